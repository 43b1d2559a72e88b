"""A network as a program that runs without this package: StableHLO for CPU, CUDA and TPU, or ONNX.

The program takes uint8 images of the network's size and returns probabilities; it includes the
scaling of pixels. A description of decoding and resizing is beside a StableHLO program and inside
an ONNX file.
"""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from vit_jax.api.model import Model, to_probabilities
from vit_jax.data.transforms import EvaluationTransform
from vit_jax.imports.extras import install_command
from vit_jax.kernels.devices import F, trace_for
from vit_jax.storage.files import expanded, write_atomically

PLATFORMS = ("cpu", "cuda", "tpu")
LARGEST_PROGRAM_BYTES = 2_000_000_000  # below the limit of jax.export
# Largest difference of log-probabilities, relative to their range: rounding gives 1e-5, mistakes 0.1
LARGEST_DIFFERENCE = 1e-3
_PREPARATION = {
    "direct": {
        "meaning": "both sides are resized to those of the input",
        "filter": "bilinear between pixel centres, without antialiasing",
    },
    "short_side": {
        "meaning": "resized to the smallest image of the same shape that covers the input's size / crop_fraction, "
        "rounded; its sides are rounded too, and the middle is kept, from half the difference rounded down",
        "filter": "area, the mean over what a new pixel covers, also where it is smaller than an old one",
    },
}
"""Descriptions of `EvaluationTransform` for users without this package."""


def export_stablehlo(
    model: Model, path: str | pathlib.Path, *, overwrite: bool = False
) -> list[pathlib.Path]:
    """Write the serialised program, and beside it PATH.json: classes, input, preparation of images.

    Read it with `jax.export.deserialize(open(path, "rb").read()).call(image)`: uint8 (B, H, W, 3),
    any B, to float32 (B, K).

    Args:
      model: on one device; its parameters become constants of the program.
      path: of the file to write.
      overwrite: replace existing files.

    Returns:
      The two files.

    Raises:
      ValueError: a file exists or cannot be written; the model has no classes, no preparation of
        images, or too many parameters.
    """
    path, description_path = _checked(model, path, "stablehlo", overwrite=overwrite)
    description = json.dumps(_description(model) | {"platforms": PLATFORMS}, indent=2)
    shape = (*jax_export.symbolic_shape("batch"), *model.architecture.image_size, 3)
    exported = jax_export.export(jax.jit(_program(model)), platforms=PLATFORMS)(
        jax.ShapeDtypeStruct(shape, jnp.uint8)
    )
    write_atomically(path, exported.serialize())
    write_atomically(description_path, f"{description}\n")
    return [path, description_path]


def export_onnx(
    model: Model, path: str | pathlib.Path, *, overwrite: bool = False
) -> list[pathlib.Path]:
    """Write an ONNX file: "images", uint8 (B, H, W, 3), any B, to "probabilities", float32 (B, K), in float32.

    The file is first checked on random images: its results must be those of the model. Its metadata
    are the description that is beside a StableHLO program, each value as JSON.

    Args:
      model: computes in float32.
      path: of the file to write.
      overwrite: replace existing files.

    Returns:
      The file, alone in its list.

    Raises:
      ValueError: as `export_stablehlo`; onnx or onnxruntime is not installed; the model computes in
        bfloat16 or has an unsupported operation; the file gives other results.
    """
    (path,) = _checked(model, path, "onnx", overwrite=overwrite)
    if model.architecture.compute_dtype != "float32":
        raise ValueError(
            "An ONNX file computes in float32: load the weights with compute_dtype float32."
        )
    require_onnx()
    import onnx

    from vit_jax.tools.export.onnx_graph import to_onnx

    program = to_onnx(trace_for(_AnyRuntime())(_program(model)), model.architecture.image_size)
    description = {field: json.dumps(value) for field, value in _description(model).items()}
    onnx.helper.set_model_props(program, description)
    written = program.SerializeToString()
    _require_same(model, written)
    write_atomically(path, written)
    return [path]


