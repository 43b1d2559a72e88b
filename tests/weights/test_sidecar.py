"""Configurations beside weights: the facts that are read, and values of another type."""

import itertools
import json
import math
import os
import random

import pytest
from numpy.testing import assert_allclose

from vit_jax.weights.sidecar import (
    MAX_BYTES,
    Sidecar,
    read_huggingface_preparation,
    read_sidecar,
    read_timm_preparation,
)


def test_a_folder_without_configuration_states_nothing(tmp_path):
    assert read_sidecar(tmp_path) == Sidecar()


def read(tmp_path, config, processor=None):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if processor is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))

    return read_sidecar(tmp_path)


HUGGINGFACE = {
    "model_type": "vit",
    "image_size": 384,
    "patch_size": 16,
    "hidden_size": 768,
    "num_hidden_layers": 6,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "id2label": {"0": "cat", "1": "dog"},
}
IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
TIMM = {
    "architecture": "vit_base_patch16_224",
    "global_pool": "avg",
    "num_classes": 2,
    "label_names": ["cat", "dog"],
    "model_args": {
        "num_heads": 4,
        "act_layer": "gelu_tanh",
        "depth": 6,
        "embed_dim": 336,
        "mlp_ratio": 816 / 336,
        "patch_size": [16, 8],
    },
    "pretrained_cfg": {"input_size": [3, 224, 256], "crop_pct": 0.9} | IMAGENET,
}


def test_a_configuration_of_hugging_face(tmp_path):
    processor = {
        "size": {"height": 384, "width": 384},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }

    sidecar = read(tmp_path, HUGGINGFACE, processor)

    assert sidecar.fields == {
        "image_size": (384, 384),
        "patch_size": (16, 16),
        "num_classes": 2,
        "width": 768,
        "depth": 6,
        "mlp_dim": 3072,
        "num_heads": 12,
        "layer_norm_epsilon": 1e-12,
        "gelu": "exact",
    }
    assert sidecar.class_names == ("cat", "dog")
    assert sidecar.preprocessing == describe_preparation((384, 384))
    assert sidecar.notes == ()


def test_made_up_labels_are_no_class_names(tmp_path):
    labels = {"0": "LABEL_0", "1": "LABEL_1"}

    assert read(tmp_path, HUGGINGFACE | {"id2label": labels}).class_names is None


def test_activations_other_than_gelu_are_rejected(tmp_path):
    message = "activation 'relu'; our networks have GELU only"

    with pytest.raises(ValueError, match=message):
        read(tmp_path, HUGGINGFACE | {"hidden_act": "relu"})


def test_a_configuration_of_timm(tmp_path):
    preparation = describe_preparation((224, 256), "short_side", 0.9, "bicubic", "timm")

    sidecar = read(tmp_path, TIMM)

    assert sidecar.fields == {
        "image_size": (224, 256),
        "patch_size": (16, 8),
        "num_classes": 2,
        "width": 336,
        "depth": 6,
        "mlp_dim": 816,
        "num_heads": 4,
        "gelu": "tanh",
        "pool": "gap",
        "rope": None,
        "pooled_tokens": "patches",
    }
    assert sidecar.class_names == ("cat", "dog")
    assert sidecar.preprocessing == preparation
    assert not sidecar.notes
    assert sidecar.normalisation == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize("name", ["preprocessor_config.json", "config.json"])
def test_files_beside_weights_are_regular_files_of_a_bounded_size(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HUGGINGFACE))
    path = tmp_path / name
    path.unlink(missing_ok=True)

    # Opening a pipe would wait.
    os.mkfifo(path)
    with pytest.raises(ValueError, match=f"{path} is not readable JSON: it is not a regular file"):
        read_sidecar(tmp_path)

    path.unlink()
    path.write_text(f"{' ' * MAX_BYTES}{{}}")
    message = f"{path} is not readable JSON: it is larger than 4,194,304 bytes"

    with pytest.raises(ValueError, match=message):
        read_sidecar(tmp_path)


