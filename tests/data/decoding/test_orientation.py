"""Photographs that are stored turned, against OpenCV's reading (JPEG) and against pixels written by hand."""

import functools
import io
import struct

import cv2
import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from tests.data import deep_files
from vit_jax.data.crops import Box, cut
from vit_jax.data.decoding import heif
from vit_jax.data.decoding.images import decode, plan_crop
from vit_jax.data.decoding.orientation import orientation_of, tagged, turn, turn_back
from vit_jax.data.records import Record
from vit_jax.data.transforms import TrainTransform, build_evaluation_transform
from vit_jax.tools.prepare.prepared import prepare_folder

ORIENTATIONS = range(1, 9)
PIXELS = np.random.default_rng(0).integers(0, 256, (48, 80, 3), np.uint8)


def photograph(orientation):
    smooth = cv2.resize(PIXELS[:6, :10], (80, 48))
    return tagged(
        cv2.imencode(".jpg", smooth, (cv2.IMWRITE_JPEG_RST_INTERVAL, 5))[1].tobytes(),
        orientation,
    )


def by_opencv(file):
    return cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR_RGB)


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_upright_as_by_opencv(orientation):
    file = photograph(orientation)

    assert orientation_of(file) == orientation
    np.testing.assert_array_equal(decode(file, exif_orientation=True), by_opencv(file))
    np.testing.assert_array_equal(decode(file), by_opencv(photograph(1)))


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_a_crop_of_the_upright_image(orientation):
    """Decoded alone, without the rest of the file."""
    file = photograph(orientation)
    whole = by_opencv(file)

    for box in (
        Box(0, 0, 9, 20),
        Box(17, 5, 30, 31),
        Box(11, 9, *(side - 20 for side in whole.shape[:2])),
    ):

        def choose(*sides, box=box):
            assert sides == whole.shape[:2]
            return box

        np.testing.assert_array_equal(
            plan_crop(file, choose, box[2:], exif_orientation=True)(),
            cut(whole, box),
        )

        stored = turn_back(box, orientation, *whole.shape[:2])

        np.testing.assert_array_equal(turn(cut(decode(file), stored), orientation), cut(whole, box))


STORED = np.array([[1, 2, 3], [4, 5, 6]])
UPRIGHT = {
    1: [[1, 2, 3], [4, 5, 6]],
    2: [[3, 2, 1], [6, 5, 4]],
    3: [[6, 5, 4], [3, 2, 1]],
    4: [[4, 5, 6], [1, 2, 3]],
    5: [[1, 4], [2, 5], [3, 6]],
    6: [[4, 1], [5, 2], [6, 3]],
    7: [[6, 3], [5, 2], [4, 1]],
    8: [[3, 6], [2, 5], [1, 4]],
}


def coloured(grid):
    """Pixels of another red, green and blue for each number of a grid."""
    return np.stack([np.multiply(grid, factor) for factor in (40, 25, 7)], axis=-1).astype(np.uint8)


def exif(order, orientation):
    """Exif data in either order of bytes."""
    start = struct.pack(f"{order}2sHIH", b"MM" if order == ">" else b"II", 42, 8, 1)
    return start + struct.pack(f"{order}HHIHHI", 274, 3, 1, orientation, 0, 0)


def png(order, orientation):
    return deep_files.with_chunk(
        deep_files.png(coloured(STORED)),
        b"eXIf" + exif(order, orientation),
    )


def webp(order, orientation):
    options = (cv2.IMWRITE_WEBP_QUALITY, 101)
    pixels = cv2.imencode(".webp", coloured(STORED)[..., ::-1], options)[1].tobytes()[12:]
    # 8: with Exif; 3 x 2 pixels
    head = b"VP8X" + struct.pack("<I4B", 10, 8, 0, 0, 0) + bytes([2, 0, 0, 1, 0, 0])
    data = exif(order, orientation)
    chunks = b"WEBP" + head + pixels + b"EXIF" + struct.pack("<I", len(data)) + data

    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks


