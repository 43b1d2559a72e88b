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
from numpy.testing import assert_allclose, assert_array_equal

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
    documented = set()
    for page in pages:
        documented.update(re.findall(r"optax(?:\.contrib)?:[a-z]\w*", page.read_text()))

    assert documented == OPTIMIZERS.keys()


def unstack(tree):
    """Return the arrays of a network that keeps its layers apart, by "name of layer"."""
    apart = {}
    for name, leaf in pytree.name_leaves(tree).items():
        is_stacked = name.startswith("encoder/blocks/") or "/rest/" in name
        if not is_stacked:
            apart[f"{name} of None"] = np.asarray(leaf)
            continue
        for layer, array in enumerate(leaf):
            apart[f"{name} of {layer}"] = np.asarray(array)

    return apart


def reshape_kernels(arrays):
    """Return the arrays with kernels of two dimensions, which optax's Muon trains by itself."""
    reshaped = {}
    for name, array in arrays.items():
        if "/kernel" in name:
            array = array.reshape(-1, array.shape[-1])
        reshaped[name] = array
    return reshaped


def sample_run(tree=None, steps=STEPS):
    """Return parameters and a gradient for each step."""
    if tree is None:
        tree = abstract()
    params, *gradients = [fill(tree, seed) for seed in range(steps + 1)]
    return params, gradients


def run_apart(optimizer, params, gradients, prepare=unstack):
    """Return the unstacked parameters after an update for each gradient."""
    params = prepare(params)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)

    for gradient in gradients:
        with jax.numpy_dtype_promotion("standard"):
            updates, state = update(prepare(gradient), state, params)
        params = optax.apply_updates(params, updates)

    return params


def run_muon_apart(params, gradients, **arguments):
    def prepare(tree):
        return reshape_kernels(unstack(tree))

    return run_apart(
        optax.contrib.muon(RATE, **arguments),
        params,
        gradients,
        prepare,
    )


def assert_equal(params, expected):
    for name, array in unstack(params).items():
        assert_allclose(
            array,
            expected[name].reshape(array.shape),
            rtol=1e-4,
            atol=1e-5,
            err_msg=name,
        )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_against_optax_on_unstacked_parameters(name):
    arguments = OPTIMIZERS[name]
    params, gradients = sample_run()
    if name == "optax.contrib:muon":
        expected = run_muon_apart(params, gradients, **arguments)
    else:
        build = getattr(optax, name.removeprefix("optax:"))
        expected = run_apart(build(RATE, **arguments), params, gradients)

    after = run(
        OptimizerConfig(name=name, arguments=arguments),
        params,
        gradients,
    )

    assert_equal(after, expected)


def select_kernels(arrays):
    return {name: "/kernel" in name for name in arrays}


@pytest.mark.parametrize("trained", ["all", "head"])
def test_lamb_scales_the_kernels_of_every_layer_to_their_norms(trained):
    """The transformations of optax that make up LAMB run on unstacked parameters.

    One kernel is 0 first.
    """
    params, gradients = sample_run()
    params.embedding.kernel[...] *= 0
    optimizer = optax.chain(
        optax.scale_by_adam(0.8, 0.95, 1e-6),
        optax.add_decayed_weights(0.3, select_kernels),
        optax.masked(optax.scale_by_trust_ratio(), select_kernels),
        optax.scale_by_learning_rate(RATE),
    )
    expected = run_apart(optimizer, params, gradients)
    if trained == "head":
        for name, array in unstack(params).items():
            if not name.startswith("head/"):
                expected[name] = array
    config = OptimizerConfig(
        name="lamb",
        beta1=0.8,
        beta2=0.95,
        epsilon=1e-6,
        weight_decay=0.3,
        weight_decay_meaning="paper_kernels",
        trained=trained,
    )

    after = run(config, params, gradients)

    assert_equal(after, expected)


def build_unit(*kernel_shape):
    kernel = jax.ShapeDtypeStruct(kernel_shape, jnp.float32)
    return {"conv1": {"kernel": kernel}}


def test_units_of_a_resnet():
    stage = {
        "first": build_unit(1, 1, 4, 6),
        "rest": build_unit(2, 1, 1, 6, 6),
    }
    params, gradients = sample_run({"body": {"stage1": stage}})
    expected = run_muon_apart(params, gradients)
    config = OptimizerConfig(name="optax.contrib:muon")

    after = run(config, params, gradients)

    assert_equal(after, expected)


