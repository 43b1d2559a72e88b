"""Rules that the fields of an architecture must keep together, one function each.

A rule returns the problem that it found as `field=value: rule. fix.`, or None.
"""

from collections.abc import Callable, Iterator

from vit_jax.config.architecture import Architecture
from vit_jax.config.field_checks import apply_rules, find_out_of_range, reject
from vit_jax.config.rules import Component, read_rules
from vit_jax.config.sizes import NUM_GROUPS, ROOT_CHANNELS, resnet_downsampling
from vit_jax.imports.reference_form import is_reference

Rule = Callable[[Architecture], str | None]


def require_valid(a: Architecture, *, drops_border: bool = False) -> Architecture:
    """Return the architecture if its fields have values in range that fit together.

    `drops_border` allows images with a border that no patch covers.

    Raises:
      ValueError: the first field that does not fit.
    """
    rules_by_field = read_rules(Architecture)
    if not a.has_transformer:  # the sizes of the transformer are 0
        of_transformer = Component("Transformer")
        rules_by_field = {
            name: rules for name, rules in rules_by_field.items() if of_transformer not in rules
        }
    reject(find_out_of_range(a, "model.", rules_by_field), "")
    reject(_find_problems(a, drops_border=drops_border), "model.")
    return a


def _find_problems(a: Architecture, *, drops_border: bool) -> Iterator[str]:
    yield from apply_rules(FAMILY_RULES, a)
    problem = check_patches(a, drops_border=drops_border)
    if problem is not None:
        yield problem
    yield from apply_rules(NETWORK_RULES, a)


# The family and its ResNet.


def check_family(a: Architecture) -> str | None:
    """Check numbers that a name cannot get wrong, but a damaged description can."""
    has_units = bool(a.units)
    if a.family == "vit":
        fits = not has_units
    elif a.family == "hybrid":
        fits = a.residual_unit == "postactivation"
    else:
        ends_in_map = a.width == a.map_channels and a.patch_size == (1, 1)
        fits = has_units and a.pool == "gap" and ends_in_map
    if fits and min(a.units, default=1) >= 1:
        return None
    numbers = f"units {a.units}, pool {a.pool!r}, width {a.width}, patch {a.patch_size}"
    return f"name={a.name!r}: {numbers} and {a.residual_unit} units make no {a.family}."


def check_group_norm(a: Architecture) -> str | None:
    """The channels of a ResNet must divide into the groups of its norm."""
    if not a.has_resnet:
        return None
    if a.root_channels >= NUM_GROUPS and a.root_channels % NUM_GROUPS == 0:
        return None
    step = NUM_GROUPS / ROOT_CHANNELS
    rule = f"must be a multiple of {step:g}, for group norm"
    return f"name={a.name!r}: the width factor {a.width_factor:g} {rule}."


# The patches of the image.


def check_patches(a: Architecture, *, drops_border: bool) -> str | None:
    """Patches must divide the image, or cover most of it where the border may be dropped."""
    divisor = resnet_downsampling(a.units) if a.family == "hybrid" else 1
    axes = zip(("height", "width"), a.image_size, a.patch_size, strict=True)
    for axis, pixels, cells in axes:
        patch = cells * divisor
        may_drop = drops_border and a.family == "vit"
        if pixels < 1 or not _covers(patch, pixels, may_drop=may_drop):
            rule = f"patches of {patch} pixels must divide the image {axis} of {pixels}"
            sizes = _spell_near_sizes(pixels, patch)
            fix = f"Use an input.image_size of {sizes}, or another patch size"
            if a.family == "vit":
                fix += ", or in fine-tuning model.uncovered_border=drop"
            return f"name={a.name!r}: {rule}. {fix}."
    return None


def _covers(patch: int, pixels: int, *, may_drop: bool) -> bool:
    """Return True if patches cover a side of the image, or most of it with a dropped border."""
    if patch <= 0:
        return False
    if pixels % patch == 0:
        return True
    return may_drop and pixels > patch


def _spell_near_sizes(pixels: int, patch: int) -> str:
    """Return the multiples of a patch next to the number of pixels."""
    below = max(pixels, 0) // max(patch, 1) * patch
    return f"{below} or {below + patch}" if below else str(patch)


# The network as a whole.


def check_initial_values(a: Architecture) -> str | None:
    """A custom network makes its own initial parameters."""
    if a.network is None or a.initial_values == "paper":
        return None
    rule = f"has no effect on the custom network {a.network}"
    return f"initial_values={a.initial_values!r}: {rule}. Use paper."


def check_patch_outputs(a: Architecture) -> str | None:
    """Masked patches are predicted by a ViT with a linear head and no classes."""
    if not a.patch_outputs:
        return None
    if a.family == "vit" and a.head == "linear" and not a.num_classes:
        return None
    rule = "must be a ViT without ResNet and classes, with model.head=linear, for masked patches"
    return f"name={a.name!r}: {rule}."


def check_heads(a: Architecture) -> str | None:
    """The heads of the transformer must divide its width."""
    if not a.has_transformer or a.width % a.num_heads == 0:
        return None
    return f"width={a.width} is not divisible by model.num_heads={a.num_heads}."


