"""Features of splits: every image once on any devices, kept and found again, computed anew where anything changed."""

import dataclasses
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest

from tests.inference.samples import NAMES, sample_pixels, sample_weights, to_png, write_classes
from tests.rejections import rejects
from vit_jax.api import from_weights
from vit_jax.arrays import normalise
from vit_jax.config import InputConfig
from vit_jax.data.memory import MemorySource
from vit_jax.data.sources import open_source
from vit_jax.data.subset import SubsetSource
from vit_jax.files import WriteError
from vit_jax.sharding import build_mesh, replicated
from vit_jax.transfer.features import Extractor, default_cache, write_features

AS_IT_IS = InputConfig(train_split="train", test_split="test", image_size=(8, 12))
PIXELS, LABELS = sample_pixels(13), np.arange(13) % 6


def extractor(cache=None, scale=None, **options):
    """Of seeded weights; with a scale, those of the last norm are others."""
    weights = sample_weights()
    if scale is not None:
        parameters = dict(weights.parameters) | {"encoder/norm/scale": weights.parameters["encoder/norm/scale"] * scale}
        weights = dataclasses.replace(weights, parameters=parameters)
    model = from_weights(weights, sharding=replicated(build_mesh(jax.devices())))
    options = {"layer": "pre_logits", "global_batch": 5, "max_unreadable": 0} | options
    return Extractor(model=model, transform=options.pop("transform", model.transform), cache=cache, **options)


def folder_source(tmp_path):
    """The training images of a folder of two splits."""
    for split in ("train", "test"):
        write_classes(tmp_path / "images" / split, LABELS, PIXELS)
    return open_source(f"folder:{tmp_path / 'images'}", "train", AS_IT_IS, 0)


@pytest.mark.parametrize("num_devices", [1, 3, 8])
def test_every_image_once_on_any_devices(num_devices, monkeypatch):
    devices = jax.devices()[:num_devices]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    found = extractor()
    features = found.extract(MemorySource(PIXELS, LABELS, NAMES))
    run = jax.jit(lambda image: found.model.module(normalise(image, "float32")).features_BD)
    expected = np.concatenate([run(image[None]) for image in PIXELS])
    np.testing.assert_allclose(features.feature_ND, expected, rtol=1e-5, atol=1e-6)
    assert features.is_read_N.all()
    assert np.array_equal(features.label_N, LABELS)
    assert len(np.unique(features.hash_N)) == 13


def test_kept_and_found_again(tmp_path):
    source = folder_source(tmp_path)
    first = extractor(tmp_path / "cache").extract(source)
    shutil.rmtree(tmp_path / "images")  # without them nothing can be computed again
    second = extractor(tmp_path / "cache").extract(source)
    for name in ("feature_ND", "label_N", "is_read_N", "hash_N"):
        assert np.array_equal(getattr(first, name), getattr(second, name)), name
    assert isinstance(second.feature_ND, np.memmap)


def test_computed_anew_when_anything_changes(tmp_path):
    source = folder_source(tmp_path)
    cache = tmp_path / "cache"
    kept = lambda: len(list(cache.iterdir()))  # noqa: E731
    extractor(cache).extract(source)
    assert kept() == 1
    extractor(cache, layer="pooled").extract(source)
    assert kept() == 2
    extractor(cache, scale=np.float32(2)).extract(source)
    assert kept() == 3
    path = pathlib.Path(source.name_of(3))
    path.write_bytes(to_png(PIXELS[0]))  # another image under the same name
    os.utime(path, ns=(1, 1))
    source = open_source(f"folder:{tmp_path / 'images'}", "train", AS_IT_IS, 0)
    changed = extractor(cache).extract(source)
    assert kept() == 4
    assert changed.hash_N[3] == changed.hash_N[[source.name_of(i).endswith("00.png") for i in range(13)]][0]


def test_other_parts_and_copies_of_a_dataset_have_features_of_their_own(data_dir, tmp_path):
    """Digits 4 and 5 as they are; and all of them moved to where another preparation might have been."""
    cache, config = tmp_path / "cache", dataclasses.replace(AS_IT_IS, data_dir=data_dir)
    parts = [open_source("digits", split, config, 0) for split in ("train[4:6]", "train[5:7]")]
    found = [extractor(cache).extract(part) for part in parts]
    assert np.array_equal(found[0].feature_ND[1], found[1].feature_ND[0])
    assert not np.array_equal(found[0].feature_ND, found[1].feature_ND)
    shutil.copytree(data_dir, tmp_path / "copy")
    moved = dataclasses.replace(config, data_dir=str(tmp_path / "copy"))
    extractor(cache).extract(open_source("digits", "train[4:6]", moved, 0))
    assert len(list(cache.iterdir())) == 3
    part = SubsetSource(open_source("digits", "train[4:6]", config, 0), [1])
    assert len(extractor(cache).extract(part)) == 1
    assert len(list(cache.iterdir())) == 4


def test_own_sources_and_no_cache_keep_nothing(tmp_path):
    source = folder_source(tmp_path)
    extractor(tmp_path / "cache").extract(MemorySource(PIXELS, LABELS, NAMES))
    extractor(None).extract(source)
    assert not (tmp_path / "cache").exists()


def test_damaged_cache_is_computed_again(tmp_path):
    source = folder_source(tmp_path)
    first = extractor(tmp_path / "cache").extract(source)
    (folder,) = (tmp_path / "cache").iterdir()
    (folder / "about.json").write_text("{}")
    assert np.array_equal(extractor(tmp_path / "cache").extract(source).feature_ND, first.feature_ND)


def test_unreadable_images(tmp_path):
    source = folder_source(tmp_path)
    pathlib.Path(source.name_of(5)).write_bytes(b"")
    with rejects("--max_unreadable", "0.*png"):
        extractor(tmp_path / "cache").extract(source)
    assert list((tmp_path / "cache").iterdir()) == []  # nothing unfinished stays
    found = extractor(tmp_path / "cache", max_unreadable=1).extract(source)
    assert np.flatnonzero(~found.is_read_N).tolist() == [5]
    written = write_features(tmp_path / "f.npz", found, source)
    assert written["features"] == "12 x 16 float32"
    with np.load(tmp_path / "f.npz") as arrays:
        assert arrays["features"].shape == (12, 16)
        assert arrays["names"].tolist() == [source.name_of(i) for i in range(13) if i != 5]
        assert arrays["class_names"].tolist() == list(source.class_names)
        assert np.array_equal(arrays["labels"], np.delete(source.labels, 5))


def test_cache_that_cannot_be_written(tmp_path):
    source = folder_source(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="cannot be written"):
        extractor(tmp_path / "file" / "cache").extract(source)


def test_default_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "vit_jax" / "features"
