"""What the rest of the system asks of an optimiser's state: names, shapes without memory, donation, checkpoints."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from orbax.checkpoint.utils import to_shape_dtype_struct

from tests.optim.small_networks import abstract, fill
from vit_jax import pytree
from vit_jax.checkpoint import CheckpointReader, CheckpointStore
from vit_jax.config.schema import OptimizerConfig
from vit_jax.optim.optimizers import build_optimizer
from vit_jax.sharding import build_mesh, shard_tree

CONFIGS = {
    "sgd_bfloat16_layer_decay": OptimizerConfig(name="sgd", first_moment_dtype="bfloat16", layer_decay=0.7),
    "sgd_head": OptimizerConfig(name="sgd", first_moment_dtype="bfloat16", trained="head"),
    "adam_layer_decay": OptimizerConfig(weight_decay=0.1, layer_decay=0.7),
    "adam_head": OptimizerConfig(weight_decay=0.1, trained="head"),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def build(config: OptimizerConfig) -> optax.GradientTransformation:
    return build_optimizer(config, lambda step: 0.1 / (1.0 + jnp.asarray(step, jnp.float32)), 0.1)


@each_config
def test_a_moment_ends_in_the_name_of_its_parameter_and_lies_beside_it(config: OptimizerConfig) -> None:
    model = abstract(width=16)
    state = jax.eval_shape(build(config).init, model)
    parameters, mesh = pytree.named_leaves(model), build_mesh(jax.devices())
    placed = pytree.named_leaves(shard_tree(model, mesh, "fsdp"))
    where = pytree.named_leaves(shard_tree(state, mesh, "fsdp"))
    for name, leaf in pytree.named_leaves(state).items():
        parameter = max((known for known in parameters if name.endswith(f"/{known}")), key=len, default=None)
        if parameter is None:
            assert name.endswith("/count"), name
            assert leaf.shape == (), name
        else:
            assert leaf.shape == parameters[parameter].shape, name
            assert leaf.dtype == ("bfloat16" if "/trace/" in name else "float32"), name
            assert where[name].spec == placed[parameter].spec, name


@pytest.mark.parametrize("config", [CONFIGS["sgd_bfloat16_layer_decay"], CONFIGS["adam_head"]])
def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_happened(config: OptimizerConfig, tmp_path: Path) -> None:
    """Steps take the memory of model and state over, as those of training do."""
    optimizer = build(config)
    gradients = [fill(abstract(), seed=seed) for seed in (1, 2)]

    def step(model: Any, state: Any, gradient: Any) -> Any:
        updates, state = optimizer.update(gradient, state, model)
        return optax.apply_updates(model, updates), state

    model = fill(abstract(), seed=0)
    state = optimizer.init(model)
    promised = pytree.named_leaves(jax.eval_shape(step, model, state, gradients[0]))
    step = jax.jit(step, donate_argnums=(0, 1))
    model, state = step(model, state, gradients[0])
    for name, leaf in pytree.named_leaves((model, state)).items():
        assert (leaf.shape, leaf.dtype) == (promised[name].shape, promised[name].dtype), name
    store = CheckpointStore(tmp_path)
    store.save(1, {"model": model, "optimizer": state}, metadata={}, metrics={})
    store.close()
    abstract_state = jax.tree.map(to_shape_dtype_struct, {"model": model, "optimizer": state})
    restored = CheckpointReader(tmp_path).restore(1, abstract_state)
    expected = step(model, state, gradients[1])
    ours = step(restored["model"], restored["optimizer"], gradients[1])
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for name, leaf in pytree.named_leaves(ours).items():
        np.testing.assert_array_equal(leaf, pytree.named_leaves(expected)[name], err_msg=name)
