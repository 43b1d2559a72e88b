"""The start of a run: from its checkpoint, `init_from`, weights, or from scratch.

For fine-tuning, which network follows from given weights, and its parameters.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import hosts, pytree
from vit_jax.checkpoint import CheckpointReader, DamagedCheckpoint
from vit_jax.checkpoint.reader import FOLDER
from vit_jax.config import (
    Architecture,
    FinetuneConfig,
    PretrainConfig,
    RunConfig,
    adapt_architecture,
)
from vit_jax.config.check import lengths
from vit_jax.config.network_options import LORA_FACTORS
from vit_jax.config.parsing import from_dict, references
from vit_jax.data.records import Source
from vit_jax.evals.imagenet_classes import match_outputs
from vit_jax.models.initial_values import truncated_normal
from vit_jax.models.lora import initial_factors
from vit_jax.storage.files import JsonObject, expanded
from vit_jax.text.printable import printable, shortened
from vit_jax.train.assemble import Assembly, schedule_of
from vit_jax.train.state import TrainState, items_of
from vit_jax.weights import Weights, load_weights
from vit_jax.weights.fit import Fitted, fit, select_classes, without_head

DAMAGED = "damaged_checkpoints"  # sub-folder of a workdir
_LAST_LAYER = 2**31 - 2  # number of a stream of random numbers of the seed; no step has it
MEANING = (
    *(
        "family",
        "network",
        "block",
        "pool",
        "position_embedding",
        "position_layers",
        "head",
        "num_heads",
        "gelu",
    ),
    *("layer_norm_epsilon", "rope", "rope_grid", "pool_num_heads"),
    *(
        "residual_unit",
        "group_norm_epsilon",
        "standardization_epsilon",
        "standardization_epsilon_added_to",
    ),
)
"""What two architectures with the same shapes may still differ in."""


def start_state(
    assembly: Assembly, fitted: Fitted | None, own: CheckpointReader, metadata: JsonObject
) -> tuple[TrainState, str]:
    """Return the state a run begins with, and a sentence that says where it comes from.

    Args:
      assembly: its parts.
      fitted: the weights that a fine-tuning run starts with; None for pre-training.
      own: the checkpoints of its workdir.
      metadata: of its checkpoints; those of a continued checkpoint must agree.

    Raises:
      ValueError: the given checkpoint or weights do not exist or do not fit.
    """
    return _continue_run(assembly, own, metadata) or given_state(assembly, fitted, metadata)


def given_state(
    assembly: Assembly, fitted: Fitted | None, metadata: JsonObject
) -> tuple[TrainState, str]:
    """Return the state that a run begins with where its workdir is empty; otherwise as `start_state`."""
    config = assembly.config
    if fitted is not None:
        return _begin(assembly, fitted.parameters, str(config.init_from))
    if isinstance(config, PretrainConfig) and config.resume_from is not None:
        reader, steps = steps_to_continue(assembly)
        state, step, damage = _restore_newest(assembly, reader, metadata, steps)
        return state, "\n".join(
            [*damage.values(), f"continuing from step {step} of {config.resume_from}"]
        )
    return first_state(assembly)


def steps_to_continue(assembly: Assembly) -> tuple[CheckpointReader, list[int]]:
    """Return the reader of the checkpoints of `config.resume_from` and the steps that the run may continue, ascending.

    A run of warm-up, stable, decay continues only steps up to which its learning rate is that of the other run.

    Raises:
      ValueError: there are none, or not `config.resume_step`.
    """
    config = assembly.config
    assert isinstance(config, PretrainConfig)
    assert config.resume_from is not None, "the caller checks it"
    workdir = config.resume_from
    wanted = config.resume_step
    reader = CheckpointReader(expanded(workdir))
    stored = reader.all_steps()
    if not stored:
        raise ValueError(
            f"config.resume_from={workdir!r} is not a workdir with a checkpoint: give the folder of a run, the one "
            f"with the sub-folder {FOLDER}/ in it."
        )
    if wanted not in (None, *stored):
        raise ValueError(
            f"config.resume_step={wanted}: must be a checkpoint of {workdir}. Use one of {stored}."
        )
    steps = stored if wanted is None else [wanted]
    if config.schedule.decay == "wsd":
        steps = [step for step in steps if _has_same_rates(assembly, reader, step)]
    if not steps:
        raise ValueError(
            f"config.resume_from={workdir!r}: must have a checkpoint before both cooldowns, with the learning rates of "
            f"this run. It has {stored}. Keep more checkpoints of the trunk (config.checkpoint.keep_latest), or "
            "shorten config.schedule.cooldown."
        )
    return reader, steps


def _has_same_rates(assembly: Assembly, reader: CheckpointReader, step: int) -> bool:
    """Return whether the run of a checkpoint had the learning rates of this run, the next one included.

    Its config is that of the checkpoint: a branch may itself be continued. True of a damaged one, which is skipped when
    it is restored.
    """
    try:
        stored = reader.metadata(step)
    except DamagedCheckpoint:
        return True
    trunk = from_dict(PretrainConfig, stored["config"])
    done = jnp.arange(step + 1)
    theirs = jax.vmap(schedule_of(trunk, lengths(trunk, stored["num_examples"])))(done)
    ours = jax.vmap(schedule_of(assembly.config, assembly.steps))(done)
    return bool(jnp.allclose(theirs, ours, rtol=1e-6, atol=0.0))


def first_state(assembly: Assembly) -> tuple[TrainState, str]:
    """The state of a pre-training run at step 0, with given weights or drawn by the seed, and where it comes from.

    Raises:
      ValueError: the weights do not exist or do not fit.
    """
    config = assembly.config
    if config.init_from is not None:
        weights = fitting_weights(assembly)
        return _begin(assembly, weights.parameters, weights.source)
    return assembly.init_state(), f"starting from scratch with seed {config.seed}"


def fitting_weights(assembly: Assembly) -> Weights:
    """Return the weights of `config.init_from`, which are of the run's network.

    Raises:
      ValueError: they do not exist, cannot be read, or do not fit; differences are listed.
    """
    weights = initial_weights(assembly.config)
    _require_same_network(assembly, dataclasses.asdict(weights.architecture), weights.source)
    _require_same_parameters(assembly, weights.parameters, weights.source)
    return weights


def initial_weights(config: RunConfig) -> Weights:
    """The weights of `config.init_from`, which may name the code that the config allows, or names itself.

    Raises:
      ValueError: they do not exist or cannot be read, or need other code.
    """
    assert config.init_from is not None, "the caller checks it"
    named = [text for name, text in references(config) if name.startswith("model.")]
    return load_weights(config.init_from, allow_code=[*config.allow_code, *named])


def _continue_run(
    assembly: Assembly, own: CheckpointReader, metadata: JsonObject
) -> tuple[TrainState, str] | None:
    """The state of the newest checkpoint of the run's own workdir that is not damaged; None if there is none at all.

    Damaged ones that are newer are moved out of the way.

    Raises:
      ValueError: all are damaged, or they do not fit the run.
    """
    steps = own.all_steps()
    if not steps:
        return None
    state, step, damage = _restore_newest(assembly, own, metadata, steps)
    lines = [
        f"{problem} It was moved to {_set_aside(own.folder, number)}."
        for number, problem in damage.items()
    ]
    return state, "\n".join([*lines, f"continuing from this workdir's checkpoint of step {step}"])


def _set_aside(folder: pathlib.Path, step: int) -> pathlib.Path:
    """Move a damaged checkpoint out of a workdir's checkpoints; the path it has now."""
    target = folder.parent / DAMAGED / f"{step}"
    numbered = (target.with_name(f"{step}-{number}") for number in itertools.count(2))
    while target.exists():
        target = next(numbered)
    hosts.wait_for_all("damaged checkpoint read")
    if hosts.is_first():
        target.parent.mkdir(exist_ok=True)
        (folder / str(step)).rename(target)
    hosts.wait_for_all("damaged checkpoint moved")
    return target


