"""Inference speed of one device with batches of 1, 2, 4, …: measured, or planned for a TPU.

As in the paper (ViT, App. D.5): the speed of the best batch, and the largest batch that fits.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import hosts
from vit_jax.arrays import normalise
from vit_jax.config import Architecture, PretrainConfig
from vit_jax.kernels.devices import trace_for
from vit_jax.models import build_model
from vit_jax.sharding import Placement, build_mesh, replicate
from vit_jax.storage.files import JsonObject
from vit_jax.tools.machine.bench import time_calls
from vit_jax.tools.plan import aot, hlo
from vit_jax.tools.plan.timeline import simulate_step
from vit_jax.tools.plan.topology import Topology, make_collective_seconds
from vit_jax.train.lifecycle import workdir as workdirs
from vit_jax.train.overview import machine
from vit_jax.train.run_files import write_summary
from vit_jax.train.state_builder import architecture_of

NUM_CLASSES = 1000
NUM_STEPS = 5  # timed for each batch, after a few that do not count

GetSeconds = Callable[[int], float | None]
"""Takes a batch size; returns the seconds of a forward pass, or None if it does not fit."""


def measure(
    config: PretrainConfig,
    workdir: str,
    topology: Topology | None = None,
) -> None:
    """Time the network of a recipe and write `summary.json`.

    It is timed on the first device, or for one chip of a TPU by the schedule of the compiled
    program.
    """
    architecture = architecture_of(config, NUM_CLASSES)
    if topology is None:
        get_seconds = _make_measurement(architecture)
        device = machine()
    else:
        get_seconds = _make_estimate(architecture, topology)
        device = {"device_kind": topology.chip.name}
    with workdirs.claim(workdir, config) as claimed:
        summary = find_peak(get_seconds, config.global_batch) | device
        if hosts.is_first():
            write_summary(claimed.folder, summary)


def find_peak(get_seconds: GetSeconds, most: int) -> JsonObject:
    """Return the best speed over batches of 1, 2, 4, … up to `most`, and the largest that fits.

    Raises:
      ValueError: not even one image fits.
    """
    speeds: dict[int, float] = {}
    batch = 1
    while batch <= most:
        seconds = get_seconds(batch)
        if seconds is None:
            break
        speeds[batch] = batch / seconds
        batch *= 2
    if not speeds:
        raise ValueError("The network does not fit the device, not even for one image.")

    fastest = max(speeds, key=speeds.__getitem__)
    largest = max(speeds)
    speed_by_batch = {str(batch): speed for batch, speed in speeds.items()}
    return {
        "images_per_second": speeds[fastest],
        "fastest_batch": fastest,
        "largest_batch": largest,
        "is_limited_by_memory": 2 * largest <= most,
        "images_per_second_by_batch": speed_by_batch,
    }


def _make_inference(
    architecture: Architecture,
    device: jax.Device,
) -> tuple[Any, jax.sharding.Sharding]:
    """Return a jitted function from model and uint8 images to logits, and the sharding of both."""
    mesh: Any = build_mesh([device])

    @trace_for(Placement(mesh))
    def infer(model: Any, image_BHWC: jax.Array) -> jax.Array:
        images = normalise(image_BHWC, architecture.compute_dtype)
        logits_BK: jax.Array = model(images).logits_BK
        return logits_BK

    return jax.jit(infer), replicate(mesh)


def _make_measurement(architecture: Architecture) -> GetSeconds:
    """Return a function that times the forward pass on this machine's first device."""
    infer, sharding = _make_inference(architecture, jax.devices()[0])
    initialise = jax.jit(lambda key: build_model(architecture, key))
    model = jax.device_put(initialise(jax.random.key(0)), sharding)

    def measure_seconds(batch: int) -> float | None:
        black = np.zeros((batch, *architecture.image_shape), np.uint8)
        image = jax.device_put(black, sharding)
        try:
            seconds = time_calls(lambda: infer(model, image), NUM_STEPS)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return None
        return float(np.median(seconds))

    return measure_seconds


def _make_estimate(architecture: Architecture, topology: Topology) -> GetSeconds:
    """Return a function that estimates the forward pass on one chip from the compiled schedule."""
    device, *_ = aot.list_devices(topology)
    infer, sharding = _make_inference(architecture, device)
    collective_seconds = make_collective_seconds([device], topology)

    def place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    abstract_model = jax.eval_shape(lambda: build_model(architecture, jax.random.key(0)))
    model = jax.tree.map(place, abstract_model)

    def estimate_seconds(batch: int) -> float | None:
        shape = (batch, *architecture.image_shape)
        image = place(jax.ShapeDtypeStruct(shape, jnp.uint8))
        compiled = aot.compile_program(lambda: infer.lower(model, image), device)
        if not isinstance(compiled, aot.Executable):
            return None
        timeline = simulate_step(
            hlo.parse(compiled.text),
            topology,
            collective_seconds,
            compiled.bundles,
        )
        return timeline.seconds

    return estimate_seconds
