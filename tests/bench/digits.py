"""The digits on this machine: loops beside unrolled layers, and the parts of the complete loop."""

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import jax

from vit_jax.config import load_recipe
from vit_jax.tools.machine.bench import Training, random_batch
from vit_jax.train.assemble import assemble
from vit_jax.train.assembly import Assembly
from vit_jax.train.state_builder import architecture_of

NUM_EXAMPLES = 1437
NUM_CLASSES = 10
WARM_UP = 3
STEPS = 20
LOOP_STEPS = 100
PARTS = ("step", "input", "input with step", "loop", "save, steps wait")


def measure_unrolling(words: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return CPU time and memory of the step in a loop and unrolled, whose steps take turns."""
    in_loop = _Contender(1)
    unrolled = _Contender(4)
    for _ in range(words.rounds):
        in_loop.train()
        unrolled.train()

    rows = {
        "CPU ms a step": (in_loop.step_ms, unrolled.step_ms),
        "CPU s to compile": (in_loop.compile_seconds, unrolled.compile_seconds),
        "temporary memory by XLA, MB": (in_loop.temporary_mb, unrolled.temporary_mb),
    }
    figures = {}
    for name, (before, after) in rows.items():
        figures[name] = {
            "loop": before,
            "unrolled": after,
            "ratio": after / before,
        }
    return figures


class _Contender:
    """A compiled step of the digits with this number of layers in each pass of the loop."""

    def __init__(self, scan_unroll: int):
        config = load_recipe("digits", [f"--config.model.scan_unroll={scan_unroll}"])
        run = assemble(
            config,
            architecture_of(config, NUM_CLASSES),
            num_examples=NUM_EXAMPLES,
            devices=jax.devices(),
        )
        start = time.process_time()
        step = run.compile_train_step()
        self.compile_seconds = time.process_time() - start

        memory: Any = step.memory_analysis()
        self.temporary_mb = memory.temp_size_in_bytes / 1e6
        self._training = Training(run, step)
        self._batch = _place_batch(run)
        self._rounds: list[float] = []

    @property
    def step_ms(self) -> float:
        """CPU milliseconds of a step, the median of the rounds."""
        return 1e3 * statistics.median(self._rounds)

    def train(self) -> None:
        """Take the steps of one round."""
        self._advance(WARM_UP)
        start = time.process_time()
        self._advance(STEPS)
        self._rounds.append((time.process_time() - start) / STEPS)

    def _advance(self, num_steps: int) -> None:
        for _ in range(num_steps):
            metrics = self._training.advance(self._batch)
        jax.block_until_ready(metrics)


def _place_batch(run: Assembly) -> Any:
    batch = random_batch(run, run.config.global_batch)
    return jax.device_put(batch, run.batch_sharding)


def measure_loop(words: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the least and largest medians, in milliseconds, of the parts of `vit-jax bench`."""
    command = [sys.executable, "-m", "vit_jax", "bench", "--config=digits", "--data", "--json"]
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(words.rounds):
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        parts = json.loads(done.stdout)["parts"]
        for part in PARTS:
            found[part].append(parts[part]["median_milliseconds"])
    return {part: {"least": min(ms), "most": max(ms)} for part, ms in found.items()}
