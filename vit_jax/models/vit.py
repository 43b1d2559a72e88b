"""The Vision Transformer, in the order of the paper's equations 1 to 4, and its hybrids with a ResNet.

Legend: B batch, H W image height and width, C channels, N patches, S = N or N + 1 with a class token, D width.
"""

from collections.abc import Collection

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.activations import named
from vit_jax.arrays import Corruption, ModelOutput, validate_taps
from vit_jax.config import Architecture
from vit_jax.models.dropout import dropout
from vit_jax.models.embed import PatchEmbedding
from vit_jax.models.head import PatchHead, apply_head, apply_pooling, build_head, build_pooling
from vit_jax.models.positions import add_positions, build_positions
from vit_jax.models.resnet import ResNetBody
from vit_jax.models.transformer import Encoder


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
        self.class_token = nnx.Param(jnp.zeros((1, 1, a.width))) if a.pool == "token" else None
        if a.position_layers != "every":  # where the blocks have them
            self.positions = build_positions(a, rngs=rngs)
        self.position_layers = a.position_layers
        self.encoder = Encoder(a, encoder_key)
        head_rngs = nnx.Rngs(head_key)
        self.pooling = build_pooling(a, rngs=head_rngs)
        self.head = PatchHead(a, rngs=head_rngs) if a.patch_outputs else build_head(a, rngs=head_rngs)
        self.dropout_fraction, self.num_classes = a.dropout_fraction, a.num_classes

    def __call__(
        self,
        image_BHWC: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
        taps: Collection[str] = (),
        corruption: Corruption | None = None,
    ) -> ModelOutput:
        """Classifies images.

        Args:
          image_BHWC: float, in [-1, 1], of the architecture's image size.
          dropout_key: given in training only; without it nothing is dropped.
          taps: inner results to return: "blocks", "attention", of a hybrid "stages"; see `ModelOutput`.
          corruption: of a network that predicts patches, what it sees in the place of some.
        """
        validate_taps(taps, ("blocks", "attention", *([] if self.stem is None else ["stages"])))
        keys = (None, None) if dropout_key is None else tuple(jax.random.split(dropout_key))
        map_BHWC, stages_BHWC = (image_BHWC, None) if self.stem is None else self.stem(image_BHWC, taps)
        embedded_BSD = self._embed(map_BHWC, keys[0], corruption)
        shared = self.positions if self.position_layers == "shared" else None
        tokens_BSD, blocks_LBSD, attention_LBTQS = self.encoder(embedded_BSD, keys[1], taps, shared)
        tokens_BND = tokens_BSD if self.class_token is None else tokens_BSD[:, 1:]
        pooled_BD = self._pool(tokens_BSD)
        logits_BK, patches_BNO, features_BD = None, None, pooled_BD.astype(jnp.float32)
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
            blocks_LBSD=blocks_LBSD,
            attention_LBTQS=attention_LBTQS,
            stages_BHWC=stages_BHWC,
        )

    def _embed(self, map_BHWC: jax.Array, key: jax.Array | None, corruption: Corruption | None) -> jax.Array:
        tokens = self.embedding(map_BHWC)
        if corruption is not None:
            assert isinstance(self.head, PatchHead), "only a network that predicts patches learns a [mask] embedding"
            tokens = self.head.corrupt(tokens, corruption)
        if self.class_token is not None:
            batch, _, width = tokens.shape
            class_token = jnp.broadcast_to(self.class_token[...].astype(tokens.dtype), (batch, 1, width))
            tokens = jnp.concatenate([class_token, tokens], axis=1)
        if self.position_layers == "stem":
            tokens = add_positions(tokens, self.positions)
        return dropout(named(tokens, "tokens_BSD"), self.dropout_fraction, key)

    def _pool(self, tokens_BSD: jax.Array) -> jax.Array:
        if self.class_token is not None:
            return tokens_BSD[:, 0]
        if self.pooling is not None:
            return apply_pooling(self.pooling, tokens_BSD)
        return tokens_BSD.astype(jnp.float32).mean(axis=1).astype(tokens_BSD.dtype)
