"""The two transforms: shapes, purity, options, and a user's augmentations."""

import collections
import pickle

import cv2
import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.packed_files import encode
from tests.rejections import rejects
from vit_jax.config.schema import InputConfig
from vit_jax.data import crops, randaugment
from vit_jax.data.records import Record
from vit_jax.data.transforms import TrainTransform, build_evaluation_transform

IMAGE = np.random.default_rng(0).integers(256, size=(40, 50, 3), dtype=np.uint8)
UNCHANGED = {
    "train_crop": "none",
    "flip": False,
    "image_size": (40, 50),
}
CROPS = [
    {},
    {"crop_distribution": "torchvision"},
    {
        "train_crop": "none",
        "test_resize": "direct",
    },
    {
        "train_crop": "none",
        "test_resize": "direct",
        "test_interpolation": "bilinear",
    },
    {
        "test_interpolation": "bicubic",
        "test_crop_fraction": 0.9,
    },
    {
        "train_crop": "shift",
        "shift_pixels": 4,
    },
    {
        "train_crop": "resize",
        "train_resize_pixels": 24,
    },
    {
        "train_crop": "resize_short_side",
        "train_resize_pixels": 31,
    },
    {"train_crop": "simple"},
    {
        "train_crop": "inception",
        "train_interpolation": "bicubic",
    },
    {
        "train_crop": "simple",
        "train_interpolation": "bicubic",
    },
    {
        "train_crop": "none",
        "train_interpolation": "bicubic",
    },
    {
        "train_crop": "resize_short_side",
        "train_interpolation": "bicubic",
        "train_resize_pixels": 31,
    },
]


@pytest.fixture
def train(make_config):
    """Return a function that makes the training image.

    It takes an image, a seed or generator, and fields of an `InputConfig`. The transform is
    pickled, as it is for workers.
    """

    def run(image, rng=0, **fields):
        transform = TrainTransform(make_config(**fields))
        received = pickle.loads(pickle.dumps(transform))
        generator = np.random.default_rng(rng)
        return received(Record(image, 0), generator)

    return run


def list_colours(image):
    pixels = image.reshape(-1, 3).tolist()
    return set(map(tuple, pixels))


