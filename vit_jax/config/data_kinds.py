"""The kinds of data that `config.data` names, such as "folder:PATH", one row each.

A new kind is a module in `data/kinds/` and a row of `KINDS`. Messages, help texts and documentation
list the rows.
"""

import dataclasses


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
    """

    form: str
    description: str
    example: str
    opener: str
    is_listing: bool = False

    @property
    def prefix(self) -> str:
        """The text before the colon."""
        return self.form.partition(":")[0]

    def names(self, data: str) -> bool:
        """Return True if a text names data of this kind."""
        if ":" not in self.form:
            return data == self.form
        prefix, _, name = data.partition(":")
        return prefix == self.prefix and name != ""


KINDS = (
    DataKind(
        "digits",
        "handwritten digits of scikit-learn",
        "digits",
        "tfds_source:open_unnamed_digits",
    ),
    DataKind("tfds:NAME", "dataset of the TFDS catalogue", "tfds:cifar10", "tfds_source:open_tfds"),
    DataKind("vtab:TASK", "task of VTAB", "vtab:caltech101", "tfds_source:open_vtab"),
    DataKind("folder:PATH", "folders of images", "folder:my-images", "folder:Folder", True),
    DataKind("wds:PATH", "tar shards of WebDataset", "wds:my-shards", "shards:Shards", True),
    DataKind(
        "parquet:PATH",
        "Parquet files of Hugging Face",
        "parquet:beans",
        "parquet:Parquet",
        True,
    ),
    DataKind("csv:FILE", "table of paths and labels", "csv:photos.csv", "table:Table", True),
)
PREFIXES = tuple(kind.prefix for kind in KINDS)
_FORMS = tuple(kind.form for kind in KINDS)
REFERENCE_FORM = "package.module:name"


def find_kind(data: str) -> DataKind | None:
    """Return the kind of data; None for a reference and for unknown data."""
    for kind in KINDS:
        if kind.names(data):
            return kind
    return None


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
