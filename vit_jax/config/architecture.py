"""A network with every number filled in, from which `models` builds it.

`sharding` estimates its memory, and checkpoints store it.

`networks` makes an architecture from a config and `adaptation` one for fine-tuning;
`architecture_rules` checks both.
"""

import dataclasses
import math
from typing import Annotated, Any, Literal

from vit_jax.config import network_options as options
from vit_jax.config.rules import Count, Number, Positive, Range, Reference, Transformer
from vit_jax.config.sizes import BOTTLENECK, RGB_CHANNELS, ROOT_CHANNELS, resnet_downsampling
from vit_jax.imports.reference_form import is_reference

_MODERN_OPTIONS = (
    "channels",
    "class_tokens",
    "pool_num_heads",
    "registers",
    "position_tokens",
    "rope",
    "layer_scale",
    "mlp",
    "norm",
    "embedding_norm",
    "final_norm",
    "attention_norm",
    "patch_bias",
    "qkv_bias",
    "linear_bias",
)
_CUSTOM_FIELDS = ("network", "block", "position_embedding", "pool", "head")
UNROLLED = ("none", "dots")
"""Policies of rematerialisation with which accelerators need no loop over layers."""

Family = Literal["vit", "resnet", "hybrid"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture(options.NetworkOptions):
    """All numbers and forms of a network."""

    name: str
    family: Family = "vit"
    image_size: tuple[int, int]
    """Height and width of the input in pixels."""
    channels: Annotated[int, Range("[1, 32]")] = RGB_CHANNELS
    """Channels C of the input."""
    patch_size: tuple[int, int]
    """Height and width, in pixels for a ViT, in cells of the ResNet's map for a hybrid."""
    num_classes: Number
    """Length K of the logits; 0 for a network that ends in its features."""
    patch_outputs: Number = 0
    """Numbers O predicted for each patch by a network for masked patches, which has no classes."""
    width: Transformer[Count]
    """Length D of the representation of an image."""
    depth: Transformer[Count]
    """Number of blocks. It is 0 for a ResNet, like mlp_dim and num_heads."""
    mlp_dim: Transformer[Count]
    num_heads: Transformer[Count]
    units: tuple[int, ...] = ()
    """Residual units of each stage; () for a ViT, and for a hybrid whose ResNet is the root
    alone."""
    width_factor: float = 1.0
    """Factor on all channels of the ResNet."""
    pool: options.Pool | Reference = "token"
    head: options.HeadForm | Reference = "linear"
    rope_grid: tuple[int, int] | None = None
    """Rows and columns to which rope="index" scales its positions; None: those of the patches."""
    residual_unit: options.UnitForm = "postactivation"
    group_norm_epsilon: Positive = 1e-6
    standardization_epsilon: Positive = 1e-5
    standardization_epsilon_added_to: options.AddedTo = "std"
    compute_dtype: options.ComputeDtype = "float32"
    remat: options.Policy = "none"
    """Policy of rematerialisation, which `train.layout` has chosen in place of auto."""

    @property
    def custom_components(self) -> dict[str, str]:
        """References to user-defined components, by field."""
        values = {field: getattr(self, field) for field in _CUSTOM_FIELDS}
        return {field: value for field, value in values.items() if is_reference(value)}

    @property
    def modern_options(self) -> dict[str, Any]:
        """Components of current pre-trained ViTs that the paper's does not have, by field."""
        modern = {}
        for name in _MODERN_OPTIONS:
            value = getattr(self, name)
            if value != getattr(Architecture, name):
                modern[name] = value
        if self.gelu == "quick":
            modern["gelu"] = "quick"
        return modern

    @property
    def is_standard(self) -> bool:
        """Return True without user-defined components.

        Formulas and other formats know standard networks only.
        """
        return not self.custom_components

    @property
    def scan_unroll_on_cpu(self) -> int:
        """Number of blocks per iteration of the loop over layers on CPUs."""
        return self.scan_unroll or 1

    @property
    def scan_unroll_on_accelerators(self) -> int:
        """Number of blocks per iteration of the loop over layers on TPUs and GPUs.

        A loop copies all activations that it keeps there. The copies cost a quarter of a step.
        Policies that keep few activations use a loop, because
        XLA does not recompute the others without one.
        """
        if self.scan_unroll is not None:
            return self.scan_unroll
        return self.depth if self.remat in UNROLLED else 1

    @property
    def has_transformer(self) -> bool:
        return self.family != "resnet"

    @property
    def has_resnet(self) -> bool:
        return self.family != "vit"

    @property
    def root_channels(self) -> int:
        """Channels after the root of the ResNet."""
        return round(ROOT_CHANNELS * self.width_factor)

    @property
    def map_channels(self) -> int:
        """Channels of the map that is cut into patches: those of the image or the ResNet's map."""
        if not self.has_resnet:
            return self.channels
        if not self.units:
            return self.root_channels
        return self.stage_channels(len(self.units) - 1)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the input."""
        return *self.image_size, self.channels

    @property
    def map_size(self) -> tuple[int, int]:
        """Height and width of the map that is cut into patches: the image or the ResNet's map."""
        if not self.has_resnet:
            return self.image_size
        divisor = resnet_downsampling(self.units)
        height, width = self.image_size
        return math.ceil(height / divisor), math.ceil(width / divisor)

    def stage_channels(self, stage: int) -> int:
        """Output channels of a stage, counted from 0."""
        return self.root_channels * BOTTLENECK * 2**stage

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches, or of the map of a ResNet."""
        height, width = self.map_size
        patch_height, patch_width = self.patch_size
        return height // patch_height, width // patch_width

    def count_kept_patches(self, dropped_fraction: float) -> int:
        """Return the number of patches of an image that patch dropout keeps, at least one."""
        num_patches = math.prod(self.grid)
        num_dropped = round(dropped_fraction * num_patches)
        return max(num_patches - num_dropped, 1)

    @property
    def sequence_length(self) -> int:
        """Number of tokens in a block: class tokens, registers and patches."""
        rows, columns = self.grid
        return self.prefix_length + rows * columns

    @property
    def num_class_tokens(self) -> int:
        """Number of class tokens."""
        if self.class_tokens is not None:
            return self.class_tokens
        return 1 if self.pool in ("token", "token_gap") else 0

    @property
    def prefix_length(self) -> int:
        """Number of tokens before the patches: class tokens and registers."""
        return self.num_class_tokens + self.registers

    @property
    def feature_width(self) -> int:
        """Length of the pooled features: D for each pooled class token, and D for a mean."""
        if self.pool == "token":
            return self.width * self.num_class_tokens
        if self.pool == "token_gap":
            return self.width * (self.num_class_tokens + 1)
        return self.width

    @property
    def block_attention(self) -> options.AttentionForm:
        """Requested form of attention in blocks.

        No kernel computes relative positions. Kernels are for longer sequences than those of axial
        blocks.
        """
        if self.position_embedding == "relative":
            return "xla"
        if self.block == "axial" and self.attention == "auto":
            return "xla"
        return self.attention

    @property
    def attention_lengths(self) -> tuple[int, ...]:
        """Lengths of the sequences that a block attends over: all tokens, or a row, then a column."""
        if self.block != "axial":
            return (self.sequence_length,)
        rows, columns = self.grid
        return columns, rows
