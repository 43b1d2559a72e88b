"""Multi-head attention, and the forms in which its core is computed: by XLA, a kernel for TPUs, or cuDNN.

Legend: B batch, Q queries, S sequence length, D width, T heads, h head dimension, E = T h.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from vit_jax.config.network_options import AttentionForm
from vit_jax.kernels import attention_cudnn, attention_pallas
from vit_jax.kernels.devices import is_placed, named, platform
from vit_jax.kernels.products import dot_general, multiply, multiply_each
from vit_jax.models.positions import RelativePositions, RotaryPositions

XAVIER_UNIFORM = nnx.initializers.xavier_uniform()
PROJECTIONS = ("query", "key", "value", "out")


class Projections(NamedTuple):
    """The operands of an attention's core; each head has h adjacent channels of E."""

    query_BQE: jax.Array  # without bias, as key and value
    key_BSE: jax.Array
    value_BSE: jax.Array
    bias_3E: jax.Array  # of queries, keys and values
    offset_key_QSh: jax.Array | None = None  # of relative positions, the same for all heads

    def biased(self) -> list[jax.Array]:
        """Queries, keys and values with their biases, (B, Q or S, E)."""
        return [x + bias_E for x, bias_E in zip(self[:3], self.bias_3E, strict=True)]

    def heads(self, num_heads: int) -> list[jax.Array]:
        """Queries, keys and values with their biases, (B, Q or S, T, h)."""
        return [x.reshape(*x.shape[:2], num_heads, -1) for x in self.biased()]


