import jax
import pytest
from jax.sharding import PartitionSpec

from vit_jax import pytree
from vit_jax.config import ModelConfig, build_architecture
from vit_jax.models import build_model
from vit_jax.sharding import build_mesh, shard_tree


def placements(strategy, devices=8, name="ViT-S/16", **options):
    architecture = build_architecture(ModelConfig(name=name, **options), image_size=(32, 32), num_classes=1001)
    model = jax.eval_shape(lambda: build_model(architecture, jax.random.key(0)))
    mesh = build_mesh(jax.devices()[:devices])
    return pytree.named_leaves(model), pytree.named_leaves(shard_tree(model, mesh, strategy))


def test_replicated_splits_nothing():
    _, shardings = placements("replicated")
    assert {sharding.spec for sharding in shardings.values()} == {PartitionSpec()}


@pytest.mark.parametrize(
    ("name", "pool"), [("ViT-S/16", "token"), ("ViT-S/16", "map"), ("R26x1", None), ("R26+ViT-S/32", None)]
)
def test_fsdp_splits_every_large_parameter(name, pool):
    leaves, shardings = placements("fsdp", name=name, pool=pool)
    for name, leaf in leaves.items():
        shards = leaf.size // jax.numpy.prod(jax.numpy.array(shardings[name].shard_shape(leaf.shape))).item()
        assert shards == (8 if name.endswith("kernel") or name == "positions/table" else 1), name


def test_optimiser_moments_lie_with_their_parameters():
    leaves, shardings = placements("fsdp")
    mesh = build_mesh(jax.devices())
    moments = {"0": {"mu": leaves}}
    for name, sharding in pytree.named_leaves(shard_tree(moments, mesh, "fsdp")).items():
        assert sharding.spec == shardings[name.removeprefix("0/mu/")].spec


def test_a_dimension_that_does_not_divide_stays_whole():
    mesh = build_mesh(jax.devices()[:7])
    tree = {"head": {"linear": {"kernel": jax.ShapeDtypeStruct((384, 10), jax.numpy.float32)}}}
    assert shard_tree(tree, mesh, "fsdp")["head"]["linear"]["kernel"].spec == PartitionSpec()
