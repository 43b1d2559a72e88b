"""Arrays of images and labels: an NPZ file ("npz:FILE") and MNIST's four files ("idx:FOLDER").

Images are numbers (N, H, W) or (N, H, W, C), uint8 where they become RGB. Labels are integers (N,)
or (N, 1), or 0 and 1 for each class (N, L): an image then has any number of labels.
"""

import functools
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from vit_jax.data.decoding.depth import ValueRange
from vit_jax.data.kinds.array_files import (
    StoredArray,
    explain_damage,
    read_idx_header,
    read_npz_headers,
)
from vit_jax.data.kinds.listing import ListedSource, Listing
from vit_jax.data.kinds.packed import read_class_names, require_distinct_names
from vit_jax.data.records import MAX_CLASSES, check_labels, digest_files
from vit_jax.text.printable import printable

_MOST_CHANNELS = 4
_CHANNELS = (1, 3, _MOST_CHANNELS)
"""Numbers of channels of an array of images that become RGB; the fourth is dropped."""
_BANDS_OF_RGB = {3: " --config.input.bands=1,2,3"}
_IMAGES_AND_LABELS = (
    (r"(?P<split>\w+)_images", "{}_labels"),  # MedMNIST
    (r"x_(?P<split>\w+)", "y_{}"),  # Keras
    (r"images(?P<split>)", "labels"),
)
"""Names of the two arrays of a split in an NPZ file."""
_IDX_FILE = re.compile(r"(?P<split>train|t10k)-(?P<part>images|labels)[-.]idx[13]-ubyte(\.gz)?")
_IDX_SPLITS = {"train": "train", "t10k": "test"}
_NAMES_IN_NPZ = "class_names"
"""Name of an array of texts in an NPZ file."""
_NAMES_FILE = "classes.txt"
"""Name of a file beside the files of MNIST."""


class ArraySplit(NamedTuple):
    """The images and the labels of a split."""

    images: StoredArray
    labels: StoredArray


class ArraySource(ListedSource):
    """Images of an array. A worker process opens the array again instead of receiving it."""

    def __init__(
        self,
        stored: StoredArray,
        labels: np.ndarray,
        class_names: tuple[str, ...],
        split: str,
    ) -> None:
        """Take labels (N,) or (N, L) of the images that are stored."""
        self.class_names = class_names
        self.labels = labels
        self.is_multilabel = labels.ndim == 2
        self.split = split
        self._stored = stored

    @functools.cached_property
    def _images(self) -> np.ndarray:
        return self._stored.read()

    def __getstate__(self) -> dict[str, object]:
        state = dict(self.__dict__)
        state.pop("_images", None)
        return state

    def image_of(self, index: int) -> np.ndarray:
        """Return the values of an image, (H, W) or (H, W, C)."""
        return np.array(self._images[index])

    def name_of(self, index: int) -> str:
        return f"{self._stored.place}[{index}]"

    def key_of(self, index: int) -> bytes:
        return b"%b:%d" % (os.fsencode(self.split), index)

    def survey(self, value_range: ValueRange | None, option: str) -> list[str]:
        """Return a warning about a fourth channel, which RGB does not have.

        Raises:
          ValueError: the images cannot become RGB: they have other bands, or more than 8 bits.
        """
        images = self._stored
        channels = images.shape[3] if len(images.shape) == 4 else 1
        if images.dtype == np.uint8 and channels == _MOST_CHANNELS:
            return ["the fourth channel is ignored; --config.input.channels=4 reads it."]
        if images.dtype == np.uint8 and channels in _CHANNELS:
            return []
        raise ValueError(
            f"{printable(images.place)}: images are {images.dtype} {images.shape}. Give uint8 "
            "(N, H, W), or (N, H, W, C) with 1, 3 or 4 channels; or read values as stored: "
            f"--config.input.channels={channels}{_BANDS_OF_RGB.get(channels, '')}, on frozen features "
            "--images. in place of --config.input."
        )

    @functools.cached_property
    def origin(self) -> str:  # type: ignore[override]
        return digest_files(f"{self._stored.member} {self.split}", [self._stored.path])


