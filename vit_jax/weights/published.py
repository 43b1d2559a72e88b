"""Public weights by network and by family, in formats that `load` reads.

`families` holds them; this module downloads nothing. An address is `hf://owner/name`, or a file in
a bucket of its authors, to be downloaded first. {A,B} stands for both names.
"""

import re
from collections.abc import Collection

from vit_jax.weights.families import load_families
from vit_jax.weights.family import Release

SOURCES = {
    "gs://vit_models/imagenet21k": "ViT",
    "gs://vit_models/augreg/": "AugReg",
    "gs://vit_models/sam/": "SAM",
    "gs://big_vision/": "big_vision",
    "gs://bit_models/": "BiT",
    "hf://google/": "Hugging Face",
    "hf://timm/": "timm",
}
"""Beginning of an address → name of the weights that are published there."""

RELEASE_HEAD = ("family", "good for", "licence", "pixels", "accuracy", "source")


def list_addresses() -> dict[str, tuple[str, ...]]:
    """Return the addresses of public weights, by the name of their network."""
    addresses: dict[str, tuple[str, ...]] = {}
    for family in load_families():
        addresses |= family.addresses
    return addresses


def find_sources(addresses: Collection[str]) -> list[str]:
    """Return the names of the sources that publish weights at these addresses."""
    sources = []
    for start, source in SOURCES.items():
        if any(address.startswith(start) for address in addresses):
            sources.append(source)
    return sources


def list_releases() -> list[Release]:
    """Return the families of pre-trained ViTs that are read, with facts of their authors."""
    releases: list[Release] = []
    for family in load_families():
        releases += family.releases
    return releases


def list_cells(release: Release) -> tuple[str, ...]:
    """Return the cells of a release below `RELEASE_HEAD`."""
    return (
        release.name,
        release.use,
        release.licence,
        release.pixels,
        release.accuracy,
        release.source,
    )


def find_finetuning_rule(name: str) -> str:
    """Return the rule of the recipe `finetune` for the family that a name belongs to; "" for none.

    Names are those of `find_licence`.
    """
    rules = set()
    for family in load_families():
        is_released = any(re.search(release.pattern, name) for release in family.releases)
        if name and (is_released or name in family.model_types):
            rules.add(family.finetuning_rule)
    if len(rules) != 1:
        return ""
    return rules.pop()


def find_licence(name: str) -> str:
    """Return the licence of the family that a name belongs to; "" for none, or several licences.

    The name is one of the Hub, a timm model with its tag, or a model type of transformers.
    """
    if not name:
        return ""
    licences = set()
    for release in list_releases():
        if re.search(release.pattern, name):
            licences.add(release.licence)
    if len(licences) != 1:
        return ""
    return licences.pop()
