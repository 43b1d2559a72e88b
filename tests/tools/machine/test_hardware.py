"""`doctor --hardware`: the complete examination in small, and each check with a fault that it must
find.
"""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.integration.commands import run
from vit_jax import hosts
from vit_jax.checkpoint import CheckpointReader
from vit_jax.tools.machine import checks, doctor, hardware, numerics
from vit_jax.tools.machine.bench import Part
from vit_jax.tools.machine.checks import Finding
from vit_jax.tools.machine.hardware import Scale, Trial
from vit_jax.tools.machine.planned import Planned

TINY = Scale("tiny", ("mu/16",), 2, 2, ("input.image_size=32,32",))
CHECKS = [
    "hardware",
    "attention xla",
    "attention pallas",
    "attention cudnn",
    "attention auto",
    "layer norm",
    "group norm",
    "determinism",
    "restored state",
    "step Ti/16",
    "input",
]
STEP = {
    "median_milliseconds": 10.0,
    "lower_quartile_milliseconds": 9.0,
    "upper_quartile_milliseconds": 11.0,
    "images_per_second": 100.0,
    "memory_bytes": 2.0**30,
}
STEP |= {"images_per_second": 100.0, "memory_bytes": 2.0**30}


def check_small_findings(found):
    """The findings name the form of each check on the CPU."""
    in_small = "no accelerator, so in small on the CPU: Ti/16 with 2 layers"

    assert found["hardware"].startswith(in_small)
    assert found["attention auto"].endswith("; xla")
    assert found["attention cudnn"] == "not available: it is for NVIDIA GPUs"
    assert found["attention pallas"].endswith("; interpreted")
    assert found["determinism"].endswith("equal to the bit")
    assert found["restored state"].endswith("equal to the bit")
    assert found["step Ti/16"].endswith("no figure of plan: plan does not know 8 x cpu")


@pytest.fixture(scope="module")
def trial():
    return Trial("mu/16", TINY)


@pytest.mark.slow
@pytest.mark.usefixtures("enough_memory")
def test_the_whole_in_small(monkeypatch, tmp_path):
    # Eight devices share two cores.
    monkeypatch.setattr(numerics, "LENGTHS", (5, 8))
    narrow = ("model.width=24", "model.mlp_dim=48")
    fields = (*hardware.SMALL.fields, *narrow)
    small = dataclasses.replace(hardware.SMALL, images=1, fields=fields)
    monkeypatch.setattr(hardware, "SMALL", small)

    outcome = run(["doctor", "--hardware", f"--workdir={tmp_path / 'run'}", "--json"])

    report = {}
    for findings in json.loads(outcome.out):
        report[findings[0]["name"]] = findings[0]

    wrong = []
    for name, finding in report.items():
        if finding["remedy"]:
            wrong.append(name)

    assert [name for name in report if name in CHECKS] == CHECKS
    assert wrong in ([], ["input"]), "the speed of this machine decides"
    assert outcome.code == bool(wrong)
    assert not list(tmp_path.iterdir()), "it leaves nothing behind"

    check_small_findings({name: finding["found"] for name, finding in report.items()})
    assert report["step Ti/16"]["figures"]["memory_bytes"] > 0
    assert set(report["attention xla"]["figures"]) == {
        "float32_5_values",
        "float32_5_gradients",
        "float32_8_values",
        "float32_8_gradients",
        "bfloat16_5_values",
        "bfloat16_5_gradients",
        "bfloat16_8_values",
        "bfloat16_8_gradients",
    }


@pytest.mark.slow
def test_trainings_that_differ(trial, monkeypatch):
    """One pixel of one of the ten batches of the second training differs."""
    assert hardware.check_determinism(trial).is_good

    draw = hardware.random_batch

    def change_pixel(*arguments):
        batch = draw(*arguments)
        batch.image_BHWC[0, 0, 0, 0] ^= 1
        return batch

    monkeypatch.setattr(hardware, "random_batch", change_pixel)
    finding = hardware.check_determinism(trial)

    assert finding.remedy.startswith("runs cannot be repeated")
    assert " arrays differ" in finding.found


@pytest.mark.slow
def test_a_storage_that_gives_back_another_number(
    trial,
    monkeypatch,
    tmp_path,
):
    assert hardware.check_restored_state(trial, None).is_good

    restore = CheckpointReader.restore

    def restore_damaged(*arguments):
        items = restore(*arguments)
        bias = items["model"].head.linear.bias
        bias[...] = jnp.nextafter(bias[...], jnp.inf)
        return items

    monkeypatch.setattr(CheckpointReader, "restore", restore_damaged)
    finding = hardware.check_restored_state(trial, tmp_path)

    remedy = "other numbers came back (model/head/linear/bias): the storage is damaged"
    assert finding.remedy == remedy
    assert "equal" not in finding.found
    assert not list(tmp_path.iterdir())


NEXT_AFTER_ONE = np.nextafter(np.float32(1), np.float32(2))


