"""Networks of current families, as timm and transformers compute them.

`reference/run_families.py` recorded the expected values.
"""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from safetensors.numpy import load_file, save_file

from tests.weights.reference.families import full_names, pixels, values
from vit_jax.api.build import from_weights
from vit_jax.config import AdaptConfig, adapt_architecture
from vit_jax.evals.features import make_feature_step
from vit_jax.models import abstract_model
from vit_jax.weights.description import describe_preparation
from vit_jax.weights.fit import fit
from vit_jax.weights.formats import open_arrays
from vit_jax.weights.head_edits import cut_after_layer
from vit_jax.weights.load import load_weights, resize_weights
from vit_jax.weights.names import require_writable
from vit_jax.weights.saving import save_weights


def read_golden(name):
    path = pathlib.Path(__file__).parents[1] / f"golden/{name}.json"
    return json.loads(path.read_text())


RECORDED = read_golden("families")
ADAPTED = read_golden("adapted")
GOLDEN = RECORDED["cases"]
RESIZED = RECORDED["resized"]
# Networks that no class of transformers computes, with the part that it lacks.
UNWRITTEN = {
    "timm/dinov2_giant": "mlp_dim=85",
    "timm/tipsv2_giant": "mlp_dim=85",
    # Or other features below the classifier.
    "timm/deit3": "layer_scale=1.0",
    "timm/clip": "has no bias there, and this one is not zero",
    "timm/registers_map": "pool='map'",
    "timm/eva01": "qkv_bias='query_value'",
    "timm/eva02_small": "rope='grid'",
    "timm/eva02_base": "rope='grid'",
    "timm/eva02_clip": "rope='grid'",
    "timm/pe_core": "rope='index'",
    "timm/pe_lang": "rope='index'",
    "timm/pe_spatial": "rope='index'",
    "original/pe_core": "rope='index'",
    "original/pe_lang": "rope='index'",
    "timm/intern300m": "final_norm='none'",
    # The biases of released ones are zero.
    "timm/radio": "patch_bias=True",
    "timm/radio_v4": "patch_bias=True",
}


def list_written():
    """Return (library, case) of the networks that are written for a library."""
    written = []
    for case, golden in GOLDEN.items():
        if case.startswith("timm/"):
            written.append(("timm", case))
        if "config" in golden and case not in UNWRITTEN:
            written.append(("huggingface", case))
    return sorted(written)


FAST = ("timm/dinov3", "timm/clip", "huggingface/dinov2", "huggingface/siglip_both")


def write(case, folder, **changes):
    """Write the files that a user downloads into a folder, which is made.

    The configuration has changes.
    """
    golden = GOLDEN[case]
    folder.mkdir(exist_ok=True)
    shapes = full_names(golden["shapes"], depth=2)
    arrays = {name: values(name, shape) for name, shape in shapes.items()}
    for name, array in golden.get("stored", {}).items():
        arrays[name] = np.array(array)

    if "config" not in golden:
        np.savez(folder / "weights.npz", **arrays)
        return folder / "weights.npz"

    save_file(arrays, folder / "model.safetensors")
    config = golden["config"] | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def apply(weights, images):
    abstract = abstract_model(weights.architecture)
    leaves = map(jnp.asarray, weights.parameters.values())
    structure = jax.tree.structure(abstract)
    model = jax.tree.unflatten(structure, leaves)
    return model(jnp.float32(images))


@pytest.mark.parametrize(
    "name",
    ["vit_small_patch16_rope_224", "vit_base_patch16_rope_mixed_ape_224"],
)
def test_a_rope_vit_is_rejected_by_the_name_beside_its_file(name, tmp_path):
    write("timm/dinov3", tmp_path, architecture=name)
    message = rf"config\.json: architecture='{name}': RoPE-ViT is not supported"

    with pytest.raises(ValueError, match=message):
        load_weights(tmp_path)


