"""Metadata as text, and as the comment of an archive, from strangers."""

import base64
import tracemalloc
import zlib

import pytest

from vit_jax.weights.formats import metadata
from vit_jax.weights.formats.failures import naming


def comment(packing, packed):
    return b"vit_jax metadata %s %08x\n%s" % (packing, zlib.crc32(packed), packed)


@pytest.mark.parametrize("value", [{}, {"a": [1, 2.5, None, True, "é\n\0"]}, {"names": ["x"] * 50_000}])
def test_round_trip(value):
    assert metadata.from_comment(metadata.to_comment(value)) == value
    assert metadata.decode(metadata.encode(value)) == value


def test_other_comments_are_not_ours():
    ours = comment(b"json", b"{}")
    for other in (b"", b"{}", b"vit_jax metadata", ours.replace(b"json", b"tar"), b" " + ours):
        assert metadata.from_comment(other) == {}


def test_a_bomb_is_not_unpacked():
    bomb = comment(b"zlib", base64.b85encode(zlib.compress(b" " * 40_000_000, 9)))
    assert len(bomb) <= metadata.MAX_COMMENT_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than 4,194,304 characters"):
            metadata.from_comment(bomb)
        assert tracemalloc.get_traced_memory()[1] < 4 * metadata.MAX_TEXT_CHARACTERS
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("packing", "packed", "error"),
    [
        (b"json", b"[1]", "not an object"),
        (b"json", b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' stands twice"),
        (b"json", b'{"a": NaN}', "NaN in its JSON"),
        (b"json", b"{", "Expecting"),
        (b"json", b'{"a": "\xff"}', "ascii"),
        (b"zlib", b"not base85 \x00", "base85"),
        (b"zlib", base64.b85encode(b"not zlib"), "header"),
        (b"zlib", base64.b85encode(zlib.compress(b'{"a": 1}')[:-6]), "ends early"),
    ],
)
def test_damage_is_found(packing, packed, error):
    with pytest.raises(ValueError, match=rf"^file: .*{error}"), naming("file"):
        metadata.from_comment(comment(packing, packed))


def test_a_wrong_checksum_is_found():
    damaged = bytearray(metadata.to_comment({"width": 768}))
    damaged[-3] ^= 1
    with pytest.raises(ValueError, match="checksum"):
        metadata.from_comment(bytes(damaged))


def test_deep_nesting_is_one_error():
    with pytest.raises(ValueError, match=r"^file: .*damaged"), naming("file"):
        metadata.decode('{"a":' + "[" * 200_000 + "]" * 200_000 + "}")
