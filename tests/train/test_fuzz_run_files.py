"""Thousands of damaged runs: each file is read as a run's, or rejected by one ValueError that names it."""

import json
import math
import os
import random
import shutil
import signal

import pytest

from vit_jax.checkpoint.reader import METADATA_DIGEST
from vit_jax.tools.figures import page
from vit_jax.tools.figures.curves import RunLog, read_run
from vit_jax.tools.sweeps.catalogue import STUDIES
from vit_jax.tools.sweeps.grid import make_grid
from vit_jax.tools.sweeps.results import build_rows, get_run_folder
from vit_jax.tools.sweeps.vtab import read_result
from vit_jax.train import rate_search, run_files
from vit_jax.train.lifecycle import workdir
from vit_jax.train.series import state_of
from vit_jax.weights import load_weights
from vit_jax.weights.load import read_class_names

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("tiny")]

NUM_CASES = 600  # damages of each file
SECONDS = 600  # against endless loops only
DEEP = "[" * 10_000 + "]" * 10_000
VALUES = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        0.5,
        1e308,
        -1e308,
        float("nan"),
        float("inf"),
        -float("inf"),
    ),
    *(
        2**53,
        2**63,
        -(2**64),
        10**400,
        "",
        "a",
        "\ud800",
        "\0",
        "\x1b[2J",
        "$\\frac$",
        "x" * 100_000,
        "1" * 400,
    ),
    *([], {}, [None], [[1], "a"], {"a": None}, {"": {"": []}}, "DEEP"),
)


