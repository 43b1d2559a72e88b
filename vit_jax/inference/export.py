"""A network as StableHLO: one file that runs on CPU, CUDA and TPU without this package.

It takes uint8 images of the network's size and returns probabilities; the scaling of pixels is inside. Decoding and
resizing are not: the file beside it describes them.
"""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import export as jax_export

from vit_jax.api import Model
from vit_jax.files import write_atomically

PLATFORMS = ("cpu", "cuda", "tpu")
LARGEST_PROGRAM_BYTES = 2_000_000_000  # below the limit of the format that jax.export writes
_PREPARATION = {
    "direct": {
        "meaning": "both sides are resized to those of the input",
        "filter": "bilinear between pixel centres, without antialiasing",
    },
    "short_side": {
        "meaning": "resized to the smallest image of the same shape that covers the input's size / crop_fraction, of "
        "which the middle is kept; sides are rounded",
        "filter": "area, the mean over what a new pixel covers, also where it is smaller than an old one",
    },
}
"""`EvaluationTransform` in words, for users without this package."""


def export_stablehlo(model: Model, path: str | pathlib.Path, *, overwrite: bool = False) -> list[pathlib.Path]:
    """Writes the serialised program, and beside it PATH.json: classes, input, how to prepare an image.

    Read it with `jax.export.deserialize(open(path, "rb").read()).call(image)`: uint8 (B, H, W, 3), any B, to float32
    (B, K).

    Args:
      model: on one device; its parameters become constants of the program.
      path: of the file to write.
      overwrite: replace what is there.

    Returns:
      The two files.

    Raises:
      ValueError: one of them exists, or the system refuses to write; the model has no classes, or states no
        preparation of images, or has too many parameters.
    """
    model.require_classes()
    path = pathlib.Path(path).expanduser()
    require_free(path, overwrite=overwrite)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.module))
    if size >= LARGEST_PROGRAM_BYTES:
        raise ValueError(
            f"{model.architecture.name} has {size / 1e9:.1f} GB of parameters, and a program with its parameters "
            "inside may have 2 GB: use --to=safetensors or --to=npz."
        )
    description = json.dumps(_description(model), indent=2)
    program = jax.jit(lambda image_BHWC: jax.nn.softmax(model(image_BHWC).logits_BK))
    shape = (*jax_export.symbolic_shape("batch"), *model.architecture.image_size, 3)
    exported = jax_export.export(program, platforms=PLATFORMS)(jax.ShapeDtypeStruct(shape, jnp.uint8))
    write_atomically(path, exported.serialize())
    write_atomically(_beside(path), f"{description}\n")
    return [path, _beside(path)]


def require_free(path: str | pathlib.Path, *, overwrite: bool) -> None:
    """Raises ValueError if one of the two files exists."""
    path = pathlib.Path(path).expanduser()
    for taken in (path, _beside(path)):
        if taken.exists() and not overwrite:
            raise ValueError(f"{taken} exists: give another --output=, or say --overwrite.")


def _beside(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name + ".json")


def _description(model: Model) -> dict[str, Any]:
    a, transform = model.architecture, model.require_transform()
    return {
        "network": a.name,
        "input": {"dtype": "uint8", "shape": ["batch", *a.image_size, 3], "colours": "RGB"},
        "output": {
            "dtype": "float32",
            "shape": ["batch", a.num_classes],
            "meaning": "probabilities: softmax of the logits",
        },
        "class_names": list(model.class_names),
        "preprocessing": {
            "resize": transform.resize,
            "crop_fraction": transform.crop_fraction,
            **_PREPARATION[transform.resize],
            "exif_orientation": "applied" if transform.exif_orientation else "ignored",
            "alpha": "dropped",
        },
        "platforms": list(PLATFORMS),
        "weights": model.source,
    }
