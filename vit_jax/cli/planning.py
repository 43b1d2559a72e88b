"""The verb plan: what a recipe needs on a machine that is not at hand."""

import math
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.cli.words import UsageError, split, whole

if TYPE_CHECKING:
    from vit_jax.config import RunConfig
    from vit_jax.plan.dataset import Dataset
    from vit_jax.plan.topology import Topology

_OPTIONAL = ("slices", "price", "num_examples", "num_classes", "hlo", "tries")


def plan(words: Sequence[str]) -> None:
    """Plans a recipe on a machine."""
    options, overrides, _ = split(
        words,
        required=("config", "topology"),
        optional=_OPTIONAL,
        switches=("search", "batches", "json", "arithmetic"),
    )
    _check_combination(options)
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is run, so no accelerator is taken
    from vit_jax.config import load_recipe
    from vit_jax.plan.dataset import choose_dataset
    from vit_jax.plan.topology import parse_topology

    price = _price(options)
    topology = parse_topology(options["topology"], num_slices=whole(options, "slices") if "slices" in options else None)
    config = load_recipe(options["config"], overrides)
    counts = {name: whole(options, name) for name in ("num_examples", "num_classes") if name in options}
    dataset = choose_dataset(options["config"], config, **counts)
    if "search" in options:
        _search(options, config, topology, dataset, price)
    else:
        _single(options, config, topology, dataset, price)


def _single(
    options: Mapping[str, str],
    config: "RunConfig",
    topology: "Topology",
    dataset: "Dataset",
    price: float | None,
) -> None:
    from vit_jax.plan.estimate import make_plan
    from vit_jax.plan.report import to_json, to_text

    target = pathlib.Path(options["hlo"]).expanduser() if "hlo" in options else None
    if target is not None and (target.is_dir() or not target.parent.is_dir()):  # seen before minutes of compiling
        raise UsageError(f"--hlo={target}: must be a file in a folder that is there.")
    result = make_plan(config, topology, dataset, price_per_chip_hour=price, can_compile="arithmetic" not in options)
    _print(options, to_json(result), to_text(result))
    if target is not None and not result.program_text:
        raise UsageError(f"--hlo={target}: there is no program to write: {result.reason.splitlines()[0]}.")
    if target is not None:
        target.write_text(result.program_text)


def _search(
    options: Mapping[str, str],
    config: "RunConfig",
    topology: "Topology",
    dataset: "Dataset",
    price: float | None,
) -> None:
    from vit_jax.plan.search import search
    from vit_jax.plan.search_report import found_to_json, found_to_text

    found = search(
        config,
        topology,
        dataset,
        price_per_chip_hour=price,
        num_tries=whole(options, "tries") if "tries" in options else 4,
        other_batches="batches" in options,
        can_compile="arithmetic" not in options,
        tell=lambda text: print(text, file=sys.stderr, flush=True),
    )
    _print(options, found_to_json(found), found_to_text(found))


def _print(options: Mapping[str, str], values: Mapping[str, Any], text: str) -> None:
    import json

    print(json.dumps(values, indent=2) if "json" in options else text, end="\n" if "json" in options else "")


def _check_combination(options: Mapping[str, str]) -> None:
    if "search" in options and "hlo" in options:
        raise UsageError("--hlo= writes the program of one plan: leave --search out.")
    for name in ("tries", "batches"):
        if name in options and "search" not in options:
            raise UsageError(f"--{name} has no effect without --search.")
    if "arithmetic" in options:
        for name in ("hlo", "tries"):
            if name in options:
                raise UsageError(
                    f"--{name}= is about compiled programs, and --arithmetic compiles none: leave one out."
                )


def _price(options: Mapping[str, str]) -> float | None:
    if "price" not in options:
        return None
    try:
        price = float(options["price"])
    except ValueError:
        price = math.nan
    if not 0 <= price < math.inf:
        raise UsageError(f"--price={options['price']}: must be the price of one chip for one hour, 0 or more.")
    return price
