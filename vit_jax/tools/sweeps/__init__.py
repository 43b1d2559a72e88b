"""Several runs of one command: sweeps over fields of a recipe, the paper's studies, and VTAB-1k."""
