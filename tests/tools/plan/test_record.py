"""The recorded plans: arithmetic agrees with the compiler."""

import pytest

from tests.tools.plan import record, record_gpus
from vit_jax.sharding.memory import Memory

ROWS = record.load()
COMPILED = [case for case in record.CASES if ROWS.get(case.name, {}).get("memory")]


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.name)
def test_arithmetic_agrees_with_the_compiler(case):
    compiled = Memory(**ROWS[case.name]["memory"])
    arithmetic = record.plan_of(case, can_compile=False).memory

    assert arithmetic.state == pytest.approx(compiled.state, rel=0.01)
    assert arithmetic.parameters == pytest.approx(compiled.parameters, rel=0.01)
    assert arithmetic.total == pytest.approx(compiled.total, rel=0.15)
    assert compiled.total == ROWS[case.name]["needed_bytes"]


def test_what_is_recorded():
    commands = {case.name: case.command for case in record.CASES}
    assert {name: row["command"] for name, row in ROWS.items()} == {
        name: commands[name] for name in ROWS
    }

    recorded = [ROWS[case.name] for case in COMPILED]
    assert {row["remat"] for row in recorded} == {"none", "dots", "attention", "full"}
    assert {row["sharding"] for row in recorded} == {"replicated", "fsdp"}
    assert {case.name for case in record.HEADLINES} <= {case.name for case in COMPILED}

    small, large = (ROWS[f"L/16 on v5e:{shape}"]["step_seconds"] for shape in ("4x4", "16x16"))
    assert large <= 1.05 * small  # 256 chips are not slower than 16


def test_what_is_recorded_for_gpus():
    rows = record_gpus.load()
    cases = (*record_gpus.TABLE, *record_gpus.RECIPES, *record_gpus.PUBLIC)
    commands = {
        f"{case.name} on {gpus}": case.command(gpus) for case in cases for gpus in case.machines
    }

    assert {name: row["command"] for name, row in rows.items()} == {
        name: " ".join(["vit-jax plan", *commands[name]]) for name in rows
    }
    assert all(row["roofline_ms"] <= row["ms"] for row in rows.values())
    assert {
        row["attention"]
        for row in rows.values()
        if row["name"] in {case.name for case in record_gpus.TABLE}
    } == {"cudnn"}
