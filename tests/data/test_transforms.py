"""The two transforms: shapes, purity, options, and values that contradict each other."""

import pickle

import numpy as np
import pytest

from vit_jax.data.records import Record
from vit_jax.data.transforms import build_evaluation_transform, build_train_transform

IMAGE = np.random.default_rng(0).integers(256, size=(40, 50, 3), dtype=np.uint8)


@pytest.mark.parametrize("shape", [(40, 50), (50, 40), (1, 1), (3, 90), (224, 224)])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"train_crop": "none"},
        {"train_crop": "shift", "shift_pixels": 2},
        {"train_crop": "resize", "train_resize_pixels": 24},
        {"train_crop": "resize_short_side", "train_resize_pixels": 31},
    ],
)
def test_any_image_becomes_the_size_asked_for(make_config, shape, fields):
    config = make_config(image_size=(24, 17), randaugment_layers=2, randaugment_magnitude=10, **fields)
    record = Record(np.zeros((*shape, 3), np.uint8), 0)
    train = build_train_transform(config)(record, np.random.default_rng(0))
    test = build_evaluation_transform(config)(record)
    assert train.shape == test.shape == (24, 17, 3)
    assert train.dtype == test.dtype == np.uint8


def test_randomness_comes_from_the_generator_alone(make_config):
    transform = build_train_transform(make_config(randaugment_layers=2, randaugment_magnitude=10))
    results = [pickle.loads(pickle.dumps(transform))(Record(IMAGE, 0), np.random.default_rng(s)) for s in (0, 0, 1)]
    assert np.array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])


def test_record_is_left_as_it_was(make_config):
    before = IMAGE.copy()
    whole = {"train_crop": "resize_short_side", "train_resize_pixels": 40, "image_size": (40, 40)}
    for fields in ({}, {"train_crop": "none", "image_size": (40, 50)}, whole):
        transform = build_train_transform(make_config(randaugment_layers=3, randaugment_magnitude=9, **fields))
        for seed in range(20):
            transform(Record(IMAGE, 0), np.random.default_rng(seed))
    assert np.array_equal(IMAGE, before)


def test_half_of_the_images_are_flipped(make_config):
    transform = build_train_transform(make_config(image_size=(40, 50), train_crop="none"))
    rng = np.random.default_rng(0)
    flipped = [np.array_equal(transform(Record(IMAGE, 0), rng), IMAGE[:, ::-1]) for _ in range(400)]
    assert 150 < sum(flipped) < 250  # five standard deviations
    still = build_train_transform(make_config(image_size=(40, 50), train_crop="none", flip=False))
    assert np.array_equal(still(Record(IMAGE, 0), rng), IMAGE)


def gradient(height, width, step):
    """Every row rises by `step` a pixel, in the three channels alike."""
    return np.repeat(np.repeat(np.arange(width, dtype=np.uint8)[None, :, None] * step, height, axis=0), 3, axis=2)


def sample_first_rows(transform, image, count=300):
    rng = np.random.default_rng(0)
    return {tuple(transform(Record(image, 0), rng)[0, :, 0].tolist()) for _ in range(count)}


def test_resize_then_random_crop(make_config):
    """16 x 32 becomes 8 x 8: columns lie 4 apart, samples between the middle two, 1.5 + 4 k; then any 6 columns."""
    config = make_config(train_crop="resize", train_resize_pixels=8, image_size=(6, 6), flip=False)
    found = sample_first_rows(build_train_transform(config), gradient(16, 32, 4))
    columns = [int(4 * (1.5 + 4 * k)) for k in range(8)]
    assert found == {tuple(columns[left : left + 6]) for left in range(3)}


def test_resize_of_the_short_side_then_random_crop(make_config):
    """16 x 32 becomes 8 x 16: pairs of columns are averaged, 0.5 + 2 k; then any 6 columns."""
    config = make_config(train_crop="resize_short_side", train_resize_pixels=8, image_size=(8, 6), flip=False)
    found = sample_first_rows(build_train_transform(config), gradient(16, 32, 4))
    columns = [int(4 * (0.5 + 2 * k)) for k in range(16)]
    assert found == {tuple(columns[left : left + 6]) for left in range(11)}


def test_short_side_averages_areas_where_resize_samples(make_config):
    """Columns 0, 0, 0, 200 repeated: the area filter gives their mean, bilinear the middle two of every four."""
    image = np.broadcast_to(np.tile([0, 0, 0, 200], 4).astype(np.uint8)[None, :, None], (16, 16, 3))
    fields = {"train_resize_pixels": 4, "image_size": (4, 4), "flip": False}
    resize, short_side = (
        build_train_transform(make_config(train_crop=crop, **fields))(Record(image, 0), np.random.default_rng(0))
        for crop in ("resize", "resize_short_side")
    )
    assert np.unique(resize).tolist() == [0]
    assert np.unique(short_side).tolist() == [50]


def test_short_side_is_resized_then_cropped(make_config):
    """Size 7 at 0.875 wants a short side of 8: a gradient of 16 x 32 shrinks by two, and the middle is taken."""
    found = build_evaluation_transform(make_config(image_size=(7, 7)))(Record(gradient(16, 32, 4), 0))
    assert found[0, :, 0].tolist() == [8 * column + 2 for column in range(4, 11)]


def test_direct_resize_keeps_everything(make_config):
    found = build_evaluation_transform(make_config(image_size=(20, 25), test_resize="direct"))(Record(IMAGE, 0))
    expected = IMAGE.reshape(20, 2, 25, 2, 3).mean(axis=(1, 3))
    assert np.abs(found - expected).max() <= 1


def test_direct_resize_samples_and_does_not_average(make_config):
    """Columns 0, 0, 0, 200 repeated, to a quarter: the middle two of every four are 0, their mean would be 50."""
    image = np.broadcast_to(np.tile([0, 0, 0, 200], 4).astype(np.uint8)[None, :, None], (16, 16, 3))
    found = build_evaluation_transform(make_config(image_size=(4, 4), test_resize="direct"))(Record(image, 0))
    assert np.unique(found).tolist() == [0]


@pytest.mark.parametrize(
    "fields",
    [
        {"crop_area_fraction": (0.0, 1.0)},
        {"crop_area_fraction": (0.6, 0.5)},
        {"crop_area_fraction": (0.5, 1.1)},
        {"shift_pixels": 2},
        {"train_crop": "shift"},
        {"randaugment_magnitude": 5},
        {"randaugment_layers": -1},
        {"image_size": (0, 8)},
        {"train_resize_pixels": 9},
        {"train_resize_pixels": 9, "train_crop": "none"},
        {"train_crop": "resize"},
        {"train_crop": "resize_short_side"},
        {"train_resize_pixels": 7, "train_crop": "resize"},
        {"train_resize_pixels": 9, "train_crop": "resize_short_side", "image_size": (8, 10)},
    ],
)
def test_contradictions_are_refused(make_config, fields):
    with pytest.raises(ValueError, match=f"{next(iter(fields)).partition('_')[0]}.*give"):
        build_train_transform(make_config(**fields))


@pytest.mark.parametrize("fraction", [0.0, 1.5])
def test_crop_fraction_outside_its_range(make_config, fraction):
    with pytest.raises(ValueError, match="test_crop_fraction"):
        build_evaluation_transform(make_config(test_crop_fraction=fraction))
