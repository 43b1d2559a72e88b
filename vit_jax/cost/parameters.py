"""Parameter counts by formula, without building a network.

The formulas follow ViT's equations (1) to (4) and Table 1, and BiT's residual units, not our modules, so that they can
contradict them: `tests/golden/parameter_counts.json` holds both to published counts. No jax here.
"""

from vit_jax.config.architecture import Architecture
from vit_jax.cost import convolutions

GROUPS = (
    "root",
    "stages",
    "patch_embedding",
    "class_token",
    "position_embedding",
    "blocks",
    "final_norm",
    "pooling",
    "head",
)


def count_parameters(architecture: Architecture) -> int:
    """How many numbers the network learns.

    Raises:
      ValueError: an unknown pool, position embedding, head or form of residual unit.
    """
    return sum(parameter_groups(architecture).values())


def parameter_groups(architecture: Architecture) -> dict[str, int]:
    """Parameters of each part, in the order in which an image meets them; 0 for a part that learns nothing.

    The sum over all groups but "head" is what papers call the backbone, and what fine-tuning keeps.

    Args:
      architecture: the network, with an image size: learned position embeddings depend on it.

    Returns:
      Counts under the names of `GROUPS`. "root" and "stages" are the ResNet's and hold their norms; "final_norm" comes
      after the last block, or after the last stage of a ResNet whose units have their norms before the convolutions.

    Raises:
      ValueError: an unknown pool, position embedding, head or form of residual unit.
    """
    a = architecture
    groups = dict.fromkeys(GROUPS, 0)
    if a.has_resnet:
        groups |= {"root": _root(a), "stages": _stages(a)}
        groups["final_norm"] = _norm(a.map_channels) if _is_preactivation(a) else 0
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
    return conv.parameters + (0 if _is_preactivation(a) else _norm(conv.outputs))


def _stages(a: Architecture) -> int:
    norms = _norms_before if _is_preactivation(a) else _norms_after
    return sum(
        norms(unit) + sum(conv.parameters for conv in unit.convolutions) for unit in convolutions.residual_units(a)
    )


def _norms_before(unit: convolutions.Unit) -> int:
    return sum(_norm(conv.inputs) for conv in unit.main)  # the shortcut sees what the first norm has normalised


def _norms_after(unit: convolutions.Unit) -> int:
    return sum(_norm(conv.outputs) for conv in unit.convolutions)


def _is_preactivation(a: Architecture) -> bool:
    match a.residual_unit:
        case "preactivation":  # BiT
            return True
        case "postactivation":  # the stem of ViT's hybrids
            return False
    raise ValueError(f"residual_unit={a.residual_unit!r} has no count: use preactivation or postactivation.")


def _attention(width: int) -> int:
    return 4 * _dense(width, width)  # query, key, value, output; the number of heads only cuts the width up


def _mlp(a: Architecture) -> int:
    return _dense(a.width, a.mlp_dim) + _dense(a.mlp_dim, a.width)


def _block(a: Architecture) -> int:
    return 2 * _norm(a.width) + _attention(a.width) + _mlp(a)


def _position_embedding(a: Architecture) -> int:
    rows, columns = a.grid
    has_class_token = a.pool == "token"
    match a.position_embedding:
        case "learned_1d":
            return (rows * columns + has_class_token) * a.width
        case "learned_2d":  # a patch's vector is its row's half beside its column's half
            return (rows + columns) * (a.width // 2) + has_class_token * a.width
        case "sincos2d" | "none":
            return 0
    raise ValueError(
        f"position_embedding={a.position_embedding!r} has no count: use learned_1d, learned_2d, sincos2d or none."
    )


def _pooling(a: Architecture) -> int:
    match a.pool:
        case "token" | "gap":
            return 0
        case "map":  # Scaling Vision Transformers: a learned query attends to all tokens, then an MLP
            probe = a.width
            return probe + _attention(a.width) + _norm(a.width) + _mlp(a)
    raise ValueError(f"pool={a.pool!r} has no count: use token, gap or map.")


def _head(a: Architecture) -> int:
    match a.head:
        case "linear":
            return _dense(a.width, a.num_classes)
        case "mlp":
            return _dense(a.width, a.width) + _dense(a.width, a.num_classes)
    raise ValueError(f"head={a.head!r} has no count: use mlp or linear.")
