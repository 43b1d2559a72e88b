"""The list of public weights, against the tables of vit_jax/weights/README.md and the names of networks."""

import re

import pytest

from tests.tiny import ROOT
from vit_jax.config.variants import MODEL_NAMES, parse_name
from vit_jax.weights.family import expand
from vit_jax.weights.hub import is_hub_address
from vit_jax.weights.published import (
    SOURCES,
    find_licence,
    list_addresses,
    list_releases,
    list_sources,
)

TABLES = (ROOT / "vit_jax/weights/README.md").read_text()
PUBLISHED = list_addresses()
ADDRESSES = [address for addresses in PUBLISHED.values() for address in addresses]


def test_addresses_are_distinct_and_of_a_known_release():
    assert len(set(ADDRESSES)) == len(ADDRESSES)
    assert all(any(address.startswith(start) for start in SOURCES) for address in ADDRESSES)
    assert set(PUBLISHED) <= set(MODEL_NAMES)
    assert {source for name in PUBLISHED for source in list_sources(name)} == set(SOURCES.values())


def test_every_file_of_the_documentation_is_listed():
    documented = set(re.findall(r"^\| `([^`]+\.npz)`", TABLES, re.MULTILINE))
    listed = {address.rpartition("/")[2] for address in ADDRESSES}

    assert len(documented) > 20
    assert documented <= listed


@pytest.mark.parametrize("name", PUBLISHED)
def test_files_bear_the_name_of_their_network(name):
    size = parse_name(name)
    sizes = {"tiny": "Ti", "small": "S", "base": "B", "large": "L", "huge": "H"}

    for address in PUBLISHED[name]:
        file = address.rpartition("/")[2]
        if is_hub_address(address):
            word = next(
                (word for word in sizes if f"vit_{word}_" in file or f"vit-{word}-" in file),
                None,
            )

            assert sizes.get(word) == size.size
            assert (
                word is None
                or size.units is not None
                or re.search(rf"patch{size.patch[0]}[_-]", file)
            )
        elif not file.startswith("vit_s16"):
            short = name.replace("/", "_")
            variants = (short, short.replace("ViT-", "").replace("+", "_"))
            assert any(re.search(rf"(^|-){re.escape(variant)}[-.]", file) for variant in variants)


@pytest.mark.parametrize("family", list_releases(), ids=lambda family: family.name)
def test_names_of_a_family_give_its_licence(family):
    for name in (one for address in family.addresses for one in expand(address)):
        assert is_hub_address(name)
        assert find_licence(name.removeprefix("hf://")) == family.licence


@pytest.mark.parametrize(
    ("name", "licence"),
    [
        ("dinov3_vit", "dinov3-license"),  # a folder of transformers
        ("vit_small_patch16_dinov3.lvd1689m", "dinov3-license"),
        ("vit_small_patch16_dinov3_qkvb.lvd1689m", "dinov3-license"),
        ("vit_small_patch16_dinov3_qkvb.eupe_lvd1689m", "fair-noncommercial-research-license"),
        ("openai/clip-vit-base-patch32", "mit"),
        ("clip_vision_model", ""),  # of OpenAI, LAION, Apple or Meta
        *(
            (name, "")
            for name in ("", "vit", "someone/vit-base", "vit_base_patch16_224.augreg_in21k")
        ),
    ],
)
def test_the_licence_is_that_of_the_family_or_unknown(name, licence):
    assert find_licence(name) == licence
