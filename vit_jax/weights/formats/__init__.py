"""Files of named arrays, `.npz` and `.safetensors`: read without trusting them, written whole.

A file is arrays by name and a dictionary of metadata; what the names mean is for others to say.
"""

from vit_jax.weights.formats.arrays import ArrayFile, StoredArray
from vit_jax.weights.formats.npz import write_npz
from vit_jax.weights.formats.opening import open_arrays
from vit_jax.weights.formats.safetensors import write_safetensors

__all__ = ["ArrayFile", "StoredArray", "open_arrays", "write_npz", "write_safetensors"]
