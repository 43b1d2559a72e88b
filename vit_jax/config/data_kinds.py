"""The kinds of data that `config.data` names, such as "folder:PATH", one row each.

A new kind is a module in `data/kinds/` and a row of `KINDS`. Messages, help texts and documentation
list the rows.
"""

import dataclasses
import pathlib

HUB_SCHEME = "hf://datasets/"
"""Beginning of an address of data on the Hugging Face Hub."""


@dataclasses.dataclass(frozen=True)
class DataKind:
    """A kind of data.

    Attributes:
      form: the text that names the data, with words in capitals for its parts.
      description: a noun phrase for messages.
      example: text that names data of this kind.
      opener: module in `data/kinds/` and name in it, looked up when data of this kind are opened.
        It is a class of `Listing`, called with the path, if `is_listing`; or a function of (name,
        split, data_dir) that returns a `Source`.
      is_listing: the text after the prefix is a path to a list of images.
      suffix: end of the names of its files, by which a path without a prefix is recognised.
      is_on_hub: the path is of a repository of the Hugging Face Hub.
    """

    form: str
    description: str
    example: str
    opener: str
    is_listing: bool = False
    suffix: str = ""
    is_on_hub: bool = False

    @property
    def prefix(self) -> str:
        """The text before the colon."""
        return self.form.partition(":")[0]

    def names(self, data: str) -> bool:
        """Return True if a text names data of this kind."""
        if ":" not in self.form:
            return data == self.form
        if self.is_on_hub:  # other addresses of the Hub name weights
            return data.startswith(HUB_SCHEME)
        prefix, _, name = data.partition(":")
        return prefix == self.prefix and name != ""


KINDS = (
    DataKind(
        "digits",
        "handwritten digits of scikit-learn",
        "digits",
        "tfds_source:open_unnamed_digits",
    ),
    DataKind(
        "fashion",
        "Fashion-MNIST, 70,000 grey photographs of clothes",
        "fashion",
        "fashion:open_fashion",
    ),
    DataKind("tfds:NAME", "dataset of the TFDS catalogue", "tfds:cifar10", "tfds_source:open_tfds"),
    DataKind("vtab:TASK", "task of VTAB", "vtab:caltech101", "tfds_source:open_vtab"),
    DataKind("folder:PATH", "folders of images", "folder:my-images", "folder:Folder", True),
    DataKind(
        "wds:PATH", "tar shards of WebDataset", "wds:my-shards", "shards:Shards", True, ".tar"
    ),
    DataKind(
        "parquet:PATH",
        "Parquet files of Hugging Face",
        "parquet:beans",
        "parquet:Parquet",
        True,
        ".parquet",
    ),
    DataKind(
        "csv:FILE", "table of paths and labels", "csv:photos.csv", "table:Table", True, ".csv"
    ),
    DataKind(
        "npz:FILE", "arrays in a file, as MedMNIST", "npz:pathmnist.npz", "array_listing:Npz", True
    ),
    DataKind(
        "idx:FOLDER", "arrays in four files, as MNIST", "idx:mnist", "array_listing:Idx", True
    ),
    DataKind(
        "hf://datasets/OWNER/NAME",
        "Parquet files on the Hugging Face Hub",
        "hf://datasets/AI-Lab-Makerere/beans",
        "hub_parquet:HubParquet",
        is_listing=True,
        is_on_hub=True,
    ),
)
PREFIXES = tuple(kind.prefix for kind in KINDS)
EMBEDDED = tuple(kind.form for kind in KINDS if ":" not in kind.form)
"""Data that one word names, for which there are recipes of the same name."""
_FORMS = tuple(kind.form for kind in KINDS)
_PACKED = (".tar", ".parquet")
"""Ends of files that hold many images."""
_HUB_FOLDER = "data"
"""Sub-folder of a dataset of Hugging Face that holds its files."""
REFERENCE_FORM = "package.module:name"


def find_kind(data: str) -> DataKind | None:
    """Return the kind of data; None for a reference and for unknown data."""
    for kind in KINDS:
        if kind.names(data):
            return kind
    return None


def is_catalogued(data: str) -> bool:
    """Return True for datasets of a catalogue only, with published results, not files of users.

    `data` is one dataset, or several with commas between them; "" is no dataset.
    """
    for name in data.split(","):
        kind = find_kind(name)
        if kind is not None and kind.is_listing:
            return False
        if kind is None and (not name or "." in name):  # a reference, package.module:name
            return False
    return True


def infer_data(text: str) -> str:
    """Return data with its kind: "folder:photos" for the folder photos, "csv:a.csv" for a table.

    A folder with nothing but tars or Parquet files has their kind, and so has one with MNIST's
    files. A ".npz" file has none, because it may hold weights. A text that names data already,
    or no file or folder of this machine, is unchanged.
    """
    if find_kind(text) is not None:
        return text
    path = text.partition("#")[0]
    for kind in KINDS:
        if kind.suffix and path.endswith(kind.suffix):
            return f"{kind.prefix}:{text}"
    folder = pathlib.Path(path).expanduser()
    if folder.is_dir():
        return f"{_find_kind_of_folder(folder)}:{text}"
    return text


def _find_kind_of_folder(folder: pathlib.Path) -> str:
    """Return the prefix of the data in a folder; with class folders these are folders of images."""
    paths = list(folder.iterdir())
    if any("-ubyte" in path.name for path in paths):
        return "idx"
    if any(path.is_dir() and path.name != _HUB_FOLDER for path in paths):
        return "folder"
    if _HUB_FOLDER in [path.name for path in paths]:
        paths += (folder / _HUB_FOLDER).glob("*")
    for kind in KINDS:
        if kind.suffix in _PACKED and any(path.suffix == kind.suffix for path in paths):
            return kind.prefix
    return "folder"


def spell_forms() -> str:
    """Return the forms of all kinds, with commas between them."""
    return ", ".join(_FORMS)


def spell_quoted_forms() -> str:
    """Return the forms of all kinds in quotation marks, with commas between them."""
    return ", ".join(map('"{}"'.format, _FORMS))


def spell_descriptions() -> str:
    """Return the forms of all kinds, each followed by its description."""
    descriptions = []
    for kind in KINDS:
        descriptions.append(f"{kind.form} ({kind.description})")
    return ", ".join(descriptions)
