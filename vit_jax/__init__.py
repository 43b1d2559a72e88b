"""Train Vision Transformers, BiT-ResNets and their hybrids in JAX, and use them.

`create_model` and `load_model` give a network with its preparation of images, `list_models` the
names of networks, `open_data` batches. Importing the package loads nothing heavy: they, and JAX, are imported on first
use.
"""

from typing import TYPE_CHECKING

from vit_jax.imports.earlier_names import install_earlier_names
from vit_jax.imports.public_names import import_on_use

if TYPE_CHECKING:
    from vit_jax.api import Data, Model, create_model, list_models, load_model, open_data

__version__ = "0.5.0"
__all__ = [
    "Data",
    "Model",
    "__version__",
    "create_model",
    "list_models",
    "load_model",
    "open_data",
]

install_earlier_names()


__getattr__ = import_on_use(
    __name__,
    {"api": ("Data", "Model", "create_model", "list_models", "load_model", "open_data")},
    advice="google-research/vision_transformer has a package of this name, too: use it in another "
    "environment.",
)


def __dir__() -> list[str]:
    return sorted(__all__)
