"""The table of model sizes, and names as people write them ("ViT-B/16").

`Architecture` is what a name becomes once every number is filled in: `models` builds it, `cost` counts it.
"""

import dataclasses
import difflib
import re

from vit_jax.config.schema import ModelConfig


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
    "b": TransformerSize(384, 12, 1536, 6),  # "b/32" of the paper's Figure 4: half of B in every hidden dimension
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

_NAME = re.compile(r"(?:ViT-)?(?P<size>[A-Za-z][\w-]*)/(?P<height>\d+)(?:x(?P<width>\d+))?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """Everything that fixes a network: its parameters, and how it computes.

    Attributes:
      image_size: height and width of the input in pixels.
      patch_size: height and width of a patch in pixels.
      num_classes: K, length of the logits.
      The others as in `schema.ModelConfig`.
    """

    name: str
    image_size: tuple[int, int]
    patch_size: tuple[int, int]
    num_classes: int
    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    pool: str = "token"
    position_embedding: str = "learned_1d"
    head: str = "linear"
    head_bias_init: float = 0.0
    dropout_fraction: float = 0.0
    stochastic_depth_fraction: float = 0.0
    gelu: str = "tanh"
    compute_dtype: str = "float32"
    remat: str = "none"
    scan_unroll: int = 1

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1]

    @property
    def sequence_length(self) -> int:
        """Tokens a block sees: the patches and, where there is one, the class token."""
        return self.grid[0] * self.grid[1] + (self.pool == "token")


def parse_name(name: str) -> tuple[str, tuple[int, int]]:
    """Splits "ViT-B/16" or "B/16x8" into the row of `VIT_SIZES` and the patch's height and width.

    Raises:
      ValueError: no such size; the nearest names are offered.
    """
    match = _NAME.fullmatch(name)
    if match and match["size"] in VIT_SIZES:
        height = int(match["height"])
        return match["size"], (height, int(match["width"] or height))
    known = [f"ViT-{size}/{patch}" for size in VIT_SIZES for patch in (32, 16, 14)]
    nearest = difflib.get_close_matches(name if name.startswith("ViT-") else f"ViT-{name}", known, n=3, cutoff=0.3)
    raise ValueError(
        f"model.name={name!r} is not a known model. Nearest: {', '.join(nearest) or 'none'}. "
        f"A name is ViT-SIZE/PATCH with SIZE one of {', '.join(VIT_SIZES)}."
    )


def build_architecture(config: ModelConfig, *, image_size: tuple[int, int], num_classes: int) -> Architecture:
    """Fills in the numbers that the name stands for.

    Raises:
      ValueError: unknown name, or numbers that do not fit together (patch and image, width and heads).
    """
    size_name, patch_size = parse_name(config.name)
    row = VIT_SIZES[size_name]
    chosen = {field: getattr(config, field) for field in ("width", "depth", "mlp_dim", "num_heads")}
    numbers = {field: getattr(row, field) if value is None else value for field, value in chosen.items()}
    shared = {field.name for field in dataclasses.fields(Architecture)} - {"name", *numbers}
    options = {name: value for name, value in vars(config).items() if name in shared}
    architecture = Architecture(
        name=config.name, image_size=image_size, patch_size=patch_size, num_classes=num_classes, **numbers, **options
    )
    _check(architecture)
    return architecture


def _check(a: Architecture) -> None:
    for field in ("width", "depth", "mlp_dim", "num_heads", "num_classes", "scan_unroll"):
        if getattr(a, field) < 1:
            raise ValueError(f"model.{field}={getattr(a, field)}: must be at least 1.")
    for axis, image, patch in zip(("height", "width"), a.image_size, a.patch_size, strict=True):
        if patch < 1 or image < 1 or image % patch:
            below = max(image, 0) // max(patch, 1) * patch
            sizes = f"{below} or {below + patch}" if below else str(patch)
            raise ValueError(
                f"model.name={a.name!r} has patches of {patch} pixels, which do not divide the image {axis} of "
                f"{image}: use an input.image_size of {sizes}, or another patch size."
            )
    if a.width % a.num_heads:
        raise ValueError(f"model.width={a.width} is not divisible by model.num_heads={a.num_heads}.")
    if a.position_embedding == "sincos2d" and a.width % 4:
        raise ValueError(f"model.position_embedding='sincos2d' needs a width divisible by 4, not {a.width}.")
    if a.position_embedding == "learned_2d" and a.width % 2:
        raise ValueError(f"model.position_embedding='learned_2d' needs an even width, not {a.width}.")
