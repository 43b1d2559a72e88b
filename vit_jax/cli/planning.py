"""The verb plan: memory, time and cost of a recipe on a machine that need not be available."""

import math
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence

from vit_jax.cli.words import UsageError, split, whole

_OPTIONAL = ("slices", "price", "num_examples", "num_classes", "hlo", "tries")
_SWITCHES = ("search", "batches", "json", "arithmetic")


def plan(words: Sequence[str]) -> None:
    """Plans a recipe on a machine."""
    options, overrides, _ = split(words, required=("config", "topology"), optional=_OPTIONAL, switches=_SWITCHES)
    _check_combination(options)
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is executed, so no accelerator is used
    from vit_jax.config import load_recipe
    from vit_jax.plan.aot import Executable
    from vit_jax.plan.dataset import choose_dataset
    from vit_jax.plan.estimate import make_plan
    from vit_jax.plan.report import found_to_json, found_to_text, to_json, to_text
    from vit_jax.plan.search import search
    from vit_jax.plan.topology import parse_topology

    counts = ("slices", "num_examples", "num_classes", "tries")
    numbers = {name: whole(options, name) for name in counts if name in options}
    topology = parse_topology(options["topology"], num_slices=numbers.pop("slices", None))
    num_tries = numbers.pop("tries", 4)
    price, can_compile = _price(options), "arithmetic" not in options
    config = load_recipe(options["config"], overrides)
    dataset = choose_dataset(options["config"], config, **numbers)
    if "search" in options:
        found = search(
            config,
            topology,
            dataset,
            price_per_chip_hour=price,
            num_tries=num_tries,
            other_batches="batches" in options,
            can_compile=can_compile,
            report=lambda text: print(text, file=sys.stderr, flush=True),
        )
        _print("json" in options, found_to_json(found), found_to_text(found))
        return
    target = pathlib.Path(options["hlo"]).expanduser() if "hlo" in options else None
    if target is not None and (target.is_dir() or not target.parent.is_dir()):  # before minutes of compiling
        raise UsageError(f"--hlo={target}: must be a file in an existing folder.")
    result = make_plan(config, topology, dataset, price_per_chip_hour=price, can_compile=can_compile)
    _print("json" in options, to_json(result), to_text(result))
    if target is None:
        return
    if not isinstance(result.compiled, Executable):
        raise UsageError(f"--hlo={target}: there is no program to write: {result.reason.splitlines()[0]}.")
    target.write_text(result.compiled.text)


def _print(as_json: bool, values: Mapping[str, object], text: str) -> None:
    import json

    print(json.dumps(values, indent=2) + "\n" if as_json else text, end="")


def _check_combination(options: Mapping[str, str]) -> None:
    if "search" in options and "hlo" in options:
        raise UsageError("--hlo= writes the program of one plan: leave --search out.")
    for name in ("tries", "batches"):
        if name in options and "search" not in options:
            raise UsageError(f"--{name} has no effect without --search.")
    for name in ("hlo", "tries"):
        if name in options and "arithmetic" in options:
            raise UsageError(f"--{name}= needs compiled programs, and --arithmetic compiles none: leave one out.")


def _price(options: Mapping[str, str]) -> float | None:
    try:
        price = float(options.get("price", 0))
    except ValueError:
        price = math.nan
    if not 0 <= price < math.inf:
        raise UsageError(f"--price={options['price']}: must be the price of one chip for one hour, 0 or more.")
    return price if "price" in options else None
