"""The arrays that follow from rules and layouts, and our own names with layers stacked and taken apart."""

import numpy as np
import pytest

from vit_jax.weights.names.entry import STACKED, Entry, Rule, make_entries
from vit_jax.weights.names.ours import find_stacked_name, unstack


def numbers(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize(
    ("count", "layout", "part", "shape", "status"),
    [
        (1, "", (3,), (3,), "copied"),
        (1, "io->oi", (2, 3), (3, 2), "transposed"),
        (1, "io->oi11", (2, 3), (3, 2, 1, 1), "transposed"),
        (1, "hwio->oihw", (2, 3, 4, 5), (5, 4, 2, 3), "transposed"),
        (1, "C->111C", (3,), (1, 1, 1, 3), "reshaped"),
        (2, STACKED, (3,), (2, 3), "copied"),
        (1, STACKED, (3,), (1, 3), "copied"),
    ],
)
def test_layouts(count, layout, part, shape, status):
    entry = Entry("x", ("a", "b")[:count], layout, part)
    ours = {name: place * 100 + numbers(*part) for place, name in enumerate(entry.ours)}
    written = entry.write(ours)

    assert written.shape == entry.shape == shape
    assert entry.status(reading=False) == status

    read = entry.read(written)
    assert {name: one.tobytes() for name, one in read.items()} == {
        name: one.tobytes() for name, one in ours.items()
    }

    if status == "transposed":
        expected = np.einsum(layout.rstrip("1"), ours["a"])
        np.testing.assert_array_equal(written.squeeze(), expected)
    else:
        np.testing.assert_array_equal(written.reshape(count, -1), np.stack(list(ours.values())))


def test_queries_keys_and_values_are_joined_as_pytorch_multiplies_them():
    """Row r of the foreign weight gives output r = 3 blocks of (head, place in the head)."""
    parts = {name: place * 100 + numbers(2, 2, 3) for place, name in enumerate(("q", "k", "v"))}
    entry = Entry("qkv", tuple(parts), "DTh->(Th)D", (2, 2, 3))
    written = entry.write(parts)

    assert written.shape == (18, 2)

    for block, part in enumerate(parts.values()):
        for head in range(2):
            for place in range(3):
                np.testing.assert_array_equal(
                    written[block * 6 + head * 3 + place],
                    part[:, head, place],
                )

    assert entry.status(reading=True) == "split, transposed"
    assert entry.status(reading=False) == "joined, transposed"


def test_rules_name_and_join_parameters():
    rules = [
        Rule(r"a/(\d)/(?:q|k)", r"a.\1.qk", "io->oi"),
        Rule(r"b/(\d)", lambda match: f"b.{int(match[1]) + 1}"),
        Rule(r"b/.*", "never"),
    ]
    entries = make_entries(rules, {"a/0/q": (2, 3), "a/0/k": (2, 3), "b/4": (5,), "empty": (3, 0)})
    expected = [
        Entry("a.0.qk", ("a/0/q", "a/0/k"), "io->oi", (2, 3)),
        Entry("b.5", ("b/4",), "", (5,)),
    ]

    assert entries == expected


def test_a_parameter_without_a_name_is_an_error():
    with pytest.raises(ValueError, match=r"no name for encoder/blocks/x, y$"):
        make_entries(
            [Rule("a", "a")],
            {"a": (1,), "encoder/blocks/0/x": (1,), "encoder/blocks/1/x": (1,), "y": (2,)},
        )


# Ours, stacked and taken apart.


def test_layers_are_numbered_and_in_their_places():
    parameters = {
        "encoder/blocks/mlp/expand/bias": np.arange(12.0).reshape(12, 1),
        "stem/stage2/first/conv1/kernel": np.full((1,), -1.0),
        "stem/stage2/rest/conv1/kernel": np.arange(2.0).reshape(2, 1),
        "encoder/norm/scale": np.ones(1),
    }
    apart = {name: float(array[0]) for name, array in unstack(parameters, 1).items()}

    assert apart["encoder/blocks/10/mlp/expand/bias"] == 10
    assert apart["stem/stage2/unit1/conv1/kernel"] == -1
    assert apart["stem/stage2/unit2/conv1/kernel"] == 0
    assert apart["stem/stage2/unit3/conv1/kernel"] == 1
    assert apart["encoder/norm/scale"] == 1
    assert find_stacked_name("stem/stage2/unit3/conv1/kernel") == (
        "stem/stage2/rest/conv1/kernel",
        1,
    )
