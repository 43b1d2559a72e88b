"""Names of Hugging Face's vision transformers (.safetensors), by class of the library.

`families` holds the tables of names. Files carry the classic names; newer versions of the library
use shorter ones in memory, which are read too. Text towers, decoders of pre-training and mask
tokens are ignored.
"""

import dataclasses
import re
from collections.abc import Iterable

import numpy as np

from vit_jax.config.architecture import Architecture
from vit_jax.weights.families import load_families
from vit_jax.weights.folding import Normalisation
from vit_jax.weights.library_lookup import find_huggingface_model
from vit_jax.weights.names.entry import Rule, invert
from vit_jax.weights.names.facts import Facts, count_classes, find_vit_facts
from vit_jax.weights.names.format import Format, Shapes
from vit_jax.weights.names.huggingface_names import HuggingFaceNames


def load_tables() -> list[HuggingFaceNames]:
    """Return the names of all families, those that are recognised by most names first."""
    tables: list[HuggingFaceNames] = []
    for family in load_families():
        tables += family.huggingface
    return sorted(tables, key=lambda table: -len(table.recognised_by))


def find_table(canonical_names: Iterable[str]) -> HuggingFaceNames | None:
    """Return the table of names that a file has."""
    names = set(canonical_names)
    for table in load_tables():
        if table.recognised_by <= names:
            return table
    return None


def find_canonical(names: Iterable[str]) -> dict[str, str] | None:
    """Return classic names → names in the file; None where the file is of another format.

    A pooler beside a classifier is ignored: the library's classifier does not see it.
    """
    unique_names = dict.fromkeys(names)
    for table in load_tables():
        for prefix in table.prefixes:
            classic_names = _read_names(unique_names, table, prefix)
            if find_table(classic_names.values()) is table:
                return _ignore_pooler(invert(classic_names), table)
    return None


def _read_names(
    names: Iterable[str],
    table: HuggingFaceNames,
    prefix: str,
) -> dict[str, str]:
    """Return names in the file → classic names, without those that are not part of the network."""
    classic_names = {}
    for name in names:
        classic_name = table.convert_to_classic(name, prefix)
        if not re.match(table.ignored, classic_name):
            classic_names[name] = classic_name
    return classic_names


def _ignore_pooler(names: dict[str, str], table: HuggingFaceNames) -> dict[str, str]:
    """Return names without a pooler beside a classifier."""
    pooler = _find_pooler(table)
    if pooler is None or "classifier.weight" not in names:
        return names
    read_names = {}
    for classic_name, name in names.items():
        if not classic_name.startswith(pooler):
            read_names[classic_name] = name
    return read_names


def _find_pooler(table: HuggingFaceNames) -> str | None:
    """Return the canonical name of the pooler, which is the hidden layer of our head."""
    pooler = table.layers.get("head/hidden")
    if pooler is None:
        return None
    return f"{table.prefixes[0]}{pooler}"


def find_names(names: Iterable[str], in_file: Iterable[str]) -> dict[str, str]:
    """Return names that the library has in memory → names in a file, for arrays of the file."""
    names = list(names)
    file_names = find_canonical(in_file)
    if file_names is None:
        return {}
    table = find_table(file_names)
    assert table is not None

    found: dict[str, str] = {}
    for prefix in table.prefixes:
        classic_names = {name: table.convert_to_classic(name, prefix) for name in names}
        with_prefix = {}
        for name, classic_name in classic_names.items():
            if classic_name in file_names:
                with_prefix[name] = file_names[classic_name]
        if len(with_prefix) > len(found):
            found = with_prefix
    return found


def make_rules(a: Architecture, shapes: Shapes) -> list[Rule]:
    """Return the names of a file, or without shapes of the class for a network."""
    table = find_table(shapes)
    if table is None:
        return find_huggingface_model(a).make_rules(a)
    return _make_file_rules(table, shapes)


def _make_file_rules(table: HuggingFaceNames, shapes: Shapes) -> list[Rule]:
    prefix = table.prefixes[0]
    is_packed = False
    if table.packed_layers:
        packed_layer = table.packed_layers[".mlp/expand"]
        is_packed = f"{prefix}{table.block}0{packed_layer}.weight" in shapes
    return table.make_rules(prefix, is_packed=is_packed)


def make_arrays(a: Architecture, normalisation: Normalisation) -> dict[str, np.ndarray]:
    """Return arrays of the library's class that we have no parameters for, such as mask tokens."""
    return find_huggingface_model(a).make_arrays(a, normalisation)


def find_facts(shapes: Shapes) -> Facts:
    """Return the facts of a file, without the number of heads.

    Raises:
      ValueError: an array is missing, or has a wrong shape.
    """
    table = find_table(shapes)
    assert table is not None
    head = table.heads["head/linear"]
    head_kernel = f"{head}.weight"
    num_classes = count_classes(shapes, head_kernel, 0, f"{head}.bias")
    pooler = _find_pooler(table)
    has_hidden_layer = pooler is not None and f"{pooler}.weight" in shapes
    absent = frozenset[str]()
    if not table.has_head_bias:
        absent = frozenset(["head/linear/bias"])

    facts = find_vit_facts(
        shapes,
        _make_file_rules(table, shapes),
        num_classes=num_classes,
        head="mlp" if has_hidden_layer else "linear",
        fixed_positions=table.fixed_positions,
        defaults={"gelu": "exact", "layer_norm_epsilon": table.epsilon},
        absent=absent,
    )

    pool = facts.pool
    head_shape = shapes.get(head_kernel, (0, 0))
    has_wide_head = head_shape[-1] == 2 * facts.width
    if table.wide_head_pool and has_wide_head:
        pool = table.wide_head_pool
    modern_options = {**facts.modern_options, **table.fields}
    return dataclasses.replace(facts, pool=pool, modern_options=modern_options)


def find_lacking(a: Architecture) -> dict[str, object]:
    """Return the parts of a network that the nearest class of the library does not compute."""
    if a.family != "vit":
        return a.modern_options
    lacking = find_huggingface_model(a).find_lacking(a)
    lacking.pop("head", None)  # `names` has the reason for it
    return lacking


def _holds_hidden_layer(a: Architecture) -> bool:
    return a.num_classes == 0


FORMAT = Format(
    suffix=".safetensors",
    find_canonical=find_canonical,
    find_facts=find_facts,
    make_rules=make_rules,
    make_arrays=make_arrays,
    find_lacking=find_lacking,
    families=("vit",),
    other_families="it holds pure ViTs only",
    holds_hidden_layer=_holds_hidden_layer,
)
