"""Thousands of damaged files: each is read as what it was, or refused by one ValueError, in little memory.

A ZIP archive has checksums and our .safetensors have digests, so damage is noticed. A damaged
header under a right checksum is read as NumPy reads it, and of another's .safetensors each array is
what its header announces.
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

NUM_CASES = 300
MEMORY_BYTES = 16 * 2**20
SECONDS = 300  # against endless loops only
NUMBERS = (0, 1, 2, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1)


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


def outcome(path, content, read=read_all):
    """What is read of a file, or None if it is refused in the proper way."""
    path.write_bytes(content)
    try:
        return read(path)
    except ValueError as error:
        if (
            type(error) is ValueError
            and str(error).startswith(f"{path}: ")
            and len(str(error)) < 2000
        ):
            return None

        raise AssertionError("not the proper way") from error


def damage(rng, content):
    """One change, of a kind and at a place drawn at random."""
    at = rng.randrange(len(content))
    other = rng.randrange(len(content))
    length = rng.choice((1, 2, 4, 8, 46, 100))
    size = rng.choice((2, 4, 8))
    number = (rng.choice(NUMBERS) % 256**size).to_bytes(size, "little")
    foreign = rng.choice((b"\0", rng.randbytes(length), b"PK\x05\x06", b"{", b"9"))
    flipped = bytes([content[at] ^ 1 << rng.randrange(8)])
    start = content[:at]
    piece = content[at : at + length]
    changes = (
        *(
            start + one + content[at + len(one) :]
            for one in (flipped, flipped, rng.randbytes(1), number, number)
        ),
        start,
        start + foreign + content[at:],
        start + content[at + length :],
        start + piece + content[at:],
        start + content[other : other + 1] + content[at + 1 :],
    )

    return rng.choice(changes)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("seed", [0, 1])
def test_damaged_archives(tmp_path, method, seed):
    path = tmp_path / "x.npz"
    members = [(f"{name}.npy", write_npy(array)) for name, array in list_a_few().items()]
    content = build_archive(members, method, encode_comment(METADATA))
    end = content.rindex(b"PK\x05\x06")
    marker = content[end + 22 : content.index(b"\n", end) + 1]
    rng = random.Random(seed)
    refused = 0

    for _ in range(NUM_CASES):
        changed = damage(rng, content)
        contents = outcome(path, changed)

        if contents is None:
            refused += 1
            continue

        arrays, metadata = contents
        assert arrays.keys() == list_a_few().keys()
        assert all(is_same(arrays[name], array) for name, array in list_a_few().items())
        # With its marker gone the comment is a stranger's.
        assert metadata == METADATA or (metadata == {} and marker not in changed)

    assert 0.5 < refused / NUM_CASES < 1  # dates and the like are nobody's business


def damage_text(rng, text):
    """One change to a header of an array that leaves it printable."""
    at = rng.randrange(len(text))
    pieces = (
        *"90-(),'\"{}[ Le.\\\n:é",
        text[at : at + 5],
        "True",
        "(0,)",
        "'<f8'",
        "'|O'",
        "'<i4'",
        "'>f4'",
        "1" * 30,
    )

    return text[:at] + rng.choice(pieces) + text[at + rng.randrange(8) :]


@pytest.mark.filterwarnings("ignore")  # of NumPy and of Python's parser
def test_damaged_headers_under_a_right_checksum(tmp_path):
    path = tmp_path / "x.npz"
    rng = random.Random(2)
    table = np.arange(6, dtype=np.float32).reshape(2, 3)
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"
    read = 0

    for _ in range(NUM_CASES):
        content = build_npy(
            damage_text(rng, header), table.tobytes(), version=rng.choice((1, 2, 3))
        )
        contents = outcome(path, build_archive([("x.npy", content)]))

        if contents is not None:
            read += 1
            stream = io.BytesIO(content)
            expected = np.lib.format.read_array(stream, allow_pickle=False)

            assert stream.read() == b""

            if expected.dtype == "V2":
                expected = expected.view(BFLOAT16)

            assert is_same(
                contents[0]["x"],
                expected.astype(expected.dtype.newbyteorder("="), order="C"),
            )

    assert 0 < read < NUM_CASES / 2


def read_safetensors(path):
    with open_arrays(path) as file:
        return {name: (array, file.read(name)) for name, array in file.arrays.items()}


def test_damaged_safetensors(tmp_path):
    path = tmp_path / "x.safetensors"
    for head in (
        b"",
        b"PK\x05\x06",
        b"\0" * 8 + b"{",
        b"\x09" + b"\0" * 7 + b"{",
        b"\x80\x04",
        b"\x93NUMPY",
    ):
        assert outcome(path, head + bytes(range(200))) is None  # noise of any kind

    write_safetensors(path, list_a_few(), METADATA)
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    rng = random.Random(3)
    read = 0

    for _ in range(NUM_CASES):
        # Half of them in the header alone, its length kept right.
        if rng.random() < 0.5:
            header = damage(rng, content[8 : 8 + length])
            changed = struct.pack("<Q", len(header)) + header + content[8 + length :]
        else:
            changed = damage(rng, content)

        contents = outcome(path, changed, read_safetensors)
        if contents is not None:
            read += 1
            assert all(stored == (array.shape, array.dtype) for stored, array in contents.values())

    assert 0 < read < NUM_CASES
