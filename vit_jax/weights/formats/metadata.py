"""The metadata of a file of arrays as JSON text, and that text as the comment of a ZIP archive.

A comment holds no more than 65,535 bytes, so long texts are compressed. Sizes are bounded on both sides of that.
"""

import base64
import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

from vit_jax.files import parse_json
from vit_jax.weights.formats.arrays import DAMAGED

MAX_TEXT_CHARACTERS = 4 * 2**20
MAX_COMMENT_BYTES = 65_535
_MARKER = re.compile(rb"vit_jax metadata (json|zlib) ([0-9a-f]{8})\n")


def encode(metadata: Mapping[str, Any]) -> str:
    """JSON text in ASCII, equal for equal metadata; ValueError for what is not JSON, or too long."""
    try:
        text = json.dumps(dict(metadata), sort_keys=True, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"metadata must be JSON values under names: {error}.") from error
    _check_length(len(text))
    return text


def decode(text: str) -> dict[str, Any]:
    """The inverse of `encode`; ValueError for what is not a JSON object of finite numbers, or too long."""
    _check_length(len(text))
    value = parse_json(text, parse_constant=_refuse_constant)
    if not isinstance(value, dict):
        raise ValueError(f"JSON in it is not an object but starts with {text[:20]!r}. {DAMAGED}")
    return value


def to_comment(metadata: Mapping[str, Any]) -> bytes:
    """The comment of an archive that carries the metadata, empty for none; ValueError where it has no room."""
    if not metadata:
        return b""
    plain = encode(metadata).encode()
    comment = _with_marker(b"json", plain)
    if len(comment) > MAX_COMMENT_BYTES:
        # Base85: the bytes that end an archive must not occur in its comment by chance.
        comment = _with_marker(b"zlib", base64.b85encode(zlib.compress(plain, 9)))
    if len(comment) > MAX_COMMENT_BYTES:
        raise ValueError(
            f"metadata takes {len(plain):,} bytes, {len(comment):,} when compressed; a .npz file holds "
            f"{MAX_COMMENT_BYTES:,}. Leave out long lists such as class names, or write .safetensors."
        )
    return comment


def from_comment(comment: bytes) -> dict[str, Any]:
    """The inverse of `to_comment`, empty for any other comment; ValueError for one of ours that is damaged."""
    marker = _MARKER.match(comment)
    if not marker:
        return {}
    packed = comment[marker.end() :]
    if zlib.crc32(packed) != int(marker[2], 16):
        raise ValueError(f"the checksum of its metadata is wrong. {DAMAGED}")
    if marker[1] == b"zlib":
        decompressor = zlib.decompressobj()
        packed = decompressor.decompress(base64.b85decode(packed), MAX_TEXT_CHARACTERS + 1)
        _check_length(len(packed))
        if not decompressor.eof:
            raise ValueError(f"its metadata ends early. {DAMAGED}")
    return decode(packed.decode("ascii"))


def _with_marker(packing: bytes, packed: bytes) -> bytes:
    return b"vit_jax metadata %s %08x\n%s" % (packing, zlib.crc32(packed), packed)


def _check_length(num_characters: int) -> None:
    if num_characters > MAX_TEXT_CHARACTERS:
        raise ValueError(f"metadata takes more than {MAX_TEXT_CHARACTERS:,} characters, which is the most allowed.")


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} in its JSON is not a number. {DAMAGED}")
