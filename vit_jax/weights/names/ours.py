"""Names and shapes of our parameters, with layers stacked as the models have them, or taken apart.

Taken apart, a layer has a number in its name: `encoder/blocks/3/...`, `body/stage2/unit1/...`, and
the heads of an attention have a separate axis, (D, T, h) for (D, T h). The tables of names use this
form, as other formats do.
"""

import functools
import re
from collections.abc import Iterator, Mapping

import jax
import numpy as np

from vit_jax import pytree
from vit_jax.config.architecture import Architecture
from vit_jax.models import build_model

Shape = tuple[int, ...]

HEAD_KERNEL = "head/linear/kernel"
HEAD_BIAS = "head/linear/bias"

_BLOCK = re.compile(r"encoder/blocks/(\d+)/(.+)")
_UNIT = re.compile(r"((?:body|stem)/stage\d+)/unit(\d+)/(.+)")
_PROJECTION = re.compile(r".*attention/(?:(?:query|key|value)/(?:kernel|bias)|(out)/kernel)")
_FIRST_OR_REST = re.compile(r"((?:body|stem)/stage\d+)/(first|rest)/(.+)")


@functools.lru_cache(maxsize=64)
def list_shapes(a: Architecture) -> Mapping[str, Shape]:
    """Return name and shape of every parameter of the model, computing none.

    Raises:
      ValueError: no model has these sizes.
    """
    try:
        model = jax.eval_shape(lambda: build_model(a, jax.random.key(0)))
    except (OverflowError, TypeError) as error:
        raise ValueError(f"no network can be built with the sizes of {a.name}: {error}") from error

    return {name: leaf.shape for name, leaf in pytree.name_leaves(model).items()}


def list_unstacked_shapes(a: Architecture) -> dict[str, Shape]:
    """Return name and shape of every parameter, layers taken apart."""
    shapes = {}
    for name, shape in list_shapes(a).items():
        for apart, place in _list_names_apart(name, shape):
            layer_shape = shape
            if place is not None:
                layer_shape = shape[1:]
            shapes[apart] = _separate_heads(name, layer_shape, a.num_heads)
    return shapes


def find_stacked_name(name: str) -> tuple[str, int | None]:
    """Return the model's name of a parameter taken apart, and its place on the layer axis.

    The place is None without this axis. The first unit of a stage is alone; the others are stacked,
    so that unit 2 has place 0.
    """
    if match := _BLOCK.fullmatch(name):
        layer, rest = match.groups()
        return f"encoder/blocks/{rest}", int(layer)

    if match := _UNIT.fullmatch(name):
        stage, number, rest = match.groups()
        if number == "1":
            return f"{stage}/first/{rest}", None
        return f"{stage}/rest/{rest}", int(number) - 2

    return name, None


def stack(apart: Mapping[str, np.ndarray], shapes: Mapping[str, Shape]) -> dict[str, np.ndarray]:
    """Return float32 parameters of the model's names and shapes from those taken apart.

    Missing ones are zeros.
    """
    parameters = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for name, array in apart.items():
        stacked, place = find_stacked_name(name)
        parameter = parameters[stacked]
        if place is not None:
            parameter = parameter[place]
        parameter[...] = array.reshape(parameter.shape)
    return parameters


def unstack(parameters: Mapping[str, np.ndarray], num_heads: int) -> dict[str, np.ndarray]:
    """Return the model's parameters taken apart; the arrays are views."""
    parts = {}
    for name, array in parameters.items():
        for apart, place in _list_names_apart(name, array.shape):
            part = array
            if place is not None:
                part = array[place]
            part_shape = _separate_heads(name, part.shape, num_heads)
            parts[apart] = part.reshape(part_shape)
    return parts


def _separate_heads(
    name: str,
    shape: Shape,
    num_heads: int,
) -> Shape:
    """Return the shape of a parameter taken apart, (..., T, h) if it has all heads on one axis."""
    match = _PROJECTION.fullmatch(name)
    if match is None:
        return shape

    is_output = match[1] is not None
    axis = len(shape) - (2 if is_output else 1)
    before = shape[:axis]
    after = shape[axis + 1 :]
    head_dim = shape[axis] // num_heads
    return (*before, num_heads, head_dim, *after)


def _list_names_apart(name: str, shape: Shape) -> Iterator[tuple[str, int | None]]:
    """Yield the names of a parameter taken apart, with their places on the layer axis."""
    if name.startswith("encoder/blocks/"):
        rest = name.removeprefix("encoder/blocks/")
        for place in range(shape[0]):
            yield f"encoder/blocks/{place}/{rest}", place
        return

    match = _FIRST_OR_REST.fullmatch(name)
    if match is None:
        yield name, None
        return

    stage, which, rest = match.groups()
    if which == "first":
        yield f"{stage}/unit1/{rest}", None
        return

    for place in range(shape[0]):
        yield f"{stage}/unit{place + 2}/{rest}", place
