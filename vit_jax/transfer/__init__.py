"""How well weights transfer: frozen features and what is fitted on them, and the 19 tasks of VTAB."""
