"""Features of layers and of splits: every image once on any devices, kept on disk, computed again after changes."""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.evals.samples import (
    NAMES,
    extractor_of,
    sample_pixels,
    sample_weights,
    to_png,
    write_classes,
)
from tests.models.small_models import apply, filled
from tests.rejections import rejects
from tests.weights.small_networks import HYBRID, RESNET, VIT
from vit_jax.api import from_weights
from vit_jax.arrays import Batch, normalise
from vit_jax.config import InputConfig
from vit_jax.config.architecture import Architecture
from vit_jax.data.kinds.in_memory import MemorySource
from vit_jax.data.sources import open_source
from vit_jax.data.subset import SubsetSource
from vit_jax.evals import runner
from vit_jax.evals.features import (
    Features,
    collect,
    hashes,
    make_feature_step,
    num_in_both,
    write_features,
)
from vit_jax.evals.runner import Runner
from vit_jax.sharding import build_mesh, replicated
from vit_jax.storage.files import WriteError, cache_folder


def batch_of(pixels, mask=None):
    mask = np.ones(len(pixels), np.float32) if mask is None else np.asarray(mask, np.float32)
    return Batch(
        image_BHWC=jnp.asarray(pixels),
        label_B=jnp.zeros(len(pixels), jnp.int32),
        mask_B=jnp.asarray(mask),
    )


def feature(a: Architecture, layer: str, pixels):
    step = jax.jit(make_feature_step(layer, a))
    return np.asarray(step(filled(a), batch_of(pixels))["feature_BD"])


def layers(a, pixels, *intermediates):
    return apply(filled(a), normalise(jnp.asarray(pixels), "float32"), intermediates=intermediates)


def test_layers_of_a_transformer():
    pixels = sample_pixels(2, VIT.image_size)
    output = layers(VIT, pixels, "blocks")

    assert VIT.pool == "token"

    expected = {
        "pre_logits": output.features_BD,
        "pooled": output.pooled_BD,
        "token": output.pooled_BD,
        "mean": np.asarray(output.tokens_BND).mean(axis=1),
        "token_mean": np.concatenate(
            [output.pooled_BD, np.asarray(output.tokens_BND).mean(axis=1)],
            axis=1,
        ),
        "block:1": output.blocks_LBSD[0, :, 0],
        f"block:{VIT.depth}": output.blocks_LBSD[-1, :, 0],
    }
    for layer, value in expected.items():
        np.testing.assert_allclose(
            feature(VIT, layer, pixels),
            np.asarray(value),
            rtol=1e-5,
            atol=1e-5,
        )


