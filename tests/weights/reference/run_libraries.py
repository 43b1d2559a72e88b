"""Loads in timm and Hugging Face what `write_files.py` wrote, and writes down what they say: arrays and logits.

Needs torch, timm and transformers, and nothing of vit_jax, so that neither can learn from the
other.

python tests/weights/reference/run_libraries.py FOLDER tests/golden/reference_logits.json
"""

import functools
import json
import pathlib
import sys

import numpy as np
import timm
import torch
import transformers
from safetensors.torch import load_file
from timm.layers import HybridEmbed, StdConv2d
from timm.models.resnetv2 import ResNetV2
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_hybrid import _resnetv2

POOLS = {
    "token": "token",
    "gap": "avg",
    "map": "map",
}
GELU = {"exact": "gelu", "tanh": "gelu_tanh"}


def build_timm(a: dict) -> torch.nn.Module:
    if a["family"] == "resnet":
        conv = functools.partial(StdConv2d, eps=1e-8)
        return ResNetV2(
            layers=a["units"],
            num_classes=a["num_classes"],
            stem_type="fixed",
            conv_layer=conv,
        )

    embed = {}
    if a["family"] == "hybrid":
        embed = {
            "embed_layer": functools.partial(
                HybridEmbed,
                backbone=_resnetv2(layers=tuple(a["units"])),
            )
        }

    return VisionTransformer(
        img_size=tuple(a["image_size"]),
        patch_size=tuple(a["patch_size"]),
        num_classes=a["num_classes"],
        embed_dim=a["width"],
        depth=a["depth"],
        num_heads=a["num_heads"],
        mlp_ratio=a["mlp_dim"] / a["width"],
        class_token=a["pool"] == "token",
        global_pool=POOLS[a["pool"]],
        fc_norm=False,
        act_layer=GELU[a["gelu"]],
        **embed,
    )


def logits_of(model: torch.nn.Module, images: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        output = model.eval()(torch.from_numpy(images).permute(0, 3, 1, 2).contiguous())

    if isinstance(output, torch.Tensor):
        return output.numpy()

    return (output.logits if "logits" in output else output.pooler_output).numpy()


def run_timm(
    folder: pathlib.Path,
    case: str,
    a: dict,
    images: np.ndarray,
) -> tuple[dict, np.ndarray]:
    """Loads strictly; the library's own reader of .npz must find the same network, and timm's factory too."""
    model = build_timm(a)
    model.load_state_dict(
        load_file(folder / case / "model.safetensors"),
        strict=True,
    )
    logits = logits_of(model, images)
    from_npz = build_timm(a)
    from_npz.load_pretrained(str(folder / f"{case}.npz"))

    for (name, one), other in zip(
        model.state_dict().items(),
        from_npz.state_dict().values(),
        strict=True,
    ):
        assert torch.equal(one, other), f"{case}: {name} of the .npz differs"

    if (folder / case / "config.json").exists():
        made = timm.create_model(f"local-dir:{folder / case}", pretrained=True)
        assert np.array_equal(logits_of(made, images), logits), (
            f"{case}: another network by its config.json"
        )
        assert made.pretrained_cfg["label_names"][0] == "class 0"

    return {name: list(array.shape) for name, array in model.state_dict().items()}, logits


def run_huggingface(
    folder: pathlib.Path,
    case: str,
    a: dict,
    images: np.ndarray,
) -> tuple[dict, np.ndarray]:
    """Loads by config.json alone, with no key missing or unexpected, and writes the library's own file names down."""
    kind = transformers.ViTForImageClassification if a["num_classes"] else transformers.ViTModel
    model, info = kind.from_pretrained(folder / case, output_loading_info=True)
    wrong = {kind: keys for kind, keys in info.items() if keys}

    assert not wrong, f"{case}: {wrong}"
    assert not a["num_classes"] or model.config.id2label[0] == "class 0"

    model.save_pretrained(folder / f"{case}_saved")
    saved = load_file(folder / f"{case}_saved" / "model.safetensors")

    return {name: list(array.shape) for name, array in saved.items()}, logits_of(model, images)


def main(folder: pathlib.Path, golden: pathlib.Path) -> None:
    torch.manual_seed(0)
    cases = {}

    for case, a in json.loads((folder / "cases.json").read_text()).items():
        run = run_timm if case.startswith("timm") else run_huggingface
        arrays, logits = run(
            folder,
            case,
            a,
            np.load(folder / f"{case}.images.npy"),
        )
        cases[case] = {
            "logits": logits.astype(np.float64).tolist(),
            "arrays": dict(sorted(arrays.items())),
        }
        print(
            case,
            len(arrays),
            "arrays, logits up to",
            float(np.abs(logits).max()),
        )

    versions = {library.__name__: library.__version__ for library in (timm, transformers, torch)}
    golden.write_text(json.dumps({"versions": versions, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
