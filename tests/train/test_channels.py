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
    labels = np.arange(SIZES[split]) % 2
    shape = (SIZES[split], 8, 8, channels)
    images = rng.integers(
        20_000,
        24_000,
        shape,
    )
    difference = np.where(labels == 1, 2_000, -2_000)[:, None, None]
    images[..., band] += difference
    if other is not None:
        images[..., other] -= difference
        images += rng.integers(0, 30_000, (len(labels), 1, 1, 1))
    return images.astype(np.uint16), labels


def open_four(split, config, seed):
    return MemorySource(*make_images(4, 3, None, split), ("dark", "bright"))


@pytest.mark.slow
def test_a_run_on_the_fourth_band(tmp_path):
    data = "data=tests.train.test_channels:open_four"

    summary = pretrain(tiny.config(*FIELDS, data, "input.channels=4"), str(tmp_path))

    assert summary["test_accuracy"] > 0.95
    stored = json.loads((tmp_path / "config.json").read_text())["input"]
    images, _ = make_images(4, 3, None, "train")
    np.testing.assert_allclose(
        stored["channel_mean"][:3], images[..., :3].mean((0, 1, 2)), rtol=1e-4
    )
    model = vit_jax.load_model(tmp_path)
    assert model.transform.bands.mean == tuple(stored["channel_mean"])


@pytest.mark.slow
def test_a_run_on_thirteen_bands_in_files(tmp_path):
    for split in SIZES:
        images, labels = make_images(13, 8, 11, split)
        for label in (0, 1):
            (tmp_path / split / f"class{label}").mkdir(parents=True)
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            path = tmp_path / split / f"class{label}" / f"{number}.tif"
            tifffile.imwrite(path, image, photometric="minisblack", planarconfig="contig")

    fields = (*FIELDS, f"data=folder:{tmp_path}", "input.channels=13")
    summary = pretrain(tiny.config(*fields), str(tmp_path / "run"))

    assert summary["test_accuracy"] > 0.95
    model = vit_jax.load_model(tmp_path / "run")
    files = sorted(map(str, (tmp_path / "test" / "class1").iterdir()))
    assert np.mean(model.predict(files).argmax(axis=1)) > 0.95
    tifffile.imwrite(
        tmp_path / "four.tif", np.zeros((8, 8, 4), np.uint16), photometric="minisblack"
    )
    with pytest.raises(ValueError, match=r"four\.tif: it has .* the network takes 13"):
        model.predict([str(tmp_path / "four.tif")])
