"""Plans and searches as text and as plain values for JSON."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from vit_jax.optim.by_name import make_is_trained
from vit_jax.text.tables import columns
from vit_jax.tools.plan.aot import Executable
from vit_jax.tools.plan.arithmetic import ATTAINABLE
from vit_jax.tools.plan.estimate import Plan
from vit_jax.tools.plan.gpu_kernels import BANDWIDTH, PRODUCTS
from vit_jax.tools.plan.search import Candidate, SearchResult
from vit_jax.train.overview import parameter_table

GIB = 2**30
_NUM_COLLECTIVES = 4


def to_text(plan: Plan) -> str:
    """The report."""
    lines = itertools.chain(_machine(plan), _memory(plan), _step(plan), _totals(plan))
    return "\n".join(lines) + "\n"


def _machine(plan: Plan) -> Iterator[str]:
    config = plan.config
    topology = plan.topology
    run = plan.run
    mesh = dict(run.batch_sharding.mesh.shape)
    rows = config.global_batch // (mesh["replica"] * mesh["data"])
    height, width = run.architecture.image_size
    micro_batches = config.optimizer.accumulation_steps or 1
    accumulated = f" in {micro_batches} micro-batches" if micro_batches > 1 else ""
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
    if (form := plan.attention_form) is not None:
        yield f"compute  {run.architecture.compute_dtype}, attention {form}"
    model = run.abstract_state.model
    is_trained = make_is_trained(config.optimizer)
    if is_trained is not None:
        yield parameter_table(model, is_folded=True, is_trained=is_trained)
    data = plan.dataset
    yield f"data     {data.name}: {data.num_examples:,} images, {data.num_classes:,} classes ({data.source})"
    if isinstance(plan.compiled, Executable):
        seconds = plan.compiled.compile_seconds
        yield f"basis    XLA compiled the step for this machine in {seconds:.0f} s; nothing was executed"
    elif plan.compiled is None:
        yield f"basis    arithmetic, nothing was compiled: {plan.reason}"
    else:
        yield "basis    XLA stopped compiling the step for this machine"


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
    arithmetic = "no arithmetic estimate: no formula gives the cost of a user's own code"
    line = plan.timeline
    if plan.roofline is not None:
        bound = {
            name: f"{1e3 * value:,.1f}" for name, value in dataclasses.asdict(plan.roofline).items()
        }
        arithmetic = (
            f"{1e3 * plan.roofline.seconds:,.1f} ms by arithmetic: {bound['compute_seconds']} matrix products at "
            f"{ATTAINABLE:.0%} of the peak, {bound['elementwise_seconds']} elementwise, "
            f"{bound['collective_seconds']} collectives, {bound['update_seconds']} update"
        )
    if line is None:
        yield f"step     {arithmetic}"
    else:
        clock = plan.topology.fabric.clock_hertz / 1e9
        compute = f"XLA's cycles at {clock:g} GHz"
        kernels = "bundles of their schedules"
        if not plan.topology.is_tpu:
            compute = f"bytes at {BANDWIDTH:.0%} of the bandwidth"
            kernels = f"FLOPs at {PRODUCTS:.0%} of the peak"
        yield (
            f"step     {1e3 * line.seconds:,.1f} ms by the compiled schedule: {1e3 * line.compute_seconds:,.1f} "
            f"compute ({compute}), {1e3 * line.kernel_seconds:,.1f} in kernels ({kernels}), "
            f"{1e3 * line.collective_seconds:,.1f} waiting for collectives, "
            f"{1e3 * line.prefetch_seconds:,.1f} for memory"
        )
        shares = sorted(
            ((seconds / line.seconds, phase) for phase, seconds in line.phases.items()),
            reverse=True,
        )
        yield f"           of it {', '.join(f'{phase} {share:.1%}' for share, phase in shares if share >= 0.001)}"
        for c in line.collectives[:_NUM_COLLECTIVES]:
            over = f" over {len(c.devices)} chips" if c.devices else ""
            yield (
                f"           {c.count:>3} x {c.operation} of {c.num_bytes / 1e6:,.2f} MB{over}: {1e3 * c.seconds:.3f} "
                f"ms each, {1e3 * c.waited_seconds:.3f} of it waited for"
            )
        if line.num_unknown_loops:
            once = 1e3 * line.unknown_loops_pass_seconds
            yield f"           {line.num_unknown_loops} loops of unknown length were counted once: {once:.3f} ms"
        if line.num_unknown_kernels:
            yield f"           {line.num_unknown_kernels} executions of kernels were counted as nothing: no schedule"
        yield f"         {arithmetic}"
    if plan.limit_seconds is not None and plan.step_seconds is not None:
        yield (
            f"         {1e3 * plan.limit_seconds:,.1f} ms at least: products at the peak or at the bandwidth, and the "
            f"update; the step reaches {plan.limit_seconds / plan.step_seconds:.0%} of this limit"
        )


def _totals(plan: Plan) -> Iterator[str]:
    total = plan.totals
    cores = plan.topology.fabric.cores_per_chip
    if total is None:
        return
    speed = f"{total.images_per_second:,.0f} images/s"
    recipe = f"{total.steps:,} steps, {total.images:,} images"
    if total.mfu is not None and total.exaflops is not None:
        flops = (
            plan.run.training_flops_per_image * plan.config.global_batch / plan.topology.num_chips
        )
        speed += f", {flops / 1e12:,.3g} TFLOP a chip and step, MFU {total.mfu:.1%}"
        recipe += f", {total.exaflops:,.4g} exaFLOPs"
    yield f"speed    {speed}"
    runs = f"{plan.num_runs - 1} learning rates and the final run: " if plan.num_runs > 1 else ""
    yield f"recipe   {runs}{recipe}"
    counted = f"TensorCores, {cores} a chip" if plan.topology.is_tpu else "GPUs"
    yield (
        f"         {total.days:,.2f} days, {total.chip_hours:,.0f} chip-hours, {total.core_days:,.0f} core-days "
        f"({counted}); at this MFU {total.tpu_v3_core_days:,.0f} core-days of a TPU v3"
    )
    if total.price is not None:
        yield f"         price {total.price:,.0f}"
    yield "         not included: evaluation, checkpoints, input, interruptions"


def to_json(plan: Plan) -> dict[str, object]:
    """The same as plain values, sizes in bytes and times in seconds."""
    names = ("dataset", "memory", "timeline", "roofline", "totals")
    sections = {
        name: value and dataclasses.asdict(value)
        for name in names
        for value in [getattr(plan, name)]
    }
    if (timeline := sections["timeline"]) is not None:
        timeline["parts"] = timeline.pop("phases")
        for collective in timeline["collectives"]:
            collective["devices"] = len(collective["devices"])
    is_compiled = isinstance(plan.compiled, Executable)
    return {
        "model": plan.run.architecture.name,
        "global_batch": plan.config.global_batch,
        "topology": plan.topology.name,
        "chip": plan.topology.chip.name,
        "num_chips": plan.topology.num_chips,
        "mesh": dict(plan.run.batch_sharding.mesh.shape),
        "sharding": plan.config.sharding.parameters,
        "remat": plan.run.architecture.remat,
        "attention": plan.attention_form,
        "accumulation_steps": plan.config.optimizer.accumulation_steps,
        "basis": "compiled"
        if is_compiled
        else "arithmetic"
        if plan.compiled is None
        else "compiler gave up",
        "reason": plan.reason,
        "num_runs": plan.num_runs,
        "compile_seconds": getattr(plan.compiled, "compile_seconds", 0.0),
        "fits": plan.fits,
        "needed_bytes": plan.needed_bytes,
        "usable_bytes": plan.usable_bytes,
        "step_seconds": plan.step_seconds,
        "limit_seconds": plan.limit_seconds,
        **sections,
    }


def result_to_text(result: SearchResult) -> str:
    """A table of all candidates, then the winner's report and the options that select it."""
    head = (
        *("parameters", "replicas", "model", "remat", "micro-batches", "batch"),
        *("arithmetic, GiB", "ms", "compiled, GiB", "ms", "verdict"),
    )
    rows = [head, *(_cells(candidate, result) for candidate in result.candidates)]
    table = columns(rows, "<>><>>>>>><", gap=" | ") + "\n"
    if result.num_refused:
        table += f"{result.num_refused} layouts are not possible on this machine\n"
    if result.winner is None:
        return (
            f"{table}\nNothing fits: use a larger machine, a smaller batch or a smaller network.\n"
        )
    words = " ".join(result.overrides) or "(nothing: the recipe as it is)"
    return f"{table}\n{to_text(result.winner)}\nadd to the command: {words}\n"


