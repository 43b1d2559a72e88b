"""Tar shards and parquet files: which images, which labels, which split, and the message for each mistake."""

import json
import os
import pickle
import tarfile

import numpy as np
import pytest

from tests.data.packed_files import image, samples, write_parquet, write_shard
from tests.rejections import rejects
from vit_jax.data.decoding.images import UnreadableImage, decode
from vit_jax.data.kinds import parquet
from vit_jax.data.kinds.packed import _expanded
from vit_jax.data.sources import holds_out, located, open_source

TWENTY = [number % 2 for number in range(20)]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The user's cache folder, which no test shares."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vit_jax" / "shards"


def levels(source):
    return [int(decode(source[index].image)[0, 0, 0]) for index in range(len(source))]


def write_both(folder):
    """The same images in two shards and in two parquet files; returns how each is named."""
    for number, name in enumerate(("train-0000", "train-0001")):
        write_shard(folder / "wds" / f"{name}.tar", samples(TWENTY[:10], 10 * number))
        write_parquet(
            folder / "parquet" / f"{name}-of-0002.parquet",
            TWENTY[:10],
            10 * number,
            names=["cat", "dog"],
        )

    write_shard(folder / "wds" / "val-0000.tar", samples([1, 0], 20, "json"))
    write_parquet(
        folder / "parquet" / "validation-0000-of-0001.parquet",
        [1, 0],
        20,
        names=["cat", "dog"],
    )
    (folder / "wds" / "classes.txt").write_text("cat\ndog\n")

    return f"wds:{folder}/wds", f"parquet:{folder}/parquet"


def test_images_labels_and_splits(tmp_path, make_config):
    for data in write_both(tmp_path):
        train, test = (open_source(data, split, make_config(), 0) for split in ("train", "test"))

        assert levels(train) == list(range(20))
        assert levels(test) == [20, 21]
        assert train.labels.tolist() == TWENTY
        assert test.labels.tolist() == [1, 0]
        assert train.class_names == test.class_names == ("cat", "dog")
        assert len({train.key_of(index) for index in range(20)}) == 20
        assert train.name_of(12).startswith(f"{data.partition(':')[2]}/train-0001")
        assert not holds_out(data, make_config())
        assert levels(pickle.loads(pickle.dumps(train)))[5:15] == list(range(5, 15))

        part = open_source(
            data,
            "train[:50%]",
            make_config(train_split="train[:50%]", classes=("dog", "cat")),
            0,
        )

        assert part.labels.tolist().count(0) == 5
        assert (
            located(data + "/../" + data.partition(":")[0] + "#label") == located(data) + "#label"
        )


def test_files_without_splits_hold_out_the_same_part_always(tmp_path, make_config):
    for number in range(2):
        write_shard(tmp_path / "a" / f"{number}.tar", samples(TWENTY[:10], 10 * number))
        write_parquet(tmp_path / "a" / f"{number}.parquet", TWENTY[:10], 10 * number)

    for data in (f"wds:{tmp_path}/a", f"parquet:{tmp_path}/a"):
        assert holds_out(data, make_config())

        train, test = (open_source(data, split, make_config(), 0) for split in ("train", "test"))

        assert sorted(levels(train) + levels(test)) == list(range(20))
        assert train.class_names == ("0", "1")
        assert sorted(test.labels.tolist()) == [0, 1]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a-{08..11}.tar", ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]),
        ("{a,b}-{0..1}.tar", ["a-0.tar", "a-1.tar", "b-0.tar", "b-1.tar"]),
        ("x{,{1..2}}.tar", ["x.tar", "x1.tar", "x2.tar"]),
        ("{t-{0..1},v-{00..01}}.tar", ["t-0.tar", "t-1.tar", "v-00.tar", "v-01.tar"]),
        ("odd{.tar", ["odd{.tar"]),
    ],
)
def test_braces(pattern, names):
    assert sorted(_expanded(pattern)) == names


def test_patterns(tmp_path, make_config):
    write_both(tmp_path)
    config = make_config()

    assert (
        len(open_source(f"wds:{tmp_path}/wds/train-{{0000..0001}}.tar", "train", config, 0)) == 20
    )
    assert len(open_source(f"wds:{tmp_path}/wds/train-*1.tar", "train", config, 0)) == 10
    assert len(open_source(f"wds:{tmp_path}/wds/train-0000.tar", "train", config, 0)) == 10
    assert (
        len(open_source(f"wds:{tmp_path}/wds/{{train-0000,val-0000}}.tar", "test", config, 0)) == 2
    )

    with rejects(
        f"wds:{tmp_path}/wds/train-{{0000..0003}}.tar",
        "2 of 4 files do not exist.*train-0002",
    ):
        open_source(f"wds:{tmp_path}/wds/train-{{0000..0003}}.tar", "train", config, 0)

    with rejects("", "range must be of at most"):
        open_source("wds:a-{0..999999999}.tar", "train", config, 0)
    with rejects("", r"more than 100,000 files"):
        open_source("wds:a-{0..999}-{0..999}.tar", "train", config, 0)