def check_attention_form(a: Architecture) -> str | None:
    """Kernels of attention compute no relative positions."""
    if a.attention in ("auto", a.block_attention):
        return None
    return f"attention={a.attention!r}: computes no relative positions. Use auto or xla."


# Position embeddings.

_WIDTH_DIVISORS = {"sincos2d": 4, "learned_2d": 2}
_NOT_ADDED = {
    "none": "position_embedding='none' adds nothing",
    "relative": "relative positions are added to nothing, every block's attention has its own",
}


def check_position_width(a: Architecture) -> str | None:
    """Two-dimensional positions have equal parts of the width for rows and columns."""
    divisor = _WIDTH_DIVISORS.get(a.position_embedding, 1)
    if a.width % divisor == 0:
        return None
    rule = f"needs a width divisible by {divisor}, not {a.width}"
    return f"position_embedding={a.position_embedding!r}: {rule}."


def check_position_tokens(a: Architecture) -> str | None:
    """Positions of patches alone must be one table, in front of which there is a class token."""
    if a.position_tokens != "patches":
        return None
    is_table = a.position_embedding == "learned_1d" and a.position_layers == "stem"
    if is_table and a.prefix_length:
        return None
    rule = "needs learned_1d positions before the blocks, and a class token"
    return f"position_tokens='patches': {rule}. Use all."


def check_position_prefix(a: Architecture) -> str | None:
    """Two-dimensional and relative positions have a place for one class token."""
    if a.position_embedding not in ("learned_2d", "relative") or a.prefix_length <= 1:
        return None
    rule = "has a place for one class token alone"
    return f"position_embedding={a.position_embedding!r}: {rule}. Use learned_1d."


def check_added_positions(a: Architecture) -> str | None:
    """Only positions that are added to tokens can be added before every block."""
    if a.position_layers == "stem" or a.position_embedding not in _NOT_ADDED:
        return None
    reason = _NOT_ADDED[a.position_embedding]
    return f"position_layers={a.position_layers!r}: {reason}. Leave it at 'stem'."


def check_repeated_positions(a: Architecture) -> str | None:
    """Fixed positions are the same before every block."""
    if a.position_layers != "every" or a.position_embedding != "sincos2d":
        return None
    reason = "sincos2d has no parameters, so that every block has the same"
    return f"position_layers='every': {reason}: use 'shared'."


def check_relative_positions(a: Architecture) -> str | None:
    """Relative positions belong to the attention of the built-in blocks."""
    if a.position_embedding != "relative" or not is_reference(a.block):
        return None
    return f"position_embedding='relative' needs the built-in blocks' attention, not {a.block}."


# Rotary positions.


def check_rotary_head_width(a: Architecture) -> str | None:
    """Rotary positions rotate two pairs of values, one for rows and one for columns."""
    if a.rope is None:
        return None
    head_width = a.width // a.num_heads
    if head_width % 4 == 0:
        return None
    return f"rope={a.rope!r}: heads have {head_width} values: must be divisible by 4."


def check_rotary_blocks(a: Architecture) -> str | None:
    """Rotary positions belong to the standard block, without relative positions."""
    if a.rope is None:
        return None
    if a.position_embedding != "relative" and a.block is None:
        return None
    rule = "relative positions and other blocks have no rotary positions"
    return f"rope={a.rope!r}: {rule}. Use rope=None."


# Class tokens, pooling and the last norm.


def check_axial_tokens(a: Architecture) -> str | None:
    """Axial blocks see rows and columns of patches only."""
    if a.block != "axial" or not a.prefix_length:
        return None
    rule = "a class token or register has no place in axial blocks"
    return f"pool={a.pool!r}: {rule}. Use gap or map."


def check_pool_heads(a: Architecture) -> str | None:
    """Heads of attention pooling must divide the width."""
    if a.pool_num_heads is None:
        return None
    if a.pool == "map" and a.width % a.pool_num_heads == 0:
        return None
    rule = f"must divide the width of {a.width}, and needs pool=map"
    return f"pool_num_heads={a.pool_num_heads}: {rule}. Use None."


def check_pooled_tokens(a: Architecture) -> str | None:
    """Pooling of class tokens needs one."""
    if a.pool not in ("token", "token_gap") or a.num_class_tokens:
        return None
    return f"class_tokens=0: pool={a.pool!r} needs a class token. Use 1, or pool=gap."


def check_final_norm(a: Architecture) -> str | None:
    """A norm of the pooled features must have the width of a token."""
    if a.final_norm != "pooled":
        return None
    if a.pool in ("token", "gap") and a.feature_width == a.width:
        return None
    rule = f"the pooled features of pool={a.pool!r} have no such norm"
    return f"final_norm='pooled': {rule}. Use tokens, or pool=gap."


# The first problem in this order is reported.
FAMILY_RULES: tuple[Rule, ...] = (check_family, check_group_norm)
NETWORK_RULES: tuple[Rule, ...] = (
    check_initial_values,
    check_patch_outputs,
    check_heads,
    check_position_width,
    check_axial_tokens,
    check_pool_heads,
    check_pooled_tokens,
    check_rotary_head_width,
    check_rotary_blocks,
    check_position_tokens,
    check_position_prefix,
    check_final_norm,
    check_added_positions,
    check_repeated_positions,
    check_relative_positions,
    check_attention_form,
)
