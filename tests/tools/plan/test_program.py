"""The program of a compiled step: parsed, its memory by kind, and its time against sums made by
hand.
"""

import dataclasses
import re
import types

import pytest

from vit_jax.sharding.memory import Memory
from vit_jax.tools.plan import hlo
from vit_jax.tools.plan.compiled_memory import measure_memory
from vit_jax.tools.plan.timeline import simulate_step

# As XLA for TPUs prints programs, small enough to work out by hand.
TEXT = """\
HloModule jit_train_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%async_collective_fusion.1 (p: bf16[64,128]) -> bf16[64,128] {
  %p = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.2 = bf16[256,128]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=7, \
replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}
}

%gathering (p: bf16[64,128]) -> bf16[256,128] {
  %p = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.1 = bf16[256,128]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=7, \
replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}
}

%body (state: (s32[], f32[3,100,128], f32[8,128])) -> (s32[], f32[3,100,128], f32[8,128]) {
  %state = (s32[], f32[3,100,128]{2,1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %fetch = (f32[8,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%state)
  %work = f32[8,128]{1,0:T(8,128)} fusion(%state), kind=kLoop, calls=%add, \
metadata={op_name="jit(train_step)/jvp()/while/body/dot"}, backend_config={"estimated_cycles":"1000"}
  %fetched = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%fetch)
  %all-reduce.1 = f32[8,128]{1,0:T(8,128)} all-reduce(%work), channel_id=3, replica_groups=[2,4]<=[8], to_apply=%add, \
metadata={op_name="jit(train_step)/sum"}
  ROOT %next = (s32[], f32[3,100,128], f32[8,128]) tuple(%state, %state, %all-reduce.1)
}

%condition (state: (s32[], f32[3,100,128], f32[8,128])) -> pred[] {
  %state = (s32[], f32[3,100,128]{2,1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %length = s32[]{:T(128)} constant(3)
  %counter = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %less = pred[]{:T(512)} compare(%counter, %length), direction=LT
}

ENTRY %main (param.0: f32[12,100], param.1: f32[12,100], param.2: u8[4,8,8,3]) -> f32[8,128] {
  %param.0 = f32[12,100]{1,0:T(8,128)} parameter(0), metadata={op_name="state[\\'model/head/kernel\\']"}
  %param.1 = f32[12,100]{1,0:T(8,128)} parameter(1), metadata={op_name="state[\\'optimizer/0/mu/head/kernel\\']"}
  %param.2 = u8[4,8,8,3]{3,2,1,0:T(8,128)} parameter(2), metadata={op_name="batch.image_BHWC"}
  %zero = s32[]{:T(128)} constant(0)
  %kept = f32[3,100,128]{2,1,0:T(8,128)} custom-call(), custom_call_target="AllocateBuffer"
  %first = f32[8,128]{1,0:T(8,128)} fusion(%param.0), kind=kLoop, calls=%add, backend_config={"estimated_cycles":"500"}
  %async-collective-start = (bf16[64,128]{1,0}, bf16[256,128]{1,0}) fusion(%first), kind=kCustom, calls=%gathering
  %beside = f32[8,128]{1,0:T(8,128)} fusion(%first), kind=kCustom, calls=%async_collective_fusion.1, \
backend_config={"estimated_cycles":"2000"}
  %async-collective-done = bf16[256,128]{1,0} fusion(%beside), kind=kCustom, calls=%gathering
  %before = (s32[], f32[3,100,128], /*index=2*/f32[8,128]) tuple(%zero, %kept, %beside)
  %while.1 = (s32[], f32[3,100,128]{2,1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)}) while(%before), condition=%condition, \
body=%body, metadata={op_name="jit(train_step)/jvp()/while"}
  ROOT %result = f32[8,128]{1,0:T(8,128)} get-tuple-element(%while.1), index=2
}
"""
TILE = 8 * 128 * 4
CYCLE = 1e-9
ENTRY = (500 + 2000) * CYCLE
LOOP = 3 * 1000 * CYCLE
UNKNOWN_LENGTH = TEXT.replace(
    "%length = s32[]{:T(128)} constant(3)", "%length = s32[]{:T(128)} parameter(1)"
)


