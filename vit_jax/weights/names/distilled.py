"""DeiT's distilled networks: a class and a distillation token, each with a head, whose logits are averaged.

In our network these are two class tokens, which the pooling concatenates, and one head on both.
"""

from collections.abc import Mapping

import numpy as np

from vit_jax.weights.names.ours import Shape

TOKENS = ("class_token", "distillation_token")
KERNELS, BIASES = (tuple(f"head/{name}/{leaf}" for name in ("linear", "distillation")) for leaf in ("kernel", "bias"))
NOTE = "The heads of the class and the distillation token are one head on both tokens, with the mean of their logits."


def split_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the parameters of our network, taken apart, as a file of a distilled one has them."""
    (_, _, width), (_, classes) = shapes[TOKENS[0]], shapes[KERNELS[0]]
    token, kernel = (1, 1, width), (width, classes)
    parts = {TOKENS: token, KERNELS: kernel, BIASES: (classes,)}
    return {**shapes, **{name: shape for names, shape in parts.items() for name in names}}


def split(parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the parameters of a distilled network with the same logits; the inverse of `join` but for its biases."""
    apart = dict(parameters)
    apart |= zip(TOKENS, np.split(apart[TOKENS[0]], 2, axis=1), strict=True)
    apart |= zip(KERNELS, np.split(2 * apart[KERNELS[0]], 2), strict=True)
    return apart | dict.fromkeys(BIASES, apart[BIASES[0]])


def join(parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the parameters of our network; the input has the shapes of `split_shapes`."""
    joined = dict(parameters)
    joined[TOKENS[0]] = np.concatenate([joined.pop(name) for name in TOKENS], axis=1)
    if KERNELS[0] in joined:
        joined[KERNELS[0]] = np.concatenate([joined.pop(name) for name in KERNELS]) / 2
        first, second = (joined.pop(name) for name in BIASES)
        joined[BIASES[0]] = (first + second) / 2
    return joined
