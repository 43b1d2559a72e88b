"""Parameter placement: ordered rules over names, of which the first that matches decides.

They apply to the complete training state: moments and averages have the name and shape of their
parameter. Arrays of other shapes (Adafactor's factors) and parameters of unknown networks are split
by the last rule.

Legend: L layers, D width, E of all heads together, M MLP dimension, r rank of LoRA, I O input and
output channels, K classes.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from vit_jax import pytree

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Split:
    """The dimension of an array that each axis of the mesh splits.

    Dimensions are counted from the last, because layers may be stacked.

    Attributes:
      data: split over the data axis, where FSDP spreads stored arrays; None for an array that is
        too small for a collective.
      model: split over the model axis, where tensor parallelism spreads computation.
    """

    data: int | None = None
    model: int | None = None

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return True if an array of this shape has the dimensions to split."""
        fits_data = self.data is None or -self.data <= len(shape)
        fits_model = self.model is None or -self.model <= len(shape)
        return fits_data and fits_model


WHOLE = Split()
OTHER = Split()  # for unknown names: FSDP splits the largest dimension that the data axis divides

RULES: tuple[tuple[str, Split], ...] = (
    # Tensor parallelism as in Megatron-LM: heads and hidden units are spread, one sum after each
    # half of a block.
    (r".*attention/(query|key|value)/kernel", Split(data=-2, model=-1)),  # (L, D, E)
    (r".*attention/(query|key|value)/bias", Split(model=-1)),  # (L, E)
    (r".*attention/out/kernel", Split(data=-1, model=-2)),  # (L, E, D)
    (r".*mlp/(expand|gate)/kernel", Split(data=-2, model=-1)),  # (L, D, M)
    (r".*mlp/(expand|gate)/bias", Split(model=-1)),  # (L, M)
    (r".*mlp/contract/kernel", Split(data=-1, model=-2)),  # (L, M, D)
    # Factors of LoRA: the dimension that they share with the split one of their kernel; too small
    # for FSDP.
    (r".*attention/(query|key|value)/lora_b", Split(model=-1)),  # (L, r, E)
    (r".*attention/out/lora_a", Split(model=-2)),  # (L, E, r)
    (r".*mlp/(expand|gate)/lora_b", Split(model=-1)),  # (L, r, M)
    (r".*mlp/contract/lora_a", Split(model=-2)),  # (L, M, r)
    (r".*/lora_[ab]", WHOLE),
    # In bottlenecks the inner channels are spread: one sum at the end of a unit.
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


def find_spec(
    name: str,
    shape: tuple[int, ...],
    axes: dict[str, int],
    strategy: str,
    parameters: Mapping[str, tuple[int, ...]] | None = None,
) -> PartitionSpec:
    """Return the partition of one array of the state; a scalar is replicated.

    Args:
      name: name by `pytree`.
      shape: shape of the array.
      axes: size of each axis of the mesh.
      strategy: "replicated", or "fsdp" to split parameters over the data axis where it divides the
        dimension.
      parameters: shapes of the network's parameters by name; an array unlike its parameter follows
        the rule for unknown names. None: the array is itself a parameter.

    Raises:
      ValueError: the model axis does not divide the dimension that a rule assigns to it.
    """
    split = _find_split(name, shape, parameters)
    spec: list[str | None] = [None] * len(shape)

    num_data = axes["data"]
    if strategy == "fsdp" and num_data > 1:
        dim = split.data
        if split is OTHER:
            dim = _find_largest_divisible(shape, num_data)
        if dim is not None and shape[dim] % num_data == 0:
            spec[dim] = "data"

    num_shards = axes["model"]
    if split.model is not None and num_shards > 1:
        size = shape[split.model]
        if size % num_shards:
            raise ValueError(
                f"config.sharding.num_model_shards={num_shards}: must divide dimension "
                f"{split.model} of {name}, which is {size} in {shape}. Choose a divisor."
            )
        spec[split.model] = "model"
    if not any(spec):
        return PartitionSpec()
    return PartitionSpec(*spec)


def _find_split(
    name: str,
    shape: tuple[int, ...],
    parameters: Mapping[str, tuple[int, ...]] | None,
) -> Split:
    """Return the rule of an array of the state; see `find_spec`."""
    split = pytree.find_first_match(RULES, name)
    if parameters is not None:
        parameter_shape = _find_shape_of_parameter(name, parameters)
        if "encoder/blocks/" in name and parameter_shape is not None and shape:
            # Moments may be of the last blocks alone.
            parameter_shape = (shape[0], *parameter_shape[1:])
        if shape != parameter_shape:
            return OTHER
    if not split.fits(shape):
        return OTHER
    return split


def _find_shape_of_parameter(
    name: str, parameters: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...] | None:
    """Return the shape of the parameter whose name this one ends in, or None."""
    while name not in parameters and name:
        name = name.partition("/")[2]
    return parameters.get(name)


def _find_largest_divisible(shape: tuple[int, ...], divisor: int) -> int | None:
    """Return the largest dimension that the divisor divides, the first of equal ones, or None."""
    dims = [dim for dim, size in enumerate(shape) if size % divisor == 0]
    return max(dims, key=shape.__getitem__, default=None)


def shard_tree(tree: T, mesh: Mesh | AbstractMesh, strategy: str) -> T:
    """Return a tree with a `NamedSharding` in place of every leaf.

    `tree` is a network, or a training state with a field `model`.

    Raises:
      ValueError: see `find_spec`; or FSDP would split less than half of the tree.
    """
    axes = dict(mesh.shape)
    network = pytree.name_leaves(getattr(tree, "model", tree))
    parameters = {name: leaf.shape for name, leaf in network.items()}
    shapes = {name: leaf.shape for name, leaf in pytree.name_leaves(tree).items()}

    def find_specs(axes: dict[str, int]) -> dict[str, PartitionSpec]:
        specs = {}
        for name, shape in shapes.items():
            specs[name] = find_spec(name, shape, axes, strategy, parameters)
        return specs

    def is_effective(axes: dict[str, int]) -> bool:
        return axes["data"] == 1 or _splits_half(shapes, find_specs(axes))

    if strategy == "fsdp" and not is_effective(axes):  # FSDP would silently be off
        raise ValueError(
            f"config.sharding.parameters='fsdp': a data axis of {axes['data']} devices must divide "
            "most parameters' dimensions, or they stay replicated. "
            f"Choose {_find_better_sharding(axes, is_effective)}."
        )
    specs = find_specs(axes)
    return pytree.map_with_names(lambda name, _: NamedSharding(mesh, specs[name]), tree)


def _splits_half(shapes: Mapping[str, tuple[int, ...]], specs: Mapping[str, PartitionSpec]) -> bool:
    """Return True if the data axis splits at least half of all values; scalars do not count."""
    total = 0
    split = 0
    for name, shape in shapes.items():
        if not shape:
            continue
        size = math.prod(shape)
        total += size
        if "data" in specs[name]:
            split += size
    return 2 * split >= total


def _find_better_sharding(
    axes: dict[str, int], is_effective: Callable[[dict[str, int]], bool]
) -> str:
    """Return the value of an option with which FSDP splits most parameters, or is off."""
    num_devices = axes["replica"] * axes["data"]
    for num_replicas in range(1, num_devices):
        if num_devices % num_replicas:
            continue
        other = axes | {"replica": num_replicas, "data": num_devices // num_replicas}
        if is_effective(other):
            return f"config.sharding.num_replicas={num_replicas}"
    return "parameters=replicated"