def make_photograph(seed, shape, sigma):
    """Return smooth noise, uint8 (H, W, 3)."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(
        256,
        size=(*shape, 3),
        dtype=np.uint8,
    )
    return cv2.GaussianBlur(noise, (0, 0), sigma)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(
    height=st.integers(1, 90),
    width=st.integers(1, 90),
    fields=st.sampled_from(CROPS),
)
def test_any_image_fills_the_size_of_the_config(height, width, fields):
    """An image of one colour keeps it; only a shift adds black."""
    config = InputConfig(
        train_split="train",
        test_split="test",
        image_size=(24, 17),
        **fields,
    )
    bgr = np.full((height, width, 3), (30, 20, 10), np.uint8)
    record = Record(encode(".png", bgr), 0)
    train = TrainTransform(config)
    evaluate = build_evaluation_transform(config)

    trained = train(record, np.random.default_rng(0))
    evaluated = evaluate(record)

    for found in (trained, evaluated):
        assert found.shape == (24, 17, 3)
        assert found.dtype == np.uint8
    assert list_colours(evaluated) == {(10, 20, 30)}

    allowed = {(10, 20, 30)}
    if "shift_pixels" in fields:
        allowed.add((0, 0, 0))

    assert list_colours(trained) <= allowed


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"train_crop": "none", "image_size": (40, 50)},
        {
            "train_crop": "resize_short_side",
            "train_resize_pixels": 40,
            "image_size": (40, 40),
        },
    ],
    ids=["inception", "none", "resize_short_side"],
)
def test_randomness_comes_from_the_generator_alone_and_the_record_stays(train, fields):
    before = IMAGE.copy()
    options = {"randaugment_layers": 3, "randaugment_magnitude": 9} | fields

    first = train(IMAGE, 0, **options)
    again = train(IMAGE, 0, **options)
    others = [train(IMAGE, seed, **options) for seed in range(1, 20)]

    assert np.array_equal(first, again)
    assert np.any(np.stack(others) != first)
    assert np.array_equal(IMAGE, before)


def list_orientations(image):
    """Return the image in its eight orientations: the rotations, then those of its mirror image."""
    orientations = []
    for start in (image, image[:, ::-1]):
        orientations += [np.rot90(start, turns) for turns in range(4)]
    return orientations


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"vertical_flip": True}, {0, 6}),
        ({"flip": True, "vertical_flip": True}, {0, 2, 4, 6}),
        ({"rotate90": True}, {0, 1, 2, 3}),
        ({"flip": True, "vertical_flip": True, "rotate90": True}, set(range(8))),
    ],
    ids=["vertical", "both flips", "rotations", "all"],
)
@pytest.mark.parametrize("in_memory", [False, True])
def test_orientations_are_equally_frequent(
    fields,
    expected,
    in_memory,
    make_config,
):
    """Each of n orientations has 800 / n of 800 images, within 4.5 standard deviations."""
    image = IMAGE[:, :40]
    before = image.copy()
    orientations = [orientation.tobytes() for orientation in list_orientations(image)]
    transform = TrainTransform(make_config(**UNCHANGED | {"image_size": (40, 40)} | fields))
    rng = np.random.default_rng(0)

    counts = collections.Counter()
    for _ in range(800):
        memory = np.empty((40, 40, 3), np.uint8) if in_memory else None
        found = transform.plan(Record(image, 0), rng, memory)()
        counts[orientations.index(found.tobytes())] += 1

    assert counts.keys() == expected
    share = 1 / len(expected)
    tolerance = 4.5 * np.sqrt(800 * share * (1 - share))
    assert all(abs(count - 800 * share) < tolerance for count in counts.values())
    assert np.array_equal(image, before)


@pytest.mark.parametrize(
    "fields",
    [
        {"three_augment": True},
        {"color_jitter": 0.4},
        {"erasing_fraction": 1.0},
        {
            "three_augment": True,
            "color_jitter": 0.4,
            "erasing_fraction": 1.0,
        },
    ],
    ids=["three_augment", "color_jitter", "erasing_fraction", "all"],
)
def test_augmentations_beside_randaugment_are_applied_and_the_record_stays(train, fields):
    before = IMAGE.copy()

    found = train(IMAGE, **UNCHANGED, **fields)

    assert not np.array_equal(found, IMAGE)
    assert np.array_equal(IMAGE, before)


def test_a_quarter_of_the_images_is_erased(train):
    """400 images hold the fraction within 4.6 standard deviations."""
    rng = np.random.default_rng(0)

    num_erased = 0
    for _ in range(400):
        found = train(
            IMAGE,
            rng,
            **UNCHANGED,
            erasing_fraction=0.25,
        )
        num_erased += not np.array_equal(found, IMAGE)

    assert 60 < num_erased < 140


def test_half_of_the_images_are_flipped(train):
    """400 images hold the fraction within five standard deviations."""
    rng = np.random.default_rng(0)
    fields = UNCHANGED | {"flip": True}

    num_flipped = 0
    for _ in range(400):
        found = train(IMAGE, rng, **fields)
        num_flipped += np.array_equal(found, IMAGE[:, ::-1])

    assert 150 < num_flipped < 250


def test_an_image_without_any_augmentation_is_unchanged(train):
    found = train(IMAGE, **UNCHANGED)

    assert np.array_equal(found, IMAGE)


def test_solarize_of_the_s16_recipe_inverts_and_the_config_can_change_that(train, monkeypatch):
    monkeypatch.setattr(randaugment, "OPERATIONS", (randaugment.solarize,))
    fields = UNCHANGED | {
        "randaugment_layers": 1,
        "randaugment_magnitude": 10,
    }

    released = train(IMAGE, **fields)
    saturating = train(
        IMAGE,
        randaugment_arithmetic="saturating",
        **fields,
    )

    assert np.array_equal(released, 255 - IMAGE)
    assert np.array_equal(saturating, IMAGE)


def make_gradient(height, width, step):
    """Return an image (height, width, 3) whose rows rise by `step` a pixel in all channels."""
    row = np.arange(width, dtype=np.uint8) * step
    return np.broadcast_to(row[:, None], (height, width, 3))


@pytest.mark.parametrize(
    ("crop", "size", "columns"),
    [
        # 16 x 32 becomes 8 x 8: columns are 4 apart, samples between the middle two.
        ("resize", (6, 6), np.arange(1.5, 32, 4)),
        # 16 x 32 becomes 8 x 16: pairs of columns are averaged.
        ("resize_short_side", (8, 6), np.arange(0.5, 32, 2)),
    ],
)
def test_resize_then_random_crop(train, crop, size, columns):
    """A crop has any six adjacent columns of the resized image."""
    fields = {
        "train_crop": crop,
        "train_resize_pixels": 8,
        "image_size": size,
        "flip": False,
    }
    rng = np.random.default_rng(0)
    image = make_gradient(16, 32, 4)

    found = set()
    for _ in range(300):
        crop = train(image, rng, **fields)
        first_row = crop[0, :, 0]
        found.add(tuple(first_row.tolist()))

    values = (4 * columns).astype(int).tolist()
    expected = set()
    for left in range(len(values) - 5):
        expected.add(tuple(values[left : left + 6]))

    assert found == expected


def test_short_side_averages_areas_where_resize_samples(train, evaluation_transform):
    """Columns 0, 0, 0, 200 repeat: the area filter gives their mean.

    The bilinear filter samples between the middle two of every four.
    """
    row = np.tile([0, 0, 0, 200], 4).astype(np.uint8)
    image = np.broadcast_to(row[:, None], (16, 16, 3))
    evaluate = evaluation_transform(image_size=(4, 4), test_resize="direct")
    fields = {
        "train_resize_pixels": 4,
        "image_size": (4, 4),
        "flip": False,
    }

    resized = train(image, train_crop="resize", **fields)
    short_side = train(
        image,
        train_crop="resize_short_side",
        **fields,
    )
    direct = evaluate(Record(image, 0))

    assert np.unique(resized).tolist() == [0]
    assert np.unique(direct).tolist() == [0]
    assert np.unique(short_side).tolist() == [50]


def test_evaluation_takes_the_middle(evaluation_transform):
    """Size 7 at 0.875 needs a short side of 8: a gradient of 16 x 32 shrinks by two."""
    transform = evaluation_transform(image_size=(7, 7))
    image = make_gradient(16, 32, 4)

    found = transform(Record(image, 0))

    columns = np.arange(4, 11)
    expected = 8 * columns + 2

    assert np.array_equal(found[0, :, 0], expected)


def test_direct_evaluation_takes_the_whole_image(evaluation_transform):
    transform = evaluation_transform(image_size=(20, 25), test_resize="direct")

    found = transform(Record(IMAGE, 0))

    blocks = IMAGE.reshape(20, 2, 25, 2, 3)
    expected = blocks.mean(axis=(1, 3))

    assert np.abs(found - expected).max() <= 1


CUSTOM = """
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
def augment(tmp_path, monkeypatch, train):
    """Return a function that applies a user's augmentations, by name, to the image at seed 0."""
    (tmp_path / "own_augmentations.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(tmp_path)

    def run(*names):
        augmentations = tuple(f"own_augmentations:{name}" for name in names)
        return train(
            IMAGE,
            augmentations=augmentations,
            **UNCHANGED,
        )

    return run


def test_custom_augmentations_apply_in_order(augment):
    before = IMAGE.copy()

    found = augment("darker", "stamp")
    again = augment("darker", "stamp")
    reverse = augment("stamp", "darker")

    assert np.array_equal(found[1:], IMAGE[1:] // 2)
    assert 100 <= found[0, 0, 0] < 200
    assert np.array_equal(IMAGE, before)
    assert np.array_equal(found, again)
    assert reverse[0, 0, 0] == found[0, 0, 0] // 2


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("to_float", r"float64 \(40, 50, 3\).*uint8 \(40, 50, 3\)"),
        ("smaller", r"uint8 \(39,"),
        ("nothing", "NoneType"),
        ("LEVELS", "function.*list"),
    ],
)
def test_custom_augmentations_are_checked(augment, name, rule):
    with rejects(f"own_augmentations:{name}", rule):
        augment(name)


