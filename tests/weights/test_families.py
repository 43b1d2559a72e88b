"""Networks of current families, as timm and transformers compute them; `reference/run_families.py` recorded these."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.weights.reference.families import full_names, pixels, values
from vit_jax.api.build import from_weights
from vit_jax.config import AdaptConfig, adapt_architecture
from vit_jax.evals.features import make_feature_step
from vit_jax.models import build_model
from vit_jax.weights.description import describe_preparation
from vit_jax.weights.fit import cut_after_layer, fit
from vit_jax.weights.formats import open_arrays
from vit_jax.weights.load import load_weights
from vit_jax.weights.names import require_writable
from vit_jax.weights.saving import save_weights

RECORDED, ADAPTED = (
    json.loads((pathlib.Path(__file__).parents[1] / f"golden/{name}.json").read_text())
    for name in ("families", "adapted")
)
GOLDEN = RECORDED["cases"]
RESIZED = RECORDED["resized"]
UNWRITTEN = {  # no class of transformers computes these
    "timm/dinov2_giant": "mlp_dim=85",
    "timm/tipsv2_giant": "mlp_dim=85",
    "timm/deit3": "layer_scale=1.0",  # or other features below the classifier
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
    "timm/radio": "patch_bias=True",  # released ones are zero
    "timm/radio_v4": "patch_bias=True",
}
WRITTEN = {
    "timm": [case for case in GOLDEN if case.startswith("timm/")],
    "huggingface": [case for case in GOLDEN if case not in UNWRITTEN and "config" in GOLDEN[case]],
}
FAST = ("timm/dinov3", "timm/clip", "huggingface/dinov2", "huggingface/siglip_both")


def write(case, folder, **changes):
    """Write the files that a user downloads into a folder, which is made, with changes of the configuration."""
    golden = GOLDEN[case]
    folder.mkdir(exist_ok=True)
    arrays = {
        name: values(name, shape) for name, shape in full_names(golden["shapes"], depth=2).items()
    }
    arrays |= {name: np.array(array) for name, array in golden.get("stored", {}).items()}

    if "config" not in golden:
        np.savez(folder / "weights.npz", **arrays)
        return folder / "weights.npz"

    save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(golden["config"] | changes))

    return folder


def apply(weights, images):
    a = weights.architecture
    abstract = jax.eval_shape(lambda: build_model(a, jax.random.key(0)))
    leaves = [jnp.asarray(array) for array in weights.parameters.values()]

    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)(
        jnp.asarray(images, jnp.float32)
    )


@pytest.mark.parametrize(
    "name",
    ["vit_small_patch16_rope_224", "vit_base_patch16_rope_mixed_ape_224"],
)
def test_a_rope_vit_is_refused_by_the_name_beside_its_file(name, tmp_path):
    write("timm/dinov3", tmp_path, architecture=name)
    with pytest.raises(
        ValueError, match=rf"config\.json: architecture='{name}': RoPE-ViT is not supported"
    ):
        load_weights(tmp_path)


@pytest.mark.parametrize("case", ["timm/dinov2_giant", "timm/dinov2_reg"])
@pytest.mark.parametrize("prefix", ["", "vision_encoder."])
def test_original_names_of_dinov2_and_tipsv2_give_the_parameters_of_timm_s_file(
    case, prefix, tmp_path
):
    """Original files have blocks in chunks, a mask token, and a position of the class token."""
    expected = load_weights(write(case, tmp_path))
    file = tmp_path / "model.safetensors"
    arrays = load_file(file)

    if "reg_token" in arrays:  # timm adds the position to the class token
        first = arrays["cls_token"]
        arrays |= {
            "cls_token": 0 * first,
            "pos_embed": np.concatenate([first, arrays["pos_embed"]], axis=1),
        }

    names = {".fc1.": ".w12.", ".fc2.": ".w3."} if case.endswith("giant") else {}
    names |= {"reg_token": "register_tokens", "blocks.": "blocks.7."}
    others = {
        f"{prefix}mask_token": np.zeros((1, 32), np.float32),
        "text_encoder.ln_final.bias": np.ones(32, np.float32),
    }
    save_file(
        {f"{prefix}{renamed(name, names)}": array for name, array in arrays.items()} | others,
        file,
    )
    read = load_weights(tmp_path)

    assert read.architecture == expected.architecture
    assert read.parameters.keys() == expected.parameters.keys()

    for name, array in expected.parameters.items():
        np.testing.assert_array_equal(read.parameters[name], array, err_msg=name)

    ignored = {
        status.name
        for status in read.statuses
        if status.status == "ignored (not part of this network)"
    }

    assert ignored == others.keys()


def renamed(name, names):
    for old, new in names.items():
        name = name.replace(old, new)
    return name


def test_a_distilled_deit_of_timm_without_its_heads_is_refused_in_words(tmp_path):
    file = write("timm/deit_distilled", tmp_path) / "model.safetensors"
    save_file(
        {name: array for name, array in load_file(file).items() if not name.startswith("head")},
        file,
    )

    with pytest.raises(
        ValueError, match=r"timm: it is a distilled DeiT without its heads.*: bring the file"
    ):
        load_weights(tmp_path)


def test_without_its_config_a_file_of_a_current_family_gives_a_warning(tmp_path):
    file = write("timm/clip", tmp_path) / "model.safetensors"
    (tmp_path / "config.json").unlink()

    assert any(
        "WARNING: without the config.json" in note for note in load_weights(file, num_heads=2).notes
    )

    file = write("timm/dinov3", tmp_path) / "model.safetensors"
    (tmp_path / "config.json").unlink()

    with pytest.raises(ValueError, match="does not state its rotary positions: give the folder"):
        load_weights(file, num_heads=2)


def require_equal(output, golden):
    """Compare what is recorded: 1e-5 of the largest value is rounding in float32."""
    compared = {
        "logits": output.logits_BK,
        "features": output.pooled_BD,
        "hidden": output.features_BD,
    }
    names = compared.keys() & golden.keys()

    assert names

    for name in names:
        expected = np.array(golden[name])
        np.testing.assert_allclose(
            compared[name],
            expected,
            rtol=0,
            atol=1e-5 * np.abs(expected).max(),
        )


@pytest.mark.parametrize(
    ("library", "case"),
    [(library, case) for library in WRITTEN for case in WRITTEN[library]],
)
def test_a_network_written_for_a_library_reads_back_equal(library, case, tmp_path):
    """With our metadata, and as the library reads it: from its configuration alone."""
    weights = load_weights(write(case, tmp_path / "theirs"))
    save_weights(weights, tmp_path / "ours", library)
    config = json.loads((tmp_path / "ours/config.json").read_text())

    if library == "timm":
        theirs = GOLDEN[case]["config"]["pretrained_cfg"]
        ours = config["pretrained_cfg"]

        assert ours["input_size"] == [3, *[GOLDEN[case]["size"]] * 2]

        for field in ("mean", "std", "num_classes", "interpolation"):
            assert ours[field] == theirs[field]
    elif (
        case.startswith(library) and "_both" not in case
    ):  # MAE's and TIPSv2's classes for pre-training aside
        fields = (
            "image_size",
            "patch_size",
            "hidden_act",
            "layer_norm_eps",
            "intermediate_size",
            "mlp_ratio",
        )
        theirs = GOLDEN[case]["config"]

        assert {field: config[field] for field in fields if field in config} == {
            field: theirs[field] for field in fields if field in theirs
        }

    for has_metadata in (True, False):
        read = load_weights(tmp_path / "ours")
        expected = weights.architecture

        if (
            library == "huggingface" and not has_metadata
        ):  # the pooling of features is that of the class
            pools = {"dinov3_vit": "token", "ijepa": "gap", "aimv2_vision_model": "gap"}
            expected = dataclasses.replace(
                expected,
                pool=pools.get(config["model_type"], expected.pool),
            )

        assert same_but_for_names(read.architecture, expected)
        assert (read.preprocessing or {}).get("mean") == (weights.preprocessing or {}).get("mean")

        if library == "timm" or has_metadata:
            assert read.preprocessing == weights.preprocessing

        for name, array in weights.parameters.items():  # folded twice: two roundings
            np.testing.assert_allclose(
                read.parameters[name],
                array,
                rtol=0,
                atol=3e-7 * np.abs(array).max(initial=0),
            )

        if has_metadata:
            with open_arrays(tmp_path / "ours/model.safetensors") as file:
                arrays = {name: file.read(name) for name in file.arrays}

            if case.startswith(library) and "_both" not in case and case != "huggingface/mae":
                names = full_names(GOLDEN[case]["shapes"], depth=2)
                if case == "huggingface/radio":  # the positions of these images alone
                    names["radio_model.model.patch_generator.pos_embed"] = (1, 9, 32)

                assert {name: array.shape for name, array in arrays.items()} == without_masks(
                    names,
                    arrays,
                )

            save_file(arrays, tmp_path / "ours/model.safetensors")


def same_but_for_names(a, other):
    """Return True for the same network; one class token may be stated or follow from the pooling."""
    counts = [
        dataclasses.replace(one, name="", class_tokens=one.num_class_tokens) for one in (a, other)
    ]
    return counts[0] == counts[1]


def without_masks(names, written):
    """Return the names without mask tokens that are not written, since the configuration says that there is none."""
    return {
        name: shape
        for name, shape in names.items()
        if not name.endswith("mask_token") or name in written
    }


@pytest.mark.parametrize(("case", "part"), UNWRITTEN.items())
def test_what_no_class_of_transformers_computes_is_rejected_by_its_part(case, part, tmp_path):
    weights = load_weights(write(case, tmp_path / "theirs"))
    with pytest.raises(ValueError, match=part):
        save_weights(weights, tmp_path / "ours", "huggingface")

    assert not (tmp_path / "ours").exists()


def test_a_trained_patch_bias_that_timm_lacks_is_rejected(tmp_path):
    weights = load_weights(write("timm/clip", tmp_path / "theirs"))
    trained = {
        **weights.parameters,
        "embedding/bias": weights.parameters["embedding/bias"] + np.float32(1e-3),
    }

    with pytest.raises(ValueError, match=r"patch_bias=True: .* Write vit_jax instead"):
        save_weights(dataclasses.replace(weights, parameters=trained), tmp_path / "ours", "timm")

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
def test_networks_that_no_class_of_timm_computes_are_rejected(case, changes, part, tmp_path):
    architecture = load_weights(write(f"timm/{case}", tmp_path)).architecture
    require_writable("timm", architecture)

    with pytest.raises(ValueError, match=rf"cannot hold .*: it is not written with {part}\."):
        require_writable("timm", dataclasses.replace(architecture, **changes))


def cases(recorded, fast):
    return [
        pytest.param(case, marks=[] if case in fast else [pytest.mark.slow]) for case in recorded
    ]


@pytest.mark.parametrize(
    "case",
    ["timm/dinov3", "timm/eva02_base", "timm/pe_core", "huggingface/deit_distilled"],
)
def test_networks_with_a_class_token_have_it_as_a_feature_whatever_they_pool(case, tmp_path):
    weights = load_weights(write(case, tmp_path))
    a = weights.architecture
    make_feature_step("token_mean", a)
    read = cut_after_layer(weights, "token_mean").architecture

    assert (read.pool, read.feature_width) == ("token_gap", (a.num_class_tokens + 1) * a.width)


@pytest.mark.parametrize("case", cases(GOLDEN, FAST))
def test_the_features_are_those_of_the_library(case, tmp_path):
    """The input is pixels in [0, 1], so that their normalisation is compared too."""
    golden = GOLDEN[case]
    weights = load_weights(write(case, tmp_path))
    require_equal(apply(weights, 2 * pixels(golden["size"]) - 1), golden)


@pytest.mark.parametrize("case", cases(RESIZED, FAST[2:]))
def test_at_another_image_size_the_features_are_those_of_the_library(case, tmp_path):
    """More rows of patches and fewer columns than in the file, by the rule of the library; rotary positions follow."""
    golden = ADAPTED["rescaled"].get(case) or RESIZED[case]
    resized = load_weights(write(case, tmp_path), image_size=golden["size"])

    assert resized.architecture.image_size == tuple(golden["size"])
    assert (resized.preprocessing or {}).get("image_size", golden["size"]) == golden["size"]

    require_equal(apply(resized, 2 * pixels(*golden["size"]) - 1), golden)


@pytest.mark.parametrize("case", cases(ADAPTED["rescaled"], ()))
def test_rotary_positions_that_count_patches_go_on_beyond_the_grid_of_the_weights(case, tmp_path):
    """As in the original code of Perception Encoder, and in fine-tuning; with rope_rescale they are timm's."""
    weights = load_weights(write(case, tmp_path))
    for rescale, golden in ((False, RESIZED[case]), (True, ADAPTED["rescaled"][case])):
        config = AdaptConfig(rope_rescale=rescale, head="keep")
        size = tuple(golden["size"])
        target = adapt_architecture(
            weights.architecture,
            config,
            image_size=size,
            num_classes=weights.architecture.num_classes,
        )
        target = dataclasses.replace(target, compute_dtype="float32")
        parameters = fit(weights, target, position_resize="bicubic").parameters
        adapted = dataclasses.replace(weights, architecture=target, parameters=parameters)
        require_equal(apply(adapted, 2 * pixels(*golden["size"]) - 1), golden)


