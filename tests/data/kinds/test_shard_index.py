"""Indices of tar shards: members of a sample, and the validity of an index on disk."""

import json
import os
import random
import tarfile

import numpy as np
import pytest

from tests.data.packed_files import image, packed, read_levels, samples, write_shard
from tests.rejections import rejects
from vit_jax.data.kinds import shard_index
from vit_jax.data.kinds.shard_index import Selection, find_index, parse_selection, read_index

NUM_DAMAGES = 300
ANY = Selection()


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The user's cache folder, which no test shares."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vit_jax" / "shards"


@pytest.fixture
def reads(monkeypatch):
    """The shards that are read from end to end."""
    calls = []

    def record_read(*arguments):
        calls.append(arguments)
        return read_index(*arguments)

    monkeypatch.setattr(shard_index, "read_index", record_read)
    return calls


def find_labels(path, selection=ANY):
    """Return the labels of a shard, as another process reads them."""
    shard_index._find_cached_index.cache_clear()
    rows = find_index(str(path), selection).rows
    return rows["label"].astype(str).tolist()


def read_images(data, open_data):
    """Return the grey levels and the labels of all images."""
    source = open_data(data)
    return read_levels(source), source.labels.tolist()


# When an index is used.


ALTERNATING = ["0", "1"] * 5


@pytest.fixture
def shard(tmp_path):
    """A shard of ten images, of two classes in turn."""
    return write_shard(tmp_path / "a.tar", samples([0, 1] * 5))


def test_an_index_is_made_once_for_a_state_of_a_shard(shard, reads):
    """A selection of suffixes has its index."""
    assert find_labels(shard) == ALTERNATING
    assert find_labels(shard) == ALTERNATING
    assert len(reads) == 1

    os.utime(shard, ns=(1, 1))
    assert find_labels(shard) == ALTERNATING
    assert len(reads) == 2

    of_png = Selection(suffixes=("png",))
    assert find_labels(shard, of_png) == ALTERNATING
    assert len(reads) == 3


def test_an_index_that_cannot_be_kept_beside_its_shard_is_in_the_cache(
    shard,
    tmp_path,
    reads,
    monkeypatch,
    cache,
):
    write = shard_index.write_atomically

    def fail_beside_shard(place, content):
        is_beside = place.parent == tmp_path
        write(tmp_path / "none" / "x" if is_beside else place, content)

    monkeypatch.setattr(shard_index, "write_atomically", fail_beside_shard)

    assert find_labels(shard) == ALTERNATING
    assert find_labels(shard) == ALTERNATING
    assert len(reads) == 1
    assert len(list(cache.iterdir())) == 1
    assert not (tmp_path / "a.tar.index").exists()


def test_a_shard_with_the_same_size_and_time_has_new_labels(shard):
    """The time of the inode differs, also where the members are unchanged."""
    os.utime(shard, ns=(1, 1))

    assert find_labels(shard) == ALTERNATING

    write_shard(shard, samples([1, 0] * 5))
    os.utime(shard, ns=(1, 1))

    assert find_labels(shard) == ["1", "0"] * 5


@pytest.fixture
def without_times(monkeypatch):
    """A file system without a time of change of the inode: the state of a file is its size."""
    monkeypatch.setattr(
        shard_index,
        "read_file_state",
        lambda file: (os.stat(file).st_size,),
    )


@pytest.mark.usefixtures("without_times")
def test_labels_are_compared_where_no_time_changes(tmp_path, reads):
    path = write_shard(tmp_path / "a.tar", samples([0, 1] * 50))
    find_labels(path)
    content = packed(*samples([1, 0] * 50))

    assert len(content) == path.stat().st_size
    path.write_bytes(content)

    assert find_labels(path) == ["1", "0"] * 50
    assert len(reads) == 2


