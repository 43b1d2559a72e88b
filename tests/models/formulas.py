"""FLOPs of a forward pass by formula: an oracle for the count of a program.

Matrix products count, as in papers.

Legend: MAC multiply-accumulate = 2 FLOPs; N patches, S tokens a block sees, D width, M mlp_dim, K
classes.
"""

import math

from vit_jax.config.architecture import Architecture
from vit_jax.sharding import convolutions


def forward_macs(architecture: Architecture, *, count_padding: bool = True) -> int:
    """Return the multiply-adds of one image's forward pass, as `models.flops.forward_macs`.

    For a ViT of ordinary blocks, with a linear head and no attention pooling:
    `N*P*P*3*D + L*(S*(4*D*D + 2*D*M) + 2*S*S*D) + D*K`.
    """
    a = architecture
    macs = _head(a)
    macs += math.prod(a.grid) * a.width * a.patch_outputs
    if a.has_resnet:
        macs += _resnet(a, count_padding)
    if a.has_transformer:
        macs += _embedding(a) + a.depth * _block(a) + _pooling(a)
    return macs


def _resnet(a: Architecture, count_padding: bool) -> int:
    macs = convolution_macs(convolutions.root(a), count_padding)
    for unit in convolutions.residual_units(a):
        for convolution in unit.convolutions:
            macs += convolution_macs(convolution, count_padding)
    return macs


def convolution_macs(conv: convolutions.Convolution, count_padding: bool) -> int:
    """Return the multiply-adds of a convolution, with or without the zeros around its map.

    Padding is as large before the map as after it, or one less: as many of its products are zero.
    """
    products = 1
    for length, num_outputs in zip(conv.size, conv.output_size, strict=True):
        if count_padding:
            products *= num_outputs * conv.kernel
        else:
            products *= _count_products_inside(conv, length, num_outputs)
    return products * conv.inputs * conv.outputs


def _count_products_inside(
    conv: convolutions.Convolution,
    length: int,
    num_outputs: int,
) -> int:
    products = 0
    for output in range(num_outputs):
        first = output * conv.stride - conv.kernel // 2
        last = first + conv.kernel
        products += min(last, length) - max(first, 0)
    return products


def _embedding(a: Architecture) -> int:
    patch_values = math.prod(a.patch_size) * a.map_channels
    return math.prod(a.grid) * patch_values * a.width


def _block(a: Architecture) -> int:
    tokens = a.sequence_length
    dense_layers = 2
    if a.mlp != "gelu":
        dense_layers = 3  # with a gate
    projections_and_mlp = tokens * (4 * a.width * a.width + dense_layers * a.width * a.mlp_dim)

    products = 2  # QK^T and AV
    if a.position_embedding == "relative":
        products = 3  # and Q times the keys of offsets

    macs = 0
    for length in a.attention_lengths:
        # All heads together have the full width.
        attention = products * tokens * length * a.width
        macs += projections_and_mlp + attention
    return macs


def _pooling(a: Architecture) -> int:
    if a.pool != "map":
        return 0

    tokens = a.sequence_length
    query_and_output = 2 * a.width * a.width  # for the one probe
    key_and_value = tokens * 2 * a.width * a.width
    attention = 2 * tokens * a.width
    mlp = 2 * a.width * a.mlp_dim
    return query_and_output + key_and_value + attention + mlp


def _head(a: Architecture) -> int:
    if a.head == "mlp":
        return a.feature_width * a.width + a.width * a.num_classes
    return a.feature_width * a.num_classes
