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
    x = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    with torch.inference_mode():
        output = model.eval()(x)

    if isinstance(output, torch.Tensor):
        return output.numpy()
    if "logits" in output:
        return output.logits.numpy()
    return output.pooler_output.numpy()


def list_shapes(arrays: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: list(array.shape) for name, array in arrays.items()}


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

    state = model.state_dict()
    state_of_npz = from_npz.state_dict()
    assert state.keys() == state_of_npz.keys()
    for name, array in state.items():
        assert torch.equal(array, state_of_npz[name]), f"{case}: {name} of the .npz differs"

    if (folder / case / "config.json").exists():
        made = timm.create_model(f"local-dir:{folder / case}", pretrained=True)
        assert np.array_equal(logits_of(made, images), logits), (
            f"{case}: another network by its config.json"
        )
        assert made.pretrained_cfg["label_names"][0] == "class 0"

    return list_shapes(state), logits


def run_huggingface(
    folder: pathlib.Path,
    case: str,
    a: dict,
    images: np.ndarray,
) -> tuple[dict, np.ndarray]:
    """Loads by config.json alone, with no key missing or unexpected, and writes the library's own file names down."""
    kind = transformers.ViTModel
    if a["num_classes"]:
        kind = transformers.ViTForImageClassification
    model, info = kind.from_pretrained(folder / case, output_loading_info=True)
    wrong = {kind: keys for kind, keys in info.items() if keys}

    assert not wrong, f"{case}: {wrong}"
    assert not a["num_classes"] or model.config.id2label[0] == "class 0"

    saved_folder = folder / f"{case}_saved"
    model.save_pretrained(saved_folder)
    saved = load_file(saved_folder / "model.safetensors")

    return list_shapes(saved), logits_of(model, images)


def main(folder: pathlib.Path, golden: pathlib.Path) -> None:
    torch.manual_seed(0)
    cases = {}

    architectures = json.loads((folder / "cases.json").read_text())
    for case, a in architectures.items():
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
    content = {"versions": versions, "cases": cases}
    golden.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
