import numpy as np
import pytest

from vit_jax.weights.names.entry import STACKED, Entry, Rule, make_entries


def numbers(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_the_same_layout():
    entry = Entry("b", ("ours",), "", (3,))
    assert entry.shape == (3,)
    np.testing.assert_array_equal(entry.write({"ours": numbers(3)}), [0, 1, 2])
    np.testing.assert_array_equal(entry.read(numbers(3))["ours"], [0, 1, 2])
    assert entry.status(reading=True) == "copied"


def test_a_dense_kernel_is_transposed():
    entry = Entry("weight", ("kernel",), "io->oi", (2, 3))
    assert entry.shape == (3, 2)
    np.testing.assert_array_equal(entry.write({"kernel": numbers(2, 3)}), [[0, 3], [1, 4], [2, 5]])
    assert entry.status(reading=True) == "transposed"


def test_a_convolution():
    entry = Entry("weight", ("kernel",), "hwio->oihw", (2, 3, 4, 5))
    kernel = numbers(2, 3, 4, 5)
    written = entry.write({"kernel": kernel})
    assert written.shape == (5, 4, 2, 3)
    assert written[4, 3, 1, 2] == kernel[1, 2, 3, 4]
    assert written[0, 3, 1, 0] == kernel[1, 0, 3, 0]


def test_new_axes_of_length_one():
    entry = Entry("scale", ("scale",), "C->111C", (3,))
    assert entry.shape == (1, 1, 1, 3)
    assert entry.status(reading=False) == "reshaped"
    assert Entry("w", ("kernel",), "io->oi11", (2, 3)).shape == (3, 2, 1, 1)


def test_queries_keys_and_values_are_joined_as_pytorch_multiplies_them():
    """Row r of the foreign weight gives output r = 3 blocks of (head, place in the head)."""
    parts = {name: place * 100 + numbers(2, 2, 3) for place, name in enumerate(("q", "k", "v"))}
    entry = Entry("qkv", tuple(parts), "DTh->(Th)D", (2, 2, 3))
    written = entry.write(parts)
    assert written.shape == (18, 2)
    for block, part in enumerate(parts.values()):
        for head in range(2):
            for place in range(3):
                np.testing.assert_array_equal(written[block * 6 + head * 3 + place], part[:, head, place])
    assert entry.status(reading=True) == "split, transposed"
    assert entry.status(reading=False) == "joined, transposed"


def test_all_layers_in_one_array():
    names = ("encoder/blocks/0/x", "encoder/blocks/1/x")
    entry = Entry("x", names, STACKED, (3,))
    assert entry.shape == (2, 3)
    np.testing.assert_array_equal(
        entry.write({names[0]: numbers(3), names[1]: 10 + numbers(3)}), [[0, 1, 2], [10, 11, 12]]
    )
    assert entry.status(reading=True) == "copied"
    assert Entry("x", names[:1], STACKED, (3,)).shape == (1, 3)


@pytest.mark.parametrize(
    ("layout", "part", "count"),
    [
        ("", (2, 3), 1),
        ("", (4,), 3),
        (STACKED, (2, 3), 4),
        (STACKED, (2, 3), 1),
        ("io->oi", (2, 3), 1),
        ("io->11io", (2, 3), 1),
        ("Th->(Th)", (2, 3), 3),
        ("DTh->(Th)D", (4, 2, 3), 2),
        ("ThD->D(Th)", (2, 3, 4), 1),
        ("hwio->oihw", (1, 2, 3, 4), 1),
    ],
)
def test_reading_undoes_writing_bit_by_bit(layout, part, count):
    bits = np.random.default_rng(0).integers(0, 2**32, (count, *part), dtype=np.uint32)  # NaNs and denormals too
    parameters = {f"encoder/blocks/{place}/x": one for place, one in enumerate(bits.view(np.float32))}
    entry = Entry("x", tuple(parameters), layout, part)
    written = entry.write(parameters)
    assert written.shape == entry.shape
    read = entry.read(written)
    assert read.keys() == parameters.keys()
    assert all(read[name].tobytes() == array.tobytes() for name, array in parameters.items())
    assert entry.write(read).tobytes() == written.tobytes()


def test_rules_name_and_join_parameters():
    rules = [
        Rule(r"a/(\d)/(?:q|k)", r"a.\1.qk", "io->oi"),
        Rule(r"b/(\d)", lambda match: f"b.{int(match[1]) + 1}"),
        Rule(r"b/.*", "never"),
    ]
    entries = make_entries(rules, {"a/0/q": (2, 3), "a/0/k": (2, 3), "b/4": (5,), "empty": (3, 0)})
    assert entries == [Entry("a.0.qk", ("a/0/q", "a/0/k"), "io->oi", (2, 3)), Entry("b.5", ("b/4",), "", (5,))]


def test_a_parameter_without_a_name_is_an_error():
    with pytest.raises(ValueError, match=r"no name for encoder/blocks/x, y$"):
        make_entries([Rule("a", "a")], {"a": (1,), "encoder/blocks/0/x": (1,), "encoder/blocks/1/x": (1,), "y": (2,)})
