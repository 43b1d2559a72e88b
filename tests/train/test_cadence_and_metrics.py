import math

import jax.numpy as jnp
import pytest

from vit_jax.train.evaluations import Cadence
from vit_jax.train.metrics import LateMetrics, require_finite


@pytest.mark.parametrize(
    ("every", "last", "expected"), [(1, 3, [1, 2, 3]), (2, 5, [2, 4, 5]), (4, 8, [4, 8]), (10, 3, [3])]
)
def test_due_every_so_often_and_at_the_end(every, last, expected):
    cadence = Cadence(every, last)
    assert [step for step in range(last + 1) if cadence.is_due(step)] == expected


def test_metrics_are_reported_one_step_late_each_once_and_in_order():
    seen = []
    late = LateMetrics(lambda step, metrics: seen.append((step, metrics["x"])))
    late.push(1, {"x": jnp.float32(1)})
    assert seen == []
    late.push(2, {"x": jnp.float32(2)})
    assert seen == [(1, 1.0)]
    late.flush()
    late.flush()
    assert seen == [(1, 1.0), (2, 2.0)]


@pytest.mark.parametrize("name", ["train_loss", "gradient_norm", "parameter_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_raises(name, value):
    metrics = {"train_loss": 1.0, "gradient_norm": 1.0, "parameter_norm": 1.0, "learning_rate": 0.1}
    require_finite(5, metrics)
    with pytest.raises(FloatingPointError, match=r"Step 5: .*learning_rate \(now 0\.1\)"):
        require_finite(5, metrics | {name: value})
    with pytest.raises(FloatingPointError, match="The learning rate is 0, so it is not the cause") as raised:
        require_finite(5, metrics | {name: value, "learning_rate": 0.0})
    assert "lower" not in str(raised.value)
