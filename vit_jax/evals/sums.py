"""Sums over all batches of a split: what evaluators divide in the end."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from vit_jax.arrays import Batch
from vit_jax.evals.protocol import OpenBatches

Sums = dict[str, jax.Array]


def sum_over(open_batches: OpenBatches, step: Callable[[Any, Batch], Sums], evaluated: Any) -> dict[str, np.ndarray]:
    """Adds up, in float64, what `step` gives for every batch of a split; empty where there is no batch.

    The step takes what is evaluated, a training state or a model, and a batch; it sums over the examples that count.
    """
    totals: dict[str, np.ndarray] = {}
    pending: Sums = {}
    with open_batches() as batches:
        for batch in batches:
            sums = step(evaluated, batch)
            _add(totals, pending)  # read one batch late, so that the devices never wait
            pending = sums
    _add(totals, pending)
    return totals


def _add(totals: dict[str, np.ndarray], sums: Sums) -> None:
    for name, value in jax.device_get(sums).items():
        totals[name] = totals.get(name, np.zeros(np.shape(value))) + np.asarray(value, np.float64)
