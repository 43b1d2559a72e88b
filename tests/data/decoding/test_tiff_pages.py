"""Pages of a TIFF that are bands of one image, written by tifffile as programs of microscopes do."""

import io

import cv2
import numpy as np
import pytest
import tifffile
from numpy.testing import assert_array_equal

from vit_jax.data.decoding.bands import BandChoice
from vit_jax.data.decoding.errors import UnreadableImage, WrongBands
from vit_jax.data.decoding.images import decode

STACK = (
    np.random.default_rng(0)
    .integers(
        0,
        60_000,
        (4, 9, 7),
    )
    .astype(np.uint16)
)
BANDS = np.moveaxis(
    STACK,
    0,
    -1,
)
COLOURS = (
    (STACK[:3] >> 8)
    .astype(np.uint8)
    .transpose(
        1,
        2,
        0,
    )
)
GREY = {"photometric": "minisblack"}
PAGE = {**GREY, "metadata": None}
SMALLER = {**GREY, "subfiletype": 1}


def encode(*pages, **options):
    """Return a TIFF of arrays, each with the options of its pages."""
    file = io.BytesIO()
    with tifffile.TiffWriter(
        file,
        **options,
    ) as writer:
        for values, fields in pages:
            writer.write(
                values,
                **fields,
            )
    return file.getvalue()


def encode_along(axes, values, **program):
    """Return a TIFF of ImageJ or OME that names its axes."""
    return encode(
        (values, {**GREY, "metadata": {"axes": axes}}),
        **program,
    )


def read(file, count, numbers=()):
    return decode(
        file,
        bands=BandChoice(count, numbers),
    )


def encode_plain_pages():
    pages = [(page, PAGE) for page in STACK]
    return encode(*pages)


def encode_thumbnail():
    thumbnail = STACK[0, ::2, ::2]
    return encode(
        (STACK, GREY),
        (thumbnail, SMALLER),
    )


def encode_mask():
    mask = STACK[0] > 9
    fields = {"photometric": "mask", "subfiletype": 4}
    return encode(
        (STACK, GREY),
        (mask, fields),
    )


def encode_tiles():
    tiles = {"compression": "zlib", "tile": (16, 16)}
    return encode(
        (STACK, GREY | tiles),
        bigtiff=True,
    )


def encode_ome_pyramid():
    """Return a stack with a smaller level in directories beside the chain of pages."""
    file = io.BytesIO()
    with tifffile.TiffWriter(
        file,
        ome=True,
    ) as writer:
        writer.write(
            STACK,
            subifds=1,
            metadata={"axes": "CYX"},
            **GREY,
        )
        writer.write(
            STACK[:, ::2, ::2],
            **SMALLER,
        )
    return file.getvalue()


PLAIN = encode_plain_pages()
FILES = {
    "pages": PLAIN,
    "tifffile": encode((STACK, GREY)),
    "one of several axes": encode((STACK[None], GREY)),
    "ImageJ": encode_along(
        "CYX",
        STACK,
        imagej=True,
    ),
    "slices of ImageJ": encode_along(
        "ZYX",
        STACK,
        imagej=True,
    ),
    "OME": encode_along(
        "CYX",
        STACK,
        ome=True,
    ),
    "frames of OME": encode_along(
        "TYX",
        STACK,
        ome=True,
    ),
    "OME with a pyramid": encode_ome_pyramid(),
    "BigTIFF": encode_tiles(),
    "thumbnail": encode_thumbnail(),
    "mask": encode_mask(),
    "OpenCV": cv2.imencodemulti(
        ".tif",
        list(STACK),
    )[1].tobytes(),
}


@pytest.mark.parametrize(
    "name",
    FILES,
)
def test_pages_are_bands(name):
    file = FILES[name]

    assert_array_equal(
        read(
            file,
            4,
        ),
        BANDS,
    )
    assert_array_equal(
        read(
            file,
            2,
            (4, 1),
        ),
        BANDS[..., [3, 0]],
    )


@pytest.mark.parametrize("second", ["none", "deflate"])
def test_pages_of_equal_encoding_are_described_once(monkeypatch, second):
    compressions = [None, None, None, None]
    if second == "deflate":
        compressions[1::2] = ["zlib", "zlib"]
    pages = []
    for values, compression in zip(STACK, compressions, strict=True):
        pages.append((values, {**PAGE, "compression": compression, "predictor": False}))
    file = encode(*pages)
    TiffFile = tifffile.TiffFile
    opened = []

    def open_described(stream):
        opened.append(stream)
        return TiffFile(stream)

    monkeypatch.setattr(tifffile, "TiffFile", open_described)

    assert_array_equal(read(file, 4), BANDS)
    assert len(opened) == len({*compressions})


