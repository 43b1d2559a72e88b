"""Parameter placement: ordered rules over names, the first that matches decides, every name must be covered.

The rules see the whole training state. An optimiser moment or a Polyak average ends in the name of its parameter and
so lies where the parameter lies.

Legend: L layers, D width, T heads, h head dimension, M MLP dimension, I O input and output channels, K classes.
"""

import dataclasses
import math
from typing import Any, TypeVar

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax import pytree

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Split:
    """Which dimension of an array each axis of the mesh splits, counted from the last, since layers may be stacked.

    Attributes:
      data: of FSDP, which spreads what is stored; None for what is too small to be worth a collective.
      model: of tensor parallelism, which spreads what is computed.
    """

    data: int | None = None
    model: int | None = None


WHOLE = Split()

RULES: tuple[tuple[str, Split], ...] = (
    # Tensor parallelism as in Megatron-LM: heads and hidden units are spread, one sum after each half of a block.
    (r".*attention/(query|key|value)/kernel", Split(data=-3, model=-2)),  # (L, D, T, h)
    (r".*attention/(query|key|value)/bias", Split(model=-2)),  # (L, T, h)
    (r".*attention/out/kernel", Split(data=-1, model=-3)),  # (L, T, h, D)
    (r".*mlp/expand/kernel", Split(data=-2, model=-1)),  # (L, D, M)
    (r".*mlp/expand/bias", Split(model=-1)),  # (L, M)
    (r".*mlp/contract/kernel", Split(data=-1, model=-2)),  # (L, M, D)
    # Bottlenecks likewise: the inner channels are spread, one sum at the end of a unit.
    (r".*conv[12]/kernel", Split(data=-2, model=-1)),  # (height, width, I, O)
    (r".*(conv3|shortcut/conv)/kernel", Split(data=-1, model=-2)),
    (r".*root/conv/kernel", Split(data=-1)),
    (r".*embedding/kernel", Split(data=-1)),  # (patch height, patch width, C, D)
    (r".*head/(hidden|linear)/kernel", Split(data=-2)),  # (D, K): D, since K is rarely divisible
    (r".*positions/table", Split(data=-1)),  # (1, S, D)
    (r".*positions/(row_table|column_table|class_row)", WHOLE),
    (r".*(class_token|probe)", WHOLE),
    (r".*/(bias|scale)", WHOLE),
)


def spec_of(name: str, shape: tuple[int, ...], axes: dict[str, int], strategy: str) -> PartitionSpec:
    """How one array of the state is split.

    Args:
      name: as `pytree` gives it.
      shape: of the array; a scalar is not split.
      axes: size of each axis of the mesh.
      strategy: "replicated", or "fsdp" for parameters split over the data axis too. A dimension that the data axis
        does not divide stays whole.

    Raises:
      ValueError: no rule covers the name, or the model axis does not divide its dimension.
    """
    if not shape:
        return PartitionSpec()
    split = pytree.first_match(RULES, name)
    parts: list[str | None] = [None] * len(shape)
    if strategy == "fsdp" and split.data is not None and axes["data"] > 1 and shape[split.data] % axes["data"] == 0:
        parts[split.data] = "data"
    if split.model is not None and axes["model"] > 1:
        if shape[split.model] % axes["model"]:
            raise ValueError(
                f"config.sharding.num_model_shards={axes['model']} does not divide dimension {split.model} of {name}, "
                f"which is {shape[split.model]} in {shape}: choose a divisor of it."
            )
        parts[split.model] = "model"
    return PartitionSpec(*parts) if any(parts) else PartitionSpec()


def shard_tree(tree: T, mesh: Mesh, strategy: str) -> T:
    """The tree, of arrays or their abstract shapes, with a `NamedSharding` in place of every leaf: see `spec_of`.

    Raises:
      ValueError: as `spec_of`, or FSDP would leave most of the tree whole.
    """
    axes = dict(mesh.shape)
    if strategy == "fsdp":
        _require_effect(tree, axes)

    def place(name: str, leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, spec_of(name, leaf.shape, axes, strategy))

    return pytree.map_with_names(place, tree)


def _require_effect(tree: Any, axes: dict[str, int]) -> None:
    """A data axis that does not divide the network's width would turn FSDP off without a word."""
    if _spread(tree, axes):
        return
    devices = axes["replica"] * axes["data"]
    sizes = (axes | {"replica": n, "data": devices // n} for n in range(1, devices) if devices % n == 0)
    better = next((f"config.sharding.num_replicas={size['replica']}" for size in sizes if _spread(tree, size)), None)
    raise ValueError(
        f"config.sharding.parameters='fsdp': a data axis of {axes['data']} devices would leave most parameters whole, "
        f"since it does not divide their dimensions. Choose {better or 'parameters=replicated'}."
    )


def _spread(tree: Any, axes: dict[str, int]) -> bool:
    """Whether FSDP splits at least half of all numbers."""
    shapes = {name: leaf.shape for name, leaf in pytree.named_leaves(tree).items() if leaf.shape}
    split = sum(math.prod(shape) for name, shape in shapes.items() if "data" in spec_of(name, shape, axes, "fsdp"))
    return axes["data"] == 1 or 2 * split >= sum(map(math.prod, shapes.values()))
