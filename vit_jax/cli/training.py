"""Verbs for training: pretrain, finetune, replay, lr-range, bench, doctor."""

import contextlib
import dataclasses
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from vit_jax.cli.groups import (
    AllowedCode,
    LoraOption,
    StartedRecipe,
    complete_rule,
    use_no_accelerator,
)
from vit_jax.cli.options import (
    Options,
    Overrides,
    UsageError,
    argument,
    format_command,
    group,
    option,
    suggest_recipe,
    switch,
)
from vit_jax.cli.outputs import (
    describe_system_error,
    fail,
    note_conversion,
    reject_runs,
    resolve_output_file,
)
from vit_jax.cli.stop import Terminated, join_processes, leave
from vit_jax.cli.verbs import verb
from vit_jax.config.rules import Count, Positive, When
from vit_jax.storage.files import JsonObject, expand_path
from vit_jax.text.printable import printable_lines

if TYPE_CHECKING:
    from vit_jax.config import RunConfig
    from vit_jax.tools.plan.topology import Topology
    from vit_jax.tools.sweeps.range_test import RangeTest

_OUT_OF_MEMORY = """\
The device has too little memory. Remedies, the cheapest first: optimizer.accumulation_steps (smaller micro-batches),
sharding.parameters=fsdp (parameters split over the devices), model.remat=dots or full (recompute), a smaller \
global_batch. The error of JAX:"""

CHECKING = When("check")
_DATA_MEANING = "images: a folder, a .csv, .parquet or .tar, or data as in a recipe"
_REQUIRED_FIELDS = {"pretrain": ("data",), "finetune": ("data", "init_from")}


# Training.


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run(Overrides):
    config: str | None = option(
        "RECIPE[:ARGUMENT]",
        "recipe: digits, configs/digits.py, or a config as JSON; default: by the words",
    )
    workdir: str | None = option(
        "FOLDER",
        "folder of checkpoints and results; the same command resumes an interrupted run; default: "
        "runs/NAME, numbered if it is taken",
        reads_bucket=True,
    )

    parameters: bool = switch("list every parameter of the network first, not only its parts")

    check: bool = switch(
        "check the recipe, data and weights, print one line and end; no device is used"
    )
    devices: Annotated[Count | None, CHECKING] = option(
        "N", "number of devices of all machines; default: the smallest possible"
    )
    slices: Annotated[Count | None, CHECKING] = option(
        "N", "number of TPU slices, or nodes of GPUs"
    )
    remote: Annotated[str | None, CHECKING] = option(
        "FOLDER", "folder that exists on the run's machines only"
    )

    doctor: bool = switch(
        "examine the machines first, as the verb doctor does, and start only if all is well"
    )

    def complete(self, words: Sequence[str]) -> "_Run":
        """Return the options with recipe, workdir and overrides in the place of a short form."""
        weights = getattr(self, "weights", None)
        data = getattr(self, "data", None)
        if self.config is not None and self.workdir is not None and not (weights or data):
            return self
        if self.doctor:  # it needs the devices, which a choice by their memory takes
            raise UsageError(
                "--doctor: must be with --config= and --workdir=. Use --check in its place: it "
                "prints the command with both."
            )

        from vit_jax.cli.short_forms import complete_run

        with explain_preemption():
            if self.check:
                use_no_accelerator()
            completed = complete_run(
                self._verb,
                weights=weights,
                data=data,
                config=self.config,
                workdir=self.workdir,
                overrides=self.overrides,
                others=self.to_words(excluded=("config", "workdir", "overrides")),
                uses_devices=not self.check,
            )
        return dataclasses.replace(self, **completed._asdict())

    @property
    def _verb(self) -> str:
        return type(self).__name__.lower()

    def suggest_next(self) -> str:
        """Return the evaluation of the run, or after a check the run."""
        from vit_jax.config import load_recipe

        assert self.config is not None, "complete sets it"
        assert self.workdir is not None, "complete sets it"
        if self.check:
            options = [f"--config={self.config}", f"--workdir={self.workdir}"]
            return format_command(self._verb, *options, *self.overrides)
        config: RunConfig = load_recipe(self.config, self.overrides)
        if config.objective.kind == "masked_patch" or config.data is None:
            return format_command("status", self.workdir)
        return format_command("evaluate", self.workdir, config.data)

    def run(self) -> None:
        assert self.config is not None, "complete sets it"
        assert self.workdir is not None, "complete sets it"
        workdir = self.workdir
        with explain_preemption():
            verb = self._verb
            config = self._load(self.config)
            if self.doctor:
                _examine([f"--config={self.config}", f"--workdir={workdir}", *self.overrides])
            recipe = self._choose_rule(self.config, config)
            if recipe != self.config:
                config = self._load(recipe)
            if self.check:
                self._check(recipe, config, _REQUIRED_FIELDS[verb])
                return
            train = getattr(importlib.import_module(f"vit_jax.train.{verb}"), verb)
            run_training(lambda: train(config, workdir), workdir)

    def _load(self, recipe: str) -> "RunConfig":
        """Return the config, which is one for this verb."""
        from vit_jax.config import FinetuneConfig, PretrainConfig, load_recipe

        overrides = list(self.overrides)
        if self.parameters:
            overrides.append("--config.logging.parameters=True")
        config: RunConfig = load_recipe(recipe, overrides)
        kinds: dict[str, type[RunConfig]] = {"pretrain": PretrainConfig, "finetune": FinetuneConfig}
        if not isinstance(config, kinds.pop(self._verb)):
            (other,) = kinds
            raise UsageError(
                f"--config={recipe}: must be a recipe for {self._verb}. "
                f"Use vit-jax {other} --config={recipe} …"
            )
        _require_effective_holdout(config, self.overrides)
        note_conversion(recipe)
        return config

    def _choose_rule(self, recipe: str, config: "RunConfig") -> str:
        """Return the recipe with the rule for the family of the weights, if it leaves it open."""
        if self.check:
            use_no_accelerator()
        is_remote = config.init_from is not None and self._is_remote(config.init_from)
        if is_remote or self._verb != "finetune":
            return recipe
        return complete_rule(recipe, self.overrides, joins=not self.doctor)

    def _is_remote(self, path: str) -> bool:
        """Return True for a path that only the machines of the run have."""
        return self.remote is not None and expand_path(path).is_relative_to(self.remote)

    def _check(self, recipe: str, config: "RunConfig", required: Sequence[str]) -> None:
        """Print what a run of the recipe would start with; no device is used."""
        from vit_jax.tools.plan.preflight import check_start

        for name in required:
            if getattr(config, name) is None:
                raise UsageError(
                    f"config.{name}=None: must be set for this recipe. Add --config.{name}=…"
                )
        lines = check_start(
            recipe,
            config,
            num_devices=self.devices,
            num_slices=self.slices or 1,
            remote=None if self.remote is None else Path(self.remote),
        )
        print(printable_lines("\n".join(lines)))


