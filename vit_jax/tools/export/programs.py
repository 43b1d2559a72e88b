"""A network as a program that runs without this package: StableHLO for CPU, CUDA and TPU, or ONNX.

The program takes uint8 images of the network's size, or float32 bands as stored, and returns
probabilities, or features of weights without classes; it includes the scaling of pixels. A
description of decoding and resizing is beside a StableHLO program and inside an ONNX file.
"""

import json
import pathlib
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from vit_jax.api.model import Model, to_probabilities
from vit_jax.data.transforms import EvaluationTransform
from vit_jax.imports.extras import install_command
from vit_jax.kernels.devices import F, trace_for
from vit_jax.storage.files import JsonObject, expand_path, write_atomically

PLATFORMS = ("cpu", "cuda", "tpu")
OUTPUTS = {
    "probabilities": "probabilities: {activation}",
    "logits": "float32 logits of the classes",
    "features": "input of the last linear layer: one vector for each image",
    "tokens": "patch tokens after the final norm, row by row; of a ResNet the places of its map",
}
"""Meaning of each output that a program may have."""
LARGEST_PROGRAM_BYTES = 2_000_000_000  # below the limit of jax.export
# Largest difference of an output, of probabilities of their logarithm, relative to its range:
# rounding gives 1e-5, mistakes 0.1
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

_USES = {
    "onnx": (
        "import numpy, onnxruntime; program = onnxruntime.InferenceSession({path!r}); "
        "(stated,) = program.get_inputs(); dtype = 'f4' if 'float' in stated.type else 'u1'; "
        "images = numpy.zeros((1, *stated.shape[1:]), dtype); "
        "print(program.run(None, dict(images=images)))"
    ),
    "stablehlo": (
        "import numpy, pathlib, jax.export; "
        "program = jax.export.deserialize(pathlib.Path({path!r}).read_bytes()); "
        "(stated,) = program.in_avals; "
        "images = numpy.zeros((1, *stated.shape[1:]), stated.dtype); "
        "print(program.call(images))"
    ),
}
"""Python that runs a program, by its kind."""


def export_stablehlo(
    model: Model,
    path: str | pathlib.Path,
    *,
    outputs: Sequence[str] = (),
    overwrite: bool = False,
) -> list[pathlib.Path]:
    """Write the serialised program, and beside it PATH.json: classes, input, preparation of images.

    Read it with `jax.export.deserialize(open(path, "rb").read()).call(image)`: uint8 (B, H, W, 3),
    any B, to float32 (B, K), or with other outputs than probabilities to a dictionary of them.

    Args:
      model: on one device; its parameters become constants of the program.
      path: the file to write.
      outputs: names in `OUTPUTS`; (): probabilities, or features and tokens without classes.
      overwrite: replace existing files.

    Returns:
      the two files.

    Raises:
      ValueError: a file exists or cannot be written; the model has no such output, no preparation
        of images, or too many parameters.
    """
    outputs = choose_outputs(model, outputs)
    path, description_path = _check_and_find_files(
        model,
        path,
        "stablehlo",
        overwrite=overwrite,
    )
    description = _describe(model, outputs) | {"platforms": PLATFORMS}
    compute = _build_program(model, outputs)

    def run(image_BHWC: jax.Array) -> jax.Array | dict[str, jax.Array]:
        results = compute(image_BHWC)
        if outputs == ("probabilities",):
            return results[0]
        return dict(zip(outputs, results, strict=True))

    export = jax_export.export(jax.jit(run), platforms=PLATFORMS)
    write_atomically(path, export(_describe_images(model)).serialize())
    write_atomically(description_path, f"{json.dumps(description, indent=2)}\n")
    return [path, description_path]


