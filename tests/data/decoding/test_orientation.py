"""Photographs that are stored turned, against OpenCV (JPEG) and pixels written by hand."""

import functools
import io
import struct

import cv2
import numpy as np
import pytest
from numpy.testing import assert_array_equal
from PIL import Image, ImageOps, PngImagePlugin

from tests.data import deep_files
from tests.data.packed_files import encode
from vit_jax.data.crops import Box, cut
from vit_jax.data.decoding import heif
from vit_jax.data.decoding.images import decode, plan_crop
from vit_jax.data.decoding.orientation import add_orientation, read_orientation, turn, turn_back
from vit_jax.data.records import Record
from vit_jax.data.transforms import TrainTransform, build_evaluation_transform
from vit_jax.tools.prepare.prepared import prepare_folder

ORIENTATIONS = range(1, 9)
ORIENTATION_TAG = 0x0112
PIXELS = np.random.default_rng(0).integers(0, 256, (48, 80, 3), np.uint8)
SMOOTH = cv2.resize(PIXELS[:6, :10], (80, 48))


def encode_photograph(orientation):
    file = encode(
        ".jpg",
        SMOOTH,
        cv2.IMWRITE_JPEG_RST_INTERVAL,
        5,
    )
    return add_orientation(file, orientation)


def decode_by_opencv(file):
    content = np.frombuffer(file, np.uint8)
    return cv2.imdecode(content, cv2.IMREAD_COLOR_RGB)


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_upright_as_by_opencv(orientation):
    file = encode_photograph(orientation)
    upright = decode_by_opencv(file)
    stored = decode_by_opencv(encode_photograph(1))

    assert read_orientation(file) == orientation
    assert_array_equal(decode(file, exif_orientation=True), upright)
    assert_array_equal(decode(file), stored)


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_a_crop_of_the_upright_image(orientation):
    """The crop is decoded alone, without the rest of the file."""
    file = encode_photograph(orientation)
    whole = decode_by_opencv(file)
    height, width = whole.shape[:2]

    boxes = [
        Box(0, 0, 9, 20),
        Box(17, 5, 30, 31),
        Box(11, 9, height - 20, width - 20),
    ]
    for box in boxes:
        sides = []

        def choose(*shape, box=box, sides=sides):
            sides.append(shape)
            return box

        expected = cut(whole, box)
        read = plan_crop(
            file,
            choose,
            (box.height, box.width),
            exif_orientation=True,
        )
        assert_array_equal(read(), expected)
        assert sides == [(height, width)]

        stored_box = turn_back(box, orientation, height, width)
        stored = cut(decode(file), stored_box)
        turned = turn(stored, orientation)
        assert_array_equal(turned, expected)


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


def make_pixels(grid):
    """Return pixels of another red, green and blue for each number of a grid."""
    factors = (40, 25, 7)
    return np.multiply.outer(grid, factors).astype(np.uint8)


STORED_PIXELS = make_pixels(STORED)


def make_exif(order, orientation):
    """Return Exif data in either order of bytes."""
    mark = b"MM" if order == ">" else b"II"
    start = struct.pack(f"{order}2sHIH", mark, 42, 8, 1)
    entry = struct.pack(
        f"{order}HHIHHI",
        ORIENTATION_TAG,
        3,
        1,
        orientation,
        0,
        0,
    )
    return start + entry


def encode_png(order, orientation):
    file = deep_files.png(STORED_PIXELS)
    exif = make_exif(order, orientation)

    return deep_files.with_chunk(file, b"eXIf" + exif)


def make_riff_chunk(kind, content):
    length = struct.pack("<I", len(content))
    return kind + length + content


def encode_webp(order, orientation):
    bgr = STORED_PIXELS[..., ::-1]
    encoded = encode(
        ".webp",
        bgr,
        cv2.IMWRITE_WEBP_QUALITY,
        101,
    )
    chunk_of_pixels = encoded[12:]
    with_exif = b"\x08\0\0\0"
    sizes_less_1 = b"\2\0\0\1\0\0"
    head = make_riff_chunk(b"VP8X", with_exif + sizes_less_1)
    exif = make_riff_chunk(b"EXIF", make_exif(order, orientation))

    chunks = b"WEBP" + head + chunk_of_pixels + exif
    return make_riff_chunk(b"RIFF", chunks)


