"""The record of a step whose loss, gradient or parameters are not finite.

A run keeps no state for this. A step that diverges is seen one step late, when its state is gone.
`divergence.json` names the step, and `vit-jax replay` computes its state again from a checkpoint.
"""

import json
import pathlib
import shlex
from collections.abc import Mapping

import numpy as np

from vit_jax import hosts
from vit_jax.checkpoint import CheckpointReader
from vit_jax.config import RunConfig, to_dict
from vit_jax.config.parsing import find_references
from vit_jax.storage.files import write_atomically
from vit_jax.train import overview
from vit_jax.train.assembly import Assembly
from vit_jax.train.inputs import Datasets, train_stream
from vit_jax.train.run_files import DIVERGENCE_FILE


def record_divergence(
    folder: pathlib.Path,
    run: Assembly,
    data: Datasets,
    step: int,
    metrics: Mapping[str, float],
) -> str:
    """Write `divergence.json` into the workdir; return a sentence with the command to replay."""
    earlier = [saved for saved in CheckpointReader(folder).all_steps() if saved < step]
    record = {
        "step": step,
        "metrics": dict(metrics),
        "records": list_records(run, data, step).tolist(),
        "checkpoint": max(earlier, default=None),
        **overview.machine(),
        "config": to_dict(run.config),
    }
    if hosts.is_first():
        write_atomically(folder / DIVERGENCE_FILE, json.dumps(record) + "\n")
    command = replay_command(folder, run.config)
    return f"`{command}` repeats the step with norms by layer and the loss of each image."


def replay_command(folder: pathlib.Path, config: RunConfig) -> str:
    """Return the command that repeats the step, with the packages whose code the config names."""
    packages = set()
    for _, reference in find_references(config):
        module = reference.partition(":")[0]
        packages.add(module.partition(".")[0])
    command = f"vit-jax replay {shlex.quote(str(folder))}"
    if packages:
        command += f" --weights.allow_code={','.join(sorted(packages))}"
    return command


def list_records(run: Assembly, data: Datasets, step: int) -> np.ndarray:
    """Return the records of all rows of the batch of a step, (B,)."""
    config = run.select_phase(step).config
    rows = np.arange(config.global_batch)
    first_sample = run.images(step - 1)
    stream = train_stream(
        config,
        data.train,
        rows,
        step - 1,
        run.steps.total,
        first_sample,
    )
    return stream.records(0)
