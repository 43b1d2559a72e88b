"""Archives from NumPy and for NumPy, and every way in which one can lie."""

import io
import re
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

from tests.weights.formats.samples import METADATA, a_few, archive, every_kind, npy, numbers, read_all, same
from vit_jax.weights.formats import open_arrays, write_npz
from vit_jax.weights.formats.encoding import BFLOAT16

ONE = numbers(np.arange(4.0))
PLAIN = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights.npz"


def refused(path, content):
    """The message with which a file is refused, at the latest when its arrays are read."""
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        read_all(path)
    return str(caught.value)


def with_central(content, offset, layout, value):
    """Changes a number in the entry of the first member in the table of contents."""
    changed = bytearray(content)
    struct.pack_into(layout, changed, content.index(b"PK\x01\x02") + offset, value)
    return bytes(changed)


# Others' files.


def test_numpy_reads_exactly_the_arrays(path):
    arrays = every_kind()
    write_npz(path, arrays, METADATA)
    with np.load(path, allow_pickle=False) as found:
        assert set(found.files) == set(arrays)
        for name, array in arrays.items():
            expected = array.view("V2") if array.dtype == BFLOAT16 else array
            assert same(found[name], expected)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_numpy_writes_is_read(path, save):
    arrays = every_kind()
    save(path, **arrays)
    found, metadata = read_all(path)
    assert found.keys() == arrays.keys()
    assert all(same(found[name], arrays[name]) for name in arrays)
    assert metadata == {}


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", ">i8", ">u2", ">f2", "|i1", "|b1"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_versions_byte_orders_and_layouts(path, version, dtype, order):
    values = (np.arange(24).reshape(2, 3, 4) % 2).astype(dtype)
    path.write_bytes(archive([("x.npy", numbers(np.asarray(values, order=order), version=version))]))
    found = read_all(path)[0]["x"]
    assert found.flags.c_contiguous
    assert same(found, values.astype(values.dtype.newbyteorder("=")))


def test_swapping_bytes_keeps_every_bit(path):
    bits = np.array([0x7F800001, 0x80000000, 0x7FC12345, 1], ">u4")
    path.write_bytes(archive([("x.npy", numbers(bits.view(">f4")))]))
    assert np.array_equal(read_all(path)[0]["x"].view("=u4"), bits)


@pytest.mark.parametrize("code", ["|V2", "<V2", "bfloat16"])
def test_the_ways_to_say_bfloat16(path, code):
    values = np.array([1.5, -0.0, 3e38]).astype(BFLOAT16)
    header = f"{{'descr': '{code}', 'fortran_order': False, 'shape': (3,), }}\n"
    path.write_bytes(archive([("x.npy", npy(header, values.tobytes()))]))
    assert same(read_all(path)[0]["x"], values)


@pytest.mark.parametrize(
    "header",
    [
        PLAIN,
        f"{PLAIN}   \n",
        "{'shape':(2,),'descr':'<f4','fortran_order':False}",
        '{"descr": "<f4", "fortran_order": False, "shape": (2, )}',
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2L,), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2), }",
    ],
)
def test_headers_of_other_writers(path, header):
    path.write_bytes(archive([("x.npy", npy(header, struct.pack("<2f", 1, 2)))]))
    assert read_all(path)[0]["x"].reshape(-1).tolist() == [1, 2]


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


def test_a_foreign_comment_is_ignored(path):
    for comment in (b"made elsewhere", b"vit_jax metadata", b'{"class_names": 1}'):
        path.write_bytes(archive([("x.npy", ONE)], comment=comment))
        assert read_all(path)[1] == {}


# Headers of arrays that lie.


