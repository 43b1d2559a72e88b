"""Parameters that begin at zero must learn under optimisers that scale by the norm of the parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tests.optim.small_networks import fill
from vit_jax import pytree
from vit_jax.config import ModelConfig, build_architecture
from vit_jax.config.schema import OptimizerConfig
from vit_jax.models import build_model
from vit_jax.optim.optimizers import build_optimizer
from vit_jax.optim.zero_start import STAND_IN_STDDEV, lift_zeros, may_start_at_zero

KERNEL = "head/linear/kernel"

BIAS = "head/linear/bias"


def sample_clusters():
    """Return features (64, 8) of four clusters, and their labels."""
    rng = np.random.default_rng(0)
    label = np.arange(64) % 4
    noise = 0.1 * rng.normal(size=(64, 8))
    features = np.eye(8)[label] + noise
    return jnp.float32(features), jnp.asarray(label)


RATE = 0.03
STEPS = 200
CASES = {
    "lamb": {},
    "optax:lamb": {},
    "optax:lars": {},
    "optax:fromage": {},
    "optax:adafactor": {"min_dim_size_to_factor": 2},
}


@pytest.mark.parametrize("name", CASES)
def test_a_head_of_zeros_learns_separable_classes(name):
    """The loss of four classes begins at ln 4."""
    features, label = sample_clusters()
    zeros = {
        KERNEL: jnp.zeros((8, 4)),
        BIAS: jnp.zeros(4),
    }
    rate = RATE
    if name == "optax:lars":
        rate *= 100  # its trust coefficient is 0.001
    config = OptimizerConfig(name=name, arguments=CASES[name])
    optimizer = build_optimizer(config, lambda step: jnp.float32(rate), rate)

    def compute_loss(params):
        logits = features @ params[KERNEL] + params[BIAS]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        return losses.mean()

    def step(carry, _):
        params, state = carry
        gradient = jax.grad(compute_loss)(params)
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), None

    @jax.jit
    def train(params, state):
        carry, _ = jax.lax.scan(
            step,
            (params, state),
            length=STEPS,
        )
        return carry[0]

    params = train(zeros, optimizer.init(zeros))
    first_loss = float(compute_loss(zeros))
    last_loss = float(compute_loss(params))
    norm = float(jnp.linalg.norm(params[KERNEL]))

    assert first_loss == pytest.approx(np.log(4))
    assert last_loss < 1.2
    assert norm > 20 * RATE * STAND_IN_STDDEV


@pytest.mark.parametrize(
    ("name", "lifted"),
    [
        ("lamb", ["blocks/lora_b"]),
        ("optax:lamb", ["blocks/lora_b", "blocks/bias"]),
    ],
)
def test_the_step_is_that_of_a_standard_deviation_of_002(name, lifted):
    """The root mean square of LAMB's first step at zero is the rate times 0.02."""
    params = {
        "blocks/lora_b": jnp.zeros((6, 5)),
        "blocks/bias": jnp.zeros(7),
    }
    gradient = fill(params, seed=1)
    config = OptimizerConfig(name=name)
    optimizer = build_optimizer(config, lambda step: jnp.float32(RATE), RATE)
    state = optimizer.init(params)

    updates, _ = optimizer.update(gradient, state, params)

    for leaf in lifted:
        squares = jnp.square(updates[leaf])
        root_mean_square = jnp.sqrt(squares.mean())
        assert_allclose(root_mean_square, RATE * STAND_IN_STDDEV, rtol=1e-4)


def test_larger_parameters_are_seen_as_they_are():
    params = {
        KERNEL: jnp.full((3, 2), 0.03),
        "positions/table": jnp.full((2,), 1e-9),
    }
    return_params = optax.stateless(lambda updates, params: params)
    optimizer = lift_zeros(return_params)

    seen, _ = optimizer.update(params, optax.EmptyState(), params)

    for name, value in params.items():
        assert_array_equal(seen[name], value)


SMALL = {
    "width": 8,
    "depth": 1,
    "mlp_dim": 8,
    "num_heads": 2,
    "registers": 1,
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ViT-Ti/16", SMALL),
        ("R14x0.5", {}),
    ],
)
def test_every_zero_of_a_network_is_known(name, options):
    """Parameters below 1e-5 at the start are those that the rule names."""
    architecture = build_architecture(
        ModelConfig(name=name, **options),
        image_size=(32, 32),
        num_classes=5,
    )

    @jax.jit
    def initialise():
        return build_model(architecture, jax.random.key(0))

    model = initialise()

    for parameter, leaf in pytree.name_leaves(model).items():
        largest = float(jnp.abs(leaf).max())
        assert may_start_at_zero(parameter) or largest > 1e-5, parameter
