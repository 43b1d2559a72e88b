"""Facts from the first bytes of a file: why it is no image, and whether its CMYK colours are ambiguous."""

_SIGNATURES = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n", "PNG"),
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"RIFF", "WebP"),
)
_MARKUP = (b"<!doctype", b"<html", b"<?xml", b"<svg", b"<head", b"<!--")

_JPEG_START = b"\xff\xd8"
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_ADOBE, _JPEG_SCAN = 0xEE, 0xDA


def explain_unreadable(file: bytes) -> str:
    """Why a file that no decoder accepts is no image."""
    if not file:
        return "The file is empty"
    if file[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(_MARKUP):
        return f"The file is a page of markup (HTML, XML or SVG, {len(file)} bytes), no image of pixels"
    for signature, name in _SIGNATURES:
        if file.startswith(signature):
            return f"The file starts as {name} but is cut off, damaged or of an unknown kind ({len(file)} bytes)"
    return f"The file is of no known image format ({len(file)} bytes)"


def has_unmarked_inks(file: bytes) -> bool:
    """Whether this is a CMYK JPEG without the marker by which Adobe says that the inks are stored inverted.

    Without it decoders disagree: to TensorFlow 0 means no ink, to PIL and OpenCV full ink.
    """
    if not file.startswith(_JPEG_START):
        return False
    place, inks, marked = 2, 0, False
    while place + 10 <= len(file) and file[place] == 0xFF:
        marker = file[place + 1]
        if marker == _JPEG_SCAN:
            break
        if marker in _JPEG_FRAMES:
            inks = file[place + 9]
        marked = marked or (marker == _JPEG_ADOBE and file[place + 4 : place + 9] == b"Adobe")
        # A marker may be preceded by any number of the bytes 0xFF.
        place += 1 if marker == 0xFF else 2 + int.from_bytes(file[place + 2 : place + 4], "big")
    return inks == 4 and not marked
