"""Runs of the command, in this process or in others.

Another process is used where signals, kills or several processes are the subject.
"""

import contextlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from typing import NamedTuple

from tests.tiny import RECIPE, ROOT, RUN, flags
from vit_jax import cli

HELD = str(pathlib.Path(__file__).parent / "held")
HANG_SECONDS = 600  # far above what any of these runs takes on a busy machine


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def pretraining(data_dir, workdir, *overrides):
    """Return the words of a pre-training on the digits with the tiny network."""
    fields = flags(*RUN, f"input.data_dir={data_dir}", *overrides)
    return ["pretrain", f"--config={RECIPE}", f"--workdir={workdir}", *fields]


def run(words):
    """Run any verb in this process, with its eight devices."""
    out = io.StringIO()
    err = io.StringIO()
    code = 0

    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(words)
        except SystemExit as end:
            code = end.code

    return Outcome(code, out.getvalue(), err.getvalue())


def succeed(words):
    """Run a verb that ends without an error; return its output."""
    outcome = run(words)

    assert outcome.code == 0, outcome.err
    return outcome.out


def rejected(words):
    """Run a verb whose words are wrong; return the message."""
    outcome = run(words)

    assert outcome.code == 2
    assert outcome.err.startswith("vit-jax: ")
    return outcome.err


def start(words, *, devices=8, program=("-m", "vit_jax"), **environment):
    """Start any verb in a process, in the background."""
    return subprocess.Popen(
        [sys.executable, *STRICT, *program, *words],
        cwd=ROOT,
        env=environment_of(devices) | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_held(words, folder):
    """Start a verb that waits for a signal at the first new checkpoint in the folder's workdir."""
    before = " ".join(map(str, checkpoint_steps(folder)))
    return start(
        words,
        PYTHONPATH=HELD,
        HELD_FOLDER=str(folder),
        HELD_BEFORE=before,
    )


def start_held_at(call, words, folder, **environment):
    """Start a verb that waits for a signal after the first `call`, such as "os:fsync".

    Returns when the verb waits, which it shows by the file `held`.
    """
    file = folder / "held"
    file.unlink(missing_ok=True)
    process = start(
        words,
        devices=1,
        PYTHONPATH=HELD,
        HELD_CALL=call,
        HELD_FILE=str(file),
        **environment,
    )
    wait_until(file.exists, process)
    file.unlink()

    return process


# The filters of warnings in pyproject.toml.
STRICT = ("-W", "error", "-W", "ignore:Error reading persistent compilation cache entry")


def environment_of(devices):
    """Return the environment of a process with this number of devices."""
    pattern = r"(?<=device_count=)\d+"
    xla_flags = re.sub(pattern, str(devices), os.environ["XLA_FLAGS"])
    return os.environ | {"XLA_FLAGS": xla_flags}


def start_all(words, environments, *, devices=1, **environment):
    """Start the processes of one run, one for each environment of `launchers`."""
    return [start(words, devices=devices, **(launch | environment)) for launch in environments]


SERIES = """
import json, sys
from vit_jax import cli

for words in json.loads(sys.argv[1]):
    cli.main(words)
    for stream in (sys.stdout, sys.stderr):
        print(end=chr(12), file=stream, flush=True)
"""


SEPARATOR = chr(12)


"""Character that ends the output of each verb of a series."""


def run_series(verbs, environments, *, devices):
    """Run verbs one after the other in the same processes.

    Returns for each verb its outcomes in all processes.
    """
    words = json.dumps([[str(word) for word in words] for words in verbs])
    outcomes = finish(
        start_all(
            [words],
            environments,
            devices=devices,
            program=("-c", SERIES),
        )
    )

    of_processes = []
    for outcome in outcomes:
        outs = outcome.out.split(SEPARATOR)
        errs = outcome.err.split(SEPARATOR)
        assert len(outs) >= len(verbs), outcomes
        pairs = zip(outs, errs, strict=True)
        of_processes.append([Outcome(outcome.code, out, err) for out, err in pairs])

    of_verbs = list(zip(*of_processes, strict=True))
    return of_verbs[: len(verbs)]


def finish(processes):
    """Wait for all processes; return the outcome of each."""
    outcomes = []
    for process in processes:
        out, err = process.communicate(timeout=HANG_SECONDS)
        outcomes.append(Outcome(process.returncode, out, err))
    return outcomes


def kill(process):
    process.kill()
    process.communicate()


def spoken(out):
    """Return lines of the run itself.

    Gloo's threads write to the output in pieces, which may come between each other.
    """
    other = r"^\s*$|\[Gloo\]|peer ranks"
    return [line for line in out.splitlines() if not re.search(other, line)]


def summary(workdir):
    return json.loads((pathlib.Path(workdir) / "summary.json").read_text())


def metrics(workdir):
    text = (pathlib.Path(workdir) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def losses(workdir):
    """Return the training loss by step."""
    losses_by_step = {}
    for line in metrics(workdir):
        if "train_loss" in line:
            losses_by_step[line["step"]] = line["train_loss"]
    return losses_by_step


def curve(workdir):
    """Return step, training loss and test loss of each line of the metrics."""
    rows = []
    for line in metrics(workdir):
        rows.append((line["step"], line.get("train_loss"), line.get("test_loss")))
    return rows


def checkpoint_steps(workdir):
    return sorted(int(path.name) for path in checkpoints(workdir) if path.name.isdigit())


def checkpoints(workdir):
    """Return all checkpoints; unfinished ones have longer names than a number."""
    return list((pathlib.Path(workdir) / "checkpoints").glob("*"))


def is_running(pid):
    """Return whether a process has not ended; one that waits to be collected has."""
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def wait_until(condition, process=None):
    """Return when the condition holds; a process, if one is given, must be alive until then."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        if process is not None:
            assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "hangs"

        time.sleep(0.01)


def wait_for_new_checkpoint(workdir, process):
    before = checkpoint_steps(workdir)
    wait_until(lambda: checkpoint_steps(workdir) != before, process)