def test_mae_with_the_mean_of_patches_and_the_norm_behind_it_is_timm_s(tmp_path):
    """Timm's network of global_pool="avg", whose fc_norm has the parameters of the file's norm."""
    weights = load_weights(write("timm/mae", tmp_path))
    config = AdaptConfig(pool="gap", final_norm="pooled", compute_dtype="float32")
    target = adapt_architecture(weights.architecture, config, image_size=(48, 48), num_classes=0)
    adapted = dataclasses.replace(
        weights,
        architecture=target,
        parameters=fit(weights, target).parameters,
    )
    require_equal(apply(adapted, 2 * pixels(48) - 1), ADAPTED["gap"]["timm/mae"])


def test_class_tokens_that_c_radio_does_not_have_are_rejected(tmp_path):
    file = write("huggingface/radio", tmp_path) / "model.safetensors"
    for choice, words in ([[0, 0], "must be different numbers below 6"], [[], "chooses 0 of 6"]):
        save_file(load_file(file) | {"radio_model.summary_idxs": np.array(choice, np.int64)}, file)
        with pytest.raises(ValueError, match=words):
            load_weights(tmp_path)


def test_the_border_that_no_patch_covers_is_left_out_of_so400m(tmp_path):
    # 3x3 patches of 16 pixels, as 384 are 27x27.
    weights = load_weights(write("huggingface/siglip", tmp_path, image_size=54))
    assert weights.architecture.image_size == (48, 48)
    assert any(
        "54x54 images, where patches of 16x16 pixels do not cover a border" in note
        for note in weights.notes
    )


