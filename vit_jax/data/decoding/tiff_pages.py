"""Bands of a TIFF as stored, which its pages may hold, as microscopes write them.

Bands are counted page by page. Smaller copies and masks that their tags mark are no pages. Pages
of unclear meaning, such as several channels of several slices, are read by numbers of bands only.
"""

import itertools
import re
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.data.decoding import tiff
from vit_jax.data.decoding.errors import UnreadableImage, WrongBands, require_numbers
from vit_jax.data.decoding.headers import (
    TIFF_COPY_TAGS,
    Tag,
    is_smaller_copy,
    locate_tiff_directories,
    read_from,
    read_tiff_tags,
)

MOST_PAGES = 1000
"""Number of pages whose bands are counted."""

_WIDTH = 256
_HEIGHT = 257
_BITS = 258
_PHOTOMETRIC = 262
_DESCRIPTION = 270
_SAMPLES = 277
_FORMAT = 339
_DEFAULTS = {_BITS: 1, _PHOTOMETRIC: 1, _SAMPLES: 1, _FORMAT: 1}
_PAGE_TAGS = (_WIDTH, _HEIGHT, *_DEFAULTS, *TIFF_COPY_TAGS)
_MOST_TEXT = 2**16
"""Number of bytes of a description that are read."""

_OME_IMAGE = re.compile(r"<(?:\w+:)?Pixels\s[^>]*>")
_OME_SIZE = re.compile(r"""\sSize([CZT])\s*=\s*["'](\d{1,9})["']""")
_IMAGEJ_SIZE = re.compile(r"^(channels|slices|frames)=(\d{1,9})\s*$", re.MULTILINE)
_TIFFFILE_SHAPE = re.compile(r'\{"shape": \[([\d, ]{1,200})\]')

_CHOOSE = "Choose bands, counted page by page: --config.input.channels=2 --config.input.bands=1,2."


class Page(NamedTuple):
    """A page by its directory.

    Attributes:
      directory_at: offset of the directory.
      size: width and height in pixels.
      samples: number of samples of a pixel.
      bits: bits of a sample.
      format: kind of a sample, a key of `tiff.FORMATS`.
      photometric: meaning of the samples.
    """

    directory_at: int
    size: tuple[int, int]
    samples: int
    bits: int
    format: int
    photometric: int

    @property
    def num_bands(self) -> int:
        """Number of bands; a palette has three."""
        if self.photometric == tiff.Photometric.PALETTE:
            return 3
        return self.samples

    @property
    def kind(self) -> tuple[tuple[int, int], int, int]:
        """Size, bits and sample format, which the bands of an image have in common."""
        return self.size, self.bits, self.format

    def describe(self) -> str:
        """Return size, bits and sample format as words."""
        width, height = self.size
        kind = tiff.FORMATS.get(self.format, f"sample format {self.format}")
        return f"{width}x{height} pixels of {self.bits} bits ({kind})"


def decode_bands(file: bytes, numbers: Sequence[int], most_pages: int) -> np.ndarray:
    """Return bands as stored, (H, W, bands).

    Args:
      file: a TIFF.
      numbers: bands to read, counted from 1, page by page; (): all.
      most_pages: number of pages of an image that is read without numbers.

    Raises:
      UnreadableImage: see `tiff.decode_bands`.
      WrongBands: a number is too large; the bands differ in size or kind; or, without numbers,
        the meaning of the pages is unclear.
    """
    pages = list_pages(file)
    if len(pages) < 2:
        values_HWC = tiff.decode_bands(file)
        if not numbers:
            return values_HWC
        require_numbers(numbers, values_HWC.shape[-1])
        return values_HWC[..., np.subtract(numbers, 1)]

    places = _list_places(pages)
    if numbers:
        require_numbers(numbers, len(places))
        places = [places[number - 1] for number in numbers]
    else:
        _require_one_band_a_page(pages, most_pages)
        _require_one_axis(_read_description(file, pages[0]), len(pages))
    # The limit of pixels was checked for the first page.
    _require_equal(pages, places)

    decoded: dict[int, np.ndarray] = {}
    described: tiff.DescribedPages = {}
    bands = []
    for page, band in places:
        directory_at = page.directory_at
        if directory_at not in decoded:
            decoded[directory_at] = tiff.decode_bands(file, directory_at, described)
        bands.append(decoded[directory_at][..., band])
    return np.stack(bands, axis=-1)


def _list_places(pages: Sequence[Page]) -> list[tuple[Page, int]]:
    """Return the page of each band and its number there, from 0."""
    places = []
    for page in pages:
        for band in range(page.num_bands):
            places.append((page, band))
    return places


