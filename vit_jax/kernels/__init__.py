"""Forms of computations for one kind of device, chosen by `dispatch`.

`models/` has the reference of each in plain JAX.

The constants name activations that rematerialisation may keep.
"""

from jax import Array

ATTENTION_OUTPUT = "attention_output"
LOG_SUMS = "log_sums"  # logarithms of the sums of a softmax
MIDDLE = "middle"  # sum of the residual stream between attention and MLP
CONVOLUTION = "convolution"
STATISTICS = "statistics"  # means of a norm
REDUCED = "reduced"  # product with the first factor of LoRA

Factors = tuple[Array, Array]
"""A (I, r) and B (r, O), whose product is added to a kernel."""
