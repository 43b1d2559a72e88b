"""Configurations beside weights: the facts that are read, and values of another type."""

import itertools
import json
import math
import os
import random
import re

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

    sidecar = read(tmp_path, HUGGINGFACE | {"id2label": labels})

    assert sidecar.class_names is None


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
    mean, std = sidecar.normalisation
    assert list(mean) == IMAGENET["mean"]
    assert list(std) == IMAGENET["std"]


@pytest.mark.parametrize("name", ["preprocessor_config.json", "config.json"])
def test_files_beside_weights_are_regular_files_of_a_bounded_size(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HUGGINGFACE))
    path = tmp_path / name
    path.unlink(missing_ok=True)

    # Opening a pipe would wait.
    os.mkfifo(path)
    message = f"{path} is not readable JSON: it is not a regular file"
    with pytest.raises(ValueError, match=message):
        read_sidecar(tmp_path)

    path.unlink()
    path.write_text(MAX_BYTES * " " + "{}")
    message = f"{path} is not readable JSON: it is larger than 4,194,304 bytes"

    with pytest.raises(ValueError, match=message):
        read_sidecar(tmp_path)


@pytest.mark.parametrize(
    "odd",
    [
        {"hidden_act": "a" * 10**6},
        {"id2label": {"1" * 5000: "cat"}},
    ],
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
    class_names = sidecar.class_names or ()
    for text in (*class_names, *sidecar.notes):
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

    names = [*config, *OTHER_FIELDS]
    for name, value in itertools.product(names, ODD_VALUES):
        odd = config | {name: value}
        processor = {"image_std": value}
        for field in PROCESSOR_FIELDS:
            processor[field] = chance.choice(ODD_VALUES)

        try:
            sidecar = read(tmp_path, odd, processor)
        except ValueError as error:
            check_message(str(error), tmp_path)
        else:
            check_facts(sidecar)


def test_the_gelu_that_timm_does_not_write_down_is_pointed_out(tmp_path):
    siglip = {
        "architecture": "vit_base_patch32_siglip_256",
        "model_args": {},
    }

    sidecar = read(tmp_path, TIMM | siglip)

    assert sidecar.fields["gelu"] == "tanh"
    assert "SigLIP was trained with the tanh GELU" in "\n".join(sidecar.notes)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "{",
        "[" * 10**5,
        '{"a": ' * 10**5,
        "\x00",
        '{"a": NaN',
    ],
)
def test_a_file_that_is_no_json_object_is_rejected(text, tmp_path):
    (tmp_path / "config.json").write_text(text)

    message = r"config.json is (not readable JSON|no JSON object)"
    with pytest.raises(ValueError, match=message):
        read_sidecar(tmp_path)


WHOLE = "must be a whole number from 1"
ONE_OR_TWO = "must be one or two whole numbers"
ABOVE_0 = "must be a finite number above 0"
TEXT = "must be text"
TRUE_OR_FALSE = "must be true or false"
RGB = "must be 3"
# Values of fields of another type, by the rule that they break.
WRONG_HUGGINGFACE = {
    WHOLE: [
        ("hidden_size", "16"),
        ("hidden_size", 16.0),
        ("num_hidden_layers", 1.5),
        ("num_attention_heads", True),
        ("num_attention_heads", 0),
        ("intermediate_size", [64]),
    ],
    RGB: [
        ("num_channels", 4),
        ("num_channels", 3.0),
        ("num_channels", True),
    ],
    ONE_OR_TWO: [
        ("image_size", "224"),
        ("image_size", [224, -1]),
        ("patch_size", [16, 16, 16]),
    ],
    ABOVE_0: [
        ("layer_norm_eps", "1e-6"),
        ("layer_norm_eps", 0),
    ],
    TEXT: [
        ("hidden_act", 3),
        ("problem_type", 1),
    ],
    TRUE_OR_FALSE: [
        ("use_swiglu_ffn", "false"),
        ("qkv_bias", "yes"),
        ("attention_bias", 1),
        ("use_gated_mlp", 0),
    ],
    "must be a list": [("id2label", "cat")],
    "must be an object": [("vision_config", [1])],
    "must be single_label_classification or multi_label": [
        ("problem_type", "regression"),
        ("problem_type", "multilabel"),
    ],
}
WRONG_PROCESSOR = {
    ABOVE_0: [
        ("rescale_factor", 0),
        ("rescale_factor", "1/255"),
        ("rescale_factor", True),
    ],
    TRUE_OR_FALSE: [
        ("do_rescale", 1),
        ("do_resize", "no"),
        ("do_center_crop", "true"),
        ("do_normalize", []),
    ],
    ONE_OR_TWO: [
        ("size", 224.0),
        ("crop_size", "224"),
    ],
    "must be a whole number": [("resample", "bicubic")],
    "must be a filter of Pillow, 0 to 5": [("resample", 17)],
    TEXT: [("image_processor_type", 1)],
}
WRONG_TIMM = {
    "must be a whole number from 0": [("num_classes", "2")],
    TEXT: [
        ("global_pool", 3),
        ("architecture", ["x"]),
    ],
    "must be an object": [("model_args", "none")],
    "must be": [("problem_type", "regression")],
}
WRONG_TIMM_MODEL = {
    WHOLE: [
        ("depth", 1.5),
        ("embed_dim", "336"),
    ],
    ABOVE_0: [("mlp_ratio", -4)],
    RGB: [("in_chans", 1)],
}
WRONG_TIMM_PREPARATION = {
    "must be channels, height and width": [("input_size", [3, 224])],
    ABOVE_0: [("crop_pct", "0.9")],
    TEXT: [("interpolation", 3)],
}


