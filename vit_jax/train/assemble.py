"""The composition root: hands each folder its own section of the config and joins the parts into one step.

`assemble` needs shapes and devices but no data, so the very step that will train can also be compiled
for devices that this machine does not have.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import jax
import numpy as np
import optax
from flax import nnx

from vit_jax import pytree
from vit_jax.arrays import Batch, abstract_batch
from vit_jax.config.adaptation import adapt_architecture, set_image_size
from vit_jax.config.architecture import Architecture
from vit_jax.config.check import Phase, RunSteps, require_fit, require_labels, resolve
from vit_jax.config.data_kinds import spell_descriptions
from vit_jax.config.networks import build_architecture, named_architecture
from vit_jax.config.schema import ModelConfig, RunConfig
from vit_jax.config.variants import parse_name
from vit_jax.data.placement import local_rows, open_placed
from vit_jax.data.records import Source, require_same_classes
from vit_jax.data.sources import open_source, require_known_data
from vit_jax.data.stream import TrainStream
from vit_jax.data.transforms import (
    EvaluationTransform,
    TrainTransform,
    build_evaluation_transform,
    check_augmentations,
)
from vit_jax.data.unreadable import UnreadableLog, require_readable
from vit_jax.evals.runner import open_whole
from vit_jax.imports.references import is_reference
from vit_jax.kernels.devices import placed_by
from vit_jax.models import build_model, lora
from vit_jax.models.block import attention_form
from vit_jax.models.flops import FLOPS_PER_MAC, FORWARDS_PER_TRAINING_STEP, forward_macs
from vit_jax.objectives import Objective, build_objective, patch_outputs
from vit_jax.optim.by_name import check_patterns, make_is_trained
from vit_jax.optim.optimizers import adapt_optimizer, build_optimizer
from vit_jax.optim.schedules import Schedule, build_schedule
from vit_jax.sharding import (
    Placement,
    batch_sharding,
    build_mesh,
    compiler_options,
    replicated,
    shard_tree,
)
from vit_jax.train.examination import Figures, make_examination
from vit_jax.train.layout import resolve_layout
from vit_jax.train.phases import config_in, make_view
from vit_jax.train.state import TrainState, init_state
from vit_jax.train.step import Metrics, View, make_evaluation_step, make_train_step, same

Leaves = dict[str, jax.Array]
S = TypeVar("S")
R = TypeVar("R")
State = TypeVar("State", contravariant=True)
Result = TypeVar("Result", covariant=True)


class JittedStep(Protocol[State, Result]):
    """A jitted function of a state, as a `TrainState` or as `Leaves` by name, and a batch."""

    def __call__(self, state: State, batch: Batch, /) -> Result:
        """Run the step."""

    def trace(self, state: State, batch: Batch, /) -> jax.stages.Traced:
        """Trace the step on arrays or their abstract shapes."""

    def lower(self, state: State, batch: Batch, /) -> jax.stages.Lowered:
        """Trace and lower the step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assembly:
    """A run's parts, fitted together; nothing has been computed yet."""

    config: RunConfig
    steps: RunSteps
    architecture: Architecture
    batch_sharding: jax.sharding.NamedSharding  # of every array of a batch
    label_shape: tuple[int, ...]  # of one image: (), or (num_classes,) where it may have several
    evaluation_batch: int  # examples of one evaluation step
    forward_macs: int  # multiply-adds of one image's forward pass, padding included
    training_flops_per_image: int  # of the forward and the backward pass, without padding
    abstract_state: TrainState  # shapes, dtypes and shardings
    init_state: Callable[[], TrainState]  # before the first step, its parameters drawn by the seed
    state_of: Callable[
        [nnx.Module], TrainState
    ]  # before the first step, with the parameters of a model
    train_step: JittedStep[
        TrainState, tuple[TrainState, Metrics]
    ]  # reuses the memory of the old state
    train_step_of_leaves: JittedStep[Leaves, tuple[Leaves, Metrics]]
    evaluation_step: JittedStep[TrainState, Metrics]  # sums over the batch
    examination: JittedStep[TrainState, Figures]  # of the training step, by layer and by example
    attention_form: (
        Callable[[], str] | None
    )  # of the standard blocks, on the devices; None if there are none
    earlier: tuple[
        "Assembly", ...
    ] = ()  # the parts for each phase in `steps.phases`, with the sizes of its images

    def in_phase(self, step: int) -> "Assembly":
        """The parts for a step, counted from 1: of the run, or with the image size and batch of an earlier phase."""
        for phase, run in zip(self.steps.phases, self.earlier, strict=True):
            if step <= phase.last_step:
                return dataclasses.replace(
                    run, config=config_in(self.config, phase), steps=self.steps
                )
        return self

    def images(self, step: int) -> int:
        """Images of the first `step` steps."""
        return sum(count * batch for count, batch, _ in self._work(step))

    def training_flops(self, step: int) -> int:
        """FLOPs of the first `step` steps, counted as `training_flops_per_image`."""
        return sum(count * batch * flops for count, batch, flops in self._work(step))

    def _work(self, step: int) -> Iterator[tuple[int, int, int]]:
        """Yield steps, batch and FLOPs of an image for each phase; the last one has no end."""
        first = 0
        for phase, run in zip(self.steps.phases, self.earlier, strict=True):
            last = min(step, phase.last_step)
            yield last - first, phase.global_batch, run.training_flops_per_image
            first = last
        yield step - first, self.config.global_batch, self.training_flops_per_image

    def trace_train_step(self) -> jax.stages.Traced:
        """Trace the train step: a second call, and the compilation, use the same trace.

        Raises:
          ValueError: the user's code returns arrays of wrong shapes.
        """
        size = self.architecture.image_size
        batch = abstract_batch(
            self.config.global_batch, size, self.batch_sharding, self.label_shape
        )
        return self.train_step_of_leaves.trace(pytree.named_leaves(self.abstract_state), batch)

    def compile_train_step(
        self, start_step: int = 0
    ) -> Callable[[Leaves, Batch], tuple[Leaves, Metrics]]:
        """Return the train step as an executable, so that no later call can hide a compilation.

        With phases it is one for each that is not over after `start_step`, chosen by the shape of the batch. It takes
        and returns the leaves of a state by name (`pytree.named_leaves`): modules take Python three milliseconds more
        to hand over.
        """
        firsts = [
            start_step,
            *(phase.last_step for phase in self.steps.phases if phase.last_step > start_step),
        ]
        compiled: dict[tuple[int, ...], jax.stages.Compiled] = {}
        for run in (self.in_phase(first + 1) for first in firsts):
            shape = (run.config.global_batch, *run.architecture.image_size, 3)
            compiled[shape] = compiled.get(shape) or run.trace_train_step().lower().compile()
        if len(compiled) == 1:
            return next(iter(compiled.values()))
        return lambda leaves, batch: compiled[batch.image_BHWC.shape](leaves, batch)

    def state_from(self, leaves: Leaves) -> TrainState:
        """The state with these leaves."""
        return pytree.from_named_leaves(self.abstract_state, leaves)