@pytest.mark.parametrize(
    ("shape", "plain", "padded", "is_in_hbm"),
    [
        ("f32[12,100]{1,0:T(8,128)}", 4800, 16 * 128 * 4, True),
        ("f32[12,100]{0,1:T(8,128)}", 4800, 104 * 128 * 4, True),
        (
            "bf16[64,197,768]{2,1,0:T(8,128)(2,1)S(1)}",
            64 * 197 * 768 * 2,
            64 * 200 * 768 * 2,
            False,
        ),
        ("f32[768]{0:T(1024)}", 3072, 4096, True),
        ("s32[]{:T(128)}", 4, 4, True),
        ("pred[8]", 8, 8, True),
        (
            "u8[64,224,224,3]{2,1,3,0:T(32,128)(4,1)}",
            64 * 224 * 224 * 3,
            64 * 3 * 224 * 256,
            True,
        ),
    ],
)
def test_arrays(shape, plain, padded, is_in_hbm):
    (array,) = hlo.Instruction("x", shape, "add", "").arrays

    assert array.num_bytes == plain
    assert array.padded_bytes == padded
    assert array.is_in_hbm == is_in_hbm


TRANSPOSED = "mesh['axis_0'=1,'axis_1'=4,'axis_2'=2], device_ids=([2,4]T(1,0))"


@pytest.mark.parametrize(
    ("groups", "members"),
    [
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", [0, 1, 2, 3]),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", [0, 4]),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=2] {'axis_0','axis_1'}", [0, 1, 2, 3]),
        (f"replica_groups={TRANSPOSED} {{'axis_1'}}", [0, 1, 2, 3]),
        (f"replica_groups={TRANSPOSED} {{'axis_2'}}", [0, 4]),
        ("replica_groups=[2,4]<=[8]", [0, 1, 2, 3]),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [0, 4]),
        ("replica_groups={{0,2},{1,3}}", [0, 2]),
        ("source_target_pairs={{0,1},{1,0}}", [0, 1]),
    ],
)
def test_members(groups, members):
    attributes = f"%y), channel_id=1, {groups}, to_apply=%add"
    collective = hlo.Instruction("x", "f32[2]", "all-reduce", attributes)

    assert hlo.list_members(collective) == members


IMAGES = 4 * 8 * 8 * 128

ALIGNMENT = 512  # bytes that the compiler adds between arguments


def make_stats():
    """Return XLA's totals for two arguments of two tiles each, and the images."""
    return types.SimpleNamespace(
        argument_size_in_bytes=4 * TILE + IMAGES + ALIGNMENT,
        temp_size_in_bytes=200_000,
        output_size_in_bytes=6096,
        alias_size_in_bytes=2000,
        generated_code_size_in_bytes=1000,
    )


def test_groups_in_an_unknown_form():
    with pytest.raises(ValueError, match="unknown form"):
        hlo.list_members(hlo.Instruction("x", "f32[2]", "all-reduce", "%y)"))


def test_kinds_of_a_program():
    kept = 3 * 104 * 128 * 4  # filled slice by slice by the forward loop
    expected = Memory(
        parameters=2 * TILE,
        optimizer=2 * TILE,
        average=0,
        batch=IMAGES + ALIGNMENT,
        activations=kept,
        gradients=0,
        temporary=200_000 + 4096 - kept,
        program=1000,
    )

    assert measure_memory(make_stats(), hlo.parse(TEXT)) == expected

    backward = hlo.parse(TEXT.replace("jvp()/while", "transpose(jvp())/while"))
    expected = dataclasses.replace(
        expected,
        activations=0,
        gradients=kept,
    )

    assert measure_memory(make_stats(), backward) == expected


