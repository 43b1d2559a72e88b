"""The networks. They take uint8 images scaled to [-1, 1] and know nothing of data, losses, meshes or training."""

import jax

from vit_jax.config import Architecture
from vit_jax.models.resnet import ResNet
from vit_jax.models.vit import VisionTransformer

__all__ = ["ResNet", "VisionTransformer", "build_model"]


def build_model(architecture: Architecture, key: jax.Array) -> VisionTransformer | ResNet:
    """Builds and initialises the network that `architecture` describes; parameters are float32."""
    return (VisionTransformer if architecture.has_transformer else ResNet)(architecture, key)
