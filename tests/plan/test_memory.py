"""Memory by kind: read from a program, and arithmetic held to what was compiled."""

import json

import pytest

from tests.plan.programs import TEXT
from vit_jax.plan import hlo, record
from vit_jax.plan.aot import Executable
from vit_jax.plan.memory import Memory, compiled_memory

RECORDED = json.loads(record.GOLDEN.read_text())
CASES = [case for case in (*record.HEADLINES, *record.SPREAD) if RECORDED.get(case.name, {}).get("memory")]
TILE = 8 * 128 * 4


def test_kinds_of_a_program():
    batch = 4 * 8 * 8 * 128
    executable = Executable(
        arguments_bytes=4 * TILE + batch + 512,
        temporary_bytes=200_000,
        new_output_bytes=4096,
        program_bytes=1000,
        text="",
        compile_seconds=1.0,
    )
    memory = compiled_memory(executable, hlo.parse(TEXT))
    kept = 3 * 104 * 128 * 4  # what the forward loop fills slice by slice
    assert memory == Memory(
        parameters=2 * TILE,
        optimizer=2 * TILE,
        average=0,
        batch=batch + 512,  # with what the compiler adds between arguments
        activations=kept,
        gradients=0,
        temporary=200_000 + 4096 - kept,
        program=1000,
    )
    assert memory.total == 4 * TILE + batch + 512 + 204_096 + 1000


def test_what_a_backward_loop_fills_is_gradients():
    executable = Executable(5 * TILE + 4 * 8 * 8 * 128, 200_000, 0, 0, "", 1.0)
    memory = compiled_memory(executable, hlo.parse(TEXT.replace("jvp()/while", "transpose(jvp())/while")))
    assert (memory.activations, memory.gradients) == (0, 3 * 104 * 128 * 4)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_arithmetic_agrees_with_the_compiler(case):
    row = RECORDED[case.name]
    compiled, (arithmetic, _) = Memory(**row["memory"]), record.arithmetic_of(case)
    assert arithmetic.state == pytest.approx(compiled.state, rel=0.01)
    assert arithmetic.parameters == pytest.approx(compiled.parameters, rel=0.01)
    assert arithmetic.total == pytest.approx(compiled.total, rel=0.15)
    assert compiled.total == row["needed_bytes"]


def test_enough_has_been_recorded():
    recorded = [RECORDED[case.name] for case in CASES]
    assert {row["remat"] for row in recorded} == {"none", "dots", "full"}
    assert {row["sharding"] for row in recorded} == {"replicated", "fsdp"}
    assert {case.name for case in record.HEADLINES} <= {case.name for case in CASES}


def test_256_chips_are_not_slower_than_16():
    small, large = (RECORDED[f"L/16 on v5e:{shape}"]["step_seconds"] for shape in ("4x4", "16x16"))
    assert large <= 1.05 * small
