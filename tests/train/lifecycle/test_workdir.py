"""Folders that a run accepts, and the run that a folder belongs to."""

import dataclasses
import errno
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from tests.rejections import rejects
from tests.train import small_runs as runs
from vit_jax.config import derive, load_recipe, to_dict
from vit_jax.storage.files import WriteError
from vit_jax.train import rate_search
from vit_jax.train.lifecycle import workdir as workdirs
from vit_jax.train.lifecycle.lock import WorkdirLock
from vit_jax.train.lifecycle.workdir import (
    claim,
    prepare_shared,
    reject_as_source,
    require_same_config,
    require_same_start,
)
from vit_jax.train.run_files import write_summary

FINETUNING = load_recipe("configs/finetune.py:any,own")
LONGER = dataclasses.replace(FINETUNING, total="40 epochs")


def claim_and_end(folder, config):
    """Claim a folder as a run that ends at once; return its path."""
    with claim(str(folder), config) as lock:
        return lock.folder


def read_start_file(folder):
    return json.loads((folder / "start.json").read_text())


def start(digit, num_train_examples=48):
    return {"parameters_sha256": digit * 64, "num_train_examples": num_train_examples}


def add_checkpoint(folder):
    (folder / "checkpoints" / "5").mkdir(parents=True)


def add_trial(folder):
    (folder / "search" / "learning_rate=0.3").mkdir(parents=True)
    write_summary(folder / "search" / "learning_rate=0.3", {"validation_loss": 1.0})


def add_interrupted_trial(folder):
    add_checkpoint(folder / "search" / "learning_rate=0.3")


def stored_config(folder):
    return json.loads((folder / "config.json").read_text())


def as_json(config):
    return json.loads(json.dumps(to_dict(config)))


def test_a_start_without_a_checkpoint_binds_nobody(tmp_path):
    """The start may have got as far as the folder of its first trial."""
    folder = tmp_path / "new" / "run"
    trial = rate_search.trial_config(FINETUNING, 0.01)

    assert claim_and_end(folder, FINETUNING) == folder
    assert [path.name for path in folder.iterdir()] == ["config.json"]

    require_same_start(folder, start("1"), "weights.npz")
    claim_and_end(folder / "search" / "learning_rate=0.01", trial)
    claim_and_end(folder, LONGER)
    require_same_start(folder, start("2"), "other.npz")

    assert stored_config(folder) == as_json(LONGER)
    assert read_start_file(folder) == {"init_from": "other.npz", **start("2")}


@pytest.fixture(params=[add_checkpoint, add_trial, add_interrupted_trial])
def begun(request, tmp_path):
    """The workdir of a run that has begun."""
    claim_and_end(tmp_path, FINETUNING)
    require_same_start(tmp_path, start("1"), "runs/pretrain")
    request.param(tmp_path)
    claim_and_end(tmp_path, FINETUNING)
    return tmp_path


def test_a_run_that_has_begun_rejects_another_config(begun):
    """In the search too: trials of two configs are no grid."""
    with rejects("total", "'20 epochs'.*'40 epochs'"):
        claim_and_end(begun, LONGER)

    assert stored_config(begun) == as_json(FINETUNING)


def test_a_run_that_has_begun_keeps_the_dtype_that_auto_has_chosen(tmp_path):
    chosen = derive(FINETUNING, {"model.compute_dtype": "float32"})
    automatic = derive(FINETUNING, {"model.compute_dtype": "auto"})
    other = derive(FINETUNING, {"model.compute_dtype": "bfloat16"})
    claim_and_end(tmp_path, chosen)
    add_checkpoint(tmp_path)

    require_same_config(tmp_path, automatic)
    with rejects("model.compute_dtype", "'float32'.*'bfloat16'"):
        require_same_config(tmp_path, other)


def test_a_run_that_has_begun_rejects_other_data_and_other_weights(begun):
    """The same weights from another place are the same; digests of files may be noted later."""
    before = (begun / "start.json").read_bytes()

    with rejects("num_train_examples", "48.*72"):
        require_same_start(
            begun,
            start("1", num_train_examples=72),
            "runs/pretrain",
        )
    with rejects("weights", "config.init_from='runs/pretrain'"):
        require_same_start(begun, start("2"), "runs/pretrain")

    require_same_start(begun, start("1"), "runs/moved")
    with_files = start("1") | {"train_files_sha256": "2" * 64}
    require_same_start(begun, with_files, "runs/pretrain")
    assert (begun / "start.json").read_bytes() == before


