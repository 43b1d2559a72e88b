"""Adam, SGD and the three meanings of weight decay against hand-worked steps and a float64 loop.

float32 knows 1 - 0.999 to about 3e-5, so Adam's direction is held to 1e-4 of its size, which is near 1.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from vit_jax import pytree
from vit_jax.config.schema import OptimizerConfig
from vit_jax.optim.optimizers import build_optimizer, is_kernel

RATE, PEAK = 0.1, 0.2
DIRECTION_TOLERANCE = 1e-4


class Network(nnx.Module):
    """A kernel, a bias, norms, and an embedding: what decays and what may not."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.dense = nnx.Linear(3, 2, rngs=rngs)
        self.norm = nnx.LayerNorm(2, rngs=rngs)
        self.position_embedding = nnx.Param(jnp.ones((1, 2)))


def fixed(rate: float = RATE) -> Callable[[Any], jax.Array]:
    return lambda step: jnp.float32(rate)


def run(config: OptimizerConfig, parameters: Any, gradients: list[Any], schedule: Any = None) -> Any:
    """The parameters after one update for each gradient."""
    optimizer = build_optimizer(config, schedule or fixed(), PEAK)
    state, update = optimizer.init(parameters), jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(gradient, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
    return parameters


def scalars(value: float) -> dict[str, jax.Array]:
    return {"kernel": jnp.float32(value), "bias": jnp.float32(value)}


@pytest.mark.parametrize(
    ("meaning", "kernel", "bias"),
    [  # Adam's first direction for a gradient of 0.5 is 1; the learning rate 0.1 is half of its peak; decay 0.1.
        ("paper", 1 - 0.1 * (1 + 0.1 * 1), 1 - 0.1 * (1 + 0.1 * 1)),
        ("paper_kernels", 1 - 0.1 * (1 + 0.1 * 1), 1 - 0.1),
        ("big_vision", 1 - 0.1 - 0.5 * 0.1 * 1, 1 - 0.1),
    ],
)
def test_first_step_by_hand(meaning: Any, kernel: float, bias: float) -> None:
    config = OptimizerConfig(weight_decay=0.1, weight_decay_meaning=meaning)
    after = run(config, scalars(1.0), [scalars(0.5)])
    assert float(after["kernel"]) == pytest.approx(kernel, abs=RATE * DIRECTION_TOLERANCE)
    assert float(after["bias"]) == pytest.approx(bias, abs=RATE * DIRECTION_TOLERANCE)


def test_second_step_by_hand() -> None:
    """Gradients 0.5 and -0.25: moments 0.02 / 0.19 and 0.00031225 / 0.001999, direction 0.266337."""
    after = run(OptimizerConfig(weight_decay=0.1), scalars(1.0), [scalars(0.5), scalars(-0.25)])
    assert float(after["kernel"]) == pytest.approx(0.89 - 0.1 * (0.266337 + 0.1 * 0.89), abs=2e-5)


def reference(config: OptimizerConfig, parameters: dict, gradients: list[dict], rates: list[float]) -> dict:
    """The definitions, leaf by leaf in float64."""
    after = {}
    for name, p in parameters.items():
        p, m, v = np.asarray(p, np.float64), 0.0, 0.0
        decays = config.weight_decay_meaning == "paper" or name.endswith("kernel")
        for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
            g = np.asarray(gradient[name], np.float64)
            m = config.beta1 * m + (1 - config.beta1) * g
            v = config.beta2 * v + (1 - config.beta2) * g * g
            adam = m / (1 - config.beta1**t) / (np.sqrt(v / (1 - config.beta2**t)) + config.epsilon)
            decay_rate = rate / PEAK if config.weight_decay_meaning == "big_vision" else rate
            p = p - rate * adam - (decay_rate * config.weight_decay * p if decays else 0.0)
        after[name] = p
    return after


@pytest.mark.parametrize("meaning", ["paper", "paper_kernels", "big_vision"])
def test_module_against_float64_loop(meaning: Any) -> None:
    config = OptimizerConfig(beta1=0.8, beta2=0.95, weight_decay=0.3, weight_decay_meaning=meaning)
    network, rates = Network(), [0.0, 0.1, 0.2, 0.15, 0.05]
    generator = np.random.default_rng(0)
    gradients = [
        jax.tree.map(lambda leaf: jnp.asarray(generator.normal(size=leaf.shape), jnp.float32), network) for _ in rates
    ]
    after = run(config, network, gradients, lambda step: jnp.asarray(rates, jnp.float32)[step])
    assert isinstance(after, Network)
    expected = reference(
        config, pytree.named_leaves(network), [pytree.named_leaves(gradient) for gradient in gradients], rates
    )
    for name, leaf in pytree.named_leaves(after).items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_big_vision_decay_is_the_papers_times_the_peak() -> None:
    gradients = [scalars(0.5), scalars(-0.1), scalars(0.3)]
    paper = run(OptimizerConfig(weight_decay=0.1, weight_decay_meaning="paper_kernels"), scalars(1.0), gradients)
    config = OptimizerConfig(weight_decay=0.1 * PEAK, weight_decay_meaning="big_vision")
    ours = run(config, scalars(1.0), gradients)
    assert float(ours["kernel"]) == pytest.approx(float(paper["kernel"]), rel=1e-6)


@pytest.mark.parametrize(("clip", "scale"), [(None, 1.0), (1.0, 0.2), (5.5, 1.0)])
def test_clipping_by_the_norm_of_the_whole_tree(clip: float | None, scale: float) -> None:
    """Gradients 3 and 4 have norm 5. An epsilon of 1 makes Adam's direction g / (|g| + 1) show their size."""
    gradient = {"kernel": jnp.float32(3.0), "bias": jnp.float32(4.0)}
    after = run(OptimizerConfig(epsilon=1.0, clip_global_norm=clip), scalars(0.0), [gradient])
    expected = [-RATE * 3 * scale / (3 * scale + 1), -RATE * 4 * scale / (4 * scale + 1)]
    assert [float(after["kernel"]), float(after["bias"])] == pytest.approx(expected, rel=DIRECTION_TOLERANCE)


def test_first_moment_in_bfloat16() -> None:
    config = OptimizerConfig(first_moment_dtype="bfloat16")
    optimizer = build_optimizer(config, fixed(), PEAK)
    parameters, gradient = scalars(1.0), scalars(0.3)
    _, state = optimizer.update(gradient, optimizer.init(parameters), parameters)
    assert optax.tree.get(state, "mu")["kernel"].dtype == jnp.bfloat16
    assert optax.tree.get(state, "nu")["kernel"].dtype == jnp.float32
    after = run(config, parameters, [gradient] * 3)["kernel"]
    assert after.dtype == jnp.float32
    assert float(after) == pytest.approx(1 - 3 * RATE, abs=3 * RATE * 2**-7)  # a bfloat16 has 8 bits


def test_sgd_by_hand() -> None:
    """Gradients 1 and 2 at a momentum of 0.9: directions 1 and 2.9. A Nesterov step would begin with 1.9."""
    config = OptimizerConfig(name="sgd")
    first = run(config, scalars(1.0), [scalars(1.0)])
    second = run(config, scalars(1.0), [scalars(1.0), scalars(2.0)])
    assert [float(first["kernel"]), float(second["kernel"])] == pytest.approx([0.9, 0.9 - 0.29], rel=1e-6)


@pytest.mark.parametrize(
    ("meaning", "kernel", "bias"),
    [  # as for Adam: direction 0.5, rate 0.1 of a peak of 0.2, decay 0.3
        ("paper", 1 - 0.1 * (0.5 + 0.3), 1 - 0.1 * (0.5 + 0.3)),
        ("paper_kernels", 1 - 0.1 * (0.5 + 0.3), 1 - 0.1 * 0.5),
        ("big_vision", 1 - 0.1 * 0.5 - 0.5 * 0.3, 1 - 0.1 * 0.5),
    ],
)
def test_weight_decay_of_sgd_by_hand(meaning: Any, kernel: float, bias: float) -> None:
    config = OptimizerConfig(name="sgd", weight_decay=0.3, weight_decay_meaning=meaning)
    after = run(config, scalars(1.0), [scalars(0.5)])
    assert [float(after["kernel"]), float(after["bias"])] == pytest.approx([kernel, bias], rel=1e-6)


def sgd_reference(
    parameters: list[np.ndarray], gradients: list[list[np.ndarray]], rates: list[float], *, clip: float, buffer: Any
) -> list[np.ndarray]:
    """The definition in float64, but for the buffer, which is rounded once a step; decay 0.01 on everything."""
    after = [p.astype(np.float64) for p in parameters]
    buffers = [np.zeros_like(p) for p in after]
    for gradient, rate in zip(gradients, rates, strict=True):
        norm = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in gradient))
        for i, g in enumerate(gradient):
            direction = 0.9 * buffers[i] + g * min(1.0, clip / norm)
            after[i] = after[i] - rate * (direction + 0.01 * after[i])
            buffers[i] = direction.astype(buffer).astype(np.float64)
    return after


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ten_steps_of_sgd_against_a_numpy_loop(dtype: Any) -> None:
    """With this seed nothing comes nearer than 3e-5 to where float32 and float64 would round to different bfloat16."""
    generator = np.random.default_rng(0)
    shapes, rates = [(4, 3), (3,)], np.linspace(0.1, 0.01, 10).tolist()
    parameters, *gradients = [[generator.normal(size=shape).astype(np.float32) for shape in shapes] for _ in range(11)]
    names = ("kernel", "bias")
    config = OptimizerConfig(name="sgd", first_moment_dtype=dtype, weight_decay=0.01, clip_global_norm=1.0)
    after = run(
        config,
        dict(zip(names, map(jnp.asarray, parameters), strict=True)),
        [dict(zip(names, map(jnp.asarray, gradient), strict=True)) for gradient in gradients],
        lambda step: jnp.asarray(rates, jnp.float32)[step],
    )
    expected = sgd_reference(parameters, gradients, rates, clip=1.0, buffer=jnp.dtype(dtype))
    for name, leaf in zip(names, expected, strict=True):
        np.testing.assert_allclose(after[name], leaf, rtol=1e-6, atol=1e-6, err_msg=name)


def test_a_bfloat16_buffer_does_not_round_the_momentum() -> None:
    """In bfloat16 0.9 is 0.8984; after a gradient of 1, which the buffer holds exactly, only that would show."""
    config = OptimizerConfig(name="sgd", first_moment_dtype="bfloat16")
    after = run(config, scalars(0.0), [scalars(1.0), scalars(0.0)])
    assert float(after["kernel"]) == pytest.approx(-RATE * 1.9, rel=1e-6)


def test_update_number_n_takes_the_rate_of_n_steps_taken() -> None:
    after = run(OptimizerConfig(), scalars(1.0), [scalars(0.5)], lambda step: jnp.where(step == 0, 0.0, 1.0))
    assert float(after["kernel"]) == 1.0


def test_kernels_are_known_by_the_end_of_their_names() -> None:
    assert is_kernel("kernel")
    assert is_kernel("blocks/attention/query/kernel")
    assert not any(map(is_kernel, ("blocks/mlp/bias", "norm/scale", "kernel/scale", "a/subkernel", "probe")))
