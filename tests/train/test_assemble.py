"""Values of a config that do not fit the network, the data or this machine."""

import pytest

from tests.rejections import rejects
from tests.train import small_runs as runs
from vit_jax.config import load_recipe
from vit_jax.train.inputs import open_datasets
from vit_jax.train.state_builder import architecture_of

LION = ("optimizer.name=optax:lion", "optimizer.weight_decay=0")


@pytest.mark.parametrize(
    ("overrides", "field", "rule"),
    [
        (("sharding.num_model_shards=8",), "sharding.num_model_shards=8", "divi.*2 heads"),
        (("objective.class_weights=1,2,3",), "objective.class_weights", "3.*10"),
        (("model.attention=cudnn",), "model.attention='cudnn'", "NVIDIA.*cpu"),
        (
            (*LION, "optimizer.arguments.b1=high"),
            "optimizer.name='optax:lion'",
            "arguments=.*'b1': 'high'.*update",
        ),
    ],
)
def test_values_that_do_not_fit(overrides, field, rule):
    with rejects(f"config.{field}", rule):
        runs.build(*overrides, devices=8)


def test_a_network_and_data_that_are_not_chosen():
    with rejects("config.model.name=ViT-B/16"):
        architecture_of(load_recipe("finetune:any,own"), 10)

    with rejects("config.data", "tfds:NAME.*folder:PATH.*csv:FILE"):
        open_datasets(runs.config("data=None"))
