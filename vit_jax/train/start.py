"""The start of a run: from its checkpoint, from another run or its weights, or from scratch."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import hosts, pytree
from vit_jax.checkpoint import CheckpointReader, DamagedCheckpoint
from vit_jax.checkpoint.reader import FOLDER
from vit_jax.config import Architecture, PretrainConfig
from vit_jax.config.lengths import convert_lengths
from vit_jax.config.network_options import LORA_FACTORS
from vit_jax.config.parsing import from_dict
from vit_jax.models.lora import build_initial_factors
from vit_jax.optim.schedules import build_schedule
from vit_jax.storage.files import JsonObject, expand_path
from vit_jax.text.printable import shorten
from vit_jax.train.assembly import Assembly
from vit_jax.train.state import TrainState, items_of

if TYPE_CHECKING:
    from vit_jax.weights import Weights
    from vit_jax.weights.fit import Fitted

DAMAGED = "damaged_checkpoints"
"""Sub-folder of a workdir for checkpoints that cannot be restored."""
MEANING = (
    "family",
    "network",
    "block",
    "pool",
    "position_embedding",
    "position_layers",
    "head",
    "num_heads",
    "gelu",
    "layer_norm_epsilon",
    "rope",
    "rope_grid",
    "pool_num_heads",
    "residual_unit",
    "group_norm_epsilon",
    "standardization_epsilon",
    "standardization_epsilon_added_to",
)
"""Fields in which two architectures with the same shapes may still differ."""


def start_state(
    assembly: Assembly,
    fitted: "Fitted | None",
    own: CheckpointReader,
    metadata: JsonObject,
) -> tuple[TrainState, str]:
    """Return the state a run begins with, and a sentence that says where it comes from.

    Args:
      assembly: its parts.
      fitted: the weights that a fine-tuning run starts with; None for pre-training.
      own: the checkpoints of its workdir.
      metadata: metadata of its checkpoints; those of a continued checkpoint must agree.

    Raises:
      ValueError: the given checkpoint or weights do not exist or do not fit.
    """
    steps = own.all_steps()
    if steps:
        return _continue_run(assembly, own, metadata, steps)
    return given_state(assembly, fitted, metadata)


def given_state(
    assembly: Assembly,
    fitted: "Fitted | None",
    metadata: JsonObject,
) -> tuple[TrainState, str]:
    """Return the state that a run in an empty workdir begins with; arguments as `start_state`."""
    config = assembly.config
    if fitted is not None:
        return _begin(assembly, fitted.parameters, str(config.init_from))
    if isinstance(config, PretrainConfig) and config.resume_from is not None:
        reader, steps = steps_to_continue(assembly)
        restored = _restore_newest(assembly, reader, metadata, steps)
        origin = f"continuing from step {restored.step} of {config.resume_from}"
        return restored.state, "\n".join([*restored.damage.values(), origin])
    return first_state(assembly)


def steps_to_continue(assembly: Assembly) -> tuple[CheckpointReader, list[int]]:
    """Return the reader of `config.resume_from` and the steps that may be continued, ascending.

    A run of warm-up, stable, decay continues only steps up to which its learning rate is that of
    the other run.

    Raises:
      ValueError: there are none, or not `config.resume_step`.
    """
    config = assembly.config
    assert isinstance(config, PretrainConfig)
    assert config.resume_from is not None, "the caller checks it"
    workdir = config.resume_from
    reader = CheckpointReader(expand_path(workdir))
    stored = reader.all_steps()
    if not stored:
        raise ValueError(
            f"config.resume_from={workdir!r} is not a workdir with a checkpoint: give the folder "
            f"of a run, the one with the sub-folder {FOLDER}/ in it. Weights of other programs "
            "are for config.init_from, which begins a new run."
        )
    steps = stored
    if config.resume_step is not None:
        steps = [config.resume_step]
        if config.resume_step not in stored:
            raise ValueError(
                f"config.resume_step={config.resume_step}: must be a checkpoint of {workdir}. Use "
                f"one of {stored}."
            )
    if config.schedule.decay == "wsd":
        steps = [step for step in steps if _has_same_rates(assembly, reader, step)]
    if not steps:
        raise ValueError(
            f"config.resume_from={workdir!r}: must have a checkpoint before both cooldowns, with "
            f"the learning rates of this run. It has {stored}. Keep more checkpoints of the trunk "
            "(config.checkpoint.keep_latest), or shorten config.schedule.cooldown."
        )
    return reader, steps


def _has_same_rates(assembly: Assembly, reader: CheckpointReader, step: int) -> bool:
    """Return whether the run of a checkpoint had the learning rates of this run up to its next step.

    Its config is that of the checkpoint: a branch may itself be continued. True of a damaged one,
    which is skipped when it is restored.
    """
    try:
        stored = reader.metadata(step)
    except DamagedCheckpoint:
        return True
    trunk = from_dict(PretrainConfig, stored["config"])
    done = jnp.arange(step + 1)
    trunk_steps = convert_lengths(trunk, stored["num_examples"])
    theirs = jax.vmap(build_schedule(trunk.schedule, trunk_steps))(done)
    ours = jax.vmap(build_schedule(assembly.config.schedule, assembly.steps))(done)
    return bool(jnp.allclose(theirs, ours, rtol=1e-6, atol=0.0))


def first_state(assembly: Assembly) -> tuple[TrainState, str]:
    """Return the state of a pre-training run at step 0, and a sentence on where it comes from.

    Raises:
      ValueError: the weights do not exist or do not fit.
    """
    config = assembly.config
    if config.init_from is not None:
        weights = fitting_weights(assembly)
        return _begin(assembly, weights.parameters, weights.source)
    return assembly.init_state(), f"starting from scratch with seed {config.seed}"


def fitting_weights(assembly: Assembly) -> "Weights":
    """Return the weights of `config.init_from`, which are of the run's network.

    Raises:
      ValueError: they do not exist, cannot be read, or do not fit; differences are listed.
    """
    from vit_jax.train.starting_weights import initial_weights

    weights = initial_weights(assembly.config)
    _require_same_network(assembly, dataclasses.asdict(weights.architecture), weights.source)
    _require_same_parameters(assembly, weights.parameters, weights.source)
    return weights


def _continue_run(
    assembly: Assembly,
    own: CheckpointReader,
    metadata: JsonObject,
    steps: Sequence[int],
) -> tuple[TrainState, str]:
    """The state of the newest checkpoint of the run's own workdir that is not damaged.

    Damaged ones that are newer are moved out of the way.

    Raises:
      ValueError: all are damaged, or they do not fit the run.
    """
    restored = _restore_newest(assembly, own, metadata, steps)
    lines = []
    for step, problem in restored.damage.items():
        lines.append(f"{problem} It was moved to {_set_aside(own.folder, step)}.")
    lines.append(f"continuing from this workdir's checkpoint of step {restored.step}")
    return restored.state, "\n".join(lines)


def _set_aside(folder: pathlib.Path, step: int) -> pathlib.Path:
    """Move a damaged checkpoint out of a workdir's checkpoints, and return its new path."""
    target = folder.parent / DAMAGED / f"{step}"
    number = 2
    while target.exists():
        target = target.with_name(f"{step}-{number}")
        number += 1
    hosts.wait_for_all("damaged checkpoint read")
    if hosts.is_first():
        target.parent.mkdir(exist_ok=True)
        (folder / str(step)).rename(target)
    hosts.wait_for_all("damaged checkpoint moved")
    return target


