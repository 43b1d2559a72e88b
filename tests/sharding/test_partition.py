"""Placement of the parameters of our networks (golden tables for large ones), of others, and of optimiser states.

`UPDATE_GOLDEN=1 pytest tests/sharding` renews the tables.
"""

import functools
import itertools
import math
import os
import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from vit_jax import pytree
from vit_jax.config import ModelConfig, build_architecture
from vit_jax.config.schema import OptimizerConfig
from vit_jax.models import build_model
from vit_jax.models.lora import Lora, factor_shapes
from vit_jax.optim.optimizers import build_optimizer
from vit_jax.sharding import shard_tree, spec_of
from vit_jax.sharding.partition import RULES
from vit_jax.train.state import init_state

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "shardings"
MODELS = ("ViT-B/16", "ViT-L/16", "ViT-H/14", "ViT-G/14", "R152x4", "R50+ViT-L/16")
AXES = {"replica": 2, "data": 16, "model": 4}


@functools.cache
def parameters(name, **options):
    architecture = build_architecture(
        ModelConfig(name=name, **options),
        image_size=(224, 224),
        num_classes=18_291,
    )
    return pytree.named_leaves(jax.eval_shape(lambda: build_model(architecture, jax.random.key(0))))


def parts(spec, axes=AXES):
    """Into how many pieces a spec cuts an array."""
    return math.prod(axes[axis] for axis in spec if axis is not None)


