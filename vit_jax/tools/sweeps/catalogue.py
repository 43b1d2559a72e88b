"""The paper's studies, as tables of axes.

Values are the paper's, for recipes of its models (`pretrain_jft`).
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vit_jax.config import ModelConfig, PretrainConfig, build_architecture, to_dict
from vit_jax.config.durations import parse_duration
from vit_jax.config.parsing import flatten
from vit_jax.text.nearest import require_known
from vit_jax.tools.sweeps.grid import MODEL, Axis, Overrides, Plot, Point, Study, build_field_axis


class Row(NamedTuple):
    """A row of the paper's Table 6: JFT-300M, then ImageNet at 384 pixels."""

    model: str  # its name in the recipe `pretrain_jft`
    epochs: int
    imagenet_percent: float  # top-1
    exaflops: float  # compute of the pre-training


TABLE_6 = (
    Row("ViT-B/32", 7, 80.73, 55),
    Row("ViT-B/16", 7, 84.15, 224),
    Row("ViT-L/32", 7, 84.37, 196),
    Row("ViT-L/16", 7, 86.30, 783),
    Row("ViT-L/16", 14, 87.12, 1567),
    Row("ViT-H/14", 14, 88.08, 4262),
    Row("R50x1", 7, 77.54, 50),
    Row("R50x2", 7, 82.12, 199),
    Row("R101x1", 7, 80.67, 96),
    Row("R152x1", 7, 81.88, 141),
    Row("R152x2", 7, 84.97, 563),
    Row("R152x2", 14, 85.56, 1126),
    Row("R200x3", 14, 87.22, 3306),
    Row("R50+ViT-B/32", 7, 84.90, 106),
    Row("R50+ViT-B/16", 7, 85.58, 274),
    Row("R50+ViT-L/32", 7, 85.68, 246),
    Row("R50+ViT-L/16", 7, 86.60, 859),
    Row("R50+ViT-L/16", 14, 87.12, 1668),
)


def _override_examples(
    config: PretrainConfig,
    value: str,
    values: Sequence[str],
) -> list[str]:
    """Train on a part of the images, for as many steps as on the largest part."""
    most = max(_parse_whole("examples", one) for one in values)
    return [f"input.train_examples={value}", *_convert_epochs(config, most)]


def _parse_whole(option: str, value: str, least: int = 1) -> int:
    if not value.isdecimal() or int(value) < least:
        raise ValueError(f"--{option}={value}: a whole number from {least} is needed.")
    return int(value)


def _convert_epochs(config: PretrainConfig, num_examples: int) -> Iterator[str]:
    """Yield an override for each duration in epochs, in images of an epoch of this size."""
    for name, text in flatten(to_dict(config)).items():
        try:
            number, unit = parse_duration(text)
        except (AttributeError, ValueError):  # not a duration
            continue
        if unit == "epochs":
            yield f"{name}={round(number * num_examples)} examples"


def _override_position(
    config: PretrainConfig,
    value: str,
    values: Sequence[str],
) -> list[str]:
    """Select position embeddings; only learned embeddings have an initial deviation."""
    overrides = [f"model.position_embedding={value}"]
    if value in ("none", "sincos2d"):
        overrides.append(f"model.position_stddev={ModelConfig.position_stddev}")
    return overrides


def _override_shape(
    config: PretrainConfig,
    value: str,
    values: Sequence[str],
) -> list[str]:
    """Multiply a dimension: "depth:2" doubles the depth.

    Heads keep their size; all: depth, width and MLP together.
    """
    if value == "base":
        return []
    dimension, _, factor = value.partition(":")
    is_known = dimension == "patch" or dimension in _SHAPE_FIELDS
    if not is_known or not re.fullmatch(r"\d+(\.\d+)?", factor):
        raise ValueError(
            f"--shapes={value}: give base, or depth, width, mlp, patch or all with a factor: "
            "depth:2."
        )
    a = build_architecture(config.model, image_size=config.input.pixels, num_classes=1)
    if not a.has_transformer:
        raise ValueError(
            f"--shapes={value}: {a.name} has no transformer, whose shape this multiplies."
        )

    if dimension == "patch":
        name, _, patch = config.model.name.rpartition("/")
        return [f"model.name={name}/{_multiply(int(patch), float(factor), value)}"]
    overrides = []
    for name in _SHAPE_FIELDS[dimension]:
        size = _multiply(getattr(a, name), float(factor), value)
        overrides.append(f"model.{name}={size}")
    return overrides