@pytest.mark.parametrize(
    ("descr", "reason"),
    [
        ("'|O'", "'|O', which is not read. Allowed: float16"),
        ("'<U3'", "is not read"),
        ("'|S2'", "is not read"),
        ("'|V4'", "is not read"),
        ("'>V2'", "is not read"),
        ("'=f4'", "is not read"),
        ("'=i1'", "is not read"),
        ("'|f4'", "is not read"),
        ("'f4'", "is not read"),
        ("'<c8'", "is not read"),
        ("'<M8[s]'", "is not read"),
        ("'f4,f4'", "is not read"),
        ("''", "is not read"),
        ("[('x', '<f4')]", "not that of a plain array"),
        ("('<f4', (2,))", "not that of a plain array"),
        ("True", "wrong kind"),
        ("__import__('os')", "not that of a plain array"),
    ],
)
def test_other_types_are_refused(path, descr, reason):
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': (2,), }}"
    message = refused(path, archive([("x/y.npy", npy(header, b"12345678"))]))
    assert "member 'x/y.npy'" in message
    assert reason in message


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ("(3,)", "takes 12 bytes, and it has 8"),
        ("(1,)", "takes 4 bytes, and it has 8"),
        ("(-1,)", "negative size"),
        ("(-2, -1)", "negative size"),
        ("(1000000000000,)", "takes 4,000,000,000,000 bytes, and it has 8"),
        ("(9223372036854775807, 9223372036854775807)", "more than any memory"),
        ("(0, 9223372036854775807, 9223372036854775807)", "more than any memory"),
        ("(99999999999999999999,)", "not one of whole numbers"),
        (f"({'1, ' * 65})", "at most 64"),
        ("(2)", "not a tuple"),
        ("(2.0,)", "not one of whole numbers"),
        ("(,)", "not one of whole numbers"),
        ("(True,)", "not one of whole numbers"),
        ("((2,),)", "not that of a plain array"),
        ("2", "not that of a plain array"),
        ("'2'", "wrong kind"),
    ],
)
def test_lying_shapes_are_refused_and_take_no_memory(path, shape, reason):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
    content = archive([("x.npy", npy(header, b"12345678"))])
    tracemalloc.start()
    try:
        assert reason in refused(path, content)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "does not start as an array"),
        (b"\x93NUMPY\x01", "does not start as an array"),
        (b"\x80\x04N.", "does not start as an array"),
        (npy(PLAIN, b"12345678", version=4), "version 4"),
        (npy(PLAIN, b"12345678", version=2, length=2**32 - 1), "4,294,967,295 bytes; at most 65,536"),
        (npy(PLAIN, b"", length=2000), "its header ends early"),
        (b"\x93NUMPY\x01\x00\x01", "unpack requires"),
        (npy("", b"12345678"), "not a dictionary"),
        (npy("{}", b"12345678"), "has the keys []"),
        (npy(PLAIN.replace("'shape'", "'shapes'"), b"12345678"), "has the keys"),
        (npy("{'shape': (1,), " + PLAIN[1:], b"12345678"), "not that of a plain array"),
        (npy(PLAIN.replace("False", "0"), b"12345678"), "not that of a plain array"),
        (npy(PLAIN.replace("False", "'False'"), b"12345678"), "wrong kind"),
        (npy(PLAIN.encode().replace(b"f4", b"f\xff"), b"12345678"), "ascii"),
        (npy("(" * 60_000, b"12345678"), "not a dictionary"),
        (npy("{" * 30_000 + "}" * 30_000, b"12345678"), "not that of a plain array"),
        (npy(PLAIN.replace("(2,)", "(" * 30_000 + ")" * 30_000), b"12345678"), "not that of a plain array"),
        (npy(PLAIN.replace("(2,)", "-" * 60_000 + "1"), b"12345678"), "not that of a plain array"),
        (npy(PLAIN.replace("(2,)", "(" + " " * 60_000), b"12345678"), "not that of a plain array"),
        (npy(PLAIN.replace("<f4", "|b1"), b"\x01\x02"), "a truth value in it is 2"),
    ],
    ids=range(20),
)
def test_damaged_headers_are_refused(path, content, reason):
    message = refused(path, archive([("x.npy", content)]))
    assert reason in message
    assert "'x" in message
    assert len(message) < 600


# Archives that lie.


@pytest.mark.parametrize(
    "name", ["/x.npy", "../x.npy", "a/../../x.npy", "a\\x.npy", "a//x.npy", ".npy", "a\nb.npy", "\x1b[2J.npy"]
)
def test_odd_names_are_refused(path, name):
    message = refused(path, archive([(name, ONE)]))
    assert "is not allowed" in message
    assert message.isprintable()


def test_a_name_cut_short_by_nul_is_refused(path):
    content = archive([("x.npy#y.npy", ONE)]).replace(b"x.npy#y.npy", b"x.npy\0y.npy")
    assert "its name is ambiguous" in refused(path, content)


def test_members_that_are_no_arrays_are_refused(path):
    for name in ("readme.txt", "folder/", "x"):
        assert f"'{name}' is not an array: it does not end in .npy" in refused(path, archive([(name, ONE)]))


def test_members_of_the_same_name_are_refused(path):
    content = archive([("x.npy", ONE), ("y.npy", ONE)]).replace(b"y.npy", b"x.npy")
    assert "the member 'x.npy' is in it twice" in refused(path, content)


def test_encrypted_members_are_refused(path):
    content = bytearray(archive([("x.npy", ONE)]))
    content[6] |= 1
    content[content.index(b"PK\x01\x02") + 8] |= 1
    assert "member 'x.npy': it is encrypted" in refused(path, bytes(content))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions_are_refused(path, method):
    assert f"compressed by method {method}" in refused(path, archive([("x.npy", ONE)], method))


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_wrong_checksum_is_found_when_the_array_is_read(path, method):
    large = numbers(np.arange(1000.0))  # more than is read at once for a header
    content = archive([("x.npy", large), ("y.npy", numbers(np.arange(3)))], method)
    assert "array 'x': Bad CRC-32" in refused(path, with_central(content, 16, "<I", 12345))
    with open_arrays(path) as file:
        assert file.read("y").tolist() == [0, 1, 2]