@pytest.fixture(autouse=True)
def bounded():
    """No test here hangs."""

    def stop(*_):
        raise TimeoutError(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def run(tiny_run, tmp_path):
    """A copy of the tiny run, with the files that other kinds of run have."""
    folder = tmp_path / "run"
    shutil.copytree(tiny_run.workdir, folder)
    (folder / "start.json").write_text(
        json.dumps({"init_from": "x", "parameters_sha256": "0" * 64, "classes": ["a"]})
    )
    (folder / "classes.txt").write_text("".join(f"class {number}\n" for number in range(10)))

    return folder


def damage_bytes(rng, content):
    """One change of a few bytes, at a place drawn at random."""
    at = rng.randrange(len(content) + 1)
    end = rng.randrange(1, 50)
    flipped = bytes(byte ^ 1 << rng.randrange(8) for byte in content[at : at + 1])
    piece = rng.choice(
        (
            b"\0",
            b"\0" * 4096,
            b"\xff",
            b"\n",
            b"{",
            b"]",
            b'"',
            b"9" * 5000,
            b"\\ud800",
            rng.randbytes(9),
        )
    )

    return rng.choice(
        (
            content[:at] + flipped + content[at + 1 :],
            content[:at],
            content[:at] + content[at + end :],
            content[:at] + piece + content[at:],
            b"\xef\xbb\xbf" + content,
            content.decode().encode("utf-16"),
            content + content,
            b"",
        )
    )


def damage_values(rng, text):
    """One change of a JSON value at a place drawn at random: another type, no or another name, a name twice, depth."""
    value = json.loads(text)
    places = list(places_of(value))
    part, key = rng.choice(places) if places else ([value], 0)
    other = rng.choice(VALUES)
    kind = rng.randrange(6)

    if kind == 0:
        del part[key]
    elif kind == 1 and isinstance(part, dict):
        part[
            rng.choice(("", "step", "test_loss", "wall_seconds", "\ud800", "x" * 5000, "diverged"))
        ] = other
    else:
        part[key] = other

    changed = json.dumps(other if kind == 2 and rng.random() < 0.3 else value)
    if kind == 3 and changed.endswith("}"):
        changed = f"{changed[:-1]}, {json.dumps(str(key))}: {json.dumps(other)}}}"  # a name twice

    return changed.replace('"DEEP"', DEEP)


def places_of(value):
    for key, inner in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield value, key
        yield from places_of(inner)


def make_special(rng, file):
    """One of the kinds of file that are not regular, or one that is too large."""
    kind = rng.choice(("/dev/zero", "/dev/null", "/dev/full", "nowhere", ".", "pipe", "large"))
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "large":
        file.touch()
        os.truncate(file, 60 * 10**9)
    else:
        file.symlink_to(kind)


def damage(rng, file, content):
    """Replaces a file by a damaged one."""
    remove(file)
    chance = rng.random()

    if chance < 0.1:
        make_special(rng, file)
    elif chance < 0.4 or file.suffix == ".txt":
        file.write_bytes(damage_bytes(rng, content))
    elif file.suffix == ".jsonl":
        lines = content.decode().splitlines()
        at = rng.randrange(len(lines))
        lines[at] = damage_values(rng, lines[at])
        file.write_text("\n".join(lines) + "\n" * (chance < 0.9))
    else:
        file.write_text(damage_values(rng, content.decode()))


def remove(file):
    if file.is_dir() and not file.is_symlink():
        file.rmdir()
    else:
        file.unlink(missing_ok=True)


def rejection(reader, folder):
    """The error of a reader in the proper way; None where it reads the file."""
    try:
        reader(folder)
    except ValueError as error:
        is_proper = str(folder) in str(error) and len(str(error)) < 5000
        if is_proper and not isinstance(error, UnicodeError | json.JSONDecodeError):
            return error

        raise AssertionError("not the proper way") from error

    return None


def fuzz(
    folder,
    name,
    readers,
    seed,
    num_cases=NUM_CASES,
):
    """Calls all readers of a file for each damage; returns how often each of them rejected it."""
    file = folder / name
    rng = random.Random(seed)
    content = file.read_bytes()
    rejected = dict.fromkeys(readers, 0)

    for reader in readers:
        reader(folder)

    for case in range(num_cases):
        damage(rng, file, content)
        for reader in readers:
            try:
                rejected[reader] += rejection(reader, folder) is not None
            except Exception as error:
                kept = file.read_bytes()[:300] if file.is_file() else "special"
                raise AssertionError(f"case {case} of {name} in {reader}: {kept}") from error

    remove(file)
    file.write_bytes(content)

    return rejected


@pytest.fixture
def draw_nothing(monkeypatch):
    """Drawing takes most of the time of a page; test_fuzz_page draws."""
    monkeypatch.setattr(page, "_to_svg", lambda figure: "<svg></svg>")
    monkeypatch.setattr(
        page,
        "draw_curves",
        lambda runs, names: [run.curve(name) for run in runs for name in names],
    )


def make_page(folder):
    found = page.Report(
        run=read_run(folder, str(folder)),
        summary=run_files.read_summary(folder),
    )
    assert page.build_page(found).endswith("</html>\n")


def positions(folder):
    log: RunLog = read_run(folder, str(folder))
    for axis in ("images", "exaflops", "time"):
        log.locate_steps(axis, log.curve("train_loss").step_P)


def test_metrics(run, draw_nothing):
    readers = (
        make_page,
        positions,
        lambda folder: run_files.metrics_up_to(folder, 3),
        run_files.last_training_line,
    )
    rejected = fuzz(run, "metrics.jsonl", readers, seed=1)

    assert all(0 < number < NUM_CASES for number in rejected.values())


def test_summary(run, draw_nothing):
    grid = make_grid(STUDIES["pooling"], "digits_studies", [], {})
    in_study = get_run_folder(run.parent, grid.runs[0])
    in_study.parent.mkdir(parents=True)
    in_study.symlink_to(run)

    def of_study(folder):
        try:
            state_of(get_run_folder(folder.parent, grid.runs[0]))
            build_rows(grid, folder.parent)
        except ValueError as error:
            raise ValueError(
                f"{folder}: {error}"
            ) from None  # it names the run by its place in the study

    def of_search(folder):
        summary = run_files.read_summary(
            folder,
            ("test_loss",),
            ("test_accuracy",),
        )
        if summary is not None:
            found = {}
            for name, value in summary.items():
                found[name.replace("test", "validation")] = value

            rate_search.choose(
                {
                    0.1: found,
                    0.2: {rate_search.ACCURACY: 0.5, rate_search.LOSS: 1.0},
                }
            )

    rejected = fuzz(
        run,
        "summary.json",
        (make_page, read_result, of_search, of_study),
        seed=2,
    )
    assert all(0 < number < NUM_CASES for number in rejected.values())


def test_divergence(run):
    found = {
        "step": 4,
        "metrics": {"train_loss": math.nan},
        "records": [1, 2],
        "config": {"seed": 0},
    }
    (run / "divergence.json").write_text(json.dumps(found))
    (rejected,) = fuzz(
        run,
        "divergence.json",
        (run_files.read_divergence,),
        seed=8,
    ).values()

    assert 0 < rejected < NUM_CASES


def test_config(run, tiny_run, draw_nothing):
    readers = (
        make_page,
        positions,
        lambda folder: workdir.require_same_config(folder, tiny_run.config),
    )
    rejected = fuzz(run, "config.json", readers, seed=3)

    assert all(0 < number < NUM_CASES for number in rejected.values())


def test_pause(run):
    run_files.write_pause(run, {"fraction": 0.5, "steps": 20})
    assert (
        0
        < fuzz(run, "pause.json", [run_files.read_pause], seed=6)[run_files.read_pause]
        < NUM_CASES
    )


def test_start(run):
    rejected = fuzz(
        run,
        "start.json",
        [read := lambda folder: run_files.read_start(folder / "start.json")],
        seed=4,
    )

    assert 0 < rejected[read] < NUM_CASES


def test_class_names(run):
    def read(folder):
        try:
            return read_class_names(folder / "classes.txt")
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder}: {error}") from None  # its callers name the file

    assert fuzz(run, "classes.txt", [read], seed=6)[read] > 0


@pytest.mark.parametrize("is_digest_right", [True, False])
def test_metadata_of_a_checkpoint(run, is_digest_right):
    """With a digest any damage is noticed; without one, as before there were any, its structure is checked."""
    for folder in (run / "checkpoints").iterdir():
        if folder.name != "6":
            shutil.rmtree(folder)

    name = "checkpoints/6/metadata/metadata"
    if not is_digest_right:
        metadata = json.loads((run / name).read_text())
        del metadata[METADATA_DIGEST]
        (run / name).write_text(json.dumps(metadata))

    rejected = fuzz(
        run,
        name,
        [load_weights],
        seed=7 + is_digest_right,
        num_cases=400,
    )
    assert 0 < rejected[load_weights] <= 400