@pytest.mark.parametrize(
    "odd",
    [{"hidden_act": "a" * 10**6}, {"id2label": {"1" * 5000: "cat"}}],
    ids=["value", "key"],
)
def test_errors_of_long_values_are_short(odd, tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path / "config.json")) as error:
        read(tmp_path, HUGGINGFACE | odd)

    assert len(str(error.value)) < 500


ODD_VALUES = [
    None,
    True,
    False,
    -1,
    1.5,
    10**400,
    float("inf"),
    float("nan"),
    "x",
    [],
    {},
    [1],
    ["a", 2],
    {"a": 1},
    {"0": 3},
    {"²": "x"},
    [[1], [2]],
    [0.5, "x"],
]

PROCESSOR_FIELDS = (
    "size",
    "crop_size",
    "do_center_crop",
    "do_resize",
    "resample",
    "rescale_factor",
    "image_mean",
)

OTHER_FIELDS = (
    "size",
    "label_names",
    "crop_pct",
    "interpolation",
)


def check_facts(sidecar):
    """Class names and notes are text."""
    for text in (*(sidecar.class_names or ()), *sidecar.notes):
        assert isinstance(text, str)


def check_message(message, folder):
    """An error has one line of a bounded length and begins with the folder."""
    assert message.startswith(str(folder))
    assert len(message.splitlines()) == 1
    assert len(message) < 500


@pytest.mark.parametrize(
    "config",
    [
        HUGGINGFACE,
        TIMM,
        TIMM["pretrained_cfg"] | {"architecture": "vit_base_patch16_224"},
    ],
    ids=["huggingface", "timm", "timm before 1.0"],
)
def test_odd_values_are_read_or_one_error_of_a_line(config, tmp_path):
    chance = random.Random(0)

    for name, value in itertools.product([*config, *OTHER_FIELDS], ODD_VALUES):
        processor = {field: chance.choice(ODD_VALUES) for field in PROCESSOR_FIELDS}
        processor["image_std"] = value
        try:
            sidecar = read(tmp_path, config | {name: value}, processor)
        except ValueError as error:
            check_message(str(error), tmp_path)
        else:
            check_facts(sidecar)


def test_the_gelu_that_timm_does_not_write_down_is_pointed_out(tmp_path):
    config = {**TIMM, "architecture": "vit_base_patch32_siglip_256"}
    sidecar = read(tmp_path, {**config, "model_args": {}})

    assert sidecar.fields["gelu"] == "tanh"
    assert any("SigLIP was trained with the tanh GELU" in note for note in sidecar.notes)


@pytest.mark.parametrize(
    "text",
    ["", "[1]", "{", "[" * 10**5, '{"a": ' * 10**5, "\x00", '{"a": NaN'],
)
def test_a_file_that_is_no_json_object_is_rejected(text, tmp_path):
    (tmp_path / "config.json").write_text(text)

    message = r"config.json is (not readable JSON|no JSON object)"
    with pytest.raises(ValueError, match=message):
        read_sidecar(tmp_path)


