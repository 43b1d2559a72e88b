"""Archives from NumPy and for NumPy, damaged ones, and metadata in the comment of an archive."""

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
    assert_read,
    build_archive,
    build_npy,
    is_same,
    list_every_kind,
    read_all,
    read_rejection,
    read_rejection_with_little_memory,
    write_npy,
)
from vit_jax.weights.formats import metadata as metadata_texts
from vit_jax.weights.formats import npz, open_arrays, write_npz
from vit_jax.weights.formats.stored import BFLOAT16

ONE = write_npy(np.arange(4.0))
PLAIN = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights.npz"


def change_entry(content, offset, layout, *values, entry=0):
    """Change numbers in the entry of a member in the directory of an archive."""
    start = -1
    for _ in range(entry + 1):
        start = content.index(b"PK\x01\x02", start + 1)

    changed = bytearray(content)
    struct.pack_into(layout, changed, start + offset, *values)
    return bytes(changed)


def test_a_large_directory_is_rejected_before_it_is_read(path, monkeypatch):
    moved = (
        f"Python {sys.version} has moved zipfile.{npz.PRIVATE}, "
        "which npz.py needs to bound a directory"
    )
    words = r"its directory takes 2,\d+,\d+ bytes, more than any network's\.$"
    assert hasattr(zipfile, npz.PRIVATE), moved

    members = [(f"{number}.npy", b"") for number in range(50_000)]
    content = build_archive(members)
    monkeypatch.setattr(zipfile, "ZipFile", None)

    assert re.search(words, read_rejection(path, content)), moved


# Files of other programs.


def test_numpy_reads_files_of_vit_jax(path):
    arrays = list_every_kind()

    write_npz(path, arrays, {"grid": [3, 5]})

    with np.load(path, allow_pickle=False) as read:
        assert set(read.files) == set(arrays)
        for name, array in arrays.items():
            expected = array.view("V2") if array.dtype == BFLOAT16 else array
            assert is_same(read[name], expected), name


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_files_of_numpy_are_read(path, save):
    arrays = list_every_kind()

    save(path, **arrays)

    assert_read(path, arrays, {})


