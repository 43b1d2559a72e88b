"""Networks, which take images in [-1, 1] and know no data, losses, meshes or training."""

from typing import TYPE_CHECKING

import jax
from flax import nnx
from jax import Array

from vit_jax.config.architecture import Architecture
from vit_jax.imports.public_names import import_on_use

if TYPE_CHECKING:
    from vit_jax.models.resnet import ResNet as ResNet
    from vit_jax.models.vit import VisionTransformer as VisionTransformer

# A network loads the modules of its family alone.
__getattr__ = import_on_use(__name__, {"resnet": ("ResNet",), "vit": ("VisionTransformer",)})

_REDRAWING = 2**31 - 1  # number of a stream of random numbers beside those of the layers


def build_model(architecture: Architecture, key: Array) -> nnx.Module:
    """Build and initialise the network that `architecture` describes; parameters are float32.

    A user-defined `network` is called with (architecture, key) and returns a module, which is
    called with images (B, H, W, 3) in [-1, 1] and `dropout_key=`, and returns a `ModelOutput`.

    Raises:
      ValueError: a user-defined component cannot be imported.
    """
    if architecture.network is not None:
        from vit_jax.imports.references import resolve

        build_network = resolve(architecture.network, "config.model.network")
        network: nnx.Module = build_network(architecture, key)
        return network
    if not architecture.has_transformer:
        from vit_jax.models.resnet import ResNet

        return ResNet(architecture, key)

    from vit_jax.models.vit import VisionTransformer

    model = VisionTransformer(architecture, key)
    if architecture.initial_values == "truncated_normal":
        from vit_jax.models.initial_values import redraw_truncated_normal

        redraw_key = jax.random.fold_in(key, _REDRAWING)
        model = redraw_truncated_normal(model, architecture, redraw_key)
    return model


def abstract_model(architecture: Architecture) -> nnx.Module:
    """Return the network with shapes and dtypes in the place of arrays; nothing is computed."""
    return jax.eval_shape(lambda: build_model(architecture, jax.random.key(0)))
