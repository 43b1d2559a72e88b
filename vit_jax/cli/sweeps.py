"""Verbs of several runs: sweep, study and vtab."""

import dataclasses
import functools
import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

from vit_jax.cli.options import (
    REQUIRED,
    Overrides,
    Recipe,
    Share,
    UsageError,
    argument,
    option,
    switch,
    verb,
)
from vit_jax.cli.outputs import note
from vit_jax.cli.training import preemptible, run_training
from vit_jax.config.rules import Count, Number, Positive, Range, When
from vit_jax.storage.files import expanded
from vit_jax.text.nearest import require_known

if TYPE_CHECKING:
    from vit_jax.tools.sweeps import vtab as vtab_sweeps
    from vit_jax.tools.sweeps.grid import Grid
    from vit_jax.tools.sweeps.runs import Halving

PLANNING = When("dry_run")


def _run_together(run: Callable[[], None], workdir: str) -> None:
    """Call a function in every process of a run, with the exit codes of training."""

    def together() -> None:
        from vit_jax import hosts
        from vit_jax.checkpoint.presence import require_exact_path
        from vit_jax.train.lifecycle.interruption import Interrupted

        require_exact_path(expanded(workdir).absolute())

        with hosts.ends_together(Interrupted):
            hosts.start()
            run()

    with preemptible():
        run_training(together, workdir)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Runs(Share, Recipe):
    workdir: str = option(
        "FOLDER", "of the runs and the results; the same command resumes them", REQUIRED
    )
    dry_run: bool = switch("list the runs with their states and costs")
    num_examples: Annotated[Count | None, PLANNING] = option(
        "N", "of data that the recipe does not name"
    )
    num_classes: Annotated[Count | None, PLANNING] = option(
        "N", "of data that the recipe does not name"
    )
    topology: str | None

    def perform(
        self, grid: "Grid", halving: "Halving | None" = None, *, with_paper: bool = False
    ) -> None:
        """Print the plan of a grid's runs, or do this machine's share of them and print the results."""
        index, count = self.share
        workdir = expanded(self.workdir).absolute()

        from vit_jax.tools.plan.topology import parse_topology

        topology = parse_topology(self.topology) if self.topology is not None else None
        if self.dry_run:
            from vit_jax.tools.sweeps.runs import plan_to_markdown

            sizes = self.chosen("num_examples", "num_classes")
            print(
                plan_to_markdown(grid, workdir, grid.runs[index::count], topology, sizes, halving),
                end="",
            )
            return

        def run() -> None:
            from vit_jax import hosts
            from vit_jax.tools.figures.drawing import require_drawing
            from vit_jax.tools.sweeps import speed
            from vit_jax.tools.sweeps.results import write_results
            from vit_jax.tools.sweeps.runs import run_grid
            from vit_jax.train import finetune, pretrain

            perform: Callable[..., object] = finetune.tune if grid.is_finetuning else pretrain.learn
            if not grid.study.is_trained:
                perform = functools.partial(speed.measure, topology=topology)
            if not grid.study.is_sweep:
                require_drawing()  # before hours of training
            stopped = run_grid(grid, workdir, slice(index, None, count), perform, halving)
            if hosts.is_first():
                table = write_results(grid, workdir, with_paper=with_paper, stopped=stopped)
                print(f"\n{table}", end="", flush=True)
                place = "the table is" if grid.study.is_sweep else "table and picture are"
                print(f"{grid.study.name}: {place} in {workdir}", file=sys.stderr, flush=True)

        _run_together(run, self.workdir)


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
    metric: str | None = option(
        "NAME", "result that settings are compared by; default: checkpoint.best_metric"
    )
    stop_after: Annotated[float | None, Range("(0, 0.99]")] = option(
        "FRACTION", "then only the best continue"
    )
    keep: Annotated[Count | None, When("stop_after")] = option(
        "N", "settings that continue; default: half of them"
    )
    topology: Annotated[str | None, PLANNING] = option(
        "NAME", "time and chip-hours there, as `plan` prints them"
    )

    def run(self) -> None:
        if self.dry_run:
            os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is executed, so no accelerator is used

        from vit_jax.tools.sweeps.fields import make_sweep
        from vit_jax.tools.sweeps.runs import Halving

        grid = make_sweep(
            self.config,
            self.overrides,
            self.grid,
            metric=self.metric,
            num_settings=self.random,
            seed=self.seed,
        )
        self.perform(grid, Halving(self.stop_after, self.keep) if self.stop_after else None)


