"""Optimisers that look at shapes: each against optax on a network whose layers are not stacked."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import Mesh

from tests.optim.small_networks import DEPTH, abstract, fill, run
from vit_jax import pytree
from vit_jax.config.schema import OptimizerConfig
from vit_jax.optim.optimizers import build_optimizer
from vit_jax.optim.per_layer import per_layer
from vit_jax.sharding import shard_tree
from vit_jax.train.state import init_state

ROOT = pathlib.Path(__file__).parents[2]
RATE = 0.1
STEPS = 3
OPTIMIZERS = {
    "optax:lamb": {"weight_decay": 0.1},
    "optax:lion": {"b1": 0.8, "weight_decay": 0.2},
    "optax:lars": {"weight_decay": 0.1},
    "optax:fromage": {},
    "optax:adafactor": {"min_dim_size_to_factor": 4},
    "optax:rmsprop": {},
    "optax.contrib:muon": {"beta": 0.9, "weight_decay": 0.1},
}


def test_each_optimiser_of_the_docs_is_tested_here():
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("docs/**/*.py"),
        *ROOT.glob("vit_jax/**/*.py"),
    ]
    named = {
        name for page in pages for name in re.findall(r"optax(?:\.contrib)?:\w+", page.read_text())
    }

    assert named == OPTIMIZERS.keys()


def unstack(tree):
    """Return the arrays as a network has them that keeps its layers apart: by "name of layer"."""
    apart = {}
    for name, leaf in pytree.named_leaves(tree).items():
        stacked = name.startswith("encoder/blocks/") or "/rest/" in name
        apart |= {
            f"{name} of {i}": np.asarray(leaf if i is None else leaf[i])
            for i in (range(len(leaf)) if stacked else [None])
        }

    return apart


def as_matrices(arrays):
    """Return the arrays with kernels of two dimensions: those that optax's Muon trains by itself."""
    return {
        name: x.reshape(-1, x.shape[-1]) if "/kernel" in name else x for name, x in arrays.items()
    }


def run_apart(optimizer, params, gradients, prepare=unstack):
    """Return the unstacked parameters after an update for each gradient."""
    params = prepare(params)
    state = optimizer.init(params)

    for gradient in gradients:
        with jax.numpy_dtype_promotion("standard"):
            updates, state = jax.jit(optimizer.update)(prepare(gradient), state, params)
        params = optax.apply_updates(params, updates)

    return params


def run_muon_apart(params, gradients, **arguments):
    return run_apart(
        optax.contrib.muon(RATE, **arguments),
        params,
        gradients,
        lambda tree: as_matrices(unstack(tree)),
    )


def assert_equal(params, expected):
    for name, array in unstack(params).items():
        np.testing.assert_allclose(
            array,
            expected[name].reshape(array.shape),
            rtol=1e-4,
            atol=1e-5,
            err_msg=name,
        )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_against_optax_on_unstacked_parameters(name):
    params, *gradients = (fill(abstract(), seed) for seed in range(STEPS + 1))
    if name == "optax.contrib:muon":
        expected = run_muon_apart(params, gradients, **OPTIMIZERS[name])
    else:
        expected = run_apart(
            getattr(optax, name.removeprefix("optax:"))(RATE, **OPTIMIZERS[name]),
            params,
            gradients,
        )

    assert_equal(
        run(OptimizerConfig(name=name, arguments=OPTIMIZERS[name]), params, gradients),
        expected,
    )


def kernels(arrays):
    return {name: "/kernel" in name for name in arrays}


@pytest.mark.parametrize("trained", ["all", "head"])
def test_lamb_scales_the_kernels_of_every_layer_to_their_norms(trained):
    """Against the transformations of optax that make up LAMB, on unstacked parameters.

    One kernel is 0 first.
    """
    params, *gradients = (fill(abstract(), seed) for seed in range(STEPS + 1))
    params.embedding.kernel[...] = jnp.zeros_like(params.embedding.kernel[...])
    optimizer = optax.chain(
        optax.scale_by_adam(0.8, 0.95, 1e-6),
        optax.add_decayed_weights(0.3, kernels),
        optax.masked(optax.scale_by_trust_ratio(), kernels),
        optax.scale_by_learning_rate(RATE),
    )
    expected = run_apart(optimizer, params, gradients)

    if trained == "head":
        expected = {
            name: x if name.startswith("head/") else unstack(params)[name]
            for name, x in expected.items()
        }

    options = {"weight_decay": 0.3, "weight_decay_meaning": "paper_kernels", "trained": trained}
    config = OptimizerConfig(name="lamb", beta1=0.8, beta2=0.95, epsilon=1e-6, **options)

    assert_equal(run(config, params, gradients), expected)


