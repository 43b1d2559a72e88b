"""`config.json` for timm and Hugging Face, against what we read of it again (the libraries: see reference/)."""

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
from vit_jax.config import ModelConfig, build_architecture
from vit_jax.weights import load_weights
from vit_jax.weights.fit import remove_head
from vit_jax.weights.formats import open_arrays, write_safetensors
from vit_jax.weights.library_config import build_timm_config
from vit_jax.weights.load import resize_weights
from vit_jax.weights.saving import save_weights

NAMES = ("cat", "dog", "bird")


def forget_metadata(folder):
    """Leaves a file as a library would have written it."""
    path = folder / "model.safetensors"
    with open_arrays(path) as file:
        assert file.metadata
        arrays = {name: file.read(name) for name in file.arrays}

    write_safetensors(path, arrays, {})


@pytest.mark.parametrize("format_name", ["timm", "huggingface"])
@pytest.mark.parametrize("gelu", ["exact", "tanh"])
def test_the_folder_alone_tells_the_network(format_name, gelu, tmp_path):
    a = dataclasses.replace(VIT, gelu=gelu)
    written = weights_of(a, class_names=NAMES, preprocessing=PREPROCESSING)
    _, notes = save_weights(written, tmp_path / "out", format_name)
    forget_metadata(tmp_path / "out")
    read = load_weights(tmp_path / "out")

    assert read.architecture == a
    assert read.class_names == NAMES
    assert not [note for note in read.notes if "WARNING" in note]
    assert_same(read.parameters, written.parameters)

    if format_name == "timm":
        expected = PREPROCESSING | {
            "interpolation": "bilinear",
            "resize_library": "timm",
        }

        assert read.preprocessing == expected
    else:
        assert any("tested on central crops" in note for note in notes)

        processor = json.loads((tmp_path / "out/preprocessor_config.json").read_text())
        assert processor["size"] == {"height": 8, "width": 12}
        assert processor["image_mean"] == processor["image_std"] == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("format_name", ["timm", "huggingface"])
@pytest.mark.parametrize("is_multilabel", [True, False])
def test_the_folder_tells_whether_images_have_several_labels(format_name, is_multilabel, tmp_path):
    """With our metadata and without them, for weights of a library and of a run, and through each format of ours."""
    training = dataclasses.replace(TRAINING, is_multilabel=is_multilabel)
    stated = weights_of(VIT, class_names=NAMES, has_several_labels=is_multilabel)

    for number, written in enumerate(
        (stated, weights_of(VIT, class_names=NAMES, training=training))
    ):
        folder = tmp_path / str(number)
        save_weights(written, folder, format_name)
        kind = "multi" if is_multilabel else "single"
        expected = f"{kind}_label_classification"

        assert json.loads((folder / "config.json").read_text())["problem_type"] == expected
        assert load_weights(folder).is_multilabel == is_multilabel

        forget_metadata(folder)
        read = load_weights(folder)

        assert read.is_multilabel == is_multilabel

        for path, other in ((tmp_path / "one.npz", "released"), (tmp_path / "ours", "vit_jax")):
            save_weights(read, path, other)
            assert load_weights(path).is_multilabel == is_multilabel

        assert not remove_head(read).is_multilabel


@pytest.fixture
def folder(tmp_path):
    """Hugging Face's files of a network for images of 16 x 16 pixels, in patches of 4 x 4."""
    save_weights(
        weights_of(dataclasses.replace(VIT, image_size=(16, 16))),
        tmp_path / "out",
        "huggingface",
    )
    forget_metadata(tmp_path / "out")

    return tmp_path / "out"