def _begin(
    assembly: Assembly,
    parameters: Mapping[str, np.ndarray],
    source: str,
) -> tuple[TrainState, str]:
    state = state_of_parameters(assembly, parameters, source)
    return state, f"starting at step 0 with the weights of {source}"


def state_of_parameters(
    assembly: Assembly,
    parameters: Mapping[str, np.ndarray],
    source: str,
) -> TrainState:
    """Return the state before the first step with these float32 parameters.

    Each process supplies the shards of its devices.
    Factors of LoRA have their initial values.

    Raises:
      ValueError: they are not those of the run's network; differences are listed.
    """
    model = assembly.abstract_state.model
    factors = {}
    for name, leaf in pytree.name_leaves(model).items():
        if name.endswith(LORA_FACTORS):
            factors[name] = leaf.shape
    initial = build_initial_factors(factors, jax.random.key(assembly.config.seed))
    complete = {**parameters, **jax.device_get(initial)}
    _require_same_parameters(assembly, complete, source)

    def place(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        array = complete[name].astype(leaf.dtype)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: array[index])

    return assembly.start_from(pytree.map_with_names(place, model))


def _require_same_parameters(
    assembly: Assembly,
    parameters: Mapping[str, np.ndarray],
    source: str,
) -> None:
    wanted = pytree.name_leaves(assembly.abstract_state.model)
    lines = pytree.differences(wanted, parameters)
    if lines:
        raise ValueError(
            f"{source} does not fit {assembly.architecture.name}:{pytree.list_lines(lines)}"
        )


