"""SIGTERM and Ctrl-C end every verb in order: an exit code, one line, nothing half-written, no process left."""

import os
import pathlib
import re
import signal
import time

import numpy as np
import pytest

from tests.evals.samples import sample_pixels, sample_weights, write_classes
from tests.integration import commands
from tests.integration.launchers import explicit
from vit_jax.weights.saving import OWN, save_weights

pytestmark = pytest.mark.processes
LINES = {
    signal.SIGTERM: (75, "vit-jax: stopped by SIGTERM; repeat the command\n"),
    signal.SIGINT: (130, "vit-jax: stopped\n"),
}
SHARED_MEMORY = pathlib.Path("/dev/shm")


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Weights and 42 images of two splits."""
    folder = tmp_path_factory.mktemp("given")
    save_weights(sample_weights(), folder / "weights", OWN)

    for split, seed in (("train", 0), ("test", 1)):
        write_classes(folder / "images" / split, np.arange(21) % 7, sample_pixels(21, seed=seed))

    return folder


@pytest.fixture
def place(tmp_path):
    """The folders that a verb writes into: its output, and that of temporary files."""
    for name in ("output", "scratch"):
        (tmp_path / name).mkdir()
    return tmp_path


def files_below(*folders):
    return sorted(str(path) for folder in folders for path in folder.rglob("*"))


def stop(number, call, words, place, after=0):
    """Send a signal to a verb that is held at a call, check how it ends; return what it had written when it came.

    So many calls pass before.
    """
    environment = {
        "TMPDIR": str(place / "scratch"),
        "TQDM_DISABLE": "1",
        "HELD_AFTER": str(after),
    }
    process = commands.start_held_at(call, words, place, **environment)
    written = files_below(place)
    process.send_signal(number)
    (outcome,) = commands.finish([process])
    *progress, end = outcome.err.splitlines(keepends=True)

    assert (outcome.code, end) == LINES[number]
    assert all(line.startswith("computing features of ") for line in progress), progress

    return written


VERBS = {  # the call at which temporary files are there, the words
    "features": (
        "numpy.lib.format:write_array_header_1_0",
        ["features", "W", "D", "--cache=none", "--output=O/features.npz"],
    ),
    "features to a cache": (
        "numpy.lib.format:write_array_header_1_0",
        ["features", "W", "D", "--cache=O", "--output=O/features.npz"],
    ),
    "features, as they are written": (
        "os:fsync",
        ["features", "W", "D", "--cache=none", "--output=O/features.npz"],
    ),
    "fewshot": (
        "numpy.lib.format:write_array_header_1_0",
        ["fewshot", "W", "D", "--shots=1", "--cache=none"],
    ),
    "evaluate": ("os:fsync", ["evaluate", "W", "D", "--report=O/report"]),
    "predict": ("os:fsync", ["predict", "W", "images", "--csv=O/table.csv"]),
    "convert": ("os:fsync", ["convert", "W", "O/weights.npz"]),
    "lr-range": (
        "os:fsync",
        ["lr-range", "--config=configs/digits.py", "R", "--steps=20", "--output=O/rates.png"],
    ),
}
CASES = [(name, signal.SIGTERM) for name in VERBS] + [
    ("features", signal.SIGINT),
    ("evaluate", signal.SIGINT),
]


@pytest.mark.parametrize(
    ("name", "number"),
    CASES,
    ids=[f"{name}, {number.name}" for name, number in CASES],
)
def test_a_verb_leaves_nothing_half_written(given, place, data_dir, name, number):
    images = given / "images"
    weights = str(given / "weights")
    recipe = commands.pretraining(data_dir, "none")[3:]
    short = {
        "W": [weights],
        "D": [f"--data=folder:{images}"],
        "R": recipe,
        "images": [str(images)],
    }
    call, words = VERBS[name]
    words = [
        word.replace("=O", f"={place}/output").replace("O/", f"{place}/output/") for word in words
    ]
    words = [part for word in words for part in short.get(word, [word])]

    assert stop(number, call, words, place) != files_below(place), "temporary files were there"
    assert files_below(place / "output", place / "scratch") == []


def test_a_dataset_of_tfds_is_complete_or_not_there(place):
    """TFDS leaves empty folders, as it does at its normal end."""
    words = ["prepare", "digits", f"--data_dir={place}/output"]

    assert any("incomplete" in file for file in stop(signal.SIGTERM, "cv2:imencode", words, place))

    left = files_below(place)

    assert not any("incomplete" in path or pathlib.Path(path).is_file() for path in left), left
    assert commands.run(words).code == 0


@pytest.mark.parametrize("number", LINES)
def test_a_copy_of_a_folder_is_marked_as_unfinished(place, number):
    count = 60
    write_classes(place / "images", np.arange(count) % 7, sample_pixels(count, size=(64, 64)))
    copy = place / "output" / "copy"
    words = ["prepare", f"folder:{place / 'images'}", "--short_side=16", f"--output={copy}"]
    stop(number, "cv2:imencode", words, place, after=20)  # when all threads have long been started

    assert 0 < len(list(copy.rglob("*.png"))) < count
    assert list(copy.rglob(".*")) == []

    refused = commands.run(["evaluate", "w", f"--data=folder:{copy}"])

    assert commands.run(words).code == 0
    assert len(list(copy.rglob("*.png"))) == count
    assert refused.code == 2


def test_a_signal_to_one_process_of_a_verb_ends_all(given, place):
    words = ["evaluate", given / "weights", f"--data=folder:{given / 'images'}"]
    files = [place / f"held_{process}" for process in range(2)]
    environments = [
        own | {"HELD_FILE": str(file)} for own, file in zip(explicit(2), files, strict=True)
    ]
    call = "vit_jax.evals.evaluate:make_evaluate"
    processes = commands.start_all(words, environments, PYTHONPATH=commands.HELD, HELD_CALL=call)

    for process, file in zip(processes, files, strict=True):
        commands.wait_until(file.exists, process)

    processes[1].send_signal(signal.SIGTERM)
    first, second = commands.finish(processes)

    assert (first.code, second.code) == (75, 75), (first, second)
    assert second.err == LINES[signal.SIGTERM][1]

    (line,) = first.err.splitlines()

    assert re.fullmatch(
        r"vit-jax: process 1 of 2 \(.*\) was stopped by SIGTERM\. Start the same command again\.",
        line,
    )


@pytest.mark.parametrize("number", LINES)
def test_data_workers_end_with_the_verb(place, data_dir, number):
    recipe = commands.pretraining(data_dir, "none", "input.num_workers=2")[3:]
    words = [
        "lr-range",
        "--config=configs/digits.py",
        *recipe,
        "--steps=20",
        f"--output={place}/output/rates.png",
    ]
    before = {*SHARED_MEMORY.glob("v*j*")}
    process = commands.start_held_at("vit_jax.tools.sweeps.range_test:RangeTest", words, place)
    workers = children(process.pid)

    assert len(workers) >= 2
    assert {*SHARED_MEMORY.glob("v*j*")} - before

    process.send_signal(number)
    (outcome,) = commands.finish([process])

    assert (outcome.code, outcome.err) == LINES[number]

    while any(map(is_alive, workers)):  # killed, or ending by themselves
        time.sleep(0.05)

    assert {*SHARED_MEMORY.glob("v*j*")} - before == set()
    assert files_below(place / "output") == []


def children(pid):
    """Return the processes that a process has started, as the system numbers them."""
    threads = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    return [int(number) for thread in threads for number in thread.read_text().split()]


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
