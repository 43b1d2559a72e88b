"""The Vision Transformer, in the order of equations 1 to 4 of the paper, and its hybrids.

Legend: B batch, H W image height and width, C channels, D width, L blocks, T heads, K classes.

* N patches that enter the encoder, all or the M that patch dropout keeps;
* P prefix tokens (class tokens and registers);
* S = P + N tokens; Q queries of attention, which are the same S tokens.

In `map_BHWC` H W C are those of the map that is split into patches.
"""

import dataclasses
from collections.abc import Collection

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from vit_jax.arrays import (
    ABSENT,
    Corruption,
    ModelOutput,
    accept_earlier_name,
    validate_intermediates,
)
from vit_jax.config.architecture import Architecture
from vit_jax.kernels.devices import constrain
from vit_jax.models.dropout import dropout, split_key
from vit_jax.models.embedding import PatchEmbedding
from vit_jax.models.encoder import Encoder
from vit_jax.models.heads import (
    Classifier,
    PatchHead,
    apply_pooling,
    build_head,
    build_pooling,
    list_intermediates,
    predict,
)
from vit_jax.models.norm import build_norm, identity
from vit_jax.models.positions import add_positions, build_positions, find_kept_tokens


class VisionTransformer(nnx.Module):
    """Patch embedding, positions, the encoder, a pooling and a head.

    The sequence has the class tokens first, then the registers, then the patches, line by line from
    the top left. In a hybrid, a ResNet (`stem`) makes the map that is split into patches.

    Positions are added in one of three places (`Architecture.position_layers`): here, to the
    embedded tokens ("stem"); by the encoder, the same to the input of every block ("shared"); or in
    the encoder, where each block has its own ("every"). `add_positions(x, None, ...)` returns x.

    The module is a plain pytree: `jax.jit`, `jax.grad` and optax take it; its leaves are the
    parameters.
    """

    def __init__(self, a: Architecture, key: Array):
        embedding_key, encoder_key, head_key = jax.random.split(key, 3)
        embedding_rngs = nnx.Rngs(embedding_key)
        head_rngs = nnx.Rngs(head_key)

        self.stem = build_stem(a, embedding_key)

        self.embedding = PatchEmbedding(a, rngs=embedding_rngs)
        self.embedding_norm_place = a.embedding_norm  # on "patches", on all "tokens" or None
        self.embedding_norm = build_norm(a) if a.embedding_norm else identity
        self.class_token = build_prefix(a.num_class_tokens, a.width)
        self.register_tokens = build_prefix(a.registers, a.width)
        self.prefix_length = a.prefix_length

        has_positions = a.position_layers != "every"
        self.positions = build_positions(a, rngs=embedding_rngs) if has_positions else None
        self.shares_positions = a.position_layers == "shared"
        self.dropout_fraction = a.dropout_fraction

        self.encoder = Encoder(a, encoder_key)

        self.pooling = build_pooling(a, rngs=head_rngs)
        self.pooled_norm = build_norm(a) if a.final_norm == "pooled" else identity
        self.feature_width = a.feature_width
        self.num_classes = a.num_classes
        self.head: PatchHead | Classifier  # predicts patches, or classes
        if a.patch_outputs:
            self.head = PatchHead(a, rngs=head_rngs)
        else:
            self.head = build_head(a, rngs=head_rngs)

    @accept_earlier_name
    def __call__(
        self,
        image_BHWC: Array,
        *,
        dropout_key: Array | None = None,
        intermediates: Collection[str] = (),
        corruption: Corruption | None = None,
        kept_BM: Array | None = None,
        num_trained_blocks: int | None = None,
    ) -> ModelOutput:
        """Classify images.

        Args:
          image_BHWC: float, in [-1, 1], of the architecture's image size.
          dropout_key: in training only; without it nothing is dropped.
          intermediates: names of activations to return: "blocks", "attention", of a hybrid
            "stages", with a distillation token "token_logits"; see `ModelOutput`.
          corruption: input in the place of some patches, for a network that predicts patches.
          kept_BM: the M patches of each image that enter the encoder (patch dropout); None: all.
          num_trained_blocks: number of blocks at the end that have gradients; None: all. With a
            number, the embedding and the other blocks drop nothing and have no backward pass.
        """
        validate_intermediates(intermediates, self.allowed_intermediates)
        embedding_key, encoder_key = split_key(dropout_key)
        if num_trained_blocks is not None:
            embedding_key = None

        # Equation 1: class token and patches, with positions.
        map_BHWC, stages_BHWC = self._run_stem(image_BHWC, intermediates)
        token_BS = find_kept_tokens(kept_BM, self.prefix_length)
        tokens_BSD = self._embed(map_BHWC, corruption, kept_BM, token_BS)
        tokens_BSD = dropout(tokens_BSD, self.dropout_fraction, embedding_key)

        # Equations 2 and 3: attention and MLP, L times; then the final norm.
        tokens_BSD, activations = self.encoder(
            tokens_BSD,
            encoder_key,
            intermediates=intermediates,
            shared_positions=self.positions if self.shares_positions else None,
            token_BS=token_BS,
            num_trained=num_trained_blocks,
        )
        tokens_BND = tokens_BSD[:, self.prefix_length :]

        # Equation 4: the class token, or another pooling, represents the image.
        pooled_BD = apply_pooling(self.pooling, tokens_BSD, self.feature_width)
        pooled_BD = self.pooled_norm(pooled_BD)
        output = predict(self.head, pooled_BD, tokens_BND, self.num_classes, intermediates)
        return dataclasses.replace(
            output,
            pooled_BD=pooled_BD,
            tokens_BND=tokens_BND,
            prefix_BPD=tokens_BSD[:, : self.prefix_length],
            blocks_LBSD=activations.output,
            attention_LBTQS=merge_axial_layers(activations.attention),
            stages_BHWC=stages_BHWC,
        )

    @property
    def allowed_intermediates(self) -> tuple[str, ...]:
        """The names of the intermediates that a call can return."""
        names = ["blocks", "attention"]
        if self.stem is not None:
            names.append("stages")
        return (*names, *list_intermediates(self.head))

    def _run_stem(
        self,
        image_BHWC: Array,
        intermediates: Collection[str],
    ) -> tuple[Array, tuple[Array, ...]]:
        """Return the map that is split into patches, and of a hybrid the intermediate "stages"."""
        if self.stem is None:
            return image_BHWC, ABSENT
        return self.stem(image_BHWC, intermediates)

    def _embed(
        self,
        map_BHWC: Array,
        corruption: Corruption | None,
        kept_BM: Array | None,
        token_BS: Array | None,
    ) -> Array:
        """Return the tokens that enter the encoder, (B, S, D); `corruption` replaces patches."""
        patches_BND = self.embedding(map_BHWC, kept_BM)
        if corruption is not None:
            assert isinstance(self.head, PatchHead), "other networks learn no [mask] embedding"
            patches_BND = self.head.corrupt(patches_BND, corruption)
        if self.embedding_norm_place == "patches":
            patches_BND = self.embedding_norm(patches_BND)

        tokens_BSD = self._prepend_prefix(patches_BND)
        if not self.shares_positions:
            tokens_BSD = add_positions(tokens_BSD, self.positions, token_BS)
        if self.embedding_norm_place == "tokens":
            tokens_BSD = self.embedding_norm(tokens_BSD)
        return constrain(tokens_BSD, "tokens_BSD")

    def _prepend_prefix(self, patches_BND: Array) -> Array:
        """Return class tokens, registers and patches, (B, S, D)."""
        learned = (self.class_token, self.register_tokens)
        prefix = [token[...] for token in learned if token is not None]
        if not prefix:
            return patches_BND

        prefix_1PD = jnp.concatenate(prefix, axis=1)
        prefix_1PD = prefix_1PD.astype(patches_BND.dtype)
        batch, _, width = patches_BND.shape
        prefix_BPD = jnp.broadcast_to(prefix_1PD, (batch, self.prefix_length, width))
        return jnp.concatenate([prefix_BPD, patches_BND], axis=1)


def build_stem(a: Architecture, key: Array) -> nnx.Module | None:
    """Return the ResNet of a hybrid; None for other networks."""
    if not a.has_resnet:
        return None

    from vit_jax.models.resnet import ResNetBody

    # `fold_in`, as a fourth key of `split` would change the initial parameters of other networks.
    stem_key = jax.random.fold_in(key, 0)
    return ResNetBody(a, stem_key)


def build_prefix(num_tokens: int, width: int) -> nnx.Param | None:
    """Return learned tokens that begin at zero, (1, P, D); None for no tokens."""
    if num_tokens == 0:
        return None
    tokens_1PD = jnp.zeros((1, num_tokens, width))
    return nnx.Param(tokens_1PD)


def merge_axial_layers(attention: Array) -> Array:
    """Return attention weights (L, B, T, Q, S); an axial block counts as two layers.

    The blocks return (L, B, T, Q, S), axial ones (L, 2, B, T, Q, S), or `ABSENT`.
    """
    if attention is ABSENT:
        return ABSENT
    shape_BTQS = attention.shape[-4:]
    return attention.reshape(-1, *shape_BTQS)
