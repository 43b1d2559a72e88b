"""Subsets of a source: chosen records, hold-outs, classes, few examples; and the cache."""

import itertools
import pickle

import numpy as np
import pytest

from tests.rejections import rejects
from vit_jax.data.kinds.in_memory import CachedSource, MemorySource
from vit_jax.data.sources import open_source
from vit_jax.data.subset import SubsetSource, find_classes_without_examples, hold_out

SIZES = {"ant": 4, "bee": 6, "cat": 5}
IMAGES = np.zeros((3, 4, 4, 3), np.uint8)


def make_source(*sizes):
    """Return a shuffled source with this number of examples of each class.

    A pixel is the record's number.
    """
    labels = np.repeat(np.arange(len(sizes)), sizes)
    labels = labels[np.random.default_rng(0).permutation(len(labels))]
    pixels = np.arange(len(labels), dtype=np.uint8)[:, None, None, None]
    return MemorySource(pixels, labels, tuple("abcdefgh"[: len(sizes)]))


def read_numbers(source):
    """Return the numbers that the records had in the source of `make_source`."""
    return [int(source[i].image.item()) for i in range(len(source))]


def read_labels(source):
    """Return the labels of the records, which must be those of the source."""
    labels = [source[i].label for i in range(len(source))]
    assert source.labels.tolist() == labels
    return labels


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


def test_workers_receive_a_cache_without_its_records(random_source):
    source = CachedSource(random_source)

    constructor, arguments = source.__reduce__()

    assert arguments == (random_source,)
    assert constructor(*arguments).class_names == source.class_names


def test_a_subset_of_a_subset_under_new_numbers():
    """The subset has the classes 2 and 0 in reverse order; its subset is sent to a worker."""
    source = make_source(3, 3, 3)
    indices = np.flatnonzero(source.labels != 1)[::-1]
    inner = SubsetSource(
        CachedSource(source),
        indices,
        ("c", "a"),
        [1, -1, 0],
    )
    outer = pickle.loads(pickle.dumps(SubsetSource(inner, [3, 0])))

    inner_numbers = read_numbers(inner)
    assert inner_numbers == [i for i in range(8, -1, -1) if source.labels[i] != 1]

    expected = [inner_numbers[3], inner_numbers[0]]
    assert read_numbers(outer) == expected
    assert [outer.name_of(i) for i in (0, 1)] == [f"record {number}" for number in expected]
    assert [outer.key_of(i) for i in (0, 1)] == [b"%d" % number for number in expected]

    new_label = {0: 1, 2: 0}
    assert read_labels(outer) == [new_label[int(source.labels[number])] for number in expected]
    assert outer.class_names == ("c", "a")
    assert outer.num_classes == 2


@pytest.mark.parametrize(
    ("sizes", "fraction", "held_sizes"),
    [
        ((10, 20, 5), 0.2, [2, 4, 1]),
        ((10, 20, 5), 0.01, [1, 1, 1]),
        ((10, 20, 5), 0.99, [9, 19, 4]),
        ((2, 1, 3), 0.5, [1, 0, 2]),  # 1.5 rounds to 2; the only example stays
        ((4, 0), 0.25, [1, 0]),
    ],
)
def test_hold_out_by_class(sizes, fraction, held_sizes):
    """The held-out part has a fraction of each class; both parts keep the order of records."""
    source = make_source(*sizes)

    rest, held = hold_out(source, fraction, seed=3)

    assert np.bincount(held.labels, minlength=len(sizes)).tolist() == held_sizes

    rest_numbers = read_numbers(rest)
    held_numbers = read_numbers(held)

    assert sorted(rest_numbers + held_numbers) == list(range(sum(sizes)))
    assert rest_numbers == sorted(rest_numbers)
    assert held_numbers == sorted(held_numbers)

    assert rest.class_names == held.class_names == source.class_names
    names_and_sizes = zip(source.class_names, held_sizes, strict=True)
    unseen = [name for name, size in names_and_sizes if size == 0]
    assert find_classes_without_examples(held) == unseen


def test_hold_out_takes_every_record_equally_often():
    """100 of 400 seeds hold a record out, within five deviations of a binomial with p = 1/4."""
    counts = np.zeros(12)

    for seed in range(400):
        _, held = hold_out(make_source(4, 8), 0.25, seed)
        counts[read_numbers(held)] += 1

    assert np.all(np.abs(counts - 100) < 45)


