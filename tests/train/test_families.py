"""ResNets and hybrids train by the step and the sharding rules that ViTs train by."""

import dataclasses

import numpy as np
import pytest

from tests.train import small_runs as runs
from vit_jax.config import ModelConfig, ShardingConfig

MODELS = {
    "resnet": ModelConfig(name="R14x0.5", compute_dtype="float32"),
    "hybrid": ModelConfig(name="R+mu/16", compute_dtype="float32"),
}


def build(family, devices, layout="replicated"):
    config = runs.config("input.image_size=32,32", "input.mixup_alpha=0", "schedule.learning_rate=1e-3")
    config = dataclasses.replace(config, model=MODELS[family], sharding=ShardingConfig(parameters=layout))
    return runs.assemble_config(config, devices)


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_fsdp_on_eight_devices_gives_the_curve_of_one(family):
    one, eight = (runs.train(build(family, *how), 5) for how in ((1,), (8, "fsdp")))
    losses = [[metrics["train_loss"] for metrics in curve] for _, curve in (one, eight)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert losses[0][4] < losses[0][0]  # something is learnt
