"""Verbs of several runs: sweep, study and vtab."""

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from vit_jax.cli.options import REQUIRED, Overrides, Recipe, Share, UsageError, argument, option, switch, verb
from vit_jax.cli.training import preemptible, run_training
from vit_jax.config.rules import Count, Number, Positive, Range, When
from vit_jax.files import expanded

if TYPE_CHECKING:
    from vit_jax.sweeps import vtab as vtab_sweeps
    from vit_jax.sweeps.grid import Grid
    from vit_jax.sweeps.runs import Halving

PLANNING = When("dry_run")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Runs(Share, Recipe):
    workdir: str = option("FOLDER", "of the runs and the results; the same command resumes them", REQUIRED)
    dry_run: bool = switch("list the runs with their states and costs")
    num_examples: Annotated[Count | None, PLANNING] = option("N", "of data that the recipe does not name")
    num_classes: Annotated[Count | None, PLANNING] = option("N", "of data that the recipe does not name")


@verb(
    "--config=digits --grid schedule.learning_rate=1e-3,3e-3 --grid seed=0,1,2 --workdir=runs/rates",
    "--config=digits --grid 'schedule.learning_rate=log(1e-4,1e-2)' --random=8 --stop_after=0.25 --workdir=runs/drawn",
)
class Sweep(_Runs):
    """Train a recipe with several values of its fields: a table of means over seeds, and the best setting.

    Pre-trains or fine-tunes, by the recipe. Every run is checked before the first one starts.
    """

    grid: list[str] = option(
        "FIELD=A,B…",
        "values of a field to try; once for each field. seed=0,1,2 repeats every setting. With --random also a range: "
        "FIELD=log(LOW,HIGH) or FIELD=uniform(LOW,HIGH)",
        REQUIRED,
    )
    random: Count | None = option("N", "number of random settings, in place of all combinations")
    seed: Annotated[Number, When("random")] = option("N", "of the random settings", 0)
    metric: str | None = option("NAME", "result that settings are compared by; default: checkpoint.best_metric")
    stop_after: Annotated[float | None, Range("(0, 0.99]")] = option("FRACTION", "then only the best continue")
    keep: Annotated[Count | None, When("stop_after")] = option("N", "settings that continue; default: half of them")
    topology: Annotated[str | None, PLANNING] = option("NAME", "time and chip-hours there, as `plan` prints them")

    def run(self) -> None:
        if self.dry_run:
            os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is executed, so no accelerator is used

        from vit_jax.sweeps.fields import make_sweep
        from vit_jax.sweeps.runs import Halving

        settings: dict[str, Any] = {"metric": self.metric, "num_settings": self.random, "seed": self.seed}
        grid = make_sweep(self.config, self.overrides, self.grid, **settings)
        _perform(self, grid, Halving(self.stop_after, self.keep) if self.stop_after else None)


