"""A process that is lost, fails or hangs ends the others, with its name; the same command goes on."""

import re
import signal
import time

import pytest

from tests.integration import commands
from tests.integration.commands import finish, spoken
from tests.integration.launchers import explicit, open_mpi, slurm

pytestmark = pytest.mark.processes
OPTIONS = ("checkpoint.every=5 steps", "evaluation.every=5000 steps", "logging.every=1 steps")
FOREVER = (*OPTIONS, "total=5000 steps")
SOON = {"VIT_JAX_LOST_SECONDS": "10"}
#: What one process meets when it reads its twelfth batch.
TROUBLE = """
import os, time
if os.environ.get("TROUBLE_IN") in (os.environ.get("VIT_JAX_PROCESS_ID"), os.environ.get("OMPI_COMM_WORLD_RANK")):
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
    """Puts a statement into one process: a function from it to the environment of all."""

    def put(process, statement):
        (tmp_path / "trouble").mkdir()
        (tmp_path / "trouble" / "sitecustomize.py").write_text(TROUBLE.format(trouble=statement))
        return {"PYTHONPATH": str(tmp_path / "trouble"), "TROUBLE_IN": str(process)}

    return put


def ours(err):
    return [line for line in err.splitlines() if line.startswith("vit-jax:")]


def test_four_processes_through_kill_9_of_one_a_restart_and_sigterm_to_one(command, tmp_path):
    processes = command.start_all(tmp_path, explicit(4), *FOREVER, **SOON)
    commands.wait_for_new_checkpoint(tmp_path, processes[0])
    processes[2].kill()
    killed_at = time.monotonic()
    results = finish(processes)
    assert time.monotonic() - killed_at < 60
    assert [code for *_, code in results] == [76, 76, -signal.SIGKILL, 76], results
    newest = commands.checkpoint_steps(tmp_path)[-1]
    for process in (0, 1, 3):
        (line,) = results[process][1].splitlines()
        assert line.startswith("vit-jax: process 2 of 4 (")
        assert "was lost after step " in line
        assert line.endswith(f"The last checkpoint is of step {newest}; start the same command again.")

    saving = ("checkpoint.every=2 steps", "evaluation.every=2 steps", "evaluation.global_batch=8")
    processes = command.start_all(tmp_path, explicit(4), *FOREVER, *saving)
    commands.wait_for_new_checkpoint(tmp_path, processes[0])
    processes[3].send_signal(signal.SIGTERM)  # while others save or evaluate
    asked_at = time.monotonic()
    results = finish(processes)
    assert time.monotonic() - asked_at < 30, "the shortest notice that a cloud gives"
    assert [code for *_, code in results] == [75] * 4, results
    assert f"continuing from this workdir's checkpoint of step {newest}" in results[0][0]
    stopped_at = commands.checkpoint_steps(tmp_path)[-1]
    for _, err, _ in results:
        assert f"stopped after step {stopped_at} of 5000, which is saved" in err


def test_kill_9_of_the_first_process(command, tmp_path):
    """With it would go JAX's coordination service, and the others by an abort, if it were not in a process apart."""
    processes = command.start_all(tmp_path, slurm(2), *FOREVER, **SOON)
    commands.wait_for_new_checkpoint(tmp_path, processes[0])
    processes[0].kill()
    (out, _, code), (_, err, other) = finish(processes)
    assert (code, other) == (-signal.SIGKILL, 76), err
    assert spoken(out)[0].startswith("2 processes by SLURM, the first at ")
    (line,) = err.splitlines()
    assert line.startswith("vit-jax: process 0 of 2 (")
    assert "no sign of life for 10 s" in line


def test_an_error_in_one_process_ends_both_with_its_words(command, tmp_path, trouble):
    environment = trouble(1, "raise ValueError('101 images cannot be decoded')")
    (_, first, code), (_, second, other) = finish(command.start_all(tmp_path, explicit(2), *FOREVER, **environment))
    assert (code, other) == (2, 2), first + second
    assert ours(second) == ["vit-jax: 101 images cannot be decoded"]
    (line,) = ours(first)
    assert line.startswith("vit-jax: process 1 of 2 (")
    assert line.endswith("failed after step 10: ValueError: 101 images cannot be decoded")
    # That of step 10 was being written, behind the steps that followed.
    assert re.search("The last checkpoint is of step (5|10); mend that and start the same command again.", first)


def test_a_process_that_hangs_is_named_with_its_step_and_shows_its_stacks(command, tmp_path, trouble):
    environment = trouble(1, "time.sleep(1000)")
    options = (*FOREVER, "logging.hang_seconds=4", "checkpoint.every=5000 steps")
    (_, first, code), (_, second, other) = finish(command.start_all(tmp_path, open_mpi(2), *options, **environment))
    assert (code, other) == (76, 76), first + second
    warning, end = ours(first)
    assert warning.startswith("vit-jax: hangs: process 1 of 2 (")
    assert "after step 10, while the others have reached step 11. At " in warning
    assert end.endswith("The run ends; start the same command again.")
    assert "stands after step 10; its Python stacks:" in second
    assert "in troubled" in second


def test_sigterm_before_the_first_step(command, tmp_path):
    process = command.start(tmp_path, *FOREVER)
    for line in process.stdout:
        if "starting from scratch" in line:  # and next it compiles
            break
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert err == ("vit-jax: stopped before the first step: there is nothing to save; the same command starts again\n")
