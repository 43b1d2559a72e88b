"""The sets of images that are evaluated in ImageNet's classes, and which answers are right: docs/imagenet.md.

Legend: K outputs of the network, L classes of the data, N images, S right answers of an image.
"""

import numpy as np

from vit_jax.config.nearest import did_you_mean
from vit_jax.data.records import Source, few
from vit_jax.inference.imagenet import classes
from vit_jax.inference.imagenet.objectnet import open_objectnet
from vit_jax.inference.imagenet.places import Absent, ImageSet, open_single
from vit_jax.inference.imagenet.real import open_real
from vit_jax.inference.labelled import Key, Labelled
from vit_jax.weights import Weights

FAMILY = "imagenet"
_TAR = " --manual_dir=FOLDER, which holds ILSVRC2012_img_val.tar"
SETS = (
    ImageSet(
        name="validation",
        images=50_000,
        dataset="imagenet2012",
        split="validation",
        folders=("val", "validation"),
        manual=_TAR,
    ),
    ImageSet(name="real", images=46_837, dataset="imagenet2012_real", split="validation", manual=_TAR),
    *(
        ImageSet(
            name=f"v2/{variant}", images=10_000, dataset=f"imagenet_v2/{variant}", folders=(f"{folder}-format-val",)
        )
        for variant, folder in (
            ("matched-frequency", "imagenetv2-matched-frequency"),
            ("threshold-0.7", "imagenetv2-threshold0.7"),
            ("topimages", "imagenetv2-top-images"),
        )
    ),
    ImageSet(name="a", images=7_500, dataset="imagenet_a", folders=("imagenet-a",), subset="A"),
    ImageSet(name="r", images=30_000, dataset="imagenet_r", folders=("imagenet-r",), subset="R"),
    ImageSet(name="sketch", images=50_889, dataset="imagenet_sketch", folders=("sketch",)),
    ImageSet(name="objectnet", images=18_574, folders=("objectnet-1.0/images",)),
)


def is_family(data: str) -> bool:
    """Whether data, as given to `evaluate`, are of this family: "imagenet", or "imagenet:NAME,…"."""
    return data.partition(":")[0] == FAMILY


def open_family(
    data: str, weights: Weights, *, data_dir: str | None = None, real: str | None = None
) -> tuple[dict[str, Labelled], dict[str, str]]:
    """Opens the sets that `data` names, "imagenet:a,v2", or all of them, "imagenet".

    Args:
      data: as for `is_family`; "v2" stands for its three variants.
      weights: whose outputs answer.
      data_dir: where TFDS keeps prepared datasets, or archives were unpacked.
      real: path of ReaL's real.json, whose labels are given to the validation images.

    Returns:
      Those that are there, by name, and for each of the others how it comes there.

    Raises:
      ValueError: an unknown name; none of the sets is there; one is there and cannot be read; the weights do not have
        ImageNet's classes.
    """
    chosen = _chosen(data)  # first: a name is mended before weights are
    outputs = classes.outputs_of(weights)
    if real is not None and "real" not in [one.name for one in chosen]:
        raise ValueError(f"--real={real}: without effect on {data}; leave it out.")
    opened, absent = {}, {}
    for one in chosen:
        try:
            opened[one.name] = _open(one, outputs, weights, data_dir, real)
        except Absent as reason:
            absent[one.name] = str(reason)
    if not opened:
        raise ValueError("\n".join(f"imagenet:{name} is not there: {reason}" for name, reason in absent.items()))
    return opened, absent


def _chosen(data: str) -> list[ImageSet]:
    chosen: list[ImageSet] = []
    for name in filter(None, data.partition(":")[2].split(",")):
        found = [one for one in SETS if name in (one.name, one.name.partition("/")[0])]
        if not found:
            known = [one.name for one in SETS]
            hint = did_you_mean(name, known)
            raise ValueError(f"--data=imagenet:{name}: there is no such set.{hint} Known: {', '.join(known)}.")
        chosen += found
    return list(dict.fromkeys(chosen)) or list(SETS)


def _open(one: ImageSet, outputs: np.ndarray, weights: Weights, data_dir: str | None, real: str | None) -> Labelled:
    source: Source
    right: np.ndarray | None = None
    if one.name == "real":
        source, where, right = open_real(one, SETS[0], outputs, data_dir, real)
    elif one.name == "objectnet":
        source, where, right = open_objectnet(one, outputs, data_dir)
    else:
        source, where = open_single(one, data_dir)
    numbers, names = classes.members(one.subset), _answer_names(weights, outputs)
    is_numbered_alike = source.class_names == classes.class_names()
    key = Key(
        answer_names=names,
        is_allowed_K=np.isin(np.arange(len(names)), outputs[numbers]),
        output_L=outputs if is_numbered_alike else np.full(source.num_classes, -1),
        listed=numbers if is_numbered_alike else np.arange(source.num_classes),
        right_NS=right,
    )
    notes = []
    if len(source) != one.images:
        notes.append(f"imagenet:{one.name} has {len(source):,} images here, and {one.images:,} were released.")
    if absent := [classes.class_names()[number] for number in numbers if outputs[number] < 0]:
        notes.append(f"{weights.source} has no output for {few(absent)}, which are never its answer.")
    return Labelled(source, f"imagenet:{one.name}, {where}, {len(source):,} images", notes, key)


def _answer_names(weights: Weights, outputs: np.ndarray) -> tuple[str, ...]:
    """The outputs' own names; those of ImageNet's classes for the outputs that stand for them."""
    names = list(weights.class_names or classes.class_names())
    for output, name in zip(outputs, classes.class_names(), strict=True):
        if output >= 0:
            names[output] = name
    return tuple(names)