@pytest.mark.parametrize(
    ("second", "loss", "remedy"),
    [
        (1.0, 0.5, ""),
        (NEXT_AFTER_ONE, 0.5, "runs cannot be repeated"),
        (1.0, np.nan, "the loss is not finite"),
    ],
    ids=["equal", "another bit", "not finite"],
)
def test_parameters_are_compared_by_their_bits(second, loss, remedy):
    first_state = {
        "a": jnp.ones(3),
        "b": jnp.full(2, 1.0, jnp.float32),
    }
    second_state = {
        "a": jnp.ones(3),
        "b": jnp.full(2, second, jnp.float32),
    }
    trial = types.SimpleNamespace(
        name="tiny",
        trained=(first_state, loss),
        train=lambda: (second_state, loss),
    )

    finding = hardware.check_determinism(trial)

    assert finding.remedy.startswith(remedy)
    assert finding.is_good == (not remedy)


@pytest.mark.parametrize(
    ("planned", "text", "remedy"),
    [
        (
            Planned("plan does not know 1 x cpu"),
            "; no figure of plan: plan does not know 1 x cpu",
            "",
        ),
        (
            Planned("compiled for h100:1", 0.009, 2**30),
            "(compiled for h100:1) 9.00 ms, 1.00 GiB: 1.11 x the time",
            "",
        ),
        (
            Planned("compiled for h100:1", 0.006, 2**30),
            "1.67 x the time",
            "more than 1.5 x the planned time",
        ),
        (
            Planned("compiled for h100:1", 0.009, 2**29),
            "0.50 GiB: 1.11 x the time",
            "more than 1.25 x the planned memory",
        ),
        (
            Planned("arithmetic for h100:1", 0.001, 2**29),
            "10.00 x the time",
            "",
        ),
    ],
    ids=["unknown", "good", "slow", "large", "arithmetic"],
)
def test_a_step_beside_its_plan(planned, text, remedy):
    measured = "10.00 ms (9.00 to 11.00), 100 images/s, 1.00 GiB a device; "
    description = hardware.describe(STEP, planned)
    advice = hardware.compare(STEP, planned)

    assert description.startswith(measured)
    assert description.endswith(text)
    assert advice.startswith(remedy)
    assert bool(advice) == bool(remedy)


def make_trial(name, step_seconds):
    config = types.SimpleNamespace(input=None, seed=0)
    return types.SimpleNamespace(
        name=name,
        part=Part("step", [step_seconds], 16),
        run=types.SimpleNamespace(config=config),
    )


@pytest.mark.parametrize(
    ("seconds", "is_good"),
    [
        (0.15, True),
        (0.25, False),
    ],
)
def test_an_input_that_is_slower_than_every_step(
    monkeypatch,
    seconds,
    is_good,
):
    trials = [make_trial("S/16", 0.1), make_trial("B/16", 0.2)]
    monkeypatch.setattr(hardware, "write_images", lambda folder: None)
    monkeypatch.setattr(hardware, "open_source", lambda *_: None)
    monkeypatch.setattr(hardware, "time_input", lambda *_: Part("input", [seconds], 16))

    finding = hardware.check_input(trials)

    speeds = "S/16 takes 160, B/16 takes 80"
    assert finding.is_good == is_good
    assert finding.found.endswith(f" from JPEGs of 375x500 in memory, {speeds}")


def test_the_images_are_like_those_of_imagenet(tmp_path):
    hardware.write_images(tmp_path)
    sizes = [path.stat().st_size for path in tmp_path.rglob("*.jpg")]

    assert len(sizes) == hardware.IMAGES
    assert 70_000 < np.mean(sizes) < 140_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["class0", "class1"]


def test_accelerators_train_complete_networks(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    steps = []
    for name in hardware.list_checks(None):
        if name.startswith("step"):
            steps.append(name)

    config = Trial("B/16", hardware.COMPLETE).config

    assert steps == ["step S/16", "step B/16"]
    assert config.global_batch == 128 * jax.device_count()
    assert config.model.remat == "dots"
    assert config.model.scan_unroll == 1


def test_a_check_that_fails_stops_no_other(monkeypatch):
    """Devices that compute wrongly do not stop other checks either."""

    def fail():
        raise RuntimeError("out of memory")

    more = {
        "determinism": fail,
        "input": lambda: Finding("fast"),
    }
    monkeypatch.setattr(checks, "check_compilation", lambda: Finding("wrong", "repair it"))
    monkeypatch.setattr(hardware, "list_checks", lambda workdir: more)

    outcome = run(["doctor", "--hardware"])

    assert outcome.code == 1
    assert "wrong  compilation       wrong\n" in outcome.out
    assert "wrong  determinism       RuntimeError: out of memory\n" in outcome.out
    assert outcome.out.endswith("good   input             fast\n")


def test_several_processes_are_rejected(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(hosts, "gather", lambda own: [own, own])
    message = "devices of one process, not of 2"

    with pytest.raises(doctor.ExaminationError, match=message):
        next(doctor.examine(None, None, with_hardware=True))
