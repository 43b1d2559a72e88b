"""First contact with an accelerator: are its results right, twice the same, and as fast as planned?

All devices of one process. On the CPU the same is done in small. Each check has what it needs from
a `Trial`, which compiles a network's step once; one that fails does not stop the others.
"""

import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Sequence

import cv2
import jax
import numpy as np

from vit_jax.config import RunConfig, load_recipe
from vit_jax.data.sources import open_source
from vit_jax.tools.machine import numerics, together
from vit_jax.tools.machine.bench import (
    Part,
    Training,
    TrainStep,
    random_batch,
    time_input,
    time_step,
)
from vit_jax.tools.machine.checks import GIB, Check, Finding
from vit_jax.tools.machine.planned import Planned, plan
from vit_jax.tools.plan.dataset import IMAGENET
from vit_jax.train.assemble import architecture_of, assemble
from vit_jax.train.assembly import Assembly
from vit_jax.train.profiling import peak_flops, use_compilation_cache
from vit_jax.train.state import TrainState, items_of

STEPS = 10  # of each of two equal trainings
SLOWER, LARGER = (
    1.5,
    1.25,
)  # than planned, from where a check fails; plans miss what is in bench/PLANS.md
IMAGES = 256
ENCODED = 16  # JPEGs of the input, and how many of them differ
JPEG_SIZE = (375, 500)
JPEG_QUALITY = 90
NOISE = 20.0  # about 100 kB, as ImageNet's


@dataclasses.dataclass(frozen=True)
class Scale:
    """Networks to examine: for accelerators, or a small one."""

    about: str
    networks: tuple[str, ...]
    images: int  # of each device in a step
    num_heads: int  # of attention
    fields: tuple[str, ...]  # of the recipe, changed


RECIPE = "pretrain_imagenet1k:ViT-{}"
_LOOP = (
    "model.remat=dots",
    "model.scan_unroll=1",
)  # unrolled layers, and dropout on TPUs, compile for minutes
COMPLETE = Scale(
    "S/16 and B/16, layers in a loop, remat=dots, no dropout, 128 images on each device",
    *(("S/16", "B/16"), 128, 12, (*_LOOP, "model.dropout_fraction=0.0")),
)
SMALL = Scale(
    "no accelerator, so in small on the CPU: Ti/16 with 2 layers, 16 images of 64x64 pixels on each device",
    *(("Ti/16",), 16, 2, (*_LOOP, "model.depth=2", "input.image_size=64,64")),
)


class Trial:
    """A recipe's training step on all devices, compiled once for several checks."""

    def __init__(self, name: str, scale: Scale):
        self.name = name
        self.recipe = RECIPE.format(name)
        fields = (*scale.fields, f"global_batch={scale.images * jax.device_count()}")
        self.overrides = [f"--config.{field}" for field in fields]

    @functools.cached_property
    def config(self) -> RunConfig:
        return load_recipe(self.recipe, self.overrides)

    @functools.cached_property
    def run(self) -> Assembly:
        architecture = architecture_of(self.config, IMAGENET.num_classes)
        return assemble(
            self.config, architecture, num_examples=IMAGENET.num_examples, devices=jax.devices()
        )

    @functools.cached_property
    def step(self) -> TrainStep:
        """The compiled step."""
        return self.run.compile_train_step()

    @functools.cached_property
    def part(self) -> Part:
        """The times of the step."""
        return time_step(self.run, self.step, together.STEPS)

    def train(self) -> tuple[TrainState, float]:
        """Take `STEPS` steps from the start; return the state and the last loss."""
        training = Training(self.run, self.step)
        batch = jax.device_put(
            random_batch(self.run, self.config.global_batch), self.run.batch_sharding
        )
        for _ in range(STEPS):
            metrics = training.advance(batch)
        return training.state, float(metrics["train_loss"])

    @functools.cached_property
    def trained(self) -> tuple[TrainState, float]:
        """Return the first result of `train`."""
        return self.train()


def checks(workdir: pathlib.Path | None) -> dict[str, Check]:
    """Return the checks in the order of the report; checkpoints go to the workdir, else to a temporary folder."""
    scale = SMALL if jax.default_backend() == "cpu" else COMPLETE
    use_compilation_cache(True)  # attention auto has the programs of another form
    trials = [Trial(name, scale) for name in scale.networks]
    forms = {
        f"attention {form}": functools.partial(numerics.attention, form, scale.num_heads)
        for form in numerics.FORMS
    }
    return {
        "hardware": lambda: Finding(scale.about),
        **forms,
        "layer norm": numerics.layer_norm,
        "group norm": numerics.group_norm,
        "determinism": functools.partial(determinism, trials[0]),
        "restored state": functools.partial(restored_state, trials[0], workdir),
        **{f"step {trial.name}": functools.partial(step, trial) for trial in trials},
        "input": functools.partial(input_speed, trials),
    }


def determinism(trial: Trial) -> Finding:
    """Train twice from the same seed on the same images, and compare all parameters and moments."""
    (first, loss), (second, _) = trial.trained, trial.train()
    found = f"two trainings of {STEPS} steps, {trial.name}: loss {loss:.6f}"
    if not np.isfinite(loss):
        return Finding(found, "the loss is not finite: see the errors above, and report this")
    if changed := together.changed_arrays(first, second):
        all_arrays = len(jax.tree.leaves(first))
        remedy = "runs cannot be repeated or resumed to the bit; on GPUs XLA_FLAGS=--xla_gpu_deterministic_ops=true"
        return Finding(
            f"{found}; {len(changed)} of {all_arrays} arrays differ", remedy, {"loss": loss}
        )
    return Finding(f"{found}, equal to the bit", figures={"loss": loss})


