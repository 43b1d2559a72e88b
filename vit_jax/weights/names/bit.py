"""Names of Big Transfer's ResNets (.npz): pre-activation units, whose a, b and c hold the norm before each convolution.

Some files end the names of layers in a number and some lack the leading `resnet/`; both are read.
"""

import re
from collections.abc import Iterable, Mapping

from vit_jax.config.architecture import Architecture
from vit_jax.weights.names.entry import Rule, invert
from vit_jax.weights.names.facts import Facts, classes_of, counts, shape_of
from vit_jax.weights.names.ours import Shape

ROOT = "resnet/root_block/standardized_conv2d/kernel"
_LEAF = {"scale": "gamma", "bias": "beta"}
_PARTS = {"1": "a", "2": "b", "3": "c", "shortcut": "a/proj"}


def _unit(match: re.Match[str]) -> str:
    return f"resnet/block{match[1]}/unit{int(match[2]):02}/{_PARTS[match[3]]}"


def rules(a: Architecture, shapes: Mapping[str, Shape]) -> list[Rule]:
    """Return the names of pre-activation ResNets, which are the same for all."""
    unit = r"body/stage(\d+)/unit(\d+)"
    return [
        Rule(r"body/root/conv/kernel", ROOT),
        Rule(
            rf"{unit}/conv([123])/kernel",
            lambda match: f"{_unit(match)}/standardized_conv2d/kernel",
        ),
        Rule(
            rf"{unit}/norm([123])/(\w+)",
            lambda match: f"{_unit(match)}/group_norm/{_LEAF[match[4]]}",
        ),
        Rule(
            rf"{unit}/(shortcut)/conv/kernel",
            lambda match: f"{_unit(match)}/standardized_conv2d/kernel",
        ),
        Rule(r"norm/(\w+)", lambda match: f"resnet/group_norm/{_LEAF[match[1]]}"),
        Rule(r"head/linear/kernel", "resnet/head/conv2d/kernel", "io->11io"),
        Rule(r"head/linear/bias", "resnet/head/conv2d/bias"),
    ]


def canonical(names: Iterable[str]) -> dict[str, str] | None:
    """Return names with the prefix, without numbers of layers → names in the file; None for another format."""
    plain = {
        name: re.sub(r"(standardized_conv2d|group_norm|conv2d)_\d+(?=/)", r"\1", name)
        for name in names
    }
    full = {
        name: short if short.startswith("resnet/") else f"resnet/{short}"
        for name, short in plain.items()
    }
    return invert(full) if ROOT in full.values() else None


def facts(shapes: Mapping[str, Shape]) -> Facts:
    """Return the facts of a file, without an image size: a ResNet takes any. ValueError as for `shape_of`."""
    return Facts(
        family="resnet",
        width=shape_of(shapes, "resnet/group_norm/gamma", 1)[0],
        units=counts(shapes, r"resnet/block(\d+)/unit(\d+)/"),
        root_channels=shape_of(shapes, ROOT, 4)[-1],
        pool="gap",
        num_classes=classes_of(shapes, "resnet/head/conv2d/kernel", -1, "resnet/head/conv2d/bias"),
        defaults={"residual_unit": "preactivation"},
    )
