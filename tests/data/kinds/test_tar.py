"""Members of tar archives, also of hostile ones, and the labelled images among them."""

import gzip
import io
import itertools
import tarfile

import pytest

from tests.data.packed_files import packed, special
from tests.rejections import rejects
from vit_jax.data.kinds import tar


def read(content, size=None):
    """Names, contents and problems of the members."""
    stream = tar.Stream(io.BytesIO(content), "a.tar", size)
    return [
        (member.name, stream.read(member.size), member.problem) for member in tar.members(stream)
    ]


@pytest.mark.parametrize("layout", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_of_every_layout(layout):
    """Names up to 250 bytes; folders are skipped; sizes around a block."""
    names = ["a.jpg", f"{'d' * 90}/{'e' * 90}.jpg"] + ["ü" * 110 + ".jpg"] * (
        layout != tarfile.USTAR_FORMAT
    )
    entries = [
        (name, bytes(size)) for name, size in itertools.product(names, (0, 1, 511, 512, 513))
    ]
    content = packed(special("folder", tarfile.DIRTYPE), *entries, format=layout)

    assert read(content) == read(content, len(content)) == [(*entry, "") for entry in entries]

    stream = tar.Stream(io.BytesIO(content), "a.tar", len(content))
    for member, (_, stored) in zip(tar.members(stream), entries, strict=True):
        assert content[member.offset :][: member.size] == stored  # and nothing was read


def test_gzip_pipes_and_files_give_the_same(tmp_path, monkeypatch):
    content = packed(("a.jpg", b"x" * 3000), ("b.jpg", b"y"))
    expected = [("a.jpg", 3000), ("b.jpg", 1)]

    for stored in (content, gzip.compress(content)):
        (tmp_path / "a").write_bytes(stored)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(stored))))

        for path in (str(tmp_path / "a"), "-"):
            with tar.open_tar(path) as stream:
                assert [(member.name, member.size) for member in tar.members(stream)] == expected


def test_members_that_must_not_be_read():
    unsafe = ("/etc/a.jpg", "../a.jpg", "a/../../b.jpg")
    links = [
        special("s.jpg", tarfile.SYMTYPE, "/etc/passwd"),
        special("h.jpg", tarfile.LNKTYPE, "/etc/passwd"),
    ]
    devices = [special("c.jpg", tarfile.CHRTYPE), special("f.jpg", tarfile.FIFOTYPE)]
    content = packed(
        *((name, b"x") for name in unsafe),
        *links,
        *devices,
        ("y" * 5000, b"x"),
        ("good.jpg", b"x"),
    )
    found = {name: problem for name, _, problem in read(content)}

    assert found.pop("good.jpg") == ""
    assert len(found) == 8
    assert all(found.values())


def damaged(content, at, new):
    return content[:at] + new + content[at + len(new) :]


def with_checksum(block):
    block = damaged(block, 148, b" " * 8)
    return damaged(block, 148, b"%06o\0 " % sum(block))


TWO = packed(("a.jpg", b"x" * 1000), ("b.jpg", b"y" * 1000))
SIZE = 124  # the place of the size in a header
HUGE = with_checksum(damaged(TWO[:512], SIZE, b"%011o\0" % 2**31)) + TWO[512:]
LONG = bytearray(TWO[:512])
LONG[156:157] = tarfile.GNUTYPE_LONGNAME


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "is no tar archive"),
        (b"n01\nn02\n", "is no tar archive .truncated header"),
        (b"rubbish" * 100, "is no tar archive"),
        (TWO[:-9216], "ends at byte"),  # without the end
        (TWO[:2000], "ends at byte"),
        (TWO[:700], "ends at byte"),
        (damaged(TWO, 1536, b"rubbish"), "header at byte 1,536 is damaged"),  # tarfile: the end
        (HUGE, "ends at byte"),
        (with_checksum(damaged(TWO[:512], SIZE, b"\xff" * 12)) + TWO[512:], "negative"),
        (
            with_checksum(damaged(bytes(LONG), SIZE, b"%011o\0" % 2**31)) + TWO[512:],
            "header at byte 0 has 2,147,483,648",
        ),
        (TWO + TWO, "other data behind its end"),
        (packed(special("s", tarfile.GNUTYPE_SPARSE)), "sparse"),
    ],
)
def test_damaged_archives(content, rule):
    for size in (None, len(content)):
        with rejects("a.tar", rule):
            read_lazily(content, size)


def read_lazily(content, size):
    """As a reader that rejects large members; `tar` itself must not read them."""
    stream = tar.Stream(io.BytesIO(content), "a.tar", size)
    return [
        member for member in tar.members(stream) if member.size < 2**20 and stream.read(member.size)
    ]


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
        read(packed(info, format=tarfile.PAX_FORMAT))


def test_a_damaged_extended_header():
    info = tarfile.TarInfo("a.jpg")
    info.pax_headers = {"comment": "x"}
    content = packed(info, format=tarfile.PAX_FORMAT)

    with rejects("a.tar", "extended header at byte 0 is damaged"):
        read(content.replace(b"13 comment", b"99 comment"))


