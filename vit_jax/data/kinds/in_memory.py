"""Sources in memory: arrays, and a cache around another source."""

import functools

import numpy as np

from vit_jax.data.records import Record, Source, WrappedSource, check_labels


class MemorySource(Source):
    """A source over arrays, for tests and for small or generated data."""

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        class_names: tuple[str, ...],
    ) -> None:
        """Take images, numbers (N, H, W, bands), and labels, integers (N,) or 0 and 1 (N, K).

        Images that become RGB are uint8 of one or three bands; a run reads others as stored with
        `input.channels` or `input.bands`.

        Raises:
          ValueError: the arrays have other types or shapes, or a label has no class.
        """
        if images.ndim != 4 or images.dtype.kind not in "buif":
            raise ValueError(
                f"Images are {images.dtype} {images.shape}; give numbers (N, H, W, bands), such as "
                "uint8 (N, H, W, 3).",
            )
        self.images = images
        self.labels = labels
        self.class_names = tuple(class_names)
        self.is_multilabel = labels.ndim == 2
        if labels.shape != (len(images), *self.label_shape) or not np.issubdtype(
            labels.dtype,
            np.integer,
        ):
            raise ValueError(
                f"Labels are {labels.dtype} {labels.shape}; give one integer for each image.",
            )
        check_labels(self)

    def image_of(self, index: int) -> np.ndarray:
        return self.images[index]


class CachedSource(WrappedSource):
    """Reads every record of another source once in each process and keeps it, still encoded.

    The cache fills as records are read, and is not sent to worker processes.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._read = functools.cache(source.__getitem__)

    def __getitem__(self, index: int) -> Record:
        return self._read(index)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.source,)
