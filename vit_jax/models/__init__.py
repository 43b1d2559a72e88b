"""The networks. They take uint8 images scaled to [-1, 1] and know nothing of data, losses, meshes or training."""

import jax

from vit_jax.config import Architecture
from vit_jax.models.vit import VisionTransformer

__all__ = ["VisionTransformer", "build_model"]


def build_model(architecture: Architecture, key: jax.Array) -> VisionTransformer:
    """Builds and initialises the network that `architecture` describes; parameters are float32."""
    return VisionTransformer(architecture, key)
