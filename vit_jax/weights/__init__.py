"""Weights of any format: read, recognised, fitted to a network, and written.

States of runs are in `checkpoint`.
"""

from typing import TYPE_CHECKING

from vit_jax.imports.public_names import import_on_use
from vit_jax.weights.overrides import OPTIONS

if TYPE_CHECKING:
    from vit_jax.weights.load import Weights, load_weights

__all__ = ["OPTIONS", "Weights", "load_weights"]

# The command line reads the options without JAX.
__getattr__ = import_on_use(__name__, {"load": ("Weights", "load_weights")})
