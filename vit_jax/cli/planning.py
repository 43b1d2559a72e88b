"""The verb plan: memory, time and cost of a recipe on a machine that need not be available."""

import math
import os
import sys
from collections.abc import Mapping

from vit_jax.cli.outputs import output_file
from vit_jax.cli.verb import RECIPE, verb
from vit_jax.cli.words import Given, UsageError, whole


@verb(
    RECIPE
    | {
        "--topology=NAME": "v4, v5e, v5p or v6e:16x16; 2*v5e:16x16 is two slices; h100:8 or 4*h100:8 are nodes of GPUs",
        "[--slices=N]": "of this topology",
        "[--price=N]": "of one chip for one hour",
        "[--num_examples=N]": "of data that the recipe does not name",
        "[--num_classes=N]": "of data that the recipe does not name",
        "[--arithmetic]": "compile nothing",
        "[--search]": "find the fastest layout that fits: rematerialisation, sharding and micro-batches",
        "[--batches]": "search other batches too",
        "[--tries=4]": "how many of the best layouts are compiled",
        "[--hlo=FILE]": "write the compiled program",
        "[--json]": "print all figures as JSON",
    },
    "--config=pretrain_imagenet1k:ViT-B/16 --topology=v5e:16x16 --price=1.2",
    "--config=pretrain_imagenet1k:ViT-L/16 --topology=h100:8 --search",
)
def plan(given: Given) -> None:
    """Memory, time and cost of a recipe on TPUs or GPUs that you do not have.

    The run's own step is compiled where the compiler is installed (extras tpu and plan-gpu). Without one, memory and
    time come from arithmetic.
    """
    options, overrides, _ = given
    _check_combination(options)
    target = output_file(options["hlo"], "--hlo=") if "hlo" in options else None
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is executed, so no accelerator is used
    from vit_jax.config import load_recipe
    from vit_jax.files import write_atomically
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
    result = make_plan(config, topology, dataset, price_per_chip_hour=price, can_compile=can_compile)
    _print("json" in options, to_json(result), to_text(result))
    if target is None:
        return
    if not isinstance(result.compiled, Executable):
        raise UsageError(f"--hlo={target}: there is no program to write: {result.reason.splitlines()[0]}.")
    write_atomically(target, result.compiled.text)


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
