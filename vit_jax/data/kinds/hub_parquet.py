"""Parquet files of a dataset on the Hugging Face Hub: "hf://datasets/OWNER/NAME@REVISION/PATH".

The revision becomes a commit when the data are opened. A split is downloaded when it is read. The
card of the dataset, its README.md, may name configurations, splits and classes.
"""

import dataclasses
import functools
import logging
import os
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from vit_jax.data.kinds.parquet import Parquet
from vit_jax.data.records import few
from vit_jax.storage import hub_files
from vit_jax.storage.files import JsonObject
from vit_jax.storage.hub_files import Card, DatasetIndex
from vit_jax.text.nearest import did_you_mean
from vit_jax.text.printable import printable

FORM = "hf://datasets/OWNER/NAME"
_ADDRESS = re.compile(
    r"hf://datasets/(?P<name>[\w.-]+/[\w.-]+)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[\w.-]+|[\w.~%-]+))?"
    r"(?:/(?P<path>.+?))?/?"
)
"""A slash in the name of a branch is %2F, as in the paths of huggingface_hub."""
_CONVERTED = "refs/convert/parquet"
"""Branch with a copy in Parquet that the Hub makes of many datasets; also written ~parquet."""
_MAIN = "main"
_PINNED = re.compile(r"@[0-9a-f]{40}(?=$|[/#])")


class Address(NamedTuple):
    """The parts of an address.

    Attributes:
      name: "owner/name".
      revision: branch, tag or commit; None: the branch main.
      path: a configuration, also with a split, a folder or a pattern of files; "" for all.
    """

    name: str
    revision: str | None
    path: str

    def spell(self, commit: str) -> str:
        """Return the address at a commit."""
        path = f"/{self.path}" if self.path else ""
        return f"hf://datasets/{self.name}@{commit}{path}"


class ChosenFiles(NamedTuple):
    """The Parquet files of a configuration.

    Attributes:
      split_of_file: split of each file by the card; "" if the card states none.
      configuration: its name; None without configurations.
    """

    split_of_file: Mapping[str, str]
    configuration: str | None


@dataclasses.dataclass(frozen=True)
class OpenDataset:
    """A dataset at a commit.

    Attributes:
      address: with the commit.
      library: huggingface_hub.
      index: the files of the repository.
      chosen: the files that the address names.
    """

    address: str
    library: ModuleType
    index: DatasetIndex
    chosen: ChosenFiles