def find_factor(name):
    if name.startswith(("embedding/", "encoder/blocks/attention/")):
        return 0.0
    if "/mlp/" in name:
        return 0.5
    if name.startswith("head/"):
        return 2.0
    return 1.0


def test_with_frozen_parameters_and_multipliers():
    config = OptimizerConfig(
        name="optax:lamb",
        frozen=("embedding/*", "encoder/blocks/attention/*"),
        learning_rate_multipliers={
            "encoder/blocks/mlp/*": 0.5,
            "head/*": 2.0,
        },
    )
    params, gradients = sample_run(steps=1)
    before = unstack(params)

    complete = run_apart(optax.lamb(RATE), params, gradients)
    after = unstack(run(config, params, gradients))

    for name, array in after.items():
        step = array - before[name]
        complete_step = complete[name] - before[name]
        assert_allclose(
            step,
            find_factor(name) * complete_step,
            rtol=1e-4,
            atol=1e-6,
            err_msg=name,
        )


def run_sharded(optimizer, params, gradients):
    """Return the state after the updates, sharded over eight devices."""
    mesh = Mesh(
        np.array(jax.devices()).reshape(1, 4, 2),
        ("replica", "data", "model"),
    )
    state = init_state(params, optimizer, with_polyak=False)
    shardings = shard_tree(state, mesh, "fsdp")
    state = jax.device_put(state, shardings)
    update = jax.jit(
        optimizer.update,
        out_shardings=(shardings.model, shardings.optimizer),
    )

    for gradient in gradients:
        gradient = jax.device_put(gradient, shardings.model)
        updates, moments = update(gradient, state.optimizer, state.model)
        model = optax.apply_updates(state.model, updates)
        state = dataclasses.replace(
            state,
            model=model,
            optimizer=moments,
        )

    return state


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("optax.contrib:muon", marks=pytest.mark.slow),
        "optax:adafactor",
    ],
)
def test_sharded(name):
    """The state is stored stacked under the names of the parameters, and sharded as they are."""
    params, gradients = sample_run()
    config = OptimizerConfig(name=name, arguments=OPTIMIZERS[name])
    optimizer = build_optimizer(config, lambda step: jnp.float32(RATE), RATE)

    expected = run(config, params, gradients)
    state = run_sharded(optimizer, params, gradients)
    num_stored = 0

    assert_equal(state.model, unstack(expected))
    for path, leaf in pytree.name_leaves(state.optimizer).items():
        if path.endswith("expand/kernel") and leaf.shape == (DEPTH, 8, 8):
            assert not leaf.sharding.is_fully_replicated
            num_stored += 1
    # Adafactor keeps rows and columns.
    assert num_stored or name == "optax:adafactor"


def test_a_sum_over_all_parameters_is_over_all_layers():
    """Clipping inside the optimiser uses the norm of the complete gradient."""
    params, gradients = sample_run(steps=1)
    clipped = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.sgd(RATE),
    )
    expected = run_apart(clipped, params, gradients)
    leaves = pytree.name_leaves(params)
    optimizer = per_layer(clipped)

    gradient = pytree.name_leaves(gradients[0])
    state = optimizer.init(leaves)
    updates, _ = optimizer.update(gradient, state, leaves)
    after = optax.apply_updates(leaves, updates)

    assert_equal(after, expected)


def test_layers_of_different_state_stay_apart():
    """A mask that an optimiser sets by layer survives being stored."""

    def exclude_first_layer(params):
        return {name: "/0/" not in name for name in params}

    masked = optax.masked(optax.trace(0.5), exclude_first_layer)
    optimizer = per_layer(masked)
    params = {
        "encoder/blocks/mlp/kernel": jnp.ones((2, 3, 4)),
        "head/kernel": jnp.ones((4, 5)),
    }

    update = jax.jit(optimizer.update)

    state = jax.jit(optimizer.init)(params)
    for _ in range(2):
        updates, state = update(params, state, params)
    first, second = updates["encoder/blocks/mlp/kernel"]

    # Masked updates are passed through.
    assert_array_equal(first, 1.0)
    assert_array_equal(second, 1.5)
