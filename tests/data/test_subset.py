"""Parts of a source: chosen records, hold-outs, `config.classes`, `config.train_examples_per_class`; and its cache."""

import itertools
import pickle

import numpy as np
import pytest

from tests.rejections import rejects
from vit_jax.data.kinds.in_memory import CachedSource, MemorySource
from vit_jax.data.sources import open_source
from vit_jax.data.subset import SubsetSource, classes_without_examples, hold_out

SIZES = {"ant": 4, "bee": 6, "cat": 5}
IMAGES = np.zeros((3, 4, 4, 3), np.uint8)


def make_source(*sizes):
    """So many examples of each class, shuffled; a pixel is the record's number."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    labels = labels[np.random.default_rng(0).permutation(len(labels))]
    pixels = np.arange(len(labels), dtype=np.uint8)[:, None, None, None]

    return MemorySource(pixels, labels, tuple("abcdefgh"[: len(sizes)]))


def numbers(source):
    return [int(source[i].image.item()) for i in range(len(source))]


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (IMAGES.astype(np.float32), [0, 0, 0], "uint8"),
        (IMAGES[0], [0, 0, 0], "uint8"),
        (IMAGES, [0, 0], "one integer for each"),
        (IMAGES, [0.0, 0.0, 1.0], "one integer for each"),
        (IMAGES, [0, 0, 2], "record 2 has the label 2, but classes are 0 to 1"),
        (IMAGES, [-1, 0, 0], "record 0 has the label -1"),
    ],
)
def test_arrays_that_are_no_source(images, labels, message):
    with pytest.raises(ValueError, match=message):
        MemorySource(images, np.array(labels), ("a", "b"))


def test_cache_reads_each_record_once(random_source, monkeypatch):
    source = CachedSource(random_source)
    first = source[5]
    monkeypatch.setattr(type(random_source), "image_of", None)

    assert source[5] is first
    assert source.labels is random_source.labels
    assert source.name_of(5) == "record 5"
    assert source.key_of(5) == b"5"
    assert len(source) == 37

    constructor, arguments = source.__reduce__()

    assert arguments == (random_source,)  # workers get no records
    assert constructor(*arguments).class_names == source.class_names


def test_a_subset_of_a_subset_under_new_numbers():
    source = make_source(3, 3, 3)
    inner = SubsetSource(
        CachedSource(source),
        np.flatnonzero(source.labels != 1)[::-1],
        ("c", "a"),
        [1, -1, 0],
    )
    outer = pickle.loads(pickle.dumps(SubsetSource(inner, [3, 0])))
    chosen = [numbers(inner)[3], numbers(inner)[0]]

    assert numbers(inner) == [i for i in range(8, -1, -1) if source.labels[i] != 1]
    assert numbers(outer) == chosen
    assert [outer.name_of(i) for i in (0, 1)] == [f"record {n}" for n in chosen]
    assert [outer.key_of(i) for i in (0, 1)] == [b"%d" % n for n in chosen]

    expected = [{0: 1, 2: 0}[int(source.labels[n])] for n in chosen]
    assert outer.labels.tolist() == [outer[i].label for i in (0, 1)] == expected
    assert outer.class_names == ("c", "a")
    assert outer.num_classes == 2


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
def test_hold_out_by_class(sizes, fraction, held_sizes):
    source = make_source(*sizes)
    rest, held = hold_out(source, fraction, seed=3)

    assert np.bincount(held.labels, minlength=len(sizes)).tolist() == list(held_sizes)
    assert sorted(numbers(rest) + numbers(held)) == list(range(sum(sizes)))
    assert [numbers(part) for part in (rest, held)] == [
        sorted(numbers(part)) for part in (rest, held)
    ]
    assert rest.class_names == held.class_names == source.class_names

    unseen = [name for name, size in zip(source.class_names, held_sizes, strict=True) if not size]

    assert classes_without_examples(held) == unseen


def test_hold_out_takes_every_record_equally_often():
    counts = np.zeros(12)
    for seed in range(400):
        counts[numbers(hold_out(make_source(4, 8), 0.25, seed)[1])] += 1

    assert np.all(np.abs(counts - 100) < 45)  # five standard deviations of a binomial with p = 1/4


def test_hold_out_does_not_depend_on_fraction_or_neighbours():
    """Larger hold-outs hold the smaller; without one record, the others keep their places in the order."""
    source = make_source(20, 20)
    small, large = (set(numbers(hold_out(source, fraction, 0)[1])) for fraction in (0.1, 0.5))

    assert small < large

    left_out = min(set(range(40)) - large)
    part = SubsetSource(source, [i for i in range(40) if i != left_out])

    assert set(numbers(hold_out(part, 0.5, 0)[1])) <= large


def test_sources_without_a_hold_out():
    with pytest.raises(ValueError, match="no class has two examples"):
        hold_out(make_source(1, 1, 1), 0.5, 0)

    source = make_source(2, 2)
    source.labels = np.array([0, 1, -1, 1])

    with pytest.raises(ValueError, match="record 2 has the label -1"):
        hold_out(source, 0.5, 0)


# What a config selects.


@pytest.fixture
def folder(make_folder):
    files = {f"{name}/{i}.png": i for name, size in SIZES.items() for i in range(size)}
    return make_folder(
        {f"{split}/{file}": level for split in ("train", "test") for file, level in files.items()}
    )


def open_names(folder, split, config, seed=0):
    source = open_source(f"folder:{folder}", split, config, seed)
    return source, [source.name_of(i)[len(f"{folder}/{split}/") :] for i in range(len(source))]


@pytest.mark.parametrize("split", ["train", "test"])
def test_classes_are_numbered_in_their_order(folder, make_config, split):
    source, names = open_names(folder, split, make_config(classes=("cat", "ant")))

    assert source.class_names == ("cat", "ant")

    expected = [("cat", "ant").index(name.partition("/")[0]) for name in names]
    assert sorted(expected) == [0] * 5 + [1] * 4
    assert source.labels.tolist() == [source[i].label for i in range(len(source))] == expected
    assert source[0].image == (folder / split / names[0]).read_bytes()


def test_few_examples_of_each_class_of_training(folder, make_config):
    """Chosen by the seed and by each file's name alone."""

    def chosen(per_class, classes=(), seed=0, path=folder):
        config = make_config(train_examples_per_class=per_class, classes=classes)
        source, names = open_names(path, "train", config, seed)

        assert np.bincount(source.labels).tolist() == [per_class] * len(classes or SIZES)

        return set(names)

    three = chosen(3)
    two = chosen(2)

    assert two < three
    assert any(chosen(3, seed=seed) != three for seed in (1, 2, 3))
    assert chosen(3, classes=("cat", "bee")) == {
        name for name in three if not name.startswith("ant")
    }
    assert len(open_names(folder, "train", make_config())[0]) == 15
    assert len(open_names(folder, "test", make_config(train_examples_per_class=2))[0]) == 15

    moved = folder.rename(folder.parent / "elsewhere")

    assert chosen(2, path=moved) == two

    (moved / "train/bee/-first.png").write_bytes((moved / "train/bee/0.png").read_bytes())

    assert len(chosen(2, path=moved) - two) <= 1


