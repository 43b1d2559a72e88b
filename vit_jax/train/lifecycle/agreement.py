"""All processes of a run have the same config, code, data and weights, or end before the first step.

Each compiles its own program and reads its own data: where these differ, a run trains on without a sign, or hangs.
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
from vit_jax.config.parsing import flatten
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.records import Record, Source, few
from vit_jax.data.workers import in_threads
from vit_jax.text.printable import printable, shortened
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
"""Images of each split that processes compare: a tenth of other images is noticed in 29 of 30 starts."""
_THREADS = 8  # that read them, mostly waiting for a disk or a network
_MOST_NAME_LETTERS = 200


def require_agreement(config: RunConfig, data: Datasets, weights_sha256: str | None = None) -> None:
    """Call in every process, before anything is compiled.

    Args:
      config: as loaded.
      data: open.
      weights_sha256: of given weights.

    Raises:
      ValueError: in every process, if one has others than the first; process and values are named.
    """
    if jax.process_count() == 1:  # hashing a million names takes seconds
        return
    facts = {
        **{
            f"config.{name}": value
            for name, value in flatten(to_dict(config)).items()
            if not _is_of_a_host(name)
        },
        "code": f"vit_jax {vit_jax.__version__}, {code_sha256()[:12]}",
        "number of training images": len(data.train),
        "number of test images": len(data.test),
        "classes": list(data.train.class_names),
        **files_of(config, data),
        **{
            f"{split} images": digest_images(source, config.seed)
            for split, source in _splits_of(data).items()
        },
        "weights": weights_sha256,
    }
    if message := describe_differences(hosts.gather(facts)):
        raise ValueError(message)


def _splits_of(data: Datasets) -> dict[str, Source]:
    others = {f"evaluator {name!r}": source for name, source in data.others.items()}
    references = {
        f"evaluator {name!r} training": source for name, source in data.train_sources.items()
    }
    return {"training": data.train, "test": data.test, **others, **references}


def digest_images(source: Source, seed: int) -> dict[str, str]:
    """Return digests of the bytes and labels of `NUM_COMPARED` records by their keys; the seed chooses the records."""
    num_compared = min(NUM_COMPARED, len(source))
    chosen = np.random.default_rng(seed).choice(len(source), num_compared, replace=False)
    indices = np.sort(chosen).tolist()  # neighbours may be stored together
    names = [
        shortened(printable(source.key_of(i).decode(errors="backslashreplace")), _MOST_NAME_LETTERS)
        for i in indices
    ]
    digests = in_threads(functools.partial(_digest_record, source), indices, _THREADS)
    return dict(zip(names, digests, strict=True))


def _digest_record(source: Source, index: int) -> str:
    try:
        record = source[index]
    except UnreadableImage:
        return "unreadable"
    digest = hashlib.sha256(_describe_record(record).encode())
    image = record.image
    digest.update(image if isinstance(image, bytes) else np.ascontiguousarray(image).data)
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
    lines = list[str]()
    for process, other in enumerate(facts):
        differences = (
            _difference(name, other.get(name), first.get(name)) for name in {**first, **other}
        )
        lines += [f"process {process}: {difference}" for difference in differences if difference]
    if not lines:
        return ""
    more = f"; and {len(lines) - 10} more" if len(lines) > 10 else ""
    # One line, for that is what other processes print of an error.
    return (
        f"The processes of this run differ: {'; '.join(lines[:10])}{more}. "
        "Start all of them with the same command, code, data and weights."
    )


def _difference(name: str, there: object, first: object) -> str:
    """Return a clause on a fact of two processes; empty where they agree."""
    if there == first:
        return ""
    if isinstance(there, dict) and isinstance(first, dict):
        return _difference_of_images(name, there, first)
    if name.endswith("_files_sha256"):
        return f"the {name.removesuffix('_files_sha256')} files have other names or classes"
    if (
        isinstance(there, list)
        and isinstance(first, list)
        and (one_sided := {*map(str, there)} ^ {*map(str, first)})
    ):
        return f"of the {name} only one of the two has {few(sorted(one_sided), repr)}"
    return f"{name} is {there!r}, in process 0 {first!r}"


def _difference_of_images(name: str, there: Mapping[str, str], first: Mapping[str, str]) -> str:
    """Compare the images that both processes chose; where seed, number or names differ, other facts say so."""
    common = [key for key in first if key in there]
    other = [key for key in common if there[key] != first[key]]
    if not other:
        return ""
    return f"{len(other)} of {len(common)} compared {name} have other bytes or labels: {few(other)}"


def _is_of_a_host(name: str) -> bool:
    return any(name == field or name.startswith(f"{field}.") for field in OF_A_HOST)


@functools.cache
def code_sha256() -> str:
    """Return the SHA-256 of the source files of this package."""
    root = pathlib.Path(vit_jax.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
