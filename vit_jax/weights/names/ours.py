"""The names and shapes of our parameters, with layers stacked on an axis, as the models have them, and taken apart.

Taken apart, a layer has a number in its name: `encoder/blocks/3/...`, `body/stage2/unit1/...`. Other formats name
layers so, hence the tables of names are written for this form. `models` defines the truth; a test compares.
"""

import re
from collections.abc import Iterator, Mapping

import numpy as np

from vit_jax.config.architecture import Architecture
from vit_jax.config.variants import BOTTLENECK

Shape = tuple[int, ...]

_BLOCK = re.compile(r"encoder/blocks/(\d+)/(.+)")
_UNIT = re.compile(r"((?:body|stem)/stage\d+)/unit(\d+)/(.+)")
_FIRST_OR_REST = re.compile(r"((?:body|stem)/stage\d+)/(first|rest)/(.+)")


def stacked_name(name: str) -> tuple[str, int | None]:
    """The model's name of a parameter taken apart, and its place on the layer axis; None where there is no such axis.

    The first unit of a stage is alone; the others are stacked, so that unit 2 has place 0.
    """
    if match := _BLOCK.fullmatch(name):
        return f"encoder/blocks/{match[2]}", int(match[1])
    if match := _UNIT.fullmatch(name):
        unit = int(match[2])
        return f"{match[1]}/{'first' if unit == 1 else 'rest'}/{match[3]}", None if unit == 1 else unit - 2
    return name, None


def stack(parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters taken apart → as the model has them."""
    layers: dict[str, dict[int | None, np.ndarray]] = {}
    for name, array in parameters.items():
        whole, place = stacked_name(name)
        layers.setdefault(whole, {})[place] = array
    return {
        name: rows[None] if None in rows else np.stack([rows[place] for place in range(len(rows))])
        for name, rows in layers.items()
    }


def unstack(parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters as the model has them → taken apart; the arrays are views."""
    return {
        apart: array if place is None else array[place]
        for name, array in parameters.items()
        for apart, place in _names_apart(name, len(array) if array.ndim else 0)
    }


def _names_apart(name: str, length: int) -> Iterator[tuple[str, int | None]]:
    match = _FIRST_OR_REST.fullmatch(name)
    if name.startswith("encoder/blocks/"):
        rest = name.removeprefix("encoder/blocks/")
        yield from ((f"encoder/blocks/{place}/{rest}", place) for place in range(length))
    elif match and match[2] == "rest":
        yield from ((f"{match[1]}/unit{place + 2}/{match[3]}", place) for place in range(length))
    elif match:
        yield f"{match[1]}/unit1/{match[3]}", None
    else:
        yield name, None


def stacked_shapes(a: Architecture) -> dict[str, Shape]:
    """Name and shape of every parameter as the model has it."""
    apart = unstacked_shapes(a)
    shapes: dict[str, Shape] = {}
    for name, shape in apart.items():
        whole, place = stacked_name(name)
        shapes[whole] = shape if place is None else (place + 1, *shape)  # places ascend, so the last is the length
    return shapes


def unstacked_shapes(a: Architecture) -> dict[str, Shape]:
    """Name and shape of every parameter, layers taken apart; queries before keys before values."""
    shapes: dict[str, Shape] = {}
    if a.has_resnet:
        shapes |= _resnet("stem" if a.has_transformer else "body", a)
    if a.has_transformer:
        shapes |= _transformer(a)
    elif a.residual_unit == "preactivation":
        shapes |= _norm("norm", a.width)
    if a.head == "mlp":
        shapes |= _dense("head/hidden", a.width, a.width)
    return shapes | _dense("head/linear", a.width, a.num_classes)


def _transformer(a: Architecture) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {
        "embedding/kernel": (*a.patch_size, a.map_channels, a.width),
        "embedding/bias": (a.width,),
    }
    if a.pool == "token":
        shapes["class_token"] = (1, 1, a.width)
    shapes |= _positions(a)
    for layer in range(a.depth):
        block = f"encoder/blocks/{layer}"
        shapes |= _norm(f"{block}/attention_norm", a.width) | _attention(f"{block}/attention", a)
        shapes |= _norm(f"{block}/mlp_norm", a.width) | _mlp(f"{block}/mlp", a)
    shapes |= _norm("encoder/norm", a.width)
    if a.pool == "map":
        shapes |= {"pooling/probe": (1, 1, a.width)} | _attention("pooling/attention", a)
        shapes |= _norm("pooling/norm", a.width) | _mlp("pooling/mlp", a)
    return shapes


def _positions(a: Architecture) -> dict[str, Shape]:
    if a.position_embedding == "learned_1d":
        return {"positions/table": (1, a.sequence_length, a.width)}
    if a.position_embedding != "learned_2d":
        return {}
    rows, columns = a.grid
    tables: dict[str, Shape] = {
        "positions/row_table": (rows, a.width // 2),
        "positions/column_table": (columns, a.width // 2),
    }
    return tables | ({"positions/class_row": (1, a.width)} if a.pool == "token" else {})


def _resnet(prefix: str, a: Architecture) -> dict[str, Shape]:
    is_normed_after = a.residual_unit == "postactivation"
    shapes: dict[str, Shape] = {f"{prefix}/root/conv/kernel": (7, 7, 3, a.root_channels)}
    if is_normed_after:
        shapes |= _norm(f"{prefix}/root/norm", a.root_channels)
    inputs = a.root_channels
    for stage, num_units in enumerate(a.units):
        outputs = a.stage_channels(stage)
        inner = outputs // BOTTLENECK
        for number in range(1, num_units + 1):
            unit = f"{prefix}/stage{stage + 1}/unit{number}"
            normed = (inner, inner, outputs) if is_normed_after else (inputs, inner, inner)
            for place, channels in enumerate(normed, start=1):
                shapes |= _norm(f"{unit}/norm{place}", channels)
            shapes[f"{unit}/conv1/kernel"] = (1, 1, inputs, inner)
            shapes[f"{unit}/conv2/kernel"] = (3, 3, inner, inner)
            shapes[f"{unit}/conv3/kernel"] = (1, 1, inner, outputs)
            if number == 1:
                shapes[f"{unit}/shortcut/conv/kernel"] = (1, 1, inputs, outputs)
                shapes |= _norm(f"{unit}/shortcut/norm", outputs) if is_normed_after else {}
            inputs = outputs
    return shapes


def _attention(prefix: str, a: Architecture) -> dict[str, Shape]:
    heads = (a.num_heads, a.width // a.num_heads)
    shapes: dict[str, Shape] = {}
    for name in ("query", "key", "value"):
        shapes |= {f"{prefix}/{name}/kernel": (a.width, *heads), f"{prefix}/{name}/bias": heads}
    return shapes | {f"{prefix}/out/kernel": (*heads, a.width), f"{prefix}/out/bias": (a.width,)}


def _mlp(prefix: str, a: Architecture) -> dict[str, Shape]:
    return _dense(f"{prefix}/expand", a.width, a.mlp_dim) | _dense(f"{prefix}/contract", a.mlp_dim, a.width)


def _dense(prefix: str, inputs: int, outputs: int) -> dict[str, Shape]:
    return {f"{prefix}/kernel": (inputs, outputs), f"{prefix}/bias": (outputs,)}


def _norm(prefix: str, channels: int) -> dict[str, Shape]:
    return {f"{prefix}/scale": (channels,), f"{prefix}/bias": (channels,)}
