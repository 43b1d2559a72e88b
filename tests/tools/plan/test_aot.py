"""The compiler for TPUs: messages, and, where libtpu is installed, one small step compiled for four
chips.
"""

import dataclasses
import functools
import os
import re
import shutil

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from tests.columns import list_column
from tests.kernels.test_unit_pallas import unit as make_unit
from tests.tools.plan import small_plans as small
from vit_jax.kernels.attention_pallas import attention
from vit_jax.kernels.devices import trace_for
from vit_jax.sharding.mesh import Placement, build_mesh, replicate
from vit_jax.tools.plan import aot, estimate, hlo
from vit_jax.tools.plan.arithmetic import estimate_memory
from vit_jax.tools.plan.estimate import make_plan
from vit_jax.tools.plan.report import to_json, to_text
from vit_jax.tools.plan.timeline import simulate_step
from vit_jax.tools.plan.topology import parse_topology

OVER_V4 = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(72.04G) exceeds available HBM (30.75G)."
)

OVER_V5E = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 512.5M of 15.75G hbm."


needs_libtpu = pytest.mark.skipif(not aot.has_compiler(), reason="libtpu is not installed")


@pytest.mark.parametrize(
    ("message", "needed_bytes", "available_bytes"),
    [
        (OVER_V4, int(72.04 * 2**30), int(30.75 * 2**30)),
        (OVER_V5E, int(512.5 * 2**20), int(15.75 * 2**30)),
        ("RESOURCE_EXHAUSTED: too much", None, None),
    ],
)
def test_messages_about_programs_that_are_too_large(
    message,
    needed_bytes,
    available_bytes,
):
    result = aot.read_too_large(message)

    assert result.needed_bytes == needed_bytes
    assert result.available_bytes == available_bytes


def describe_devices(devices):
    described = []
    for device in devices:
        slice_index = getattr(device, "slice_index", None) or 0
        coords = tuple(device.coords)
        described.append((device.device_kind, coords, device.process_index, slice_index))
    return described


@pytest.mark.newest
@needs_libtpu
@pytest.mark.tools
@pytest.mark.parametrize(
    "name",
    ["v5e:4x4", "2*v5e:2x4", "v4:4x4x4", "v5p:2x2x1", "v6e:1x1"],
)
def test_stand_ins_are_like_the_devices_of_the_compiler(name):
    topology = parse_topology(name)
    before = dict(os.environ)

    real = describe_devices(aot.list_devices(topology))

    assert real == describe_devices(topology.stand_ins())
    assert dict(os.environ) == before, "this machine must not look like a host of TPUs"


@needs_libtpu
@pytest.mark.tools
@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_the_clock_turns_cycles_into_the_speed_of_the_chip(name):
    """XLA's cycles for a large product and a large copy are near the peak and the bandwidth, and
    never above.
    """
    topology = parse_topology(name)
    size = 4096
    place = SingleDeviceSharding(aot.list_devices(topology)[0])
    matrix = jax.ShapeDtypeStruct((size, size), jnp.bfloat16, sharding=place)
    stack = jax.ShapeDtypeStruct((8, size, size), jnp.float32, sharding=place)
    step = jax.jit(
        lambda x, y, z: (x @ y, z * 2.5),
        out_shardings=place,
    )
    program = hlo.parse(step.lower(matrix, matrix, stack).compile().as_text())

    copy_cycles = 0
    product_cycles = 0
    for instruction in program.computations[program.entry]:
        if any(array.dims == (8, size, size) for array in instruction.arrays):
            copy_cycles += instruction.cycles
        else:
            product_cycles += instruction.cycles

    clock_hertz = topology.fabric.clock_hertz
    flops_per_second = 2 * size**3 / (product_cycles / clock_hertz)
    bytes_per_second = 2 * 4 * 8 * size**2 / (copy_cycles / clock_hertz)
    chip = topology.chip

    assert 0.6 < flops_per_second / chip.peak_bf16_flops < 1
    assert 0.6 < bytes_per_second / chip.memory_bandwidth_bytes_per_second < 1


