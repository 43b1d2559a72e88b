"""Every parameter of every network is placed by a rule; the placements of the large ones stand in golden tables.

`UPDATE_GOLDEN=1 pytest tests/sharding` renews the tables.
"""

import math
import os
import pathlib
import re

import jax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from vit_jax import pytree
from vit_jax.config import ModelConfig, build_architecture
from vit_jax.models import build_model
from vit_jax.sharding import build_mesh, shard_tree, spec_of
from vit_jax.sharding.rules import RULES

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "shardings"
MODELS = ("ViT-B/16", "ViT-L/16", "ViT-H/14", "ViT-G/14", "R152x4", "R50+ViT-L/16")
AXES = {"replica": 2, "data": 16, "model": 4}


def parameters(name, **options):
    architecture = build_architecture(ModelConfig(name=name, **options), image_size=(224, 224), num_classes=18_291)
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
    lines = [f"{name} on {mesh}, fsdp: {total:,} parameters, {held:,} on each device (1/{total / held:.1f})", ""]
    width = max(map(len, leaves))
    for leaf, x in leaves.items():
        shape, spec = " ".join(map(str, x.shape)), " ".join(axis or "-" for axis in specs[leaf]) or "whole"
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


EVERY_KIND = [
    *(
        {"name": "ViT-S/16", "pool": pool, "head": head}
        for pool in ("token", "gap", "map")
        for head in ("mlp", "linear")
    ),
    *({"name": "ViT-S/16", "position_embedding": kind} for kind in ("learned_1d", "learned_2d", "sincos2d", "none")),
    *({"name": "R26x1", "residual_unit": form} for form in ("preactivation", "postactivation")),
    {"name": "R26+ViT-S/32"},
]


@pytest.mark.parametrize("options", EVERY_KIND, ids=lambda options: "-".join(options.values()))
def test_every_large_parameter_is_split_over_data_and_what_computes_most_over_model(options):
    data, model = {"replica": 1, "data": 8, "model": 1}, {"replica": 2, "data": 2, "model": 2}
    for name, leaf in parameters(**options).items():
        if leaf.size >= 50_000:
            assert parts(spec_of(name, leaf.shape, data, "fsdp"), data) == 8, name
        computes_most = re.search(r"(blocks|pooling)/.*kernel|(conv[123]|shortcut/conv)/kernel", name) is not None
        spread = parts(spec_of(name, leaf.shape, model, "replicated"), model)
        assert spread == (2 if computes_most or re.search("(query|key|value|expand)/bias", name) else 1), name


def test_replicated_splits_nothing_over_data():
    axes = {"replica": 2, "data": 4, "model": 1}
    assert {spec_of(name, x.shape, axes, "replicated") for name, x in parameters("ViT-S/16").items()} == {
        PartitionSpec()
    }


def test_a_parameter_without_a_rule_is_an_error():
    with pytest.raises(ValueError, match="No rule covers 'encoder/blocks/novelty'"):
        spec_of("encoder/blocks/novelty", (2, 2), AXES, "replicated")


def test_every_rule_is_needed():
    names = [name for options in EVERY_KIND for name in parameters(**options)]
    for i, (pattern, _) in enumerate(RULES):
        first = [name for name in names if pytree.first_match([(p, j) for j, (p, _) in enumerate(RULES)], name) == i]
        assert first, f"{pattern} decides nothing"


def test_optimiser_moments_lie_with_their_parameters():
    leaves = parameters("ViT-S/16")
    mesh = build_mesh(jax.devices())
    shardings = pytree.named_leaves(shard_tree(leaves, mesh, "fsdp"))
    for name, sharding in pytree.named_leaves(shard_tree({"0": {"mu": leaves}}, mesh, "fsdp")).items():
        assert sharding.spec == shardings[name.removeprefix("0/mu/")].spec


def test_a_dimension_that_data_does_not_divide_stays_whole():
    axes = {"replica": 1, "data": 7, "model": 1}
    assert spec_of("head/linear/kernel", (384, 10), axes, "fsdp") == PartitionSpec()


def test_a_data_axis_that_does_not_divide_the_width_is_an_error():
    """1,664 values over 512 devices of a pod: nothing would be split."""
    mesh = AbstractMesh((1, 512, 1), ("replica", "data", "model"))
    with pytest.raises(
        ValueError, match=r"data axis of 512 devices would leave most .* Choose config.sharding.num_replicas=4"
    ):
        shard_tree(parameters("ViT-G/14"), mesh, "fsdp")
    shard_tree(parameters("ViT-H/14"), AbstractMesh((1, 256, 1), ("replica", "data", "model")), "fsdp")


def test_where_no_number_of_replicas_helps_the_error_says_so():
    with pytest.raises(ValueError, match="Choose parameters=replicated"):
        shard_tree(parameters("ViT-S/16"), build_mesh(jax.devices()[:7]), "fsdp")


def test_a_dimension_that_model_does_not_divide_is_an_error():
    with pytest.raises(ValueError, match=r"num_model_shards=4 .* encoder/blocks/attention/query/kernel, which is 6"):
        spec_of("encoder/blocks/attention/query/kernel", (12, 384, 6, 64), AXES, "replicated")
