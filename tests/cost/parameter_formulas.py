"""Parameter counts by formula, without building a network.

The formulas follow ViT's equations (1) to (4) and Table 1, and BiT's residual units, not our modules, so that each can
reveal an error of the other: `tests/golden/parameter_counts.json` has published counts for both. No jax here.
"""

from vit_jax.config.architecture import Architecture
from vit_jax.cost import convolutions, require_formulas

_OF_A_TRANSFORMER = ("patch_embedding", "class_token", "position_embedding", "blocks", "final_norm", "pooling")
GROUPS = ("root", "stages", *_OF_A_TRANSFORMER, "head")


def count_parameters(architecture: Architecture) -> int:
    """How many parameters the network has.

    Raises:
      ValueError: a part is the user's own code.
    """
    return sum(parameter_groups(architecture).values())


def parameter_groups(architecture: Architecture) -> dict[str, int]:
    """Parameters of each part, in the order of the forward pass; 0 for a part that has none.

    The sum over all groups but "head" is what papers call the backbone, and what fine-tuning keeps.

    Args:
      architecture: the network, with an image size: learned position embeddings depend on it.

    Returns:
      Counts under the names of `GROUPS`. "root" and "stages" are the ResNet's and hold their norms; "final_norm" comes
      after the last block, or after the last stage of a ResNet whose units have their norms before the convolutions.

    Raises:
      ValueError: a part is the user's own code.
    """
    a = require_formulas(architecture)
    groups = dict.fromkeys(GROUPS, 0)
    if a.has_resnet:
        groups |= {"root": _root(a), "stages": _stages(a)}
        groups["final_norm"] = _norm(a.map_channels) if a.residual_unit == "preactivation" else 0
    if a.has_transformer:
        groups |= {
            "patch_embedding": _dense(a.patch_size[0] * a.patch_size[1] * a.map_channels, a.width),
            "class_token": a.width if a.pool == "token" else 0,
            "position_embedding": _position_embedding(a),
            "blocks": a.depth * _block(a),
            "final_norm": _norm(a.width),
            "pooling": _pooling(a),
        }
    return groups | {"head": _head(a)}


def _dense(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def _norm(channels: int) -> int:
    return 2 * channels  # scale and bias, of a layer norm and of a group norm alike


def _root(a: Architecture) -> int:
    conv = convolutions.root(a)
    return conv.parameters + (0 if a.residual_unit == "preactivation" else _norm(conv.outputs))


def _stages(a: Architecture) -> int:
    units = list(convolutions.residual_units(a))
    kernels = sum(conv.parameters for unit in units for conv in unit.convolutions)
    if a.residual_unit == "preactivation":  # BiT; the shortcut sees what the first norm has normalised
        return kernels + sum(_norm(conv.inputs) for unit in units for conv in unit.main)
    return kernels + sum(_norm(conv.outputs) for unit in units for conv in unit.convolutions)


def _attention(width: int) -> int:
    return 4 * _dense(width, width)  # query, key, value, output; the number of heads only cuts the width up


def _mlp(a: Architecture) -> int:
    return _dense(a.width, a.mlp_dim) + _dense(a.mlp_dim, a.width)


def _block(a: Architecture) -> int:
    return 2 * _norm(a.width) + _attention(a.width) + _mlp(a)


def _position_embedding(a: Architecture) -> int:
    rows, columns = a.grid
    class_token = a.width if a.pool == "token" else 0
    if a.position_embedding == "learned_1d":
        return rows * columns * a.width + class_token
    if a.position_embedding == "learned_2d":  # a patch's vector is its row's half and its column's half
        return (rows + columns) * (a.width // 2) + class_token
    return 0


def _pooling(a: Architecture) -> int:
    """Scaling Vision Transformers: a learned query attends to all tokens, then an MLP."""
    return a.width + _attention(a.width) + _norm(a.width) + _mlp(a) if a.pool == "map" else 0


def _head(a: Architecture) -> int:
    hidden = _dense(a.width, a.width) if a.head == "mlp" else 0
    return hidden + _dense(a.width, a.num_classes)
