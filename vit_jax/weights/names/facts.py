"""Facts about a network from names and shapes of a file.

A file may contain anything: no shape is trusted.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vit_jax.weights.names.entry import Rule, find_name
from vit_jax.weights.names.ours import Shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a network; None is unknown.

    Attributes:
      position_rows: length of the table of positions; None where there is none.
      fixed_positions: the positions of files without a table.
      prefix_rows: possible numbers of rows of prefix tokens; None: any number.
      defaults: fields of the architecture that the format fixes but no file states: GELU form,
        epsilons.
      modern_options: fields of the architecture that the arrays decide: registers, biases, norms.
      needs_rope: the network has rotary positions, whose form is not in the file.
      absent: our parameters that are zeros and not in the file.
    """

    family: str = "vit"
    patch_size: tuple[int, int] = (1, 1)
    width: int
    depth: int = 0
    mlp_dim: int = 0
    num_heads: int | None = 0
    units: tuple[int, ...] = ()
    root_channels: int = 64
    pool: str
    head: str = "linear"
    num_classes: int
    position_rows: int | None = None
    fixed_positions: str = "sincos2d"
    prefix_rows: tuple[int, ...] | None = None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    modern_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    needs_rope: bool = False
    absent: frozenset[str] = frozenset()

    @property
    def prefix_length(self) -> int:
        """Number of class tokens and registers."""
        class_tokens = self.modern_options.get("class_tokens", 0)
        registers = self.modern_options.get("registers", 0)
        return int(class_tokens + registers)


def read_shape(shapes: Mapping[str, Shape], name: str, ndim: int) -> Shape:
    """Return the shape of an array.

    Raises:
      ValueError: it is missing, has another number of axes, or an empty one.
    """
    if name not in shapes:
        raise ValueError(f"{name} is missing")
    shape = shapes[name]
    if len(shape) != ndim or 0 in shape:
        raise ValueError(
            f"{name} has the shape {shape}, where {ndim} axes with elements are expected"
        )
    return shape


def count_classes(
    shapes: Mapping[str, Shape],
    kernel: str,
    axis: int,
    bias: str,
) -> int:
    """Return the number of classes, from an axis of the head's kernel; 0 without a head.

    The bias is read too, so that a kernel under another name is reported as missing.
    """
    kernel_shape = shapes.get(kernel) or (0,)
    bias_shape = shapes.get(bias) or (0,)
    return kernel_shape[axis] or bias_shape[0]


def count_values(names: Iterable[str], pattern: str) -> int:
    """Return the number of values that the group of `pattern` has at the beginning of names.

    Gaps are reported later, by name.
    """
    values = set()
    for name in names:
        if match := re.match(pattern, name):
            values.add(match[1])
    return len(values)


def count_units(names: Iterable[str], pattern: str) -> tuple[int, ...]:
    """Return the number of units of every stage, from a pattern with groups of stage and unit."""
    units: dict[str, set[str]] = {}
    for name in names:
        if match := re.match(pattern, name):
            stage, unit = match.groups()
            units.setdefault(stage, set()).add(unit)
    stages = sorted(units, key=lambda digits: (len(digits), digits))
    return tuple(len(units[stage]) for stage in stages)


_BLOCK = "encoder/blocks/0"