def simulate(
    text=TEXT,
    *,
    memory=1e12,
    collective=0.0,
    bundles=None,
    cores=1,
):
    """Return the timeline on a machine with this bandwidth of memory and these seconds of a
    collective.
    """
    fabric = types.SimpleNamespace(
        clock_hertz=1 / CYCLE,
        network_bytes_per_second=1e9,
        cores_per_chip=cores,
    )
    chip = types.SimpleNamespace(memory_bandwidth_bytes_per_second=memory)
    machine = types.SimpleNamespace(
        is_tpu=True,
        fabric=fabric,
        chip=chip,
    )

    return simulate_step(
        hlo.parse(text),
        machine,
        lambda *_: collective,
        bundles or {},
    )


SLOW_MEMORY = 8 * 128 * 4 / 3e-6  # bytes a second with which the copy takes 3 us


@pytest.mark.parametrize(
    ("text", "memory", "compute", "prefetch", "num_unknown_loops"),
    [
        (TEXT, 1e12, ENTRY + LOOP, 0, 0),
        # A loop of unknown length counts once.
        (UNKNOWN_LENGTH, 1e12, ENTRY + LOOP / 3, 0, 1),
        # 1000 cycles of the copy are hidden.
        (TEXT, SLOW_MEMORY, ENTRY + LOOP, 3 * (3e-6 - 1000 * CYCLE), 0),
    ],
    ids=["known length", "unknown length", "slow memory"],
)
def test_cycles_times_loops_and_memory_that_comes_too_late(
    text,
    memory,
    compute,
    prefetch,
    num_unknown_loops,
):
    line = simulate(text, memory=memory)

    assert line.compute_seconds == pytest.approx(compute)
    assert line.prefetch_seconds == pytest.approx(prefetch)
    assert line.collective_seconds == 0
    assert line.num_unknown_loops == num_unknown_loops
    assert line.unknown_loops_pass_seconds == pytest.approx(num_unknown_loops * LOOP / 3)
    assert line.seconds == pytest.approx(compute + prefetch)


@pytest.mark.parametrize(
    ("source", "branch"),
    [
        ("metrics/cond", 0),
        ("optimizer/cond", 700),
        ("cond", 700),
    ],
)
def test_a_conditional_costs_its_longest_branch_unless_it_is_for_logged_steps(source, branch):
    branches = """\
%skip (p: f32[8,128]) -> f32[] {
  ROOT %nan = f32[] constant(nan)
}

%norm (p: f32[8,128]) -> f32[] {
  %p = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %squares = f32[] fusion(%p), kind=kLoop, calls=%add, backend_config={"estimated_cycles":"700"}
}

ENTRY"""
    chosen = f"""\
  %chosen = f32[] conditional(%zero, %first, %first), branch_computations={{%skip, %norm}}, \
metadata={{op_name="jit(train_step)/{source}"}}
  ROOT %result"""
    line = simulate(TEXT.replace("ENTRY", branches).replace("  ROOT %result", chosen))

    assert line.seconds == pytest.approx(ENTRY + LOOP + branch * CYCLE)


@pytest.mark.parametrize("phase", ["optimizer", "metrics"])
def test_norms_in_one_fusion_with_the_update_count_as_the_update(phase):
    text = TEXT.replace(
        "calls=%add, backend",
        'calls=%add, metadata={op_name="metrics/reduce_sum"}, backend',
    )
    text = text.replace(
        "add(%a, %b)",
        f'add(%a, %b), metadata={{op_name="jit(train_step)/{phase}/add"}}',
    )

    assert simulate(text).phases[phase] == pytest.approx(500 * CYCLE)


KERNEL = TEXT.replace(
    "  ROOT %next = ",
    """\
  %attention.1 = bf16[8,128]{1,0:T(8,128)} custom-call(%work), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"programs":"20"
}}, metadata={op_name="jit(train_step)/attention"}, backend_config={"custom_call_config":{"body":"QUJD"}}
  ROOT %next = """,
)