def list_pages(file: bytes) -> list[Page]:
    """Return the pages of full size, at most `MOST_PAGES`.

    Damage behind a first page is ignored: a page alone may point anywhere.

    Raises:
      UnreadableImage: the file is damaged behind several pages.
      WrongBands: the first page is a smaller copy or a mask.
    """
    directories = locate_tiff_directories(read_from(file), _PAGE_TAGS)
    starts_with_copy = False
    pages: list[Page] = []
    try:
        for place, tags in itertools.islice(directories, MOST_PAGES):
            if not is_smaller_copy(tags):
                pages.extend(_read_page(place, tags))
            elif not pages:
                starts_with_copy = True
    except (struct.error, ValueError, OverflowError) as error:
        if len(pages) > 1:
            raise UnreadableImage(
                f"The file is a TIFF that is cut off or damaged behind page {len(pages)}"
            ) from error

    if starts_with_copy and pages:
        raise WrongBands(
            "its first page is a smaller copy or a mask of another one. "
            "Write the image as the first page."
        )
    return pages


def _read_page(place: int, tags: Mapping[int, Tag]) -> list[Page]:
    """Return the page of a directory; [] for a directory without an image."""
    if _WIDTH not in tags or _HEIGHT not in tags:
        return []
    values = dict(_DEFAULTS)
    for number, tag in tags.items():
        values[number] = int(tag.values[0])
    page = Page(
        directory_at=place,
        size=(values[_WIDTH], values[_HEIGHT]),
        samples=values[_SAMPLES],
        bits=values[_BITS],
        format=values[_FORMAT],
        photometric=values[_PHOTOMETRIC],
    )
    return [page]


def _require_one_band_a_page(pages: Sequence[Page], most_pages: int) -> None:
    """Raise WrongBands for pages of colours, and for more pages than channels."""
    for page in pages:
        if page.num_bands > 1:
            raise WrongBands(
                f"it has {len(pages)} pages, some of several bands, and it is unclear which are "
                f"wanted. {_CHOOSE}"
            )
    if len(pages) > most_pages:
        raise WrongBands(
            f"it has {len(pages)} pages, the first of {pages[0].describe()}, and a network takes "
            f"1 to {most_pages} channels. {_CHOOSE} If tifffile wrote an array (height, width, "
            'bands), write it with planarconfig="contig".'
        )


def _require_one_axis(description: str, num_pages: int) -> None:
    """Raise WrongBands for several images, and for pages along two axes."""
    images = _OME_IMAGE.findall(description)
    if len(images) > 1:
        raise WrongBands(f"it has {len(images)} images by its OME metadata. {_CHOOSE}")

    lengths = _read_axes(description, num_pages)
    axes = []
    for name, length in lengths.items():
        if length > 1:
            axes.append(f"{length} {name}")
    if len(axes) < 2:
        return
    words = " x ".join(axes)
    raise WrongBands(
        f"its {num_pages} pages are {words}, and it is unclear which are bands. {_CHOOSE}"
    )


def _read_axes(description: str, num_pages: int) -> dict[str, int]:
    """Return the lengths of the axes that OME-TIFF, ImageJ or tifffile state, by name."""
    if description.startswith("ImageJ="):
        return {name: int(length) for name, length in _IMAGEJ_SIZE.findall(description)}
    if match := _OME_IMAGE.search(description):
        names = {"C": "channels", "Z": "slices", "T": "frames"}
        return {names[axis]: int(length) for axis, length in _OME_SIZE.findall(match[0])}

    match = _TIFFFILE_SHAPE.match(description)
    if match is None:
        return {}
    lengths: dict[str, int] = {}
    count = 1
    for axis, length in enumerate(re.findall(r"\d{1,9}", match[1])):
        if count >= num_pages:
            break
        count *= int(length)
        lengths[f"along axis {axis + 1}"] = int(length)
    return lengths


def _read_description(file: bytes, page: Page) -> str:
    tags = read_tiff_tags(file, (_DESCRIPTION,), _MOST_TEXT, page.directory_at)
    if _DESCRIPTION not in tags:
        return ""
    return bytes(map(int, tags[_DESCRIPTION].values)).decode("utf-8", "replace")


def _require_equal(pages: Sequence[Page], places: Sequence[tuple[Page, int]]) -> None:
    """Raise WrongBands unless the pages of the places are like the first page."""
    first = pages[0]
    for page, _ in places:
        if page.kind == first.kind:
            continue
        number = pages.index(page) + 1
        raise WrongBands(
            f"page {number} has {page.describe()}, and page 1 {first.describe()}. "
            f"Pages become bands if their size and kind are equal. {_CHOOSE}"
        )
