"""SIGTERM and Ctrl-C end every verb in order.

The exit code and one line tell so; nothing is half-written, and no process is left.
"""

import contextlib
import os
import pathlib
import re
import signal

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
def inputs(tmp_path_factory):
    """The folder of weights and of 42 images in two splits."""
    folder = tmp_path_factory.mktemp("inputs")
    save_weights(sample_weights(), folder / "weights", OWN)
    for split, seed in (("train", 0), ("test", 1)):
        write_classes(
            folder / "images" / split,
            np.arange(21) % 7,
            sample_pixels(21, seed=seed),
        )
    return folder


@pytest.fixture
def place(tmp_path):
    """A folder with the subfolders for the output of a verb and for temporary files."""
    (tmp_path / "output").mkdir()
    (tmp_path / "scratch").mkdir()
    return tmp_path


def list_below(*folders):
    """Return the sorted paths of everything below some folders."""
    paths = []
    for folder in folders:
        paths += map(str, folder.rglob("*"))
    return sorted(paths)


def stop_held(number, call, words, place, after=0):
    """Send a signal to a verb that is held at a call, and check its end.

    Returns the files that were there when the signal came. `after` calls pass before the held one.
    """
    environment = {
        "TMPDIR": str(place / "scratch"),
        "TQDM_DISABLE": "1",
        "HELD_AFTER": str(after),
    }
    process = commands.start_held_at(call, words, place, **environment)
    written = list_below(place)

    process.send_signal(number)
    (outcome,) = commands.finish([process])

    code, message = LINES[number]
    *progress, last = outcome.err.splitlines(keepends=True)
    assert outcome.code == code
    assert last == message
    for line in progress:
        assert line.startswith("computing features of "), progress
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
CASES = [
    *((name, signal.SIGTERM) for name in VERBS),
    ("features", signal.SIGINT),
    ("evaluate", signal.SIGINT),
]


def expand_words(words, inputs, output, recipe):
    """Return the words of a verb for the abbreviations in VERBS.

    W are the weights, D the data, R the options of the recipe, O the output folder.
    """
    abbreviations = {
        "W": [str(inputs / "weights")],
        "D": [f"--data=folder:{inputs / 'images'}"],
        "R": recipe,
        "images": [str(inputs / "images")],
    }
    expanded = []
    for word in words:
        if word in abbreviations:
            expanded += abbreviations[word]
        else:
            expanded.append(word.replace("=O", f"={output}").replace("O/", f"{output}/"))
    return expanded


@pytest.mark.parametrize(
    ("name", "number"),
    CASES,
    ids=[f"{name}, {number.name}" for name, number in CASES],
)
def test_a_verb_leaves_nothing_half_written(
    inputs,
    place,
    data_dir,
    name,
    number,
):
    """Temporary files are there when the signal comes, and gone afterwards."""
    call, words = VERBS[name]
    recipe = commands.pretraining(data_dir, "none")[3:]
    words = expand_words(words, inputs, place / "output", recipe)

    written = stop_held(number, call, words, place)

    assert written != list_below(place)
    assert list_below(place / "output", place / "scratch") == []


def test_a_dataset_of_tfds_is_complete_or_not_there(place):
    """TFDS leaves empty folders, as it does at its normal end."""
    words = ["prepare", "digits", f"--data_dir={place}/output"]

    written = stop_held(signal.SIGTERM, "cv2:imencode", words, place)

    assert any("incomplete" in path for path in written)
    for path in list_below(place):
        assert "incomplete" not in path
        assert not pathlib.Path(path).is_file(), path
    assert commands.run(words).code == 0


@pytest.mark.parametrize("number", LINES)
def test_a_copy_of_a_folder_is_marked_as_unfinished(place, number):
    """The signal comes when all threads have long been started."""
    count = 60
    write_classes(
        place / "images",
        np.arange(count) % 7,
        sample_pixels(count, size=(64, 64)),
    )
    copy = place / "output" / "copy"
    words = ["prepare", f"folder:{place / 'images'}", "--short_side=16", f"--output={copy}"]

    stop_held(number, "cv2:imencode", words, place, after=20)

    assert 0 < len(list(copy.rglob("*.png"))) < count
    assert list(copy.rglob(".*")) == []

    rejected = commands.run(["evaluate", "w", f"--data=folder:{copy}"])
    assert rejected.code == 2

    resumed = commands.run(words)
    assert resumed.code == 0
    assert len(list(copy.rglob("*.png"))) == count


def test_a_signal_to_one_process_of_a_verb_ends_all(inputs, place):
    words = ["evaluate", inputs / "weights", f"--data=folder:{inputs / 'images'}"]
    files = [place / "held_0", place / "held_1"]
    environments = []
    for environment, file in zip(explicit(2), files, strict=True):
        environments.append(environment | {"HELD_FILE": str(file)})
    call = "vit_jax.evals.evaluate:make_evaluate"
    processes = commands.start_all(
        words,
        environments,
        PYTHONPATH=commands.HELD,
        HELD_CALL=call,
    )
    for process, file in zip(processes, files, strict=True):
        commands.wait_until(file.exists, process)

    processes[1].send_signal(signal.SIGTERM)
    first, second = commands.finish(processes)

    assert first.code == 75, first
    assert second.code == 75, second
    assert second.err == LINES[signal.SIGTERM][1]

    (line,) = first.err.splitlines()
    message = (
        r"vit-jax: process 1 of 2 \(.*\) was stopped by SIGTERM\. Start the same command again\."
    )
    assert re.fullmatch(message, line)


def find_shared_memory(pid):
    """Return the pattern of the files of a process in shared memory.

    It holds one open, `vit_jax-DIGITS.lock`, and the names of the others have these digits. Other
    tests of this machine have other files there. Its threads may close files meanwhile.
    """
    for descriptor in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            path = pathlib.Path(os.readlink(descriptor))
            if path.parent == SHARED_MEMORY and path.suffix == ".lock":
                return f"v*j*{path.stem[-5:]}*"
    raise AssertionError("the process has no file in shared memory")


@pytest.mark.parametrize("number", LINES)
def test_data_workers_end_with_the_verb(place, data_dir, number):
    """Workers are killed, or end by themselves soon; their shared memory is gone at once."""
    recipe = commands.pretraining(data_dir, "none", "input.num_workers=2")[3:]
    words = [
        "lr-range",
        "--config=configs/digits.py",
        *recipe,
        "--steps=20",
        f"--output={place}/output/rates.png",
    ]
    process = commands.start_held_at(
        "vit_jax.tools.sweeps.range_test:RangeTest",
        words,
        place,
    )
    workers = list_children(process.pid)
    pattern = find_shared_memory(process.pid)

    assert len(workers) >= 2
    assert list(SHARED_MEMORY.glob(pattern))

    process.send_signal(number)
    (outcome,) = commands.finish([process])

    code, message = LINES[number]
    assert outcome.code == code
    assert outcome.err == message

    commands.wait_until(lambda: not any(map(commands.is_running, workers)))
    assert list(SHARED_MEMORY.glob(pattern)) == []
    assert list_below(place / "output") == []


def list_children(pid):
    """Return the numbers of the processes that a process has started; its threads may end meanwhile."""
    numbers = []
    for thread in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            numbers += map(int, thread.read_text().split())
    return numbers
