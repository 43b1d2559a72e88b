"""Options that several verbs take: groups of fields, and bases of the verbs that read a recipe.

`--weights.FIELD` describes weights, `--images.FIELD` prepares their images. A field is declared
here once; a verb states which groups it takes. `load_model` gives both to the model.
"""

import dataclasses
import math
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from vit_jax.cli.options import (
    Group,
    Overrides,
    PositiveShare,
    Recipe,
    UsageError,
    option,
    switch,
)
from vit_jax.cli.outputs import note
from vit_jax.config.network_options import LORA_RANK, AddedTo, Gelu, Rope
from vit_jax.config.rules import Count, Positive, Range
from vit_jax.config.schema import ChannelWeights, Interpolation
from vit_jax.weights import OPTIONS

if TYPE_CHECKING:
    from jax.sharding import Sharding

    from vit_jax.api import Model
    from vit_jax.config import InputConfig
    from vit_jax.data.decoding.bands import BandChoice
    from vit_jax.evals.splits import SplitChoice
    from vit_jax.weights import Weights


def _read_size(text: str) -> tuple[int, int]:
    """Return height and width of "HEIGHT,WIDTH", or of one number for both."""
    height, comma, width = text.partition(",")
    return _read_side(height), _read_side(width if comma else height)


def _read_side(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ValueError("must be SIDE or HEIGHT,WIDTH in pixels. Use 224, or 224,160")
    return int(text)


def _read_range(text: str) -> tuple[float, float]:
    """Return LOW and HIGH of "LOW,HIGH"."""
    problem = "must be LOW,HIGH, two finite numbers, LOW < HIGH"
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise ValueError(problem) from None
    if not -math.inf < low < high < math.inf:
        raise ValueError(problem)
    return low, high


def _describe_facts() -> dict[str, tuple[str, str]]:
    """Return form and meaning of each fact in `weights.OPTIONS`; of a choice the type has the form."""
    facts = {}
    for name, (form, meaning) in OPTIONS.items():
        if "|" in form:
            form = ""
        facts[name] = (form, f"{meaning}; default: as in the file")
    return facts


_FACTS = _describe_facts()


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllowedCode(Group):
    """Packages whose code the weights may run."""

    PREFIX: ClassVar[str] = "weights"

    allow_code: str | None = option(
        "PACKAGE,…", "packages whose code the weights may run; default: none"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightFields(AllowedCode):
    """Facts that the file of the weights does not state."""

    raw: bool = switch("use a workdir's parameters, not their Polyak average")
    image_size: Annotated[tuple[int, int] | None, _read_size] = option(
        "H,W",
        "image size in pixels, or one number for both sides; learned positions are resized as in "
        "the library of the weights",
    )
    architecture: str | None = option(*_FACTS["architecture"])
    num_heads: Count | None = option(*_FACTS["num_heads"])
    gelu: Gelu | None = option(*_FACTS["gelu"])
    layer_norm_epsilon: Positive | None = option(*_FACTS["layer_norm_epsilon"])
    group_norm_epsilon: Positive | None = option(*_FACTS["group_norm_epsilon"])
    standardization_epsilon: Positive | None = option(*_FACTS["standardization_epsilon"])
    standardization_epsilon_added_to: AddedTo | None = option(
        *_FACTS["standardization_epsilon_added_to"]
    )
    rope: Rope | None = option(*_FACTS["rope"])
    position_embedding: Literal["learned_1d", "learned_2d", "sincos2d", "none"] | None = option(
        *_FACTS["position_embedding"]
    )
    compute_dtype: Literal["float32", "bfloat16"] = option("", "dtype of activations", "float32")

    def collect_facts(self) -> dict[str, Any]:
        """Return the options as `load_weights` takes them."""
        return self.collect_values(*OPTIONS, "allow_code")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageFields(Group):
    """Image preparation; default: as stored."""

    PREFIX: ClassVar[str] = "images"

    resize: Literal["direct", "short_side"] | None = option(
        "", "method that resizes images; default: as in the weights"
    )
    crop_fraction: PositiveShare | None = option(
        "X", "fraction of both sides that a central crop keeps"
    )
    interpolation: Interpolation | None = option(
        "", "antialiased filter; default: as in the weights"
    )
    exif_orientation: Literal["applied", "ignored"] | None = option(
        "", "turn photographs upright; default: as in training, and applied to other files"
    )
    value_range: Annotated[tuple[float, float] | None, _read_range] = option(
        "LOW,HIGH",
        "values of files of more than 8 bits that become 0 and 255; of bands -1 and 1; default: as "
        "in training",
    )
    channels: Annotated[int | None, Range("[1, 32]")] = option(
        "N", "number of channels of the images; default: as the weights"
    )
    bands: tuple[Count, ...] | None = option(
        "N,…", "stored bands to read, in this order, counted from 1; default: all"
    )
    channel_mean: tuple[float, ...] | None = option(
        "X,…", "stored value of each channel that becomes 0; default: of the training images"
    )
    channel_std: tuple[Positive, ...] | None = option(
        "X,…", "difference that becomes 1, of each channel; default: of the training images"
    )
    channel_weights: ChannelWeights | None = option(
        "", "first kernel for other channels than the weights have, as in finetune; default: cyclic"
    )

    def reject_channel_weights(self, reason: str) -> None:
        """Raise UsageError if a method is set, which has no effect for this reason."""
        method = self.channel_weights
        if method is not None:
            raise UsageError(
                f"--images.channel_weights={method}: has no effect {reason}. Leave it out."
            )

    def choose_input(self, stored: "BandChoice | None") -> "InputConfig | None":
        """Return the input with the chosen channels; None without an option of them.

        `stored` are the bands of the weights, which are read unless others are chosen.
        """
        values = self.collect_values("channels", "bands", "channel_mean", "channel_std")
        if not values:
            self.reject_channel_weights("without --images.channels")
            return None
        if stored is not None and not values.keys() & {"channels", "bands"}:
            values["channels"] = stored.count
            values["bands"] = stored.numbers

        from vit_jax.config import InputConfig
        from vit_jax.config.run_rules import find_band_problem, find_scale_problem

        inputs = InputConfig(
            train_split="train",
            test_split="test",
            image_size=(1, 1),  # neither it nor the splits are used
            value_range=self.value_range,
            **values,
        )
        for problem in (find_band_problem(inputs), find_scale_problem(inputs)):
            if problem is not None:
                raise UsageError(re.sub(r"\b(config\.)?input\.", "--images.", problem))
        return inputs

    def collect_options(self) -> dict[str, Any]:
        """Return the options as `from_weights` takes them."""
        is_oriented = None
        if self.exif_orientation is not None:
            is_oriented = self.exif_orientation == "applied"
        return {
            "resize": self.resize,
            "crop_fraction": self.crop_fraction,
            "interpolation": self.interpolation,
            "exif_orientation": is_oriented,
            "value_range": self.value_range,
        }


GROUPS = (WeightFields, ImageFields)


def load_model(
    checkpoint: str,
    weight_fields: WeightFields,
    image_fields: ImageFields,
    *,
    data: str = "",
    measured_data: str | None = None,
    choice: "SplitChoice | None" = None,
    class_names: list[str] | None = None,
    is_placed: bool = False,
    needs_classes: bool = True,
    needs_transform: bool = True,
    uses_preparation: bool = True,
    uses_head: bool = True,
) -> "tuple[Model, Weights]":
    """Load a model and print notes about its weights.

    Args:
      checkpoint: path or address of the weights.
      weight_fields: facts about the weights.
      image_fields: preparation of images.
      data: datasets of the images; "": image files.
      measured_data: dataset whose training images determine the normalisation of channels that no
        option states; None: `data`.
      choice: its splits and classes.
      class_names: names of the classes; default: of the weights.
      is_placed: put the parameters on every device of all processes, not on one device.
      needs_classes: reject weights without a classifier.
      needs_transform: reject weights that do not state how images are prepared.
      uses_preparation: prepare images by the options; False: the caller builds another preparation.
      uses_head: print warnings about the head.
    """
    from vit_jax import hosts
    from vit_jax.api import from_weights

    weights = _load_weights(checkpoint, weight_fields, class_names)
    weights = _adapt_channels(weights, image_fields, measured_data or data, choice)
    if hosts.is_first():
        note(*weights.notes)
        if uses_head:
            note(*weights.warnings())

    if not uses_preparation:
        image_fields = ImageFields()
    model = from_weights(
        weights,
        compute_dtype=weight_fields.compute_dtype,
        sharding=_choose_sharding(is_placed=is_placed),
        data=data,
        **image_fields.collect_options(),
    )
    if hosts.is_first():
        printed = {*weights.notes, *weights.warnings()}
        note(*(text for text in model.notes if text not in printed))
    if needs_classes:
        model.require_classes()
    if needs_transform:
        model.require_transform()
    return model, weights


def _load_weights(
    checkpoint: str,
    weight_fields: WeightFields,
    class_names: list[str] | None,
) -> "Weights":
    """Return the weights by the stated facts."""
    from vit_jax.weights import load_weights

    facts = weight_fields.collect_facts()
    if class_names is not None:
        facts["class_names"] = class_names
    return load_weights(checkpoint, polyak=not weight_fields.raw, **facts)


def _choose_sharding(*, is_placed: bool) -> "Sharding | None":
    """Return the layout on every device of all processes; None for one device."""
    if not is_placed:
        return None

    import jax

    from vit_jax.sharding import build_mesh, replicate

    return replicate(build_mesh(jax.devices()))


def _adapt_channels(
    weights: "Weights",
    image_fields: ImageFields,
    data: str,
    choice: "SplitChoice | None",
) -> "Weights":
    """Return the weights for the channels that the options choose, with a note on the change."""
    from vit_jax.data.decoding.bands import choose_bands, read_bands

    inputs = image_fields.choose_input(read_bands(weights.preprocessing))
    if inputs is None:
        return weights
    if inputs.standardises_bands and not inputs.channel_mean:
        inputs = _measure_channels(weights, inputs, data, choice)

    from vit_jax.weights.image_channels import expect_standardised_channels, set_bands

    stored = weights.architecture.channels
    if stored == inputs.channels:
        reason = f"on images with the {stored} channels of the weights"
        image_fields.reject_channel_weights(reason)
    if inputs.standardises_bands:
        weights = expect_standardised_channels(weights)
    return set_bands(
        weights,
        inputs.channels,
        choose_bands(inputs),
        method=image_fields.channel_weights or "cyclic",
        option="--images.channel_weights",
    )


def _measure_channels(
    weights: "Weights",
    inputs: "InputConfig",
    data: str,
    choice: "SplitChoice | None",
) -> "InputConfig":
    """Return the input with mean and standard deviation of the training images, as in finetune.

    Raises:
      UsageError: there is not one dataset.
    """
    if not data or "," in data:
        raise UsageError(
            f"--images.channels={inputs.channels}: must have one dataset, whose training images are "
            "measured, or a normalisation. Add --images.value_range=LOW,HIGH, or "
            "--images.channel_mean= and --images.channel_std=."
        )

    from vit_jax.data.channel_statistics import measure_bands
    from vit_jax.data.decoding.bands import BandChoice
    from vit_jax.evals.splits import SplitChoice, open_train_split

    bands = BandChoice(inputs.channels, inputs.bands)
    choice = dataclasses.replace(choice or SplitChoice(), bands=bands)
    source = open_train_split(data, choice, weights.training)
    mean, std = measure_bands(source, inputs)
    return dataclasses.replace(inputs, channel_mean=mean, channel_std=std)


# Recipes that leave values to the weights.


def use_no_accelerator() -> None:
    """Let JAX start on CPUs alone, in a command that executes nothing."""
    os.environ["JAX_PLATFORMS"] = "cpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartedRecipe(Recipe):
    """A recipe whose run is planned or tried, with the rule for the family of its weights."""

    def complete(self, words: Sequence[str]) -> Self:
        """Return the options with a rule where `finetune:any` leaves it open."""
        return dataclasses.replace(self, config=complete_rule(self.config, self.overrides))


def complete_rule(recipe: str, overrides: Sequence[str], *, joins: bool = False) -> str:
    """Return a recipe with the rule for the family of the weights, if it leaves its rule open.

    A note names the rule.

    Args:
      recipe: any recipe.
      overrides: words "--config.FIELD=VALUE".
      joins: join the other processes first, of which one prints the note.

    Raises:
      ValueError: the weights cannot be read.
    """
    from vit_jax.config.specification import find_open_rule

    if find_open_rule(recipe) is None:
        return recipe

    from vit_jax import hosts
    from vit_jax.train.run_defaults import choose_rule

    if joins:
        hosts.start()
    chosen = choose_rule(recipe, overrides)
    if not joins or hosts.is_first():
        note(*chosen.reasons)
    return chosen.recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraOption(Overrides):
    """The option --lora, alone or with a rank."""

    lora: Count | None = option(
        "=RANK",
        f"train low-rank factors beside the kernels (LoRA) by Adam; default: {LORA_RANK}",
        bare=LORA_RANK,
    )

    def expand_lora(self, recipe: str | None) -> Self:
        """Return the options with overrides in the place of --lora.

        Args:
          recipe: the recipe, with a rule; None: one that suits the weights.

        Raises:
          UsageError: the recipe pre-trains.
        """
        if self.lora is None:
            return self

        from vit_jax.config import FinetuneConfig, load_recipe
        from vit_jax.train.run_defaults import choose_lora

        searches = False
        if recipe is not None:
            config = load_recipe(recipe, self.overrides)
            if not isinstance(config, FinetuneConfig):
                raise UsageError(f"--lora: must be with a recipe of fine-tuning, not {recipe}.")
            searches = bool(config.search.learning_rates)
        added = choose_lora(self.overrides, self.lora, searches=searches)
        overrides = [*self.overrides, *(f"--config.{override}" for override in added)]
        return dataclasses.replace(self, overrides=overrides, lora=None)
