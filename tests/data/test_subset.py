"""Chosen records of a source, and hold-outs: counts by hand, stability, and that no record is lost or doubled."""

import pickle

import numpy as np
import pytest

from vit_jax.data.memory import CachedSource, MemorySource
from vit_jax.data.subset import SubsetSource, classes_without_examples, hold_out


@pytest.fixture
def make_source():
    """Returns a function from the number of examples of each class to a source whose pixels are the record's number."""

    def make(*sizes):
        labels = np.repeat(np.arange(len(sizes)), sizes)
        labels = labels[np.random.default_rng(0).permutation(len(labels))]
        pixels = np.arange(len(labels), dtype=np.uint8)[:, None, None, None]
        return MemorySource(pixels, labels, tuple("abcdefgh"[: len(sizes)]))

    return make


def numbers(source):
    return [int(source[i].image.item()) for i in range(len(source))]


def test_subset_is_the_chosen_records_in_order(make_source):
    source = make_source(4, 4, 4)
    subset = SubsetSource(source, [7, 2, 5])
    assert numbers(subset) == [7, 2, 5]
    assert subset.labels.tolist() == [subset[i].label for i in range(3)] == source.labels[[7, 2, 5]].tolist()
    assert (subset.class_names, subset.num_classes) == (source.class_names, 3)
    assert [subset.name_of(i) for i in range(3)] == ["record 7", "record 2", "record 5"]
    assert [subset.key_of(i) for i in range(3)] == [b"7", b"2", b"5"]


def test_new_numbers_and_names(make_source):
    source = make_source(3, 3, 3)
    chosen = np.flatnonzero(source.labels != 1)
    subset = SubsetSource(source, chosen, ("c", "a"), relabel=[1, -1, 0])
    expected = [{0: 1, 2: 0}[int(source.labels[index])] for index in chosen]
    assert subset.labels.tolist() == [subset[i].label for i in range(len(subset))] == expected
    assert subset.class_names == ("c", "a")


@pytest.mark.parametrize(("indices", "relabel"), [([0, 4], None), ([-1], None), ([0, 1], [0])])
def test_mistakes_of_a_subset(make_source, indices, relabel):
    with pytest.raises(AssertionError):
        SubsetSource(make_source(2, 2), indices, relabel=relabel)


def test_subset_of_a_subset_and_pickling(make_source):
    inner = SubsetSource(CachedSource(make_source(5, 5)), [9, 8, 7, 1])
    outer = pickle.loads(pickle.dumps(SubsetSource(inner, [3, 0])))
    assert numbers(outer) == [1, 9]
    assert outer.name_of(1) == "record 9"
    assert np.array_equal(outer.labels, [outer[0].label, outer[1].label])


@pytest.mark.parametrize(
    ("sizes", "fraction", "held_sizes"),
    [
        ((10, 20, 5), 0.2, (2, 4, 1)),
        ((10, 20, 5), 0.01, (1, 1, 1)),
        ((10, 20, 5), 0.99, (9, 19, 4)),
        ((2, 1, 3), 0.5, (1, 0, 2)),  # 1.5 rounds to 2; the only example stays
        ((4, 0), 0.25, (1, 0)),
    ],
)
def test_hold_out_by_class(make_source, sizes, fraction, held_sizes):
    source = make_source(*sizes)
    rest, held = hold_out(source, fraction, seed=3)
    assert np.bincount(held.labels, minlength=len(sizes)).tolist() == list(held_sizes)
    assert sorted(numbers(rest) + numbers(held)) == list(range(sum(sizes)))
    assert numbers(held) == sorted(numbers(held))
    assert numbers(rest) == sorted(numbers(rest))
    assert rest.class_names == held.class_names == source.class_names


def test_hold_out_takes_every_record_equally_often(make_source):
    source = make_source(4, 8)
    counts = np.zeros(12)
    for seed in range(400):
        counts[numbers(hold_out(source, 0.25, seed)[1])] += 1
    assert np.all(np.abs(counts - 100) < 45)  # five standard deviations of a binomial with p = 1/4
    assert numbers(hold_out(source, 0.25, 7)[1]) == numbers(hold_out(source, 0.25, 7)[1])


def test_hold_out_does_not_depend_on_fraction_or_neighbours(make_source):
    """Larger hold-outs hold the smaller; without one record, the others keep their places in the order."""
    source = make_source(20, 20)
    small, large = (set(numbers(hold_out(source, fraction, 0)[1])) for fraction in (0.1, 0.5))
    assert small < large
    left_out = min(set(range(40)) - large)
    part = SubsetSource(source, [i for i in range(40) if i != left_out])
    assert set(numbers(hold_out(part, 0.5, 0)[1])) <= large


def test_classes_of_which_nothing_is_held_out_are_named(make_source):
    rest, held = hold_out(make_source(3, 1, 2, 1), 0.5, 0)
    assert classes_without_examples(rest) == []
    assert classes_without_examples(held) == [held.class_names[1], held.class_names[3]]


def test_sources_without_a_hold_out(make_source):
    with pytest.raises(ValueError, match="no class has two examples"):
        hold_out(make_source(1, 1, 1), 0.5, 0)
    source = make_source(2, 2)
    source.labels = np.array([0, 1, -1, 1])
    with pytest.raises(ValueError, match="record 2 has the label -1"):
        hold_out(source, 0.5, 0)