def _multiply(size: int, factor: float, value: str) -> int:
    product = size * factor
    if product != round(product) or product < 1:
        raise ValueError(f"--shapes={value}: {size} times {factor:g} is no whole number from 1.")
    return round(product)


def _override_optimizer(
    config: PretrainConfig,
    value: str,
    values: Sequence[str],
) -> list[str]:
    """Select the recipe's Adam, or SGD with the hyper-parameters of BiT-L (BiT, sec. 3.1)."""
    require_known("--optimizers", value, ("adam", "sgd"))
    if value == "adam":
        return ["optimizer.name=adam"]
    learning_rate = 0.03 * config.global_batch / 256
    return [
        "optimizer.name=sgd",
        "optimizer.weight_decay=1e-4",
        f"schedule.learning_rate={learning_rate!r}",
        "schedule.decay=staircase",
        "schedule.drop_at_fraction=0.25,0.575,0.75,0.925",
        "schedule.end_learning_rate=0.0",
    ]


def _override_rate(
    config: PretrainConfig,
    value: str,
    values: Sequence[str],
) -> list[str]:
    """Multiply the learning rate, which may depend on the optimizer."""
    if not re.fullmatch(r"\d*\.?\d+(e[-+]?\d+)?", value):
        raise ValueError(f"--rate_factors={value}: a positive number is needed.")
    return [f"schedule.learning_rate={config.schedule.learning_rate * float(value)!r}"]


def _override_image_size(
    config: PretrainConfig,
    value: str,
    values: Sequence[str],
) -> list[str]:
    """Select square images, without the border that patches do not cover."""
    match = re.fullmatch(r"[^+]*/(\d+)", config.model.name)
    patch_size = int(match[1]) if match else 1
    num_patches = _parse_whole("image_sizes", value, patch_size) // patch_size
    side = num_patches * patch_size
    return [f"input.image_size={side},{side}"]


def _allows_layer(point: Point) -> bool:
    """Return False for positions that are not added to tokens, in other layers than the stem."""
    if point["position"] in ("none", "relative"):
        return point.get("layer", "stem") == "stem"
    return True


def _override_nothing(
    config: PretrainConfig,
    value: str,
    values: Sequence[str],
) -> list[str]:
    return []


def _model_axis(*values: str) -> Axis:
    """Return the axis of models, whose values are arguments of the recipe instead of overrides."""
    return Axis(
        name=MODEL,
        overrides=_override_nothing,
        values=values,
        fields=("model.name",),
    )


def _axis(
    name: str,
    overrides: Overrides,
    values: str,
    field: str = "",
) -> Axis:
    """Return an axis with values that are separated by blanks; it sets a field, if one is named."""
    return Axis(
        name=name,
        overrides=overrides,
        values=tuple(values.split()),
        fields=(field,) if field else (),
    )


_RESNETS = ("R50x1", "R152x2,epochs=7")
_SHAPE_FIELDS = {
    "depth": ("depth",),
    "width": ("width", "num_heads"),
    "mlp": ("mlp_dim",),
    "all": ("depth", "width", "num_heads", "mlp_dim"),
}

