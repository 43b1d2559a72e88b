"""The tasks of VTAB on made-up datasets with TFDS's features and numbers of examples."""

import pickle

import numpy as np
import pytest
import tensorflow_datasets as tfds

from tests.data import vtab_datasets
from tests.data.packed_files import encode
from tests.rejections import rejects
from vit_jax.data.decoding import images
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.kinds import vtab_tasks
from vit_jax.data.kinds.vtab_tasks import TASKS
from vit_jax.data.records import check_labels
from vit_jax.data.sources import open_source

# Hundredths of train at which the parts for validation and for testing begin, where TFDS has no
# such splits: from the paper and the code of VTAB.
HUNDREDTHS = {
    "caltech101": (90, None),
    "cifar100": (90, None),
    "pets": (80, None),
    "svhn": (90, None),
    "clevr_count": (90, None),
    "clevr_distance": (90, None),
    "eurosat": (60, 80),
    "resisc45": (60, 80),
    "dsprites_location": (80, 90),
    "dsprites_orientation": (80, 90),
}
DISTANCES = (1 + np.arange(vtab_datasets.PERIOD) % 24) / 2


def name_task(task):
    return task.name


def label_clevr_distance(numbers):
    """Count the thresholds below the distance of each record."""
    thresholds = np.array([8, 8.5, 9, 9.5, 10])
    return np.searchsorted(thresholds, DISTANCES[numbers])


def label_kitti_distance(numbers):
    is_vehicle = numbers % 8 < 3
    return np.where(is_vehicle, DISTANCES[numbers] > 8, 3)


LABELS = {  # labels of distinct records, where they are no "label"
    "clevr_count": lambda numbers: numbers % 8,
    "clevr_distance": label_clevr_distance,
    "dsprites_location": lambda numbers: numbers % 32 // 2,
    "dsprites_orientation": lambda numbers: np.floor(numbers % 40 / 2.5),
    "kitti_distance": label_kitti_distance,
    "smallnorb_azimuth": lambda numbers: numbers % 18,
    "smallnorb_elevation": lambda numbers: numbers % 9,
}


@pytest.fixture(scope="session")
def vtab_dir(tmp_path_factory):
    """All datasets, prepared."""
    folder = tmp_path_factory.mktemp("vtab")
    task_of_dataset = {task.dataset: task for task in TASKS}
    for task in task_of_dataset.values():
        vtab_datasets.write(
            folder,
            task.dataset,
            exact_version(task),
        )
    return folder


def exact_version(task):
    """Return the first version of a task, or "" if it is a pattern."""
    first, *_ = task.version.split(",")
    if "*" in first:
        return ""
    return first


def list_records(task, split):
    """Return the numbers of the records of a split in TFDS's splits."""
    sizes = vtab_datasets.SIZES[task.dataset]
    num_train = sizes["train"]
    val_hundredths, test_hundredths = HUNDREDTHS.get(task.name, (0, None))
    val_start = val_hundredths * num_train // 100
    train800 = np.arange(800)
    val200 = val_start + np.arange(200)

    if split == "train800":
        return train800
    if split == "val200":
        return val200
    if split == "train800val200":
        return np.concatenate([train800, val200])

    if test_hundredths is not None:
        test_start = test_hundredths * num_train // 100
        return np.arange(test_start, num_train)
    if task.dataset == "clevr":
        return np.arange(sizes["validation"])
    test = np.arange(sizes["test"])
    if task.dataset == "smallnorb":
        return test[len(test) // 2 :]
    return test


def test_tasks_are_nineteen_in_three_groups():
    groups = [task.group for task in TASKS]

    expected = ["natural"] * 7 + ["specialized"] * 4 + ["structured"] * 8
    assert groups == expected


def test_tasks_without_flips_and_crops():
    unflipped = {task.name for task in TASKS if not task.flip}
    uncropped = {task.name for task in TASKS if not task.crop}

    assert unflipped == {
        "dsprites_location",
        "dsprites_orientation",
        "smallnorb_azimuth",
    }
    assert uncropped == {
        "clevr_count",
        "clevr_distance",
        "dmlab",
        "kitti_distance",
        "dsprites_location",
    }


@pytest.mark.parametrize("task", TASKS, ids=name_task)
def test_tfds_has_the_features_of_a_task(task):
    """Version, features and classes are those of TFDS's code for the dataset."""
    builder = vtab_datasets.builder_of(task.dataset, exact_version(task))
    features = builder.info.features
    patterns = task.version.split(",")

    names = task.labels.class_names or features[task.labels.feature].names

    assert any(map(builder.version.match, patterns))
    assert isinstance(features["image"], tfds.features.Image)
    assert len(names) == task.num_classes
    assert bool(task.manual) == bool(builder.MANUAL_DOWNLOAD_INSTRUCTIONS)


@pytest.mark.parametrize("split", ["train800", "val200", "train800val200", "test"])
@pytest.mark.parametrize("task", TASKS, ids=name_task)
def test_records_of_splits(vtab_dir, open_data, task, split):
    """Test splits have up to 73,728 records: the first and the last are read."""
    source = open_data(
        f"vtab:{task.name}",
        split,
        data_dir=str(vtab_dir),
    )

    records = list_records(task, split)
    assert len(source) == len(records)
    assert source.num_classes == task.num_classes

    if split == "test":
        ends = np.array([0, 1, 2, -2, -1])
        places = np.arange(len(source))[ends]
        records = records[ends]
        found = [source[place].label for place in places.tolist()]
    else:
        found = check_labels(source).tolist()

    numbers = records % vtab_datasets.PERIOD
    expected = numbers % task.num_classes
    if task.name in LABELS:
        expected = LABELS[task.name](numbers)

    assert found == expected.tolist()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("dsprites_location", {0, 255}),
        ("smallnorb_azimuth", {0, 1}),
    ],
)
def test_images_of_one_channel_are_repeated_and_masks_scaled(
    vtab_dir,
    open_data,
    name,
    values,
):
    source = open_data(
        f"vtab:{name}",
        "train800",
        data_dir=str(vtab_dir),
    )
    received = pickle.loads(pickle.dumps(source))

    found = set()
    for index in range(4):
        pixels = images.decode(received[index].image)
        assert pixels.shape == (4, 6, 3)
        found.update(np.unique(pixels))

    assert found == values


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
def test_tasks_that_cannot_be_opened(tmp_path, open_data, name, split, rule):
    with rejects(name, rule):
        open_data(
            f"vtab:{name}",
            split,
            data_dir=str(tmp_path),
        )