def restored_state(trial: Trial, workdir: pathlib.Path | None) -> Finding:
    """Save the trained state as a run does, and compare what is restored."""
    state, _ = trial.trained
    with (
        together.folder_in(workdir)
        if workdir
        else tempfile.TemporaryDirectory(prefix="vit_jax_doctor_") as folder
    ):
        stored = together.store(
            pathlib.Path(folder), items_of(state), items_of(trial.run.abstract_state)
        )
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    figures = {"write_seconds": stored.write_seconds, "read_seconds": stored.read_seconds}
    same = "" if stored.changed else ", equal to the bit"
    return Finding(f"{trial.name}: {stored.found(size)}{same}", stored.remedy, figures)


def step(trial: Trial) -> Finding:
    """Time and memory of the training step, beside those of a plan for these devices."""
    planned = plan(trial.recipe, trial.overrides, jax.devices())
    memory = _memory(trial.step)
    figures = trial.part.figures()
    speed = figures["images_per_second"]
    if (peak := peak_flops()) is not None:
        figures["mfu"] = speed * trial.run.training_flops_per_image / peak
    statistics = jax.local_devices()[0].memory_stats() or {}
    sizes = {"memory_bytes": memory, "peak_bytes": statistics.get("peak_bytes_in_use")}
    sizes |= {"planned_bytes": planned.num_bytes}
    figures |= {key: float(size) for key, size in sizes.items() if size is not None}
    figures |= {} if planned.seconds is None else {"planned_milliseconds": 1000 * planned.seconds}
    return Finding(describe(figures, planned), compare(figures, planned), figures)


def describe(figures: dict[str, float], planned: Planned) -> str:
    """Return the line of a step."""
    low = figures["lower_quartile_milliseconds"]
    high = figures["upper_quartile_milliseconds"]
    parts = [f"{figures['median_milliseconds']:.2f} ms ({low:.2f} to {high:.2f})"]
    parts += [f"{figures['images_per_second']:,.0f} images/s"]
    parts += [f"MFU {figures['mfu']:.1%}"] if "mfu" in figures else []
    parts += (
        [f"{figures['memory_bytes'] / GIB:.2f} GiB a device"] if "memory_bytes" in figures else []
    )
    parts += (
        [f"peak of this process {figures['peak_bytes'] / GIB:.2f}"]
        if "peak_bytes" in figures
        else []
    )
    if planned.seconds is None:
        return f"{', '.join(parts)}; no figure of plan: {planned.basis}"
    ratio = figures["median_milliseconds"] / (1000 * planned.seconds)
    size = "" if planned.num_bytes is None else f", {planned.num_bytes / GIB:.2f} GiB"
    beside = f"plan ({planned.basis}) {1000 * planned.seconds:.2f} ms{size}"
    return f"{', '.join(parts)}; {beside}: {ratio:.2f} x the time"


def compare(figures: dict[str, float], planned: Planned) -> str:
    """Return what to do where a step is slower or larger than it was compiled to be; arithmetic is too rough for it."""
    if not planned.is_compiled or planned.seconds is None:
        return ""
    if figures["median_milliseconds"] > SLOWER * 1000 * planned.seconds:
        return (
            f"more than {SLOWER} x the planned time: look for other programs and low clocks (nvidia-smi, tpu-info); if "
            "there are none, the plan is wrong: report this"
        )
    if (
        planned.num_bytes is not None
        and figures.get("memory_bytes", 0.0) > LARGER * planned.num_bytes
    ):
        return f"more than {LARGER} x the planned memory: the plan is wrong: report this"
    return ""


def input_speed(trials: Sequence[Trial]) -> Finding:
    """Compare the input of JPEGs, decoded and cropped as in training, with the steps."""
    with tempfile.TemporaryDirectory(prefix="vit_jax_doctor_") as folder:
        write_images(pathlib.Path(folder))
        run = trials[0].run
        source = open_source(f"folder:{folder}", "all", run.config.input, run.config.seed)
        speed = time_input(run, source, together.STEPS).images_per_second
    height, width = JPEG_SIZE
    needed = {trial.name: trial.part.images_per_second for trial in trials}
    found = f"{speed:,.0f} images/s from JPEGs of {height}x{width} in memory"
    found += "".join(f", {name} takes {least:,.0f}" for name, least in needed.items())
    return Finding(
        found, together.slow_input(speed, min(needed.values())), {"images_per_second": speed}
    )


def write_images(folder: pathlib.Path) -> None:
    """Write JPEGs of two classes: smooth colours with noise."""
    rng = np.random.default_rng(0)
    (height, width) = JPEG_SIZE
    files = list[bytes]()
    for _ in range(ENCODED):
        smooth = cv2.resize(
            rng.uniform(0, 255, (6, 8, 3)), (width, height), interpolation=cv2.INTER_CUBIC
        )
        noisy = np.clip(smooth + rng.normal(0, NOISE, smooth.shape), 0, 255).astype(np.uint8)
        files.append(
            cv2.imencode(".jpg", noisy, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1].tobytes()
        )
    for number in range(IMAGES):
        path = folder / f"class{number % 2}" / f"{number:04}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(files[number % ENCODED])


def _memory(step: TrainStep) -> int | None:
    """Return the bytes that XLA gives a program on each device, counted as a plan counts them."""
    sizes = step.memory_analysis()  # type: ignore[attr-defined]
    if sizes is None:
        return None
    used = (
        sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + sizes.generated_code_size_in_bytes
    )
    return int(used + sizes.output_size_in_bytes - sizes.alias_size_in_bytes)
