"""Files of this machine and objects of Cloud Storage: atomic writes, bounded reads."""

import os

SCHEME = "gs://"


def is_address(path: str | os.PathLike[str]) -> bool:
    """Return True for the address of a bucket or object: gs://..."""
    return os.fspath(path).startswith(SCHEME)
