"""Names of networks ("ViT-B/16", "R50x1", "R50+ViT-B/16").

`sizes` has the tables of their rows, `architecture.Architecture` all numbers of a name.
"""

import dataclasses
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from vit_jax.config.sizes import RESNET_UNITS, VIT_SIZES
from vit_jax.text.nearest import closest

_PATCHES = {
    "mu": (16,),
    "Ti": (16,),
    "S": (32, 16),
    "b": (32, 16),
    "M": (32, 16),
    "B": (32, 16, 8),
    "L": (32, 16),
}
"""Patch sizes of published networks; other sizes have patches of 16 and 14."""


def _list_vits() -> Iterator[str]:
    for size in VIT_SIZES:
        for patch in _PATCHES.get(size, (16, 14)):
            yield f"ViT-{size}/{patch}"


MODEL_NAMES = (
    *_list_vits(),
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
    "R200x1",
    "R200x3",
    "R+ViT-Ti/16",
    "R26+ViT-S/32",
    "R26+ViT-B/32",
    "R50+ViT-B/32",
    "R50+ViT-B/16",
    "R50+ViT-L/32",
    "R50+ViT-L/16",
)
"""The usual networks.

`parse_name` reads every other patch size, width factor and combination, too.
"""


def list_models(pattern: str = "") -> list[str]:
    """Return the names of the usual networks that match a pattern such as "ViT-B/*".

    A pattern without signs matches names that contain it. Upper and lower case differ ("ViT-b" is
    not "ViT-B"), unless nothing matches otherwise.
    """
    if not set(pattern) & set("*?["):
        pattern = f"*{pattern}*"
    names = [name for name in MODEL_NAMES if fnmatchcase(name, pattern)]
    if not names:
        pattern = pattern.lower()
        names = [name for name in MODEL_NAMES if fnmatchcase(name.lower(), pattern)]
    return names


_NAME = re.compile(
    r"(?:(?P<resnet>R)(?P<depth>(?:[1-9]\d*)?)(?:x(?P<factor>\d+(?:\.\d+)?))?(?:$|\+(?=.)))?"
    r"(?:(?:ViT-)?(?P<size>[A-Za-z][\w-]*)/(?P<height>[1-9]\d*)(?:x(?P<width>[1-9]\d*))?)?"
)


@dataclasses.dataclass(frozen=True)
class ModelName:
    """A parsed name.

    Attributes:
      size: row of `VIT_SIZES`; None for a ResNet.
      patch: height and width as written: pixels of a patch, or the total downsampling of a hybrid.
      units: residual units of each stage, () for the root alone; None for a ViT.
      width_factor: factor on the channels of the ResNet.
    """

    size: str | None = None
    patch: tuple[int, int] = (1, 1)
    units: tuple[int, ...] | None = None
    width_factor: float = 1.0


def parse_name(name: str) -> ModelName:
    """Parse "ViT-B/16", "B/16x8", "R50", "R50x2", "R50+ViT-B/16", "R50x1+ViT-B/32" or "R+Ti/16".

    Raises:
      ValueError: no such model; the nearest names are offered.
    """
    match = _NAME.fullmatch(name)
    if not match or not (match["size"] or match["resnet"]):
        raise _unknown_name(name)
    size = match["size"]
    if size and size not in VIT_SIZES:
        raise _unknown_name(name)

    units = None
    factor = 1.0
    if match["resnet"]:
        depth = int(match["depth"] or 0)
        factor = float(match["factor"] or 1)
        is_known_depth = depth in RESNET_UNITS
        is_root_of_hybrid = depth == 0 and size is not None
        if factor == 0 or not (is_known_depth or is_root_of_hybrid):
            raise _unknown_name(name)
        units = RESNET_UNITS.get(depth, ())
    if not size:
        return ModelName(units=units, width_factor=factor)
    height = int(match["height"])
    width = int(match["width"] or height)
    return ModelName(size, (height, width), units, factor)


_SIZES_ELSEWHERE = {
    "ti": "Ti",
    "tiny": "Ti",
    "s": "S",
    "small": "S",
    "b": "B",
    "base": "B",
    "l": "L",
    "large": "L",
    "h": "H",
    "huge": "H",
    "giant": "g",
    "gigantic": "G",
}
"""Our sizes by the words of other systems."""


def _unknown_name(name: str) -> ValueError:
    """Return the error for a name that is none, with the nearest names."""
    nearest = closest(_guess_name(name), _list_known_names(), 3, cutoff=0.3)
    near = ", ".join(nearest) or "none"
    sizes = ", ".join(VIT_SIZES)
    depths = ", ".join(map(str, RESNET_UNITS))
    forms = (
        f"ViT-SIZE/PATCH with SIZE one of {sizes}; or RDEPTHxWIDTH with DEPTH one of {depths}; "
        "or both, as in R50+B/16"
    )
    return ValueError(f"model.name={name!r}: must be a model. Nearest: {near}. Forms: {forms}.")


def _list_known_names() -> list[str]:
    """Return names of every size and depth, from which the nearest are offered."""
    vits = []
    hybrid_vits = []
    for size in VIT_SIZES:
        vits += [f"ViT-{size}/32", f"ViT-{size}/16", f"ViT-{size}/14"]
        hybrid_vits += [f"ViT-{size}/32", f"ViT-{size}/16"]
    resnets = []
    hybrids = []
    for depth in RESNET_UNITS:
        resnets += [f"R{depth}x{factor}" for factor in (1, 2, 3, 4)]
        hybrids += [f"R{depth}+{vit}" for vit in hybrid_vits]
    return [*vits, *resnets, *hybrids, "R+ViT-Ti/16"]


def _guess_name(name: str) -> str:
    """Return the form here of a name such as "resnet50" or "vit_base_patch16_224"."""
    elsewhere = re.search(r"(?:vi|dei)t[-_](\w+?)[-_](?:patch)?(\d+)", name.lower())
    if elsewhere and elsewhere[1] in _SIZES_ELSEWHERE:
        return f"ViT-{_SIZES_ELSEWHERE[elsewhere[1]]}/{elsewhere[2]}"
    guess = re.sub(r"^(ResNet-?|r)(?=\d)", "R", name.strip())
    guess = re.sub(r"^(R\d+)$", r"\1x1", guess)
    if guess.startswith("R"):
        guess = re.sub(r"\+(?!ViT-)", "+ViT-", guess)
    if re.match(r"ViT-|R\d", guess):
        return guess
    return f"ViT-{guess}"