def export_onnx(
    model: Model,
    path: str | pathlib.Path,
    *,
    outputs: Sequence[str] = (),
    overwrite: bool = False,
) -> list[pathlib.Path]:
    """Write an ONNX file, which computes in float32.

    It maps "images", uint8 (B, H, W, 3), any B, to float32 outputs with the names in `OUTPUTS`.
    Before it is written, its results on random images must be equal to those of the model. Its
    metadata are the description of a StableHLO program, each value as JSON.

    Args:
      model: computes in float32.
      path: the file to write.
      outputs: names, the same as for `export_stablehlo`.
      overwrite: replace existing files.

    Returns:
      the file, alone in its list.

    Raises:
      ValueError: see `export_stablehlo`; onnx or onnxruntime is not installed; the model computes in
        bfloat16 or has an unsupported operation; the file gives other results.
    """
    outputs = choose_outputs(model, outputs)
    (path,) = _check_and_find_files(model, path, "onnx", overwrite=overwrite)
    if model.architecture.compute_dtype != "float32":
        raise ValueError(
            "An ONNX file computes in float32: load the weights with compute_dtype float32."
        )
    require_onnx()
    import onnx

    from vit_jax.tools.export.onnx_graph import to_onnx

    program = trace_for(_AnyRuntime())(_build_program(model, outputs))
    proto = to_onnx(program, outputs, _describe_images(model))
    description = _describe(model, outputs)
    properties = {field: json.dumps(value) for field, value in description.items()}
    onnx.helper.set_model_props(proto, properties)
    content = proto.SerializeToString()
    _require_equal_results(model, outputs, content)
    write_atomically(path, content)
    return [path]


def format_use(path: str, kind: str) -> str:
    """Return the command, for a shell, that runs a program on a black image and prints its outputs.

    `kind` is "stablehlo" or "onnx".
    """
    python = "python"
    found = shutil.which(python)
    if found is None or pathlib.Path(found).parent != pathlib.Path(sys.executable).parent:
        python = sys.executable  # the one that has the libraries
    code = _USES[kind].format(path=str(expand_path(path)))
    return shlex.join([python, "-c", code])


def choose_outputs(model: Model, outputs: Sequence[str]) -> tuple[str, ...]:
    """Return the outputs of a program.

    Raises:
      ValueError: one is unknown or given twice, or needs classes that the model does not have.
    """
    if not outputs:
        if model.architecture.num_classes:
            return ("probabilities",)
        return ("features", "tokens")

    names = ", ".join(OUTPUTS)
    for name in outputs:
        if name not in OUTPUTS or outputs.count(name) > 1:
            raise ValueError(
                f"--outputs={','.join(outputs)}: must be different names. Use some of {names}."
            )
        if name in ("probabilities", "logits"):
            model.require_classes()
    return tuple(outputs)


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
    num_devices = 1

    def __call__(self, name: str, activation: jax.Array) -> jax.Array:
        return activation

    def map_shards(self, function: F, *_: Any) -> F:
        return function


def _require_equal_results(
    model: Model,
    outputs: tuple[str, ...],
    content: bytes,
) -> None:
    """Raise ValueError unless file and model agree on one random image and on three."""
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    program = _build_program(model, outputs)
    for batch_size in (1, 3):
        images = _sample_images(model, batch_size)
        with jax.default_matmul_precision("float32"):
            expected = program(images)
        found = session.run(list(outputs), {"images": images})
        for name, of_model, of_file in zip(outputs, expected, found, strict=True):
            _require_equal_output(model, name, np.asarray(of_model), of_file)


def _sample_images(model: Model, batch_size: int) -> np.ndarray:
    """Return random input of the program."""
    rng = np.random.default_rng(batch_size)
    shape = (batch_size, *model.architecture.image_shape)
    bands = model.require_transform().bands
    if bands is None:
        return rng.integers(0, 256, shape, np.uint8)
    return bands.restore(rng.uniform(-1, 1, shape))


def _require_equal_output(
    model: Model,
    name: str,
    of_model: np.ndarray,
    of_file: np.ndarray,
) -> None:
    """Raise ValueError unless an output of the file is that of the model."""
    word = name
    if name == "probabilities":
        word = "log-probabilities"
        of_model = _take_log(of_model)
        of_file = _take_log(of_file)
    difference = np.abs(of_model - of_file).max()
    allowed = LARGEST_DIFFERENCE * np.ptp(of_model) + 1e-6
    if not difference <= allowed:  # also if it is NaN
        raise ValueError(
            f"{model.architecture.name} is not written as ONNX: "
            f"on random images the {word} of the file would differ "
            f"by {difference:.2g}, more than {allowed:.2g}. Use --to=stablehlo."
        )


