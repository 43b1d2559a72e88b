"""Several runs of one command: the paper's studies, and VTAB-1k."""