def architecture_of(config: RunConfig, num_classes: int) -> Architecture:
    """The network that a run trains; of a fine-tuning run the one it names, before any weights are read.

    Raises:
      ValueError: a fine-tuning recipe names none.
    """
    model = config.model
    image_size = config.input.image_size
    if isinstance(model, ModelConfig):
        outputs = patch_outputs(config.objective, parse_name(model.name).patch)
        num_classes = 0 if outputs else num_classes
        return build_architecture(
            model, image_size=image_size, num_classes=num_classes, patch_outputs=outputs
        )
    if model.name is None:
        raise ValueError(
            "config.model.name=None: must name the network, which is not known without weights. Use "
            "--config.model.name=ViT-B/16, or --config=configs/finetune.py:ViT-B/16,..."
        )
    return adapt_architecture(
        named_architecture(model.name), model, image_size=image_size, num_classes=num_classes
    )


def schedule_of(config: RunConfig, steps: RunSteps) -> Schedule:
    """Return the learning rate of a run by the number of steps done."""
    return build_schedule(
        config.schedule,
        warmup_steps=steps.warmup,
        total_steps=steps.total,
        timescale_steps=steps.timescale,
        cooldown_steps=steps.cooldown,
    )


def assemble(
    config: RunConfig,
    architecture: Architecture,
    *,
    num_examples: int,
    devices: Sequence[jax.Device],
    label_shape: tuple[int, ...] = (),
    network: Callable[[Architecture, jax.Array], nnx.Module] | None = None,
    objective: Objective | None = None,
    schedule: Schedule | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> Assembly:
    """Build a run's parts.

    Args:
      config: as `config.validate` takes it.
      architecture: the network, for the dataset's classes.
      num_examples: of the training split.
      devices: all devices of all processes, or of a topology that is only compiled for.
      label_shape: of one image of the data.
      network: (architecture, key) -> module, in the place of the network that `architecture` describes.
      objective: in the place of the config's; has its methods `prepare` and `sums`.
      schedule: step -> learning rate, in the place of the config's.
      optimizer: in the place of the config's optimizer and its schedule. `frozen` and `trained` of the config hold. It
        sees parameters by name and layer (`optim.optimizers.adapt_optimizer`).

    Raises:
      ValueError: values of the config that do not fit each other, the dataset or the devices.
    """
    steps = resolve(config, num_examples=num_examples, num_devices=len(devices))
    require_fit(config, architecture, devices[0].platform)
    schedule = schedule or schedule_of(config, steps)
    if optimizer is None:
        optimizer = build_optimizer(config.optimizer, schedule, config.schedule.learning_rate)
    else:
        optimizer = adapt_optimizer(
            optimizer, make_is_trained(config.optimizer) or (lambda name: True)
        )
    build = network or build_model
    factors = lora.lora_of(config.optimizer)
    if factors is not None:
        lora.require_adaptable(architecture, is_standard=network is None)

    def state_of(model: nnx.Module) -> TrainState:
        return init_state(model, optimizer, with_polyak=config.polyak.factor is not None)

    def init(architecture: Architecture) -> TrainState:
        key = jax.random.key(config.seed)
        model = build(architecture, key)
        return state_of(model if factors is None else lora.add_factors(model, factors, key))

    abstract = jax.eval_shape(functools.partial(init, architecture))
    sizes = [
        (config, architecture),
        *(_in_phase(config, architecture, phase) for phase in steps.phases),
    ]
    largest = max(
        sizes, key=lambda size: size[0].global_batch * math.prod(size[1].grid)
    )  # decides the memory
    layout = resolve_layout(*largest, abstract, devices, is_standard=network is None)
    laid_out = {"model": layout.model, "optimizer": layout.optimizer, "sharding": layout.sharding}
    config = dataclasses.replace(config, **laid_out)  # type: ignore[arg-type]
    assert layout.model.remat != "auto"
    if layout.model.remat != architecture.remat:  # a network knows its policy
        architecture = dataclasses.replace(architecture, remat=layout.model.remat)
        abstract = jax.eval_shape(functools.partial(init, architecture))
    if steps.phases:  # micro-batches must divide every batch
        resolve(config, num_examples=num_examples, num_devices=len(devices))
    mesh = build_mesh(devices, config.sharding)
    check_patterns(config.optimizer, abstract.model)
    if is_reference(config.optimizer.name):  # its arguments may suit its first state and no update
        jax.eval_shape(optimizer.update, abstract.model, abstract.optimizer, abstract.model)
    shardings = shard_tree(abstract, mesh, config.sharding.parameters)
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings
    )

    whole = replicated(mesh)
    on_mesh = placed_by(
        Placement(mesh)
    )  # a decorator: activations find their places when a step is traced
    has_standard_blocks = (
        network is None and architecture.is_standard and architecture.has_transformer
    )
    batches = batch_sharding(mesh)
    options = compiler_options(mesh)
    evaluation_batch = config.evaluation.global_batch or config.global_batch

    def jit_training(
        step: Callable[[S, Batch], tuple[S, Metrics]], states: S
    ) -> JittedStep[S, tuple[S, Metrics]]:
        """Jit a step on states with these shardings; it reuses their memory."""
        outputs = (states, whole)
        return jax.jit(
            step,
            in_shardings=(states, batches),
            out_shardings=outputs,
            donate_argnums=0,
            compiler_options=options,
        )

    def jit_observing(step: Callable[[TrainState, Batch], R]) -> JittedStep[TrainState, R]:
        """Jit a step that does not change the state."""
        inputs = (shardings, batches)
        return jax.jit(
            on_mesh(step), in_shardings=inputs, out_shardings=whole, compiler_options=options
        )

    def objective_of(architecture: Architecture) -> Objective:
        return build_objective(config.objective, architecture) if objective is None else objective

    jitted_init = jax.jit(functools.partial(init, architecture), out_shardings=shardings)
    jitted_state_of = jax.jit(state_of, out_shardings=shardings)
    evaluation_step = jit_observing(make_evaluation_step(architecture, objective_of(architecture)))

    def sized(
        config: RunConfig, architecture: Architecture, model: nnx.Module, view: View
    ) -> Assembly:
        """Return the parts for one size of the images; `view` makes of a model of the run a `model` of this size."""
        task = objective_of(architecture)
        train_step = on_mesh(
            make_train_step(config, steps, architecture, task, optimizer, schedule, view)
        )

        def train_step_of_leaves(state: Leaves, batch: Batch) -> tuple[Leaves, Metrics]:
            after, metrics = train_step(pytree.from_named_leaves(abstract, state), batch)
            return pytree.named_leaves(after), metrics

        counted = None if network is None else model
        macs_without_padding = forward_macs(architecture, counted, count_padding=False)
        return Assembly(
            config=config,
            steps=steps,
            architecture=architecture,
            batch_sharding=batches,
            label_shape=label_shape,
            evaluation_batch=evaluation_batch,
            forward_macs=forward_macs(architecture, counted),
            training_flops_per_image=FORWARDS_PER_TRAINING_STEP
            * FLOPS_PER_MAC
            * macs_without_padding,
            abstract_state=abstract,
            init_state=jitted_init,
            state_of=jitted_state_of,
            train_step=jit_training(train_step, shardings),
            train_step_of_leaves=jit_training(train_step_of_leaves, pytree.named_leaves(shardings)),
            evaluation_step=evaluation_step,
            examination=jit_observing(
                make_examination(config, architecture, task, optimizer, view)
            ),
            attention_form=on_mesh(lambda: attention_form(architecture))
            if has_standard_blocks
            else None,
        )

    def in_phase(phase: Phase) -> Assembly:
        smaller_config, smaller = _in_phase(config, architecture, phase)
        model = jax.eval_shape(functools.partial(init, smaller)).model
        return sized(
            smaller_config,
            smaller,
            model,
            make_view(abstract.model, model, architecture.grid, smaller.grid),
        )

    run = sized(config, architecture, abstract.model, same)
    return dataclasses.replace(run, earlier=tuple(map(in_phase, steps.phases)))


