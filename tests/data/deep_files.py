"""Image files of more than 8 bits, written by hand, with what they state about their values."""

import struct
import zlib

import cv2

_TIFF_TYPES = {"H": 3, "I": 4, "f": 11, "d": 12}
_FORMATS = {"u": 1, "i": 2, "f": 3}


def png(values, used_bits=None):
    """A PNG of 16 bits, with sBIT where the number of used bits is given."""
    file = cv2.imencode(".png", values if values.ndim == 2 else values[..., ::-1])[1].tobytes()
    if used_bits is None:
        return file
    return with_chunk(file, b"sBIT" + bytes([used_bits] * (1 if values.ndim == 2 else 3)))


def with_chunk(file, chunk):
    """A PNG with a further chunk, its kind and content, behind the header."""
    return (
        file[:33]
        + struct.pack(">I", len(chunk) - 4)
        + chunk
        + struct.pack(">I", zlib.crc32(chunk))
        + file[33:]
    )


def pnm(values, most):
    kind = b"P5" if values.ndim == 2 else b"P6"
    (height, width) = values.shape[:2]
    dtype = ">u2" if most > 255 else "u1"

    return (
        b"%b\n# made by hand\n%d %d\n%d\n" % (kind, width, height, most)
        + values.astype(dtype).tobytes()
    )


def packed(values, bits):
    """Rows of values of 10 to 14 bits without gaps."""
    rows = ("".join(f"{value:0{bits}b}" for value in row) for row in values.tolist())
    return b"".join(
        int(row.ljust(-(-len(row) // 8) * 8, "0"), 2).to_bytes(-(-len(row) // 8), "big")
        for row in rows
    )


def tiff(values, order="<", bits=None, pages=1, is_big=False, thumbnails=0, **tags):
    """An uncompressed TIFF or BigTIFF of grey levels or RGB; tags such as t281=("H", 4095), of any number of values.

    Further pages, and thumbnails, have the same pixels. Fewer bits than the dtype has are packed.
    """
    height, width, *channels = values.shape
    samples = channels[0] if channels else 1
    pixels = (
        packed(values, bits) if bits else values.astype(values.dtype.newbyteorder(order)).tobytes()
    )
    word, count, room = ("Q", "Q", 8) if is_big else ("I", "H", 4)
    fields = {
        256: ("H", width),
        257: ("H", height),
        258: ("H", *[bits or values.dtype.itemsize * 8] * samples),
        259: ("H", 1),
        262: ("H", 1 if samples == 1 else 2),
        273: ("I", 16),
        277: ("H", samples),
        278: ("H", height),
        279: ("I", len(pixels)),
        339: ("H", *[_FORMATS[values.dtype.kind]] * samples),
        **{int(tag[1:]): value for tag, value in tags.items()},
    }
    body = pixels + bytes(-len(pixels) % 8)
    first = 16 + len(body)

    for page in range(pages + thumbnails):
        of_page = fields | ({254: ("I", 1)} if page >= pages else {})
        size = struct.calcsize(order + count) + len(of_page) * (4 + 2 * room) + room
        start = 16 + len(body)
        entries = b""
        extra = b""

        for tag, (kind, *numbers) in sorted(of_page.items()):
            value = struct.pack(f"{order}{len(numbers)}{kind}", *numbers)
            if len(value) > room:
                place = start + size + len(extra)
                extra += value + bytes(-len(value) % 8)
                value = struct.pack(order + word, place)

            entries += struct.pack(
                f"{order}HH{word}",
                tag,
                _TIFF_TYPES[kind],
                len(numbers),
            ) + value.ljust(room, b"\0")

        extra += bytes(-(size + len(extra)) % 8)
        following = 0 if page == pages + thumbnails - 1 else start + size + len(extra)
        body += (
            struct.pack(order + count, len(of_page))
            + entries
            + struct.pack(order + word, following)
            + extra
        )

    version = (
        struct.pack(f"{order}HHHQ", 43, 8, 0, first)
        if is_big
        else struct.pack(f"{order}HI", 42, first)
    )
    file = (b"II" if order == "<" else b"MM") + version

    return file + bytes(16 - len(file)) + body
