"""The end of a network: pooling of its tokens, and heads for classes and for masked patches.

Legend: B batch, S sequence length, D width, N patches, O outputs of a patch, K classes.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from vit_jax.arrays import Corruption, ModelOutput
from vit_jax.config.architecture import Architecture
from vit_jax.imports.reference_form import is_reference
from vit_jax.models.attention import XAVIER_UNIFORM, Attention
from vit_jax.models.embedding import LECUN_NORMAL
from vit_jax.models.mlp import Mlp
from vit_jax.models.norm import build_norm

Pooling = Callable[[Array], Array]
Classifier = Callable[[Array], tuple[Array | None, Array]]
ZEROS = nnx.initializers.zeros_init()
MASK_STDDEV = 0.02  # standard deviation of the initial [mask] embedding
constant = functools.cache(nnx.initializers.constant)  # equal modules must hold the same function


class TokenPooling(nnx.Module):
    """Takes class tokens, the mean of the patches, or both one after the other."""

    def __init__(self, a: Architecture):
        self.num_class_tokens = 0 if a.pool == "gap" else a.num_class_tokens
        self.takes_mean = a.pool != "token"
        self.prefix_length = a.prefix_length

    def __call__(self, tokens_BSD: Array) -> Array:
        """Return pooled_BD; D is `Architecture.feature_width`."""
        pooled = [tokens_BSD[:, index] for index in range(self.num_class_tokens)]
        if self.takes_mean:
            tokens_BND = tokens_BSD[:, self.prefix_length :]
            exact_BND = tokens_BND.astype(jnp.float32)
            mean_BD = exact_BND.mean(axis=1)
            pooled.append(mean_BD.astype(tokens_BSD.dtype))

        if len(pooled) == 1:
            return pooled[0]
        return jnp.concatenate(pooled, axis=-1)


class AttentionPooling(nnx.Module):
    """A learned probe attends to all tokens, then a residual MLP ("MAP" head of big_vision)."""

    def __init__(
        self,
        a: Architecture,
        *,
        rngs: nnx.Rngs,
    ):
        dtype = jnp.dtype(a.compute_dtype)
        num_heads = a.pool_num_heads or a.num_heads
        shape_11D = (1, 1, a.width)
        probe_11D = XAVIER_UNIFORM(rngs.params(), shape_11D, jnp.float32)

        self.probe = nnx.Param(probe_11D)
        self.attention = Attention(
            a.width,
            num_heads,
            dtype=dtype,
            rngs=rngs,
        )
        self.norm = build_norm(a)
        self.mlp = Mlp(
            a.width,
            a.mlp_dim,
            form=a.gelu,
            dtype=dtype,
            rngs=rngs,
        )

    @jax.named_scope("pooling")
    def __call__(self, tokens_BSD: Array) -> Array:
        """Return pooled_BD."""
        batch, _, width = tokens_BSD.shape
        probe_11D = self.probe[...]
        probe_11D = probe_11D.astype(tokens_BSD.dtype)
        probe_B1D = jnp.broadcast_to(probe_11D, (batch, 1, width))

        x_B1D = self.attention(probe_B1D, tokens_BSD)
        normed_B1D = self.norm(x_B1D)
        x_B1D = x_B1D + self.mlp(normed_B1D)
        return x_B1D[:, 0]


class Head(nnx.Module):
    """Zero-initialised linear classifier, behind a tanh layer of width D if the head is "mlp".

    The paper pre-trains with the hidden layer and fine-tunes without (ViT, sec. 3.2). Computes in
    float32. A network of 0 classes ends in its features and has no logits.
    """

    def __init__(
        self,
        a: Architecture,
        *,
        rngs: nnx.Rngs,
    ):
        num_features = a.feature_width
        hidden = None
        if a.head == "mlp":
            hidden = nnx.Linear(
                num_features,
                a.width,
                kernel_init=LECUN_NORMAL,
                rngs=rngs,
            )
            num_features = a.width
        self.hidden = hidden
        self.has_classes = a.num_classes > 0
        self.has_distillation_token = (
            a.num_class_tokens == 2 and a.pool == "token" and hidden is None and self.has_classes
        )
        self.linear = nnx.Linear(
            num_features,
            a.num_classes,
            kernel_init=ZEROS,
            bias_init=constant(a.head_bias_init),
            rngs=rngs,
        )

    @jax.named_scope("head")
    def __call__(self, pooled_BD: Array) -> tuple[Array | None, Array]:
        """Return logits_BK, or None, and the features_BD they are linear in."""
        features_BD = pooled_BD.astype(jnp.float32)
        if self.hidden is not None:
            hidden_BD = self.hidden(features_BD)
            features_BD = jnp.tanh(hidden_BD)

        if not self.has_classes:
            return None, features_BD
        logits_BK = self.linear(features_BD)
        return logits_BK, features_BD

    def score_tokens(self, features_BD: Array) -> Array:
        """Return the logits of the class token and of the distillation token, (2, B, K).

        The layer maps both side by side to the mean of their logits.
        """
        kernel_DK = self.linear.kernel[...]
        kernel_TDK = kernel_DK.reshape(2, -1, kernel_DK.shape[-1])
        features_BTD = features_BD.reshape(len(features_BD), 2, -1)
        halves_TBK = jnp.einsum("BTD,TDK->TBK", features_BTD, kernel_TDK)
        assert self.linear.bias is not None
        return 2 * halves_TBK + self.linear.bias[...]


class PatchHead(nnx.Module):
    """Head of a network for masked patches: the [mask] embedding, and predictions.

    The last layer begins at zero, as in a classifier, and gives float32.
    """

    def __init__(
        self,
        a: Architecture,
        *,
        rngs: nnx.Rngs,
    ):
        self.linear: Any = nnx.Linear(
            a.width,
            a.patch_outputs,
            kernel_init=ZEROS,
            rngs=rngs,
        )
        shape_11D = (1, 1, a.width)
        mask_11D = MASK_STDDEV * jax.random.normal(rngs.params(), shape_11D)
        self.mask = nnx.Param(mask_11D)

    @jax.named_scope("embedding")
    def corrupt(
        self,
        tokens_BND: Array,
        corruption: Corruption,
    ) -> Array:
        """Return the embeddings of patches, before positions are added, with some replaced."""
        source_BN1 = corruption.source_BN[..., None]
        moved_BND = jnp.take_along_axis(tokens_BND, source_BN1, axis=1)
        is_masked_BN1 = corruption.is_masked_BN[..., None]
        mask_11D = self.mask[...]
        mask_11D = mask_11D.astype(tokens_BND.dtype)
        return jnp.where(is_masked_BN1, mask_11D, moved_BND)

    @jax.named_scope("head")
    def __call__(self, tokens_BND: Array) -> Array:
        """Return patches_BNO, float32."""
        kernel_DO = self.linear.kernel[...]
        kernel_DO = kernel_DO.astype(tokens_BND.dtype)
        patches_BNO = jnp.matmul(
            tokens_BND,
            kernel_DO,
            preferred_element_type=jnp.float32,
        )
        return patches_BNO + self.linear.bias[...]


def build_pooling(a: Architecture, *, rngs: nnx.Rngs) -> Pooling:
    """Return the pooling of an architecture: built in, or the class that `a.pool` refers to."""
    if is_reference(a.pool):
        return _build_custom(a.pool, "config.model.pool", a, rngs)
    if a.pool == "map":
        return AttentionPooling(a, rngs=rngs)
    return TokenPooling(a)


def build_head(a: Architecture, *, rngs: nnx.Rngs) -> Classifier:
    """Return the classifier of an architecture: built in, or the class that `a.head` refers to."""
    if is_reference(a.head):
        return _build_custom(a.head, "config.model.head", a, rngs)
    return Head(a, rngs=rngs)


def _build_custom(
    reference: str,
    field: str,
    a: Architecture,
    rngs: nnx.Rngs,
) -> Any:
    """Return the module that a user's class builds for an architecture."""
    from vit_jax.imports.references import explain_call, resolve

    build = resolve(reference, field)
    with explain_call(f"{field}={reference!r}", "(architecture, rngs=...)"):
        return build(a, rngs=rngs)


