"""Detection of the format and the architecture from names, shapes and metadata of a file.

The file decides most fields; a format fixes its defaults (GELU form, epsilons); a configuration
beside the file and the caller's options give the rest. An unknown value is an error that names the
option. No data is read here.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vit_jax.config.architecture import Architecture
from vit_jax.config.sizes import (
    RESIDUAL_UNITS,
    RESNET_UNITS,
    ROOT_CHANNELS,
    VIT_SIZES,
    resnet_downsampling,
)
from vit_jax.weights import architectures
from vit_jax.weights.description import MAX_STAGES, parse_architecture, parse_bounded_architecture
from vit_jax.weights.families import load_families
from vit_jax.weights.formats import StoredArray, naming
from vit_jax.weights.names import FORMATS, Entry, Facts, Shape, replace_shape
from vit_jax.weights.overrides import OPTIONS
from vit_jax.weights.packing import PLAIN, Packing
from vit_jax.weights.typed_values import is_count

# Facts of a configuration that are not fields of the architecture to take from it.
_FACTS_OF_FILE = ("pool", "pooled_tokens")
# Fields that the file decides; a configuration must agree.
_DECIDED = ("patch_size", "width", "depth", "mlp_dim", "num_classes")
_RESNET_OPTIONS = ("group_norm_", "standardization_")  # beginnings of their names
_UNNAMED = (
    "The file does not name its network: norms before each branch are assumed, as most models "
    "of timm have them. If its name is known, give it, such as architecture=vit_base_patch16_224."
)
_TEXT_TOWER = re.compile(
    r"text_(model|encoder|projection)\.|logit_(scale|bias)$|temperature$|(.*\.)?token_embedding\."
)

Fields = Mapping[str, Any]
"""Fields of the architecture, stated by a configuration beside a file or given by the caller."""


@dataclasses.dataclass(frozen=True)
class Recognised:
    """A file whose network is known.

    Attributes:
      format: "released", "big_vision", "bit", "timm" or "huggingface".
      entries: arrays that the file must have, by canonical names of the format.
      names: canonical name → name in the file, of every array to read.
      ignored: names in the file that are not part of the network.
      folded_rows: leading rows of the table of positions that belong to class tokens, and are added
        to these.
      packing: form in which the file packs parameters.
      assumptions: a sentence for each value that the file does not state.
    """

    format: str
    architecture: Architecture
    entries: Sequence[Entry]
    names: Mapping[str, str]
    ignored: Sequence[str]
    folded_rows: int
    facts: Facts
    packing: Packing
    assumptions: Sequence[str]


def recognise(
    arrays: Mapping[str, StoredArray],
    metadata: Mapping[str, object],
    *,
    stated: Fields | None = None,
    options: Mapping[str, object] | None = None,
) -> Recognised:
    """Find the format and the network of a file.

    Fields of the architecture that the arrays and our metadata do not have are `stated` by a
    configuration beside the file, or `options` of the caller, from `vit_jax.weights.OPTIONS`, which
    take precedence.

    Raises:
      ValueError: an unknown format, a network that ours cannot compute, an option that is missing
        or contradicts it.
    """
    stated = stated or {}
    chosen = validate_options(options or {})
    chosen.pop("architecture", None)  # `stated` has its facts

    name, names = _find_format(arrays)
    format_ = FORMATS[name]
    shapes = {canonical: arrays[in_file].shape for canonical, in_file in names.items()}
    with naming(f"the file has the names of {name}"):
        facts = format_.find_facts(shapes)
        packing = _find_packing(shapes, arrays)
        facts = packing.complete_facts(facts, shapes, arrays)

    assumptions: list[str] = []
    if metadata:
        architecture = parse_architecture(metadata)
        reject_contradictions(chosen, dataclasses.asdict(architecture), "the file's metadata")
    else:
        architecture = _Completion(facts, packing, stated, chosen, assumptions).build()
        if name == "timm" and not stated and architecture.has_transformer:
            assumptions.append(_UNNAMED)

    entries = format_.make_entries(architecture, shapes, facts.absent, packing)
    folded_rows = _count_folded_rows(facts, architecture)
    if folded_rows:
        num_rows = math.prod(architecture.grid) + folded_rows
        shape = (1, num_rows, architecture.width)
        entries = replace_shape(entries, "positions/table", shape)

    used = set(names.values())
    ignored = [in_file for in_file in arrays if in_file not in used]
    return Recognised(
        format=format_.name_style(shapes, names) or name,
        architecture=architecture,
        entries=entries,
        names=names,
        ignored=ignored,
        folded_rows=folded_rows,
        facts=facts,
        packing=packing,
        assumptions=assumptions,
    )


def _find_packing(
    shapes: Mapping[str, Shape],
    arrays: Mapping[str, StoredArray],
) -> Packing:
    """Return the form in which a file packs parameters.

    Its shapes are by canonical names, its arrays by names in the file.
    """
    for family in load_families():
        for packing in family.packings:
            if packing.matches(shapes, arrays):
                return packing
    return PLAIN


def _count_folded_rows(facts: Facts, a: Architecture) -> int:
    """Return the number of rows of the table that belong to tokens without positions."""
    if a.position_tokens != "patches" or facts.position_rows is None:
        return 0
    return max(0, facts.position_rows - math.prod(a.grid))


def validate_options(options: Fields) -> dict[str, Any]:
    """Return the options that are not None, image_size as a tuple.

    Raises:
      ValueError: a value that no network has.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    for name, value in chosen.items():
        is_possible, rule = _find_rule(name)
        if not is_possible(value):
            raise ValueError(f"{name}={value!r}: must be {rule}.")
    if "image_size" in chosen:
        chosen["image_size"] = tuple(chosen["image_size"])
    return chosen


