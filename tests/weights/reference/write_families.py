"""Writes the networks of `families.json` as timm's, each into a folder that `run_written.py` reads.

python -m tests.weights.reference.write_families /tmp/folders
"""

import pathlib
import sys
import tempfile

from tests.weights.test_families import GOLDEN, write
from vit_jax.weights.load import load_weights
from vit_jax.weights.saving import save_weights

if __name__ == "__main__":
    for case in GOLDEN:
        library, name = case.split("/")
        if library == "timm":
            with tempfile.TemporaryDirectory() as folder:
                save_weights(load_weights(write(case, pathlib.Path(folder))), pathlib.Path(sys.argv[1]) / name, library)