def list_wrong_fields(table):
    """Return (fields, message) of each value of a table."""
    cases = []
    for rule, fields in table.items():
        for field, value in fields:
            cases.append(({field: value}, f"{field}={value!r}: {rule}"))
    return cases


def check_is_rejected(tmp_path, file, message, *contents):
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}/{file}: {message}")):
        read(tmp_path, *contents)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        *list_wrong_fields(WRONG_HUGGINGFACE),
        (
            {"id2label": {"0": 5, "1": "dog"}},
            "id2label[0]=5: must be text",
        ),
        (
            {"vision_config": {"hidden_size": "16"}},
            "hidden_size='16': must be a whole number",
        ),
    ],
)
def test_values_of_another_type_in_the_configuration_of_hugging_face(
    odd,
    message,
    tmp_path,
):
    check_is_rejected(tmp_path, "config.json", message, HUGGINGFACE | odd)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        *list_wrong_fields(WRONG_PROCESSOR),
        (
            {"size": {"shortest_edge": "256"}},
            "size.shortest_edge='256': must be a whole number of pixels",
        ),
        (
            {"size": {"height": 0, "width": 32}},
            "size.height=0: must be a whole number of pixels",
        ),
    ],
)
def test_values_of_another_type_in_the_configuration_of_the_processor(
    odd,
    message,
    tmp_path,
):
    check_is_rejected(
        tmp_path,
        "preprocessor_config.json",
        message,
        HUGGINGFACE,
        HALF | odd,
    )


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        *list_wrong_fields(WRONG_TIMM),
        (
            {"label_names": ["cat", 2]},
            "label_names[1]=2: must be text",
        ),
    ],
)
def test_values_of_another_type_in_the_configuration_of_timm(
    odd,
    message,
    tmp_path,
):
    check_is_rejected(tmp_path, "config.json", message, TIMM | odd)


@pytest.mark.parametrize(("odd", "message"), list_wrong_fields(WRONG_TIMM_MODEL))
def test_values_of_another_type_in_the_arguments_of_timm(
    odd,
    message,
    tmp_path,
):
    arguments = TIMM["model_args"] | odd
    config = TIMM | {"model_args": arguments}

    check_is_rejected(tmp_path, "config.json", message, config)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        *list_wrong_fields(WRONG_TIMM_PREPARATION),
        (
            {"input_size": [4, 224, 224]},
            "input_size[0]=4: must be 3",
        ),
    ],
)
def test_values_of_another_type_in_the_preparation_of_timm(
    odd,
    message,
    tmp_path,
):
    preparation = TIMM["pretrained_cfg"] | odd
    config = TIMM | {"pretrained_cfg": preparation}

    check_is_rejected(tmp_path, "config.json", message, config)


def test_values_that_are_null_are_not_stated(tmp_path):
    config = dict.fromkeys(HUGGINGFACE) | {"model_type": "vit"}
    processor = dict.fromkeys(PROCESSOR_FIELDS)
    del processor["image_mean"], processor["do_center_crop"]

    sidecar = read(tmp_path, config, processor)

    assert sidecar.fields == {}
    assert sidecar.class_names is None


def name_outputs(*numbers):
    return {str(number): f"c{number}" for number in numbers}


