"""Training and test batches of any data that a run can read, for a custom loop."""

import dataclasses
from collections.abc import Iterator
from typing import Unpack

import numpy as np

from vit_jax.api.data_options import DataOptions
from vit_jax.api.model_options import require_known_options
from vit_jax.config import InputConfig, from_dict
from vit_jax.data.pipeline import open_batches
from vit_jax.data.records import Source, require_same_classes
from vit_jax.data.sources import open_source, require_known_data
from vit_jax.data.stream import EvaluationStream, HostBatch, Stream, build_train_stream
from vit_jax.data.transforms import build_evaluation_transform, check_augmentations
from vit_jax.data.workers import Parallelism, count_cores
from vit_jax.weights.description import choose_orientation

_MIXING = "batches are not mixed here. Mix them in the training step, with vit_jax.data.mixing"
_OF_THE_STEP = {
    "mixup_alpha": _MIXING,
    "cutmix_alpha": _MIXING,
    "cutmix_fraction": _MIXING,
    "patch_dropout": "the network excludes patches, not the data. Omit it",
}
"""Fields of `config.InputConfig` that concern a training step, and what to do in a custom loop."""


@dataclasses.dataclass(frozen=True)
class Data:
    """The two splits of a data set, open.

    A batch has `image`, uint8 (B, H, W, 3), RGB; `label`, int32 (B,), or (B, K) where an image may
    have several labels; and `mask`, float32 (B,), 0 for padding and for unreadable images, which do
    not count.

    Attributes:
      train: records of the training split.
      test: records of the test split.
      inputs: preparation of the images.
      batch_size: images of a batch.
      seed: random seed of order and augmentation.
    """

    train: Source
    test: Source
    inputs: InputConfig
    batch_size: int
    seed: int

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; their places are the labels."""
        return tuple(self.train.class_names)

    @property
    def is_multilabel(self) -> bool:
        """True if an image may have several labels."""
        return self.train.is_multilabel

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches with as many images as the training split has."""
        return max(1, len(self.train) // self.batch_size)

    def train_batches(self, num_steps: int, start_step: int = 0) -> Iterator[HostBatch]:
        """Yield augmented batches of steps in the order of the seed, without end of an epoch.

        A loop that goes on after `start_step` steps gets the batches that it would have got.
        """
        stream = build_train_stream(
            self.train,
            self.inputs,
            seed=self.seed,
            global_batch=self.batch_size,
            global_rows=np.arange(self.batch_size),
            start_step=start_step,
            num_steps=num_steps,
        )
        return self._iterate(stream)

    def test_batches(self) -> Iterator[HostBatch]:
        """Yield batches that hold every test image once; the last one is padded."""
        stream = EvaluationStream(
            self.test,
            build_evaluation_transform(self.inputs),
            self.batch_size,
            np.arange(self.batch_size),
        )
        return self._iterate(stream)

    def _iterate(self, stream: Stream) -> Iterator[HostBatch]:
        """Yield the batches of a stream, which are prepared ahead; by threads, if not stated."""
        parallelism = Parallelism(
            num_workers=self.inputs.num_workers or 0,
            num_threads=self.inputs.num_threads or count_cores(),
        )
        with open_batches(stream, parallelism) as batches:
            yield from batches


def open_data(
    data: str,
    *,
    image_size: int | tuple[int, int] = 224,
    batch_size: int = 64,
    seed: int = 0,
    train_split: str = "train",
    test_split: str = "test",
    **options: Unpack[DataOptions],
) -> Data:
    """Open the training and the test split of a data set.

    Args:
      data: text in a form of `--data=`, such as "folder:photos" or "digits" (docs/data.md).
      image_size: in pixels, one side of a square or (height, width).
      batch_size: images of a batch.
      seed: chooses a hold-out where files have no splits, the order of images and their
        augmentation.
      train_split: split to train on, also a part of one: "train[:90%]".
      test_split: split to evaluate on.
      **options: other fields of `config.InputConfig`, such as holdout_fraction=0.2, flip=False or
        randaugment_layers=2.

    Raises:
      ValueError: unknown data or options, a split that does not exist, or splits of other classes.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: give at least 1.")
    known = DataOptions.__optional_keys__
    require_known_options(open_data, options, known, _OF_THE_STEP)
    require_known_data(data, "data")
    size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    fields = {
        "train_split": train_split,
        "test_split": test_split,
        "image_size": size,
        "exif_orientation": choose_orientation(None, None, data),
        **options,
    }
    inputs = from_dict(InputConfig, fields, "input.")

    train = open_source(data, train_split, inputs, seed)
    test = open_source(data, test_split, inputs, seed)
    require_same_classes(data, train_split, train, test_split, test)
    check_augmentations(inputs, train[0])
    return Data(train, test, inputs, batch_size, seed)
