"""Pre-norm blocks of attention and MLP: the ordinary one, and the axial one, which is two along rows and columns.

Legend: B batch, S sequence length, R = B S, D width, T heads, M MLP dimension, h w rows and columns of patches.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from vit_jax.activations import named, platform
from vit_jax.config import Architecture
from vit_jax.config.schema import AttentionForm
from vit_jax.models.attention import XAVIER_UNIFORM, Attention, LineAttention, choose_form
from vit_jax.models.dropout import drop_examples, dropout
from vit_jax.models.positions import RelativePositions
from vit_jax.models.product import dot_general

NEARLY_ZERO = nnx.initializers.normal(stddev=1e-6)


def as_rows(x_BSD: jax.Array) -> jax.Array:
    """Return (B S, D) on GPUs, and elsewhere the array as it is: the form of tokens within a block.

    Gradients of norms and biases are sums over B and S. XLA for GPUs computes them from transposed copies in float32,
    but not if it is one dimension. XLA for TPUs is faster with two dimensions.
    """
    return x_BSD.reshape(-1, x_BSD.shape[-1]) if platform() == "gpu" else x_BSD


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


class LayerNorm(nnx.Module):
    """Normalises over D.

    Flax's own layer mixes bfloat16 and float32 in a way that strict dtype promotion refuses.
    """

    def __init__(self, a: Architecture):
        self.scale = nnx.Param(jnp.ones((a.width,)))
        self.bias = nnx.Param(jnp.zeros((a.width,)))
        self.epsilon, self.dtype = a.layer_norm_epsilon, jnp.dtype(a.compute_dtype)

    @jax.named_scope("norm")
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns an array of the shape of `x`, (..., D), in the compute dtype."""
        x = x.astype(jnp.float32)
        means = x.mean(-1, keepdims=True), jnp.square(x).mean(-1, keepdims=True)  # in one pass over x
        mean, mean_of_squares = (checkpoint_name(each, "statistics") for each in means)
        variance = jnp.maximum(mean_of_squares - jnp.square(mean), 0.0)
        scale = jax.lax.rsqrt(variance + self.epsilon) * self.scale[...]
        return ((x - mean) * scale + self.bias[...]).astype(self.dtype)


class Mlp(nnx.Module):
    """Two dense layers around a GELU, dropout after each (ViT, App. B.1).

    The form of the GELU is "tanh", an approximation (released JAX code), or "exact" (PyTorch ports).
    """

    def __init__(self, width: int, mlp_dim: int, *, form: str, dtype: jnp.dtype, rngs: nnx.Rngs):
        dense = functools.partial(
            nnx.Linear,
            kernel_init=XAVIER_UNIFORM,
            bias_init=NEARLY_ZERO,
            dtype=dtype,
            dot_general=dot_general,
            rngs=rngs,
        )
        self.expand, self.contract = dense(width, mlp_dim), dense(mlp_dim, width)
        self.form = form

    @jax.named_scope("mlp")
    def __call__(self, x: jax.Array, *, fraction: float = 0.0, key: jax.Array | None = None) -> jax.Array:
        """Return an array of the shape of `x`, (B, S, D) or (B S, D)."""
        name = "hidden_BSM" if x.ndim == 3 else "hidden_RM"
        hidden = checkpoint_name(named(self.expand(x), name), "hidden")
        hidden = gelu(hidden, self.form == "tanh")
        return dropout(self.contract(dropout(hidden, fraction, key, site=0)), fraction, key, site=1)


def _build_attention(a: Architecture, length: int | None, rngs: nnx.Rngs) -> Attention:
    options: dict[str, Any] = {"dtype": jnp.dtype(a.compute_dtype), "rngs": rngs, "form": _asked_form(a)}
    if a.position_embedding == "relative":
        options["positions"] = RelativePositions(a, length or math.prod(a.grid), rngs=rngs)
    if length is None:
        return Attention(a.width, a.num_heads, **options)
    return LineAttention(a.width, a.num_heads, length=length, **options)


def _asked_form(a: Architecture) -> AttentionForm:
    """Return the form of axial attention, too: kernels are for longer sequences, so that "auto" is "xla" there."""
    return "xla" if a.attention == "auto" and a.block == "axial" else a.attention


def attention_form(a: Architecture) -> str:
    """Return the form of self-attention in standard blocks, on the devices of `placed_by`.

    Raises:
      ValueError: as `choose_form`.
    """
    if a.position_embedding == "relative":
        return "xla"
    head_dim, dtype = a.width // a.num_heads, jnp.dtype(a.compute_dtype)
    (form,) = {
        choose_form(_asked_form(a), length=length, num_heads=a.num_heads, head_dim=head_dim, dtype=dtype)
        for length in a.attention_lengths
    }
    return form