@pytest.mark.parametrize(
    ("members", "rule"),
    [
        ([("a.png", image(0))], "1 images have no label.*a"),
        ([*samples([0, 1]), *samples([0])], "1 images have the name of another.*00000.png"),
        ([("a.cls", b"0"), ("a.png", (tarfile.SYMTYPE, "/etc/passwd"))], "'a.png' is a link"),
        ([("a.cls", b"0"), ("a.png", (tarfile.CHRTYPE, ""))], "'a.png' is a device"),
        ([("../a.cls", b"0"), ("../a.png", image(0))], "'../a.cls' has '..' in its path"),
        ([("a.json", b'{"target": 1}'), ("a.png", image(0))], "'a.png' states no class.*#KEY"),
        ([("a.json", b'{"label": [1]}'), ("a.png", image(0))], "'a.png' states no class"),
        ([("a.json", b"{"), ("a.png", image(0))], "not JSON"),
        ([("a.cls", b" \n"), ("a.png", image(0))], "'a.png' states no class"),
        ([("a.cls", b" " * 2**21), ("a.png", image(0))], "'a.cls' has 2,097,152 bytes"),
        ([("a.txt", b"0")], "no images"),
        ([*samples([0, "cat"])], r"some labels are numbers \(0\) and others are names \(cat\)"),
        ([*samples([0, 10**9])], "states no class: 1000000"),
        ([*samples([0, 0])], "at least two classes.*'0'"),
    ],
)
def test_mistakes_in_shards_are_named(tmp_path, make_config, members, rule):
    write_shard(tmp_path / "a-0.tar", members)
    with rejects("", rule):
        open_source(f"wds:{tmp_path}", "all", make_config(), 0)


def test_damaged_shards_are_named(tmp_path, make_config):
    path = write_shard(tmp_path / "a.tar", samples([0, 1] * 5))
    whole = path.read_bytes()

    for content in (whole[:15000], b"rubbish" * 1000, b""):
        path.write_bytes(content)
        with rejects(str(path), ""):
            open_source(f"wds:{path}", "all", make_config(), 0)

    path.write_bytes(whole)
    source = open_source(f"wds:{path}", "all", make_config(), 0)
    os.truncate(path, 2000)

    with pytest.raises(UnreadableImage, match="ends after"):
        source[9]

    path.rename(tmp_path / "a.tar.gz")
    with rejects(str(tmp_path), "no files named.*decompress.*a.tar.gz"):
        open_source(f"wds:{tmp_path}", "all", make_config(), 0)


def test_labels_of_shards(tmp_path, make_config):
    """Texts, keys of JSON, and names of classes from a file, whose number and spelling must fit."""
    data = f"wds:{tmp_path}/a.tar"
    write_shard(tmp_path / "a.tar", samples(["dog", "cat"] * 5, kind="json"))
    texts = open_source(data, "all", make_config(), 0)

    assert texts.class_names == ("cat", "dog")
    assert texts.labels.tolist() == [1, 0] * 5
    assert open_source(f"{data}#id", "all", make_config(), 0).labels.tolist() == list(range(10))

    (tmp_path / "classes.txt").write_text("dog\ncat\nemu\n")

    assert open_source(data, "all", make_config(), 0).labels.tolist() == [0, 1] * 5

    with rejects(data, "not among the 3 classes.*: 3, .* 9"):
        open_source(f"{data}#id", "all", make_config(), 0)

    (tmp_path / "classes.txt").write_text("dog\nhorse\n")
    with rejects(data, "not among the 2 classes.*: cat"):
        open_source(data, "all", make_config(), 0)

    (tmp_path / "classes.txt").write_text("dog\n\ndog\n")
    with rejects("", "empty or repeated: 'dog', ''"):
        open_source(data, "all", make_config(), 0)


def test_numbers_without_images_keep_their_place(tmp_path, make_config):
    """As the missing classes of a winter21 subset; a class of the test split alone is an error."""
    write_shard(tmp_path / "train.tar", samples([0, 3] * 5))
    write_shard(tmp_path / "test.tar", samples([3, 3]))

    assert open_source(f"wds:{tmp_path}", "test", make_config(), 0).num_classes == 4

    with rejects("train.tar", "no split 'test'.*train.:90%"):
        open_source(f"wds:{tmp_path}/train.tar", "test", make_config(), 0)

    write_shard(tmp_path / "test.tar", samples([4]))
    with rejects("", "'train' does not have: 4.*training images"):
        open_source(f"wds:{tmp_path}", "test", make_config(), 0)

    write_shard(tmp_path / "more.tar", samples([0]))
    with rejects("", "1 do not: .*more.tar"):
        open_source(f"wds:{tmp_path}", "train", make_config(), 0)