def table(name):
    """A line for each parameter: its shape, its dimensions over the axes, with FSDP and tensor parallelism."""
    leaves = parameters(name)
    specs = {leaf: spec_of(leaf, x.shape, AXES, "fsdp") for leaf, x in leaves.items()}
    total = sum(x.size for x in leaves.values())
    held = sum(x.size // parts(specs[leaf]) for leaf, x in leaves.items())
    mesh = " x ".join(f"{size} {axis}" for axis, size in AXES.items())
    lines = [
        f"{name} on {mesh}, fsdp: {total:,} parameters, {held:,} on each device (1/{total / held:.1f})",
        "",
    ]
    width = max(map(len, leaves))

    for leaf, x in leaves.items():
        shape = " ".join(map(str, x.shape))
        spec = " ".join(axis or "-" for axis in specs[leaf]) or "whole"
        lines.append(f"{leaf:<{width}}  {shape:<18}  {spec}")

    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", MODELS)
def test_golden_tables(name):
    path = GOLDEN / f"{name.replace('/', '_').replace('+', '_')}.txt"
    text = table(name)

    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    assert text == path.read_text()


POOLS_AND_HEADS = itertools.product(("token", "gap", "map"), ("mlp", "linear"))
EVERY_KIND = [
    *({"name": "ViT-S/16", "pool": pool, "head": head} for pool, head in POOLS_AND_HEADS),
    *(
        {"name": "ViT-S/16", "position_embedding": kind}
        for kind in ("learned_1d", "learned_2d", "sincos2d", "none")
    ),
    {"name": "ViT-S/16", "position_embedding": "relative"},
    {"name": "ViT-S/16", "position_layers": "every"},
    {"name": "ViT-S/16", "block": "axial"},
    *({"name": "R26x1", "residual_unit": form} for form in ("preactivation", "postactivation")),
    {"name": "R26+ViT-S/32"},
]


@pytest.mark.parametrize("options", EVERY_KIND, ids=lambda options: "-".join(options.values()))
def test_every_large_parameter_is_split_over_data_and_what_computes_most_over_model(options):
    data = {"replica": 1, "data": 8, "model": 1}
    model = {"replica": 2, "data": 2, "model": 2}

    for name, leaf in parameters(**options).items():
        if leaf.size >= 50_000:
            assert parts(spec_of(name, leaf.shape, data, "fsdp"), data) == 8, name

        computes_most = (
            re.search(r"(blocks|pooling)/.*kernel|(conv[123]|shortcut/conv)/kernel", name)
            is not None
        )
        spread = parts(spec_of(name, leaf.shape, model, "replicated"), model)

        assert spread == (
            2 if computes_most or re.search("(query|key|value|expand)/bias", name) else 1
        ), name


def test_every_rule_decides_something_and_known_networks_need_no_last_one():
    patterns = [(pattern, pattern) for pattern, _ in RULES]
    names = {name for options in EVERY_KIND for name in parameters(**options)}
    shapes = {name: leaf.shape for name, leaf in parameters("ViT-B/16", mlp="swiglu").items()}
    names |= factor_shapes(shapes, Lora(rank=2, scale=1.0, layers=())).keys()
    used = {pytree.first_match(patterns, name) for name in names}

    assert used == {pattern for pattern, _ in RULES[:-1]}


@pytest.mark.parametrize(
    ("name", "shape", "axes", "strategy", "expected"),
    [
        (
            "head/linear/kernel",
            (384, 10),
            {"replica": 1, "data": 7, "model": 1},
            "fsdp",
            (),
        ),  # 7 divides nothing
        (
            "encoder/novelty",
            (32, 768, 96),
            AXES,
            "fsdp",
            (None, "data", None),
        ),  # the largest dimension
        ("encoder/novelty", (32, 100, 96), AXES, "fsdp", (None, None, "data")),  # that 16 divides
        ("encoder/novelty", (33, 100), AXES, "fsdp", ()),
        ("encoder/novelty", (), AXES, "fsdp", ()),
        (
            "encoder/mine/mlp/expand/kernel",
            (768,),
            AXES,
            "fsdp",
            ("data",),
        ),  # too few dimensions for its rule
    ],
)
def test_arrays_that_no_rule_splits_and_unknown_names(name, shape, axes, strategy, expected):
    assert spec_of(name, shape, axes, strategy) == PartitionSpec(*expected)


def preconditioners(parameters):
    """As Shampoo and SOAP have them: for each kernel two square matrices."""
    return jax.tree.map(lambda x: [jnp.zeros((x.shape[dim],) * 2) for dim in (0, -1)], parameters)


def ours(**options):
    return build_optimizer(OptimizerConfig(**options), lambda step: jnp.float32(0.1), 0.1)


OPTIMIZERS = {
    "adafactor": optax.adafactor(0.1),
    "schedule-free": optax.contrib.schedule_free(optax.adam(0.1), 0.1),
    "preconditioners": optax.GradientTransformation(preconditioners, None),
    "adam": ours(weight_decay=0.1, layer_decay=0.7),
    "adam_head": ours(weight_decay=0.1, trained="head"),
    "sgd": ours(name="sgd", layer_decay=0.7),
    "sgd_head": ours(name="sgd", trained="head"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_optimizers(name):
    """Arrays with their parameter's shape are placed like it; the others are spread without tensor parallelism.

    All that our own optimisers keep is of their parameters' shapes, but for counters of steps.
    """
    architecture = build_architecture(
        ModelConfig(name="ViT-S/16"),
        image_size=(224, 224),
        num_classes=1000,
    )
    model = jax.eval_shape(lambda: build_model(architecture, jax.random.key(0)))
    state = jax.eval_shape(
        lambda model: init_state(model, OPTIMIZERS[name], with_polyak=True),
        model,
    )
    placed = pytree.named_leaves(shard_tree(state, AbstractMesh((1, 8, 2), tuple(AXES)), "fsdp"))
    shapes = {leaf: x.shape for leaf, x in pytree.named_leaves(model).items()}

    for leaf, x in pytree.named_leaves(state).items():
        parameter = next((known for known in shapes if leaf.endswith(f"/{known}")), None)
        if parameter and x.shape == shapes[parameter]:
            assert placed[leaf].spec == placed[f"model/{parameter}"].spec, leaf
        else:
            is_split = any(size % 8 == 0 for size in x.shape)
            assert parts(placed[leaf].spec, {"data": 8}) == (8 if is_split else 1), leaf
            assert (
                not name.startswith(("adam", "sgd")) or leaf == "step" or leaf.endswith("/count")
            ), leaf


def test_a_data_axis_that_does_not_divide_the_width_is_an_error():
    """1,664 values over 512 devices of a pod: nothing would be split."""
    mesh = AbstractMesh((1, 512, 1), ("replica", "data", "model"))
    with pytest.raises(
        ValueError, match=r"data axis of 512 devices .* Choose config.sharding.num_replicas=4"
    ):
        shard_tree(parameters("ViT-G/14"), mesh, "fsdp")

    shard_tree(
        parameters("ViT-H/14"),
        AbstractMesh((1, 256, 1), ("replica", "data", "model")),
        "fsdp",
    )

    with pytest.raises(ValueError, match="Choose parameters=replicated"):
        shard_tree(
            parameters("ViT-S/16"),
            AbstractMesh((1, 7, 1), ("replica", "data", "model")),
            "fsdp",
        )
