"""Runs on images of 4 and 13 bands whose class the first three bands do not tell."""

import json

import numpy as np
import pytest
import tifffile

import vit_jax
from tests import tiny
from vit_jax.data.kinds.in_memory import MemorySource
from vit_jax.train.pretrain import pretrain

SIZES = {"train": 256, "test": 64}
FIELDS = (
    "input.image_size=8",
    "input.flip=True",
    "schedule.learning_rate=0.01",
    "global_batch=64",
    "evaluation.global_batch=64",
    "evaluation.every=40 steps",
    "checkpoint.every=40 steps",
    "logging.every=40 steps",
    "total=40 steps",
    "model.depth=1",
)


def make_images(channels, band, other, split):
    """Return uint16 images and labels.

    In class 1 `band` is brighter than `other` by 4,000, in class 0 darker. Both have the brightness
    of the image, so that one band alone tells little; without another band (None) it tells all.
    """
    rng = np.random.default_rng(len(split))
    size = SIZES[split]
    labels = np.arange(size) % 2
    images = rng.integers(20_000, 24_000, (size, 8, 8, channels))
    difference = np.where(labels == 1, 2_000, -2_000)
    difference = difference.reshape(size, 1, 1)
    images[..., band] += difference
    if other is not None:
        brightness = rng.integers(0, 30_000, (size, 1, 1, 1))
        images[..., other] -= difference
        images += brightness
    return images.astype(np.uint16), labels


def open_four(split, config, seed):
    images, labels = make_images(4, 3, None, split)
    return MemorySource(images, labels, ("dark", "bright"))


@pytest.mark.slow
def test_a_run_on_the_fourth_band(tmp_path):
    config = tiny.config(
        *FIELDS,
        "data=tests.train.test_channels:open_four",
        "input.channels=4",
    )

    summary = pretrain(config, str(tmp_path))

    assert summary["test_accuracy"] > 0.95
    stored = json.loads((tmp_path / "config.json").read_text())
    stored_mean = stored["input"]["channel_mean"]
    images, _ = make_images(4, 3, None, "train")
    mean = images.mean((0, 1, 2))
    np.testing.assert_allclose(stored_mean[:3], mean[:3], rtol=1e-4)
    model = vit_jax.load_model(tmp_path)
    assert model.transform.bands.mean == tuple(stored_mean)


@pytest.mark.slow
def test_a_run_on_thirteen_bands_in_files(tmp_path):
    for split in SIZES:
        images, labels = make_images(13, 8, 11, split)
        for label in (0, 1):
            (tmp_path / split / f"class{label}").mkdir(parents=True)
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            path = tmp_path / split / f"class{label}" / f"{number}.tif"
            tifffile.imwrite(
                path,
                image,
                photometric="minisblack",
                planarconfig="contig",
            )

    config = tiny.config(
        *FIELDS,
        f"data=folder:{tmp_path}",
        "input.channels=13",
    )
    summary = pretrain(config, str(tmp_path / "run"))

    assert summary["test_accuracy"] > 0.95
    model = vit_jax.load_model(tmp_path / "run")
    folder = tmp_path / "test" / "class1"
    files = sorted(map(str, folder.iterdir()))
    predictions = model.predict(files).argmax(axis=1)
    assert np.mean(predictions) > 0.95
    tifffile.imwrite(
        tmp_path / "four.tif",
        np.zeros((8, 8, 4), np.uint16),
        photometric="minisblack",
    )
    with pytest.raises(ValueError, match=r"four\.tif: it has .* the network takes 13"):
        model.predict([str(tmp_path / "four.tif")])
