"""Sets of images that are evaluated in ImageNet's classes, and their correct outputs.

docs/imagenet.md describes them. Sets are prepared by TFDS or are unpacked archives.

Legend: K outputs of the network, L classes of the data, N images, S correct outputs of an image.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from vit_jax.config import InputConfig
from vit_jax.data.decoding.images import UnreadableImage, decode
from vit_jax.data.kinds.folder import Folder
from vit_jax.data.kinds.listing import WHOLE, FileSource, open_listing
from vit_jax.data.records import Source, few
from vit_jax.data.subset import SubsetSource, select
from vit_jax.evals import imagenet_classes as classes
from vit_jax.evals import label_sets
from vit_jax.evals.label_map import Labelled, LabelMap, WeightsInfo
from vit_jax.storage.files import expand_path, read_json
from vit_jax.text.nearest import did_you_mean

FAMILY = "imagenet"
_TAR = " --manual_dir=FOLDER, which holds ILSVRC2012_img_val.tar"
_ALL_OF_FOLDER = InputConfig(train_split="train", test_split="test", image_size=(1, 1))
_BORDER_PIXELS = 2  # width of the red border of each image of ObjectNet
_MAPPINGS = ("folder_to_objectnet_label.json", "objectnet_to_imagenet_1k.json")


class Absent(ValueError):
    """A set does not exist; the message says how to prepare it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSet:
    """One of the sets.

    Attributes:
      name: the name after "imagenet:".
      images: number of released images.
      dataset: name in TFDS; "" if it has none.
      split: split of that dataset.
      folders: folders of the unpacked archive, below data_dir, with a sub-folder for each class.
      subset: letter of `classes.members` for a set with some of the classes; "" for all.
      manual: option for files that TFDS cannot download.
    """

    name: str
    images: int
    dataset: str = ""
    split: str = "test"
    folders: tuple[str, ...] = ()
    subset: str = ""
    manual: str = ""


def _build_v2(variant: str, folder: str) -> ImageSet:
    return ImageSet(
        name=f"v2/{variant}",
        images=10_000,
        dataset=f"imagenet_v2/{variant}",
        folders=(f"imagenetv2-{folder}-format-val",),
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
        name="real",
        images=46_837,
        dataset="imagenet2012_real",
        split="validation",
        manual=_TAR,
    ),
    _build_v2("matched-frequency", "matched-frequency"),
    _build_v2("threshold-0.7", "threshold0.7"),
    _build_v2("topimages", "top-images"),
    ImageSet(
        name="a",
        images=7_500,
        dataset="imagenet_a",
        folders=("imagenet-a",),
        subset="A",
    ),
    ImageSet(
        name="r",
        images=30_000,
        dataset="imagenet_r",
        folders=("imagenet-r",),
        subset="R",
    ),
    ImageSet(name="sketch", images=50_889, dataset="imagenet_sketch", folders=("sketch",)),
    ImageSet(name="objectnet", images=18_574, folders=("objectnet-1.0/images",)),
)


def is_family(data: str) -> bool:
    """Return True if data, as in `--data=`, are "imagenet" or "imagenet:NAME,…"."""
    return data.partition(":")[0] == FAMILY


def open_family(
    data: str,
    weights: WeightsInfo,
    *,
    data_dir: str | None = None,
    real: str | None = None,
) -> tuple[dict[str, Labelled], dict[str, str]]:
    """Open the sets of `data`: some, "imagenet:a,v2", or all, "imagenet".

    Args:
      data: see `is_family`; "v2" stands for its three variants.
      weights: the weights to evaluate.
      data_dir: folder of prepared TFDS datasets and of unpacked archives.
      real: path of ReaL's real.json, which has labels of the validation images.

    Returns:
      the opened sets by name, and instructions to prepare each absent set.

    Raises:
      ValueError: an unknown name; no set exists; a set is unreadable; the weights do not have
        ImageNet's classes.
    """
    sets = _select_sets(data)  # first, because it is faster than a look at the weights
    outputs = classes.find_outputs(weights)
    names = [image_set.name for image_set in sets]
    if real is not None and "real" not in names:
        raise ValueError(f"--real={real}: without effect on {data}; leave it out.")
    opened = {}
    absent = {}
    for image_set in sets:
        try:
            opened[image_set.name] = _open(
                image_set,
                outputs,
                weights,
                data_dir,
                real,
            )
        except Absent as reason:
            absent[image_set.name] = str(reason)
    if opened:
        return opened, absent

    lines = []
    for name, instructions in absent.items():
        lines.append(f"imagenet:{name} is not there: {instructions}")
    raise ValueError("\n".join(lines))


