"""Names of networks in `config.json`: read, rejected with a reason, unknown, and given by an option."""

import itertools
import json
import pathlib
import re

import pytest
from numpy.testing import assert_array_equal
from safetensors.numpy import save_file

from tests.weights.reference.families import full_names, values
from vit_jax.weights import architectures, load_weights
from vit_jax.weights.architectures import (
    find_current_name,
    find_huggingface_fields,
    find_timm_fields,
    find_unsupported,
    is_known,
    list_deprecated_names,
    list_model_types,
    list_models,
)
from vit_jax.weights.families import load_families
from vit_jax.weights.family import expand
from vit_jax.weights.published import list_addresses, list_releases
from vit_jax.weights.saving import save_weights

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests/golden/families.json").read_text())["cases"]
SIZES = list_models()
DEPRECATED = list_deprecated_names()


def write_case(case, folder, **changes):
    """Write the weights and the configuration of a small network, with changes; return its folder.

    A change to None removes the field.
    """
    golden = GOLDEN[case]
    folder.mkdir(exist_ok=True)
    shapes = full_names(golden["shapes"], depth=2)
    arrays = {}
    for name, shape in shapes.items():
        arrays[name] = values(name, shape)

    save_file(arrays, folder / "model.safetensors")

    config = {**golden["config"], **changes}
    stated = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(stated))
    return folder


def require_same(weights, others):
    assert weights.architecture == others.architecture
    assert weights.parameters.keys() == others.parameters.keys()

    for name, array in weights.parameters.items():
        assert_array_equal(array, others.parameters[name])


def test_the_page_counts_the_names_of_the_list():
    page = (ROOT / "vit_jax/bench/AGREEMENT.md").read_text()
    row = re.search(r"^\| all \| (\d+) \| (\d+) \|", page, re.MULTILINE)

    assert int(row[1]) == len(SIZES)
    assert int(row[2]) > 0


def test_no_name_of_the_list_has_a_reason_to_be_rejected():
    for name in SIZES:
        assert not find_unsupported(name), name


def test_deprecated_names_lead_to_names_of_the_list():
    assert set(DEPRECATED.values()) <= set(SIZES)
    assert not set(DEPRECATED) & set(SIZES)


def test_names_of_the_list_give_sizes_or_are_resnets():
    for name in SIZES:
        fields = find_timm_fields(name, {})
        is_resnet = name.startswith("resnetv2_")
        assert (fields == {}) == is_resnet, name
        if is_resnet:
            continue

        assert fields["width"] % fields["num_heads"] == 0, name
        assert fields["rope"] in (None, "centred", "grid", "index"), name


# Sizes as in the papers, or in timm's functions where the paper has no such size.
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("vit_base_patch16_224", (768, 12, 12)),
        ("vit_large_patch14_reg4_dinov2", (1024, 24, 16)),
        ("eva02_tiny_patch14_224", (192, 12, 3)),
        ("eva_giant_patch14_224", (1408, 40, 16)),
        ("vit_so400m_patch14_siglip_384", (1152, 27, 16)),
        ("vit_base_patch16_gap_224", (768, 12, 16)),
    ],
)
def test_sizes_are_those_of_the_model(name, sizes):
    assert SIZES[name] == sizes


def list_published_names():
    """Return the names of timm whose weights are published."""
    addresses = itertools.chain.from_iterable(list_addresses().values())
    names = []
    for address in itertools.chain(addresses, *(each.addresses for each in list_releases())):
        for full_address in expand(address):
            if full_address.startswith("hf://timm/"):
                names.append(full_address.removeprefix("hf://timm/"))
    return names


def list_written_names():
    """Return the names of timm that are written for weights of a family."""
    names = []
    for family in load_families():
        names.extend(model.name for model in family.timm_models)
        names.extend(family.timm_bodies.values())
    return names


def test_published_and_written_names_are_known():
    published = list_published_names()

    assert len(published) > 50
    assert list(itertools.filterfalse(is_known, published)) == []
    assert list(itertools.filterfalse(is_known, list_written_names())) == []


