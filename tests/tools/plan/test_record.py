"""The recorded plans: arithmetic agrees with the compiler."""

import pytest

from tests.columns import list_column
from tests.tools.plan import record, record_gpus
from vit_jax.sharding.memory import Memory

ROWS = record.load()


def list_compiled():
    """Return the cases whose rows have the memory by the compiler."""
    compiled = []
    for case in record.CASES:
        row = ROWS.get(case.name, {})
        if row.get("memory"):
            compiled.append(case)
    return compiled


COMPILED = list_compiled()


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.name)
def test_arithmetic_agrees_with_the_compiler(case):
    row = ROWS[case.name]
    compiled = Memory(**row["memory"])
    arithmetic = record.plan_of(case, can_compile=False).memory

    state = pytest.approx(compiled.state, rel=0.01)
    parameters = pytest.approx(compiled.parameters, rel=0.01)
    total = pytest.approx(compiled.total, rel=0.15)

    assert arithmetic.state == state
    assert arithmetic.parameters == parameters
    assert arithmetic.total == total
    assert compiled.total == row["needed_bytes"]


def test_recorded_commands_are_those_of_the_cases():
    commands = {case.name: case.command for case in record.CASES}

    for name, row in ROWS.items():
        assert row["command"] == commands[name]


def test_recorded_plans_cover_policies_and_shardings():
    names = list_column(COMPILED, "name")
    headlines = list_column(record.HEADLINES, "name")
    recorded = [ROWS[name] for name in names]
    policies = list_column(recorded, "remat")
    shardings = list_column(recorded, "sharding")

    assert set(policies) == {"none", "dots", "attention", "full"}
    assert set(shardings) == {"replicated", "fsdp"}
    assert set(names) >= set(headlines)


def test_256_chips_are_not_slower_than_16():
    few_chips = ROWS["L/16 on v5e:4x4"]
    many_chips = ROWS["L/16 on v5e:16x16"]

    assert many_chips["step_seconds"] <= 1.05 * few_chips["step_seconds"]


def test_recorded_plans_for_gpus():
    rows = record_gpus.load()
    commands = {}
    for case in record_gpus.CASES:
        for machine in case.machines:
            words = ["vit-jax plan", *case.command(machine)]
            commands[f"{case.name} on {machine}"] = " ".join(words)

    for name, row in rows.items():
        assert row["command"] == commands[name]
        assert row["roofline_ms"] <= row["ms"]

    table_names = list_column(record_gpus.TABLE, "name")
    forms = set()
    for row in rows.values():
        if row["name"] in table_names:
            forms.add(row["attention"])

    assert forms == {"cudnn"}
