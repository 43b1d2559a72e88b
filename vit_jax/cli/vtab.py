"""The verb vtab: how well weights transfer to the tasks of VTAB-1k, or of a suite of one's own."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vit_jax.cli.training import preemptible, run_training
from vit_jax.cli.verb import ALLOW_CODE, SHARE, verb
from vit_jax.cli.words import Given, UsageError, positive, share
from vit_jax.files import expanded

if TYPE_CHECKING:
    from vit_jax.sweeps.vtab import Setting, Sweep

RECIPE = "finetune:any,vtab"
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
    "evaluation.every": "nothing: a run is evaluated once, at its end",
    "stop_early.patience": "nothing: a run is evaluated once, at its end",
    "checkpoint.keep_latest": "nothing: a run keeps its last checkpoint",
    "checkpoint.keep_best": "nothing: a run keeps its last checkpoint",
}


@verb(
    {
        "WEIGHTS": "a workdir, .npz, .safetensors, a folder with weights, or hf://owner/name",
        "--tasks=TASKS": "all, a group (natural, specialized, structured), or names",
        "--workdir=FOLDER": "of the runs and the table; the same command goes on after an interruption",
        "[--data_dir=FOLDER]": "of TFDS",
        "[--available]": "leave out tasks whose data are not there",
        "[--dry_run]": "print what would be run",
        "[--sweep=shared|per_task]": "whether one setting is chosen by the mean over the tasks, or one for each",
        "[--learning_rates=X,…]": "to try",
        "[--lengths=STEPS:WARMUP,…]": "to try",
        **SHARE,
        "[--suite=package.module:name]": "tasks of one's own",
        "[--config=RECIPE]": "of the fine-tuning, finetune:any,vtab by default",
        "[--config.SECTION.FIELD=VALUE]": "changes a value of the recipe",
        **ALLOW_CODE,
    },
    "ViT-B_16.npz --tasks=all --workdir=runs/vtab",
    "runs/imagenet --tasks=natural --workdir=runs/vtab --available --index=0 --count=4",
)
def vtab(given: Given) -> None:
    """Fine-tune on the 19 tasks of VTAB-1k, or a suite of one's own: a table beside the paper's.

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
    from vit_jax.train.interruption import Interrupted

    with hosts.ends_together(Interrupted):
        hosts.start()
        sweep = _sweep(options, overrides)
        if "dry_run" not in options:
            run_sweep(sweep)
        if hosts.is_first():
            print(plan_to_markdown(sweep) if "dry_run" in options else write_results(sweep), end="", flush=True)


def _sweep(options: Mapping[str, str], overrides: Sequence[str]) -> "Sweep":
    """What the words ask for; the data of every task can be opened."""
    import dataclasses

    from vit_jax import hosts
    from vit_jax.config import FinetuneConfig, load_recipe
    from vit_jax.sweeps.vtab import Sweep, unavailable
    from vit_jax.transfer.vtab.suite import load_suite, select_tasks

    index, count = share(options)
    recipe = options.get("config", RECIPE)
    data_dir = [f"--config.input.data_dir={options['data_dir']}"] if "data_dir" in options else []
    config = load_recipe(recipe, [*overrides, *data_dir])
    if not isinstance(config, FinetuneConfig):
        raise UsageError(f"{recipe} is a recipe for {type(config).__name__}, not for fine-tuning.")
    asked = select_tasks(load_suite(options.get("suite")), options["tasks"])
    problems = unavailable(asked, config)
    tasks = tuple(task for task in asked if task not in problems)
    if tasks and "available" in options:
        for task, problem in problems.items() if hosts.is_first() else ():
            print(f"note: {task.name} is left out. {problem}", file=sys.stderr, flush=True)
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
