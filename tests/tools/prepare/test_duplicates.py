"""Near-duplicates: planted copies are found, confirmed and kept out of training.

Other images stay in training.
"""

import csv
import json
import re

import cv2
import jax
import numpy as np
import pytest

from tests.bench.calibrate_duplicates import Images
from tests.data.photographs import COPIES, photographs
from tests.evals.samples import extractor_of, sample_weights
from tests.integration.commands import run, succeed
from tests.rejections import rejects
from tests.tiny import config
from vit_jax.api import from_weights
from vit_jax.data.decoding.images import decode
from vit_jax.data.exclusion import num_excluded
from vit_jax.data.sources import open_source
from vit_jax.sharding import build_mesh, replicate
from vit_jax.tools.prepare import duplicates
from vit_jax.tools.prepare.duplicates import find_by_hashes
from vit_jax.weights.saving import OWN, save_weights

PLANTED = {
    0: "JPEG quality 30",
    1: "mirrored, JPEG 50, 50 %",
    2: "grey",
    3: "resized to 200 %",
    4: "colours shifted",
}


def write_images(folder, images):
    for number, image in enumerate(images):
        path = folder / "ab"[number % 2] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), image[..., ::-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve training images, and eight test images: five copies of the first, and three others."""
    root = tmp_path_factory.mktemp("duplicates")
    images = photographs(15, sides=(100, 160))
    copies = []
    for number, kind in PLANTED.items():
        copies.append(COPIES[kind](images[number]))

    write_images(root / "images" / "train", images[:12])
    write_images(root / "images" / "test", copies + images[12:])
    save_weights(sample_weights(), root / "weights", OWN)
    return root


def build_words(folder, *more):
    data = f"folder:{folder}/images"
    return ["duplicates", data, f"--against={data}", *more]


def test_planted_copies_are_written_and_excluded(folder, tmp_path):
    pairs = tmp_path / "pairs.csv"
    ids = tmp_path / "ids.json"

    out = succeed(build_words(folder, f"--output={pairs}", f"--write={ids}"))

    rows = list(csv.DictReader(pairs.read_text().splitlines()))
    numbers = sorted((row["id"][2:4], row["test_id"][2:4]) for row in rows)
    mirrored = []
    for row in rows:
        if row["is_mirrored"] == "True":
            mirrored.append(row["id"])

    assert "5 of 8" in out
    assert numbers == [
        ("00", "00"),
        ("01", "01"),
        ("02", "02"),
        ("03", "03"),
        ("04", "04"),
    ]
    assert mirrored == ["b/01.png"]
    for row in rows:
        assert int(row["distance"]) <= 6
        assert row["cosine"] == ""

    input_config = config(f"input.exclude={ids}").input
    train = open_source(f"folder:{folder}/images", "train", input_config, 0)
    kept = set()
    for index in range(len(train)):
        kept.add(int(train.key_of(index)[2:4]))

    assert kept == set(range(5, 12))
    assert num_excluded(train) == 5


def test_all_images_are_compared_where_there_are_no_splits(folder):
    """The images that a run would hold out depend on its seed."""
    train = f"folder:{folder}/images/train"
    test = f"folder:{folder}/images/test"
    found = json.loads(
        succeed(
            [
                "duplicates",
                train,
                f"--against={test}",
                "--json",
            ]
        )
    )

    assert found["images"] == 12
    assert found["duplicates"] == 5
    assert found[f"{test}: copied test images"] == "5 of 8"

    same = json.loads(
        succeed(
            [
                "duplicates",
                train,
                f"--against={train}",
                "--json",
            ]
        )
    )
    num_held_out = 12 - same["images"]

    assert same["images"] < 12
    assert same[f"{train}: copied test images"] == f"0 of {num_held_out}"


def compute_cosines(folder):
    """Return the cosine of each training and test image, and of the mirrored test image.

    The keys of the result are (id, test id, whether the test image is mirrored).
    """
    model = from_weights(
        sample_weights(),
        sharding=replicate(build_mesh(jax.devices())),
    )
    extractor = extractor_of(model, global_batch=8)
    train = open_source(f"folder:{folder}/images", "train", config().input, 0)
    test = open_source(f"folder:{folder}/images", "test", config().input, 0)
    images = []
    for index in range(len(test)):
        images.append(decode(test[index].image))

    mirrored = [image[:, ::-1] for image in images]

    def extract_directions(source):
        feature_ND = extractor.extract(source).feature_ND
        return feature_ND / np.linalg.norm(feature_ND, axis=1, keepdims=True)

    train_ND = extract_directions(train)
    cosines = {}
    for is_mirrored, side in ((False, images), (True, mirrored)):
        cosine_NM = train_ND @ extract_directions(Images(side)).T
        for (n, m), cosine in np.ndenumerate(cosine_NM):
            pair = (
                train.key_of(n).decode(),
                test.key_of(m).decode(),
                is_mirrored,
            )
            cosines[pair] = float(cosine)
    return cosines


def find_pairs(folder, *more):
    """Return what the verb finds, by (id, test id, whether the test image is mirrored)."""
    found = json.loads(succeed(build_words(folder, "--json", *more)))["found"]
    return {(one["id"], one["test_id"], one["is_mirrored"]): one for one in found}


def drop_sides(pairs):
    return {(train, test) for train, test, _ in pairs}


def test_pairs_have_the_cosine_of_their_features(folder):
    """They agree with the features of all images and of the mirrored test images."""
    expected = compute_cosines(folder)
    least = float(np.median([*expected.values()]))
    options = [f"--weights={folder}/weights", "--cache=none", f"--cosine={least}"]

    by_features = find_pairs(
        folder,
        *options,
        "--distance=0",
        "--candidates=all",
    )
    confirmed = find_pairs(folder, *options, "--distance=0", "--candidates=64")
    both = find_pairs(folder, *options, "--distance=64", "--candidates=1")

    for found in (by_features, confirmed, both):
        for pair, one in found.items():
            assert one["cosine"] == pytest.approx(expected[pair], abs=1e-4)

    similar = drop_sides(pair for pair, cosine in expected.items() if cosine >= least)
    equal = drop_sides(pair for pair, one in both.items() if one["distance"] == 0)

    assert drop_sides(by_features) == similar | equal
    assert len(confirmed) > 20
    assert drop_sides(confirmed) <= similar | equal
    assert len(both) == 12 * 8


@pytest.mark.parametrize(
    ("option", "rule"),
    [
        ("--cosine=0.9", "--cosine=0.9: has no effect without --weights"),
        ("--images.exif_orientation=applied", "--images.exif_orientation=applied: has no effect"),
        ("--candidates=all", "--candidates=all: has no effect without --weights"),
        ("--distance=few", "--distance=few: must be int"),
        ("--data_dir=x", "--data_dir.*no effect"),
        ("--split=tran", "no split 'tran'"),
        ("--output=/nowhere/x.csv", "--output=/nowhere/x.csv"),
    ],
)
def test_mistakes_are_named(folder, option, rule):
    outcome = run(build_words(folder, option))

    assert outcome.code == 2
    assert re.search(f"(?is){rule}", outcome.err), outcome.err


class StoredImages(Images):
    """Images whose bytes are given, also where they are no image."""

    def image_of(self, index):
        return self.images[index]


def test_unreadable_images_are_no_duplicates():
    image = photographs(1, sides=(40, 50))[0]
    source = StoredImages([b"rubbish", image, b"rubbish"])

    (pair,) = find_by_hashes(source, [source], 0, 2)

    assert pair[:4] == (1, 0, 1, 0)
    with rejects("2 images cannot be read"):
        find_by_hashes(source, [source], 0, 1)


def test_too_many_pairs_are_rejected(folder, monkeypatch):
    monkeypatch.setattr(duplicates, "MOST_PAIRS", 20)
    outcome = run(build_words(folder, "--distance=64"))

    assert outcome.code == 2
    assert "More than 20 pairs" in outcome.err
