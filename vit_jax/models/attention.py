"""Multi-head attention (ViT, App. A): of all tokens, or of the tokens of a row or column.

Legend: B batch, Q queries, S sequence length, D width, T heads, h head dimension, E = T h; l lines
of s tokens.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from vit_jax.kernels import ATTENTION_OUTPUT, dispatch
from vit_jax.kernels.devices import constrain

XAVIER_UNIFORM = nnx.initializers.xavier_uniform()
PROJECTIONS = ("query", "key", "value", "out")


class Projections(NamedTuple):
    """Queries, keys and values of all heads, each with h adjacent channels of E.

    Biases are apart, since the kernels of `dispatch.compute_attention` add them on the chip.
    """

    query_BQE: Array  # without bias
    key_BSE: Array  # without bias
    value_BSE: Array  # without bias
    bias_3E: Array  # biases of queries, keys and values
    offset_key_QSh: Array | None = None  # keys of relative positions, the same for all heads

    def add_biases(self) -> list[Array]:
        """Return queries, keys and values with their biases, (B, Q or S, E)."""
        projections = (self.query_BQE, self.key_BSE, self.value_BSE)
        biased = []
        for x, bias_E in zip(projections, self.bias_3E, strict=True):
            biased.append(x + bias_E)
        return biased

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
        rotary: Callable[[Array, int], Array] | None = None,
        norm: Callable[[Array], Array] | None = None,
        biases: Collection[str] = PROJECTIONS,
    ):
        dense = functools.partial(
            nnx.Linear,
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
    ) -> Array:
        """Return (B, Q, D), each query's weighted sum of the tokens."""
        projections = self._project(queries_BQD, tokens_BSD)
        form = self._choose_form(projections)
        output_BQE = attend(projections, self.num_heads, form)
        return self._project_output(output_BQE)

    @jax.named_scope("attention")
    def with_weights(
        self,
        queries_BQD: Array,
        tokens_BSD: Array,
    ) -> tuple[Array, Array]:
        """Return the attention output (B, Q, D) and its weights (B, T, Q, S) in float32."""
        projections = self._project(queries_BQD, tokens_BSD)
        output_BQE, weights_BTQS = attend_with_weights(projections, self.num_heads)
        return self._project_output(output_BQE), weights_BTQS

    def _project(
        self,
        queries_BQD: Array,
        tokens_BSD: Array,
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
            query_BQE = self.rotary(query_BQE + query_bias_E, self.num_heads)
            query_bias_E = jnp.zeros_like(query_bias_E)
            key_BSE = self.rotary(key_BSE + key_bias_E, self.num_heads)
            key_bias_E = jnp.zeros_like(key_bias_E)

        bias_3E = jnp.stack([query_bias_E, key_bias_E, value_bias_E])
        offset_key_QSh = None
        if self.positions is not None:
            offset_key_QSh = self.positions()
        return Projections(query_BQE, key_BSE, value_BSE, bias_3E, offset_key_QSh)

    def _multiply_kernels(
        self,
        queries_BQD: Array,
        tokens_BSD: Array,
    ) -> Sequence[Array]:
        """Return queries, keys and values without biases."""
        kernels_DE = []
        for layer in (self.query, self.key, self.value):
            kernel_DE = layer.kernel[...]
            kernels_DE.append(kernel_DE.astype(self.dtype))

        if queries_BQD is tokens_BSD:
            tokens_BSD = tokens_BSD.astype(self.dtype)
            return dispatch.multiply_each(tokens_BSD, kernels_DE)

        products = []
        inputs = (queries_BQD, tokens_BSD, tokens_BSD)
        for x, kernel_DE in zip(inputs, kernels_DE, strict=True):
            x = x.astype(self.dtype)
            products.append(dispatch.multiply(x, kernel_DE))
        return products

    def _read_bias(self, layer: nnx.Linear) -> Array:
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

    def _project_output(self, output_BQE: Array) -> Array:
        """Return the attention output in the width of the tokens, (B, Q, D)."""
        if self.norm is not None:
            output_BQE = self.norm(output_BQE)
        return self.out(output_BQE)


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
        projections.bias_3E,
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


class LineAttention(Attention):
    """Attention of each token to the `length` tokens of its line: its row or its column."""

    def __init__(self, *arguments: Any, length: int, **options: Any):
        super().__init__(*arguments, **options)
        self.length = length

    def __call__(
        self,
        queries_BSD: Array,
        tokens_BSD: Array,
    ) -> Array:
        """Return (B, S, D), as `Attention` with queries of the same length."""
        line_queries = self._split_lines(queries_BSD)
        line_tokens = self._split_lines(tokens_BSD)
        output = super().__call__(line_queries, line_tokens)
        return output.reshape(queries_BSD.shape)

    def with_weights(
        self,
        queries_BSD: Array,
        tokens_BSD: Array,
    ) -> tuple[Array, Array]:
        """Return output and weights as `Attention`; weights (B, T, S, S) are 0 outside of lines."""
        line_queries = self._split_lines(queries_BSD)
        line_tokens = self._split_lines(tokens_BSD)
        output, weights = super().with_weights(line_queries, line_tokens)

        batch, length, _ = tokens_BSD.shape
        num_lines = length // self.length
        shape_BlTss = (
            batch,
            num_lines,
            self.num_heads,
            self.length,
            self.length,
        )
        weights_BlTss = weights.reshape(shape_BlTss)
        is_same_line = jnp.eye(num_lines)
        weights_BTlsls = jnp.einsum("BlTqs,lm->BTlqms", weights_BlTss, is_same_line)
        weights_BTSS = weights_BTlsls.reshape(batch, -1, length, length)
        return output.reshape(queries_BSD.shape), weights_BTSS

    def _split_lines(self, x_BSD: Array) -> Array:
        """Return the lines of all images one after the other, (B l, s, D)."""
        width = x_BSD.shape[-1]
        return x_BSD.reshape(-1, self.length, width)
