"""A frozen network is the same to the bit; its head is trained as if it stood alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.optim.small_networks import abstract, fill
from vit_jax import pytree
from vit_jax.config.schema import OptimizerConfig
from vit_jax.optim.optimizers import build_optimizer

RATE = 0.1
SETTINGS: Any = {"weight_decay": 0.3, "clip_global_norm": 1.0}


def run(config: OptimizerConfig, parameters: Any, gradients: list[Any]) -> Any:
    """The parameters after one update for each gradient."""
    optimizer = build_optimizer(config, lambda step: jnp.float32(RATE), RATE)
    state, update = optimizer.init(parameters), jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(gradient, state, parameters)
        parameters = optax.apply_updates(parameters, updates)  # not compiled, for a compiler may leave + 0 out
    return parameters


def head_of(model: Any) -> dict[str, Any]:
    return {name: leaf for name, leaf in pytree.named_leaves(model).items() if name.startswith("head/")}


def with_frozen(model: Any, value: float) -> Any:
    """The tree with one number in every leaf outside the head."""
    return pytree.map_with_names(
        lambda name, leaf: leaf if name.startswith("head/") else jnp.full_like(leaf, value), model
    )


@pytest.mark.parametrize("value", [0.0, -0.0, 1 / 3, float("inf")])
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_all_but_the_head_stays_to_the_bit(name: Any, value: float) -> None:
    model = with_frozen(fill(abstract(), seed=0), value)
    gradients = [fill(model, seed=seed) for seed in (1, 2)]
    after = run(OptimizerConfig(name=name, trained="head", **SETTINGS), model, gradients)
    before = pytree.named_leaves(model)
    for leaf, array in pytree.named_leaves(after).items():
        same = np.asarray(array).tobytes() == np.asarray(before[leaf]).tobytes()
        assert same == (not leaf.startswith("head/")), leaf


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_the_head_is_trained_as_if_it_stood_alone(name: Any) -> None:
    """Clipping and all; what happens to be the gradient of a frozen parameter makes no difference, not even NaN."""
    model = fill(abstract(), seed=0)
    gradients = [with_frozen(fill(model, seed=seed), float("nan")) for seed in (1, 2, 3)]
    ours = run(OptimizerConfig(name=name, trained="head", **SETTINGS), model, gradients)
    alone = run(OptimizerConfig(name=name, **SETTINGS), head_of(model), [head_of(gradient) for gradient in gradients])
    assert alone
    for leaf, array in alone.items():
        np.testing.assert_array_equal(head_of(ours)[leaf], array, err_msg=leaf)


def test_clipping_by_the_norm_of_the_heads_gradients() -> None:
    """3 and 4 in the head have norm 5 and are divided by it, whatever the 100 beside them."""
    gradient = {"embedding": {"bias": jnp.float32(100.0)}, "head": {"bias": jnp.float32(3.0), "kernel": jnp.float32(4)}}
    parameters = jax.tree.map(jnp.zeros_like, gradient)
    after = run(OptimizerConfig(name="sgd", trained="head", clip_global_norm=1.0), parameters, [gradient])
    assert [float(leaf) for leaf in jax.tree.leaves(after)] == pytest.approx([0.0, -RATE * 0.6, -RATE * 0.8], rel=1e-6)


def test_only_kernels_of_the_head_decay_where_asked() -> None:
    parameters = {"head": {"bias": jnp.float32(1.0), "kernel": jnp.float32(1.0)}, "norm": {"scale": jnp.float32(1.0)}}
    config = OptimizerConfig(name="sgd", trained="head", weight_decay=0.3, weight_decay_meaning="paper_kernels")
    after = run(config, parameters, [jax.tree.map(jnp.zeros_like, parameters)])
    assert [float(leaf) for leaf in jax.tree.leaves(after)] == pytest.approx([1.0, 1 - RATE * 0.3, 1.0], rel=1e-6)


@pytest.mark.parametrize(("name", "moments"), [("adam", 2), ("sgd", 1)])
def test_no_moments_of_frozen_parameters(name: Any, moments: int) -> None:
    model = abstract()
    optimizer = build_optimizer(OptimizerConfig(name=name, trained="head"), lambda step: jnp.float32(RATE), RATE)
    state = pytree.named_leaves(jax.eval_shape(optimizer.init, model))
    numbers = sum(leaf.size for leaf in state.values() if leaf.ndim)
    assert numbers == moments * sum(leaf.size for leaf in head_of(model).values())
