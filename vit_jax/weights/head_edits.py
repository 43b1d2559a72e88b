"""The end of a network with weights: its head removed, replaced, or reduced to some classes.

Legend: D features, K classes of the source, L classes of the target.
"""

import dataclasses

import numpy as np

from vit_jax.config.adaptation import set_pooling
from vit_jax.config.network_options import HeadForm
from vit_jax.config.rules import Reference
from vit_jax.imports.references import is_reference
from vit_jax.weights.fit import HEAD, LAST_LAYER, fit
from vit_jax.weights.load import Weights
from vit_jax.weights.names import HEAD_BIAS, HEAD_KERNEL, list_shapes

_NO_PATCH_HEAD = "the head that predicts masked patches, and its [mask] embedding, are dropped."
LAYER_POOLS = {
    "token": "token",
    "mean": "gap",
    "token_mean": "token_gap",
}
"""Layers of features and the pooling that gives the same."""


def remove_head(weights: Weights, *, keep_hidden: bool = True) -> Weights:
    """Return the weights without their last layer; `fit` adds a new one, for any classes.

    With `keep_hidden` the hidden layer of the head stays, if there is one; otherwise the network
    ends in its pooled features. A head of a custom class is removed as a whole, since its last
    layer is not known.
    """
    a = weights.architecture
    head: HeadForm | Reference = "linear"
    removed: tuple[str, ...] = (HEAD,)
    if keep_hidden and not is_reference(a.head):
        head = a.head
        removed = (LAST_LAYER, "head/mask")
    architecture = dataclasses.replace(a, num_classes=0, patch_outputs=0, head=head)

    parameters = {}
    for name, array in weights.parameters.items():
        if not name.startswith(removed):
            parameters[name] = array
    for name, shape in list_shapes(architecture).items():
        if name.startswith(LAST_LAYER):
            parameters[name] = np.zeros(shape, np.float32)

    if a.patch_outputs:
        weights = weights.add_note(_NO_PATCH_HEAD)
    return dataclasses.replace(
        weights,
        architecture=architecture,
        parameters=parameters,
        class_names=None,
        has_several_labels=False,
    )


def cut_after_layer(weights: Weights, layer: str) -> Weights:
    """Return the network without its head, whose feature "pre_logits" is a layer of this one.

    The layer is "pre_logits", which keeps the hidden layer of the head, "pooled" or one of
    `LAYER_POOLS`.

    Raises:
      ValueError: the network has no class token.
    """
    base = remove_head(weights, keep_hidden=layer == "pre_logits")
    if layer not in LAYER_POOLS:
        return base

    # A norm of the pooled features is not part of these layers.
    has_pooled_norm = base.architecture.final_norm == "pooled"
    final_norm = "none" if has_pooled_norm else None
    target = set_pooling(base.architecture, LAYER_POOLS[layer], final_norm)
    fitted = fit(base, target)
    return base.replace_network(target, fitted.parameters)


def select_classes(
    weights: Weights,
    output_L: np.ndarray,
    class_names: tuple[str, ...],
) -> Weights:
    """Return the weights with some of their outputs, for classes of these names.

    `output_L` is the output of each class. A class without an output, -1, has a kernel of zeros and
    the mean bias.
    """
    kernel_DK = weights.parameters[HEAD_KERNEL]
    bias_K = weights.parameters[HEAD_BIAS]
    is_known_L = output_L >= 0
    mean_bias = bias_K[output_L[is_known_L]].mean()

    kernel_DL = np.where(is_known_L, kernel_DK[:, output_L], np.float32(0))
    bias_L = np.where(is_known_L, bias_K[output_L], mean_bias)
    parameters = {
        **weights.parameters,
        HEAD_KERNEL: kernel_DL,
        HEAD_BIAS: bias_L,
    }

    architecture = dataclasses.replace(weights.architecture, num_classes=len(class_names))
    return weights.replace_network(architecture, parameters, class_names=class_names)


def set_classifier(
    weights: Weights,
    kernel_DK: np.ndarray,
    bias_K: np.ndarray,
    class_names: tuple[str, ...],
) -> Weights:
    """Return the weights with a new last layer, in float32.

    Its input is the feature "pre_logits" of the network.

    Raises:
      ValueError: the kernel does not fit the network.
    """
    base = remove_head(weights)
    architecture = dataclasses.replace(base.architecture, num_classes=len(class_names))
    shapes = list_shapes(architecture)
    head = {
        HEAD_KERNEL: kernel_DK.astype(np.float32),
        HEAD_BIAS: bias_K.astype(np.float32),
    }
    for name, array in head.items():
        if array.shape != shapes[name]:
            raise ValueError(f"{name} has the shape {array.shape}: must be {shapes[name]}.")

    parameters = {**base.parameters, **head}
    return base.replace_network(architecture, parameters, class_names=class_names)
