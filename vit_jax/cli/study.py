"""The verb study: a grid of runs after the paper's studies, their table and their picture."""

import os
import pathlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vit_jax.cli.training import preemptible, run_training
from vit_jax.cli.verb import RECIPE, SHARE, verb
from vit_jax.cli.words import Given, UsageError, share, whole
from vit_jax.files import expanded

if TYPE_CHECKING:
    from vit_jax.sweeps.grid import Grid

_AXES = {  # values with commas between them
    "models": "arguments of the recipe, with more fields: ViT-B/32,epochs=7,R50x1,ViT-B/32,model.block=axial",
    "examples": "training images (data_size)",
    "weight_decays": "searched for each part of the images (data_size)",
    "dropouts": "likewise",
    "label_smoothings": "likewise",
    "epochs": "lengths (scaling)",
    "positions": "none, learned_1d, learned_2d, relative, sincos2d (positions)",
    "layers": "where they are added: stem, every, shared (positions)",
    "pools": "token, gap, map (pooling)",
    "learning_rates": "at the peak (pooling)",
    "shapes": "base, and depth:2, width:0.5, mlp:2, patch:0.5, all:2 times the recipe's (shape)",
    "optimizers": "adam, sgd (optimizer)",
    "rate_factors": "of the learning rate, searched for each optimiser (optimizer)",
    "image_sizes": "sides in pixels (speed)",
    "seeds": "of every study: their mean and extremes are shown",
}


@verb(
    {
        "NAME": "data_size, scaling, positions, pooling, shape, optimizer or speed",
        **RECIPE,
        "--workdir=FOLDER": "of the runs, the table and the picture; the same command goes on after an interruption",
        "[--dry_run]": "list the runs, their state, and what they cost",
        "[--topology=NAME]": "as of `plan`: time and chip-hours of a dry run there; the TPU that speed is planned for",
        "[--num_examples=N]": "for a dry run, of data that the recipe does not name",
        "[--num_classes=N]": "for a dry run, of data that the recipe does not name",
        "[--measures=A,B,…]": "of summary.json, to be shown",
        "[--paper]": "draw the paper's Table 6 too (scaling)",
        **SHARE,
        **{f"[--{name}=A,B,…]": meaning for name, meaning in _AXES.items()},
    },
    "positions --config=digits_studies --workdir=runs/positions",
    "scaling --config=pretrain_jft --workdir=runs/scaling --dry-run --topology=v5e:16x16",
)
def study(given: Given) -> None:
    """The paper's studies: grids of runs that are trained, collected into a table, and drawn.

    Each value of an axis stands for overrides of the recipe. Values are those of the command, else of the recipe's
    table `STUDIES`, else the paper's.
    """
    from vit_jax.sweeps.catalogue import STUDIES

    options, overrides, _ = given
    if options["NAME"] not in STUDIES:
        raise UsageError(f"There is no study {options['NAME']!r}. Studies: {', '.join(STUDIES)}.")
    chosen = STUDIES[options["NAME"]]
    _check(options, is_trained=chosen.is_trained)
    values = {name: values_of(options[name]) for name in (*_AXES, "measures") if name in options}
    if empty := [f"--{name}={options[name]}" for name, found in values.items() if not found]:
        raise UsageError(f"{empty[0]}: there is no value.")
    index, count = share(options)
    if "dry_run" in options or "topology" in options:
        os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is executed, so no accelerator is used

    from vit_jax.sweeps.grid import make_grid

    grid = make_grid(chosen, options["config"], overrides, values)
    if "dry_run" in options:
        print(_plan(options, grid, index, count), end="")
        return
    with preemptible():
        run_training(lambda: _study(options, grid, index, count), options["workdir"])


def values_of(text: str) -> tuple[str, ...]:
    """The values of "A,B": what has a sign of equality belongs to the value before, as in "L/16,epochs=7,B/32"."""
    values: list[str] = []
    for part in filter(None, text.split(",")):
        if "=" in part and values:
            values[-1] += f",{part}"
        else:
            values.append(part)
    return tuple(values)


def _check(options: Mapping[str, str], *, is_trained: bool) -> None:
    name = options["NAME"]
    for option in ("num_examples", "num_classes"):
        if option in options and "dry_run" not in options:
            raise UsageError(f"--{option}= has no effect without --dry-run.")
    if "topology" in options and is_trained and "dry_run" not in options:
        raise UsageError(f"--topology= has no effect on {name} without --dry-run: its runs train on this machine.")
    if "paper" in options and name != "scaling":
        raise UsageError(f"--paper has no effect on {name}: the paper's points are those of scaling.")


def _study(options: Mapping[str, str], grid: "Grid", index: int, count: int) -> None:
    from vit_jax import hosts
    from vit_jax.drawing import require_drawing
    from vit_jax.plan.topology import parse_topology
    from vit_jax.sweeps import speed
    from vit_jax.sweeps.results import write_results
    from vit_jax.sweeps.runs import run_study
    from vit_jax.train.interruption import Interrupted
    from vit_jax.train.pretrain import learn

    require_drawing()  # before hours of training
    workdir, perform = _folder(options), learn
    if not grid.study.is_trained:
        perform = speed.planner(parse_topology(options["topology"])) if "topology" in options else speed.measure  # type: ignore[assignment]
        grid = _on_machine(options, grid)
    with hosts.ends_together(Interrupted):
        hosts.start()
        run_study(grid, workdir, grid.runs[index::count], perform)
        if hosts.is_first():
            print(f"\n{write_results(grid, workdir, with_paper='paper' in options)}", end="", flush=True)
            print(f"{grid.study.name}: table and picture are in {workdir}", file=sys.stderr, flush=True)


def _on_machine(options: Mapping[str, str], grid: "Grid") -> "Grid":
    """Runs planned for another machine have other folders than those measured on this one."""
    import dataclasses

    from vit_jax.sweeps.grid import changed

    if "topology" not in options:
        return grid
    return dataclasses.replace(grid, runs=tuple(changed(run, machine=options["topology"]) for run in grid.runs))


def _plan(options: Mapping[str, str], grid: "Grid", index: int, count: int) -> str:
    from vit_jax.plan.topology import parse_topology
    from vit_jax.sweeps.costs import plan_to_markdown

    numbers: dict[str, Any] = {
        name: whole(options, name) for name in ("num_examples", "num_classes") if name in options
    }
    topology = parse_topology(options["topology"]) if "topology" in options else None
    if not grid.study.is_trained:
        grid = _on_machine(options, grid)
    return plan_to_markdown(grid, _folder(options), grid.runs[index::count], topology, numbers)


def _folder(options: Mapping[str, str]) -> pathlib.Path:
    return expanded(options["workdir"]).absolute()