@dataclasses.dataclass(frozen=True)
class Restored:
    """A state from a checkpoint.

    Attributes:
      state: the complete state.
      step: number of steps done.
      damage: damage of each newer checkpoint, by its step.
    """

    state: TrainState
    step: int
    damage: Mapping[int, str]


def _restore_newest(
    assembly: Assembly,
    reader: CheckpointReader,
    metadata: JsonObject,
    steps: Sequence[int],
) -> Restored:
    """Restore the newest of these checkpoints that is not damaged.

    Raises:
      ValueError: all are damaged.
    """
    damage: dict[int, str] = {}
    for step in reversed(steps):
        try:
            state = restore(assembly, reader, step, metadata)
        except DamagedCheckpoint as error:
            damage[step] = str(error)
        else:
            return Restored(state, step, damage)
    problems = "\n".join(damage.values())
    raise ValueError(
        f"No checkpoint in {reader.folder} can be used. Restore one from a copy; to start over, "
        "choose another "
        f"workdir, or remove this folder.\n{problems}"
    )


def restore(
    assembly: Assembly,
    reader: CheckpointReader,
    step: int,
    metadata: JsonObject,
) -> TrainState:
    """The complete state of one checkpoint, whose metadata must agree with `metadata`.

    Raises:
      ValueError: it does not fit the run, or (`DamagedCheckpoint`) is damaged.
    """
    stored = reader.metadata(step)
    _require_same_network(assembly, stored["architecture"], str(reader.folder))
    _require_same_data(stored, metadata, step, reader.folder)
    _require_same_teacher(stored, metadata, reader.folder)
    restored = reader.restore(step, items_of(assembly.abstract_state))
    return TrainState(
        step=restored["progress"]["step"],
        model=restored["model"],
        optimizer=restored["optimizer"],
        polyak=restored.get("polyak"),
    )


def _require_same_data(
    stored: JsonObject,
    metadata: JsonObject,
    step: int,
    folder: pathlib.Path,
) -> None:
    """Raise ValueError if the run of a checkpoint has seen other images than this run has."""
    names = ["data", "num_examples", "class_names", "seed", "exclude_sha256"]
    if count_images(stored, step) != count_images(metadata, step):
        names += ["global_batch", "phases"]
    for name in ("train_files_sha256", "test_files_sha256"):
        if name in stored:
            names.append(name)
    for name in names:
        there = stored.get(name)
        here = metadata.get(name)
        if there != here:
            raise ValueError(
                f"The checkpoint in {folder} was trained with {name}={shorten(repr(there), 80)}, "
                f"this run has {shorten(repr(here), 80)}: continuing would not see the same "
                "images. To start anew from its weights, use config.init_from and another workdir."
            )


def _require_same_teacher(
    stored: JsonObject,
    metadata: JsonObject,
    folder: pathlib.Path,
) -> None:
    """Raise ValueError if the run of a checkpoint has learned from another teacher."""
    there = stored.get("teacher", {})
    here = metadata.get("teacher", {})
    if there.get("sha256") == here.get("sha256"):
        return
    raise ValueError(
        f"config.objective.teacher={here.get('name')!r}: must be the teacher of the checkpoint in "
        f"{folder}, {there.get('name')!r}, and its parameters differ. Restore them, or train in "
        "another workdir."
    )


def count_images(metadata: JsonObject, step: int) -> int:
    """Return the images of the first steps of a run: its place in the order of the data.

    "phases" of the metadata are pairs of the last step of a phase and its batch; after them steps
    have the batch "global_batch".
    """
    images = 0
    steps_counted = 0
    for last_step, batch in metadata.get("phases", ()):
        phase_end = min(step, last_step)
        images += (phase_end - steps_counted) * batch
        steps_counted = phase_end
    last_batch: int = metadata["global_batch"]
    return images + (step - steps_counted) * last_batch


def _require_same_network(assembly: Assembly, stored: JsonObject, source: str) -> None:
    """Raise ValueError if two networks with the same shapes compute different functions."""
    here = dataclasses.asdict(assembly.architecture)
    lines = []
    for name in MEANING:
        there = stored.get(name, getattr(Architecture, name, None))  # older metadata lack some
        if there != here[name]:
            lines.append(f"\n  {name}: there {there!r}, here {here[name]!r}")
    if lines:
        raise ValueError(f"{source} is of another network:{''.join(lines)}")
