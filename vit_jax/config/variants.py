"""Tables of model sizes, and names ("ViT-B/16", "R50x1", "R50+ViT-B/16").

`architecture.Architecture` has all numbers of a name.
"""

import dataclasses
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from vit_jax.text.nearest import closest


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
    "b": TransformerSize(
        384, 12, 1536, 6
    ),  # "b/32" of the paper's Figure 4: half of B in every hidden dimension
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

RESNET_UNITS = {  # residual units of each stage
    14: (1, 1, 1, 1),  # a test size
    26: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}


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

ROOT_CHANNELS = 64  # times the width factor
NUM_GROUPS = 32  # of every group norm
BOTTLENECK = 4  # output channels of a residual unit for each of its inner ones


def resnet_downsampling(units: Sequence[int]) -> int:
    """Return the factor by which a ResNet reduces height and width: root, pooling, every stage but the first."""
    return 4 * 2 ** max(len(units) - 1, 0)


_PATCHES = {
    "mu": (16,),
    "Ti": (16,),
    "B": (32, 16, 8),
    **dict.fromkeys(("S", "b", "M", "L"), (32, 16)),
}
MODEL_NAMES = (
    *(f"ViT-{size}/{patch}" for size in VIT_SIZES for patch in _PATCHES.get(size, (16, 14))),
    *(
        "R14x1",
        "R26x1",
        "R50x1",
        "R50x2",
        "R50x3",
        "R101x1",
        "R101x3",
        "R152x1",
        "R152x2",
        "R152x4",
    ),
    *("R200x1", "R200x3", "R+ViT-Ti/16", "R26+ViT-S/32", "R26+ViT-B/32"),
    *("R50+ViT-B/32", "R50+ViT-B/16", "R50+ViT-L/32", "R50+ViT-L/16"),
)
"""The usual networks. `parse_name` reads every other patch size, width factor and combination, too."""


def list_models(pattern: str = "") -> list[str]:
    """Return the names of the usual networks, or those that match a pattern such as "ViT-B/*" or contain a text.

    Upper and lower case differ ("ViT-b" is not "ViT-B"), unless nothing matches otherwise.
    """
    pattern = pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*"
    names = [name for name in MODEL_NAMES if fnmatchcase(name, pattern)]
    return names or [name for name in MODEL_NAMES if fnmatchcase(name.lower(), pattern.lower())]


_NAME = re.compile(
    r"(?:(?P<resnet>R)(?P<depth>(?:[1-9]\d*)?)(?:x(?P<factor>\d+(?:\.\d+)?))?(?:$|\+(?=.)))?"
    r"(?:(?:ViT-)?(?P<size>[A-Za-z][\w-]*)/(?P<height>[1-9]\d*)(?:x(?P<width>[1-9]\d*))?)?"
)


@dataclasses.dataclass(frozen=True)
class ModelName:
    """A parsed name."""

    size: str | None = None  # row of `VIT_SIZES`; None for a ResNet
    patch: tuple[int, int] = (
        1,
        1,
    )  # height and width as written, in pixels; of a hybrid, its total downsampling
    units: tuple[int, ...] | None = (
        None  # residual units of each stage, () for the root alone; None for a ViT
    )
    width_factor: float = 1.0  # of the ResNet


def parse_name(name: str) -> ModelName:
    """Parse "ViT-B/16", "B/16x8", "R50", "R50x2", "R50+ViT-B/16", "R50x1+ViT-B/32" or "R+Ti/16".

    Raises:
      ValueError: no such model; the nearest names are offered.
    """
    match = _NAME.fullmatch(name)
    if (
        not match
        or not (match["size"] or match["resnet"])
        or (match["size"] and match["size"] not in VIT_SIZES)
    ):
        raise _unknown_name(name)
    units = None
    factor = 1.0
    if match["resnet"]:
        depth = int(match["depth"] or 0)
        factor = float(match["factor"] or 1)
        if not factor or (depth not in RESNET_UNITS and (depth or not match["size"])):
            raise _unknown_name(name)
        units = RESNET_UNITS[depth] if depth else ()
    if not match["size"]:
        return ModelName(units=units, width_factor=factor)
    height = int(match["height"])
    return ModelName(match["size"], (height, int(match["width"] or height)), units, factor)


_SIZES_ELSEWHERE = {
    "tiny": "Ti",
    "small": "S",
    "base": "B",
    "large": "L",
    "huge": "H",
    "giant": "g",
    "gigantic": "G",
}
_SIZES_ELSEWHERE |= {size.lower(): size for size in ("Ti", "S", "B", "L", "H")}


def _unknown_name(name: str) -> ValueError:
    vits = [f"ViT-{size}/{patch}" for size in VIT_SIZES for patch in (32, 16, 14)]
    resnets = [f"R{depth}x{factor}" for depth in RESNET_UNITS for factor in (1, 2, 3, 4)]
    hybrids = [
        f"R{depth}+{vit}" for depth in RESNET_UNITS for vit in vits if not vit.endswith("14")
    ] + ["R+ViT-Ti/16"]
    meant = re.sub(r"^(ResNet-?|r)(?=\d)", "R", name.strip())
    meant = re.sub(r"^(R\d+)$", r"\1x1", meant)
    meant = re.sub(r"\+(?!ViT-)", "+ViT-", meant) if meant.startswith("R") else meant
    meant = meant if re.match(r"ViT-|R\d", meant) else f"ViT-{meant}"
    elsewhere = re.search(
        r"(?:vi|dei)t[-_](\w+?)[-_](?:patch)?(\d+)", name.lower()
    )  # timm's and Hugging Face's
    if elsewhere and elsewhere[1] in _SIZES_ELSEWHERE:
        meant = f"ViT-{_SIZES_ELSEWHERE[elsewhere[1]]}/{elsewhere[2]}"
    nearest = closest(meant, vits + resnets + hybrids, 3, cutoff=0.3)
    sizes = ", ".join(VIT_SIZES)
    depths = ", ".join(map(str, RESNET_UNITS))
    forms = (
        f"ViT-SIZE/PATCH with SIZE one of {sizes}; or RDEPTHxWIDTH with DEPTH one of {depths}; "
        "or both, as in R50+B/16"
    )
    return ValueError(
        f"model.name={name!r}: must be a model. Nearest: {', '.join(nearest) or 'none'}. Forms: {forms}."
    )
