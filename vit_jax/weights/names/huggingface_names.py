"""A table of names that some classes of transformers share, and names that several tables share."""

import dataclasses
import functools
import re
from collections.abc import Mapping

from vit_jax.weights.names.entry import Rule, make_pytorch_rules, make_transformer_rules
from vit_jax.weights.patterns import NEVER

Names = Mapping[str, str]

# Names that several families share: our name → their name. Names that begin with a dot are in a
# block.
TOKENS = {
    "class_token": "embeddings.cls_token",
    "register_tokens": "embeddings.register_tokens",
    "positions/table": "embeddings.position_embeddings",
}
ATTENTION = {
    ".attention/query": ".attention.attention.query",
    ".attention/key": ".attention.attention.key",
    ".attention/value": ".attention.attention.value",
    ".attention/out": ".attention.output.dense",
}
PROJECTIONS = {
    ".attention/query": ".attention.q_proj",
    ".attention/key": ".attention.k_proj",
    ".attention/value": ".attention.v_proj",
}
SCALES = {
    ".attention_scale": ".layer_scale1.lambda1",
    ".mlp_scale": ".layer_scale2.lambda1",
}
GATED = {
    ".mlp/gate": "gate_proj",
    ".mlp/expand": "up_proj",
    ".mlp/contract": "down_proj",
}
TWO_LAYERS = {
    ".mlp/expand": ".mlp.fc1",
    ".mlp/contract": ".mlp.fc2",
}
NORMS = {
    ".attention_norm": ".norm1",
    ".mlp_norm": ".norm2",
}

# Newer → classic names, below a layer.
CLASSIC = {
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
}
_NEWER_LAYER = re.compile(r"(?:model\.|encoder\.)?layers?\.(\d+)\.(.+)\.(\w+)")


def prefix_values(prefix: str, names: Names) -> Names:
    """Return a table of names with a prefix for the names in the file."""
    return {ours: f"{prefix}{theirs}" for ours, theirs in names.items()}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class HuggingFaceNames:
    """Names that some classes of the library share.

    Attributes:
      prefixes: prefixes of the network in a file; the first is used in canonical names.
      patches: name of the patch embedding. Files are recognised by it and by the first norm of a
        block.
      marks: full names of further arrays by which files are recognised.
      block: beginning of the names of a block, before its number.
      layers: our names → theirs; names that begin with a dot are in a block.
      packed_layers: names that differ where gate and hidden layer of the MLP are one array.
      arrays: the same for single arrays.
      layouts: layouts of single arrays.
      heads: names of linear layers behind the network, which have no prefix.
      newer: newer → classic names, below a layer.
      ignored: regular expression of names that are not part of the network, without prefix.
      has_head_bias: the head has a bias.
      epsilon: epsilon of norms, where the configuration states none.
      fixed_positions: the positions of files without a table.
      wide_head_pool: pooling of networks whose head reads twice the width; "" where there are none.
      fields: fields of the architecture of all networks with these names.
    """

    prefixes: tuple[str, ...]
    patches: str
    marks: tuple[str, ...] = ()
    block: str
    layers: Names
    packed_layers: Names = dataclasses.field(default_factory=dict)
    arrays: Names = dataclasses.field(default_factory=dict)
    layouts: Names = dataclasses.field(default_factory=dict)
    heads: Names = dataclasses.field(default_factory=lambda: {"head/linear": "classifier"})
    newer: Names = dataclasses.field(default_factory=dict)
    ignored: str = NEVER
    has_head_bias: bool = True
    epsilon: float = 1e-6
    fixed_positions: str = "sincos2d"
    wide_head_pool: str = ""
    fields: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def recognised_by(self) -> frozenset[str]:
        """Canonical names that a file of this family has."""
        prefix = self.prefixes[0]
        first_norm = f"{self.block}0{self.layers['.attention_norm']}"
        patches = f"{prefix}{self.patches}.weight"
        return frozenset((patches, f"{prefix}{first_norm}.weight", *self.marks))

    def make_rules(self, prefix: str, *, is_packed: bool = False) -> list[Rule]:
        """Return the names of parameters, with the prefix of the network."""
        layers = {"embedding": self.patches, **self.layers}
        if is_packed:
            layers |= self.packed_layers
        network = make_transformer_rules(self.block, layers, self.arrays, self.layouts, prefix)
        return [*network, *make_pytorch_rules(self.heads)]

    def convert_to_classic(self, name: str, prefix: str) -> str:
        """Return the canonical name of an array whose network has this prefix in the file."""
        if not name.startswith(prefix) or self._is_in_head(name):
            return name
        short_name = name.removeprefix(prefix)
        if re.match(self.ignored, short_name):
            return short_name

        match = _NEWER_LAYER.fullmatch(short_name)
        if match and self.block != "encoder.layers.":  # these are the classic names themselves
            number, part, leaf = match.groups()
            classic_part = self.newer.get(part, part)
            short_name = f"{self.block}{number}.{classic_part}.{leaf}"
        return f"{self.prefixes[0]}{short_name}"

    def _is_in_head(self, name: str) -> bool:
        """Return True for a parameter of a linear layer behind the network."""
        return any(name.startswith(f"{head}.") for head in self.heads.values())