def _read_values(text: str) -> tuple[str, ...]:
    """Return the values of "A,B"; a word with "=" belongs to the value before, as in "L/16,epochs=7,B/32"."""
    values = re.split(r",+(?!,|[^,]*=)", text.strip(","))
    if values == [""]:
        raise ValueError("must have a value. Use A,B")
    return tuple(values)


Values = Annotated[tuple[str, ...] | None, _read_values]


@verb(
    "positions --config=digits_studies --workdir=runs/positions",
    "scaling --config=pretrain_jft --workdir=runs/scaling --dry-run --topology=v5e:16x16",
)
class Study(_Runs):
    """The paper's studies: grids of runs that are trained, collected into a table, and drawn.

    Each value of an axis stands for overrides of the recipe. Values are those of the command, else of the recipe's
    table `STUDIES`, else the paper's.
    """

    name: str = argument(
        "NAME", "data_size, scaling, positions, pooling, shape, optimizer or speed"
    )
    topology: str | None = option(
        "NAME", "for a dry run, as of `plan`; the TPU that speed is planned for"
    )
    measures: Values = option("A,B,…", "metrics of summary.json to show")
    paper: bool = switch("draw the paper's Table 6 too (scaling)")
    models: Values = option(
        "A,B,…", "arguments of the recipe and fields: ViT-B/32,epochs=7,model.block=axial,R50x1"
    )
    examples: Values = option("A,B,…", "numbers of training images (data_size)")
    weight_decays: Values = option("A,B,…", "searched for each number of images (data_size)")
    dropouts: Values = option("A,B,…", "searched for each number of images (data_size)")
    label_smoothings: Values = option("A,B,…", "searched for each number of images (data_size)")
    epochs: Values = option("A,B,…", "lengths (scaling)")
    positions: Values = option(
        "A,B,…", "none, learned_1d, learned_2d, relative, sincos2d (positions)"
    )
    layers: Values = option("A,B,…", "where they are added: stem, every, shared (positions)")
    pools: Values = option("A,B,…", "token, gap, map (pooling)")
    learning_rates: Values = option("A,B,…", "at the peak (pooling)")
    shapes: Values = option(
        "A,B,…", "base; depth:2, width:0.5, mlp:2, patch:0.5, all:2 times the recipe's (shape)"
    )
    optimizers: Values = option("A,B,…", "adam, sgd (optimizer)")
    rate_factors: Values = option(
        "A,B,…", "of the learning rate, searched for each optimiser (optimizer)"
    )
    image_sizes: Values = option("A,B,…", "sides in pixels (speed)")
    seeds: Values = option("A,B,…", "of every study: their mean and extremes are shown")

    def run(self) -> None:
        from vit_jax.tools.sweeps.catalogue import STUDIES

        require_known("NAME", self.name, STUDIES)
        study = STUDIES[self.name]
        if study.is_trained and not self.dry_run:
            self.reject_ineffective(["topology"], f"on {self.name} without --dry-run")
        if self.name != "scaling":
            self.reject_ineffective(["paper"], f"on {self.name}, only on scaling")
        axes = [
            name for name in type(self).__annotations__ if name not in ("name", "topology", "paper")
        ]
        if self.dry_run or self.topology is not None:
            os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is executed, so no accelerator is used

        from vit_jax.tools.sweeps.grid import make_grid, on_machine

        grid = make_grid(study, self.config, self.overrides, self.chosen(*axes))
        if self.topology is not None and not study.is_trained:
            grid = on_machine(grid, self.topology)
        self.perform(grid, with_paper=self.paper)


VTAB_RECIPE = "finetune:any,vtab"
_SET_OTHERWISE = {  # fields of the recipe that a sweep sets for each of its runs
    "data": "--tasks= and --suite=",
    "init_from": "the weights, in front of the options",
    **dict.fromkeys(("total", "schedule.warmup"), "--lengths="),
    **dict.fromkeys(("schedule.learning_rate", "search.learning_rates"), "--learning_rates="),
    "search.validation_fraction": "the validation split of a suite's tasks",
    **dict.fromkeys(("input.train_split", "input.test_split"), "the tasks of a suite"),
    "input.data_dir": "--data_dir=",
    **dict.fromkeys(
        ("evaluation.every", "stop_early.patience"), "nothing: a run is evaluated once, at its end"
    ),
    **dict.fromkeys(
        ("checkpoint.keep_latest", "checkpoint.keep_best"),
        "nothing: a run keeps its last checkpoint",
    ),
}


