"""The compiler for TPUs: messages, and, where libtpu is installed, one small step compiled for four chips."""

import dataclasses
import functools
import os
import re
import shutil

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from tests.kernels.test_unit_pallas import unit as make_unit
from tests.tools.plan import small_plans as small
from vit_jax.kernels.attention_pallas import attention
from vit_jax.kernels.devices import trace_for
from vit_jax.sharding.mesh import Placement, build_mesh, replicated
from vit_jax.tools.plan import aot, estimate, hlo
from vit_jax.tools.plan.arithmetic import arithmetic_memory
from vit_jax.tools.plan.estimate import make_plan
from vit_jax.tools.plan.report import to_json, to_text
from vit_jax.tools.plan.timeline import step_timeline
from vit_jax.tools.plan.topology import parse_topology

needs_libtpu = pytest.mark.skipif(not aot.has_compiler(), reason="libtpu is not installed")


@pytest.mark.parametrize(
    ("message", "needed", "available"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (72.04G) "
            "exceeds available HBM (30.75G).",
            72.04 * 2**30,
            30.75 * 2**30,
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 512.5M of 15.75G hbm.",
            512.5 * 2**20,
            15.75 * 2**30,
        ),
        ("RESOURCE_EXHAUSTED: too much", None, None),
    ],
)
def test_messages_about_programs_that_are_too_large(message, needed, available):
    result = aot.read_too_large(message)
    assert (result.needed_bytes, result.available_bytes) == (
        needed and int(needed),
        available and int(available),
    )


@pytest.mark.newest
@needs_libtpu
@pytest.mark.tools
@pytest.mark.parametrize("name", ["v5e:4x4", "2*v5e:2x4", "v4:4x4x4", "v5p:2x2x1", "v6e:1x1"])
def test_stand_ins_are_like_the_devices_of_the_compiler(name):
    topology = parse_topology(name)
    before = dict(os.environ)
    real, stand_ins = (
        [
            (d.device_kind, tuple(d.coords), d.process_index, getattr(d, "slice_index", None) or 0)
            for d in devices
        ]
        for devices in (aot.topology_devices(topology), topology.stand_ins())
    )

    assert real == stand_ins
    assert dict(os.environ) == before, "this machine must not look like a host of TPUs"


@needs_libtpu
@pytest.mark.tools
@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_the_clock_turns_cycles_into_the_speed_of_the_chip(name):
    """XLA's cycles for a large product and a large copy are near the peak and the bandwidth, and never above."""
    topology = parse_topology(name)
    size = 4096
    place = SingleDeviceSharding(aot.topology_devices(topology)[0])
    shapes = [
        ((size, size), jnp.bfloat16),
        ((size, size), jnp.bfloat16),
        ((8, size, size), jnp.float32),
    ]
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in shapes]
    step = jax.jit(lambda x, y, z: (x @ y, z * 2.5), out_shardings=place)
    program = hlo.parse(step.lower(*arguments).compile().as_text())
    seconds = {"copy": 0.0, "product": 0.0}
    for instruction in program.computations[program.entry]:
        is_copy = any(array.dims == (8, size, size) for array in instruction.arrays)
        seconds["copy" if is_copy else "product"] += (
            instruction.cycles / topology.fabric.clock_hertz
        )

    assert 0.6 < 2 * size**3 / seconds["product"] / topology.chip.peak_bf16_flops < 1
    assert (
        0.6
        < 2 * 4 * 8 * size**2 / seconds["copy"] / topology.chip.memory_bandwidth_bytes_per_second
        < 1
    )


@needs_libtpu
@pytest.mark.tools
@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_a_kernel_costs_the_programs_that_one_core_runs(name):
    """The loop of the compiled kernel has that length, and two more passes that only read or write."""
    topology = parse_topology(name)
    num_images = 6
    device = aot.topology_devices(topology)[0]
    shapes = [(num_images, 197, 128)] * 3 + [(3, 128)]
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=SingleDeviceSharding(device))
        for shape in shapes
    ]
    step = jax.jit(lambda *operands: attention(*operands, 64, False))
    compiled = aot.compile_program(lambda: step.lower(*arguments), device)
    line = step_timeline(hlo.parse(compiled.text), topology, lambda *_: 0.0, compiled.bundles)
    (bundles,) = (size for name, size in compiled.bundles.items() if "attention" in name)
    (schedule,) = (
        path
        for path in aot._open_schedules().glob("*attention*final_bundles.txt")
        if "analysis" not in path.name
    )
    (last,) = re.findall(r"scmp\.ge\S* %\S+, (\d+) /\* loop exit test", schedule.read_text())
    passes = int(last) - 2

    assert passes == num_images / topology.fabric.cores_per_chip
    assert line.kernel_seconds == pytest.approx(bundles * passes / topology.fabric.clock_hertz)


