"""Build networks from the folders of `write_files.py` with their library, and compare outputs.

Needs torch, timm and transformers, and nothing of vit_jax. It fails if a difference to
`families.json` is above 1e-5 of the largest value:

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


def load_model(
    folder: pathlib.Path,
    architecture: str,
    golden: dict,
) -> torch.nn.Module:
    """Load strictly by config.json alone."""
    options = {}
    # A ViTModel has a layer behind the features unless it is told otherwise.
    if architecture in ("ViTModel", "DeiTModel"):
        options["add_pooling_layer"] = "hidden" in golden

    model, info = getattr(transformers, architecture).from_pretrained(
        folder,
        output_loading_info=True,
        **options,
    )
    assert not any(info.values()), info
    return model.eval()


def read_normalisation(folder: pathlib.Path, model_type: str) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of pixels by the processor beside the weights."""
    if (folder / "preprocessor_config.json").exists():
        processor = transformers.AutoImageProcessor.from_pretrained(folder)
        return processor.image_mean, processor.image_std
    if model_type == "radio":
        return [0.0] * 3, [1.0] * 3
    return [0.5] * 3, [0.5] * 3


def select_output(
    output: dict,
    config: dict,
    golden: dict,
) -> dict[str, torch.Tensor]:
    """Return the output that the golden file has."""
    model_type = config["model_type"]
    pools_patches = golden["config"].get("global_pool") == "avg"
    if "logits" in output:
        return {"logits": output["logits"]}
    if "image_embeds" in output:
        return {"logits": output["image_embeds"]}
    if "summary" in output:
        return {"features": output.summary}
    if "hidden" in golden:
        return {"hidden": output.pooler_output}
    if pools_patches or model_type in ("ijepa", "aimv2_vision_model"):
        first = 0
        if "num_register_tokens" in config:
            first = 1 + config["num_register_tokens"]
        return {"features": output.last_hidden_state[:, first:].mean(1)}
    if model_type == "vit":
        return {"features": output.last_hidden_state[:, 0]}
    return {"features": output.pooler_output}


def run_by_timm(folder: pathlib.Path, golden: dict) -> dict[str, list]:
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    stated = model.pretrained_cfg
    return run(
        model,
        folder.name,
        (golden["size"],),
        stated["mean"],
        stated["std"],
    )


def run_by_transformers(folder: pathlib.Path, golden: dict) -> dict[str, np.ndarray]:
    config = json.loads((folder / "config.json").read_text())
    model = load_model(folder, config["architectures"][0], golden)
    mean, std = read_normalisation(folder, config["model_type"])

    normalised = (pixels(golden["size"]) - mean) / std
    tensor = torch.from_numpy(normalised.astype(np.float32))
    images = tensor.permute(0, 3, 1, 2).contiguous()
    with torch.inference_mode():
        output = model(images)

    selected = select_output(output, config, golden)
    return {name: array.numpy() for name, array in selected.items()}


def compare(folder: pathlib.Path, golden: dict) -> float:
    """Print the differences of a case; return the largest, relative to the largest value."""
    if folder.parent.name == "timm":
        outputs = run_by_timm(folder, golden)
    else:
        outputs = run_by_transformers(folder, golden)
    names = outputs.keys() & golden.keys()
    assert names, (folder, outputs.keys())

    line = f"{folder.parent.name} {folder.name}"
    differences = []
    for name in sorted(names):
        expected = np.array(golden[name])
        error = np.abs(np.asarray(outputs[name]) - expected)
        difference = error.max() / np.abs(expected).max()
        differences.append(difference)
        line += f" {name} {difference:.1e}"

    print(line)
    return max(differences)


def main() -> None:
    folders = sorted(pathlib.Path(sys.argv[1]).glob("*/*"))
    golden_file = pathlib.Path(sys.argv[2])
    cases = json.loads(golden_file.read_text())["cases"]

    worst = 0.0
    for folder in folders:
        golden = cases[folder.name.replace("_", "/", 1)]
        worst = max(worst, compare(folder, golden))
    sys.exit(f"the largest is {worst:.1e}" if worst > 1e-5 else 0)


if __name__ == "__main__":
    main()
