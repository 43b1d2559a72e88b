"""Verbs for training: pretrain, finetune, replay, lr-range, show, bench, doctor."""

import contextlib
import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vit_jax.cli.outputs import output_file
from vit_jax.cli.stop import Terminated, joined, leave
from vit_jax.cli.verb import ALLOW_CODE, RECIPE, fields_of_recipes, verb
from vit_jax.cli.words import Given, UsageError, fail, positive, whole
from vit_jax.files import expanded, printable_lines

_OUT_OF_MEMORY = """\
The device has too little memory. Remedies, the cheapest first: optimizer.accumulation_steps (smaller micro-batches),
sharding.parameters=fsdp (parameters split over the devices), model.remat=dots or full (compute again, not keep), a \
smaller global_batch. JAX says:"""


_RUN = RECIPE | {
    "--workdir=FOLDER": "of checkpoints and results; the same command goes on after an interruption",
    "[--parameters]": "list every parameter of the network first, not its parts alone",
    "[--check]": "build the abstract network, optimiser and sharding, open data and weights, print one line and end; "
    "no device is used",
    "[--devices=N]": "with --check: of all machines of the run; the smallest possible number by default",
    "[--slices=N]": "with --check: TPU slices, or nodes of GPUs, that these devices form",
    "[--remote=FOLDER]": "with --check: a folder that only the machines of the run have; its paths are printed alone",
    "[--doctor]": "examine the machines first, as the verb doctor does, and start only where all is well",
}


@verb(
    _RUN,
    "--config=digits --workdir=runs/digits",
    "--config=pretrain_imagenet1k:ViT-B/16 --workdir=runs/imagenet --config.seed=1",
)
def pretrain(given: Given) -> None:
    """Train from scratch, or resume from the workdir's last checkpoint."""
    with preemptible():
        from vit_jax.config import PretrainConfig

        _train("pretrain", "finetune", PretrainConfig, given)


@verb(
    _RUN,
    "--config=finetune:any,own --workdir=runs/mine --config.init_from=ViT-B_16.npz --config.data=folder:my-images",
    "--config=finetune:ViT-B/16,cifar10 --workdir=runs/cifar10 --config.init_from=runs/imagenet",
)
def finetune(given: Given) -> None:
    """Fine-tune weights on other images, or resume.

    --config.init_from=WEIGHTS names the weights: a workdir, .npz, .safetensors or hf://owner/name.
    """
    with preemptible():
        from vit_jax.config import FinetuneConfig

        _train("finetune", "pretrain", FinetuneConfig, given)


@contextlib.contextmanager
def preemptible() -> Iterator[None]:
    """Say what SIGTERM means while a run imports, opens data or waits for others, before `train.interruption`."""
    try:
        yield
    except Terminated as error:
        leave(error, "stopped before the first step: there is nothing to save; the same command starts again")


def _train(verb: str, other: str, kind: type[Any], given: Given) -> None:
    from vit_jax.config import load_recipe

    options, overrides, _ = given
    overrides += ["--config.logging.parameters=True"] if "parameters" in options else []
    config, workdir = load_recipe(options["config"], overrides), options["workdir"]
    if not isinstance(config, kind):
        recipe = options["config"]
        raise UsageError(f"{recipe} is a recipe for {other}, not for {verb}: vit-jax {other} --config={recipe} …")
    _refuse_idle_holdout(config, overrides)
    if "check" in options:
        for name in ("data", "init_from") if verb == "finetune" else ("data",):
            if getattr(config, name) is None:
                raise UsageError(f"config.{name} is not set, and this recipe does not choose it: --config.{name}=…")
        _check(config, options)
        return
    if idle := [name for name in ("devices", "slices", "remote") if name in options]:
        raise UsageError(f"--{idle[0]}= has no effect without --check.")
    if "doctor" in options:
        _examine([f"--config={options['config']}", f"--workdir={workdir}", *overrides])
    train = getattr(importlib.import_module(f"vit_jax.train.{verb}"), verb)
    run_training(lambda: train(config, workdir), workdir)


def _check(config: Any, options: Mapping[str, str]) -> None:
    """Print what a run of the recipe would start with; no device is used."""
    os.environ["JAX_PLATFORMS"] = "cpu"

    from vit_jax.plan.check import check_start

    devices, slices = (whole(options, name) if name in options else None for name in ("devices", "slices"))
    remote = Path(options["remote"]) if "remote" in options else None
    lines = check_start(options["config"], config, num_devices=devices, num_slices=slices or 1, remote=remote)
    print(printable_lines("\n".join(lines)))


