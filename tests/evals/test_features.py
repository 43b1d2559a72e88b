"""Features of layers and of splits, on any devices, kept on disk, computed again after changes."""

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
from numpy.testing import assert_allclose, assert_array_equal

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
from vit_jax.evals import step_results
from vit_jax.evals.features import (
    Features,
    collect,
    count_common_images,
    join_hash_words,
    make_feature_step,
    write_features,
)
from vit_jax.evals.runner import Runner
from vit_jax.sharding import build_mesh, replicate
from vit_jax.storage.files import WriteError, cache_folder


def make_batch(pixels, mask=None):
    count = len(pixels)
    if mask is None:
        mask = np.ones(count)

    return Batch(
        image_BHWC=jnp.asarray(pixels),
        label_B=jnp.zeros(count, jnp.int32),
        mask_B=jnp.asarray(mask, jnp.float32),
    )


def compute_feature(a: Architecture, layer: str, pixels):
    step = jax.jit(make_feature_step(layer, a))
    network = filled(a)
    batch = make_batch(pixels)

    rows = step(network, batch)
    return np.asarray(rows["feature_BD"])


def compute_layers(a, pixels, *intermediates):
    network = filled(a)
    images = normalise(jnp.asarray(pixels), "float32")
    return apply(
        network,
        images,
        intermediates=intermediates,
    )


def average_tokens(output):
    tokens_BND = np.asarray(output.tokens_BND)
    return tokens_BND.mean(axis=1)


def join_features(*parts):
    return np.concatenate(parts, axis=1)


def assert_feature(a, layer, pixels, expected):
    found = compute_feature(a, layer, pixels)
    assert_allclose(
        found,
        np.asarray(expected),
        rtol=1e-5,
        atol=1e-5,
    )


def test_layers_of_a_transformer():
    pixels = sample_pixels(2, VIT.image_size)
    output = compute_layers(VIT, pixels, "blocks")
    mean = average_tokens(output)

    assert VIT.pool == "token"

    expected = {
        "pre_logits": output.features_BD,
        "pooled": output.pooled_BD,
        "token": output.pooled_BD,
        "mean": mean,
        "token_mean": join_features(output.pooled_BD, mean),
        "block:1": output.blocks_LBSD[0, :, 0],
        f"block:{VIT.depth}": output.blocks_LBSD[-1, :, 0],
    }
    for layer, value in expected.items():
        assert_feature(VIT, layer, pixels, value)


def test_token_and_mean_behind_registers_are_what_token_gap_pools():
    a = dataclasses.replace(
        VIT,
        pool="token_gap",
        registers=2,
    )
    pixels = sample_pixels(2, a.image_size)

    pooled = compute_layers(a, pixels).pooled_BD

    assert pooled.shape == (2, 2 * a.width)
    assert_feature(a, "token_mean", pixels, pooled)


@pytest.mark.parametrize("pool", ["gap", "map"])
def test_the_class_token_is_a_feature_also_where_it_is_not_pooled(pool):
    a = dataclasses.replace(
        VIT,
        pool=pool,
        class_tokens=1,
        registers=2,
    )
    pixels = sample_pixels(2, a.image_size)

    output = compute_layers(a, pixels)

    token = output.prefix_BPD[:, 0]
    mean = average_tokens(output)

    assert_feature(a, "token", pixels, token)
    assert_feature(
        a,
        "token_mean",
        pixels,
        join_features(token, mean),
    )


@pytest.mark.slow
def test_the_feature_of_a_block_without_class_token_is_the_mean():
    a = dataclasses.replace(VIT, pool="gap")
    pixels = sample_pixels(2, a.image_size)

    output = compute_layers(a, pixels, "blocks")

    first_block = np.asarray(output.blocks_LBSD[0])
    expected = first_block.mean(axis=1)

    assert_feature(a, "block:1", pixels, expected)


WITHOUT_TOKEN = dataclasses.replace(VIT, pool="gap")


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
        (WITHOUT_TOKEN, "token_mean", "must be one of pre_logits, pooled, mean, block"),
    ],
)
def test_layers_that_are_not_there(a, layer, message):
    with pytest.raises(ValueError, match=message):
        make_feature_step(layer, a)