def read_last_pass(kernel):
    """Return the index of the last pass through the loop of this kernel, from its schedule."""
    paths = aot._open_schedules().glob(f"*{kernel}*final_bundles.txt")
    (schedule,) = (path for path in paths if "analysis" not in path.name)
    pattern = r"scmp\.ge\S* %\S+, (\d+) /\* loop exit test"
    (last,) = re.findall(pattern, schedule.read_text())
    return int(last)


@needs_libtpu
@pytest.mark.tools
@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_a_kernel_costs_the_programs_that_one_core_runs(name):
    """The loop of the compiled kernel has that length, and two more passes that only read or write."""
    topology = parse_topology(name)
    num_images = 6
    device = aot.list_devices(topology)[0]
    place = SingleDeviceSharding(device)
    operand = jax.ShapeDtypeStruct(
        (num_images, 197, 128),
        jnp.bfloat16,
        sharding=place,
    )
    bias = jax.ShapeDtypeStruct((3, 128), jnp.bfloat16, sharding=place)
    step = jax.jit(lambda *operands: attention(*operands, 64, False))

    compiled = aot.compile_program(
        lambda: step.lower(operand, operand, operand, bias),
        device,
    )
    timeline = simulate_step(
        hlo.parse(compiled.text),
        topology,
        lambda *_: 0.0,
        compiled.bundles,
    )

    (name,) = [name for name in compiled.bundles if "attention" in name]
    bundles = compiled.bundles[name]
    passes = read_last_pass("attention") - 2
    seconds = bundles * passes / topology.fabric.clock_hertz

    assert passes == num_images / topology.fabric.cores_per_chip
    assert timeline.kernel_seconds == pytest.approx(seconds)


@pytest.mark.newest
@needs_libtpu
@pytest.mark.tools
@pytest.mark.parametrize("form", ["preactivation", "postactivation"])
@pytest.mark.parametrize(
    ("channels", "size", "stride"),
    [(64, (7, 6), 1), (128, (12, 10), 2)],
)
def test_units_of_a_resnet_are_compiled_as_kernels(
    form,
    channels,
    size,
    stride,
):
    """Both directions have a shortcut, and rows that are no complete tiles."""
    topology = parse_topology("v5e:1x1")
    mesh = build_mesh(aot.list_devices(topology))
    unit = make_unit(
        channels,
        channels,
        stride=stride,
        form=form,
        dtype="bfloat16",
    )
    x = jnp.zeros((2, *size, channels), jnp.bfloat16)
    place = functools.partial(jax.ShapeDtypeStruct, sharding=replicate(mesh))
    arguments = jax.tree.map(
        lambda leaf: place(leaf.shape, leaf.dtype),
        (unit, x),
    )
    differentiate = jax.grad(
        lambda unit, x: unit(x).astype(jnp.float32).sum(),
        argnums=(0, 1),
    )
    step = jax.jit(trace_for(Placement(mesh))(differentiate))

    compiled = aot.compile_program(
        lambda: step.lower(*arguments),
        mesh.devices.flat[0],
    )
    timeline = simulate_step(
        hlo.parse(compiled.text),
        topology,
        lambda *_: 0.0,
        compiled.bundles,
    )

    bundles = [size for name, size in compiled.bundles.items() if name.startswith("unit_")]
    seconds = 2 * sum(bundles) / topology.fabric.clock_hertz

    assert len(bundles) == 2
    assert timeline.num_unknown_kernels == 0
    assert timeline.kernel_seconds == pytest.approx(seconds)


@pytest.fixture(scope="module")
def plan():
    """A plan in which attention is a kernel."""
    config = small.recipe("sharding.parameters=fsdp", "model.compute_dtype=bfloat16")
    return make_plan(
        config,
        parse_topology("v5e:2x2"),
        small.dataset(config),
    )