def _in_phase(
    config: RunConfig, architecture: Architecture, phase: Phase
) -> tuple[RunConfig, Architecture]:
    try:
        return config_in(config, phase), set_image_size(architecture, phase.image_size)
    except ValueError as error:
        raise ValueError(f"config.phases: {error}") from None


@dataclasses.dataclass(frozen=True)
class Datasets:
    """The splits of a run, open: for training, for testing, and of each further evaluator by its name.

    `train_sources` are what evaluators on frozen features learn from.
    """

    train: Source
    test: Source
    others: Mapping[str, Source] = dataclasses.field(default_factory=dict)
    train_sources: Mapping[str, Source] = dataclasses.field(default_factory=dict)


def open_datasets(config: RunConfig) -> Datasets:
    """Open every split and compare their classes.

    Raises:
      ValueError: no dataset was chosen, one is missing, or splits that belong together have different classes; a value
        of the config is not for data whose images may have several labels, or only for these.
    """
    if config.data is None:
        raise ValueError(
            "config.data=None: must be set, since the recipe does not choose a dataset. "
            f"Add --config.data= with one of: {spell_descriptions()}."
        )
    require_known_datasets(config)
    inputs = config.input
    seed = config.seed
    train = open_source(config.data, inputs.train_split, inputs, seed)
    test = open_source(config.data, inputs.test_split, inputs, seed)
    evaluators = config.evaluation.evaluators
    others = {
        name: open_source(
            evaluator.data or config.data, evaluator.split or inputs.test_split, inputs, seed
        )
        for name, evaluator in evaluators.items()
    }
    complete = dataclasses.replace(
        inputs, train_examples=None
    )  # a smaller training set is measured as a larger one is
    train_sources = {
        name: open_source(
            evaluator.data or config.data,
            evaluator.train_split or inputs.train_split,
            complete,
            seed,
        )
        for name, evaluator in evaluators.items()
        if evaluator.frozen
    }
    same = {
        name: train for name, evaluator in evaluators.items() if evaluator.kind == "classification"
    } | train_sources
    require_same_classes(config.data, inputs.train_split, train, inputs.test_split, test)
    for name, source in same.items():
        data = evaluators[name].data or config.data
        require_same_classes(
            data, evaluators[name].train_split or inputs.train_split, source, name, others[name]
        )
    frozen = {
        name: source.is_multilabel or others[name].is_multilabel
        for name, source in train_sources.items()
    }
    require_labels(config, is_multilabel=train.is_multilabel, frozen=frozen)
    _require_readable_splits(config, {inputs.train_split: train, inputs.test_split: test, **others})
    check_augmentations(inputs, train[0])
    return Datasets(train, test, others, train_sources)


