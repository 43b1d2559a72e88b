"""The tasks of VTAB on made-up datasets with TFDS's own features and numbers of examples."""

import pickle

import cv2
import numpy as np
import pytest
import tensorflow_datasets as tfds

from tests.data import vtab_datasets
from tests.rejections import rejects
from vit_jax.data.decoding import images
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.kinds import vtab_tasks
from vit_jax.data.kinds.vtab_tasks import TASKS
from vit_jax.data.records import checked_labels
from vit_jax.data.sources import open_source

# Of VTAB's paper and code: how many hundredths of train are for training, and how many before those
# for testing, where TFDS has no such splits.
HUNDREDTHS = {
    "caltech101": 90,
    "cifar100": 90,
    "pets": 80,
    "svhn": 90,
    "clevr_count": 90,
    "clevr_distance": 90,
}
HUNDREDTHS |= dict.fromkeys(("eurosat", "resisc45"), (60, 80))
HUNDREDTHS |= dict.fromkeys(("dsprites_location", "dsprites_orientation"), (80, 90))
DISTANCES = (1 + np.arange(vtab_datasets.PERIOD) % 24) / 2
LABELS = {  # of distinct record n, where they are no "label"
    "clevr_count": lambda n: n % 8,
    "clevr_distance": lambda n: np.sum(
        [DISTANCES[n] > threshold for threshold in (8, 8.5, 9, 9.5, 10)],
        axis=0,
    ),
    "dsprites_location": lambda n: n % 32 // 2,
    "dsprites_orientation": lambda n: np.floor(n % 40 / 2.5),
    "kitti_distance": lambda n: np.where(n % 8 < 3, DISTANCES[n] > 8, 3),
    "smallnorb_azimuth": lambda n: n % 18,
    "smallnorb_elevation": lambda n: n % 9,
}


@pytest.fixture(scope="session")
def vtab_dir(tmp_path_factory):
    """All datasets, prepared."""
    folder = tmp_path_factory.mktemp("vtab")
    for task in {task.dataset: task for task in TASKS}.values():
        vtab_datasets.write(folder, task.dataset, exact_version(task))

    return folder


def exact_version(task):
    first = task.version.split(",")[0]
    return "" if "*" in first else first