def _examine(words: Sequence[str]) -> None:
    """Run the verb doctor with these words in its own process, which frees the devices; end unless all is well."""
    doctor = subprocess.Popen([sys.executable, "-P", "-m", "vit_jax", "doctor", *words])
    try:
        code = doctor.wait()
    except KeyboardInterrupt:
        doctor.kill()
        raise
    if code == 1:
        fail("doctor found what is wrong; nothing was started. Without --doctor it would be.", 2)
    if code != 0:
        fail("doctor did not come to its end; nothing was started", code if code > 0 else 128 - code)


def _refuse_idle_holdout(config: Any, overrides: Sequence[str]) -> None:
    """An option for the hold-out without any effect is an error; a recipe may set it for other data."""
    given = [word for word in overrides if word.startswith("--config.input.holdout_fraction")]
    if not given or config.data is None:
        return
    from vit_jax.data.sources import holds_out

    if not holds_out(config.data, config.input):
        raise UsageError(
            f"{given[-1]}: without effect on {config.data}; only files without splits have a part that is held out for "
            "testing. Leave it out."
        )


def run_training(loop: Callable[[], object], workdir: str) -> None:
    """Run a training loop; convert its errors to one message and an exit code."""
    import jax

    from vit_jax.checkpoint import SaveError
    from vit_jax.data.pipeline import LostWorker
    from vit_jax.hosts import exits
    from vit_jax.train.lifecycle.interruption import Interrupted
    from vit_jax.train.lifecycle.lock import WorkdirLost

    try:
        loop()
    except Interrupted as interrupted:
        fail(str(interrupted), exits.PREEMPTED)
    except Terminated:
        raise
    except KeyboardInterrupt:
        fail(f"stopped at once; {_kept(workdir)}", exits.STOPPED)
    except (SaveError, LostWorker, WorkdirLost) as error:
        fail(str(error), exits.FAILED)
    except OSError as error:
        fail(f"{error.filename or workdir}: {error.strerror}; {_kept(workdir)}", exits.FAILED)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        fail(f"{_OUT_OF_MEMORY}\n{error}", exits.FAILED)


def _kept(workdir: str) -> str:
    """Say which checkpoint a run that ends now leaves behind."""
    from vit_jax.train.lifecycle.watchdog import newest_checkpoint

    step = newest_checkpoint(expanded(workdir))
    return "no checkpoint was written" if step is None else f"the last checkpoint, of step {step:,}, is kept"


@verb(
    {
        "WORKDIR": "of a run, ended or not; of a search also FOLDER/search/learning_rate=RATE",
        "[--step=N]": "from 1; by default the step that diverged",
    }
    | ALLOW_CODE,
    "runs/digits",
    "runs/digits --step=250",
)
def replay(given: Given) -> None:
    """Repeat one step of a run, the one that diverged or any other: norms by layer, the loss of each image.

    It begins at the newest checkpoint before the step and repeats the steps after it, to the bit on the same devices.
    WORKDIR/replay/step_N receives all figures and the state before the step; nothing else changes.
    """
    options = given.options
    step = whole(options, "step") if "step" in options else None

    from vit_jax import hosts
    from vit_jax.train.replay import replay

    def say(line: str) -> None:
        if hosts.is_first():
            print(line, flush=True)

    with joined():
        say(replay(options["WORKDIR"], step, allow_code=options.get("allow_code", ""), say=say).to_text())


