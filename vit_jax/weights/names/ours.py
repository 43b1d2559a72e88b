"""The names and shapes of our parameters, with layers stacked on an axis, as the models have them, and taken apart.

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

_BLOCK = re.compile(r"encoder/blocks/(\d+)/(.+)")
_UNIT = re.compile(r"((?:body|stem)/stage\d+)/unit(\d+)/(.+)")
_PROJECTION = re.compile(r".*attention/(?:(?:query|key|value)/(?:kernel|bias)|(out)/kernel)")
_FIRST_OR_REST = re.compile(r"((?:body|stem)/stage\d+)/(first|rest)/(.+)")


@functools.lru_cache(maxsize=64)
def stacked_shapes(a: Architecture) -> Mapping[str, Shape]:
    """Return name and shape of every parameter of the model, computing none; ValueError if no model has these sizes."""
    try:
        model = jax.eval_shape(lambda: build_model(a, jax.random.key(0)))
    except (OverflowError, TypeError) as error:
        raise ValueError(f"no network can be built with the sizes of {a.name}: {error}") from error
    return {name: leaf.shape for name, leaf in pytree.named_leaves(model).items()}


def unstacked_shapes(a: Architecture) -> dict[str, Shape]:
    """Return name and shape of every parameter, layers taken apart."""
    shapes = {}
    for name, shape in stacked_shapes(a).items():
        for apart, place in _names_apart(name, shape):
            layer_shape = shape if place is None else shape[1:]
            shapes[apart] = _with_heads(name, layer_shape, a.num_heads)
    return shapes


def stacked_name(name: str) -> tuple[str, int | None]:
    """Return the model's name of a parameter taken apart, and its place on the layer axis; None without this axis.

    The first unit of a stage is alone; the others are stacked, so that unit 2 has place 0.
    """
    if match := _BLOCK.fullmatch(name):
        return f"encoder/blocks/{match[2]}", int(match[1])
    if match := _UNIT.fullmatch(name):
        stage, number, rest = match.groups()
        if number == "1":
            return f"{stage}/first/{rest}", None
        return f"{stage}/rest/{rest}", int(number) - 2
    return name, None


def stack(apart: Mapping[str, np.ndarray], shapes: Mapping[str, Shape]) -> dict[str, np.ndarray]:
    """Return float32 parameters of the model's names and shapes from those taken apart; missing ones are zeros."""
    parameters = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for name, array in apart.items():
        stacked, place = stacked_name(name)
        parameter = parameters[stacked] if place is None else parameters[stacked][place]
        parameter[...] = array.reshape(parameter.shape)
    return parameters


def unstack(parameters: Mapping[str, np.ndarray], num_heads: int) -> dict[str, np.ndarray]:
    """Return the model's parameters taken apart; the arrays are views."""
    parts = {}
    for name, array in parameters.items():
        for apart, place in _names_apart(name, array.shape):
            part = array if place is None else array[place]
            parts[apart] = part.reshape(_with_heads(name, part.shape, num_heads))
    return parts


def _with_heads(name: str, shape: Shape, num_heads: int) -> Shape:
    """Return the shape of a parameter taken apart, (..., T, h) if it has all heads on one axis."""
    match = _PROJECTION.fullmatch(name)
    if match is None:
        return shape
    axis = len(shape) - (2 if match[1] else 1)
    return (*shape[:axis], num_heads, shape[axis] // num_heads, *shape[axis + 1 :])


def _names_apart(name: str, shape: Shape) -> Iterator[tuple[str, int | None]]:
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
