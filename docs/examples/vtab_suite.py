"""Tasks for `vit-jax vtab`: five tasks on handwritten digits, with 100 examples each.

`--suite` takes a list of `vit_jax.tools.sweeps.suite.Task`.

Run it, after `vit-jax pretrain --config=digits_transfer:pretrain --workdir=runs/small`:

    vit-jax vtab runs/small --suite=docs.examples.vtab_suite:SUITE --tasks=all --workdir=runs/suite \
        --config=finetune:any,vtab,image_size=16 --config.global_batch=50 --config.model.compute_dtype=float32 \
        --learning_rates=0.03,0.1 --lengths=50:5,200:20
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from vit_jax.config import InputConfig
from vit_jax.data.decoding.images import decode
from vit_jax.data.kinds.in_memory import MemorySource
from vit_jax.data.kinds.tfds_source import open_digits
from vit_jax.tools.sweeps.suite import Task


@dataclasses.dataclass(frozen=True)
class Question:
    """The digits with another label.

    Attributes:
      class_names: names of the classes.
      answer: returns the class of a digit and its pixels, float (8, 8) in [0, 1].
    """

    class_names: tuple[str, ...]
    answer: Callable[[int, np.ndarray], int]

    def __call__(self, split: str, config: InputConfig, seed: int) -> MemorySource:
        """Open a split; `data` of a task is the name of this function."""
        digits = open_digits(split, config.data_dir)
        images = np.stack([decode(digits[index].image) for index in range(len(digits))])
        labels = []
        for label, image in zip(digits.labels.tolist(), images, strict=True):
            labels.append(self.answer(label, image[..., 0] / 255))
        return MemorySource(images, np.array(labels), self.class_names)


def compare_halves(label: int, pixels: np.ndarray) -> int:
    """Return 1 if the right half has more ink than the left one."""
    return int(pixels[:, 4:].sum() > pixels[:, :4].sum())


def measure_ink(label: int, pixels: np.ndarray) -> int:
    """Return 0 to 2, more for more ink."""
    return int(np.searchsorted((0.29, 0.32), pixels.mean()))


digit = Question(tuple("0123456789"), lambda digit, pixels: digit)
parity = Question(("even", "odd"), lambda digit, pixels: digit % 2)
loop = Question(("no loop", "loop"), lambda digit, pixels: int(digit in (0, 6, 8, 9)))
ink = Question(("little", "some", "much"), measure_ink)
side = Question(("left", "right"), compare_halves)


def build_task(name: str, group: str, *, flip: bool = False, crop: bool = True) -> Task:
    """Return a task with a tenth of VTAB's 800 and 200 examples.

    Digits are not mirrored by default, because a mirrored digit is another digit.
    """
    return Task(
        name=name,
        group=group,
        data=f"docs.examples.vtab_suite:{name}",
        train="train[:80]",
        validation="train[80:100]",
        train_and_validation="train[:100]",
        flip=flip,
        crop=crop,
    )


SUITE = [
    build_task("digit", "meaning"),
    build_task("parity", "meaning"),
    build_task("loop", "meaning"),
    build_task("ink", "appearance", flip=True, crop=False),  # a crop would remove some of the ink
    build_task("side", "appearance", crop=False),
]