@verb(
    RECIPE
    | {
        "[--output=FILE]": "lr_range.png by default; .svg and .pdf too, and all figures beside it in a .json",
        "[--low=1e-6]": "the first learning rate",
        "[--high=1]": "the last one, unless the loss diverges before",
        "[--steps=100]": "each with a higher rate than the one before",
    },
    "--config=digits",
    "--config=finetune:any,own --config.init_from=ViT-B_16.npz --config.data=folder:my-images --output=rates.png",
)
def lr_range(given: Given) -> None:
    """Find learning rates to try: a few steps of a recipe at rising rates, until the loss diverges.

    The range test of Smith (2017, arXiv:1506.01186), on this machine. It writes a picture with its numbers, no more.
    """
    options = {"output": "lr_range.png", "low": "1e-6", "high": "1", "steps": "100"} | given.options
    low, high, num_steps = positive(options, "low"), positive(options, "high"), whole(options, "steps")

    from vit_jax import drawing
    from vit_jax.config import load_recipe
    from vit_jax.files import write_atomically

    output, form = drawing.output_of(options["output"])
    output_file(options["output"])
    config = load_recipe(options["config"], given.overrides)

    from vit_jax.train import range_test

    test = range_test.run_range_test(config, low, high, num_steps)
    found = test.to_json()
    write_atomically(output, drawing.to_bytes(range_test.draw(test, options["config"]), form))
    write_atomically(output.with_suffix(".json"), json.dumps(found, indent=2) + "\n")
    suggestions: dict[str, float] = found["suggestions"]
    for reason, rate in suggestions.items():
        print(f"{rate:<9.2g}{reason}")
    print(f"try --config.schedule.learning_rate={min(suggestions.values()):.2g}, the lowest; a warm-up allows more")
    print(f"{output}, {output.with_suffix('.json').name}")


@verb(RECIPE, "--config=digits", "--config=finetune:ViT-B/16,cifar10 --config.seed=1", appendix=fields_of_recipes)
def show(given: Given) -> None:
    """Print every value of a recipe; with --help, describe all fields."""
    from vit_jax.config import load_recipe, to_text

    print(to_text(load_recipe(given.options["config"], given.overrides)), end="")


@verb(
    RECIPE
    | {
        "[--steps=20]": "to time",
        "[--data]": "time also the input, alone and with the step, and the complete loop",
        "[--json]": "print all figures as JSON",
    },
    "--config=digits --data",
    "--config=pretrain_imagenet1k:ViT-B/16 --config.global_batch=256",
)
def bench(given: Given) -> None:
    """Time a recipe's step, evaluation, inference, saves, input and loop on this machine."""
    from vit_jax.config import load_recipe

    options, overrides, _ = given
    num_steps = whole({"steps": "20"} | options, "steps")
    config = load_recipe(options["config"], overrides)

    from vit_jax.machine.bench import bench, to_text

    result = bench(config, num_steps=num_steps, with_data="data" in options)
    print(json.dumps(result, indent=2) + "\n" if "json" in options else to_text(result), end="")


@verb(
    {
        "[--workdir=FOLDER]": "tries a checkpoint there, too, and says how much room there is",
        "[--config=RECIPE[:ARGUMENT]]": "compares the speed of its input with that of its step, too",
        "[--config.SECTION.FIELD=VALUE]": "changes a value of the recipe",
        **ALLOW_CODE,
        "[--hardware]": "examine the devices, too, in minutes: numerics, determinism, speed and memory beside a plan",
        "[--json]": "print what each process found as JSON",
    },
    "--workdir=runs/digits --config=digits",
    "--hardware",
)
def doctor(given: Given) -> None:
    """Examine this machine, or all machines of a run: each line is good, or says what to do.

    Versions, driver, devices, memory, shared memory, disk, a compilation, an all-reduce, a checkpoint, speed. Start it
    as a run is started, in every process. It ends with code 1 where something is wrong.

    --hardware is for the first contact with an accelerator, by one process: attention and norms against float32, two
    equal trainings, a restored state, steps of S/16 and B/16 beside their plans, input. On the CPU it does so in small.
    """
    options, overrides, _ = given
    if overrides and "config" not in options:
        raise UsageError(f"{overrides[0]}: without effect without --config=RECIPE.")

    from vit_jax.config import load_recipe

    config = load_recipe(options["config"], overrides) if "config" in options else None

    from vit_jax import hosts
    from vit_jax.machine.doctor import ExaminationError, examine, lines

    found = []
    try:
        with joined():
            for findings in examine(options.get("workdir"), config, with_hardware="hardware" in options):
                found.append(findings)
                if hosts.is_first() and "json" not in options:
                    print(printable_lines("\n".join(lines(findings))), flush=True)
    except ExaminationError as error:
        fail(str(error), hosts.exits.FAILED)
    if hosts.is_first() and "json" in options:
        print(json.dumps([[dataclasses.asdict(finding) for finding in findings] for findings in found], indent=2))
    if not all(finding.is_good for findings in found for finding in findings):
        sys.exit(hosts.exits.FAILED)