class ArrayListing(Listing):
    """Splits that are pairs of arrays; a subclass finds them."""

    unsplit = "whose arrays have no split in their names"

    @property
    def arrays(self) -> Mapping[str, ArraySplit]:
        """The arrays by split; "" for images without splits.

        Raises:
          ValueError: a file cannot be read, or there are no images, or only one of two arrays.
        """
        raise NotImplementedError

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes; (): their numbers."""
        return ()

    def splits(self, *names: str) -> list[str]:
        return sorted({*self.arrays} - {""})

    def classes(self, split: str | None) -> list[str]:
        if self.class_names:
            return list(self.class_names)
        labels = self._read_labels(split)
        if labels.ndim == 2:
            return list(map(str, range(labels.shape[1])))
        return list(map(str, range(int(labels.max()) + 1)))

    def read(self, split: str | None, class_names: tuple[str, ...]) -> ArraySource:
        """Return the images of a split.

        Raises:
          ValueError: arrays of other shapes or types, or a label that is no class.
        """
        images = self.arrays[split or ""].images
        labels = self._read_labels(split)
        _require_pixels(images)
        if labels.ndim == 2 and labels.shape[1] != len(class_names):
            raise ValueError(
                f"{self.place(split)}: has {labels.shape[1]} labels an image, and the training "
                f"split {len(class_names)}. Give splits of the same classes."
            )
        source = ArraySource(images, labels, class_names, split or "")
        check_labels(source)
        return source

    def _read_labels(self, split: str | None) -> np.ndarray:
        """Return the labels of a split, int32 (N,), or 0 and 1 (N, L) for several an image."""
        images, stored = self.arrays[split or ""]
        is_number = np.issubdtype(stored.dtype, np.integer) or stored.dtype == bool
        has_known_shape = len(stored.shape) in (1, 2) and stored.num_bytes > 0
        if not is_number or not has_known_shape:
            raise ValueError(
                f"{printable(stored.place)}: labels are {stored.dtype} {stored.shape}. Give "
                "integers (N,) or (N, 1), or 0 and 1 for each class (N, L)."
            )
        if stored.shape[0] != images.shape[0]:
            raise ValueError(
                f"{printable(stored.place)}: has {stored.shape[0]:,} labels, and "
                f"{printable(images.place)} has {images.shape[0]:,} images. Give one label each."
            )
        labels = stored.read()
        if labels.ndim == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        if int(labels.max()) >= MAX_CLASSES:
            raise ValueError(
                f"{printable(stored.place)}: a label is {labels.max()}; class numbers are below "
                f"{MAX_CLASSES:,}."
            )
        return np.array(labels, np.int32)


class Npz(ArrayListing):
    """An NPZ file with the arrays train_images, train_labels and those of other splits."""

    kind = "npz"

    def exists(self) -> bool:
        return self.path.is_file()

    def require(self) -> None:
        if not self.exists():
            raise ValueError(f"There is no file {str(self.path)!r}. Give npz:FILE.")

    @functools.cached_property
    def _stored(self) -> dict[str, StoredArray]:
        """The arrays of the file by name."""
        self.require()
        return read_npz_headers(str(self.path))

    @property
    def class_names(self) -> tuple[str, ...]:
        stored = self._stored.get(_NAMES_IN_NPZ)
        if stored is None:
            return ()
        if stored.dtype.kind != "U" or len(stored.shape) != 1:
            raise ValueError(
                f"{printable(stored.place)}: is {stored.dtype} {stored.shape}. Give a list of texts."
            )
        names = tuple(map(str, stored.read()))
        require_distinct_names(printable(stored.place), names)
        return names

    @functools.cached_property
    def arrays(self) -> Mapping[str, ArraySplit]:  # type: ignore[override]
        stored = self._stored
        splits = {}
        for images, labels in _IMAGES_AND_LABELS:
            for name in stored:
                match = re.fullmatch(images, name)
                if match is None:
                    continue
                split = match["split"]
                name_of_labels = labels.format(split)
                if name_of_labels not in stored:
                    raise ValueError(
                        f"{self.place(None)}: has {name!r} and no {name_of_labels!r}. Add it."
                    )
                splits[split] = ArraySplit(stored[name], stored[name_of_labels])
            if splits:
                return splits
        names = ", ".join(map(printable, stored)) or "no arrays"
        raise ValueError(
            f"{self.place(None)}: has {names}. Name the arrays train_images, train_labels, "
            "test_images and test_labels, or images and labels."
        )


class Idx(ArrayListing):
    """A folder with MNIST's four files, each as it is or compressed by gzip.

    They are train-images-idx3-ubyte, train-labels-idx1-ubyte, and the same with t10k for the test
    split. `classes.txt`, one name a line, names the classes.
    """

    kind = "idx"

    def exists(self) -> bool:
        return self.path.is_dir() and bool(self._files)

    def require(self) -> None:
        if not self.exists():
            raise ValueError(
                f"There is no train-images-idx3-ubyte or train-images-idx3-ubyte.gz in "
                f"{str(self.path)!r}. Give idx:FOLDER with MNIST's four files."
            )

    @property
    def class_names(self) -> tuple[str, ...]:
        path = self.path / _NAMES_FILE
        if not path.exists():
            return ()
        return read_class_names(str(path))

    @functools.cached_property
    def _files(self) -> dict[tuple[str, str], str]:
        """The files by split and part; one that is not compressed comes first."""
        files = {}
        with explain_damage(str(self.path)):
            names = sorted(os.listdir(self.path), reverse=True)
        for name in names:
            if match := _IDX_FILE.fullmatch(name):
                split = _IDX_SPLITS[match["split"]]
                files[split, match["part"]] = str(self.path / name)
        return files

    @functools.cached_property
    def arrays(self) -> Mapping[str, ArraySplit]:  # type: ignore[override]
        self.require()
        splits = {}
        for split in dict.fromkeys(split for split, _ in self._files):
            stored = []
            for part in ("images", "labels"):
                if (split, part) not in self._files:
                    raise ValueError(
                        f"{self.place(split)}: has no file of {part}. Complete the four files."
                    )
                stored.append(read_idx_header(self._files[split, part]))
            splits[split] = ArraySplit(*stored)
        return splits


def _require_pixels(images: StoredArray) -> None:
    """Raise ValueError unless an array has the shape and type of images."""
    is_number = images.dtype.kind in "buif"
    if not is_number or len(images.shape) not in (3, 4) or not images.num_bytes:
        raise ValueError(
            f"{printable(images.place)}: images are {images.dtype} {images.shape}. Give uint8 "
            "(N, H, W) or (N, H, W, C), or other numbers with --config.input.channels."
        )