@verb(
    "positions --config=digits_studies --workdir=runs/positions",
    "scaling --config=pretrain_jft --workdir=runs/scaling --dry-run --topology=v5e:16x16",
)
class Study(_Runs):
    """The paper's studies: grids of runs that are trained, collected into a table, and drawn.

    Each value of an axis stands for overrides of the recipe. Values are those of the command, else of the recipe's
    table `STUDIES`, else the paper's.
    """

    name: str = argument("NAME", "data_size, scaling, positions, pooling, shape, optimizer or speed")
    topology: str | None = option("NAME", "for a dry run, as of `plan`; the TPU that speed is planned for")
    measures: str | None = option("A,B,…", "metrics of summary.json to show")
    paper: bool = switch("draw the paper's Table 6 too (scaling)")
    models: str | None = option(
        "A,B,…", "arguments of the recipe and fields: ViT-B/32,epochs=7,model.block=axial,R50x1"
    )
    examples: str | None = option("A,B,…", "numbers of training images (data_size)")
    weight_decays: str | None = option("A,B,…", "searched for each number of images (data_size)")
    dropouts: str | None = option("A,B,…", "searched for each number of images (data_size)")
    label_smoothings: str | None = option("A,B,…", "searched for each number of images (data_size)")
    epochs: str | None = option("A,B,…", "lengths (scaling)")
    positions: str | None = option("A,B,…", "none, learned_1d, learned_2d, relative, sincos2d (positions)")
    layers: str | None = option("A,B,…", "where they are added: stem, every, shared (positions)")
    pools: str | None = option("A,B,…", "token, gap, map (pooling)")
    learning_rates: str | None = option("A,B,…", "at the peak (pooling)")
    shapes: str | None = option("A,B,…", "base; depth:2, width:0.5, mlp:2, patch:0.5, all:2 times the recipe's (shape)")
    optimizers: str | None = option("A,B,…", "adam, sgd (optimizer)")
    rate_factors: str | None = option("A,B,…", "of the learning rate, searched for each optimiser (optimizer)")
    image_sizes: str | None = option("A,B,…", "sides in pixels (speed)")
    seeds: str | None = option("A,B,…", "of every study: their mean and extremes are shown")

    def run(self) -> None:
        from vit_jax.sweeps.catalogue import STUDIES

        if self.name not in STUDIES:
            raise UsageError(f"NAME={self.name}: must be a study. Use one of {', '.join(STUDIES)}.")
        chosen = STUDIES[self.name]
        if self.topology is not None and chosen.is_trained and not self.dry_run:
            raise UsageError(
                f"--topology={self.topology}: has no effect on {self.name} without --dry-run. Leave it out."
            )
        if self.paper and self.name != "scaling":
            raise UsageError(f"--paper: has no effect on {self.name}, only on scaling. Leave it out.")
        axes = [name for name in type(self).__annotations__ if name not in ("name", "topology", "paper")]
        texts = {name: text for name in axes if (text := getattr(self, name)) is not None}
        values = {name: values_of(text) for name, text in texts.items()}
        if empty := [f"--{name}={texts[name]}" for name, found in values.items() if not found]:
            raise UsageError(f"{empty[0]}: must have a value. Give A,B.")
        if self.dry_run or self.topology is not None:
            os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is executed, so no accelerator is used

        from vit_jax.sweeps.grid import make_grid, on_machine

        grid = make_grid(chosen, self.config, self.overrides, values)
        if self.topology is not None and not chosen.is_trained:
            grid = on_machine(grid, self.topology)
        _perform(self, grid, with_paper=self.paper)


def values_of(text: str) -> tuple[str, ...]:
    """Return the values of "A,B"; a part with "=" belongs to the value before, as in "L/16,epochs=7,B/32"."""
    values: list[str] = []
    for part in filter(None, text.split(",")):
        if "=" in part and values:
            values[-1] += f",{part}"
        else:
            values.append(part)
    return tuple(values)


def _perform(
    options: "Sweep | Study", grid: "Grid", halving: "Halving | None" = None, *, with_paper: bool = False
) -> None:
    """Print the plan of a grid's runs, or do this machine's share of them and print the results."""
    index, count = options.share
    workdir = expanded(options.workdir).absolute()

    from vit_jax.plan.topology import parse_topology

    topology = parse_topology(options.topology) if options.topology is not None else None
    if options.dry_run:
        from vit_jax.sweeps.runs import plan_to_markdown

        both = {"num_examples": options.num_examples, "num_classes": options.num_classes}
        sizes = {name: size for name, size in both.items() if size is not None}
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
                table = write_results(grid, workdir, with_paper=with_paper, stopped=stopped)
                print(f"\n{table}", end="", flush=True)
                found = "the table is" if grid.study.is_sweep else "table and picture are"
                print(f"{grid.study.name}: {found} in {workdir}", file=sys.stderr, flush=True)

    with preemptible():
        run_training(run, options.workdir)


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


def _read_lengths(text: str) -> tuple[tuple[int, int], ...]:
    pairs = [text.split(":") for text in text.split(",")]
    are_pairs = all(len(pair) == 2 and all(map(str.isdecimal, pair)) for pair in pairs)
    lengths = tuple((int(steps), int(warmup)) for steps, warmup in pairs) if are_pairs else ()
    if not lengths or any(warmup >= steps for steps, warmup in lengths):
        raise ValueError("must be pairs STEPS:WARMUP, each warm-up shorter than its run. Use 500:100,2500:200")
    return lengths


