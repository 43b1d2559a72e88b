"""Files of this machine and objects of Cloud Storage: atomic writes, bounded reads."""
