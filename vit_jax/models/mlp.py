"""The MLP of a block: two dense layers around a GELU, or gated (SwiGLU; Shazeer, 2020).

Legend: B batch, S sequence length, R = B S, D width, M MLP dimension.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from vit_jax.config import Architecture
from vit_jax.kernels.devices import named, platform
from vit_jax.kernels.products import dot_general
from vit_jax.models.attention import XAVIER_UNIFORM
from vit_jax.models.dropout import dropout
from vit_jax.models.norm import build_norm

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

    Without a gate the hidden units are GELU(expand(x)), in the form "tanh" (released JAX code), "exact" (PyTorch ports)
    or "quick" (CLIP); with one they are silu(gate(x)) * expand(x). A `norm` follows them.
    """

    def __init__(
        self,
        width: int,
        mlp_dim: int,
        *,
        form: str,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        is_gated: bool = False,
        norm: Callable[[jax.Array], jax.Array] | None = None,
        use_bias: bool = True,
    ):
        dense = functools.partial(
            nnx.Linear,
            kernel_init=XAVIER_UNIFORM,
            bias_init=NEARLY_ZERO,
            use_bias=use_bias,
            dtype=dtype,
            dot_general=dot_general,
            rngs=rngs,
        )
        self.expand = dense(width, mlp_dim)
        self.contract = dense(mlp_dim, width)
        self.gate = dense(width, mlp_dim) if is_gated else None
        self.norm = norm
        self.form = form

    @jax.named_scope("mlp")
    def __call__(
        self, x: jax.Array, *, fraction: float = 0.0, key: jax.Array | None = None
    ) -> jax.Array:
        """Return an array of the shape of `x`, (B, S, D) or (B S, D)."""
        hidden = self._hidden(self.expand, x)
        hidden = (
            GELUS[self.form](hidden)
            if self.gate is None
            else jax.nn.silu(self._hidden(self.gate, x)) * hidden
        )
        if self.norm is not None:
            hidden = self.norm(hidden)
        return dropout(self.contract(dropout(hidden, fraction, key, site=0)), fraction, key, site=1)

    def _hidden(self, layer: nnx.Linear, x: jax.Array) -> jax.Array:
        return checkpoint_name(
            named(layer(x), "hidden_BSM" if x.ndim == 3 else "hidden_RM"), "hidden"
        )


def build_mlp(a: Architecture, *, rngs: nnx.Rngs) -> Mlp:
    """Return the MLP of a block."""
    return Mlp(
        a.width,
        a.mlp_dim,
        form=a.gelu,
        dtype=jnp.dtype(a.compute_dtype),
        rngs=rngs,
        is_gated=a.mlp != "gelu",
        norm=build_norm(a, a.mlp_dim) if a.mlp == "swiglu_norm" else None,
        use_bias=a.linear_bias,
    )
