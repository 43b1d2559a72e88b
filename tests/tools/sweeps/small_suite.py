"""A suite that trains in seconds: three tasks on made-up images of 4 x 4 pixels, whose brightness
is their class.
"""

import re

import numpy as np

from tests.tiny import flags
from vit_jax.data.kinds.in_memory import MemorySource
from vit_jax.tools.sweeps.suite import Task

MODULE = "tests.tools.sweeps.small_suite"
FINETUNING = [
    "--config=finetune:any,vtab,image_size=4",
    *flags("global_batch=16", "model.compute_dtype=float32", "logging.tensorboard=False"),
    *flags("checkpoint.every=1 fraction"),  # one takes as long as many steps
]
GRID = ["--learning_rates=0.0001,0.2", "--lengths=12:2"]
SIZES = {
    "train800": 32,
    "val200": 16,
    "train800val200": 48,
    "test": 24,
}


def bright(split, config, seed):
    return _images(split, ("dark", "light"))


def shade(split, config, seed):
    return _images(split, ("black", "grey", "white"))


def dull(split, config, seed):
    """Nothing can be learnt."""
    source = _images(split, ("a", "b"))
    return MemorySource(
        np.zeros_like(source.images),
        source.labels,
        source.class_names,
    )


def absent(split, config, seed):
    raise ValueError("There are no such images; run: make images.")


def _images(split, class_names):
    rng = np.random.default_rng(len(split))
    count = SIZES[split]
    labels = np.arange(count) % len(class_names)

    levels = 40 + labels * 170 // (len(class_names) - 1)
    noise = rng.integers(0, 40, (count, 4, 4, 3))
    images = levels[:, None, None, None] + noise
    return MemorySource(images.astype(np.uint8), labels, class_names)


def _task(name, group, **fields):
    return Task(
        name=name,
        group=group,
        data=f"tests.tools.sweeps.small_suite:{name}",
        **fields,
    )


SUITE = [
    _task("bright", "light", published=(90.0, 80.0, 70.0)),
    _task(
        "shade",
        "light",
        flip=False,
        published=(70.0, 60.0, 50.0),
    ),
    _task(
        "dull",
        "nothing",
        crop=False,
        published=(50.0, 40.0, 33.0),
    ),
]
UNPUBLISHED = [_task("bright", "light"), _task("shade", "light")]
WITH_ABSENT = [*SUITE, _task("absent", "nothing")]
TWICE = [*SUITE, SUITE[2]]
NOT_A_SUITE = ["bright"]


def build_words(
    weights,
    folder,
    *more,
    suite="SUITE",
    tasks="all",
    settings=GRID,
):
    """Return the words of a sweep."""
    return [
        "vtab",
        str(weights),
        f"--tasks={tasks}",
        f"--suite={MODULE}:{suite}",
        f"--workdir={folder}",
        *FINETUNING,
        *settings,
        *more,
    ]


def read_begun(out):
    """Return (task, kind, learning rate, steps) of the runs that were begun, in order."""
    pattern = r"^(\w+), (trial|final run): learning rate ([\d.]+), (\d+) steps$"
    return re.findall(pattern, out, re.MULTILINE)
