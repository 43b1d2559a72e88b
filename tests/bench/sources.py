"""Measure the images a second of one core from each kind of data: read in order, read in random order, and decoded.

    python -m tests.bench.record sources

The first run writes JPEGs of `input_against_tf_data` into a folder, and packs them as ArrayRecord
(TFDS), tar shards and parquet with row groups of 100 images, as the Hub has them. All kinds take
turns in one process of one thread, on files that the system holds in memory. The figures are
medians over the rounds, by CPU time.
"""

import argparse
import collections
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from tests.bench.input_against_tf_data import SIZE, make
from tests.data.packed_files import make_row, write_parquet, write_shard
from vit_jax.config.schema import InputConfig
from vit_jax.data.kinds import parquet
from vit_jax.data.sources import open_source
from vit_jax.data.stream import TrainStream
from vit_jax.data.transforms import TrainTransform

BATCH = 50
PER_FILE = 500
COUNT = 1000


def make_config(folder: Path) -> InputConfig:
    """Return the input of a run."""
    return InputConfig(
        train_split="train",
        test_split="test",
        image_size=(SIZE, SIZE),
        data_dir=str(folder / "tfds"),
    )


class BenchSources(tfds.core.GeneratorBasedBuilder):
    """The JPEGs as ArrayRecord files."""

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, source: Any = None, **options: Any) -> None:
        self.source = source
        super().__init__(**options)

    def _info(self) -> tfds.core.DatasetInfo:
        label = tfds.features.ClassLabel(num_classes=10)
        image = tfds.features.Image()
        features = tfds.features.FeaturesDict({"image": image, "label": label})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for n in range(len(self.source)):
            example = {
                "image": self.source[n].image,
                "label": n % 10,
            }
            yield n, example


def write_part(folder: Path, images: list[bytes], first: int) -> None:
    """Write a tar shard and a parquet file of images from this number on."""
    numbers = range(first, min(first + PER_FILE, len(images)))
    labels = []
    members = []
    stored = []
    for n in numbers:
        label = n % 10
        labels.append(label)
        members.append((f"{n:06}.jpg", images[n]))
        members.append((f"{n:06}.cls", b"%d" % label))
        stored.append(make_row(images[n]))

    write_shard(folder / "wds" / f"train-{first:06}.tar", members)
    parquet_file = folder / "parquet" / f"train-{first:06}.parquet"
    write_parquet(
        parquet_file,
        labels,
        group=100,
        images=stored,
    )


def pack(folder: Path, count: int) -> dict[str, str]:
    """Write the data that are missing; return the data by kind."""
    if not (folder / "jpegs").exists():
        make(folder / "jpegs", count)

    source = open_source(
        f"folder:{folder}/jpegs",
        "all",
        make_config(folder),
        0,
    )
    if not (folder / "wds").exists():
        images = []
        for n in range(len(source)):
            images.append(source[n].image)
        for first in range(
            0,
            count,
            PER_FILE,
        ):
            write_part(
                folder,
                images,
                first,
            )
        builder = BenchSources(
            source,
            data_dir=str(folder / "tfds"),
            file_format="array_record",
        )
        builder.download_and_prepare()

    return {
        "ArrayRecord (`tfds:`)": "tfds:bench_sources",
        "`folder:`": f"folder:{folder}/jpegs",
        "`wds:`": f"wds:{folder}/wds",
        "`parquet:`": f"parquet:{folder}/parquet",
    }


def time_reading(source: Any, order: Any) -> float:
    """Return CPU seconds an image."""
    start = time.process_time()
    for index in order:
        source[int(index)]
    seconds = time.process_time() - start

    return seconds / len(source)


def time_training(source: Any, config: InputConfig) -> float:
    """Return CPU seconds an image that is prepared for training."""
    steps = len(source) // BATCH
    stream = TrainStream(
        source,
        TrainTransform(config),
        BATCH,
        np.arange(BATCH),
        seed=0,
        start_step=0,
        num_steps=steps,
    )
    start = time.process_time()
    for step in range(steps):
        stream[step]
    seconds = time.process_time() - start

    return seconds / (steps * BATCH)


def measure(folder: Path, data: str, split: str) -> dict[str, float]:
    """Return CPU seconds an image."""
    config = make_config(folder)
    source = open_source(
        data,
        split,
        config,
        0,
    )
    count = len(source)
    # 50 MB of 100, as for data that do not fit into memory
    parquet._GROUPS = parquet._Groups(4 * 100 * 2**17)

    in_order = range(count)
    at_random = np.random.default_rng(0).permutation(count)
    return {
        "in order": time_reading(source, in_order),
        "at random": time_reading(source, at_random),
        "training": time_training(source, config),
    }


def take_medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    medians = {}
    for name in rounds[0]:
        medians[name] = statistics.median(one[name] for one in rounds)
    return medians


def measure_rows(words: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return images a second of CPU time by kind of data, medians of rounds that take turns."""
    data = pack(words.folder / "sources", COUNT)
    rounds: dict[str, list[dict[str, float]]] = collections.defaultdict(list)
    for _ in range(words.rounds):
        for kind, name in data.items():
            split = "all" if name.startswith("folder:") else "train"
            found = measure(
                words.folder / "sources",
                name,
                split,
            )
            rounds[kind].append(found)

    medians = {kind: take_medians(found) for kind, found in rounds.items()}
    rows = {}
    for kind, seconds in medians.items():
        rows[kind] = {name: 1 / value for name, value in seconds.items()}
        rows[kind]["ratio"] = medians["`folder:`"]["training"] / seconds["training"]
    return rows