@pytest.mark.usefixtures("without_times")
def test_names_are_compared_where_no_time_changes(tmp_path, reads):
    path = write_shard(tmp_path / "a.tar", samples([0, 1] * 50))
    find_labels(path)
    entries = []
    with tarfile.open(path) as archive:
        for member in archive:
            entries.append((f"1{member.name[1:]}", archive.extractfile(member).read()))
    content = packed(*entries)

    assert len(content) == path.stat().st_size
    path.write_bytes(content)

    assert find_labels(path) == ["0", "1"] * 50
    assert len(reads) == 2


def test_a_shard_that_changes_while_it_is_read_is_an_error(
    shard,
    tmp_path,
    monkeypatch,
):
    def read_and_change(file, selection):
        index = read_index(file, selection)
        write_shard(shard, samples([1, 0, 1]))
        return index

    monkeypatch.setattr(shard_index, "read_index", read_and_change)

    with rejects(str(shard), "changed while it was read"):
        find_labels(shard)

    assert not (tmp_path / "a.tar.index").exists()


def test_an_index_of_an_earlier_form_is_made_again(tmp_path, reads, caplog):
    path = write_shard(tmp_path / "a.tar", samples([0, 1]))
    status = path.stat()
    about = {
        "form": 1,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "label": "",
    }
    header = json.dumps({"about": about, "letters": [9, 1]})
    rows = np.zeros(2, shard_index._build_row_type(9, 1))
    content = header.encode() + rows.tobytes()
    (tmp_path / "a.tar.index").write_bytes(content)

    assert find_labels(path) == ["0", "1"]
    assert find_labels(path) == ["0", "1"]
    assert len(reads) == 1
    assert caplog.messages == []


def test_damaged_indices_are_made_again(shard, tmp_path, caplog, reads):
    """No damage gives another label: flipped bits, missing or repeated records, cut files."""
    find_labels(shard)
    place = tmp_path / "a.tar.index"
    whole = place.read_bytes()
    record_bytes = read_index(str(shard), ANY)[0].rows.dtype.itemsize

    for seed in range(NUM_DAMAGES):
        place.write_bytes(damage(whole, record_bytes, random.Random(seed)))
        caplog.clear()

        assert find_labels(shard) == ALTERNATING, seed
        assert len(reads) == 1 + 1 + seed, seed
        assert place.read_bytes() == whole
        for message in caplog.messages:
            assert len(message.splitlines()) == 1
            assert str(place) in message


def damage(whole, record_bytes, random):
    """Return the content of a file after one random damage."""
    kind = random.choice(["bit", "bytes", "cut", "less", "twice", "insert"])
    place = random.randrange(len(whole))
    content = bytearray(whole)

    if kind == "bit":
        content[place] ^= 1 << random.randrange(8)
    elif kind == "bytes":
        content[place : place + 8] = bytes(random.randrange(256) for _ in range(8))
    elif kind == "cut":
        del content[place:]
    elif kind == "less":
        del content[-record_bytes:]
    elif kind == "twice":
        content += content[-record_bytes:]
    else:
        content[place:place] = b"\n"

    if content == whole:
        content += b"x"
    return bytes(content)


# Samples.


@pytest.fixture
def read_shard(tmp_path, open_data):
    """Return a function that writes a shard, and returns its levels and labels."""

    def write_and_read(name, members):
        path = write_shard(tmp_path / name, members)
        return read_images(f"wds:{path}", open_data)

    return write_and_read


def test_members_of_a_sample_may_be_apart(read_shard):
    """Records and labels are those of the sorted archive; first members give the order."""
    members = list(samples([0, 1] * 5))
    labels = members[::2]
    images = members[1::2]
    shuffled = list(members)
    random.Random(0).shuffle(shuffled)

    expected = read_shard("sorted.tar", members)
    images_first = read_shard("0.tar", [*images, *labels])
    labels_first = read_shard("1.tar", [*labels, *reversed(images)])
    mixed = read_shard("mixed.tar", shuffled)

    assert images_first == expected
    assert labels_first == expected
    pairs = zip(*mixed, strict=True)
    expected_pairs = zip(*expected, strict=True)
    assert sorted(pairs) == sorted(expected_pairs)