@pytest.mark.parametrize(("activation", "gelu"), [("quick_gelu", "quick"), ("gelu", "exact")])
def test_the_gelu_of_clip_is_that_of_its_config(activation, gelu, tmp_path):
    weights = load_weights(write("huggingface/clip", tmp_path, hidden_act=activation))
    assert weights.architecture.gelu == gelu


def test_the_licence_of_a_known_family_is_in_the_card_of_what_is_made_of_it(tmp_path):
    weights = load_weights(write("timm/dinov3", tmp_path / "theirs"))
    save_weights(weights, tmp_path / "ours", "vit_jax")
    own = dataclasses.replace(
        weights,
        licence="",
    )  # of a network with the same parts that was trained from scratch
    save_weights(own, tmp_path / "own", "timm")

    assert load_weights(tmp_path / "own").licence == ""

    text = (tmp_path / "ours/README.md").read_text()
    assert 'license: "other"\nlicense_name: "dinov3-license"' in text
    assert "| licence of the pre-trained weights | dinov3-license |" in text


def test_fine_tuned_and_loaded_networks_keep_the_pixels_of_their_library(tmp_path):
    """CLIP has no patch bias in timm, so that it cannot be written without them."""
    weights = load_weights(write("timm/clip", tmp_path / "theirs"))
    mean = GOLDEN["timm/clip"]["config"]["pretrained_cfg"]["mean"]
    weights = dataclasses.replace(weights, licence="mit")
    model = from_weights(weights)
    model.save(tmp_path / "workdir")
    model.save(f"{tmp_path}/timm/", to="timm")

    for folder in ("workdir", "timm"):
        assert load_weights(tmp_path / folder).preprocessing["mean"] == mean
        assert load_weights(tmp_path / folder).licence == "mit"
        assert 'license: "mit"' in (tmp_path / folder / "README.md").read_text()

    fitted = fit(weights, dataclasses.replace(weights.architecture, num_classes=2))
    assert fitted.licence == "mit"

    described = describe_preparation(model.transform, fitted.normalisation)
    assert described["mean"] == mean
    assert not {"mean", "std"} & describe_preparation(model.transform).keys()
