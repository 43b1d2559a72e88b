"""Tiny runs for the tests of this folder: assembled, and trained on random batches."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from tests.tiny import config
from vit_jax.arrays import Batch
from vit_jax.train.assemble import assemble
from vit_jax.train.lifecycle.interruption import Interrupted, Interruption
from vit_jax.train.state_builder import architecture_of


@functools.cache
def build(*overrides, devices=1):
    """Return an assembly on the first CPU devices, compiled once for the same overrides."""
    return assemble_config(config(*overrides), devices)


def assemble_config(config, devices=1, **numbers):
    """Return an assembly of the config's network, with other numbers where given."""
    architecture = dataclasses.replace(architecture_of(config, 10), **numbers)
    return assemble(
        config,
        architecture,
        num_examples=160,
        devices=jax.devices()[:devices],
    )


def batches(run, num_steps, *, masked=()):
    """Yield host arrays of made-up images; the mask excludes the rows in `masked`."""
    rng = np.random.default_rng(0)
    size = run.config.global_batch

    for _ in range(num_steps):
        mask = np.ones(size, np.float32)
        mask[list(masked)] = 0
        image = rng.integers(0, 256, (size, *run.architecture.image_size, 3), np.uint8)
        label = rng.integers(0, 10, size, np.int32)
        yield Batch(
            image_BHWC=image,
            label_B=label,
            mask_B=mask,
        )


def train(run, num_steps=20, *, masked=()):
    """Return the state after some steps, and every step's metrics as floats."""
    state = run.init_state()
    curve = []

    for batch in batches(run, num_steps, masked=masked):
        state, metrics = run.train_step(
            state,
            jax.device_put(batch, run.batch_sharding),
        )
        curve.append({name: float(value) for name, value in metrics.items()})

    return state, curve


def first_batch(run):
    """Return the first of `batches`, on the run's devices."""
    return jax.device_put(next(batches(run, 1)), run.batch_sharding)


def ask_to_end_at(request, monkeypatch):
    """Let a run find a request to end at its n-th check, as after a signal; None for never."""
    count = itertools.count(1)
    monkeypatch.setattr(Interruption, "is_requested", lambda self: next(count) == request)


def interrupt(train, request, step, monkeypatch):
    """Interrupt a run at its n-th check, which follows this step; later runs are not interrupted."""
    ask_to_end_at(request, monkeypatch)

    message = f"stopped after step {step} of 6, which is saved"
    with pytest.raises(Interrupted, match=message):
        train()

    ask_to_end_at(None, monkeypatch)


def assert_same_end(summary, expected):
    """Parameters and results of two runs are equal to the bit."""
    for name in ("parameters_sha256", "test_loss", "test_accuracy", "train_loss"):
        assert summary[name] == expected[name], name


def losses(curve):
    """Return the loss of every step."""
    return [metrics["train_loss"] for metrics in curve]
