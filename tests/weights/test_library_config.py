"""`config.json` for timm and Hugging Face, and the facts that are read of it again."""

import dataclasses
import json

import pytest

from tests.weights.small_networks import (
    HYBRID,
    PREPROCESSING,
    RESNET,
    ROOT_HYBRID,
    TRAINING,
    VIT,
    assert_same,
    weights_of,
)
from vit_jax import load_model
from vit_jax.config import ModelConfig, build_architecture
from vit_jax.weights import load_weights
from vit_jax.weights.formats import open_arrays, write_safetensors
from vit_jax.weights.head_edits import remove_head
from vit_jax.weights.library_config import build_timm_config
from vit_jax.weights.load import resize_weights
from vit_jax.weights.saving import save_weights

NAMES = ("cat", "dog", "bird")


def forget_metadata(folder):
    """Leave a file as a library would have written it."""
    path = folder / "model.safetensors"
    with open_arrays(path) as file:
        assert file.metadata
        arrays = {name: file.read(name) for name in file.arrays}

    write_safetensors(path, arrays, {})


def read_config(folder, name="config.json"):
    return json.loads((folder / name).read_text())


@pytest.mark.parametrize("format_name", ["timm", "huggingface"])
@pytest.mark.parametrize("gelu", ["exact", "tanh"])
def test_the_folder_alone_states_the_network(format_name, gelu, tmp_path):
    a = dataclasses.replace(VIT, gelu=gelu)
    written = weights_of(
        a,
        class_names=NAMES,
        preprocessing=PREPROCESSING,
    )
    save_weights(written, tmp_path, format_name)
    forget_metadata(tmp_path)

    read = load_weights(tmp_path)

    assert read.architecture == a
    assert read.class_names == NAMES
    assert not any("WARNING" in note for note in read.notes)
    assert_same(read.parameters, written.parameters)


@pytest.mark.parametrize("gelu", ["exact", "tanh"])
def test_a_folder_of_timm_states_the_preprocessing(gelu, tmp_path):
    a = dataclasses.replace(VIT, gelu=gelu)
    save_weights(weights_of(a, preprocessing=PREPROCESSING), tmp_path, "timm")
    forget_metadata(tmp_path)
    expected = PREPROCESSING | {"interpolation": "bilinear", "resize_library": "timm"}

    assert load_weights(tmp_path).preprocessing == expected


@pytest.mark.parametrize("gelu", ["exact", "tanh"])
def test_a_folder_of_hugging_face_has_a_processor_without_the_central_crop(gelu, tmp_path):
    a = dataclasses.replace(VIT, gelu=gelu)

    _, notes = save_weights(
        weights_of(a, preprocessing=PREPROCESSING),
        tmp_path,
        "huggingface",
    )
    processor = read_config(tmp_path, "preprocessor_config.json")

    assert any("tested on central crops" in note for note in notes)
    assert processor["size"] == {"height": 8, "width": 12}
    assert processor["image_mean"] == [0.5, 0.5, 0.5]
    assert processor["image_std"] == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("source", ["library", "run"])
@pytest.mark.parametrize("format_name", ["timm", "huggingface"])
@pytest.mark.parametrize("is_multilabel", [True, False])
def test_the_folder_states_if_images_have_several_labels(
    format_name,
    is_multilabel,
    source,
    tmp_path,
):
    """The fact is read with the metadata of vit_jax and without them, and through its formats."""
    if source == "library":
        written = weights_of(
            VIT,
            class_names=NAMES,
            has_several_labels=is_multilabel,
        )
    else:
        training = dataclasses.replace(TRAINING, is_multilabel=is_multilabel)
        written = weights_of(
            VIT,
            class_names=NAMES,
            training=training,
        )
    folder = tmp_path / "folder"
    kind = "multi" if is_multilabel else "single"

    save_weights(written, folder, format_name)

    assert read_config(folder)["problem_type"] == f"{kind}_label_classification"
    assert load_weights(folder).is_multilabel == is_multilabel

    forget_metadata(folder)
    read = load_weights(folder)
    save_weights(read, tmp_path / "one.npz", "released")
    save_weights(read, tmp_path / "ours", "vit_jax")

    assert read.is_multilabel == is_multilabel
    assert load_weights(tmp_path / "one.npz").is_multilabel == is_multilabel
    assert load_weights(tmp_path / "ours").is_multilabel == is_multilabel
    assert not remove_head(read).is_multilabel


@pytest.fixture
def folder(tmp_path):
    """Hugging Face's files of a network for images of 16 x 16 pixels, in patches of 4 x 4."""
    weights = weights_of(dataclasses.replace(VIT, image_size=(16, 16)))
    save_weights(weights, tmp_path / "out", "huggingface")
    forget_metadata(tmp_path / "out")
    return tmp_path / "out"


CROP_OF_8 = {
    "size": {"shortest_edge": 16},
    "do_center_crop": True,
    "crop_size": 8,
}

CROP_OF_24 = {
    "size": {"shortest_edge": 32},
    "do_center_crop": True,
    "crop_size": {"height": 24, "width": 24},
}

DIRECT = {"size": {"height": 8, "width": 12}}


