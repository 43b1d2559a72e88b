"""Plans and searches as text and as plain values for JSON."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from vit_jax.optim.by_name import find_trained
from vit_jax.sharding.memory import Memory
from vit_jax.text.tables import columns
from vit_jax.tools.plan.aot import Executable
from vit_jax.tools.plan.arithmetic import ERROR, Roofline
from vit_jax.tools.plan.estimate import Plan, Totals
from vit_jax.tools.plan.gpu_kernels import BANDWIDTH, PRODUCTS
from vit_jax.tools.plan.search import Candidate, SearchResult
from vit_jax.tools.plan.timeline import Timeline
from vit_jax.tools.plan.topology import Topology
from vit_jax.train.overview import parameter_table

GIB = 2**30
_NUM_COLLECTIVES = 4  # collectives in the text
_SEARCH_HEAD = (
    "parameters",
    "replicas",
    "model",
    "remat",
    "micro-batches",
    "batch",
    "arithmetic, GiB",
    "ms",
    "compiled, GiB",
    "ms",
    "verdict",
)


def to_text(plan: Plan) -> str:
    """Return the report of a plan."""
    sections = (
        _describe_machine(plan),
        _describe_layout(plan),
        _describe_memory(plan),
        _describe_step(plan),
        _describe_totals(plan),
    )
    return "\n".join(itertools.chain(*sections)) + "\n"


def _describe_machine(plan: Plan) -> Iterator[str]:
    topology = plan.topology
    architecture = plan.run.architecture
    height, width = architecture.image_size
    yield f"{architecture.name} on {height}x{width} images, {plan.config.global_batch:,} a step"
    if plan.network.origin:
        yield f"weights  {plan.network.origin}"
    yield (
        f"machine  {topology.name}: {topology.num_chips:,} x {topology.chip.name}, "
        f"{_format_gib(plan.usable_bytes)} usable of each"
    )


def _describe_layout(plan: Plan) -> Iterator[str]:
    config = plan.config
    run = plan.run
    mesh = run.batch_sharding.mesh.shape
    images = config.global_batch // (mesh["replica"] * mesh["data"])
    unit = "chip" if mesh["model"] == 1 else "model group"
    micro_batches = config.optimizer.accumulation_steps or 1
    accumulation = f" in {micro_batches} micro-batches" if micro_batches > 1 else ""
    yield (
        f"layout   {mesh['replica']} replicas x {mesh['data']} data x {mesh['model']} model, "
        f"parameters {config.sharding.parameters}; {images:,} images a {unit}{accumulation}, "
        f"remat {run.architecture.remat}"
    )
    attention = plan.attention_form
    if attention is not None:
        yield f"compute  {run.architecture.compute_dtype}, attention {attention}"
    trained = find_trained(config.optimizer)
    if trained is not None:
        yield parameter_table(run.abstract_state.model, is_folded=True, trained=trained)
    data = plan.dataset
    yield (
        f"data     {data.name}: {data.num_examples:,} images, {data.num_classes:,} classes "
        f"({data.source})"
    )
    if isinstance(plan.compiled, Executable):
        seconds = plan.compiled.compile_seconds
        yield (
            f"basis    XLA compiled the step for this machine in {seconds:.0f} s; "
            "nothing was executed"
        )
    elif plan.compiled is None:
        yield f"basis    arithmetic, nothing was compiled: {plan.reason}"
    else:
        yield "basis    XLA stopped compiling the step for this machine"


def _format_gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def _format_ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


def _describe_memory(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    usable = _format_gib(plan.usable_bytes)
    if memory is None:
        needed = "more" if plan.needed_bytes is None else _format_gib(plan.needed_bytes)
        yield f"memory   DOES NOT FIT: {needed}, usable are {usable}"
        yield f"         XLA: {plan.reason.splitlines()[0]}"
        return
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    used = memory.total / plan.usable_bytes
    yield f"memory   {verdict}: {_format_gib(memory.total)} a chip, {used:.0%} of what is usable"
    for kind, size in dataclasses.asdict(memory).items():
        yield f"           {kind:<12} {size / GIB:>8.3f} GiB"


def _describe_step(plan: Plan) -> Iterator[str]:
    arithmetic = _describe_roofline(plan.roofline)
    if plan.timeline is None:
        yield f"step     {arithmetic}"
    else:
        yield _describe_schedule(plan.timeline, plan.topology)
        yield f"           of it {_describe_phases(plan.timeline)}"
        yield from _describe_collectives(plan.timeline)
        yield from _describe_unknown(plan.timeline)
        yield f"         {arithmetic}"
    limit = plan.limit_seconds
    if limit is not None and plan.step_seconds is not None:
        yield (
            f"         {_format_ms(limit)} ms at least: products at the peak or at the bandwidth, "
            f"and the update; the step reaches {limit / plan.step_seconds:.0%} of this limit"
        )


def _describe_roofline(roofline: Roofline | None) -> str:
    if roofline is None:
        return "no arithmetic estimate: no formula gives the cost of a user's own code"
    return (
        f"{_format_ms(roofline.seconds)} ms by arithmetic, within {ERROR:.0%} of compiled steps: "
        f"{_format_ms(roofline.compute_seconds)} matrix products, "
        f"{_format_ms(roofline.elementwise_seconds)} elementwise, "
        f"{_format_ms(roofline.collective_seconds)} collectives, "
        f"{_format_ms(roofline.update_seconds)} update, "
        f"{_format_ms(roofline.launch_seconds)} launches"
    )


def _describe_schedule(timeline: Timeline, topology: Topology) -> str:
    compute = f"XLA's cycles at {topology.fabric.clock_hertz / 1e9:g} GHz"
    kernels = "bundles of their schedules"
    if not topology.is_tpu:
        compute = f"bytes at {BANDWIDTH:.0%} of the bandwidth"
        kernels = f"FLOPs at {PRODUCTS:.0%} of the peak"
    return (
        f"step     {_format_ms(timeline.seconds)} ms by the compiled schedule: "
        f"{_format_ms(timeline.compute_seconds)} compute ({compute}), "
        f"{_format_ms(timeline.kernel_seconds)} in kernels ({kernels}), "
        f"{_format_ms(timeline.collective_seconds)} waiting for collectives, "
        f"{_format_ms(timeline.prefetch_seconds)} for memory"
    )


def _describe_phases(timeline: Timeline) -> str:
    """Return the shares of the phases from a thousandth of the step, the largest first."""
    shares = []
    for phase, seconds in timeline.phases.items():
        share = seconds / timeline.seconds
        if share >= 0.001:
            shares.append((share, phase))
    return ", ".join(f"{phase} {share:.1%}" for share, phase in sorted(shares, reverse=True))


def _describe_collectives(timeline: Timeline) -> Iterator[str]:
    for collective in timeline.collectives[:_NUM_COLLECTIVES]:
        over = f" over {len(collective.devices)} chips" if collective.devices else ""
        yield (
            f"           {collective.count:>3} x {collective.operation} of "
            f"{collective.num_bytes / 1e6:,.2f} MB{over}: "
            f"{1e3 * collective.seconds:.3f} ms each, "
            f"{1e3 * collective.waited_seconds:.3f} of it waited for"
        )


def _describe_unknown(timeline: Timeline) -> Iterator[str]:
    """Yield the parts of a step that the estimate counts once or not at all."""
    if timeline.num_unknown_loops:
        once = f"{1e3 * timeline.unknown_loops_pass_seconds:.3f} ms"
        loops = timeline.num_unknown_loops
        yield f"           {loops} loops of unknown length were counted once: {once}"
    if timeline.num_unknown_kernels:
        kernels = timeline.num_unknown_kernels
        yield f"           {kernels} executions of kernels were counted as nothing: no schedule"


def _describe_totals(plan: Plan) -> Iterator[str]:
    totals = plan.totals
    if totals is None:
        return
    topology = plan.topology
    speed = f"{totals.images_per_second:,.0f} images/s"
    recipe = f"{totals.steps:,} steps, {totals.images:,} images"
    if totals.mfu is not None and totals.exaflops is not None:
        step_flops = plan.run.training_flops_per_image * plan.config.global_batch
        chip_teraflops = step_flops / topology.num_chips / 1e12
        speed += f", {chip_teraflops:,.3g} TFLOP a chip and step, MFU {totals.mfu:.1%}"
        recipe += f", {totals.exaflops:,.4g} exaFLOPs"
    if plan.num_runs > 1:
        recipe = f"{plan.num_runs - 1} learning rates and the final run: {recipe}"
    cores = "GPUs"
    if topology.is_tpu:
        cores = f"TensorCores, {topology.fabric.cores_per_chip} a chip"
    yield f"speed    {speed}"
    yield f"recipe   {recipe}"
    yield (
        f"         {totals.days:,.2f} days, {totals.chip_hours:,.0f} chip-hours, "
        f"{totals.core_days:,.0f} core-days "
        f"({cores}); at this MFU {totals.tpu_v3_core_days:,.0f} core-days of a TPU v3"
    )
    if totals.price is not None:
        yield f"         price {totals.price:,.0f}"
    yield "         not included: evaluation, checkpoints, input, interruptions"


def to_json(plan: Plan) -> dict[str, object]:
    """Return the same as plain values, sizes in bytes and times in seconds."""
    return {
        "model": plan.run.architecture.name,
        "weights": plan.network.origin,
        "global_batch": plan.config.global_batch,
        "topology": plan.topology.name,
        "chip": plan.topology.chip.name,
        "num_chips": plan.topology.num_chips,
        "mesh": dict(plan.run.batch_sharding.mesh.shape),
        "sharding": plan.config.sharding.parameters,
        "remat": plan.run.architecture.remat,
        "attention": plan.attention_form,
        "accumulation_steps": plan.config.optimizer.accumulation_steps,
        "basis": _name_basis(plan),
        "reason": plan.reason,
        "num_runs": plan.num_runs,
        "compile_seconds": getattr(plan.compiled, "compile_seconds", 0.0),
        "fits": plan.fits,
        "needed_bytes": plan.needed_bytes,
        "usable_bytes": plan.usable_bytes,
        "step_seconds": plan.step_seconds,
        "limit_seconds": plan.limit_seconds,
        "dataset": dataclasses.asdict(plan.dataset),
        "memory": _convert(plan.memory),
        "timeline": _convert_timeline(plan.timeline),
        "roofline": _convert(plan.roofline),
        "totals": _convert(plan.totals),
    }


def _name_basis(plan: Plan) -> str:
    if plan.compiled is None:
        return "arithmetic"
    if isinstance(plan.compiled, Executable):
        return "compiled"
    return "compiler gave up"


def _convert(section: Memory | Roofline | Totals | None) -> dict[str, object] | None:
    if section is None:
        return None
    return dataclasses.asdict(section)


def _convert_timeline(timeline: Timeline | None) -> dict[str, object] | None:
    """Return the timeline with numbers of devices, and phases by their name in JSON."""
    if timeline is None:
        return None
    values = dataclasses.asdict(timeline)
    values["parts"] = values.pop("phases")
    for collective in values["collectives"]:
        collective["devices"] = len(collective["devices"])
    return values


def result_to_text(result: SearchResult) -> str:
    """Return a table of all candidates, then the winner's report and the options that select it."""
    rows = [_SEARCH_HEAD, *(_list_cells(candidate, result) for candidate in result.candidates)]
    table = columns(rows, "<>><>>>>>><", gap=" | ") + "\n"
    if result.num_rejected:
        table += f"{result.num_rejected} layouts are not possible on this machine\n"
    if result.winner is None:
        return (
            f"{table}\nNothing fits: use a larger machine, a smaller batch or a smaller network.\n"
        )
    overrides = " ".join(result.overrides) or "(nothing: the recipe as it is)"
    return f"{table}\n{to_text(result.winner)}\nadd to the command: {overrides}\n"


