"""What is expressed of the libraries' ways to prepare images, and that what is not is told."""

import pytest

from vit_jax.weights.preprocessing import of_huggingface, of_timm

HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
RANGE = {"pixel_range": [-1.0, 1.0]}
SMALL, LARGE = {"height": 32, "width": 48}, {"height": 40, "width": 60}
SQUARE = {"height": 32, "width": 32}
SMOOTHED = (
    "Their images were resized with bilinear interpolation, smoothed where it shrinks; ours takes one bilinear sample "
    "a pixel, so logits differ a little."
)


def prepared(size, resize="direct", crop_fraction=1.0):
    return {"image_size": list(size), "resize": resize, "crop_fraction": crop_fraction} | RANGE


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ({}, prepared((32, 48))),
        ({"size": SMALL}, prepared((32, 48))),
        ({"size": SMALL, "do_resize": True, "do_center_crop": False, "crop_size": LARGE}, prepared((32, 48))),
        ({"size": SMALL, "do_center_crop": True, "crop_size": SMALL}, prepared((32, 48))),
        ({"size": SMALL, "resample": 2, "do_rescale": True, "rescale_factor": 0.00392157}, prepared((32, 48))),
    ],
)
def test_what_a_processor_says_and_ours_does(processor, expected):
    found, (note,) = of_huggingface({"image_size": [32, 48]}, HALF | processor)
    assert found == expected
    assert note == SMOOTHED


@pytest.mark.parametrize("crop", [32, SQUARE])
def test_a_crop_of_the_short_side(crop):
    processor = {"size": {"shortest_edge": 40}, "do_center_crop": True, "crop_size": crop}
    assert of_huggingface({"image_size": 32}, HALF | processor) == (prepared((32, 32), "short_side", 0.8), ())


@pytest.mark.parametrize(
    ("processor", "said"),
    [
        ({"size": LARGE, "do_center_crop": True, "crop_size": SMALL}, "do_center_crop=True, crop_size={'height': 32"),
        ({"size": 60, "do_center_crop": True, "crop_size": 48}, "size=60, do_center_crop=True, crop_size=48"),
        ({"size": SMALL, "do_center_crop": True}, "do_center_crop=True"),
        ({"size": SMALL, "do_resize": False}, "do_resize=False"),
        ({"size": {"shortest_edge": 40}}, "size={'shortest_edge': 40}"),
        ({"size": {"shortest_edge": 60}, "do_center_crop": True, "crop_size": SMALL}, "size={'shortest_edge': 60}"),
        ({"size": {"shortest_edge": 20}, "do_center_crop": True, "crop_size": 32}, "size={'shortest_edge': 20}"),
    ],
)
def test_what_ours_cannot_do_is_left_unknown_and_told(processor, said):
    found, (note,) = of_huggingface({"image_size": [32, 48]}, HALF | processor)
    assert found is None
    assert said in note
    assert "which ours cannot do, so their preprocessing is left unknown" in note


@pytest.mark.parametrize(
    ("processor", "said"),
    [
        ({"do_normalize": False}, "do_normalize=False; our"),
        ({"do_normalize": False, "image_mean": [0.4, 0.4, 0.4]}, "do_normalize=False; our"),
        ({"do_rescale": False}, "do_rescale=False; our"),
        ({"rescale_factor": 1 / 127.5}, "rescale_factor=0.00784"),
        ({"image_mean": [0.4, 0.5, 0.5]}, "image_mean=[0.4, 0.5, 0.5], image_std=[0.5, 0.5, 0.5]; our"),
    ],
)
def test_other_pixels_than_ours_are_warned_of_and_not_written_down_as_ours(processor, said):
    found, (note, *_) = of_huggingface({"image_size": 32}, HALF | processor)
    assert found == {"image_size": [32, 32], "resize": "direct", "crop_fraction": 1.0}
    assert note.startswith("WARNING: these weights were trained on pixels prepared with ")
    assert said in note


def test_another_size_than_the_networks_is_told():
    _, (note, _) = of_huggingface({"image_size": 32}, HALF | {"size": SMALL})
    assert note == "Their images were made [32, 48], but config.json says [32, 32], which counts."


def test_another_interpolation_is_told():
    for resample, name, smoothed in ((3, "bicubic", ", smoothed where it shrinks"), (0, "nearest", "")):
        found, (note,) = of_huggingface({"image_size": 32}, HALF | {"resample": resample})
        assert found == prepared((32, 32))
        assert f"resized with {name} interpolation{smoothed}; ours takes one bilinear sample a pixel" in note
    found, (note,) = of_timm({"crop_pct": 0.9, "interpolation": "bicubic"}, (32, 32))
    assert found == prepared((32, 32), "short_side", 0.9)
    assert "resized with bicubic interpolation, smoothed where it shrinks; ours averages over areas" in note


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"crop_pct": 0.9}, prepared((32, 48), "short_side", 0.9)),
        ({"crop_pct": 1, "crop_mode": "center", "interpolation": "bilinear"}, prepared((32, 48), "short_side", 1.0)),
        ({}, None),
    ],
)
def test_what_timm_says_and_ours_does(config, expected):
    assert of_timm(config, (32, 48)) == (expected, ())


@pytest.mark.parametrize("config", [{"crop_pct": 0.9, "crop_mode": "squash"}, {"crop_pct": 1.0, "crop_mode": "border"}])
def test_what_timm_does_and_ours_cannot(config):
    found, (note,) = of_timm(config, (32, 48))
    assert found is None
    assert f"prepared by crop_pct={config['crop_pct']}, crop_mode={config['crop_mode']}, which ours cannot do" in note


def test_squashing_as_timm_does_it_smooths():
    config = {"crop_pct": 1.0, "crop_mode": "squash", "interpolation": "bilinear"}
    assert of_timm(config, (32, 48)) == (prepared((32, 48)), (SMOOTHED,))
