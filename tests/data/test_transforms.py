"""The two transforms: shapes, purity, options, and a user's own augmentations."""

import pickle

import cv2
import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rejections import rejects
from vit_jax.config.schema import InputConfig
from vit_jax.data import crops, randaugment
from vit_jax.data.records import Record
from vit_jax.data.transforms import TrainTransform, build_evaluation_transform

IMAGE = np.random.default_rng(0).integers(256, size=(40, 50, 3), dtype=np.uint8)
WHOLE = {
    "train_crop": "none",
    "flip": False,
    "image_size": (40, 50),
}  # changes nothing
CROPS = [
    {},
    {"crop_distribution": "torchvision"},
    {"train_crop": "none", "test_resize": "direct"},
    {
        "train_crop": "none",
        "test_resize": "direct",
        "test_interpolation": "bilinear",
    },
    {"test_interpolation": "bicubic", "test_crop_fraction": 0.9},
    {"train_crop": "shift", "shift_pixels": 4},
    {"train_crop": "resize", "train_resize_pixels": 24},
    {"train_crop": "resize_short_side", "train_resize_pixels": 31},
    {"train_crop": "simple"},
    *(
        {"train_interpolation": "bicubic", "train_crop": crop}
        for crop in ("inception", "simple", "none")
    ),
    {
        "train_interpolation": "bicubic",
        "train_crop": "resize_short_side",
        "train_resize_pixels": 31,
    },
]


@pytest.fixture
def train(make_config):
    """Returns a function from an image, a seed or generator and fields of an `InputConfig` to the training image."""

    def run(image, rng=0, **fields):
        transform = pickle.loads(
            pickle.dumps(TrainTransform(make_config(**fields)))
        )  # as it is sent to workers
        return transform(Record(image, 0), np.random.default_rng(rng))

    return run


@settings(derandomize=True, deadline=None, max_examples=80)
@given(height=st.integers(1, 90), width=st.integers(1, 90), fields=st.sampled_from(CROPS))
def test_any_image_fills_the_size_of_the_config(height, width, fields):
    config = InputConfig(
        train_split="train",
        test_split="test",
        image_size=(24, 17),
        **fields,
    )
    file = cv2.imencode(".png", np.full((height, width, 3), (30, 20, 10), np.uint8))[1].tobytes()
    train = TrainTransform(config)(Record(file, 0), np.random.default_rng(0))
    test = build_evaluation_transform(config)(Record(file, 0))

    assert train.shape == test.shape == (24, 17, 3)
    assert train.dtype == test.dtype == np.uint8
    assert {tuple(pixel) for pixel in test.reshape(-1, 3).tolist()} == {(10, 20, 30)}

    border = {(0, 0, 0)} if "shift_pixels" in fields else set()

    assert {tuple(pixel) for pixel in train.reshape(-1, 3).tolist()} <= {(10, 20, 30)} | border


def test_randomness_comes_from_the_generator_alone_and_the_record_stays(train):
    before = IMAGE.copy()
    complete = {
        "train_crop": "resize_short_side",
        "train_resize_pixels": 40,
        "image_size": (40, 40),
    }

    for fields in ({}, {"train_crop": "none", "image_size": (40, 50)}, complete):
        fields = {"randaugment_layers": 3, "randaugment_magnitude": 9, **fields}
        first, again, *others = (train(IMAGE, seed, **fields) for seed in (0, 0, *range(1, 20)))

        assert np.array_equal(first, again)
        assert not all(np.array_equal(first, other) for other in others)

    assert np.array_equal(IMAGE, before)


def test_augmentations_beside_randaugment_are_applied_and_the_record_stays(train, monkeypatch):
    before = IMAGE.copy()
    fields = ({"three_augment": True}, {"color_jitter": 0.4}, {"erasing_fraction": 1.0})
    every = {name: value for options in fields for name, value in options.items()}
    found = [train(IMAGE, **WHOLE, **options) for options in (*fields, every)]

    assert not any(np.array_equal(image, IMAGE) for image in found)
    assert np.array_equal(IMAGE, before)

    rng = np.random.default_rng(0)
    erased = [
        not np.array_equal(train(IMAGE, rng, **WHOLE, erasing_fraction=0.25), IMAGE)
        for _ in range(400)
    ]

    assert 60 < sum(erased) < 140  # 4.6 standard deviations


