"""Label functions by hand: what VTAB's code gives, and strictly which side of a threshold a distance on it is."""

import cv2
import numpy as np
import pytest

from vit_jax.data import vtab as labels
from vit_jax.data.images import UnreadableImage


def objects(distances, types=None):
    """As TFDS gives them: a list for each feature."""
    places = [np.array([50.0, 20.0, distance], np.float32) for distance in distances]
    return {"size": [0] * len(places), "type": types, "pixel_coords": places, "location": places}


@pytest.mark.parametrize(("number", "label"), [(3, 0), (4, 1), (10, 7)])
def test_object_count(number, label):
    assert labels.object_count(objects([9.0] * number)) == label


@pytest.mark.parametrize(
    ("distance", "label"),
    [(0.5, 0), (8, 0), (8.000001, 1), (8.5, 1), (8.6, 2), (9, 2), (9.1, 3), (9.5, 3), (9.75, 4), (10, 4), (10.1, 5)],
)
def test_object_distance_is_that_of_the_closest_and_a_threshold_belongs_below(distance, label):
    assert labels.object_distance(objects([30, distance, 12])) == label


def test_a_distance_of_no_range_is_no_class():
    assert labels.object_distance(objects([0.0])) == -1
    assert labels.object_distance(objects([101.0])) == len(labels.ranges(labels.CLEVR_DISTANCES))


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
    assert labels.vehicle_distance(objects(distances, types)) == label


def test_bins_are_floors_of_quotients():
    location, orientation = labels.bins("x", 32, 16), labels.bins("o", 40, 16)
    assert [location.label(value) for value in range(32)] == [value // 2 for value in range(32)]
    assert [orientation.label(value) for value in range(40)] == [int(value / 2.5) for value in range(40)]
    assert location.class_names[:2] == ("0-1", "2-3")
    assert orientation.class_names[:3] == ("0-2", "3-4", "5-7")
    assert orientation.class_names[-1] == "38-39"
    assert [len(set(names)) for names in (location.class_names, orientation.class_names)] == [16, 16]


def test_a_mask_becomes_black_and_white():
    mask = np.array([[0, 1, 1], [1, 0, 0]], np.uint8)
    image = labels.mask_to_grey(cv2.imencode(".png", mask)[1].tobytes())
    assert image.dtype == np.uint8
    assert image.tolist() == [[[0], [255], [255]], [[255], [0], [0]]]
    with pytest.raises(UnreadableImage):
        labels.mask_to_grey(b"rubbish")