def find_ignored(weights):
    ignored = set()
    for status in weights.statuses:
        if status.status == "ignored (not part of this network)":
            ignored.add(status.name)
    return ignored


def use_original_names(arrays, case):
    """Return the arrays as original files of DINOv2 and TIPSv2 have them."""
    arrays = dict(arrays)
    if "reg_token" in arrays:
        # timm adds the position to the class token.
        first = arrays["cls_token"]
        arrays["cls_token"] = 0 * first
        arrays["pos_embed"] = np.concatenate(
            [first, arrays["pos_embed"]],
            axis=1,
        )

    names = {"reg_token": "register_tokens", "blocks.": "blocks.7."}
    if case.endswith("giant"):
        names |= {".fc1.": ".w12.", ".fc2.": ".w3."}
    renamed = {}
    for name, array in arrays.items():
        renamed[rename_array(name, names)] = array
    return renamed


@pytest.mark.parametrize("case", ["timm/dinov2_giant", "timm/dinov2_reg"])
@pytest.mark.parametrize("prefix", ["", "vision_encoder."])
def test_original_names_of_dinov2_and_tipsv2_give_the_parameters_of_timm_s_file(
    case,
    prefix,
    tmp_path,
):
    """Original files have blocks in chunks, a mask token, and a position of the class token."""
    expected = load_weights(write(case, tmp_path))
    file = tmp_path / "model.safetensors"
    arrays = {}
    original = use_original_names(load_file(file), case)
    for name, array in original.items():
        arrays[f"{prefix}{name}"] = array
    others = {
        f"{prefix}mask_token": np.zeros((1, 32), np.float32),
        "text_encoder.ln_final.bias": np.ones(32, np.float32),
    }
    save_file(arrays | others, file)

    read = load_weights(tmp_path)

    assert read.architecture == expected.architecture
    assert read.parameters.keys() == expected.parameters.keys()
    for name, array in expected.parameters.items():
        assert_array_equal(read.parameters[name], array, err_msg=name)
    assert find_ignored(read) == others.keys()


def resize_as_dinov2(table_hwD, side):
    """Resize a square of positions by the authors' scale factor, sample by sample.

    It is Keys' cubic convolution at slope -0.75 with repeated borders (PyTorch's bicubic).
    """
    old = len(table_hwD)
    scale = (side + 0.1) / old
    weights = np.zeros((side, old))
    for new in range(side):
        centre = (new + 0.5) / scale - 0.5
        first = int(np.floor(centre)) - 1
        for index in range(first, first + 4):
            x = abs(centre - index)
            value = 1.25 * x**3 - 2.25 * x**2 + 1
            if x > 1:
                value = -0.75 * (x**3 - 5 * x**2 + 8 * x - 4)
            weights[new, min(max(index, 0), old - 1)] += value
    return np.einsum("Hh,Ww,hwD->HWD", weights, weights, np.float64(table_hwD))


@pytest.mark.parametrize("case", ["timm/dinov2_giant", "timm/dinov2_reg"])
def test_positions_are_resized_as_by_the_code_that_wrote_the_file(case, tmp_path):
    """Files of the authors have a mask token. With registers their code does as timm's."""
    file = write(case, tmp_path) / "model.safetensors"
    by_timm = load_weights(tmp_path)
    arrays = use_original_names(load_file(file), case)
    arrays["mask_token"] = np.zeros((1, 32), np.float32)
    torch_file = tmp_path / "dinov2.safetensors"
    save_file(arrays, torch_file)

    original = load_weights(torch_file, num_heads=2)

    assert by_timm.choose_resize_method() == "bicubic"
    if case.endswith("reg"):
        assert original.choose_resize_method() == "bicubic"
        return
    pixels = 5 * original.architecture.patch_size[0]
    resized = resize_weights(original, (pixels, pixels))
    rows, columns = original.architecture.grid
    table_SD = original.parameters["positions/table"][0]
    prefix_PD, patches_SD = table_SD[: -rows * columns], table_SD[-rows * columns :]
    expected_HWD = resize_as_dinov2(patches_SD.reshape(rows, columns, -1), 5)

    found_SD = resized.parameters["positions/table"][0]
    np.testing.assert_allclose(found_SD[-25:], expected_HWD.reshape(25, -1), atol=1e-6)
    assert_array_equal(found_SD[:-25], prefix_PD)
    assert "dinov2, as the original code of DINOv2" in resized.notes[-1]


