"""The Python API: networks by name, or from weights of any format, with their image preparation.

`vit_jax.list_models`, `vit_jax.create_model`, `vit_jax.load_model`, `vit_jax.open_data`,
`vit_jax.Model` and `vit_jax.Data`. The verbs evaluate, predict and export use the same. Each name
is imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vit_jax.api.build import create_model, from_weights, load_model
    from vit_jax.api.data import Data, open_data
    from vit_jax.api.model import Model
    from vit_jax.config.variants import list_models

__all__ = [
    "Data",
    "Model",
    "create_model",
    "from_weights",
    "list_models",
    "load_model",
    "open_data",
]

_MODULES = {
    "Data": "vit_jax.api.data",
    "Model": "vit_jax.api.model",
    "create_model": "vit_jax.api.build",
    "from_weights": "vit_jax.api.build",
    "list_models": "vit_jax.config.variants",
    "load_model": "vit_jax.api.build",
    "open_data": "vit_jax.api.data",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
