"""Kernels of pre-trained weights for other numbers of channels."""

import dataclasses
import math

import numpy as np
import pytest

import vit_jax
from tests.rejections import rejects
from vit_jax.weights import load_weights
from vit_jax.weights.channels import adapt_channels
from vit_jax.weights.folding import BIAS, Normalisation, describe_normalisation, fold
from vit_jax.weights.folding import KERNEL as KERNEL_NAME
from vit_jax.weights.image_channels import expect_standardised_channels, fit_channels

KERNEL = np.random.default_rng(0).normal(size=(4, 4, 3, 8)).astype(np.float32)


def adapt_as_timm(kernel_hwCD, channels):
    """Return timm's `adapt_input_conv`, written again by its description on (D, C, h, w)."""
    weight_DChw = np.transpose(kernel_hwCD, (3, 2, 0, 1))
    weight = weight_DChw.astype(np.float64)
    if channels == 1:
        weight = weight.sum(axis=1, keepdims=True)
    else:
        repeats = math.ceil(channels / 3)
        repeated = np.tile(weight, (1, repeats, 1, 1))
        weight = repeated[:, :channels] * (3 / channels)
    return np.transpose(weight, (2, 3, 1, 0))


@pytest.mark.parametrize("channels", [1, 2, 4, 13, 32])
def test_cyclic_kernels_are_those_of_timm(channels):
    adapted = adapt_channels(KERNEL, channels, "cyclic")

    assert adapted.dtype == np.float32
    np.testing.assert_allclose(
        adapted,
        adapt_as_timm(KERNEL, channels),
        atol=1e-6,
    )


def test_new_channels_have_kernels_of_zeros():
    adapted = adapt_channels(KERNEL, 5, "zero")

    np.testing.assert_array_equal(
        adapted[:, :, :3],
        KERNEL,
    )
    assert not adapted[:, :, 3:].any()
    np.testing.assert_array_equal(
        adapt_channels(KERNEL, 2, "zero"),
        KERNEL[:, :, :2],
    )


@pytest.fixture(scope="module")
def rgb(tmp_path_factory):
    """A network for RGB, and its folder."""
    folder = tmp_path_factory.mktemp("rgb") / "weights"
    model = vit_jax.create_model("ViT-mu/4", image_size=8, num_classes=3, seed=1)
    model.save(folder)
    return model, folder


def test_grey_images_have_the_features_of_their_colours(rgb):
    model, folder = rgb
    grey_model = vit_jax.load_model(folder, channels=1)
    six_model = vit_jax.load_model(folder, channels=6)
    rng = np.random.default_rng(0)
    grey = rng.integers(0, 256, (2, 8, 8, 1), np.uint8)
    colours = np.repeat(grey, 3, axis=-1)
    six = np.repeat(grey, 6, axis=-1)

    of_colours = model(colours).features_BD
    of_grey = grey_model(grey).features_BD
    of_six = six_model(six).features_BD

    np.testing.assert_allclose(
        of_grey,
        of_colours,
        atol=1e-5,
    )
    np.testing.assert_allclose(
        of_six,
        of_colours,
        atol=1e-5,
    )


def test_a_model_of_four_channels_is_saved_and_loaded(tmp_path, rgb):
    model = vit_jax.load_model(
        rgb[1],
        channels=4,
        value_range=(0, 65_535),
        channel_weights="zero",
    )
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 65_536, (3, 8, 8, 4))
    images = list(pixels.astype(np.uint16))

    model.save(tmp_path / "four")
    again = vit_jax.load_model(tmp_path / "four")

    assert again.transform == model.transform
    np.testing.assert_array_equal(
        again.features(images),
        model.features(images),
    )
    with rejects("channels=4", "vit_jax holds every network"):
        model.save(tmp_path / "timm", to="timm")
    with rejects("channels='4'", "integer"):
        vit_jax.create_model("ViT-mu/4", channels="4")


@pytest.mark.parametrize("channels", [3, 13])
def test_standardised_channels_have_the_kernel_of_the_library(rgb, channels):
    _, folder = rgb
    stored = load_weights(folder)
    library = dict(stored.parameters)
    library[BIAS] = np.linspace(-1, 1, 32, dtype=np.float32)
    normalisation = Normalisation(
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    )
    folded = dataclasses.replace(
        stored,
        parameters=fold(library, normalisation),
        preprocessing=describe_normalisation(normalisation),
    )

    weights = expect_standardised_channels(folded)
    adapted = fit_channels(weights, channels, "cyclic", "channel_weights")

    expected = library[KERNEL_NAME]
    if channels != 3:
        expected = adapt_as_timm(expected, channels)
    np.testing.assert_allclose(adapted.parameters[KERNEL_NAME], expected, atol=1e-6)
    np.testing.assert_allclose(adapted.parameters[BIAS], library[BIAS], atol=1e-6)
    assert weights.preprocessing is None


def test_weights_for_pixels_from_minus_one_to_one_remain(rgb):
    weights = load_weights(rgb[1])

    assert expect_standardised_channels(weights) is weights
