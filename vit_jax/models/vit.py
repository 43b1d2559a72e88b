"""The Vision Transformer, in the order of the paper's equations 1 to 4, and its hybrids with a ResNet.

Legend: B batch, H W image height and width, C channels, N patches, P prefix tokens, S = P + N, D width.
"""

from collections.abc import Collection

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.arrays import Corruption, ModelOutput, validate_taps
from vit_jax.config import Architecture
from vit_jax.kernels.devices import named
from vit_jax.models.dropout import dropout
from vit_jax.models.embedding import PatchEmbedding
from vit_jax.models.encoder import Encoder
from vit_jax.models.heads import PatchHead, apply_head, apply_pooling, build_head, build_pooling
from vit_jax.models.norm import build_norm
from vit_jax.models.positions import add_positions, build_positions
from vit_jax.models.resnet import ResNetBody


class VisionTransformer(nnx.Module):
    """Patches, an optional class token, positions, the encoder, a pooling and a head.

    The patches of a hybrid are cut from the map that a ResNet makes of the image.

    A plain pytree: `jax.jit`, `jax.grad` and optax take the module itself; parameters are its leaves.
    """

    def __init__(self, a: Architecture, key: jax.Array):
        embedding_key, encoder_key, head_key = jax.random.split(key, 3)
        self.stem = ResNetBody(a, jax.random.fold_in(embedding_key, 0)) if a.has_resnet else None
        rngs = nnx.Rngs(embedding_key)
        self.embedding = PatchEmbedding(a, rngs=rngs)
        self.embedding_norm = build_norm(a) if a.embedding_norm is not None else None
        self.norms_patches = a.embedding_norm == "patches"
        self.class_token = _prefix(a.num_class_tokens, a.width)
        self.register_tokens = _prefix(a.registers, a.width)
        self.prefix_length = a.prefix_length
        if a.position_layers != "every":  # where the blocks have them
            self.positions = build_positions(a, rngs=rngs)
        self.position_layers = a.position_layers
        self.encoder = Encoder(a, encoder_key)
        head_rngs = nnx.Rngs(head_key)
        self.pool = a.pool
        self.pooling = build_pooling(a, rngs=head_rngs)
        self.pooled_norm = build_norm(a) if a.final_norm == "pooled" else None
        self.head = (
            PatchHead(a, rngs=head_rngs) if a.patch_outputs else build_head(a, rngs=head_rngs)
        )
        self.dropout_fraction = a.dropout_fraction
        self.num_classes = a.num_classes

    def __call__(
        self,
        image_BHWC: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
        taps: Collection[str] = (),
        corruption: Corruption | None = None,
    ) -> ModelOutput:
        """Classify images.

        Args:
          image_BHWC: float, in [-1, 1], of the architecture's image size.
          dropout_key: in training only; without it nothing is dropped.
          taps: inner results to return: "blocks", "attention", of a hybrid "stages"; see `ModelOutput`.
          corruption: of a network that predicts patches, what it sees in the place of some.
        """
        validate_taps(taps, ("blocks", "attention", *([] if self.stem is None else ["stages"])))
        keys = (None, None) if dropout_key is None else tuple(jax.random.split(dropout_key))
        map_BHWC, stages_BHWC = (
            (image_BHWC, None) if self.stem is None else self.stem(image_BHWC, taps)
        )
        embedded_BSD = self._embed(map_BHWC, keys[0], corruption)
        shared = self.positions if self.position_layers == "shared" else None
        tokens_BSD, blocks_LBSD, attention_LBTQS = self.encoder(embedded_BSD, keys[1], taps, shared)
        tokens_BND = tokens_BSD[:, self.prefix_length :]
        pooled_BD = self._pool(tokens_BSD)
        logits_BK = None
        patches_BNO = None
        features_BD = pooled_BD.astype(jnp.float32)
        if isinstance(self.head, PatchHead):
            patches_BNO = self.head(tokens_BND)
        else:
            logits_BK, features_BD = apply_head(self.head, pooled_BD, self.num_classes)
        return ModelOutput(
            logits_BK=logits_BK,
            patches_BNO=patches_BNO,
            features_BD=features_BD,
            pooled_BD=pooled_BD,
            tokens_BND=tokens_BND,
            prefix_BPD=tokens_BSD[:, : self.prefix_length],
            blocks_LBSD=blocks_LBSD,
            attention_LBTQS=attention_LBTQS,
            stages_BHWC=stages_BHWC,
        )

    def _embed(
        self, map_BHWC: jax.Array, key: jax.Array | None, corruption: Corruption | None
    ) -> jax.Array:
        tokens = self.embedding(map_BHWC)
        if corruption is not None:
            assert isinstance(self.head, PatchHead), (
                "only a network that predicts patches learns a [mask] embedding"
            )
            tokens = self.head.corrupt(tokens, corruption)
        if self.embedding_norm is not None and self.norms_patches:
            tokens = self.embedding_norm(tokens)
        prefix = [
            token[...] for token in (self.class_token, self.register_tokens) if token is not None
        ]
        if prefix:
            prefix_1PD = jnp.concatenate(prefix, axis=1).astype(tokens.dtype)
            prefix_BPD = jnp.broadcast_to(prefix_1PD, (tokens.shape[0], *prefix_1PD.shape[1:]))
            tokens = jnp.concatenate([prefix_BPD, tokens], axis=1)
        if self.position_layers == "stem":
            tokens = add_positions(tokens, self.positions)
        if self.embedding_norm is not None and not self.norms_patches:
            tokens = self.embedding_norm(tokens)
        return dropout(named(tokens, "tokens_BSD"), self.dropout_fraction, key)

    def _pool(self, tokens_BSD: jax.Array) -> jax.Array:
        if self.pooling is not None:
            return apply_pooling(self.pooling, tokens_BSD)
        pooled = []
        if self.pool != "gap" and self.class_token is not None:
            pooled = [tokens_BSD[:, place] for place in range(self.class_token.shape[1])]
        if self.pool != "token":
            mean_BD = tokens_BSD[:, self.prefix_length :].astype(jnp.float32).mean(axis=1)
            pooled.append(mean_BD.astype(tokens_BSD.dtype))
        pooled_BD = jnp.concatenate(pooled, axis=-1) if len(pooled) > 1 else pooled[0]
        return pooled_BD if self.pooled_norm is None else self.pooled_norm(pooled_BD)


def _prefix(count: int, width: int) -> nnx.Param | None:
    return nnx.Param(jnp.zeros((1, count, width))) if count else None