def test_units_of_a_resnet():
    shapes = {"first": (1, 1, 4, 6), "rest": (2, 1, 1, 6, 6)}
    tree = {
        "body": {"stage1": {unit: {"conv1": {"kernel": shape}} for unit, shape in shapes.items()}}
    }
    tree = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        tree,
        is_leaf=lambda x: type(x) is tuple,
    )
    params, *gradients = (fill(tree, seed) for seed in range(STEPS + 1))
    expected = run_muon_apart(params, gradients)

    assert_equal(run(OptimizerConfig(name="optax.contrib:muon"), params, gradients), expected)


def test_with_frozen_parameters_and_multipliers():
    frozen = ("embedding/*", "encoder/blocks/attention/*")
    multipliers = {"encoder/blocks/mlp/*": 0.5, "head/*": 2.0}
    params, gradient = (fill(abstract(), seed) for seed in range(2))
    config = OptimizerConfig(
        name="optax:lamb",
        frozen=frozen,
        learning_rate_multipliers=multipliers,
    )
    after = unstack(run(config, params, [gradient]))
    complete = run_apart(optax.lamb(RATE), params, [gradient])
    before = unstack(params)

    for name, array in after.items():
        is_frozen = name.startswith(("embedding/", "encoder/blocks/attention/"))
        factor = (
            0.0
            if is_frozen
            else 0.5
            if "/mlp/" in name
            else 2.0
            if name.startswith("head/")
            else 1.0
        )
        step = factor * (complete[name] - before[name])

        np.testing.assert_allclose(array - before[name], step, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("optax.contrib:muon", marks=pytest.mark.slow),
        "optax:adafactor",
    ],
)
def test_sharded(name):
    """The state is stored stacked, under the names of the parameters, so that it is sharded as they are."""
    params, *gradients = (fill(abstract(), seed) for seed in range(STEPS + 1))
    config = OptimizerConfig(name=name, arguments=OPTIMIZERS[name])
    optimizer = build_optimizer(config, lambda step: jnp.float32(RATE), RATE)
    mesh = Mesh(np.array(jax.devices()).reshape(1, 4, 2), ("replica", "data", "model"))
    state = init_state(params, optimizer, with_polyak=False)
    shardings = shard_tree(state, mesh, "fsdp")
    state = jax.device_put(state, shardings)

    for gradient in gradients:
        update = jax.jit(optimizer.update, out_shardings=(shardings.model, shardings.optimizer))
        updates, moments = update(
            jax.device_put(gradient, shardings.model),
            state.optimizer,
            state.model,
        )
        state = dataclasses.replace(
            state,
            model=optax.apply_updates(state.model, updates),
            optimizer=moments,
        )

    assert_equal(state.model, unstack(run(config, params, gradients)))

    matrices = [
        leaf
        for path, leaf in pytree.named_leaves(state.optimizer).items()
        if path.endswith("expand/kernel")
    ]
    stored = [leaf for leaf in matrices if leaf.shape == (DEPTH, 8, 8)]

    assert all(not leaf.sharding.is_fully_replicated for leaf in stored)
    assert stored or name == "optax:adafactor"  # which keeps rows and columns


def test_a_sum_over_all_parameters_is_over_all_layers():
    """Clipping inside the optimiser uses the norm of the complete gradient."""
    params, gradient = (fill(abstract(), seed) for seed in range(2))
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(RATE))
    leaves = pytree.named_leaves(params)
    optimizer = per_layer(clipped)
    updates, _ = optimizer.update(pytree.named_leaves(gradient), optimizer.init(leaves), leaves)
    expected = run_apart(clipped, params, [gradient])

    assert_equal(optax.apply_updates(leaves, updates), expected)


def test_layers_of_different_state_stay_apart():
    """A mask that an optimiser sets by layer survives being stored."""
    optimizer = optax.masked(
        optax.trace(0.5),
        lambda params: {name: "/0/" not in name for name in params},
    )
    optimizer = per_layer(optimizer)
    params = {"encoder/blocks/mlp/kernel": jnp.ones((2, 3, 4)), "head/kernel": jnp.ones((4, 5))}
    state = jax.jit(optimizer.init)(params)

    for _ in range(2):
        updates, state = jax.jit(optimizer.update)(params, state, params)

    first, second = updates["encoder/blocks/mlp/kernel"]
    np.testing.assert_array_equal(first, 1.0)  # masked: passed through
    np.testing.assert_array_equal(second, 1.5)