def claim_again(folder):
    claim_and_end(folder, FINETUNING)


def compare_start(folder):
    require_same_start(folder, start("1"), "")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", claim_again),
        ("start.json", compare_start),
    ],
    ids=["config", "start"],
)
def test_a_run_that_has_begun_rejects_damaged_files(begun, name, read):
    path = begun / name

    path.write_text('{"total": "20 ep')
    with rejects(name, "not JSON"):
        read(begun)

    # Opening a pipe would wait.
    path.unlink()
    os.mkfifo(path)
    with rejects(name, "not a regular file"):
        read(begun)


def test_a_run_that_has_begun_rejects_damaged_metrics(begun):
    (begun / "config.json").unlink()
    (begun / "metrics.jsonl").write_text("[]\n")

    with rejects("metrics.jsonl, line 1", "object"):
        claim_again(begun)


def start_racer(seed):
    return subprocess.Popen(
        [sys.executable, "-c", RACE, str(seed)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=pathlib.Path(__file__).parents[2],
    )


def send_line(processes, line):
    for process in processes:
        process.stdin.write(line)
        process.stdin.flush()


def read_lines(processes):
    return [process.stdout.readline() for process in processes]


def leave_lock(folder):
    """Leave the lock of a killed run in a folder."""
    folder.mkdir()
    owner = WorkdirLock(folder)._owner | {"started": "1"}
    (folder / "run.lock").write_text(json.dumps(owner))


def test_a_second_run_changes_nothing_of_the_first(tmp_path):
    """Not its config either, which nothing protects before the first checkpoint."""
    with claim(str(tmp_path), FINETUNING), rejects(str(tmp_path), "used by another run"):
        claim_and_end(tmp_path, LONGER)

    assert stored_config(tmp_path) == as_json(FINETUNING)

    claim_and_end(tmp_path, LONGER)


RACE = """
import dataclasses, pathlib, sys, time
from vit_jax.config import load_recipe
from vit_jax.train.lifecycle.workdir import claim

config = dataclasses.replace(load_recipe("configs/finetune.py:any,own"), seed=int(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    folder, at = line.split()
    while time.time() < float(at):
        pass
    try:
        with claim(folder, config):
            print("won", flush=True)
            sys.stdin.readline()
        print("left", flush=True)
    except ValueError as error:
        print(str(error), flush=True)
        sys.stdin.readline()
"""


@pytest.mark.processes
def test_of_two_processes_at_one_moment_one_writes_its_config(tmp_path):
    """Also where a killed run has left its lock.

    The other is told who has the workdir, and writes nothing.
    """
    processes = [start_racer(0), start_racer(1)]
    assert read_lines(processes) == ["ready\n", "ready\n"]

    for number in range(40):
        folder = tmp_path / str(number)
        if number % 2:
            leave_lock(folder)

        send_line(processes, f"{folder} {time.time() + 0.02}\n")
        lines = read_lines(processes)
        assert lines.count("won\n") == 1, lines

        winner = lines.index("won\n")
        owner = f"is used by another run: process {processes[winner].pid} on"
        assert owner in lines[1 - winner]
        assert {path.name for path in folder.iterdir()} == {"run.lock", "config.json"}
        assert stored_config(folder)["seed"] == winner

        send_line(processes, "\n")
        assert processes[winner].stdout.readline() == "left\n"
        assert [path.name for path in folder.iterdir()] == ["config.json"]

    for process in processes:
        process.communicate()


def test_options_of_the_machine_may_change(tmp_path):
    claim_and_end(tmp_path, FINETUNING)
    add_checkpoint(tmp_path)
    # On fewer devices.
    optimizer = dataclasses.replace(FINETUNING.optimizer, accumulation_steps=4)
    changed = dataclasses.replace(
        FINETUNING,
        logging=dataclasses.replace(FINETUNING.logging, tensorboard=False),
        checkpoint=dataclasses.replace(FINETUNING.checkpoint, keep_latest=5),
        model=dataclasses.replace(FINETUNING.model, remat="full"),
        optimizer=optimizer,
    )

    claim_and_end(tmp_path, changed)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (runs.config(), FINETUNING),
        (FINETUNING, runs.config()),
    ],
    ids=["pretrain", "finetune"],
)
def test_a_folder_of_the_other_kind_of_run_is_rejected(
    tmp_path,
    first,
    second,
):
    claim_and_end(tmp_path, first)
    add_checkpoint(tmp_path)

    with rejects(str(tmp_path), "other kind.*config.init_from"):
        claim_and_end(tmp_path, second)

    assert stored_config(tmp_path) == as_json(first)


