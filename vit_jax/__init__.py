"""Train Vision Transformers, BiT-ResNets and their hybrids in JAX, and use them.

`create_model` and `load_model` give a network with its preparation of images, `list_models` the names of networks.
Importing the package loads nothing heavy: they, and JAX, are imported on first use.
"""

from typing import TYPE_CHECKING, Any

from vit_jax.imports.earlier_names import install_earlier_names

if TYPE_CHECKING:
    from vit_jax.api import Model, create_model, list_models, load_model

__version__ = "0.3.0"
__all__ = ["Model", "__version__", "create_model", "list_models", "load_model"]

install_earlier_names()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vit_jax import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
