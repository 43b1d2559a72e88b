"""The networks. They take images in [-1, 1] and know nothing of data, losses, meshes or training."""

import jax
from flax import nnx

from vit_jax.config import Architecture
from vit_jax.imports.references import resolve
from vit_jax.models.initial_values import redraw_truncated_normal
from vit_jax.models.resnet import ResNet
from vit_jax.models.vit import VisionTransformer

__all__ = ["ResNet", "VisionTransformer", "abstract_model", "build_model"]

_REDRAWING = 2**31 - 1  # number of a stream of random numbers beside those of the layers


def build_model(architecture: Architecture, key: jax.Array) -> nnx.Module:
    """Build and initialise the network that `architecture` describes; parameters are float32.

    A user-defined `network` is called with (architecture, key) and returns a module, which is called with images
    (B, H, W, 3) in [-1, 1] and `dropout_key=`, and returns a `ModelOutput`.

    Raises:
      ValueError: a user-defined component cannot be imported.
    """
    if architecture.network is not None:
        return resolve(architecture.network, "config.model.network")(architecture, key)
    if not architecture.has_transformer:
        return ResNet(architecture, key)
    model = VisionTransformer(architecture, key)
    if architecture.initial_values == "truncated_normal":
        model = redraw_truncated_normal(model, architecture, jax.random.fold_in(key, _REDRAWING))
    return model


def abstract_model(architecture: Architecture) -> nnx.Module:
    """Return the network with shapes and dtypes in the place of arrays; nothing is computed."""
    return jax.eval_shape(lambda: build_model(architecture, jax.random.key(0)))