def numbers(task, split):
    """Numbers of the records of a split in TFDS's own splits."""
    sizes = vtab_datasets.SIZES[task.dataset]
    hundredths = HUNDREDTHS.get(task.name)
    first, *later = hundredths if isinstance(hundredths, tuple) else (hundredths,)
    val_start = first * sizes["train"] // 100 if first else 0

    if split == "test":
        name = "validation" if task.dataset == "clevr" else "test"
        if task.dataset == "smallnorb":
            return np.arange(sizes["test"] // 2, sizes["test"])
        return (
            np.arange(later[0] * sizes["train"] // 100, sizes["train"])
            if later
            else np.arange(sizes[name])
        )

    parts = {"train800": np.arange(800), "val200": val_start + np.arange(200)}
    return parts[split] if split in parts else np.concatenate([*parts.values()])


def test_they_are_the_nineteen_in_three_groups():
    groups = [task.group for task in TASKS]

    assert [groups.count(group) for group in ("natural", "specialized", "structured")] == [7, 4, 8]

    expected_groups = sorted(groups, key=("natural", "specialized", "structured").index)
    assert groups == expected_groups

    unflipped = {task.name for task in TASKS if not task.flip}

    expected_unflipped = {"dsprites_location", "dsprites_orientation", "smallnorb_azimuth"}
    assert unflipped == expected_unflipped
    assert {task.name for task in TASKS if not task.crop} == {
        *("clevr_count", "clevr_distance", "dmlab", "kitti_distance", "dsprites_location")
    }


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_tfds_has_what_the_task_names(task):
    """The version, the features and their classes, of TFDS's own code for the dataset."""
    builder = vtab_datasets.builder_of(task.dataset, exact_version(task))
    features = builder.info.features

    assert any(builder.version.match(pattern) for pattern in task.version.split(","))
    assert isinstance(features["image"], tfds.features.Image)

    names = task.labels.class_names or features[task.labels.feature].names

    assert len(names) == task.num_classes
    assert bool(task.manual) == bool(builder.MANUAL_DOWNLOAD_INSTRUCTIONS)


@pytest.mark.parametrize(
    "split",
    [
        "train800",
        "val200",
        "train800val200",
        "test",
    ],
)
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_splits_hold_the_records_that_they_should(vtab_dir, make_config, task, split):
    source = open_source(f"vtab:{task.name}", split, make_config(data_dir=str(vtab_dir)), 0)
    expected = numbers(task, split)
    assert len(source) == len(expected)

    label_of = LABELS.get(task.name, lambda number: number % task.num_classes)
    if split == "test":  # up to 73,728: the first and the last
        places = np.array([0, 1, 2, len(source) - 2, len(source) - 1])
        found = [source[int(place)].label for place in places]
    else:
        places = np.arange(len(source))
        found = checked_labels(source).tolist()

    assert found == label_of(expected[places] % vtab_datasets.PERIOD).tolist()
    assert source.num_classes == task.num_classes


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("dsprites_location", {0, 255}),
        ("smallnorb_azimuth", {0, 1}),
    ],
)
def test_images_of_one_channel_are_repeated_and_masks_scaled(vtab_dir, make_config, name, values):
    source = open_source(f"vtab:{name}", "train800", make_config(data_dir=str(vtab_dir)), 0)
    source = pickle.loads(pickle.dumps(source))  # as it reaches a worker
    pixels = np.stack([images.decode(source[index].image) for index in range(4)])

    assert pixels.shape == (4, 4, 6, 3)
    assert {*pixels.reshape(-1).tolist()} == values


@pytest.mark.parametrize(
    ("name", "split", "rule"),
    [
        ("pet", "test", "nearest.*pets"),
        ("imagenet", "test", "caltech101, "),
        ("pets", "train", "'train'.*train800, val200, train800val200, test"),
        ("kitti_distance", "test", r"vit-jax prepare kitti:3\.1\.0 --data_dir=\S+$"),
        ("sun397", "test", r"vit-jax prepare sun397/tfds --data_dir=\S+$"),
        ("resisc45", "test", r"--manual_dir=FOLDER\nFOLDER holds NWPU-RESISC45, "),
    ],
)
def test_what_cannot_be_opened(tmp_path, make_config, name, split, rule):
    with rejects(name, rule):
        open_source(f"vtab:{name}", split, make_config(data_dir=str(tmp_path)), 0)


def test_another_version_is_rejected_and_one_beside_it_is_found(tmp_path, make_config):
    config = make_config(data_dir=str(tmp_path))
    sizes = {"train": 1000, "validation": 300, "test": 300}
    newest = vtab_datasets.write(tmp_path, "kitti", sizes=sizes)

    with rejects("vtab:kitti_distance", rf"version 3\.1\.0.*{newest}"):
        open_source("vtab:kitti_distance", "val200", config, 0)

    vtab_datasets.write(tmp_path, "kitti", "3.1.0", sizes=sizes)

    assert len(open_source("vtab:kitti_distance", "val200", config, 0)) == 200


def test_what_is_too_short_or_of_other_classes_is_rejected(tmp_path, make_config):
    config = make_config(data_dir=str(tmp_path))
    vtab_datasets.write(tmp_path, "caltech101", sizes={"train": 2900, "test": 10})

    with rejects("train[2754:2954]", "'train': 2900"):
        open_source("vtab:caltech101", "val200", config, 0)

    vtab_datasets.write(tmp_path, "dtd", sizes={"train": 1000, "validation": 200, "test": 10})
    names = next((tmp_path / "dtd").glob("*/label.labels.txt"))
    names.write_text("\n".join(names.read_text().split()[:-1]))
    info = next((tmp_path / "dtd").glob("*/features.json"))
    info.write_text(info.read_text().replace('"47"', '"46"'))

    with rejects("47 classes", "'dtd/.*46"):
        open_source("vtab:dtd", "val200", config, 0)