UNORDERED = name_outputs(10, 2, 0, 1, 9, 8, 3, 7, 4, 6, 5)
ELEVEN = tuple(name_outputs(*range(11)).values())


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (UNORDERED, ELEVEN),
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
        (name_outputs(*range(1, 11)), "0 to 9, each once; 0 is missing"),
        (name_outputs(0, 1, 3), "0 to 2, each once; 2 is missing"),
        (
            name_outputs(0, 1, "01"),
            "0 to 2, each once; '01' is another, or has the value of another",
        ),
        (name_outputs(0, "one"), "0 to 1, each once; 'one' is another"),
        (name_outputs(-1, 0), "'-1' is another"),
        (name_outputs(0, "1.0"), "'1.0' is another"),
        (name_outputs(0, "²"), "'²' is another"),
    ],
)
def test_labels_whose_keys_are_not_all_numbers_of_outputs(
    labels,
    reason,
    tmp_path,
):
    message = f"config.json: .*: its keys must be the numbers of the outputs.*{reason}"

    with pytest.raises(ValueError, match=message):
        read(tmp_path, HUGGINGFACE | {"id2label": labels})
    with pytest.raises(ValueError, match=message):
        read(tmp_path, TIMM | {"label_names": labels})


@pytest.mark.parametrize("base", [HUGGINGFACE, TIMM], ids=["huggingface", "timm"])
def test_the_problem_type_states_several_labels(base, tmp_path):
    def is_multilabel(**stated):
        sidecar = read(tmp_path, base | stated)
        return sidecar.is_multilabel

    assert not is_multilabel()
    assert not is_multilabel(problem_type=None)
    assert not is_multilabel(problem_type="single_label_classification")
    assert is_multilabel(problem_type="multi_label_classification")


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
        (
            {
                "size": SMALL,
                "do_center_crop": True,
                "crop_size": SMALL,
            },
            ((32, 48),),
        ),
        (
            {
                "size": SMALL,
                "resample": 2,
                "do_center_crop": False,
                "crop_size": LARGE,
            },
            ((32, 48),),
        ),
        (
            {"size": SMALL, "resample": 3},
            ((32, 48), "direct", 1.0, "bicubic"),
        ),
        (
            {
                "size": {"shortest_edge": 40},
                "do_center_crop": True,
                "crop_size": 32,
            },
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
    size = {"height": height, "width": width}
    preparation = describe_preparation(*expected)

    from_config = read_huggingface_preparation(
        {"image_size": [height, width]},
        HALF | processor,
    )
    from_processor = read_huggingface_preparation(
        {"image_size": 99},
        HALF | {"size": size} | processor,
    )

    assert from_config == (preparation, ())
    assert from_processor == (preparation, ())


def test_gated_mlps_have_no_gelu(tmp_path):
    gated = {"use_gated_mlp": True, "hidden_act": "silu"}

    sidecar = read(tmp_path, HUGGINGFACE | gated)

    assert "gelu" not in sidecar.fields


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
    sidecar = read(tmp_path, HUGGINGFACE, HALF | processor)
    means, stds = sidecar.normalisation

    assert_allclose(means, 3 * [mean], rtol=1e-12)
    assert_allclose(stds, 3 * [std], rtol=1e-12)


def test_gated_mlps_with_another_activation_are_rejected(tmp_path):
    config = HUGGINGFACE | {"use_gated_mlp": True, "hidden_act": "gelu"}
    message = "its gated MLPs have the activation 'gelu': vit_jax has silu only"

    with pytest.raises(ValueError, match=message):
        read(tmp_path, config)


@pytest.mark.parametrize(
    "mean",
    [
        [0.5, 0.5],
        [0.5, 0.5, "x"],
        0.5,
        None,
        [0.5, 0.5, float("nan")],
    ],
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
def test_another_interpolation_of_hugging_face_is_noted(
    resample,
    theirs,
    ours,
):
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
    shares = (0.0, 0.5, 7 / 8, 0.99, 1.0)
    for edge, kept in itertools.product(range(1, 600), shares):
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
            describe_preparation((32, 48), "short_side", 0.9, "bicubic", "timm"),
        ),
        (
            {"crop_pct": 1, "crop_mode": "center"},
            describe_preparation((32, 48), "short_side", 1.0, "bicubic", "timm"),
        ),
        (
            {
                "crop_pct": 1.0,
                "crop_mode": "squash",
                "interpolation": "bilinear",
            },
            describe_preparation((32, 48), library="timm"),
        ),
        ({}, None),
    ],
)
def test_what_timm_says_and_ours_does(config, expected):
    preprocessing, notes = read_timm_preparation(config, (32, 48))

    assert preprocessing == expected
    assert notes == ()


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