def _take_log(probabilities: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(probabilities, 1e-30))


def _build_program(
    model: Model,
    outputs: tuple[str, ...],
) -> Callable[[Any], tuple[jax.Array, ...]]:
    """Return the function from images to the outputs, float32, in their order."""
    transform = model.transform
    bands = None if transform is None else transform.bands

    def run(image_BHWC: Any) -> tuple[jax.Array, ...]:
        if bands is not None:
            image_BHWC = bands.normalise(image_BHWC)
        result = model(image_BHWC)
        results = []
        for name in outputs:
            if name == "probabilities":
                results.append(to_probabilities(result.logits_BK, model.is_multilabel))
            elif name == "logits":
                results.append(result.logits_BK)
            elif name == "features":
                results.append(result.features_BD)
            else:
                results.append(result.tokens_BND.astype(jnp.float32))
        return tuple(results)

    return run


def _describe_images(model: Model) -> jax.ShapeDtypeStruct:
    """Return the shape of images of a batch of any size."""
    (batch,) = jax_export.symbolic_shape("batch")
    dtype = model.require_transform().dtype
    return jax.ShapeDtypeStruct((batch, *model.architecture.image_shape), dtype)


def _check_and_find_files(
    model: Model,
    path: str | pathlib.Path,
    kind: str,
    *,
    overwrite: bool,
) -> list[pathlib.Path]:
    """Return the files of `require_free`; raise ValueError if the model cannot be a program."""
    paths = require_free(path, kind, overwrite=overwrite)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(model.module))
    if num_bytes >= LARGEST_PROGRAM_BYTES:
        raise ValueError(
            f"{model.architecture.name} has {num_bytes / 1e9:.1f} GB of parameters, "
            "and a program with its parameters inside may have 2 GB: "
            "use --to=safetensors or --to=npz."
        )
    return paths


def require_free(
    path: str | pathlib.Path,
    kind: str,
    *,
    overwrite: bool,
) -> list[pathlib.Path]:
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


def _describe(model: Model, outputs: tuple[str, ...]) -> JsonObject:
    """Return input, outputs, classes and preparation of images as JSON values.

    Probabilities alone are "output"; other outputs are "outputs", by their names.
    """
    a = model.architecture
    described = _describe_outputs(model, outputs)
    key = "outputs"
    value: JsonObject = described
    if outputs == ("probabilities",):
        key = "output"
        value = described["probabilities"]
    return {
        "network": a.name,
        "input": _describe_input(model),
        key: value,
        "class_names": list(model.class_names),
        "preprocessing": _describe_preparation(model.require_transform()),
        "weights": model.source,
    }


def _describe_input(model: Model) -> JsonObject:
    """Return dtype, shape and channels of the images."""
    shape = ["batch", *model.architecture.image_shape]
    bands = model.require_transform().bands
    if bands is None:
        return {"dtype": "uint8", "shape": shape, "colours": "RGB"}
    return {
        "dtype": "float32",
        "shape": shape,
        "channels": "values of bands as stored; the program normalises them",
        "bands": list(bands.list_numbers()),
    }


def _describe_outputs(model: Model, outputs: tuple[str, ...]) -> dict[str, JsonObject]:
    """Return dtype, shape and meaning of each output."""
    activation = "sigmoid of each logit" if model.is_multilabel else "softmax of the logits"
    results = jax.eval_shape(_build_program(model, outputs), _describe_images(model))
    described = {}
    for name, result in zip(outputs, results, strict=True):
        described[name] = {
            "dtype": "float32",
            "shape": ["batch", *result.shape[1:]],
            "meaning": OUTPUTS[name].format(activation=activation),
        }
    return described


def _describe_preparation(transform: EvaluationTransform) -> JsonObject:
    description: JsonObject = {
        "resize": transform.resize,
        "crop_fraction": transform.crop_fraction,
        **_describe_resize(transform),
        "exif_orientation": "applied" if transform.exif_orientation else "ignored",
    }
    if transform.value_range is not None:
        description["value_range"] = list(transform.value_range)
    description["alpha"] = "dropped"
    return description
