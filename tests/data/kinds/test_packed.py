"""Tar shards and parquet files: which images, which labels, which split, and the message for each mistake."""

import json
import os
import pickle
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.deep_files import png
from tests.data.packed_files import (
    image,
    make_row,
    read_levels,
    samples,
    write_parquet,
    write_shard,
)
from tests.rejections import rejects
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.kinds import parquet
from vit_jax.data.kinds.packed import _expand_pattern
from vit_jax.data.sources import holds_out, normalize_data

TWENTY = [number % 2 for number in range(20)]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The user's cache folder, which no test shares."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vit_jax" / "shards"


CAT_AND_DOG = ("cat", "dog")


@pytest.fixture
def shards(tmp_path):
    """Two shards of training and one of test."""
    folder = tmp_path / "wds"
    members = {
        "train-0000.tar": samples(TWENTY[:10], 0),
        "train-0001.tar": samples(TWENTY[:10], 10),
        "val-0000.tar": samples([1, 0], 20, "json"),
    }
    for name, members_of_shard in members.items():
        write_shard(folder / name, members_of_shard)
    (folder / "classes.txt").write_text("cat\ndog\n")
    return f"wds:{folder}"


@pytest.fixture
def parquet_files(tmp_path):
    """Two parquet files of training and one of test, of the images in the shards."""
    folder = tmp_path / "parquet"
    files = [
        ("train-0000-of-0002.parquet", TWENTY[:10], 0),
        ("train-0001-of-0002.parquet", TWENTY[10:], 10),
        ("validation-0000-of-0001.parquet", [1, 0], 20),
    ]
    for name, labels, first in files:
        write_parquet(
            folder / name,
            labels,
            first,
            names=CAT_AND_DOG,
        )
    return f"parquet:{folder}"


@pytest.mark.parametrize("kind", ["shards", "parquet_files"])
def test_images_labels_and_splits(request, kind, make_config, open_data):
    data = request.getfixturevalue(kind)
    folder = data.partition(":")[2]

    train = open_data(data, "train")
    test = open_data(data, "test")

    assert read_levels(train) == list(range(20))
    assert read_levels(test) == [20, 21]
    assert train.labels.tolist() == TWENTY
    assert test.labels.tolist() == [1, 0]
    assert train.class_names == test.class_names == CAT_AND_DOG
    keys = {train.key_of(index) for index in range(20)}
    assert len(keys) == 20
    assert train.name_of(12).startswith(f"{folder}/train-0001")
    assert not holds_out(data, make_config())

    received = pickle.loads(pickle.dumps(train))
    assert read_levels(received)[5:15] == list(range(5, 15))


@pytest.mark.parametrize("kind", ["shards", "parquet_files"])
def test_part_of_a_split(request, kind, open_data):
    data = request.getfixturevalue(kind)

    source = open_data(
        data,
        "train[:50%]",
        train_split="train[:50%]",
        classes=("dog", "cat"),
    )

    labels = source.labels.tolist()
    assert labels.count(0) == 5


@pytest.mark.parametrize("kind", ["shards", "parquet_files"])
def test_the_location_keeps_the_column_of_labels(request, kind):
    data = request.getfixturevalue(kind)
    folder = data.partition(":")[0]

    found = normalize_data(f"{data}/../{folder}#label")

    expected = normalize_data(data) + "#label"
    assert found == expected


@pytest.mark.parametrize("kind", ["wds", "parquet"])
def test_files_without_splits_hold_out_a_part(
    tmp_path,
    make_config,
    open_data,
    kind,
):
    folder = tmp_path / "a"
    ten = TWENTY[:10]
    for number in range(2):
        first = 10 * number
        write_shard(folder / f"{number}.tar", samples(ten, first))
        write_parquet(
            folder / f"{number}.parquet",
            ten,
            first,
        )
    data = f"{kind}:{folder}"

    train = open_data(data, "train")
    test = open_data(data, "test")

    assert holds_out(data, make_config())
    levels = read_levels(train) + read_levels(test)
    assert sorted(levels) == list(range(20))
    assert train.class_names == ("0", "1")
    assert sorted(test.labels.tolist()) == [0, 1]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a-{08..11}.tar", "a-08.tar a-09.tar a-10.tar a-11.tar"),
        ("{a,b}-{0..1}.tar", "a-0.tar a-1.tar b-0.tar b-1.tar"),
        ("x{,{1..2}}.tar", "x.tar x1.tar x2.tar"),
        ("{t-{0..1},v-{00..01}}.tar", "t-0.tar t-1.tar v-00.tar v-01.tar"),
        ("odd{.tar", "odd{.tar"),
    ],
)
def test_braces(pattern, names):
    expanded = _expand_pattern(pattern)

    assert sorted(expanded) == names.split()