def test_custom_augmentations_are_resolved_at_the_start(make_config):
    config = make_config(augmentations=("math:missing",))

    with rejects("config.input.augmentations", "'missing'"):
        TrainTransform(config)


def cut_by_pillow(pixels, seed, size, resampling):
    """Return torchvision's random crop of an image, resized by Pillow."""
    rng = np.random.default_rng(seed)
    box = crops.sample_inception_box(
        rng,
        *pixels.shape[:2],
        (0.3, 1.0),
        "torchvision",
    )
    cropped = np.ascontiguousarray(crops.cut(pixels, box))
    image = PIL.Image.fromarray(cropped)
    return np.asarray(image.resize(size[::-1], resampling))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(24, 24), (90, 31)])
def test_antialiased_crops_are_pillows_within_a_grey_level(
    train,
    interpolation,
    size,
):
    """Arrays and JPEG files give the same; files are not decoded at a fraction of their size."""
    image = make_photograph(1, (201, 280), 1.2)
    image = cv2.normalize(
        image,
        None,
        0,
        255,
        cv2.NORM_MINMAX,
    )
    file = encode(
        ".jpg",
        image,
        cv2.IMWRITE_JPEG_QUALITY,
        95,
    )
    decoded = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR_RGB)
    resampling = PIL.Image.Resampling[interpolation.upper()]
    fields = {
        "crop_area_fraction": (0.3, 1.0),
        "crop_distribution": "torchvision",
        "flip": False,
        "train_interpolation": interpolation,
        "image_size": size,
    }

    for stored, pixels in ((image, image), (file, decoded)):
        for seed in range(4):
            found = train(stored, seed, **fields)

            expected = cut_by_pillow(pixels, seed, size, resampling)
            difference = found.astype(int) - expected
            assert np.abs(difference).max() <= 1


def test_the_simple_crop_is_cut_from_pillows_image(train):
    """DeiT III resizes the short side, bicubic with antialiasing, and mirrors 4 border pixels."""
    image = make_photograph(2, (97, 130), 1.5)
    width = int(32 * 130 / 97)
    resized = PIL.Image.fromarray(image).resize(
        (width, 32),
        PIL.Image.Resampling.BICUBIC,
    )
    expected = crops.crop_simply(
        np.random.default_rng(5),
        np.asarray(resized),
        (32, 32),
    )

    found = train(
        image,
        5,
        train_crop="simple",
        train_interpolation="bicubic",
        image_size=(32, 32),
        flip=False,
    )

    difference = found.astype(int) - expected
    assert np.abs(difference).max() <= 1