def _select_sets(data: str) -> list[ImageSet]:
    """Return the sets of `data`, each once; all sets without names."""
    selected: list[ImageSet] = []
    _, _, names = data.partition(":")
    for name in names.split(","):
        if not name:
            continue
        for image_set in _find_sets(name):
            if image_set not in selected:
                selected.append(image_set)
    return selected or list(SETS)


def _find_sets(name: str) -> list[ImageSet]:
    """Return the set with a name, or all variants of it; ValueError if there is none."""
    found = []
    for image_set in SETS:
        family, _, _ = image_set.name.partition("/")
        if name in (image_set.name, family):
            found.append(image_set)
    if found:
        return found

    known = [image_set.name for image_set in SETS]
    hint = did_you_mean(name, known)
    raise ValueError(
        f"--data=imagenet:{name}: there is no such set.{hint} Known: {', '.join(known)}."
    )


def _open(
    image_set: ImageSet,
    outputs: np.ndarray,
    weights: WeightsInfo,
    data_dir: str | None,
    real: str | None,
) -> Labelled:
    """Open a set. `outputs` has the output of each class of ImageNet, -1 without one."""
    source: Source
    correct_NS: np.ndarray | None = None
    if image_set.name == "real":
        source, where, correct_NS = _open_real(image_set, outputs, data_dir, real)
    elif image_set.name == "objectnet":
        source, where, correct_NS = _open_objectnet(image_set, outputs, data_dir)
    else:
        source, where = _open_single(image_set, data_dir)

    numbers = classes.members(image_set.subset)
    output_L = np.full(source.num_classes, -1)
    listed = np.arange(source.num_classes)
    if source.class_names == classes.class_names():
        output_L = outputs
        listed = numbers
    output_names = _name_outputs(weights, outputs)
    label_map = LabelMap(
        output_names=output_names,
        is_allowed_K=np.isin(np.arange(len(output_names)), outputs[numbers]),
        output_L=output_L,
        listed=listed,
        correct_NS=correct_NS,
    )

    notes = []
    if len(source) != image_set.images:
        notes.append(
            f"imagenet:{image_set.name} has {len(source):,} images here, "
            f"and {image_set.images:,} were released."
        )
    class_names = classes.class_names()
    absent = [class_names[number] for number in numbers if outputs[number] < 0]
    if absent:
        notes.append(
            f"{weights.source} has no output for {few(absent)}, which are never its answer."
        )
    words = f"imagenet:{image_set.name}, {where}, {len(source):,} images"
    return Labelled(source, words, notes, label_map)


def _name_outputs(weights: WeightsInfo, outputs: np.ndarray) -> tuple[str, ...]:
    """Return the names of the outputs; the output of a class of ImageNet has the name of the class."""
    names = list(weights.class_names or classes.class_names())
    for output, name in zip(outputs, classes.class_names(), strict=True):
        if output >= 0:
            names[output] = name
    return tuple(names)


# Images with one label.


def _open_single(image_set: ImageSet, data_dir: str | None) -> tuple[SubsetSource, str]:
    """Return images with one label each, in the numbering of `classes`, and their location."""
    source, where = _open_stored(image_set, data_dir)
    known = classes.numbers_by_id()
    for number in range(classes.COUNT):
        known[str(number)] = number  # folders of V2
    allowed = set(known.values())
    if isinstance(source, FileSource):
        allowed = set(classes.members(image_set.subset).tolist())
    unknown = [name for name in source.class_names if known.get(name) not in allowed]
    if unknown:
        raise ValueError(
            f"{where} has classes that imagenet:{image_set.name} does not have: {few(unknown)}."
        )
    numbers = [known[name] for name in source.class_names]
    images = SubsetSource(
        source,
        np.arange(len(source)),
        classes.class_names(),
        np.array(numbers),
    )
    return images, where


def _open_stored(image_set: ImageSet, data_dir: str | None) -> tuple[Source, str]:
    """Return the images of a dataset of TFDS, else of an unpacked archive, and their location."""
    if image_set.dataset:
        # Imported here, because tensorflow_datasets takes seconds to load.
        from vit_jax.data.kinds import tfds_source

        try:
            source = tfds_source.open_tfds(image_set.dataset, image_set.split, data_dir)
        except tfds_source.NotPrepared:
            pass
        else:
            return source, f"tfds:{image_set.dataset}"
    return _open_unpacked(image_set, data_dir)