@pytest.mark.parametrize(
    ("processor", "size"),
    [
        ({"size": {"shortest_edge": 16}, "do_center_crop": True, "crop_size": 8}, (8, 8)),
        (
            {
                "size": {"shortest_edge": 32},
                "do_center_crop": True,
                "crop_size": {"height": 24, "width": 24},
            },
            (24, 24),
        ),
        ({"size": {"height": 8, "width": 12}}, (8, 12)),
    ],
)
def test_the_processor_decides_the_image_size(folder, processor, size):
    before = load_weights(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    read = load_weights(folder)

    assert read.architecture.image_size == size
    assert read.preprocessing["image_size"] == list(size)

    (note,) = [note for note in read.notes if "preprocessor_config.json" in note]
    assert (
        f"makes images of {size[0]}x{size[1]} pixels, config.json says 16x16: {size[0]}x{size[1]} is taken"
        in note
    )
    assert_same(read.parameters, resize_weights(before, size).parameters)

    asked = load_weights(folder, image_size=(20, 16))
    assert asked.architecture.image_size == (20, 16)
    assert_same(asked.parameters, resize_weights(before, (20, 16)).parameters)

    same = load_weights(folder, image_size=(16, 16))
    assert same.architecture.image_size == (16, 16)
    assert_same(same.parameters, before.parameters)


@pytest.mark.parametrize("edge", [10, 15])
def test_patches_that_do_not_divide_the_images_of_the_processor(folder, edge):
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"size": {"height": edge, "width": edge}})
    )
    read = load_weights(folder)

    assert read.architecture.image_size == (16, 16)
    assert any(
        f"{edge}x{edge} pixels, config.json says 16x16, which is taken, since patches" in n
        for n in read.notes
    )


def test_networks_without_classes_have_no_problem_type(tmp_path):
    save_weights(
        weights_of(dataclasses.replace(VIT, num_classes=0)),
        tmp_path / "out",
        "huggingface",
    )

    assert "problem_type" not in json.loads((tmp_path / "out/config.json").read_text())


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
    a = build_architecture(ModelConfig(name=name), image_size=(224, 224), num_classes=3)
    config = build_timm_config(a, NAMES, PREPROCESSING)

    assert config["architecture"] == expected
    assert config["label_names"] == list(NAMES)
    assert config["pretrained_cfg"]["input_size"] == [3, 224, 224]

    if a.has_transformer:
        assert (config["model_args"]["mlp_ratio"], config["model_args"]["class_token"]) == (4, True)

        for width, mlp_dim in [
            (336, 816),
            *((size, n) for size in (16, 48, 1152) for n in range(1, 3 * size, 7)),
        ]:
            config = build_timm_config(
                dataclasses.replace(VIT, width=width, mlp_dim=mlp_dim),
                NAMES,
                PREPROCESSING,
            )

            assert int(width * config["model_args"]["mlp_ratio"]) == mlp_dim  # as timm computes it


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("format_name", ["timm", "huggingface"])
def test_the_folder_alone_tells_the_interpolation(format_name, interpolation, tmp_path):
    preprocessing = PREPROCESSING | {
        "resize": "direct",
        "crop_fraction": 1.0,
        "interpolation": interpolation,
    }
    save_weights(weights_of(VIT, preprocessing=preprocessing), tmp_path, format_name)
    forget_metadata(tmp_path)
    library = {"resize_library": "timm"} if format_name == "timm" else {}

    assert load_weights(tmp_path).preprocessing == preprocessing | library


@pytest.mark.parametrize("preprocessing", [None, {"image_size": [8, 12]}])
@pytest.mark.parametrize("format_name", ["timm", "huggingface"])
def test_preprocessing_that_nobody_knows_is_not_made_up(format_name, preprocessing, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text("{}")  # of other weights
    _, notes = save_weights(weights_of(VIT, preprocessing=preprocessing), tmp_path, format_name)

    assert any(
        note.startswith("How images were resized and cropped for this network is not known")
        for note in notes
    )
    assert not (tmp_path / "preprocessor_config.json").exists()

    if format_name == "timm":
        pretrained = json.loads((tmp_path / "config.json").read_text())["pretrained_cfg"]
        assert not {"crop_pct", "crop_mode", "interpolation"} & pretrained.keys()

    forget_metadata(tmp_path)
    assert load_weights(tmp_path).preprocessing is None


@pytest.mark.parametrize("a", [HYBRID, RESNET, ROOT_HYBRID])
def test_what_timm_has_no_name_for_gets_no_config(a, tmp_path):
    save_weights(weights_of(VIT), tmp_path, "timm")  # what was there does not go with it
    _, notes = save_weights(weights_of(a), tmp_path, "timm")

    assert not (tmp_path / "config.json").exists()
    assert any(note.startswith(f"timm has no model with the ResNet of {a.name}") for note in notes)
