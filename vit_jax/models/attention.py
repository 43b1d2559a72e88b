"""Multi-head attention (ViT, App. A).

`Linear` is the linear layer of attention and MLP.

Legend: B batch, Q queries, S sequence length, D width, T heads, h head dimension, E = T h; I O
channels of a kernel's input and output, r rank of LoRA's factors.
"""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from vit_jax.config.architecture import Architecture
from vit_jax.kernels import ATTENTION_OUTPUT, Factors, dispatch
from vit_jax.kernels.devices import constrain
from vit_jax.models.norm import build_norm
from vit_jax.models.positions import RelativePositions, RotaryPositions

XAVIER_UNIFORM = nnx.initializers.xavier_uniform()
PROJECTIONS = ("query", "key", "value", "out")
QKV_BIASES: dict[str, tuple[str, ...]] = {
    "all": ("query", "key", "value"),
    "query_value": ("query", "value"),
    "none": (),
}


class Linear(nnx.Linear):
    """A linear layer of a block.

    With factors of LoRA (`models.lora`) it computes x W + scale * (x A) B.
    """

    lora_a: nnx.Param[Array]
    lora_b: nnx.Param[Array]
    lora_scale: float | None = None  # None: the layer has no factors

    def __call__(
        self,
        inputs: Array,
        out_sharding: Any = None,
        output_scale: Array | None = None,
    ) -> Array:
        """Return x W + b, and the branch of the factors, times `output_scale` (O,): (..., O).

        The smaller array is scaled: the output, or kernel and bias. The gradient of the scale is
        then a sum over the kernel, and the backward pass does not read the output.
        """
        if output_scale is not None and not _is_larger(inputs, self.kernel[...]):
            return self(inputs, out_sharding) * output_scale.astype(self.dtype)
        if self.lora_scale is None and output_scale is None:
            return super().__call__(inputs, out_sharding)

        x_I = inputs.astype(self.dtype)
        (product_O,) = multiply_layers(x_I, [self], output_scale)
        if self.bias is None:
            return product_O
        bias_O = self.bias[...]
        if output_scale is not None:
            bias_O = dispatch.repeat_rows(bias_O * output_scale, product_O.shape)
        return product_O + bias_O.astype(self.dtype)


def _is_larger(x_I: Array, kernel_IO: Array) -> bool:
    """Return whether a product has more rows than its kernel.

    Return False for an exported program of any number of images.
    """
    num_rows = math.prod(x_I.shape[:-1])
    return isinstance(num_rows, int) and num_rows >= kernel_IO.shape[0]


def multiply_layers(
    x_I: Array,
    layers: Sequence[Linear],
    output_scale: Array | None = None,
) -> list[Array]:
    """Return the products of one activation with several layers, (..., O), without biases.

    Layers with factors share one product with all A. `output_scale` multiplies the outputs.
    """
    kernels_IO = []
    for layer in layers:
        kernel_IO = layer.kernel[...]
        if output_scale is not None:
            scale_IO = dispatch.repeat_rows(output_scale, kernel_IO.shape)
            kernel_IO = kernel_IO.astype(jnp.float32) * scale_IO
        kernels_IO.append(kernel_IO.astype(x_I.dtype))
    adapted = [layer for layer in layers if layer.lora_scale is not None]
    if not adapted:
        return dispatch.multiply_each(x_I, kernels_IO)

    factors: list[Factors | None] = []
    for layer in layers:
        factors.append(_read_factors(layer, x_I.dtype, output_scale))
    return dispatch.multiply_adapted(x_I, kernels_IO, factors)


def _read_factors(
    layer: Linear,
    dtype: jnp.dtype,
    output_scale: Array | None,
) -> Factors | None:
    """Return A and scale * B of a layer in the compute dtype; None without factors."""
    if layer.lora_scale is None:
        return None
    a_Ir = layer.lora_a[...].astype(dtype)
    scaled_rO = layer.lora_scale * layer.lora_b[...]
    if output_scale is not None:
        scaled_rO = scaled_rO * output_scale
    return a_Ir, scaled_rO.astype(dtype)


class Projections(NamedTuple):
    """Queries, keys and values of all heads, each with h adjacent channels of E.

    Biases are apart, since the kernels of `dispatch.compute_attention` add them on the chip.
    """

    query_BQE: Array  # without bias
    key_BSE: Array  # without bias
    value_BSE: Array  # without bias
    biases_E: Sequence[Array]  # biases of queries, keys and values
    offset_key_QSh: Array | None = None  # keys of relative positions, the same for all heads

    def add_biases(self) -> list[Array]:
        """Return queries, keys and values with their biases, (B, Q or S, E)."""
        projections = (self.query_BQE, self.key_BSE, self.value_BSE)
        return [x + bias_E for x, bias_E in zip(projections, self.biases_E, strict=True)]

    def split_heads(self, num_heads: int) -> list[Array]:
        """Return queries, keys and values with their biases, (B, Q or S, T, h)."""
        split = []
        for x in self.add_biases():
            batch, length, _ = x.shape
            heads = x.reshape(batch, length, num_heads, -1)
            split.append(heads)
        return split