@pytest.mark.parametrize(
    ("processor", "size"),
    [
        (CROP_OF_8, (8, 8)),
        (CROP_OF_24, (24, 24)),
        (DIRECT, (8, 12)),
    ],
)
def test_the_processor_decides_the_image_size(folder, processor, size):
    before = load_weights(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    pixels = f"{size[0]}x{size[1]}"
    message = f"makes images of {pixels} pixels, config.json says 16x16: {pixels} is taken"

    read = load_weights(folder)
    notes = [note for note in read.notes if "preprocessor_config.json" in note]
    (note,) = notes

    assert read.architecture.image_size == size
    assert read.preprocessing["image_size"] == list(size)
    assert message in note
    expected = resize_weights(before, size)
    assert_same(read.parameters, expected.parameters)

    larger = load_weights(folder, image_size=(20, 16))
    assert larger.architecture.image_size == (20, 16)
    expected = resize_weights(before, (20, 16))
    assert_same(larger.parameters, expected.parameters)

    same = load_weights(folder, image_size=(16, 16))
    assert same.architecture.image_size == (16, 16)
    assert_same(same.parameters, before.parameters)

    kept = load_weights(folder, keep_size=True)
    assert kept.architecture.image_size == (16, 16)
    assert_same(kept.parameters, before.parameters)
    assert not [note for note in kept.notes if "preprocessor_config.json" in note]
    model = load_model(folder, image_size=(20, 16))
    assert_same(model._to_weights().parameters, larger.parameters)


@pytest.mark.parametrize("edge", [10, 15])
def test_patches_that_do_not_divide_the_images_of_the_processor(folder, edge):
    processor = {"size": {"height": edge, "width": edge}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    message = f"{edge}x{edge} pixels, config.json says 16x16, which is taken, since patches"

    read = load_weights(folder)

    assert read.architecture.image_size == (16, 16)
    assert any(message in note for note in read.notes)


def test_networks_without_classes_have_no_problem_type(tmp_path):
    weights = weights_of(dataclasses.replace(VIT, num_classes=0))

    save_weights(weights, tmp_path / "out", "huggingface")

    assert "problem_type" not in read_config(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ViT-B/16", "vit_base_patch16_224"),
        ("R50+ViT-B/16", "vit_base_r50_s16_224"),
        ("R26+ViT-B/32", "vit_small_r26_s32_224"),
        ("R+ViT-Ti/16", "vit_tiny_r_s16_p8_224"),
        ("R50x3", "resnetv2_50x3_bit"),
        ("R152x4", "resnetv2_152x4_bit"),
    ],
)
def test_published_networks_have_a_name_in_timm(name, expected):
    a = build_architecture(
        ModelConfig(name=name),
        image_size=(224, 224),
        num_classes=3,
    )

    config = build_timm_config(a, NAMES, PREPROCESSING)

    assert config["architecture"] == expected
    assert config["label_names"] == list(NAMES)
    assert config["pretrained_cfg"]["input_size"] == [3, 224, 224]
    if a.has_transformer:
        assert config["model_args"]["mlp_ratio"] == 4
        assert config["model_args"]["class_token"] is True


@pytest.mark.parametrize("width", [16, 48, 336, 1152])
def test_ratios_of_mlps_give_their_size_as_timm_computes_it(width):
    for mlp_dim in [816, *range(1, 3 * width, 7)]:
        a = dataclasses.replace(VIT, width=width, mlp_dim=mlp_dim)
        config = build_timm_config(a, NAMES, PREPROCESSING)
        ratio = config["model_args"]["mlp_ratio"]
        assert int(width * ratio) == mlp_dim


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("format_name", ["timm", "huggingface"])
def test_the_folder_alone_states_the_interpolation(
    format_name,
    interpolation,
    tmp_path,
):
    preprocessing = PREPROCESSING | {
        "resize": "direct",
        "crop_fraction": 1.0,
        "interpolation": interpolation,
    }
    save_weights(
        weights_of(VIT, preprocessing=preprocessing),
        tmp_path,
        format_name,
    )
    forget_metadata(tmp_path)
    expected = dict(preprocessing)
    if format_name == "timm":
        expected["resize_library"] = "timm"

    assert load_weights(tmp_path).preprocessing == expected


@pytest.mark.parametrize(
    "preprocessing",
    [None, {"image_size": [8, 12]}],
)
@pytest.mark.parametrize("format_name", ["timm", "huggingface"])
def test_preprocessing_that_nobody_knows_is_not_made_up(
    format_name,
    preprocessing,
    tmp_path,
):
    # The processor of other weights.
    processor = tmp_path / "preprocessor_config.json"
    processor.write_text("{}")
    message = "How images were resized and cropped for this network is not known"

    _, notes = save_weights(
        weights_of(VIT, preprocessing=preprocessing),
        tmp_path,
        format_name,
    )

    assert any(note.startswith(message) for note in notes)
    assert not processor.exists()
    if format_name == "timm":
        pretrained = read_config(tmp_path)["pretrained_cfg"]
        assert not {"crop_pct", "crop_mode", "interpolation"} & pretrained.keys()

    forget_metadata(tmp_path)
    assert load_weights(tmp_path).preprocessing is None


@pytest.mark.parametrize(
    "a",
    [HYBRID, RESNET, ROOT_HYBRID],
    ids=lambda a: a.name,
)
def test_networks_that_timm_has_no_name_for_get_no_config(a, tmp_path):
    """The config of other weights in the folder is removed."""
    save_weights(weights_of(VIT), tmp_path, "timm")
    message = f"timm has no model with the ResNet of {a.name}"

    _, notes = save_weights(weights_of(a), tmp_path, "timm")

    assert not (tmp_path / "config.json").exists()
    assert any(note.startswith(message) for note in notes)