@pytest.mark.parametrize(
    "version",
    [
        (1, 0),
        (2, 0),
        (3, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(
    "dtype",
    [
        "<f4",
        ">f4",
        ">i8",
        ">u2",
        ">f2",
        "|i1",
        "|b1",
    ],
)
def test_versions_byte_orders_and_layouts(path, dtype, order, version):
    bits = np.arange(24) % 2
    values = bits.reshape(2, 3, 4).astype(dtype)
    member = write_npy(
        np.asarray(values, order=order),
        version=version,
    )
    path.write_bytes(build_archive([("x.npy", member)]))

    arrays, _ = read_all(path)

    assert arrays["x"].flags.c_contiguous
    assert is_same(arrays["x"], values.astype(values.dtype.newbyteorder("=")))


HALVES = np.array([1.5, -0.0]).astype(BFLOAT16)
NOT_NUMBERS = np.array([0x7F800001, 0x7FC12345], ">u4")


@pytest.mark.parametrize(
    ("header", "values"),
    [
        (PLAIN.replace("<f4", "|V2"), HALVES),
        (PLAIN.replace("<f4", "<V2"), HALVES),
        (PLAIN.replace("<f4", "bfloat16"), HALVES),
        # Every bit is kept.
        (PLAIN.replace("<f4", ">f4"), NOT_NUMBERS.view(">f4")),
        ("{'shape':(2,),'descr':'<f4','fortran_order':False}", np.float32([1, 2])),
        # A header of Python 2.
        (PLAIN.replace("(2,)", "(2L,)"), np.float32([1, 2])),
    ],
)
def test_headers_of_other_writers(path, header, values):
    member = build_npy(header, values.tobytes())
    path.write_bytes(build_archive([("x.npy", member)]))

    arrays, _ = read_all(path)

    assert is_same(arrays["x"], values.astype(values.dtype.newbyteorder("=")))


def test_an_archive_written_to_a_stream(path):
    class Stream(io.BytesIO):
        def seekable(self):
            return False

        def tell(self):
            raise OSError

    stream = Stream()
    np.savez(stream, a=np.arange(3.0), b=np.float32(2))
    path.write_bytes(stream.getvalue())

    arrays, _ = read_all(path)
    with zipfile.ZipFile(path) as file:
        sizes_follow_data = [member.flag_bits & 8 for member in file.infolist()]

    assert all(sizes_follow_data)
    assert is_same(arrays["a"], np.arange(3.0))


# Headers of arrays that lie.


DATA = b"12345678"
SHAPES = (
    "(3,)",
    "(1,)",
    "(-1,)",
    f"({10**12},)",
    "(2.0,)",
    "(-2, -1)",
    f"({2**63}, {2**63})",
    f"(0, {2**62}, {2**62})",
)
TYPES = (
    "'|O'",
    "'<U3'",
    "'|V4'",
    "'<c8'",
    "'<M8[s]'",
    "'f4,f4'",
    "[('x', '<f4')]",
)


def list_damaged_members():
    """Return members whose headers lie or are damaged, with words of the message."""
    members = []
    for shape in SHAPES:
        header = PLAIN.replace("(2,)", shape)
        members.append((build_npy(header, DATA), "member 'x.npy': "))
    for dtype in TYPES:
        header = PLAIN.replace("'<f4'", dtype)
        words = "it is of type .*which is not read. Allowed: fl"
        members.append((build_npy(header, DATA), words))

    with_code = PLAIN.replace("<f4", "__import__('os')")
    return [
        *members,
        (b"", "'x"),
        (b"\x93NUMPY\x01", "'x"),
        (b"\x80\x04N.", "'x"),
        (
            build_npy(PLAIN, DATA, version=4),
            r"version \(4, 0\) of the .npy format",
        ),
        (build_npy(PLAIN, DATA, version=2, length=2**32 - 1), "'x"),
        (build_npy(PLAIN, b"", length=2000), "'x"),
        (build_npy(with_code, DATA), "'x"),
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    list_damaged_members(),
    ids=range(22),
)
def test_lying_and_damaged_headers_are_rejected_and_take_no_memory(
    path,
    content,
    words,
):
    archive = build_archive([("x.npy", content)])
    message = read_rejection_with_little_memory(path, archive)

    assert re.search(words, message)
    assert len(message) < 1000


# Archives that lie.


TWO = build_archive([("x.npy", ONE), ("y.npy", ONE)])
ALONE = build_archive([("x.npy", ONE)])
EMPTIED = bytearray(ALONE)
struct.pack_into("<2HI", EMPTIED, len(ALONE) - 14, 0, 0, 0)
ENCRYPTED = bytearray(change_entry(ALONE, 8, "<H", 1))
ENCRYPTED[6] |= 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (build_archive([("x.npy", build_npy("{" * 9_000, DATA))]), "member 'x.npy': "),
        (
            build_archive([("x.npy", build_npy(PLAIN.replace("(2,)", "-" * 9_000 + "1"), DATA))]),
            "member 'x.npy': ",
        ),
        (build_archive([("../x.npy", ONE)]), "is not allowed"),
        (
            build_archive([("x.npy#y.npy", ONE)]).replace(b"x.npy#y.npy", b"x.npy\0y.npy"),
            "is not allowed",
        ),
        (
            build_archive([("readme.txt", ONE)]),
            "'readme.txt' is not an array: it does not end in .npy",
        ),
        (TWO.replace(b"y.npy", b"x.npy"), "a member is in it twice"),
        (bytes(ENCRYPTED), "is encrypted"),
        (
            build_archive([("x.npy", ONE)], zipfile.ZIP_LZMA),
            "compressed by method 14",
        ),
        (
            change_entry(ALONE, 24, "<I", len(ONE) + 8),
            "it claims to hold 168 bytes in 160, ",
        ),
        (
            change_entry(ALONE, 20, "<2I", 2**30, 2**30),
            "its directory: it starts at byte 195, and the part before it",
        ),
        (
            change_entry(TWO, 42, "<I", 0, entry=1),
            "it starts at byte 0, and the part before it ends at 195",
        ),
        (bytes(EMPTIED), "its directory: it starts at byte"),
        (ALONE + b"PK", "the archive does not end where the file does"),
        (ALONE[:4] + b"\0" * 8 + ALONE, "and the part before it ends at 0"),
    ],
    ids=range(14),
)
def test_lying_archives_are_rejected(path, content, reason):
    message = read_rejection(path, content)

    assert reason in message
    assert len(message) < 1000


ZEROS = build_archive(
    [("x.npy", write_npy(np.zeros(2**20)))],
    zipfile.ZIP_DEFLATED,
)


def test_the_compression_of_zeros_is_allowed(path):
    path.write_bytes(ZEROS)

    arrays, _ = read_all(path)

    assert not arrays["x"].any()


def test_a_bomb_is_rejected_by_its_size(path):
    bomb = change_entry(ZEROS, 24, "<I", 2**31)

    assert "it claims to hold 2,147,483,648 bytes" in read_rejection(path, bomb)


def test_a_checksum_is_compared_when_the_array_is_read(path):
    damaged = change_entry(ZEROS, 16, "<I", 12345)

    assert "array 'x': Bad CRC-32" in read_rejection(path, damaged)


FLAT = write_npy(np.zeros(4000))
SQUARE = write_npy(np.zeros((40, 100)))
FOUR_THOUSAND = build_archive([("x.npy", FLAT)])

SAME_SIZE = build_archive([("x.npy", SQUARE)])


@pytest.mark.parametrize(
    "other",
    [SAME_SIZE, FOUR_THOUSAND[:5000]],
    ids=["changed", "shorter"],
)
def test_a_file_that_changes_or_shrinks_under_the_reader(path, other):
    path.write_bytes(FOUR_THOUSAND)

    with open_arrays(path) as file:
        path.write_bytes(other)
        with pytest.raises(ValueError, match=r"array 'x': .*damaged"):
            file.read("x")


# Metadata in the comment.

CUT = zlib.compress(b'{"a": 1}')[:-6]


def comment(packing, packed):
    return b"vit_jax metadata %s %08x\n%s" % (packing, zlib.crc32(packed), packed)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"a": [1, 2.5, None, True, "é\n\0"]},
        {"names": [f"class {n}" for n in range(10_000)]},
    ],
    ids=["empty", "short", "long"],
)
def test_metadata_is_a_comment_compressed_where_it_is_long(path, metadata):
    write_npz(path, {"x": np.zeros(2)}, metadata)

    _, read = read_all(path)

    assert read == metadata