def apply_pooling(pooling: Pooling, tokens_BSD: Array, feature_width: int) -> Array:
    """Return pooled_BD.

    Raises:
      ValueError: the module returns another shape.
    """
    pooled_BD = pooling(tokens_BSD)
    shape = jnp.shape(pooled_BD)
    expected = (tokens_BSD.shape[0], feature_width)
    if shape != expected:
        name = type(pooling).__name__
        raise ValueError(
            f"config.model.pool: {name} returns shape {shape} for tokens {tokens_BSD.shape}: "
            f"must be {expected}, a vector for each image."
        )
    return pooled_BD


def predict(
    head: PatchHead | Classifier,
    pooled_BD: Array,
    tokens_BND: Array,
    num_classes: int,
    intermediates: Collection[str],
) -> ModelOutput:
    """Return the outputs of a head, and the features that its last layer takes.

    Raises:
      ValueError: the head of the user returns something else.
    """
    if isinstance(head, PatchHead):
        features_BD = pooled_BD.astype(jnp.float32)
        return ModelOutput(features_BD=features_BD, patches_BNO=head(tokens_BND))

    logits_BK, features_BD = apply_head(head, pooled_BD, num_classes)
    output = ModelOutput(features_BD=features_BD, logits_BK=logits_BK)
    if "token_logits" in intermediates:
        assert isinstance(head, Head), "other heads do not allow this intermediate"
        token_logits_TBK = head.score_tokens(features_BD)
        output = dataclasses.replace(output, token_logits_TBK=token_logits_TBK)
    return output


def list_intermediates(head: PatchHead | Classifier) -> tuple[str, ...]:
    """Return the names of the intermediates that `predict` can return for a head."""
    if isinstance(head, Head) and head.has_distillation_token:
        return ("token_logits",)
    return ()


def apply_head(
    head: Classifier,
    pooled_BD: Array,
    num_classes: int,
) -> tuple[Array | None, Array]:
    """Return logits_BK, or None without classes, and the features_BD they are computed from.

    Raises:
      ValueError: the module returns something else.
    """
    output = head(pooled_BD)
    batch = pooled_BD.shape[0]
    expected = (batch, num_classes)
    if not _is_head_output(output, expected):
        name = type(head).__name__
        raise ValueError(
            f"config.model.head: {name} returns shape {_list_shapes(output)}: must be logits "
            f"{expected} and features. Return (logits_BK, features_BD)."
        )

    logits_BK, features_BD = output
    if num_classes == 0:
        return None, features_BD
    return logits_BK, features_BD


def _is_head_output(output: object, logits_shape: tuple[int, int]) -> bool:
    """Return whether a head gave logits of this shape, or any without classes, and features."""
    if not isinstance(output, tuple) or len(output) != 2:
        return False
    logits, _ = output
    _, num_classes = logits_shape
    return num_classes == 0 or jnp.shape(logits) == logits_shape


def _list_shapes(output: Any) -> tuple:
    """Return the shape of an array, or the shapes of several."""
    if isinstance(output, tuple):
        return tuple(map(jnp.shape, output))
    return jnp.shape(output)