def _cells(candidate: Candidate, result: SearchResult) -> Sequence[str]:
    config = candidate.config
    plan = candidate.plan
    size = ""
    time = ""
    verdict = "not tried"
    if plan is not None:
        if plan.compiled is not None and plan.needed_bytes is not None:
            size = f"{plan.needed_bytes / GIB:.2f}"
        time = f"{1e3 * plan.timeline.seconds:,.0f}" if plan.timeline is not None else ""
        verdict = (
            "fastest that fits"
            if plan is result.winner
            else "fits"
            if plan.fits
            else "does not fit"
        )
    elif candidate.needed_bytes > result.usable_bytes:
        verdict = "too large by arithmetic"
    sharding = config.sharding
    return (
        *(
            sharding.parameters,
            str(sharding.num_replicas or "slices"),
            str(sharding.num_model_shards),
        ),
        *(config.model.remat, str(config.optimizer.accumulation_steps), str(config.global_batch)),
        *(
            f"{candidate.needed_bytes / GIB:.2f}",
            f"{1e3 * candidate.step_seconds:,.0f}",
            size,
            time,
            verdict,
        ),
    )


def result_to_json(result: SearchResult) -> dict[str, object]:
    """The same as plain values."""
    return {
        "candidates": [
            {
                "global_batch": c.config.global_batch,
                "remat": c.config.model.remat,
                "accumulation_steps": c.config.optimizer.accumulation_steps,
                "sharding": dataclasses.asdict(c.config.sharding),
                "arithmetic": {"needed_bytes": c.needed_bytes, "step_seconds": c.step_seconds},
                "plan": None if c.plan is None else to_json(c.plan),
            }
            for c in result.candidates
        ],
        "winner": None if result.winner is None else to_json(result.winner),
        "overrides": list(result.overrides),
        "num_refused": result.num_refused,
    }