@pytest.mark.parametrize(
    ("pattern", "split", "count"),
    [
        ("train-{0000..0001}.tar", "train", 20),
        ("train-*1.tar", "train", 10),
        ("train-0000.tar", "train", 10),
        ("{train-0000,val-0000}.tar", "test", 2),
    ],
)
def test_patterns(shards, open_data, pattern, split, count):
    source = open_data(f"{shards}/{pattern}", split)

    assert len(source) == count


def test_patterns_whose_files_do_not_exist(shards, open_data):
    data = f"{shards}/train-{{0000..0003}}.tar"

    with rejects(data, "2 of 4 files do not exist.*train-0002"):
        open_data(data, "train")


@pytest.mark.parametrize(
    ("pattern", "rule"),
    [
        ("a-{0..999999999}.tar", "range must be of at most"),
        ("a-{0..999}-{0..999}.tar", r"more than 100,000 files"),
    ],
)
def test_patterns_of_too_many_files(open_data, pattern, rule):
    with rejects("", rule):
        open_data(f"wds:{pattern}", "train")


IMAGE = image(0)
LINK = (tarfile.SYMTYPE, "/etc/passwd")
DEVICE = (tarfile.CHRTYPE, "")


@pytest.mark.parametrize(
    ("name", "label", "rule"),
    [
        ("a.json", b'{"target": 1}', "'a.png' states no class.*#KEY"),
        ("a.json", b'{"label": [1]}', "'a.png' states no class"),
        ("a.json", b"{", "not JSON"),
        ("a.cls", b" \n", "'a.png' states no class"),
        ("a.cls", b" " * 2**21, "'a.cls' has 2,097,152 bytes"),
    ],
)
def test_labels_that_cannot_be_read_are_named(
    tmp_path,
    open_data,
    name,
    label,
    rule,
):
    members = [(name, label), ("a.png", IMAGE)]
    write_shard(tmp_path / "a-0.tar", members)

    with rejects("", rule):
        open_data(f"wds:{tmp_path}")


@pytest.mark.parametrize(
    ("members", "rule"),
    [
        (
            {"a.png": IMAGE},
            "1 images have no label.*a",
        ),
        (
            {"a.cls": b"0", "a.png": LINK},
            "'a.png' is a link",
        ),
        (
            {"a.cls": b"0", "a.png": DEVICE},
            "'a.png' is a device",
        ),
        (
            {"../a.cls": b"0", "../a.png": IMAGE},
            "'../a.cls' has '..' in its path",
        ),
        (
            {"a.txt": b"0"},
            "no images",
        ),
    ],
)
def test_mistakes_in_shards_are_named(tmp_path, open_data, members, rule):
    write_shard(tmp_path / "a-0.tar", members.items())

    with rejects("", rule):
        open_data(f"wds:{tmp_path}")


@pytest.mark.parametrize(
    ("labels", "rule"),
    [
        ([0, "cat"], r"some labels are numbers \(0\) and others are names \(cat\)"),
        ([0, 10**9], "states no class: 1000000"),
        ([0, 0], "at least two classes.*'0'"),
    ],
)
def test_mistakes_in_labels_of_shards_are_named(
    tmp_path,
    open_data,
    labels,
    rule,
):
    write_shard(tmp_path / "a-0.tar", samples(labels))

    with rejects("", rule):
        open_data(f"wds:{tmp_path}")


def test_images_with_one_name_are_rejected(tmp_path, open_data):
    members = [*samples([0, 1]), *samples([0])]
    write_shard(tmp_path / "a-0.tar", members)

    with rejects("", "1 images have the name of another.*00000.png"):
        open_data(f"wds:{tmp_path}")


