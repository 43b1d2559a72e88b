"""Parameters that begin at zero must learn under optimisers that scale by the norm of the parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax import pytree
from vit_jax.config import ModelConfig, build_architecture
from vit_jax.config.schema import OptimizerConfig
from vit_jax.models import build_model
from vit_jax.optim.optimizers import build_optimizer
from vit_jax.optim.zero_start import STAND_IN_STDDEV, lift_zeros, may_start_at_zero

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
    """Four clusters, from a loss of ln 4."""
    generator = np.random.default_rng(0)
    label = np.arange(64) % 4
    features = jnp.asarray(np.eye(8)[label] + 0.1 * generator.normal(size=(64, 8)), jnp.float32)
    zeros = {"head/linear/kernel": jnp.zeros((8, 4)), "head/linear/bias": jnp.zeros(4)}
    rate = RATE * (100 if name == "optax:lars" else 1)  # whose trust coefficient is 0.001
    config = OptimizerConfig(name=name, arguments=CASES[name])
    optimizer = build_optimizer(config, lambda step: jnp.float32(rate), rate)

    def loss(params):
        logits = features @ params["head/linear/kernel"] + params["head/linear/bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(label)).mean()

    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.jit(lambda first: jax.lax.scan(step, first, length=STEPS))(
        (zeros, optimizer.init(zeros))
    )

    assert float(loss(zeros)) == pytest.approx(np.log(4))
    assert float(loss(params)) < 1.2

    norm = float(jnp.linalg.norm(params["head/linear/kernel"]))
    assert norm > 20 * RATE * STAND_IN_STDDEV


def test_the_step_is_that_of_a_standard_deviation_of_002():
    """The root mean square of LAMB's first step at zero is the rate times 0.02, of both kinds of LAMB."""
    shape = (6, 5)
    params = {"blocks/lora_b": jnp.zeros(shape), "blocks/bias": jnp.zeros(7)}
    gradient = jax.tree.map(
        lambda x: jnp.asarray(np.random.default_rng(1).normal(size=x.shape), jnp.float32),
        params,
    )

    for name, names in (("lamb", ["blocks/lora_b"]), ("optax:lamb", list(params))):
        optimizer = build_optimizer(
            OptimizerConfig(name=name),
            lambda step: jnp.float32(RATE),
            RATE,
        )
        updates, _ = optimizer.update(gradient, optimizer.init(params), params)

        for leaf in names:
            np.testing.assert_allclose(
                jnp.sqrt(jnp.mean(updates[leaf] ** 2)),
                RATE * STAND_IN_STDDEV,
                rtol=1e-4,
            )


def test_larger_parameters_are_seen_as_they_are():
    params = {"head/linear/kernel": jnp.full((3, 2), 0.03), "positions/table": jnp.full((2,), 1e-9)}
    seen = optax.stateless(lambda updates, params: params)
    shown, _ = lift_zeros(seen).update(params, optax.EmptyState(), params)

    assert all(bool((shown[name] == params[name]).all()) for name in params)


@pytest.mark.parametrize("name", ["ViT-Ti/16", "R14x0.5"])
def test_every_zero_of_a_network_is_known(name):
    """Parameters below 1e-5 at the start are those that the rule names."""
    options = (
        {"width": 8, "depth": 1, "mlp_dim": 8, "num_heads": 2, "registers": 1}
        if "/" in name
        else {}
    )
    architecture = build_architecture(
        ModelConfig(name=name, **options),
        image_size=(32, 32),
        num_classes=5,
    )
    model = jax.jit(build_model, static_argnums=0)(architecture, jax.random.key(0))

    for parameter, leaf in pytree.named_leaves(model).items():
        assert may_start_at_zero(parameter) or float(jnp.abs(leaf).max()) > 1e-5, parameter