def _is_name(value: object) -> bool:
    return isinstance(value, str) and architectures.is_known(value)


def _is_size(value: Sequence[object]) -> bool:
    return len(value) == 2 and all(map(is_count, value))


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "architecture": (
        _is_name,
        "a model of timm or a model type of transformers that is read, "
        "such as vit_base_patch16_224",
    ),
    "num_heads": (
        is_count,
        "a divisor of the network's width",
    ),
    "image_size": (
        _is_size,
        "height and width in pixels, such as 224,224",
    ),
}
_NUMBER_RULE = (_is_positive, "a number above 0, such as 1e-6")


def _find_rule(option: str) -> tuple[Callable[[Any], bool], str]:
    """Return the test of an option's values, and the values that pass it in words."""
    form, _ = OPTIONS[option]
    if "|" in form:
        values = form.split("|")
        return values.__contains__, f"one of {', '.join(values)}"
    return _RULES.get(option, _NUMBER_RULE)


def reject_contradictions(
    options: Mapping[str, object],
    known: Mapping[str, object],
    source: str,
) -> None:
    """Raise ValueError for an option whose known value is another, except the image size."""
    for name, value in options.items():
        if name == "image_size":
            continue
        known_value = known.get(name)
        if known_value is not None and known_value != value:
            raise ValueError(
                f"{name}={value!r}: must be {known_value!r}, as {source} states. Omit the option."
            )


def _find_format(arrays: Mapping[str, StoredArray]) -> tuple[str, dict[str, str]]:
    """Return the name of the format of a file, and its canonical names → names in the file."""
    _reject_unread(arrays)
    for name, format_ in FORMATS.items():
        with naming(f"the file has the names of {name}"):
            names = format_.find_canonical(arrays)
            if names:
                return name, names

    if any(map(_TEXT_TOWER.match, arrays)):
        raise ValueError(
            "the file is of a text tower alone, which is no image network: "
            "take the file with both towers"
        )
    first_names = ", ".join(list(arrays)[:4])
    raise ValueError(
        f"its {len(arrays)} arrays have names of no known format ({first_names}, ...). "
        "Known are the released ViT, big_vision, Big Transfer, timm and Hugging Face, "
        "and the families that docs/pretrained.md lists. Give a file of one of these"
    )


def _reject_unread(arrays: Mapping[str, StoredArray]) -> None:
    """Raise ValueError, with the reason, for a file of an unsupported network."""
    names_by_kind = {}
    for name, array in arrays.items():
        names_by_kind[f"{name}:{len(array.shape)}:{array.dtype.kind}"] = name
    for family in load_families():
        for rejected in family.rejected_arrays:
            kind = _find_first_match(rejected.pattern, names_by_kind)
            if kind is not None:
                raise ValueError(
                    f"the file is of {rejected.family}: it has {rejected.feature} "
                    f"({names_by_kind[kind]}), which are not read: {rejected.remedy}"
                )


def _find_first_match(pattern: str, texts: Iterable[str]) -> str | None:
    """Return the first text that begins with a pattern."""
    for text in texts:
        if re.match(pattern, text):
            return text
    return None


