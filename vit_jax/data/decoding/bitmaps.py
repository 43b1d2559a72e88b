"""Decode bitmaps whose bands are bit fields: BMP of 16 or 32 bits with masks, PAM, Sun raster.

OpenCV 5.0.0 ignores the masks of a BMP of 32 bits, halves the range of one of 16, mixes up the
bands of a PAM, and exchanges red and blue in the colour map of a Sun raster.
"""

import re
import struct

import numpy as np

MOST_BANDS = 4

_BMP_SIDES_AT = 18
_BMP_BITS_AT = 28
_BMP_COMPRESSION_AT = 30
_BMP_MASKS_AT = 54
_BMP_PLAIN = 0
_BMP_MASKED = (3, 6)
_MASKS_OF_16_BITS = (0x7C00, 0x03E0, 0x001F)

_PAM_HEADER = re.compile(rb"P7\s.*?\bENDHDR[^\n]*\n", re.DOTALL)

_SUN_LAYOUT = ">8I"
_SUN_PLAIN = (0, 1)


class UndecodableRaster(ValueError):
    """A layout that is not supported; the message names it."""


def is_bmp_of_bit_fields(file: bytes) -> bool:
    """Return True for a BMP of 16 bits, or of 32 with masks."""
    if not file.startswith(b"BM") or len(file) < _BMP_MASKS_AT or file[14] < 40:
        return False
    (bits,) = struct.unpack_from("<H", file, _BMP_BITS_AT)
    (compression,) = struct.unpack_from("<I", file, _BMP_COMPRESSION_AT)
    if bits == 16:
        return compression == _BMP_PLAIN or compression in _BMP_MASKED
    return bits == 32 and compression in _BMP_MASKED


def decode_bmp(file: bytes) -> np.ndarray | None:
    """Return a BMP of bit fields as uint8 RGB, (H, W, 3); None where it is cut off.

    Raises:
      UndecodableRaster: the bits of a mask are not next to each other.
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
    if width <= 0 or height == 0 or len(file) < start + height * row_bytes:
        return None
    rows = np.frombuffer(file, np.uint8, height * row_bytes, start).reshape(height, row_bytes)
    numbers = np.ascontiguousarray(rows).view("<u2" if bits == 16 else "<u4")[:, :width]
    if signed_height > 0:
        numbers = numbers[::-1]
    return np.stack([_read_bit_field(numbers, mask) for mask in masks], axis=-1)


def _read_bit_field(numbers: np.ndarray, mask: int) -> np.ndarray:
    """Return the band under a mask, scaled to all 8 bits."""
    shift = (mask & -mask).bit_length() - 1
    most = mask >> max(shift, 0)
    if mask == 0 or most & (most + 1):
        raise UndecodableRaster(
            f"The file is a BMP with the mask {mask:#x}, which is empty or has gaps: save it as PNG"
        )
    values = (numbers & numbers.dtype.type(mask)) >> numbers.dtype.type(shift)
    return np.rint(values * (255 / most)).astype(np.uint8)


def decode_pam(file: bytes) -> np.ndarray:
    """Return the values of a PAM, (H, W, 3), uint8 or uint16; MAXVAL scales them later.

    Raises:
      UndecodableRaster: the layout is not supported, or the file is cut off.
    """
    header = _PAM_HEADER.match(file)
    if header is None:
        raise UndecodableRaster("The file starts as PAM but its header is cut off or damaged")
    fields = dict(
        re.findall(rb"^(WIDTH|HEIGHT|DEPTH|MAXVAL)\s+(\d{1,9})\s*$", header[0], re.MULTILINE)
    )
    kind = re.search(rb"^TUPLTYPE\s+(\w+)", header[0], re.MULTILINE)
    if len(fields) < 4:
        raise UndecodableRaster(
            "The file starts as PAM but its header lacks WIDTH, HEIGHT, DEPTH or MAXVAL"
        )
    width, height, bands, most = (
        int(fields[name]) for name in (b"WIDTH", b"HEIGHT", b"DEPTH", b"MAXVAL")
    )
    if not 1 <= bands <= MOST_BANDS:
        raise UndecodableRaster(
            f"The file is a PAM of {bands} bands, and images have 1 to {MOST_BANDS}: save it as RGB"
        )
    if kind is not None and kind[1].startswith(b"CMYK"):
        raise UndecodableRaster("The file is a PAM of CMYK: save it as RGB")
    if not 1 <= most <= 65535:
        raise UndecodableRaster(
            f"The file is a PAM with MAXVAL {most}, which must be from 1 to 65535"
        )
    dtype = np.dtype(">u2" if most > 255 else "u1")
    count = height * width * bands
    if len(file) - header.end() < count * dtype.itemsize:
        raise UndecodableRaster(f"The file starts as PAM but is cut off ({len(file)} bytes)")
    values = np.frombuffer(file, dtype, count, header.end()).reshape(height, width, bands)
    colours = values[..., :3] if bands >= 3 else np.repeat(values[..., :1], 3, axis=-1)
    return np.ascontiguousarray(colours, dtype.newbyteorder("="))


def require_plain_sun_raster(file: bytes) -> None:
    """Raise UndecodableRaster for a Sun raster of another layout than grey of 8 bits, or BGR of 24 or 32."""
    if len(file) < struct.calcsize(_SUN_LAYOUT):
        return
    _, _, _, bits, _, kind, _, map_bytes = struct.unpack_from(_SUN_LAYOUT, file)
    if bits not in (8, 24, 32):
        layout = f"values of {bits} bits"
    elif kind not in _SUN_PLAIN:
        layout = f"the type {kind}"
    elif map_bytes > 0:
        layout = "a colour map"
    else:
        return
    raise UndecodableRaster(
        f"The file is a Sun raster with {layout}, which is not supported: save it as PNG"
    )