def test_half_of_the_images_are_flipped(train):
    rng = np.random.default_rng(0)
    flipped = [
        np.array_equal(train(IMAGE, rng, **WHOLE | {"flip": True}), IMAGE[:, ::-1])
        for _ in range(400)
    ]

    assert 150 < sum(flipped) < 250  # five standard deviations
    assert np.array_equal(train(IMAGE, rng, **WHOLE), IMAGE)


def test_solarize_of_the_s16_recipe_inverts_and_the_config_can_change_that(train, monkeypatch):
    monkeypatch.setattr(randaugment, "OPERATIONS", (randaugment.solarize,))
    fields = {
        **WHOLE,
        "randaugment_layers": 1,
        "randaugment_magnitude": 10,
    }

    assert np.array_equal(train(IMAGE, **fields), 255 - IMAGE)
    assert np.array_equal(train(IMAGE, randaugment_arithmetic="saturating", **fields), IMAGE)


def gradient(height, width, step):
    """Every row rises by `step` a pixel, in the three channels alike."""
    return np.repeat(
        np.repeat(np.arange(width, dtype=np.uint8)[None, :, None] * step, height, axis=0),
        3,
        axis=2,
    )


@pytest.mark.parametrize(
    ("crop", "size", "columns"),
    [
        # 16 x 32 becomes 8 x 8: columns are 4 apart, samples between the middle two; then any 6
        # columns
        ("resize", (6, 6), [1.5 + 4 * k for k in range(8)]),
        # 16 x 32 becomes 8 x 16: pairs of columns are averaged; then any 6 columns
        ("resize_short_side", (8, 6), [0.5 + 2 * k for k in range(16)]),
    ],
)
def test_resize_then_random_crop(train, crop, size, columns):
    fields = {
        "train_crop": crop,
        "train_resize_pixels": 8,
        "image_size": size,
        "flip": False,
    }
    rng = np.random.default_rng(0)
    image = gradient(16, 32, 4)
    found = {tuple(train(image, rng, **fields)[0, :, 0].tolist()) for _ in range(300)}

    assert found == {
        tuple(int(4 * c) for c in columns[left : left + 6]) for left in range(len(columns) - 5)
    }


def test_short_side_averages_areas_where_resize_samples(train, evaluation_transform):
    """Columns 0, 0, 0, 200 repeated: the area filter gives their mean, bilinear the middle two of every four."""
    image = np.broadcast_to(np.tile([0, 0, 0, 200], 4).astype(np.uint8)[None, :, None], (16, 16, 3))
    fields = {
        "train_resize_pixels": 4,
        "image_size": (4, 4),
        "flip": False,
    }
    resize, short_side = (
        train(image, train_crop=crop, **fields) for crop in ("resize", "resize_short_side")
    )
    direct = evaluation_transform(image_size=(4, 4), test_resize="direct")(Record(image, 0))

    assert np.unique(resize).tolist() == np.unique(direct).tolist() == [0]
    assert np.unique(short_side).tolist() == [50]


def test_evaluation_resizes_and_takes_the_middle_or_all(evaluation_transform):
    """Size 7 at 0.875 wants a short side of 8: a gradient of 16 x 32 shrinks by two, and the middle is taken."""
    found = evaluation_transform(image_size=(7, 7))(Record(gradient(16, 32, 4), 0))

    assert found[0, :, 0].tolist() == [8 * column + 2 for column in range(4, 11)]

    found = evaluation_transform(image_size=(20, 25), test_resize="direct")(Record(IMAGE, 0))

    assert np.abs(found - IMAGE.reshape(20, 2, 25, 2, 3).mean(axis=(1, 3))).max() <= 1