def make_masked_samples(num):
    """Yield samples of two images: of level n, and before it of level 100 + n, named .seg.png."""
    for number in range(num):
        yield f"{number:03}.seg.png", image(100 + number)
        yield f"{number:03}.cls", b"%d" % (number % 2)
        yield f"{number:03}.PNG", image(number)


def test_one_of_several_images_is_read(read_shard, caplog):
    levels, labels = read_shard("a.tar", make_masked_samples(4))

    assert levels == [0, 1, 2, 3]
    assert labels == [0, 1, 0, 1]
    (line,) = set(caplog.messages)
    message = "4 samples have several images: the first of .png is read, and .seg.png are skipped"
    assert message in line


def test_a_suffix_of_images_can_be_chosen(tmp_path, open_data):
    path = write_shard(tmp_path / "a.tar", make_masked_samples(4))

    source = open_data(f"wds:{path}#.seg.png")

    assert read_levels(source) == [100, 101, 102, 103]
    with rejects(str(path), "no images, named .left.png"):
        open_data(f"wds:{path}#.left.png")


def write_one_sample(path, names):
    members = [("x.cls", b"0")]
    for name in names:
        members.append((f"x.{name}", image(0)))
    return write_shard(path, members)


def test_the_order_of_suffixes(tmp_path):
    """The first image is removed again and again."""
    in_order = ["jpg", "jpeg", "PNG", "webp", "b.jpg", "a.png", "a.b.jpg"]
    names = sorted(in_order)

    for expected in in_order:
        path = write_one_sample(tmp_path / "a.tar", names)

        index, *_ = read_index(str(path), ANY)

        (name,) = index.rows["name"]
        assert name.decode() == f"x.{expected}"
        names.remove(expected)


def test_a_mask_without_its_image_is_an_error(tmp_path):
    members = [
        *make_masked_samples(2),
        ("z.seg.png", image(0)),
        ("z.cls", b"0"),
    ]
    path = write_shard(tmp_path / "a.tar", members)

    with rejects(str(path), r"'z\.seg\.png' is the only image.*#\.seg\.png"):
        read_index(str(path), ANY)

    both = Selection(suffixes=("png", "seg.png"))
    index, *_ = read_index(str(path), both)

    assert index.rows["name"].tolist() == [
        b"000.PNG",
        b"001.PNG",
        b"z.seg.png",
    ]


def test_labels_without_an_image_are_reported(tmp_path, open_data, caplog):
    """The report is the same when the index is read again."""
    members = [
        *samples([0, 1]),
        ("lost.cls", b"1"),
        ("._00000.png", b"macOS"),
    ]
    path = write_shard(tmp_path / "a.tar", members)

    for _ in range(2):
        caplog.clear()
        shard_index._find_cached_index.cache_clear()
        shard_index.warn_once.cache_clear()

        levels, labels = read_images(f"wds:{path}", open_data)

        assert levels == [0, 1]
        assert labels == [0, 1]
        (line,) = set(caplog.messages)
        assert "1 labels have no image and are skipped: lost.cls" in line


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        (
            [("x.a.cls", b"1"), ("x.png", image(0)), ("x.cls", b"0")],
            ["0"],
        ),
        (
            [("x.v1.json", b"{}"), ("x.v1.png", image(0)), ("x.v1.cls", b"cat")],
            ["cat"],
        ),
    ],
    ids=["shortest suffix", "cls before json"],
)
def test_several_labels_of_an_image(tmp_path, members, expected):
    path = write_shard(tmp_path / "a.tar", members)

    assert find_labels(path) == expected


def test_a_sample_without_a_single_label(tmp_path):
    members = [
        ("x.v1.cls", b"1"),
        ("x.v1.png", image(0)),
        ("x.v2.cls", b"0"),
        ("x.v2.png", image(0)),
    ]
    path = write_shard(tmp_path / "a.tar", members)
    rule = r"several labels: x\.v1\.cls, x\.v2\.cls; names are equal up to the first dot"

    with rejects(str(path), rule):
        find_labels(path)


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