def test_tags_and_deprecated_names():
    assert find_current_name("vit_base_patch16_224.mae") == "vit_base_patch16_224"
    assert find_current_name("vit_small_patch16_224_dino.x") == "vit_small_patch16_224"
    assert is_known("dinov2")
    assert not is_known("vit_base_patch16_rpn_224")


REJECTED = [
    (
        "vit_base_patch16_rpn_224",
        "a ViT with post-norm blocks is not supported: it has a norm behind each branch",
    ),
    (
        "eva02_enormous_patch14_clip_224",
        "a ViT with post-norm blocks is not supported: it has a norm behind each",
    ),
    (
        "vit_so150m_patch16_reg4_map_256",
        "attention pooling and registers is not supported: it has a pooling of",
    ),
    ("cait_xs24_384", "CaiT is not supported: it has attention that mixes heads"),
    ("beitv2_large_patch16_224", "BEiT is not supported: it has relative positions"),
    ("beit3_base_patch16_224", "BEiT-3 is not supported: it has norms in MLPs"),
    (
        "vit_medium_patch16_rope_reg1_gap_256",
        "RoPE-ViT is not supported: it has rotary positions of other forms",
    ),
    ("vit_relpos_small_patch16_224", "a ViT with relative positions is not supported"),
    ("samvit_huge_patch16", "SAM is not supported: it has attention in windows"),
    (
        "naflexvit_base_patch16_siglip",
        "a NaFlex model is not supported: it has patches of images of any aspect ratio",
    ),
    (
        "vit_small_patch16_18x2_224",
        "a ViT with parallel layers is not supported: it has several branches",
    ),
    ("resnetv2_50d_gn", "a ResNet v2 other than Big Transfer's is not supported"),
]


@pytest.mark.parametrize(("name", "words"), REJECTED)
def test_a_name_is_rejected_with_its_reason(name, words):
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        find_timm_fields(name, {})

    assert str(error.value).startswith(f"architecture='{name}': ")
    assert "rope=" not in str(error.value)


@pytest.mark.parametrize(("name", "words"), REJECTED[:3])
def test_arrays_of_a_known_network_do_not_save_a_rejected_name(
    name,
    words,
    tmp_path,
):
    folder = write_case("timm/mae", tmp_path / "folder", architecture=name)
    message = rf"config\.json: architecture='{name}': .*{re.escape(words[:20])}"

    with pytest.raises(ValueError, match=message):
        load_weights(folder)


def test_an_unknown_name_needs_the_option(tmp_path):
    known = load_weights(write_case("timm/mae", tmp_path / "known"))
    folder = write_case("timm/mae", tmp_path / "unknown", architecture="vit_base_patch16_mine_224")
    message = r"architecture='vit_base_patch16_mine_224': must be a model of timm that was"

    with pytest.raises(ValueError, match=message):
        load_weights(folder)
    with pytest.raises(ValueError, match="architecture='resnet50': must be a model of"):
        load_weights(folder, architecture="resnet50")

    require_same(load_weights(folder, architecture="vit_base_patch16_224"), known)


def test_the_option_names_a_file_without_configuration(tmp_path):
    folder = write_case("timm/dinov3", tmp_path / "folder")
    (folder / "config.json").unlink()
    file = folder / "model.safetensors"
    name = GOLDEN["timm/dinov3"]["config"]["architecture"]
    without_name = r"does not state its rotary positions: .*such as architecture="
    with_name = "another network: width 384 there, 32 in the file"

    with pytest.raises(ValueError, match=without_name):
        load_weights(file)
    with pytest.raises(ValueError, match=with_name):
        load_weights(file, architecture=name)


def test_an_unnamed_file_is_noted(tmp_path):
    folder = write_case("timm/mae", tmp_path / "folder")
    file = folder / "weights.safetensors"
    (folder / "model.safetensors").rename(file)
    notes = load_weights(file, num_heads=2).notes

    assert any("does not name its network" in note and "architecture=" in note for note in notes)


def test_the_option_is_rejected_where_the_file_states_its_network(tmp_path):
    folder = write_case("huggingface/mae", tmp_path / "folder")
    message = "model_type='vit_base_patch16_224': must be one of vit"

    with pytest.raises(ValueError, match=message):
        load_weights(folder, architecture="vit_base_patch16_224")