@verb(
    "my-images",
    "--config=pretrain_imagenet1k:ViT-B/16 --workdir=runs/imagenet --config.seed=1",
)
class Pretrain(_Run):
    """Train from scratch, or resume from the workdir's last checkpoint.

    With DATA alone the recipe suits the number of images. The choices are printed as a command.
    """

    data: str | None = argument("DATA", _DATA_MEANING, None, reads_bucket=True)


@verb(
    "ViT-B_16.npz my-images",
    "--config=finetune:ViT-B/16,cifar10 --workdir=runs/cifar10 --config.init_from=runs/imagenet",
)
class Finetune(_Run, LoraOption):
    """Fine-tune weights on other images, or resume.

    Without --config the recipe suits the weights, the length the data, and LoRA or all parameters
    the memory. The choices are printed as a command.
    """

    weights: str | None = argument(
        "WEIGHTS",
        "weights: a workdir, .npz, .safetensors, a folder with weights, or hf://owner/name",
        None,
        reads_bucket=True,
    )
    data: str | None = argument("DATA", _DATA_MEANING, None, reads_bucket=True)

    def complete(self, words: Sequence[str]) -> "_Run":
        """Return the options without a short form, and with LoRA as overrides."""
        options = self
        if self.lora is not None:
            with explain_preemption():
                recipe = self.config
                if recipe is not None:
                    recipe = self._choose_rule(recipe, self._load(recipe))
                options = dataclasses.replace(self, config=recipe).expand_lora(recipe)
        return _Run.complete(options, words)


@contextlib.contextmanager
def explain_preemption() -> Iterator[None]:
    """Explain SIGTERM while a run imports, opens data or waits, before `train.interruption` does."""
    try:
        yield
    except Terminated as error:
        leave(
            error,
            "stopped before the first step: there is nothing to save; repeat the command",
        )


