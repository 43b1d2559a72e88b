"""Big Transfer: ResNets of pre-activation units, in the authors' files (.npz) and timm's.

In the authors' files a, b and c hold the norm before each convolution. Some end the names of layers
in a number and some lack the leading `resnet/`; both are read.
"""

import re
from collections.abc import Iterable, Mapping

from vit_jax.config.architecture import Architecture
from vit_jax.config.sizes import RESNET_UNITS
from vit_jax.weights.family import Family, expand_all, read_deprecated, read_models
from vit_jax.weights.names.entry import Rule, invert
from vit_jax.weights.names.facts import Facts, classes_of, counts, shape_of
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
_SIZES = ((50, 1), (50, 3), (101, 1), (101, 3), (152, 2), (152, 4))  # depth, factor of the width
_ROOT = "resnet/root_block/standardized_conv2d/kernel"
_LEAF = {"scale": "gamma", "bias": "beta"}
_PARTS = {"1": "a", "2": "b", "3": "c", "shortcut": "a/proj"}


def _name_unit(match: re.Match[str]) -> str:
    return f"resnet/block{match[1]}/unit{int(match[2]):02}/{_PARTS[match[3]]}"


def make_rules(a: Architecture, shapes: Mapping[str, Shape]) -> list[Rule]:
    """Return the names of pre-activation ResNets, which are the same for all."""
    unit = r"body/stage(\d+)/unit(\d+)"
    return [
        Rule(r"body/root/conv/kernel", _ROOT),
        Rule(
            rf"{unit}/conv([123])/kernel",
            lambda match: f"{_name_unit(match)}/standardized_conv2d/kernel",
        ),
        Rule(
            rf"{unit}/norm([123])/(\w+)",
            lambda match: f"{_name_unit(match)}/group_norm/{_LEAF[match[4]]}",
        ),
        Rule(
            rf"{unit}/(shortcut)/conv/kernel",
            lambda match: f"{_name_unit(match)}/standardized_conv2d/kernel",
        ),
        Rule(r"norm/(\w+)", lambda match: f"resnet/group_norm/{_LEAF[match[1]]}"),
        Rule(r"head/linear/kernel", "resnet/head/conv2d/kernel", "io->11io"),
        Rule(r"head/linear/bias", "resnet/head/conv2d/bias"),
    ]


def find_canonical(names: Iterable[str]) -> dict[str, str] | None:
    """Return names with the prefix, without numbers of layers → names in the file; None for another format."""
    plain = {
        name: re.sub(r"(standardized_conv2d|group_norm|conv2d)_\d+(?=/)", r"\1", name)
        for name in names
    }
    full = {
        name: short if short.startswith("resnet/") else f"resnet/{short}"
        for name, short in plain.items()
    }
    return invert(full) if _ROOT in full.values() else None


def find_facts(shapes: Mapping[str, Shape]) -> Facts:
    """Return the facts of a file, without an image size: a ResNet takes any.

    ValueError as for `shape_of`.
    """
    return Facts(
        family="resnet",
        width=shape_of(shapes, "resnet/group_norm/gamma", 1)[0],
        units=counts(shapes, r"resnet/block(\d+)/unit(\d+)/"),
        root_channels=shape_of(shapes, _ROOT, 4)[-1],
        pool="gap",
        num_classes=classes_of(shapes, "resnet/head/conv2d/kernel", -1, "resnet/head/conv2d/bias"),
        defaults={"residual_unit": "preactivation"},
    )


_FORMAT = Format(
    suffix=".npz",
    canonical=find_canonical,
    facts=find_facts,
    rules=make_rules,
    families=("resnet",),
    other_families="it holds ResNets only; a ViT or a hybrid goes to released or timm",
)


def _list_addresses(depth: int, factor: int) -> tuple[str, ...]:
    name = f"R{depth}x{factor}"
    files = f"gs://bit_models/{{BiT-M-{name},BiT-M-{name}-ILSVRC2012,BiT-S-{name}}}.npz"
    models = f"hf://timm/resnetv2_{depth}x{factor}_bit.{{goog_in21k,goog_in21k_ft_in1k}}"
    return expand_all((files, models))


FAMILY = Family(
    addresses={f"R{depth}x{factor}": _list_addresses(depth, factor) for depth, factor in _SIZES},
    models=read_models(_MODELS),
    deprecated=read_deprecated(_DEPRECATED),
    registry_rows={
        "Big Transfer": "resnetv2_",
    },
    formats={"bit": _FORMAT},
    timm_bodies={
        ("resnet", RESNET_UNITS[depth], factor): f"resnetv2_{depth}x{factor}_bit"
        for depth, factor in _SIZES
    },
)
