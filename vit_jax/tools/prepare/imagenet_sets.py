"""Sets of images that are evaluated in ImageNet's classes, and their right outputs.

docs/imagenet.md describes them. Sets are prepared by TFDS or are unpacked archives.

Legend: K outputs of the network, L classes of the data, N images, S right outputs of an image.
"""

import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.config import InputConfig
from vit_jax.data.decoding.images import UnreadableImage, decode
from vit_jax.data.kinds.folder import Folder
from vit_jax.data.kinds.listing import WHOLE, FileSource, open_listing
from vit_jax.data.records import Source, few
from vit_jax.data.subset import SubsetSource, select
from vit_jax.evals import imagenet_classes as classes
from vit_jax.evals.label_map import Labelled, LabelMap, WeightsInfo
from vit_jax.storage.files import expanded, read_json
from vit_jax.text.nearest import did_you_mean

FAMILY = "imagenet"
_TAR = " --manual_dir=FOLDER, which holds ILSVRC2012_img_val.tar"
_AS_IT_IS = InputConfig(
    train_split="train", test_split="test", image_size=(1, 1)
)  # reads all of a folder
_VALIDATION_FILE = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG$", re.IGNORECASE)
_BORDER_PIXELS = 2  # red, around each image of ObjectNet
_MAPPINGS = ("folder_to_objectnet_label.json", "objectnet_to_imagenet_1k.json")


