"""Runs of the command: in this process where their outcome is the subject, else in processes of their own."""

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
    """Words of a pre-training on the digits with the tiny network."""
    fields = flags(*RUN, f"input.data_dir={data_dir}", *overrides)
    return ["pretrain", f"--config={RECIPE}", f"--workdir={workdir}", *fields]


def run(words):
    """Any verb in this process, with its eight devices."""
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
    """What the verb prints."""
    outcome = run(words)

    assert outcome.code == 0, outcome.err

    return outcome.out


def rejected(words):
    """The message of a verb whose words are wrong."""
    outcome = run(words)

    assert outcome.code == 2
    assert outcome.err.startswith("vit-jax: ")

    return outcome.err


def start(words, *, devices=8, program=("-m", "vit_jax"), **environment):
    """Any verb in a process of its own, in the background."""
    return subprocess.Popen(
        [sys.executable, *STRICT, *program, *words],
        cwd=ROOT,
        env=environment_of(devices) | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_held(words, folder):
    """As `start`, but at the first new checkpoint in the folder's workdir it waits for a signal."""
    before = " ".join(map(str, checkpoint_steps(folder)))
    return start(words, PYTHONPATH=HELD, HELD_FOLDER=str(folder), HELD_BEFORE=before)


def start_held_at(call, words, folder, **environment):
    """As `start`, but after the first `call`, such as "os:fsync", it makes the file held and waits for a signal."""
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


# As in pyproject.toml.
STRICT = ("-W", "error", "-W", "ignore:Error reading persistent compilation cache entry")


def environment_of(devices):
    return os.environ | {
        "XLA_FLAGS": re.sub(r"(?<=device_count=)\d+", str(devices), os.environ["XLA_FLAGS"])
    }


def start_all(words, environments, *, devices=1, **environment):
    """The processes of one run, one for each of `launchers`' environments."""
    return [start(words, devices=devices, **(own | environment)) for own in environments]


SERIES = """
import json, sys
from vit_jax import cli

for words in json.loads(sys.argv[1]):
    cli.main(words)
    for stream in (sys.stdout, sys.stderr):
        print(end=chr(12), file=stream, flush=True)
"""


def run_series(verbs, environments, *, devices):
    """Verbs that the same processes run one after the other: for each of these, the outcomes in every process."""
    words = [json.dumps([[str(word) for word in words] for words in verbs])]
    outcomes = finish(start_all(words, environments, devices=devices, program=("-c", SERIES)))

    assert all(outcome.out.count(chr(12)) >= len(verbs) - 1 for outcome in outcomes), outcomes

    apart = [
        zip(outcome.out.split(chr(12)), outcome.err.split(chr(12)), strict=True)
        for outcome in outcomes
    ]
    made = [
        [Outcome(outcome.code, *texts) for texts in pairs]
        for outcome, pairs in zip(outcomes, apart, strict=True)
    ]

    return list(zip(*made, strict=True))[: len(verbs)]


def finish(processes):
    """The outcome of each, once all have ended."""
    results = [process.communicate(timeout=HANG_SECONDS) for process in processes]
    return [
        Outcome(process.returncode, *result)
        for process, result in zip(processes, results, strict=True)
    ]


def kill(process):
    process.kill()
    process.communicate()


def spoken(out):
    """Lines of the run itself: Gloo's threads write to the output in pieces, which may come between each other."""
    return [line for line in out.splitlines() if not re.search(r"^\s*$|\[Gloo\]|peer ranks", line)]


def summary(workdir):
    return json.loads((pathlib.Path(workdir) / "summary.json").read_text())


def metrics(workdir):
    return [
        json.loads(line)
        for line in (pathlib.Path(workdir) / "metrics.jsonl").read_text().splitlines()
    ]


def losses(workdir):
    """Training loss by step."""
    return {line["step"]: line["train_loss"] for line in metrics(workdir) if "train_loss" in line}


def curve(workdir):
    return [
        (line["step"], line.get("train_loss"), line.get("test_loss")) for line in metrics(workdir)
    ]


def checkpoint_steps(workdir):
    return sorted(int(path.name) for path in checkpoints(workdir) if path.name.isdigit())


def checkpoints(workdir):
    """Those that are being written too, which have longer names than a number."""
    return list((pathlib.Path(workdir) / "checkpoints").glob("*"))


def wait_until(condition, process):
    """Return when the condition holds; the process must be alive until then."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "hangs"

        time.sleep(0.01)


def wait_for_new_checkpoint(workdir, process):
    before = checkpoint_steps(workdir)
    wait_until(lambda: checkpoint_steps(workdir) != before, process)