def rename_array(name, names):
    for old, new in names.items():
        name = name.replace(old, new)
    return name


def test_a_distilled_deit_of_timm_without_its_heads_is_rejected_in_words(tmp_path):
    file = write("timm/deit_distilled", tmp_path) / "model.safetensors"
    arrays = load_file(file)
    for name in list(arrays):
        if name.startswith("head"):
            del arrays[name]
    save_file(arrays, file)
    message = r"timm: it is a distilled DeiT without its heads.*: take the file"

    with pytest.raises(ValueError, match=message):
        load_weights(tmp_path)


def write_without_config(case, folder):
    file = write(case, folder) / "model.safetensors"
    (folder / "config.json").unlink()
    return file


def test_without_its_config_a_file_of_a_current_family_gives_a_warning(tmp_path):
    file = write_without_config("timm/clip", tmp_path)

    notes = load_weights(file, num_heads=2).notes

    assert any("WARNING: without the config.json" in note for note in notes)


def test_without_its_config_a_file_with_rotary_positions_is_rejected(tmp_path):
    file = write_without_config("timm/dinov3", tmp_path)
    message = "does not state its rotary positions: give the folder"

    with pytest.raises(ValueError, match=message):
        load_weights(file, num_heads=2)


def require_equal(output, golden):
    """Compare an output with the recorded one: 1e-5 of the largest value is rounding in float32."""
    compared = {
        "logits": output.logits_BK,
        "features": output.pooled_BD,
        "hidden": output.features_BD,
    }
    names = compared.keys() & golden.keys()
    assert names

    for name in names:
        expected = np.array(golden[name])
        tolerance = 1e-5 * np.abs(expected).max()
        assert_allclose(
            compared[name],
            expected,
            rtol=0,
            atol=tolerance,
        )


CLASS_POOLS = {
    "dinov3_vit": "token",
    "ijepa": "gap",
    "aimv2_vision_model": "gap",
}
TRANSFORMERS_FIELDS = (
    "image_size",
    "patch_size",
    "hidden_act",
    "layer_norm_eps",
    "intermediate_size",
    "mlp_ratio",
)


def select_fields(config, fields):
    selected = {}
    for field in fields:
        if field in config:
            selected[field] = config[field]
    return selected


def is_written_as_it_was(library, case):
    """Return True if the class that is written is that of the case.

    MAE's and TIPSv2's classes for pre-training are others.
    """
    return case.startswith(library) and "_both" not in case


def check_written_config(library, case, config):
    golden = GOLDEN[case]
    if library == "timm":
        written = config["pretrained_cfg"]
        expected = golden["config"]["pretrained_cfg"]
        size = golden["size"]
        assert written["input_size"] == [3, size, size]
        for field in ("mean", "std", "num_classes", "interpolation"):
            assert written[field] == expected[field]
    elif is_written_as_it_was(library, case):
        expected = select_fields(golden["config"], TRANSFORMERS_FIELDS)
        assert select_fields(config, TRANSFORMERS_FIELDS) == expected


def check_read_weights(read, weights, architecture):
    """Check parameters and facts that were written and read again."""
    preprocessing = read.preprocessing or {}
    expected = weights.preprocessing or {}
    assert same_but_for_names(read.architecture, architecture)
    assert preprocessing.get("mean") == expected.get("mean")
    for name, array in weights.parameters.items():
        # The patch embedding is folded twice: two roundings.
        tolerance = 3e-7 * np.abs(array).max(initial=0)
        assert_allclose(
            read.parameters[name],
            array,
            rtol=0,
            atol=tolerance,
        )


