"""From what a file's names and shapes tell to the whole architecture: defaults, answers, and what must be asked for."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from vit_jax.config.architecture import Architecture
from vit_jax.config.variants import RESIDUAL_UNITS, RESNET_UNITS, ROOT_CHANNELS, VIT_SIZES, resnet_downsampling
from vit_jax.weights.answers import refuse_contradictions
from vit_jax.weights.description import MOST_STAGES, bounded_architecture
from vit_jax.weights.names import Facts

DECIDED = ("patch_size", "width", "depth", "mlp_dim", "num_classes")  # by the file, whatever is said of it
_OF_TRANSFORMER = {"num_heads", "gelu", "layer_norm_epsilon", "position_embedding"}
_OF_RESNET = {"group_norm_epsilon", "standardization_epsilon", "standardization_epsilon_added_to"}
_WITHOUT_EFFECT: dict[str, set[str]] = {"vit": _OF_RESNET, "resnet": _OF_TRANSFORMER, "hybrid": set()}


def complete(facts: Facts, stated: dict[str, Any], given: Mapping[str, Any]) -> tuple[Architecture, bool, list[str]]:
    """The architecture, whether its table of positions lacks the class token's row, and what was assumed.

    Args:
      facts: of the file.
      stated: what a configuration beside it says; used up.
      given: answers, as from `normal_answers`.

    Raises:
      ValueError: something is contradicted, without effect, or still not known.
    """
    if stated.pop("pool", facts.pool) != facts.pool:
        raise ValueError(
            f"the configuration beside it asks for another pooling than the file's parameters ({facts.pool}): "
            "our networks have a class token only where they read it"
        )
    _require_same_network(facts, {name: stated.pop(name) for name in DECIDED if name in stated})
    known: dict[str, Any] = {"num_heads": facts.num_heads}
    if facts.position_rows is not None:
        known["position_embedding"] = "learned_1d"
    refuse_contradictions(given, known, "the file")
    if idle := given.keys() & _WITHOUT_EFFECT[facts.family]:
        raise ValueError(f"{', '.join(sorted(idle))} would have no effect on a {facts.family}: leave it out")
    choice = {**stated, **given}
    fields = format_defaults(facts)
    assumptions: list[str] = []
    fields["num_heads"] = _num_heads(facts, choice.get("num_heads"), assumptions)
    size, is_given = choice.get("image_size"), "image_size" in given
    fields["image_size"], is_row_missing = _image_size(facts, size, is_given, assumptions)
    fields["name"] = _name(facts, fields["num_heads"])
    if facts.position_rows is None and facts.family != "resnet":
        fields["position_embedding"] = facts.fixed_positions
        if "position_embedding" not in given:
            assumptions.append(
                f"It has no table of positions; {facts.fixed_positions!r} is assumed. If that is wrong, give "
                "position_embedding=sincos2d or none."
            )
    fields |= {name: value for name, value in choice.items() if name not in ("image_size", "num_heads")}
    return bounded_architecture(fields), is_row_missing, assumptions


def _require_same_network(facts: Facts, stated: Mapping[str, Any]) -> None:
    """What stands beside the file is of it: of fewer layers than it says, a file could be whole and yet not all.

    Only of the head one side may have none: it was left out of the file, or a library is to build none.
    """
    headless = facts.num_classes == 0 or stated.get("num_classes") == 0
    different = [
        f"{name} {value} there, {getattr(facts, name)} in the file"
        for name, value in stated.items()
        if value != getattr(facts, name) and not (name == "num_classes" and headless)
    ]
    if different:
        raise ValueError(
            f"the configuration beside it is of another network: {'; '.join(different)}. Bring both from one place, or "
            "take the configuration away and answer what it tells"
        )


def format_defaults(facts: Facts) -> dict[str, Any]:
    """Fields of the architecture that the file decides, or whose value is the format's: GELU form, epsilons."""
    form = facts.defaults.get("residual_unit", "postactivation")
    defaults = {field.name: field.default for field in dataclasses.fields(Architecture)}
    names = ["family", "patch_size", "width", "depth", "mlp_dim", "units", "pool", "head", "num_classes"]
    return {
        **{name: value for name, value in defaults.items() if value is not dataclasses.MISSING},
        **vars(RESIDUAL_UNITS[form]),
        **facts.defaults,
        **{name: getattr(facts, name) for name in names},
        "width_factor": facts.root_channels / ROOT_CHANNELS,
    }


