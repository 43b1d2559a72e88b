"""Parameter placement: ordered rules over names, of which the first that matches decides.

They apply to the complete training state: moments and averages have the name and shape of their parameter. Arrays of
other shapes (Adafactor's factors) and parameters of unknown networks are split by the last rule.

Legend: L layers, D width, E of all heads together, M MLP dimension, r rank of LoRA, I O input and output channels,
K classes.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import TypeVar

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from vit_jax import pytree

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Split:
    """The dimension of an array that each axis of the mesh splits, counted from the last: layers may be stacked."""

    data: int | None = (
        None  # of FSDP, which spreads what is stored; None: too small to be worth a collective
    )
    model: int | None = None  # of tensor parallelism, which spreads what is computed

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether an array of this shape has the dimensions to split."""
        return all(dim is None or -dim <= len(shape) for dim in (self.data, self.model))


WHOLE = Split()
OTHER = Split()  # for unknown names: FSDP splits the largest dimension that the data axis divides

RULES: tuple[tuple[str, Split], ...] = (
    # Tensor parallelism as in Megatron-LM: heads and hidden units are spread, one sum after each half of a block.
    (r".*attention/(query|key|value)/kernel", Split(data=-2, model=-1)),  # (L, D, E)
    (r".*attention/(query|key|value)/bias", Split(model=-1)),  # (L, E)
    (r".*attention/out/kernel", Split(data=-1, model=-2)),  # (L, E, D)
    (r".*mlp/(expand|gate)/kernel", Split(data=-2, model=-1)),  # (L, D, M)
    (r".*mlp/(expand|gate)/bias", Split(model=-1)),  # (L, M)
    (r".*mlp/contract/kernel", Split(data=-1, model=-2)),  # (L, M, D)
    # Factors of LoRA: the dimension that they share with the split one of their kernel; too small for FSDP.
    (r".*attention/(query|key|value)/lora_b", Split(model=-1)),  # (L, r, E)
    (r".*attention/out/lora_a", Split(model=-2)),  # (L, E, r)
    (r".*mlp/(expand|gate)/lora_b", Split(model=-1)),  # (L, r, M)
    (r".*mlp/contract/lora_a", Split(model=-2)),  # (L, M, r)
    (r".*/lora_[ab]", WHOLE),
    # Bottlenecks likewise: the inner channels are spread, one sum at the end of a unit.
    (r".*conv[12]/kernel", Split(data=-2, model=-1)),  # (height, width, I, O)
    (r".*(conv3|shortcut/conv)/kernel", Split(data=-1, model=-2)),
    (r".*root/conv/kernel", Split(data=-1)),
    (r".*embedding/kernel", Split(data=-1)),  # (patch height, patch width, C, D)
    (r".*head/(hidden|linear)/kernel", Split(data=-2)),  # (D, K): D, since K is rarely divisible
    (r".*positions/table", Split(data=-1)),  # (1, S, D)
    (r".*positions/(row_table|column_table|class_row)", WHOLE),
    (r".*(class_token|register_tokens|probe|head/mask)", WHOLE),
    (r".*/(bias|scale|attention_scale|mlp_scale)", WHOLE),
    (r".*", OTHER),
)


def spec_of(
    name: str,
    shape: tuple[int, ...],
    axes: dict[str, int],
    strategy: str,
    parameters: Mapping[str, tuple[int, ...]] | None = None,
) -> PartitionSpec:
    """Return the partition of one array of the state; a scalar is replicated.

    Args:
      name: as `pytree` gives it.
      shape: of the array.
      axes: size of each axis of the mesh.
      strategy: "replicated", or "fsdp" to split parameters over the data axis where it divides the dimension.
      parameters: shapes of the network's parameters by name; an array unlike its parameter follows the rule for unknown
        names. None: the array is itself a parameter.

    Raises:
      ValueError: the model axis does not divide the dimension that a rule assigns to it.
    """
    split = pytree.first_match(RULES, name)
    if (
        parameters is not None and shape != _shape_of_parameter(name, parameters)
    ) or not split.fits(shape):
        split = OTHER
    spec: list[str | None] = [None] * len(shape)
    data = _largest_divisible(shape, axes["data"]) if split is OTHER else split.data
    if (
        strategy == "fsdp"
        and data is not None
        and axes["data"] > 1
        and shape[data] % axes["data"] == 0
    ):
        spec[data] = "data"
    if split.model is not None and axes["model"] > 1:
        if shape[split.model] % axes["model"]:
            rule = f"must divide dimension {split.model} of {name}, which is {shape[split.model]} in {shape}"
            raise ValueError(
                f"config.sharding.num_model_shards={axes['model']}: {rule}. Choose a divisor."
            )
        spec[split.model] = "model"
    return PartitionSpec(*spec) if any(spec) else PartitionSpec()


def _shape_of_parameter(
    name: str, parameters: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...] | None:
    """The shape of the parameter whose name this one ends in; None where there is none."""
    while name not in parameters and name:
        name = name.partition("/")[2]
    return parameters.get(name)


def _largest_divisible(shape: tuple[int, ...], divisor: int) -> int | None:
    return max(
        (dim for dim, size in enumerate(shape) if size % divisor == 0),
        key=shape.__getitem__,
        default=None,
    )


def shard_tree(tree: T, mesh: Mesh | AbstractMesh, strategy: str) -> T:
    """Return a network, or a training state with a field `model`, with a `NamedSharding` in place of every leaf.

    Raises:
      ValueError: as `spec_of`, or FSDP would split less than half of the tree.
    """
    leaves = pytree.named_leaves(tree)
    axes = dict(mesh.shape)
    network = pytree.named_leaves(getattr(tree, "model", tree))
    parameters = {name: leaf.shape for name, leaf in network.items()}
    sizes = {name: math.prod(leaf.shape) for name, leaf in leaves.items() if leaf.shape}

    def spec(name: str, axes: dict[str, int]) -> PartitionSpec:
        return spec_of(name, leaves[name].shape, axes, strategy, parameters)

    def is_effective(axes: dict[str, int]) -> bool:
        """Return whether FSDP splits at least half of all values."""
        split = sum(size for name, size in sizes.items() if "data" in spec(name, axes))
        return axes["data"] == 1 or 2 * split >= sum(sizes.values())

    if strategy == "fsdp" and not is_effective(axes):  # FSDP would silently be off
        devices = axes["replica"] * axes["data"]
        sizes_of = (
            axes | {"replica": n, "data": devices // n}
            for n in range(1, devices)
            if devices % n == 0
        )
        better = next(
            (f"config.sharding.num_replicas={a['replica']}" for a in sizes_of if is_effective(a)),
            None,
        )
        rule = f"a data axis of {axes['data']} devices must divide most parameters' dimensions"
        fix = better or "parameters=replicated"
        raise ValueError(
            f"config.sharding.parameters='fsdp': {rule}, or they stay replicated. Choose {fix}."
        )
    return pytree.map_with_names(lambda name, _: NamedSharding(mesh, spec(name, axes)), tree)
