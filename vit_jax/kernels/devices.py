"""The devices that a program is traced for, and the layout of large activations on them.

A model names an activation (`constrain(tokens, "tokens_BSD")`) and knows no mesh; `placed_by` gives
the names a layout while a step for several devices is traced. Without it a name changes nothing.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import jax

F = TypeVar("F", bound=Callable[..., tuple])


class Place(Protocol):
    """The devices of a step, and the layout of activations on them."""

    @property
    def platform(self) -> str:
        """Return the platform of the devices: "cpu", "gpu" or "tpu"."""

    @property
    def device_kind(self) -> str:
        """Return the kind of the devices, such as "TPU v5 lite"."""

    @property
    def compute_capability(self) -> tuple[int, ...] | None:
        """Return the compute capability of an NVIDIA GPU, such as (9, 0).

        It is (0, 0) for other GPUs, and None elsewhere or if it is not known.
        """

    def __call__(self, name: str, activation: jax.Array) -> jax.Array:
        """Return an activation with the layout of its name."""

    def on_shards(self, function: F, names: tuple[str, ...], results: tuple[str, ...]) -> F:
        """Return a function that runs `function` on each device's shard of arguments and results.

        `names` are of the layouts of the arguments, `results` of the tuple that `function` returns.
        """


_place: contextvars.ContextVar[Place | None] = contextvars.ContextVar("place", default=None)


def constrain(activation: jax.Array, name: str) -> jax.Array:
    """Return the activation with the layout that `placed_by` has for its name.

    Args:
      activation: with the dimensions in the suffix of the name.
      name: "tokens_BSD", "heads_BSE", "hidden_BSM", "hidden_RM" or "map_BHWC".
    """
    place = _place.get()
    if place is None:
        return activation
    return place(name, activation)


def on_shards(function: F, names: tuple[str, ...], results: tuple[str, ...]) -> F:
    """Return `Place.on_shards`; outside of `placed_by` the function itself."""
    place = _place.get()
    if place is None:
        return function
    return place.on_shards(function, names, results)


def is_placed() -> bool:
    """Return whether `placed_by` has set the devices, and with them the layout of arrays."""
    return _place.get() is not None


def platform() -> str:
    """Return the platform of the traced program; outside of `placed_by` that of JAX's devices.

    `dispatch` alone calls this: there a computation has a form for each platform.
    """
    place = _place.get()
    if place is None:
        return jax.default_backend()
    return place.platform


def device_kind() -> str:
    """Return the kind of the devices that `placed_by` has set, such as "TPU v5 lite"; else ""."""
    place = _place.get()
    if place is None:
        return ""
    return place.device_kind


def compute_capability() -> tuple[int, ...] | None:
    """Return the compute capability of the GPUs that `placed_by` has set, or None."""
    place = _place.get()
    if place is None:
        return None
    return place.compute_capability


@contextlib.contextmanager
def placed_by(place: Place) -> Iterator[None]:
    """Trace a step for the devices of `place` (a context or a decorator)."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)