def test_a_label_that_is_no_class_is_named(tmp_path, make_config):
    def beyond(number, example):
        # Two objects, not three
        return example | {"objects": example["objects"][:2]} if number == 7 else example

    vtab_datasets.write(tmp_path, "clevr", sizes={"train": 70_000, "validation": 8}, changed=beyond)
    source = open_source("vtab:clevr_count", "test", make_config(data_dir=str(tmp_path)), 0)

    with rejects("validation:7", "label -1.*0 to 7"):
        checked_labels(source)


# Label functions by hand: what VTAB's code gives, and strictly on which side of a threshold a
# distance on it is.


def objects(distances, types=None):
    """As TFDS gives them: a list for each feature."""
    places = [np.array([50.0, 20.0, distance], np.float32) for distance in distances]
    return {
        "size": [0] * len(places),
        "type": types,
        "pixel_coords": places,
        "location": places,
    }


@pytest.mark.parametrize(
    ("number", "label"),
    [
        (3, 0),
        (4, 1),
        (10, 7),
    ],
)
def test_object_count(number, label):
    assert vtab_tasks.object_count(objects([9.0] * number)) == label


@pytest.mark.parametrize(
    ("distance", "label"),
    [
        (0.5, 0),
        (8, 0),
        (8.000001, 1),
        (8.5, 1),
        (8.6, 2),
        (9, 2),
        (9.1, 3),
        (9.5, 3),
        (9.75, 4),
        (10, 4),
        (10.1, 5),
    ],
)
def test_object_distance_is_that_of_the_closest_and_a_threshold_belongs_below(distance, label):
    assert vtab_tasks.object_distance(objects([30, distance, 12])) == label


def test_a_distance_of_no_range_is_no_class():
    assert vtab_tasks.object_distance(objects([0.0])) == -1
    assert vtab_tasks.object_distance(objects([101.0])) == len(
        vtab_tasks.ranges(vtab_tasks.CLEVR_DISTANCES)
    )


@pytest.mark.parametrize(
    ("distances", "types", "label"),
    [
        ([8.0], [0], 0),  # a car
        ([8.1, 30], [1, 0], 1),  # a van and a car
        ([20.0], [2], 1),  # a truck
        ([20.1], [2], 2),
        ([5.0, 25.0], [3, 0], 2),  # the pedestrian is closer and does not count
        ([-3.0], [0], 0),  # beside or behind the camera
        ([5.0, 6.0], [3, 7], 3),  # no vehicle
        ([], [], 3),  # nothing at all
        ([999.0], [0], 2),
    ],
)
def test_vehicle_distance(distances, types, label):
    assert vtab_tasks.vehicle_distance(objects(distances, types)) == label


def test_bins_are_floors_of_quotients():
    location = vtab_tasks.bins("x", 32, 16)
    orientation = vtab_tasks.bins("o", 40, 16)

    assert [location.label(value) for value in range(32)] == [value // 2 for value in range(32)]
    assert [orientation.label(value) for value in range(40)] == [
        int(value / 2.5) for value in range(40)
    ]
    assert location.class_names[:2] == ("0-1", "2-3")
    assert orientation.class_names[:3] == ("0-2", "3-4", "5-7")
    assert orientation.class_names[-1] == "38-39"
    assert [len(set(names)) for names in (location.class_names, orientation.class_names)] == [
        16,
        16,
    ]


def test_a_mask_becomes_black_and_white():
    mask = np.array([[0, 1, 1], [1, 0, 0]], np.uint8)
    image = vtab_tasks.mask_to_grey(cv2.imencode(".png", mask)[1].tobytes())

    assert image.dtype == np.uint8
    assert image.tolist() == [[[0], [255], [255]], [[255], [0], [0]]]

    with pytest.raises(UnreadableImage):
        vtab_tasks.mask_to_grey(b"rubbish")