def require_onnx() -> None:
    """Raise ValueError if the libraries of an ONNX export are not installed."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"An ONNX file is written by onnx and checked by onnxruntime, which cannot be imported ({error}): "
            f"{install_command('onnx')}"
        ) from None


class _AnyRuntime:
    """Unknown devices of a traced program: it has no form that is fast on particular ones."""

    platform = "any"
    device_kind = ""
    compute_capability = None

    def __call__(self, name: str, activation: jax.Array) -> jax.Array:
        return activation

    def map_shards(self, function: F, *_: Any) -> F:
        return function


def _require_same(model: Model, written: bytes) -> None:
    """Raise ValueError unless file and model agree on one random image and on three."""
    import onnxruntime

    session = onnxruntime.InferenceSession(written, providers=["CPUExecutionProvider"])
    for count in (1, 3):
        images = np.random.default_rng(count).integers(
            0, 256, (count, *model.architecture.image_size, 3), np.uint8
        )
        with jax.default_matmul_precision("float32"):
            probabilities = np.asarray(_program(model)(images))
        ours, theirs = (
            np.log(np.maximum(x, 1e-30))
            for x in (probabilities, *session.run(None, {"images": images}))
        )
        difference = np.abs(ours - theirs).max()
        allowed = LARGEST_DIFFERENCE * np.ptp(ours) + 1e-6
        if not difference <= allowed:
            raise ValueError(
                f"{model.architecture.name} is not written as ONNX: on random images the log-probabilities of the file "
                f"would differ by {difference:.2g}, more than {allowed:.2g}. Use --to=stablehlo."
            )


def _program(model: Model) -> Callable[[Any], jax.Array]:
    return lambda image_BHWC: to_probabilities(model(image_BHWC).logits_BK, model.is_multilabel)


def _checked(
    model: Model, path: str | pathlib.Path, kind: str, *, overwrite: bool
) -> list[pathlib.Path]:
    """Return the files of `require_free`; raise ValueError if the model cannot be a program."""
    model.require_classes()
    paths = require_free(path, kind, overwrite=overwrite)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.module))
    if size >= LARGEST_PROGRAM_BYTES:
        raise ValueError(
            f"{model.architecture.name} has {size / 1e9:.1f} GB of parameters, and a program with its parameters "
            "inside may have 2 GB: use --to=safetensors or --to=npz."
        )
    return paths


def require_free(path: str | pathlib.Path, kind: str, *, overwrite: bool) -> list[pathlib.Path]:
    """Return the files of a program of this kind, "stablehlo" or "onnx"; raise ValueError if one exists."""
    path = expanded(path)
    paths = [path] if kind == "onnx" else [path, path.with_name(path.name + ".json")]
    for taken in paths:
        if taken.exists() and not overwrite:
            raise ValueError(f"{taken} exists: give another --output=, or add --overwrite.")
    return paths


def _filter_words(transform: EvaluationTransform) -> dict[str, str]:
    words = _PREPARATION[transform.resize]
    interpolation = transform.interpolation
    if interpolation is None:
        return words
    is_square = transform.image_size[0] == transform.image_size[1]
    is_even = transform.library == "timm"
    cropped = (
        "resized to the smallest image of the same shape that covers the input's size / crop_fraction, rounded down; "
        f"the longer side is rounded {'down' if is_square else 'to the nearest'}, and the middle is kept, from half "
        f"the difference rounded {'to the nearest even number' if is_even else 'down'}"
    )
    return {
        "interpolation": interpolation,
        "meaning": words["meaning"] if transform.resize == "direct" else cropped,
        "filter": f"{interpolation} with antialiasing, as Pillow's Image.resize of 8-bit images",
    }


def _description(model: Model) -> dict[str, Any]:
    a = model.architecture
    transform = model.require_transform()
    return {
        "network": a.name,
        "input": {"dtype": "uint8", "shape": ["batch", *a.image_size, 3], "colours": "RGB"},
        "output": {
            "dtype": "float32",
            "shape": ["batch", a.num_classes],
            "meaning": f"probabilities: {'sigmoid of each logit' if model.is_multilabel else 'softmax of the logits'}",
        },
        "class_names": list(model.class_names),
        "preprocessing": {
            "resize": transform.resize,
            "crop_fraction": transform.crop_fraction,
            **_filter_words(transform),
            "exif_orientation": "applied" if transform.exif_orientation else "ignored",
            **(
                {}
                if transform.value_range is None
                else {"value_range": list(transform.value_range)}
            ),
            "alpha": "dropped",
        },
        "weights": model.source,
    }
