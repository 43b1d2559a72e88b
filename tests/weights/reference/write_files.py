"""Writes the files that `run_libraries.py` loads: every network of `networks.py` in the formats that can hold it.

python -m tests.weights.reference.write_files FOLDER
"""

import dataclasses
import json
import pathlib
import sys

import numpy as np

from tests.weights.reference import networks
from vit_jax.weights import Weights
from vit_jax.weights.saving import save_weights


def main(folder: pathlib.Path) -> None:
    cases = {}
    for case, a in networks.CASES.items():
        weights = Weights(a, networks.parameters(a), tuple(f"class {number}" for number in range(a.num_classes)))
        library = case.partition("_")[0]
        save_weights(weights, folder / case, library)
        if library == "timm":
            save_weights(weights, folder / f"{case}.npz", "bit" if a.family == "resnet" else "released")
        np.save(folder / f"{case}.images.npy", networks.images(a))
        cases[case] = dataclasses.asdict(a)
    (folder / "cases.json").write_text(json.dumps(cases))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
