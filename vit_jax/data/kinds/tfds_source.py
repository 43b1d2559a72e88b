"""Datasets of the TFDS catalogue: prepared once as ArrayRecord files, then read by index.

Reading needs no TensorFlow.

Images stay encoded; the transforms decode them.
"""

import functools
import importlib.util
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import tensorflow_datasets as tfds
from google.protobuf import json_format

from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.kinds import digits
from vit_jax.data.kinds.array_records import BucketRecords, num_records
from vit_jax.data.kinds.vtab_tasks import STORED, Labels, VtabTask, find_task
from vit_jax.data.records import Record, Source, digest_files, few
from vit_jax.storage import is_address
from vit_jax.storage.files import expand_path, is_mirrored, mirror, read_json
from vit_jax.text.nearest import closest

_NAME = re.compile(r"[A-Za-z]\w*(/(?!\.+(:|$))[\w+.-]+)?(:(\d+|\*)(\.(\d+|\*)){2})?", re.ASCII)
UNFINISHED = ".unfinished"
"""A folder beside the versions of a dataset that is made of tars; for TFDS it is no version."""
READ_WHOLE = (".json", ".txt")
"""Ends of the names of descriptions, which TFDS opens by itself."""
ORIGINAL_LABEL = "original_label"
"""The label of ImageNet in ImageNet ReaL, beside its sets of correct classes."""
CHUNK = 256
"""Number of records that are read at once for their labels."""


class NotPrepared(ValueError):
    """A dataset of the catalogue is missing; the message has the command that prepares it."""


def tfds_folder(data_dir: str | None, dataset: str = "") -> Path:
    """Return the folder of prepared datasets; None: the default of TFDS.

    For gs:// it is a mirror with this dataset alone.
    """
    if data_dir is not None and is_address(data_dir):
        return mirror(f"{data_dir.rstrip('/')}/{dataset}", *READ_WHOLE).parent
    return expand_path(data_dir or tfds.core.constants.DATA_DIR)