def read_arrays(path):
    with open_arrays(path) as file:
        return {name: file.read(name) for name in file.arrays}


def check_written_shapes(case, arrays):
    names = full_names(GOLDEN[case]["shapes"], depth=2)
    if case == "huggingface/radio":
        # The positions of these images alone.
        names["radio_model.model.patch_generator.pos_embed"] = (1, 9, 32)

    shapes = {name: array.shape for name, array in arrays.items()}
    assert shapes == without_masks(names, arrays)


@pytest.mark.parametrize(("library", "case"), list_written())
def test_a_network_written_for_a_library_reads_back_equal(
    library,
    case,
    tmp_path,
):
    """The metadata of vit_jax are read first, then the configuration alone, as the library does."""
    weights = load_weights(write(case, tmp_path / "theirs"))
    folder = tmp_path / "ours"
    save_weights(weights, folder, library)
    config = json.loads((folder / "config.json").read_text())
    check_written_config(library, case, config)

    read = load_weights(folder)
    check_read_weights(read, weights, weights.architecture)
    assert read.preprocessing == weights.preprocessing

    arrays = read_arrays(folder / "model.safetensors")
    if is_written_as_it_was(library, case) and case != "huggingface/mae":
        check_written_shapes(case, arrays)

    save_file(arrays, folder / "model.safetensors")
    read = load_weights(folder)
    architecture = weights.architecture
    if library == "huggingface":
        # The pooling of features is that of the class.
        pool = CLASS_POOLS.get(config["model_type"], architecture.pool)
        architecture = dataclasses.replace(architecture, pool=pool)
    check_read_weights(read, weights, architecture)
    if library == "timm":
        assert read.preprocessing == weights.preprocessing


def same_but_for_names(a, other):
    """Return True for the same network.

    One class token may be stated or follow from the pooling.
    """
    anonymous = dataclasses.replace(
        a,
        name="",
        class_tokens=a.num_class_tokens,
    )
    return anonymous == dataclasses.replace(
        other,
        name="",
        class_tokens=other.num_class_tokens,
    )


def without_masks(names, written):
    """Return the names without mask tokens that are not written.

    The configuration says that there is none.
    """
    kept = {}
    for name, shape in names.items():
        if name in written or not name.endswith("mask_token"):
            kept[name] = shape
    return kept


@pytest.mark.parametrize(("case", "part"), UNWRITTEN.items())
def test_what_no_class_of_transformers_computes_is_rejected_by_its_part(
    case,
    part,
    tmp_path,
):
    weights = load_weights(write(case, tmp_path / "theirs"))
    with pytest.raises(ValueError, match=part):
        save_weights(weights, tmp_path / "ours", "huggingface")

    assert not (tmp_path / "ours").exists()


def test_a_trained_patch_bias_that_timm_lacks_is_rejected(tmp_path):
    weights = load_weights(write("timm/clip", tmp_path / "theirs"))
    parameters = dict(weights.parameters)
    parameters["embedding/bias"] = parameters["embedding/bias"] + np.float32(1e-3)
    trained = dataclasses.replace(weights, parameters=parameters)
    message = r"patch_bias=True: .* Write vit_jax instead"

    with pytest.raises(ValueError, match=message):
        save_weights(trained, tmp_path / "ours", "timm")

    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("case", "changes", "part"),
    [
        ("mae", {"attention_norm": True}, "attention_norm=True"),
        ("mae", {"class_tokens": 2}, "class_tokens=2"),
        ("mae", {"norm": "rms"}, "norm='rms'"),
        ("mae", {"pool": "token_gap"}, "pool='token_gap'"),
        ("siglip", {"mlp": "swiglu"}, "mlp='swiglu'"),
        ("dinov3", {"qkv_bias": "all"}, "qkv_bias='all'"),
        ("dinov3", {"position_embedding": "learned_1d"}, "position_embedding='learned_1d'"),
        ("pe_core", {"gelu": "tanh"}, "gelu='tanh'"),
    ],
)
def test_networks_that_no_class_of_timm_computes_are_rejected(
    case,
    changes,
    part,
    tmp_path,
):
    architecture = load_weights(write(f"timm/{case}", tmp_path)).architecture
    require_writable("timm", architecture)
    message = rf"cannot hold .*: it is not written with {part}\."

    with pytest.raises(ValueError, match=message):
        require_writable("timm", dataclasses.replace(architecture, **changes))


