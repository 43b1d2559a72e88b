"""Verbs of several runs: sweep, study and vtab."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.cli.training import preemptible, run_training
from vit_jax.cli.verb import ALLOW_CODE, RECIPE, SHARE, verb
from vit_jax.cli.words import Given, UsageError, fraction, positive, share, whole
from vit_jax.files import expanded

if TYPE_CHECKING:
    from vit_jax.sweeps.grid import Grid
    from vit_jax.sweeps.runs import Halving
    from vit_jax.sweeps.vtab import Setting, Sweep

_SIZES = {
    "[--num_examples=N]": "for a dry run, of data that the recipe does not name",
    "[--num_classes=N]": "for a dry run, of data that the recipe does not name",
}
_OF_DRY_RUN = dict.fromkeys(("num_examples", "num_classes"), "dry_run")


@verb(
    RECIPE
    | {
        "--grid=FIELD=A,B…": "values of a field to try; once for each field. seed=0,1,2 repeats every setting. With "
        "--random also a range: FIELD=log(LOW,HIGH) or FIELD=uniform(LOW,HIGH)",
        "--workdir=FOLDER": "of the runs and the table; the same command goes on after an interruption",
        "[--random=N]": "draw N settings at random, not all combinations",
        "[--seed=N]": "of the draws, 0 by default",
        "[--metric=NAME]": "result that settings are compared by; checkpoint.best_metric by default",
        "[--stop_after=FRACTION]": "compare all settings after this fraction of the steps; only the best go on",
        "[--keep=N]": "number of settings that go on after --stop_after; half of them by default",
        "[--dry_run]": "list the runs with their states and costs",
        "[--topology=NAME]": "as of `plan`: time and chip-hours of a dry run there",
        **_SIZES,
        **SHARE,
    },
    "--config=digits --grid schedule.learning_rate=1e-3,3e-3 --grid seed=0,1,2 --workdir=runs/rates",
    "--config=digits --grid 'schedule.learning_rate=log(1e-4,1e-2)' --random=8 --stop_after=0.25 --workdir=runs/drawn",
)
def sweep(given: Given) -> None:
    """Train a recipe with several values of its fields: a table of means over seeds, and the best setting.

    Pre-trains or fine-tunes, by the recipe. Every run is checked before the first one starts.
    """
    options, overrides, _ = given
    needs = {"seed": "random", "keep": "stop_after", "topology": "dry_run"} | _OF_DRY_RUN
    if idle := [name for name, other in needs.items() if name in options and other not in options]:
        raise UsageError(f"--{idle[0]}= has no effect without --{needs[idle[0]].replace('_', '-')}.")
    number = {name: whole(options, name) for name in ("random", "seed", "keep") if name in options}
    paused = fraction(options, "stop_after", most=0.99) if "stop_after" in options else None
    if "dry_run" in options:
        os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is executed, so no accelerator is used

    from vit_jax.sweeps.fields import make_sweep
    from vit_jax.sweeps.runs import Halving

    words = options["grid"].splitlines()
    draws: dict[str, Any] = {"num_settings": number.get("random"), "seed": number.get("seed", 0)}
    grid = make_sweep(options["config"], overrides, words, metric=options.get("metric"), **draws)
    _perform(options, grid, Halving(paused, number.get("keep")) if paused else None)


_AXES = {  # values with commas between them
    "models": "arguments of the recipe, with more fields: ViT-B/32,epochs=7,R50x1,ViT-B/32,model.block=axial",
    "examples": "training images (data_size)",
    "weight_decays": "searched for each part of the images (data_size)",
    "dropouts": "searched for each part of the images (data_size)",
    "label_smoothings": "searched for each part of the images (data_size)",
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
        "[--dry_run]": "list the runs with their states and costs",
        "[--topology=NAME]": "as of `plan`: time and chip-hours of a dry run there; the TPU that speed is planned for",
        **_SIZES,
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
    name = options["NAME"]
    if name not in STUDIES:
        raise UsageError(f"There is no study {name!r}. Studies: {', '.join(STUDIES)}.")
    chosen = STUDIES[name]
    if idle := [option for option in _OF_DRY_RUN if option in options and "dry_run" not in options]:
        raise UsageError(f"--{idle[0]}= has no effect without --dry-run.")
    if "topology" in options and chosen.is_trained and "dry_run" not in options:
        raise UsageError(f"--topology= has no effect on {name} without --dry-run: its runs train on this machine.")
    if "paper" in options and name != "scaling":
        raise UsageError(f"--paper has no effect on {name}: the paper's points are those of scaling.")
    values = {name: values_of(options[name]) for name in (*_AXES, "measures") if name in options}
    if empty := [f"--{name}={options[name]}" for name, found in values.items() if not found]:
        raise UsageError(f"{empty[0]}: there is no value.")
    if "dry_run" in options or "topology" in options:
        os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is executed, so no accelerator is used

    from vit_jax.sweeps.grid import make_grid, on_machine

    grid = make_grid(chosen, options["config"], overrides, values)
    if "topology" in options and not chosen.is_trained:
        grid = on_machine(grid, options["topology"])
    _perform(options, grid)


def values_of(text: str) -> tuple[str, ...]:
    """Return the values of "A,B"; a part with "=" belongs to the value before it, as in "L/16,epochs=7,B/32"."""
    values: list[str] = []
    for part in filter(None, text.split(",")):
        if "=" in part and values:
            values[-1] += f",{part}"
        else:
            values.append(part)
    return tuple(values)


def _perform(options: Mapping[str, str], grid: "Grid", halving: "Halving | None" = None) -> None:
    """Print the plan of a grid's runs, or do this machine's share of them and print the results."""
    index, count = share(options)
    workdir = expanded(options["workdir"]).absolute()

    from vit_jax.plan.topology import parse_topology

    topology = parse_topology(options["topology"]) if "topology" in options else None
    if "dry_run" in options:
        from vit_jax.sweeps.runs import plan_to_markdown

        sizes = {name: whole(options, name) for name in _OF_DRY_RUN if name in options}
        print(plan_to_markdown(grid, workdir, grid.runs[index::count], topology, sizes, halving), end="")
        return

    def run() -> None:
        from vit_jax import hosts
        from vit_jax.drawing import require_drawing
        from vit_jax.sweeps import speed
        from vit_jax.sweeps.results import write_results
        from vit_jax.sweeps.runs import run_grid
        from vit_jax.train import finetune, pretrain
        from vit_jax.train.lifecycle.interruption import Interrupted

        perform: Callable[..., object]
        if not grid.study.is_trained:
            perform = speed.planner(topology) if topology else speed.measure
        else:
            perform = finetune.tune if grid.is_finetuning else pretrain.learn
        if not grid.study.is_sweep:
            require_drawing()  # before hours of training
        with hosts.ends_together(Interrupted):
            hosts.start()
            stopped = run_grid(grid, workdir, slice(index, None, count), perform, halving)
            if hosts.is_first():
                table = write_results(grid, workdir, with_paper="paper" in options, stopped=stopped)
                print(f"\n{table}", end="", flush=True)
                found = "the table is" if grid.study.is_sweep else "table and picture are"
                print(f"{grid.study.name}: {found} in {workdir}", file=sys.stderr, flush=True)

    with preemptible():
        run_training(run, options["workdir"])


VTAB_RECIPE = "finetune:any,vtab"
_SET_OTHERWISE = {  # fields of the recipe that a sweep sets for each of its runs
    "data": "--tasks= and --suite=",
    "init_from": "the weights, in front of the options",
    **dict.fromkeys(("total", "schedule.warmup"), "--lengths="),
    **dict.fromkeys(("schedule.learning_rate", "search.learning_rates"), "--learning_rates="),
    "search.validation_fraction": "the validation split of a suite's tasks",
    **dict.fromkeys(("input.train_split", "input.test_split"), "the tasks of a suite"),
    "input.data_dir": "--data_dir=",
    **dict.fromkeys(("evaluation.every", "stop_early.patience"), "nothing: a run is evaluated once, at its end"),
    **dict.fromkeys(("checkpoint.keep_latest", "checkpoint.keep_best"), "nothing: a run keeps its last checkpoint"),
}


@verb(
    {
        "WEIGHTS": "a workdir, .npz, .safetensors, a folder with weights, or hf://owner/name",
        "--tasks=TASKS": "all, a group (natural, specialized, structured), or names",
        "--workdir=FOLDER": "of the runs and the table; the same command goes on after an interruption",
        "[--data_dir=FOLDER]": "of TFDS",
        "[--available]": "skip tasks whose data cannot be opened",
        "[--dry_run]": "print the plan; run nothing",
        "[--sweep=shared|per_task]": "whether one setting is chosen by the mean over the tasks, or one for each",
        "[--learning_rates=X,…]": "to try",
        "[--lengths=STEPS:WARMUP,…]": "to try",
        **SHARE,
        "[--suite=package.module:name]": "custom tasks",
        "[--config=RECIPE]": "of the fine-tuning, finetune:any,vtab by default",
        "[--config.SECTION.FIELD=VALUE]": "changes a value of the recipe",
        **ALLOW_CODE,
    },
    "ViT-B_16.npz --tasks=all --workdir=runs/vtab",
    "runs/imagenet --tasks=natural --workdir=runs/vtab --available --index=0 --count=4",
)
def vtab(given: Given) -> None:
    """Fine-tune on the 19 tasks of VTAB-1k, or a custom suite: a table beside the paper's.

    Settings are tried on 800 images of a task and compared on 200; then the best is trained on all 1,000 and tested.
    """
    options, overrides, _ = given
    for word in overrides:
        field = word.removeprefix("--config.").partition("=")[0]
        if field in _SET_OTHERWISE:
            raise UsageError(f"{word}: a sweep sets this for each of its runs. Use {_SET_OTHERWISE[field]}.")
    with preemptible():
        run_training(lambda: _vtab(options, overrides), options["workdir"])


def _vtab(options: Mapping[str, str], overrides: Sequence[str]) -> None:
    from vit_jax import hosts
    from vit_jax.sweeps.vtab import run_sweep
    from vit_jax.sweeps.vtab_table import plan_to_markdown, write_results
    from vit_jax.train.lifecycle.interruption import Interrupted

    with hosts.ends_together(Interrupted):
        hosts.start()
        sweep = _tasks(options, overrides)
        if "dry_run" not in options:
            run_sweep(sweep)
        if hosts.is_first():
            print(plan_to_markdown(sweep) if "dry_run" in options else write_results(sweep), end="", flush=True)


def _tasks(options: Mapping[str, str], overrides: Sequence[str]) -> "Sweep":
    """Return the sweep that the words describe; the data of every task can be opened."""
    import dataclasses

    from vit_jax import hosts
    from vit_jax.config import FinetuneConfig, load_recipe
    from vit_jax.sweeps.suite import load_suite, select_tasks
    from vit_jax.sweeps.vtab import Sweep, unavailable

    index, count = share(options)
    recipe = options.get("config", VTAB_RECIPE)
    data_dir = [f"--config.input.data_dir={options['data_dir']}"] if "data_dir" in options else []
    config = load_recipe(recipe, [*overrides, *data_dir])
    if not isinstance(config, FinetuneConfig):
        raise UsageError(f"{recipe} is a recipe for {type(config).__name__}, not for fine-tuning.")
    asked = select_tasks(load_suite(options.get("suite")), options["tasks"])
    problems = unavailable(asked, config)
    tasks = tuple(task for task in asked if task not in problems)
    if tasks and "available" in options:
        for task, problem in problems.items() if hosts.is_first() else ():
            print(f"note: {task.name} is skipped. {problem}", file=sys.stderr, flush=True)
    elif problems:
        lines = "\n".join(f"  {task.name}: {problem}" for task, problem in problems.items())
        hint = "\nWith --available the other tasks are run." if tasks and "available" not in options else ""
        raise UsageError(f"Data of {len(problems)} of {len(asked)} tasks cannot be opened:\n{lines}{hint}")
    return Sweep(
        asked=asked,
        tasks=tasks,
        own=tasks[index::count],
        settings=_settings(options),
        is_shared=options.get("sweep", "shared") == "shared",
        config=dataclasses.replace(config, init_from=options["WEIGHTS"]),
        folder=expanded(options["workdir"]).absolute(),
    )


def _settings(options: Mapping[str, str]) -> "tuple[Setting, ...]":
    from vit_jax.sweeps.vtab import LEARNING_RATES, LENGTHS, grid

    rates, lengths = list(LEARNING_RATES), list(LENGTHS)
    if "learning_rates" in options:
        texts = options["learning_rates"].split(",")
        rates = [positive(options, "learning_rates", text) for text in texts]
    if "lengths" in options:
        pairs = [text.split(":") for text in options["lengths"].split(",")]
        are_pairs = all(len(pair) == 2 and all(map(str.isdecimal, pair)) for pair in pairs)
        lengths = [(int(steps), int(warmup)) for steps, warmup in pairs] if are_pairs else []
        if not lengths or any(warmup >= steps for steps, warmup in lengths):
            raise UsageError(
                f"--lengths={options['lengths']}: give pairs STEPS:WARMUP, each warm-up shorter than its run, with "
                "commas between them: 500:100,2500:200."
            )
    for name, values in (("learning_rates", rates), ("lengths", [steps for steps, _ in lengths])):
        if len({*values}) < len(values):
            raise UsageError(f"--{name}={options[name]}: a value occurs twice.")
    return grid(rates, lengths)
