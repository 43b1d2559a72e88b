"""The devices that a program is traced for, and the layout of large activations on them.

A model names an activation (`constrain(tokens, "tokens_BSD")`) and knows no mesh. `trace_for` gives
the names a layout while a step for several devices is traced. Without it a name changes nothing.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import jax
from jax import Array

F = TypeVar("F", bound=Callable[..., tuple])


class TargetDevices(Protocol):
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

    @property
    def num_devices(self) -> int:
        """Return the number of devices, over which the batch may be spread."""

    def __call__(
        self,
        name: str,
        activation: Array,
    ) -> Array:
        """Return an activation with the sharding constraint of its name."""

    def map_shards(
        self,
        function: F,
        names: tuple[str, ...],
        results: tuple[str, ...],
    ) -> F:
        """Return a function that runs `function` on each device's shard of arguments and results.

        Args:
          function: called with the shards of its arguments; returns a tuple of shards.
          names: names of the layouts of the arguments.
          results: names of the layouts of the results.
        """


_target_devices: contextvars.ContextVar[TargetDevices | None]
_target_devices = contextvars.ContextVar("target_devices", default=None)


@contextlib.contextmanager
def trace_for(devices: TargetDevices) -> Iterator[None]:
    """Trace a step for these devices (a context or a decorator)."""
    token = _target_devices.set(devices)
    try:
        yield
    finally:
        _target_devices.reset(token)


def has_target_devices() -> bool:
    """Return whether `trace_for` has set the devices, and with them the layout of arrays."""
    return _target_devices.get() is not None


def constrain(activation: Array, name: str) -> Array:
    """Return the activation with the layout of its name on the devices of `trace_for`.

    Args:
      activation: with the dimensions in the suffix of the name.
      name: "tokens_BSD", "heads_BSE", "hidden_BSM", "hidden_RM" or "map_BHWC".
    """
    target = _target_devices.get()
    if target is None:
        return activation
    return target(name, activation)


def map_shards(
    function: F,
    names: tuple[str, ...],
    results: tuple[str, ...],
) -> F:
    """Return `TargetDevices.map_shards`; outside of `trace_for` the function itself."""
    target = _target_devices.get()
    if target is None:
        return function
    return target.map_shards(function, names, results)


def platform() -> str:
    """Return the platform of the traced program; outside of `trace_for` the default of JAX.

    `dispatch` alone calls this: there a computation has a form for each platform.
    """
    target = _target_devices.get()
    if target is None:
        return jax.default_backend()
    return target.platform


def device_kind() -> str:
    """Return the kind of the devices of `trace_for`, such as "TPU v5 lite"; else ""."""
    target = _target_devices.get()
    if target is None:
        return ""
    return target.device_kind


def compute_capability() -> tuple[int, ...] | None:
    """Return the compute capability of the GPUs of `trace_for`, or None."""
    target = _target_devices.get()
    if target is None:
        return None
    return target.compute_capability


def count_devices() -> int:
    """Return the number of devices of `trace_for`; 1 outside of it."""
    target = _target_devices.get()
    if target is None:
        return 1
    return target.num_devices