def _read_lengths(text: str) -> tuple[tuple[int, int], ...]:
    pairs = [text.split(":") for text in text.split(",")]
    are_pairs = all(len(pair) == 2 and all(map(str.isdecimal, pair)) for pair in pairs)
    lengths = tuple((int(steps), int(warmup)) for steps, warmup in pairs) if are_pairs else ()
    if not lengths or any(warmup >= steps for steps, warmup in lengths):
        raise ValueError(
            "must be pairs STEPS:WARMUP, each warm-up shorter than its run. Use 500:100,2500:200"
        )
    return lengths


@verb(
    "ViT-B_16.npz --tasks=all --workdir=runs/vtab",
    "runs/imagenet --tasks=natural --workdir=runs/vtab --available --index=0 --count=4",
)
class Vtab(Share, Overrides):
    """Fine-tune on the 19 tasks of VTAB-1k, or a custom suite: a table beside the paper's.

    Settings are tried on 800 images of a task and compared on 200; then the best is trained on all 1,000 and tested.
    """

    weights: str = argument(
        "WEIGHTS", "a workdir, .npz, .safetensors, a folder with weights, or hf://owner/name"
    )
    tasks: str = option(
        "TASKS", "all, a group (natural, specialized, structured), or names", REQUIRED
    )
    workdir: str = option(
        "FOLDER", "of the runs and the table; the same command resumes them", REQUIRED
    )
    data_dir: str | None = option("FOLDER", "of TFDS")
    available: bool = switch("skip tasks whose data cannot be opened")
    dry_run: bool = switch("print the plan; run nothing")
    sweep: Literal["shared", "per_task"] = option(
        "", "one setting for all tasks, or one for each", "shared"
    )
    learning_rates: tuple[Positive, ...] | None = option("X,…", "to try")
    lengths: Annotated[tuple[tuple[int, int], ...] | None, _read_lengths] = option(
        "STEPS:WARMUP,…", "to try"
    )
    suite: str | None = option("package.module:name", "custom tasks")
    config: str = option("RECIPE", "of the fine-tuning", VTAB_RECIPE)

    def run(self) -> None:
        from vit_jax.tools.sweeps.grid import reject_taken

        reject_taken(self.overrides, _SET_OTHERWISE)
        _run_together(self._run, self.workdir)

    def _run(self) -> None:
        from vit_jax import hosts
        from vit_jax.tools.sweeps.vtab import run_sweep
        from vit_jax.tools.sweeps.vtab_table import plan_to_markdown, write_results

        sweep = self._tasks()
        if not self.dry_run:
            run_sweep(sweep)
        if hosts.is_first():
            print(
                plan_to_markdown(sweep) if self.dry_run else write_results(sweep),
                end="",
                flush=True,
            )

    def _tasks(self) -> "vtab_sweeps.Sweep":
        """Return the sweep; the data of every task can be opened."""
        from vit_jax import hosts
        from vit_jax.config import FinetuneConfig, load_recipe
        from vit_jax.tools.sweeps.grid import require_different
        from vit_jax.tools.sweeps.suite import load_suite, select_tasks
        from vit_jax.tools.sweeps.vtab import LEARNING_RATES, LENGTHS, Sweep, grid, unavailable

        index, count = self.share
        data_dir = [f"--config.input.data_dir={self.data_dir}"] if self.data_dir is not None else []
        config = load_recipe(self.config, [*self.overrides, *data_dir])
        if not isinstance(config, FinetuneConfig):
            raise UsageError(
                f"--config={self.config}: must be a recipe for fine-tuning. Use {VTAB_RECIPE}."
            )
        asked = select_tasks(load_suite(self.suite), self.tasks)
        problems = unavailable(asked, config)
        tasks = tuple(task for task in asked if task not in problems)
        if tasks and self.available:
            if hosts.is_first():
                note(*(f"{task.name} is skipped. {problem}" for task, problem in problems.items()))
        elif problems:
            lines = "\n".join(f"  {task.name}: {problem}" for task, problem in problems.items())
            hint = (
                "\nWith --available the other tasks are run."
                if tasks and not self.available
                else ""
            )
            raise UsageError(
                f"Data of {len(problems)} of {len(asked)} tasks cannot be opened:\n{lines}{hint}"
            )
        rates = self.learning_rates or LEARNING_RATES
        lengths = self.lengths or LENGTHS
        require_different("--learning_rates=", rates)
        require_different("--lengths=", [steps for steps, _ in lengths])
        return Sweep(
            asked=asked,
            tasks=tasks,
            own=tasks[index::count],
            settings=grid(list(rates), list(lengths)),
            is_shared=self.sweep == "shared",
            config=dataclasses.replace(config, init_from=self.weights),
            folder=expanded(self.workdir).absolute(),
        )
