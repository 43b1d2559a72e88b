"""DeiT, distilled or not."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from vit_jax.config.architecture import Architecture
from vit_jax.weights.families import vision_transformer as vit
from vit_jax.weights.family import Family, Release, read_models
from vit_jax.weights.formats import ArrayFile, StoredArray
from vit_jax.weights.library_models import (
    DISTILLED,
    WITHOUT_REGISTERS,
    TimmModel,
    TransformersModel,
)
from vit_jax.weights.packing import Packing, Parameters, Shapes, Unpacked

_MODELS = """
192/12/3
  deit_tiny_distilled_patch16_224 deit_tiny_patch16_224
384/12/6
  deit_small_distilled_patch16_224 deit_small_patch16_224
768/12/12
  deit_base_distilled_patch16_224 deit_base_distilled_patch16_384 deit_base_patch16_224
  deit_base_patch16_384
"""

_TOKENS = ("class_token", "distillation_token")
_KERNELS = ("head/linear/kernel", "head/distillation/kernel")
_BIASES = ("head/linear/bias", "head/distillation/bias")


class DistilledTokens(Packing):
    """A class and a distillation token, each with a head, whose logits are averaged.

    In our network these are two class tokens, which the pooling concatenates, and one head on both.
    """

    note = (
        "The heads of the class and the distillation token are one head on both tokens, with the "
        "mean of their logits."
    )

    def matches(self, shapes: Shapes, arrays: Mapping[str, StoredArray]) -> bool:
        """Return True for a file with a distillation token that a head reads."""
        if {"cls_token", "dist_token"} <= shapes.keys():
            return True
        return shapes.keys() >= set(_WITH_TEACHER_NAMES.marks)

    def split_shapes(self, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        """Return the shapes of two tokens and two heads."""
        _, _, width = shapes["class_token"]
        _, num_classes = shapes["head/linear/kernel"]
        apart = dict(shapes)
        apart |= dict.fromkeys(_TOKENS, (1, 1, width))
        apart |= dict.fromkeys(_KERNELS, (width, num_classes))
        apart |= dict.fromkeys(_BIASES, (num_classes,))
        return apart

    def unpack(self, parts: Parameters, file: ArrayFile, a: Architecture) -> Unpacked:
        """Return the parameters of our network."""
        joined = dict(parts)
        tokens = list(map(joined.pop, _TOKENS))
        joined["class_token"] = np.concatenate(tokens, axis=1)
        if "head/linear/kernel" in joined:
            kernels = list(map(joined.pop, _KERNELS))
            first_bias, second_bias = map(joined.pop, _BIASES)
            joined["head/linear/kernel"] = np.concatenate(kernels) / 2
            joined["head/linear/bias"] = (first_bias + second_bias) / 2
        return Unpacked(joined)

    def pack(self, parameters: Parameters) -> dict[str, np.ndarray]:
        """Return parameters of two heads with the same logits; `unpack` inverts it up to biases."""
        apart = dict(parameters)
        tokens = np.split(parameters["class_token"], 2, axis=1)
        apart |= zip(_TOKENS, tokens, strict=True)
        kernels = np.split(2 * parameters["head/linear/kernel"], 2)
        apart |= zip(_KERNELS, kernels, strict=True)
        apart |= dict.fromkeys(_BIASES, parameters["head/linear/bias"])
        return apart


_DISTILLED_TOKENS = DistilledTokens()
_MARK = "vit.embeddings.distillation_token"
_NAME = "embeddings.distillation_token"
_WITH_TEACHER_NAMES = dataclasses.replace(
    vit.HUGGINGFACE_NAMES,
    marks=(_MARK, "distillation_classifier.weight"),
    arrays={**vit.HUGGINGFACE_NAMES.arrays, "distillation_token": _NAME},
    heads={"head/linear": "cls_classifier", "head/distillation": "distillation_classifier"},
)
_WITHOUT_TEACHER_NAMES = dataclasses.replace(
    vit.HUGGINGFACE_NAMES,
    marks=(_MARK,),
    arrays={**vit.HUGGINGFACE_NAMES.arrays, "register_tokens": _NAME},
)
"""Names of files whose distillation token no head reads: it is a register."""

_TIMM_MODEL = TimmModel(
    name="deit_base_distilled_patch16_224",
    held={**WITHOUT_REGISTERS, **DISTILLED, "pool": ("token",)},
    packing=_DISTILLED_TOKENS,
)
_WITH_TEACHER = TransformersModel(
    name="",
    classifier="DeiTForImageClassificationWithTeacher",
    model_type="deit",
    prefix="deit.",
    names=_WITH_TEACHER_NAMES,
    held={**vit.TRANSFORMERS_PARTS, **DISTILLED},
    arguments=vit.state_arguments,
    packing=_DISTILLED_TOKENS,
)
_WITHOUT_TEACHER = TransformersModel(
    name="DeiTModel",
    classifier="DeiTForImageClassification",
    model_type="deit",
    prefix="deit.",
    names=_WITHOUT_TEACHER_NAMES,
    held={**vit.TRANSFORMERS_PARTS, "registers": (1,)},
    arguments=vit.state_arguments,
)

FAMILY = Family(
    releases=(
        Release(
            name="DeiT",
            addresses=(
                "hf://timm/deit_{tiny,small,base}_patch16_224.fb_in1k",
                "hf://facebook/deit-{tiny,small,base}-patch16-224",
            ),
            pattern=r"(^|/)deit(_\w+?_patch|-\w+?-(distilled-)?patch|$)",
            use="classification of ImageNet, small networks",
            licence="apache-2.0",
            pixels="short side 256 bicubic, middle 224",
            accuracy="supervised S 79.8, B 81.8; distilled B 83.4",
            source="arXiv:2012.12877",
        ),
    ),
    models=read_models(_MODELS),
    registry_rows={
        "DeiT, distilled or not": "deit_",
    },
    model_types={"deit": {}},
    huggingface=(_WITH_TEACHER_NAMES, _WITHOUT_TEACHER_NAMES),
    packings=(_DISTILLED_TOKENS,),
    timm_models=(_TIMM_MODEL,),
    transformers_models=(_WITHOUT_TEACHER, _WITH_TEACHER),
)
