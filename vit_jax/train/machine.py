"""Speed and compilation cache of the machine that a run is on."""

import os
import pathlib
import time
from collections.abc import Callable
from typing import TypeVar

import jax

from vit_jax.cost.chips import find_chip

T = TypeVar("T")


def timed(action: Callable[[], T]) -> tuple[T, float]:
    """What an action returns, and the seconds it took."""
    began = time.perf_counter()
    return action(), time.perf_counter() - began


def peak_flops() -> float | None:
    """FLOP/s of all devices together; None where the chip is not known."""
    chip = find_chip(jax.devices()[0].device_kind)
    return None if chip is None else chip.peak_bf16_flops * jax.device_count()


def use_compilation_cache(enabled: bool) -> None:
    """Compiled programs outlive the process, unless the user has set up a cache of their own."""
    if enabled and not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(root).expanduser() / "vit_jax" / "xla"))