def test_a_kernel_costs_its_bundles_times_its_programs():
    """XLA counts no cycles for it, and the lines of its metadata end no computation."""
    line = simulate(
        KERNEL,
        bundles={"attention.1": 70, "other": 9},
    )
    kernel_seconds = 3 * 20 * 70 * CYCLE

    assert line.kernel_seconds == pytest.approx(kernel_seconds)
    assert line.compute_seconds == pytest.approx(ENTRY + LOOP)
    assert line.seconds == pytest.approx(ENTRY + LOOP + line.kernel_seconds)
    assert line.num_unknown_kernels == 0


def test_equal_kernels_are_compiled_once():
    (first,) = re.findall(r"  %attention.1 = .*?QUJD.*?\n", KERNEL, re.DOTALL)
    second = first.replace("attention.1", "attention.2")
    bundles = {"attention.1": 70}

    once = simulate(KERNEL, bundles=bundles)
    twice = simulate(
        KERNEL.replace(first, first + second),
        bundles=bundles,
    )

    assert twice.kernel_seconds == pytest.approx(2 * once.kernel_seconds)


@pytest.mark.parametrize(
    ("programs", "per_core"),
    [
        (20, 10),
        (5, 3),
        (1, 1),
    ],
)
def test_two_cores_share_the_programs_of_a_kernel(programs, per_core):
    text = KERNEL.replace('"programs":"20"', f'"programs":"{programs}"')
    line = simulate(text, bundles={"attention.1": 70}, cores=2)

    assert line.kernel_seconds == pytest.approx(3 * per_core * 70 * CYCLE)


NO_PROGRAMS = KERNEL.replace('"programs":"20"', '"a":"b"')


@pytest.mark.parametrize(
    ("text", "bundles"),
    [
        (KERNEL, {}),
        (NO_PROGRAMS, {"attention.1": 70}),
    ],
    ids=["no bundles", "no programs"],
)
def test_a_kernel_without_a_count_is_reported(text, bundles):
    line = simulate(text, bundles=bundles)

    assert line.kernel_seconds == 0
    assert line.num_unknown_kernels == 3


def test_a_collective_costs_what_no_work_hides():
    line = simulate(collective=5e-6)
    found = []
    for c in line.collectives:
        found.append((c.operation, c.count, c.num_bytes, len(c.devices)))

    expected = [
        ("all-reduce", 3, 8 * 128 * 4, 4),
        ("all-gather", 1, 256 * 128 * 2, 4),
    ]

    assert found == expected
    # The sum of each pass stops the core; the gather runs beside 2000 cycles.
    sums = 3 * 5e-6
    gather = 5e-6 - 2000 * CYCLE
    assert line.collective_seconds == pytest.approx(sums + gather)
    assert line.collectives[1].waited_seconds == pytest.approx(3e-6)

    # Here the gather is hidden.
    line = simulate(collective=1.5e-6)
    assert line.collective_seconds == pytest.approx(3 * 1.5e-6)


def test_slices_exchange_over_the_network():
    exchange = """\
  %token = token[] after-all()
  %recv = (f32[8,128]{1,0:T(8,128)}, u32[], token[]) recv(%token), channel_id=9, is_host_transfer=true
  %recv-done = (f32[8,128]{1,0:T(8,128)}, token[]) recv-done(%recv), channel_id=9
  %before ="""
    line = simulate(TEXT.replace("  %before =", exchange))

    assert line.collective_seconds == pytest.approx(8 * 128 * 4 / 1e9 + 20e-6)
    assert line.collectives[0].operation == "exchange between slices"


def test_a_fusion_that_keeps_a_part_of_a_sum_is_a_reduce_scatter():
    text = TEXT.replace(
        "ROOT %all-gather.1 = bf16[256,128]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=7",
        "ROOT %all-reduce.9 = bf16[1024,128]{1,0:T(8,128)(2,1)} all-reduce(%p), channel_id=7",
    )
    text = text.replace(
        "%async-collective-start = (bf16[64,128]{1,0}, bf16[256,128]{1,0})",
        "%scattered = bf16[256,128]{1,0}",
    )

    line = simulate(text, collective=1e-6)

    num_bytes = {c.operation: c.num_bytes for c in line.collectives}
    assert num_bytes["reduce-scatter"] == 1024 * 128 * 2
