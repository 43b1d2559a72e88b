"""The reader of ranges against the library that writes the files."""

import os
import random

import pytest
from array_record.python import array_record_module

from vit_jax.data.kinds.array_records import BucketRecords, num_records


def write_records(path, options, sizes):
    """Write records of half random, half zero bytes; return them."""
    records = [os.urandom(size // 2) + bytes(size - size // 2) for size in sizes]
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
    small_sizes = [numbers.randrange(3000) for _ in range(300)]
    sizes = [0, 1, 64 * 1024 - 64, 200_000, *small_sizes]
    written = write_records(tmp_path / "x", options, sizes)

    source = open_records(tmp_path / "x", len(written))

    assert num_records(str(tmp_path / "x")) == len(written)
    assert len(source) == len(written)
    assert source.__getitems__(range(len(written))) == written
    for index in (0, 1, 2, 3, 200, 303):
        assert source[index] == written[index]


def test_a_footer_of_several_blocks(tmp_path):
    written = write_records(
        tmp_path / "x",
        "group_size:1",
        [1] * 12_000,
    )

    source = open_records(tmp_path / "x", len(written))

    assert source.__getitems__(range(11_000, 11_100)) == written[11_000:11_100]


def test_parts_of_files_follow_each_other(tmp_path):
    one = write_records(
        tmp_path / "a",
        "group_size:1",
        range(10, 20),
    )
    two = write_records(
        tmp_path / "b",
        "group_size:1",
        range(10, 20),
    )

    source = BucketRecords([(str(tmp_path / "a"), 7, 3), (str(tmp_path / "b"), 2, 5)])

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
    write_records(tmp_path / "x", "group_size:1", [100] * 2000)
    damaged = damage((tmp_path / "x").read_bytes())
    (tmp_path / "y").write_bytes(damaged)

    with pytest.raises(RuntimeError, match=r"damaged|ArrayRecord"):
        open_records(tmp_path / "y", 2000)[0]


def test_a_damaged_record(tmp_path):
    write_records(tmp_path / "x", "group_size:1", [1000] * 5)
    content = bytearray((tmp_path / "x").read_bytes())
    content[110:120] = bytes(10)  # of the first record
    (tmp_path / "y").write_bytes(content)

    with pytest.raises(RuntimeError, match="damaged"):
        open_records(tmp_path / "y", 5)[0]


def test_transposed_records_are_rejected(tmp_path):
    write_records(
        tmp_path / "z",
        "group_size:1,transpose",
        [1000],
    )

    with pytest.raises(RuntimeError, match="another kind than TFDS writes"):
        open_records(tmp_path / "z", 1)[0]
