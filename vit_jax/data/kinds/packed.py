"""Datasets packed in a few large files: their files, splits and class numbers.

A file belongs to the split whose name is in the file's name or else in that of its folder:
train/0000.tar, imagenet-train-0000.tar, train-00000-of-00005.parquet.
"""

import collections
import functools
import glob
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vit_jax.data.decoding.depth import ValueRange, survey
from vit_jax.data.kinds.image_files import MAX_NAME_BYTES, walk
from vit_jax.data.kinds.listing import ListedSource, Listing, list_known_splits
from vit_jax.data.records import MAX_CLASSES, check_labels, digest_files, few
from vit_jax.storage.files import read_bounded, read_lines

MOST_FILES = 100_000
"""Number of files that a pattern may name."""
_MOST_NAMES_BYTES = 2**28
_BRACES = re.compile(r"\{([^{}]*)\}")
"""Innermost braces, which are expanded first."""
_RANGE = re.compile(r"(\d{1,9})\.\.(\d{1,9})")


def read_class_names(path: str) -> tuple[str, ...]:
    """Return the names in a text file, one a line, in the order of the numbers of classes.

    Raises:
      ValueError: the file cannot be read as text, or has an empty line or a name twice; the message
        begins with `path`.
    """
    try:
        content = read_bounded(path, _MOST_NAMES_BYTES)
        text = content.decode("utf-8-sig", "backslashreplace").rstrip()
        lines = read_lines(io.StringIO(text), MAX_NAME_BYTES)
        names = tuple(map(str.strip, lines))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: must be a text file with one name of a class a line: {error}.",
        ) from error
    require_distinct_names(path, names)
    return names


def require_distinct_names(place: str, names: Sequence[str]) -> None:
    """Raise ValueError, which begins with the place, for empty or equal names of classes."""
    counts = collections.Counter(names)
    repeated = [name for name in counts if not name or counts[name] > 1]
    if repeated:
        raise ValueError(
            f"{place}: names are empty or repeated: {few(repeated, repr)}. Give each class a name.",
        )
    if len(names) > MAX_CLASSES:
        raise ValueError(
            f"{place}: has {len(names):,} classes; at most {MAX_CLASSES:,} are allowed.",
        )


def number_labels(labels: np.ndarray, class_names: Sequence[str]) -> tuple[np.ndarray, list[str]]:
    """Return the numbers of labels that are names (N,), and the names that are no classes."""
    number_of_name = dict(zip(class_names, range(len(class_names)), strict=True))
    names, inverse = np.unique(labels, return_inverse=True)
    numbers = []
    unknown = []
    for name in names.tolist():
        if name not in number_of_name:
            unknown.append(name)
        numbers.append(number_of_name.get(name, -1))
    return np.array(numbers)[inverse], unknown


class PackedSource(ListedSource):
    """Records of packed files, one file after the other.

    Attributes:
      files: the files of all records.
      root: folder to which the names of records are relative.
    """

    def __init__(
        self,
        files: Sequence[str],
        sizes: Sequence[int],
        class_names: tuple[str, ...],
        labels: np.ndarray,
        root: str,
    ) -> None:
        """Take the files and their numbers of records."""
        self.files = list(files)
        self.class_names = class_names
        self.labels = labels
        self.root = root
        self._names = []
        for file in files:
            name = os.path.relpath(file, root)
            self._names.append(os.fsencode(name))
        self._firsts = np.cumsum([0, *sizes])

    def image_of(self, index: int) -> bytes:
        """Return the file of a record's image."""
        raise NotImplementedError

    def list_surveyed(self) -> Sequence[int]:
        """Return the records whose headers may be checked for values of more than 8 bits."""
        raise NotImplementedError

    def _place_of(self, index: int) -> tuple[int, int]:
        """Return the number of a record's file, and the number of the record in this file."""
        file = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return file, index - int(self._firsts[file])

    def survey(self, value_range: ValueRange | None, option: str) -> list[str]:
        """Return warnings as `depth.survey`."""
        indices = self.list_surveyed()
        index_of_name = dict(zip(map(self.name_of, indices), indices, strict=True))

        def open_image(name: str) -> io.BytesIO:
            return io.BytesIO(self.image_of(index_of_name[name]))

        return survey(index_of_name, value_range, option, open_image)

    def name_of(self, index: int) -> str:
        return os.path.join(self.root, os.fsdecode(self.key_of(index)))

    @functools.cached_property
    def origin(self) -> str:  # type: ignore[override]
        return digest_files(type(self).__name__, self.files)