@pytest.mark.parametrize(
    ("name", "format_name"),
    [("weights.npz", "released"), ("ours.safetensors", "vit_jax")],
)
def test_a_file_that_states_its_network_takes_no_name(
    name,
    format_name,
    tmp_path,
):
    weights = load_weights(write_case("timm/mae", tmp_path / "folder"))
    file = tmp_path / name
    save_weights(weights, file, format_name)
    message = r"architecture: must not be set, as .* states its network"

    with pytest.raises(ValueError, match=message):
        load_weights(file, architecture="vit_base_patch16_224")


def test_a_model_type_that_was_not_compared(tmp_path):
    case = "huggingface/dinov2"
    known = load_weights(write_case(case, tmp_path / "known"))
    folder = write_case(case, tmp_path / "unknown", model_type="dinov2_of_mine")
    message = r"model_type='dinov2_of_mine': must be one of .* such as architecture=vit"

    with pytest.raises(ValueError, match=message):
        load_weights(folder)

    require_same(load_weights(folder, architecture="dinov2"), known)


@pytest.mark.parametrize("model_type", [*list_model_types(), None])
def test_model_types_that_are_read(model_type):
    assert find_huggingface_fields(model_type, {}).keys() <= {"rope", "pool"}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("rope_theta", 10_000.0, "rope_theta=10000.0: must be 100.0"),
        ("pooler_act", "gelu", "pooler_act='gelu': must be 'tanh'"),
        ("is_native", True, "is_native=True: must be False"),
    ],
)
def test_values_that_no_array_shows(name, value, words):
    fixed = architectures._FIXED_VALUES[name]

    assert find_huggingface_fields("vit", {name: fixed}) == {}
    with pytest.raises(ValueError, match=re.escape(words)):
        find_huggingface_fields("vit", {name: value})


def test_arguments_that_change_no_rotary_positions():
    arguments = {"embed_dim": 32, "drop_path_rate": 0.1, "dynamic_img_size": True}

    assert find_timm_fields("vit_base_patch16_224", arguments)["rope"] is None


@pytest.mark.parametrize(
    "argument",
    ["block_fn", "norm_layer", "rope_theta", "a" * 1000],
)
def test_arguments_that_change_a_network_in_an_unknown_way(argument):
    message = rf"model_args\.{argument}='x': is not supported"

    with pytest.raises(ValueError, match=message):
        find_timm_fields("vit_base_patch16_224", {argument: "x"})


PE_CORE = "vit_pe_core_base_patch16_224"


@pytest.mark.parametrize(
    ("arguments", "grid"),
    [
        ({}, (14, 14)),
        ({"ref_feat_shape": [3, 5]}, (3, 5)),
    ],
)
def test_the_grid_of_rotary_positions(arguments, grid):
    assert find_timm_fields(PE_CORE, arguments)["rope_grid"] == grid


@pytest.mark.parametrize("shape", [[3], [3, 0], ["3", 3], 3], ids=str)
def test_grids_of_rotary_positions_that_are_no_grid(shape):
    message = r"ref_feat_shape.*must be rows and columns"

    with pytest.raises(ValueError, match=message):
        find_timm_fields(PE_CORE, {"ref_feat_shape": shape})


def test_grids_of_rotary_positions_that_do_not_fit_the_network():
    message = r"ref_feat_shape=\[8, 8\]: must be \[16, 16\]"

    with pytest.raises(ValueError, match=message):
        find_timm_fields("eva02_base_patch14_224", {"ref_feat_shape": [8, 8]})


def test_attention_pooling_of_patches_alone_beside_registers(tmp_path):
    """The name decides which tokens are pooled: no array shows it."""
    case = "timm/registers_map"
    arguments = {
        **GOLDEN[case]["config"]["model_args"],
        "pool_include_prefix": False,
    }
    folder = write_case(case, tmp_path / "patches", model_args=arguments)
    message = "it pools patches without prefix tokens by map, which is not supported"

    load_weights(write_case(case, tmp_path / "all"))
    with pytest.raises(ValueError, match=message):
        load_weights(folder)
