"""Placement of the parameters of known networks (golden tables), of others, and of optimiser states.

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

from tests.columns import list_column
from vit_jax import pytree
from vit_jax.config import ModelConfig, build_architecture
from vit_jax.config.schema import OptimizerConfig
from vit_jax.models import build_model
from vit_jax.models.lora import Lora, list_factor_shapes
from vit_jax.optim.optimizers import build_optimizer
from vit_jax.sharding import find_spec, shard_tree
from vit_jax.sharding.partition import RULES
from vit_jax.train.state import init_state

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "shardings"
MODELS = (
    "ViT-B/16",
    "ViT-L/16",
    "ViT-H/14",
    "ViT-G/14",
    "R152x4",
    "R50+ViT-L/16",
)
AXES = {"replica": 2, "data": 16, "model": 4}


def abstract_model(name, num_classes=18_291, **options):
    architecture = build_architecture(
        ModelConfig(name=name, **options),
        image_size=(224, 224),
        num_classes=num_classes,
    )

    def build():
        return build_model(architecture, jax.random.key(0))

    return jax.eval_shape(build)


@functools.cache
def parameters(name, **options):
    return pytree.name_leaves(abstract_model(name, **options))


def parts(spec, axes=AXES):
    """Return the number of pieces into which a spec cuts an array."""
    return math.prod(axes[axis] for axis in spec if axis is not None)


def write_table(name):
    """Return a line for each parameter: its shape, and the axes of its dimensions.

    Parameters are placed with FSDP and tensor parallelism.
    """
    lines = []
    total = 0
    held = 0
    leaves = parameters(name)
    width = max(map(len, leaves))

    for leaf, x in leaves.items():
        spec = find_spec(leaf, x.shape, AXES, "fsdp")
        total += x.size
        held += x.size // parts(spec)

        shape = " ".join(map(str, x.shape))
        axes = " ".join(axis or "-" for axis in spec)
        lines.append(f"{leaf:<{width}}  {shape:<18}  {axes or 'whole'}")

    mesh = "2 replica x 16 data x 4 model"
    share = f"1/{total / held:.1f}"
    counts = f"{total:,} parameters, {held:,} on each device ({share})"
    header = f"{name} on {mesh}, fsdp: {counts}"
    return "\n".join([header, "", *lines, ""])


@pytest.mark.parametrize("name", MODELS)
def test_golden_tables(name):
    stem = re.sub(r"[/+]", "_", name)
    path = GOLDEN / f"{stem}.txt"
    text = write_table(name)

    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    assert text == path.read_text()


POOLS = ("token", "gap", "map")
HEADS = ("mlp", "linear")
EVERY_KIND = [
    *(
        {
            "name": "ViT-S/16",
            "pool": pool,
            "head": head,
        }
        for pool, head in itertools.product(POOLS, HEADS)
    ),
    {"name": "ViT-S/16", "position_embedding": "learned_1d"},
    {"name": "ViT-S/16", "position_embedding": "learned_2d"},
    {"name": "ViT-S/16", "position_embedding": "sincos2d"},
    {"name": "ViT-S/16", "position_embedding": "none"},
    {"name": "ViT-S/16", "position_embedding": "relative"},
    {"name": "ViT-S/16", "position_layers": "every"},
    {"name": "ViT-S/16", "block": "axial"},
    {"name": "R26x1", "residual_unit": "preactivation"},
    {"name": "R26x1", "residual_unit": "postactivation"},
    {"name": "R26+ViT-S/32"},
]

SPLIT_OVER_MODEL = re.compile(
    r"(blocks|pooling)/.*kernel|(conv[123]|shortcut/conv)/kernel|(query|key|value|expand)/bias"
)


def build_axes(replica, data, model):
    return {
        "replica": replica,
        "data": data,
        "model": model,
    }


def join_values(options):
    return "-".join(options.values())


@pytest.mark.parametrize("options", EVERY_KIND, ids=join_values)
def test_every_large_parameter_is_split_over_data(options):
    axes = build_axes(1, 8, 1)

    for name, leaf in parameters(**options).items():
        if leaf.size >= 50_000:
            spec = find_spec(name, leaf.shape, axes, "fsdp")
            assert parts(spec, axes) == 8, name


@pytest.mark.parametrize("options", EVERY_KIND, ids=join_values)
def test_parameters_that_compute_most_are_split_over_model(options):
    axes = build_axes(2, 2, 2)

    for name, leaf in parameters(**options).items():
        expected = 2 if SPLIT_OVER_MODEL.search(name) else 1
        spec = find_spec(name, leaf.shape, axes, "replicated")
        assert parts(spec, axes) == expected, name


def list_shapes(tree):
    shapes = {}
    for name, leaf in pytree.name_leaves(tree).items():
        shapes[name] = leaf.shape
    return shapes


def test_every_rule_decides_something_and_known_networks_need_no_last_one():
    patterns = list_column(RULES, 0)
    names = set()
    for options in EVERY_KIND:
        names.update(parameters(**options))
    model = abstract_model("ViT-B/16", mlp="swiglu")
    lora = Lora(
        rank=2,
        scale=1.0,
        layers=(),
    )
    names.update(list_factor_shapes(list_shapes(model), lora))

    indices = [(pattern, index) for index, pattern in enumerate(patterns)]
    used = {pytree.find_first_match(indices, name) for name in names}

    last = len(patterns) - 1
    assert used == set(range(last))


@pytest.mark.parametrize(
    ("name", "shape", "axes", "expected"),
    [
        # 7 divides nothing.
        ("head/linear/kernel", (384, 10), build_axes(1, 7, 1), ()),
        # The largest dimension, and the largest that 16 divides.
        ("encoder/novelty", (32, 768, 96), AXES, (None, "data", None)),
        ("encoder/novelty", (32, 100, 96), AXES, (None, None, "data")),
        ("encoder/novelty", (33, 100), AXES, ()),
        ("encoder/novelty", (), AXES, ()),
        # Too few dimensions for its rule.
        ("encoder/mine/mlp/expand/kernel", (768,), AXES, ("data",)),
    ],
)
def test_arrays_that_no_rule_splits_and_unknown_names(
    name,
    shape,
    axes,
    expected,
):
    spec = find_spec(name, shape, axes, "fsdp")

    assert spec == PartitionSpec(*expected)


def preconditioners(parameters):
    """Return two square matrices for each kernel, as Shampoo and SOAP keep them."""

    def build_matrices(x):
        rows = x.shape[0]
        columns = x.shape[-1]
        return [jnp.zeros((rows, rows)), jnp.zeros((columns, columns))]

    return jax.tree.map(build_matrices, parameters)


def find_parameter(leaf, names):
    """Return the parameter that a leaf of the state belongs to by its name, if any."""
    for name in names:
        if leaf.endswith(f"/{name}"):
            return name
    return None


def ours(**options):
    return build_optimizer(
        OptimizerConfig(**options),
        lambda step: jnp.float32(0.1),
        0.1,
    )


OPTIMIZERS = {
    "adafactor": optax.adafactor(0.1),
    "schedule-free": optax.contrib.schedule_free(optax.adam(0.1), 0.1),
    "preconditioners": optax.GradientTransformation(preconditioners, None),
    "adam": ours(weight_decay=0.1, layer_decay=0.7),
    "adam_head": ours(weight_decay=0.1, trained="head"),
    "adam_last": ours(weight_decay=0.1, trained="last:3"),
    "sgd": ours(name="sgd", layer_decay=0.7),
    "sgd_head": ours(name="sgd", trained="head"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_optimizers(name):
    """Arrays with their parameter's shape are placed like it.

    The others are spread without tensor parallelism. The project's optimisers keep arrays of their
    parameters' shapes, and counters of steps.
    """
    model = abstract_model("ViT-S/16", num_classes=1000)
    state = jax.eval_shape(
        lambda model: init_state(model, OPTIMIZERS[name], with_polyak=True),
        model,
    )
    mesh = AbstractMesh((1, 8, 2), tuple(AXES))
    shapes = list_shapes(model)

    shardings = shard_tree(state, mesh, "fsdp")
    placed = pytree.name_leaves(shardings)

    for leaf, shape in list_shapes(state).items():
        spec = placed[leaf].spec
        parameter = find_parameter(leaf, shapes)
        if parameter and shape in (shapes[parameter], (3, *shapes[parameter][1:])):
            assert spec == placed[f"model/{parameter}"].spec, leaf
            continue

        is_split = any(size % 8 == 0 for size in shape)
        num_parts = 8 if is_split else 1
        assert parts(spec, {"data": 8}) == num_parts, leaf
        if name.startswith(("adam", "sgd")):
            assert leaf == "step" or leaf.endswith("/count"), leaf


def place(name, data_axis):
    mesh = AbstractMesh((1, data_axis, 1), ("replica", "data", "model"))
    return shard_tree(parameters(name), mesh, "fsdp")


def test_a_data_axis_that_does_not_divide_the_width_is_an_error():
    """Nothing of 1,664 values would be split over the 512 devices of a pod."""
    message = r"data axis of 512 devices .* Choose config.sharding.num_replicas=4"

    place("ViT-H/14", 256)
    with pytest.raises(ValueError, match=message):
        place("ViT-G/14", 512)
    with pytest.raises(ValueError, match="Choose parameters=replicated"):
        place("ViT-S/16", 7)
