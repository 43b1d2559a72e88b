"""The weights that a run begins with, and the network that fine-tuning makes of them."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import jax

from vit_jax.config import (
    Architecture,
    FinetuneConfig,
    InputConfig,
    RunConfig,
    adapt_architecture,
)
from vit_jax.config.network_options import LEARNED_POSITIONS
from vit_jax.config.parsing import find_references
from vit_jax.config.run_rules import check_rotation
from vit_jax.data.records import Source
from vit_jax.evals.imagenet_classes import match_outputs
from vit_jax.models.initial_values import sample_truncated_normal
from vit_jax.text.printable import printable
from vit_jax.weights import Weights, load_weights
from vit_jax.weights.channels import describe_adaptation
from vit_jax.weights.fit import Fitted, fit
from vit_jax.weights.head_edits import remove_head, select_classes
from vit_jax.weights.image_channels import expect_standardised_channels

C = TypeVar("C", bound=RunConfig)

_LAST_LAYER = 2**31 - 2
"""Number of a stream of random numbers of the seed. No step has it."""


class Start(NamedTuple):
    """The beginning of a fine-tuning run."""

    architecture: Architecture
    fitted: Fitted
    config: FinetuneConfig  # with the values of the weights where it leaves them open
    report: str  # lines on the weights and what was done to them


def initial_weights(config: RunConfig) -> Weights:
    """Return the weights of `config.init_from`, whose code the config must allow or name.

    Raises:
      ValueError: they do not exist or cannot be read, or need other code.
    """
    assert config.init_from is not None, "the caller checks it"
    allowed = list(config.allow_code)
    for field, reference in find_references(config):
        if field.startswith("model."):
            allowed.append(reference)
    return load_weights(
        config.init_from,
        allow_code=allowed,
        keep_size=config.input.image_size is not None,
    )


def adapt(config: FinetuneConfig, train: Source, weights: Weights | None = None) -> Start:
    """Load the weights of `config.init_from`, unless they are given, and fit them to the data.

    Raises:
      ValueError: no weights are given, they cannot be read, or are of another network than the
        config wants.
    """
    if config.init_from is None:
        raise ValueError(
            "config.init_from is not set: give the weights to fine-tune, --config.init_from=PATH "
            "with a workdir, an .npz or a .safetensors."
        )
    if weights is None:
        weights = initial_weights(config)
    config, choices = follow_weights(config, weights)
    choices += _describe_rule(config, weights)
    kept = keep_outputs(weights, config.model.head, train)
    if config.input.standardises_bands:
        kept = expect_standardised_channels(kept)
    architecture = adapt_architecture(
        kept.architecture,
        config.model,
        image_size=config.input.pixels,
        num_classes=train.num_classes,
        channels=config.input.channels,
    )
    if architecture.pool != weights.architecture.pool and architecture.has_transformer:
        choices.append(
            f"Pooling is {architecture.pool}, in the weights {weights.architecture.pool}: "
            "config.model.pool."
        )
    fitted = fit(
        kept,
        architecture,
        position_resize=config.model.position_resize,
        channel_weights=config.model.channel_weights,
    )
    if architecture.channels != kept.architecture.channels:
        note = describe_adaptation(
            kept.architecture.channels,
            architecture.channels,
            config.model.channel_weights,
            "config.model.channel_weights",
        )
        choices.append(note)
    if config.model.head_stddev:
        fitted = _draw_last_layer(fitted, config.model.head_stddev, config.seed)
    lines = [f"weights  {kept.source}", f"         {fitted.summary()}"]
    for note in [*kept.notes, *choices]:
        lines.append(f"note     {note}")
    report = "\n".join(map(printable, lines))
    return Start(architecture, fitted, config, report)


def follow_weights(
    config: FinetuneConfig,
    weights: Weights,
) -> tuple[FinetuneConfig, list[str]]:
    """Return the config with values of the weights where it leaves them open, and notes on these.

    Open are `input.image_size=None` and `input.test_resize="weights"`.
    """
    inputs = config.input
    notes = []
    if inputs.image_size is None:
        image_size = weights.architecture.image_size
        inputs = dataclasses.replace(inputs, image_size=image_size)
        problem = check_rotation(dataclasses.replace(config, input=inputs))
        if problem is not None:
            raise ValueError(f"config.{problem}")
        notes.append(
            f"Images have the {image_size[0]}x{image_size[1]} pixels of the weights: "
            "config.input.image_size."
        )
    if inputs.test_resize == "weights":
        inputs, note = _follow_preparation(inputs, weights.preprocessing or {})
        notes.append(note)
    model = config.model
    a = weights.architecture
    if inputs.pixels != a.image_size and model.position_resize == "library":
        if a.rope == "index" and weights.format == "timm":
            model = dataclasses.replace(model, rope_rescale=True)
        notes += _describe_positions(weights)
    return dataclasses.replace(config, input=inputs, model=model), notes


def _describe_rule(config: FinetuneConfig, weights: Weights) -> list[str]:
    """Return a note if the family of the weights has a rule, and the run another optimiser."""
    rule = weights.finetuning_rule
    if not rule or config.optimizer.name == "adam":
        return []
    return [f"The family of the weights has a rule with AdamW: --config=finetune:{rule},TASK."]


def _follow_preparation(inputs: InputConfig, stated: Mapping[str, Any]) -> tuple[InputConfig, str]:
    """Return the input with the preparation of test images that weights state, and a note."""
    if not stated.get("resize"):
        inputs = dataclasses.replace(inputs, test_resize="direct")
        return inputs, "The weights state no preparation: test images are resized directly."

    values: dict[str, Any] = {"test_resize": stated["resize"]}
    if stated["resize"] == "short_side":
        values["test_crop_fraction"] = float(stated["crop_fraction"])
    if inputs.test_interpolation is None and stated.get("interpolation"):
        values["test_interpolation"] = stated["interpolation"]
    if values.get("test_interpolation") and stated.get("resize_library") == "timm":
        values["test_resize_library"] = "timm"
    shown = ", ".join(f"{name}={value}" for name, value in values.items())
    return (
        dataclasses.replace(inputs, **values),
        f"Test images are prepared as for the weights: {shown}.",
    )


def _describe_positions(weights: Weights) -> list[str]:
    """Return a note on the resizing of learned positions, if there are any."""
    a = weights.architecture
    if not a.has_transformer or a.position_embedding not in LEARNED_POSITIONS:
        return []
    method = weights.choose_resize_method()
    return [f"Positions are resized as in the library of the weights: {method}."]


def read_network(config: FinetuneConfig, num_classes: int) -> tuple[Architecture, str]:
    """Return the network that `adapt` makes of the weights, and their source, without data.

    The outputs that `config.model.head` keeps are not compared with the classes of the data.

    Raises:
      ValueError: weights are missing, cannot be read, or are of another network.
    """
    weights = initial_weights(config)
    config, _ = follow_weights(config, weights)
    if config.model.head == "zero":
        weights = remove_head(weights)
    architecture = adapt_architecture(
        weights.architecture,
        config.model,
        image_size=config.input.pixels,
        num_classes=num_classes,
        channels=config.input.channels,
    )
    return architecture, printable(weights.source)


def set_open_size(config: C, architecture: Architecture) -> C:
    """Return the config with the image size of the network, if it leaves it to the weights."""
    if config.input.image_size is not None:
        return config
    inputs = dataclasses.replace(config.input, image_size=architecture.image_size)
    return dataclasses.replace(config, input=inputs)


def keep_outputs(weights: Weights, head: str, train: Source) -> Weights:
    """Return the weights with the outputs that `config.model.head` keeps.

    Raises:
      ValueError: the weights have no such outputs for the classes of the data.
    """
    if head == "keep":
        _require_same_classes(weights, train)
        return weights
    if head == "select":
        outputs = match_outputs(weights, train.class_names)
        return select_classes(weights, outputs, train.class_names)
    return remove_head(weights)


def _draw_last_layer(fitted: Fitted, stddev: float, seed: int) -> Fitted:
    """Return the parameters with a random kernel of the last layer, from a truncated normal."""
    name = "head/linear/kernel"
    key = jax.random.fold_in(jax.random.key(seed), _LAST_LAYER)
    kernel = jax.device_get(sample_truncated_normal(key, fitted.parameters[name].shape, stddev))
    return dataclasses.replace(fitted, parameters={**fitted.parameters, name: kernel})


def _require_same_classes(weights: Weights, train: Source) -> None:
    """Raise ValueError unless the outputs of the weights are the classes of the data in order."""
    there = weights.class_names
    here = train.class_names
    if weights.architecture.num_classes != len(here) or there not in (None, here):
        known = list(there)[:10] if there else "not named"
        raise ValueError(
            f"config.model.head='keep', but {weights.source} has "
            f"{weights.architecture.num_classes} classes ({known}) and the data {len(here)} "
            f"({list(here)[:10]}). For other classes use config.model.head=zero."
        )
    if there is not None or not all(name.isdecimal() for name in here):
        return
    numbers = list(map(int, here))
    if numbers != list(range(len(here))):
        raise ValueError(
            f"config.model.head='keep': {weights.source} does not name its classes, and the data's "
            f"names are numbers in another order ({list(here)[:10]}), so its outputs would be "
            "exchanged. Name the folders with leading zeros from 0, or use config.model.head=zero."
        )
