"""What the rest of the pipeline knows of stored data: one record by its index, and the names of the classes.

`open_source` turns the `data` of a config ("digits", "tfds:NAME", "folder:PATH") into a `Source`. The kinds
live in their own files and are imported only when asked for.
"""

import difflib
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from vit_jax.config.schema import InputConfig


def few(names: Sequence[str], shown: Callable[[str], str] = str) -> str:
    """The first ten of the names, and how many more there are."""
    return ", ".join(map(shown, names[:10])) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


class Record(NamedTuple):
    """One stored example.

    Attributes:
      image: an encoded file (JPEG, PNG, ...) as bytes, or pixels as uint8 (H, W), (H, W, 1) or (H, W, 3) in RGB.
      label: class number, 0 to num_classes - 1.
    """

    image: bytes | np.ndarray
    label: int


class Source(Protocol):
    """Records by index. Implementations can be pickled to worker processes and read from many threads at once."""

    class_names: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        """How many classes labels may name."""

    @property
    def labels(self) -> np.ndarray:
        """The labels of all records, integers (N,), had without decoding an image."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record: ...

    def name_of(self, index: int) -> str:
        """What a person would call the record: its file, or "split:index"."""

    def key_of(self, index: int) -> bytes:
        """What the record is known by wherever the data lies; choices by hash rest on it."""


def records_sha256(source: Source) -> str:
    """SHA-256 over what every record is known by, and its label; not over the images, which would take hours."""
    digest = hashlib.sha256()
    for index, label in enumerate(source.labels.tolist()):
        key = source.key_of(index)
        digest.update(b"%d %d %b" % (label, len(key), key))
    return digest.hexdigest()


def open_source(data: str, split: str, config: InputConfig, seed: int) -> Source:
    """Opens one split of a dataset.

    Args:
      data: "digits", "tfds:NAME" (also "tfds:NAME/CONFIG", "tfds:NAME:VERSION") or "folder:PATH".
      split: a split of the dataset; for TFDS and digits also a part of one, "train[:98%]".
      config: where data is kept, which splits exist beside this one, which classes and how many training examples
        of each are taken, whether records are cached.
      seed: chooses the hold-out of an image folder that has no split sub-folders, and the training examples.

    Raises:
      ValueError: the data does not exist, is not prepared, has no such split, or cannot be trained on; what the
        config chooses of it does not exist.
    """
    from vit_jax.data.selection import select

    source = select(_open(data, split, config, seed), config, training=split == config.train_split, seed=seed)
    if not config.cache_records:
        return source
    from vit_jax.data.memory import CachedSource

    return CachedSource(source)


def folder_of(data: str) -> Path | None:
    """The folder that data of images in class folders lie in; None of other data."""
    kind, _, name = data.partition(":")
    return Path(name).expanduser() if kind == "folder" else None


def located(data: str) -> str:
    """The same text for every way to write one folder; other data as they are."""
    path = folder_of(data)
    return data if path is None else f"folder:{path.resolve()}"


def _open(data: str, split: str, config: InputConfig, seed: int) -> Source:
    kind, _, name = data.partition(":")
    if data == "digits":
        from vit_jax.data import digits, tfds_source

        return tfds_source.TfdsSource.from_directory(digits.prepare(config.data_dir), split)
    if kind == "tfds" and name:
        from vit_jax.data import tfds_source

        return tfds_source.TfdsSource.from_name(name, split, config.data_dir)
    if kind == "folder" and name:
        from vit_jax.data import folder

        return folder.open_folder(Path(name).expanduser(), split, config, seed)
    near = [word for word in difflib.get_close_matches(kind, ["digits", "tfds", "folder"], n=1) if word != kind]
    near = [f"folder:{data}"] if Path(data).expanduser().is_dir() else near
    raise ValueError(
        f'Unknown data {data!r}; allowed are "digits", "tfds:NAME" and "folder:PATH".'
        + (f" Did you mean {near[0]!r}?" if near else "")
    )