OWN = """
LEVELS = [1]
darker = lambda image, rng: image // 2  # cannot be pickled by itself
to_float = lambda image, rng: image / 255
smaller = lambda image, rng: image[1:]
nothing = lambda image, rng: None

def stamp(image, rng):
    image[0, 0] = rng.integers(100, 200)  # in place
    return image
"""


@pytest.fixture
def augmented(tmp_path, monkeypatch, train):
    """Returns a function from names of a user's own augmentations to the image that they make, by seed 0."""
    (tmp_path / "own_augmentations.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)

    return lambda *names: train(
        IMAGE,
        augmentations=tuple(f"own_augmentations:{n}" for n in names),
        **WHOLE,
    )


def test_own_augmentations_apply_in_order(augmented):
    before = IMAGE.copy()
    found = augmented("darker", "stamp")

    assert np.array_equal(found[1:], IMAGE[1:] // 2)
    assert 100 <= found[0, 0, 0] < 200
    assert np.array_equal(IMAGE, before)
    assert np.array_equal(found, augmented("darker", "stamp"))
    assert augmented("stamp", "darker")[0, 0, 0] == found[0, 0, 0] // 2


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("to_float", r"float64 \(40, 50, 3\).*uint8 \(40, 50, 3\)"),
        ("smaller", r"uint8 \(39,"),
        ("nothing", "NoneType"),
        ("LEVELS", "function.*list"),
    ],
)
def test_own_augmentations_are_checked(augmented, name, rule):
    with rejects(f"own_augmentations:{name}", rule):
        augmented(name)


def test_own_augmentations_are_resolved_at_the_start(make_config):
    with rejects("config.input.augmentations", "'missing'"):
        TrainTransform(make_config(augmentations=("math:missing",)))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    "size",
    [
        (24, 24),
        (90, 31),
    ],
)
def test_antialiased_crops_are_pillows_within_a_grey_level(train, interpolation, size):
    """Of arrays and of JPEG files, which are then not decoded at a fraction of their size."""
    image = cv2.GaussianBlur(
        np.random.default_rng(1).integers(256, size=(201, 280, 3), dtype=np.uint8),
        (0, 0),
        1.2,
    )
    image = cv2.normalize(image, None, 0, 255, cv2.NORM_MINMAX)
    file = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 95])[1].tobytes()
    decoded = cv2.cvtColor(
        cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR),
        cv2.COLOR_BGR2RGB,
    )
    resampling = PIL.Image.Resampling[interpolation.upper()]
    fields = {
        "crop_area_fraction": (0.3, 1.0),
        "crop_distribution": "torchvision",
        "flip": False,
    }
    fields |= {"train_interpolation": interpolation, "image_size": size}

    for stored, pixels in ((image, image), (file, decoded)):
        for seed in range(4):
            box = crops.sample_inception_box(
                np.random.default_rng(seed),
                201,
                280,
                (0.3, 1.0),
                "torchvision",
            )
            cropped = PIL.Image.fromarray(np.ascontiguousarray(crops.cut(pixels, box)))

            expected = np.asarray(cropped.resize(size[::-1], resampling))
            found = train(stored, seed, **fields)

            assert np.abs(found.astype(int) - expected).max() <= 1


def test_the_simple_crop_is_cut_from_pillows_image(train):
    """DeiT III: the short side is resized, bicubic with antialiasing, and 4 pixels are mirrored at each border."""
    image = cv2.GaussianBlur(
        np.random.default_rng(2).integers(256, size=(97, 130, 3), dtype=np.uint8),
        (0, 0),
        1.5,
    )
    resized = PIL.Image.fromarray(image).resize(
        (int(32 * 130 / 97), 32),
        PIL.Image.Resampling.BICUBIC,
    )

    expected = crops.simple_crop(np.random.default_rng(5), np.asarray(resized), (32, 32))
    fields = {
        "train_crop": "simple",
        "train_interpolation": "bicubic",
        "image_size": (32, 32),
        "flip": False,
    }

    assert np.abs(train(image, 5, **fields).astype(int) - expected).max() <= 1
