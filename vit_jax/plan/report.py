"""A plan as text for people and as JSON for programs."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from vit_jax.cost.flops import training_flops_per_image
from vit_jax.plan.arithmetic import ATTAINABLE
from vit_jax.plan.estimate import Plan

GIB = 2**30
_NUM_COLLECTIVES = 4


def to_text(plan: Plan) -> str:
    """The whole report."""
    parts = (_machine(plan), _memory(plan), _step(plan), _totals(plan))
    return "\n".join(line for part in parts for line in part) + "\n"


def _machine(plan: Plan) -> Iterator[str]:
    config, topology, run = plan.config, plan.topology, plan.run
    mesh = dict(run.batch_sharding.mesh.shape)
    rows = config.global_batch // (mesh["replica"] * mesh["data"])
    height, width = run.architecture.image_size
    accumulated = f" in {config.optimizer.accumulation_steps} parts" if config.optimizer.accumulation_steps > 1 else ""
    yield f"{run.architecture.name} on {height}x{width} images, {config.global_batch:,} a step"
    yield (
        f"machine  {topology.name}: {topology.num_chips:,} x {topology.chip.name}, "
        f"{plan.usable_bytes / GIB:.2f} GiB usable of each"
    )
    yield (
        f"layout   {mesh['replica']} replicas x {mesh['data']} data x {mesh['model']} model, parameters "
        f"{config.sharding.parameters}; {rows:,} images a {'chip' if mesh['model'] == 1 else 'model group'}"
        f"{accumulated}, remat {run.architecture.remat}"
    )
    data = plan.dataset
    yield f"data     {data.name}: {data.num_examples:,} images, {data.num_classes:,} classes ({data.source})"
    if plan.is_compiled:
        yield f"basis    XLA compiled the step for this machine in {plan.compile_seconds:.0f} s; nothing was run"
    elif plan.memory is not None:
        yield f"basis    arithmetic, nothing was compiled: {plan.reason}"
    else:
        yield "basis    XLA gave up compiling the step for this machine"


def _memory(plan: Plan) -> Iterator[str]:
    if plan.memory is None:
        needed = "more" if plan.needed_bytes is None else f"{plan.needed_bytes / GIB:.2f} GiB"
        yield f"memory   DOES NOT FIT: {needed}, usable are {plan.usable_bytes / GIB:.2f} GiB"
        yield f"         XLA: {plan.reason.splitlines()[0]}"
        return
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    used = plan.memory.total / plan.usable_bytes
    yield f"memory   {verdict}: {plan.memory.total / GIB:.2f} GiB a chip, {used:.0%} of what is usable"
    for kind, size in dataclasses.asdict(plan.memory).items():
        yield f"           {kind:<12} {size / GIB:>8.3f} GiB"


def _step(plan: Plan) -> Iterator[str]:
    flops = training_flops_per_image(plan.run.architecture) * plan.config.global_batch / plan.topology.num_chips
    bound = plan.roofline
    arithmetic = (
        f"{1e3 * bound.seconds:,.1f} ms by arithmetic: {1e3 * bound.compute_seconds:,.1f} matrix products at "
        f"{ATTAINABLE:.0%} of the peak, {1e3 * bound.elementwise_seconds:,.1f} elementwise, "
        f"{1e3 * bound.collective_seconds:,.1f} collectives, {1e3 * bound.update_seconds:,.1f} update"
    )
    if plan.timeline is None:
        yield f"step     {arithmetic}"
    else:
        line, clock = plan.timeline, plan.topology.fabric.clock_hertz / 1e9
        yield (
            f"step     {1e3 * line.seconds:,.1f} ms by the compiled schedule: {1e3 * line.compute_seconds:,.1f} "
            f"compute (XLA's cycles at {clock:g} GHz), {1e3 * line.collective_seconds:,.1f} waiting for collectives, "
            f"{1e3 * line.prefetch_seconds:,.1f} for memory"
        )
        for c in line.collectives[:_NUM_COLLECTIVES]:
            over = f" over {len(c.devices)} chips" if c.devices else ""
            yield (
                f"           {c.count:>3} x {c.operation} of {c.num_bytes / 1e6:,.2f} MB{over}: {1e3 * c.seconds:.3f} "
                f"ms each, {1e3 * c.waited_seconds:.3f} of it waited for"
            )
        if line.num_unknown_loops:
            yield f"           {line.num_unknown_loops} loops of unknown length were counted once"
        yield f"         {arithmetic}"
    yield (
        f"speed    {plan.totals.images_per_second:,.0f} images/s, {flops / 1e12:,.3g} TFLOP a chip and step, MFU "
        f"{plan.totals.mfu:.1%}"
    )


def _totals(plan: Plan) -> Iterator[str]:
    total, cores = plan.totals, plan.topology.fabric.cores_per_chip
    counted = f"TensorCores, {cores} a chip" if plan.topology.is_tpu else "GPUs"
    runs = f"{plan.num_runs - 1} learning rates and the final run: " if plan.num_runs > 1 else ""
    yield f"recipe   {runs}{total.steps:,} steps, {total.images:,} images, {total.exaflops:,.4g} exaFLOPs"
    yield (
        f"         {total.days:,.2f} days, {total.chip_hours:,.0f} chip-hours, {total.core_days:,.0f} core-days "
        f"({counted}); at this MFU {total.tpu_v3_core_days:,.0f} core-days of a TPU v3"
    )
    if total.price is not None:
        yield f"         price {total.price:,.0f}"
    yield "         evaluation, checkpoints, input and interruptions are not in it"


def to_json(plan: Plan) -> dict[str, Any]:
    """The same as plain values, sizes in bytes and times in seconds."""
    mesh, topology = dict(plan.run.batch_sharding.mesh.shape), plan.topology
    line = None if plan.timeline is None else dataclasses.asdict(plan.timeline)
    for collective in [] if line is None else line["collectives"]:
        collective["devices"] = len(collective["devices"])
    return {
        "model": plan.run.architecture.name,
        "global_batch": plan.config.global_batch,
        "topology": topology.name,
        "chip": topology.chip.name,
        "num_chips": topology.num_chips,
        "mesh": mesh,
        "sharding": plan.config.sharding.parameters,
        "remat": plan.run.architecture.remat,
        "accumulation_steps": plan.config.optimizer.accumulation_steps,
        "dataset": dataclasses.asdict(plan.dataset),
        "basis": "compiled" if plan.is_compiled else "arithmetic" if plan.memory is not None else "compiler gave up",
        "reason": plan.reason,
        "num_runs": plan.num_runs,
        "compile_seconds": plan.compile_seconds,
        "fits": plan.fits,
        "memory": None if plan.memory is None else dataclasses.asdict(plan.memory),
        "needed_bytes": plan.needed_bytes,
        "usable_bytes": plan.usable_bytes,
        "step_seconds": plan.step_seconds,
        "timeline": line,
        "roofline": dataclasses.asdict(plan.roofline),
        "totals": dataclasses.asdict(plan.totals),
    }