# Fields of config.json of Hugging Face, and the rule that they break.
WRONG = [
    ({"hidden_size": "16"}, "hidden_size='16': must be a whole number from 1"),
    ({"hidden_size": 16.0}, "hidden_size=16.0: must be a whole number from 1"),
    ({"num_hidden_layers": 1.5}, "num_hidden_layers=1.5: must be a whole number from 1"),
    ({"num_attention_heads": True}, "num_attention_heads=True: must be a whole number from 1"),
    ({"num_attention_heads": 0}, "num_attention_heads=0: must be a whole number from 1"),
    ({"intermediate_size": [64]}, r"intermediate_size=\[64\]: must be a whole number from 1"),
    ({"num_channels": 4}, "num_channels=4: must be 3"),
    ({"num_channels": 3.0}, "num_channels=3.0: must be 3"),
    ({"num_channels": True}, "num_channels=True: must be 3"),
    ({"image_size": "224"}, "image_size='224': must be one or two whole numbers"),
    (
        {"image_size": [224, -1]},
        r"image_size=\[224, -1\]: must be one or two whole numbers",
    ),
    (
        {"patch_size": [16, 16, 16]},
        "patch_size=.*: must be one or two whole numbers",
    ),
    ({"layer_norm_eps": "1e-6"}, "layer_norm_eps='1e-6': must be a finite number above 0"),
    ({"layer_norm_eps": 0}, "layer_norm_eps=0: must be a finite number above 0"),
    ({"hidden_act": 3}, "hidden_act=3: must be text"),
    ({"use_swiglu_ffn": "false"}, "use_swiglu_ffn='false': must be true or false"),
    ({"qkv_bias": "yes"}, "qkv_bias='yes': must be true or false"),
    ({"attention_bias": 1}, "attention_bias=1: must be true or false"),
    ({"use_gated_mlp": 0}, "use_gated_mlp=0: must be true or false"),
    ({"id2label": "cat"}, "id2label='cat': must be a list"),
    (
        {"id2label": {"0": 5, "1": "dog"}},
        r"id2label\[0\]=5: must be text",
    ),
    ({"vision_config": [1]}, r"vision_config=\[1\]: must be an object"),
    ({"vision_config": {"hidden_size": "16"}}, "hidden_size='16': must be a whole number"),
    ({"problem_type": 1}, "problem_type=1: must be text"),
    (
        {"problem_type": "regression"},
        "problem_type='regression': must be single_label_classification or multi_label",
    ),
    (
        {"problem_type": "multilabel"},
        "problem_type='multilabel': must be single_label_classification or multi_label",
    ),
]


@pytest.mark.parametrize(("odd", "rule"), WRONG)
def test_values_of_another_type_in_the_configuration_of_hugging_face(odd, rule, tmp_path):
    message = f"{tmp_path}/config.json: {rule}"

    with pytest.raises(ValueError, match=message):
        read(tmp_path, HUGGINGFACE | odd)


@pytest.mark.parametrize(
    ("odd", "rule"),
    [
        ({"rescale_factor": 0}, "rescale_factor=0: must be a finite number above 0"),
        ({"rescale_factor": "1/255"}, "rescale_factor='1/255': must be a finite number above 0"),
        ({"rescale_factor": True}, "rescale_factor=True: must be a finite number above 0"),
        ({"do_rescale": 1}, "do_rescale=1: must be true or false"),
        ({"do_resize": "no"}, "do_resize='no': must be true or false"),
        ({"do_center_crop": "true"}, "do_center_crop='true': must be true or false"),
        ({"do_normalize": []}, r"do_normalize=\[\]: must be true or false"),
        (
            {"size": {"shortest_edge": "256"}},
            "size.shortest_edge='256': must be a whole number of pixels",
        ),
        (
            {"size": {"height": 0, "width": 32}},
            "size.height=0: must be a whole number of pixels",
        ),
        ({"size": 224.0}, "size=224.0: must be one or two whole numbers"),
        ({"crop_size": "224"}, "crop_size='224': must be one or two whole numbers"),
        ({"resample": "bicubic"}, "resample='bicubic': must be a whole number"),
        ({"resample": 17}, "resample=17: must be a filter of Pillow, 0 to 5"),
        ({"image_processor_type": 1}, "image_processor_type=1: must be text"),
    ],
)
def test_values_of_another_type_in_the_configuration_of_the_processor(odd, rule, tmp_path):
    message = f"{tmp_path}/preprocessor_config.json: {rule}"

    with pytest.raises(ValueError, match=message):
        read(tmp_path, HUGGINGFACE, HALF | odd)


