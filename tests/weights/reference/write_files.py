"""Writes the networks that `run_libraries.py` and `run_written.py` load, in the formats that can hold them.

python -m tests.weights.reference.write_files small|families FOLDER
"""

import dataclasses
import json
import pathlib
import sys
import tempfile

import numpy as np

from tests.weights.reference import networks
from tests.weights.test_families import WRITTEN, write
from vit_jax.weights import Weights, load_weights
from vit_jax.weights.saving import save_weights


def write_small(folder: pathlib.Path) -> None:
    """Write every network of `networks.py`."""
    cases = {}
    for case, a in networks.CASES.items():
        weights = Weights(
            a,
            networks.parameters(a),
            tuple(f"class {number}" for number in range(a.num_classes)),
        )
        library = case.partition("_")[0]
        save_weights(weights, folder / case, library)

        if library == "timm":
            save_weights(
                weights,
                folder / f"{case}.npz",
                "bit" if a.family == "resnet" else "released",
            )

        np.save(folder / f"{case}.images.npy", networks.images(a))
        cases[case] = dataclasses.asdict(a)

    (folder / "cases.json").write_text(json.dumps(cases))


def write_families(folder: pathlib.Path) -> None:
    """Write the networks of `families.json` for timm and transformers, each into a folder."""
    for library, cases in WRITTEN.items():
        for case in cases:
            with tempfile.TemporaryDirectory() as source:
                weights = load_weights(write(case, pathlib.Path(source)))
                save_weights(
                    weights,
                    folder / library / case.replace("/", "_"),
                    library,
                )


if __name__ == "__main__":
    {"small": write_small, "families": write_families}[sys.argv[1]](pathlib.Path(sys.argv[2]))
