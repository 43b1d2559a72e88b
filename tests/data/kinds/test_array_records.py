"""The reader of ranges against the library that writes the files."""

import os
import random

import pytest
from array_record.python import array_record_module

from vit_jax.data.kinds.array_records import BucketRecords, num_records


def write(path, options, sizes):
    records = [os.urandom(size // 2) + bytes(size - size // 2) for size in sizes]
    writer = array_record_module.ArrayRecordWriter(str(path), options)

    for record in records:
        writer.write(record)

    writer.close()
    return records


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
    numbers = random.Random(0)
    sizes = [
        0,
        1,
        64 * 1024 - 64,
        200_000,
        *(numbers.randrange(3000) for _ in range(300)),
    ]  # over the ends of blocks
    written = write(tmp_path / "x", options, sizes)
    source = BucketRecords([(str(tmp_path / "x"), 0, len(written))])

    assert num_records(str(tmp_path / "x")) == len(written)
    assert len(source) == len(written)
    assert source.__getitems__(range(len(written))) == written

    expected = [written[index] for index in (0, 1, 2, 3, 200, 303)]
    assert [source[index] for index in (0, 1, 2, 3, 200, 303)] == expected


def test_a_footer_of_several_blocks(tmp_path):
    written = write(tmp_path / "x", "group_size:1", [1] * 12_000)
    source = BucketRecords([(str(tmp_path / "x"), 0, len(written))])

    assert source.__getitems__(range(11_000, 11_100)) == written[11_000:11_100]


def test_parts_of_files_follow_each_other(tmp_path):
    one, two = (write(tmp_path / name, "group_size:1", range(10, 20)) for name in "ab")
    source = BucketRecords([(str(tmp_path / "a"), 7, 3), (str(tmp_path / "b"), 2, 5)])

    assert source.__getitems__(range(8)) == one[7:] + two[2:7]
    assert source[2] == one[9]
    assert source[3] == two[2]


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:-1],
        lambda b: b[:70_000],
        lambda b: bytes(len(b)),
        lambda b: b"",
        lambda b: b"x" + b,
    ],
)
def test_a_damaged_end(tmp_path, damage):
    write(tmp_path / "x", "group_size:1", [100] * 2000)
    (tmp_path / "y").write_bytes(damage((tmp_path / "x").read_bytes()))

    with pytest.raises(RuntimeError, match=r"damaged|ArrayRecord"):
        BucketRecords([(str(tmp_path / "y"), 0, 2000)])[0]


def test_a_damaged_record_and_a_transposed_one(tmp_path):
    write(tmp_path / "x", "group_size:1", [1000] * 5)
    content = bytearray((tmp_path / "x").read_bytes())
    content[110:120] = bytes(10)  # of the first record
    (tmp_path / "y").write_bytes(content)
    source = BucketRecords([(str(tmp_path / "y"), 0, 5)])

    with pytest.raises(RuntimeError, match="damaged"):
        source[0]

    write(tmp_path / "z", "group_size:1,transpose", [1000])
    with pytest.raises(RuntimeError, match="another kind than TFDS writes"):
        BucketRecords([(str(tmp_path / "z"), 0, 1)])[0]
