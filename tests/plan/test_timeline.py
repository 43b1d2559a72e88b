"""The walk through a schedule, against sums made by hand."""

import pytest

from tests.plan.programs import TEXT
from vit_jax.plan import hlo
from vit_jax.plan.timeline import Speeds, step_timeline

CYCLE = 1e-9
ENTRY, LOOP = (500 + 2000) * CYCLE, 3 * 1000 * CYCLE


def timeline(text=TEXT, *, memory=1e12, collective=0.0):
    return step_timeline(hlo.parse(text), Speeds(1 / CYCLE, memory, 1e9, lambda *_: collective))


def test_cycles_times_loops():
    line = timeline()
    assert line.compute_seconds == pytest.approx(ENTRY + LOOP)
    assert line.collective_seconds == 0
    assert line.seconds == pytest.approx(ENTRY + LOOP)


def test_a_collective_costs_what_no_work_hides():
    line = timeline(collective=5e-6)
    # the sum of each pass stops the core; the gather runs beside 2000 cycles
    assert line.collective_seconds == pytest.approx(3 * 5e-6 + (5e-6 - 2000 * CYCLE))
    assert [(c.operation, c.count, c.num_bytes, len(c.devices)) for c in line.collectives] == [
        ("all-reduce", 3, 8 * 128 * 4, 4),
        ("all-gather", 1, 256 * 128 * 2, 4),
    ]
    assert line.collectives[1].waited_seconds == pytest.approx(3e-6)


def test_a_gather_that_work_hides_costs_nothing():
    line = timeline(TEXT.replace("%all-reduce.1", "%all-reduce.1"), collective=1.5e-6)
    assert line.collective_seconds == pytest.approx(3 * 1.5e-6)


def test_memory_that_comes_too_late_is_waited_for():
    num_bytes = 8 * 128 * 4
    line = timeline(memory=num_bytes / 3e-6)  # 3 us, of which 1000 cycles are hidden
    assert line.prefetch_seconds == pytest.approx(3 * (3e-6 - 1000 * CYCLE))


def test_a_loop_of_unknown_length_is_counted_once_and_told():
    line = timeline(TEXT.replace("%length = s32[]{:T(128)} constant(3)", "%length = s32[]{:T(128)} parameter(1)"))
    assert line.num_unknown_loops == 1
    assert line.compute_seconds == pytest.approx(ENTRY + LOOP / 3)


def test_slices_exchange_over_the_network():
    exchange = """\
  %token = token[] after-all()
  %recv = (f32[8,128]{1,0:T(8,128)}, u32[], token[]) recv(%token), channel_id=9, is_host_transfer=true
  %recv-done = (f32[8,128]{1,0:T(8,128)}, token[]) recv-done(%recv), channel_id=9
  %before ="""
    line = timeline(TEXT.replace("  %before =", exchange))
    assert line.collective_seconds == pytest.approx(8 * 128 * 4 / 1e9 + 20e-6)
    assert line.collectives[0].operation == "exchange between slices"


def test_a_fusion_that_keeps_a_part_of_a_sum_is_a_reduce_scatter():
    text = TEXT.replace(
        "ROOT %all-gather.1 = bf16[256,128]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=7",
        "ROOT %all-reduce.9 = bf16[1024,128]{1,0:T(8,128)(2,1)} all-reduce(%p), channel_id=7",
    ).replace("%async-collective-start = (bf16[64,128]{1,0}, bf16[256,128]{1,0})", "%scattered = bf16[256,128]{1,0}")
    operations = {c.operation: c.num_bytes for c in timeline(text, collective=1e-6).collectives}
    assert operations["reduce-scatter"] == 1024 * 128 * 2
