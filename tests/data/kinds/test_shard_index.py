"""Indices of tar shards: which members make a sample, and when an index on disk is used."""

import io
import json
import os
import random
import tarfile

import numpy as np
import pytest

from tests.data.packed_files import image, packed, samples, write_shard
from tests.rejections import rejects
from vit_jax.data.decoding.images import decode
from vit_jax.data.kinds import shard_index
from vit_jax.data.kinds.shard_index import Selection, find_index, parse_selection, read_index
from vit_jax.data.sources import open_source

NUM_DAMAGES = 300
ANY = Selection()


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The user's cache folder, which no test shares."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vit_jax" / "shards"


@pytest.fixture
def made(monkeypatch):
    """The shards that are read from end to end."""
    calls = []

    def read(*arguments, read=read_index):
        calls.append(arguments)
        return read(*arguments)

    monkeypatch.setattr(shard_index, "read_index", read)
    return calls


def labels_of(path, selection=ANY):
    """The labels of a shard, as another process reads them."""
    shard_index._find_valid.cache_clear()
    return find_index(str(path), selection).rows["label"].astype(str).tolist()


def levels(data, make_config):
    source = open_source(data, "all", make_config(), 0)
    return [
        int(decode(source[index].image)[0, 0, 0]) for index in range(len(source))
    ], source.labels.tolist()


# When an index is used.


def test_an_index_is_made_once_for_a_state_of_a_shard(tmp_path, made):
    path = write_shard(tmp_path / "a.tar", samples([0, 1] * 5))

    assert labels_of(path) == labels_of(path) == ["0", "1"] * 5
    assert len(made) == 1

    os.utime(path, ns=(1, 1))

    assert labels_of(path) == ["0", "1"] * 5
    assert len(made) == 2
    assert labels_of(path, Selection(suffixes=("png",))) == ["0", "1"] * 5
    assert len(made) == 3


def test_an_index_that_cannot_be_kept_beside_its_shard_is_in_the_cache(
    tmp_path, made, monkeypatch, cache
):
    path = write_shard(tmp_path / "a.tar", samples([0, 1] * 5))

    def write(place, content, write=shard_index.write_atomically):
        is_beside = place.parent == tmp_path
        write(tmp_path / "none" / "x" if is_beside else place, content)

    monkeypatch.setattr(shard_index, "write_atomically", write)

    assert labels_of(path) == labels_of(path) == ["0", "1"] * 5
    assert len(made) == 1
    assert len(list(cache.iterdir())) == 1
    assert not (tmp_path / "a.tar.index").exists()


def test_a_shard_with_the_same_size_and_time_has_new_labels(tmp_path):
    """The time of the inode differs, also where the members are unchanged."""
    path = write_shard(tmp_path / "a.tar", samples([0, 1] * 5))
    os.utime(path, ns=(1, 1))

    assert labels_of(path) == ["0", "1"] * 5

    write_shard(path, samples([1, 0] * 5))
    os.utime(path, ns=(1, 1))

    assert labels_of(path) == ["1", "0"] * 5


@pytest.mark.parametrize("change", ["labels", "names"])
def test_members_are_compared_where_no_time_changes(tmp_path, monkeypatch, made, change):
    """As on file systems without a time of change of the inode."""
    monkeypatch.setattr(shard_index, "read_file_state", lambda file: (os.stat(file).st_size,))
    path = write_shard(tmp_path / "a.tar", samples([0, 1] * 50))
    labels_of(path)
    content = path.read_bytes()

    if change == "names":
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            entries = [(f"1{one.name[1:]}", archive.extractfile(one).read()) for one in archive]
        new = packed(*entries)
    else:
        new = packed(*samples([1, 0] * 50))

    path.write_bytes(new)

    assert len(new) == len(content)
    assert labels_of(path) == (["1", "0"] * 50 if change == "labels" else ["0", "1"] * 50)
    assert len(made) == 2


def test_a_shard_that_changes_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    path = write_shard(tmp_path / "a.tar", samples([0, 1]))

    def read(file, selection, read=read_index):
        index = read(file, selection)
        write_shard(path, samples([1, 0, 1]))

        return index

    monkeypatch.setattr(shard_index, "read_index", read)
    with rejects(str(path), "changed while it was read"):
        labels_of(path)

    assert not (tmp_path / "a.tar.index").exists()


def test_an_index_of_an_earlier_form_is_made_again(tmp_path, made, caplog):
    path = write_shard(tmp_path / "a.tar", samples([0, 1]))
    status = path.stat()
    about = {
        "form": 1,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "label": "",
    }
    rows = np.zeros(2, shard_index._row_type(9, 1))
    (tmp_path / "a.tar.index").write_bytes(
        json.dumps({"about": about, "letters": [9, 1]}).encode() + rows.tobytes()
    )

    assert labels_of(path) == labels_of(path) == ["0", "1"]
    assert len(made) == 1
    assert caplog.messages == []


def test_damaged_indices_are_made_again(tmp_path, caplog, made):
    """Flipped bits, records that are missing or twice, cut files, other bytes: never another label."""
    path = write_shard(tmp_path / "a.tar", samples([0, 1] * 5))
    expected = ["0", "1"] * 5
    labels_of(path)
    place = tmp_path / "a.tar.index"
    whole = place.read_bytes()
    record = read_index(str(path), ANY)[0].rows.dtype.itemsize

    for seed in range(NUM_DAMAGES):
        content = damage(whole, record, random.Random(seed))
        place.write_bytes(content)
        caplog.clear()

        assert labels_of(path) == expected, seed
        assert len(made) == 2 + seed, seed
        assert all(len(line.splitlines()) == 1 and str(place) in line for line in caplog.messages)
        assert place.read_bytes() == whole


