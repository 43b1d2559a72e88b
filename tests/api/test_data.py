"""Batches for a custom loop: those of a run with the same options."""

import re

import jax
import numpy as np
import pytest

import vit_jax
from tests.rejections import rejects
from tests.tiny import ROOT

PLAIN = {"image_size": 8, "batch_size": 32, "train_crop": "none", "flip": False}


@pytest.fixture(scope="module")
def digits():
    return vit_jax.open_data("digits", **PLAIN)


def test_what_is_known_of_the_data(digits):
    assert digits.class_names == tuple("0123456789")
    assert not digits.is_multilabel
    assert digits.steps_per_epoch == 1437 // 32


def test_an_epoch_has_every_training_image_once(digits):
    batches = list(digits.train_batches(num_steps=44))

    seen = np.concatenate([batch.record_index for batch in batches])
    assert len(set(seen.tolist())) == 44 * 32
    assert batches[0].image.shape == (32, 8, 8, 3)
    assert batches[0].image.dtype == np.uint8


def test_a_loop_goes_on_with_the_batches_that_it_would_have_got(digits):
    whole = list(digits.train_batches(num_steps=5))
    rest = list(digits.train_batches(num_steps=5, start_step=3))

    assert len(rest) == 2
    for expected, batch in zip(whole[3:], rest, strict=True):
        np.testing.assert_array_equal(batch.image, expected.image)
        np.testing.assert_array_equal(batch.label, expected.label)


def test_test_batches_have_every_image_once(digits):
    batches = list(digits.test_batches())

    counted = sum(batch.mask.sum() for batch in batches)
    assert counted == 360
    assert batches[-1].image.shape == (32, 8, 8, 3)


@pytest.mark.parametrize(
    ("data", "options", "rule"),
    [
        ("digitz", {}, "'digits'"),
        ("digits", {"image_sise": 8}, "Did you mean 'image_size'"),
        ("digits", {"mixup_alpha": 0.2}, "training step"),
        ("digits", {"patch_dropout": 0.5}, "the network excludes patches"),
        ("digits", {"test_split": "val"}, "train.*test"),
        ("digits", {"batch_size": 0}, "at least 1"),
    ],
)
def test_mistakes_are_named(data, options, rule):
    with rejects("", rule):
        vit_jax.open_data(data, **options)


def test_the_loop_of_the_documentation_learns():
    page = (ROOT / "docs/python_api.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (loop,) = [block for block in blocks if "open_data" in block]
    names = {"vit_jax": vit_jax}

    with jax.numpy_dtype_promotion("standard"):  # as users have it
        exec(loop, names)

    assert names["loss"] < 2.1  # it begins with the logarithm of ten classes, 2.3