class _Records(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> bytes: ...

    def __getitems__(self, indices: range) -> Sequence[bytes]: ...


class TfdsSource(Source):
    """One split, or a part of one, of a prepared dataset with the feature "image" and a label."""

    def __init__(
        self,
        builder: tfds.core.DatasetBuilder,
        split: str,
        labels: Labels = STORED,
    ) -> None:
        """Open a split of a TFDS builder.

        Raises:
          ValueError: the data is missing or in a format without random access, there is no such
            split, a file of it is damaged, or the dataset has no image or no class label.
        """
        _require_prepared(builder)
        _require_split(builder, split)
        _require_files(builder, split)
        self.class_names = _find_class_names(builder, labels)
        self.split = split
        self._labels = labels
        self._all_features = dict(builder.info.features)
        self._records = _open_records(builder, split)
        parts = builder.info.splits[split].file_instructions
        self._files = sorted({part.filename for part in parts})
        # Nothing else is parsed: TFDS would decode other images with TensorFlow.
        self._features = tfds.features.FeaturesDict(
            {
                "image": self._all_features["image"],
                labels.feature: self._all_features[labels.feature],
            },
        )

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        try:
            stored = self._records[index]
        except RuntimeError as error:
            raise UnreadableImage(f"The stored record is damaged ({error})") from error
        record = self._features.deserialize_example_np(
            stored,
            decoders={"image": tfds.decode.SkipDecoding()},
        )
        image = record["image"]
        if self._labels.image is not None:
            image = self._labels.image(image)
        return Record(image, self._read_label(record[self._labels.feature]))

    def _read_label(self, value: Any) -> int:
        if self._labels.label is not None:
            value = self._labels.label(value)
        return int(value)

    @functools.cached_property
    def labels(self) -> np.ndarray:  # type: ignore[override]  # read when it is first needed
        """Labels int32 (N,), 0 for a damaged record, which is an unreadable image.

        No image is decoded, but the files are read from end to end, once.
        """
        labels = np.zeros(len(self), np.int32)
        for index, value in enumerate(self.column(self._labels.feature)):
            if value is not None:
                labels[index] = self._read_label(value)
        return labels

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features of the dataset."""
        return tuple(self._all_features)

    def column(self, key: str) -> Iterator[Any]:
        """Yield one feature of every record, without decoding images; None for a damaged record."""
        features = tfds.features.FeaturesDict({key: self._all_features[key]})
        for first in range(0, len(self), CHUNK):
            end = min(first + CHUNK, len(self))
            yield from self._read_values(range(first, end), key, features)

    def _read_values(
        self,
        indices: range,
        key: str,
        features: tfds.features.FeaturesDict,
    ) -> Iterator[Any]:
        """Yield a feature of consecutive records, which are read one by one if one is damaged."""
        try:
            records = self._records.__getitems__(indices)
            values = [features.deserialize_example_np(record)[key] for record in records]
        except RuntimeError:
            if len(indices) == 1:
                yield None
                return
            for index in indices:
                yield from self._read_values(range(index, index + 1), key, features)
            return
        yield from values

    def name_of(self, index: int) -> str:
        return f"{self.split}:{index}"

    @property
    def origin(self) -> str:
        return digest_files(self.split, self._files)


def open_digits(split: str, data_dir: str | None) -> TfdsSource:
    """Open the digits of scikit-learn; prepare them if necessary."""
    if data_dir is not None and is_address(data_dir):
        raise ValueError(
            f"input.data_dir={data_dir}: has no effect on digits, which each machine has. "
            "Leave it out.",
        )
    folder = digits.prepare(data_dir)
    builder = tfds.builder_from_directory(str(folder))
    return TfdsSource(builder, split)


def open_unnamed_digits(name: str, split: str, data_dir: str | None) -> TfdsSource:
    """Open the digits as a kind of data, whose text has no further name."""
    return open_digits(split, data_dir)


def open_tfds(name: str, split: str, data_dir: str | None) -> TfdsSource:
    """Open a dataset by its TFDS name: "cifar10", "cifar10:3.0.2" or "name/config".

    Its labels are the feature "label", or "original_label" of ImageNet ReaL.

    Raises:
      NotPrepared: a dataset of the catalogue is missing.
      ValueError: it is no name, TFDS knows no such dataset or version, or would download its code;
        otherwise as `TfdsSource`.
    """
    # For other texts TFDS runs code: NAMESPACE:NAME downloads it, NAME/config=FOLDER has it.
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"data='tfds:{name}': must be a name. Write NAME, NAME/CONFIG, NAME:VERSION or both.",
        )

    family = re.split("[/:]", name)[0]
    home = tfds_folder(data_dir, family)
    _require_descriptions(home / family)
    try:
        builder = tfds.builder(name, data_dir=data_dir and str(home))
    except tfds.core.DatasetNotFoundError:
        raise _explain_missing(name, home) from None
    # Versions and configs raise these, too.
    except (AssertionError, TypeError, ValueError, json_format.ParseError) as error:
        raise ValueError(f"TFDS cannot open {name!r}: {error}") from error
    return TfdsSource(builder, split, Labels(_choose_label(builder)))


def _choose_label(builder: tfds.core.DatasetBuilder) -> str:
    """Return the name of the feature with the label."""
    features = builder.info.features
    if STORED.feature not in features and ORIGINAL_LABEL in features:
        return ORIGINAL_LABEL
    return STORED.feature


def _explain_missing(name: str, home: Path) -> ValueError:
    """Return the error of a dataset that TFDS does not find."""
    root = home / name
    if (root / UNFINISHED).exists():
        return NotPrepared(f"Dataset {str(root)!r} is unfinished. Repeat vit-jax prepare.")

    prepared = [path.name for path in home.glob("[a-z]*/")]
    _, near = look_up_dataset(name, *prepared)
    hint = "See tfds.list_builders() for the names."
    if near:
        hint = f"Nearest: {', '.join(near)}."
    return ValueError(
        f"TFDS has no dataset {name!r}, and none is prepared in {str(home)!r}. {hint}",
    )


def open_vtab(name: str, split: str, data_dir: str | None) -> TfdsSource:
    """Open a split of a task of VTAB: train800, val200, train800val200 or test.

    Raises:
      ValueError: there is no such task or split, or its dataset is not prepared in a version that
        the splits hold for; otherwise as `TfdsSource`.
    """
    task = find_task(name)
    tfds_split = task.splits.get(split)
    if tfds_split is None:
        raise ValueError(
            f"Task vtab:{name} has no split {split!r}; it has {', '.join(task.splits)}.",
        )
    root = tfds.core.Path(tfds_folder(data_dir, task.dataset))
    version = _find_version(task, root)
    builder = tfds.builder_from_directory(str(root / task.dataset / str(version)))
    source = TfdsSource(builder, tfds_split, task.labels)
    if source.num_classes != task.num_classes:
        raise ValueError(
            f"Task vtab:{name} has {task.num_classes} classes, and {builder.info.full_name!r} in "
            f"{str(root)!r} has {source.num_classes}: it is another dataset than the splits are "
            "made for. Remove it and prepare it anew.",
        )
    return source


def _find_version(task: VtabTask, root: Any) -> Any:
    """Return the newest prepared version of a task's dataset with its splits.

    Raises:
      ValueError: there is none in the folder.
    """
    prepared = tfds.core.utils.version.list_all_versions(root / task.dataset)
    allowed = task.version.split(",")
    usable = [version for version in prepared if any(map(version.match, allowed))]
    if usable:
        return usable[-1]

    version = ""
    if "*" not in allowed[0]:
        version = f":{allowed[0]}"
    command = f"vit-jax prepare {task.dataset}{version} --data_dir={root}"
    if task.manual:
        command += f" --manual_dir=FOLDER\nFOLDER holds {task.manual}."
    present = "none"
    if prepared:
        present = few(prepared, str)
    raise ValueError(
        f"Task vtab:{task.name} has its splits from version {' or '.join(allowed)} of "
        f"{task.dataset!r}; in {str(root)!r} there is {present}. Run: {command}",
    )


def prepare(name: str, *, data_dir: str | None = None, manual_dir: str | None = None) -> str:
    """Download and prepare a dataset, unless it is prepared; return its folder.

    Args:
      name: "digits", or a dataset of the catalogue such as "cifar10" or "imagenet2012".
      data_dir: folder of prepared datasets; None: the default of TFDS.
      manual_dir: folder of archives that must be downloaded by hand (ImageNet's two tar files).

    Raises:
      ValueError: unknown name, or TensorFlow, which the builders of the catalogue need, is not
        installed.
    """
    if name == "digits":
        return str(digits.prepare(data_dir))
    is_known, near = look_up_dataset(name, "digits")
    if not is_known:
        raise ValueError(f"TFDS has no dataset {name!r}. Nearest: {', '.join(near) or 'none'}.")
    builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
    if builder.is_prepared():
        return str(builder.data_path)
    if importlib.util.find_spec("tensorflow") is None:
        from vit_jax.imports.extras import install_command

        raise ValueError(
            f"Preparing {name!r} needs TensorFlow, once, because TFDS's own builders do "
            f"(training does not): {install_command('prepare')}, best in a separate "
            "environment, and run the command again.",
        )
    builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(manual_dir=manual_dir),
    )
    return str(builder.data_path)


def look_up_dataset(name: str, *more: str) -> tuple[bool, list[str]]:
    """Return True if the catalogue has this dataset, and the nearest names."""
    # Datasets of the community would be downloaded.
    known = tfds.list_builders(with_community_datasets=False)
    family = name.partition("/")[0].partition(":")[0]
    return family in known, closest(family, [*known, *more], 3)


def _require_prepared(builder: tfds.core.DatasetBuilder) -> None:
    name = builder.info.full_name
    file_format = builder.info.file_format
    data_dir = Path(builder.data_dir)
    root = data_dir.parents[len(Path(name).parts) - 1]
    command = f"vit-jax prepare {name.replace(f'/{builder.version}', '')} --data_dir={root}"
    if not builder.info.splits:
        raise NotPrepared(f"Dataset {name!r} is not prepared in {str(root)!r}; run: {command}")
    if file_format is not tfds.core.FileFormat.ARRAY_RECORD:
        raise ValueError(
            f"Dataset {name!r} in {str(root)!r} is prepared as {file_format.value}, which cannot be "
            f"read by index. Move {str(data_dir)!r} away, or choose another data_dir, and run: "
            f"{command}",
        )


def _require_descriptions(dataset: Path) -> None:
    """Raise ValueError for a description that is no JSON, or a pipe, for which TFDS would wait."""
    for name in ("dataset_info.json", "features.json"):
        of_versions = dataset.glob(f"*/{name}")
        of_configs = dataset.glob(f"*/*/{name}")
        for file in itertools.chain(of_versions, of_configs):
            read_json(file)


def _require_split(builder: tfds.core.DatasetBuilder, split: str) -> None:
    try:
        if builder.info.splits[split].num_examples:
            return
        problem = "no examples in"
    except (KeyError, ValueError, AssertionError):
        problem = "no split"

    sizes = {name: info.num_examples for name, info in builder.info.splits.items()}
    first = next(iter(sizes))
    raise ValueError(
        f"Dataset {builder.info.full_name!r} has {problem} {split!r}; it has {sizes}, "
        f"and parts of them such as {first}[:98%].",
    )


def _require_files(builder: tfds.core.DatasetBuilder, split: str) -> None:
    """Raise ValueError for a file with an unreadable index or another number of records."""
    for part in builder.info.splits[split].file_instructions:
        expected = part.examples_in_shard
        try:
            count = num_records(part.filename)  # read from the end of the file
        except RuntimeError as error:
            problem = str(error)
        else:
            if count == expected:
                continue
            problem = f"it has {count} records instead of {expected}"
        raise ValueError(
            f"{part.filename!r} is missing, cut off or damaged ({problem}): "
            "copy it again, or remove the dataset and prepare it anew.",
        )


def _open_records(builder: tfds.core.DatasetBuilder, split: str) -> _Records:
    """Return the records of a split by index, still serialised."""
    files = builder.info.splits[split].file_instructions
    if not is_mirrored(files[0].filename):
        return cast(_Records, builder.as_data_source(split=split).data_source)
    return BucketRecords([(file.filename, file.skip, file.take) for file in files])


def _find_class_names(builder: tfds.core.DatasetBuilder, labels: Labels) -> tuple[str, ...]:
    """Return the names of the classes.

    Raises:
      ValueError: the dataset has no image, or no label.
    """
    features = dict(builder.info.features)
    has_image = isinstance(features.get("image"), tfds.features.Image)
    feature: Any = features.get(labels.feature)
    if has_image and labels.class_names and feature is not None:
        return labels.class_names
    if has_image and isinstance(feature, tfds.features.ClassLabel):
        return labels.class_names or tuple(feature.names)

    kinds = {name: type(present).__name__ for name, present in features.items()}
    needed = f"'image' (an Image) and {labels.feature!r}"
    if not labels.class_names:
        needed += " (a ClassLabel)"
    raise ValueError(
        f"Dataset {builder.info.full_name!r} has the features {kinds}; it needs {needed}.",
    )