@pytest.mark.parametrize(
    ("part", "odd", "rule"),
    [
        ("", {"num_classes": "2"}, "num_classes='2': must be a whole number from 0"),
        ("", {"label_names": ["cat", 2]}, r"label_names\[1\]=2: must be text"),
        ("", {"global_pool": 3}, "global_pool=3: must be text"),
        ("", {"architecture": ["x"]}, r"architecture=\['x'\]: must be text"),
        ("", {"model_args": "none"}, "model_args='none': must be an object"),
        ("", {"problem_type": "regression"}, "problem_type='regression': must be"),
        ("model_args", {"depth": 1.5}, "depth=1.5: must be a whole number from 1"),
        ("model_args", {"embed_dim": "336"}, "embed_dim='336': must be a whole number from 1"),
        ("model_args", {"mlp_ratio": -4}, "mlp_ratio=-4: must be a finite number above 0"),
        ("model_args", {"in_chans": 1}, "in_chans=1: must be 3"),
        ("pretrained_cfg", {"input_size": [4, 224, 224]}, r"input_size\[0\]=4: must be 3"),
        (
            "pretrained_cfg",
            {"input_size": [3, 224]},
            "input_size=.*: must be channels, height and width",
        ),
        ("pretrained_cfg", {"crop_pct": "0.9"}, "crop_pct='0.9': must be a finite number above 0"),
        ("pretrained_cfg", {"interpolation": 3}, "interpolation=3: must be text"),
    ],
)
def test_values_of_another_type_in_the_configuration_of_timm(part, odd, rule, tmp_path):
    changes = {part: TIMM[part] | odd} if part else odd
    message = f"{tmp_path}/config.json: {rule}"

    with pytest.raises(ValueError, match=message):
        read(tmp_path, TIMM | changes)


def test_values_that_are_null_are_not_stated(tmp_path):
    config = dict.fromkeys(HUGGINGFACE) | {"model_type": "vit"}
    processor = dict.fromkeys(("size", "crop_size", "do_resize", "rescale_factor", "resample"))

    sidecar = read(tmp_path, config, processor)

    assert sidecar.fields == {}
    assert sidecar.class_names is None


ELEVEN = tuple(f"c{number}" for number in range(11))


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ({str(n): f"c{n}" for n in (10, 2, 0, 1, 9, 8, 3, 7, 4, 6, 5)}, ELEVEN),
        ({"01": "b", "00": "a"}, ("a", "b")),
        (["a", "b"], ("a", "b")),
    ],
)
def test_keys_of_labels_are_numbers_of_outputs(labels, names, tmp_path):
    sidecar = read(tmp_path, HUGGINGFACE | {"id2label": labels})

    assert sidecar.class_names == names
    assert sidecar.fields["num_classes"] == len(names)


def test_no_labels_state_no_classes(tmp_path):
    sidecar = read(tmp_path, HUGGINGFACE | {"id2label": {}})

    assert sidecar.class_names is None
    assert sidecar.fields.get("num_classes") is None


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ({str(number): f"c{number}" for number in range(1, 11)}, "0 to 9, each once; 0 is missing"),
        ({"0": "a", "1": "b", "3": "d"}, "0 to 2, each once; 2 is missing"),
        (
            {"0": "a", "1": "b", "01": "c"},
            "0 to 2, each once; '01' is another, or has the value of another",
        ),
        ({"0": "a", "one": "b"}, "0 to 1, each once; 'one' is another"),
        ({"-1": "a", "0": "b"}, "'-1' is another"),
        ({"0": "a", "1.0": "b"}, "'1.0' is another"),
        ({"0": "a", "²": "b"}, "'²' is another"),
    ],
)
def test_labels_whose_keys_are_not_all_numbers_of_outputs(labels, reason, tmp_path):
    message = f"config.json: .*: its keys must be the numbers of the outputs.*{reason}"

    for config in (HUGGINGFACE | {"id2label": labels}, TIMM | {"label_names": labels}):
        with pytest.raises(ValueError, match=message):
            read(tmp_path, config)


