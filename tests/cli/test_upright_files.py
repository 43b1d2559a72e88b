"""All verbs read a photograph with an orientation in its Exif data into the same pixels."""

import dataclasses
import json
import pathlib
import re

import cv2
import numpy as np
import pytest

from tests.cli.test_short_forms import read_command
from tests.data import deep_files
from tests.data.decoding.test_orientation import make_exif
from tests.integration.commands import run, succeed
from tests.weights.small_networks import SQUARE, arrays_of
from vit_jax import load_model, open_data
from vit_jax.config import load_recipe
from vit_jax.data.records import Record
from vit_jax.data.subset import TrainingData
from vit_jax.data.transforms import build_evaluation_transform
from vit_jax.train.run_defaults import choose_finetuning, choose_pretraining
from vit_jax.weights.description import choose_orientation
from vit_jax.weights.formats import write_npz

CLASSES = ("ant", "bee", "cat")
WEIGHTS = ["w.npz", "--weights.num_heads=2"]
ROTATED = 6  # the number of Exif for a photograph that must be turned to the right


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Weights, and the same photographs in two folders: upright, and stored on their side."""
    folder = tmp_path_factory.mktemp("upright")
    write_npz(folder / "w.npz", arrays_of(SQUARE, "released"), {})
    (folder / "names.txt").write_text("\n".join(CLASSES))
    rng = np.random.default_rng(0)
    for name in CLASSES:
        for index in range(4):
            file = f"{name}/{index}.png"
            upright = rng.integers(0, 256, (36, 48, 3), np.uint8)
            write_photograph(folder / "upright" / file, upright, 1)
            stored = cv2.rotate(upright, cv2.ROTATE_90_COUNTERCLOCKWISE)
            write_photograph(folder / "stored" / file, stored, ROTATED)
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def write_photograph(path, pixels, orientation):
    path.parent.mkdir(parents=True, exist_ok=True)
    _, file = cv2.imencode(".png", pixels)
    exif = b"eXIf" + make_exif(">", orientation)
    path.write_bytes(deep_files.with_chunk(file.tobytes(), exif))


def run_on(data, verb, *options):
    """Run a verb on a folder; return its output without the name of the folder and speeds."""
    file, num_heads = WEIGHTS
    printed = succeed([verb, file, data, num_heads, *options])
    printed = re.sub(r"_second\": [\d.]+", "", printed)
    return printed.replace("stored", "upright")


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        ("predict", ["--json"]),
        ("evaluate", ["--json", "--split=all", "--class_names=names.txt"]),
        ("probe", ["--json", "--penalty=1", "--cache=none"]),
        ("probe", ["--json", "--penalty=1", "--cache=none", "--preprocessing=fewshot"]),
        ("knn", ["--json", "--neighbours=2", "--cache=none"]),
        ("fewshot", ["--json", "--shots=1", "--seeds=0", "--cache=none"]),
    ],
)
def test_verbs_turn_photographs(here, verb, options):
    on_upright = run_on("upright", verb, *options)
    on_stored = run_on("stored", verb, *options)

    assert on_stored.replace("upright-probe-2", "upright-probe") == on_upright
    if verb == "predict":
        ignored = run_on("stored", verb, *options, "--images.exif_orientation=ignored")
        assert ignored != on_upright


def test_features_are_those_of_upright_photographs(here):
    files = {}
    for name in ("upright", "stored"):
        run_on(name, "features", f"--output={name}.npz", "--split=all", "--cache=none")
        files[name] = np.load(f"{name}.npz")["features"]

    np.testing.assert_array_equal(files["stored"], files["upright"])


def test_figures_are_of_upright_photographs(here):
    for name in ("upright", "stored"):
        succeed(["inspect", *WEIGHTS, "pca", f"--images={name}", f"--output=figures-{name}"])

    stored = np.load("figures-stored/pca.npz")
    upright = np.load("figures-upright/pca.npz")
    for name in upright.files:
        if upright[name].dtype.kind == "f":
            np.testing.assert_array_equal(stored[name], upright[name])


def test_programs_say_that_photographs_are_turned(here):
    succeed(["export", *WEIGHTS, "--to=stablehlo", "--output=program", "--overwrite"])

    words = json.loads((here / "program.json").read_text())["preprocessing"]
    assert words["exif_orientation"] == "applied"


FIXED = ["--config.input.image_size=16,16", "--config.input.test_resize=direct"]


def read_both(transform):
    """Return the pixels of the first photograph in both folders."""
    pixels = []
    for name in ("upright", "stored"):
        content = pathlib.Path(f"{name}/ant/0.png").read_bytes()
        record = Record(content, 0)
        pixels.append(transform(record))
    return pixels


def test_training_and_the_python_api_turn_photographs(here, monkeypatch):
    weights = "--config.init_from=w.npz"
    data = "--config.data=folder:stored"
    finetuning = choose_finetuning(None, [weights, data], uses_devices=False)
    scratch = choose_pretraining(None, "folder:stored", [data])
    monkeypatch.setattr("vit_jax.train.run_defaults.MOST_SCRATCH_IMAGES", 0)
    on_many = choose_pretraining(None, "folder:stored", [data])

    opened = open_data("folder:stored", image_size=16)
    model = load_model("w.npz", num_heads=2)
    transforms = [
        model.transform,
        build_evaluation_transform(opened.inputs),
    ]
    for defaults in (finetuning, scratch, on_many):
        added = [f"--config.{override}" for override in defaults.overrides]
        config = load_recipe(defaults.recipe, [*added, *FIXED])
        transforms.append(build_evaluation_transform(config.input))

    for transform in transforms:
        upright, stored = read_both(transform)
        np.testing.assert_array_equal(stored, upright)


FILES = TrainingData(
    data="folder:a",
    seed=0,
    holdout_fraction=0.1,
    train_split="train",
    test_split="test",
    classes=(),
)


@pytest.mark.parametrize(
    ("stated", "trained_on", "data", "is_upright"),
    [
        (None, None, "", True),
        (None, None, "folder:a", True),
        (None, None, "tfds:imagenet2012", False),
        (None, None, "pets,dtd", False),
        (None, None, "pets,folder:a", True),
        (None, None, "my.package:data", True),
        (True, None, "tfds:imagenet2012", True),
        (False, "folder:a", "folder:a", False),
        (False, None, "folder:a", False),
        (False, "tfds:imagenet2012", "folder:a", True),
        (False, "tfds:imagenet2012", "tfds:imagenet2012", False),
    ],
)
def test_the_choice_by_weights_and_data(
    stated,
    trained_on,
    data,
    is_upright,
):
    training = None
    if trained_on is not None:
        training = dataclasses.replace(FILES, data=trained_on)
    preprocessing = {"exif_orientation": stated}

    assert choose_orientation(preprocessing, training, data) == is_upright


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        ("knn", ["--neighbours=2"]),
        ("fewshot", ["--shots=1", "--seeds=0"]),
        ("probe", ["--penalty=1", "--output=probe", "--overwrite"]),
        ("features", ["--split=all", "--output=long.npz"]),
    ],
)
def test_the_printed_command_has_the_same_result(here, verb, options):
    file, num_heads = WEIGHTS
    short = run([verb, file, "stored", num_heads, *options, "--cache=none"])
    command = read_command(short.err)

    long = run(command)

    assert short.code == 0, short.err
    assert command[:3] == [verb, "w.npz", "--data=folder:stored"]
    assert "command" not in long.err
    assert long.out == short.out
