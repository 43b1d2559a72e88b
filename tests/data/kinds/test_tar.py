"""Members of tar archives, also of hostile ones, and the labelled images among them."""

import gzip
import io
import itertools
import tarfile

import pytest

from tests.data.packed_files import packed, special
from tests.rejections import rejects
from vit_jax.data.kinds import tar


def read_members(content, size=None):
    """Return names, contents and problems of the members."""
    stream = tar.Stream(io.BytesIO(content), "a.tar", size)
    found = []
    for member in tar.members(stream):
        stored = stream.read(member.size)
        found.append((member.name, stored, member.problem))
    return found


@pytest.mark.parametrize(
    "layout",
    [
        tarfile.USTAR_FORMAT,
        tarfile.GNU_FORMAT,
        tarfile.PAX_FORMAT,
    ],
)
def test_members_of_every_layout(layout):
    """Names have up to 250 bytes, and sizes are around a block; folders are skipped."""
    names = ["a.jpg", f"{'d' * 90}/{'e' * 90}.jpg"]
    if layout != tarfile.USTAR_FORMAT:
        names.append("ü" * 110 + ".jpg")
    sizes = (0, 1, 511, 512, 513)
    entries = []
    for name, size in itertools.product(names, sizes):
        entries.append((name, bytes(size)))
    content = packed(
        special("folder", tarfile.DIRTYPE),
        *entries,
        format=layout,
    )

    expected = [(name, stored, "") for name, stored in entries]
    assert read_members(content) == expected
    assert read_members(content, len(content)) == expected

    without_reads = tar.Stream(
        io.BytesIO(content),
        "a.tar",
        len(content),
    )
    members = tar.members(without_reads)
    for member, (_, stored) in zip(members, entries, strict=True):
        end = member.offset + member.size
        assert content[member.offset : end] == stored


def test_gzip_pipes_and_files_give_the_same(tmp_path, monkeypatch):
    content = packed(("a.jpg", b"x" * 3000), ("b.jpg", b"y"))
    file = tmp_path / "a"

    for stored in (content, gzip.compress(content)):
        file.write_bytes(stored)
        pipe = io.BufferedReader(io.BytesIO(stored))
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(pipe))

        for path in (str(file), "-"):
            with tar.open_tar(path) as stream:
                first, second = tar.members(stream)
            assert (first.name, first.size) == ("a.jpg", 3000)
            assert (second.name, second.size) == ("b.jpg", 1)


def test_members_that_must_not_be_read():
    content = packed(
        ("/etc/a.jpg", b"x"),
        ("../a.jpg", b"x"),
        ("a/../../b.jpg", b"x"),
        special("s.jpg", tarfile.SYMTYPE, "/etc/passwd"),
        special("h.jpg", tarfile.LNKTYPE, "/etc/passwd"),
        special("c.jpg", tarfile.CHRTYPE),
        special("f.jpg", tarfile.FIFOTYPE),
        ("y" * 5000, b"x"),
        ("good.jpg", b"x"),
    )

    *bad, good = read_members(content)

    name, _, problem = good
    assert name == "good.jpg"
    assert problem == ""
    assert len(bad) == 8
    for name, _, problem in bad:
        assert problem != "", name


def replace_bytes(content, place, new):
    changed = bytearray(content)
    changed[place : place + len(new)] = new
    return bytes(changed)


def set_checksum(block):
    block = replace_bytes(block, 148, b" " * 8)
    return replace_bytes(block, 148, b"%06o\0 " % sum(block))


TWO = packed(("a.jpg", b"x" * 1000), ("b.jpg", b"y" * 1000))
HEADER = TWO[:512]
REST = TWO[512:]


def set_size(header, size):
    """Return a header with another size, in 12 bytes, and its checksum."""
    changed = replace_bytes(header, 124, size)
    return set_checksum(changed)


