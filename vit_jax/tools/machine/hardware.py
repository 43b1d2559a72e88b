"""First contact with an accelerator: are its results right, reproducible, and as fast as planned?

All devices of one process are examined. On the CPU the checks are the same with a small network.
Each check takes its parts from a `Trial`, which compiles a network's step once. A check that fails
does not stop the others.
"""

import contextlib
import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Mapping, Sequence

import cv2
import jax
import numpy as np

from vit_jax.config import RunConfig, load_recipe
from vit_jax.data.sources import open_source
from vit_jax.storage.files import use_compilation_cache
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
from vit_jax.train.assemble import assemble
from vit_jax.train.assembly import Assembly
from vit_jax.train.profiling import peak_flops
from vit_jax.train.state import TrainState, items_of
from vit_jax.train.state_builder import architecture_of

STEPS = 10  # steps of each of two equal trainings
# Ratios to the plan, above which a check fails. `bench/PLANS.md` states what plans do not include.
SLOWER = 1.5
LARGER = 1.25
IMAGES = 256
ENCODED = 16  # different JPEGs among the images of the input
JPEG_SIZE = (375, 500)
JPEG_QUALITY = 90
NOISE = 20.0  # gives about 100 kB, as in ImageNet


@dataclasses.dataclass(frozen=True)
class Scale:
    """Networks to examine: for accelerators, or a small one.

    Attributes:
      about: a description for the report.
      networks: names of networks.
      images: number of images of each device in a step.
      num_heads: number of heads of attention.
      fields: fields of the recipe that are overridden.
    """

    about: str
    networks: tuple[str, ...]
    images: int
    num_heads: int
    fields: tuple[str, ...]


RECIPE = "pretrain_imagenet1k:ViT-{}"
# Unrolled layers, and dropout on TPUs, compile for minutes.
_LOOP = ("model.remat=dots", "model.scan_unroll=1")
COMPLETE = Scale(
    about="S/16 and B/16, layers in a loop, remat=dots, no dropout, 128 images on each device",
    networks=("S/16", "B/16"),
    images=128,
    num_heads=12,
    fields=(*_LOOP, "model.dropout_fraction=0.0"),
)
SMALL = Scale(
    about="no accelerator, so in small on the CPU: Ti/16 with 2 layers, "
    "16 images of 64x64 pixels on each device",
    networks=("Ti/16",),
    images=16,
    num_heads=2,
    fields=(*_LOOP, "model.depth=2", "input.image_size=64,64"),
)


