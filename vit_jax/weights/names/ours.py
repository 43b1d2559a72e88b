"""The names and shapes of our parameters, with layers stacked on an axis, as the models have them, and taken apart.

Taken apart, a layer has a number in its name: `encoder/blocks/3/...`, `body/stage2/unit1/...`, and the heads of an
attention have a separate axis, (D, T, h) for (D, T h). The tables of names use this form, as other formats do.
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
    return {
        apart: _with_heads(name, shape if place is None else shape[1:], a.num_heads)
        for name, shape in stacked_shapes(a).items()
        for apart, place in _names_apart(name, shape)
    }


def stacked_name(name: str) -> tuple[str, int | None]:
    """Return the model's name of a parameter taken apart, and its place on the layer axis; None without this axis.

    The first unit of a stage is alone; the others are stacked, so that unit 2 has place 0.
    """
    if match := _BLOCK.fullmatch(name):
        return f"encoder/blocks/{match[2]}", int(match[1])
    if match := _UNIT.fullmatch(name):
        unit = int(match[2])
        return (
            f"{match[1]}/{'first' if unit == 1 else 'rest'}/{match[3]}",
            None if unit == 1 else unit - 2,
        )
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
    return {
        apart: part.reshape(_with_heads(name, part.shape, num_heads))
        for name, array in parameters.items()
        for apart, place in _names_apart(name, array.shape)
        for part in [array if place is None else array[place]]
    }


def _with_heads(name: str, shape: Shape, num_heads: int) -> Shape:
    """Return the shape of a parameter taken apart, (..., T, h) if it has all heads on one axis."""
    match = _PROJECTION.fullmatch(name)
    if match is None:
        return shape
    axis = len(shape) - (2 if match[1] else 1)
    return (*shape[:axis], num_heads, shape[axis] // num_heads, *shape[axis + 1 :])


def _names_apart(name: str, shape: Shape) -> Iterator[tuple[str, int | None]]:
    match = _FIRST_OR_REST.fullmatch(name)
    if name.startswith("encoder/blocks/"):
        rest = name.removeprefix("encoder/blocks/")
        yield from ((f"encoder/blocks/{place}/{rest}", place) for place in range(shape[0]))
    elif match and match[2] == "rest":
        yield from ((f"{match[1]}/unit{place + 2}/{match[3]}", place) for place in range(shape[0]))
    else:
        yield (f"{match[1]}/unit1/{match[3]}" if match else name), None
