"""Image files of more than 8 bits, written by hand, with what they state about their values."""

import dataclasses
import struct
import zlib

import numpy as np

from tests.data.packed_files import encode

_TIFF_TYPES = {"H": 3, "I": 4, "f": 11, "d": 12}
_FORMATS = {"u": 1, "i": 2, "f": 3}
_TIFF_HEADER_BYTES = 16
_PNG_HEADER_BYTES = 33


def png(values, used_bits=None):
    """Return a PNG of 16 bits, with sBIT if the number of used bits is given."""
    num_channels = 1
    if values.ndim == 3:
        num_channels = 3
        values = values[..., ::-1]

    file = encode(".png", values)
    if used_bits is None:
        return file
    return with_chunk(file, b"sBIT" + bytes([used_bits] * num_channels))


def with_chunk(file, chunk):
    """Return a PNG with a further chunk (its kind and content) behind the header."""
    length = struct.pack(">I", len(chunk) - 4)
    checksum = struct.pack(">I", zlib.crc32(chunk))

    header = file[:_PNG_HEADER_BYTES]
    rest = file[_PNG_HEADER_BYTES:]
    return header + length + chunk + checksum + rest


def pnm(values, most):
    """Return a PGM (H, W) or PPM (H, W, 3) whose largest value is `most`."""
    kind = "P5" if values.ndim == 2 else "P6"
    height, width = values.shape[:2]
    header = f"{kind}\n# made by hand\n{width} {height}\n{most}\n"
    dtype = ">u2" if most > 255 else "u1"
    pixels = values.astype(dtype).tobytes()

    return header.encode() + pixels


def packed(values, bits):
    """Return rows of values of 10 to 14 bits without gaps, each row filled up to a byte."""
    rows = []
    for row in values.tolist():
        digits = "".join(f"{value:0{bits}b}" for value in row)
        is_set = np.array(list(digits), int)
        rows.append(np.packbits(is_set).tobytes())
    return b"".join(rows)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Byte order and sizes of numbers: TIFF has 32-bit places, BigTIFF 64-bit places."""

    order: str
    is_big: bool

    @property
    def place(self):
        """The code of `struct` for a place or a number of values."""
        return "Q" if self.is_big else "I"

    @property
    def place_bytes(self):
        return 8 if self.is_big else 4

    def pack(self, codes, *numbers):
        return struct.pack(self.order + codes, *numbers)

    def pack_header(self, first_directory):
        mark = b"II" if self.order == "<" else b"MM"
        if self.is_big:
            header = mark + self.pack("HHHQ", 43, 8, 0, first_directory)
        else:
            header = mark + self.pack("HI", 42, first_directory)
        return header.ljust(_TIFF_HEADER_BYTES, b"\0")

    def pack_directory(self, fields, start, is_last):
        """Return a directory that begins at `start`, followed by its longer values.

        A further directory is expected behind these, unless this one is the last.
        """
        count = self.pack("Q" if self.is_big else "H", len(fields))
        entry_bytes = 4 + 2 * self.place_bytes
        size = len(count) + len(fields) * entry_bytes + self.place_bytes

        entries = b""
        longer_values = b""
        for tag, (kind, *numbers) in sorted(fields.items()):
            value = self.pack(f"{len(numbers)}{kind}", *numbers)
            if len(value) > self.place_bytes:
                place = start + size + len(longer_values)
                longer_values += value + bytes(-len(value) % 8)
                value = self.pack(self.place, place)
            entries += self.pack(
                "HH" + self.place,
                tag,
                _TIFF_TYPES[kind],
                len(numbers),
            )
            entries += value.ljust(self.place_bytes, b"\0")

        longer_values += bytes(-(size + len(longer_values)) % 8)
        following = 0 if is_last else start + size + len(longer_values)
        return count + entries + self.pack(self.place, following) + longer_values


def tiff(
    values,
    order="<",
    bits=None,
    pages=1,
    is_big=False,
    thumbnails=0,
    photometric=None,
    most=None,
    **tags,
):
    """Return an uncompressed TIFF or BigTIFF of grey levels or RGB.

    `photometric` and `most` are PhotometricInterpretation and MaxSampleValue; other tags are
    written as t340=("H", 0), with any number of values. Further pages, and thumbnails, have the
    same pixels. Fewer bits than the dtype has are packed.
    """
    layout = _Layout(order, is_big)
    pixels = values.astype(values.dtype.newbyteorder(order)).tobytes()
    if bits is not None:
        pixels = packed(values, bits)

    fields = _describe_pixels(values, len(pixels), bits)
    if photometric is not None:
        fields[262] = ("H", photometric)
    if most is not None:
        fields[281] = ("H", most)
    for name, value in tags.items():
        fields[int(name.removeprefix("t"))] = value

    body = pixels + bytes(-len(pixels) % 8)
    file = layout.pack_header(_TIFF_HEADER_BYTES + len(body)) + body
    num_directories = pages + thumbnails
    for page in range(num_directories):
        fields_of_page = dict(fields)
        if page >= pages:
            fields_of_page[254] = ("I", 1)
        is_last = page == num_directories - 1
        file += layout.pack_directory(
            fields_of_page,
            len(file),
            is_last,
        )
    return file


def _describe_pixels(values, num_bytes, bits):
    """Return the tags that every TIFF has: sizes, bits, photometric interpretation, one strip."""
    height, width = values.shape[:2]
    samples = values.size // (height * width)
    bits_per_sample = bits or values.dtype.itemsize * 8
    kind = _FORMATS[values.dtype.kind]

    return {
        256: ("H", width),
        257: ("H", height),
        258: ("H", *[bits_per_sample] * samples),
        259: ("H", 1),
        262: ("H", 1 if samples == 1 else 2),
        273: ("I", _TIFF_HEADER_BYTES),
        277: ("H", samples),
        278: ("H", height),
        279: ("I", num_bytes),
        339: ("H", *[kind] * samples),
    }