def _examine(words: Sequence[str]) -> None:
    """Run the verb doctor with these words in a process, which frees the devices.

    The program ends unless all is well.
    """
    doctor = subprocess.Popen([sys.executable, "-P", "-m", "vit_jax", "doctor", *words])
    try:
        code = doctor.wait()
    except KeyboardInterrupt:
        doctor.kill()
        raise
    if code == 1:
        fail("doctor found a problem; nothing was started. Solve it, or leave --doctor out.", 2)
    if code != 0:
        exit_code = code if code > 0 else 128 - code
        fail("doctor was interrupted; nothing was started", exit_code)


def _require_effective_holdout(config: "RunConfig", overrides: Sequence[str]) -> None:
    """Raise UsageError for a hold-out of the command line without effect.

    A recipe may set a hold-out for other data.
    """
    from vit_jax.data.sources import holds_out

    words = [word for word in overrides if word.startswith("--config.input.holdout_fraction")]
    if words and config.data is not None and not holds_out(config.data, config.input):
        raise UsageError(
            f"{words[-1]}: has no effect on {config.data}, which has splits. Leave it out."
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
        fail(f"stopped at once; {_describe_checkpoint(workdir)}", exits.STOPPED)
    except (SaveError, LostWorker, WorkdirLost) as error:
        fail(str(error), exits.FAILED)
    except OSError as error:
        problem = describe_system_error(error, workdir)
        fail(f"{problem}; {_describe_checkpoint(workdir)}", exits.FAILED)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        fail(f"{_OUT_OF_MEMORY}\n{error}", exits.FAILED)


def _describe_checkpoint(workdir: str) -> str:
    """Return which checkpoint a run that ends now leaves behind."""
    from vit_jax.train.lifecycle.watchdog import newest_checkpoint

    step = newest_checkpoint(expand_path(workdir))
    if step is None:
        return "no checkpoint was written"
    return f"the last checkpoint, of step {step:,}, is kept"


# Diagnosis of a run.


@verb("runs/digits", "runs/digits --step=250")
class Replay(Options):
    """Repeat one step of a run, the one that diverged or any other: norms by layer, the loss of each image.

    It begins at the newest checkpoint before the step and repeats the steps after it, to the bit on
    the same devices. WORKDIR/replay/step_N receives all figures and the state before the step;
    nothing else changes.
    """

    workdir: str = argument(
        "WORKDIR", "workdir of a run, or of a trial: FOLDER/search/learning_rate=RATE"
    )

    step: Count | None = option("N", "step, counted from 1; default: the step that diverged")
    weights: AllowedCode = group(AllowedCode)

    def suggest_next(self) -> str:
        """Return the page of the run."""
        return format_command("report", self.workdir)

    def run(self) -> None:
        from vit_jax.tools.inspection.replay import replay
        from vit_jax.train.series import say

        with join_processes():
            allow_code = self.weights.allow_code or ""
            result = replay(self.workdir, self.step, allow_code=allow_code, say=say)
            say(result.to_text())


@verb(
    "--config=digits",
    "--config=finetune:any,own --config.init_from=ViT-B_16.npz --config.data=folder:my-images --output=rates.png",
)
class LrRange(StartedRecipe):
    """Find learning rates to try: a few steps of a recipe at rising rates, until the loss diverges.

    The range test of Smith (2017, arXiv:1506.01186), on this machine. It writes a figure and its
    numbers.
    """

    output: str = option(
        "FILE",
        "figure: a .png, .svg or .pdf file; a .json beside it has its numbers",
        "lr_range.png",
    )

    low: Positive = option("X", "first learning rate", 1e-6)
    high: Positive = option("X", "last learning rate, unless the loss diverges before", 1.0)
    steps: Count = option("N", "number of steps, each with a higher rate than the one before", 100)

    def suggest_next(self) -> str:
        """Return the run with a rate in the place of RATE."""
        return f"{self.suggest_run()} --config.schedule.learning_rate=RATE"

    def run(self) -> None:
        from vit_jax.tools.figures import drawing

        output, form = drawing.resolve_output(self.output)
        resolve_output_file(self.output)
        reject_runs(output.with_suffix(".json"), f"--output={self.output}")
        config = self.load()

        from vit_jax.tools.sweeps.range_test import run_range_test

        test = run_range_test(config, self.low, self.high, self.steps)
        suggestions = test.suggestions()
        self._write(test, output, form)
        for reason, rate in suggestions.items():
            print(f"{rate:<9.2g}{reason}")
        lowest = min(suggestions.values())
        print(
            f"try --config.schedule.learning_rate={lowest:.2g}, the lowest; a warm-up allows more"
        )
        print(f"{output}, {output.with_suffix('.json').name}")

    def _write(self, test: "RangeTest", output: Path, form: str) -> None:
        from vit_jax.storage.files import write_atomically
        from vit_jax.tools.figures import drawing
        from vit_jax.tools.sweeps.range_test import draw

        write_atomically(output, drawing.to_bytes(draw(test, self.config), form))
        figures = json.dumps(test.to_json(), indent=2)
        write_atomically(output.with_suffix(".json"), figures + "\n")


# Machines.


@verb("--config=digits --data", "--config=pretrain_imagenet1k:ViT-B/16 --config.global_batch=256")
class Bench(StartedRecipe):
    """Time a recipe's step, evaluation, inference, saves, input and loop on this machine."""

    steps: Count = option("N", "number of steps to time", 20)
    data: bool = switch("time also the input, alone and with the step, and the complete loop")
    json: bool = switch("print all figures as JSON")

    def suggest_next(self) -> str:
        """Return the run that was timed."""
        return self.suggest_run()

    def run(self) -> None:
        config = self.load()

        from vit_jax.tools.machine.bench import bench, to_text

        result = bench(config, num_steps=self.steps, with_data=self.data)
        if self.json:
            print(json.dumps(result, indent=2))
        else:
            print(to_text(result), end="")


@verb("--workdir=runs/digits --config=digits", "--hardware")
class Doctor(Overrides):
    """Examine this machine, or all machines of a run: each line is good, or says what to do.

    Versions, driver, devices, memory, shared memory, disk, a compilation, an all-reduce, a
    checkpoint, speed. Start it like a run, in every process. It ends with code 1 if there is a
    problem.

    --hardware is for the first contact with an accelerator, by one process: attention and norms
    against float32, two equal trainings, a restored state, steps of S/16 and B/16 beside their
    plans, input. On a CPU it uses small sizes.
    """

    workdir: str | None = option(
        "FOLDER", "write a checkpoint to this folder, too, and report its free space"
    )

    config: str | None = option(
        "RECIPE[:ARGUMENT]", "compare the speeds of this recipe's input and step, too"
    )
    topology: Annotated[str | None, When("config")] = option(
        "NAME",
        "machine, as in `plan`: compare the input with the step planned for it instead",
    )

    hardware: bool = switch(
        "examine the devices in minutes: numerics, determinism, speed and memory"
    )
    json: bool = switch("print the findings of each process as JSON")

    def suggest_next(self) -> str:
        """Return the run that the machine is ready for."""
        if self.config is None:
            return format_command("pretrain", "digits")
        return suggest_recipe(self.config, self.overrides, self.workdir)

    def run(self) -> None:
        config = self._load()

        from vit_jax import hosts
        from vit_jax.tools.machine.doctor import ExaminationError
        from vit_jax.tools.plan.topology import parse_topology

        topology = None
        if self.topology is not None:
            topology = parse_topology(self.topology)
        try:
            with join_processes():
                is_good = self._examine(config, topology)
        except ExaminationError as error:
            fail(str(error), hosts.exits.FAILED)
        if not is_good:
            sys.exit(hosts.exits.FAILED)

    def _load(self) -> "RunConfig | None":
        if self.config is None:
            self.reject_ineffective(["overrides"], "without --config=RECIPE")
            return None

        from vit_jax.config import load_recipe

        config: RunConfig = load_recipe(self.config, self.overrides)
        return config

    def _examine(self, config: "RunConfig | None", topology: "Topology | None") -> bool:
        """Print the findings; return True if there is no problem."""
        from vit_jax import hosts
        from vit_jax.tools.machine.doctor import examine, format_findings

        examination = examine(self.workdir, config, topology=topology, with_hardware=self.hardware)
        report = []
        is_good = True
        for name, findings in examination:
            rows: list[JsonObject] = []
            for finding in findings:
                rows.append({"name": name} | dataclasses.asdict(finding))
                is_good &= finding.is_good
            report.append(rows)
            if hosts.is_first() and not self.json:
                print(printable_lines("\n".join(format_findings(name, findings))), flush=True)
        if hosts.is_first() and self.json:
            print(json.dumps(report, indent=2))
        return is_good
