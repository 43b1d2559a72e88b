"""A network as StableHLO: one file that runs on CPU, CUDA and TPU without this package.

It takes uint8 images of the network's size and gives probabilities; the scaling of pixels is inside. Decoding and
resizing are not: how images come to that size stands in the file beside it.
"""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import export as jax_export

from vit_jax.inference.classifier import Classifier, probabilities
from vit_jax.weights.formats.whole import write_whole

PLATFORMS = ("cpu", "cuda", "tpu")
LARGEST_PROGRAM_BYTES = 2_000_000_000  # of the form that jax.export writes, with something to spare
_BILINEAR = "bilinear between pixel centres, without antialiasing"
_PREPARATION = {
    "direct": {"meaning": "both sides are resized to those of the input", "filter": _BILINEAR},
    "short_side": {
        "meaning": "resized to the smallest image of the same shape that covers the input's size / crop_fraction, of "
        "which the middle is kept; sides are rounded",
        "filter": f"area, the mean over what a new pixel covers, where both sides shrink; else {_BILINEAR}",
    },
}
"""What `EvaluationTransform` does, for those who have to do it without this package."""


def export_stablehlo(
    classifier: Classifier, path: str | pathlib.Path, *, overwrite: bool = False
) -> list[pathlib.Path]:
    """Writes the serialised program, and beside it PATH.json: classes, input, how to prepare an image.

    Read it with `jax.export.deserialize(open(path, "rb").read()).call(image)`: uint8 (B, H, W, 3), any B, to float32
    (B, K).

    Args:
      classifier: on one device; its parameters become constants of the program.
      path: of the file to write.
      overwrite: replace what is there.

    Returns:
      The two files.

    Raises:
      ValueError: one of them exists, or the system refuses to write.
    """
    path = pathlib.Path(path).expanduser()
    require_free(path, overwrite=overwrite)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(classifier.model))
    if size >= LARGEST_PROGRAM_BYTES:
        raise ValueError(
            f"{classifier.architecture.name} has {size / 1e9:.1f} GB of parameters, and a program with its parameters "
            "inside may have 2 GB: use --to=safetensors or --to=npz."
        )
    exported = jax_export.export(_program(classifier), platforms=PLATFORMS)(_abstract_images(classifier))
    with write_whole(path) as file:
        file.write(exported.serialize())
    with write_whole(_beside(path)) as file:
        file.write((json.dumps(_description(classifier), indent=2) + "\n").encode())
    return [path, _beside(path)]


def require_free(path: str | pathlib.Path, *, overwrite: bool) -> None:
    """Raises ValueError if there is a file in the place of one of the two."""
    path = pathlib.Path(path).expanduser()
    for taken in (path, _beside(path)):
        if taken.exists() and not overwrite:
            raise ValueError(f"{taken} exists: give another --output=, or say --overwrite.")


def _beside(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name + ".json")


def _program(classifier: Classifier) -> Any:
    model, dtype = classifier.model, classifier.architecture.compute_dtype
    return jax.jit(lambda image_BHWC: probabilities(model, image_BHWC, dtype))


def _abstract_images(classifier: Classifier) -> jax.ShapeDtypeStruct:
    (batch,) = jax_export.symbolic_shape("batch")
    return jax.ShapeDtypeStruct((batch, *classifier.architecture.image_size, 3), jnp.uint8)


def _description(classifier: Classifier) -> dict[str, Any]:
    a, transform = classifier.architecture, classifier.transform
    return {
        "network": a.name,
        "input": {"dtype": "uint8", "shape": ["batch", *a.image_size, 3], "colours": "RGB"},
        "output": {
            "dtype": "float32",
            "shape": ["batch", a.num_classes],
            "meaning": "probabilities: softmax of the logits",
        },
        "class_names": list(classifier.class_names),
        "preprocessing": {
            "resize": transform.resize,
            "crop_fraction": transform.crop_fraction,
            **_PREPARATION[transform.resize],
            "exif_orientation": "ignored",
            "alpha": "dropped",
        },
        "platforms": list(PLATFORMS),
        "weights": classifier.source,
    }
