"""Archives from NumPy and for NumPy, the ways in which one can lie, and metadata in its comment."""

import base64
import io
import re
import struct
import sys
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest

from tests.weights.formats.samples import (
    archive,
    assert_read,
    every_kind,
    npy,
    numbers,
    read_all,
    refused,
    same,
)
from vit_jax.weights.formats import metadata as metadata_texts
from vit_jax.weights.formats import npz, open_arrays, write_npz
from vit_jax.weights.formats.stored import BFLOAT16

ONE = numbers(np.arange(4.0))
PLAIN = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights.npz"


def changed(content, offset, layout, *values, entry=0):
    """A number changed in the entry of a member in the directory of the archive."""
    at = -1
    for _ in range(entry + 1):
        at = content.index(b"PK\x01\x02", at + 1)

    struct.pack_into(layout, content := bytearray(content), at + offset, *values)
    return bytes(content)


def test_a_large_directory_is_refused_before_it_is_read(path, monkeypatch):
    moved = f"Python {sys.version} has moved zipfile.{npz.PRIVATE}, which npz.py needs to bound a directory"
    assert hasattr(zipfile, npz.PRIVATE), moved

    content = archive([(f"{number}.npy", b"") for number in range(50_000)])
    monkeypatch.setattr(zipfile, "ZipFile", None)
    message = refused(path, content)

    assert re.search(r"its directory takes 2,\d+,\d+ bytes, more than any network's\.$", message), (
        moved
    )


# Others' files.


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_numpy_reads_what_we_write_and_we_what_it_writes(path, save):
    arrays = every_kind()
    write_npz(path, arrays, {"grid": [3, 5]})

    with np.load(path, allow_pickle=False) as read:
        assert set(read.files) == set(arrays)

        for name, array in arrays.items():
            assert same(read[name], array.view("V2") if array.dtype == BFLOAT16 else array)

    save(path, **arrays)
    assert_read(path, arrays, {})


@pytest.mark.parametrize("dtype", ["<f4", ">f4", ">i8", ">u2", ">f2", "|i1", "|b1"])
def test_versions_byte_orders_and_layouts(path, dtype):
    values = (np.arange(24).reshape(2, 3, 4) % 2).astype(dtype)
    for version in ((1, 0), (2, 0), (3, 0)):
        for order in "CF":
            path.write_bytes(
                archive([("x.npy", numbers(np.asarray(values, order=order), version=version))])
            )
            read = read_all(path)[0]["x"]

            assert read.flags.c_contiguous
            assert same(read, values.astype(values.dtype.newbyteorder("=")))


@pytest.mark.parametrize(
    ("header", "values"),
    [
        *(
            (PLAIN.replace("<f4", code), np.array([1.5, -0.0]).astype(BFLOAT16))
            for code in ("|V2", "<V2", "bfloat16")
        ),
        (
            PLAIN.replace("<f4", ">f4"),
            np.array([0x7F800001, 0x7FC12345], ">u4").view(">f4"),
        ),  # every bit is kept
        ("{'shape':(2,),'descr':'<f4','fortran_order':False}", np.float32([1, 2])),
        (PLAIN.replace("(2,)", "(2L,)"), np.float32([1, 2])),  # of Python 2
    ],
)
def test_headers_of_other_writers(path, header, values):
    path.write_bytes(archive([("x.npy", npy(header, values.tobytes()))]))
    assert same(read_all(path)[0]["x"], values.astype(values.dtype.newbyteorder("=")))


def test_an_archive_written_to_a_stream(path):
    class Stream(io.BytesIO):
        def seekable(self):
            return False

        def tell(self):
            raise OSError

    stream = Stream()
    np.savez(stream, a=np.arange(3.0), b=np.float32(2))
    path.write_bytes(stream.getvalue())

    with zipfile.ZipFile(path) as file:
        assert all(member.flag_bits & 8 for member in file.infolist())  # sizes follow the data

    assert same(read_all(path)[0]["a"], np.arange(3.0))


# Headers of arrays that lie.


DATA = b"12345678"
SHAPES = (*(f"({size},)" for size in (3, 1, -1, 10**12, 2.0)), "(-2, -1)")
SHAPES += (f"({2**63}, {2**63})", f"(0, {2**62}, {2**62})")
TYPES = ("'|O'", "'<U3'", "'|V4'", "'<c8'", "'<M8[s]'", "'f4,f4'", "[('x', '<f4')]")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        *((npy(PLAIN.replace("(2,)", shape), DATA), "member 'x.npy': ") for shape in SHAPES),
        *(
            (
                npy(PLAIN.replace("'<f4'", one), DATA),
                "it is of type .*which is not read. Allowed: fl",
            )
            for one in TYPES
        ),
        (b"", "'x"),
        (b"\x93NUMPY\x01", "'x"),
        (b"\x80\x04N.", "'x"),
        (npy(PLAIN, DATA, version=4), r"version \(4, 0\) of the .npy format"),
        (npy(PLAIN, DATA, version=2, length=2**32 - 1), "'x"),
        (npy(PLAIN, b"", length=2000), "'x"),
        (npy(PLAIN.replace("<f4", "__import__('os')"), DATA), "'x"),
    ],
    ids=range(22),
)
def test_lying_and_damaged_headers_are_refused_and_take_no_memory(path, content, words):
    content = archive([("x.npy", content)])
    tracemalloc.start()

    try:
        message = refused(path, content)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()

    assert re.search(words, message)
    assert len(message) < 1000


# Archives that lie.


