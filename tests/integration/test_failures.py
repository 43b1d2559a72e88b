"""A process that is lost, fails or hangs ends the others, and the same command resumes the run.

The processes find each other by the environment of SLURM, JobSet and Open MPI.
"""

import os
import re
import signal

import pytest

from tests.integration import commands
from tests.integration.commands import finish, pretraining, spoken, start_all
from tests.integration.launchers import explicit, jobset, open_mpi, slurm
from tests.tiny import ROOT, flags

pytestmark = pytest.mark.processes
FOREVER = (
    "total=5000 steps",
    "checkpoint.every=5 steps",
    "evaluation.every=5000 steps",
    "logging.every=1 steps",
)
# A process that runs the statement when it reads its twelfth batch.
TROUBLE = """
import os, time
if os.environ.get("TROUBLE_IN") in (os.environ.get("JOB_INDEX"), os.environ.get("OMPI_COMM_WORLD_RANK")):
    from vit_jax.data.unreadable import UnreadableLog

    batches, update = [], UnreadableLog.update

    def troubled(self, batch):
        batches.append(batch)
        if len(batches) == 12:
            {trouble}
        update(self, batch)

    UnreadableLog.update = troubled
"""


@pytest.fixture
def trouble(tmp_path):
    """Return a function that puts a statement into process 1; it returns the environment of all."""

    def put(statement):
        folder = tmp_path / "trouble"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(TROUBLE.format(trouble=statement))
        return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "TROUBLE_IN": "1"}

    return put


def list_messages(err):
    return [line for line in err.splitlines() if line.startswith("vit-jax:")]


def test_a_killed_first_process_a_resumed_run_of_two_and_sigterm_to_one(data_dir, tmp_path):
    """JAX's coordination service is a further process.

    In the first process it would end with it, and abort the others.
    """
    words = pretraining(data_dir, tmp_path, *FOREVER, "global_batch=12")

    processes = start_all(words, slurm(3), VIT_JAX_LOST_SECONDS="20")
    commands.wait_for_new_checkpoint(tmp_path, processes[0])
    processes[0].kill()
    first, *others = finish(processes)

    assert first.code == -signal.SIGKILL, first
    assert spoken(first.out)[0].startswith("3 processes by SLURM, the first at ")

    newest = commands.checkpoint_steps(tmp_path)[-1]
    end = f"The last checkpoint is of step {newest}; start the same command again."
    for outcome in others:
        assert outcome.code == 76, outcome
        (line,) = outcome.err.splitlines()
        assert line.startswith("vit-jax: process 0 of 3 (")
        assert "was lost after step " in line
        assert "no sign of life for 20 s" in line
        assert line.endswith(end)

    check_stop_of_two_processes(words, tmp_path, newest)


def check_stop_of_two_processes(words, workdir, newest):
    """Resume in two processes, and send SIGTERM to one while they save or evaluate."""
    often = flags("checkpoint.every=2 steps", "evaluation.every=2 steps")
    batch = flags("evaluation.global_batch=8")

    processes = start_all([*words, *often, *batch], explicit(2))
    commands.wait_for_new_checkpoint(workdir, processes[0])
    processes[1].send_signal(signal.SIGTERM)
    outcomes = finish(processes)

    assert f"continuing from this workdir's checkpoint of step {newest}" in outcomes[0].out
    last_step = commands.checkpoint_steps(workdir)[-1]
    for outcome in outcomes:
        assert outcome.code == 75, outcome
        assert f"stopped after step {last_step} of 5000, which is saved" in outcome.err


def test_an_error_in_one_process_ends_both_with_its_words(
    data_dir,
    tmp_path,
    trouble,
):
    """The checkpoint of step 10 may still be written, behind the steps that follow."""
    environment = trouble("raise ValueError('101 images cannot be decoded')")
    words = pretraining(data_dir, tmp_path / "run", *FOREVER)

    first, second = finish(start_all(words, jobset(2), **environment))

    assert first.code == 2, first
    assert second.code == 2, second
    assert spoken(first.out)[0].startswith("2 processes by Kubernetes JobSet, the first at ")
    assert spoken(second.out) == [], "only the first process prints"
    assert list_messages(second.err) == ["vit-jax: 101 images cannot be decoded"]

    (line,) = list_messages(first.err)
    assert line.startswith("vit-jax: process 1 of 2 (")
    assert line.endswith("failed after step 10: ValueError: 101 images cannot be decoded")

    rule = "The last checkpoint is of step (5|10); fix that and start the same command again."
    assert re.search(rule, first.err)


def test_a_process_that_hangs_is_named_with_its_step_and_shows_its_stacks(
    data_dir,
    tmp_path,
    trouble,
):
    environment = trouble("time.sleep(100000)")
    words = pretraining(
        data_dir,
        tmp_path / "run",
        *FOREVER,
        "logging.hang_seconds=30",
        "checkpoint.every=5000 steps",
    )

    first, second = finish(start_all(words, open_mpi(2), **environment))

    assert first.code == 76, first
    assert second.code == 76, second

    warning, end = list_messages(first.err)
    assert warning.startswith("vit-jax: hangs: process 1 of 2 (")
    assert "after step 10, while the others have reached step 11. At " in warning
    assert end.endswith("The run ends; start the same command again.")
    assert "is after step 10; its Python stacks:" in second.err
    assert "in troubled" in second.err
