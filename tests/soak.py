"""python -m tests.soak [MINUTES] [--seed=N]: ends runs in every way, at random moments, and counts what goes wrong.

Not part of the test suite: a soak takes as long as it is given. Each trial starts a small run of
the digits in a layout of processes and devices, does one harm to it, checks how it ends, and
resumes it to its end. Nothing goes wrong if the run ended with a code that its launcher can act on,
and the resumed run has the parameters, the evaluations and the metrics of one that was left alone.
"""

import argparse
import collections
import contextlib
import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

if __name__ == "__main__":
    from tests import conftest  # noqa: F401  sets the flags that the processes inherit

from tests.integration import commands
from tests.integration.launchers import explicit
from tests.tiny import ROOT
from vit_jax.hosts import exits

LENGTH = (
    "total=40 steps",
    "checkpoint.every=4 steps",
    "evaluation.every=8 steps",
    "logging.every=2 steps",
)
OPTIONS = (*LENGTH, "polyak.factor=0.99", "model.dropout_fraction=0.1", "sharding.parameters=fsdp")
INPUT = "input.num_workers=1"
KILLED = -signal.SIGKILL


@dataclasses.dataclass(frozen=True)
class Layout:
    """How many processes a run has, each with how many devices."""

    num_processes: int
    num_devices: int

    def __str__(self) -> str:
        return f"{self.num_processes} x {self.num_devices}"


LAYOUTS = (Layout(1, 1), Layout(1, 8), Layout(2, 1), Layout(4, 1))
Processes = Sequence[subprocess.Popen]


@dataclasses.dataclass(frozen=True)
class Harm:
    """One way to end a run.

    Attributes:
      do: to the processes of the run.
      codes: with which each of them may end. 0 is always allowed: the run may have been faster.
      limit: of a file's size in KiB, which stands in for a full disk.
    """

    do: Callable[[Processes], object]
    codes: frozenset[int]
    limit: int | None = None


def signal_one(number: int) -> Callable[[Processes], object]:
    return lambda processes: random.choice(processes).send_signal(number)


def signal_group(number: int) -> Callable[[Processes], object]:
    """As a terminal does: to each process of the run and to its data workers."""

    def do(processes: Processes) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    return do


STOPPED = frozenset({exits.PREEMPTED, exits.STOPPED})
HARMS = {
    "kill -9 of one process": Harm(signal_one(signal.SIGKILL), frozenset({KILLED, exits.LOST})),
    "kill -9 of the group": Harm(signal_group(signal.SIGKILL), frozenset({KILLED})),
    "SIGTERM to one process": Harm(signal_one(signal.SIGTERM), STOPPED),
    "SIGTERM to the group": Harm(signal_group(signal.SIGTERM), STOPPED),
    "Ctrl-C": Harm(signal_group(signal.SIGINT), STOPPED),
    "full disk": Harm(lambda processes: None, frozenset({exits.FAILED}), limit=6),
}


def start(words: Sequence[str], layout: Layout, limit: int | None) -> list[subprocess.Popen]:
    """The processes of a run, each the leader of a group."""
    shell = ["bash", "-c", f'ulimit -f {limit or "unlimited"} && exec "$@"', "bash"]
    environments = explicit(layout.num_processes) if layout.num_processes > 1 else [{}]
    cache = {"JAX_ENABLE_COMPILATION_CACHE": "false"} if limit else {}

    return [
        subprocess.Popen(
            [*shell, sys.executable, "-m", "vit_jax", *words],
            cwd=ROOT,
            env=commands.environment_of(layout.num_devices) | cache | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for own in environments
    ]


def complete(words: Sequence[str], layout: Layout) -> list[str]:
    """Runs to the end; what went wrong."""
    outcomes = commands.finish(start(words, layout, None))
    return [f"ended with {o.code}: {o.err.strip()[-500:]}" for o in outcomes if o.code != 0]


def words_of(data_dir: Path, workdir: Path) -> list[str]:
    return commands.pretraining(data_dir, workdir, *OPTIONS, INPUT)


def differences(workdir: Path, expected: Path) -> list[str]:
    """Where a resumed run differs from one that was left alone."""
    found = commands.summary(workdir)
    wanted = commands.summary(expected)
    names = ("parameters_sha256", "test_loss", "test_accuracy")
    wrong = [f"another {name}" for name in names if found[name] != wanted[name]]

    return wrong + (
        [] if commands.curve(workdir) == commands.curve(expected) else ["another metrics.jsonl"]
    )


def trial(
    harm: Harm, layout: Layout, data_dir: Path, expected: Path, seconds: float, folder: Path
) -> list[str]:
    """Harms one run after `seconds` and resumes it; what went wrong."""
    words = words_of(data_dir, folder / "run")
    processes = start(words, layout, harm.limit)
    time.sleep(seconds)
    harm.do(processes)
    outcomes = commands.finish(processes)
    allowed = harm.codes | {0}
    wrong = [
        f"ended with {o.code}: {o.err.strip()[-500:]}" for o in outcomes if o.code not in allowed
    ]
    ends = [outcome.err for outcome in outcomes if outcome.code in (0, exits.PREEMPTED)]

    if "leaked shared_memory" in "".join(ends):
        wrong.append("leaked shared memory")

    return wrong + (complete(words, layout) or differences(folder / "run", expected))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("minutes", type=float, nargs="?", default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    end = time.monotonic() + 60 * arguments.minutes
    trials: collections.Counter = collections.Counter()
    failures: collections.Counter = collections.Counter()

    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        from vit_jax.data.kinds import digits

        digits.prepare(str(root / "data"))
        references = {}
        durations = {}

        for layout in LAYOUTS:
            references[layout] = root / f"reference {layout}"
            words = words_of(root / "data", references[layout])
            complete(words, layout)  # compiles
            shutil.rmtree(references[layout], ignore_errors=True)
            began = time.monotonic()

            if wrong := complete(words, layout):
                sys.exit(f"A run that is left alone, {layout}: {wrong}")

            durations[layout] = time.monotonic() - began

        cases = [(name, layout) for name in HARMS for layout in LAYOUTS]
        while time.monotonic() < end:
            random.shuffle(cases)
            for name, layout in cases:
                if time.monotonic() >= end:
                    break

                seconds = random.uniform(0, durations[layout])
                with tempfile.TemporaryDirectory(dir=root) as folder:
                    wrong = trial(
                        HARMS[name],
                        layout,
                        root / "data",
                        references[layout],
                        seconds,
                        Path(folder),
                    )

                trials[name, layout] += 1
                failures[name, layout] += bool(wrong)

                for line in wrong:
                    print(f"FAILED  {name}, {layout}, after {seconds:.1f} s: {line}", flush=True)

    print(
        f"{'':<26}" + "".join(f"{layout!s:>10}" for layout in LAYOUTS) + "   (failures of trials)"
    )
    for name in HARMS:
        counts = [f"{failures[name, layout]} of {trials[name, layout]}" for layout in LAYOUTS]
        print(f"{name:<26}" + "".join(f"{count:>10}" for count in counts))

    print(f"{failures.total()} of {trials.total()} trials failed")
    sys.exit(failures.total() > 0)


if __name__ == "__main__":
    main()
