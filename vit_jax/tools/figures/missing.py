"""Reasons why a network lacks a figure, and the facts about its outputs that they follow from.

Each function `explain_x` returns the reason, or None if the network has the figure.
"""

import functools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.api import Model


def explain_custom(model: Model) -> str | None:
    """Return the reason of a custom network, whose parts are not known."""
    network = model.architecture.network
    if network is None:
        return None
    return f"{network} is a custom network"


def explain_positions(model: Model) -> str | None:
    """Return the reason why there are no position embeddings of patches."""
    a = model.architecture
    if not a.has_transformer:
        return f"{a.name} has no transformer, and no positions"
    if a.network is not None:
        return explain_custom(model)
    if len(position_tables(model)) > 0:
        return None
    return f"{a.position_embedding} positions add no row to each token"


def explain_attention(model: Model) -> str | None:
    """Return the reason why there are no attention weights."""
    a = model.architecture
    if not a.has_transformer:
        return f"{a.name} has no attention"
    num_layers, *shape = find_attention_shape(model)
    if num_layers and shape == [1, a.num_heads, a.sequence_length, a.sequence_length]:
        return None
    name = a.block or a.network or a.name
    return f"{name} does not give the weights of every block, head and token"


def explain_map(model: Model) -> str | None:
    """Return the reason why there is no last map of a classifier, for Grad-CAM."""
    a = model.architecture
    if not a.has_resnet:
        return f"{a.name} has no ResNet"
    if not a.num_classes:
        return "the weights have no classes"
    if math.prod(a.map_size) == 1:
        height, width = a.image_size
        return f"the last map of {a.name} is one cell for an image of {height}x{width}"
    return explain_custom(model)


def explain_features(model: Model) -> str | None:
    """Return the reason why there are no features of images."""
    if _find_output_shape(model, "features_BD"):
        return None
    return "the network returns no features"


def explain_tokens(model: Model) -> str | None:
    """Return the reason why there are no features of patches."""
    num_patches = math.prod(model.architecture.grid)
    shape = _find_output_shape(model, "tokens_BND") or ()
    if shape[:2] == (1, num_patches):
        return None
    return "the network returns no features of patches"


def explain_prediction(model: Model) -> str | None:
    """Return the reason why no masked patches are predicted."""
    a = model.architecture
    if a.patch_outputs:
        return explain_custom(model)
    return (
        f"{a.name} predicts no patches; "
        "a run with config.objective.kind=masked_patch trains one that does"
    )


def find_attention_shape(model: Model) -> tuple[int, ...]:
    """Return the shape of the attention weights of one image; (0,) without any."""
    return _find_output_shape(model, "attention_LBTQS", "attention") or (0,)


def _find_output_shape(
    model: Model,
    field: str,
    *intermediates: str,
) -> tuple[int, ...] | None:
    """Return the shape of an output for one image without computing it; None if there is none."""
    dtype = jnp.uint8 if model.transform is None else model.transform.dtype
    image = jax.ShapeDtypeStruct((1, *model.architecture.image_shape), dtype)
    compute = functools.partial(model, intermediates=intermediates)
    try:
        output = jax.eval_shape(compute, image)
    except (TypeError, ValueError):
        return None

    array = getattr(output, field, None)
    return getattr(array, "shape", None)


def position_tables(model: Model) -> np.ndarray:
    """Return position embeddings of the network (1, S, D), or of each block (L, S, D).

    The array is empty, (0, S, D), for a network without them.
    """
    a = model.architecture
    module = cast(Any, model.module)
    tables = np.zeros((0, 0, 0))
    if callable(getattr(module, "positions", None)):
        tables = np.asarray(module.positions())
    else:
        block_positions = getattr(module.encoder.blocks, "positions", None)
        if block_positions is not None:
            read_tables = jax.vmap(lambda positions: positions()[0])
            tables = np.asarray(read_tables(block_positions))

    table_shape = (a.sequence_length, a.width)
    if tables.shape[1:] == table_shape and tables.any():
        return tables
    return np.zeros((0, *table_shape))
