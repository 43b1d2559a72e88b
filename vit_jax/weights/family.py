"""The description of a family of pre-trained weights: all facts that differ between families.

Each module of `families` holds one, as `FAMILY`. Every part may be absent: a family whose files
have names and a class that another family describes has its releases alone.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vit_jax.weights.patterns import NEVER

if TYPE_CHECKING:
    from vit_jax.weights.library_models import TimmModel, TransformersModel
    from vit_jax.weights.names.format import Format
    from vit_jax.weights.names.huggingface_names import HuggingFaceNames
    from vit_jax.weights.names.original_names import OriginalNames
    from vit_jax.weights.packing import Packing

TimmBody = tuple[str, tuple[int, ...], float]
"""A ResNet, alone or below a transformer: family of the network, units, width factor."""


class Sizes(NamedTuple):
    """Sizes of a network that its name states."""

    width: int
    depth: int
    num_heads: int


class Release(NamedTuple):
    """Pre-trained networks of one training method, as their authors published them."""

    name: str
    addresses: tuple[str, ...]  # on the Hub, with {A,B}
    # Regular expression of Hub names, timm's models with their tag, and transformers' model types.
    pattern: str
    use: str
    licence: str  # name on the Hub, when this was written
    pixels: str  # preprocessing of its authors
    accuracy: str = ""  # ImageNet-1k top-1 in percent; "" if the source below was not at hand
    source: str = ""  # paper or page that states the accuracy


class RejectedModels(NamedTuple):
    """Models of timm that are not read."""

    pattern: str  # regular expression of the beginning of their names
    family: str
    feature: str  # a part that our networks do not compute


class RejectedArrays(NamedTuple):
    """Files that are not read, recognised by one of their arrays."""

    pattern: str  # regular expression of "name:axes:kind", with the kind of the array's dtype
    family: str
    feature: str  # a part that our networks do not compute
    remedy: str = "take weights of a family that docs/pretrained.md lists"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Family:
    """Facts about one family of pre-trained weights.

    Attributes:
      releases: rows of the documentation, with licences.
      addresses: public weights of networks that this package names: name of the network →
        addresses.
      models: timm's models whose outputs ours equal, with their sizes; None for a ResNet.
      deprecated: older names of these models → current ones.
      registry_rows: row of the table of compared models → regular expression of timm's names.
      named_fields: regular expression of timm's names → fields of the architecture that no array
        shows; the first match counts.
      doubled_ratio: regular expression of timm's names whose ratio of the MLP counts gate and value
        as one.
      note: sentence for the report of timm's models of this family.
      model_types: model types of transformers that are read → fields of the architecture that no
        array shows.
      rejected_models: timm's models of this family that are not read.
      rejected_arrays: files of this family that are not read.
      formats: formats that only this family has, by name.
      original: names of arrays in the authors' files.
      huggingface: names of arrays in transformers' files, in one or more variants.
      packings: arrays that hold several of our parameters, or parts of one.
      timm_models: models of timm for which networks are written.
      timm_bodies: models of timm for which networks with a ResNet are written, by name.
      transformers_models: classes of transformers for which networks are written.
      finetuning_rule: rule of configs/finetune.py for these weights; "": the one for any weights.
    """

    releases: Sequence[Release] = ()
    addresses: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    models: Mapping[str, Sizes | None] = dataclasses.field(default_factory=dict)
    deprecated: Mapping[str, str] = dataclasses.field(default_factory=dict)
    registry_rows: Mapping[str, str] = dataclasses.field(default_factory=dict)
    named_fields: Mapping[str, Mapping[str, object]] = dataclasses.field(default_factory=dict)
    doubled_ratio: str = NEVER
    note: str = ""
    model_types: Mapping[str, Mapping[str, object]] = dataclasses.field(default_factory=dict)
    rejected_models: Sequence[RejectedModels] = ()
    rejected_arrays: Sequence[RejectedArrays] = ()

    formats: Mapping[str, "Format"] = dataclasses.field(default_factory=dict)
    original: "OriginalNames | None" = None
    huggingface: Sequence["HuggingFaceNames"] = ()
    packings: Sequence["Packing"] = ()

    timm_models: Sequence["TimmModel"] = ()
    timm_bodies: Mapping[TimmBody, str] = dataclasses.field(default_factory=dict)
    transformers_models: Sequence["TransformersModel"] = ()
    finetuning_rule: str = ""


def read_models(text: str) -> dict[str, Sizes | None]:
    """Return the sizes of timm's models by name, from a table.

    It has lines of width/depth/heads, or "resnet", each before indented names.
    """
    models: dict[str, Sizes | None] = {}
    for block in split_blocks(text):
        head, *names = block.split()
        sizes = None
        if head != "resnet":
            sizes = Sizes(*map(int, head.split("/")))
        models |= dict.fromkeys(names, sizes)
    return models


def read_deprecated(text: str) -> dict[str, str]:
    """Return current names by older names, from lines with an older and a current name."""
    names: dict[str, str] = {}
    for line in text.strip().splitlines():
        older, current = line.split()
        names[older] = current
    return names


def read_addresses(text: str) -> dict[str, tuple[str, ...]]:
    """Return addresses by the name of a network, from a table.

    It has lines with the name, each before indented addresses with {A,B}.
    """
    by_name: dict[str, tuple[str, ...]] = {}
    for block in split_blocks(text):
        name, *short_addresses = block.split()
        by_name[name] = expand_all(short_addresses)
    return by_name


def expand_all(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return all addresses that addresses with {A,B} stand for."""
    full: list[str] = []
    for address in addresses:
        full += expand(address)
    return tuple(full)


def expand(address: str) -> list[str]:
    """Return the addresses that one with {A,B} stands for."""
    start, brace, rest = address.partition("{")
    if not brace:
        return [address]
    words, _, end = rest.partition("}")
    addresses = []
    for word in words.split(","):
        for ending in expand(end):
            addresses.append(f"{start}{word}{ending}")
    return addresses


def split_blocks(text: str) -> list[str]:
    """Return the blocks of a table: each begins with a line that is not indented."""
    return re.split(r"\n(?=\S)", text.strip())