class _Completion:
    """The architecture of a file, from its facts, a configuration, and options of the caller."""

    def __init__(
        self,
        facts: Facts,
        packing: Packing,
        stated: Fields,
        chosen: Fields,
        assumptions: list[str],
    ) -> None:
        """Take the facts of the file, the stated and the chosen fields.

        Sentences about values that are in none of them go to `assumptions`.

        Raises:
          ValueError: they contradict each other.
        """
        _require_same_network(facts, stated)
        self.facts = dataclasses.replace(facts, pool=stated.get("pool", facts.pool))
        self.packing = packing
        self.stated = stated
        self.chosen = chosen
        self.assumptions = assumptions
        _require_pooled_tokens(self.facts, stated)
        _require_agreement(self.facts, stated, chosen)
        _require_effect(facts, chosen)

    def build(self) -> Architecture:
        """Return the architecture.

        Raises:
          ValueError: a value is unknown, or the values give no network.
        """
        chosen_fields = self.find_choices()
        fields = collect_fields(self.facts)
        fields["num_heads"] = self.find_num_heads(chosen_fields.pop("num_heads", None))
        fields["image_size"], prefix_rows = self.find_image_size()
        fields["name"] = _name_network(self.facts, fields["num_heads"])
        self.complete_positions(fields, chosen_fields, prefix_rows)

        usual_class_tokens = int(self.facts.pool in ("token", "token_gap"))
        if fields.get("class_tokens") == usual_class_tokens:
            fields["class_tokens"] = None  # the number follows from the pooling

        a = parse_bounded_architecture(fields | chosen_fields)
        if a.modern_options.keys() - {"position_tokens"} and not self.stated:
            self.assumptions.append(
                f"WARNING: without the config.json of these weights, gelu={a.gelu}, "
                f"layer_norm_epsilon={a.layer_norm_epsilon:g} and pixels in [-1, 1] are assumed, "
                "which other families do not have. Give the folder with both files."
            )
        return a

    def find_choices(self) -> dict[str, Any]:
        """Return the stated or chosen fields of the architecture, except the image size."""
        choices = {**self.stated, **self.chosen}
        for field in (*_FACTS_OF_FILE, *_DECIDED, "image_size"):
            choices.pop(field, None)
        if self.facts.needs_rope and "rope" not in choices:
            raise ValueError(
                "the file does not state its rotary positions: give the folder with its "
                "config.json, or its name in timm, such as architecture=vit_small_patch16_dinov3"
            )
        return choices

    def find_num_heads(self, chosen: int | None) -> int:
        """Return the number of heads: of the file, the chosen one, or of the ViT of this size."""
        facts = self.facts
        if facts.num_heads is not None:
            return facts.num_heads

        if chosen is not None:
            if chosen < 1 or facts.width % chosen:
                raise ValueError(
                    f"num_heads={chosen}: must divide the width. Give a divisor of {facts.width}."
                )
            return chosen

        sizes = (facts.width, facts.depth, facts.mlp_dim)
        for name, size in VIT_SIZES.items():
            if (size.width, size.depth, size.mlp_dim) == sizes:
                self.assumptions.append(
                    "The file does not state the number of heads; "
                    f"{size.num_heads} is ViT-{name}'s."
                )
                return size.num_heads
        raise ValueError(
            f"the file does not state the number of heads, and no known size has width "
            f"{facts.width}, depth {facts.depth} and mlp_dim {facts.mlp_dim}: "
            f"give num_heads, a divisor of {facts.width}"
        )

    def complete_positions(
        self,
        fields: dict[str, Any],
        chosen_fields: dict[str, Any],
        prefix_rows: int,
    ) -> None:
        """Add the form of the positions to fields of the architecture."""
        facts = self.facts
        class_tokens = fields.get("class_tokens") or 0
        prefix_length = class_tokens + fields.get("registers", 0)
        has_table = facts.position_rows is not None
        if has_table and (self.packing.fits_any_grid or prefix_rows != prefix_length):
            fields["position_tokens"] = "patches"

        if not has_table and facts.family != "resnet":
            fields["position_embedding"] = facts.fixed_positions
            has_rope = chosen_fields.get("rope") is not None  # rotary positions have no table
            if "position_embedding" not in chosen_fields and not has_rope:
                self.assumptions.append(
                    f"It has no table of positions; {facts.fixed_positions!r} is assumed. "
                    "If that is wrong, give position_embedding=sincos2d or none."
                )

        if chosen_fields.get("rope_grid") == _find_grid(fields):
            chosen_fields["rope_grid"] = None

    def find_image_size(self) -> tuple[tuple[int, int], int]:
        """Return height and width in pixels, and the number of positions of prefix tokens.

        The chosen size counts if no other is stated, or if the file has positions for it alone.
        """
        patch = _find_patch(self.facts)
        chosen = self.chosen.get("image_size")
        if chosen:
            chosen = _require_multiple(chosen, patch)
        stated = self.stated.get("image_size")
        if stated:
            stated = self.cut_border(stated, patch)

        if self.packing.fits_any_grid:
            return _require_size(chosen or stated, patch), 0
        if self.facts.position_rows is None:
            return _require_size(stated or chosen, patch), 0

        lengths = _list_lengths(self.facts)
        size = stated
        for candidate in (stated, chosen):
            if candidate and _count_patches(candidate, patch) in lengths:
                size = candidate
                break
        size = size or self.assume_square(lengths, patch) or chosen
        size = _require_size(size, patch)

        patches = _count_patches(size, patch)
        if patches not in lengths:
            possible = " or ".join(map(str, lengths))
            raise ValueError(
                f"image_size={size} has {patches} patches of {patch[0]}x{patch[1]} pixels, "
                f"the file has positions for {possible}"
            )
        return size, lengths[patches]

    def cut_border(self, size: tuple[int, int], patch: tuple[int, int]) -> tuple[int, int]:
        """Return a stated size without a border that no patch covers."""
        height, width = _round_down(size, patch)
        if height < 1 or width < 1:
            return _require_multiple(size, patch)
        if (height, width) != size:
            self.assumptions.append(
                f"The configuration beside it says {size[0]}x{size[1]} images, where patches of "
                f"{patch[0]}x{patch[1]} pixels do not cover a border; vit_jax resizes the whole "
                f"image to {height}x{width}."
            )
        return height, width

    def assume_square(
        self,
        lengths: Iterable[int],
        patch: tuple[int, int],
    ) -> tuple[int, int] | None:
        """Return the size of square images; None if no possible number of patches is a square."""
        for length in lengths:
            side = math.isqrt(max(length, 0))
            if side == 0 or side**2 != length:
                continue
            height = side * patch[0]
            width = side * patch[1]
            self.assumptions.append(
                f"A square grid of {side}x{side} patches is assumed, of {height}x{width} images."
            )
            return height, width
        return None


