"""Outputs that would change a run are rejected."""

import pytest

from tests.rejections import rejects
from vit_jax.checkpoint.run_folders import RUN_FILES, is_run, require_outside_runs
from vit_jax.train import run_files
from vit_jax.train.lifecycle import lock


def make_run(folder, *files):
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")

    return folder


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["config.json", "start.json"], True),
        (["metrics.jsonl"], True),
        (["checkpoints/4/x"], True),
        (["checkpoints/0/x", "checkpoints/12/x"], True),
        (["checkpoints/0/x", "README.md"], False),
        (["config.json", "model.safetensors"], False),
        (["checkpoints/notes.txt"], False),
        (["checkpoints"], False),
    ],
)
def test_what_is_a_run(tmp_path, files, expected):
    assert is_run(make_run(tmp_path / "run", *files)) == expected


def test_files_of_runs_are_all_known():
    names = {
        getattr(run_files, name)
        for name in dir(run_files)
        if name.endswith("_FILE") and name[0] != "_"
    }

    assert set(RUN_FILES) == names | {lock.FILE}


@pytest.mark.parametrize(
    "target",
    [
        "",
        "config.json",
        "summary.json",
        "run.lock",
        "checkpoints",
        "checkpoints/7",
        "checkpoints/new/a.npz",
        "../link",
    ],
)
def test_what_would_change_a_run(tmp_path, target):
    run = make_run(
        tmp_path / "run",
        "config.json",
        "start.json",
        "checkpoints/7/x",
    )
    (tmp_path / "link").symlink_to(run)

    with rejects(f"--output={target}", f"'{run}' is the workdir of a run.*Choose another"):
        require_outside_runs(run / target, f"--output={target}")


@pytest.mark.parametrize(
    "target",
    ["run/report", "run/report.html", "run/a.npz", "other", "other/config.json", "run2"],
)
def test_what_leaves_a_run_as_it_is(tmp_path, target):
    make_run(tmp_path / "run", "config.json", "start.json")
    make_run(
        tmp_path / "other",
        "config.json",
        "checkpoints/0/x",
    )
    require_outside_runs(tmp_path / target, "x")
