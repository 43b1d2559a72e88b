"""Layer decay, learning rates by path, frozen parameters and linear probes, on small networks."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.optim.small_networks import abstract, fill, run
from vit_jax import pytree
from vit_jax.config.schema import OptimizerConfig
from vit_jax.optim.by_name import check_patterns, layers_to_head
from vit_jax.optim.optimizers import build_optimizer

RATE = 0.1
DECAY = 0.5
SETTINGS = {"weight_decay": 0.3, "clip_global_norm": 1.0}


def updates_of(**config):
    """The first updates, compiled, of a gradient."""
    model = fill(abstract(), seed=0)
    gradients = fill(abstract(), seed=1)
    optimizer = build_optimizer(OptimizerConfig(**config), lambda step: jnp.float32(RATE), RATE)
    updates, _ = jax.jit(optimizer.update)(gradients, jax.jit(optimizer.init)(model), model)

    assert jax.tree.structure(updates) == jax.tree.structure(model)

    return {name: np.asarray(leaf) for name, leaf in pytree.named_leaves(updates).items()}


# Layer decay.


TRANSFORMER = {
    "encoder/blocks": {3, 2, 1},
    "encoder/norm": {0},
    "embedding": {4},
    "positions": {4},
    "head": {0},
}
STAGES = {"body/stage1": {4}, "body/stage2": {3}, "body/stage3": {2}, "body/stage4": {1}}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, TRANSFORMER | {"class_token": {4}}),
        ({"pool": "map", "position_embedding": "learned_2d"}, TRANSFORMER | {"pooling": {0}}),
        ({"name": "R26+ViT-B/32"}, TRANSFORMER | {"class_token": {4}, "stem": {4}}),
        (
            {"registers": 2, "embedding_norm": "tokens", "final_norm": "pooled"},
            {name: layers for name, layers in TRANSFORMER.items() if name != "encoder/norm"}
            | {
                "class_token": {4},
                "register_tokens": {4},
                "embedding_norm": {4},
                "pooled_norm": {0},
            },
        ),
        ({"name": "R26"}, {"body/root": {5}, **STAGES, "norm": {0}, "head": {0}}),
    ],
)
def test_layers_between_a_parameter_and_the_head(options, expected):
    actual = {}
    for name, distance in layers_to_head(abstract(**options)).items():
        actual.setdefault(re.match(r"(encoder|body)/\w+|\w+", name)[0], set()).update(
            distance.ravel().tolist()
        )

    assert actual == expected


def test_a_parameter_whose_place_is_not_known_is_refused_unless_layers_do_not_count():
    tree = {"adapter": {"kernel": jnp.ones(2)}}
    run(OptimizerConfig(layer_decay=1.0), tree, [tree])

    with pytest.raises(ValueError, match="'adapter/kernel'"):
        run(OptimizerConfig(layer_decay=0.9), tree, [tree])


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_layer_decay_scales_the_complete_step(name):
    """Clipping sees unscaled gradients; weight decay is scaled too, and their sum may round in another order."""
    unscaled = updates_of(name=name, **SETTINGS)
    layers = layers_to_head(abstract())

    for leaf, update in updates_of(name=name, layer_decay=DECAY, **SETTINGS).items():
        expected = unscaled[leaf] * DECAY ** layers[leaf]
        np.testing.assert_allclose(update, expected, rtol=1e-6, atol=1e-8, err_msg=leaf)


# Patterns.


def test_the_first_pattern_that_matches_scales_the_update():
    of_sgd = updates_of(name="sgd")
    multipliers = {"encoder/*/bias": 4.0, "encoder/*": 0.5, "head/linear/kernel": 0.25}

    for name, update in updates_of(name="sgd", learning_rate_multipliers=multipliers).items():
        factor = 0.25 if name == "head/linear/kernel" else 1.0
        if name.startswith("encoder/"):
            factor = 4.0 if name.endswith("/bias") else 0.5

        np.testing.assert_array_equal(update, of_sgd[name] * np.float32(factor), err_msg=name)


def test_frozen_parameters_change_nothing_for_the_others():
    """Layers are counted in the complete network: with its blocks frozen the embedding is as far from the head."""
    scales = {"layer_decay": 0.5, "learning_rate_multipliers": {"head/*": 3.0}}
    everything, some = (
        updates_of(name="sgd", frozen=frozen, **scales) for frozen in ((), ("encoder/blocks/*",))
    )

    for name, update in some.items():
        expected = (
            np.full_like(update, -0.0) if name.startswith("encoder/blocks/") else everything[name]
        )

        assert update.tobytes() == expected.tobytes(), name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"frozen": ("embedding/*", "encoder/layer3/*")},
            r"frozen: no parameter matches 'encoder/layer3/\*'\. ",
        ),
        (
            {"frozen": ("embeding/*",)},
            r"no parameter matches 'embeding/\*'\. Nearest: 'embedding/\*'.*\. The names: ",
        ),
        ({"frozen": ("zzz",)}, r"no parameter matches 'zzz'\. The names: "),
        (
            {"learning_rate_multipliers": {"heads/*": 3.0}},
            r"multipliers: no parameter matches 'heads/\*'.*head/linear",
        ),
        (
            {"frozen": ("*",)},
            r"trained='all', frozen=\('\*',\) leaves no parameter of this model to train",
        ),
    ],
)
def test_patterns_are_checked(fields, message):
    check_patterns(
        OptimizerConfig(frozen=("embedding/*",), learning_rate_multipliers={"head/*": 3.0}),
        abstract(),
    )
    check_patterns(OptimizerConfig(trained="head"), abstract())

    with pytest.raises(ValueError, match=rf"config\.optimizer.*{message}"):
        check_patterns(OptimizerConfig(**fields), abstract())

    with pytest.raises(ValueError, match=r"trained='head', frozen=\(\) leaves no parameter"):
        check_patterns(OptimizerConfig(trained="head"), {"norm": {"scale": jnp.ones(2)}})


# What is trained.


def head_of(model):
    return {
        name: leaf for name, leaf in pytree.named_leaves(model).items() if name.startswith("head/")
    }


def with_frozen(model, value):
    """The tree with one number in every leaf outside the head."""
    return pytree.map_with_names(
        lambda name, leaf: leaf if name.startswith("head/") else jnp.full_like(leaf, value),
        model,
    )


@pytest.mark.parametrize(
    "fields",
    [{"trained": "head"}, {"frozen": ("[!h]*",)}],
    ids=["head", "frozen"],
)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("adam", 0.0),
        ("sgd", -0.0),
        ("adam", 1 / 3),
        ("sgd", float("inf")),
        ("optax:lion", 0.0),
    ],
)
def test_what_is_not_trained_stays_to_the_bit(name, value, fields):
    settings = {} if ":" in name else SETTINGS
    model = with_frozen(fill(abstract(), seed=0), value)
    after = run(
        OptimizerConfig(name=name, **fields, **settings),
        model,
        [fill(model, seed=seed) for seed in (1, 2)],
    )
    before = pytree.named_leaves(model)

    for leaf, array in pytree.named_leaves(after).items():
        same = np.asarray(array).tobytes() == np.asarray(before[leaf]).tobytes()
        assert same == (not leaf.startswith("head/")), leaf


@pytest.mark.parametrize(("name", "moments"), [("adam", 2), ("sgd", 1)])
def test_the_head_is_trained_as_if_it_stood_alone(name, moments):
    """Clipping and all; what happens to be the gradient of a frozen parameter makes no difference, not even NaN."""
    model = fill(abstract(), seed=0)
    config = OptimizerConfig(name=name, trained="head", **SETTINGS)
    gradients = [with_frozen(fill(model, seed=seed), float("nan")) for seed in (1, 2, 3)]
    ours = head_of(run(config, model, gradients))
    alone = run(
        OptimizerConfig(name=name, **SETTINGS),
        head_of(model),
        [head_of(gradient) for gradient in gradients],
    )

    for leaf, array in alone.items():
        np.testing.assert_array_equal(ours[leaf], array, err_msg=leaf)

    state = jax.eval_shape(
        build_optimizer(config, lambda step: jnp.float32(RATE), RATE).init,
        model,
    )
    numbers = sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim)

    assert numbers == moments * sum(leaf.size for leaf in alone.values()), (
        "no moments of frozen parameters"
    )