def _begin(
    assembly: Assembly, parameters: Mapping[str, np.ndarray], source: str
) -> tuple[TrainState, str]:
    return state_of_parameters(
        assembly, parameters, source
    ), f"starting at step 0 with the weights of {source}"


def state_of_parameters(
    assembly: Assembly, parameters: Mapping[str, np.ndarray], source: str
) -> TrainState:
    """The state before the first step, with given float32 parameters; each process supplies what its devices hold.

    Factors of LoRA have their initial values.

    Raises:
      ValueError: they are not those of the run's network; differences are listed.
    """
    leaves = pytree.named_leaves(assembly.abstract_state.model)
    factors = {name: leaf.shape for name, leaf in leaves.items() if name.endswith(LORA_FACTORS)}
    initial = initial_factors(factors, jax.random.key(assembly.config.seed))
    parameters = {**parameters, **jax.device_get(initial)}
    _require_same_parameters(assembly, parameters, source)

    def place(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: parameters[name][index]
        )

    return assembly.state_of(pytree.map_with_names(place, assembly.abstract_state.model))


def _require_same_parameters(
    assembly: Assembly, parameters: Mapping[str, np.ndarray], source: str
) -> None:
    if lines := pytree.differences(pytree.named_leaves(assembly.abstract_state.model), parameters):
        raise ValueError(
            f"{source} does not fit {assembly.architecture.name}:{pytree.listed(lines)}"
        )


def _restore_newest(
    assembly: Assembly, reader: CheckpointReader, metadata: JsonObject, steps: Sequence[int]
) -> tuple[TrainState, int, dict[int, str]]:
    """The state of the newest of these checkpoints that is not damaged, its step, and what is wrong with newer ones."""
    damage: dict[int, str] = {}
    for step in reversed(steps):
        try:
            return restore(assembly, reader, step, metadata), step, damage
        except DamagedCheckpoint as error:
            damage[step] = str(error)
    problems = "\n".join(damage.values())
    raise ValueError(
        f"No checkpoint in {reader.folder} can be used. Restore one from a copy; to start over, choose another "
        f"workdir, or remove this folder.\n{problems}"
    )


