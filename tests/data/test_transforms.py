"""The two transforms: shapes, purity, options, and a user's own augmentations."""

import pickle

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vit_jax.config.schema import InputConfig
from vit_jax.data.records import Record
from vit_jax.data.transforms import TrainTransform, build_evaluation_transform, build_train_transform

IMAGE = np.random.default_rng(0).integers(256, size=(40, 50, 3), dtype=np.uint8)
CROPS = [
    {},
    {"crop_distribution": "torchvision"},
    {"train_crop": "none", "test_resize": "direct"},
    {"train_crop": "shift", "shift_pixels": 4},
    {"train_crop": "resize", "train_resize_pixels": 24},
    {"train_crop": "resize_short_side", "train_resize_pixels": 31},
]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(height=st.integers(1, 90), width=st.integers(1, 90), fields=st.sampled_from(CROPS))
def test_any_image_fills_the_size_of_the_config(height, width, fields):
    config = InputConfig(train_split="train", test_split="test", image_size=(24, 17), **fields)
    file = cv2.imencode(".png", np.full((height, width, 3), (30, 20, 10), np.uint8))[1].tobytes()
    train = build_train_transform(config)(Record(file, 0), np.random.default_rng(0))
    test = build_evaluation_transform(config)(Record(file, 0))
    assert train.shape == test.shape == (24, 17, 3)
    assert train.dtype == test.dtype == np.uint8
    assert {tuple(pixel) for pixel in test.reshape(-1, 3).tolist()} == {(10, 20, 30)}
    border = {(0, 0, 0)} if "shift_pixels" in fields else set()
    assert {tuple(pixel) for pixel in train.reshape(-1, 3).tolist()} <= {(10, 20, 30)} | border


def test_randomness_comes_from_the_generator_alone(make_config):
    transform = build_train_transform(make_config(randaugment_layers=2, randaugment_magnitude=10))
    results = [pickle.loads(pickle.dumps(transform))(Record(IMAGE, 0), np.random.default_rng(s)) for s in (0, 0, 1)]
    assert np.array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])


def test_record_is_not_modified(make_config):
    before = IMAGE.copy()
    complete = {"train_crop": "resize_short_side", "train_resize_pixels": 40, "image_size": (40, 40)}
    for fields in ({}, {"train_crop": "none", "image_size": (40, 50)}, complete):
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


@pytest.mark.parametrize(
    ("crop", "size", "columns"),
    [
        # 16 x 32 becomes 8 x 8: columns are 4 apart, samples between the middle two; then any 6 columns
        ("resize", (6, 6), [1.5 + 4 * k for k in range(8)]),
        # 16 x 32 becomes 8 x 16: pairs of columns are averaged; then any 6 columns
        ("resize_short_side", (8, 6), [0.5 + 2 * k for k in range(16)]),
    ],
)
def test_resize_then_random_crop(make_config, crop, size, columns):
    transform = build_train_transform(make_config(train_crop=crop, train_resize_pixels=8, image_size=size, flip=False))
    rng, image = np.random.default_rng(0), gradient(16, 32, 4)
    found = {tuple(transform(Record(image, 0), rng)[0, :, 0].tolist()) for _ in range(300)}
    assert found == {tuple(int(4 * c) for c in columns[left : left + 6]) for left in range(len(columns) - 5)}


def test_short_side_averages_areas_where_resize_samples(make_config):
    """Columns 0, 0, 0, 200 repeated: the area filter gives their mean, bilinear the middle two of every four."""
    record = Record(np.broadcast_to(np.tile([0, 0, 0, 200], 4).astype(np.uint8)[None, :, None], (16, 16, 3)), 0)
    fields = {"train_resize_pixels": 4, "image_size": (4, 4), "flip": False}
    resize, short_side = (
        build_train_transform(make_config(train_crop=crop, **fields))(record, np.random.default_rng(0))
        for crop in ("resize", "resize_short_side")
    )
    direct = build_evaluation_transform(make_config(image_size=(4, 4), test_resize="direct"))(record)
    assert np.unique(resize).tolist() == np.unique(direct).tolist() == [0]
    assert np.unique(short_side).tolist() == [50]


def test_short_side_is_resized_then_cropped(make_config):
    """Size 7 at 0.875 wants a short side of 8: a gradient of 16 x 32 shrinks by two, and the middle is taken."""
    found = build_evaluation_transform(make_config(image_size=(7, 7)))(Record(gradient(16, 32, 4), 0))
    assert found[0, :, 0].tolist() == [8 * column + 2 for column in range(4, 11)]


def test_direct_resize_keeps_everything(make_config):
    found = build_evaluation_transform(make_config(image_size=(20, 25), test_resize="direct"))(Record(IMAGE, 0))
    expected = IMAGE.reshape(20, 2, 25, 2, 3).mean(axis=(1, 3))
    assert np.abs(found - expected).max() <= 1


# A user's own augmentations.

OWN = """
import numpy as np

LEVELS = np.arange(256, dtype=np.uint8)
darker = lambda image, rng: image // 2  # cannot be pickled by itself

def stamp(image, rng):
    image[0, 0] = rng.integers(100, 200)  # in place
    return image

def to_float(image, rng):
    return image / 255

def smaller(image, rng):
    return image[1:]

def nothing(image, rng):
    stamp(image, rng)
"""


@pytest.fixture
def own(tmp_path, monkeypatch, make_config):
    """Returns a function from names of augmentations to a transform that changes nothing else."""
    (tmp_path / "own_augmentations.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)

    def build(*names):
        fields = {"train_crop": "none", "flip": False, "image_size": (40, 50)}
        return build_train_transform(
            make_config(augmentations=tuple(f"own_augmentations:{n}" for n in names), **fields)
        )

    return build


def test_own_augmentations_apply_in_order(own):
    before = IMAGE.copy()
    transform = pickle.loads(pickle.dumps(own("darker", "stamp")))  # as it is sent to workers
    found = transform(Record(IMAGE, 0), np.random.default_rng(0))
    assert np.array_equal(found[1:], IMAGE[1:] // 2)
    assert 100 <= found[0, 0, 0] < 200
    assert np.array_equal(IMAGE, before)
    assert np.array_equal(found, transform(Record(IMAGE, 0), np.random.default_rng(0)))
    assert own("stamp", "darker")(Record(IMAGE, 0), np.random.default_rng(0))[0, 0, 0] == found[0, 0, 0] // 2


def flipped(image, rng):
    return image[::-1]


def test_a_function_is_an_augmentation_too(make_config):
    config = make_config(train_crop="none", flip=False, image_size=(40, 50))
    transform = TrainTransform(config, (flipped,))
    assert np.array_equal(transform(Record(IMAGE, 0), np.random.default_rng(0)), IMAGE[::-1])


@pytest.mark.parametrize(
    ("name", "found"), [("to_float", r"float64 \(40, 50, 3\)"), ("smaller", r"uint8 \(39,"), ("nothing", "NoneType")]
)
def test_results_of_own_augmentations_are_checked(own, name, found):
    with pytest.raises(ValueError, match=rf"own_augmentations:{name} returned {found}.*return uint8 \(40, 50, 3\)"):
        own(name)(Record(IMAGE, 0), np.random.default_rng(0))


@pytest.mark.parametrize(
    ("name", "message"), [("missing", "has no 'missing'"), ("LEVELS", "is ndarray; give a function")]
)
def test_own_augmentations_are_resolved_at_the_start(own, name, message):
    with pytest.raises(ValueError, match=rf"config.input.augmentations.*{message}"):
        own(name)
