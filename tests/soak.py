"""python -m tests.soak [MINUTES] [--seed=N]: end runs at random moments and count failures.

This program is not part of the test suite: a soak takes as long as it is given. Each trial starts
a small run of the digits in a layout of processes and devices, harms it in one way, checks its
end, and resumes it. A trial succeeds if the run ended with a code that its launcher can act on,
and the resumed run has the parameters, evaluations and metrics of an undisturbed one.
"""

import argparse
import collections
import contextlib
import dataclasses
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
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
    """The number of processes of a run, and of devices of each."""

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
      do: a function of the processes of the run.
      codes: exit codes that are allowed. 0 always is: the run may have been faster.
      limit: the largest size of a file in KiB, which stands in for a full disk.
    """

    do: Callable[[Processes], object]
    codes: frozenset[int]
    limit: int | None = None


def signal_one(number: int) -> Callable[[Processes], object]:
    return lambda processes: random.choice(processes).send_signal(number)


def signal_group(number: int) -> Callable[[Processes], object]:
    """Send a signal as a terminal does: to each process of the run and to its data workers."""

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
    "full disk": Harm(
        lambda processes: None,
        frozenset({exits.FAILED}),
        limit=6,
    ),
}


def start_run(
    words: Sequence[str],
    layout: Layout,
    limit: int | None,
) -> list[subprocess.Popen]:
    """Start the processes of a run, each as the leader of a group."""
    shell = ["bash", "-c", f'ulimit -f {limit or "unlimited"} && exec "$@"', "bash"]
    command = [*shell, sys.executable, "-m", "vit_jax", *words]
    launches = explicit(layout.num_processes) if layout.num_processes > 1 else [{}]
    environment = commands.environment_of(layout.num_devices)
    if limit:
        environment |= {"JAX_ENABLE_COMPILATION_CACHE": "false"}

    processes = []
    for launch in launches:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | launch,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
    return processes


def describe_ends(outcomes: Sequence[commands.Outcome], allowed: Collection[int]) -> list[str]:
    """Return a line for each process that ended with a code that is not allowed."""
    problems = []
    for outcome in outcomes:
        if outcome.code not in allowed:
            problems.append(f"ended with {outcome.code}: {outcome.err.strip()[-500:]}")
    return problems


def complete_run(words: Sequence[str], layout: Layout) -> list[str]:
    """Run to the end and return the problems."""
    outcomes = commands.finish(start_run(words, layout, None))
    return describe_ends(outcomes, {0})


def list_words(data_dir: Path, workdir: Path) -> list[str]:
    return commands.pretraining(data_dir, workdir, *OPTIONS, INPUT)


def compare_runs(workdir: Path, expected: Path) -> list[str]:
    """Return the differences between a resumed run and an undisturbed one."""
    found = commands.summary(workdir)
    wanted = commands.summary(expected)

    problems = []
    for name in ("parameters_sha256", "test_loss", "test_accuracy"):
        if found[name] != wanted[name]:
            problems.append(f"another {name}")
    if commands.curve(workdir) != commands.curve(expected):
        problems.append("another metrics.jsonl")
    return problems


def run_trial(
    harm: Harm,
    layout: Layout,
    data_dir: Path,
    expected: Path,
    seconds: float,
    folder: Path,
) -> list[str]:
    """Harm one run after `seconds`, resume it, and return the problems."""
    words = list_words(data_dir, folder / "run")
    processes = start_run(words, layout, harm.limit)
    time.sleep(seconds)
    harm.do(processes)
    outcomes = commands.finish(processes)

    problems = describe_ends(outcomes, harm.codes | {0})
    ends = [outcome.err for outcome in outcomes if outcome.code in (0, exits.PREEMPTED)]
    if "leaked shared_memory" in "".join(ends):
        problems.append("leaked shared memory")

    problems_of_resumed = complete_run(words, layout)
    if not problems_of_resumed:
        problems_of_resumed = compare_runs(folder / "run", expected)
    return problems + problems_of_resumed


@dataclasses.dataclass(frozen=True)
class Reference:
    """An undisturbed run, and its duration with compiled programs."""

    workdir: Path
    seconds: float


def run_references(root: Path) -> dict[Layout, Reference]:
    """Run each layout twice without harm: the first run compiles."""
    references = {}
    for layout in LAYOUTS:
        workdir = root / f"reference {layout}"
        words = list_words(root / "data", workdir)
        complete_run(words, layout)
        shutil.rmtree(workdir, ignore_errors=True)

        start = time.monotonic()
        problems = complete_run(words, layout)
        if problems:
            sys.exit(f"A run that is left alone, {layout}: {problems}")
        references[layout] = Reference(workdir, time.monotonic() - start)
    return references


def iterate_cases(end: float) -> Iterator[tuple[str, Layout]]:
    """Yield all harms of all layouts, in random orders, until a time."""
    cases = list(itertools.product(HARMS, LAYOUTS))
    while True:
        random.shuffle(cases)
        for case in cases:
            if time.monotonic() >= end:
                return
            yield case


def print_counts(trials: collections.Counter, failures: collections.Counter) -> None:
    columns = "".join(f"{layout!s:>10}" for layout in LAYOUTS)
    print(f"{'':<26}{columns}   (failures of trials)")
    for name in HARMS:
        counts = [f"{failures[name, layout]} of {trials[name, layout]}" for layout in LAYOUTS]
        columns = "".join(f"{count:>10}" for count in counts)
        print(f"{name:<26}{columns}")
    print(f"{failures.total()} of {trials.total()} trials failed")


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
        references = run_references(root)
        for name, layout in iterate_cases(end):
            reference = references[layout]
            seconds = random.uniform(0, reference.seconds)
            with tempfile.TemporaryDirectory(dir=root) as folder:
                problems = run_trial(
                    HARMS[name],
                    layout,
                    root / "data",
                    reference.workdir,
                    seconds,
                    Path(folder),
                )

            trials[name, layout] += 1
            failures[name, layout] += bool(problems)
            for problem in problems:
                print(f"FAILED  {name}, {layout}, after {seconds:.1f} s: {problem}", flush=True)

    print_counts(trials, failures)
    sys.exit(failures.total() > 0)


if __name__ == "__main__":
    main()