def require_known_datasets(config: RunConfig) -> None:
    """Raise ValueError for data of the run or of an evaluator of no known kind, before anything is opened."""
    if config.data is not None:
        require_known_data(config.data, "config.data")
    for name, evaluator in config.evaluation.evaluators.items():
        if evaluator.data is not None:
            require_known_data(evaluator.data, f"config.evaluation.evaluators.{name}.data")


def _require_readable_splits(config: RunConfig, splits: Mapping[str, Source]) -> None:
    """Raise TooManyUnreadable for splits and data of evaluators, by name, without a readable image."""
    inputs = config.input
    for name, source in splits.items():
        require_readable(
            source,
            f"config.data={config.data}, split {name}",
            inputs.max_unreadable,
            inputs.max_image_megapixels,
            inputs.value_range,
        )


def train_stream(
    config: RunConfig,
    source: Source,
    rows: np.ndarray,
    start_step: int,
    num_steps: int,
    first_image: int | None = None,
) -> TrainStream:
    """Return the training batches of the config, of which this process supplies the rows; as `TrainStream`."""
    transform = TrainTransform(config.input)
    is_balanced = config.input.sampling == "balanced"
    order = (
        config.seed,
        config.global_batch,
        rows,
        start_step,
        num_steps,
        is_balanced,
        config.input.repeats,
    )
    return TrainStream(source, transform, *order, first_image)


