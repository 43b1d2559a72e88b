"""Require that all processes of a run have the same config, code, data and weights.

Each process compiles its program and reads its data: where these differ, a run trains on without a
sign, or hangs.
"""

import functools
import hashlib
import pathlib
from collections.abc import Mapping, Sequence

import jax
import numpy as np

import vit_jax
from vit_jax import hosts
from vit_jax.config import RunConfig, to_dict
from vit_jax.config.parsing import flatten, is_within
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.records import Record, Source, few
from vit_jax.data.workers import map_in_threads
from vit_jax.storage.files import JsonObject
from vit_jax.text.printable import printable, shorten
from vit_jax.train.inputs import Datasets
from vit_jax.train.overview import files_of

OF_A_HOST = (
    "input.data_dir",
    "input.num_workers",
    "input.num_threads",
    "input.cache_records",
    "logging",
)
"""Fields that may differ between hosts: where data lie and what a machine can do."""
NUM_COMPARED = 32
"""Images of each split to compare: 10 % of other images are noticed in 29 of 30 starts."""
_NUM_THREADS = 8  # for reading images, which is mostly waiting for a disk or a network
_MAX_NAME_LETTERS = 200
_MAX_DIFFERENCES = 10  # in an error


def require_agreement(config: RunConfig, data: Datasets, weights_sha256: str | None = None) -> None:
    """Call in every process, before anything is compiled.

    Args:
      config: the loaded config.
      data: open.
      weights_sha256: digest of given weights.

    Raises:
      ValueError: in every process, if one has others than the first; process and values are named.
    """
    if jax.process_count() == 1:  # hashing a million names takes seconds
        return
    facts = hosts.gather(_collect_facts(config, data, weights_sha256))
    if message := describe_differences(facts):
        raise ValueError(message)


def _collect_facts(config: RunConfig, data: Datasets, weights_sha256: str | None) -> JsonObject:
    """Return what must be equal in all processes, by name."""
    facts: JsonObject = {}
    for name, value in flatten(to_dict(config)).items():
        if not is_within(name, OF_A_HOST):
            facts[f"config.{name}"] = value
    facts["code"] = f"vit_jax {vit_jax.__version__}, {code_sha256()[:12]}"
    facts["number of training images"] = len(data.train)
    facts["number of test images"] = len(data.test)
    facts["classes"] = list(data.train.class_names)
    facts |= files_of(config, data)
    for split, source in _name_splits(data).items():
        facts[f"{split} images"] = digest_images(source, config.seed)
    facts["weights"] = weights_sha256
    return facts


def _name_splits(data: Datasets) -> dict[str, Source]:
    """Return all splits of a run by names for errors."""
    splits = {"training": data.train, "test": data.test}
    for name, source in data.others.items():
        splits[f"evaluator {name!r}"] = source
    for name, source in data.train_sources.items():
        splits[f"evaluator {name!r} training"] = source
    return splits


def digest_images(source: Source, seed: int) -> dict[str, str]:
    """Return digests of the bytes and labels of `NUM_COMPARED` records by the names of the records.

    The seed chooses the records.
    """
    num_compared = min(NUM_COMPARED, len(source))
    chosen = np.random.default_rng(seed).choice(len(source), num_compared, replace=False)
    indices = np.sort(chosen).tolist()  # neighbours may be stored together

    names = map(functools.partial(_name_record, source), indices)
    digests = map_in_threads(functools.partial(_digest_record, source), indices, _NUM_THREADS)
    return dict(zip(names, digests, strict=True))


def _name_record(source: Source, index: int) -> str:
    key = source.key_of(index).decode(errors="backslashreplace")
    return shorten(printable(key), _MAX_NAME_LETTERS)


def _digest_record(source: Source, index: int) -> str:
    try:
        record = source[index]
    except UnreadableImage:
        return "unreadable"
    digest = hashlib.sha256(_describe_record(record).encode())
    if isinstance(record.image, bytes):
        digest.update(record.image)
    else:
        digest.update(np.ascontiguousarray(record.image).data)
    return digest.hexdigest()[:16]


def _describe_record(record: Record) -> str:
    shape = None if isinstance(record.image, bytes) else record.image.shape
    return f"{np.asarray(record.label).tolist()} {shape}\n"


def describe_differences(facts: Sequence[Mapping[str, object]]) -> str:
    """Return a sentence on the differences of processes from the first; empty without any.

    Args:
      facts: JSON values by name, of each process.
    """
    first = facts[0]
    clauses = list[str]()
    for process, other in enumerate(facts):
        for name in {**first, **other}:
            if difference := _describe_difference(name, other.get(name), first.get(name)):
                clauses.append(f"process {process}: {difference}")
    if not clauses:
        return ""

    num_more = len(clauses) - _MAX_DIFFERENCES
    if num_more > 0:
        clauses = [*clauses[:_MAX_DIFFERENCES], f"and {num_more} more"]
    # Other processes print the first line of an error.
    return (
        f"The processes of this run differ: {'; '.join(clauses)}. "
        "Start all of them with the same command, code, data and weights."
    )


def _describe_difference(name: str, there: object, first: object) -> str:
    """Return a clause on a fact of two processes; empty where they agree."""
    if there == first:
        return ""
    if isinstance(there, dict) and isinstance(first, dict):
        return _describe_different_images(name, there, first)
    if name.endswith("_files_sha256"):
        return f"the {name.removesuffix('_files_sha256')} files have other names or classes"
    if isinstance(there, list) and isinstance(first, list):
        one_sided = {*map(str, there)} ^ {*map(str, first)}
        if one_sided:
            return f"of the {name} only one of the two has {few(sorted(one_sided), repr)}"
    return f"{name} is {there!r}, in process 0 {first!r}"


def _describe_different_images(
    name: str,
    there: Mapping[str, str],
    first: Mapping[str, str],
) -> str:
    """Compare the images that both processes chose.

    Other facts tell where seed, number or names differ.
    """
    common = [key for key in first if key in there]
    different = [key for key in common if there[key] != first[key]]
    if not different:
        return ""

    count = f"{len(different)} of {len(common)}"
    return f"{count} compared {name} have other bytes or labels: {few(different)}"


@functools.cache
def code_sha256() -> str:
    """Return the SHA-256 of the source files of this package."""
    root = pathlib.Path(vit_jax.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
