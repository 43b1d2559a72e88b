"""Defaults of a run from its weights, its data and the machine: recipe, length, trained parameters.

A default is an override of the recipe, which the short forms of `pretrain` and `finetune` print.
"""

import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax

from vit_jax.config import FinetuneConfig, RunConfig, load_recipe
from vit_jax.config.data_kinds import EMBEDDED
from vit_jax.config.network_options import LORA_RANK
from vit_jax.config.specification import find_open_rule
from vit_jax.data.decoding.bands import read_bands
from vit_jax.data.records import Source
from vit_jax.data.sources import open_source
from vit_jax.evals.least_squares import memory_bytes
from vit_jax.optim.by_name import find_trained
from vit_jax.sharding.fabrics import GIB
from vit_jax.storage.files import read_bounded
from vit_jax.train.assemble import assemble
from vit_jax.train.assembly import Assembly
from vit_jax.train.layout import RESERVE, usable_bytes
from vit_jax.train.starting_weights import adapt, initial_weights
from vit_jax.weights import Weights
from vit_jax.weights.description import choose_orientation

FEWEST_STEPS = 200
"""Steps of fine-tuning on a few images, of which many epochs are few steps."""
MOST_STEPS = 20_000
"""Steps of fine-tuning on many images: those of ImageNet in the paper (ViT, Table 4)."""
QUICK = "finetune:any,own,quick"
MOST_SCRATCH_IMAGES = 100_000
"""Largest number of images of the recipe `pretrain_own`."""
_HOST_FRACTION = 0.8
"""Fraction of the memory of a machine without accelerators that a run may use."""
_MEMORY_LIMIT = pathlib.Path("/sys/fs/cgroup/memory.max")
"""File with the memory of a container on Linux."""
_UNKNOWN_MEMORY = (
    f"trains   all parameters; a run without --check takes LoRA of rank {LORA_RANK} if they do not "
    "fit the memory"
)
_CHOSEN_BY_MEMORY = ("optimizer", "schedule.learning_rate")
"""Section and field that a choice of LoRA would change."""
_CHOSEN_WITH_RULE = ("optimizer.name", "schedule.learning_rate", "search")
"""Fields of the user that need the rule of the recipe: a learning rate suits one optimiser."""


class Defaults(NamedTuple):
    """The recipe of a run and changes of its values, with reasons."""

    recipe: str
    overrides: list[str]  # without the prefix "--config."
    reasons: list[str]  # lines for the log


# Fine-tuning.


def choose_finetuning(
    recipe: str | None,
    overrides: Sequence[str],
    *,
    uses_devices: bool = True,
) -> Defaults:
    """Return the defaults of a fine-tuning run.

    Args:
      recipe: a recipe of the user, whose values stay, completed by `choose_rule`; None: one that
        suits the weights.
      overrides: words of the user, "--config.FIELD=VALUE", with `init_from` and `data`.
      uses_devices: choose between LoRA and all parameters by the memory of the devices.

    Raises:
      ValueError: the weights or the data cannot be opened, or an override is invalid.
    """
    if recipe is not None:
        return choose_rule(recipe, overrides)

    weights = initial_weights(load_recipe(QUICK, overrides))
    chosen = QUICK
    reasons = [f"recipe   {QUICK}: one learning rate, for any network"]
    if weights.finetuning_rule:
        chosen = f"finetune:{weights.finetuning_rule},own"
        reasons = [f"recipe   {chosen}: for the family of the weights"]

    choices = _Choices(overrides)
    reasons += _choose_bands(choices, weights)
    config = load_recipe(chosen, choices.words)
    train = open_source(config.data, config.input.train_split, config.input, config.seed)
    if train.is_multilabel:
        choices.add("objective.loss=sigmoid")
        if config.objective.label_smoothing_fraction:
            choices.add("objective.label_smoothing_fraction=0")
    _choose_batch(choices, config.global_batch, len(train))
    is_upright = choose_orientation(weights.preprocessing, weights.training, config.data)
    if is_upright != config.input.exif_orientation:
        choices.add(f"input.exif_orientation={is_upright}")
    config = load_recipe(chosen, choices.words)
    reasons.append(_choose_length(choices, config, len(train)))
    if not choices.has_any(_CHOSEN_BY_MEMORY):
        if uses_devices:
            reasons.append(_choose_parameters(choices, chosen, train, weights))
        else:
            reasons.append(_UNKNOWN_MEMORY)
    return Defaults(chosen, choices.added, reasons)


def read_rule(config: RunConfig) -> str:
    """Return the rule for the family of the weights of a run; "" without one."""
    return initial_weights(config).finetuning_rule