@verb(
    "ViT-B_16.npz --tasks=all --workdir=runs/vtab",
    "runs/imagenet --tasks=natural --workdir=runs/vtab --available --index=0 --count=4",
)
class Vtab(Share, Overrides):
    """Fine-tune on the 19 tasks of VTAB-1k, or a custom suite: a table beside the paper's.

    Settings are tried on 800 images of a task and compared on 200; then the best is trained on all 1,000 and tested.
    """

    weights: str = argument("WEIGHTS", "a workdir, .npz, .safetensors, a folder with weights, or hf://owner/name")
    tasks: str = option("TASKS", "all, a group (natural, specialized, structured), or names", REQUIRED)
    workdir: str = option("FOLDER", "of the runs and the table; the same command resumes them", REQUIRED)
    data_dir: str | None = option("FOLDER", "of TFDS")
    available: bool = switch("skip tasks whose data cannot be opened")
    dry_run: bool = switch("print the plan; run nothing")
    sweep: Literal["shared", "per_task"] = option("", "one setting for all tasks, or one for each", "shared")
    learning_rates: tuple[Positive, ...] | None = option("X,…", "to try")
    lengths: Annotated[tuple[tuple[int, int], ...] | None, _read_lengths] = option("STEPS:WARMUP,…", "to try")
    suite: str | None = option("package.module:name", "custom tasks")
    config: str = option("RECIPE", "of the fine-tuning", VTAB_RECIPE)

    def run(self) -> None:
        for word in self.overrides:
            field = word.removeprefix("--config.").partition("=")[0]
            if field in _SET_OTHERWISE:
                raise UsageError(f"{word}: is set for each run of a sweep. Use {_SET_OTHERWISE[field]}.")
        with preemptible():
            run_training(self._run, self.workdir)

    def _run(self) -> None:
        from vit_jax import hosts
        from vit_jax.sweeps.vtab import run_sweep
        from vit_jax.sweeps.vtab_table import plan_to_markdown, write_results
        from vit_jax.train.lifecycle.interruption import Interrupted

        with hosts.ends_together(Interrupted):
            hosts.start()
            sweep = self._tasks()
            if not self.dry_run:
                run_sweep(sweep)
            if hosts.is_first():
                print(plan_to_markdown(sweep) if self.dry_run else write_results(sweep), end="", flush=True)

    def _tasks(self) -> "vtab_sweeps.Sweep":
        """Return the sweep; the data of every task can be opened."""
        from vit_jax import hosts
        from vit_jax.config import FinetuneConfig, load_recipe
        from vit_jax.sweeps.suite import load_suite, select_tasks
        from vit_jax.sweeps.vtab import LEARNING_RATES, LENGTHS, Sweep, grid, unavailable

        index, count = self.share
        data_dir = [f"--config.input.data_dir={self.data_dir}"] if self.data_dir is not None else []
        config = load_recipe(self.config, [*self.overrides, *data_dir])
        if not isinstance(config, FinetuneConfig):
            raise UsageError(f"--config={self.config}: must be a recipe for fine-tuning. Use {VTAB_RECIPE}.")
        asked = select_tasks(load_suite(self.suite), self.tasks)
        problems = unavailable(asked, config)
        tasks = tuple(task for task in asked if task not in problems)
        if tasks and self.available:
            for task, problem in problems.items() if hosts.is_first() else ():
                print(f"note: {task.name} is skipped. {problem}", file=sys.stderr, flush=True)
        elif problems:
            lines = "\n".join(f"  {task.name}: {problem}" for task, problem in problems.items())
            hint = "\nWith --available the other tasks are run." if tasks and not self.available else ""
            raise UsageError(f"Data of {len(problems)} of {len(asked)} tasks cannot be opened:\n{lines}{hint}")
        rates, lengths = self.learning_rates or LEARNING_RATES, self.lengths or LENGTHS
        for name, values in (("learning_rates", rates), ("lengths", [steps for steps, _ in lengths])):
            if len({*values}) < len(values):
                raise UsageError(f"--{name}: must be different values, and has {', '.join(map(str, values))}.")
        return Sweep(
            asked=asked,
            tasks=tasks,
            own=tasks[index::count],
            settings=grid(list(rates), list(lengths)),
            is_shared=self.sweep == "shared",
            config=dataclasses.replace(config, init_from=self.weights),
            folder=expanded(self.workdir).absolute(),
        )
