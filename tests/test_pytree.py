import difflib

import jax.numpy as jnp
import pytest

from vit_jax import pytree

TREE = {"a": {"b": jnp.zeros(2), "c": jnp.ones((3, 1))}}


def test_names_and_back():
    leaves = pytree.name_leaves(TREE)

    assert list(leaves) == ["a/b", "a/c"]

    rebuilt = pytree.from_named_leaves(TREE, {"a/b": 1, "a/c": 2, "unused": 3})

    assert rebuilt == {"a": {"b": 1, "c": 2}}

    with pytest.raises(KeyError):
        pytree.from_named_leaves(TREE, {"a/b": 1})


def test_map_with_names():
    expected = {"a": {"b": "a/b", "c": "a/c"}}
    assert pytree.map_with_names(lambda name, leaf: name, TREE) == expected


def test_first_match_takes_the_first_and_refuses_gaps():
    rules = (("a/.*", 1), (".*", 2))

    assert pytree.find_first_match(rules, "a/b") == 1
    assert pytree.find_first_match(rules, "b/a/b") == 2

    with pytest.raises(ValueError, match="No rule covers 'x'"):
        pytree.find_first_match((("a", 1),), "x")


def test_differences_lists_everything_and_the_nearest():
    given = {"a/bb": jnp.zeros(2), "a/c": jnp.ones((3, 2))}

    expected = [
        "left over: a/bb (2,) (nearest: a/b)",
        "missing: a/b (2,) (nearest: a/bb)",
        "shape: a/c is (3, 2), the model has (3, 1)",
    ]
    assert pytree.differences(pytree.name_leaves(TREE), given) == expected
    assert pytree.differences(given, given) == []


def test_the_first_of_many_lines_are_listed():
    assert pytree.list_lines(["a", "b"]) == "\n  a\n  b"

    lines = pytree.list_lines([str(number) for number in range(5000)]).splitlines()

    assert len(lines) == 32
    assert lines[1] == "  0"
    assert lines[-1] == "  and 4,970 more"


def test_differences_of_deep_networks_compare_kinds_and_tell_layers(monkeypatch):
    compared = []
    compare = difflib.get_close_matches
    monkeypatch.setattr(
        difflib,
        "get_close_matches",
        lambda *a, **k: compared.append(a) or compare(*a, **k),
    )
    kinds = {
        "attention/query": "attn/q_proj",
        "attention/value": "attn/v_proj",
        "mlp/up": "mlp/fc_up",
    }
    ours = {f"blocks/{layer}/{kind}/kernel": jnp.zeros(2) for layer in range(100) for kind in kinds}
    theirs = {
        f"layers/{layer}/{kind}/kernel": jnp.zeros(2)
        for layer in range(100)
        for kind in kinds.values()
    }
    lines = pytree.differences(ours, theirs)

    assert len(compared) == 6, "each of a hundred layers would take minutes"
    assert len(lines) == 600
    assert (
        "missing: blocks/17/attention/query/kernel (2,) (nearest: layers/17/attn/q_proj/kernel)"
        in lines
    )
    assert "left over: layers/99/mlp/fc_up/kernel (2,) (nearest: blocks/99/mlp/up/kernel)" in lines
