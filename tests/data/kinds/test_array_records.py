"""The reader of ranges against the library that writes the files."""

import os
import random

import pytest
from array_record.python import array_record_module

from vit_jax.data.kinds.array_records import BucketRecords, num_records


def write_records(path, options, sizes):
    """Write records of half random, half zero bytes; return them."""
    records = []
    for size in sizes:
        half = os.urandom(size // 2)
        records.append(half.ljust(size, b"\0"))

    writer = array_record_module.ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return records


def open_records(path, count):
    return BucketRecords([(str(path), 0, count)])


@pytest.mark.parametrize(
    "options",
    [
        "group_size:1",
        "group_size:1,uncompressed",
        "group_size:3,brotli:1",
        "group_size:1,snappy",
    ],
)
def test_records_are_those_that_the_library_wrote(tmp_path, options):
    """Some records go over the ends of blocks."""
    numbers = random.Random(0)
    sizes = [0, 1, 64 * 1024 - 64, 200_000]
    for _ in range(300):
        sizes.append(numbers.randrange(3000))
    path = tmp_path / "x"
    written = write_records(path, options, sizes)
    count = len(written)

    source = open_records(path, count)

    assert num_records(str(path)) == count
    assert len(source) == count
    assert source.__getitems__(range(count)) == written
    for index in (0, 1, 2, 3, 200, 303):
        assert source[index] == written[index]


def test_a_footer_of_several_blocks(tmp_path):
    path = tmp_path / "x"
    written = write_records(
        path,
        "group_size:1",
        [1] * 12_000,
    )

    source = open_records(path, len(written))

    found = source.__getitems__(range(11_000, 11_100))
    assert found == written[11_000:11_100]


def test_parts_of_files_follow_each_other(tmp_path):
    a = tmp_path / "a"
    b = tmp_path / "b"
    sizes = range(10, 20)
    one = write_records(a, "group_size:1", sizes)
    two = write_records(b, "group_size:1", sizes)
    parts = [
        (str(a), 7, 3),
        (str(b), 2, 5),
    ]

    source = BucketRecords(parts)

    assert source.__getitems__(range(8)) == one[7:] + two[2:7]
    assert source[2] == one[9]
    assert source[3] == two[2]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[:70_000],
        lambda content: bytes(len(content)),
        lambda content: b"",
        lambda content: b"x" + content,
    ],
    ids=["last byte", "cut off", "zeros", "empty", "shifted"],
)
def test_a_damaged_end(tmp_path, damage):
    path = tmp_path / "x"
    write_records(path, "group_size:1", [100] * 2000)
    content = path.read_bytes()
    path.write_bytes(damage(content))

    with pytest.raises(RuntimeError, match=r"damaged|ArrayRecord"):
        open_records(path, 2000)[0]


def test_a_damaged_record(tmp_path):
    path = tmp_path / "x"
    write_records(path, "group_size:1", [1000] * 5)
    content = bytearray(path.read_bytes())
    content[110:120] = bytes(10)  # of the first record
    path.write_bytes(content)

    with pytest.raises(RuntimeError, match="damaged"):
        open_records(path, 5)[0]


def test_transposed_records_are_rejected(tmp_path):
    path = tmp_path / "x"
    write_records(path, "group_size:1,transpose", [1000])

    with pytest.raises(RuntimeError, match="another kind than TFDS writes"):
        open_records(path, 1)[0]