class Absent(ValueError):
    """A set is not there; the message says how to prepare it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSet:
    """One of the sets.

    Attributes:
      name: after "imagenet:".
      images: number of released images.
      dataset: name in TFDS; "" if it has none.
      split: of that dataset.
      folders: of the unpacked archive, below data_dir, with a sub-folder for each class.
      subset: letter of `classes.members` whose classes it has; "" for all.
      manual: option for what TFDS cannot download.
    """

    name: str
    images: int
    dataset: str = ""
    split: str = "test"
    folders: tuple[str, ...] = ()
    subset: str = ""
    manual: str = ""


def _v2(variant: str, folder: str) -> ImageSet:
    folders = (f"imagenetv2-{folder}-format-val",)
    return ImageSet(
        name=f"v2/{variant}", images=10_000, dataset=f"imagenet_v2/{variant}", folders=folders
    )


SETS = (
    ImageSet(
        name="validation",
        images=50_000,
        dataset="imagenet2012",
        split="validation",
        folders=("val", "validation"),
        manual=_TAR,
    ),
    ImageSet(
        name="real", images=46_837, dataset="imagenet2012_real", split="validation", manual=_TAR
    ),
    _v2("matched-frequency", "matched-frequency"),
    _v2("threshold-0.7", "threshold0.7"),
    _v2("topimages", "top-images"),
    ImageSet(name="a", images=7_500, dataset="imagenet_a", folders=("imagenet-a",), subset="A"),
    ImageSet(name="r", images=30_000, dataset="imagenet_r", folders=("imagenet-r",), subset="R"),
    ImageSet(name="sketch", images=50_889, dataset="imagenet_sketch", folders=("sketch",)),
    ImageSet(name="objectnet", images=18_574, folders=("objectnet-1.0/images",)),
)


def is_family(data: str) -> bool:
    """Return whether data, as in `--data=`, are "imagenet" or "imagenet:NAME,…"."""
    return data.partition(":")[0] == FAMILY


def open_family(
    data: str, weights: WeightsInfo, *, data_dir: str | None = None, real: str | None = None
) -> tuple[dict[str, Labelled], dict[str, str]]:
    """Open the sets that `data` names, "imagenet:a,v2", or all of them, "imagenet".

    Args:
      data: as for `is_family`; "v2" stands for its three variants.
      weights: whose outputs are evaluated.
      data_dir: folder of prepared TFDS datasets and of unpacked archives.
      real: path of ReaL's real.json, which has labels of the validation images.

    Returns:
      The opened sets by name, and for each absent one how to prepare it.

    Raises:
      ValueError: an unknown name; no set is there; one is unreadable; the weights do not have
        ImageNet's classes.
    """
    chosen = _chosen(data)  # before the weights: a wrong name is the cheaper mistake
    outputs = classes.outputs_of(weights)
    if real is not None and "real" not in [one.name for one in chosen]:
        raise ValueError(f"--real={real}: without effect on {data}; leave it out.")
    opened = {}
    absent = {}
    for one in chosen:
        try:
            opened[one.name] = _open(one, outputs, weights, data_dir, real)
        except Absent as reason:
            absent[one.name] = str(reason)
    if not opened:
        raise ValueError(
            "\n".join(f"imagenet:{name} is not there: {reason}" for name, reason in absent.items())
        )
    return opened, absent


def _chosen(data: str) -> list[ImageSet]:
    chosen: list[ImageSet] = []
    for name in filter(None, data.partition(":")[2].split(",")):
        named = [one for one in SETS if name in (one.name, one.name.partition("/")[0])]
        if not named:
            known = [one.name for one in SETS]
            hint = did_you_mean(name, known)
            raise ValueError(
                f"--data=imagenet:{name}: there is no such set.{hint} Known: {', '.join(known)}."
            )
        chosen += named
    return list(dict.fromkeys(chosen)) or list(SETS)


def _open(
    one: ImageSet, outputs: np.ndarray, weights: WeightsInfo, data_dir: str | None, real: str | None
) -> Labelled:
    source: Source
    right: np.ndarray | None = None
    if one.name == "real":
        source, where, right = _open_real(one, outputs, data_dir, real)
    elif one.name == "objectnet":
        source, where, right = _open_objectnet(one, outputs, data_dir)
    else:
        source, where = _open_single(one, data_dir)
    numbers = classes.members(one.subset)
    names = _output_names(weights, outputs)
    is_numbered_alike = source.class_names == classes.class_names()
    label_map = LabelMap(
        output_names=names,
        is_allowed_K=np.isin(np.arange(len(names)), outputs[numbers]),
        output_L=outputs if is_numbered_alike else np.full(source.num_classes, -1),
        listed=numbers if is_numbered_alike else np.arange(source.num_classes),
        right_NS=right,
    )
    notes = []
    if len(source) != one.images:
        notes.append(
            f"imagenet:{one.name} has {len(source):,} images here, and {one.images:,} were "
            "released."
        )
    if absent := [classes.class_names()[number] for number in numbers if outputs[number] < 0]:
        notes.append(
            f"{weights.source} has no output for {few(absent)}, which are never its answer."
        )
    return Labelled(
        source, f"imagenet:{one.name}, {where}, {len(source):,} images", notes, label_map
    )


def _output_names(weights: WeightsInfo, outputs: np.ndarray) -> tuple[str, ...]:
    """Return the names of the outputs; outputs that stand for a class of ImageNet have its name."""
    names = list(weights.class_names or classes.class_names())
    for output, name in zip(outputs, classes.class_names(), strict=True):
        if output >= 0:
            names[output] = name
    return tuple(names)


# Images with one label.


def _open_single(one: ImageSet, data_dir: str | None) -> tuple[SubsetSource, str]:
    """Open images with one label each, in the numbering of `classes`.

    Return them and where they are.
    """
    source, where = _open_prepared(one, data_dir) or _open_unpacked(one, data_dir)
    known = classes.numbers_by_id() | {
        str(number): number for number in range(classes.COUNT)
    }  # V2's folders
    members = (
        set(classes.members(one.subset).tolist())
        if isinstance(source, FileSource)
        else set(known.values())
    )
    if unknown := [name for name in source.class_names if known.get(name) not in members]:
        raise ValueError(
            f"{where} has classes that imagenet:{one.name} does not have: {few(unknown)}."
        )
    numbers = np.array([known[name] for name in source.class_names])
    return SubsetSource(source, np.arange(len(source)), classes.class_names(), numbers), where


def _open_prepared(
    one: ImageSet, data_dir: str | None, label_key: str = "label"
) -> tuple[Source, str] | None:
    """Open a set that TFDS has prepared; None if it has not."""
    from vit_jax.data.kinds import (
        tfds_source,  # here, because tensorflow_datasets takes seconds to load
    )

    try:
        return tfds_source.open_tfds(
            one.dataset, one.split, data_dir, label_key
        ), f"tfds:{one.dataset}"
    except tfds_source.NotPrepared:
        return None


def _open_unpacked(one: ImageSet, data_dir: str | None) -> tuple[Source, str]:
    """Open the folder of an unpacked archive; `Absent` says how to prepare the set."""
    for path in [expanded(data_dir) / folder for folder in one.folders] if data_dir else []:
        if path.is_dir():
            return open_listing(Folder(path), WHOLE, _AS_IT_IS, seed=0), f"folder:{path}"
    ways = []
    if one.dataset:
        place = f" --data_dir={data_dir}" if data_dir else ""
        ways.append(f"vit-jax prepare {one.dataset}{place}{one.manual}")
    if one.folders:
        ways.append(
            f"unpack its archive, so that {' or '.join(one.folders)} is in the folder of "
            "--data_dir="
        )
    else:
        ways.append("give --real=real.json, for the images of imagenet:validation")
    raise Absent("; or ".join(ways))


def _filled(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return rows of different lengths as one array, filled with -1."""
    filled = np.full((len(rows), max(map(len, rows))), -1)
    for row, values in zip(filled, rows, strict=True):
        row[: len(values)] = values
    return filled


# ReaL: the validation images with every class that they show (Beyer et al., "Are we done with
# ImageNet?", 2020).


