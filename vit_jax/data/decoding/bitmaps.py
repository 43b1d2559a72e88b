"""Decode bitmaps whose bands are bit fields: BMP of 16 or 32 bits with masks, PAM, Sun raster.

OpenCV 5.0.0 ignores the masks of a BMP of 32 bits, halves the range of one of 16, mixes up the
bands of a PAM, and exchanges red and blue in the colour map of a Sun raster.
"""

import re
import struct

import numpy as np

from vit_jax.data.decoding.errors import UnreadableImage

MOST_BANDS = 4

_BMP_SIDES_AT = 18
_BMP_BITS_AT = 28
_BMP_COMPRESSION_AT = 30
_BMP_MASKS_AT = 54
_BMP_PLAIN = 0
_BMP_MASKED = (3, 6)
_MASKS_OF_16_BITS = (0x7C00, 0x03E0, 0x001F)

_PAM_HEADER = re.compile(rb"P7\s.*?\bENDHDR[^\n]*\n", re.DOTALL)
_PAM_FIELD = re.compile(rb"^(WIDTH|HEIGHT|DEPTH|MAXVAL)\s+(\d{1,9})\s*$", re.MULTILINE)
_PAM_KIND = re.compile(rb"^TUPLTYPE\s+(\w+)", re.MULTILINE)

_SUN_LAYOUT = ">8I"
_SUN_PLAIN = (0, 1)


def is_bmp_of_bit_fields(file: bytes) -> bool:
    """Return True for a BMP of 16 bits, or of 32 with masks."""
    if not file.startswith(b"BM") or len(file) < _BMP_MASKS_AT:
        return False
    if file[14] < 40:
        return False

    (bits,) = struct.unpack_from("<H", file, _BMP_BITS_AT)
    (compression,) = struct.unpack_from("<I", file, _BMP_COMPRESSION_AT)
    if bits == 16:
        return compression == _BMP_PLAIN or compression in _BMP_MASKED
    if bits == 32:
        return compression in _BMP_MASKED
    return False


def decode_bmp(file: bytes) -> np.ndarray | None:
    """Return a BMP of bit fields as uint8 RGB, (H, W, 3); None where it is cut off.

    Raises:
      UnreadableImage: the bits of a mask are not next to each other.
    """
    width, signed_height = struct.unpack_from("<ii", file, _BMP_SIDES_AT)
    (start,) = struct.unpack_from("<I", file, 10)
    (bits,) = struct.unpack_from("<H", file, _BMP_BITS_AT)
    (compression,) = struct.unpack_from("<I", file, _BMP_COMPRESSION_AT)

    masks = _MASKS_OF_16_BITS
    if compression in _BMP_MASKED:
        if len(file) < _BMP_MASKS_AT + 12:
            return None
        masks = struct.unpack_from("<3I", file, _BMP_MASKS_AT)

    height = abs(signed_height)
    row_bytes = (abs(width) * bits + 31) // 32 * 4
    if width <= 0 or height == 0:
        return None
    if len(file) < start + height * row_bytes:
        return None

    rows = np.frombuffer(file, np.uint8, height * row_bytes, start)
    rows = rows.reshape(height, row_bytes)
    dtype = f"<u{bits // 8}"
    numbers = np.ascontiguousarray(rows).view(dtype)
    numbers = numbers[:, :width]
    if signed_height > 0:
        numbers = numbers[::-1]

    bands = [_read_bit_field(numbers, mask) for mask in masks]
    return np.stack(bands, axis=-1)


def _read_bit_field(numbers: np.ndarray, mask: int) -> np.ndarray:
    """Return the band under a mask, scaled to all 8 bits."""
    shift = (mask & -mask).bit_length() - 1
    most = mask >> max(shift, 0)
    if mask == 0 or most & (most + 1):
        raise UnreadableImage(
            f"The file is a BMP with the mask {mask:#x}, which is empty or has gaps: save it as PNG",
        )

    number = numbers.dtype.type
    values = numbers & number(mask)
    values = values >> number(shift)
    scaled = np.rint(values * (255 / most))
    return scaled.astype(np.uint8)


def decode_pam(file: bytes) -> np.ndarray:
    """Return the values of a PAM, (H, W, 3), uint8 or uint16; MAXVAL scales them later.

    Raises:
      UnreadableImage: the layout is not supported, or the file is cut off.
    """
    header = _PAM_HEADER.match(file)
    if header is None:
        raise UnreadableImage("The file starts as PAM but its header is cut off or damaged")

    fields = dict(_PAM_FIELD.findall(header[0]))
    if len(fields) < 4:
        raise UnreadableImage(
            "The file starts as PAM but its header lacks WIDTH, HEIGHT, DEPTH or MAXVAL"
        )
    width = int(fields[b"WIDTH"])
    height = int(fields[b"HEIGHT"])
    bands = int(fields[b"DEPTH"])
    most = int(fields[b"MAXVAL"])

    if not 1 <= bands <= MOST_BANDS:
        raise UnreadableImage(
            f"The file is a PAM of {bands} bands, and images have 1 to {MOST_BANDS}: save it as RGB",
        )

    kind = _PAM_KIND.search(header[0])
    if kind is not None and kind[1].startswith(b"CMYK"):
        raise UnreadableImage("The file is a PAM of CMYK: save it as RGB")
    if not 1 <= most <= 65535:
        raise UnreadableImage(
            f"The file is a PAM with MAXVAL {most}, which must be from 1 to 65535",
        )

    dtype = np.dtype(">u2" if most > 255 else "u1")

    count = height * width * bands
    pixel_bytes = len(file) - header.end()
    if pixel_bytes < count * dtype.itemsize:
        raise UnreadableImage(f"The file starts as PAM but is cut off ({len(file)} bytes)")
    values = np.frombuffer(file, dtype, count, header.end())
    values = values.reshape(height, width, bands)

    if bands >= 3:
        colours = values[..., :3]
    else:
        colours = np.repeat(values[..., :1], 3, axis=-1)
    return np.ascontiguousarray(colours, dtype.newbyteorder("="))


def require_plain_sun_raster(file: bytes) -> None:
    """Raise UnreadableImage for a Sun raster that is neither grey of 8 bits nor BGR."""
    if len(file) < struct.calcsize(_SUN_LAYOUT):
        return

    header = struct.unpack_from(_SUN_LAYOUT, file)
    bits = header[3]
    kind = header[5]
    map_bytes = header[7]
    if bits not in (8, 24, 32):
        layout = f"values of {bits} bits"
    elif kind not in _SUN_PLAIN:
        layout = f"the type {kind}"
    elif map_bytes > 0:
        layout = "a colour map"
    else:
        return
    raise UnreadableImage(
        f"The file is a Sun raster with {layout}, which is not supported: save it as PNG",
    )
