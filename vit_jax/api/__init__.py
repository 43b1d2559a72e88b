"""The Python API: networks by name, or from weights of any format, with the preparation of images that belongs to them.

`vit_jax.list_models`, `vit_jax.create_model`, `vit_jax.load_model` and `vit_jax.Model`. The verbs evaluate, predict and
export use the same.
"""

from vit_jax.api.build import create_model, from_weights, load_model
from vit_jax.api.model import Model
from vit_jax.config.variants import list_models

__all__ = ["Model", "create_model", "from_weights", "list_models", "load_model"]
