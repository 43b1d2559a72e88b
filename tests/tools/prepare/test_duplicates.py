"""Near-duplicates: planted copies are found, confirmed and kept out of training; nothing else is."""

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
from vit_jax.sharding import build_mesh, replicated
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve training images, and test images: five copies of the first, and three others."""
    root = tmp_path_factory.mktemp("duplicates")
    images = photographs(15, sides=(100, 160))
    tests = [COPIES[kind](images[number]) for number, kind in PLANTED.items()] + images[12:]
    for split, some in (("train", images[:12]), ("test", tests)):
        for number, image in enumerate(some):
            path = root / "images" / split / "ab"[number % 2] / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(path), image[..., ::-1])
    save_weights(sample_weights(), root / "weights", OWN)
    return root


def words(folder, *more):
    data = f"folder:{folder}/images"
    return ["duplicates", data, f"--against={data}", *more]


def test_planted_copies_are_written_and_excluded(folder, tmp_path):
    pairs = tmp_path / "pairs.csv"
    ids = tmp_path / "ids.json"
    out = succeed(words(folder, f"--output={pairs}", f"--write={ids}"))

    assert "5 of 8" in out

    rows = list(csv.DictReader(pairs.read_text().splitlines()))
    assert sorted((row["id"][2:4], row["test_id"][2:4]) for row in rows) == [
        (f"0{n}", f"0{n}") for n in range(5)
    ]
    assert [row["id"] for row in rows if row["is_mirrored"] == "True"] == ["b/01.png"]
    assert all(int(row["distance"]) <= 6 and row["cosine"] == "" for row in rows)

    data = f"folder:{folder}/images"
    train = open_source(data, "train", config(f"input.exclude={ids}").input, 0)

    assert {train.key_of(index)[2:4] for index in range(len(train))} == {
        b"%02d" % n for n in range(5, 12)
    }
    assert num_excluded(train) == 5


def test_all_images_are_compared_where_there_are_no_splits(folder):
    """Which images a run would hold out depends on its seed."""
    train, test = (f"folder:{folder}/images/{split}" for split in ("train", "test"))
    found = json.loads(succeed(["duplicates", train, f"--against={test}", "--json"]))

    assert (found["images"], found["duplicates"]) == (12, 5)
    assert found[f"{test}: copied test images"] == "5 of 8"

    same = json.loads(succeed(["duplicates", train, f"--against={train}", "--json"]))
    assert same["images"] < 12
    assert same[f"{train}: copied test images"] == f"0 of {12 - same['images']}"


def test_pairs_have_the_cosine_of_their_features(folder):
    """Held against the features of all images and of the mirrored test images."""
    model = from_weights(sample_weights(), sharding=replicated(build_mesh(jax.devices())))
    extractor = extractor_of(model, global_batch=8)
    train, test = (
        open_source(f"folder:{folder}/images", split, config().input, 0)
        for split in ("train", "test")
    )
    decoded = [decode(test[index].image) for index in range(len(test))]
    sides = Images(decoded), Images([image[:, ::-1] for image in decoded])
    unit, *units = (
        found / np.linalg.norm(found, axis=1, keepdims=True)
        for found in (extractor.extract(source).feature_ND for source in (train, *sides))
    )
    expected = {
        (train.key_of(n).decode(), test.key_of(m).decode(), bool(side)): float(
            unit[n] @ units[side][m]
        )
        for n in range(12)
        for m in range(8)
        for side in (0, 1)
    }
    least = float(np.median([*expected.values()]))
    how = [f"--weights={folder}/weights", "--cache=none", "--json", f"--cosine={least}"]
    by_features, confirmed, both = (
        {(one["id"], one["test_id"], one["is_mirrored"]): one for one in json.loads(out)["found"]}
        for out in (
            succeed(words(folder, *how, *more))
            for more in (
                ["--distance=0", "--candidates=all"],
                ["--distance=0", "--candidates=64"],
                ["--distance=64", "--candidates=1"],
            )
        )
    )

    for found in (by_features, confirmed, both):
        assert all(
            one["cosine"] == pytest.approx(expected[pair], abs=1e-4) for pair, one in found.items()
        )

    pairs = {pair[:2] for pair, cosine in expected.items() if cosine >= least}
    equal = {pair[:2] for pair, one in both.items() if one["distance"] == 0}

    assert {pair[:2] for pair in by_features} == pairs | equal
    assert len(confirmed) > 20
    assert {pair[:2] for pair in confirmed} <= pairs | equal
    assert len(both) == 12 * 8


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        (["--cosine=0.9"], "--cosine=0.9: has no effect without --weights"),
        (["--images.exif_orientation=applied"], "--images.exif_orientation=applied: has no effect"),
        (["--candidates=all"], "--candidates=all: has no effect without --weights"),
        (["--distance=few"], "--distance=few: must be int"),
        (["--data_dir=x"], "--data_dir.*no effect"),
        (["--split=tran"], "no split 'tran'"),
        (["--output=/nowhere/x.csv"], "--output=/nowhere/x.csv"),
    ],
)
def test_mistakes_are_named(folder, more, rule):
    outcome = run(words(folder, *more))

    assert outcome.code == 2
    assert re.search(f"(?is){rule}", outcome.err), outcome.err


def test_unreadable_images_are_no_duplicates(folder, make_source):
    source = make_source([b"rubbish", photographs(1, sides=(40, 50))[0], b"rubbish"])
    (pair,) = find_by_hashes(source, [source], 0, 2)

    assert pair[:4] == (1, 0, 1, 0)
    with rejects("2 images cannot be read"):
        find_by_hashes(source, [source], 0, 1)


@pytest.fixture
def make_source():
    class Stored(Images):
        def image_of(self, index):
            return self.images[index]

    return Stored


def test_too_many_pairs_are_rejected(folder, monkeypatch):
    monkeypatch.setattr(duplicates, "MOST_PAIRS", 20)
    outcome = run(words(folder, "--distance=64"))

    assert outcome.code == 2
    assert "More than 20 pairs" in outcome.err
