"""Names of networks in `config.json`: names that are read, and reasons for the others.

A name decides more than its arrays show: heads of attention, the place of norms, rotary positions.
So a name is read only if `tests/weights/reference/compare_registry.py` compared its outputs with
ours. `families` holds the names, and the facts that only a name states.
"""

import re
from collections.abc import Mapping

from vit_jax.text.printable import shorten
from vit_jax.weights.families import load_families
from vit_jax.weights.family import Family, Sizes
from vit_jax.weights.formats.stored import quote
from vit_jax.weights.typed_values import is_count

TIMM_VERSION = "1.0.31"
"""The version of timm that models were compared with."""

_GRID_REFERENCE = [16, 16]
"""Rows and columns of the places that the rotary positions "grid" count."""

# Arguments of timm's classes that the arrays show, `sidecar` reads, or that change no output; also
# every argument with "drop" in its name.
_KNOWN_ARGUMENTS = """
img_size patch_size in_chans num_classes global_pool embed_dim depth num_heads mlp_ratio act_layer
attn_pool_num_heads attn_pool_mlp_ratio ref_feat_shape pool_include_prefix class_token
no_embed_class reg_tokens num_reg_tokens pos_embed pre_norm final_norm fc_norm use_fc_norm
use_pre_transformer_norm use_post_transformer_norm embed_norm_layer init_values qkv_bias qkv_fused
proj_bias swiglu_mlp swiglu_align_to scale_mlp scale_attn_inner use_abs_pos_emb dynamic_img_size
dynamic_img_pad strict_img_size weight_init fix_init head_init_scale layers channels stem_chs
"""
_DROPOUT_ARGUMENT = re.compile(r"\w*drop\w*")

_SHOWN_CHARACTERS = 80
_FIXED_VALUES = {
    "rope_theta": 100.0,
    "pooler_act": "tanh",
    "is_native": False,
}
"""Values of transformers' configurations that our networks have, and that no array shows."""


def list_models() -> dict[str, Sizes | None]:
    """Return the sizes of timm's models that are read, by name; None for a ResNet."""
    models: dict[str, Sizes | None] = {}
    for family in load_families():
        models |= family.models
    return models


def list_deprecated_names() -> dict[str, str]:
    """Return current names of timm's models that are read, by older names."""
    names: dict[str, str] = {}
    for family in load_families():
        names |= family.deprecated
    return names


def list_model_types() -> dict[str, Mapping[str, object]]:
    """Return the model types of transformers that are read, with fields that no array shows."""
    types: dict[str, Mapping[str, object]] = {}
    for family in load_families():
        types |= family.model_types
    return types


def find_current_name(name: str) -> str:
    """Return timm's name without its tag, and the current one for a deprecated one."""
    name = name.partition(".")[0]
    return list_deprecated_names().get(name, name)


def is_known(name: str) -> bool:
    """Return True for a name that is read: timm's, or a model type of transformers."""
    return find_current_name(name) in list_models() or name in list_model_types()


def find_family(name: str) -> Family | None:
    """Return the family of a model of timm that is read."""
    for family in load_families():
        if name in family.models:
            return family
    return None


def find_unsupported(name: str) -> str | None:
    """Return the reason why a model of timm is not read; None for an unknown one."""
    for family in load_families():
        for rejected in family.rejected_models:
            if re.match(rejected.pattern, name):
                return f"{rejected.family} is not supported: it has {rejected.feature}"
    return None


def require_compared(name: str) -> Family:
    """Return the family of a model of timm.

    Raises:
      ValueError: the model is not read. The message has the reason.
    """
    family = find_family(name)
    if family is not None:
        return family
    reason = find_unsupported(name)
    if reason:
        raise ValueError(
            f"architecture={quote(name)}: {reason}. "
            "Take weights of a family that docs/pretrained.md lists."
        )
    raise ValueError(
        f"architecture={quote(name)}: must be a model of timm that was compared with this "
        "program. If another model computes the same, give its name, such as "
        "architecture=vit_base_patch16_224."
    )


def find_timm_fields(name: str, arguments: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of the architecture that a model of timm has by its name and arguments.

    Raises:
      ValueError: the model is not read, or an argument changes it in an unknown way.
    """
    family = require_compared(name)
    _require_known_arguments(name, arguments)
    sizes = family.models[name]
    if sizes is None:
        return {}

    fields = {"rope": None, **_find_named_fields(family, name), **sizes._asdict()}
    reference = arguments.get("ref_feat_shape")
    if fields["rope"] == "index":
        fields["rope_grid"] = _read_reference_grid(name, reference)
    elif fields["rope"] == "grid":
        _require_grid_reference(reference)
    elif fields["rope"] is None:
        pools_all = fields.get("pooled_tokens") == "all"
        pools_all = arguments.get("pool_include_prefix", pools_all)
        fields["pooled_tokens"] = "all" if pools_all else "patches"
    return fields


def _find_named_fields(family: Family, name: str) -> Mapping[str, object]:
    """Return the fields of the architecture that no array of a model shows."""
    for pattern, fields in family.named_fields.items():
        if re.search(pattern, name):
            return fields
    return {}


def _require_known_arguments(name: str, arguments: Mapping[str, object]) -> None:
    known_arguments = _KNOWN_ARGUMENTS.split()
    for argument, value in arguments.items():
        if argument in known_arguments or _DROPOUT_ARGUMENT.fullmatch(argument):
            continue
        raise ValueError(
            f"model_args.{argument}={quote(str(value))}: is not supported. Remove it if it is the "
            f"default of {name}."
        )


def _require_grid_reference(reference: object) -> None:
    if reference not in (None, _GRID_REFERENCE):
        raise ValueError(
            f"model_args.ref_feat_shape={reference}: must be {_GRID_REFERENCE}. Take other weights."
        )


def _read_reference_grid(name: str, stated: object) -> tuple[int, int]:
    """Return rows and columns of the grid that the places of Perception Encoder count.

    The default is the grid of the model, whose name ends in the sizes of patches and images.
    """
    if stated is None:
        patch_size, image_size = map(int, re.findall(r"\d+", name)[-2:])
        side = image_size // patch_size
        return side, side
    if not isinstance(stated, list) or len(stated) != 2 or not all(map(is_count, stated)):
        raise ValueError(
            f"model_args.ref_feat_shape={quote(str(stated))}: must be rows and columns. "
            "Correct the file."
        )
    rows, columns = stated
    return rows, columns


def find_huggingface_fields(
    model_type: str | None, config: Mapping[str, object]
) -> dict[str, object]:
    """Return the fields of the architecture that a model type of transformers has by its name.

    Raises:
      ValueError: the model type is not read, or a value is one that our networks do not have.
    """
    types = list_model_types()
    if model_type is not None and model_type not in types:
        raise ValueError(
            f"model_type={quote(model_type)}: must be one of {', '.join(types)}. If one of these "
            "computes the same, give its name, such as architecture=vit."
        )
    for name, value in _FIXED_VALUES.items():
        if config.get(name) not in (None, value):
            stated = shorten(repr(config[name]), _SHOWN_CHARACTERS)
            raise ValueError(f"{name}={stated}: must be {value!r}. Take other weights.")
    if model_type is None:
        return {}
    return dict(types[model_type])