@pytest.mark.parametrize(
    "name",
    FILES,
)
def test_the_first_page_is_read_as_rgb(name):
    values = (0, 65_535)

    pixels = decode(
        FILES[name],
        value_range=values,
    )

    assert_array_equal(
        pixels,
        decode(
            PLAIN,
            value_range=values,
        ),
    )


def test_smaller_pages_of_a_pyramid_are_no_bands():
    half = STACK[0, ::2, ::2]
    quarter = STACK[0, ::4, ::4]
    file = encode(
        (STACK[0], GREY),
        (half, SMALLER),
        (quarter, SMALLER),
    )

    assert_array_equal(
        read(
            file,
            1,
        ),
        BANDS[..., :1],
    )
    with pytest.raises(
        WrongBands,
        match="first page is a smaller copy",
    ):
        read(
            encode((half, SMALLER), (STACK[0], GREY)),
            1,
        )


SLICES = np.stack([STACK, STACK + 1, STACK + 2])
ROWS = np.zeros(
    (64, 9, 4),
    np.uint8,
)
RGB = {"photometric": "rgb"}
UNCLEAR = {
    "4 channels x 3 slices": encode_along(
        "ZCYX",
        SLICES,
        imagej=True,
    ),
    "4 channels x 3 frames": encode_along(
        "TCYX",
        SLICES,
        ome=True,
    ),
    "3 along axis 1 x 4 along axis 2": encode((SLICES, GREY)),
    "2 images": encode(
        (STACK, GREY),
        (STACK, GREY),
        ome=True,
    ),
    "64 pages": encode((ROWS, GREY)),
}


@pytest.mark.parametrize(
    "reason",
    UNCLEAR,
)
def test_unclear_pages_are_read_by_numbers_alone(reason):
    file = UNCLEAR[reason]

    with pytest.raises(
        WrongBands,
        match=rf"{reason}.*input\.bands=1,2",
    ):
        read(
            file,
            4,
        )

    chosen = read(
        file,
        2,
        (1, 5),
    )
    pages = tifffile.imread(
        io.BytesIO(file),
        key=[0, 4],
    )
    assert_array_equal(
        chosen,
        np.moveaxis(
            pages,
            0,
            -1,
        ),
    )


def test_bands_of_pages_in_colour_are_counted_page_by_page():
    inverted = 255 - COLOURS
    file = encode(
        (COLOURS, RGB),
        (inverted, RGB),
    )

    with pytest.raises(
        WrongBands,
        match="some of several bands",
    ):
        read(
            file,
            3,
        )
    assert_array_equal(
        read(
            file,
            3,
            (4, 5, 6),
        ),
        inverted,
    )


@pytest.mark.parametrize(
    "kind",
    ["uint16", "int16", "float32"],
)
def test_pages_that_differ_are_no_bands_of_one_image(kind):
    other = STACK[1].astype(kind)
    if kind == "uint16":
        other = other[:5, :3]
    file = encode(
        (STACK[0], PAGE),
        (other, PAGE),
    )

    with pytest.raises(
        WrongBands,
        match=r"page 2 has .* and page 1 7x9 pixels of 16 bits",
    ):
        read(
            file,
            2,
        )
    with pytest.raises(
        WrongBands,
        match="page 2 has",
    ):
        read(
            file,
            1,
            (2,),
        )
    assert_array_equal(
        read(
            file,
            1,
            (1,),
        ),
        BANDS[..., :1],
    )


def test_a_stack_that_is_cut_off_is_unreadable():
    file = PLAIN

    with pytest.raises(
        UnreadableImage,
        match="cut off or damaged behind page 3",
    ):
        read(
            file[: len(file) - 300],
            4,
        )
    with pytest.raises(
        WrongBands,
        match=r"4 bands.*input\.bands=\(5,\)",
    ):
        read(
            file,
            1,
            (5,),
        )


@pytest.mark.parametrize(
    "form",
    [".jp2", ".avif"],
)
def test_formats_without_other_bands_say_so(form):
    colours = np.full(
        (64, 64, 4),
        9,
        np.uint8,
    )
    file = cv2.imencode(
        form,
        colours,
    )[1].tobytes()

    with pytest.raises(
        WrongBands,
        match="JPEG 2000 and AVIF are read as RGB",
    ):
        read(
            file,
            4,
        )