@pytest.mark.slow
@pytest.mark.parametrize(
    "a",
    [RESNET, HYBRID],
    ids=["resnet", "hybrid"],
)
def test_the_feature_of_a_stage_is_the_mean(a):
    pixels = sample_pixels(2, a.image_size)

    output = compute_layers(a, pixels, "stages")

    first_stage = np.asarray(output.stages_BHWC[0])
    expected = first_stage.mean(axis=(1, 2))

    assert_feature(a, "stage:1", pixels, expected)
    if a is RESNET:
        assert_feature(a, "mean", pixels, output.pooled_BD)


def test_equal_pixels_have_equal_hashes_and_others_have_not():
    """Images that differ in one bit, or by a flip, have other hashes."""
    pixels = sample_pixels(40, VIT.image_size)
    original = pixels[3]
    pixels[7] = original
    pixels[8] = original
    pixels[8, 0, 0, 0] ^= 1
    pixels[9] = original[:, ::-1]
    pixels[10] = 0
    pixels[11] = 1
    step = make_feature_step("pooled", VIT)
    batch = make_batch(pixels)

    network = filled(VIT)
    rows = step(network, batch)

    words_B2 = np.asarray(rows["hash_B2"])
    found = join_hash_words(words_B2)
    num_different = len(np.unique(found))

    assert found[3] == found[7]
    assert num_different == 39


def open_batches(batches):
    """Return a function that opens these batches."""
    return lambda: contextlib.nullcontext(iter(batches))


def fake_step(_, batch):
    """Return the first two values of each image as its features."""
    count = len(batch.image_BHWC)
    values = batch.image_BHWC.reshape(count, -1)
    first_values = values[:, :2]
    return {
        "feature_BD": first_values.astype(jnp.float32),
        "hash_B2": jnp.zeros((count, 2), jnp.uint32),
        "mask_B": batch.mask_B,
    }


def test_padding_is_excluded_and_unreadable_images_keep_their_place():
    pixels = sample_pixels(6, (2, 2))
    full = make_batch(pixels[:3])
    padded = make_batch(pixels[3:], [1, 0, 0])
    labels = np.arange(5, dtype=np.int32)

    found = collect(
        open_batches([full, padded]),
        fake_step,
        None,
        labels,
    )

    values = pixels.reshape(6, -1)
    expected = values[:5, :2]
    readable = found.readable()

    unread = np.flatnonzero(~found.is_read_N)
    assert unread.tolist() == [4]
    assert np.array_equal(found.feature_ND, expected)
    assert np.array_equal(readable.label_N, labels[:4])


def test_features_that_are_not_finite():
    def step_with_nan(_, batch):
        rows = fake_step(_, batch)
        feature_BD = rows["feature_BD"]
        rows["feature_BD"] = feature_BD.at[1, 0].set(jnp.nan)
        return rows

    pixels = sample_pixels(3, (2, 2))
    batches = open_batches([make_batch(pixels)])
    labels = np.zeros(3, np.int32)

    with pytest.raises(ValueError, match="features: the outputs for image 1 are not finite"):
        collect(batches, step_with_nan, None, labels)


def test_images_of_different_normalised_bands_have_different_hashes():
    pixels = np.random.default_rng(0).uniform(-0.5, 0.5, (3, *VIT.image_shape))
    pixels[2] = pixels[0]
    step = jax.jit(make_feature_step("pre_logits", VIT))

    rows = step(filled(VIT), make_batch(pixels.astype(np.float32)))

    first, second, copy = join_hash_words(np.asarray(rows["hash_B2"])).tolist()
    assert first != second
    assert first == copy


def test_images_on_both_sides():
    def make_side(numbers, unreadable=()):
        count = len(numbers)
        return Features(
            np.zeros((count, 1)),
            np.zeros(count, np.int32),
            ~np.isin(numbers, unreadable),
            np.array(numbers, np.uint64),
        )

    train = make_side([1, 2, 3, 4], unreadable=[4])
    test = make_side([3, 3, 2, 4, 9])

    num_common = count_common_images(train, test)

    assert num_common == 3


AS_IT_IS = InputConfig(
    train_split="train",
    test_split="test",
    image_size=(8, 12),
)
PIXELS = sample_pixels(13)
LABELS = np.arange(13) % 6


