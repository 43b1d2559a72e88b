"""Runs of the real command in processes of their own."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[2]
SHRUNK = [
    "global_batch=16",
    "evaluation.global_batch=360",
    "model.width=16",
    "model.mlp_dim=32",
    "model.depth=2",
    "model.num_heads=2",
    "schedule.warmup=5 steps",
    "logging.tensorboard=False",
]


@dataclasses.dataclass
class Command:
    """`python -m vit_jax` with a shrunk digits recipe and a shared cache of compiled programs."""

    data_dir: str
    compilation_cache: str

    def words(self, workdir, *overrides):
        fields = [*SHRUNK, f"input.data_dir={self.data_dir}", *overrides]
        return ["pretrain", "--config=configs/digits.py", f"--workdir={workdir}", *(f"--config.{f}" for f in fields)]

    def start(self, workdir, *overrides, devices=1, **environment):
        return self.start_words(*self.words(workdir, *overrides), devices=devices, **environment)

    def start_all(self, workdir, environments, *overrides, devices=1, **environment):
        """The processes of one run, one for each of `launchers`' environments."""
        return [self.start(workdir, *overrides, devices=devices, **(own | environment)) for own in environments]

    def run_words(self, *words, devices=1, **environment):
        """Any verb, to its end."""
        return ended(self.start_words(*words, devices=devices, **environment))

    def start_words(self, *words, devices=1, **environment):
        """Any verb, in the background."""
        return subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "vit_jax", *words],
            cwd=ROOT,
            env=self.environment(devices) | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, workdir, *overrides, devices=1, **environment):
        return ended(self.start(workdir, *overrides, devices=devices, **environment))

    def environment(self, devices):
        return os.environ | {
            # Programs run a few times: without optimisation they compile twice as fast.
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": self.compilation_cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        }


def finish(processes):
    """(stdout, stderr, exit code) of each, once all have ended."""
    return [(*process.communicate(timeout=240), process.returncode) for process in processes]


def spoken(out):
    """What the run itself said: Gloo's threads write to the output in pieces, which may come between each other."""
    return [line for line in out.splitlines() if not re.search(r"^\s*$|\[Gloo\]|peer ranks", line)]


def ended(process):
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def summary(workdir):
    return json.loads((pathlib.Path(workdir) / "summary.json").read_text())


def metrics(workdir):
    return [json.loads(line) for line in (pathlib.Path(workdir) / "metrics.jsonl").read_text().splitlines()]


def checkpoint_steps(workdir):
    folder = pathlib.Path(workdir) / "checkpoints"
    return sorted(int(child.name) for child in folder.iterdir() if child.name.isdigit()) if folder.is_dir() else []


def wait_for_new_checkpoint(workdir, process, timeout_seconds=120):
    """Waits until the process has written a checkpoint; fails if it ends first."""
    before, deadline = checkpoint_steps(workdir), time.monotonic() + timeout_seconds
    while checkpoint_steps(workdir) == before:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)
