"""Writes the networks of `families.json` for timm and transformers, each into a folder that `run_written.py` reads.

python -m tests.weights.reference.write_families FOLDER
"""

import pathlib
import sys
import tempfile

from tests.weights.test_families import WRITTEN, write
from vit_jax.weights.load import load_weights
from vit_jax.weights.saving import save_weights

if __name__ == "__main__":
    for library, cases in WRITTEN.items():
        for case in cases:
            with tempfile.TemporaryDirectory() as folder:
                weights = load_weights(write(case, pathlib.Path(folder)))
                save_weights(weights, pathlib.Path(sys.argv[1]) / library / case.replace("/", "_"), library)
