"""Train Vision Transformers, BiT-ResNets and their hybrids in JAX.

Importing the package loads nothing heavy: neither jax nor any sub-package. Import the part you need,
for example `from vit_jax.models import build_model`.
"""

__version__ = "0.1.0"
