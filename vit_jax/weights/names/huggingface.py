"""Names of Hugging Face's vision transformers (.safetensors), by class of the library; `families` holds them.

Files carry the classic names; newer versions of the library use shorter ones in memory, which are
read too. Text towers, decoders of pre-training and mask tokens are ignored.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

import numpy as np

from vit_jax.config.architecture import Architecture
from vit_jax.weights.families import load_families
from vit_jax.weights.folding import Normalisation
from vit_jax.weights.library_lookup import huggingface_model
from vit_jax.weights.names.entry import Rule, invert
from vit_jax.weights.names.facts import Facts, classes_of, vit_facts
from vit_jax.weights.names.format import Format
from vit_jax.weights.names.huggingface_names import HuggingFaceNames
from vit_jax.weights.names.ours import Shape


def load_names() -> list[HuggingFaceNames]:
    """Return the names of all families, those that are recognised by most names first."""
    tables: list[HuggingFaceNames] = []
    for family in load_families():
        tables += family.huggingface
    return sorted(tables, key=lambda table: -len(table.recognised_by))


def find_table(canonical_names: Iterable[str]) -> HuggingFaceNames | None:
    """Return the names of the family that a file has."""
    names = set(canonical_names)
    for table in load_names():
        if table.recognised_by <= names:
            return table
    return None


def canonical(names: Iterable[str]) -> dict[str, str] | None:
    """Return classic names → names in the file; None where the file is of another format.

    A pooler beside a classifier is left out: the library's classifier does not see it.
    """
    names = set(names)
    for table in load_names():
        for prefix in table.prefixes:
            kept = _read_names(names, table, prefix)
            if find_table(kept.values()) is table:
                return _leave_out_pooler(invert(kept), table)
    return None


def _read_names(names: Iterable[str], table: HuggingFaceNames, prefix: str) -> dict[str, str]:
    """Return names in the file → classic names, without those that are not part of the network."""
    kept = {}
    for name in names:
        classic = table.to_classic(name, prefix)
        if not re.match(table.ignored, classic):
            kept[name] = classic
    return kept


def _leave_out_pooler(names: Mapping[str, str], table: HuggingFaceNames) -> dict[str, str]:
    pooler = table.layers.get("head/hidden")
    if pooler is None or "classifier.weight" not in names:
        return dict(names)
    start = f"{table.prefixes[0]}{pooler}"
    return {classic: name for classic, name in names.items() if not classic.startswith(start)}


def find_names(names: Iterable[str], in_file: Iterable[str]) -> dict[str, str]:
    """Return names that the library has in memory → names in a file, for those that the file has."""
    names = list(names)
    classic_names = canonical(in_file)
    if classic_names is None:
        return {}
    table = find_table(classic_names)
    assert table is not None
    best: dict[str, str] = {}
    for prefix in table.prefixes:
        found = {}
        for name in names:
            classic = table.to_classic(name, prefix)
            if classic in classic_names:
                found[name] = classic_names[classic]
        best = max(best, found, key=len)
    return best


def make_rules(a: Architecture, shapes: Mapping[str, Shape]) -> list[Rule]:
    """Return the names of a file, or without shapes of the class for a network."""
    if table := find_table(shapes):
        return _make_file_rules(table, shapes)
    return huggingface_model(a).make_rules(a)


def _make_file_rules(table: HuggingFaceNames, shapes: Mapping[str, Shape]) -> list[Rule]:
    prefix = table.prefixes[0]
    is_packed = False
    if table.packed_layers:
        packed = f"{table.block}0{table.packed_layers['.mlp/expand']}.weight"
        is_packed = f"{prefix}{packed}" in shapes
    return table.make_rules(prefix, is_packed=is_packed)


def add_arrays(a: Architecture, normalisation: Normalisation) -> dict[str, np.ndarray]:
    """Return arrays of the library's class that hold no parameter of ours, such as mask tokens."""
    return huggingface_model(a).make_arrays(a, normalisation)


def find_facts(shapes: Mapping[str, Shape]) -> Facts:
    """Return the facts of a file; not the number of heads. ValueError as for `shape_of`."""
    table = find_table(shapes)
    assert table is not None
    head = table.heads["head/linear"]
    pooler = f"{table.prefixes[0]}{table.layers.get('head/hidden')}"
    vit = vit_facts(
        shapes,
        _make_file_rules(table, shapes),
        num_classes=classes_of(shapes, f"{head}.weight", 0, f"{head}.bias"),
        head="mlp" if f"{pooler}.weight" in shapes else "linear",
        fixed_positions=table.fixed_positions,
        defaults={"gelu": "exact", "layer_norm_epsilon": table.epsilon},
        absent=frozenset() if table.has_head_bias else frozenset(["head/linear/bias"]),
    )
    head_width = shapes.get(f"{head}.weight", (0, 0))[-1]
    has_wide_head = head_width == 2 * vit.width
    pool = table.wide_head_pool if table.wide_head_pool and has_wide_head else vit.pool
    modern_options = {**vit.modern_options, **table.fields}
    return dataclasses.replace(vit, pool=pool, modern_options=modern_options)


def find_lacking(a: Architecture) -> dict[str, object]:
    """Return the parts of a network that the nearest class of the library does not compute."""
    if a.family != "vit":
        return a.modern_options
    lacking = huggingface_model(a).lacking(a)
    lacking.pop("head", None)  # a reason of its own
    return lacking


FORMAT = Format(
    suffix=".safetensors",
    canonical=canonical,
    facts=find_facts,
    rules=make_rules,
    added=add_arrays,
    find_lacking=find_lacking,
    families=("vit",),
    other_families="it holds pure ViTs only",
    holds_hidden_layer=lambda a: a.num_classes == 0,
)
