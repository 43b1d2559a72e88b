"""The comparison with timm: measurements of our half, the table, and processes that fail."""

import math
import os
import subprocess
import types

import pytest

from tests.bench import against_timm
from vit_jax.tools.plan import aot
from vit_jax.tools.plan.topology import parse_topology

RESULT = {
    "batch": 2,
    "training": [0.4, 0.5, 0.6],
    "inference": [0.1, 0.1, 0.1],
    "peak_bytes": None,
}
MISSING = aot.explain_missing_compiler(parse_topology("h100:1"))


@pytest.mark.slow
@pytest.mark.parametrize("form", [("xla", False), ("auto", True)])
def test_ours_is_measured_on_the_machine_at_hand(form):
    found = against_timm.measure_ours("mu/16@32", 2, 2, *form)

    assert len(found["training"]) == 2
    assert len(found["inference"]) == 2
    for seconds in found["training"] + found["inference"]:
        assert 0 < seconds < math.inf
    assert 0 < found["loss"] < 10


@pytest.mark.tools
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_programs_of_ours_compile_for_a_gpu():
    """They have a class token, so the number of tokens is odd."""
    device = aot.list_devices(parse_topology("h100:1"))[0]
    _, *traced = against_timm.build_ours("mu/16@32", 2, "xla", True, device)

    for program in traced:
        assert isinstance(aot.compile_program(program.lower, device), aot.Executable)


def test_the_table_has_speeds_beside_the_ceiling_and_timm():
    twice_as_fast = RESULT | {"training": [0.2, 0.25, 0.3], "peak_bytes": 2**30}
    results = {"S/16@32": {"ours, xla": twice_as_fast, "timm": RESULT}}
    ceiling = 3 * against_timm.flops_per_image("S/16@32") * 16

    row = against_timm.table(results, ceiling).splitlines()[2]

    assert [cell.strip() for cell in row.split("|")[3:-1]] == [
        "2",
        "8.0, 7.3 to 8.9",
        "50%",
        "2.00",
        "1.0",
        "20.0",
    ]


ONE_LINE = """echo '{"batch": 32}'"""

KILLED = f"""{ONE_LINE}
echo '{{"bat'
kill -9 $$"""


OUT_OF_MEMORY = f"""{ONE_LINE}
echo noise
echo 'Traceback (most recent call last):
jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.
--------------------
For simplicity, JAX has removed its internal frames from the traceback of the following exception.' >&2
exit 1"""

NO_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (ONE_LINE, ""),
        (OUT_OF_MEMORY, f"code 1: jax.errors.JaxRuntimeError: {NO_MEMORY}"),
        (KILLED, "code -9"),
    ],
    ids=["success", "out of memory", "killed"],
)
def test_why_a_process_ended(tmp_path, text, problem):
    """Complete lines count; JAX's errors end with a note that says nothing."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    words = types.SimpleNamespace(
        timm=str(path),
        environment=dict(os.environ),
        limit=600,
    )

    lines, found = against_timm.ask(words, "timm")

    assert lines == [{"batch": 32}]
    assert found.startswith(problem)
    assert bool(found) == bool(problem)


SPEEDS = {2: 9, 4: 10, 8: 7}  # images/s by batch


def ask_for_speeds(words, contender, *arguments):
    """Pretend that cuDNN is missing, and that timm and the largest batch end by an error."""
    if contender == "ours, cudnn":
        return [], "code 1: ValueError: no GPU"

    lines = []
    for batch, speed in SPEEDS.items():
        if f"--batches={batch}" in arguments:
            line = {"batch": batch, "training": [batch / speed], "inference": [1]}
            lines.append(line | {"loss": 1, "peak_bytes": 5})
    if contender == "timm" or len(lines) == 3:
        return lines, "code 1: out of memory"
    return lines, ""


def test_a_process_that_takes_too_long(monkeypatch):
    """Results that it has printed count."""

    def run(command, stdout, timeout, **_):
        stdout.write('{"batch": 32}\n')
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    words = types.SimpleNamespace(timm="python", environment={}, limit=60)

    assert against_timm.ask(words, "timm") == ([{"batch": 32}], "stopped after 60 s")


def test_a_contender_takes_its_fastest_batch_and_failures_are_told(monkeypatch, capsys):
    monkeypatch.setattr(against_timm, "ask", ask_for_speeds)
    words = types.SimpleNamespace(batches=[2, 4, 8], steps=2, rounds=2)

    found = against_timm.compare(words, "S/16")

    assert list(found) == ["ours, xla", "ours, cudnn, unrolled", "timm"]
    assert found["ours, xla"] == {
        "batch": 4,
        "training": [0.4, 0.4],
        "inference": [1, 1],
        "peak_bytes": 5,
        "loss": 1,
    }

    out = capsys.readouterr().out
    speeds = "2: 9.0, 4: 10.0, 8: 7.0"
    assert "S/16, ours, cudnn: images/s by batch none; code 1: ValueError: no GPU\n" in out
    assert f"S/16, ours, xla: images/s by batch {speeds}; code 1: out of memory\n" in out
    assert out.count("S/16, timm, batch 4: code 1: out of memory\n") == 2