# Sources of weights, and workdirs that are the same folder.
SAME = [
    ("run", "other/../run"),
    ("run", "link/finetuned"),
    ("run/weights.npz", "run"),
    ("link", "run"),
]


@pytest.mark.parametrize(("source", "workdir"), SAME)
def test_a_run_may_not_write_where_its_weights_come_from(
    tmp_path,
    monkeypatch,
    source,
    workdir,
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    for folder in ("run", "other"):
        pathlib.Path(folder).mkdir()

    pathlib.Path("link").symlink_to("run")
    for place in (source, f"~/{source}", str(tmp_path / source)):
        with rejects(f"config.init_from={place!r}", "same folder"):
            reject_as_source(place, workdir)


@pytest.mark.parametrize(
    ("source", "workdir"),
    [
        ("run", "run2"),
        ("run2", "run"),
        ("a/run", "b/run"),
        ("weights.npz", "run"),
        ("hf://owner/name", "."),
        (None, "."),
    ],
)
def test_folders_that_lie_apart(tmp_path, monkeypatch, source, workdir):
    monkeypatch.chdir(tmp_path)

    reject_as_source(source, workdir)


def test_links_in_a_circle_are_no_folder(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    reject_as_source(str(tmp_path / "loop"), str(tmp_path / "run"))

    with rejects(f"workdir {str(tmp_path / 'loop')!r}", "cannot be written"):
        claim_and_end(tmp_path / "loop", FINETUNING)


def test_a_folder_whose_files_cannot_be_deleted(tmp_path, monkeypatch):
    """The account of a bucket may be allowed to create only."""

    def deny(path, missing_ok=False):
        raise PermissionError(errno.EACCES, "access is denied", str(path))

    monkeypatch.setattr(pathlib.Path, "unlink", deny)
    with rejects(f"workdir {str(tmp_path)!r} cannot be written", "access is denied"):
        prepare_shared(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["config.json", "start.json", "metrics.jsonl", "summary.json", ".probe"],
)
@pytest.mark.parametrize("is_there", [False, True])
def test_nothing_is_written_through_links_of_a_workdir(
    tmp_path,
    name,
    is_there,
):
    folder = tmp_path / "theirs"
    target = tmp_path / "mine"
    folder.mkdir()

    if is_there:
        target.write_text("precious")

    (folder / name).symlink_to(target)
    if name == ".probe":  # any name that is predictable
        claim_and_end(folder, FINETUNING)
    else:
        with rejects(str(folder / name), "is a link"):
            claim_and_end(folder, FINETUNING)

    assert target.exists() is is_there
    assert not is_there or target.read_text() == "precious"


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, OSError), (errno.EACCES, ValueError)],
)
def test_a_full_disk_may_pass_and_a_forbidden_folder_may_not(
    tmp_path,
    monkeypatch,
    number,
    kind,
):
    """The former ends with 1, after which launchers try again, the latter with 2; neither leaves anything."""

    def fail(path, content):
        raise WriteError(number, os.strerror(number), str(path))

    monkeypatch.setattr(workdirs, "write_atomically", fail)
    with pytest.raises(kind) as raised:
        claim_and_end(tmp_path, FINETUNING)

    assert isinstance(raised.value, ValueError) is (kind is ValueError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["my\\run", "run[1]", "run*/seed", "a\udcff"])
def test_a_path_that_cannot_hold_checkpoints_is_rejected_before_anything_is_written(tmp_path, name):
    for use in (
        lambda: claim_and_end(tmp_path / name, FINETUNING),
        lambda: prepare_shared(tmp_path / name),
    ):
        message = r"^workdir='[^\n]* Choose another folder\.$"

        with pytest.raises(ValueError, match=message):
            use()

    assert not list(tmp_path.iterdir())


def test_too_many_open_files_do_not_blame_the_workdir(tmp_path, monkeypatch):
    def fail(*_):
        raise WriteError(errno.EMFILE, os.strerror(errno.EMFILE), str(tmp_path))

    monkeypatch.setattr(workdirs, "write_atomically", fail)
    with pytest.raises(OSError, match="Too many open files") as raised:
        prepare_shared(tmp_path / "run")

    assert not isinstance(raised.value, ValueError)
    assert str(WriteError(errno.EMFILE, "", "runs/a")).startswith("too many open files")