def test_hold_out_does_not_depend_on_fraction_or_neighbours():
    """Larger hold-outs contain the smaller; without one record, the others keep their order."""
    source = make_source(20, 20)

    _, small = hold_out(source, 0.1, 0)
    _, large = hold_out(source, 0.5, 0)

    large_numbers = set(read_numbers(large))
    assert set(read_numbers(small)) < large_numbers

    removed = min(set(range(40)) - large_numbers)
    part = SubsetSource(source, [i for i in range(40) if i != removed])
    _, held_of_part = hold_out(part, 0.5, 0)

    assert set(read_numbers(held_of_part)) <= large_numbers


def test_sources_without_a_hold_out():
    with pytest.raises(ValueError, match="no class has two examples"):
        hold_out(make_source(1, 1, 1), 0.5, 0)

    source = make_source(2, 2)
    source.labels = np.array([0, 1, -1, 1])
    with pytest.raises(ValueError, match="record 2 has the label -1"):
        hold_out(source, 0.5, 0)


# Records that a config selects.


@pytest.fixture
def folder(make_folder):
    """An image folder with the splits train and test, each with the classes of SIZES."""
    files = {}
    for split in ("train", "test"):
        for name, size in SIZES.items():
            files |= {f"{split}/{name}/{i}.png": i for i in range(size)}
    return make_folder(files)


def open_names(folder, split, config, seed=0):
    """Return a source and the names of its files below the folder of the split."""
    source = open_source(f"folder:{folder}", split, config, seed)
    names = [source.name_of(i).removeprefix(f"{folder}/{split}/") for i in range(len(source))]
    return source, names


@pytest.mark.parametrize("split", ["train", "test"])
def test_classes_are_numbered_in_their_order(folder, make_config, split):
    source, names = open_names(
        folder,
        split,
        make_config(classes=("cat", "ant")),
    )

    labels = read_labels(source)

    assert source.class_names == ("cat", "ant")
    assert sorted(labels) == [0] * 5 + [1] * 4
    assert labels == [("cat", "ant").index(name.partition("/")[0]) for name in names]
    assert source[0].image == (folder / split / names[0]).read_bytes()


@pytest.fixture
def choose_per_class(folder, make_config):
    """Return a function from a number of examples of each class to the chosen names."""

    def choose(per_class, classes=(), seed=0, path=folder):
        config = make_config(train_examples_per_class=per_class, classes=classes)
        source, names = open_names(path, "train", config, seed)

        num_classes = len(classes or SIZES)
        assert np.bincount(source.labels).tolist() == [per_class] * num_classes
        return set(names)

    return choose


def test_few_examples_of_each_class_of_training(folder, make_config, choose_per_class):
    """Fewer examples are among more; a seed has its examples; other splits are complete."""
    three = choose_per_class(3)

    assert choose_per_class(2) < three
    assert any(choose_per_class(3, seed=seed) != three for seed in (1, 2, 3))

    expected = {name for name in three if not name.startswith("ant")}
    assert choose_per_class(3, classes=("cat", "bee")) == expected

    train, _ = open_names(folder, "train", make_config())
    test, _ = open_names(
        folder,
        "test",
        make_config(train_examples_per_class=2),
    )

    assert len(train) == 15
    assert len(test) == 15


def test_examples_are_chosen_by_the_names_of_files_alone(folder, choose_per_class):
    """A moved folder has the same examples; a further file replaces at most one."""
    before = choose_per_class(2)

    moved = folder.rename(folder.parent / "elsewhere")
    assert choose_per_class(2, path=moved) == before

    content = (moved / "train/bee/0.png").read_bytes()
    (moved / "train/bee/-first.png").write_bytes(content)

    assert len(choose_per_class(2, path=moved) - before) <= 1


def test_few_examples_in_all_of_training(folder, make_config):
    """A smaller subset is in each larger one, and another seed has another."""

    def choose(count, seed=0):
        source, names = open_names(
            folder,
            "train",
            make_config(train_examples=count),
            seed,
        )
        assert len(source) == count
        return set(names)

    subsets = [choose(count) for count in (2, 5, 11, 15)]

    assert all(less < more for less, more in itertools.pairwise(subsets))
    assert any(choose(5, seed) != subsets[1] for seed in (1, 2, 3))

    test, _ = open_names(folder, "test", make_config(train_examples=2))
    assert len(test) == 15


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
    """A split of one image has a single class."""

    def open_one_image(**fields):
        return open_source(
            "digits",
            "test[:1]",
            make_config(data_dir=data_dir, **fields),
            0,
        )

    label = open_one_image()[0].label
    others = tuple(str(digit) for digit in range(10) if digit != label)

    with rejects("config.input.classes", "no image of them"):
        open_one_image(classes=others)
    with rejects("", f"1.*'{others[0]}' has 0"):
        open_one_image(classes=(str(label), others[0]), train_split="test[:1]")
