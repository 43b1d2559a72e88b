"""Read boxes of AVIF and JPEG 2000, and the orientation, Exif and XMP of AVIF.

Source: ISO 14496-12 and 23008-12. Offsets and counts of the file are limits only: nothing is
allocated by them.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_MOST_BOXES = 4096
"""Number of boxes in one box."""
_MOST_ITEMS = 4096
"""Number of items with offsets in the file."""
_UNTIL_END = 0
_ITEM_LAYOUTS = {2: ">HH4s", 3: ">IH4s"}
"""`struct` layouts by the version of `infe`."""
# Bits of a byte of `av1C`.
_HIGH_BITS = 0x40
_TWELVE_BITS = 0x20
_MONOCHROME = 0x10

# Orientation of Exif by the quarter turns to the left, and the axis of a mirror after them: 0 swaps
# top and bottom, 1 left and right.
_ORIENTATIONS = {
    (0, None): 1,
    (1, None): 8,
    (2, None): 3,
    (3, None): 6,
    (0, 0): 4,
    (1, 0): 5,
    (2, 0): 2,
    (3, 0): 7,
    (0, 1): 2,
    (1, 1): 7,
    (2, 1): 4,
    (3, 1): 5,
}


class Box(NamedTuple):
    """A box of the file: its kind, and where its content is."""

    kind: bytes
    start: int
    end: int


class Metadata(NamedTuple):
    """Metadata of an AVIF.

    Attributes:
      orientation: 1 to 8, from the properties irot and imir; None: the image has neither.
      exif: Exif data in the form of a TIFF; empty without any.
      xmp: XMP data; empty without any.
    """

    orientation: int | None = None
    exif: bytes = b""
    xmp: bytes = b""


def read_boxes(
    file: bytes,
    start: int = 0,
    end: int | None = None,
) -> Iterator[Box]:
    """Yield the boxes between two places."""
    if end is None:
        end = len(file)
    end = min(end, len(file))

    for _ in range(_MOST_BOXES):
        if start + 8 > end:
            return
        size, kind = struct.unpack_from(">I4s", file, start)
        head = 8
        if size == 1:
            (size,) = struct.unpack_from(">Q", file, start + 8)
            head = 16
        if size == _UNTIL_END:
            size = end - start
        if size < head:
            return

        box_end = min(start + size, end)
        yield Box(kind, start + head, box_end)
        start += size


def read_metadata(file: bytes) -> Metadata:
    """Return the metadata of the primary image.

    Raises:
      struct.error: the file is cut off.
    """
    meta = _find(file, read_boxes(file), b"meta")
    if meta is None:
        return Metadata()

    boxes = _index_boxes(file, meta.start + 4, meta.end)
    kinds = _read_item_kinds(file, boxes.get(b"iinf"))
    exif = _read_item_data(file, boxes, _find_item(kinds, b"Exif"))
    xmp = _read_item_data(file, boxes, _find_item(kinds, b"mime"))

    if len(exif) > 4:
        (gap,) = struct.unpack_from(">I", exif)  # bytes up to the header of the TIFF
        exif = exif[4 + gap :]
    orientation = _read_orientation(file, boxes)
    return Metadata(orientation, exif, xmp)


def is_monochrome(file: bytes) -> bool:
    """Return True for an AVIF of grey images only; alpha is one, too."""
    codings = _find_codings(file)
    if not codings:
        return False
    return all(coding & _MONOCHROME for coding in codings)


def count_bits(file: bytes) -> int:
    """Return the bits of a value of an AVIF: 8, 10 or 12."""
    codings = _find_codings(file)
    if not codings or not codings[0] & _HIGH_BITS:
        return 8
    if codings[0] & _TWELVE_BITS:
        return 12
    return 10


def remove_sequence(file: bytes) -> bytes:
    """Return an AVIF in which a decoder sees only the primary image."""
    changed = bytearray(file)
    for box in read_boxes(file):
        if box.kind == b"ftyp":
            brands = file[box.start : box.end]
            changed[box.start : box.end] = brands.replace(b"avis", b"avif")
        elif box.kind == b"moov":
            kind_at = file.rindex(b"moov", 0, box.start)
            changed[kind_at : kind_at + 4] = b"free"
    return bytes(changed)


def _find_codings(file: bytes) -> list[int]:
    """Return the byte of bits and colours in the coding of each image of an AVIF.

    Any other file has none.
    """
    if file[4:8] != b"ftyp":
        return []
    try:
        return _read_codings(file)
    except (struct.error, IndexError):
        return []


def _read_codings(file: bytes) -> list[int]:
    meta = _find(file, read_boxes(file), b"meta")
    if meta is None:
        return []
    properties = _find(file, read_boxes(file, meta.start + 4, meta.end), b"iprp")
    if properties is None:
        return []
    container = _find(file, read_boxes(file, properties.start, properties.end), b"ipco")
    if container is None:
        return []

    codings = []
    for box in read_boxes(file, container.start, container.end):
        if box.kind == b"av1C":
            codings.append(file[box.start + 2])
    return codings


def _find(file: bytes, boxes: Iterator[Box], kind: bytes) -> Box | None:
    for box in boxes:
        if box.kind == kind:
            return box
    return None


def _index_boxes(file: bytes, start: int, end: int) -> dict[bytes, Box]:
    """Return the last box of each kind between two places."""
    return {box.kind: box for box in read_boxes(file, start, end)}


def _find_item(kinds: dict[int, bytes], wanted: bytes) -> int | None:
    """Return the number of the first item of a kind."""
    for item, kind in kinds.items():
        if kind == wanted:
            return item
    return None


def _read_orientation(
    file: bytes,
    boxes: dict[bytes, Box],
) -> int | None:
    primary = boxes.get(b"pitm")
    properties = boxes.get(b"iprp")
    if primary is None or properties is None:
        return None

    layout = ">I" if file[primary.start] > 0 else ">H"
    (item,) = struct.unpack_from(layout, file, primary.start + 4)
    parts = _index_boxes(file, properties.start, properties.end)
    if b"ipco" not in parts or b"ipma" not in parts:
        return None

    container = parts[b"ipco"]
    known = list(read_boxes(file, container.start, container.end))
    turns = []
    for number in _read_associations(file, parts[b"ipma"], item):
        if not 0 < number <= len(known):
            continue
        box = known[number - 1]
        if box.kind in (b"irot", b"imir"):
            turns.append(box)
    return _compose_turns(file, turns)


def _compose_turns(file: bytes, turns: Sequence[Box]) -> int | None:
    """Return the orientation of turns and mirrors in their order."""
    if not turns:
        return None

    quarters = 0
    axis: int | None = None
    for box in turns:
        value = file[box.start]
        if box.kind == b"irot" and axis is None:
            quarters += value & 3
        elif box.kind == b"irot":
            quarters -= value & 3
        elif axis is None:
            axis = value & 1
        else:
            if axis != value & 1:
                quarters += 2
            axis = None
    return _ORIENTATIONS[quarters % 4, axis]


def _read_associations(file: bytes, box: Box, wanted: int) -> list[int]:
    """Return the numbers of the properties of an item, from 1 on, in their order."""
    version_and_flags, count = struct.unpack_from(">II", file, box.start)
    item_layout = ">H"
    if version_and_flags >> 24:
        item_layout = ">I"
    index_kind = "B"
    index_bits = 0x7F
    if version_and_flags & 1:
        index_kind = "H"
        index_bits = 0x7FFF

    place = box.start + 8
    for _ in range(min(count, _MOST_ITEMS)):
        (item,) = struct.unpack_from(item_layout, file, place)
        place += struct.calcsize(item_layout)

        number = file[place : place + 1]
        if not number:
            raise struct.error("cut off")
        layout = f">{number[0]}{index_kind}"
        indices = struct.unpack_from(layout, file, place + 1)

        if item == wanted:
            return [index & index_bits for index in indices]
        place += 1 + struct.calcsize(layout)
    return []


def _read_item_kinds(file: bytes, box: Box | None) -> dict[int, bytes]:
    """Return the kind of each item by its number."""
    if box is None:
        return {}

    kinds: dict[int, bytes] = {}
    start = box.start + 8
    if file[box.start] == 0:
        start = box.start + 6
    for entry in read_boxes(file, start, box.end):
        version = file[entry.start]
        if entry.kind != b"infe" or version not in _ITEM_LAYOUTS:
            continue
        item, _, kind = struct.unpack_from(_ITEM_LAYOUTS[version], file, entry.start + 4)
        kinds[item] = kind
    return kinds


def _read_item_data(
    file: bytes,
    boxes: dict[bytes, Box],
    wanted: int | None,
) -> bytes:
    """Return the bytes of an item; empty where it is missing or stored in several parts."""
    box = boxes.get(b"iloc")
    if wanted is None or box is None:
        return b""

    version, sizes, more_sizes = struct.unpack_from(">BxxxBB", file, box.start)
    offset_size = sizes >> 4
    length_size = sizes & 15
    base_size = more_sizes >> 4
    index_size = 0
    if version:
        index_size = more_sizes & 15
    number_size = 4
    if version < 2:
        number_size = 2
    place = box.start + 6

    def take(size: int) -> int:
        nonlocal place
        start = place
        place += size
        if place > box.end:
            raise struct.error("cut off")
        return int.from_bytes(file[start:place], "big")

    num_items = min(take(number_size), _MOST_ITEMS)
    for _ in range(num_items):
        item = take(number_size)
        is_in_idat = version > 0 and take(2) & 15 == 1
        take(2)  # the file that holds the data: this one
        base = take(base_size)
        extents = take(2)
        for _ in range(extents):
            take(index_size)
            offset = base + take(offset_size)
            length = take(length_size)
            if item != wanted or extents != 1:
                continue
            if is_in_idat:
                offset += _find_idat(file, boxes)
            if not length:
                return file[offset:]
            return file[offset : offset + length]
    return b""


def _find_idat(file: bytes, boxes: dict[bytes, Box]) -> int:
    """Return where the data in the metadata begin; the end of the file without any."""
    if b"idat" not in boxes:
        return len(file)
    return boxes[b"idat"].start
