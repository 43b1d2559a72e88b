"""The learning-rate range test: its suggestions for known losses, and that its result is a function
of the seed.
"""

import json

import numpy as np
import pytest

from tests.integration import commands
from tests.rejections import rejects
from tests.train import small_runs as runs
from vit_jax.tools.sweeps.range_test import RangeTest, draw, run_range_test

RATES = np.logspace(-6, 0, 100)


def compute_losses(x):
    """Return losses at these logarithms of the learning rate.

    The loss is 2.3 up to a rate of 1e-4. Then it falls, fastest from 1e-3 to 1e-2, and rises again.
    """
    exponents = [-6, -4, -3, -2, -1, 0]
    losses = [2.3, 2.3, 1.9, 0.7, 1.9, 6]
    trend = np.interp(x, exponents, losses)
    noise = np.cos(40 * np.arange(len(x)))
    return trend + 0.004 * noise


def test_suggestions():
    test = RangeTest(
        100,
        RATES,
        compute_losses(np.log10(RATES)),
        became_infinite=False,
    )
    diverged_rate = test.rate_P[test.diverged]
    # Here the loss is again as high as at the start.
    expected_rate = 10 ** np.interp(2.3, [1.9, 6], [-1, 0])

    assert diverged_rate == pytest.approx(expected_rate, rel=0.3)  # two places
    assert len(draw(test, "x").axes[0].lines) == 4

    (_, fastest), (reason, tenth) = test.suggestions().items()
    assert 1.2e-3 < fastest < 0.8e-2
    assert reason == f"a tenth of {diverged_rate:.2g}, where the loss diverges"
    assert tenth == pytest.approx(0.0125, rel=0.3)


def test_without_divergence_and_with_a_loss_that_is_not_finite():
    rates = RATES[:70]  # up to 1.6e-2
    loss = compute_losses(np.log10(rates))
    finite = RangeTest(100, rates, loss, became_infinite=False)
    infinite = RangeTest(
        100,
        rates,
        loss,
        became_infinite=True,
    )

    assert list(finite.suggestions()) == ["where the loss falls fastest"]
    assert infinite.diverged == 69
    assert len(infinite.suggestions()) == 2


@pytest.mark.parametrize("count", [1, 5, 40])
def test_a_loss_that_does_not_fall(count):
    loss = np.linspace(2, 2.01, count)
    test = RangeTest(100, RATES[:count], loss, became_infinite=True)
    message = "did not fall before it diverged: lower --low="

    with pytest.raises(ValueError, match=message):
        test.suggestions()


@pytest.mark.slow
def test_a_recipe_twice(data_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = ("model.depth=1", "input.mixup_alpha=0.0")
    _, config, _, *fields = commands.pretraining(data_dir, "none", *overrides)
    words = [
        "lr-range",
        config,
        *fields,
        "--low=1e-4",
        "--high=10",
        "--steps=30",
    ]

    first = commands.succeed([*words, "--output=a.png"])
    again = commands.succeed([*words, "--output=b.svg"])

    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["a.json", "a.png", "b.json", "b.svg"]
    text = (tmp_path / "a.json").read_text()
    assert text == (tmp_path / "b.json").read_text()
    assert first.replace("a.", "b.").replace("png", "svg") == again

    found = json.loads(text)
    suggested = min(found["suggestions"].values())

    lowest, second, *_ = found["learning_rates"]
    assert lowest == pytest.approx(1e-4)
    assert second == pytest.approx(1e-4 * 1e5 ** (1 / 29))
    assert len(found["learning_rates"]) < 30, "it diverges before the last"
    assert f"try --config.schedule.learning_rate={suggested:.2g}" in first


@pytest.mark.parametrize(
    ("rates", "num_steps", "override", "rule"),
    [
        ((1, 0.1), 100, "seed=0", "--low=1 .*--high=0.1 .*at least 20"),
        ((0.1, 1), 5, "seed=0", "5 steps.*at least 20"),
        ((0.1, 1), 100, "resume_from=runs/x", "config.resume_from.*step 0"),
    ],
)
def test_invalid_settings(rates, num_steps, override, rule):
    with rejects("", rule):
        run_range_test(runs.config(override), *rates, num_steps)