def _list_cells(candidate: Candidate, result: SearchResult) -> Sequence[str]:
    config = candidate.config
    plan = candidate.plan
    compiled_gib = ""
    compiled_ms = ""
    if plan is not None and plan.compiled is not None and plan.needed_bytes is not None:
        compiled_gib = f"{plan.needed_bytes / GIB:.2f}"
    if plan is not None and plan.timeline is not None:
        compiled_ms = f"{1e3 * plan.timeline.seconds:,.0f}"
    return (
        config.sharding.parameters,
        str(config.sharding.num_replicas or "slices"),
        str(config.sharding.num_model_shards),
        config.model.remat,
        str(config.optimizer.accumulation_steps),
        str(config.global_batch),
        f"{candidate.needed_bytes / GIB:.2f}",
        f"{1e3 * candidate.step_seconds:,.0f}",
        compiled_gib,
        compiled_ms,
        _judge(candidate, result),
    )


def _judge(candidate: Candidate, result: SearchResult) -> str:
    """Return the verdict on a candidate."""
    if candidate.plan is None:
        if candidate.needed_bytes > result.usable_bytes:
            return "too large by arithmetic"
        return "not tried"
    if candidate.plan is result.winner:
        return "fastest that fits"
    return "fits" if candidate.plan.fits else "does not fit"


def result_to_json(result: SearchResult) -> dict[str, object]:
    """Return the same as plain values."""
    return {
        "candidates": [_convert_candidate(candidate) for candidate in result.candidates],
        "winner": None if result.winner is None else to_json(result.winner),
        "overrides": list(result.overrides),
        "num_refused": result.num_rejected,
    }


def _convert_candidate(candidate: Candidate) -> dict[str, object]:
    config = candidate.config
    return {
        "global_batch": config.global_batch,
        "remat": config.model.remat,
        "accumulation_steps": config.optimizer.accumulation_steps,
        "sharding": dataclasses.asdict(config.sharding),
        "arithmetic": {
            "needed_bytes": candidate.needed_bytes,
            "step_seconds": candidate.step_seconds,
        },
        "plan": None if candidate.plan is None else to_json(candidate.plan),
    }