def test_another_version_is_rejected_and_one_beside_it_is_found(tmp_path, make_config):
    config = make_config(data_dir=str(tmp_path))
    sizes = {"train": 1000, "validation": 300, "test": 300}
    newest = vtab_datasets.write(tmp_path, "kitti", sizes=sizes)

    with rejects("vtab:kitti_distance", rf"version 3\.1\.0.*{newest}"):
        open_source("vtab:kitti_distance", "val200", config, 0)

    vtab_datasets.write(tmp_path, "kitti", "3.1.0", sizes=sizes)
    source = open_source("vtab:kitti_distance", "val200", config, 0)

    assert len(source) == 200


def test_a_short_dataset_is_rejected(tmp_path, open_data):
    vtab_datasets.write(
        tmp_path,
        "caltech101",
        sizes={"train": 2900, "test": 10},
    )

    with rejects("train[2754:2954]", "'train': 2900"):
        open_data(
            "vtab:caltech101",
            "val200",
            data_dir=str(tmp_path),
        )


def test_a_dataset_of_other_classes_is_rejected(tmp_path, open_data):
    """A class is removed from the prepared files."""
    vtab_datasets.write(
        tmp_path,
        "dtd",
        sizes={"train": 1000, "validation": 200, "test": 10},
    )
    (folder,) = (tmp_path / "dtd").iterdir()
    names = folder / "label.labels.txt"
    *kept_names, _ = names.read_text().split()
    names.write_text("\n".join(kept_names))
    features = folder / "features.json"
    description = features.read_text()
    features.write_text(description.replace('"47"', '"46"'))

    with rejects("47 classes", "'dtd/.*46"):
        open_data(
            "vtab:dtd",
            "val200",
            data_dir=str(tmp_path),
        )


def test_a_label_that_is_no_class_is_named(tmp_path, open_data):
    """Example 7 has two objects; classes begin with three."""

    def remove_objects(number, example):
        if number == 7:
            example["objects"] = example["objects"][:2]
        return example

    sizes = {"train": 70_000, "validation": 8}
    vtab_datasets.write(
        tmp_path,
        "clevr",
        sizes=sizes,
        changed=remove_objects,
    )
    source = open_data(
        "vtab:clevr_count",
        "test",
        data_dir=str(tmp_path),
    )

    with rejects("validation:7", "label -1.*0 to 7"):
        check_labels(source)


# Label functions by hand: what VTAB's code gives, and strictly on which side of a threshold a
# distance on it is.


def make_objects(distances, types=None):
    """Return objects as TFDS does: a list for each feature."""
    places = []
    for distance in distances:
        places.append(np.array([50.0, 20.0, distance], np.float32))
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
    objects = make_objects([9.0] * number)

    assert vtab_tasks.count_objects(objects) == label


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
def test_object_distance_is_that_of_the_closest(distance, label):
    """A threshold belongs to the range below it."""
    objects = make_objects([30, distance, 12])

    assert vtab_tasks.find_object_distance(objects) == label


def test_a_distance_of_no_range_is_no_class():
    num_classes = len(vtab_tasks.name_ranges(vtab_tasks.CLEVR_DISTANCES))
    too_near = make_objects([0.0])
    too_far = make_objects([101.0])

    assert vtab_tasks.find_object_distance(too_near) == -1
    assert vtab_tasks.find_object_distance(too_far) == num_classes


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
    objects = make_objects(distances, types)

    assert vtab_tasks.find_vehicle_distance(objects) == label


@pytest.mark.parametrize(
    ("bins", "count", "width"),
    [
        (vtab_tasks.build_bins("x", 32, 16), 32, 2),
        (vtab_tasks.build_bins("o", 40, 16), 40, 2.5),
    ],
    ids=["location", "orientation"],
)
def test_bins_are_floors_of_quotients(bins, count, width):
    for value in range(count):
        assert bins.label(value) == int(value / width)
    assert len(set(bins.class_names)) == 16


def test_names_of_bins():
    location = vtab_tasks.build_bins("x", 32, 16).class_names
    orientation = vtab_tasks.build_bins("o", 40, 16).class_names

    assert location[:2] == ("0-1", "2-3")
    assert orientation[:3] == ("0-2", "3-4", "5-7")
    assert orientation[-1] == "38-39"


def test_a_mask_becomes_black_and_white():
    mask = np.array([[0, 1, 1], [1, 0, 0]], np.uint8)
    file = encode(".png", mask)

    image = vtab_tasks.mask_to_grey(file)

    assert image.dtype == np.uint8
    assert image.shape == (2, 3, 1)
    assert np.array_equal(image[..., 0], mask * 255)
    with pytest.raises(UnreadableImage):
        vtab_tasks.mask_to_grey(b"rubbish")