def encode_tiff(order, orientation, is_big=False, bits=8):
    samples = STORED_PIXELS
    if bits == 16:
        samples = samples * np.uint16(257)

    return deep_files.tiff(
        samples,
        order,
        is_big=is_big,
        t274=("H", orientation),
    )


FORMATS = {
    "PNG": encode_png,
    "WebP": encode_webp,
    "TIFF": encode_tiff,
    "BigTIFF": functools.partial(encode_tiff, is_big=True),
    "TIFF of 16 bits": functools.partial(encode_tiff, bits=16),
}


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("kind", FORMATS)
def test_other_formats_by_hand(kind, order):
    """Pixels are as stored by default, also where OpenCV turns them; upright on request."""
    encode_kind = FORMATS[kind]

    for orientation, grid in UPRIGHT.items():
        file = encode_kind(order, orientation)

        decoded = decode(file)
        turned = decode(file, exif_orientation=True)
        read_crop = plan_crop(
            file,
            lambda height, width: Box(0, 0, height, width),
            (1, 1),
            exif_orientation=True,
        )

        upright = make_pixels(grid)
        assert read_orientation(file) == orientation
        assert_array_equal(decoded, STORED_PIXELS)
        assert_array_equal(turned, upright)
        assert_array_equal(read_crop(), upright)


XMP = """<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
<rdf:Description rdf:about="" xmlns:tiff="http://ns.adobe.com/tiff/1.0/"{}>{}</rdf:Description></rdf:RDF></x:xmpmeta>"""
WAYS = ("exif", "attribute", "element")  # Exif data, and an attribute or an element of XMP data


def make_xmp(orientation, way):
    attribute = ""
    element = ""
    if way == "attribute":
        attribute = f' tiff:Orientation="{orientation}"'
    else:
        element = f"<tiff:Orientation>{orientation}</tiff:Orientation>"

    return XMP.format(attribute, element).encode()


def make_pillow_exif(orientation):
    tags = Image.Exif()
    tags[ORIENTATION_TAG] = orientation
    return tags


def make_options(kind, orientation, way):
    """Return the options of Pillow that state the orientation in Exif or XMP data."""
    if way == "exif":
        return {"exif": make_pillow_exif(orientation)}

    xmp = make_xmp(orientation, way)
    if kind == "TIFF":
        return {"tiffinfo": {700: xmp}}
    if kind == "PNG":
        info = PngImagePlugin.PngInfo()
        info.add_itxt(
            "XML:com.adobe.xmp",
            xmp.decode(),
            zip=way == "element",
        )
        return {"pnginfo": info}
    return {"xmp": xmp}


def encode_by_pillow(pixels, kind, **options):
    file = io.BytesIO()
    image = Image.fromarray(pixels)
    image.save(file, kind, **options)
    return file.getvalue()


def turn_by_pillow(file):
    """Return the upright pixels of a file as int64."""
    image = Image.open(io.BytesIO(file))
    upright = ImageOps.exif_transpose(image)
    return np.asarray(upright).astype(int)