@pytest.mark.newest
@needs_libtpu
@pytest.mark.tools
def test_a_step_is_compiled_for_four_chips(plan):
    """Its kinds of memory sum up, and its state agrees with arithmetic."""
    memory = plan.memory
    arithmetic = estimate_memory(plan.run, plan.topology)
    text = to_text(plan)

    assert plan.fits
    assert plan.compiled.text.startswith("HloModule")
    assert "XLA compiled the step for this machine" in text
    assert "ms by the compiled schedule" in text

    assert min(dataclasses.astuple(memory)) >= 0
    parameters = pytest.approx(arithmetic.parameters, rel=0.01)
    optimizer = pytest.approx(arithmetic.optimizer, rel=0.01)
    assert memory.parameters == parameters
    assert memory.optimizer == optimizer
    # The optimiser has two moments.
    assert memory.optimizer == pytest.approx(2 * memory.parameters, rel=0.01)


@pytest.mark.newest
@needs_libtpu
@pytest.mark.tools
def test_the_schedule_of_a_step_has_loops_and_collectives(plan):
    timeline = plan.timeline
    counts = list_column(timeline.collectives, "count")
    sums = [c for c in timeline.collectives if c.operation == "all-reduce"]

    assert timeline.num_unknown_loops == 0
    assert timeline.compute_seconds > 0
    # The kernels of both directions are found in the schedules that the compiler wrote.
    assert timeline.kernel_seconds > 0
    assert timeline.num_unknown_kernels == 0
    assert 2 in counts, "one for each of two blocks"
    assert {len(c.devices) for c in sums} == {4}


@pytest.mark.newest
@needs_libtpu
@pytest.mark.tools
def test_the_norms_of_logged_steps_are_conditional(plan):
    """By its source a plan knows that most steps do without it."""
    conditionals = []
    for instructions in hlo.parse(plan.compiled.text).computations.values():
        conditionals += [i for i in instructions if i.opcode == "conditional"]

    (norm,) = conditionals
    assert "metrics" in norm.source


@needs_libtpu
@pytest.mark.tools
def test_custom_code_has_the_figures_of_the_compiled_step_only(plan, monkeypatch):
    custom = dataclasses.replace(plan.run.architecture, block="vit_jax.models.block:Block")
    builder = dataclasses.replace(plan.run.builder, architecture=custom)
    run = dataclasses.replace(plan.run, builder=builder)
    monkeypatch.setattr(estimate, "architecture_of", lambda *_: custom)
    monkeypatch.setattr(estimate, "assemble", lambda *_, **__: run)
    monkeypatch.setattr(aot, "compile_step", lambda _: plan.compiled)

    result = make_plan(plan.config, plan.topology, plan.dataset)
    values = to_json(result)

    assert values["roofline"] is None
    assert values["totals"]["mfu"] is None
    assert values["memory"] == to_json(plan)["memory"]
    assert values["totals"]["days"] == plan.totals.days
    assert "no arithmetic estimate" in to_text(result)

    too_large = aot.TooLarge(None, None, "too large")
    monkeypatch.setattr(aot, "compile_step", lambda _: too_large)
    result = make_plan(plan.config, plan.topology, plan.dataset)

    assert result.step_seconds is None
    assert result.totals is None
    assert "DOES NOT FIT" in to_text(result)

    with pytest.raises(ValueError, match=r"vit_jax\.models\.block:Block: no formula"):
        make_plan(
            plan.config,
            plan.topology,
            plan.dataset,
            can_compile=False,
        )


@needs_libtpu
@pytest.mark.tools
def test_what_does_not_fit_is_a_result():
    config = small.recipe(
        "model.width=8192",
        "model.mlp_dim=65536",
        "model.depth=24",
        "global_batch=4",
    )
    plan = make_plan(
        config,
        parse_topology("v5e:2x2"),
        small.dataset(config),
    )

    assert not plan.fits
    assert plan.memory is None
    assert plan.usable_bytes == plan.topology.fabric.usable_bytes
    assert "DOES NOT FIT" in to_text(plan)


def test_the_folder_of_schedules_is_made_again():
    shutil.rmtree(aot._open_schedules())
    assert aot._open_schedules().is_dir()
