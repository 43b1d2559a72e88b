"""The data path of one host: records read and images decoded per second, beside what a planned step needs."""

import concurrent.futures
import itertools
import time

import jax
import numpy as np

from vit_jax.config import RunConfig
from vit_jax.config.check import validate
from vit_jax.data.pipeline import open_batches
from vit_jax.data.records import Source
from vit_jax.data.workers import Parallelism, choose_parallelism
from vit_jax.tools.machine.bench import time_batches
from vit_jax.tools.machine.checks import Finding
from vit_jax.tools.plan.dataset import Dataset
from vit_jax.tools.plan.estimate import make_plan
from vit_jax.tools.plan.topology import Topology
from vit_jax.train.inputs import open_datasets, train_stream

READ_SECONDS = 5.0  # at most, of the test of reading alone
MOST_RECORDS = 8192  # that it reads
MOST_IMAGES = 512  # of a batch that is timed
STEPS = 20  # batches that are timed


def data_path(config: RunConfig, topology: Topology) -> Finding:
    """Compare the speed of this host's data with the step that `plan` estimates for a machine.

    No device computes: it can be measured on any machine that sees the data, before the
    accelerators are rented. A process counts as one host.

    Raises:
      ValueError: the config, its data or the machine cannot be used.
      LostWorker, OSError: as of the input.
    """
    validate(config)
    source = open_datasets(config).train
    dataset = Dataset(str(config.data), len(source), source.num_classes, "the data")
    step_seconds = make_plan(config, topology, dataset, can_compile=False).step_seconds
    assert step_seconds is not None  # a network without formulas is an error
    num_hosts = max(topology.num_hosts, jax.process_count())
    needed = config.global_batch / step_seconds / num_hosts
    images = min(-(-config.global_batch // num_hosts), MOST_IMAGES)
    inputs = config.input
    (height, width) = config.input.image_size
    parallelism = choose_parallelism(
        inputs.num_workers, inputs.num_threads, batch_bytes=images * height * width * 3
    )
    read, read_bytes = read_speed(source, parallelism)
    decoded = decode_speed(config, source, images, parallelism)
    found = (
        f"reads {read:,.0f} images/s ({read_bytes / 1e6:,.1f} MB/s), prepares {decoded:,.0f}; "
        f"the step of {topology.name} ({1000 * step_seconds:,.1f} ms by arithmetic) needs {needed:,.0f} on each of "
        f"{num_hosts} host(s)"
    )
    figures = {"read_images_per_second": read, "read_bytes_per_second": read_bytes}
    figures |= {"images_per_second": decoded, "needed_images_per_second": needed}
    return Finding(found, _remedy(read, decoded, needed), figures)


def read_speed(source: Source, parallelism: Parallelism) -> tuple[float, float]:
    """Return images/s and bytes/s of records in a random order, read by as many threads as the input has in all."""
    count = min(len(source), MOST_RECORDS)
    order = iter(
        np.random.default_rng().choice(len(source), count, replace=False).tolist()
    )  # new: caches know others
    began = time.perf_counter()

    def read() -> list[int]:
        sizes = []
        for index in order:
            image = source[index].image
            sizes.append(len(image) if isinstance(image, bytes) else image.nbytes)
            if time.perf_counter() - began > READ_SECONDS:
                break
        return sizes

    num_threads = max(parallelism.num_workers, 1) * parallelism.num_threads
    with concurrent.futures.ThreadPoolExecutor(num_threads) as threads:
        futures = [threads.submit(read) for _ in range(num_threads)]
        sizes = list(itertools.chain.from_iterable(future.result() for future in futures))
    seconds = time.perf_counter() - began
    return len(sizes) / seconds, sum(sizes) / seconds


def decode_speed(config: RunConfig, source: Source, images: int, parallelism: Parallelism) -> float:
    """Return images/s of the input: read, decoded, augmented, in batches of `images`."""
    stream = train_stream(config, source, np.arange(images), 0, 10**6)
    with open_batches(stream, parallelism) as batches:
        return time_batches(batches, STEPS, images).images_per_second


def _remedy(read: float, decoded: float, needed: float) -> str:
    if read < needed:
        return (
            "reading is too slow: keep the data nearer (a bucket in the region of the machines, its file cache on a "
            "local SSD, or a copy there), or input.cache_records=True for data that fit into memory"
        )
    if decoded < needed:
        return "decoding is too slow: more cores, or images with a smaller short side (vit-jax prepare --short_side=N)"
    return ""
