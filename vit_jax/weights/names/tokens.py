"""Arrays that hold several of our parameters, or parts of one: distilled DeiT's and C-RADIO's.

A distilled DeiT has a class and a distillation token, each with a head, whose logits are averaged. In our network these
are two class tokens, which the pooling concatenates, and one head on both.

C-RADIO has all prefix tokens in one array, positions of a large square, and the normalisation of pixels. The network's
output is a choice of its class tokens, which become the class tokens of ours; the others are registers. Prefix tokens
have no positions, so their order changes nothing.
"""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

from vit_jax.config.architecture import Architecture
from vit_jax.weights.folding import Normalisation
from vit_jax.weights.formats import StoredArray
from vit_jax.weights.names.facts import Facts
from vit_jax.weights.names.ours import Shape

# Distilled DeiT.

TOKENS = ("class_token", "distillation_token")
KERNELS, BIASES = (
    tuple(f"head/{name}/{leaf}" for name in ("linear", "distillation"))
    for leaf in ("kernel", "bias")
)
DISTILLED_NOTE = (
    "The heads of the class and the distillation token are one head on both tokens, "
    "with the mean of their logits."
)


def split_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the parameters of our network, taken apart, as a file of a distilled one has them."""
    (_, _, width), (_, classes) = shapes[TOKENS[0]], shapes[KERNELS[0]]
    token = (1, 1, width)
    kernel = (width, classes)
    shapes_of = {TOKENS: token, KERNELS: kernel, BIASES: (classes,)}
    return {**shapes, **{name: shape for names, shape in shapes_of.items() for name in names}}


def split_distilled(parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the parameters of a distilled network with the same logits; `join_distilled` inverts it up to biases."""
    apart = dict(parameters)
    apart |= zip(TOKENS, np.split(apart[TOKENS[0]], 2, axis=1), strict=True)
    apart |= zip(KERNELS, np.split(2 * apart[KERNELS[0]], 2), strict=True)
    return apart | dict.fromkeys(BIASES, apart[BIASES[0]])


def join_distilled(parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the parameters of our network; the input has the shapes of `split_shapes`."""
    joined = dict(parameters)
    joined[TOKENS[0]] = np.concatenate([joined.pop(name) for name in TOKENS], axis=1)
    if KERNELS[0] in joined:
        joined[KERNELS[0]] = np.concatenate([joined.pop(name) for name in KERNELS]) / 2
        first, second = (joined.pop(name) for name in BIASES)
        joined[BIASES[0]] = (first + second) / 2
    return joined


# C-RADIO.

CHOICE = "radio_model.summary_idxs"  # of class tokens
NORMALISATION = (
    "radio_model.input_conditioner.norm_mean",
    "radio_model.input_conditioner.norm_std",
)
RADIO_NOTE = (
    "Positions are resized to the longer side (bilinear) and cropped, as transformers and C-RADIOv4 do (align_corners="
    "False). C-RADIOv3 B and H were trained with align_corners=True: take timm's files of these."
)


def with_tokens(facts: Facts, arrays: Mapping[str, StoredArray]) -> Facts:
    """Return the facts with as many class tokens as the file chooses; the first one if it states no choice."""
    tokens = facts.modern_options["class_tokens"] + facts.modern_options["registers"]
    chosen = arrays[CHOICE].shape[0] if CHOICE in arrays and len(arrays[CHOICE].shape) == 1 else 1
    if not 0 < chosen <= tokens:
        raise ValueError(f"it chooses {chosen} of {tokens} prefix tokens: {CHOICE}")
    modern_options = facts.modern_options | {"class_tokens": chosen, "registers": tokens - chosen}
    return dataclasses.replace(facts, modern_options=modern_options)


_OWN = {  # timm's names → C-RADIO's, below the prefix
    r"^patch_embed\.proj": "patch_generator.embedder",
    "^pos_embed$": "patch_generator.pos_embed",
    "^cls_token$": "patch_generator.cls_token.token",
    r"\.ls(\d)\.gamma$": r".layer_scale\1.lambda1",
}


def own_name(name: str) -> str:
    """Return C-RADIO's name for timm's."""
    for pattern, new in _OWN.items():
        name = re.sub(pattern, new, name)
    return f"radio_model.model.{name}"


def added(a: Architecture, normalisation: Normalisation) -> dict[str, np.ndarray]:
    """Return the arrays that hold no parameter of ours: the choice of class tokens, and the normalisation."""
    numbers = (np.array(values, np.float32).reshape(3, 1, 1) for values in normalisation)
    return {CHOICE: np.arange(a.num_class_tokens), **dict(zip(NORMALISATION, numbers, strict=True))}


def join_tokens(parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the parameters with all prefix tokens in the array of the class token."""
    names = [name for name in ("class_token", "register_tokens") if name in parameters]
    tokens = np.concatenate([parameters[name] for name in names], axis=1)
    return {name: array for name, array in parameters.items() if name not in names} | {
        "class_token": tokens
    }


def split_tokens(tokens_1PD: np.ndarray, chosen: np.ndarray) -> dict[str, np.ndarray]:
    """Return our class tokens and registers.

    Raises:
      ValueError: the chosen numbers are not those of different tokens.
    """
    count = tokens_1PD.shape[1]
    if len(set(chosen.tolist())) != len(chosen) or not set(chosen.tolist()) <= set(range(count)):
        raise ValueError(
            f"{CHOICE}={chosen.tolist()}: must be different numbers below {count}. Correct the file."
        )
    others = [place for place in range(count) if place not in chosen]
    return {"class_token": tokens_1PD[:, chosen], "register_tokens": tokens_1PD[:, others]}
