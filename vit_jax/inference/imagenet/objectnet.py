"""ObjectNet: household objects in unusual places and poses (Barbu et al., NeurIPS 2019)."""

import dataclasses
from pathlib import Path

import numpy as np

from vit_jax.data.images import UnreadableImage, decode
from vit_jax.data.records import Source
from vit_jax.data.subset import select
from vit_jax.files import read_json
from vit_jax.inference.imagenet import classes
from vit_jax.inference.imagenet.places import AS_IT_IS, ImageSet, filled, open_unpacked

_BORDER_PIXELS = 2  # red, around each image
_MAPPINGS = ("folder_to_objectnet_label.json", "objectnet_to_imagenet_1k.json")


class WithoutBorder(Source):
    """Images without their outermost pixels, which are not part of the photograph."""

    def __init__(self, source: Source, pixels: int) -> None:
        """Removes so many on each side."""
        self.source, self.pixels = source, pixels
        self.class_names, self.labels = source.class_names, source.labels

    def image_of(self, index: int) -> np.ndarray:
        image = decode(self.source[index].image)
        if min(image.shape[:2]) <= 2 * self.pixels:
            raise UnreadableImage(f"It has {image.shape[0]} x {image.shape[1]} pixels, all of them border")
        return image[self.pixels : -self.pixels, self.pixels : -self.pixels]

    def name_of(self, index: int) -> str:
        return self.source.name_of(index)

    def key_of(self, index: int) -> bytes:
        return self.source.key_of(index)


def open_objectnet(one: ImageSet, outputs: np.ndarray, data_dir: str | None) -> tuple[Source, str, np.ndarray]:
    """Images of the objects that ImageNet has too, without the border, and the outputs that are right for each."""
    source, where = open_unpacked(one, data_dir)
    folder_of, classes_of = (read_json(Path(where.partition(":")[2]).parent / "mappings" / name) for name in _MAPPINGS)
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
        raise ValueError(f"{where} has no class that ImageNet has too, by the mappings beside it.")
    chosen = select(source, dataclasses.replace(AS_IT_IS, classes=names), training=False, seed=0)
    sets = filled([outputs[right[name]] for name in names])
    return WithoutBorder(chosen, _BORDER_PIXELS), where, sets[chosen.labels]
