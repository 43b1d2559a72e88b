"""Arguments of the kernel for residual units.

Legend: I E C input, output and inner channels, N any number.
"""

from typing import NamedTuple

from jax import Array


class UnitParameters(NamedTuple):
    """Parameters of a unit in float32: kernels are standardised, a norm is its scale and its bias.

    The outer norm is the first one of a pre-activated unit (N = I), and the last one of a
    post-activated unit (N = E), whose shortcut has a norm too.
    """

    outer_norms_2N: Array  # (4, E) with the norm of the shortcut
    inner_norms_4C: Array
    conv1_IC: Array
    conv2_HWIO: Array
    conv3_CE: Array
    shortcut_IE: Array | None  # None: I = E, and the input is added


class Form(NamedTuple):
    """Properties of a unit that fix its program, beside the shapes of its arrays."""

    width: int  # columns of the input
    stride: int  # stride of the 3x3 convolution and the shortcut
    first_offset: int  # line and column where a window begins, from the output's position
    epsilon: float  # guard of the division in group norms
    is_preactivated: bool
    interpret: bool  # run on any device, slowly, as the kernel would on a TPU
