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


def read_rates(workdir):
    """Return the learning rate of each step."""
    rates = {}
    for line in commands.metrics(workdir):
        if "learning_rate" in line:
            rates[line["step"]] = line["learning_rate"]
    return rates


def compute_rates(total):
    """Return the rates of a run in float64; the rate of a step depends on the steps before it."""
    rates = {}
    for done in range(total):
        warmup = min(1, done / WARMUP)
        cooled = max(0.0, (done - total + COOLDOWN) / COOLDOWN)
        rates[done + 1] = PEAK * warmup * (1 - cooled**0.5)
    return rates


@pytest.fixture(scope="module")
def branch(trunk, data_dir, tmp_path_factory):
    """A run of 8 steps from the newest checkpoint before both cooldowns."""
    workdir = tmp_path_factory.mktemp("branches") / "branch"

    words = pretraining(
        data_dir,
        workdir,
        *FIELDS,
        "total=8 steps",
        f"resume_from={trunk}",
    )
    out = succeed(words)

    assert f"continuing from step 4 of {trunk}" in out
    return workdir


def test_learning_rates_of_trunk_and_branch(trunk, branch):
    of_trunk = read_rates(trunk)
    before_branch = {}
    for step, rate in of_trunk.items():
        if step <= 4:
            before_branch[step] = rate

    assert of_trunk == pytest.approx(compute_rates(10), rel=1e-5)
    assert before_branch | read_rates(branch) == pytest.approx(compute_rates(8), rel=1e-5)


def test_a_branch_continues_the_trunk(branch, data_dir, tmp_path):
    """A run of 8 steps without a trunk has the same parameters and results."""
    succeed(pretraining(data_dir, tmp_path, *FIELDS, "total=8 steps"))

    found = commands.summary(branch)
    expected = commands.summary(tmp_path)
    for name in ("parameters_sha256", "test_loss", "test_accuracy"):
        assert found[name] == expected[name], name
