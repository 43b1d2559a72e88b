"""Layer decay, learning rates by path, frozen parameters and linear probes, on small networks."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tests.optim.small_networks import abstract, fill, run
from vit_jax import pytree
from vit_jax.config.schema import OptimizerConfig
from vit_jax.optim.by_name import check_patterns, count_layers_to_head
from vit_jax.optim.optimizers import build_optimizer


def find_layers(tree):
    """Return the distances to the head of the parameters of each part."""
    layers = {}
    for name, distance in count_layers_to_head(tree).items():
        part = re.match(r"(encoder|body)/\w+|\w+", name)[0]
        layers.setdefault(part, set()).update(distance.ravel().tolist())
    return layers


RATE = 0.1
DECAY = 0.5
SETTINGS = {"weight_decay": 0.3, "clip_global_norm": 1.0}


def compute_updates(**config):
    """The first updates, compiled, of a gradient."""
    model = fill(abstract(), seed=0)
    gradients = fill(abstract(), seed=1)
    optimizer = build_optimizer(
        OptimizerConfig(**config),
        lambda step: jnp.float32(RATE),
        RATE,
    )
    init = jax.jit(optimizer.init)
    update = jax.jit(optimizer.update)
    updates, _ = update(gradients, init(model), model)

    assert jax.tree.structure(updates) == jax.tree.structure(model)

    leaves = pytree.name_leaves(updates)
    return jax.tree.map(np.asarray, leaves)


# Layer decay.


TRANSFORMER = {
    "encoder/blocks": {3, 2, 1},
    "encoder/norm": {0},
    "embedding": {4},
    "positions": {4},
    "head": {0},
}
STAGES = {
    "body/stage1": {4},
    "body/stage2": {3},
    "body/stage3": {2},
    "body/stage4": {1},
}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, TRANSFORMER | {"class_token": {4}}),
        (
            {"pool": "map", "position_embedding": "learned_2d"},
            TRANSFORMER | {"pooling": {0}},
        ),
        (
            {"name": "R26+ViT-B/32"},
            TRANSFORMER | {"class_token": {4}, "stem": {4}},
        ),
        (
            {"registers": 2, "embedding_norm": "tokens", "final_norm": "pooled"},
            {
                "encoder/blocks": {3, 2, 1},
                "embedding": {4},
                "embedding_norm": {4},
                "positions": {4},
                "class_token": {4},
                "register_tokens": {4},
                "pooled_norm": {0},
                "head": {0},
            },
        ),
        (
            {"name": "R26"},
            {
                "body/root": {5},
                **STAGES,
                "norm": {0},
                "head": {0},
            },
        ),
    ],
)
def test_layers_between_a_parameter_and_the_head(options, expected):
    assert find_layers(abstract(**options)) == expected


def test_a_parameter_of_an_unknown_layer_is_rejected_unless_layers_do_not_count():
    tree = {"adapter": {"kernel": jnp.ones(2)}}
    run(OptimizerConfig(layer_decay=1.0), tree, [tree])

    with pytest.raises(ValueError, match="'adapter/kernel'"):
        run(OptimizerConfig(layer_decay=0.9), tree, [tree])


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_layer_decay_scales_the_complete_step(name):
    """Clipping sees unscaled gradients; weight decay is scaled too.

    The sum of both may round in another order.
    """
    layers = count_layers_to_head(abstract())
    unscaled = compute_updates(name=name, **SETTINGS)

    scaled = compute_updates(
        name=name,
        layer_decay=DECAY,
        **SETTINGS,
    )

    for leaf, update in scaled.items():
        expected = unscaled[leaf] * DECAY ** layers[leaf]
        assert_allclose(update, expected, rtol=1e-6, atol=1e-8, err_msg=leaf)


def find_factor(name):
    if name == "head/linear/kernel":
        return 0.25
    if not name.startswith("encoder/"):
        return 1.0
    if name.endswith("/bias"):
        return 4.0
    return 0.5


# Patterns.


def test_the_first_pattern_that_matches_scales_the_update():
    multipliers = {
        "encoder/*/bias": 4.0,
        "encoder/*": 0.5,
        "head/linear/kernel": 0.25,
    }
    unscaled = compute_updates(name="sgd")

    scaled = compute_updates(name="sgd", learning_rate_multipliers=multipliers)

    for name, update in scaled.items():
        expected = unscaled[name] * np.float32(find_factor(name))
        assert_array_equal(update, expected, err_msg=name)


def test_frozen_parameters_change_nothing_for_the_others():
    """Layers are counted in the complete network.

    With its blocks frozen the embedding is as far from the head.
    """
    scales = {"layer_decay": 0.5, "learning_rate_multipliers": {"head/*": 3.0}}
    complete = compute_updates(name="sgd", **scales)

    partial = compute_updates(
        name="sgd",
        frozen=("encoder/blocks/*",),
        **scales,
    )

    for name, update in partial.items():
        expected = complete[name]
        if name.startswith("encoder/blocks/"):
            expected = np.full_like(update, -0.0)
        assert update.tobytes() == expected.tobytes(), name


@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig(frozen=("embedding/*",), learning_rate_multipliers={"head/*": 3.0}),
        OptimizerConfig(trained="head"),
    ],
    ids=["patterns", "head"],
)
def test_patterns_of_the_model_are_accepted(config):
    check_patterns(config, abstract())


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
        ({"trained": "last:99"}, r"trained='last:99': must have at most the \d+ blocks"),
        (
            {"trained": "last:1", "frozen": ("encoder/*", "head/*")},
            r"trained='last:1'.* leaves no parameter",
        ),
    ],
)
def test_patterns_are_checked(fields, message):
    with pytest.raises(ValueError, match=rf"config\.optimizer.*{message}"):
        check_patterns(OptimizerConfig(**fields), abstract())


def test_a_model_without_a_head_has_nothing_to_train():
    without_head = {"norm": {"scale": jnp.ones(2)}}
    message = r"trained='head', frozen=\(\) leaves no parameter"

    with pytest.raises(ValueError, match=message):
        check_patterns(OptimizerConfig(trained="head"), without_head)


def is_of_head(name):
    return name.startswith("head/")


# Trained parameters.


def select_head(model):
    head = {}
    for name, leaf in pytree.name_leaves(model).items():
        if is_of_head(name):
            head[name] = leaf
    return head


def replace_frozen(model, value):
    """Return the tree with one number in every leaf outside the head."""

    def replace(name, leaf):
        return leaf if is_of_head(name) else jnp.full_like(leaf, value)

    return pytree.map_with_names(replace, model)


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
def test_frozen_parameters_stay_to_the_bit(name, value, fields):
    settings = {} if ":" in name else SETTINGS
    config = OptimizerConfig(
        name=name,
        **fields,
        **settings,
    )
    model = replace_frozen(fill(abstract(), seed=0), value)
    gradients = [fill(model, seed=1), fill(model, seed=2)]

    before = pytree.name_leaves(model)
    after = pytree.name_leaves(run(config, model, gradients))

    for leaf, array in after.items():
        old_array = np.asarray(before[leaf])
        is_same = np.asarray(array).tobytes() == old_array.tobytes()
        assert is_same == (not is_of_head(leaf)), leaf


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_the_head_is_trained_as_if_it_stood_alone(name):
    """Also clipping ignores the gradients of frozen parameters, even NaN."""
    model = fill(abstract(), seed=0)
    gradients = []
    for seed in (1, 2, 3):
        gradient = fill(model, seed=seed)
        gradients.append(replace_frozen(gradient, float("nan")))
    gradients_of_head = [select_head(gradient) for gradient in gradients]
    settings = OptimizerConfig(name=name, **SETTINGS)
    frozen_settings = OptimizerConfig(
        name=name,
        trained="head",
        **SETTINGS,
    )

    alone = run(settings, select_head(model), gradients_of_head)
    trained = select_head(run(frozen_settings, model, gradients))

    for leaf, array in alone.items():
        assert_array_equal(trained[leaf], array, err_msg=leaf)


@pytest.mark.parametrize(
    ("name", "moments"),
    [("adam", 2), ("sgd", 1)],
)
def test_frozen_parameters_have_no_moments(name, moments):
    model = abstract()
    config = OptimizerConfig(
        name=name,
        trained="head",
        **SETTINGS,
    )
    optimizer = build_optimizer(config, lambda step: jnp.float32(RATE), RATE)

    state = jax.eval_shape(optimizer.init, model)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim)

    head_numbers = sum(leaf.size for leaf in select_head(model).values())
    assert numbers == moments * head_numbers