@pytest.mark.parametrize("base", [HUGGINGFACE, TIMM], ids=["huggingface", "timm"])
def test_the_problem_type_states_several_labels(base, tmp_path):
    single = base | {"problem_type": "single_label_classification"}
    several = base | {"problem_type": "multi_label_classification"}

    assert not read(tmp_path, base).is_multilabel
    assert not read(tmp_path, base | {"problem_type": None}).is_multilabel
    assert not read(tmp_path, single).is_multilabel
    assert read(tmp_path, several).is_multilabel


# The preparation of images.


HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
CLIP = {"size": 32, "do_center_crop": True, "crop_size": 32}
SMALL = {"height": 32, "width": 48}
LARGE = {"height": 40, "width": 60}


def describe_preparation(
    size,
    resize="direct",
    crop_fraction=1.0,
    interpolation="bilinear",
    library=None,
):
    preparation = {
        "image_size": list(size),
        "resize": resize,
        "crop_fraction": crop_fraction,
        "interpolation": interpolation,
        "pixel_range": [-1.0, 1.0],
    }
    if library is not None:
        preparation["resize_library"] = library
    return preparation


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ({}, ((32, 48),)),
        ({"size": SMALL, "do_center_crop": True, "crop_size": SMALL}, ((32, 48),)),
        (
            {"size": SMALL, "resample": 2, "do_center_crop": False, "crop_size": LARGE},
            ((32, 48),),
        ),
        ({"size": SMALL, "resample": 3}, ((32, 48), "direct", 1.0, "bicubic")),
        (
            {"size": {"shortest_edge": 40}, "do_center_crop": True, "crop_size": 32},
            ((32, 32), "short_side", 0.8),
        ),
        (
            CLIP | {"feature_extractor_type": "CLIPFeatureExtractor"},
            ((32, 32), "short_side", 1.0),
        ),
        (CLIP | {"image_processor_type": "ViTImageProcessor"}, ((32, 32),)),
    ],
)
def test_preparations_of_a_processor_that_are_known(processor, expected):
    height, width = expected[0]
    preparation = describe_preparation(*expected)
    with_size = {"size": {"height": height, "width": width}} | processor

    from_config = read_huggingface_preparation(
        {"image_size": [height, width]},
        HALF | processor,
    )
    from_processor = read_huggingface_preparation({"image_size": 99}, HALF | with_size)

    assert from_config == (preparation, ())
    assert from_processor == (preparation, ())


def test_gated_mlps_have_no_gelu(tmp_path):
    config = HUGGINGFACE | {"use_gated_mlp": True, "hidden_act": "silu"}

    assert "gelu" not in read(tmp_path, config).fields


@pytest.mark.parametrize(
    ("processor", "said"),
    [
        (
            {"size": LARGE, "do_center_crop": True, "crop_size": SMALL},
            "do_center_crop=True, crop_size={'height': 32",
        ),
        ({"size": SMALL, "do_center_crop": True}, "do_center_crop=True"),
        ({"size": SMALL, "do_resize": False}, "do_resize=False"),
        (
            {"size": {"shortest_edge": 60}, "do_center_crop": True, "crop_size": SMALL},
            "size={'shortest_edge': 60}",
        ),
        (
            {"size": {"shortest_edge": 20}, "do_center_crop": True, "crop_size": 32},
            "size={'shortest_edge': 20}",
        ),
    ],
)
def test_what_ours_cannot_do_is_left_unknown_and_told(processor, said):
    preprocessing, (note,) = read_huggingface_preparation(
        {"image_size": [32, 48]}, HALF | processor
    )
    assert preprocessing is None
    assert said in note
    assert "which vit_jax cannot do, so their preprocessing is unknown" in note


@pytest.mark.parametrize(
    ("processor", "mean", "std"),
    [
        ({}, 0.5, 0.5),
        ({"image_mean": None, "image_std": None}, 0.5, 0.5),
        ({"do_normalize": False, "image_mean": [0.4, 0.4, 0.4]}, 0.0, 1.0),
        ({"do_normalize": False, "do_rescale": False}, 0.0, 1 / 255),
        ({"do_rescale": False}, 0.5 / 255, 0.5 / 255),
        ({"rescale_factor": 1 / 127.5}, 0.25, 0.25),
        ({"image_mean": [0.4, 0.4, 0.4], "image_std": [0.2, 0.2, 0.2]}, 0.4, 0.2),
    ],
)
def test_the_normalisation_of_a_processor(processor, mean, std, tmp_path):
    normalisation = read(tmp_path, HUGGINGFACE, HALF | processor).normalisation
    assert_allclose(normalisation, [[mean] * 3, [std] * 3], rtol=1e-12)