def encode_with_metadata(kind, orientation, way):
    """Return a file of the photograph; Exif data of AVIF become the boxes irot and imir."""
    options = make_options(kind, orientation, way)
    return encode_by_pillow(SMOOTH, kind, **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_upright_as_by_pillow(kind, way):
    for orientation in ORIENTATIONS:
        file = encode_with_metadata(kind, orientation, way)

        stored = decode(file)
        upright = decode(file, exif_orientation=True)

        difference = upright - turn_by_pillow(file)
        assert np.abs(difference).max() <= 2
        assert stored.shape == (48, 80, 3)
        assert read_orientation(file) == orientation


@pytest.mark.parametrize("way", WAYS)
def test_jpeg_2000_states_it_in_a_box(way):
    """A box before the pixels holds Exif or XMP data; Pillow reads neither."""
    file = encode(".jp2", PIXELS)
    start = file.index(b"jp2c") - 4

    for orientation in ORIENTATIONS:
        if way == "exif":
            identifier = b"JpgTiffExif->JP2"
            content = make_exif("<", orientation)
        else:
            identifier = bytes.fromhex("be7acfcb97a942e89c71999491e3afac")
            content = make_xmp(orientation, way)
        length = 8 + len(identifier) + len(content)
        header = struct.pack(">I4s", length, b"uuid")
        box = header + identifier + content
        with_box = file[:start] + box + file[start:]

        assert read_orientation(with_box) == orientation


def test_irot_and_imir_come_first_in_avif():
    file = encode_by_pillow(
        PIXELS,
        "AVIF",
        exif=make_pillow_exif(6),
        xmp=make_xmp(3, "attribute"),
    )

    assert read_orientation(file) == 6

    turned = bytearray(file)
    value_of_irot = file.index(b"irot") + 4
    turned[value_of_irot] = 1

    assert read_orientation(bytes(turned)) == 8

    without_irot = file.replace(b"irot", b"free")
    assert read_orientation(without_irot) in (1, 3, 6)


def test_exif_comes_before_xmp():
    file = encode_by_pillow(
        PIXELS,
        "JPEG",
        exif=make_pillow_exif(6),
        xmp=make_xmp(3, "attribute"),
    )

    assert read_orientation(file) == 6


@pytest.mark.parametrize("quarters", range(4))
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("is_mirrored_first", [False, True])
def test_turns_of_avif_are_composed_in_their_order(
    quarters,
    axis,
    is_mirrored_first,
):
    """irot turns to the left; imir swaps top and bottom (0) or left and right (1): ISO 23008-12."""
    turns = [(b"irot", quarters)]
    if axis is not None:
        turns.append((b"imir", axis))
    if is_mirrored_first:
        turns.reverse()

    expected = STORED
    for kind, value in turns:
        if kind == b"irot":
            expected = np.rot90(expected, value)
        else:
            expected = np.flip(expected, value)

    file = bytes(value for _, value in turns)
    boxes = []
    for place, (kind, _) in enumerate(turns):
        boxes.append(heif.Box(kind, place, place + 1))
    orientation = heif._compose_turns(file, boxes)

    found = turn(STORED_PIXELS, orientation)
    assert_array_equal(found, make_pixels(expected))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_damaged_metadata_state_a_number(kind):
    rng = np.random.default_rng(0)

    for way in WAYS:
        file = encode_with_metadata(kind, 6, way)
        for _ in range(40):
            damaged = bytearray(file)
            for place in rng.integers(4, len(file), 8):
                damaged[place] = rng.integers(256)
            length = rng.integers(20, 2 * len(file))

            orientation = read_orientation(bytes(damaged[:length]))

            assert orientation in ORIENTATIONS


USUAL = encode_photograph(1)
EMPTY_EXIF = b"\xff\xe1\0\x08Exif\0\0"
TABLES = b"\xff\xdb"


@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"II*\0",
        b"MM\0*\0\0\0\x08\xff\xff",
        USUAL.replace(TABLES, EMPTY_EXIF + TABLES, 1),
        add_orientation(USUAL, 9),
        encode_photograph(6)[:30],
        PIXELS,
    ],
)
def test_an_image_that_states_no_orientation_is_upright(file):
    assert read_orientation(file) == 1


@pytest.mark.parametrize("is_turned", [True, False])
def test_training_and_evaluation_see_the_same_side_up(make_config, is_turned):
    """Both turn the image if `exif_orientation` is set, and neither does by default."""
    record = Record(encode_photograph(6), 0)
    upright = decode_by_opencv(record.image)
    height, width = upright.shape[:2]
    config = make_config(
        image_size=(height, width),
        train_crop="none",
        flip=False,
        test_resize="direct",
        exif_orientation=is_turned,
    )
    train = TrainTransform(config)
    evaluate = build_evaluation_transform(config)

    trained = train(record, np.random.default_rng(0))
    evaluated = evaluate(record)

    expected = upright
    if not is_turned:
        stored = decode_by_opencv(USUAL)
        expected = cv2.resize(stored, (width, height))

    assert_array_equal(trained, expected)
    assert_array_equal(evaluated, expected)


def test_a_smaller_copy_keeps_it(tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    (images / "a.jpg").write_bytes(encode_photograph(6))

    prepare_folder(images, tmp_path / "copy", short_side=24)

    copy = (tmp_path / "copy" / "a.jpg").read_bytes()
    assert read_orientation(copy) == 6
    assert decode(copy, exif_orientation=True).shape == (40, 24, 3)