def damage(whole, record, random):
    kind = random.choice(["bit", "bytes", "cut", "less", "twice", "insert"])
    at = random.randrange(len(whole))
    content = bytearray(whole)

    if kind == "bit":
        content[at] ^= 1 << random.randrange(8)
    elif kind == "bytes":
        content[at : at + 8] = bytes(random.randrange(256) for _ in range(8))
    elif kind == "cut":
        del content[at:]
    elif kind == "less":
        del content[-record:]
    elif kind == "twice":
        content += content[-record:]
    else:
        content[at:at] = b"\n"

    return bytes(content) if content != whole else bytes(content) + b"x"


# Samples.


def test_members_of_a_sample_may_be_apart(tmp_path, make_config):
    """In any order the records and labels are those of the sorted archive; the order is that of the first members."""
    members = list(samples([0, 1] * 5))
    expected = levels(f"wds:{write_shard(tmp_path / 'sorted.tar', members)}", make_config)
    images = members[1::2]
    labels = members[::2]

    for number, order in enumerate(([*images, *labels], [*labels, *reversed(images)])):
        path = write_shard(tmp_path / f"{number}.tar", order)
        assert levels(f"wds:{path}", make_config) == expected

    random.Random(0).shuffle(members)
    found = levels(f"wds:{write_shard(tmp_path / 'mixed.tar', members)}", make_config)

    assert sorted(zip(*found, strict=True)) == sorted(zip(*expected, strict=True))


def with_masks(num):
    """Samples of an image of level n and of one of level 100 + n, named .seg.png, which comes first."""
    for number in range(num):
        yield f"{number:03}.seg.png", image(100 + number)
        yield f"{number:03}.cls", b"%d" % (number % 2)
        yield f"{number:03}.PNG", image(number)


def test_one_of_several_images_is_read(tmp_path, make_config, caplog):
    data = f"wds:{write_shard(tmp_path / 'a.tar', with_masks(4))}"

    assert levels(data, make_config) == ([0, 1, 2, 3], [0, 1, 0, 1])

    (line,) = {*caplog.messages}

    assert (
        "4 samples have several images: the first of .png is read, and .seg.png are skipped" in line
    )

    caplog.clear()

    assert levels(f"{data}#.seg.png", make_config)[0] == [100, 101, 102, 103]

    with rejects(str(tmp_path / "a.tar"), "no images, named .left.png"):
        open_source(f"{data}#.left.png", "all", make_config(), 0)


def test_the_order_of_suffixes(tmp_path):
    names = ["b.jpg", "jpg", "PNG", "webp", "jpeg", "a.png", "a.b.jpg"]
    path = write_shard(
        tmp_path / "a.tar",
        [("x.cls", b"0"), *((f"x.{name}", image(0)) for name in names)],
    )
    order = ["x.jpg", "x.jpeg", "x.PNG", "x.webp", "x.b.jpg", "x.a.png", "x.a.b.jpg"]

    for name in order:
        assert read_index(str(path), ANY)[0].rows["name"].tolist() == [name.encode()]

        names.remove(name[2:])
        write_shard(path, [("x.cls", b"0"), *((f"x.{name}", image(0)) for name in names)])


def test_a_mask_without_its_image_is_an_error(tmp_path):
    path = write_shard(
        tmp_path / "a.tar",
        [*with_masks(2), ("z.seg.png", image(0)), ("z.cls", b"0")],
    )
    with rejects(str(path), r"'z\.seg\.png' is the only image.*#\.seg\.png"):
        read_index(str(path), ANY)

    rows = read_index(str(path), Selection(suffixes=("png", "seg.png")))[0].rows

    assert rows["name"].tolist() == [b"000.PNG", b"001.PNG", b"z.seg.png"]


def test_labels_without_an_image_are_reported(tmp_path, make_config, caplog):
    path = write_shard(
        tmp_path / "a.tar",
        [*samples([0, 1]), ("lost.cls", b"1"), ("._00000.png", b"macOS")],
    )
    for _ in range(2):  # the second time from the index
        caplog.clear()
        shard_index._find_valid.cache_clear()
        shard_index.warn_once.cache_clear()

        assert levels(f"wds:{path}", make_config) == ([0, 1], [0, 1])

        (line,) = {*caplog.messages}

        assert "1 labels have no image and are skipped: lost.cls" in line


def test_several_labels_of_an_image(tmp_path):
    """`x.cls` rather than `x.more.cls`; without it the sample has no single label."""
    path = write_shard(
        tmp_path / "a.tar",
        [("x.a.cls", b"1"), ("x.png", image(0)), ("x.cls", b"0")],
    )

    assert labels_of(path) == ["0"]

    write_shard(
        path,
        [("x.v1.cls", b"1"), ("x.v1.png", image(0)), ("x.v2.cls", b"0"), ("x.v2.png", image(0))],
    )
    with rejects(
        str(path),
        r"several labels: x\.v1\.cls, x\.v2\.cls; names are equal up to the first dot",
    ):
        labels_of(path)

    write_shard(path, [("x.v1.json", b"{}"), ("x.v1.png", image(0)), ("x.v1.cls", b"cat")])

    assert labels_of(path) == ["cat"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Selection()),
        ("id", Selection("id")),
        (".seg.PNG", Selection("", ("seg.png",))),
        ("id#.png#.tif", Selection("id", ("png", "tif"))),
    ],
)
def test_selections(text, expected):
    assert parse_selection(text) == expected


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("a#b", "one key"),
        (".cls", "no suffix of images"),
        (".", "no suffix"),
    ],
)
def test_selections_that_are_none(text, rule):
    with rejects(f"#{text}", rule):
        parse_selection(text)