class Packed(Listing):
    """A folder of packed files, a file, or a pattern.

    Patterns have `*`, `?`, `[…]`, `{0000..1023}` and `{a,b}`. "PATH#NAME" also names the label. A
    subclass reads the files.

    Attributes:
      extension: extension of the files.
      names: names of the classes by number; None: labels are numbers without names, or names.
    """

    extension: str
    unsplit = "whose file names have no split in them"

    def __init__(self, path: Path) -> None:
        text, _, self.label = str(path).partition("#")
        super().__init__(Path(text))
        self.suffix = f"#{self.label}" * bool(self.label)

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of the classes by number; None without them."""
        raise NotImplementedError

    def labels(self, files: Sequence[str]) -> np.ndarray:
        """Return the label of every record of the files, integers or text (N,)."""
        raise NotImplementedError

    def records(
        self,
        files: Sequence[str],
        class_names: tuple[str, ...],
        labels: np.ndarray,
    ) -> PackedSource:
        """Return the records of the files with labels int32 (N,)."""
        raise NotImplementedError

    def exists(self) -> bool:
        if self.path.is_file():
            return self.path.suffix == self.extension
        return self.path.is_dir() or any(map(os.path.exists, self._matches))

    def require(self) -> None:
        """Raise ValueError if a file is missing or none can be read."""
        problem = self._find_problem()
        if problem is not None:
            raise ValueError(f"{self.place(None)}: {problem}")

    def _find_problem(self) -> str | None:
        """Return the reason why the files cannot be read; None if they can."""
        missing = [file for file in self._matches if not os.path.isfile(file)]
        if not self.exists():
            return f"there is no such file, folder or pattern. Give files named *{self.extension}."
        if missing:
            return (
                f"{len(missing):,} of {len(self.files):,} files do not exist: {few(missing)}. "
                "Complete the set."
            )
        if self.files:
            return None

        problem = f"there are no files named *{self.extension}."
        compressed = [name for name in self._paths_inside if f"{self.extension}." in name]
        if compressed:
            problem += f" Compressed files cannot be read by index: decompress {few(compressed)}."
        return problem

    def splits(self, *names: str) -> list[str]:
        return sorted({*self._find_splits(names)} - {""})

    def require_splits(self, *names: str) -> None:
        others = self._list_files("", names)
        if others:
            raise ValueError(
                f"{self.place(None)}: other files name a split, and {len(others):,} do not: "
                f"{few(others)}. Rename them, or give a pattern without them.",
            )

    def classes(self, split: str | None) -> list[str]:
        """Return names in the order of their numbers; without numbers, sorted."""
        if self.names is not None:
            return list(self.names)

        labels = self.labels(self._select_files(split))
        if not np.issubdtype(labels.dtype, np.integer):
            names = sorted({*labels.tolist()})
            require_distinct_names(self.place(split), names)
            return names

        highest = int(labels.max(initial=-1))
        if highest >= MAX_CLASSES:
            raise ValueError(
                f"{self.place(split)}: a label is {highest}; "
                f"class numbers are below {MAX_CLASSES:,}.",
            )
        return list(map(str, range(highest + 1)))

    def read(self, split: str | None, class_names: tuple[str, ...]) -> PackedSource:
        """Return the records of the files in the order of their names.

        Raises:
          ValueError: a label is no class.
        """
        files = self._select_files(split)
        labels = self.labels(files)
        if np.issubdtype(labels.dtype, np.integer):
            is_unknown = (labels < 0) | (labels >= len(class_names))
            unknown = list(map(str, np.unique(labels[is_unknown]).tolist()))
        else:
            labels, unknown = number_labels(labels, class_names)
        if unknown:
            raise ValueError(
                f"{self.place(split)}: labels are not among the {len(class_names):,} classes "
                f"({few(class_names)}): {few(unknown)}. "
                "Give each a name; numbers are those of names, from 0.",
            )

        source = self.records(files, class_names, labels.astype(np.int32))
        check_labels(source)
        return source

    @functools.cached_property
    def files(self) -> list[str]:
        """The files in the order of their names."""
        if not self.path.is_dir():
            return self._matches
        return [name for name in self._paths_inside if name.endswith(self.extension)]

    @property
    def root(self) -> str:
        """The folder that contains all files."""
        if self.path.is_dir():
            return str(self.path)
        paths = map(os.path.abspath, self.files)
        return os.path.commonpath(list(map(os.path.dirname, paths)))

    @functools.cached_property
    def _paths_inside(self) -> list[str]:
        """All files below the folder, sorted."""
        paths = []
        for _, files in walk(str(self.path)):
            for entry in files:
                paths.append(entry.path)
        return sorted(paths)

    @functools.cached_property
    def _matches(self) -> list[str]:
        """The files that a pattern names; files in braces need not exist."""
        if self.path.is_file():
            return [str(self.path)]
        if self.path.is_dir():
            return []
        return sorted(_expand_pattern(str(self.path)))

    def _select_files(self, split: str | None) -> list[str]:
        """Return the files of a split, or all files without splits."""
        if split is None:
            return self.files
        return self._list_files(split, (split,))

    def _list_files(self, split: str, names: Sequence[str]) -> list[str]:
        """Return the files of a split, or for "" the files without one."""
        files = []
        for file, split_of_file in zip(self.files, self._find_splits(names), strict=True):
            if split_of_file == split:
                files.append(file)
        return files

    def _find_splits(self, names: Sequence[str]) -> list[str]:
        """Return the split of each file, "" for a file without one."""
        longest_first = sorted(list_known_splits(names), key=len, reverse=True)
        words = "|".join(map(re.escape, longest_first))
        word = re.compile(rf"(?<![^\W\d_])({words})(?![^\W\d_])")
        splits = []
        for file in self.files:
            name = os.path.relpath(file, self.root)
            splits.append(_find_split(name, word))
        return splits


def _find_split(file: str, word: re.Pattern[str]) -> str:
    """Return the split in the name of a file, or of the nearest folder with one; "" without any."""
    for name in reversed(Path(file).parts):
        if match := word.search(name):
            return match[0]
    return ""


def _expand_pattern(pattern: str) -> set[str]:
    """Return the files that a pattern names.

    They are all choices of braces, and existing matches of `*`, `?` and `[…]`.
    """
    pending = {pattern}
    paths = set[str]()
    while pending:
        current = pending.pop()
        if braces := _BRACES.search(current):
            before = current[: braces.start()]
            after = current[braces.end() :]
            for choice in _expand_braces(braces[1]):
                pending.add(before + choice + after)
        elif glob.has_magic(current):
            paths.update(glob.glob(current))
        else:
            paths.add(current)

        if len(pending) + len(paths) > MOST_FILES:
            raise ValueError(
                f"{pattern}: the pattern names more than {MOST_FILES:,} files. Give a folder.",
            )
    return paths


def _expand_braces(braces: str) -> list[str]:
    """Return the words or numbers in braces; numbers have the width of the first one."""
    numbers = _RANGE.fullmatch(braces)
    if numbers is None:
        return braces.split(",")

    first = int(numbers[1])
    last = int(numbers[2])
    width = len(numbers[1])
    if not first <= last < first + MOST_FILES:
        raise ValueError(
            f"{{{braces}}}: a range must be of at most {MOST_FILES:,} numbers, "
            "the smaller one first.",
        )
    return [str(number).zfill(width) for number in range(first, last + 1)]
