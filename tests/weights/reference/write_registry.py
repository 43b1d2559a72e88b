"""Writes a small random instance of every ViT-like model of timm, with its logits, for `compare_registry.py`.

Needs torch, timm and safetensors, and nothing of vit_jax:

python tests/weights/reference/write_registry.py FOLDER [NAME ...]

Each model has two blocks of width 32 and a small image where its function takes these arguments;
everything else is as in its entry. `FOLDER/NAME/` holds timm's `config.json` and
`model.safetensors`, `expected.npz`, and `full.json` with the shapes of all arrays at full size and
the configuration of a published file, which has no `model_args`.
"""

import json
import pathlib
import sys
import warnings
from typing import Any

import numpy as np
import torch
from families import pixels, values
from torchvision_stand_in import install_stand_in

install_stand_in()

import timm  # noqa: E402
from timm.models._hub import save_config_for_hf  # noqa: E402
from timm.models._registry import _deprecated_models, _model_entrypoints, _module_to_models  # noqa: E402

MODULES = (
    *(
        "vision_transformer",
        "deit",
        "eva",
        "beit",
        "cait",
        "vision_transformer_hybrid",
        "naflexvit",
    ),
    *(
        "vision_transformer_sam",
        "vision_transformer_relpos",
        "resnetv2",
        "gemma4_vit",
        "qwen3_vit",
        "deepseek_vit",
    ),
)
PATCHES = 3  # a side of the grid of a small image


def vit_names() -> list[str]:
    """Return the names of all models of `MODULES` that are not deprecated."""
    names = [name for module in MODULES for name in sorted(_module_to_models[module])]
    return [name for name in names if name not in _deprecated_models]


def full_model(name: str) -> torch.nn.Module:
    """Return a model at its full size, without memory for its arrays."""
    with torch.device("meta"):
        return timm.create_model(name)


def arguments_for(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return arguments for a small instance of a model, the smallest one first."""
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", (16, 16))
    image = PATCHES * patch[0]

    if hasattr(getattr(model, "patch_embed", None), "backbone"):
        image = 64

    sizes = {"embed_dim": 32, "depth": 2, "num_heads": 2}
    classes = {"num_classes": 5} if model.num_classes else {}
    rope = getattr(model, "rope", None)
    reference = {}

    if getattr(rope, "ref_feat_shape", None) is not None:
        reference = {"ref_feat_shape": list(rope.ref_feat_shape)}

    layers = {"layers": [1, 1], "channels": [32, 64], "stem_chs": 16}
    return [
        {
            **sizes,
            "img_size": image,
            **classes,
            **reference,
        },
        {
            **sizes,
            "img_size": image,
            **classes,
        },
        {**sizes, **classes},
        {**layers, **classes},
        classes,
    ]


def small_resnet(name: str) -> torch.nn.Module:
    """Return Big Transfer's ResNet with one unit in each stage; its functions take no other arguments."""
    factor = int(name.removesuffix("_bit").rpartition("x")[2])
    layers = {
        "layers": [1, 1, 1, 1],
        "width_factor": factor,
        "num_classes": 5,
    }

    return timm.models.resnetv2._create_resnetv2_bit(name, **layers).eval()


def small_model(name: str, full: torch.nn.Module) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return a small instance with random values, and its arguments.

    Raises:
      RuntimeError: timm builds it with none of the arguments.
    """
    if name.startswith("resnetv2_") and name.endswith("_bit"):
        return small_resnet(name), {"num_classes": 5}

    errors = []
    for arguments in arguments_for(full):
        try:
            model = timm.create_model(name, **arguments).eval()
        except Exception as error:  # a model function may raise anything
            errors.append(f"{type(error).__name__}: {error}")
            continue

        if sum(array.numel() for array in model.parameters()) < 40e6:
            return model, arguments

        errors.append("more than 40 million parameters")

    raise RuntimeError("; ".join(errors))


def fill(model: torch.nn.Module) -> None:
    """Give every array values by its name; variances are positive."""
    state = model.state_dict()
    for name, array in state.items():
        if array.is_floating_point():
            drawn = values(name, tuple(array.shape))
            if name.endswith("running_var"):
                drawn = np.abs(drawn) + 1

            if name.startswith("patch_embed.backbone.") and name.endswith("norm3.weight"):
                # Else 16 units amplify timm's rounding to 4e-5 of its outputs in float64
                drawn = 0.2 * drawn

            state[name] = torch.from_numpy(drawn)

    model.load_state_dict(state)


def find_outputs(model: torch.nn.Module, image_size: tuple[int, int]) -> dict[str, np.ndarray]:
    """Return the features and, if there are classes, logits of the images, normalised as the model states."""
    pretrained = model.pretrained_cfg
    images = ((pixels(*image_size) - pretrained["mean"]) / pretrained["std"]).astype(np.float32)
    batch = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    outputs = {"size": np.array(image_size)}

    if type(model).__name__.endswith(
        "Encoder"
    ):  # towers of language models, which have no image features
        return outputs

    with torch.inference_mode():
        if not hasattr(model, "head_dist"):
            features = model.forward_head(model.forward_features(batch), pre_logits=True)
            outputs["features"] = features.flatten(1).numpy()

        if model.num_classes:
            outputs["logits"] = model(batch).numpy()

    return outputs


def write_model(name: str, folder: pathlib.Path) -> None:
    """Write the files of one model."""
    folder.mkdir(parents=True, exist_ok=True)
    full = full_model(name)
    save_config_for_hf(full, folder / "config.json")
    published = json.loads((folder / "config.json").read_text())
    published.pop("model_args", None)
    shapes = {}
    for key, array in full.state_dict().items():
        shapes[key] = list(array.shape)

    first_attention = next(
        (module for module in full.modules() if hasattr(module, "num_heads")),
        None,
    )
    sizes = {
        "width": getattr(full, "embed_dim", None),
        "depth": len(full.blocks) if hasattr(full, "blocks") else None,
        "num_heads": getattr(first_attention, "num_heads", None),
    }
    published_text = {
        "config": published,
        "shapes": shapes,
        "sizes": sizes,
        "class": type(full).__name__,
    }
    (folder / "full.json").write_text(json.dumps(published_text))
    model, arguments = small_model(name, full)
    fill(model)
    timm.models.save_for_hf(
        model,
        folder,
        model_args=arguments,
        safe_serialization=True,
    )
    side = arguments.get("img_size") or published["pretrained_cfg"]["input_size"][-1]
    np.savez(folder / "expected.npz", **find_outputs(model, (side, side)))


def write_registry(folder: pathlib.Path, names: list[str]) -> None:
    """Write all models, and an error text for those that timm does not build in this size."""
    for name in names:
        error_file = folder / name / "error.txt"
        error_file.unlink(missing_ok=True)

        try:
            write_model(name, folder / name)
        except Exception as error:  # the walk goes on, and the report shows it
            error_file.parent.mkdir(parents=True, exist_ok=True)
            error_file.write_text(f"{type(error).__name__}: {error}"[:2000])
            print(f"{name}: {error_file.read_text()[:200]}", flush=True)

    deprecated = {}
    for old, new in _deprecated_models.items():
        deprecated[old] = (new or "").partition(".")[0]

    known = {
        "names": vit_names(),
        "deprecated": deprecated,
        "version": timm.__version__,
    }
    known["all"] = sorted(_model_entrypoints)
    (folder / "registry.json").write_text(json.dumps(known))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    write_registry(
        pathlib.Path(sys.argv[1]),
        sys.argv[2:] or vit_names(),
    )