def choose_rule(
    recipe: str,
    overrides: Sequence[str],
    read_rule: Callable[[RunConfig], str] = read_rule,
) -> Defaults:
    """Return a recipe with the rule for the family of the weights, if it leaves its rule open.

    "finetune:any,pets" becomes "finetune:any,pets,rule=dinov3". It stays if the user chooses the
    optimiser or learning rates, which suit one rule only.

    Args:
      recipe: any recipe.
      overrides: words of the user, "--config.FIELD=VALUE".
      read_rule: returns the rule for the weights of a config.

    Raises:
      ValueError: the weights cannot be read, or an override is invalid.
    """
    unchanged = Defaults(recipe, [], [])
    open_recipe = find_open_rule(recipe)
    if open_recipe is None or _Choices(overrides).has_any(_CHOSEN_WITH_RULE):
        return unchanged
    config = load_recipe(recipe, overrides)
    if config.init_from is None:
        return unchanged
    rule = read_rule(config)
    if not rule:
        return unchanged
    completed = f"{open_recipe}{rule}"
    return Defaults(completed, [], [f"recipe {completed}: for the family of the weights"])


def choose_lora(overrides: Sequence[str], rank: int, *, searches: bool) -> list[str]:
    """Return the overrides for LoRA as in docs/custom_images.md; values of the user stay.

    There is one learning rate unless the user searches.

    Args:
      overrides: words of the user, "--config.FIELD=VALUE".
      rank: rank of the factors.
      searches: the recipe searches its learning rate.
    """
    choices = _Choices(overrides)
    choices.add("optimizer.name=adam")
    if not choices.has_any(["search"]):
        choices.add("schedule.learning_rate=0.001")
        if searches:
            choices.add("search.learning_rates=")
    choices.add(f"optimizer.lora_rank={rank}")
    return choices.added


class _Choices:
    """Overrides of the user, and those that are added; a value of the user stays."""

    def __init__(self, given: Sequence[str]) -> None:
        self.given = list(given)
        self.added: list[str] = []

    @property
    def words(self) -> list[str]:
        """All overrides as words of a command."""
        return [*self.given, *(f"--config.{override}" for override in self.added)]

    def add(self, *overrides: str) -> None:
        """Add overrides of fields that the user does not set."""
        for override in overrides:
            field = override.partition("=")[0]
            if not self.has_any([field]):
                self.added.append(override)

    def has_any(self, fields: Sequence[str]) -> bool:
        """Return True if the user sets one of these fields, or a field of one of these sections."""
        for word in self.given:
            path = word.removeprefix("--config.").partition("=")[0]
            if any(f"{path}.".startswith(f"{field}.") for field in fields):
                return True
        return False


def _choose_bands(choices: _Choices, weights: Weights) -> list[str]:
    """Read the bands of the weights, normalised as for them; return the reason."""
    bands = read_bands(weights.preprocessing)
    if bands is None or choices.has_any(["input.channels", "input.bands"]):
        return []
    choices.add(f"input.channels={bands.count}")
    if bands.numbers:
        choices.add(f"input.bands={','.join(map(str, bands.numbers))}")
    is_scaled = choices.has_any(["input.value_range", "input.channel_mean", "input.channel_std"])
    if bands.mean and not is_scaled:
        choices.add(f"input.channel_mean={','.join(map(str, bands.mean))}")
        choices.add(f"input.channel_std={','.join(map(str, bands.std))}")
    return [f"bands    {bands.count} channels, as the weights"]


def _choose_batch(choices: _Choices, global_batch: int, num_images: int) -> None:
    """Halve the batch of the recipe until it is at most an epoch."""
    smaller = global_batch
    while smaller > max(num_images, 1):
        smaller = smaller // 2
    if smaller != global_batch:
        choices.add(f"global_batch={smaller}")


def _choose_length(choices: _Choices, config: FinetuneConfig, num_images: int) -> str:
    """Keep the epochs of the recipe, within limits of steps; return the reason."""
    epochs = float(config.total.split()[0])
    steps = round(epochs * num_images / config.global_batch)
    allowed = min(max(steps, FEWEST_STEPS), MOST_STEPS)
    if choices.has_any(["total"]):
        return f"length   {config.total}"
    if steps == allowed:
        return f"length   {config.total} of {num_images:,} images, {steps:,} steps"
    choices.add(f"total={allowed}steps")
    limit = "at least" if steps < allowed else "at most"
    return (
        f"length   {allowed:,} steps: {config.total} of {num_images:,} images are {steps:,}, "
        f"{limit} {allowed:,} are done"
    )


