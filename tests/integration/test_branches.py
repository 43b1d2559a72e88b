"""Several cooldowns from the checkpoints of one trunk (warm-up, stable, decay)."""

import pytest

from tests.integration import commands
from tests.integration.commands import pretraining, succeed

WSD = (
    "schedule.decay=wsd",
    "schedule.warmup=2 steps",
    "schedule.cooldown=3 steps",
    "logging.every=1 steps",
)
AVERAGED = ("polyak.factor=0.9", "polyak.warmup=ratio", "polyak.bias_correction=False")
SAVED = ("checkpoint.every=2 steps", "checkpoint.keep_latest=9", "evaluation.every=8 steps")
FIELDS = (*WSD, *AVERAGED, *SAVED)
PEAK = 3e-3
WARMUP = 2
COOLDOWN = 3
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]


@pytest.fixture(scope="module")
def trunk(data_dir, tmp_path_factory):
    """A run of 10 steps, whose cooldown begins at step 7."""
    workdir = tmp_path_factory.mktemp("branches") / "trunk"
    succeed(pretraining(data_dir, workdir, *FIELDS, "total=10 steps"))

    return workdir


def rates(workdir):
    """The learning rate of each step."""
    return {
        line["step"]: line["learning_rate"]
        for line in commands.metrics(workdir)
        if "learning_rate" in line
    }


def expected_rate(step, total):
    """In float64: the rate of a step depends on the steps before it."""
    done = step - 1
    return (
        PEAK * min(1, done / WARMUP) * (1 - max(0.0, (done - total + COOLDOWN) / COOLDOWN) ** 0.5)
    )


def test_a_branch_continues_the_trunk_as_if_it_had_run_alone(trunk, data_dir, tmp_path):
    branch = tmp_path / "branch"
    alone = tmp_path / "alone"
    out = succeed(pretraining(data_dir, branch, *FIELDS, "total=8 steps", f"resume_from={trunk}"))

    assert f"continuing from step 4 of {trunk}" in out, "the newest before both cooldowns"

    followed = {step: rate for step, rate in rates(trunk).items() if step <= 4} | rates(branch)

    assert followed == pytest.approx(
        {step: expected_rate(step, 8) for step in range(1, 9)},
        rel=1e-5,
    )
    assert rates(trunk) == pytest.approx(
        {step: expected_rate(step, 10) for step in range(1, 11)},
        rel=1e-5,
    )

    succeed(pretraining(data_dir, alone, *FIELDS, "total=8 steps"))
    found = commands.summary(branch)

    expected = commands.summary(alone)
    for name in ("parameters_sha256", "test_loss", "test_accuracy"):
        assert found[name] == expected[name], name
