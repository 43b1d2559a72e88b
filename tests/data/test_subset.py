"""Subsets of a source: chosen records, hold-outs, classes, few examples; and the cache."""

import pathlib
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
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    labels = rng.permutation(labels)
    numbers = np.arange(len(labels))
    pixels = numbers.astype(np.uint8).reshape(-1, 1, 1, 1)
    names = tuple("abcdefgh"[: len(sizes)])

    return MemorySource(pixels, labels, names)


def read_numbers(source):
    """Return the numbers that the records had in the source of `make_source`."""
    numbers = []
    for i in range(len(source)):
        numbers.append(source[i].image.item())
    return numbers


def read_labels(source):
    """Return the labels of the records, which must be those of the source."""
    labels = []
    for i in range(len(source)):
        labels.append(source[i].label)
    assert source.labels.tolist() == labels
    return labels


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 0], "one integer for each"),
        ([0.0, 0.0, 1.0], "one integer for each"),
        ([0, 0, 2], "record 2 has the label 2, but classes are 0 to 1"),
        ([-1, 0, 0], "record 0 has the label -1"),
    ],
)
def test_labels_that_are_no_classes(labels, message):
    with pytest.raises(ValueError, match=message):
        MemorySource(IMAGES, np.array(labels), ("a", "b"))


@pytest.mark.parametrize("images", [IMAGES.astype(np.complex64), IMAGES[0]])
def test_arrays_that_are_no_images(images):
    labels = [0, 0, 0]

    with pytest.raises(ValueError, match="uint8"):
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
    pickled = pickle.dumps(SubsetSource(inner, [3, 0]))
    outer = pickle.loads(pickled)

    inner_numbers = read_numbers(inner)
    assert inner_numbers == indices.tolist()

    numbers = read_numbers(outer)
    labels = read_labels(outer)

    assert numbers == [inner_numbers[3], inner_numbers[0]]
    for i, number in enumerate(numbers):
        assert outer.name_of(i) == f"record {number}"
        assert outer.key_of(i) == b"%d" % number
        label = source.labels[number]
        name = source.class_names[label]
        assert outer.class_names[labels[i]] == name
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
    """The held-out part has a fraction of each class; both parts keep the order of records."""
    source = make_source(*sizes)

    rest, held = hold_out(source, fraction, seed=3)

    counts = np.bincount(held.labels, minlength=len(sizes))
    assert np.array_equal(counts, held_sizes)

    rest_numbers = read_numbers(rest)
    held_numbers = read_numbers(held)
    all_numbers = list(range(sum(sizes)))

    assert sorted(rest_numbers + held_numbers) == all_numbers
    assert rest_numbers == sorted(rest_numbers)
    assert held_numbers == sorted(held_numbers)

    assert rest.class_names == held.class_names == source.class_names
    unseen = []
    for name, size in zip(source.class_names, held_sizes, strict=True):
        if size == 0:
            unseen.append(name)
    assert find_classes_without_examples(held) == unseen


def test_hold_out_takes_every_record_equally_often():
    """100 of 400 seeds hold a record out, within five deviations of a binomial with p = 1/4."""
    source = make_source(4, 8)
    counts = np.zeros(12)

    for seed in range(400):
        _, held = hold_out(source, 0.25, seed)
        counts[read_numbers(held)] += 1

    deviations = np.abs(counts - 100)
    assert deviations.max() < 45


def test_hold_out_does_not_depend_on_fraction_or_neighbours():
    """Larger hold-outs contain the smaller; without one record, the others keep their order."""
    source = make_source(20, 20)

    _, small = hold_out(source, 0.1, 0)
    _, large = hold_out(source, 0.5, 0)

    small_numbers = set(read_numbers(small))
    large_numbers = set(read_numbers(large))

    assert small_numbers < large_numbers

    all_numbers = set(range(40))
    removed = min(all_numbers - large_numbers)
    part = SubsetSource(source, sorted(all_numbers - {removed}))
    _, held_of_part = hold_out(part, 0.5, 0)

    assert set(read_numbers(held_of_part)) <= large_numbers


def test_sources_without_a_hold_out():
    single_examples = make_source(1, 1, 1)
    with pytest.raises(ValueError, match="no class has two examples"):
        hold_out(single_examples, 0.5, 0)

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
            for i in range(size):
                files[f"{split}/{name}/{i}.png"] = i
    return make_folder(files)


def open_names(folder, split, config, seed=0):
    """Return a source and the names of its files below the folder of the split."""
    source = open_source(
        f"folder:{folder}",
        split,
        config,
        seed,
    )
    names = []
    for i in range(len(source)):
        path = pathlib.Path(source.name_of(i))
        names.append(str(path.relative_to(folder / split)))
    return source, names


