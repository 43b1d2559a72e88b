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
from vit_jax.storage.files import expand_path, write_atomically

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
        "meaning": (
            "resized to the smallest image of the same shape that covers the input's size / "
            "crop_fraction, rounded; its sides are rounded too, and the middle is kept, "
            "from half the difference rounded down"
        ),
        "filter": (
            "area, the mean over what a new pixel covers, also where it is smaller than an old one"
        ),
    },
}
"""Descriptions of `EvaluationTransform` for users without this package."""
# The meaning of "short_side" with the interpolation of Pillow.
_PILLOW_CROP = (
    "resized to the smallest image of the same shape that covers the input's size / "
    "crop_fraction, rounded down; the longer side is rounded {longer_side}, and the middle "
    "is kept, from half the difference rounded {middle}"
)


def export_stablehlo(
    model: Model,
    path: str | pathlib.Path,
    *,
    overwrite: bool = False,
) -> list[pathlib.Path]:
    """Write the serialised program, and beside it PATH.json: classes, input, preparation of images.

    Read it with `jax.export.deserialize(open(path, "rb").read()).call(image)`: uint8 (B, H, W, 3),
    any B, to float32 (B, K).

    Args:
      model: on one device; its parameters become constants of the program.
      path: the file to write.
      overwrite: replace existing files.

    Returns:
      the two files.

    Raises:
      ValueError: a file exists or cannot be written; the model has no classes, no preparation of
        images, or too many parameters.
    """
    path, description_path = _check_and_find_files(model, path, "stablehlo", overwrite=overwrite)
    description = _describe(model) | {"platforms": PLATFORMS}
    (batch,) = jax_export.symbolic_shape("batch")
    images = jax.ShapeDtypeStruct((batch, *model.architecture.image_size, 3), jnp.uint8)
    export = jax_export.export(jax.jit(_build_program(model)), platforms=PLATFORMS)
    write_atomically(path, export(images).serialize())
    write_atomically(description_path, f"{json.dumps(description, indent=2)}\n")
    return [path, description_path]


def export_onnx(
    model: Model,
    path: str | pathlib.Path,
    *,
    overwrite: bool = False,
) -> list[pathlib.Path]:
    """Write an ONNX file, which computes in float32.

    It maps "images", uint8 (B, H, W, 3), any B, to "probabilities", float32 (B, K). Before it is
    written, its results on random images must be equal to those of the model. Its metadata are the
    description of a StableHLO program, each value as JSON.

    Args:
      model: computes in float32.
      path: the file to write.
      overwrite: replace existing files.

    Returns:
      the file, alone in its list.

    Raises:
      ValueError: see `export_stablehlo`; onnx or onnxruntime is not installed; the model computes in
        bfloat16 or has an unsupported operation; the file gives other results.
    """
    (path,) = _check_and_find_files(model, path, "onnx", overwrite=overwrite)
    if model.architecture.compute_dtype != "float32":
        raise ValueError(
            "An ONNX file computes in float32: load the weights with compute_dtype float32."
        )
    require_onnx()
    import onnx

    from vit_jax.tools.export.onnx_graph import to_onnx

    program = trace_for(_AnyRuntime())(_build_program(model))
    proto = to_onnx(program, model.architecture.image_size)
    properties = {field: json.dumps(value) for field, value in _describe(model).items()}
    onnx.helper.set_model_props(proto, properties)
    content = proto.SerializeToString()
    _require_equal_results(model, content)
    write_atomically(path, content)
    return [path]