def test_token_and_mean_behind_registers_are_what_token_gap_pools():
    a = dataclasses.replace(VIT, pool="token_gap", registers=2)
    pixels = sample_pixels(2, a.image_size)
    pooled = layers(a, pixels).pooled_BD

    assert pooled.shape == (2, 2 * a.width)
    np.testing.assert_allclose(feature(a, "token_mean", pixels), pooled, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pool", ["gap", "map"])
def test_the_class_token_is_a_feature_also_where_it_is_not_pooled(pool):
    a = dataclasses.replace(VIT, pool=pool, class_tokens=1, registers=2)
    pixels = sample_pixels(2, a.image_size)
    output = layers(a, pixels)
    token = output.prefix_BPD[:, 0]
    mean = np.asarray(output.tokens_BND).mean(axis=1)

    np.testing.assert_allclose(feature(a, "token", pixels), token, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        feature(a, "token_mean", pixels),
        np.concatenate([token, mean], 1),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.slow
def test_block_without_class_token_and_stages():
    pixels = sample_pixels(2, VIT.image_size)
    gap = dataclasses.replace(VIT, pool="gap")
    blocks = layers(gap, pixels, "blocks").blocks_LBSD

    np.testing.assert_allclose(
        feature(gap, "block:1", pixels),
        np.asarray(blocks[0]).mean(axis=1),
        atol=1e-5,
    )

    for a in (RESNET, HYBRID):
        pixels = sample_pixels(2, a.image_size)
        output = layers(a, pixels, "stages")
        stage = np.asarray(output.stages_BHWC[0]).mean(axis=(1, 2))

        np.testing.assert_allclose(feature(a, "stage:1", pixels), stage, rtol=1e-5, atol=1e-5)

        if a is RESNET:
            np.testing.assert_allclose(
                feature(a, "mean", pixels),
                output.pooled_BD,
                rtol=1e-5,
                atol=1e-5,
            )


@pytest.mark.parametrize(
    ("a", "layer", "message"),
    [
        (VIT, "logits", "must be one of pre_logits, pooled, token, mean, token_mean, block:1"),
        (VIT, "block:0", f"block:1 to block:{VIT.depth} for"),
        (VIT, "block:99", f"block:1 to block:{VIT.depth} for"),
        (VIT, "stage:1", "must be one of"),
        (RESNET, "block:1", "mean, stage:1 to stage:"),
        (RESNET, "token", "must be one of pre_logits, pooled, mean, stage"),
        (RESNET, "token_mean", "must be one of pre_logits, pooled, mean, stage"),
        (
            dataclasses.replace(VIT, pool="gap"),
            "token_mean",
            "must be one of pre_logits, pooled, mean, block",
        ),
    ],
)
def test_layers_that_are_not_there(a, layer, message):
    with pytest.raises(ValueError, match=message):
        make_feature_step(layer, a)


def test_equal_pixels_have_equal_hashes_and_others_have_not():
    pixels = sample_pixels(40, VIT.image_size)
    pixels[7] = pixels[3]
    pixels[8] = pixels[3]
    pixels[8, 0, 0, 0] ^= 1  # one bit
    pixels[9] = pixels[3][:, ::-1]
    pixels[10] = 0
    pixels[11] = 1
    step = make_feature_step("pooled", VIT)
    found = hashes(np.asarray(step(filled(VIT), batch_of(pixels))["hash_B2"]))

    assert found[3] == found[7]
    assert len(np.unique(found)) == 39


def open_batches(batches):
    @contextlib.contextmanager
    def opened():
        yield iter(batches)

    return opened


def fake_step(_, batch):
    return {
        "feature_BD": batch.image_BHWC.reshape(len(batch.image_BHWC), -1)[:, :2].astype(
            jnp.float32
        ),
        "hash_B2": jnp.zeros((len(batch.image_BHWC), 2), jnp.uint32),
        "mask_B": batch.mask_B,
    }


def test_padding_is_left_out_and_unreadable_images_keep_their_place():
    pixels = sample_pixels(6, (2, 2))
    batches = [batch_of(pixels[:3]), batch_of(pixels[3:], [1, 0, 0])]
    found = collect(open_batches(batches), fake_step, None, np.arange(5, dtype=np.int32))

    assert found.is_read_N.tolist() == [True, True, True, True, False]
    assert np.array_equal(found.feature_ND, pixels.reshape(6, -1)[:5, :2])
    assert found.readable().label_N.tolist() == [0, 1, 2, 3]


def test_features_that_are_not_finite():
    def broken(_, batch):
        results = fake_step(_, batch)
        return results | {"feature_BD": results["feature_BD"].at[1, 0].set(jnp.nan)}

    with pytest.raises(ValueError, match="features: the outputs for image 1 are not finite"):
        collect(
            open_batches([batch_of(sample_pixels(3, (2, 2)))]),
            broken,
            None,
            np.zeros(3, np.int32),
        )


def test_images_on_both_sides():
    def side(numbers, unreadable=()):
        hash_N = np.array(numbers, np.uint64)
        is_read = np.array([number not in unreadable for number in numbers])

        return Features(
            np.zeros((len(hash_N), 1)),
            np.zeros(len(hash_N), np.int32),
            is_read,
            hash_N,
        )

    assert num_in_both(side([1, 2, 3, 4], unreadable=[4]), side([3, 3, 2, 4, 9])) == 3


AS_IT_IS = InputConfig(train_split="train", test_split="test", image_size=(8, 12))
PIXELS = sample_pixels(13)
LABELS = np.arange(13) % 6


def extractor(cache=None, scale=None, **options):
    """Return seeded weights; a scale changes those of the last norm."""
    weights = sample_weights()
    if scale is not None:
        parameters = dict(weights.parameters) | {
            "encoder/norm/scale": weights.parameters["encoder/norm/scale"] * scale
        }
        weights = dataclasses.replace(weights, parameters=parameters)

    model = from_weights(weights, sharding=replicated(build_mesh(jax.devices())))
    return extractor_of(model, cache, **({"global_batch": 5} | options))


def folder_source(tmp_path):
    """The training images of a folder of two splits."""
    for split in ("train", "test"):
        write_classes(tmp_path / "images" / split, LABELS, PIXELS)
    return folder_again(tmp_path)


def folder_again(tmp_path):
    return open_source(f"folder:{tmp_path / 'images'}", "train", AS_IT_IS, 0)


@pytest.mark.parametrize("num_devices", [1, 3, 8])
def test_every_image_once_on_any_devices(num_devices, monkeypatch):
    devices = jax.devices()[:num_devices]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    features = extractor().extract(MemorySource(PIXELS, LABELS, NAMES))
    module = from_weights(sample_weights()).module
    run = jax.jit(lambda image: module(normalise(image, "float32")).features_BD)

    expected = np.concatenate([run(image[None]) for image in PIXELS])
    np.testing.assert_allclose(features.feature_ND, expected, rtol=1e-5, atol=1e-6)
    assert features.is_read_N.all()
    assert np.array_equal(features.label_N, LABELS)
    assert len(np.unique(features.hash_N)) == 13


def test_kept_and_found_again(tmp_path, capsys):
    source = folder_source(tmp_path)
    first = extractor(tmp_path / "cache").extract(source)

    assert "computing features of 13 images\n" in capsys.readouterr().err

    shutil.rmtree(tmp_path / "images")  # without them nothing can be computed again
    second = extractor(tmp_path / "cache").extract(source)

    assert capsys.readouterr().err == ""

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
    assert (
        changed.hash_N[3]
        == changed.hash_N[[source.name_of(i).endswith("00.png") for i in range(13)]][0]
    )


def test_files_of_equal_size_and_time_that_change_places(tmp_path):
    source = folder_source(tmp_path)
    cache = tmp_path / "cache"
    first, second = (pathlib.Path(source.name_of(i)) for i in (0, 5))
    longest = max(path.stat().st_size for path in (first, second))

    for path in (first, second):
        path.write_bytes(
            path.read_bytes().ljust(longest, b"\0")
        )  # decoders ignore what follows an image
        os.utime(path, ns=(1, 1))

    before = extractor(cache).extract(folder_again(tmp_path)).hash_N
    first.rename(tmp_path / "other")
    second.rename(first)
    (tmp_path / "other").rename(second)
    after = extractor(cache).extract(folder_again(tmp_path)).hash_N

    assert [after[0], after[5]] == [before[5], before[0]] != [before[0], before[5]]


def test_other_parts_and_copies_of_a_dataset_have_features_of_their_own(data_dir, tmp_path):
    """Digits 4 and 5 as they are; and all of them moved to where another preparation might have been."""
    cache = tmp_path / "cache"
    config = dataclasses.replace(AS_IT_IS, data_dir=data_dir)
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


def flip_bits(content):
    """Flip 200 bits, spread over the second half, of all positions in a byte."""
    changed = np.frombuffer(content, np.uint8).copy()
    places = np.linspace(len(changed) // 2, len(changed) - 1, 200).astype(int)
    np.bitwise_xor.at(changed, places, (1 << np.arange(200) % 8).astype(np.uint8))

    return changed.tobytes()


DAMAGE = {
    "flipped bits": ("feature.npy", flip_bits),
    "rows of zeros": (
        "feature.npy",
        lambda content: content[: len(content) // 2].ljust(len(content), b"\0"),
    ),
    "truncated": ("feature.npy", lambda content: content[:-100]),
    "truncated header": ("hash.npy", lambda content: content[:50]),
    "empty": ("is_read.npy", lambda content: b""),
    "another record": ("about.json", lambda content: b"{}"),
    "no JSON": ("about.json", lambda content: content[:-10]),
    "no object": ("about.json", lambda content: b"[]"),
    "recorded shape": ("about.json", lambda content: content.replace(b"13,", b"12,")),
}


def test_damaged_cache_is_computed_again(tmp_path, caplog):
    source = folder_source(tmp_path)
    cache = tmp_path / "cache"
    found = extractor(cache)
    first = np.array(found.extract(source).feature_ND)
    (folder,) = cache.iterdir()

    for name, (file, damage) in DAMAGE.items():
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(damage(content))

        assert (folder / file).read_bytes() != content, name
        assert np.array_equal(found.extract(source).feature_ND, first), name

        (line,) = caplog.messages

        assert str(folder) in line, name
        assert "damaged" in line, name

        caplog.clear()

        assert np.array_equal(found.extract(source).feature_ND, first), name
        assert caplog.messages == [], name
        assert list(cache.iterdir()) == [folder], name

    (folder / "hash.npy").unlink()

    assert np.array_equal(found.extract(source).feature_ND, first)
    assert "hash.npy" in caplog.text


def test_digests_are_of_files(tmp_path):
    """`sha256sum` finds the same."""
    extractor(tmp_path / "cache").extract(folder_source(tmp_path))
    (folder,) = (tmp_path / "cache").iterdir()
    arrays = json.loads((folder / "about.json").read_text())["arrays"]

    assert sorted([*arrays, "about.json"]) == sorted(path.name for path in folder.iterdir())

    for file, recorded in arrays.items():
        assert recorded["sha256"] == hashlib.sha256((folder / file).read_bytes()).hexdigest()
        assert recorded["shape"] == list(np.load(folder / file).shape)


def test_two_processes_with_equal_numbers(tmp_path, monkeypatch):
    """Threads stand in for containers: the second begins before the first is complete, and ends after it."""
    source = folder_source(tmp_path)
    cache = tmp_path / "cache"
    waiting = 600
    begins = threading.Event()
    has_begun = threading.Event()
    first_ended = threading.Event()
    original = Runner.compute_rows

    def rows(*arguments, **options):
        is_second = begins.is_set()
        for part in original(*arguments, **options):
            yield part
            if is_second and not has_begun.is_set():  # its first batch is written
                has_begun.set()
                assert first_ended.wait(waiting)

        if not is_second:
            begins.set()
            assert has_begun.wait(waiting)

    def extract_second():
        assert begins.wait(waiting)
        return np.array(others[1].extract(source).feature_ND)

    expected = extractor(None).extract(source).feature_ND
    others = extractor(cache), extractor(cache)
    monkeypatch.setattr(Runner, "compute_rows", rows)

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        second = threads.submit(extract_second)
        try:
            first = np.array(others[0].extract(source).feature_ND)
        finally:
            first_ended.set()

        np.testing.assert_array_equal(first, expected)
        np.testing.assert_array_equal(second.result(), expected)

    monkeypatch.setattr(Runner, "compute_rows", None)  # neither computes again

    np.testing.assert_array_equal(others[0].extract(source).feature_ND, expected)
    assert len(list(cache.iterdir())) == 1


def test_half_of_the_rows_are_never_kept(tmp_path, monkeypatch):
    source = folder_source(tmp_path)
    results = runner.iterate_results
    monkeypatch.setattr(
        runner,
        "iterate_results",
        lambda *arguments: itertools.islice(results(*arguments), 1),
    )

    with pytest.raises(RuntimeError, match="8 of its 13 images"):
        extractor(tmp_path / "cache").extract(source)

    assert list((tmp_path / "cache").iterdir()) == []


def test_unreadable_images(tmp_path):
    source = folder_source(tmp_path)
    pathlib.Path(source.name_of(5)).write_bytes(b"")

    with rejects("--max_unreadable", "0.*png"):
        extractor(tmp_path / "cache").extract(source)

    assert list((tmp_path / "cache").iterdir()) == []  # nothing unfinished stays

    found = extractor(tmp_path / "cache", max_unreadable=1).extract(source)

    assert np.flatnonzero(~found.is_read_N).tolist() == [5]

    with rejects("--max_unreadable", "0.*png"):
        extractor(tmp_path / "cache").extract(source)  # also where features are kept

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
    assert cache_folder("features") == tmp_path / "vit_jax" / "features"
