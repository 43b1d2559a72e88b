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
    network = _resnet(a, count_padding) if a.has_resnet else 0

    if a.has_transformer:
        patch_values = math.prod(a.patch_size) * a.map_channels
        network += math.prod(a.grid) * patch_values * a.width + a.depth * _block(a) + _pooling(a)

    hidden = a.feature_width * a.width if a.head == "mlp" else 0
    head = hidden + (a.width if a.head == "mlp" else a.feature_width) * a.num_classes

    return network + head + math.prod(a.grid) * a.width * a.patch_outputs


def _resnet(a: Architecture, count_padding: bool) -> int:
    units = (conv for unit in convolutions.residual_units(a) for conv in unit.convolutions)
    return sum(convolution_macs(conv, count_padding) for conv in (convolutions.root(a), *units))


def convolution_macs(conv: convolutions.Convolution, count_padding: bool) -> int:
    """Padding is as large before the map as after it, or one less: as many taps meet zeros."""
    taps = []
    for length, num_outputs in zip(conv.size, conv.output_size, strict=True):
        firsts = [output * conv.stride - conv.kernel // 2 for output in range(num_outputs)]
        inside = sum(min(first + conv.kernel, length) - max(first, 0) for first in firsts)
        taps.append(num_outputs * conv.kernel if count_padding else inside)

    return math.prod(taps) * conv.inputs * conv.outputs


def _block(a: Architecture) -> int:
    tokens = a.sequence_length
    dense_layers = 2 if a.mlp == "gelu" else 3  # with a gate
    projections_and_mlp = tokens * (4 * a.width * a.width + dense_layers * a.width * a.mlp_dim)
    # QK^T and AV; and Q times the keys of offsets
    products = 3 if a.position_embedding == "relative" else 2
    attention = [
        products * tokens * length * a.width for length in a.attention_lengths
    ]  # all heads: the full width

    return len(attention) * projections_and_mlp + sum(attention)


def _pooling(a: Architecture) -> int:
    if a.pool != "map":
        return 0

    tokens = a.sequence_length
    query_and_output = 2 * a.width * a.width  # of the one probe
    key_and_value = tokens * 2 * a.width * a.width

    return query_and_output + key_and_value + 2 * tokens * a.width + 2 * a.width * a.mlp_dim