def test_gated_mlps_with_another_activation_are_rejected(tmp_path):
    config = HUGGINGFACE | {"use_gated_mlp": True, "hidden_act": "gelu"}
    message = "its gated MLPs have the activation 'gelu': vit_jax has silu only"

    with pytest.raises(ValueError, match=message):
        read(tmp_path, config)


@pytest.mark.parametrize(
    "mean",
    [[0.5, 0.5], [0.5, 0.5, "x"], 0.5, None, [0.5, 0.5, float("nan")]],
)
def test_a_normalisation_that_is_not_three_numbers_is_rejected(mean, tmp_path):
    message = "must be three finite numbers each"

    with pytest.raises(ValueError, match=message):
        read(tmp_path, HUGGINGFACE, HALF | {"image_mean": mean})


@pytest.mark.parametrize(
    ("resample", "theirs", "ours"),
    [
        (1, "lanczos", "bicubic"),
        (0, "nearest", "bilinear"),
    ],
)
def test_another_interpolation_of_hugging_face_is_noted(resample, theirs, ours):
    preprocessing, (note,) = read_huggingface_preparation(
        {"image_size": 32}, HALF | {"resample": resample}
    )

    assert preprocessing == describe_preparation((32, 32), interpolation=ours)
    assert f"resized with {theirs} interpolation; vit_jax uses {ours}" in note


def test_another_interpolation_of_timm_is_noted():
    config = {"crop_pct": 0.9, "interpolation": "lanczos"}
    expected = describe_preparation((32, 32), "short_side", 0.9, "bicubic", "timm")

    preprocessing, (note,) = read_timm_preparation(config, (32, 32))

    assert preprocessing == expected
    assert "resized with lanczos interpolation; vit_jax uses bicubic" in note


def test_the_short_side_of_a_processor_is_kept_exactly():
    for edge, kept in itertools.product(range(1, 600), (0.0, 0.5, 7 / 8, 0.99, 1.0)):
        crop = max(1, int(edge * kept))
        processor = {
            "size": {"shortest_edge": edge},
            "do_center_crop": True,
            "crop_size": crop,
        }

        preprocessing, _ = read_huggingface_preparation({}, HALF | processor)
        fraction = preprocessing["crop_fraction"]

        assert 0 < fraction <= 1
        assert math.floor(crop / fraction) == edge


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"crop_pct": 0.9},
            (describe_preparation((32, 48), "short_side", 0.9, "bicubic", "timm"), ()),
        ),
        (
            {"crop_pct": 1, "crop_mode": "center"},
            (describe_preparation((32, 48), "short_side", 1.0, "bicubic", "timm"), ()),
        ),
        (
            {"crop_pct": 1.0, "crop_mode": "squash", "interpolation": "bilinear"},
            (describe_preparation((32, 48), library="timm"), ()),
        ),
        ({}, (None, ())),
    ],
)
def test_what_timm_says_and_ours_does(config, expected):
    assert read_timm_preparation(config, (32, 48)) == expected


@pytest.mark.parametrize(
    "config",
    [
        {"crop_pct": 0.9, "crop_mode": "squash"},
        {"crop_pct": 1.0, "crop_mode": "border"},
    ],
)
def test_preparations_of_timm_that_are_unknown(config):
    said = f"prepared by crop_pct={config['crop_pct']}, crop_mode={config['crop_mode']}"

    preprocessing, (note,) = read_timm_preparation(config, (32, 48))

    assert preprocessing is None
    assert f"{said}, which vit_jax cannot do" in note
