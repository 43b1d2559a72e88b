"""The files of a run: another structure is one error that names file, line and rule, whoever reads them."""

import json
import os

import pytest

from tests.rejections import rejects
from vit_jax.tools.figures.curves import read_runs
from vit_jax.train import run_files
from vit_jax.train.run_files import (
    last_training_line,
    metrics_up_to,
    read_config,
    read_metrics,
    read_start,
    read_summary,
    write_summary,
)

LINES = (
    '{"step": 1, "train_loss": 2.5}',
    '{"step": 2, "test_loss": NaN}',
    '{"step": 3, "train_loss": 1, "mfu": 1e-3}',
)
ZEROS = "\0" * 10
DEEP = "[" * 10_000
COMMON = {
    "empty": ("", "not JSON"),
    "zeros": (ZEROS, "not JSON"),
    "deep": (DEEP, "deeper"),
    "list": ("[]", "object"),
}


@pytest.fixture
def workdir(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"global_batch": 8, "data": "digits", "model": {"name": "x"}}'
    )
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in LINES))

    return tmp_path


def test_what_was_written_is_read(workdir):
    assert [line["step"] for line in read_metrics(workdir)] == [1, 2, 3]
    assert metrics_up_to(workdir, 2) == "".join(f"{line}\n" for line in LINES[:2])
    assert last_training_line(workdir) == json.loads(LINES[2])
    assert read_summary(workdir) is None

    write_summary(
        workdir,
        {
            "test_accuracy": None,
            "diverged": "Step 1: …",
            "by_batch": {"1": 2},
            "version_jax": "0.9",
        },
    )

    assert read_summary(workdir, ("test_accuracy", "test_f1"))["by_batch"] == {"1": 2}
    assert read_config(workdir)["data"] == "digits"


def test_a_last_line_that_is_not_complete_is_skipped(workdir):
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write(f"{LINES[0][:9]}{ZEROS}")

    assert len(read_metrics(workdir)) == 3
    assert metrics_up_to(workdir, 9).endswith(f"{LINES[2]}\n")

    (workdir / "metrics.jsonl").unlink()
    assert read_metrics(workdir) == []


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        *COMMON.values(),
        ('{"x": 1}', "must have step"),
        *(
            (f'{{"step": {step}}}', "step must be")
            for step in ("0", "-1", "1.0", "true", '"1"', "null", "1" * 30)
        ),
        *(
            (f'{{"step": 1, "x": {x}}}', "x must be a number")
            for x in ("null", "true", '"1"', "[]", "{}", "1" * 400)
        ),
        *(
            (f'{{"step": 1, "{name}": "x"}}', f"{name} must be a number")
            for name in ("data", "error", "diverged")
        ),
        *(
            (f'{{"step": 1, "wall_seconds": {x}}}', "wall_seconds must be .* 0")
            for x in ("NaN", "Infinity", "-1")
        ),
        ('{"step": 1, "x\\u001b[2J": null}', r"x\\x1b\[2J must be a number"),
        ('{"step": 1}' + " " * 2**20, "longer than 1,048,576"),
    ],
)
def test_a_line_of_another_structure_is_named(workdir, line, rule):
    (workdir / "metrics.jsonl").write_text(f"{LINES[0]}\n{line}\n{LINES[2]}\n")
    for read in (read_metrics, lambda folder: metrics_up_to(folder, 1), last_training_line):
        with rejects("metrics.jsonl, line 2 is damaged", rule):
            read(workdir)


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        *((name, *case) for name in ("config", "summary", "start") for case in COMMON.values()),
        *(
            ("config", f'{{"global_batch": {x}}}', "global_batch")
            for x in ("0", "null", "[]", "8.0", "true", "9" * 20)
        ),
        ("config", '{"data": []}', "data must be"),
        ("config", '{"model": null}', "model must be"),
        ("start", '{"init_from": "x"}', "parameters_sha256"),
        ("start", '{"parameters_sha256": 1}', "parameters_sha256"),
        *(
            ("summary", f'{{"test_accuracy": {x}}}', "test_accuracy")
            for x in ('"1"', "[]", "{}", "true", "9" * 400)
        ),
        ("summary", '{"test_loss": "a"}', "test_loss"),
        ("summary", '{"diverged": 1}', "diverged must be text"),
        ("summary", '{"wall_seconds": Infinity}', "wall_seconds"),
        ("summary", '{"parameters": null}', "parameters"),
        ("summary", '{"test_loss": 1}', "it must have test_accuracy or test_f1"),
    ],
)
def test_another_structure_is_named(workdir, name, content, rule):
    (workdir / f"{name}.json").write_text(content)
    read = {
        "config": read_config,
        "summary": lambda folder: read_summary(folder, ("test_accuracy", "test_f1")),
        "start": lambda folder: read_start(folder / "start.json"),
    }[name]

    with rejects(f"{name}.json is damaged", rule):
        read(workdir)


def test_special_files_and_large_ones_are_named(workdir, monkeypatch):
    monkeypatch.setattr(run_files, "MAX_METRICS_BYTES", 20)
    with rejects("metrics.jsonl", "larger than 20 bytes"):
        read_metrics(workdir)

    for name, read in (
        ("metrics.jsonl", read_metrics),
        ("summary.json", read_summary),
        ("config.json", read_config),
    ):
        (workdir / name).unlink(missing_ok=True)
        os.mkfifo(workdir / name)

        with rejects(name, "not a regular file"):
            read(workdir)


def test_curves_are_drawn_of_sound_files(workdir):
    assert len(read_runs([str(workdir)])) == 1

    (workdir / "metrics.jsonl").write_text("[]\n")
    with rejects("metrics.jsonl, line 1", "object"):
        read_runs([str(workdir)])
