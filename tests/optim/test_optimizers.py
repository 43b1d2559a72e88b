"""Adam, SGD and the three meanings of weight decay against a float64 loop; optimisers by reference.

float32 knows 1 - 0.999 to about 3e-5, so Adam's direction is held to 1e-4 of its size, which is
near 1.
"""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.optim.small_networks import fill, run
from vit_jax import pytree
from vit_jax.config.schema import OptimizerConfig
from vit_jax.optim.optimizers import build_optimizer

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
    return {"kernel": jnp.float32(value), "bias": jnp.float32(value)}


def reference(config, parameters, gradients, rates):
    """The definitions, leaf by leaf in float64, but for SGD's buffer, which is rounded once a step."""
    after = {name: np.asarray(p, np.float64) for name, p in parameters.items()}
    m = dict.fromkeys(after, 0.0)
    v = dict.fromkeys(after, 0.0)

    for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        norm = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in gradient.values()))
        scale = min(1.0, (config.clip_global_norm or np.inf) / norm)

        for name, p in after.items():
            g = np.asarray(gradient[name], np.float64) * scale
            if config.name == "adam":
                m[name] = config.beta1 * m[name] + (1 - config.beta1) * g
                v[name] = config.beta2 * v[name] + (1 - config.beta2) * g * g
                root = np.sqrt(v[name] / (1 - config.beta2**t))
                direction = m[name] / (1 - config.beta1**t) / (root + config.epsilon)
            else:
                direction = config.momentum * m[name] + g
                m[name] = direction.astype(jnp.dtype(config.first_moment_dtype)).astype(np.float64)

            decays = config.weight_decay_meaning == "paper" or name.endswith("kernel")
            decay_rate = rate / PEAK if config.weight_decay_meaning == "big_vision" else rate
            after[name] = (
                p - rate * direction - (decay_rate * config.weight_decay * p if decays else 0.0)
            )

    return after


CASES = {"adam": {"beta1": 0.8, "beta2": 0.95}, "sgd": {"name": "sgd"}}
CASES |= {"sgd_bfloat16": {"name": "sgd", "first_moment_dtype": "bfloat16"}}
CASES |= {"sgd_without_momentum": {"name": "sgd", "momentum": 0.0}}


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("meaning", ["paper", "paper_kernels", "big_vision"])
@pytest.mark.parametrize("case", CASES)
def test_module_against_float64_loop(case, meaning, clip):
    """With this seed nothing comes near to where float32 and float64 would round to different bfloat16."""
    config = OptimizerConfig(
        weight_decay=0.3,
        weight_decay_meaning=meaning,
        clip_global_norm=clip,
        **CASES[case],
    )
    network, rates = (
        Network(),
        [0.0, 0.1, 0.2, 0.15, 0.05],
    )  # update number n takes the rate of n steps taken
    gradients = [fill(network, seed) for seed in range(5)]
    after = run(
        config,
        network,
        gradients,
        lambda step: jnp.asarray(rates, jnp.float32)[step],
        PEAK,
    )

    assert isinstance(after, Network)

    expected = reference(
        config,
        pytree.named_leaves(network),
        [*map(pytree.named_leaves, gradients)],
        rates,
    )

    for name, leaf in pytree.named_leaves(after).items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_first_moment_of_adam_in_bfloat16():
    config = OptimizerConfig(first_moment_dtype="bfloat16")
    state = build_optimizer(config, lambda step: RATE, PEAK).init(scalars(1.0))

    assert optax.tree.get(state, "mu")["kernel"].dtype == jnp.bfloat16
    assert optax.tree.get(state, "nu")["kernel"].dtype == jnp.float32

    optimizer = build_optimizer(config, lambda step: RATE, PEAK)
    for gradient in (10.0, 0.0):
        _, state = optimizer.update(scalars(gradient), state, scalars(1.0))

    assert (
        float(optax.tree.get(state, "mu")["kernel"]) == 0.8984375
    )  # beta1 is rounded too, as the documentation says

    after = run(config, scalars(1.0), [scalars(0.3)] * 3)["kernel"]
    assert after.dtype == jnp.float32
    assert float(after) == pytest.approx(
        1 - 3 * RATE, abs=3 * RATE * 2**-7
    )  # a bfloat16 has 8 bits


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
        (f"{__name__}:no_optimizer", {}, r"gives int, not an optax\.GradientTransformation"),
        ("optax:no_such", {}, "optax has no 'no_such'"),
    ],
)
def test_what_is_no_optimiser_is_refused(name, arguments, message):
    with pytest.raises(ValueError, match=rf"config\.optimizer\.name='{name}'.*{message}"):
        build_optimizer(OptimizerConfig(name=name, arguments=arguments), lambda step: RATE, PEAK)