@pytest.mark.parametrize(
    ("write", "rule"),
    [
        (
            lambda path: write_parquet(path, [0, 1], label="class"),
            "no column of labels.*'class'.*#COLUMN",
        ),
        (lambda path: write_parquet(path, [0, None]), "row 1 has no label"),
        (lambda path: write_parquet(path, [0, 1, -1]), "has the label -1"),
        (
            lambda path: write_parquet(path, [0, 5], names=["cat", "dog"]),
            "not among the 2 classes.*: 5",
        ),
        (lambda path: path.write_bytes(b"PAR1" + b"0" * 99), "no complete parquet file"),
    ],
)
def test_mistakes_in_parquet_are_named(tmp_path, make_config, write, rule):
    write(tmp_path / "a.parquet")
    with rejects(f"{tmp_path}/a.parquet", rule):
        open_source(f"parquet:{tmp_path}/a.parquet", "all", make_config(), 0)


def test_files_of_several_datasets_are_rejected(tmp_path, make_config):
    write_parquet(tmp_path / "train.parquet", [0, 1], names=["cat", "dog"])
    write_parquet(tmp_path / "test.parquet", [0, 1], names=["cat", "emu"])

    with rejects("", "differ.*names of classes.*'dog' and .*'emu'"):
        open_source(f"parquet:{tmp_path}", "train", make_config(), 0)


def test_columns_of_parquet(tmp_path, make_config):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = write_parquet(
        tmp_path / "a.parquet",
        [0, 1, 1, 0],
        fine_label=pa.array(["x", "y", "z", "x"]),
    )

    class_names = open_source(f"parquet:{path}", "all", make_config(), 0).class_names

    assert class_names == ("0", "1")
    assert open_source(f"parquet:{path}#fine_label", "all", make_config(), 0).labels.tolist() == [
        0,
        1,
        2,
        0,
    ]

    features = {"img": {"_type": "Image"}, "coarse": {"names": ["a", "b"], "_type": "ClassLabel"}}
    table = pa.table(
        {"img": pa.array([image(n) for n in range(4)]), "coarse": pa.array([1, 0, 1, 0])}
    )
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(table.replace_schema_metadata(metadata), path)
    source = open_source(f"parquet:{path}", "all", make_config(), 0)

    assert levels(source) == [0, 1, 2, 3]
    assert source.class_names == ("a", "b")

    pq.write_table(table.drop_columns("img"), path)
    with rejects(str(path), r"no column of images.*'coarse' \(int64\)"):
        open_source(f"parquet:{path}", "all", make_config(), 0)


def test_row_groups_are_read_once_and_forgotten(tmp_path, make_config, monkeypatch):
    """In order each is read once; memory holds those that were used last."""
    path = write_parquet(tmp_path / "a.parquet", [0, 1] * 10, group=4)
    reads = []
    monkeypatch.setattr(
        parquet,
        "_read_group",
        lambda *key, read=parquet._read_group: reads.append(key[1]) or read(*key),
    )
    source = open_source(f"parquet:{path}", "all", make_config(), 0)
    reads.clear()
    sizes = [
        sum(len(image(number)) for number in range(first, first + 4)) for first in range(0, 20, 4)
    ]
    stated = [
        parquet._chunk(parquet._now(str(path)), group, "image.bytes").uncompressed
        for group in range(5)
    ]
    monkeypatch.setattr(parquet, "_GROUPS", parquet._Groups(max(sizes) + max(stated)))

    assert levels(source) == list(range(20))
    assert reads == [0, 1, 2, 3, 4]
    assert levels(source)[16:] == [16, 17, 18, 19]
    assert reads[5:] == [0, 1, 2, 3, 4]

    source[12], source[19], source[0]

    assert reads[10:] == [0]

    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 10)
    with rejects(str(path), "row group 0 holds.*row_group_size"):
        open_source(f"parquet:{path}", "all", make_config(), 0)


def test_deep_images_are_noticed(tmp_path, make_config, caplog):
    from tests.data.deep_files import png

    deep = png(np.arange(63, dtype=np.uint16).reshape(7, 9))
    write_shard(tmp_path / "a.tar", [*samples([0, 1]), ("x.png", deep), ("x.cls", b"1")])
    write_parquet(tmp_path / "a.parquet", [0, 1], images=[{"bytes": deep, "path": None}] * 2)
    open_source(f"wds:{tmp_path}", "all", make_config(), 0)
    open_source(f"parquet:{tmp_path}", "all", make_config(), 0)
    one, two = caplog.messages

    assert "1 of 3 checked files have 16 bits" in one
    assert "2 of 2 checked files have 16 bits" in two