def test_damaged_gzip_and_bombs(tmp_path, monkeypatch):
    path = tmp_path / "a.tar.gz"
    whole = gzip.compress(TWO)

    def names():
        with tar.open_tar(str(path)) as stream:
            return [member.name for member in tar.members(stream)]

    path.write_bytes(whole[:-20])
    with rejects(str(path), "cannot be read after byte"):
        names()

    path.write_bytes(damaged(whole, 30, b"\xff\xff\xff\xff"))
    with rejects(str(path)):
        names()

    monkeypatch.setattr(tar, "_FREE_BYTES", 2**16)
    path.write_bytes(gzip.compress(packed(("a.jpg", bytes(2**22)))))

    with rejects(str(path), "compressed bytes give more"):
        names()


def test_samples_of_a_shard():
    """Labels before and after their image, of one extension or two; names with several dots; other files."""
    names = [
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
    ]
    found = list(tar.samples((name, name) for name in names))

    assert [sample.name for sample in found] == ["s/0.jpg", "s/1.jpg", "2.webp", "x/4.png"]
    assert [sorted(sample.labels.values()) for sample in found] == [
        ["s/0.cls"],
        ["s/1.json"],
        ["2.cls", "2.json"],
        [],
    ]
    assert [
        sample.name
        for sample in tar.samples((name, 0) for name in ("a.jpg", "a.png", "a.b.JPEG", ".jpg"))
    ] == [
        "a.jpg",
        "a.png",
        "a.b.JPEG",
    ]


def test_one_image_of_a_sample_with_labels():
    """The first by the order of suffixes, wherever the label is; without labels all images."""
    for names in (
        ["x.seg.png", "x.cls", "x.png", "x.jpg"],
        ["x.jpg", "x.png", "x.seg.png", "x.cls"],
    ):
        (sample,) = tar.samples((name, name.upper()) for name in names)

        assert sample.name == "x.jpg"
        assert sample.image == "X.JPG"
        assert dict(sample.labels) == {"cls": "X.CLS"}
        assert {*sample.skipped} == {("x.png", "X.PNG"), ("x.seg.png", "X.SEG.PNG")}

    found = list(tar.samples((name, 0) for name in ("d/x.1.jpg", "d/x.2.jpg", "d/x.3.jpg")))

    assert [(sample.name, sample.labels) for sample in found] == [
        (f"d/x.{number}.jpg", {}) for number in (1, 2, 3)
    ]


def test_images_without_a_label_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(tar, "_MOST_WAITING_BYTES", 10)
    waiting = []

    def entries(*names):
        for name in names:
            waiting.append(name)
            yield name, b"1234"

    for sample in tar.samples(entries(*(f"x.{number}.jpg" for number in range(9))), size_of=len):
        assert len(waiting) <= 3 * (1 + int(sample.name[2]) // 3)

    with rejects("x.cls", "too many images"):
        list(tar.samples(entries("x.1.jpg", "x.2.jpg", "x.3.jpg", "x.cls"), size_of=len))


@pytest.mark.parametrize(
    ("names", "rule"),
    [
        ("a.jpg a.cls b.cls b.txt b.jpg", ""),
        ("n1/a.jpg n1/b.jpg n2/a.jpg meta.json", ""),
        ("a.jpg b.jpg a.cls b.cls", "'a'"),
        ("a.json b.json b.jpg a.jpg", "'a'"),
        ("d/a.jpg d/b.jpg d/b.cls d/a.json", "'d/a'"),
    ],
)
def test_members_that_are_apart(names, rule):
    order = tar.SampleOrder("a.tar")

    def see_all():
        for name in names.split():
            if not name.endswith(".txt"):
                order.see(name)
        order.end()

    if not rule:
        see_all()
        return

    with rejects("a.tar", f"image and label of {rule} are apart.*--sort=name"):
        see_all()


def test_keys_of_incomplete_samples_are_forgotten(monkeypatch):
    monkeypatch.setattr(tar, "_MOST_KEYS", 3)
    order = tar.SampleOrder("a.tar")

    for number in range(9):
        order.see(f"{number}.jpg")
        assert len(order._incomplete["image"]) <= 3

    order.see("0.cls")
    with rejects("a.tar", "image and label of '8' are apart"):
        [order.see(name) for name in ("8.cls", "x.jpg")]


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
        *({"cls": text} for text in (b"", b" ", b"9" * 30, b"1048576")),
        *(
            {"json": text}
            for text in (b"", b"7", b"{}", b"[" * 9999, b'{"label": -1}', b'{"label": true}')
        ),
    ],
)
def test_labels_that_are_none(labels):
    with pytest.raises(ValueError, match=r"class|JSON|levels"):
        tar.label_of(labels)


def test_names_of_another_format():
    jpeg = b"\xff\xd8\xff\xe0"
    png = b"\x89PNG\r\n\x1a\n"
    webp = b"RIFF\0\0\0\0WEBP"

    assert [tar.is_mislabelled("a.JPEG", image) for image in (jpeg, png, webp)] == [
        False,
        True,
        True,
    ]
    assert [
        tar.is_mislabelled(f"a.{kind}", image) for kind, image in (("png", png), ("webp", webp))
    ] == [False, False]