def mark_slow(recorded, fast):
    """Return parameters of a test, all slow but some."""
    parameters = []
    for case in recorded:
        marks = ()
        if case not in fast:
            marks = pytest.mark.slow
        parameters.append(pytest.param(case, marks=marks))
    return parameters


@pytest.mark.parametrize(
    "case",
    ["timm/dinov3", "timm/eva02_base", "timm/pe_core", "huggingface/deit_distilled"],
)
def test_networks_with_a_class_token_have_it_as_a_feature_whatever_they_pool(case, tmp_path):
    weights = load_weights(write(case, tmp_path))
    a = weights.architecture
    make_feature_step("token_mean", a)

    ended = cut_after_layer(weights, "token_mean").architecture

    assert ended.pool == "token_gap"
    assert ended.feature_width == (a.num_class_tokens + 1) * a.width


@pytest.mark.parametrize("case", mark_slow(GOLDEN, FAST))
def test_the_features_are_those_of_the_library(case, tmp_path):
    """The input is pixels in [0, 1], so that their normalisation is compared too."""
    golden = GOLDEN[case]
    weights = load_weights(write(case, tmp_path))

    require_equal(
        apply(weights, 2 * pixels(golden["size"]) - 1),
        golden,
    )


@pytest.mark.parametrize("case", mark_slow(RESIZED, FAST[2:]))
def test_at_another_image_size_the_features_are_those_of_the_library(case, tmp_path):
    """There are more rows of patches and fewer columns than in the file.

    Positions are resized by the rule of the library; rotary positions follow.
    """
    golden = ADAPTED["rescaled"].get(case) or RESIZED[case]
    size = golden["size"]

    resized = load_weights(write(case, tmp_path), image_size=size)

    assert resized.architecture.image_size == tuple(size)
    assert (resized.preprocessing or {}).get("image_size", size) == size
    require_equal(apply(resized, 2 * pixels(*size) - 1), golden)


@pytest.mark.parametrize("case", mark_slow(ADAPTED["rescaled"], ()))
def test_rotary_positions_that_count_patches_go_on_beyond_the_grid_of_the_weights(case, tmp_path):
    """The original code of Perception Encoder and fine-tuning count on; timm rescales them."""
    weights = load_weights(write(case, tmp_path))

    for rescale, golden in ((False, RESIZED[case]), (True, ADAPTED["rescaled"][case])):
        size = golden["size"]
        target = adapt_architecture(
            weights.architecture,
            AdaptConfig(rope_rescale=rescale, head="keep"),
            image_size=tuple(size),
            num_classes=weights.architecture.num_classes,
        )
        target = dataclasses.replace(target, compute_dtype="float32")
        parameters = fit(weights, target, position_resize="bicubic").parameters
        adapted = dataclasses.replace(
            weights,
            architecture=target,
            parameters=parameters,
        )
        require_equal(apply(adapted, 2 * pixels(*size) - 1), golden)