@pytest.fixture
def shard(tmp_path):
    return write_shard(tmp_path / "a.tar", samples([0, 1] * 5))


def test_damaged_shards_are_named(shard, open_data):
    cut_off = shard.read_bytes()[:15000]
    rubbish = b"rubbish" * 1000

    for content in (cut_off, rubbish, b""):
        shard.write_bytes(content)
        with rejects(str(shard), ""):
            open_data(f"wds:{shard}")


def test_an_image_of_a_shard_that_was_cut_off_is_unreadable(shard, open_data):
    source = open_data(f"wds:{shard}")
    os.truncate(shard, 2000)

    with pytest.raises(UnreadableImage, match="ends after"):
        source[9]


def test_compressed_shards_are_named(shard, tmp_path, open_data):
    shard.rename(tmp_path / "a.tar.gz")

    with rejects(str(tmp_path), "no files named.*decompress.*a.tar.gz"):
        open_data(f"wds:{tmp_path}")


def test_labels_of_shards(tmp_path, open_data):
    """Labels are texts or other keys of JSON; names of classes come from a file."""
    path = tmp_path / "a.tar"
    data = f"wds:{path}"
    members = samples(["dog", "cat"] * 5, kind="json")
    write_shard(path, members)

    texts = open_data(data)
    numbers = open_data(f"{data}#id")

    assert texts.class_names == CAT_AND_DOG
    assert texts.labels.tolist() == [1, 0] * 5
    assert numbers.labels.tolist() == list(range(10))

    (tmp_path / "classes.txt").write_text("dog\ncat\nemu\n")
    with_names = open_data(data)

    assert with_names.labels.tolist() == [0, 1] * 5


@pytest.mark.parametrize(
    ("names", "key", "rule"),
    [
        ("dog\ncat\nemu\n", "#id", "a.tar.*not among the 3 classes.*: 3, .* 9"),
        ("dog\nhorse\n", "", "a.tar.*not among the 2 classes.*: cat"),
        ("dog\n\ndog\n", "", "empty or repeated: 'dog', ''"),
    ],
)
def test_names_of_classes_must_fit_the_labels(
    tmp_path,
    open_data,
    names,
    key,
    rule,
):
    path = tmp_path / "a.tar"
    members = samples(["dog", "cat"] * 5, kind="json")
    write_shard(path, members)
    (tmp_path / "classes.txt").write_text(names)

    with rejects("", rule):
        open_data(f"wds:{path}{key}")


def test_numbers_without_images_keep_their_place(tmp_path, open_data):
    """Classes may be missing, as in a winter21 subset; a class of the test split alone is an error."""
    data = f"wds:{tmp_path}"
    write_shard(tmp_path / "train.tar", samples([0, 3] * 5))
    write_shard(tmp_path / "test.tar", samples([3, 3]))

    test = open_data(data, "test")

    assert test.num_classes == 4
    with rejects("train.tar", "no split 'test'.*train.:90%"):
        open_data(f"{data}/train.tar", "test")

    write_shard(tmp_path / "test.tar", samples([4]))
    with rejects("", "'train' does not have: 4.*training images"):
        open_data(data, "test")

    write_shard(tmp_path / "more.tar", samples([0]))
    with rejects("", "1 do not: .*more.tar"):
        open_data(data, "train")


@pytest.mark.parametrize(
    ("labels", "options", "rule"),
    [
        ([0, 1], {"label": "class"}, "no column of labels.*'class'.*#COLUMN"),
        ([0, None], {}, "row 1 has no label"),
        ([0, 1, -1], {}, "has the label -1"),
        ([0, 5], {"names": CAT_AND_DOG}, "not among the 2 classes.*: 5"),
    ],
)
def test_mistakes_in_parquet_are_named(
    tmp_path,
    open_data,
    labels,
    options,
    rule,
):
    path = write_parquet(
        tmp_path / "a.parquet",
        labels,
        **options,
    )

    with rejects(str(path), rule):
        open_data(f"parquet:{path}")


def test_damaged_parquet_is_named(tmp_path, open_data):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1" + b"0" * 99)

    with rejects(str(path), "no complete parquet file"):
        open_data(f"parquet:{path}")