class Block(nnx.Module):
    """One layer of the encoder: x + attention(norm(x)), then x + mlp(norm(x)).

    With a `length`, attention is within lines of so many tokens.
    """

    def __init__(self, a: Architecture, *, rngs: nnx.Rngs, length: int | None = None):
        dtype = jnp.dtype(a.compute_dtype)
        self.attention_norm = LayerNorm(a)
        self.attention = _build_attention(a, length, rngs)
        self.mlp_norm = LayerNorm(a)
        self.mlp = Mlp(a.width, a.mlp_dim, form=a.gelu, dtype=dtype, rngs=rngs)
        self.dropout_fraction, self.drops_examples = a.dropout_fraction, a.stochastic_depth_fraction > 0

    def __call__(self, x_BSD: jax.Array, drop_fraction: jax.Array, key: jax.Array | None) -> jax.Array:
        """Args: drop_fraction: scalar, probability of leaving out each residual branch of an example."""
        norm_BSD = self._attention_norm(x_BSD)
        return self._add(x_BSD, self.attention(norm_BSD, norm_BSD), drop_fraction, key)

    def with_attention(
        self, x_BSD: jax.Array, drop_fraction: jax.Array, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """As a call, and returns the attention weights (B, T, S, S) beside its output."""
        norm_BSD = self._attention_norm(x_BSD)
        branch, weights_BTSS = self.attention.with_weights(norm_BSD, norm_BSD)
        return self._add(x_BSD, branch, drop_fraction, key), weights_BTSS

    def _attention_norm(self, x_BSD: jax.Array) -> jax.Array:
        return self.attention_norm(as_rows(x_BSD)).reshape(x_BSD.shape)

    def _add(
        self, x_BSD: jax.Array, branch_BSD: jax.Array, drop_fraction: jax.Array, key: jax.Array | None
    ) -> jax.Array:
        """Add both residual branches: that of the attention as computed, that of the MLP."""
        shape = x_BSD.shape

        def drop(branch: jax.Array, site: int) -> jax.Array:
            if key is None or not self.drops_examples:
                return branch
            return drop_examples(branch.reshape(shape), drop_fraction, key, site).reshape(branch.shape)

        x, branch = as_rows(x_BSD), dropout(as_rows(branch_BSD), self.dropout_fraction, key, site=2)
        x = checkpoint_name(x + drop(branch, site=3), "middle")
        branch = self.mlp(self.mlp_norm(x), fraction=self.dropout_fraction, key=key)
        return (x + drop(branch, site=4)).reshape(shape)


class AxialBlock(nnx.Module):
    """Two blocks in the place of one: the first has attention along rows, the second along columns (ViT, App. D.6)."""

    def __init__(self, a: Architecture, *, rngs: nnx.Rngs):
        rows, columns = self.grid = a.grid
        self.rows = Block(a, rngs=rngs, length=columns)
        self.columns = Block(a, rngs=rngs, length=rows)

    def __call__(self, x_BSD: jax.Array, drop_fraction: jax.Array, key: jax.Array | None) -> jax.Array:
        """As of `Block`; the tokens are patches in raster order."""
        of_rows, of_columns = (None, None) if key is None else jax.random.split(key)
        x_BSD = self.rows(x_BSD, drop_fraction, of_rows)
        return _turned(self.columns(_turned(x_BSD, self.grid), drop_fraction, of_columns), self.grid[::-1])

    def with_attention(
        self, x_BSD: jax.Array, drop_fraction: jax.Array, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """As a call, and returns the weights (2, B, T, S, S) of both attentions, 0 outside of rows and of columns."""
        of_rows, of_columns = (None, None) if key is None else jax.random.split(key)
        x_BSD, rows_BTSS = self.rows.with_attention(x_BSD, drop_fraction, of_rows)
        x_BSD, columns_BTSS = self.columns.with_attention(_turned(x_BSD, self.grid), drop_fraction, of_columns)
        places = np.arange(x_BSD.shape[1]).reshape(self.grid[::-1]).T.ravel()  # among the columns, in raster order
        both = jnp.stack([rows_BTSS, columns_BTSS[:, :, places[:, None], places]])
        return _turned(x_BSD, self.grid[::-1]), both


def _turned(x_BSD: jax.Array, grid: tuple[int, int]) -> jax.Array:
    """The tokens of a grid in raster order, one column after the other."""
    return x_BSD.reshape(x_BSD.shape[0], *grid, -1).swapaxes(1, 2).reshape(x_BSD.shape)
