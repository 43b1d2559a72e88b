"""A process that is lost, fails or hangs ends the others, with its name; the same command continues the run.

The processes find each other by what SLURM, JobSet and Open MPI leave in the environment.
"""

import re
import signal

import pytest

from tests.integration import commands
from tests.integration.commands import finish, pretraining, spoken, start_all
from tests.integration.launchers import explicit, jobset, open_mpi, slurm

pytestmark = pytest.mark.processes
FOREVER = (
    "total=5000 steps",
    "checkpoint.every=5 steps",
    "evaluation.every=5000 steps",
    "logging.every=1 steps",
)
#: What one process meets when it reads its twelfth batch.
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
    """Puts a statement into process 1: a function from it to the environment of all."""

    def put(statement):
        (tmp_path / "trouble").mkdir()
        (tmp_path / "trouble" / "sitecustomize.py").write_text(TROUBLE.format(trouble=statement))

        return {"PYTHONPATH": str(tmp_path / "trouble"), "TROUBLE_IN": "1"}

    return put


def ours(err):
    return [line for line in err.splitlines() if line.startswith("vit-jax:")]


def test_three_processes_through_kill_9_of_the_first_a_restart_as_two_and_sigterm_to_one(
    data_dir, tmp_path
):
    """With the first would go JAX's coordination service, and the others by an abort, if it had no process apart."""
    words = pretraining(data_dir, tmp_path, *FOREVER, "global_batch=12")
    processes = start_all(words, slurm(3), VIT_JAX_LOST_SECONDS="20")
    commands.wait_for_new_checkpoint(tmp_path, processes[0])
    processes[0].kill()
    outcomes = finish(processes)

    assert [outcome.code for outcome in outcomes] == [-signal.SIGKILL, 76, 76], outcomes
    assert spoken(outcomes[0].out)[0].startswith("3 processes by SLURM, the first at ")

    newest = commands.checkpoint_steps(tmp_path)[-1]
    for outcome in outcomes[1:]:
        (line,) = outcome.err.splitlines()

        assert line.startswith("vit-jax: process 0 of 3 (")
        assert "was lost after step " in line
        assert "no sign of life for 20 s" in line
        assert line.endswith(
            f"The last checkpoint is of step {newest}; start the same command again."
        )

    saving = ("checkpoint.every=2 steps", "evaluation.every=2 steps", "evaluation.global_batch=8")
    processes = start_all([*words, *(f"--config.{field}" for field in saving)], explicit(2))
    commands.wait_for_new_checkpoint(tmp_path, processes[0])
    processes[1].send_signal(signal.SIGTERM)  # while others save or evaluate
    outcomes = finish(processes)

    assert [outcome.code for outcome in outcomes] == [75] * 2, outcomes
    assert f"continuing from this workdir's checkpoint of step {newest}" in outcomes[0].out

    stopped_at = commands.checkpoint_steps(tmp_path)[-1]
    for outcome in outcomes:
        assert f"stopped after step {stopped_at} of 5000, which is saved" in outcome.err


def test_an_error_in_one_process_ends_both_with_its_words(data_dir, tmp_path, trouble):
    environment = trouble("raise ValueError('101 images cannot be decoded')")
    words = pretraining(data_dir, tmp_path / "run", *FOREVER)
    first, second = finish(start_all(words, jobset(2), **environment))

    assert (first.code, second.code) == (2, 2), (first, second)
    assert spoken(first.out)[0].startswith("2 processes by Kubernetes JobSet, the first at ")
    assert spoken(second.out) == [], "only the first process prints"
    assert ours(second.err) == ["vit-jax: 101 images cannot be decoded"]

    (line,) = ours(first.err)

    assert line.startswith("vit-jax: process 1 of 2 (")
    assert line.endswith("failed after step 10: ValueError: 101 images cannot be decoded")
    # That of step 10 was being written, behind the steps that followed.
    assert re.search(
        "The last checkpoint is of step (5|10); fix that and start the same command again.",
        first.err,
    )


def test_a_process_that_hangs_is_named_with_its_step_and_shows_its_stacks(
    data_dir, tmp_path, trouble
):
    words = pretraining(
        data_dir,
        tmp_path / "run",
        *FOREVER,
        "logging.hang_seconds=10",
        "checkpoint.every=5000 steps",
    )
    first, second = finish(start_all(words, open_mpi(2), **trouble("time.sleep(100000)")))

    assert (first.code, second.code) == (76, 76), (first, second)

    warning, end = ours(first.err)

    assert warning.startswith("vit-jax: hangs: process 1 of 2 (")
    assert "after step 10, while the others have reached step 11. At " in warning
    assert end.endswith("The run ends; start the same command again.")
    assert "is after step 10; its Python stacks:" in second.err
    assert "in troubled" in second.err
