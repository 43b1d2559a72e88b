"""Builds networks from the folders of `write_files.py` with their library, and compares them with `families.json`.

Needs torch, timm and transformers, and nothing of vit_jax. It fails if a difference is above 1e-5
of the largest value:

python tests/weights/reference/run_written.py FOLDER tests/golden/families.json
"""

import json
import pathlib
import sys

import numpy as np
import timm
import torch
import transformers
from families import pixels
from run_families import run


def of_timm(folder: pathlib.Path, golden: dict) -> dict[str, list]:
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    stated = model.pretrained_cfg
    return run(model, folder.name, (golden["size"],), stated["mean"], stated["std"])


def of_huggingface(folder: pathlib.Path, golden: dict) -> dict[str, np.ndarray]:
    """Load strictly by config.json alone, and the pixels by the processor beside it."""
    config = json.loads((folder / "config.json").read_text())
    architecture = getattr(transformers, config["architectures"][0])
    # ViTModel has a layer behind the features unless it is told otherwise.
    options = (
        {"add_pooling_layer": "hidden" in golden}
        if config["architectures"][0] in ("ViTModel", "DeiTModel")
        else {}
    )
    model, info = architecture.from_pretrained(folder, output_loading_info=True, **options)

    assert not any(info.values()), info

    mean, std = (
        ([0.0] * 3, [1.0] * 3) if config["model_type"] == "radio" else ([0.5] * 3, [0.5] * 3)
    )
    if (folder / "preprocessor_config.json").exists():
        processor = transformers.AutoImageProcessor.from_pretrained(folder)
        mean = processor.image_mean
        std = processor.image_std

    images = torch.from_numpy(((pixels(golden["size"]) - mean) / std).astype(np.float32)).permute(
        0,
        3,
        1,
        2,
    )
    with torch.inference_mode():
        output = model.eval()(images.contiguous())

    if "logits" in output or "image_embeds" in output:
        return {"logits": output["logits" if "logits" in output else "image_embeds"].numpy()}

    if "summary" in output:
        return {"features": output.summary.numpy()}

    if "hidden" in golden:
        return {"hidden": output.pooler_output.numpy()}

    if golden["config"].get("global_pool") == "avg" or config["model_type"] in (
        "ijepa",
        "aimv2_vision_model",
    ):
        first = 1 + config["num_register_tokens"] if "num_register_tokens" in config else 0
        return {"features": output.last_hidden_state[:, first:].mean(1).numpy()}

    is_vit = config["model_type"] == "vit"
    return {
        "features": (output.last_hidden_state[:, 0] if is_vit else output.pooler_output).numpy()
    }


if __name__ == "__main__":
    cases = json.loads(pathlib.Path(sys.argv[2]).read_text())["cases"]
    worst = 0.0

    for folder in sorted(pathlib.Path(sys.argv[1]).glob("*/*")):
        golden = cases[folder.name.replace("_", "/", 1)]
        outputs = (of_timm if folder.parent.name == "timm" else of_huggingface)(folder, golden)
        names = outputs.keys() & golden.keys()

        assert names, (folder, outputs.keys())

        line = f"{folder.parent.name} {folder.name}"
        for name in sorted(names):
            expected = np.array(golden[name])
            difference = np.abs(np.asarray(outputs[name]) - expected).max() / np.abs(expected).max()
            worst = max(worst, difference)
            line += f" {name} {difference:.1e}"

        print(line)

    sys.exit(f"the largest is {worst:.1e}" if worst > 1e-5 else 0)
