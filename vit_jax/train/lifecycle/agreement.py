"""All processes of a run have the same config, code, data and weights, or end before the first step.

Each compiles its own program and reads its own data: where these differ, a run trains on without a sign, or hangs.
"""

import functools
import hashlib
import pathlib
from collections.abc import Mapping, Sequence

import jax

import vit_jax
from vit_jax import hosts
from vit_jax.config import RunConfig, to_dict
from vit_jax.config.parsing import flatten
from vit_jax.data.records import few
from vit_jax.train.assemble import Datasets
from vit_jax.train.overview import files_of

OF_A_HOST = ("input.data_dir", "input.num_workers", "input.num_threads", "input.cache_records", "logging")
"""Fields that may differ between hosts: where data lie and what a machine can do."""


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
        **{f"config.{name}": value for name, value in flatten(to_dict(config)).items() if not _is_of_a_host(name)},
        "code": f"vit_jax {vit_jax.__version__}, {code_sha256()[:12]}",
        "number of training images": len(data.train),
        "number of test images": len(data.test),
        "classes": list(data.train.class_names),
        **files_of(config, data),
        "weights": weights_sha256,
    }
    if message := describe_differences(hosts.gather(facts)):
        raise ValueError(message)


def describe_differences(facts: Sequence[Mapping[str, object]]) -> str:
    """Return a sentence on the differences of processes from the first; empty without any.

    Args:
      facts: JSON values by name, of each process.
    """
    first = facts[0]
    lines = [
        f"process {process}: {_difference(name, other.get(name), first.get(name))}"
        for process, other in enumerate(facts)
        for name in {**first, **other}
        if other.get(name) != first.get(name)
    ]
    if not lines:
        return ""
    more = f"; and {len(lines) - 10} more" if len(lines) > 10 else ""
    # One line, for that is what other processes print of an error.
    return (
        f"The processes of this run differ: {'; '.join(lines[:10])}{more}. "
        "Start all of them with the same command, code, data and weights."
    )


def _difference(name: str, there: object, first: object) -> str:
    if name.endswith("_files_sha256"):
        return f"the {name.removesuffix('_files_sha256')} files have other names or classes"
    if isinstance(there, list) and isinstance(first, list) and (one_sided := {*map(str, there)} ^ {*map(str, first)}):
        return f"of the {name} only one of the two has {few(sorted(one_sided), repr)}"
    return f"{name} is {there!r}, in process 0 {first!r}"


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
