"""Optimisers by reference, learning rates by path, and frozen parameters, on a small network."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.optim.small_networks import abstract, fill
from vit_jax import pytree
from vit_jax.config.schema import OptimizerConfig
from vit_jax.optim.optimizers import build_optimizer, check_patterns

RATE = 0.1


def updates_of(**config: Any) -> dict[str, np.ndarray]:
    """The first updates, compiled, of a gradient."""
    model, gradients = fill(abstract(), seed=0), fill(abstract(), seed=1)
    optimizer = build_optimizer(OptimizerConfig(**config), lambda step: jnp.float32(RATE), RATE)
    updates, state = jax.jit(optimizer.update)(gradients, jax.jit(optimizer.init)(model), model)
    assert jax.tree.structure(updates) == jax.tree.structure(model)
    assert jax.tree.structure(state) == jax.tree.structure(jax.eval_shape(optimizer.init, model))
    return {name: np.asarray(leaf) for name, leaf in pytree.named_leaves(updates).items()}


@pytest.fixture(scope="module")
def of_sgd() -> dict[str, np.ndarray]:
    return updates_of(name="sgd")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("optax:lion", {"b1": 0.8, "weight_decay": 0.2}), ("optax:adafactor", {}), ("optax.contrib:muon", {"beta": 0.9})],
)
def test_an_optimiser_of_optax_is_called_with_its_arguments(name: Any, arguments: dict[str, Any]) -> None:
    model, gradients = (pytree.named_leaves(fill(abstract(), seed=seed)) for seed in (0, 1))
    module, _, function = name.partition(":")
    alone = getattr(optax if module == "optax" else optax.contrib, function)(learning_rate=RATE, **arguments)
    with jax.numpy_dtype_promotion("standard"):
        expected, _ = jax.jit(alone.update)(gradients, jax.jit(alone.init)(model), model)
    for leaf, update in updates_of(name=name, arguments=arguments).items():
        np.testing.assert_allclose(update, expected[leaf], rtol=1e-4, atol=1e-6, err_msg=leaf)


def no_optimizer(learning_rate: Any) -> int:
    return 3


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("optax:lion", {"beta": 0.9}, r"cannot be called with learning_rate and .*arguments=\{'beta': 0.9\}: .*'beta'"),
        ("optax:identity", {}, "cannot be called with learning_rate"),
        ("math:pi", {}, "'float' object is not callable"),
        (f"{__name__}:no_optimizer", {}, r"gives int, not an optax\.GradientTransformation"),
        ("optax:no_such", {}, "optax has no 'no_such'"),
    ],
)
def test_what_is_no_optimiser_is_refused(name: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"config\.optimizer\.name='{name}'.*{message}"):
        updates_of(name=name, arguments=arguments)


def test_the_first_pattern_that_matches_scales_the_update(of_sgd: dict[str, np.ndarray]) -> None:
    multipliers = {"encoder/*/bias": 4.0, "encoder/*": 0.5, "head/linear/kernel": 0.25}
    for name, update in updates_of(name="sgd", learning_rate_multipliers=multipliers).items():
        factor = 0.25 if name == "head/linear/kernel" else 1.0
        if name.startswith("encoder/"):
            factor = 4.0 if name.endswith("/bias") else 0.5
        np.testing.assert_array_equal(update, of_sgd[name] * np.float32(factor), err_msg=name)


@pytest.mark.parametrize("name", ["sgd", "adam", "optax:lion"])
def test_frozen_parameters_stay_to_the_bit(name: Any) -> None:
    """-0.0 is what changes nothing when added, a zero of either sign included."""
    for leaf, update in updates_of(name=name, frozen=("embedding/*", "encoder/*/bias")).items():
        is_frozen = leaf.startswith("embedding/") or (leaf.startswith("encoder/") and leaf.endswith("/bias"))
        assert (update.tobytes() == np.full_like(update, -0.0).tobytes()) == is_frozen, leaf


def test_frozen_parameters_change_nothing_for_the_others(of_sgd: dict[str, np.ndarray]) -> None:
    """Layers are counted in the complete network: with its blocks frozen the embedding is as far from the head."""
    scales: Any = {"layer_decay": 0.5, "learning_rate_multipliers": {"head/*": 3.0}}
    everything, some = (updates_of(name="sgd", frozen=frozen, **scales) for frozen in ((), ("encoder/blocks/*",)))
    np.testing.assert_allclose(everything["head/linear/bias"], of_sgd["head/linear/bias"] * 3, rtol=1e-6)
    np.testing.assert_allclose(everything["embedding/bias"], of_sgd["embedding/bias"] / 16, rtol=1e-6)
    for name, update in some.items():
        expected = np.full_like(update, -0.0) if name.startswith("encoder/blocks/") else everything[name]
        assert update.tobytes() == expected.tobytes(), name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"frozen": ("embedding/*", "encoder/layer3/*")}, r"frozen: no parameter matches 'encoder/layer3/\*'\. The"),
        ({"learning_rate_multipliers": {"heads/*": 3.0}}, r"multipliers: no parameter matches 'heads/\*'.*head/linear"),
        ({"frozen": ("*",)}, r"trained='all', frozen=\('\*',\) leaves no parameter of this model to train"),
    ],
)
def test_patterns_are_checked(fields: dict[str, Any], message: str) -> None:
    check_patterns(OptimizerConfig(frozen=("embedding/*",), learning_rate_multipliers={"head/*": 3.0}), abstract())
    check_patterns(OptimizerConfig(trained="head"), abstract())
    with pytest.raises(ValueError, match=rf"config\.optimizer.*{message}"):
        check_patterns(OptimizerConfig(**fields), abstract())


def test_a_network_without_a_head_has_none_to_train() -> None:
    with pytest.raises(ValueError, match=r"trained='head', frozen=\(\) leaves no parameter"):
        check_patterns(OptimizerConfig(trained="head"), {"norm": {"scale": jnp.ones(2)}})
