"""Preprocessing of big_vision: the operations that have a counterpart, and their arguments."""

import pytest

from tests.rejections import rejects
from vit_jax.config.migration.image_ops import convert_test_images, convert_train_images


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (
            "decode|inception_crop(64)",
            {"train_crop": "inception", "image_size": 64, "crop_area_fraction": (0.05, 1.0)},
        ),
        (
            "decode_jpeg_and_inception_crop(64, area_min=8)||flip_lr",
            {
                "train_crop": "inception",
                "image_size": 64,
                "crop_area_fraction": (0.08, 1.0),
                "flip": True,
            },
        ),
        (
            "decode|inception_crop(64, method='bicubic', antialias=True)",
            {
                "train_crop": "inception",
                "image_size": 64,
                "crop_area_fraction": (0.05, 1.0),
                "train_interpolation": "bicubic",
            },
        ),
        (
            "decode|resize_small(80)|random_crop(64)",
            {"train_crop": "resize_short_side", "train_resize_pixels": 80, "image_size": 64},
        ),
        (
            "decode|resize(80)|random_crop((64, 48))",
            {"train_crop": "resize", "train_resize_pixels": 80, "image_size": (64, 48)},
        ),
        (
            "decode|resize(64)|randaug",
            {
                "train_crop": "none",
                "image_size": 64,
                "randaugment_layers": 2,
                "randaugment_magnitude": 10,
            },
        ),
        (
            "value_range(-1, 1)|decode|resize(64)|keep('image')",
            {"train_crop": "none", "image_size": 64},
        ),
    ],
)
def test_training_images(text, fields):
    assert convert_train_images(text) == {"flip": False, "train_interpolation": None} | fields


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (
            "decode|resize_small(80)|central_crop(64)",
            {"test_resize": "short_side", "image_size": 64, "test_crop_fraction": 0.8},
        ),
        (
            "decode|resize_small(64)|central_crop(64)",
            {"test_resize": "short_side", "image_size": 64, "test_crop_fraction": 1.0},
        ),
        ("decode|resize(64)", {"test_resize": "direct", "image_size": 64}),
        ("decode|resize((64, 48))", {"test_resize": "direct", "image_size": (64, 48)}),
        (
            "decode|resize(64, 'bicubic', True)",
            {"test_resize": "direct", "image_size": 64, "test_interpolation": "bicubic"},
        ),
    ],
)
def test_test_images(text, fields):
    assert convert_test_images(text) == {"test_interpolation": None} | fields


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "needs a size"),
        ("decode|flip_lr", "needs a size"),
        ("decode|resize_small(80)", "needs a size"),
        ("inception_crop", "inception_crop: needs a size"),
        ("inception_crop(64, ratio=2)", "unexpected keyword"),
        ("inception_crop(64, method='area')", "method must be bilinear"),
        ("decode_jpeg_and_inception_crop(64, ratio_min=0.5)", "ratios"),
        ("randaug(2,10)|inception_crop(64)", "inception_crop must come before randaug"),
        ("inception_crop(64)|value_range(0, 1)", r"use value_range\(-1, 1\)"),
        ("inception_crop(64)|vgg_value_range", r"vgg_value_range.*use value_range\(-1, 1\)"),
        ("inception_crop(64)|randaugment(2)", "Did you mean 'randaug'"),
        ("inception_crop(64)|onehot(9, key='real')", "key='label' instead of 'real'"),
        ("decode(channels=1)|inception_crop(64)", "channels"),
        ("inception_crop(x)", "no operation"),
        ("inception_crop(64", "no operation"),
        ("3", "no operation"),
    ],
)
def test_training_images_without_a_counterpart(text, rule):
    with rejects("", rule):
        convert_train_images(text)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("decode", "must be resize"),
        ("resize(80)|central_crop(64)", "must be resize"),
        ("resize_small(64)|central_crop(80)", "smaller than resize_small"),
        ("resize_small(80)|central_crop((64, 48))", "square"),
        ("resize(64)|flip_lr", "flip_lr has no counterpart"),
    ],
)
def test_test_images_without_a_counterpart(text, rule):
    with rejects("", rule):
        convert_test_images(text)