def tiff(order, orientation, is_big=False, bits=8):
    samples = (coloured(STORED).astype(int) * (257 if bits == 16 else 1)).astype(f"u{bits // 8}")
    return deep_files.tiff(samples, order, is_big=is_big, t274=("H", orientation))


FORMATS = {
    "PNG": png,
    "WebP": webp,
    "TIFF": tiff,
    "BigTIFF": functools.partial(tiff, is_big=True),
    "TIFF of 16 bits": functools.partial(tiff, bits=16),
}


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("kind", FORMATS)
def test_other_formats_by_hand(kind, order):
    """Stored pixels by default, whatever OpenCV does with the tag; upright pixels where they are wanted."""
    for orientation, upright in UPRIGHT.items():
        file = FORMATS[kind](order, orientation)

        assert orientation_of(file) == orientation
        np.testing.assert_array_equal(decode(file), coloured(STORED))
        np.testing.assert_array_equal(decode(file, exif_orientation=True), coloured(upright))

        planned = plan_crop(
            file,
            lambda height, width: Box(0, 0, height, width),
            (1, 1),
            exif_orientation=True,
        )

        np.testing.assert_array_equal(planned(), coloured(upright))


XMP = """<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
<rdf:Description rdf:about="" xmlns:tiff="http://ns.adobe.com/tiff/1.0/"{}>{}</rdf:Description></rdf:RDF></x:xmpmeta>"""


def xmp(orientation, is_attribute):
    if is_attribute:
        return XMP.format(f' tiff:Orientation="{orientation}"', "").encode()
    return XMP.format("", f"<tiff:Orientation>{orientation}</tiff:Orientation>").encode()


def by_pillow(kind, orientation, way):
    """A file of the photograph that states the orientation in Exif or XMP data; of AVIF Exif becomes irot and imir."""
    pixels = cv2.resize(PIXELS[:6, :10], (80, 48))
    options = {}

    if way == "exif":
        tags = Image.Exif()
        tags[0x0112] = orientation
        options["exif"] = tags
    elif kind == "PNG":
        options["pnginfo"] = PngImagePlugin.PngInfo()
        text = xmp(orientation, is_attribute=way == "attribute").decode()
        options["pnginfo"].add_itxt("XML:com.adobe.xmp", text, zip=way == "element")
    elif kind == "TIFF":
        options["tiffinfo"] = {700: xmp(orientation, is_attribute=way == "attribute")}
    else:
        options["xmp"] = xmp(orientation, is_attribute=way == "attribute")

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)

    return file.getvalue()


@pytest.mark.parametrize("way", ["exif", "attribute", "element"])
@pytest.mark.parametrize(
    "kind",
    [
        "JPEG",
        "PNG",
        "WEBP",
        "TIFF",
        "AVIF",
    ],
)
def test_upright_as_by_pillow(kind, way):
    for orientation in ORIENTATIONS:
        file = by_pillow(kind, orientation, way)

        assert orientation_of(file) == orientation

        upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(file))))

        assert np.abs(decode(file, exif_orientation=True) - upright.astype(int)).max() <= 2
        assert decode(file).shape == (48, 80, 3)


@pytest.mark.parametrize("way", ["exif", "attribute", "element"])
def test_jpeg_2000_states_it_in_a_box(way):
    """Pillow reads none there."""
    file = cv2.imencode(".jp2", PIXELS)[1].tobytes()
    identifiers = {"exif": b"JpgTiffExif->JP2"}
    identifier = identifiers.get(way, bytes.fromhex("be7acfcb97a942e89c71999491e3afac"))

    for orientation in ORIENTATIONS:
        data = (
            exif("<", orientation)
            if way == "exif"
            else xmp(orientation, is_attribute=way == "attribute")
        )
        box = struct.pack(">I4s", 24 + len(data), b"uuid") + identifier + data
        at = file.index(b"jp2c") - 4

        assert orientation_of(file[:at] + box + file[at:]) == orientation