@pytest.mark.parametrize("split", ["train", "test"])
def test_classes_are_numbered_in_their_order(folder, make_config, split):
    classes = ("cat", "ant")
    config = make_config(classes=classes)

    source, names = open_names(folder, split, config)

    labels = read_labels(source)
    assert source.class_names == classes
    assert np.bincount(labels).tolist() == [5, 4]
    for label, name in zip(labels, names, strict=True):
        assert name.startswith(f"{classes[label]}/")
    first = folder / split / names[0]
    record = source[0]
    assert record.image == first.read_bytes()


@pytest.fixture
def choose_per_class(folder, make_config):
    """Return a function from a number of examples of each class to the chosen names."""

    def choose(per_class, classes=(), seed=0, path=folder):
        config = make_config(
            train_examples_per_class=per_class,
            classes=classes,
        )
        source, names = open_names(path, "train", config, seed)

        num_classes = len(classes or SIZES)
        counts = np.bincount(source.labels)
        assert counts.tolist() == [per_class] * num_classes
        return set(names)

    return choose


def test_few_examples_of_each_class_of_training(choose_per_class):
    """Fewer examples are among more; a seed has its examples."""
    two = choose_per_class(2)
    three = choose_per_class(3)
    of_other_seeds = []
    for seed in (1, 2, 3):
        of_other_seeds.append(choose_per_class(3, seed=seed))
    cats_and_bees = choose_per_class(3, classes=("cat", "bee"))

    assert two < three
    assert of_other_seeds != [three] * 3
    expected = {name for name in three if not name.startswith("ant")}
    assert cats_and_bees == expected


def test_other_splits_are_complete(folder, make_config):
    train, _ = open_names(folder, "train", make_config())

    assert len(train) == 15

    for field in ("train_examples", "train_examples_per_class"):
        config = make_config(**{field: 2})
        test, _ = open_names(folder, "test", config)
        assert len(test) == 15


def test_examples_are_chosen_by_the_names_of_files_alone(folder, choose_per_class):
    """A moved folder has the same examples; a further file replaces at most one."""
    before = choose_per_class(2)

    moved = folder.rename(folder.parent / "elsewhere")
    assert choose_per_class(2, path=moved) == before

    bees = moved / "train/bee"
    content = (bees / "0.png").read_bytes()
    (bees / "-first.png").write_bytes(content)
    added = choose_per_class(2, path=moved) - before

    assert len(added) <= 1


def test_few_examples_in_all_of_training(folder, make_config):
    """A smaller subset is in each larger one, and another seed has another."""

    def choose(count, seed=0):
        config = make_config(train_examples=count)
        source, names = open_names(folder, "train", config, seed)
        assert len(source) == count
        return set(names)

    two, five, eleven, all_names = map(choose, (2, 5, 11, 15))
    of_other_seeds = [choose(5, seed) for seed in (1, 2, 3)]

    assert two < five < eleven < all_names
    assert of_other_seeds != [five] * 3


@pytest.mark.parametrize(
    ("classes", "rule"),
    [
        (("cat", "bea"), "'bea'.*nearest.*'bee'"),
        (("cat", "zebra"), "'zebra'.*'ant', 'bee', 'cat'"),
        (("cat", ""), "no class ''"),
        (("cat",), "at least two"),
        (("cat", "ant", "cat"), "at least two different"),
    ],
)
def test_classes_that_cannot_be_selected(folder, open_data, classes, rule):
    with rejects("config.input.classes", rule):
        open_data(
            f"folder:{folder}",
            "train",
            classes=classes,
        )


@pytest.mark.parametrize(
    ("fields", "field", "rule"),
    [
        (
            {"train_examples": 16},
            "config.input.train_examples=16",
            "15",
        ),
        (
            {"train_examples_per_class": 5},
            "",
            "5.*'ant' has 4.*config.input.train_examples_per_class",
        ),
        (
            {"train_examples_per_class": 6, "classes": ("cat", "bee")},
            "",
            "6.*'cat' has 5",
        ),
    ],
)
def test_more_examples_than_there_are(
    folder,
    open_data,
    fields,
    field,
    rule,
):
    with rejects(field, rule):
        open_data(f"folder:{folder}", "train", **fields)


def test_split_without_the_classes(data_dir, open_data):
    """A split of one image has a single class."""

    def open_one_image(**fields):
        return open_data(
            "digits",
            "test[:1]",
            data_dir=data_dir,
            **fields,
        )

    source = open_one_image()
    label = str(source[0].label)
    others = tuple(digit for digit in "0123456789" if digit != label)
    first, *_ = others

    with rejects("config.input.classes", "no image of them"):
        open_one_image(classes=others)
    with rejects("", f"1.*'{first}' has 0"):
        open_one_image(classes=(label, first), train_split="test[:1]")
