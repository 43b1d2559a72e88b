"""Weights of any format: read, recognised, fitted to a network, and written.

States of runs are in `checkpoint`.
"""

from typing import TYPE_CHECKING, Any

from vit_jax.weights.overrides import OPTIONS

if TYPE_CHECKING:
    from vit_jax.weights.load import Weights, load_weights

__all__ = ["OPTIONS", "Weights", "load_weights"]


def __getattr__(name: str) -> Any:
    """Import on first use, so that the command line reads its options without JAX."""
    if name not in ("Weights", "load_weights"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vit_jax.weights import load

    return getattr(load, name)
