"""Initial values from a truncated normal: of every kernel, token and position.

Sources: DeiT III (2204.07118) and its JAX reproduction, with a standard deviation of 0.02.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from vit_jax import pytree
from vit_jax.config.architecture import Architecture

STDDEV = 0.02
_LIMIT = 2.0  # in standard deviations of the normal
_STDDEV_WITHIN_LIMIT = 0.87962566103423978  # for a normal of deviation 1, truncated at the limit
_TOKENS = ("class_token", "register_tokens", "pooling/probe")
M = TypeVar("M", bound=nnx.Module)


def redraw_truncated_normal(model: M, a: Architecture, key: Array) -> M:
    """Return the network with new kernels, tokens and learned positions, and biases of zero.

    Positions have `a.position_stddev`, the last layer keeps its bias. A ResNet before the patches,
    norms and LayerScale stay as they are.
    """
    leaves = pytree.name_leaves(model)
    names = sorted(leaves)

    def redraw(name: str, leaf: Array) -> Array:
        kind = name.rpartition("/")[2]
        if name.startswith("stem/") or name == "head/linear/bias":
            return leaf
        if kind == "bias":
            return jnp.zeros_like(leaf)
        if kind == "kernel" or name in _TOKENS:
            stddev = STDDEV
        elif kind.endswith(("table", "class_row")):
            stddev = a.position_stddev
        else:
            return leaf
        leaf_key = jax.random.fold_in(key, names.index(name))
        return sample_truncated_normal(leaf_key, leaf.shape, stddev)

    return pytree.map_with_names(redraw, model)


def sample_truncated_normal(key: Array, shape: tuple[int, ...], stddev: float) -> Array:
    """Return float32 values of a normal truncated at two deviations, with this deviation."""
    values = jax.random.truncated_normal(key, -_LIMIT, _LIMIT, shape)
    return values * (stddev / _STDDEV_WITHIN_LIMIT)
