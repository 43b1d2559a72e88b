"""Architectures from configs, from names and from stored descriptions."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from vit_jax.config.architecture import Architecture, Family
from vit_jax.config.architecture_rules import require_valid
from vit_jax.config.field_checks import find_ineffective_fields, reject
from vit_jax.config.network_options import ComputeOptions
from vit_jax.config.parsing import from_dict
from vit_jax.config.rules import Component, read_rules
from vit_jax.config.schema import ModelConfig
from vit_jax.config.sizes import (
    BOTTLENECK,
    RESIDUAL_UNITS,
    RGB_CHANNELS,
    ROOT_CHANNELS,
    VIT_SIZES,
)
from vit_jax.config.variants import ModelName, parse_name

_MISSING_COMPONENT = {"vit": "ResNet", "resnet": "Transformer"}
_STORED_ALWAYS = {"family", "units", "width_factor"}


def build_architecture(
    config: ModelConfig,
    *,
    image_size: tuple[int, int],
    num_classes: int,
    patch_outputs: int = 0,
    channels: int = RGB_CHANNELS,
) -> Architecture:
    """Return the network of a config, with every number of its name.

    Args:
      config: section `model`.
      image_size: height and width in pixels.
      num_classes: number of logits; 0 for a network without them.
      patch_outputs: numbers predicted for each masked patch; 0 without masked patches.
      channels: channels of the images.

    Raises:
      ValueError: unknown name, an option that this family has no use for, or numbers that do not
        fit together (patch and image, width and heads).
    """
    name = parse_name(config.name)
    family = _find_family(name)
    reject(_find_ineffective(config, family))

    units = name.units or ()
    patch_size = name.patch
    if family == "hybrid":
        units, patch_size = _split_downsampling(config.name, name)

    fields = _get_default_forms(config, family)
    if patch_outputs:
        fields["head"] = "linear"
    fields |= _get_default_sizes(name, units)
    for field, value in vars(config).items():
        if value is not None:
            fields[field] = value
    fields |= read_compute_options(config)

    a = Architecture(
        family=family,
        units=units,
        width_factor=name.width_factor,
        image_size=image_size,
        channels=channels,
        patch_size=patch_size,
        num_classes=num_classes,
        patch_outputs=patch_outputs,
        **fields,
    )
    return require_valid(a)


def build_named_architecture(name: str) -> Architecture:
    """Return the network of this name, for one class and an image size that its patches divide."""
    height, width = parse_name(name).patch
    image_size = (32 * height, 32 * width)
    return build_architecture(ModelConfig(name=name), image_size=image_size, num_classes=1)


def read_architecture(values: Mapping[str, Any]) -> Architecture:
    """Return an architecture from the JSON of its `dataclasses.asdict`.

    Raises:
      ValueError: fields are missing, unknown, or do not fit together.
    """
    missing = sorted(_STORED_ALWAYS - set(values))
    if missing:  # their defaults would be another network
        raise ValueError(f"The stored description of the network lacks {', '.join(missing)}.")

    try:
        a = from_dict(Architecture, values, "architecture.")
        return require_valid(a, drops_border=True)
    except ValueError as error:
        raise ValueError(f"The stored description of the network cannot be used. {error}") from None


def read_compute_options(config: ComputeOptions) -> dict[str, Any]:
    """Return the options of computing; a run on devices replaces those of `auto`."""
    options = {}
    for field in dataclasses.fields(ComputeOptions):
        options[field.name] = getattr(config, field.name)

    if config.remat == "auto":
        options["remat"] = "none"
    if config.compute_dtype == "auto":
        options["compute_dtype"] = "bfloat16"
    return options


def _find_family(name: ModelName) -> Family:
    """Return the family of a name, by its size and its residual units."""
    if name.size is None:
        return "resnet"
    if name.units is None:
        return "vit"
    return "hybrid"


def _get_default_forms(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Return the pooling, the head and the residual unit of a family."""
    forms: dict[str, Any] = {"pool": "token", "head": "mlp", "residual_unit": "postactivation"}
    if family == "resnet":
        forms = {"pool": "gap", "head": "linear", "residual_unit": "preactivation"}
    elif config.block == "axial":
        forms["pool"] = "gap"
    if config.residual_unit is not None:
        forms["residual_unit"] = config.residual_unit
    return forms | vars(RESIDUAL_UNITS[forms["residual_unit"]])


def _get_default_sizes(name: ModelName, units: tuple[int, ...]) -> dict[str, Any]:
    """Return the width, the depth, the MLP dimension and the heads of a name."""
    if name.size is not None:
        return dict(vars(VIT_SIZES[name.size]))
    root_channels = round(ROOT_CHANNELS * name.width_factor)
    width = root_channels * BOTTLENECK * 2 ** (len(units) - 1)
    return {"width": width, "depth": 0, "mlp_dim": 0, "num_heads": 0}


def _split_downsampling(text: str, name: ModelName) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return the stages and the patch of a hybrid, whose number is the total downsampling.

    A full ResNet of four stages divides by 32. For less, the units of removed stages join the last
    remaining one (ViT, sec. 4.1, option ii: R50+ViT-B/16 has stages of 3, 4 and 9). The root alone
    is counted as dividing by 2, as the name R+Ti/16 does, though its convolution and its pooling
    divide by 4.
    """
    units = name.units
    height, width = name.patch
    is_square = height == width
    if not units and is_square and height >= 2 and height % 2 == 0:
        return (), (height // 2, height // 2)

    if units and is_square and height in (4, 8, 16, 32):
        num_stages = height.bit_length() - 2  # 4: one stage, 32: four
        last_stage = sum(units[num_stages - 1 :])
        return (*units[: num_stages - 1], last_stage), (1, 1)

    if units and is_square and height > 32 and height % 32 == 0:
        return units, (height // 32, height // 32)

    raise ValueError(
        f"model.name={text!r}: the number of a hybrid is its total downsampling: must be 4, 8, 16, "
        "32 or a multiple of 32, or an even number where the ResNet is the root alone."
    )


def _find_ineffective(config: ModelConfig, family: Family) -> Iterator[str]:
    """Yield options that have no effect on this family."""
    missing = _MISSING_COMPONENT.get(family)
    if missing is not None:
        yield from _find_missing_component(config, missing)
    yield from find_ineffective_fields(config, config, "model.")
    if family == "resnet" and config.pool not in (None, "gap"):
        yield f"model.pool={config.pool!r}: must be gap for {config.name}. Use gap or None."
    if family == "hybrid" and config.residual_unit == "preactivation":
        rule = "must be postactivation in a hybrid (ViT, sec. 4.1)"
        yield f"model.residual_unit='preactivation': {rule}. Use None."


def _find_missing_component(config: ModelConfig, component: str) -> Iterator[str]:
    """Yield options of a component that the network does not have."""
    rules = read_rules(ModelConfig)
    rule = f"has no effect on {config.name}, without a {component}"
    for field in dataclasses.fields(ModelConfig):
        value = getattr(config, field.name)
        if Component(component) in rules[field.name] and value != field.default:
            yield f"model.{field.name}={value!r}: {rule}. Leave it at {field.default!r}."
