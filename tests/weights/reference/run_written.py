"""Builds networks from the folders of `write_families.py` with timm, and compares them with `families.json`.

Needs torch, timm and transformers, and nothing of vit_jax. It fails if a difference is above 1e-5 of the largest value:

python tests/weights/reference/run_written.py FOLDER tests/golden/families.json
"""

import json
import pathlib
import sys

import numpy as np
import timm
from run_families import run


def compare(folder: pathlib.Path, golden: dict) -> dict[str, float]:
    """Return the largest difference of each output, relative to its largest value."""
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    pixels = model.pretrained_cfg
    found = run(model, folder.name, golden["size"], pixels["mean"], pixels["std"])
    names = {"features", "logits"} & golden.keys()
    assert names == found.keys()
    return {name: np.abs(np.subtract(found[name], golden[name])).max() / np.abs(golden[name]).max() for name in names}


if __name__ == "__main__":
    cases = json.loads(pathlib.Path(sys.argv[2]).read_text())["cases"]
    worst = 0.0
    for folder in sorted(pathlib.Path(sys.argv[1]).iterdir()):
        differences = compare(folder, cases[f"timm/{folder.name}"])
        worst = max(worst, *differences.values())
        print(folder.name, *(f"{name} {value:.1e}" for name, value in sorted(differences.items())))
    sys.exit(f"the largest is {worst:.1e}" if worst > 1e-5 else 0)