_DATA_SIZE = Study(
    name="data_size",
    title="Size of the training set",
    about=(
        "Fig. 4 and, with regularisers searched, Fig. 3: parts of the training images, "
        "equally many steps"
    ),
    axes=(
        _model_axis(
            "ViT-L/16,epochs=7",
            "ViT-L/32",
            "ViT-B/32",
            "ViT-B/32,model.name=ViT-b/32",
            *_RESNETS,
        ),
        _axis(
            "examples",
            _override_examples,
            "9000000 30000000 90000000 303000000",
            "input.train_examples",
        ),
        build_field_axis("weight_decay", "optimizer.weight_decay", is_searched=True),
        build_field_axis("dropout", "model.dropout_fraction", is_searched=True),
        build_field_axis("label_smoothing", "objective.label_smoothing_fraction", is_searched=True),
    ),
    config=("evaluation.evaluators.fewshot.kind=fewshot",),
    measures=("fewshot_5shot_accuracy",),
    stops_early=True,
    plot=Plot(x="examples", x_label="training images", series=MODEL),
)

_SCALING = Study(
    name="scaling",
    title="Accuracy for training compute",
    about="Fig. 5, Table 6: accuracy against compute of models and lengths",
    axes=(
        _model_axis(*(f"{row.model},epochs={row.epochs}" for row in TABLE_6)),
        build_field_axis("epochs", "total", form="{} epochs"),
    ),
    plot=Plot(
        x="exaflops",
        x_label="training compute (exaFLOPs)",
        series="family",
        has_front=True,
    ),
)

_POSITIONS = Study(
    name="positions",
    title="Position embeddings",
    about="Table 8: kinds of position embeddings, and where they are added",
    axes=(
        _axis(
            "position",
            _override_position,
            "none learned_1d learned_2d relative",
            "model.position_embedding",
        ),
        build_field_axis("layer", "model.position_layers", ("stem", "every", "shared")),
    ),
    allows=_allows_layer,
    plot=Plot(x="position", x_label="position embedding", series="layer", is_log=False),
)

_POOLING = Study(
    name="pooling",
    title="Class token or average",
    about="Fig. 9: class token against averaging, each over learning rates",
    axes=(
        build_field_axis("pool", "model.pool", ("token", "gap")),
        build_field_axis("learning_rate", "schedule.learning_rate", ("3e-4", "8e-4")),
    ),
    plot=Plot(x="learning_rate", x_label="learning rate at its peak", series="pool"),
)

_SHAPE = Study(
    name="shape",
    title="Shape of the Transformer",
    about="Fig. 8: depth, width, MLP width, patch size and the first three together, multiplied",
    axes=(
        _axis(
            "shape",
            _override_shape,
            "base depth:0.5 depth:2 depth:4 depth:8 width:0.5 width:2 mlp:0.5 mlp:2 mlp:4 "
            "patch:0.5 "
            "all:0.5 all:2",
        ),
    ),
    plot=Plot(
        x="relative_compute",
        x_label="training compute (of the base shape)",
        series="dimension",
    ),
)

_OPTIMIZER = Study(
    name="optimizer",
    title="Adam or SGD",
    about="Table 7: Adam against SGD with momentum for ResNets",
    axes=(
        _model_axis(*_RESNETS),
        _axis("optimizer", _override_optimizer, "adam sgd", "optimizer.name"),
        Axis(name="rate_factor", overrides=_override_rate, is_searched=True),
    ),
    plot=Plot(x=MODEL, x_label="model", series="optimizer", is_log=False),
)

_SPEED = Study(
    name="speed",
    title="Speed of the forward pass",
    about="Fig. 12: inference speed, and the largest batch, against input size",
    axes=(
        _model_axis(
            "R50x1",
            "R50x2",
            "ViT-B/32",
            "ViT-L/32",
            "ViT-B/16",
            "ViT-L/16,epochs=7",
            "ViT-H/14",
        ),
        _axis("image_size", _override_image_size, "64 128 224 384 512", "input.image_size"),
    ),
    measures=("images_per_second", "largest_batch"),
    is_trained=False,
    plot=Plot(x="image_size", x_label="side of the image (pixels)", series=MODEL),
)

STUDIES = {
    study.name: study
    for study in (
        _DATA_SIZE,
        _SCALING,
        _POSITIONS,
        _POOLING,
        _SHAPE,
        _OPTIMIZER,
        _SPEED,
    )
}