TWO = archive([("x.npy", ONE), ("y.npy", ONE)])
ALONE = archive([("x.npy", ONE)])
EMPTIED = bytearray(ALONE)
struct.pack_into("<2HI", EMPTIED, len(ALONE) - 14, 0, 0, 0)
ENCRYPTED = bytearray(changed(ALONE, 8, "<H", 1))
ENCRYPTED[6] |= 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (archive([("x.npy", npy("{" * 9_000, DATA))]), "member 'x.npy': "),
        (
            archive([("x.npy", npy(PLAIN.replace("(2,)", "-" * 9_000 + "1"), DATA))]),
            "member 'x.npy': ",
        ),
        (archive([("../x.npy", ONE)]), "is not allowed"),
        (
            archive([("x.npy#y.npy", ONE)]).replace(b"x.npy#y.npy", b"x.npy\0y.npy"),
            "is not allowed",
        ),
        (archive([("readme.txt", ONE)]), "'readme.txt' is not an array: it does not end in .npy"),
        (TWO.replace(b"y.npy", b"x.npy"), "a member is in it twice"),
        (bytes(ENCRYPTED), "is encrypted"),
        (archive([("x.npy", ONE)], zipfile.ZIP_LZMA), "compressed by method 14"),
        (changed(ALONE, 24, "<I", len(ONE) + 8), "it claims to hold 168 bytes in 160, "),
        (
            changed(ALONE, 20, "<2I", 2**30, 2**30),
            "its directory: it starts at byte 195, and what is before it",
        ),
        (
            changed(TWO, 42, "<I", 0, entry=1),
            "it starts at byte 0, and what is before it ends at 195",
        ),
        (bytes(EMPTIED), "its directory: it starts at byte"),
        (ALONE + b"PK", "the archive does not end where the file does"),
        (ALONE[:4] + b"\0" * 8 + ALONE, "and what is before it ends at 0"),
    ],
    ids=range(14),
)
def test_lying_archives_are_refused(path, content, reason):
    message = refused(path, content)
    assert reason in message
    assert len(message) < 1000


def test_a_bomb_is_refused_by_its_size_and_a_checksum_when_the_array_is_read(path):
    content = archive([("x.npy", numbers(np.zeros(2**20)))], zipfile.ZIP_DEFLATED)
    path.write_bytes(content)

    assert not read_all(path)[0]["x"].any()  # what zeros really compress to is allowed
    assert "it claims to hold 2,147,483,648 bytes" in refused(
        path,
        changed(content, 24, "<I", 2**31),
    )
    assert "array 'x': Bad CRC-32" in refused(path, changed(content, 16, "<I", 12345))


def test_a_file_that_changes_or_shrinks_under_the_reader(path):
    content = archive([("x.npy", numbers(np.zeros(4000)))])
    for other in (archive([("x.npy", numbers(np.zeros((40, 100))))]), content[:5000]):
        path.write_bytes(content)
        with open_arrays(path) as file:
            path.write_bytes(other)
            with pytest.raises(ValueError, match=r"array 'x': .*damaged"):
                file.read("x")


# Metadata in the comment.


def comment(packing, packed):
    return b"vit_jax metadata %s %08x\n%s" % (packing, zlib.crc32(packed), packed)


def test_metadata_is_a_comment_compressed_where_it_is_long(path):
    for metadata in (
        {},
        {"a": [1, 2.5, None, True, "é\n\0"]},
        {"names": [f"class {n}" for n in range(10_000)]},
    ):
        write_npz(path, {"x": np.zeros(2)}, metadata)
        assert read_all(path)[1] == metadata


def test_other_comments_are_ignored(path):
    ours = comment(b"json", b'{"a":1}')
    for other in (b"", b"{}", b"vit_jax metadata", ours.replace(b"json", b"tar"), b" " + ours):
        path.write_bytes(archive([("x.npy", ONE)], comment=other))
        assert read_all(path)[1] == {}


def test_metadata_that_does_not_fit_is_refused_with_its_size(path):
    metadata = {"noise": np.random.default_rng(0).bytes(50_000).hex()}
    with pytest.raises(
        ValueError,
        match=r"takes 100,\d+ bytes, \d\d,\d+ when compressed; a \.npz file holds 65,535",
    ):
        write_npz(path, {"x": np.zeros(2)}, metadata)

    assert not path.exists()


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [
        (comment(b"json", b"[1]"), "not an object"),
        (comment(b"json", b'{"a": NaN}'), "NaN in its JSON"),
        (comment(b"json", b"{"), "Expecting"),
        (comment(b"json", b'{"a": "\xff"}'), "ascii"),
        (comment(b"json", b'{"a":' + b"[" * 30_000), "damaged"),
        (comment(b"zlib", base64.b85encode(b"not zlib")), "header"),
        (comment(b"zlib", base64.b85encode(zlib.compress(b'{"a": 1}')[:-6])), "ends early"),
        (comment(b"json", b"{}").replace(b"{}", b"{ "), "checksum"),
    ],
    ids=range(8),
)
def test_damaged_metadata_is_refused(path, damaged, reason):
    assert reason in refused(path, archive([("x.npy", ONE)], comment=damaged))


def test_a_bomb_in_the_comment_is_not_unpacked():
    bomb = comment(b"zlib", base64.b85encode(zlib.compress(b" " * 40_000_000, 9)))
    tracemalloc.start()

    try:
        with pytest.raises(ValueError, match="more than 4,194,304 characters"):
            metadata_texts.decode_comment(bomb)

        assert tracemalloc.get_traced_memory()[1] < 4 * metadata_texts.MAX_TEXT_CHARACTERS
    finally:
        tracemalloc.stop()
