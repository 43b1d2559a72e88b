"""The list of public weights, held to vit_jax/weights/README.md and to the names of networks."""

import itertools
import re

import pytest

from tests.tiny import ROOT
from vit_jax.config.variants import MODEL_NAMES, parse_name
from vit_jax.weights.family import expand
from vit_jax.weights.hub import is_hub_address
from vit_jax.weights.published import (
    SOURCES,
    find_licence,
    find_sources,
    list_addresses,
    list_releases,
)

TABLES = (ROOT / "vit_jax/weights/README.md").read_text()
PUBLISHED = list_addresses()
ADDRESSES = list(itertools.chain.from_iterable(PUBLISHED.values()))
SIZES = {
    "tiny": "Ti",
    "small": "S",
    "base": "B",
    "large": "L",
    "huge": "H",
}


def test_addresses_are_distinct():
    assert len(set(ADDRESSES)) == len(ADDRESSES)


def test_addresses_are_of_a_known_release():
    sources = set()
    for addresses in PUBLISHED.values():
        sources.update(find_sources(addresses))

    assert all(address.startswith(tuple(SOURCES)) for address in ADDRESSES)
    assert set(PUBLISHED) <= set(MODEL_NAMES)
    assert sources == set(SOURCES.values())


def find_size(file):
    """Return the size that the name of a repository states, if any."""
    for word, size in SIZES.items():
        if f"vit_{word}_" in file or f"vit-{word}-" in file:
            return size
    return None


def check_repository(file, network):
    size = find_size(file)

    assert size == network.size
    if size is not None and network.units is None:
        assert re.search(rf"patch{network.patch[0]}[_-]", file)


def check_file(file, name):
    short = name.replace("/", "_")
    shorter = short.replace("ViT-", "").replace("+", "_")

    assert re.search(rf"(^|-)({re.escape(short)}|{re.escape(shorter)})[-.]", file)


def test_every_file_of_the_documentation_is_listed():
    documented = set(re.findall(r"^\| `([^`]+\.npz)`", TABLES, re.MULTILINE))
    listed = {address.rpartition("/")[2] for address in ADDRESSES}

    assert len(documented) > 20
    assert documented <= listed


@pytest.mark.parametrize("name", PUBLISHED)
def test_files_bear_the_name_of_their_network(name):
    network = parse_name(name)

    for address in PUBLISHED[name]:
        file = address.rpartition("/")[2]
        if is_hub_address(address):
            check_repository(file, network)
        elif not file.startswith("vit_s16"):
            check_file(file, name)


@pytest.mark.parametrize("family", list_releases(), ids=lambda family: family.name)
def test_names_of_a_family_give_its_licence(family):
    for address in family.addresses:
        for name in expand(address):
            assert is_hub_address(name)
            assert find_licence(name.removeprefix("hf://")) == family.licence


@pytest.mark.parametrize(
    ("name", "licence"),
    [
        # A folder of transformers.
        ("dinov3_vit", "dinov3-license"),
        ("vit_small_patch16_dinov3.lvd1689m", "dinov3-license"),
        ("vit_small_patch16_dinov3_qkvb.lvd1689m", "dinov3-license"),
        ("vit_small_patch16_dinov3_qkvb.eupe_lvd1689m", "fair-noncommercial-research-license"),
        ("openai/clip-vit-base-patch32", "mit"),
        # Weights of OpenAI, LAION, Apple or Meta.
        ("clip_vision_model", ""),
        ("", ""),
        ("vit", ""),
        ("someone/vit-base", ""),
        ("vit_base_patch16_224.augreg_in21k", ""),
    ],
)
def test_the_licence_is_that_of_the_family_or_unknown(name, licence):
    assert find_licence(name) == licence