@pytest.mark.newest
@needs_libtpu
@pytest.mark.tools
@pytest.mark.parametrize("form", ["preactivation", "postactivation"])
@pytest.mark.parametrize(("channels", "size", "stride"), [(64, (7, 6), 1), (128, (12, 10), 2)])
def test_units_of_a_resnet_are_compiled_as_kernels(form, channels, size, stride):
    """Forwards and backwards, with a shortcut and rows that are no complete tiles."""
    topology = parse_topology("v5e:1x1")
    mesh = build_mesh(aot.topology_devices(topology))
    unit = make_unit(channels, channels, stride=stride, form=form, dtype="bfloat16")
    x = jnp.zeros((2, *size, channels), jnp.bfloat16)
    place = functools.partial(jax.ShapeDtypeStruct, sharding=replicated(mesh))
    arguments = jax.tree.map(lambda leaf: place(leaf.shape, leaf.dtype), (unit, x))
    differentiate = jax.grad(lambda unit, x: unit(x).astype(jnp.float32).sum(), argnums=(0, 1))
    step = jax.jit(trace_for(Placement(mesh))(differentiate))
    compiled = aot.compile_program(lambda: step.lower(*arguments), mesh.devices.flat[0])
    line = step_timeline(hlo.parse(compiled.text), topology, lambda *_: 0.0, compiled.bundles)
    kernels = {
        name: bundles for name, bundles in compiled.bundles.items() if name.startswith("unit_")
    }

    assert len(kernels) == 2
    assert line.num_unknown_kernels == 0
    assert line.kernel_seconds == pytest.approx(
        2 * sum(kernels.values()) / topology.fabric.clock_hertz
    )


@pytest.fixture(scope="module")
def plan():
    config = small.recipe(
        "sharding.parameters=fsdp", "model.compute_dtype=bfloat16"
    )  # in which attention is a kernel
    return make_plan(config, parse_topology("v5e:2x2"), small.dataset(config))


@pytest.mark.newest
@needs_libtpu
@pytest.mark.tools
def test_a_step_is_compiled_for_four_chips(plan):
    """Its kinds of memory sum up and its state is that of arithmetic; its schedule has loops and collectives."""
    assert plan.fits
    assert plan.compiled.text.startswith("HloModule")

    text = to_text(plan)
    assert "XLA compiled the step for this machine" in text
    assert "ms by the compiled schedule" in text

    arithmetic = arithmetic_memory(plan.run, plan.topology)
    assert min(dataclasses.astuple(plan.memory)) >= 0
    assert plan.memory.parameters == pytest.approx(arithmetic.parameters, rel=0.01)
    assert plan.memory.optimizer == pytest.approx(arithmetic.optimizer, rel=0.01)
    assert plan.memory.optimizer == pytest.approx(
        2 * plan.memory.parameters, rel=0.01
    )  # two moments
    assert plan.timeline.num_unknown_loops == 0
    assert plan.timeline.compute_seconds > 0
    assert plan.timeline.kernel_seconds > 0, (
        "forwards and backwards, from the schedules that the compiler wrote"
    )
    assert plan.timeline.num_unknown_kernels == 0
    assert any(collective.count == 2 for collective in plan.timeline.collectives), (
        "one for each of two blocks"
    )

    every = (
        i
        for computation in hlo.parse(plan.compiled.text).computations.values()
        for i in computation
    )
    (norm,) = (i for i in every if i.opcode == "conditional")

    assert "metrics" in norm.source, "by which the plan knows that most steps do without it"

    sums = [c for c in plan.timeline.collectives if c.operation == "all-reduce"]
    assert {len(c.devices) for c in sums} == {4}


@needs_libtpu
@pytest.mark.tools
def test_own_code_has_the_figures_of_the_compiled_step_only(plan, monkeypatch):
    own = dataclasses.replace(plan.run.architecture, block="mine:Block")
    monkeypatch.setattr(estimate, "architecture_of", lambda *_: own)
    monkeypatch.setattr(
        estimate, "assemble", lambda *_, **__: dataclasses.replace(plan.run, architecture=own)
    )
    monkeypatch.setattr(aot, "compile_step", lambda _: plan.compiled)
    result = make_plan(plan.config, plan.topology, plan.dataset)
    values = to_json(result)

    assert (values["roofline"], values["totals"]["mfu"], values["memory"]) == (
        None,
        None,
        to_json(plan)["memory"],
    )
    assert values["totals"]["days"] == plan.totals.days
    assert "no arithmetic estimate" in to_text(result)

    monkeypatch.setattr(aot, "compile_step", lambda _: aot.TooLarge(None, None, "too large"))
    result = make_plan(plan.config, plan.topology, plan.dataset)

    assert (result.step_seconds, result.totals) == (None, None)
    assert "DOES NOT FIT" in to_text(result)
    with pytest.raises(ValueError, match="mine:Block: no formula"):
        make_plan(plan.config, plan.topology, plan.dataset, can_compile=False)


@needs_libtpu
@pytest.mark.tools
def test_what_does_not_fit_is_a_result():
    config = small.recipe(
        "model.width=8192", "model.mlp_dim=65536", "model.depth=24", "global_batch=4"
    )
    plan = make_plan(config, parse_topology("v5e:2x2"), small.dataset(config))

    assert not plan.fits
    assert plan.memory is None
    assert plan.usable_bytes == plan.topology.fabric.usable_bytes
    assert "DOES NOT FIT" in to_text(plan)


def test_the_folder_of_schedules_is_made_again():
    shutil.rmtree(aot._open_schedules())
    assert aot._open_schedules().is_dir()
