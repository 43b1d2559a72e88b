"""The MLP of a block: two dense layers around a GELU, or gated (SwiGLU; Shazeer, 2020).

Legend: B batch, S sequence length, R = B S, D width, M MLP dimension.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from vit_jax.activations import named, platform
from vit_jax.config import Architecture
from vit_jax.models.attention import XAVIER_UNIFORM
from vit_jax.models.dropout import dropout
from vit_jax.models.norm import build_norm
from vit_jax.models.product import dot_general

NEARLY_ZERO = nnx.initializers.normal(stddev=1e-6)


def gelu(x: jax.Array, approximate: bool) -> jax.Array:
    """Return the GELU. On GPUs its gradient is computed from the input alone.

    JAX keeps the derivative, which XLA for GPUs writes and reads beside the input. XLA for TPUs computes it again.
    """
    return (_gelu_of_input if platform() == "gpu" else jax.nn.gelu)(x, approximate)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gelu_of_input(x: jax.Array, approximate: bool) -> jax.Array:
    return jax.nn.gelu(x, approximate)


def _save_input(x: jax.Array, approximate: bool) -> tuple[jax.Array, jax.Array]:
    return jax.nn.gelu(x, approximate), x


def _differentiate(approximate: bool, x: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    x = jax.lax.optimization_barrier(x)  # or XLA computes values and derivatives at once
    (gradient,) = jax.vjp(lambda x: jax.nn.gelu(x, approximate), x)[1](gradient)
    return (gradient,)


_gelu_of_input.defvjp(_save_input, _differentiate)


GELUS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "tanh": functools.partial(gelu, approximate=True),  # released JAX code
    "exact": functools.partial(gelu, approximate=False),  # PyTorch ports
    "quick": lambda x: x * jax.nn.sigmoid(1.702 * x),  # CLIP
}


class Mlp(nnx.Module):
    """Dense layers to M hidden units and back, dropout after each (ViT, App. B.1).

    "gelu" is GELU(expand(x)); "swiglu" is silu(gate(x)) * expand(x), "swiglu_norm" with a norm after it (EVA-02).
    """

    def __init__(self, a: Architecture, *, rngs: nnx.Rngs, form: str | None = None):
        dense = functools.partial(
            nnx.Linear,
            kernel_init=XAVIER_UNIFORM,
            bias_init=NEARLY_ZERO,
            use_bias=a.linear_bias,
            dtype=jnp.dtype(a.compute_dtype),
            dot_general=dot_general,
            rngs=rngs,
        )
        form = form or a.mlp
        self.expand, self.contract = dense(a.width, a.mlp_dim), dense(a.mlp_dim, a.width)
        self.gate = None if form == "gelu" else dense(a.width, a.mlp_dim)
        self.norm = build_norm(a, a.mlp_dim) if form == "swiglu_norm" else None
        self.gelu = a.gelu

    @jax.named_scope("mlp")
    def __call__(self, x: jax.Array, *, fraction: float = 0.0, key: jax.Array | None = None) -> jax.Array:
        """Return an array of the shape of `x`, (B, S, D) or (B S, D)."""
        hidden = self._hidden(self.expand, x)
        hidden = GELUS[self.gelu](hidden) if self.gate is None else jax.nn.silu(self._hidden(self.gate, x)) * hidden
        if self.norm is not None:
            hidden = self.norm(hidden)
        return dropout(self.contract(dropout(hidden, fraction, key, site=0)), fraction, key, site=1)

    def _hidden(self, layer: nnx.Linear, x: jax.Array) -> jax.Array:
        return checkpoint_name(named(layer(x), "hidden_BSM" if x.ndim == 3 else "hidden_RM"), "hidden")