def parse_address(text: str) -> Address:
    """Return the parts of "hf://datasets/OWNER/NAME@REVISION/PATH".

    Raises:
      ValueError: another form.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{printable(text)!r}: data on the Hub must have the form {FORM}, {FORM}@REVISION or "
            f"{FORM}/CONFIGURATION."
        )
    revision = match["revision"]
    if revision is not None:
        revision = urllib.parse.unquote(revision)
        if revision == "~parquet":
            revision = _CONVERTED
    return Address(match["name"], revision, match["path"] or "")


def pin_address(text: str, stored: str | None) -> str:
    """Return data on the Hub with their commit.

    Args:
      text: an address, also with "#COLUMN".
      stored: the data of an earlier run; if they are the same without a revision, their commit.
    """
    if stored is not None and _PINNED.sub("", stored) == text.rstrip("/"):
        return stored
    return HubParquet(Path(text.removeprefix("hf:"))).address


@functools.cache  # a run opens its data several times
def open_dataset(text: str) -> OpenDataset:
    """Return a dataset at the commit of its revision; its files are not downloaded.

    Raises:
      ValueError: a wrong address; the Hub does not know it or cannot be reached; there are no such
        files.
    """
    address = parse_address(text)
    library = hub_files.import_library(text, "download the files and give them as parquet:PATH")
    revision = address.revision or _MAIN
    with hub_files.explain_failure(text):
        index, is_stored = hub_files.read_index(library, address.name, revision)
    if is_stored:
        logging.getLogger(__name__).warning(
            "%s: the Hub cannot be reached. The cached commit %s is used.",
            printable(text),
            index.commit,
        )
    chosen = choose_files(text, address, index)
    return OpenDataset(address.spell(index.commit), library, index, chosen)


def read_licence(text: str) -> str:
    """Return the licence of data on the Hub in the words of their card; "" if it states none."""
    stated = open_dataset(text.partition("#")[0]).index.card.get("license")
    licences = [printable(str(licence)) for licence in _to_list(stated)]
    return ", ".join(licences)


# Configurations and their files.


def choose_files(text: str, address: Address, index: DatasetIndex) -> ChosenFiles:
    """Return the Parquet files that an address names.

    Raises:
      ValueError: there are none, or several configurations of which the address names none.
    """
    names = sorted(name for name in index.files if name.endswith(".parquet"))
    if not names:
        raise ValueError(
            f"{text}: has no .parquet files, but {few(sorted(index.files))}. Try the copy that the "
            f"Hub makes of many datasets: {address.spell('~parquet')}."
        )
    configurations = list_configurations(index.card, names)
    if address.revision == _CONVERTED and not configurations:
        configurations = _group_by_folder(names)

    if not address.path:
        return _choose_all(text, names, configurations, index.card)
    configuration, _, split = address.path.partition("/")
    files = {}
    for name, stated_split in configurations.get(configuration, {}).items():
        if split in ("", stated_split):
            files[name] = stated_split
    if files:
        return ChosenFiles(files, configuration)

    pattern = _compile_pattern(address.path)
    chosen = [name for name in names if pattern.match(name)]
    if chosen:
        return ChosenFiles(dict.fromkeys(chosen, ""), None)
    folders = {os.path.dirname(name) for name in names} - {""}
    known = [*configurations, *sorted(folders)]
    raise ValueError(
        f"{text}: has no Parquet files in {address.path!r}."
        f"{did_you_mean(address.path, known)} Use one of {few(known)}."
    )


def _choose_all(
    text: str,
    names: Sequence[str],
    configurations: Mapping[str, Mapping[str, str]],
    card: Card,
) -> ChosenFiles:
    """Return all files without configurations, else those of the only or default one."""
    if not configurations:
        return ChosenFiles(dict.fromkeys(names, ""), None)
    if len(configurations) > 1:
        return _choose_default(text, configurations, card)
    ((configuration, files),) = configurations.items()
    return ChosenFiles(files, configuration)


def _choose_default(
    text: str,
    configurations: Mapping[str, Mapping[str, str]],
    card: Card,
) -> ChosenFiles:
    """Return the files of the default configuration; raise ValueError if the card states none."""
    for section in _list_sections(card, "configs"):
        if section.get("default") is True and section.get("config_name") in configurations:
            name = section["config_name"]
            return ChosenFiles(configurations[name], name)
    if "default" in configurations:
        return ChosenFiles(configurations["default"], "default")
    raise ValueError(
        f"{text}: has several configurations. Add one of them: /{' or /'.join(configurations)}."
    )


def list_configurations(card: Card, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the split of each Parquet file, by configuration of the card."""
    configurations = {}
    for section in _list_sections(card, "configs"):
        patterns = _list_patterns(section)
        files = {}
        for name in names:
            split = _find_stated_split(name, patterns)
            if split is not None:
                files[name] = split
        if files:
            configurations[str(section.get("config_name"))] = files
    return configurations


def _find_stated_split(name: str, patterns: Sequence[tuple[str, str]]) -> str | None:
    """Return the split of the first pattern that matches a file; None if none does."""
    for split, pattern in patterns:
        if _compile_pattern(pattern).match(name):
            return split
    return None


def _list_sections(card: Card, key: str) -> list[Card]:
    """Return the sections of a card below a key, which may be one or a list."""
    sections = _to_list(card.get(key))
    return [section for section in sections if isinstance(section, Mapping)]


def _to_list(value: object) -> list[object]:
    """Return the entries of a list, or one entry as a list; [] for other values."""
    if isinstance(value, str | Mapping):
        return [value]
    if isinstance(value, list):
        return value
    return []


def _list_patterns(section: Card) -> list[tuple[str, str]]:
    """Return splits ("" if none is stated) and patterns of the files of a configuration."""
    folder = section.get("data_dir")
    patterns = []
    for entry in _to_list(section.get("data_files")):
        split = ""
        paths = _to_list(entry)
        if isinstance(entry, Mapping):
            split = str(entry.get("split", ""))
            paths = _to_list(entry.get("path"))
        for path in paths:
            patterns.append((split, f"{folder}/{path}" if folder else str(path)))
    if folder and not patterns:
        patterns.append(("", str(folder)))
    return patterns


