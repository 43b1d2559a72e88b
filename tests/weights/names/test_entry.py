"""The arrays that follow from rules and layouts, and names with layers stacked and taken apart."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from vit_jax.weights.names.entry import STACKED, Entry, Rule, make_entries
from vit_jax.weights.names.ours import find_stacked_name, unstack


def count_up(*shape, start=0):
    count = np.prod(shape)
    numbers = np.arange(start, start + count, dtype=np.float32)
    return numbers.reshape(shape)


@pytest.mark.parametrize(
    ("count", "layout", "part", "shape", "status"),
    [
        (1, "", (3,), (3,), "copied"),
        (1, "io->oi", (2, 3), (3, 2), "transposed"),
        (1, "io->oi11", (2, 3), (3, 2, 1, 1), "transposed"),
        (
            1,
            "hwio->oihw",
            (2, 3, 4, 5),
            (5, 4, 2, 3),
            "transposed",
        ),
        (
            1,
            "C->111C",
            (3,),
            (1, 1, 1, 3),
            "reshaped",
        ),
        (2, STACKED, (3,), (2, 3), "copied"),
        (1, STACKED, (3,), (1, 3), "copied"),
    ],
)
def test_layouts(
    count,
    layout,
    part,
    shape,
    status,
):
    names = ("a", "b")[:count]
    entry = Entry("x", names, layout, part)
    ours = {}
    for index, name in enumerate(names):
        ours[name] = count_up(*part, start=100 * index)

    written = entry.write(ours)
    read = entry.read(written)

    assert entry.shape == shape
    assert written.shape == shape
    assert entry.describe_use(reading=False) == status
    assert read.keys() == ours.keys()
    for name, array in ours.items():
        assert read[name].tobytes() == array.tobytes()
    if status == "transposed":
        expected = np.einsum(layout.rstrip("1"), ours["a"])
        assert_array_equal(written.squeeze(), expected)
    else:
        rows = written.reshape(count, -1)
        assert_array_equal(rows, [*ours.values()])


def test_queries_keys_and_values_are_joined_as_pytorch_multiplies_them():
    """Row r of the foreign weight gives output r: 3 blocks of (head, index in the head)."""
    parts = {
        "q": count_up(2, 2, 3),
        "k": count_up(2, 2, 3, start=100),
        "v": count_up(2, 2, 3, start=200),
    }
    entry = Entry(
        "qkv",
        tuple(parts),
        "DTh->(Th)D",
        (2, 2, 3),
    )

    written = entry.write(parts)

    assert written.shape == (18, 2)
    assert entry.describe_use(reading=True) == "split, transposed"
    assert entry.describe_use(reading=False) == "joined, transposed"
    blocks = written.reshape(3, 2, 3, 2)
    for block, part in zip(blocks, parts.values(), strict=True):
        for head, index in np.ndindex(2, 3):
            column = part[:, head, index]
            assert_array_equal(block[head, index], column)


def test_rules_name_and_join_parameters():
    rules = [
        Rule(r"a/(\d)/(?:q|k)", r"a.\1.qk", "io->oi"),
        Rule(r"b/(\d)", lambda match: f"b.{int(match[1]) + 1}"),
        Rule(r"b/.*", "never"),
    ]
    shapes = {
        "a/0/q": (2, 3),
        "a/0/k": (2, 3),
        "b/4": (5,),
        "empty": (3, 0),
    }

    joined, renamed = make_entries(rules, shapes)

    assert joined == Entry(
        "a.0.qk",
        ("a/0/q", "a/0/k"),
        "io->oi",
        (2, 3),
    )
    assert renamed == Entry("b.5", ("b/4",), "", (5,))


def test_a_parameter_without_a_name_is_an_error():
    shapes = {
        "a": (1,),
        "encoder/blocks/0/x": (1,),
        "encoder/blocks/1/x": (1,),
        "y": (2,),
    }
    rules = [Rule("a", "a")]
    message = r"no name for encoder/blocks/x, y$"

    with pytest.raises(ValueError, match=message):
        make_entries(rules, shapes)


# Ours, stacked and taken apart.


def test_layers_are_numbered_and_in_their_places():
    stacked_kernel = "stem/stage2/rest/conv1/kernel"
    parameters = {
        "encoder/blocks/mlp/expand/bias": count_up(12, 1),
        "stem/stage2/first/conv1/kernel": -np.ones(1),
        stacked_kernel: count_up(2, 1),
        "encoder/norm/scale": np.ones(1),
    }
    expected = {
        "encoder/blocks/10/mlp/expand/bias": 10,
        "stem/stage2/unit1/conv1/kernel": -1,
        "stem/stage2/unit2/conv1/kernel": 0,
        "stem/stage2/unit3/conv1/kernel": 1,
        "encoder/norm/scale": 1,
    }

    apart = unstack(parameters, 1)
    found = find_stacked_name("stem/stage2/unit3/conv1/kernel")

    for name, value in expected.items():
        assert apart[name].tolist() == [value]
    assert found == (stacked_kernel, 1)