class Parts:
    """The parts of a ViT in PyTorch's layouts that a file has, by our names."""

    def __init__(self, shapes: Mapping[str, Shape], rules: Sequence[Rule]) -> None:
        """Take shapes by the file's names, and the rules from our names to these."""
        self.shapes = shapes
        self.rules = rules

    def name(self, ours: str) -> str:
        """Return the file's name of a parameter; "" if it has none."""
        return find_name(self.rules, ours)

    def find(self, ours: str) -> Shape | None:
        """Return the shape of a parameter; None if it is absent."""
        return self.shapes.get(self.name(ours))

    def has(self, ours: str) -> bool:
        """Return True if a parameter is there."""
        return self.find(ours) is not None

    def has_in_block(self, ours: str) -> bool:
        """Return True if a parameter of the first block is there."""
        return self.has(f"{_BLOCK}/{ours}")

    def count_tokens(self) -> int:
        """Return the number of class and distillation tokens."""
        return int(self.has("class_token")) + int(self.has("distillation_token"))

    def count_registers(self) -> int:
        """Return the number of registers."""
        registers = self.find("register_tokens")
        if registers is None or len(registers) < 2:
            return 0
        return registers[-2]

    def count_positions(self) -> int | None:
        """Return the length of the table of positions; None where there is none."""
        table = self.find("positions/table")
        if table is None or len(table) < 2:
            return None
        return table[-2]

    def count_blocks(self) -> int:
        """Return the depth."""
        first_norm = self.name(f"{_BLOCK}/attention_norm/scale")
        beginning, _, _ = first_norm.partition("0")
        start = re.escape(beginning)
        return count_values(self.shapes, start + r"(\d+)\.")

    def find_pool(self) -> str:
        """Return the pooling."""
        if self.has("pooling/probe"):
            return "map"
        if self.has("pooled_norm/scale") or not self.count_tokens():
            return "gap"
        return "token"

    def find_mlp(self) -> str:
        """Return the form of the MLP."""
        if not self.has_in_block("mlp/gate/kernel"):
            return "gelu"
        if self.has_in_block("mlp/norm/scale"):
            return "swiglu_norm"
        return "swiglu"

    def find_final_norm(self) -> str:
        """Return the place of the last norm."""
        if self.has("pooled_norm/scale"):
            return "pooled"
        if self.has("encoder/norm/scale"):
            return "tokens"
        return "none"

    def find_qkv_bias(self) -> str:
        """Return which of query, key and value have a bias; the value has one if the query has."""
        has_query = self.has_in_block("attention/query/bias")
        has_key = self.has_in_block("attention/key/bias")
        if has_query and has_key:
            return "all"
        if has_query or has_key:
            return "query_value"
        return "none"

    def find_options(self) -> dict[str, Any]:
        """Return the fields of the architecture that the arrays decide."""
        has_layer_scale = self.has_in_block("attention_scale")
        has_norm_bias = self.has_in_block("attention_norm/bias")
        embedding_norm = None
        if self.has("embedding_norm/scale"):
            embedding_norm = "tokens"
        return {
            "class_tokens": self.count_tokens(),
            "registers": self.count_registers(),
            "layer_scale": 1.0 if has_layer_scale else None,
            "mlp": self.find_mlp(),
            "norm": "layer" if has_norm_bias else "rms",
            "embedding_norm": embedding_norm,
            "final_norm": self.find_final_norm(),
            "attention_norm": self.has_in_block("attention/norm/scale"),
            "patch_bias": self.has("embedding/bias"),
            "qkv_bias": self.find_qkv_bias(),
            "linear_bias": self.has_in_block("mlp/contract/bias"),
        }


def find_vit_facts(
    shapes: Mapping[str, Shape],
    rules: Sequence[Rule],
    *,
    num_classes: int,
    defaults: Mapping[str, Any],
    head: str = "linear",
    **others: Any,
) -> Facts:
    """Return the facts about a ViT in PyTorch's layouts, whose names have these rules.

    The number of heads is not among them. Further arguments are fields of `Facts`.

    Raises:
      ValueError: an array is missing, or has a wrong shape.
    """
    parts = Parts(shapes, rules)
    embedding = parts.name("embedding/kernel")
    width, _, patch_height, patch_width = read_shape(shapes, embedding, 4)
    contract = parts.name(f"{_BLOCK}/mlp/contract/kernel")
    _, mlp_dim = read_shape(shapes, contract, 2)
    return Facts(
        patch_size=(patch_height, patch_width),
        width=width,
        depth=parts.count_blocks(),
        mlp_dim=mlp_dim,
        num_heads=None,
        pool=parts.find_pool(),
        head=head,
        num_classes=num_classes,
        position_rows=parts.count_positions(),
        defaults=defaults,
        modern_options=parts.find_options(),
        **others,
    )
