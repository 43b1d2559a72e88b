"""Names for the few activations whose layout decides memory and communication, and the devices that a step runs on.

A model names an activation (`named(tokens, "tokens_BSD")`) and knows no mesh; `placed_by` gives the names a layout
while a step for several devices is traced. Without it a name changes nothing.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import jax

F = TypeVar("F", bound=Callable[..., tuple])


class Place(Protocol):
    """The devices of a step, and what lies where on them."""

    @property
    def platform(self) -> str:
        """The platform of the devices: "cpu", "gpu" or "tpu"."""

    @property
    def device_kind(self) -> str:
        """The kind of the devices, such as "TPU v5 lite"."""

    @property
    def compute_capability(self) -> tuple[int, ...] | None:
        """Compute capability of an NVIDIA GPU, such as (9, 0); (0, 0) for other GPUs; None elsewhere or if unknown."""

    def __call__(self, name: str, activation: jax.Array) -> jax.Array:
        """The activation, laid out as its name says."""

    def on_shards(self, function: F, names: tuple[str, ...], results: tuple[str, ...]) -> F:
        """Return `function`, which returns a tuple, as run on each device's shard of its arguments and results."""


_place: contextvars.ContextVar[Place | None] = contextvars.ContextVar("place", default=None)


def named(activation: jax.Array, name: str) -> jax.Array:
    """The activation, laid out as `placed_by` has it.

    Args:
      activation: with the dims at the end of the name.
      name: "tokens_BSD", "heads_BSE", "hidden_BSM", "hidden_RM" or "map_BHWC".
    """
    place = _place.get()
    return activation if place is None else place(name, activation)


def on_shards(function: F, names: tuple[str, ...], results: tuple[str, ...]) -> F:
    """Return `function` as run on each device's shard, see `Place`; outside of `placed_by` on complete arrays."""
    place = _place.get()
    return function if place is None else place.on_shards(function, names, results)


def is_placed() -> bool:
    """Return whether `placed_by` has set the devices; else nothing is known of how arrays are spread over them."""
    return _place.get() is not None


def platform() -> str:
    """Return the platform that the program is traced for; outside of `placed_by` that of JAX's devices."""
    place = _place.get()
    return jax.default_backend() if place is None else place.platform


def device_kind() -> str:
    """Return the kind of the devices that `placed_by` has set, such as "TPU v5 lite"; else ""."""
    place = _place.get()
    return "" if place is None else place.device_kind


def compute_capability() -> tuple[int, ...] | None:
    """Return that of the NVIDIA GPUs which `placed_by` has set, or None."""
    place = _place.get()
    return None if place is None else place.compute_capability


@contextlib.contextmanager
def placed_by(place: Place) -> Iterator[None]:
    """Context, or decorator, of a step while it is traced: `place` gives every named activation its layout."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)