def test_irot_and_imir_come_first_and_exif_before_xmp():
    file = io.BytesIO()
    tags = Image.Exif()
    tags[0x0112] = 6
    Image.fromarray(PIXELS).save(file, "AVIF", exif=tags, xmp=xmp(3, is_attribute=True))
    both = file.getvalue()

    assert orientation_of(both) == 6

    at = both.index(b"irot") + 4

    assert orientation_of(both[:at] + b"\1" + both[at + 1 :]) == 8

    without = both.replace(b"irot", b"free")

    assert orientation_of(without) in (1, 3, 6)

    file = io.BytesIO()
    tags[0x0112] = 6  # Pillow removed it
    Image.fromarray(PIXELS).save(file, "JPEG", exif=tags, xmp=xmp(3, is_attribute=True))

    assert orientation_of(file.getvalue()) == 6


@pytest.mark.parametrize("quarters", range(4))
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("is_mirrored_first", [False, True])
def test_turns_of_avif_are_composed_in_their_order(quarters, axis, is_mirrored_first):
    """ISO 23008-12: irot turns to the left; imir swaps top and bottom (0), or left and right (1)."""
    turns = [(b"irot", quarters)] + ([(b"imir", axis)] if axis is not None else [])
    turns = turns[::-1] if is_mirrored_first else turns

    expected = STORED
    for kind, value in turns:
        expected = np.rot90(expected, value) if kind == b"irot" else np.flip(expected, value)

    file = bytes(value for _, value in turns)
    boxes = [heif.Box(kind, place, place + 1) for place, (kind, _) in enumerate(turns)]
    orientation = heif._compose(file, boxes)

    np.testing.assert_array_equal(turn(coloured(STORED), orientation), coloured(expected))


@pytest.mark.parametrize(
    "kind",
    [
        "JPEG",
        "PNG",
        "WEBP",
        "TIFF",
        "AVIF",
    ],
)
def test_damaged_metadata_state_a_number(kind):
    rng = np.random.default_rng(0)
    for way in ("exif", "attribute", "element"):
        file = by_pillow(kind, 6, way)
        for _ in range(40):
            damaged = bytearray(file)
            for place in rng.integers(4, len(file), 8):
                damaged[place] = rng.integers(256)

            assert orientation_of(bytes(damaged[: rng.integers(20, 2 * len(file))])) in ORIENTATIONS


@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"II*\0",
        b"MM\0*\0\0\0\x08\xff\xff",
        photograph(1).replace(b"\xff\xdb", b"\xff\xe1\0\x08Exif\0\0\xff\xdb", 1),
        tagged(photograph(1), 9),
        photograph(6)[:30],
        PIXELS,
    ],
)
def test_what_states_none_is_upright(file):
    assert orientation_of(file) == 1


def test_training_and_evaluation_see_the_same_side_up(make_config):
    """And with the default neither does."""
    record = Record(photograph(6), 0)
    upright = by_opencv(record.image)
    fields = {
        "image_size": upright.shape[:2],
        "train_crop": "none",
        "flip": False,
        "test_resize": "direct",
    }

    for config, expected in (
        (make_config(**fields, exif_orientation=True), upright),
        (make_config(**fields), cv2.resize(by_opencv(photograph(1)), upright.shape[1::-1])),
    ):
        trained = TrainTransform(config)(record, np.random.default_rng(0))

        np.testing.assert_array_equal(trained, build_evaluation_transform(config)(record))
        np.testing.assert_array_equal(trained, expected)


def test_a_smaller_copy_keeps_it(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.jpg").write_bytes(photograph(6))
    prepare_folder(tmp_path / "images", tmp_path / "copy", short_side=24)
    copy = (tmp_path / "copy" / "a.jpg").read_bytes()

    assert orientation_of(copy) == 6
    assert decode(copy, exif_orientation=True).shape == (40, 24, 3)
