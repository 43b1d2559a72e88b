"""The metadata of a file of arrays as JSON text, and that text as the comment of a ZIP archive.

A comment holds no more than 65,535 bytes, so long texts are compressed. Sizes are bounded before
and after compression.
"""

import base64
import json
import re
import zlib
from collections.abc import Mapping

from vit_jax.storage.files import parse_json
from vit_jax.weights.formats.stored import DAMAGED

MAX_TEXT_CHARACTERS = 4 * 2**20
MAX_COMMENT_BYTES = 65_535
_MARKER = re.compile(rb"vit_jax metadata (json|zlib) ([0-9a-f]{8})\n")


def encode(metadata: Mapping[str, object]) -> str:
    """Return JSON text in ASCII, equal for equal metadata.

    Raises:
      ValueError: it is not JSON, or too long.
    """
    try:
        text = json.dumps(dict(metadata), sort_keys=True, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"metadata must be JSON values under names: {error}.") from error
    _check_length(len(text))
    return text


def decode(text: str) -> dict[str, object]:
    """Return the inverse of `encode`.

    Raises:
      ValueError: it is not a JSON object of finite numbers, or too long.
    """

    def reject_constant(constant: str) -> None:
        raise ValueError(f"{constant} in its JSON is not a number. {DAMAGED}")

    _check_length(len(text))
    value = parse_json(text, parse_constant=reject_constant)
    if not isinstance(value, dict):
        raise ValueError(f"JSON in it is not an object but starts with {text[:20]!r}. {DAMAGED}")
    return value


def encode_comment(metadata: Mapping[str, object]) -> bytes:
    """Return the comment of an archive that carries the metadata, empty for none.

    Raises:
      ValueError: it is too long, also compressed.
    """
    if not metadata:
        return b""
    plain = encode(metadata).encode()
    comment = _mark(b"json", plain)
    if len(comment) <= MAX_COMMENT_BYTES:
        return comment

    # Base85: the bytes that end an archive must not occur in its comment by chance.
    compressed = base64.b85encode(zlib.compress(plain, 9))
    comment = _mark(b"zlib", compressed)
    if len(comment) <= MAX_COMMENT_BYTES:
        return comment
    raise ValueError(
        f"metadata takes {len(plain):,} bytes, {len(comment):,} when compressed; a .npz file "
        f"holds {MAX_COMMENT_BYTES:,}. Omit long lists such as class names, or write .safetensors."
    )


def _mark(packing: bytes, content: bytes) -> bytes:
    """Return a comment that begins with the packing and the checksum of its content."""
    return b"vit_jax metadata %s %08x\n%s" % (packing, zlib.crc32(content), content)


def decode_comment(comment: bytes) -> dict[str, object]:
    """Return the inverse of `encode_comment`, empty for any other comment.

    Raises:
      ValueError: it is damaged.
    """
    marker = _MARKER.match(comment)
    if not marker:
        return {}
    content = comment[marker.end() :]
    packing, checksum = marker.groups()
    if zlib.crc32(content) != int(checksum, 16):
        raise ValueError(f"the checksum of its metadata is wrong. {DAMAGED}")

    if packing == b"zlib":
        decompressor = zlib.decompressobj()
        compressed = base64.b85decode(content)
        content = decompressor.decompress(compressed, MAX_TEXT_CHARACTERS + 1)
        _check_length(len(content))
        if not decompressor.eof:
            raise ValueError(f"its metadata ends early. {DAMAGED}")
    return decode(content.decode("ascii"))


def _check_length(num_characters: int) -> None:
    if num_characters > MAX_TEXT_CHARACTERS:
        raise ValueError(
            f"metadata takes more than {MAX_TEXT_CHARACTERS:,} characters, "
            "which is the most allowed."
        )