def _group_by_folder(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the files of each top folder, without splits: CONFIGURATION/SPLIT/0000.parquet."""
    configurations: dict[str, dict[str, str]] = {}
    for name in names:
        configuration, _, _ = name.partition("/")
        configurations.setdefault(configuration, {})[name] = ""
    return configurations


@functools.lru_cache(1024)
def _compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return an expression for a file, a folder with its files, or a pattern with `*` and `?`.

    `**` matches any folders.
    """
    words = []
    for word in re.split(r"(\*\*/?|\*|\?)", pattern.strip("/").removeprefix("./")):
        if word.startswith("**"):
            words.append(".*")
        elif word == "*":
            words.append("[^/]*")
        elif word == "?":
            words.append("[^/]")
        else:
            words.append(re.escape(word))
    return re.compile(f"{''.join(words)}(/.*)?$")


def read_features(card: Card, configuration: str | None) -> dict[str, JsonObject]:
    """Return the columns of images and classes in the card, as Parquet metadata describe them."""
    features: dict[str, JsonObject] = {}
    sections = _list_sections(card, "dataset_info")
    for section in sections:
        if len(sections) > 1 and section.get("config_name", "default") != configuration:
            continue
        for column in _list_sections(section, "features"):
            name = str(column.get("name"))
            dtype = column.get("dtype")
            if dtype == "image":
                features[name] = {"_type": "Image"}
            elif isinstance(dtype, Mapping) and "class_label" in dtype:
                features[name] = {"_type": "ClassLabel", "names": _list_class_names(dtype)}
    return features


def _list_class_names(dtype: Card) -> list[str] | None:
    """Return the names of classes in the order of their numbers; None without a complete list."""
    label = dtype["class_label"]
    names = label.get("names") if isinstance(label, Mapping) else None
    if isinstance(names, list):
        return names
    if not isinstance(names, Mapping):
        return None
    by_number = {str(number): name for number, name in names.items()}
    if by_number.keys() != set(map(str, range(len(names)))):
        return None
    return [by_number[str(number)] for number in range(len(names))]


# The listing.


class HubParquet(Parquet):
    """Parquet files of a dataset on the Hub, in the cache of huggingface_hub."""

    kind = "hf"

    def __init__(self, path: Path) -> None:
        """Take the text after "hf:" as a path; nothing is read."""
        text, _, self.label = str(path).partition("#")
        self.suffix = f"#{self.label}" * bool(self.label)
        self._text = f"hf:{text}"

    @functools.cached_property
    def _dataset(self) -> OpenDataset:
        return open_dataset(self._text)

    @functools.cached_property
    def path(self) -> Path:  # type: ignore[override]
        return hub_files.find_snapshot(self._dataset.index)

    @property
    def root(self) -> str:
        return str(self.path)

    @property
    def address(self) -> str:
        if _PINNED.search(self._text):
            return f"{self._text}{self.suffix}"
        return f"{self._dataset.address}{self.suffix}"

    def place(self, split: str | None) -> str:
        name = self.address
        if split:
            name += f", split {split!r}"
        return printable(name)

    def exists(self) -> bool:
        return bool(self.files)

    def require(self) -> None:
        """Raise ValueError if the Hub does not have the files; nothing is downloaded."""
        assert self.files, "an open dataset has files"

    @functools.cached_property
    def files(self) -> list[str]:
        return [os.path.join(self.root, name) for name in self._dataset.chosen.split_of_file]

    def _find_splits(self, names: Sequence[str]) -> list[str]:
        stated = list(self._dataset.chosen.split_of_file.values())
        if any(stated):
            return stated
        return super()._find_splits(names)

    def _select_files(self, split: str | None) -> list[str]:
        """Return the files of a split, which are downloaded unless they are cached."""
        files = super()._select_files(split)
        self._fetch(files)
        self._require_same_facts(files)
        return files

    @functools.cached_property
    def _schema_file(self) -> str:
        """The smallest file, which is downloaded for the columns of all of them."""
        index = self._dataset.index
        smallest = min(self._dataset.chosen.split_of_file, key=lambda name: index.files[name].size)
        file = os.path.join(self.root, smallest)
        self._fetch([file])
        return file

    def _fetch(self, files: Sequence[str]) -> None:
        names = [os.path.relpath(file, self.root) for file in files]
        with hub_files.explain_failure(self.address):
            hub_files.fetch_files(self._dataset.library, self._dataset.index, names)

    @functools.cached_property
    def card_features(self) -> dict[str, JsonObject]:  # type: ignore[override]
        return read_features(self._dataset.index.card, self._dataset.chosen.configuration)
