"""The files of a run: another structure is one error that names file, line and rule."""

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


def test_metrics_are_read(workdir):
    assert [line["step"] for line in read_metrics(workdir)] == [1, 2, 3]
    assert metrics_up_to(workdir, 2) == f"{LINES[0]}\n{LINES[1]}\n"
    assert last_training_line(workdir) == json.loads(LINES[2])


def test_a_summary_is_read(workdir):
    summary = {
        "test_accuracy": None,
        "diverged": "Step 1: …",
        "by_batch": {"1": 2},
        "version_jax": "0.9",
    }
    assert read_summary(workdir) is None

    write_summary(workdir, summary)

    assert read_summary(workdir, ("test_accuracy", "test_f1"))["by_batch"] == {"1": 2}


def test_a_config_is_read(workdir):
    assert read_config(workdir)["data"] == "digits"


def build_lines(name, *values):
    return [f'{{"step": 1, "{name}": {value}}}' for value in values]


def list_damaged_lines():
    """Return lines of another structure, each with the rule that it breaks."""
    cases = list(COMMON.values())
    cases.append(('{"x": 1}', "must have step"))
    for step in ("0", "-1", "1.0", "true", '"1"', "null", "1" * 30):
        cases.append((f'{{"step": {step}}}', "step must be"))
    for line in build_lines("x", "null", "true", '"1"', "[]", "{}", "1" * 400):
        cases.append((line, "x must be a number"))
    for name in ("data", "error", "diverged"):
        cases.append((f'{{"step": 1, "{name}": "x"}}', f"{name} must be a number"))
    for line in build_lines("wall_seconds", "NaN", "Infinity", "-1"):
        cases.append((line, "wall_seconds must be .* 0"))
    cases.append(('{"step": 1, "x\\u001b[2J": null}', r"x\\x1b\[2J must be a number"))
    cases.append(('{"step": 1}' + " " * 2**20, "longer than 1,048,576"))
    return cases


def read_first_step(workdir):
    return metrics_up_to(workdir, 1)


def test_a_last_line_that_is_not_complete_is_skipped(workdir):
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write(f"{LINES[0][:9]}{ZEROS}")

    assert len(read_metrics(workdir)) == 3
    assert metrics_up_to(workdir, 9).endswith(f"{LINES[2]}\n")

    (workdir / "metrics.jsonl").unlink()
    assert read_metrics(workdir) == []


@pytest.mark.parametrize(("line", "rule"), list_damaged_lines())
def test_a_line_of_another_structure_is_named(workdir, line, rule):
    (workdir / "metrics.jsonl").write_text(f"{LINES[0]}\n{line}\n{LINES[2]}\n")

    for read in (read_metrics, read_first_step, last_training_line):
        with rejects("metrics.jsonl, line 2 is damaged", rule):
            read(workdir)


def list_damaged_files():
    """Return names and contents of files of another structure, each with the rule that it breaks."""
    cases = []
    for name in ("config", "summary", "start"):
        for content, rule in COMMON.values():
            cases.append((name, content, rule))
    for value in ("0", "null", "[]", "8.0", "true", "9" * 20):
        cases.append(("config", f'{{"global_batch": {value}}}', "global_batch"))
    for value in ('"1"', "[]", "{}", "true", "9" * 400):
        cases.append(("summary", f'{{"test_accuracy": {value}}}', "test_accuracy"))

    return [
        *cases,
        ("config", '{"data": []}', "data must be"),
        ("config", '{"model": null}', "model must be"),
        ("start", '{"init_from": "x"}', "parameters_sha256"),
        ("start", '{"parameters_sha256": 1}', "parameters_sha256"),
        ("summary", '{"test_loss": "a"}', "test_loss"),
        ("summary", '{"diverged": 1}', "diverged must be text"),
        ("summary", '{"wall_seconds": Infinity}', "wall_seconds"),
        ("summary", '{"parameters": null}', "parameters"),
        ("summary", '{"test_loss": 1}', "it must have test_accuracy or test_f1"),
    ]


def read_file(workdir, name):
    if name == "config":
        return read_config(workdir)
    if name == "summary":
        return read_summary(workdir, ("test_accuracy", "test_f1"))
    return read_start(workdir / "start.json")


@pytest.mark.parametrize(("name", "content", "rule"), list_damaged_files())
def test_another_structure_is_named(workdir, name, content, rule):
    (workdir / f"{name}.json").write_text(content)

    with rejects(f"{name}.json is damaged", rule):
        read_file(workdir, name)


def test_large_files_are_named(workdir, monkeypatch):
    monkeypatch.setattr(run_files, "MAX_METRICS_BYTES", 20)

    with rejects("metrics.jsonl", "larger than 20 bytes"):
        read_metrics(workdir)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("metrics.jsonl", read_metrics),
        ("summary.json", read_summary),
        ("config.json", read_config),
    ],
)
def test_special_files_are_named(workdir, name, read):
    (workdir / name).unlink(missing_ok=True)
    os.mkfifo(workdir / name)

    with rejects(name, "not a regular file"):
        read(workdir)


def test_curves_are_drawn_of_sound_files(workdir):
    assert len(read_runs([str(workdir)])) == 1

    (workdir / "metrics.jsonl").write_text("[]\n")
    with rejects("metrics.jsonl, line 1", "object"):
        read_runs([str(workdir)])
