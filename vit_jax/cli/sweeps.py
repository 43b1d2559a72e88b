"""Verbs of several runs: sweep, study and vtab."""

import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from vit_jax.cli.groups import complete_rule, use_no_accelerator
from vit_jax.cli.options import (
    REQUIRED,
    Overrides,
    Recipe,
    Share,
    UsageError,
    argument,
    format_command,
    option,
    switch,
)
from vit_jax.cli.outputs import note
from vit_jax.cli.training import explain_preemption, run_training
from vit_jax.cli.verbs import verb
from vit_jax.config.rules import Count, Number, Positive, Range, When
from vit_jax.storage.files import expand_path
from vit_jax.text.nearest import require_known

if TYPE_CHECKING:
    from vit_jax.config import FinetuneConfig
    from vit_jax.tools.plan.topology import Topology
    from vit_jax.tools.sweeps import vtab as vtab_sweeps
    from vit_jax.tools.sweeps.grid import Grid
    from vit_jax.tools.sweeps.halving import Halving
    from vit_jax.tools.sweeps.suite import Task

PLANNING = When("dry_run")


def _run_together(run: Callable[[], None], workdir: str) -> None:
    """Call a function in every process of a run, with the exit codes of training."""

    def run_together() -> None:
        from vit_jax import hosts
        from vit_jax.checkpoint.presence import require_exact_path
        from vit_jax.train.lifecycle.interruption import Interrupted

        require_exact_path(expand_path(workdir).absolute())

        with hosts.ends_together(Interrupted):
            hosts.start()
            run()

    with explain_preemption():
        run_training(run_together, workdir)


