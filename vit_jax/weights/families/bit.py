"""Big Transfer: ResNets of pre-activation units, in the authors' files (.npz) and timm's.

In the authors' files a, b and c hold the norm before each convolution. Some end the names of layers
in a number and some lack the leading `resnet/`; both are read.
"""

import re
from collections.abc import Iterable, Mapping

from vit_jax.config.architecture import Architecture
from vit_jax.config.sizes import RESNET_UNITS
from vit_jax.weights.family import Family, TimmBody, expand_all, read_deprecated, read_models
from vit_jax.weights.names.entry import Rule, invert
from vit_jax.weights.names.facts import Facts, count_classes, count_units, read_shape
from vit_jax.weights.names.format import Format
from vit_jax.weights.names.ours import Shape

_MODELS = """
resnet
  resnetv2_101x1_bit resnetv2_101x3_bit resnetv2_152x2_bit resnetv2_152x4_bit resnetv2_50x1_bit
  resnetv2_50x3_bit
"""
_DEPRECATED = """
resnetv2_101x1_bitm resnetv2_101x1_bit
resnetv2_101x1_bitm_in21k resnetv2_101x1_bit
resnetv2_101x3_bitm resnetv2_101x3_bit
resnetv2_101x3_bitm_in21k resnetv2_101x3_bit
resnetv2_152x2_bit_teacher resnetv2_152x2_bit
resnetv2_152x2_bit_teacher_384 resnetv2_152x2_bit
resnetv2_152x2_bitm resnetv2_152x2_bit
resnetv2_152x2_bitm_in21k resnetv2_152x2_bit
resnetv2_152x4_bitm resnetv2_152x4_bit
resnetv2_152x4_bitm_in21k resnetv2_152x4_bit
resnetv2_50x1_bit_distilled resnetv2_50x1_bit
resnetv2_50x1_bitm resnetv2_50x1_bit
resnetv2_50x1_bitm_in21k resnetv2_50x1_bit
resnetv2_50x3_bitm resnetv2_50x3_bit
resnetv2_50x3_bitm_in21k resnetv2_50x3_bit
"""
_SIZES = ((50, 1), (50, 3), (101, 1), (101, 3), (152, 2), (152, 4))
"""Depths and width factors of the published networks."""

_ROOT = "resnet/root_block/standardized_conv2d/kernel"
_NUMBERED_LAYER = re.compile(r"(standardized_conv2d|group_norm|conv2d)_\d+(?=/)")
_LEAVES = {"scale": "gamma", "bias": "beta"}
_PARTS = {"1": "a", "2": "b", "3": "c", "shortcut": "a/proj"}


def _name_part(match: re.Match[str]) -> str:
    """Return the name of a part of a unit, with its norm and convolution."""
    stage, unit, part = match.groups()[:3]
    return f"resnet/block{stage}/unit{int(unit):02}/{_PARTS[part]}"


def _name_conv(match: re.Match[str]) -> str:
    return f"{_name_part(match)}/standardized_conv2d/kernel"


def _name_norm(match: re.Match[str]) -> str:
    return f"{_name_part(match)}/group_norm/{_LEAVES[match[4]]}"


def _name_final_norm(match: re.Match[str]) -> str:
    return f"resnet/group_norm/{_LEAVES[match[1]]}"


def make_rules(a: Architecture, shapes: Mapping[str, Shape]) -> list[Rule]:
    """Return the names of pre-activation ResNets, which are the same for all."""
    unit = r"body/stage(\d+)/unit(\d+)"
    return [
        Rule(r"body/root/conv/kernel", _ROOT),
        Rule(rf"{unit}/conv([123])/kernel", _name_conv),
        Rule(rf"{unit}/norm([123])/(\w+)", _name_norm),
        Rule(rf"{unit}/(shortcut)/conv/kernel", _name_conv),
        Rule(r"norm/(\w+)", _name_final_norm),
        Rule(r"head/linear/kernel", "resnet/head/conv2d/kernel", "io->11io"),
        Rule(r"head/linear/bias", "resnet/head/conv2d/bias"),
    ]


def find_canonical(names: Iterable[str]) -> dict[str, str] | None:
    """Return names with the prefix, without numbers of layers → names in the file.

    It is None for another format.
    """
    full_names = {name: _complete_name(name) for name in names}
    if _ROOT not in full_names.values():
        return None
    return invert(full_names)


def _complete_name(name: str) -> str:
    """Return a name with the prefix, without numbers of layers."""
    plain_name = _NUMBERED_LAYER.sub(r"\1", name)
    if plain_name.startswith("resnet/"):
        return plain_name
    return f"resnet/{plain_name}"


def find_facts(shapes: Mapping[str, Shape]) -> Facts:
    """Return the facts of a file, without an image size: a ResNet takes any.

    Raises:
      ValueError: an array is missing, or has a wrong shape.
    """
    return Facts(
        family="resnet",
        width=read_shape(shapes, "resnet/group_norm/gamma", 1)[0],
        units=count_units(shapes, r"resnet/block(\d+)/unit(\d+)/"),
        root_channels=read_shape(shapes, _ROOT, 4)[-1],
        pool="gap",
        num_classes=count_classes(
            shapes,
            "resnet/head/conv2d/kernel",
            -1,
            "resnet/head/conv2d/bias",
        ),
        defaults={"residual_unit": "preactivation"},
    )


_FORMAT = Format(
    suffix=".npz",
    find_canonical=find_canonical,
    find_facts=find_facts,
    make_rules=make_rules,
    families=("resnet",),
    other_families="it holds ResNets only; a ViT or a hybrid goes to released or timm",
)


def _list_addresses() -> dict[str, tuple[str, ...]]:
    """Return the addresses of weights by the name of their network."""
    addresses = {}
    for depth, factor in _SIZES:
        name = f"R{depth}x{factor}"
        files = f"gs://bit_models/{{BiT-M-{name},BiT-M-{name}-ILSVRC2012,BiT-S-{name}}}.npz"
        models = f"hf://timm/resnetv2_{depth}x{factor}_bit.{{goog_in21k,goog_in21k_ft_in1k}}"
        addresses[name] = expand_all((files, models))
    return addresses


def _list_bodies() -> dict[TimmBody, str]:
    """Return the names of timm's models by their ResNet."""
    bodies: dict[TimmBody, str] = {}
    for depth, factor in _SIZES:
        body = ("resnet", RESNET_UNITS[depth], factor)
        bodies[body] = f"resnetv2_{depth}x{factor}_bit"
    return bodies


FAMILY = Family(
    addresses=_list_addresses(),
    models=read_models(_MODELS),
    deprecated=read_deprecated(_DEPRECATED),
    registry_rows={
        "Big Transfer": "resnetv2_",
    },
    formats={"bit": _FORMAT},
    timm_bodies=_list_bodies(),
)