def test_mae_with_the_mean_of_patches_and_the_norm_behind_it_is_timm_s(tmp_path):
    """In timm's network of global_pool="avg" fc_norm has the parameters of the file's norm."""
    weights = load_weights(write("timm/mae", tmp_path))
    config = AdaptConfig(
        pool="gap",
        final_norm="pooled",
        compute_dtype="float32",
    )
    target = adapt_architecture(
        weights.architecture,
        config,
        image_size=(48, 48),
        num_classes=0,
    )
    parameters = fit(weights, target).parameters
    adapted = dataclasses.replace(
        weights,
        architecture=target,
        parameters=parameters,
    )

    require_equal(
        apply(adapted, 2 * pixels(48) - 1),
        ADAPTED["gap"]["timm/mae"],
    )


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ([0, 0], "must be different numbers below 6"),
        ([], "chooses 0 of 6"),
    ],
)
def test_class_tokens_that_c_radio_does_not_have_are_rejected(
    choice,
    words,
    tmp_path,
):
    file = write("huggingface/radio", tmp_path) / "model.safetensors"
    arrays = load_file(file)
    arrays["radio_model.summary_idxs"] = np.array(choice, np.int64)
    save_file(arrays, file)

    with pytest.raises(ValueError, match=words):
        load_weights(tmp_path)


def test_the_border_that_no_patch_covers_is_left_out_of_so400m(tmp_path):
    """54 pixels have 3x3 patches of 16 pixels, as 384 have 27x27 of 14."""
    message = "54x54 images, where patches of 16x16 pixels do not cover a border"

    weights = load_weights(write("huggingface/siglip", tmp_path, image_size=54))

    assert weights.architecture.image_size == (48, 48)
    assert any(message in note for note in weights.notes)


@pytest.mark.parametrize(
    ("activation", "gelu"),
    [("quick_gelu", "quick"), ("gelu", "exact")],
)
def test_the_gelu_of_clip_is_that_of_its_config(activation, gelu, tmp_path):
    weights = load_weights(write("huggingface/clip", tmp_path, hidden_act=activation))
    assert weights.architecture.gelu == gelu


def test_the_licence_of_a_known_family_is_in_the_card_of_what_is_made_of_it(tmp_path):
    weights = load_weights(write("timm/dinov3", tmp_path / "theirs"))

    save_weights(weights, tmp_path / "ours", "vit_jax")
    card = (tmp_path / "ours/README.md").read_text()

    assert 'license: "other"\nlicense_name: "dinov3-license"' in card
    assert "| licence of the pre-trained weights | dinov3-license |" in card


def test_a_network_with_the_same_parts_that_was_trained_from_scratch_has_no_licence(tmp_path):
    weights = load_weights(write("timm/dinov3", tmp_path / "theirs"))
    from_scratch = dataclasses.replace(weights, licence="")

    save_weights(from_scratch, tmp_path / "own", "timm")

    assert load_weights(tmp_path / "own").licence == ""


@pytest.fixture
def clip(tmp_path):
    """Weights of CLIP, which has no patch bias in timm, so that its normalisation must be written."""
    weights = load_weights(write("timm/clip", tmp_path / "theirs"))
    return dataclasses.replace(weights, licence="mit")


CLIP_MEAN = GOLDEN["timm/clip"]["config"]["pretrained_cfg"]["mean"]


@pytest.mark.parametrize(
    ("folder", "to"),
    [("workdir", None), ("timm/", "timm")],
)
def test_saved_networks_keep_the_pixels_of_their_library(
    folder,
    to,
    clip,
    tmp_path,
):
    options = {} if to is None else {"to": to}

    from_weights(clip).save(f"{tmp_path}/{folder}", **options)
    read = load_weights(tmp_path / folder)

    assert read.preprocessing["mean"] == CLIP_MEAN
    assert read.licence == "mit"
    assert 'license: "mit"' in (tmp_path / folder / "README.md").read_text()


def test_fine_tuned_networks_keep_the_pixels_of_their_library(clip):
    transform = from_weights(clip).transform

    fitted = fit(
        clip,
        dataclasses.replace(clip.architecture, num_classes=2),
    )
    described = describe_preparation(transform, fitted.normalisation)

    assert fitted.licence == "mit"
    assert described["mean"] == CLIP_MEAN
    assert not {"mean", "std"} & describe_preparation(transform).keys()
