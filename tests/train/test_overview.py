"""The facts that a run prints of its data before it trains, and notes to recognise them."""

import json
import pathlib
import re
import shutil

import cv2
import numpy as np
import pytest

from tests import tiny
from tests.rejections import rejects
from tests.train import small_runs as runs
from vit_jax.config import load_recipe
from vit_jax.data.kinds.listing import FileSource
from vit_jax.data.subset import read_held_hashes
from vit_jax.train.inputs import Datasets, open_datasets
from vit_jax.train.lifecycle.workdir import require_same_start
from vit_jax.train.overview import (
    checkpoint_metadata,
    files_of,
    opening,
    parameter_table,
    start_of,
)
from vit_jax.train.progress import results_line
from vit_jax.weights.description import FORMAT_VERSION, parse_architecture, parse_training_data
from vit_jax.weights.fit import Fitted

MODEL = {
    "head": {
        "kernel": np.zeros((3, 2)),
        "bias": np.zeros(2),
    },
    "norm": {"scale": np.zeros(1)},
}


def test_parameters_are_counted_by_part():
    assert parameter_table(MODEL, is_folded=True) == "params   9: head 8, norm 1"


@pytest.fixture
def folder(tmp_path):
    """Ten images of each of two classes."""
    black = np.zeros((2, 2, 3), np.uint8)
    _, file = cv2.imencode(".png", black)
    image = file.tobytes()
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(10):
            (tmp_path / "images" / name / f"{number}.png").write_bytes(image)

    return tmp_path / "images"


def start(folder):
    config = load_recipe("configs/finetune.py:any,own", [f"--config.data=folder:{folder}"])
    return start_of(
        config,
        open_datasets(config),
        {"bias": np.zeros(2, np.float32)},
    )


def test_parameters_are_listed():
    lines = []
    for line in parameter_table(MODEL, is_folded=False).splitlines():
        lines.append(line.split())

    *leaves, total = lines

    assert sorted(leaves) == [
        ["head/bias", "2", "2"],
        ["head/kernel", "3", "x", "2", "6"],
        ["norm/scale", "1", "1"],
    ]
    assert total == ["total", "9"]


def test_the_opening_of_a_run():
    """Class names may be bytes that are no text."""
    no_text = b"caf\xe9".decode("utf-8", "surrogateescape")
    names = (no_text, *(f"class {number}" for number in range(11)))
    data = Datasets(
        tiny.source(160, names),
        tiny.source(1200, names),
        test_name="validation",
    )
    shown = b", ".join(b"'class %d'" % number for number in range(9))
    threads = re.compile(rb"^input    \d+ thread\(s\) on \d+ core\(s\), JPEG by \w+$", re.MULTILINE)

    text = opening(runs.build(), data, pathlib.Path("/runs/x")).encode()
    lines = text.splitlines()

    assert b"data     digits: 160 training and 1,200 validation images, 12 classes" in lines
    assert threads.search(text)
    assert b"compute  float32, attention xla" in lines
    assert rb"classes  'caf\udce9', " + shown + b" and 2 more" in lines


def test_the_line_of_an_evaluation():
    results = {"test_loss": 0.12345, "test_accuracy": 0.9, "test_images": 1234.0}
    expected = "step      5/20  test_loss 0.1235  test_accuracy 90.00%  test_images 1,234"

    assert results_line(5, 20, results) == expected


@pytest.mark.parametrize(
    "moves",
    [{"cat/0": "cat/zz"}, {"cat/3": "dog/33", "dog/3": "cat/33"}],
    ids=["name", "class"],
)
def test_files_that_change_under_a_run_are_noticed(folder, tmp_path, moves):
    """Even two files that change places, where no number changes; the folder may move."""
    workdir = tmp_path / "run"
    workdir.mkdir()
    require_same_start(workdir, start(folder), "w.npz")
    (workdir / "checkpoints" / "5").mkdir(parents=True)
    require_same_start(workdir, start(folder), "w.npz")

    folder = folder.rename(folder.with_name("pictures"))
    require_same_start(workdir, start(folder), "w.npz")

    for before, after in moves.items():
        (folder / f"{before}.png").rename(folder / f"{after}.png")
    with rejects("other data", r"t\w+_files_sha256"):
        require_same_start(workdir, start(folder), "w.npz")


def test_the_names_of_files_are_read_once(folder, monkeypatch):
    """The processes of a run compare them, checkpoints note them: of a million it takes seconds."""
    config = load_recipe("configs/finetune.py:any,own", [f"--config.data=folder:{folder}"])
    data = open_datasets(config)

    first = files_of(config, data)
    monkeypatch.setattr(FileSource, "key_of", None)

    assert files_of(config, data) == first
    assert len(set(first.values())) == 2


def test_a_run_describes_its_network_as_every_format_does():
    run = runs.build(
        "input.test_resize=direct",
        "input.test_interpolation=bicubic",
        "input.value_range=0,4095",
    )
    names = tuple("0123456789")
    data = Datasets(tiny.source(160, names), tiny.source(8, names))

    metadata = checkpoint_metadata(run, data)
    preprocessing = metadata["preprocessing"]

    # Only a folder is identified by its files.
    assert not any("sha256" in name for name in metadata)
    assert parse_architecture(metadata) == run.architecture
    assert metadata["format_version"] == FORMAT_VERSION
    assert metadata["grid"] == list(run.architecture.grid)
    assert metadata["class_names"] == list(names)
    assert preprocessing["crop_fraction"] == 1.0
    assert preprocessing["interpolation"] == "bicubic"
    assert preprocessing["exif_orientation"] is False
    assert preprocessing["value_range"] == [0.0, 4095.0]
    assert metadata["num_examples"] == 160
    assert metadata["global_batch"] == 16
    assert "finetuning_rule" not in metadata


def test_a_run_keeps_the_recipe_for_the_weights_that_it_began_with():
    run = runs.build()
    names = tuple("0123456789")
    data = Datasets(tiny.source(160, names), tiny.source(8, names))
    fitted = Fitted(parameters={}, statuses=(), licence="mit", finetuning_rule="mae")

    metadata = checkpoint_metadata(run, data, fitted)

    assert metadata["licence"] == "mit"
    assert metadata["finetuning_rule"] == "mae"


def read_held_out(metadata):
    return parse_training_data(json.loads(json.dumps(metadata))).held_up_to


def test_a_checkpoint_states_the_images_that_a_folder_holds_out(folder):
    run = runs.build(f"data=folder:{folder}")
    data = open_datasets(run.config)

    held_out = read_held_out(checkpoint_metadata(run, data))

    assert held_out == read_held_hashes(data.test, run.config.seed)
    assert len(held_out) == 2


def test_a_folder_with_splits_holds_out_nothing(folder):
    splits = folder.with_name("splits")
    shutil.copytree(folder, splits / "train")
    shutil.copytree(folder, splits / "test")
    run = runs.build(f"data=folder:{splits}")

    metadata = checkpoint_metadata(run, open_datasets(run.config))

    assert read_held_out(metadata) == {}
