"""Number of parameters by formula, so that a list of networks builds none. No jax here.

Legend: S tokens a block sees, D width, M mlp_dim, K classes.
"""

import math

from vit_jax.config.architecture import Architecture
from vit_jax.cost import convolutions, require_formulas


def count_parameters(architecture: Architecture) -> int:
    """Return the number of parameters of a network with ordinary blocks and learned positions before them.

    Raises:
      ValueError: a part is user-defined, or another form of blocks, positions or pooling.
    """
    a = require_formulas(architecture)
    if a.block or a.pool == "map" or (a.has_transformer and (a.position_embedding, a.position_layers) != _POSITIONS):
        raise ValueError(f"{a.name}: no formula gives the parameters of these blocks, positions or pooling.")
    network = _resnet(a) if a.has_resnet else 0
    if a.has_transformer:
        embedding = math.prod(a.patch_size) * a.map_channels * a.width + a.width * a.patch_bias
        rows = math.prod(a.grid) + (a.prefix_length if a.position_tokens == "all" else 0)
        norms = (a.embedding_norm is not None) + (a.final_norm != "none")
        network += embedding + (a.prefix_length + rows) * a.width + a.depth * _block(a) + norms * _norm(a, a.width)
    hidden = a.feature_width * a.width + a.width if a.head == "mlp" else 0
    features = a.width if a.head == "mlp" else a.feature_width
    patches = a.width * a.patch_outputs + a.patch_outputs + a.width if a.patch_outputs else 0  # and [mask]
    return network + hidden + patches + (features * a.num_classes + a.num_classes)


_POSITIONS = ("learned_1d", "stem")


def _block(a: Architecture) -> int:
    biases = {"all": 3, "query_value": 2, "none": 0}[a.qkv_bias] + a.linear_bias
    attention = 4 * a.width * a.width + biases * a.width + a.attention_norm * _norm(a, a.width)
    hidden = 1 if a.mlp == "gelu" else 2  # with a gate
    mlp = (hidden + 1) * a.width * a.mlp_dim + a.linear_bias * (hidden * a.mlp_dim + a.width)
    mlp += _norm(a, a.mlp_dim) if a.mlp == "swiglu_norm" else 0
    scales = 0 if a.layer_scale is None else 2 * a.width
    return attention + mlp + 2 * _norm(a, a.width) + scales


def _norm(a: Architecture, width: int) -> int:
    return width if a.norm == "rms" else 2 * width


def _resnet(a: Architecture) -> int:
    units = list(convolutions.residual_units(a))
    kernels = sum(conv.parameters for unit in units for conv in unit.convolutions)
    if a.residual_unit == "preactivation":  # a norm before each convolution, and one after the last unit
        channels = sum(conv.inputs for unit in units for conv in unit.main) + a.map_channels
    else:  # a norm after each convolution
        channels = a.root_channels + sum(conv.outputs for unit in units for conv in unit.convolutions)
    return convolutions.root(a).parameters + kernels + 2 * channels