def _num_heads(facts: Facts, given: int | None, assumptions: list[str]) -> int:
    if facts.num_heads is not None:
        return facts.num_heads
    if given is not None:
        if given < 1 or facts.width % given:
            raise ValueError(f"num_heads={given} does not divide the width: give a divisor of {facts.width}")
        return given
    numbers = (facts.width, facts.depth, facts.mlp_dim)
    for name, size in VIT_SIZES.items():
        if (size.width, size.depth, size.mlp_dim) == numbers:
            assumptions.append(f"The file does not tell the number of heads; {size.num_heads} is ViT-{name}'s.")
            return size.num_heads
    raise ValueError(
        f"the file does not tell the number of heads, and no known size has width {numbers[0]}, depth {numbers[1]} "
        f"and mlp_dim {numbers[2]}: give num_heads, a divisor of {numbers[0]}"
    )


def _pixels_of_a_patch(facts: Facts) -> tuple[int, int]:
    divisor = resnet_downsampling(facts.units[: MOST_STAGES + 1]) if facts.family == "hybrid" else 1
    return facts.patch_size[0] * divisor, facts.patch_size[1] * divisor


def _whole_patches(
    size: tuple[int, int], patch: tuple[int, int], is_given: bool, assumptions: list[str]
) -> tuple[int, int]:
    """The size; of one that a configuration states, what is left without a border that no patch covers."""
    height, width = (pixels // part * part for pixels, part in zip(size, patch, strict=True))
    if (height, width) == size:
        return size
    patches = f"patches of {patch[0]}x{patch[1]} pixels"
    if is_given or height < 1 or width < 1:
        near = f"{max(height, patch[0])},{max(width, patch[1])}"
        raise ValueError(f"image_size={size} is no multiple of its {patches}: give image_size, such as {near}")
    assumptions.append(
        f"The configuration beside it says {size[0]}x{size[1]} images, where {patches} leave out a border; ours show "
        f"all of the image in {height}x{width}."
    )
    return height, width


def _image_size(
    facts: Facts, stated: tuple[int, int] | None, is_given: bool, assumptions: list[str]
) -> tuple[tuple[int, int], bool]:
    """Height and width in pixels, and whether the table of positions lacks the row of a class token."""
    height, width = patch = _pixels_of_a_patch(facts)
    size = None if stated is None else _whole_patches(stated, patch, is_given, assumptions)
    if facts.position_rows is None:
        if size is None:
            raise ValueError("the file does not tell the image size: give image_size, height and width in pixels")
        return size, False
    lengths = {facts.position_rows - rows: rows for rows in facts.class_rows}
    if size is None:
        side = next((math.isqrt(n) for n in lengths if n > 0 and math.isqrt(n) ** 2 == n), None)
        if side is None:
            raise ValueError(
                f"its {facts.position_rows} positions are no square of patches: give image_size, height and width in "
                f"pixels, multiples of {height} and {width}"
            )
        size = (side * height, side * width)
        assumptions.append(f"A square grid of {side}x{side} patches is assumed, of {size[0]}x{size[1]} images.")
    patches = (size[0] // height) * (size[1] // width)
    if patches not in lengths:
        raise ValueError(
            f"image_size={size} has {patches} patches of {height}x{width} pixels, the file has positions for "
            f"{' or '.join(map(str, lengths))}"
        )
    return size, facts.pool == "token" and lengths[patches] == 0


def _name(facts: Facts, num_heads: int) -> str:
    """The name that people would write, as far as the numbers have one."""
    numbers = (facts.width, facts.depth, facts.mlp_dim, num_heads)
    size = f"ViT-{next((name for name, row in VIT_SIZES.items() if tuple(vars(row).values()) == numbers), 'custom')}"
    factor = "" if facts.root_channels == ROOT_CHANNELS else f"x{facts.root_channels / ROOT_CHANNELS:g}"
    height, width = facts.patch_size
    if facts.family == "vit":
        return f"{size}/{height}" if height == width else f"{size}/{height}x{width}"
    if not facts.units:
        return f"R{factor}+{size}/{2 * height}"
    stages = len(facts.units)
    joined = {  # a hybrid of fewer stages has the units of all
        (*units[: stages - 1], sum(units[stages - 1 :])): str(depth) for depth, units in RESNET_UNITS.items()
    }
    resnet = f"R{joined.get(facts.units, '-custom')}"
    if facts.family == "resnet":
        return f"{resnet}{factor or 'x1'}"
    return f"{resnet}{factor}+{size}/{resnet_downsampling(facts.units) * height}"