def require_onnx() -> None:
    """Raise ValueError if the libraries of an ONNX export are not installed."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "An ONNX file is written by onnx and checked by onnxruntime, "
            f"which cannot be imported ({error}): {install_command('onnx')}"
        ) from None


class _AnyRuntime:
    """Unknown devices of a traced program, which has no form for particular devices."""

    platform = "any"
    device_kind = ""
    compute_capability = None

    def __call__(self, name: str, activation: jax.Array) -> jax.Array:
        return activation

    def map_shards(self, function: F, *_: Any) -> F:
        return function


def _require_equal_results(model: Model, content: bytes) -> None:
    """Raise ValueError unless file and model agree on one random image and on three."""
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    program = _build_program(model)
    for batch_size in (1, 3):
        shape = (batch_size, *model.architecture.image_size, 3)
        images = np.random.default_rng(batch_size).integers(0, 256, shape, np.uint8)
        with jax.default_matmul_precision("float32"):
            of_model = _take_log(np.asarray(program(images)))
        (probabilities,) = session.run(None, {"images": images})
        difference = np.abs(of_model - _take_log(probabilities)).max()
        allowed = LARGEST_DIFFERENCE * np.ptp(of_model) + 1e-6
        if not difference <= allowed:  # also if it is NaN
            raise ValueError(
                f"{model.architecture.name} is not written as ONNX: "
                "on random images the log-probabilities of the file would differ "
                f"by {difference:.2g}, more than {allowed:.2g}. Use --to=stablehlo."
            )


def _take_log(probabilities: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(probabilities, 1e-30))


def _build_program(model: Model) -> Callable[[Any], jax.Array]:
    """Return the function from images to probabilities."""
    return lambda image_BHWC: to_probabilities(model(image_BHWC).logits_BK, model.is_multilabel)


def _check_and_find_files(
    model: Model,
    path: str | pathlib.Path,
    kind: str,
    *,
    overwrite: bool,
) -> list[pathlib.Path]:
    """Return the files of `require_free`; raise ValueError if the model cannot be a program."""
    model.require_classes()
    paths = require_free(path, kind, overwrite=overwrite)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(model.module))
    if num_bytes >= LARGEST_PROGRAM_BYTES:
        raise ValueError(
            f"{model.architecture.name} has {num_bytes / 1e9:.1f} GB of parameters, "
            "and a program with its parameters inside may have 2 GB: "
            "use --to=safetensors or --to=npz."
        )
    return paths


def require_free(path: str | pathlib.Path, kind: str, *, overwrite: bool) -> list[pathlib.Path]:
    """Return the files of a program of this kind, "stablehlo" or "onnx".

    Raises:
      ValueError: a file exists and `overwrite` is False.
    """
    path = expand_path(path)
    paths = [path]
    if kind == "stablehlo":
        paths.append(path.with_name(path.name + ".json"))
    for file in paths:
        if file.exists() and not overwrite:
            raise ValueError(f"{file} exists: give another --output=, or add --overwrite.")
    return paths


def _describe_resize(transform: EvaluationTransform) -> dict[str, str]:
    """Return how images are resized and cropped, for users without this package."""
    description = dict(_PREPARATION[transform.resize])
    interpolation = transform.interpolation
    if interpolation is None:
        return description
    if transform.resize == "short_side":
        height, width = transform.image_size
        description["meaning"] = _PILLOW_CROP.format(
            longer_side="down" if height == width else "to the nearest",
            middle="to the nearest even number" if transform.library == "timm" else "down",
        )
    description["filter"] = (
        f"{interpolation} with antialiasing, as Pillow's Image.resize of 8-bit images"
    )
    return {"interpolation": interpolation, **description}


def _describe(model: Model) -> dict[str, Any]:
    """Return input, output, classes and preparation of images as JSON values."""
    a = model.architecture
    activation = "sigmoid of each logit" if model.is_multilabel else "softmax of the logits"
    return {
        "network": a.name,
        "input": {"dtype": "uint8", "shape": ["batch", *a.image_size, 3], "colours": "RGB"},
        "output": {
            "dtype": "float32",
            "shape": ["batch", a.num_classes],
            "meaning": f"probabilities: {activation}",
        },
        "class_names": list(model.class_names),
        "preprocessing": _describe_preparation(model.require_transform()),
        "weights": model.source,
    }


def _describe_preparation(transform: EvaluationTransform) -> dict[str, Any]:
    description: dict[str, Any] = {
        "resize": transform.resize,
        "crop_fraction": transform.crop_fraction,
        **_describe_resize(transform),
        "exif_orientation": "applied" if transform.exif_orientation else "ignored",
    }
    if transform.value_range is not None:
        description["value_range"] = list(transform.value_range)
    description["alpha"] = "dropped"
    return description