def make_extractor(cache=None, scale=None, **options):
    """Return an extractor of seeded weights; a scale changes their last norm."""
    weights = sample_weights()
    if scale is not None:
        name = "encoder/norm/scale"
        parameters = dict(weights.parameters)
        parameters[name] = parameters[name] * scale
        weights = dataclasses.replace(weights, parameters=parameters)

    mesh = build_mesh(jax.devices())
    model = from_weights(weights, sharding=replicate(mesh))
    options = {"global_batch": 5} | options
    return extractor_of(model, cache, **options)


def extract(source, cache, **options):
    extractor = make_extractor(cache, **options)
    return extractor.extract(source)


@pytest.fixture
def source(tmp_path):
    """The training images of a folder of two splits."""
    for split in ("train", "test"):
        write_classes(
            tmp_path / "images" / split,
            LABELS,
            PIXELS,
        )
    return open_folder(tmp_path)


def open_folder(tmp_path):
    return open_source(
        f"folder:{tmp_path / 'images'}",
        "train",
        AS_IT_IS,
        0,
    )


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def count_entries(cache):
    return len(list(cache.iterdir()))


@pytest.mark.parametrize("num_devices", [1, 3, 8])
def test_every_image_once_on_any_devices(num_devices, monkeypatch):
    devices = jax.devices()[:num_devices]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)

    source = MemorySource(PIXELS, LABELS, NAMES)

    features = extract(source, None)

    module = from_weights(sample_weights()).module

    @jax.jit
    def compute(image):
        output = module(normalise(image, "float32"))
        return output.features_BD

    expected = []
    for image in PIXELS:
        expected += list(compute(image[None]))
    assert_allclose(
        features.feature_ND,
        expected,
        rtol=1e-5,
        atol=1e-6,
    )
    num_hashes = len(np.unique(features.hash_N))
    assert features.is_read_N.all()
    assert np.array_equal(features.label_N, LABELS)
    assert num_hashes == 13


def test_kept_and_found_again(source, cache, tmp_path, capsys):
    """The second extraction has no images, so that nothing can be computed again."""
    first = extract(source, cache)

    assert "computing features of 13 images\n" in capsys.readouterr().err

    shutil.rmtree(tmp_path / "images")
    second = extract(source, cache)

    assert capsys.readouterr().err == ""

    for field in dataclasses.fields(Features):
        array = getattr(first, field.name)
        array_again = getattr(second, field.name)
        assert np.array_equal(array, array_again), field.name
    assert isinstance(second.feature_ND, np.memmap)


def test_other_layers_and_weights_are_computed_anew(source, cache):
    extract(source, cache)

    assert count_entries(cache) == 1

    extract(source, cache, layer="pooled")
    assert count_entries(cache) == 2

    extract(source, cache, scale=np.float32(2))
    assert count_entries(cache) == 3


def test_another_image_under_the_same_name_is_computed_anew(
    source,
    cache,
    tmp_path,
):
    """Image 3 becomes a copy of the image 00.png."""
    paths = []
    for i in range(13):
        path = source.name_of(i)
        paths.append(path)
        if path.endswith("00.png"):
            copied = i
    extract(source, cache)

    replaced = pathlib.Path(paths[3])
    replaced.write_bytes(to_png(PIXELS[0]))
    os.utime(replaced, ns=(1, 1))

    changed = extract(open_folder(tmp_path), cache)

    assert count_entries(cache) == 2
    hashes = changed.hash_N
    assert hashes[3] == hashes[copied]


def test_files_of_equal_size_and_time_that_change_places(
    source,
    cache,
    tmp_path,
):
    """Decoders ignore the zeros after an image that make its file longer."""
    first = pathlib.Path(source.name_of(0))
    second = pathlib.Path(source.name_of(5))
    contents = {path: path.read_bytes() for path in (first, second)}
    longest = max(map(len, contents.values()))
    for path, content in contents.items():
        path.write_bytes(content.ljust(longest, b"\0"))
        os.utime(path, ns=(1, 1))

    before = extract(open_folder(tmp_path), cache).hash_N
    first.rename(tmp_path / "other")
    second.rename(first)
    (tmp_path / "other").rename(second)
    after = extract(open_folder(tmp_path), cache).hash_N

    assert before[0] != before[5]
    assert after[0] == before[5]
    assert after[5] == before[0]


