"""A network: an MLP-Mixer (Tolstikhin et al., 2021) of the size that `model.name` names.

`model.network` takes `(architecture, key) -> module` from images to a `ModelOutput`.

Run it:

    vit-jax pretrain --config=digits --workdir=runs/mixer \
        --config.model.network=docs.examples.network:Mixer
"""

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.arrays import ModelOutput
from vit_jax.config import Architecture
from vit_jax.models.block import LayerNorm, Mlp
from vit_jax.models.embedding import PatchEmbedding


class MixerBlock(nnx.Module):
    """An MLP over the tokens, then one over the channels."""

    def __init__(self, a: Architecture, *, rngs: nnx.Rngs):
        num_tokens = a.grid[0] * a.grid[1]
        dtype = jnp.dtype(a.compute_dtype)
        self.token_norm = LayerNorm(a)
        self.channel_norm = LayerNorm(a)
        self.token_mlp = Mlp(num_tokens, a.mlp_dim // 4, form=a.gelu, dtype=dtype, rngs=rngs)
        self.channel_mlp = Mlp(a.width, a.mlp_dim, form=a.gelu, dtype=dtype, rngs=rngs)

    def __call__(self, x_BND: jax.Array) -> jax.Array:
        channels_BDN = self.token_norm(x_BND).swapaxes(1, 2)
        x_BND = x_BND + self.token_mlp(channels_BDN).swapaxes(1, 2)
        return x_BND + self.channel_mlp(self.channel_norm(x_BND))


class Mixer(nnx.Module):
    """Blocks between a patch embedding and a linear head.

    It is called with images in [-1, 1] of the architecture's size. Its output must have logits; all
    other fields are optional.
    """

    def __init__(self, a: Architecture, key: jax.Array):
        rngs = nnx.Rngs(key)
        self.embedding = PatchEmbedding(a, rngs=rngs)
        self.blocks = nnx.List([MixerBlock(a, rngs=rngs) for _ in range(a.depth)])
        self.norm = LayerNorm(a)
        self.head = nnx.Linear(
            a.width,
            a.num_classes,
            kernel_init=nnx.initializers.zeros,
            rngs=rngs,
        )

    def __call__(
        self,
        image_BHWC: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
    ) -> ModelOutput:
        del dropout_key
        x_BND = self.embedding(image_BHWC)
        for block in self.blocks:
            x_BND = block(x_BND)
        pooled_BD = self.norm(x_BND).astype(jnp.float32).mean(axis=1)
        return ModelOutput(logits_BK=self.head(pooled_BD), features_BD=pooled_BD)