def test_a_bomb_is_refused_by_its_size(path):
    zeros = numbers(np.zeros(2**20))
    content = archive([("x.npy", zeros)], zipfile.ZIP_DEFLATED)
    path.write_bytes(content)
    assert not read_all(path)[0]["x"].any()  # what zeros really compress to is allowed
    message = refused(path, with_central(content, 24, "<I", 2**31))
    assert "member 'x.npy': it claims to hold 2,147,483,648 bytes" in message


def test_a_stored_member_is_as_long_as_it_says(path):
    content = archive([("x.npy", ONE)])
    for size in (len(ONE) + 8, len(ONE) - 8):
        assert "it claims to hold" in refused(path, with_central(content, 24, "<I", size))


def test_members_beyond_the_end_are_refused(path):
    content = archive([("x.npy", ONE)])
    for sizes in (struct.pack("<2I", 2**30, 2**30), struct.pack("<2I", len(ONE) + 8, len(ONE) + 8)):
        assert "overlaps the one before" in refused(path, with_central(content, 20, "8s", sizes))
    assert "does not follow the one before" in refused(path, with_central(content, 42, "<I", 2**31))


def test_overlapping_members_are_refused(path):
    content = archive([("x.npy", ONE), ("y.npy", ONE)])
    second = content.index(b"PK\x01\x02", content.index(b"PK\x01\x02") + 1)
    changed = bytearray(content)
    struct.pack_into("<I", changed, second + 42, 0)
    assert "overlaps the one before" in refused(path, bytes(changed))


def test_a_table_of_contents_that_was_emptied_is_refused(path):
    content = bytearray(archive([("x.npy", ONE)]))
    struct.pack_into("<2HI", content, len(content) - 14, 0, 0, 0)
    assert "its table of contents" in refused(path, bytes(content))


def test_an_endless_table_of_contents_is_refused_and_takes_no_memory(path):
    entry = archive([("x.npy", ONE)])
    table = entry[entry.index(b"PK\x01\x02") : entry.index(b"PK\x05\x06")]
    count = 5 * 2**20 // len(table)
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 1, 1, count * len(table), entry.index(b"PK\x01\x02"), 0)
    path.write_bytes(entry[: entry.index(b"PK\x01\x02")] + table * count + end)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="a part of its frame takes"):
            open_arrays(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_more_before_or_behind_the_archive_is_refused(path):
    content = archive([("x.npy", ONE)])
    assert "weights.npz" in refused(path, content + b"PK")
    assert "does not follow the one before" in refused(path, content[:4] + b"\0" * 8 + content)


@pytest.mark.parametrize("comment", [False, True])
def test_every_truncation_is_refused(path, comment):
    write_npz(path, a_few(), METADATA if comment else {})
    content = path.read_bytes()
    for size in range(len(content)):
        refused(path, content[:size])


def test_two_headers_that_disagree_are_refused(path):
    content = archive([("x.npy", ONE)])
    for offset, value in ((6, 0x800), (8, 8), (26, 4)):  # flags, method, length of the name
        changed = bytearray(content)
        struct.pack_into("<H", changed, offset, value)
        refused(path, bytes(changed))


def test_a_file_that_changes_under_the_reader(path):
    path.write_bytes(archive([("x.npy", numbers(np.zeros(4000)))]))
    with open_arrays(path) as file:
        path.write_bytes(archive([("x.npy", numbers(np.zeros((40, 100))))]))
        with pytest.raises(ValueError, match="array 'x': it has changed since the file was opened"):
            file.read("x")


def test_a_file_that_shrinks_under_the_reader(path):
    content = archive([("x.npy", numbers(np.zeros(4000)))])
    path.write_bytes(content)
    with open_arrays(path) as file:
        path.write_bytes(content[:5000])
        with pytest.raises(ValueError, match=r"array 'x': .*damaged"):
            file.read("x")


# Metadata in the comment.


def test_long_metadata_is_compressed_into_the_comment(path):
    metadata = {"class_names": [f"class {number}" for number in range(10_000)]}
    write_npz(path, {"x": np.zeros(2)}, metadata)
    assert read_all(path)[1] == metadata


def test_metadata_that_does_not_fit_is_refused_with_its_size(path):
    metadata = {"noise": np.random.default_rng(0).bytes(50_000).hex()}
    with pytest.raises(ValueError, match=r"takes 100,\d+ bytes, \d\d,\d+ when compressed; a \.npz file holds 65,535"):
        write_npz(path, {"x": np.zeros(2)}, metadata)
    assert not path.exists()
