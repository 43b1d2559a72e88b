"""Tables of sizes: the rows of Vision Transformers, the residual units of ResNets."""

import dataclasses
from collections.abc import Sequence

RGB_CHANNELS = 3
"""Channels of a colour image: red, green and blue."""


@dataclasses.dataclass(frozen=True)
class TransformerSize:
    """One row of the size table: width D, depth L, MLP dimension, heads."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int


VIT_SIZES = {
    "mu": TransformerSize(32, 1, 128, 2),  # a test size
    "Ti": TransformerSize(192, 12, 768, 3),  # AugReg, DeiT
    "S": TransformerSize(384, 12, 1536, 6),
    # "b/32" of the paper's Figure 4: half of B in every hidden dimension.
    "b": TransformerSize(384, 12, 1536, 6),
    "M": TransformerSize(512, 12, 2048, 8),
    "B": TransformerSize(768, 12, 3072, 12),  # ViT, Table 1
    "L": TransformerSize(1024, 24, 4096, 16),
    "So400m": TransformerSize(1152, 27, 4304, 16),
    "H": TransformerSize(1280, 32, 5120, 16),
    "g": TransformerSize(1408, 40, 6144, 16),  # Scaling Vision Transformers
    "g-opt": TransformerSize(1536, 40, 6144, 16),
    "G": TransformerSize(1664, 48, 8192, 16),
    "G-opt": TransformerSize(1536, 48, 8192, 16),
    "e": TransformerSize(1792, 56, 15360, 16),  # PaLI
}

RESNET_UNITS = {
    14: (1, 1, 1, 1),  # a test size
    26: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}
"""Residual units of each stage, by depth."""


@dataclasses.dataclass(frozen=True)
class ResidualUnit:
    """The constants that a form of residual unit was released with."""

    group_norm_epsilon: float
    standardization_epsilon: float
    standardization_epsilon_added_to: str


RESIDUAL_UNITS = {
    "preactivation": ResidualUnit(1e-5, 1e-10, "variance"),  # Big Transfer (BiT)
    "postactivation": ResidualUnit(1e-6, 1e-5, "std"),  # the stem of ViT's hybrids
}

ROOT_CHANNELS = 64
"""Channels after the root, for a width factor of 1."""
NUM_GROUPS = 32
"""Groups of every group norm."""
BOTTLENECK = 4
"""Output channels of a residual unit for each of its inner channels."""


def resnet_downsampling(units: Sequence[int]) -> int:
    """Return the factor by which a ResNet reduces height and width.

    The root, the pooling and every stage but the first halve them.
    """
    return 4 * 2 ** max(len(units) - 1, 0)