def test_other_parts_and_copies_of_a_dataset_have_their_features(
    data_dir,
    cache,
    tmp_path,
):
    """A part, another part, a moved copy as of another preparation, and a subset."""

    def open_digits(split, folder=data_dir):
        config = dataclasses.replace(AS_IT_IS, data_dir=str(folder))
        return open_source("digits", split, config, 0)

    def extract_digits(*words):
        return extract(open_digits(*words), cache)

    first = extract_digits("train[4:6]")
    second = extract_digits("train[5:7]")

    _, last_of_first = first.feature_ND
    first_of_second, last_of_second = second.feature_ND
    assert np.array_equal(last_of_first, first_of_second)
    assert not np.array_equal(last_of_first, last_of_second)

    shutil.copytree(data_dir, tmp_path / "copy")
    extract_digits("train[4:6]", tmp_path / "copy")

    assert count_entries(cache) == 3

    subset = SubsetSource(open_digits("train[4:6]"), [1])
    of_subset = extract(subset, cache)

    assert len(of_subset) == 1
    assert count_entries(cache) == 4


def test_custom_sources_and_no_cache_keep_nothing(source, cache):
    extract(MemorySource(PIXELS, LABELS, NAMES), cache)
    extract(source, None)

    assert not cache.exists()


def flip_bits(content):
    """Flip 200 bits, spread over the second half, of all positions in a byte."""
    changed = bytearray(content)
    last = len(changed) - 1
    places = np.linspace(last // 2, last, 200).astype(int)
    for number, place in enumerate(places):
        bit = number % 8
        changed[place] ^= 1 << bit
    return bytes(changed)


def zero_second_half(content):
    length = len(content)
    half = content[: length // 2]
    return half.ljust(length, b"\0")


def change_shape(content):
    return content.replace(b"13,", b"12,")


def truncate(length):
    """Return damage that cuts a file off after this number of bytes."""
    return lambda content: content[:length]


def write_instead(content):
    """Return damage that writes other content."""
    return lambda _: content


DAMAGE = {
    "flipped bits": ("feature.npy", flip_bits),
    "rows of zeros": ("feature.npy", zero_second_half),
    "truncated": ("feature.npy", truncate(-100)),
    "truncated header": ("hash.npy", truncate(50)),
    "empty": ("is_read.npy", write_instead(b"")),
    "another record": ("about.json", write_instead(b"{}")),
    "no JSON": ("about.json", truncate(-10)),
    "no object": ("about.json", write_instead(b"[]")),
    "recorded shape": ("about.json", change_shape),
}


def test_damaged_cache_is_computed_again(source, cache, caplog):
    extractor = make_extractor(cache)
    expected = np.array(extractor.extract(source).feature_ND)
    (folder,) = cache.iterdir()

    for name, (file_name, damage) in DAMAGE.items():
        file = folder / file_name
        content = file.read_bytes()
        file.write_bytes(damage(content))
        assert file.read_bytes() != content, name

        computed = extractor.extract(source).feature_ND
        assert np.array_equal(computed, expected), name
        (line,) = caplog.messages
        assert str(folder) in line, name
        assert "damaged" in line, name

        caplog.clear()
        cached = extractor.extract(source).feature_ND
        assert np.array_equal(cached, expected), name
        assert caplog.messages == [], name
        assert list(cache.iterdir()) == [folder], name


def test_a_file_of_the_cache_that_is_gone_is_computed_again(
    source,
    cache,
    caplog,
):
    expected = np.array(extract(source, cache).feature_ND)
    (folder,) = cache.iterdir()
    (folder / "hash.npy").unlink()

    computed = extract(source, cache).feature_ND

    assert np.array_equal(computed, expected)
    assert "hash.npy" in caplog.text


def test_digests_are_of_files(source, cache):
    """`sha256sum` prints the same digests."""
    extract(source, cache)

    (folder,) = cache.iterdir()
    text = (folder / "about.json").read_text()
    record = json.loads(text)
    arrays = record["arrays"]
    files = {path.name for path in folder.iterdir()}

    assert files == {*arrays, "about.json"}
    for name, recorded in arrays.items():
        file = folder / name
        digest = hashlib.sha256(file.read_bytes())
        array = np.load(file)
        assert recorded["sha256"] == digest.hexdigest()
        assert recorded["shape"] == list(array.shape)


class OverlappingExtractions:
    """Two extractions: the second begins before the first is complete, and ends after it."""

    WAIT_SECONDS = 600

    def __init__(self):
        self._may_begin_second = threading.Event()
        self._second_has_begun = threading.Event()
        self._first_has_ended = threading.Event()

    def wrap(self, compute_rows):
        """Return `compute_rows` that waits for the other extraction."""

        def compute_and_wait(*arguments, **options):
            is_second = self._may_begin_second.is_set()
            for part in compute_rows(*arguments, **options):
                yield part
                if is_second and not self._second_has_begun.is_set():
                    self._second_has_begun.set()
                    assert self._first_has_ended.wait(self.WAIT_SECONDS)

            if not is_second:
                self._may_begin_second.set()
                assert self._second_has_begun.wait(self.WAIT_SECONDS)

        return compute_and_wait

    def run_first(self, extract):
        try:
            return extract()
        finally:
            self._first_has_ended.set()

    def run_second(self, extract):
        assert self._may_begin_second.wait(self.WAIT_SECONDS)
        return extract()


def test_two_processes_that_extract_at_once(source, cache, monkeypatch):
    """Threads stand in for containers whose processes have equal numbers."""
    expected = extract(source, None).feature_ND
    first_extractor = make_extractor(cache)
    second_extractor = make_extractor(cache)
    extractions = OverlappingExtractions()
    monkeypatch.setattr(
        Runner,
        "compute_rows",
        extractions.wrap(Runner.compute_rows),
    )

    def extract_first():
        return np.array(first_extractor.extract(source).feature_ND)

    def extract_second():
        return np.array(second_extractor.extract(source).feature_ND)

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        second = threads.submit(extractions.run_second, extract_second)
        first = extractions.run_first(extract_first)
        assert_array_equal(first, expected)
        assert_array_equal(second.result(), expected)

    monkeypatch.setattr(Runner, "compute_rows", None)  # neither computes again
    assert_array_equal(extract_first(), expected)
    assert count_entries(cache) == 1


def test_half_of_the_rows_are_never_kept(source, cache, monkeypatch):
    results = step_results.iterate_results

    def iterate_first(*arguments):
        return itertools.islice(results(*arguments), 1)

    monkeypatch.setattr(step_results, "iterate_results", iterate_first)

    with pytest.raises(RuntimeError, match="8 of its 13 images"):
        extract(source, cache)

    assert list(cache.iterdir()) == []


@pytest.fixture
def damaged_source(source):
    """The training images of the folder, of which image 5 is unreadable."""
    path = pathlib.Path(source.name_of(5))
    path.write_bytes(b"")
    return source


def test_too_many_unreadable_images_are_an_error(damaged_source, cache):
    """The limit holds also where the features are kept; after an error nothing is kept."""
    with rejects("--max_unreadable", "0.*png"):
        extract(damaged_source, cache)

    assert list(cache.iterdir()) == []

    found = extract(damaged_source, cache, max_unreadable=1)
    unreadable = np.flatnonzero(~found.is_read_N)

    assert unreadable.tolist() == [5]

    with rejects("--max_unreadable", "0.*png"):
        extract(damaged_source, cache)


def test_a_file_of_features_excludes_unreadable_images(damaged_source, tmp_path):
    path = tmp_path / "f.npz"
    found = extract(damaged_source, None, max_unreadable=1)

    written = write_features(path, found, damaged_source)

    assert written["features"] == "12 x 16 float32"
    names = []
    for i in range(13):
        if i != 5:
            names.append(damaged_source.name_of(i))
    labels = np.delete(damaged_source.labels, 5)
    class_names = list(damaged_source.class_names)
    with np.load(path) as arrays:
        assert arrays["features"].shape == (12, 16)
        assert arrays["names"].tolist() == names
        assert arrays["class_names"].tolist() == class_names
        assert np.array_equal(arrays["labels"], labels)


def test_cache_that_cannot_be_written(source, tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(WriteError, match="cannot be written"):
        make_extractor(tmp_path / "file" / "cache").extract(source)


def test_default_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert cache_folder("features") == tmp_path / "vit_jax" / "features"