def restore(
    assembly: Assembly, reader: CheckpointReader, step: int, metadata: JsonObject
) -> TrainState:
    """The complete state of one checkpoint, whose metadata must agree with `metadata`.

    Raises:
      ValueError: it does not fit the run, or (`DamagedCheckpoint`) is damaged.
    """
    stored = reader.metadata(step)
    _require_same_network(assembly, stored["architecture"], str(reader.folder))
    always = ("data", "num_examples", "class_names", "seed", "exclude_sha256")
    order = ("global_batch", "phases") if _images(stored, step) != _images(metadata, step) else ()
    for name in (*always, *order, *stored.keys() & {"train_files_sha256", "test_files_sha256"}):
        if stored.get(name) != metadata.get(name):
            raise ValueError(
                f"The checkpoint in {reader.folder} was trained with {name}={shortened(repr(stored.get(name)), 80)}, "
                f"this run has {shortened(repr(metadata.get(name)), 80)}: continuing would not see the same images. To "
                "start anew from its weights, use config.init_from and another workdir."
            )
    restored = reader.restore(step, items_of(assembly.abstract_state))
    step_array = restored.pop("progress")["step"]
    return TrainState(step=step_array, **{"polyak": None, **restored})


def _images(metadata: JsonObject, step: int) -> int:
    """Return the images of the first steps: where the run is in the order of its data."""
    images = 0
    first = 0
    for last, batch in (*metadata.get("phases", ()), (step, metadata["global_batch"])):
        images = images + (min(step, last) - first) * batch
        first = min(step, last)
    return images


def _require_same_network(assembly: Assembly, stored: JsonObject, source: str) -> None:
    """Raise if two networks with the same shapes compute different functions."""
    here = dataclasses.asdict(assembly.architecture)
    there = {
        name: stored.get(name, getattr(Architecture, name, None)) for name in MEANING
    }  # older ones lack some
    if different := [name for name in MEANING if there[name] != here[name]]:
        lines = "\n".join(
            f"  {name}: there {there[name]!r}, here {here[name]!r}" for name in different
        )
        raise ValueError(f"{source} is of another network:\n{lines}")


def adapt(config: FinetuneConfig, train: Source) -> tuple[Architecture, Fitted, str]:
    """Load the weights of `config.init_from` and fit them to the data, whose classes become those of the head.

    Returns:
      The network, its parameters, and lines on where they come from.

    Raises:
      ValueError: no weights are given, they cannot be read, or are of another network than the config wants.
    """
    if config.init_from is None:
        raise ValueError(
            "config.init_from is not set: give the weights to fine-tune, --config.init_from=PATH with a workdir, an "
            ".npz or a .safetensors."
        )
    weights = initial_weights(config)
    if config.model.head == "keep":
        _require_same_classes(weights, train)
    elif config.model.head == "select":
        weights = select_classes(
            weights, match_outputs(weights, train.class_names), train.class_names
        )
    else:
        weights = without_head(weights)
    architecture = adapt_architecture(
        weights.architecture,
        config.model,
        image_size=config.input.image_size,
        num_classes=train.num_classes,
    )
    fitted = fit(weights, architecture, position_resize=config.model.position_resize)
    if config.model.head_stddev:
        fitted = _draw_last_layer(fitted, config.model.head_stddev, config.seed)
    notes = [f"note     {note}" for note in weights.notes]
    lines = [f"weights  {weights.source}", f"         {fitted.summary()}", *notes]
    return architecture, fitted, "\n".join(map(printable, lines))


def _draw_last_layer(fitted: Fitted, stddev: float, seed: int) -> Fitted:
    """Return the parameters with a kernel of the last layer from a truncated normal, drawn by the seed of the run."""
    name = "head/linear/kernel"
    key = jax.random.fold_in(jax.random.key(seed), _LAST_LAYER)
    kernel = jax.device_get(truncated_normal(key, fitted.parameters[name].shape, stddev))
    return dataclasses.replace(fitted, parameters={**fitted.parameters, name: kernel})


def _require_same_classes(weights: Weights, train: Source) -> None:
    there = weights.class_names
    here = train.class_names
    if weights.architecture.num_classes != len(here) or there not in (None, here):
        known = list(there)[:10] if there else "not named"
        raise ValueError(
            f"config.model.head='keep', but {weights.source} has {weights.architecture.num_classes} classes ({known}) "
            f"and the data {len(here)} ({list(here)[:10]}). For other classes use config.model.head=zero."
        )
    numbers = [int(name) if name.isdecimal() else -1 for name in here]
    if there is None and min(numbers) >= 0 and numbers != list(range(len(here))):
        raise ValueError(
            f"config.model.head='keep': {weights.source} does not name its classes, and the data's names are numbers "
            f"in another order ({list(here)[:10]}), so its outputs would be exchanged. Name the folders with leading "
            "zeros from 0, or use config.model.head=zero."
        )