def _open_real(
    one: ImageSet, outputs: np.ndarray, data_dir: str | None, real: str | None
) -> tuple[Source, str, np.ndarray]:
    """Open the validation images that have a label.

    Return them, where they are, and their right outputs.
    """
    labels: list[Sequence[int] | None]  # None for a damaged record, which counts as unreadable
    if real is not None:
        source, where = _open_single(SETS[0], data_dir)
        labels = _labels_of_files(source, expanded(real))
        where = f"{real} on {where}"
    else:
        prepared, where = _open_prepared(one, data_dir, "original_label") or _open_unpacked(
            one, data_dir
        )
        source = SubsetSource(prepared, np.arange(len(prepared)), classes.class_names())
        labels = list(_column(prepared, "real_label"))
    kept = [number for number, some in enumerate(labels) if some is None or len(some)]
    if not kept:
        raise ValueError(f"{where}: no image has a label.")
    right = _filled(
        [outputs[np.asarray(() if labels[n] is None else labels[n], np.int64)] for n in kept]
    )
    return SubsetSource(source, kept), where, right


def _labels_of_files(source: SubsetSource, path: Path) -> list[Sequence[int] | None]:
    """Return ReaL's labels of each record, by the number in the name of its file."""
    labels = read_json(path)
    if not isinstance(labels, list) or not all(map(_is_label_set, labels)):
        raise ValueError(
            f"{path}: must be a list of lists of classes, 0 to 999, one for each validation image."
        )
    labels_of: list[Sequence[int] | None] = []
    for name in _file_names(source.source):
        match = _VALIDATION_FILE.search(name or "")
        number = int(match[1]) if match else 0
        if name is not None and not 1 <= number <= len(labels):
            raise ValueError(
                f"{name} has no place in {path}, whose {len(labels):,} lists are of "
                "ILSVRC2012_val_00000001.JPEG and so on, in the order of these names."
            )
        labels_of.append(None if name is None else labels[number - 1])
    return labels_of


def _is_label_set(some: object) -> bool:
    return isinstance(some, list) and all(
        type(label) is int and 0 <= label < classes.COUNT for label in some
    )


def _file_names(source: Source) -> Iterator[str | None]:
    if isinstance(source, FileSource):
        yield from map(source.name_of, range(len(source)))
    else:
        yield from (
            name if name is None else os.fsdecode(name) for name in _column(source, "file_name")
        )


def _column(source: Source, key: str) -> Iterator[Any]:
    """Yield one feature of every record of TFDS."""
    from vit_jax.data.kinds.tfds_source import TfdsSource

    assert isinstance(source, TfdsSource)
    return source.column(key)


# ObjectNet: household objects in unusual places and poses (Barbu et al., NeurIPS 2019).


class WithoutBorder(Source):
    """Images without their outermost pixels, which are not part of the photograph."""

    def __init__(self, source: Source, pixels: int) -> None:
        """Remove this number of pixels on each side."""
        self.source = source
        self.pixels = pixels
        self.class_names = source.class_names
        self.labels = source.labels

    def image_of(self, index: int) -> np.ndarray:
        image = decode(self.source[index].image)
        if min(image.shape[:2]) <= 2 * self.pixels:
            raise UnreadableImage(
                f"It has {image.shape[0]} x {image.shape[1]} pixels, all of them border"
            )
        return image[self.pixels : -self.pixels, self.pixels : -self.pixels]

    def name_of(self, index: int) -> str:
        return self.source.name_of(index)

    def key_of(self, index: int) -> bytes:
        return self.source.key_of(index)


def _open_objectnet(
    one: ImageSet, outputs: np.ndarray, data_dir: str | None
) -> tuple[Source, str, np.ndarray]:
    """Open the images of ImageNet's objects, without border.

    Return them, where they are, and their right outputs.
    """
    source, where = _open_unpacked(one, data_dir)
    folder_of, classes_of = (
        read_json(Path(where.partition(":")[2]).parent / "mappings" / name) for name in _MAPPINGS
    )
    numbers = {one.lemmas: number for number, one in enumerate(classes.classes())}
    try:
        right = {
            name: [numbers[lemmas] for lemmas in classes_of[label].split("; ")]
            for name, label in folder_of.items()
            if label in classes_of
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{where}: the mappings beside it are not those of ObjectNet's release ({error!r})."
        ) from error
    names = tuple(name for name in source.class_names if name in right)
    if not names:
        raise ValueError(f"{where} has no class of ImageNet, by the mappings beside it.")
    chosen = select(source, dataclasses.replace(_AS_IT_IS, classes=names), training=False, seed=0)
    sets = _filled([outputs[right[name]] for name in names])
    return WithoutBorder(chosen, _BORDER_PIXELS), where, sets[chosen.labels]