def test_few_examples_in_all_of_training(folder, make_config):
    """A smaller part is in each larger one, and another seed has another."""

    def chosen(count, seed=0):
        source, names = open_names(folder, "train", make_config(train_examples=count), seed)

        assert len(source) == count

        return set(names)

    parts = [chosen(count) for count in (2, 5, 11, 15)]

    assert all(less < more for less, more in itertools.pairwise(parts))
    assert any(chosen(5, seed) != parts[1] for seed in (1, 2, 3))
    assert len(open_names(folder, "test", make_config(train_examples=2))[0]) == 15


@pytest.mark.parametrize(
    ("fields", "field", "rule"),
    [
        ({"train_examples": 16}, "config.input.train_examples=16", "15"),
        ({"classes": ("cat", "bea")}, "config.input.classes", "'bea'.*nearest.*'bee'"),
        ({"classes": ("cat", "zebra")}, "config.input.classes", "'zebra'.*'ant', 'bee', 'cat'"),
        ({"classes": ("cat", "")}, "config.input.classes", "no class ''"),
        ({"classes": ("cat",)}, "config.input.classes", "at least two"),
        ({"classes": ("cat", "ant", "cat")}, "config.input.classes", "at least two different"),
        (
            {"train_examples_per_class": 5},
            "",
            "5.*'ant' has 4.*config.input.train_examples_per_class",
        ),
        ({"train_examples_per_class": 6, "classes": ("cat", "bee")}, "", "6.*'cat' has 5"),
    ],
)
def test_mistakes_of_a_selection(folder, make_config, fields, field, rule):
    with rejects(field, rule):
        open_names(folder, "train", make_config(**fields))


def test_split_without_the_classes(data_dir, make_config):
    label = open_source("digits", "test[:1]", make_config(data_dir=data_dir), 0)[0].label
    others = tuple(str(digit) for digit in range(10) if digit != label)

    with rejects("config.input.classes", "no image of them"):
        open_source("digits", "test[:1]", make_config(data_dir=data_dir, classes=others), 0)

    config = make_config(data_dir=data_dir, classes=(str(label), others[0]), train_split="test[:1]")
    with rejects("", f"1.*'{others[0]}' has 0"):
        open_source("digits", "test[:1]", config, 0)