class Attention(nnx.Module):
    """Multi-head attention with separate projections; softmax in float32.

    `rotary` turns queries and keys by the position of their patch; a `norm` precedes the last
    projection. `biases` are the projections that have one.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        form: str = "auto",
        positions: Callable[[], Array] | None = None,
        rotary: Callable[[Array, int, Array | None], Array] | None = None,
        norm: Callable[[Array], Array] | None = None,
        biases: Collection[str] = PROJECTIONS,
    ):
        dense = functools.partial(
            Linear,
            width,
            width,
            kernel_init=XAVIER_UNIFORM,
            dtype=dtype,
            dot_general=dispatch.dot_general,
            rngs=rngs,
        )
        self.query = dense(use_bias="query" in biases)
        self.key = dense(use_bias="key" in biases)
        self.value = dense(use_bias="value" in biases)
        self.out = dense(use_bias="out" in biases)
        self.num_heads = num_heads
        self.dtype = dtype
        self.form = form
        self.positions = positions
        self.rotary = rotary
        self.norm = norm

    @jax.named_scope("attention")
    def __call__(
        self,
        queries_BQD: Array,
        tokens_BSD: Array,
        token_BS: Array | None = None,
        output_scale: Array | None = None,
    ) -> Array:
        """Return (B, Q, D), each query's weighted sum of the tokens, times `output_scale` (D,).

        Rotary positions need `token_BS`, the indices of the tokens, where patches are dropped.
        """
        projections = self._project(queries_BQD, tokens_BSD, token_BS)
        form = self._choose_form(projections)
        output_BQE = attend(projections, self.num_heads, form)
        return self._project_output(output_BQE, output_scale)

    @jax.named_scope("attention")
    def with_weights(
        self,
        queries_BQD: Array,
        tokens_BSD: Array,
        token_BS: Array | None = None,
        output_scale: Array | None = None,
    ) -> tuple[Array, Array]:
        """Return the result of a call (B, Q, D) and its weights (B, T, Q, S) in float32."""
        projections = self._project(queries_BQD, tokens_BSD, token_BS)
        output_BQE, weights_BTQS = attend_with_weights(projections, self.num_heads)
        return self._project_output(output_BQE, output_scale), weights_BTQS

    def _project(
        self,
        queries_BQD: Array,
        tokens_BSD: Array,
        token_BS: Array | None = None,
    ) -> Projections:
        """Return queries, keys and values, turned by rotary positions if there are any."""
        query_BQE, key_BSE, value_BSE = self._multiply_kernels(queries_BQD, tokens_BSD)
        query_BQE = name_heads(query_BQE, "query")
        query_bias_E = self._read_bias(self.query)
        key_BSE = name_heads(key_BSE, "key")
        key_bias_E = self._read_bias(self.key)
        value_BSE = name_heads(value_BSE, "value")
        value_bias_E = self._read_bias(self.value)

        if self.rotary is not None:  # it turns queries and keys with their biases
            query_BQE = self.rotary(query_BQE + query_bias_E, self.num_heads, token_BS)
            query_bias_E = jnp.zeros_like(query_bias_E)
            key_BSE = self.rotary(key_BSE + key_bias_E, self.num_heads, token_BS)
            key_bias_E = jnp.zeros_like(key_bias_E)

        biases_E = (query_bias_E, key_bias_E, value_bias_E)
        offset_key_QSh = None
        if self.positions is not None:
            offset_key_QSh = self.positions()
        return Projections(query_BQE, key_BSE, value_BSE, biases_E, offset_key_QSh)

    def _multiply_kernels(
        self,
        queries_BQD: Array,
        tokens_BSD: Array,
    ) -> Sequence[Array]:
        """Return queries, keys and values without biases."""
        layers = [self.query, self.key, self.value]
        if queries_BQD is tokens_BSD:
            return multiply_layers(tokens_BSD.astype(self.dtype), layers)

        products: list[Array] = []
        inputs = (queries_BQD, tokens_BSD, tokens_BSD)
        for x, layer in zip(inputs, layers, strict=True):
            products += multiply_layers(x.astype(self.dtype), [layer])
        return products

    def _read_bias(self, layer: Linear) -> Array:
        """Return the bias of a projection, zeros if it has none."""
        if layer.bias is None:
            width = layer.kernel.shape[-1]
            bias_E = jnp.zeros(width)
        else:
            bias_E = layer.bias[...]
        return bias_E.astype(self.dtype)

    def _choose_form(self, projections: Projections) -> str:
        """Return the form of the attention; kernels need as many queries as tokens."""
        tokens = projections.key_BSE
        is_self_attention = projections.query_BQE.shape == tokens.shape
        if not is_self_attention or projections.offset_key_QSh is not None:
            return "xla"

        _, length, width = tokens.shape
        return dispatch.choose_attention(
            self.form,
            length=length,
            num_heads=self.num_heads,
            head_dim=width // self.num_heads,
            dtype=tokens.dtype,
        )

    def _project_output(self, output_BQE: Array, output_scale: Array | None) -> Array:
        """Return the attention output in the width of the tokens, (B, Q, D)."""
        if self.norm is not None:
            output_BQE = self.norm(output_BQE)
        return self.out(output_BQE, output_scale=output_scale)


def name_heads(product_BSE: Array, name: str) -> Array:
    """Constrain the sharding of a projection, and name it for rematerialisation."""
    product_BSE = constrain(product_BSE, "heads_BSE")
    return checkpoint_name(product_BSE, name)


def attend(
    projections: Projections,
    num_heads: int,
    form: str,
) -> Array:
    """Return the attention output (B, Q, E) in a form of `dispatch.choose_attention`."""
    if form == "xla":
        output_BQE, _ = attend_with_weights(projections, num_heads)
        return output_BQE
    return dispatch.compute_attention(
        form,
        projections.query_BQE,
        projections.key_BSE,
        projections.value_BSE,
        projections.biases_E,
        num_heads,
    )


def attend_with_weights(
    projections: Projections,
    num_heads: int,
) -> tuple[Array, Array]:
    """Return softmax(q k^T / sqrt(h)) v of every head (ViT, eq. 5 to 7), and the softmax.

    Their shapes are (B, Q, E) and (B, T, Q, S).
    """
    query_BQTh, key_BSTh, value_BSTh = projections.split_heads(num_heads)
    head_dim = query_BQTh.shape[-1]
    scale = jnp.asarray(head_dim**-0.5, query_BQTh.dtype)
    query_BQTh = query_BQTh * scale

    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    logits_BTQS = product("BQTh,BSTh->BTQS", query_BQTh, key_BSTh)
    if projections.offset_key_QSh is not None:
        offset_key_QSh = projections.offset_key_QSh.astype(query_BQTh.dtype)
        logits_BTQS += product("BQTh,QSh->BTQS", query_BQTh, offset_key_QSh)

    weights_BTQS = jax.nn.softmax(logits_BTQS)
    rounded_BTQS = weights_BTQS.astype(value_BSTh.dtype)
    output_BQTh = jnp.einsum("BTQS,BSTh->BQTh", rounded_BTQS, value_BSTh)
    output_BQE = output_BQTh.reshape(projections.query_BQE.shape)
    output_BQE = checkpoint_name(output_BQE, ATTENTION_OUTPUT)
    return output_BQE, weights_BTQS


def build_attention(
    a: Architecture,
    *,
    rngs: nnx.Rngs,
    attention_class: Callable[..., Attention] = Attention,
    num_patches: int | None = None,
) -> Attention:
    """Return the attention of a block.

    Args:
      a: network.
      rngs: random keys.
      attention_class: class of the attention.
      num_patches: number of patches that attend to each other; None: all.
    """
    biases = QKV_BIASES[a.qkv_bias]
    if a.linear_bias:
        biases = (*biases, "out")

    positions = None
    if a.position_embedding == "relative":
        positions = RelativePositions(a, num_patches or math.prod(a.grid), rngs=rngs)
    rotary = None
    if a.rope is not None:
        rotary = RotaryPositions(a)
    norm = None
    if a.attention_norm:
        norm = build_norm(a)

    return attention_class(
        a.width,
        a.num_heads,
        dtype=jnp.dtype(a.compute_dtype),
        rngs=rngs,
        form=a.block_attention,
        positions=positions,
        rotary=rotary,
        norm=norm,
        biases=biases,
    )


def find_attention_form(a: Architecture) -> str:
    """Return the form that attention has in standard blocks on the devices of `trace_for`.

    Raises:
      ValueError: cuDNN does not compute this attention.
    """
    return dispatch.choose_attention(
        a.block_attention,
        length=a.attention_lengths[0],  # the second length of an axial block has the same form
        num_heads=a.num_heads,
        head_dim=a.width // a.num_heads,
        dtype=jnp.dtype(a.compute_dtype),
    )