OURS = comment(b"json", b'{"a":1}')


@pytest.mark.parametrize(
    "other",
    [
        b"",
        b"{}",
        b"vit_jax metadata",
        OURS.replace(b"json", b"tar"),
        b" " + OURS,
    ],
)
def test_other_comments_are_ignored(path, other):
    path.write_bytes(build_archive([("x.npy", ONE)], comment=other))

    _, metadata = read_all(path)

    assert metadata == {}


def test_metadata_that_do_not_fit_are_rejected_with_their_size(path):
    rng = np.random.default_rng(0)
    metadata = {"noise": rng.bytes(50_000).hex()}
    message = r"takes 100,\d+ bytes, \d\d,\d+ when compressed; a \.npz file holds 65,535"

    with pytest.raises(ValueError, match=message):
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
        (comment(b"zlib", base64.b85encode(CUT)), "ends early"),
        (comment(b"json", b"{}").replace(b"{}", b"{ "), "checksum"),
    ],
    ids=range(8),
)
def test_damaged_metadata_are_rejected(path, damaged, reason):
    content = build_archive([("x.npy", ONE)], comment=damaged)

    assert reason in read_rejection(path, content)


def test_a_bomb_in_the_comment_is_not_unpacked():
    bomb = comment(
        b"zlib",
        base64.b85encode(zlib.compress(b" " * 40_000_000, 9)),
    )
    tracemalloc.start()

    try:
        message = "more than 4,194,304 characters"

        with pytest.raises(ValueError, match=message):
            metadata_texts.decode_comment(bomb)

        assert tracemalloc.get_traced_memory()[1] < 4 * metadata_texts.MAX_TEXT_CHARACTERS
    finally:
        tracemalloc.stop()