@contextlib.contextmanager
def open_train_batches(
    assembly: Assembly, source: Source, start_step: int
) -> Iterator[tuple[Iterator[Batch], UnreadableLog]]:
    """Return placed batches of the steps from `start_step` on, and the counter of unreadable images.

    Threads and workers end with the context. Each phase begins with new ones.
    """
    inputs = assembly.config.input
    sharding = assembly.batch_sharding
    steps = assembly.steps
    log = UnreadableLog(
        source, inputs.max_unreadable, inputs.max_image_megapixels, inputs.value_range
    )
    ends = [
        *(phase.last_step for phase in steps.phases if phase.last_step > start_step),
        steps.total,
    ]
    with contextlib.ExitStack() as stack:

        def opened(first: int, last: int) -> Iterator[Batch]:
            config = assembly.in_phase(first + 1).config
            rows = local_rows(sharding, config.global_batch)
            stream = train_stream(config, source, rows, first, last, assembly.images(first))
            stack.close()  # the input of the phase before
            return stack.enter_context(
                open_placed(stream, sharding, log, inputs.num_workers, inputs.num_threads)
            )

        now = opened(start_step, ends[0])  # starts the threads
        later = (
            opened(*pair) for pair in itertools.pairwise(ends)
        )  # each when the one before has ended
        yield itertools.chain(now, itertools.chain.from_iterable(later)), log


def open_evaluation_batches(
    assembly: Assembly,
    source: Source,
    log: UnreadableLog,
    transform: EvaluationTransform | None = None,
) -> contextlib.AbstractContextManager[Iterator[Batch]]:
    """Return a context of placed batches that hold every example of the split once.

    `log` is the split's, of all evaluations; without a `transform` images are prepared as the config says.
    """
    inputs = assembly.config.input
    batch = assembly.evaluation_batch
    sharding = assembly.batch_sharding
    transform = transform or build_evaluation_transform(inputs)
    return open_whole(
        source, transform, sharding, batch, log, inputs.num_workers, inputs.num_threads
    )
