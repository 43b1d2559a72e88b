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
from vit_jax.tools.sweeps.grid import MODEL, Axis, Overrides, Picture, Point, Study, field_axis


class Row(NamedTuple):
    """A row of the paper's Table 6: pre-trained on JFT-300M, fine-tuned on ImageNet at 384 pixels."""

    model: str  # as the recipe `pretrain_jft` names it
    epochs: int
    imagenet_percent: float  # top-1
    exaflops: float  # of pre-training


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


def _examples(config: PretrainConfig, value: str, values: Sequence[str]) -> list[str]:
    """Train on a part of the images, for as many steps as on the largest part."""
    most = max(_whole("examples", one) for one in values)
    return [f"input.train_examples={value}", *_in_examples(config, most)]


def _whole(option: str, value: str, least: int = 1) -> int:
    if not value.isdecimal() or int(value) < least:
        raise ValueError(f"--{option}={value}: a whole number from {least} is needed.")
    return int(value)


def _in_examples(config: PretrainConfig, epoch: int) -> Iterator[str]:
    for name, text in flatten(to_dict(config)).items():
        try:
            number, unit = parse_duration(text)
        except (AttributeError, ValueError):  # no duration
            continue
        if unit == "epochs":
            yield f"{name}={round(number * epoch)} examples"


def _position(config: PretrainConfig, value: str, values: Sequence[str]) -> list[str]:
    """Choose position embeddings; only learned ones have a spread at the start."""
    spread = (
        [f"model.position_stddev={ModelConfig.position_stddev}"]
        if value in ("none", "sincos2d")
        else []
    )
    return [f"model.position_embedding={value}", *spread]


def _shape(config: PretrainConfig, value: str, values: Sequence[str]) -> list[str]:
    """Multiply a dimension: "depth:2" doubles the depth.

    Heads keep their size; all: depth, width and MLP together.
    """
    if value == "base":
        return []
    dimension, _, text = value.partition(":")
    if dimension not in ("depth", "width", "mlp", "patch", "all") or not re.fullmatch(
        r"\d+(\.\d+)?", text
    ):
        raise ValueError(
            f"--shapes={value}: give base, or depth, width, mlp, patch or all with a factor: depth:2."
        )
    a = build_architecture(config.model, image_size=config.input.image_size, num_classes=1)
    if not a.has_transformer:
        raise ValueError(
            f"--shapes={value}: {a.name} has no transformer, whose shape this multiplies."
        )
    if dimension == "patch":
        name, _, patch = config.model.name.rpartition("/")
        return [f"model.name={name}/{_times(int(patch), float(text), value)}"]
    fields = {"depth": ["depth"], "width": ["width", "num_heads"], "mlp": ["mlp_dim"]}
    names = fields.get(dimension, ["depth", "width", "num_heads", "mlp_dim"])
    return [f"model.{name}={_times(getattr(a, name), float(text), value)}" for name in names]


def _times(size: int, factor: float, value: str) -> int:
    product = size * factor
    if product != round(product) or product < 1:
        raise ValueError(f"--shapes={value}: {size} times {factor:g} is no whole number from 1.")
    return round(product)


def _optimizer(config: PretrainConfig, value: str, values: Sequence[str]) -> list[str]:
    """Choose the recipe's Adam, or SGD with the hyper-parameters of BiT-L (BiT, sec. 3.1)."""
    require_known("--optimizers", value, ("adam", "sgd"))
    if value == "adam":
        return ["optimizer.name=adam"]
    rate = 0.03 * config.global_batch / 256
    schedule = [
        f"learning_rate={rate!r}",
        "decay=staircase",
        "drop_at_fraction=0.25,0.575,0.75,0.925",
    ]
    schedule += ["end_learning_rate=0.0"]
    return [
        "optimizer.name=sgd",
        "optimizer.weight_decay=1e-4",
        *(f"schedule.{word}" for word in schedule),
    ]


def _rate_factor(config: PretrainConfig, value: str, values: Sequence[str]) -> list[str]:
    if not re.fullmatch(r"\d*\.?\d+(e[-+]?\d+)?", value):
        raise ValueError(f"--rate_factors={value}: a positive number is needed.")
    return [f"schedule.learning_rate={config.schedule.learning_rate * float(value)!r}"]


def _image_size(config: PretrainConfig, value: str, values: Sequence[str]) -> list[str]:
    """Choose square images, without the border that patches do not cover."""
    match = re.fullmatch(r"[^+]*/(\d+)", config.model.name)
    patch = int(match[1]) if match else 1
    side = _whole("image_sizes", value, patch) // patch * patch
    return [f"input.image_size={side},{side}"]


