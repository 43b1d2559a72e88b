"""Adam, SGD and the three meanings of weight decay against a float64 loop; optimisers by reference.

float32 knows 1 - 0.999 to about 3e-5, so Adam's direction is held to 1e-4 of its size, which is
near 1.
"""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from numpy.testing import assert_allclose

from tests.optim.small_networks import fill, run
from tests.rejections import rejects
from vit_jax import pytree
from vit_jax.config.schema import OptimizerConfig
from vit_jax.optim.optimizers import build_optimizer


def clip_by_norm(gradients, largest_norm):
    """Return float64 gradients whose common norm is bounded."""
    gradients = {name: np.float64(g) for name, g in gradients.items()}
    scale = 1.0
    if largest_norm is not None:
        squares = sum(np.square(g).sum() for g in gradients.values())
        norm = np.sqrt(squares)
        scale = min(1.0, largest_norm / norm)

    return {name: g * scale for name, g in gradients.items()}


def find_direction(
    config,
    name,
    gradient,
    m,
    v,
    t,
):
    """Return the direction of a parameter's step and update its moments."""
    if config.name == "adam":
        square = gradient * gradient
        m[name] += (1 - config.beta1) * (gradient - m[name])
        v[name] += (1 - config.beta2) * (square - v[name])
        mean = m[name] / (1 - config.beta1**t)
        variance = v[name] / (1 - config.beta2**t)
        return mean / (np.sqrt(variance) + config.epsilon)

    direction = config.momentum * m[name] + gradient
    rounded = direction.astype(jnp.dtype(config.first_moment_dtype))
    m[name] = rounded.astype(np.float64)
    return direction


def find_decay(config, name, rate):
    """Return the share of a parameter by which weight decay lowers it."""
    if config.weight_decay_meaning == "paper":
        return rate * config.weight_decay
    if not name.endswith("kernel"):
        return 0.0
    if config.weight_decay_meaning == "big_vision":
        return rate / PEAK * config.weight_decay
    return rate * config.weight_decay


RATE = 0.1
PEAK = 0.2


class Network(nnx.Module):
    """A kernel, a bias, norms, and an embedding: what decays and what may not."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.dense = nnx.Linear(3, 2, rngs=rngs)
        self.norm = nnx.LayerNorm(2, rngs=rngs)
        self.position_embedding = nnx.Param(jnp.ones((1, 2)))


def scalars(value):
    return {
        "kernel": jnp.float32(value),
        "bias": jnp.float32(value),
    }


def compute_by_definition(config, parameters, gradients, rates):
    """Return the parameters after all steps, leaf by leaf in float64.

    SGD's buffer alone is rounded once a step.
    """
    after = {name: np.float64(p) for name, p in parameters.items()}
    m = dict.fromkeys(after, 0.0)
    v = dict.fromkeys(after, 0.0)

    for t, gradient in enumerate(gradients, start=1):
        rate = rates[t - 1]
        clipped = clip_by_norm(gradient, config.clip_global_norm)
        for name, p in after.items():
            direction = find_direction(config, name, clipped[name], m, v, t)
            decay = find_decay(config, name, rate)
            after[name] = p - rate * direction - decay * p

    return after


CASES = {
    "adam": {"beta1": 0.8, "beta2": 0.95},
    "sgd": {"name": "sgd"},
    "sgd_bfloat16": {"name": "sgd", "first_moment_dtype": "bfloat16"},
    "sgd_without_momentum": {"name": "sgd", "momentum": 0.0},
}


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("meaning", ["paper", "paper_kernels", "big_vision"])
@pytest.mark.parametrize("case", CASES)
def test_module_against_float64_loop(case, meaning, clip):
    """With this seed no value is near to where float32 and float64 round to different bfloat16."""
    config = OptimizerConfig(
        weight_decay=0.3,
        weight_decay_meaning=meaning,
        clip_global_norm=clip,
        **CASES[case],
    )
    network = Network()
    gradients = [fill(network, seed) for seed in range(5)]
    # Update number n takes the rate of n steps taken.
    rates = [0.0, 0.1, 0.2, 0.15, 0.05]
    expected = compute_by_definition(
        config,
        pytree.name_leaves(network),
        map(pytree.name_leaves, gradients),
        rates,
    )

    def schedule(step):
        return jnp.asarray(rates, jnp.float32)[step]

    after = run(config, network, gradients, schedule, PEAK)

    assert isinstance(after, Network)
    for name, leaf in pytree.name_leaves(after).items():
        assert_allclose(
            leaf,
            expected[name],
            rtol=1e-5,
            atol=1e-5,
            err_msg=name,
        )


def read_moment(state, name):
    return optax.tree.get(state, name)["kernel"]


def test_first_moment_of_adam_in_bfloat16():
    config = OptimizerConfig(first_moment_dtype="bfloat16")
    optimizer = build_optimizer(config, lambda step: RATE, PEAK)

    state = optimizer.init(scalars(1.0))

    assert read_moment(state, "mu").dtype == jnp.bfloat16
    assert read_moment(state, "nu").dtype == jnp.float32

    for gradient in (10.0, 0.0):
        _, state = optimizer.update(
            scalars(gradient),
            state,
            scalars(1.0),
        )

    # beta1 is rounded too, as the documentation says.
    assert float(read_moment(state, "mu")) == 0.8984375


def test_parameters_stay_float32_with_a_first_moment_in_bfloat16():
    config = OptimizerConfig(first_moment_dtype="bfloat16")

    gradients = 3 * [scalars(0.3)]
    # A bfloat16 has 8 bits.
    expected = pytest.approx(1 - 3 * RATE, abs=3 * RATE * 2**-7)

    after = run(config, scalars(1.0), gradients)
    kernel = after["kernel"]

    assert kernel.dtype == jnp.float32
    assert float(kernel) == expected


def no_optimizer(learning_rate):
    return 3


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "optax:lion",
            {"beta": 0.9},
            r"cannot be called with learning_rate and .*arguments=\{'beta': 0.9\}: .*'beta'",
        ),
        ("math:pi", {}, "'float' object is not callable"),
        (
            f"{__name__}:no_optimizer",
            {},
            r"gives int, not an optax\.GradientTransformation",
        ),
        ("optax:no_such", {}, "optax has no 'no_such'"),
    ],
)
def test_what_is_no_optimiser_is_rejected(name, arguments, message):
    config = OptimizerConfig(name=name, arguments=arguments)

    with rejects(f"config.optimizer.name='{name}'", message):
        build_optimizer(config, lambda step: RATE, PEAK)


@pytest.mark.parametrize(
    ("fields", "first"),
    [
        ({"trained": "head"}, "0/mu/head/kernel"),
        ({"trained": "head", "layer_decay": 0.5}, "0/0/mu/head/kernel"),
        ({"layer_decay": 0.5}, "0/mu/head/kernel"),
    ],
)
def test_checkpoints_name_the_state_by_its_place_in_the_chain(fields, first):
    parameters = {"head": {"kernel": jnp.zeros((2, 3))}}
    optimizer = build_optimizer(OptimizerConfig(name="adam", **fields), lambda step: 0.1, 0.1)

    names = pytree.name_leaves(optimizer.init(parameters))

    assert first in names
