"""The data path of one host: speeds of reading and decoding, compared with the planned step."""

import concurrent.futures
import itertools
import math
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

READ_SECONDS = 5.0  # longest duration of the test of reading
MOST_RECORDS = 8192  # records of the test of reading
MOST_IMAGES = 512  # images of a timed batch
STEPS = 20  # timed batches


def check_data_path(config: RunConfig, topology: Topology) -> Finding:
    """Compare the speed of this host's data with the step that `plan` estimates for a machine.

    No device computes. So any machine that can read the data can measure it, before accelerators
    are rented. A process counts as one host.

    Raises:
      ValueError: the config, its data or the machine cannot be used.
      LostWorker, OSError: see the input.
    """
    validate(config)
    source = open_datasets(config).train
    dataset = Dataset(str(config.data), len(source), source.num_classes, "the data")
    step_seconds = make_plan(config, topology, dataset, can_compile=False).step_seconds
    assert step_seconds is not None  # a network without formulas is an error
    num_hosts = max(topology.num_hosts, jax.process_count())
    needed = config.global_batch / step_seconds / num_hosts

    batch_size = min(math.ceil(config.global_batch / num_hosts), MOST_IMAGES)
    inputs = config.input
    height, width = inputs.pixels
    parallelism = choose_parallelism(
        inputs.num_workers,
        inputs.num_threads,
        batch_bytes=batch_size * height * width * 3,
    )
    read, read_bytes = measure_reading(source, parallelism)
    decoded = measure_decoding(config, source, batch_size, parallelism)

    found = (
        f"reads {read:,.0f} images/s ({read_bytes / 1e6:,.1f} MB/s), prepares {decoded:,.0f}; "
        f"the step of {topology.name} ({1000 * step_seconds:,.1f} ms by arithmetic) "
        f"needs {needed:,.0f} on each of {num_hosts} host(s)"
    )
    figures = {
        "read_images_per_second": read,
        "read_bytes_per_second": read_bytes,
        "images_per_second": decoded,
        "needed_images_per_second": needed,
    }
    return Finding(found, _advise(read, decoded, needed), figures)


def measure_reading(source: Source, parallelism: Parallelism) -> tuple[float, float]:
    """Return images/s and bytes/s of reading records in a random order.

    The number of threads is that of all threads of the input.
    """
    # A new random order at every call, because caches hold the records of earlier ones.
    num_records = min(len(source), MOST_RECORDS)
    rng = np.random.default_rng()
    order = iter(rng.choice(len(source), num_records, replace=False).tolist())
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


def measure_decoding(
    config: RunConfig,
    source: Source,
    batch_size: int,
    parallelism: Parallelism,
) -> float:
    """Return images/s of the input, which reads, decodes and augments batches of this size."""
    stream = train_stream(config, source, np.arange(batch_size), 0, 10**6)
    with open_batches(stream, parallelism) as batches:
        return time_batches(batches, STEPS, batch_size).images_per_second


def _advise(read: float, decoded: float, needed: float) -> str:
    """Return a remedy for a speed that is too low; "" if both are high enough."""
    if read < needed:
        return (
            "reading is too slow: keep the data nearer (a bucket in the region of the machines, "
            "its file cache on a local SSD, or a copy there), or input.cache_records=True "
            "for data that fit into memory"
        )
    if decoded < needed:
        return (
            "decoding is too slow: more cores, or images with a smaller short side "
            "(vit-jax prepare --short_side=N)"
        )
    return ""