def _require_agreement(facts: Facts, stated: Fields, chosen: Fields) -> None:
    """Raise ValueError for a chosen value if the file or the name of the network states another."""
    positions = "learned_1d" if facts.position_rows else None
    known = {"num_heads": facts.num_heads, "position_embedding": positions}
    reject_contradictions(chosen, known, "the file")

    if "rope" not in stated or "rope" not in chosen:
        return
    if chosen["rope"] != stated["rope"]:
        raise ValueError(
            f"rope={chosen['rope']!r}: must be {stated['rope']}, by the network's name. "
            "Omit the option."
        )


def _require_effect(facts: Facts, chosen: Fields) -> None:
    """Raise ValueError for a chosen value that a network does not use."""
    for name in chosen.keys() - {"image_size"}:
        other_family = "vit" if name.startswith(_RESNET_OPTIONS) else "resnet"
        if facts.family == other_family:
            value = chosen[name]
            raise ValueError(
                f"{name}={value!r}: must not be set, as it has no effect on a {facts.family}."
            )


def _find_grid(fields: Fields) -> tuple[int, int]:
    """Return rows and columns of patches."""
    height, width = fields["image_size"]
    patch_height, patch_width = fields["patch_size"]
    return height // patch_height, width // patch_width


def _require_pooled_tokens(facts: Facts, stated: Fields) -> None:
    """Raise ValueError if the network beside a file pools other tokens than our network.

    Our attention pools all tokens, our mean the patches.
    """
    ours = _POOLED_TOKENS.get(facts.pool)
    theirs = stated.get("pooled_tokens", ours)
    if not facts.prefix_length or ours is None or theirs == ours:
        return
    pooled = "all tokens" if theirs == "all" else "patches without prefix tokens"
    raise ValueError(
        f"it pools {pooled} by {facts.pool}, which is not supported: "
        "take weights of a family that docs/pretrained.md lists"
    )


_POOLED_TOKENS = {
    "map": "all",
    "gap": "patches",
}


def _require_same_network(facts: Facts, stated: Fields) -> None:
    """Raise ValueError if the configuration beside a file is of another network.

    Either side may have no head. Poolings without parameters agree.
    """
    compared = {*_DECIDED, "pool"}
    if not facts.num_classes or stated.get("num_classes") == 0:
        compared.remove("num_classes")
    if "map" not in (facts.pool, stated.get("pool")):
        compared.remove("pool")

    different = []
    for name, value in stated.items():
        if name not in compared:
            continue
        in_file = getattr(facts, name)
        if value != in_file:
            different.append(f"{name} {value} there, {in_file} in the file")
    if different:
        raise ValueError(
            f"the configuration beside it is of another network: {'; '.join(different)}. "
            "Take both from one place, or remove the configuration and give its values as options"
        )