TWO_GIB = b"%011o\0" % 2**31
HUGE = set_size(HEADER, TWO_GIB) + REST
NEGATIVE = set_size(HEADER, b"\xff" * 12) + REST
LONG_NAME = replace_bytes(
    HEADER,
    156,
    tarfile.GNUTYPE_LONGNAME,
)
HUGE_NAME = set_size(LONG_NAME, TWO_GIB) + REST


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "is no tar archive"),
        (b"n01\nn02\n", "is no tar archive .truncated header"),
        (b"rubbish" * 100, "is no tar archive"),
        (TWO[:-9216], "ends at byte"),  # without the end
        (TWO[:2000], "ends at byte"),
        (TWO[:700], "ends at byte"),
        # tarfile takes this for the end.
        (replace_bytes(TWO, 1536, b"rubbish"), "header at byte 1,536 is damaged"),
        (HUGE, "ends at byte"),
        (NEGATIVE, "negative"),
        (HUGE_NAME, "header at byte 0 has 2,147,483,648"),
        (TWO + TWO, "other data behind its end"),
        (packed(special("s", tarfile.GNUTYPE_SPARSE)), "sparse"),
    ],
)
def test_damaged_archives(content, rule):
    for size in (None, len(content)):
        with rejects("a.tar", rule):
            read_small_members(content, size)


def read_small_members(content, size):
    """Read as a reader that rejects large members; `tar` itself must not read them."""
    stream = tar.Stream(io.BytesIO(content), "a.tar", size)
    for member in tar.members(stream):
        if member.size < 2**20:
            stream.read(member.size)


@pytest.mark.parametrize(
    "size",
    [
        b"-1",
        b"1e9",
        b"9" * 19,
        b"",
    ],
)
def test_sizes_of_extended_headers_that_are_no_numbers(size):
    info = tarfile.TarInfo("a.jpg")
    info.pax_headers = {"size": size.decode(), "comment": "x"}

    with rejects("a.tar", "no number"):
        read_members(packed(info, format=tarfile.PAX_FORMAT))


def test_a_damaged_extended_header():
    info = tarfile.TarInfo("a.jpg")
    info.pax_headers = {"comment": "x"}
    content = packed(info, format=tarfile.PAX_FORMAT)
    damaged = content.replace(b"13 comment", b"99 comment")

    with rejects("a.tar", "extended header at byte 0 is damaged"):
        read_members(damaged)


def list_members(path):
    with tar.open_tar(str(path)) as stream:
        return [member.name for member in tar.members(stream)]


def test_damaged_gzip(tmp_path):
    path = tmp_path / "a.tar.gz"
    whole = gzip.compress(TWO)

    path.write_bytes(whole[:-20])
    with rejects(str(path), "cannot be read after byte"):
        list_members(path)

    path.write_bytes(replace_bytes(whole, 30, b"\xff\xff\xff\xff"))
    with rejects(str(path)):
        list_members(path)


def test_a_gzip_bomb(tmp_path, monkeypatch):
    monkeypatch.setattr(tar, "_FREE_BYTES", 2**16)
    path = tmp_path / "a.tar.gz"
    archive = packed(("a.jpg", bytes(2**22)))
    path.write_bytes(gzip.compress(archive))

    with rejects(str(path), "compressed bytes give more"):
        list_members(path)


def list_samples(*names):
    """Return the samples of members whose contents are their names."""
    return list(tar.samples((name, name) for name in names))


def test_samples_of_a_shard():
    """Labels are before and after their image, of one extension or two; others are ignored."""
    found = list_samples(
        "s/0.cls",
        "s/0.jpg",
        "s/1.jpg",
        "s/1.json",
        "2.webp",
        "2.cls",
        "2.json",
        "2.txt",
        "3.cls",
        "x/4.png",
    )

    labels = {sample.name: sorted(sample.labels.values()) for sample in found}
    assert labels == {
        "s/0.jpg": ["s/0.cls"],
        "s/1.jpg": ["s/1.json"],
        "2.webp": ["2.cls", "2.json"],
        "x/4.png": [],
    }


def test_names_of_samples_with_several_dots():
    found = list_samples("a.jpg", "a.png", "a.b.JPEG", ".jpg")

    names = [sample.name for sample in found]
    assert names == ["a.jpg", "a.png", "a.b.JPEG"]


@pytest.mark.parametrize(
    "names",
    [
        ["x.seg.png", "x.cls", "x.png", "x.jpg"],
        ["x.jpg", "x.png", "x.seg.png", "x.cls"],
    ],
    ids=["label in the middle", "label at the end"],
)
def test_one_image_of_a_sample_with_labels(names):
    """The first image by the order of suffixes is read."""
    (sample,) = tar.samples((name, name.upper()) for name in names)

    assert sample.name == "x.jpg"
    assert sample.image == "X.JPG"
    assert dict(sample.labels) == {"cls": "X.CLS"}
    assert dict(sample.skipped) == {
        "x.png": "X.PNG",
        "x.seg.png": "X.SEG.PNG",
    }


