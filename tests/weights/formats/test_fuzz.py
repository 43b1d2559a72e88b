"""Thousands of damaged files: each is read as it was, or rejected by one ValueError, in little memory.

A ZIP archive has checksums and .safetensors of vit_jax have digests, so damage is noticed. A
damaged header under a right checksum is read as NumPy reads it, and in .safetensors of others each
array is what its header announces.
"""

import io
import random
import signal
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

from tests.weights.formats.samples import (
    METADATA,
    build_archive,
    build_npy,
    is_same,
    list_a_few,
    read_all,
    write_npy,
)
from vit_jax.weights.formats import open_arrays, write_safetensors
from vit_jax.weights.formats.metadata import encode_comment
from vit_jax.weights.formats.stored import BFLOAT16


def is_proper(error, path):
    text = str(error)
    if type(error) is not ValueError:
        return False
    return text.startswith(f"{path}: ") and len(text) < 2000


NUM_CASES = 300
MEMORY_BYTES = 16 * 2**20
SECONDS = 300  # against endless loops only
SMALL_NUMBERS = (0, 1, 2)
LIMITS = tuple(2**bits - 1 for bits in (7, 8, 15, 16, 31, 32, 63, 64))
NUMBERS = SMALL_NUMBERS + LIMITS


@pytest.fixture(autouse=True)
def bounded():
    """No test here takes much memory or hangs."""

    def stop(*_):
        raise TimeoutError(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)

    assert peak < MEMORY_BYTES


def read_damaged(path, content, read=read_all):
    """Return the content of a file, or None if it is rejected in the proper way."""
    path.write_bytes(content)
    try:
        return read(path)
    except ValueError as error:
        if not is_proper(error, path):
            raise AssertionError("not the proper way") from error
        return None


def damage(rng, content):
    """Return the content with a random change at a random index."""
    index = rng.randrange(len(content))
    other = rng.randrange(len(content))
    length = rng.choice((1, 2, 4, 8, 46, 100))
    size = rng.choice((2, 4, 8))
    number = (rng.choice(NUMBERS) % 256**size).to_bytes(size, "little")
    pieces = (
        b"\0",
        rng.randbytes(length),
        b"PK\x05\x06",
        b"{",
        b"9",
    )
    inserted = rng.choice(pieces)
    flipped = bytes([content[index] ^ 1 << rng.randrange(8)])
    start = content[:index]
    piece = content[index : index + length]

    def replace(new):
        return start + new + content[index + len(new) :]

    changes = (
        replace(flipped),
        replace(flipped),
        replace(rng.randbytes(1)),
        replace(number),
        replace(number),
        start,
        start + inserted + content[index:],
        start + content[index + length :],
        start + piece + content[index:],
        start + content[other : other + 1] + content[index + 1 :],
    )
    return rng.choice(changes)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("seed", [0, 1])
def test_damaged_archives(tmp_path, method, seed):
    """Dates and the like are read by nobody. Without its marker a comment is ignored."""
    path = tmp_path / "x.npz"
    expected = list_a_few()
    members = [(f"{name}.npy", write_npy(array)) for name, array in expected.items()]
    content = build_archive(members, method, encode_comment(METADATA))
    end = content.rindex(b"PK\x05\x06")
    marker = content[end + 22 : content.index(b"\n", end) + 1]
    rng = random.Random(seed)
    rejected = 0

    for _ in range(NUM_CASES):
        changed = damage(rng, content)
        contents = read_damaged(path, changed)
        if contents is None:
            rejected += 1
            continue

        arrays, metadata = contents
        assert arrays.keys() == expected.keys()
        for name, array in expected.items():
            assert is_same(arrays[name], array)
        if marker in changed:
            assert metadata == METADATA
        else:
            assert metadata in (METADATA, {})

    assert 0.5 < rejected / NUM_CASES < 1


def damage_text(rng, text):
    """Return the header of an array with one change that leaves it printable."""
    index = rng.randrange(len(text))
    pieces = (
        *"90-(),'\"{}[ Le.\\\n:é",
        text[index : index + 5],
        "True",
        "(0,)",
        "'<f8'",
        "'|O'",
        "'<i4'",
        "'>f4'",
        "1" * 30,
    )

    return text[:index] + rng.choice(pieces) + text[index + rng.randrange(8) :]


def read_by_numpy(content):
    """Return the array of a complete `.npy` file in native byte order."""
    stream = io.BytesIO(content)
    array = np.lib.format.read_array(stream, allow_pickle=False)
    assert stream.read() == b""

    if array.dtype == "V2":
        array = array.view(BFLOAT16)
    return array.astype(array.dtype.newbyteorder("="), order="C")


# NumPy and Python's parser warn.
@pytest.mark.filterwarnings("ignore")
def test_damaged_headers_under_a_right_checksum(tmp_path):
    path = tmp_path / "x.npz"
    rng = random.Random(2)
    data = np.arange(6, dtype=np.float32).tobytes()
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"
    num_read = 0

    for _ in range(NUM_CASES):
        damaged = damage_text(rng, header)
        content = build_npy(damaged, data, version=rng.choice((1, 2, 3)))
        contents = read_damaged(path, build_archive([("x.npy", content)]))
        if contents is None:
            continue

        arrays, _ = contents
        num_read += 1
        assert is_same(arrays["x"], read_by_numpy(content))

    assert 0 < num_read < NUM_CASES / 2


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"PK\x05\x06",
        b"\0" * 8 + b"{",
        b"\x09" + b"\0" * 7 + b"{",
        b"\x80\x04",
        b"\x93NUMPY",
    ],
)
def test_noise_of_any_kind(tmp_path, head):
    assert read_damaged(tmp_path / "x.safetensors", head + bytes(range(200))) is None


def damage_safetensors(rng, content):
    """Return a damaged file, half of the time damaged in its header alone, whose length is right."""
    (length,) = struct.unpack("<Q", content[:8])
    if rng.random() >= 0.5:
        return damage(rng, content)

    header = damage(rng, content[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def read_safetensors(path):
    with open_arrays(path) as file:
        return {name: (array, file.read(name)) for name, array in file.arrays.items()}


def test_damaged_safetensors(tmp_path):
    path = tmp_path / "x.safetensors"
    write_safetensors(path, list_a_few(), METADATA)
    content = path.read_bytes()
    rng = random.Random(3)
    num_read = 0

    for _ in range(NUM_CASES):
        changed = damage_safetensors(rng, content)
        contents = read_damaged(path, changed, read_safetensors)
        if contents is None:
            continue

        num_read += 1
        for stored, array in contents.values():
            assert stored == (array.shape, array.dtype)

    assert 0 < num_read < NUM_CASES