def _open_unpacked(image_set: ImageSet, data_dir: str | None) -> tuple[Source, str]:
    """Return the images in the folder of an unpacked archive, and their location.

    Raises:
      Absent: the folder does not exist; the message says how to prepare the set.
    """
    if data_dir:
        for folder in image_set.folders:
            path = expand_path(data_dir) / folder
            if path.is_dir():
                images = open_listing(
                    Folder(path),
                    WHOLE,
                    _ALL_OF_FOLDER,
                    seed=0,
                )
                return images, f"folder:{path}"

    ways = []
    if image_set.dataset:
        command = f"vit-jax prepare {image_set.dataset}"
        if data_dir:
            command += f" --data_dir={data_dir}"
        ways.append(command + image_set.manual)
    if image_set.folders:
        folders = " or ".join(image_set.folders)
        ways.append(f"unpack its archive, so that {folders} is in the folder of --data_dir=")
    else:
        ways.append("give --real=real.json, for the images of imagenet:validation")
    raise Absent("; or ".join(ways))


# ReaL: the validation images with every class that they show (Beyer et al., "Are we done with
# ImageNet?", 2020).


def _open_real(
    image_set: ImageSet,
    outputs: np.ndarray,
    data_dir: str | None,
    real: str | None,
) -> tuple[Source, str, np.ndarray]:
    """Return the validation images that have a label, their location, and their correct outputs."""
    if real is not None:
        single, where = _open_single(SETS[0], data_dir)
        path = expand_path(real)
        source: Source = single
        real_sets = label_sets.read_label_file(single.source, path, classes.COUNT)
        where = f"{real} on {where}"
    else:
        stored, where = _open_stored(image_set, data_dir)
        source = SubsetSource(stored, np.arange(len(stored)), classes.class_names())
        real_sets = list(label_sets.read_column(stored, "real_label"))

    images = label_sets.keep_labelled(source, real_sets, where)
    is_filled_NS = images.correct_NS >= 0
    correct_outputs_NS = np.where(is_filled_NS, outputs[images.correct_NS], -1)
    return images.source, where, correct_outputs_NS


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
        image_HWC = decode(self.source[index].image)
        height, width = image_HWC.shape[:2]
        if min(height, width) <= 2 * self.pixels:
            raise UnreadableImage(f"It has {height} x {width} pixels, all of them border")
        inside = slice(self.pixels, -self.pixels)
        return image_HWC[inside, inside]

    def name_of(self, index: int) -> str:
        return self.source.name_of(index)

    def key_of(self, index: int) -> bytes:
        return self.source.key_of(index)


def _open_objectnet(
    image_set: ImageSet,
    outputs: np.ndarray,
    data_dir: str | None,
) -> tuple[Source, str, np.ndarray]:
    """Return images of ImageNet's objects without border, their location, and correct outputs."""
    source, where = _open_unpacked(image_set, data_dir)
    _, _, path = where.partition(":")
    mappings = Path(path).parent / "mappings"
    label_of_folder = read_json(mappings / _MAPPINGS[0])
    lemmas_of_label = read_json(mappings / _MAPPINGS[1])
    try:
        numbers_of_folder = _match_folders(label_of_folder, lemmas_of_label)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{where}: the mappings beside it are not those of ObjectNet's release ({error!r})."
        ) from error
    names = tuple(name for name in source.class_names if name in numbers_of_folder)
    if not names:
        raise ValueError(f"{where} has no class of ImageNet, by the mappings beside it.")

    inputs = dataclasses.replace(_ALL_OF_FOLDER, classes=names)
    selected = select(source, inputs, training=False, seed=0)
    images = WithoutBorder(selected, _BORDER_PIXELS)

    correct_outputs = [outputs[numbers_of_folder[name]] for name in names]
    correct_LS = label_sets.stack_rows(correct_outputs)
    return images, where, correct_LS[selected.labels]


def _match_folders(
    label_of_folder: Mapping[str, str],
    lemmas_of_label: Mapping[str, str],
) -> dict[str, list[int]]:
    """Return the numbers of the classes of ImageNet that each folder of ObjectNet shows."""
    numbers = {}
    for number, known in enumerate(classes.classes()):
        numbers[known.lemmas] = number

    numbers_of_folder = {}
    for name, label in label_of_folder.items():
        if label in lemmas_of_label:
            all_lemmas = lemmas_of_label[label].split("; ")
            numbers_of_folder[name] = [numbers[lemmas] for lemmas in all_lemmas]
    return numbers_of_folder