def test_all_images_of_a_sample_without_labels():
    names = ["d/x.1.jpg", "d/x.2.jpg", "d/x.3.jpg"]

    found = list_samples(*names)

    for sample, name in zip(found, names, strict=True):
        assert sample.name == name
        assert sample.labels == {}


def test_images_without_a_label_do_not_fill_the_memory(monkeypatch):
    """At most three images wait for a label."""
    monkeypatch.setattr(tar, "_MOST_PENDING_BYTES", 10)
    num_read = 0

    def iterate_images():
        nonlocal num_read
        for number in range(9):
            num_read += 1
            yield f"x.{number}.jpg", b"1234"

    for sample in tar.samples(iterate_images(), size_of=len):
        number = int(sample.name[2])
        assert num_read <= 3 * (1 + number // 3)


def test_too_many_images_before_a_label(monkeypatch):
    monkeypatch.setattr(tar, "_MOST_PENDING_BYTES", 10)
    names = ("x.1.jpg", "x.2.jpg", "x.3.jpg", "x.cls")
    members = [(name, b"1234") for name in names]

    with rejects("x.cls", "too many images"):
        list(tar.samples(members, size_of=len))


def see_all(names):
    """Show names to a check of the order of members."""
    order = tar.SampleOrder("a.tar")
    for name in names.split():
        if not name.endswith(".txt"):
            order.see(name)
    order.end()


@pytest.mark.parametrize(
    "names",
    [
        "a.jpg a.cls b.cls b.txt b.jpg",
        "n1/a.jpg n1/b.jpg n2/a.jpg meta.json",
    ],
)
def test_members_that_are_together(names):
    see_all(names)


@pytest.mark.parametrize(
    ("names", "sample"),
    [
        ("a.jpg b.jpg a.cls b.cls", "'a'"),
        ("a.json b.json b.jpg a.jpg", "'a'"),
        ("d/a.jpg d/b.jpg d/b.cls d/a.json", "'d/a'"),
    ],
)
def test_members_that_are_apart(names, sample):
    with rejects("a.tar", f"image and label of {sample} are apart.*--sort=name"):
        see_all(names)


def test_keys_of_incomplete_samples_are_forgotten(monkeypatch):
    monkeypatch.setattr(tar, "_MOST_KEYS", 3)
    order = tar.SampleOrder("a.tar")

    for number in range(9):
        order.see(f"{number}.jpg")
        assert len(order._incomplete["image"]) <= 3

    order.see("0.cls")
    order.see("8.cls")
    with rejects("a.tar", "image and label of '8' are apart"):
        order.see("x.jpg")


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"cls": b"7\n"}, 7),
        ({"cls": b"n01440764"}, "n01440764"),
        ({"cls": b"7", "json": b'{"label": 8}'}, 7),
        ({"json": b'{"label": 8, "class_id": "n01440764"}'}, "n01440764"),
        ({"json": b'{"label": "8"}'}, 8),
    ],
)
def test_labels(labels, expected):
    assert tar.label_of(labels) == expected


@pytest.mark.parametrize(
    "labels",
    [
        {"cls": b""},
        {"cls": b" "},
        {"cls": b"9" * 30},
        {"cls": b"1048576"},
        {"json": b""},
        {"json": b"7"},
        {"json": b"{}"},
        {"json": b"[" * 9999},
        {"json": b'{"label": -1}'},
        {"json": b'{"label": true}'},
    ],
)
def test_labels_that_are_none(labels):
    with pytest.raises(ValueError, match=r"class|JSON|levels"):
        tar.label_of(labels)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.JPEG", b"\xff\xd8\xff\xe0", False),
        ("a.JPEG", b"\x89PNG\r\n\x1a\n", True),
        ("a.JPEG", b"RIFF\0\0\0\0WEBP", True),
        ("a.png", b"\x89PNG\r\n\x1a\n", False),
        ("a.webp", b"RIFF\0\0\0\0WEBP", False),
    ],
)
def test_names_of_another_format(name, content, expected):
    assert tar.is_mislabelled(name, content) is expected
