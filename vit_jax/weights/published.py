"""Public weights by network and by family, in formats that `load` reads.

This module downloads nothing.

`families` holds them. An address is a file in a bucket of its authors, to be downloaded first, or
`hf://owner/name`. {A,B} stands for both.
"""

import re

from vit_jax.weights.families import load_families
from vit_jax.weights.family import Release

SOURCES = {  # beginning of an address: name of what is published there
    "gs://vit_models/imagenet21k": "ViT",
    "gs://vit_models/augreg/": "AugReg",
    "gs://vit_models/sam/": "SAM",
    "gs://big_vision/": "big_vision",
    "gs://bit_models/": "BiT",
    "hf://google/": "Hugging Face",
    "hf://timm/": "timm",
}

RELEASE_HEAD = ("family", "good for", "licence", "pixels", "accuracy", "source")


def published_addresses() -> dict[str, tuple[str, ...]]:
    """Return the addresses of public weights, by the name of their network."""
    addresses: dict[str, tuple[str, ...]] = {}
    for family in load_families():
        addresses |= family.addresses
    return addresses


def sources_of(name: str) -> list[str]:
    """Return the names of the sources that have weights of this network."""
    addresses = published_addresses().get(name, ())
    return [
        source
        for start, source in SOURCES.items()
        if any(address.startswith(start) for address in addresses)
    ]


def list_releases() -> list[Release]:
    """Return the families of pre-trained ViTs that are read, with facts of their authors."""
    releases: list[Release] = []
    for family in load_families():
        releases += family.releases
    return releases


def release_cells(release: Release) -> tuple[str, ...]:
    """Return the cells of a release below `RELEASE_HEAD`."""
    return (
        release.name,
        release.use,
        release.licence,
        release.pixels,
        release.accuracy,
        release.source,
    )


def licence_of(name: str) -> str:
    """Return the licence of the family of a Hub name, a timm model with its tag, or a model type of transformers.

    "" if no or several families have it.
    """
    if not name:
        return ""
    licences = {release.licence for release in list_releases() if re.search(release.pattern, name)}
    return licences.pop() if len(licences) == 1 else ""