def _follow_weights(grid: "Grid") -> "Grid":
    """Return the runs with the rules for the families of their weights, and note these rules."""
    from vit_jax import hosts
    from vit_jax.tools.sweeps.fields import follow_weights

    followed = follow_weights(grid)
    recipes = dict.fromkeys(run.recipe for run in followed.runs)
    for run in grid.runs:
        recipes.pop(run.recipe, None)
    if hosts.is_first():
        note(*(f"recipe {recipe}: for the family of the weights" for recipe in recipes))
    return followed


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Runs(Share, Recipe):
    workdir: str = option(
        "FOLDER", "folder of the runs and the results; the same command resumes them", REQUIRED
    )

    dry_run: bool = switch("list the runs with their states and costs")
    num_examples: Annotated[Count | None, PLANNING] = option(
        "N", "number of training images, for data of unknown size"
    )
    num_classes: Annotated[Count | None, PLANNING] = option(
        "N", "number of classes, for data of unknown size"
    )

    topology: str | None

    def perform(
        self,
        grid: "Grid",
        halving: "Halving | None" = None,
        *,
        with_paper: bool = False,
    ) -> None:
        """Print the plan of a grid's runs, or do this machine's share and print the results."""
        _ = self.share  # rejects a wrong one

        from vit_jax.tools.plan.topology import parse_topology

        topology = None
        if self.topology is not None:
            topology = parse_topology(self.topology)
        if self.dry_run:
            self._print_plan(_follow_weights(grid), topology, halving)
            return

        def run() -> None:
            self._train(_follow_weights(grid), topology, halving, with_paper=with_paper)

        _run_together(run, self.workdir)

    def _print_plan(
        self,
        grid: "Grid",
        topology: "Topology | None",
        halving: "Halving | None",
    ) -> None:
        """Print this machine's share of the runs with states and costs."""
        from vit_jax.tools.sweeps.runs_plan import plan_to_markdown

        index, count = self.share
        sizes = self.collect_values("num_examples", "num_classes")
        workdir = expand_path(self.workdir).absolute()
        runs = grid.runs[index::count]
        print(plan_to_markdown(grid, workdir, runs, topology, sizes, halving), end="")

    def _train(
        self,
        grid: "Grid",
        topology: "Topology | None",
        halving: "Halving | None",
        *,
        with_paper: bool,
    ) -> None:
        """Do this machine's share of the runs; print and write the results."""
        from vit_jax import hosts
        from vit_jax.tools.figures.drawing import require_drawing
        from vit_jax.tools.sweeps import speed
        from vit_jax.tools.sweeps.results_table import write_results
        from vit_jax.tools.sweeps.runs import run_grid
        from vit_jax.train import finetune, pretrain

        perform: Callable[..., object] = finetune.tune if grid.is_finetuning else pretrain.learn
        if not grid.study.is_trained:
            perform = functools.partial(speed.measure, topology=topology)
        if not grid.study.is_sweep:
            require_drawing()  # before hours of training

        index, count = self.share
        workdir = expand_path(self.workdir).absolute()
        stopped = run_grid(grid, workdir, slice(index, None, count), perform, halving)
        if hosts.is_first():
            table = write_results(grid, workdir, with_paper=with_paper, stopped=stopped)
            print(f"\n{table}", end="", flush=True)
            results = "the table is" if grid.study.is_sweep else "table and figure are"
            print(f"{grid.study.name}: {results} in {workdir}", file=sys.stderr, flush=True)


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
        "values of a field, once for each field; seed=0,1,2 repeats every setting. "
        "With --random also a range: FIELD=log(LOW,HIGH) or FIELD=uniform(LOW,HIGH)",
        REQUIRED,
    )

    random: Count | None = option("N", "number of random settings, in place of all combinations")
    seed: Annotated[Number, When("random")] = option("N", "random seed of the settings", 0)

    metric: str | None = option(
        "NAME", "result to compare settings by; default: checkpoint.best_metric"
    )

    stop_after: Annotated[float | None, Range("(0, 0.99]")] = option(
        "FRACTION", "stop all but the best at this fraction of the steps"
    )
    keep: Annotated[Count | None, When("stop_after")] = option(
        "N", "number of settings that continue; default: half of them"
    )

    topology: Annotated[str | None, PLANNING] = option(
        "NAME", "machine, as in `plan`, for time and chip-hours"
    )

    def suggest_next(self) -> str:
        """Return the figure of the runs."""
        return format_command("plot", self.workdir)

    def run(self) -> None:
        if self.dry_run:
            use_no_accelerator()

        from vit_jax.tools.sweeps.fields import make_sweep
        from vit_jax.tools.sweeps.halving import Halving

        halving = None
        if self.stop_after is not None:
            halving = Halving(self.stop_after, self.keep)
        grid = make_sweep(
            self.config,
            self.overrides,
            self.grid,
            metric=self.metric,
            num_settings=self.random,
            seed=self.seed,
        )
        self.perform(grid, halving)


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

    Each value of an axis stands for overrides of the recipe. Values are those of the command, else
    of the recipe's table `STUDIES`, else the paper's.
    """

    name: str = argument(
        "NAME", "study: data_size, scaling, positions, pooling, shape, optimizer or speed"
    )

    topology: str | None = option(
        "NAME", "machine, as in `plan`, for a dry run or the study of speed"
    )

    measures: Values = option("A,B,…", "metrics of summary.json to show")
    paper: bool = switch("draw the paper's Table 6 too (scaling)")

    models: Values = option(
        "A,B,…", "models: arguments and fields of the recipe, ViT-B/32,epochs=7,R50x1"
    )

    examples: Values = option("A,B,…", "numbers of training images (data_size)")
    weight_decays: Values = option(
        "A,B,…", "weight decays, searched for each number of images (data_size)"
    )
    dropouts: Values = option(
        "A,B,…", "dropout rates, searched for each number of images (data_size)"
    )
    label_smoothings: Values = option(
        "A,B,…", "smoothing, searched for each number of images (data_size)"
    )

    epochs: Values = option("A,B,…", "lengths in epochs (scaling)")

    positions: Values = option(
        "A,B,…", "kinds: none, learned_1d, learned_2d, relative, sincos2d (positions)"
    )
    layers: Values = option("A,B,…", "layers that add positions: stem, every, shared (positions)")

    pools: Values = option("A,B,…", "kinds of pooling: token, gap, map (pooling)")
    learning_rates: Values = option("A,B,…", "learning rates at the peak (pooling)")

    shapes: Values = option(
        "A,B,…", "factors: base; depth:2, width:0.5, mlp:2, patch:0.5, all:2 (shape)"
    )

    optimizers: Values = option("A,B,…", "optimisers: adam, sgd (optimizer)")
    rate_factors: Values = option(
        "A,B,…", "factors of the learning rate, searched for each (optimizer)"
    )

    image_sizes: Values = option("A,B,…", "image sizes in pixels (speed)")

    seeds: Values = option("A,B,…", "random seeds: their mean and extremes are shown")

    def suggest_next(self) -> str:
        """Return the figure of the runs."""
        return format_command("plot", self.workdir)

    def run(self) -> None:
        from vit_jax.tools.sweeps.catalogue import STUDIES

        require_known("NAME", self.name, STUDIES)
        study = STUDIES[self.name]
        if study.is_trained and not self.dry_run:
            self.reject_ineffective(["topology"], f"on {self.name} without --dry-run")
        if self.name != "scaling":
            self.reject_ineffective(["paper"], f"on {self.name}, only on scaling")
        if self.dry_run or self.topology is not None:
            use_no_accelerator()

        from vit_jax.tools.sweeps.grid import make_grid, plan_on_machine

        grid = make_grid(study, self.config, self.overrides, self._choose_axes())
        if self.topology is not None and not study.is_trained:
            grid = plan_on_machine(grid, self.topology)
        self.perform(grid, with_paper=self.paper)

    def _choose_axes(self) -> dict[str, Any]:
        """Return the values of the axes that the command gives, and measures."""
        names = set(type(self).__annotations__) - {"name", "topology", "paper"}
        return self.collect_values(*names)


VTAB_RECIPE = "finetune:any,vtab"
_EVALUATED_ONCE = "nothing: a run is evaluated once, at its end"
_KEPT_ONCE = "nothing: a run keeps its last checkpoint"
_SET_OTHERWISE = {  # fields of the recipe that a sweep sets for each of its runs
    "data": "--tasks= and --suite=",
    "init_from": "the weights, in front of the options",
    "total": "--lengths=",
    "schedule.warmup": "--lengths=",
    "schedule.learning_rate": "--learning_rates=",
    "search.learning_rates": "--learning_rates=",
    "search.validation_fraction": "the validation split of a suite's tasks",
    "input.train_split": "the tasks of a suite",
    "input.test_split": "the tasks of a suite",
    "input.data_dir": "--data_dir=",
    "evaluation.every": _EVALUATED_ONCE,
    "stop_early.patience": _EVALUATED_ONCE,
    "checkpoint.keep_latest": _KEPT_ONCE,
    "checkpoint.keep_best": _KEPT_ONCE,
}


def _read_lengths(text: str) -> tuple[tuple[int, int], ...]:
    lengths = []
    for pair in text.split(","):
        steps, _, warmup = pair.partition(":")
        if not steps.isdecimal() or not warmup.isdecimal() or int(warmup) >= int(steps):
            raise ValueError(
                "must be pairs STEPS:WARMUP, each warm-up shorter than its run. "
                "Use 500:100,2500:200"
            )
        lengths.append((int(steps), int(warmup)))
    return tuple(lengths)


@verb(
    "ViT-B_16.npz --tasks=all --workdir=runs/vtab",
    "runs/imagenet --tasks=natural --workdir=runs/vtab --available --index=0 --count=4",
)
class Vtab(Share, Overrides):
    """Fine-tune on the 19 tasks of VTAB-1k, or a custom suite: a table beside the paper's.

    Settings are tried on 800 images of a task and compared on 200; then the best is trained on all
    1,000 and tested.
    """

    weights: str = argument(
        "WEIGHTS",
        "weights: a workdir, .npz, .safetensors, a folder with weights, or hf://owner/name",
    )
    tasks: str = option(
        "TASKS", "tasks: all, a group (natural, specialized, structured), or names", REQUIRED
    )
    workdir: str = option(
        "FOLDER", "folder of the runs and the table; the same command resumes them", REQUIRED
    )

    data_dir: str | None = option("FOLDER", "folder of TFDS datasets", reads_bucket=True)

    available: bool = switch("skip tasks whose data cannot be opened")

    dry_run: bool = switch("print the plan; run nothing")

    sweep: Literal["shared", "per_task"] = option(
        "", "one setting for all tasks, or one for each", "shared"
    )
    learning_rates: tuple[Positive, ...] | None = option(
        "X,…", "learning rates to try; default: the recipe's and 0.3 of it"
    )
    lengths: Annotated[tuple[tuple[int, int], ...] | None, _read_lengths] = option(
        "STEPS:WARMUP,…", "lengths to try, each with its warm-up"
    )

    suite: str | None = option("package.module:name", "custom suite of tasks")
    config: str = option("RECIPE", "recipe of the fine-tuning", VTAB_RECIPE)

    def suggest_next(self) -> str:
        """Return the state of the runs."""
        return format_command("status", self.workdir)

    def run(self) -> None:
        from vit_jax.tools.sweeps.grid import reject_overrides

        reject_overrides(self.overrides, _SET_OTHERWISE)
        _run_together(self._run, self.workdir)

    def _run(self) -> None:
        from vit_jax import hosts
        from vit_jax.tools.sweeps.vtab import run_sweep
        from vit_jax.tools.sweeps.vtab_table import plan_to_markdown, write_results

        sweep = self._build_sweep()
        if not self.dry_run:
            run_sweep(sweep)
        if hosts.is_first():
            text = plan_to_markdown(sweep) if self.dry_run else write_results(sweep)
            print(text, end="", flush=True)

    def _build_sweep(self) -> "vtab_sweeps.Sweep":
        """Return the sweep; the data of every task can be opened."""
        from vit_jax.tools.sweeps.grid import require_different
        from vit_jax.tools.sweeps.suite import load_suite, select_tasks
        from vit_jax.tools.sweeps.vtab import (
            LENGTHS,
            Sweep,
            build_settings,
            choose_learning_rates,
            find_unavailable,
        )

        index, count = self.share
        config = self._load()
        requested = select_tasks(load_suite(self.suite), self.tasks)
        problems = find_unavailable(requested, config)
        tasks = tuple(task for task in requested if task not in problems)
        self._report_unavailable(problems, len(requested))

        rates = self.learning_rates or choose_learning_rates(config)
        lengths = self.lengths or LENGTHS
        require_different("--learning_rates=", rates)
        require_different("--lengths=", [steps for steps, _ in lengths])
        return Sweep(
            requested=requested,
            tasks=tasks,
            local_tasks=tasks[index::count],
            settings=build_settings(list(rates), list(lengths)),
            is_shared=self.sweep == "shared",
            config=config,
            folder=expand_path(self.workdir).absolute(),
        )

    def _load(self) -> "FinetuneConfig":
        """Return the config of the fine-tuning, with the weights and the rule of their family."""
        from vit_jax.config import FinetuneConfig, load_recipe

        overrides = list(self.overrides)
        if self.data_dir is not None:
            overrides.append(f"--config.input.data_dir={self.data_dir}")
        overrides.append(f"--config.init_from={self.weights}")
        chosen = list(overrides)
        for rate in self.learning_rates or ():
            chosen.append(f"--config.schedule.learning_rate={rate}")
        config = load_recipe(complete_rule(self.config, chosen, joins=True), overrides)
        if not isinstance(config, FinetuneConfig):
            raise UsageError(
                f"--config={self.config}: must be a recipe for fine-tuning. Use {VTAB_RECIPE}."
            )
        return config

    def _report_unavailable(self, problems: "Mapping[Task, str]", num_requested: int) -> None:
        """Note the tasks whose data cannot be opened.

        Raises:
          UsageError: there are such tasks, and the others must not run without them.
        """
        from vit_jax import hosts

        if not problems:
            return
        has_others = len(problems) < num_requested
        if has_others and self.available:
            if hosts.is_first():
                for task, problem in problems.items():
                    note(f"{task.name} is skipped. {problem}")
            return

        lines = [f"  {task.name}: {problem}" for task, problem in problems.items()]
        if has_others:
            lines.append("With --available the other tasks are run.")
        raise UsageError(
            "\n".join(
                [f"Data of {len(problems)} of {num_requested} tasks cannot be opened:", *lines]
            )
        )