def test_files_of_several_datasets_are_rejected(tmp_path, open_data):
    write_parquet(
        tmp_path / "train.parquet",
        [0, 1],
        names=CAT_AND_DOG,
    )
    write_parquet(
        tmp_path / "test.parquet",
        [0, 1],
        names=["cat", "emu"],
    )

    with rejects("", "differ.*names of classes.*'dog' and .*'emu'"):
        open_data(f"parquet:{tmp_path}", "train")


def test_a_named_column_of_labels(tmp_path, open_data):
    path = write_parquet(
        tmp_path / "a.parquet",
        [0, 1, 1, 0],
        fine_label=pa.array(["x", "y", "z", "x"]),
    )

    default = open_data(f"parquet:{path}")
    fine = open_data(f"parquet:{path}#fine_label")

    assert default.class_names == ("0", "1")
    assert fine.labels.tolist() == [0, 1, 2, 0]


def test_columns_are_found_by_the_metadata_of_hugging_face(tmp_path, open_data):
    path = tmp_path / "a.parquet"
    features = {
        "img": {"_type": "Image"},
        "coarse": {"names": ["a", "b"], "_type": "ClassLabel"},
    }
    description = json.dumps({"info": {"features": features}})
    images = [image(level) for level in range(4)]
    table = pa.table({"img": images, "coarse": [1, 0, 1, 0]})
    table = table.replace_schema_metadata({"huggingface": description})

    pq.write_table(table, path)
    source = open_data(f"parquet:{path}")

    assert read_levels(source) == [0, 1, 2, 3]
    assert source.class_names == ("a", "b")

    without_images = table.drop_columns("img")
    pq.write_table(without_images, path)
    with rejects(str(path), r"no column of images.*'coarse' \(int64\)"):
        open_data(f"parquet:{path}")


@pytest.fixture
def five_groups(tmp_path, open_data, monkeypatch):
    """The path and the source of twenty images in five row groups, and a list of the groups read.

    Memory is limited to one group and what the file states of another.
    """
    path = write_parquet(
        tmp_path / "a.parquet",
        [0, 1] * 10,
        group=4,
    )
    source = open_data(f"parquet:{path}")
    file = parquet._stat_file(str(path))
    reads = []
    read_group = parquet._read_group

    def record_read(*key):
        reads.append(key[1])
        return read_group(*key)

    file_sizes = np.array([len(image(level)) for level in range(20)])
    group_sizes = file_sizes.reshape(5, 4).sum(axis=1)
    stated_sizes = []
    for group in range(5):
        chunk = parquet._find_chunk(file, group, "image.bytes")
        stated_sizes.append(chunk.uncompressed)
    num_bytes = int(group_sizes.max()) + max(stated_sizes)
    memory = parquet._Groups(num_bytes)
    monkeypatch.setattr(parquet, "_read_group", record_read)
    monkeypatch.setattr(parquet, "_GROUPS", memory)
    return path, source, reads


def test_row_groups_are_read_once_and_forgotten(five_groups):
    """In order each is read once; memory holds the groups that were used last."""
    _, source, reads = five_groups

    assert read_levels(source) == list(range(20))
    assert reads == [0, 1, 2, 3, 4]

    read_levels(source)
    assert reads == [0, 1, 2, 3, 4] * 2

    for index in (12, 19, 0):
        source[index]
    assert reads[10:] == [0]


def test_row_groups_that_are_too_large_are_named(
    five_groups,
    open_data,
    monkeypatch,
):
    path, _, _ = five_groups
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 10)

    with rejects(str(path), "row group 0 holds.*row_group_size"):
        open_data(f"parquet:{path}")


def test_deep_images_are_noticed(tmp_path, open_data, caplog):
    pixels = np.arange(63, dtype=np.uint16).reshape(7, 9)
    deep = png(pixels)
    members = [*samples([0, 1]), ("x.png", deep), ("x.cls", b"1")]
    write_shard(tmp_path / "a.tar", members)
    write_parquet(
        tmp_path / "a.parquet",
        [0, 1],
        images=[make_row(deep)] * 2,
    )

    open_data(f"wds:{tmp_path}")
    open_data(f"parquet:{tmp_path}")

    of_shards, of_parquet = caplog.messages
    assert "1 of 3 checked files have 16 bits" in of_shards
    assert "2 of 2 checked files have 16 bits" in of_parquet