def _choose_parameters(choices: _Choices, recipe: str, train: Source, weights: Weights) -> str:
    """Choose between all parameters and LoRA by the memory of a step; return the reason."""
    available = _count_available_bytes()
    smallest = None
    for name, overrides in _list_trained(choices, recipe, weights):
        words = [*choices.words, *(f"--config.{override}" for override in overrides)]
        run = _assemble(load_recipe(recipe, words), train, weights)
        needed = estimate_bytes(run)
        if needed is None:
            return "trains   all parameters: the memory of this network is not known"
        smallest = (name, overrides, needed)
        if needed <= available:
            break
    assert smallest is not None, "all parameters are tried"
    name, overrides, needed = smallest
    choices.add(*overrides)
    sizes = f"{needed / GIB:,.2f} of {available / GIB:,.2f} GiB by formula"
    if needed > available:
        return f"trains   {name}, which may not fit: {sizes}"
    return f"trains   {name}: a step needs {sizes}"


def _list_trained(
    choices: _Choices, recipe: str, weights: Weights
) -> Iterator[tuple[str, list[str]]]:
    """Yield all parameters and LoRA; on CPUs, where no layout is chosen, each with micro-batches."""
    micro_batches = [1]
    if jax.devices()[0].platform == "cpu":
        images = load_recipe(recipe, choices.words).global_batch // jax.device_count()
        while images % (2 * micro_batches[-1]) == 0:
            micro_batches.append(2 * micro_batches[-1])

    trained: dict[str, list[str]] = {"all parameters": []}
    if weights.architecture.has_transformer and not weights.architecture.has_resnet:
        lora = choose_lora(choices.words, LORA_RANK, searches=False)
        trained[f"LoRA of rank {LORA_RANK}"] = lora
    for name, overrides in trained.items():
        for number in micro_batches:
            steps = [f"optimizer.accumulation_steps={number}"] if number > 1 else []
            yield name, [*overrides, *steps]


def _assemble(config: FinetuneConfig, train: Source, weights: Weights) -> Assembly:
    start = adapt(config, train, weights)
    return assemble(
        start.config,
        start.architecture,
        num_examples=len(train),
        label_shape=train.label_shape,
        devices=jax.devices(),
    )


def estimate_bytes(run: Assembly) -> int | None:
    """Return the memory of a step on one device by formula; None for a network without one."""
    if not run.architecture.is_standard:
        return None
    from vit_jax.train.step_memory import step_memory

    memory = step_memory(
        run.training_architecture,
        run.abstract_state,
        image_size=run.architecture.image_size,
        global_batch=run.config.global_batch,
        accumulation_steps=run.config.optimizer.accumulation_steps or 1,
        trained=find_trained(run.config.optimizer),
        tiled=jax.devices()[0].platform == "tpu",
        teacher=run.teacher.abstract.network if run.teacher is not None else None,
    )
    return memory.total


def _count_available_bytes() -> int:
    """Return the memory of a device that a step may use; CPU devices share the machine's."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return int((1 - RESERVE) * usable_bytes(device))
    return int(_HOST_FRACTION * _read_host_bytes()) // jax.local_device_count()


def _read_host_bytes() -> int:
    """Return the memory of this machine, or of its container."""
    total = memory_bytes()
    try:
        limit = int(read_bounded(_MEMORY_LIMIT, 100))
    except (OSError, ValueError):  # another system, or "max": there is no limit
        return total
    return min(total, limit)


# Pre-training.


def choose_pretraining(recipe: str | None, data: str, overrides: Sequence[str]) -> Defaults:
    """Return the defaults of a pre-training run on these data.

    Args:
      recipe: a recipe of the user, whose values stay; None: one that suits the data.
      data: with its kind.
      overrides: words of the user, with `data`.

    Raises:
      ValueError: the data cannot be opened, or an override is invalid.
    """
    if recipe is not None:
        return Defaults(recipe, [], [])
    if data in EMBEDDED:
        return Defaults(data, [], [])

    config = load_recipe("pretrain_own", overrides)
    train = open_source(data, config.input.train_split, config.input, config.seed)
    num_images = len(train)
    choices = _Choices(overrides)
    chosen = f"pretrain_own:ViT-Ti/16,examples={num_images}"
    if num_images > MOST_SCRATCH_IMAGES:
        chosen = "pretrain_s16_baseline"
        choices.add("input.train_split=train", "input.test_split=test")
    if train.is_multilabel:
        choices.add("objective.loss=sigmoid")
    config = load_recipe(chosen, choices.words)
    if choose_orientation(None, None, data) != config.input.exif_orientation:
        choices.add(f"input.exif_orientation={not config.input.exif_orientation}")
    _choose_batch(choices, config.global_batch, num_images)
    reason = f"recipe   {chosen}: from scratch on {num_images:,} images, {config.total}"
    return Defaults(chosen, choices.added, [reason])