def _has_place(point: Point) -> bool:
    """Return False for several places of positions that are no embeddings to add."""
    return point["position"] not in ("none", "relative") or point.get("layer", "stem") == "stem"


def _models(*values: str) -> Axis:
    """Return the axis of models, whose values are arguments of the recipe instead of overrides."""
    return Axis(
        name=MODEL, overrides=lambda config, value, values: (), values=values, takes=("model.name",)
    )


def _axis(name: str, overrides: Overrides, values: str, *takes: str) -> Axis:
    return Axis(name=name, overrides=overrides, values=tuple(values.split()), takes=takes)


_RESNETS = ("R50x1", "R152x2,epochs=7")


STUDIES = {
    study.name: study
    for study in (
        Study(
            name="data_size",
            title="Size of the training set",
            about="Fig. 4 and, with regularisers searched, Fig. 3: parts of the training images, equally many steps",
            axes=(
                _models(
                    *("ViT-L/16,epochs=7", "ViT-L/32", "ViT-B/32", "ViT-B/32,model.name=ViT-b/32"),
                    *_RESNETS,
                ),
                _axis(
                    "examples",
                    _examples,
                    "9000000 30000000 90000000 303000000",
                    "input.train_examples",
                ),
                field_axis("weight_decay", "optimizer.weight_decay", is_searched=True),
                field_axis("dropout", "model.dropout_fraction", is_searched=True),
                field_axis(
                    "label_smoothing", "objective.label_smoothing_fraction", is_searched=True
                ),
            ),
            config=("evaluation.evaluators.fewshot.kind=fewshot",),
            measures=("fewshot_5shot_accuracy",),
            stops_early=True,
            picture=Picture(x="examples", x_label="training images", series=MODEL),
        ),
        Study(
            name="scaling",
            title="Accuracy for training compute",
            about="Fig. 5, Table 6: accuracy against compute of models and lengths",
            axes=(
                _models(*(f"{row.model},epochs={row.epochs}" for row in TABLE_6)),
                field_axis("epochs", "total", form="{} epochs"),
            ),
            picture=Picture(
                x="exaflops", x_label="training compute (exaFLOPs)", series="family", has_front=True
            ),
        ),
        Study(
            name="positions",
            title="Position embeddings",
            about="Table 8: kinds of position embeddings, and where they are added",
            axes=(
                _axis(
                    "position",
                    _position,
                    "none learned_1d learned_2d relative",
                    "model.position_embedding",
                ),
                field_axis("layer", "model.position_layers", ("stem", "every", "shared")),
            ),
            allows=_has_place,
            picture=Picture(
                x="position", x_label="position embedding", series="layer", is_log=False
            ),
        ),
        Study(
            name="pooling",
            title="Class token or average",
            about="Fig. 9: class token against averaging, each over learning rates",
            axes=(
                field_axis("pool", "model.pool", ("token", "gap")),
                field_axis("learning_rate", "schedule.learning_rate", ("3e-4", "8e-4")),
            ),
            picture=Picture(x="learning_rate", x_label="learning rate at its peak", series="pool"),
        ),
        Study(
            name="shape",
            title="Shape of the Transformer",
            about="Fig. 8: depth, width, MLP width, patch size and the first three together, multiplied",
            axes=(
                _axis(
                    "shape",
                    _shape,
                    "base depth:0.5 depth:2 depth:4 depth:8 width:0.5 width:2 mlp:0.5 mlp:2 mlp:4 patch:0.5 "
                    "all:0.5 all:2",
                ),
            ),
            picture=Picture(
                x="relative_compute",
                x_label="training compute (of the base shape)",
                series="dimension",
            ),
        ),
        Study(
            name="optimizer",
            title="Adam or SGD",
            about="Table 7: Adam against SGD with momentum for ResNets",
            axes=(
                _models(*_RESNETS),
                _axis("optimizer", _optimizer, "adam sgd", "optimizer.name"),
                Axis(name="rate_factor", overrides=_rate_factor, is_searched=True),
            ),
            picture=Picture(x=MODEL, x_label="model", series="optimizer", is_log=False),
        ),
        Study(
            name="speed",
            title="Speed of the forward pass",
            about="Fig. 12: inference speed, and the largest batch, against input size",
            axes=(
                _models(
                    "R50x1",
                    "R50x2",
                    "ViT-B/32",
                    "ViT-L/32",
                    "ViT-B/16",
                    "ViT-L/16,epochs=7",
                    "ViT-H/14",
                ),
                _axis("image_size", _image_size, "64 128 224 384 512", "input.image_size"),
            ),
            measures=("images_per_second", "largest_batch"),
            is_trained=False,
            picture=Picture(x="image_size", x_label="side of the image (pixels)", series=MODEL),
        ),
    )
}