class Attention(nnx.Module):
    """Multi-head attention with separate projections; softmax in float32.

    `rotary` turns queries and keys by the place of their patch; a `norm` precedes the last projection. `biases` are the
    projections that have one.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        form: AttentionForm = "auto",
        positions: RelativePositions | None = None,
        rotary: RotaryPositions | None = None,
        norm: Callable[[jax.Array], jax.Array] | None = None,
        biases: Collection[str] = PROJECTIONS,
    ):
        self.query, self.key, self.value, self.out = (
            nnx.Linear(
                width,
                width,
                use_bias=name in biases,
                kernel_init=XAVIER_UNIFORM,
                dtype=dtype,
                dot_general=dot_general,
                rngs=rngs,
            )
            for name in PROJECTIONS
        )
        self.num_heads = num_heads
        self.dtype = dtype
        self.form = form
        self.positions = positions
        self.rotary = rotary
        self.norm = norm

    @jax.named_scope("attention")
    def __call__(self, queries_BQD: jax.Array, tokens_BSD: jax.Array) -> jax.Array:
        """Return (B, Q, D), each query's weighted sum of the tokens."""
        projections = self._project(queries_BQD, tokens_BSD)
        return self._finish(CORES[self._form_of(projections)](projections, self.num_heads))

    @jax.named_scope("attention")
    def with_weights(
        self, queries_BQD: jax.Array, tokens_BSD: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the attention output and its weights (B, T, Q, S) in float32."""
        output_BQE, weights_BTQS = _weighted(self._project(queries_BQD, tokens_BSD), self.num_heads)
        return self._finish(output_BQE), weights_BTQS

    def _finish(self, output_BQE: jax.Array) -> jax.Array:
        return self.out(output_BQE if self.norm is None else self.norm(output_BQE))

    def _form_of(self, projections: Projections) -> str:
        """Return the form of the core. Queries that are not the tokens, as a pooling's probe, are few."""
        tokens = projections.key_BSE
        if projections.query_BQE.shape != tokens.shape or projections.offset_key_QSh is not None:
            return "xla"
        _, length, width = tokens.shape
        head_dim = width // self.num_heads
        return choose_form(
            self.form,
            length=length,
            num_heads=self.num_heads,
            head_dim=head_dim,
            dtype=tokens.dtype,
        )

    def _project(self, queries_BQD: jax.Array, tokens_BSD: jax.Array) -> Projections:
        layers = {"query": self.query, "key": self.key, "value": self.value}
        kernels = [layer.kernel[...].astype(self.dtype) for layer in layers.values()]
        if queries_BQD is tokens_BSD:
            products = multiply_each(tokens_BSD.astype(self.dtype), kernels)
        else:
            products = [
                multiply(x.astype(self.dtype), kernel)
                for x, kernel in zip((queries_BQD, tokens_BSD, tokens_BSD), kernels, strict=True)
            ]
        named_products = list[jax.Array]()
        biases = list[jax.Array]()
        for (name, layer), product in zip(layers.items(), products, strict=True):
            named_products.append(checkpoint_name(named(product, "heads_BSE"), name))
            bias = jnp.zeros(product.shape[-1]) if layer.bias is None else layer.bias[...]
            biases.append(bias.astype(self.dtype))
        if self.rotary is not None:  # queries and keys are turned with their biases
            for place in range(2):
                named_products[place] = self.rotary(
                    named_products[place] + biases[place], self.num_heads
                )
                biases[place] = jnp.zeros_like(biases[place])
        query_BQE, key_BSE, value_BSE = named_products
        bias_3E = jnp.stack(biases)
        return Projections(
            query_BQE,
            key_BSE,
            value_BSE,
            bias_3E,
            None if self.positions is None else self.positions(),
        )


class LineAttention(Attention):
    """Attention within lines: each token attends to the `length` tokens of its row or column of the grid."""

    def __init__(self, *arguments: Any, length: int, **options: Any):
        super().__init__(*arguments, **options)
        self.length = length

    def __call__(self, queries_BSD: jax.Array, tokens_BSD: jax.Array) -> jax.Array:
        """Return (B, S, D), as `Attention` with queries of the same length."""
        output = super().__call__(self._lines(queries_BSD), self._lines(tokens_BSD))
        return output.reshape(queries_BSD.shape)

    def with_weights(
        self, queries_BSD: jax.Array, tokens_BSD: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the output and weights, as `Attention`; the weights (B, T, S, S) are 0 outside of lines."""
        batch, length, _ = tokens_BSD.shape
        lines = length // self.length
        output, weights = super().with_weights(self._lines(queries_BSD), self._lines(tokens_BSD))
        apart = weights.reshape(batch, lines, self.num_heads, self.length, self.length)
        weights_BTSS = jnp.einsum("BlTqs,lm->BTlqms", apart, jnp.eye(lines)).reshape(
            batch, -1, length, length
        )
        return output.reshape(queries_BSD.shape), weights_BTSS

    def _lines(self, x_BSD: jax.Array) -> jax.Array:
        return x_BSD.reshape(-1, self.length, x_BSD.shape[-1])


def _weighted(projections: Projections, num_heads: int) -> tuple[jax.Array, jax.Array]:
    """Return the attention output (B, Q, E) and its weights (B, T, Q, S), with the scores in memory."""
    query_BQTh, key_BSTh, value_BSTh = projections.heads(num_heads)
    query_BQTh = query_BQTh * jnp.asarray(query_BQTh.shape[-1] ** -0.5, query_BQTh.dtype)
    logits_BTQS = jnp.einsum(
        "BQTh,BSTh->BTQS", query_BQTh, key_BSTh, preferred_element_type=jnp.float32
    )
    if projections.offset_key_QSh is not None:
        keys_QSh = projections.offset_key_QSh.astype(query_BQTh.dtype)
        logits_BTQS += jnp.einsum(
            "BQTh,QSh->BTQS", query_BQTh, keys_QSh, preferred_element_type=jnp.float32
        )
    weights_BTQS = jax.nn.softmax(logits_BTQS)
    output_BQTh = jnp.einsum("BTQS,BSTh->BQTh", weights_BTQS.astype(value_BSTh.dtype), value_BSTh)
    output_BQE = output_BQTh.reshape(projections.query_BQE.shape)
    return checkpoint_name(output_BQE, attention_pallas.MIXTURE), weights_BTQS


def _by_xla(projections: Projections, num_heads: int) -> jax.Array:
    return _weighted(projections, num_heads)[0]


def _by_pallas(projections: Projections, num_heads: int) -> jax.Array:
    """Run the kernel on every device's shard of the batch and of the heads; off TPUs it is interpreted."""
    head_dim = projections.query_BQE.shape[-1] // num_heads
    return attention_pallas.attention(*projections[:4], head_dim, platform() != "tpu")


def _by_cudnn(projections: Projections, num_heads: int) -> jax.Array:
    query_BSE, key_BSE, value_BSE = projections.biased()
    return attention_cudnn.attention(query_BSE, key_BSE, value_BSE, num_heads)


CORES = {"xla": _by_xla, "pallas": _by_pallas, "cudnn": _by_cudnn}


def choose_form(
    form: AttentionForm, *, length: int, num_heads: int, head_dim: int, dtype: jnp.dtype
) -> str:
    """Return the form that self-attention of `form` has on the devices of `placed_by`.

    "auto" takes a kernel that keeps scores on the chip where there is one: Pallas on TPUs in bfloat16, cuDNN on GPUs.
    Outside of `placed_by` the program may run on any device, so "auto" is "xla" there.

    Raises:
      ValueError: the form is "cudnn", and cuDNN does not compute this attention.
    """
    if form == "cudnn" and (problem := attention_cudnn.find_problem(head_dim, dtype)):
        raise ValueError(
            f"config.model.attention='cudnn': cuDNN rejects this attention: {problem}. Use auto or xla."
        )
    if form != "auto":
        return form
    if is_placed() and platform() == "tpu" and dtype == jnp.bfloat16:
        return (
            "xla"
            if attention_pallas.heads_per_program(num_heads, head_dim, length) is None
            else "pallas"
        )
    if is_placed() and platform() == "gpu":
        return "xla" if attention_cudnn.find_problem(head_dim, dtype) else "cudnn"
    return "xla"
