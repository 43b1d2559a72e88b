"""Families of pre-trained weights: one module for each, imported on first use.

A new family is a module with a `FAMILY` and its name in `NAMES`.
"""

import functools
import importlib

from vit_jax.weights.family import Family

NAMES: tuple[str, ...] = (
    "vision_transformer",
    "hybrid",
    "bit",
    "mae",
    "ijepa",
    "deit",
    "deit3",
    "dinov2",
    "tipsv2",
    "dinov3",
    "siglip",
    "clip",
    "eva",
    "perception_encoder",
    "aimv2",
    "radio",
    "internvit",
    "rejected",
)
"""Modules of families, in the order of the documentation."""


def load_families() -> tuple[Family, ...]:
    """Return all families."""
    return _import_families(NAMES)


@functools.cache
def _import_families(names: tuple[str, ...]) -> tuple[Family, ...]:
    families: list[Family] = []
    for name in names:
        module = importlib.import_module(f"{__name__}.{name}")
        families.append(module.FAMILY)
    return tuple(families)