def collect_fields(facts: Facts) -> dict[str, Any]:
    """Return the fields of the architecture that the file decides or the format fixes.

    A format fixes the GELU form and epsilons.
    """
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(Architecture):
        if field.default is not dataclasses.MISSING:
            fields[field.name] = field.default

    residual_unit = facts.defaults.get("residual_unit", "postactivation")
    fields |= vars(RESIDUAL_UNITS[residual_unit])
    fields |= facts.defaults
    fields |= facts.modern_options
    for name in ("family", "units", "pool", "head", *_DECIDED):
        fields[name] = getattr(facts, name)
    fields["width_factor"] = facts.root_channels / ROOT_CHANNELS
    return fields


def _find_patch(facts: Facts) -> tuple[int, int]:
    """Return the pixels of an image that a patch covers."""
    height, width = facts.patch_size
    if facts.family != "hybrid":
        return height, width
    divisor = resnet_downsampling(facts.units[: MAX_STAGES + 1])
    return height * divisor, width * divisor


def _list_lengths(facts: Facts) -> dict[int, int]:
    """Return possible numbers of patches → rows of prefix tokens before their positions."""
    assert facts.position_rows is not None
    tokens = facts.modern_options.get("class_tokens", 0)
    possible = facts.prefix_rows or {0, tokens, facts.prefix_length}
    return {facts.position_rows - rows: rows for rows in sorted(possible)}


def _count_patches(size: tuple[int, int], patch: tuple[int, int]) -> int:
    """Return the number of patches of an image."""
    height, width = size
    patch_height, patch_width = patch
    return (height // patch_height) * (width // patch_width)


def _require_size(
    size: tuple[int, int] | None,
    patch: tuple[int, int],
) -> tuple[int, int]:
    if size is None:
        raise ValueError(
            "the file does not state the image size, and its positions are not a square grid "
            "of patches: give image_size, height and width in pixels, "
            f"multiples of {patch[0]} and {patch[1]}"
        )
    return size


def _round_down(size: tuple[int, int], patch: tuple[int, int]) -> tuple[int, int]:
    height, width = size
    patch_height, patch_width = patch
    rows = height // patch_height
    columns = width // patch_width
    return rows * patch_height, columns * patch_width


def _require_multiple(size: tuple[int, int], patch: tuple[int, int]) -> tuple[int, int]:
    height, width = _round_down(size, patch)
    if (height, width) != size:
        patch_height, patch_width = patch
        near_height = max(height, patch_height)
        near_width = max(width, patch_width)
        raise ValueError(
            f"image_size={size}: must be a multiple of its patches of "
            f"{patch_height}x{patch_width} pixels. Give image_size, such as "
            f"{near_height},{near_width}."
        )
    return size


def _name_network(facts: Facts, num_heads: int) -> str:
    """Return the usual name of the network, as far as its sizes have one."""
    transformer = f"ViT-{_name_size(facts, num_heads)}"
    height, width = facts.patch_size
    if facts.family == "vit":
        if height == width:
            return f"{transformer}/{height}"
        return f"{transformer}/{height}x{width}"

    factor = ""
    if facts.root_channels != ROOT_CHANNELS:
        factor = f"x{facts.root_channels / ROOT_CHANNELS:g}"
    if not facts.units:
        return f"R{factor}+{transformer}/{2 * height}"
    resnet = f"R{_name_units(facts.units)}"
    if facts.family == "resnet":
        return f"{resnet}{factor or 'x1'}"
    return f"{resnet}{factor}+{transformer}/{resnet_downsampling(facts.units) * height}"


def _name_size(facts: Facts, num_heads: int) -> str:
    numbers = (facts.width, facts.depth, facts.mlp_dim, num_heads)
    for name, size in VIT_SIZES.items():
        if tuple(vars(size).values()) == numbers:
            return name
    return "custom"


def _name_units(units: tuple[int, ...]) -> str:
    """Return the depth of the ResNet with these units; "-custom" for other ResNets.

    The last stage of a hybrid with fewer stages has the units of all remaining stages.
    """
    last = len(units) - 1
    for depth, all_units in RESNET_UNITS.items():
        merged_units = (*all_units[:last], sum(all_units[last:]))
        if merged_units == units:
            return str(depth)
    return "-custom"