class Trial:
    """A recipe's training step on all devices, compiled once for several checks."""

    def __init__(self, name: str, scale: Scale):
        self.name = name
        self.recipe = RECIPE.format(name)
        global_batch = scale.images * jax.device_count()
        fields = (*scale.fields, f"global_batch={global_batch}")
        self.overrides = [f"--config.{field}" for field in fields]

    @functools.cached_property
    def config(self) -> RunConfig:
        return load_recipe(self.recipe, self.overrides)

    @functools.cached_property
    def run(self) -> Assembly:
        architecture = architecture_of(self.config, IMAGENET.num_classes)
        return assemble(
            self.config,
            architecture,
            num_examples=IMAGENET.num_examples,
            devices=jax.devices(),
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
        images = random_batch(self.run, self.config.global_batch)
        batch = jax.device_put(images, self.run.batch_sharding)
        for _ in range(STEPS):
            metrics = training.advance(batch)
        return training.state, float(metrics["train_loss"])

    @functools.cached_property
    def trained(self) -> tuple[TrainState, float]:
        """The first result of `train`."""
        return self.train()


def list_checks(workdir: pathlib.Path | None) -> dict[str, Check]:
    """Return the checks in the order of the report.

    Checkpoints go to the workdir, or to a temporary folder without one.
    """
    scale = SMALL if jax.default_backend() == "cpu" else COMPLETE
    use_compilation_cache(True)  # attention auto has the programs of another form
    trials = [Trial(name, scale) for name in scale.networks]

    checks: dict[str, Check] = {"hardware": lambda: Finding(scale.about)}
    for form in numerics.FORMS:
        check_form = functools.partial(numerics.check_attention, form, scale.num_heads)
        checks[f"attention {form}"] = check_form
    checks["layer norm"] = numerics.check_layer_norm
    checks["group norm"] = numerics.check_group_norm
    checks["determinism"] = functools.partial(check_determinism, trials[0])
    checks["restored state"] = functools.partial(check_restored_state, trials[0], workdir)
    for trial in trials:
        checks[f"step {trial.name}"] = functools.partial(check_step, trial)
    checks["input"] = functools.partial(check_input, trials)
    return checks


def check_determinism(trial: Trial) -> Finding:
    """Train twice from the same seed on the same images, and compare all parameters and moments."""
    first, loss = trial.trained
    second, _ = trial.train()
    found = f"two trainings of {STEPS} steps, {trial.name}: loss {loss:.6f}"
    if not np.isfinite(loss):
        return Finding(found, "the loss is not finite: see the errors above, and report this")
    figures = {"loss": loss}
    changed = together.find_changed_arrays(first, second)
    if not changed:
        return Finding(f"{found}, equal to the bit", figures=figures)
    num_arrays = len(jax.tree.leaves(first))
    return Finding(
        f"{found}; {len(changed)} of {num_arrays} arrays differ",
        "runs cannot be repeated or resumed to the bit; "
        "on GPUs XLA_FLAGS=--xla_gpu_deterministic_ops=true",
        figures,
    )


def check_restored_state(trial: Trial, workdir: pathlib.Path | None) -> Finding:
    """Save the trained state as a run does, and compare the restored state with it."""
    state, _ = trial.trained
    items = items_of(state)
    abstract = items_of(trial.run.abstract_state)
    with contextlib.ExitStack() as stack:
        if workdir is not None:
            folder = stack.enter_context(together.make_temporary_folder(workdir))
        else:
            temporary = tempfile.TemporaryDirectory(prefix="vit_jax_doctor_")
            folder = pathlib.Path(stack.enter_context(temporary))
        stored = together.write_and_read(folder, items, abstract)

    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    found = f"{trial.name}: {stored.describe(num_bytes)}"
    if not stored.changed:
        found += ", equal to the bit"
    figures = {
        "write_seconds": stored.write_seconds,
        "read_seconds": stored.read_seconds,
    }
    return Finding(found, stored.remedy, figures)


def check_step(trial: Trial) -> Finding:
    """Measure time and memory of the training step, and compare them with a plan."""
    planned = plan(trial.recipe, trial.overrides, jax.devices())
    memory = _read_memory(trial.step)
    figures = trial.part.figures()
    peak = peak_flops()
    if peak is not None:
        flops_per_second = figures["images_per_second"] * trial.run.training_flops_per_image
        figures["mfu"] = flops_per_second / peak

    device, *_ = jax.local_devices()
    statistics = device.memory_stats() or {}
    sizes = {
        "memory_bytes": memory,
        "peak_bytes": statistics.get("peak_bytes_in_use"),
        "planned_bytes": planned.num_bytes,
    }
    for name, size in sizes.items():
        if size is not None:
            figures[name] = float(size)
    if planned.seconds is not None:
        figures["planned_milliseconds"] = 1000 * planned.seconds
    found = describe(figures, planned)
    remedy = compare(figures, planned)
    return Finding(found, remedy, figures)


def describe(figures: Mapping[str, float], planned: Planned) -> str:
    """Return the line of a step."""
    median = figures["median_milliseconds"]
    low = figures["lower_quartile_milliseconds"]
    high = figures["upper_quartile_milliseconds"]
    parts = [f"{median:.2f} ms ({low:.2f} to {high:.2f})"]
    parts.append(f"{figures['images_per_second']:,.0f} images/s")
    if "mfu" in figures:
        parts.append(f"MFU {figures['mfu']:.1%}")
    if "memory_bytes" in figures:
        parts.append(f"{figures['memory_bytes'] / GIB:.2f} GiB a device")
    if "peak_bytes" in figures:
        parts.append(f"peak of this process {figures['peak_bytes'] / GIB:.2f}")
    measured = ", ".join(parts)

    if planned.seconds is None:
        return f"{measured}; no figure of plan: {planned.basis}"
    milliseconds = 1000 * planned.seconds
    expected = f"plan ({planned.basis}) {milliseconds:.2f} ms"
    if planned.num_bytes is not None:
        expected += f", {planned.num_bytes / GIB:.2f} GiB"
    return f"{measured}; {expected}: {median / milliseconds:.2f} x the time"


def compare(figures: Mapping[str, float], planned: Planned) -> str:
    """Return a remedy for a step that is slower or larger than its compiled plan.

    Plans by arithmetic are too rough for a comparison.
    """
    if not planned.is_compiled or planned.seconds is None:
        return ""
    if figures["median_milliseconds"] > SLOWER * 1000 * planned.seconds:
        return (
            f"more than {SLOWER} x the planned time: "
            "look for other programs and low clocks (nvidia-smi, tpu-info); "
            "if there are none, the plan is wrong: report this"
        )
    memory_bytes = figures.get("memory_bytes", 0.0)
    if planned.num_bytes is not None and memory_bytes > LARGER * planned.num_bytes:
        return f"more than {LARGER} x the planned memory: the plan is wrong: report this"
    return ""


def check_input(trials: Sequence[Trial]) -> Finding:
    """Compare the input of JPEGs, decoded and cropped as in training, with the steps."""
    with tempfile.TemporaryDirectory(prefix="vit_jax_doctor_") as folder:
        write_images(pathlib.Path(folder))
        run = trials[0].run
        source = open_source(
            f"folder:{folder}",
            "all",
            run.config.input,
            run.config.seed,
        )
        part = time_input(run, source, together.STEPS)

    speed = part.images_per_second

    height, width = JPEG_SIZE
    found = f"{speed:,.0f} images/s from JPEGs of {height}x{width} in memory"
    needed = []
    for trial in trials:
        step_speed = trial.part.images_per_second
        needed.append(step_speed)
        found += f", {trial.name} takes {step_speed:,.0f}"
    remedy = together.advise_on_input(speed, min(needed))
    return Finding(found, remedy, {"images_per_second": speed})


def write_images(folder: pathlib.Path) -> None:
    """Write JPEGs of two classes: smooth colours with noise."""
    rng = np.random.default_rng(0)
    files = [_encode_random_image(rng) for _ in range(ENCODED)]
    for number in range(IMAGES):
        path = folder / f"class{number % 2}" / f"{number:04}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(files[number % ENCODED])


def _encode_random_image(rng: np.random.Generator) -> bytes:
    height, width = JPEG_SIZE
    colours = rng.uniform(0, 255, (6, 8, 3))
    smooth = cv2.resize(
        colours,
        (width, height),
        interpolation=cv2.INTER_CUBIC,
    )
    noise = rng.normal(0, NOISE, smooth.shape)
    pixels = np.clip(smooth + noise, 0, 255).astype(np.uint8)
    quality = [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY]
    _, encoded = cv2.imencode(".jpg", pixels, quality)
    return encoded.tobytes()


def _read_memory(step: TrainStep) -> int | None:
    """Return the bytes that XLA gives a program on each device, counted as a plan counts them."""
    sizes = step.memory_analysis()  # type: ignore[attr-defined]
    if sizes is None:
        return None
    used = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes
    used += sizes.generated_code_size_in_bytes
    return int(used + sizes.output_size_in_bytes - sizes.alias_size_in_bytes)
