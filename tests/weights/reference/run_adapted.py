"""Records what timm computes with two of the families when they are adapted, in tests/golden/adapted.json.

"rescaled": Perception Encoder at another image size, its rotary positions scaled to the grid of the
weights. "gap": MAE with the mean of patches and the norm of the weights behind it. Needs what
run_families.py needs:

python tests/weights/reference/run_adapted.py tests/golden/adapted.json
"""

import json
import pathlib
import re
import sys

import timm
from run_families import SIZES, describe_timm, fill, run


def record(path: pathlib.Path) -> None:
    rescaled = {}
    gap = {}

    for case in ("pe_core", "pe_lang", "pe_spatial", "mae"):
        name, size, arguments = describe_timm(case)
        arguments = {
            **SIZES,
            "img_size": size,
            **arguments,
        }
        model = timm.create_model(name, **arguments).eval()
        fill(model)
        normalisation = [list(model.pretrained_cfg[key]) for key in ("mean", "std")]

        if case == "mae":
            pooled = timm.create_model(name, **arguments, global_pool="avg").eval()
            state = {}
            for key, array in model.state_dict().items():
                state[re.sub(r"^norm\.", "fc_norm.", key)] = array

            pooled.load_state_dict(state)
            gap[f"timm/{case}"] = run(pooled, case, (size,), *normalisation)
        else:
            new = (size // 3 * 4, size // 3 * 2)
            model.set_input_size(new)
            rescaled[f"timm/{case}"] = {"size": new, **run(model, case, new, *normalisation)}

    outputs = {
        "versions": {"timm": timm.__version__},
        "rescaled": rescaled,
        "gap": gap,
    }
    path.write_text(json.dumps(outputs, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    record(pathlib.Path(sys.argv[1]))
