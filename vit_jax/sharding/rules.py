"""Parameter placement: ordered rules over names, the first that matches decides, every name is covered.

The rules see the whole training state. An optimiser moment or a Polyak average ends in the name of its
parameter and so lies where the parameter lies.
"""

from typing import Any, TypeVar

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax import pytree

T = TypeVar("T")

Rules = tuple[tuple[str, int | None], ...]
"""(pattern over the whole name, dimension that is split over the data axis or None for no split)"""

RULES: dict[str, Rules] = {
    "replicated": ((".*", None),),
    "fsdp": (
        (r".*blocks/attention/(query|key|value)/kernel", 1),  # (L, D, heads, head dim): D
        (r".*blocks/attention/out/kernel", -1),  # (L, heads, head dim, D): D
        (r".*blocks/mlp/expand/kernel", -1),  # (L, D, M): M
        (r".*blocks/mlp/contract/kernel", 1),  # (L, M, D): M
        (r".*pooling/attention/(query|key|value)/kernel", 0),
        (r".*pooling/.*/kernel", -1),
        (r".*conv[123]?/kernel", -1),  # (height, width, I, O): O
        (r".*embedding/kernel", -1),  # (patch height, patch width, 3, D): D
        (r".*head/(hidden|linear)/kernel", 0),  # (D, K): D, since K is rarely divisible
        (r".*positions/table", -1),
        (r".*", None),  # biases, norms, tokens, scalars: too small to be worth a collective
    ),
}


def shard_tree(tree: T, mesh: Mesh, strategy: str) -> T:
    """The tree with a `NamedSharding` in place of every leaf.

    Args:
      tree: arrays or their abstract shapes.
      mesh: from `build_mesh`.
      strategy: a key of `RULES`. A dimension that the data axis does not divide stays whole.
    """

    def place(name: str, leaf: Any) -> NamedSharding:
        dim = pytree.first_match(RULES[strategy], name)
        if dim is None or leaf.ndim == 0 or leaf.shape[dim] % mesh.shape["data"]:
            return NamedSharding(mesh, PartitionSpec())
        axes: list[str | None] = [None] * leaf.ndim
        axes[dim] = "data"
        return NamedSharding(mesh, PartitionSpec(*axes))

    return pytree.map_with_names(place, tree)
