"""Distances from the head by hand for every family, and whole steps against a loop over single blocks."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.optim.small_networks import DEPTH, abstract, fill
from vit_jax import pytree
from vit_jax.config.schema import OptimizerConfig
from vit_jax.optim.layer_decay import layers_to_head
from vit_jax.optim.optimizers import build_optimizer

RATE, DECAY = 0.1, 0.5
ROUNDING = 4e-8  # of float32 terms up to 0.3, which may cancel in a sum


def distances_by_part(model: Any, pattern: str) -> dict[str, set[int]]:
    """The distances found under each part of the network; a part is what `pattern` finds at the start of a name."""
    found: dict[str, set[int]] = {}
    for name, distance in layers_to_head(model).items():
        match = re.match(pattern, name)
        found.setdefault(match[0] if match else name, set()).update(distance.ravel().tolist())
    return found


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        ({}, {"class_token": {4}}),
        ({"pool": "map", "position_embedding": "learned_2d"}, {"pooling": {0}}),
        ({"name": "R26+ViT-B/32"}, {"class_token": {4}, "stem": {4}}),
    ],
)
def test_transformers(options: dict[str, Any], extra: dict[str, set[int]]) -> None:
    expected = {"encoder/blocks": {3, 2, 1}, "encoder/norm": {0}, "embedding": {4}, "positions": {4}, "head": {0}}
    model = abstract(**options)
    assert distances_by_part(model, r"encoder/\w+|\w+") == {**expected, **extra}
    assert layers_to_head(model).keys() == pytree.named_leaves(model).keys()


def test_stacked_blocks_have_a_distance_along_their_first_axis() -> None:
    model = abstract()
    distances = layers_to_head(model)
    for name, leaf in pytree.named_leaves(model).items():
        if name.startswith("encoder/blocks/"):
            assert distances[name].shape == (DEPTH,) + (1,) * (leaf.ndim - 1), name
            assert distances[name].ravel().tolist() == [3, 2, 1], name


def test_resnets_count_stages() -> None:
    found = distances_by_part(abstract("R26"), r"body/\w+|\w+")
    stages = {"body/stage1": {4}, "body/stage2": {3}, "body/stage3": {2}, "body/stage4": {1}}
    assert found == {"body/root": {5}, **stages, "norm": {0}, "head": {0}}


def test_a_parameter_whose_place_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="'adapter/kernel'"):
        layers_to_head({"adapter": {"kernel": jnp.ones(2)}})


SOME = (
    "embedding/kernel",
    "class_token",
    "encoder/blocks/attention/query/bias",
    "encoder/blocks/mlp/expand/kernel",
    "encoder/norm/scale",
    "head/linear/kernel",
)


def updates_of(config: OptimizerConfig, parameters: Any, gradients: Any) -> dict[str, jax.Array]:
    optimizer = build_optimizer(config, lambda step: jnp.float32(RATE), RATE)
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(parameters), parameters)
    return pytree.named_leaves(updates)


@pytest.mark.parametrize(("name", "meaning"), [("adam", "paper"), ("adam", "big_vision"), ("sgd", "paper_kernels")])
def test_the_whole_update_is_scaled(name: Any, meaning: Any) -> None:
    """Weight decay included; the norm to clip by is that of gradients nothing has scaled."""
    leaves = pytree.named_leaves(abstract())
    parameters = fill({leaf: leaves[leaf] for leaf in SOME}, seed=0)
    gradients = fill(parameters, seed=1)
    options: Any = {"weight_decay": 0.3, "weight_decay_meaning": meaning, "clip_global_norm": 1.0}
    plain = updates_of(OptimizerConfig(name=name, **options), parameters, gradients)
    ours = updates_of(OptimizerConfig(name=name, layer_decay=DECAY, **options), parameters, gradients)
    for leaf in SOME[-2:]:
        np.testing.assert_array_equal(ours[leaf], plain[leaf])
    for leaf in SOME[:2]:
        np.testing.assert_allclose(ours[leaf], plain[leaf] / 16, rtol=1e-6, atol=ROUNDING)
    for leaf in SOME[2:4]:
        for block, factor in enumerate((1 / 8, 1 / 4, 1 / 2)):
            np.testing.assert_allclose(ours[leaf][block], plain[leaf][block] * factor, rtol=1e-6, atol=ROUNDING)


def single_parameters(model: Any) -> dict[str, np.ndarray]:
    """Float64 copies by name, every block for itself."""
    singles = {}
    for name, leaf in pytree.named_leaves(model).items():
        if name.startswith("encoder/blocks/"):
            singles |= {f"block{i}:{name}": np.asarray(part, np.float64) for i, part in enumerate(leaf)}
        else:
            singles[name] = np.asarray(leaf, np.float64)
    return singles


def rate_of(name: str) -> float:
    """As one would write parameter groups by hand."""
    if name.startswith("block"):
        return RATE * DECAY ** {"0": 3, "1": 2, "2": 1}[name[5]]
    return RATE * (1.0 if name.startswith(("head/", "encoder/norm/")) else DECAY**4)


def test_ten_steps_of_sgd_against_a_rate_for_each_parameter() -> None:
    start = fill(abstract(), seed=0)
    config = OptimizerConfig(name="sgd", momentum=0.8, weight_decay=0.3, layer_decay=DECAY)
    optimizer = build_optimizer(config, lambda step: jnp.float32(RATE), RATE)
    update, model, state = jax.jit(optimizer.update), start, optimizer.init(start)
    expected = single_parameters(start)
    buffers = dict.fromkeys(expected, np.zeros(()))
    for step in range(10):
        gradients = fill(start, seed=step + 1)
        updates, state = update(gradients, state, model)
        model = optax.apply_updates(model, updates)
        for name, gradient in single_parameters(gradients).items():
            buffers[name] = 0.8 * buffers[name] + gradient
            expected[name] = expected[name] - rate_of(name) * (buffers[name] + 0.3 * expected[name])
    for name, leaf in single_parameters(model).items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_no_decay_is_no_part_of_the_chain() -> None:
    tree = {"anything": jnp.ones(2)}  # with a layer decay its place would have to be known
    optimizer = build_optimizer(OptimizerConfig(layer_decay=1.0), lambda step: jnp.float32(RATE), RATE)
    optimizer.update(tree, optimizer.init(tree), tree)
    optimizer = build_optimizer(OptimizerConfig(layer_decay=0.9), lambda step: jnp.float32(RATE), RATE)
    with pytest.raises(ValueError, match="anything"):
        optimizer.update(tree, optimizer.init(tree), tree)
