"""From names, shapes and metadata of a file to its format and the architecture of its network.

The file decides what it can; a format fixes its defaults (GELU form, epsilons); a configuration beside the file and the
caller's options give the rest, and what is still unknown is an error that names the option. No data is read here.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from vit_jax.config.architecture import Architecture
from vit_jax.config.schema import AddedTo, Gelu, Rope
from vit_jax.config.variants import RESIDUAL_UNITS, RESNET_UNITS, ROOT_CHANNELS, VIT_SIZES, resnet_downsampling
from vit_jax.weights.description import MOST_STAGES, bounded_architecture, stored_architecture
from vit_jax.weights.formats import StoredArray
from vit_jax.weights.names import FORMATS, TABULAR, Entry, Facts, radio, released
from vit_jax.weights.options import OPTIONS

_CHOICES: dict[str, tuple[str, ...]] = {
    "gelu": get_args(Gelu),
    "standardization_epsilon_added_to": get_args(AddedTo),
    "position_embedding": TABULAR,
    "rope": get_args(Rope),
}
_NEEDED = {
    "image_size": "give height and width in pixels, such as 224,224",
    "num_heads": "give a divisor of the network's width",
    **{name: "give a number above 0, such as 1e-6" for name in OPTIONS if name.endswith("epsilon")},
    **{name: f"choose {' or '.join(choices)}" for name, choices in _CHOICES.items()},
}
_DECIDED = ("patch_size", "width", "depth", "mlp_dim", "num_classes")  # by the file; a configuration must agree
_OF_TRANSFORMER = {"num_heads", "gelu", "layer_norm_epsilon", "position_embedding", "rope"}
_OF_RESNET = {"group_norm_epsilon", "standardization_epsilon", "standardization_epsilon_added_to"}
_WITHOUT_EFFECT: dict[str, set[str]] = {"vit": _OF_RESNET, "resnet": _OF_TRANSFORMER, "hybrid": set()}
_OTHERS = "take weights of a family that docs/pretrained.md lists"
_WHOLE = "take the file in float32, float16 or bfloat16"
_UNREAD = {  # part of a name → family, what it has, what to do
    r"^embeddings\.cls_register_token$": (
        "C-RADIO in transformers' names of memory",
        "all prefix tokens in one array",
        "save it by save_pretrained, which writes C-RADIO's own names",
    ),
    r"(^|\.)head\.output_proj\.": ("AIMv2 with attention pooling (lit, native)", "a pooling head", _OTHERS),
    r"(^|\.)detection_tokens$|(^|\.)mid_position_embeddings$|^(class_labels_classifier|bbox_predictor)\.": (
        "a detector (YOLOS, DETR)",
        "tokens or heads for boxes",
        "take weights for classification, such as DeiT's",
    ),
    r"(^|\.)relative_position_bias\.|^beit\.": ("BEiT", "relative positions", _OTHERS),
    r"encoder\.layers\.\d+\.ls1$|encoder\.layer\.\d+\.lambda_1$": (
        "InternViT or BEiT of Hugging Face",
        "names that are not known",
        f"{_OTHERS}, such as timm's InternViT",
    ),
    r"\.[qk]_norm\.": ("a ViT with qk-norm", "norms of queries and keys", _OTHERS),
    r"relative_position|\.rel_pos(_|$)": ("Swin, BEiT or a similar network", "relative positions", _OTHERS),
    r"running_mean$": ("a network with convolutions", "batch norm", _OTHERS),
    r"stem\.conv1\.": ("a ResNet of timm's (D)", "a root of several convolutions", "take Big Transfer's"),
    r"norm\d?\.weight_g$": ("a network with weight norm", "directions and lengths of weights", _OTHERS),
    r"^freqs(_t_[xy])?$|(^|\.)rope\.freqs$": (
        "RoPE-ViT",
        "learned or mixed rotary frequencies",
        f"{_OTHERS}, such as DINOv3",
    ),
    r"\.(SCB|absmax|nested_absmax|quant_map|weight_format)$|\.quant_state\.": (
        "a quantised network",
        "integers with scales in place of weights",
        _WHOLE,
    ),
}
_OF_TEXT = r"text_(model|encoder|projection)\.|logit_(scale|bias)$|temperature$"


@dataclasses.dataclass(frozen=True)
class Recognised:
    """A file that is understood."""

    format: str  # "released", "big_vision", "bit", "timm" or "huggingface"
    architecture: Architecture
    entries: Sequence[Entry]  # arrays that the file must have, under the format's own names
    names: Mapping[str, str]  # the format's own name → name in the file; everything that must be read
    ignored: Sequence[str]  # names in the file that are not part of the network
    folded_rows: int  # leading rows of the table of positions that belong to class tokens, and are added to these
    facts: Facts
    assumptions: Sequence[str]  # a sentence for each thing that the file does not state


def recognise(
    arrays: Mapping[str, StoredArray],
    metadata: Mapping[str, Any],
    *,
    stated: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Recognised:
    """Finds out what is in a file.

    Args:
      arrays: what the file announces.
      metadata: what we wrote into it; empty for a file from elsewhere.
      stated: fields of the architecture that a configuration beside the file gives, and its `pool`.
      options: fields of the architecture, from `OPTIONS`, that the caller gives; they take precedence over `stated`.

    Raises:
      ValueError: an unknown format, a network that ours cannot compute, an option that is missing or contradicts it.
    """
    given = validated_options(options or {})
    name, names = _find_format(arrays)
    shapes = {canonical: arrays[in_file].shape for canonical, in_file in names.items()}
    label = "big_vision" if name == "released" and released.is_big_vision(shapes, names) else name
    with _with_names_of(name):
        facts = FORMATS[name].facts(shapes)
        facts = radio.with_tokens(facts, arrays) if facts.is_radio else facts
    if metadata:
        architecture, assumptions = stored_architecture(metadata), list[str]()
        refuse_contradictions(given, dataclasses.asdict(architecture), "the file's metadata")
    else:
        architecture, assumptions = _complete(facts, dict(stated or {}), given)
    folded = 0
    if architecture.position_tokens == "patches" and facts.position_rows is not None:
        folded = max(0, facts.position_rows - math.prod(architecture.grid))
    entries = FORMATS[name].entries(architecture, shapes, facts.absent, is_distilled=facts.is_distilled)
    used = set(names.values())
    ignored = [in_file for in_file in arrays if in_file not in used]
    entries = with_rows(entries, architecture, folded)
    entries = radio.with_all_tokens(entries, architecture.prefix_length) if facts.is_radio else entries
    return Recognised(label, architecture, entries, names, ignored, folded, facts, assumptions)


def with_rows(entries: Sequence[Entry], a: Architecture, rows: int) -> list[Entry]:
    """Return the entries with as many more rows in the table of positions, before those of patches."""
    long = (1, math.prod(a.grid) + rows, a.width)
    is_table = [rows > 0 and entry.ours == ("positions/table",) for entry in entries]
    return [dataclasses.replace(e, part=long) if is_one else e for e, is_one in zip(entries, is_table, strict=True)]


def validated_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are given, image_size as a tuple; ValueError for a value that no network has."""
    given = {name: value for name, value in options.items() if value is not None}
    if "image_size" in given:
        given["image_size"] = tuple(given["image_size"])
    for name, value in given.items():
        if not _is_possible(name, value):
            raise ValueError(f"{name}={options[name]!r}: {_NEEDED[name]}")
    return given


def _is_possible(name: str, value: Any) -> bool:
    if name in _CHOICES:
        return value in _CHOICES[name]
    if name == "image_size":
        return len(value) == 2 and all(type(pixels) is int and pixels > 0 for pixels in value)
    if name == "num_heads":
        return type(value) is int and value > 0
    return type(value) in (int, float) and 0 < value < math.inf


def refuse_contradictions(given: Mapping[str, Any], known: Mapping[str, Any], source: str) -> None:
    """Raises ValueError for an option whose value is known, if it is another; the image size may change."""
    for name, value in given.items():
        if name != "image_size" and known.get(name) is not None and known[name] != value:
            raise ValueError(f"{name}={value!r} is given, but {source} says {known[name]!r}: leave it out")


def _find_format(arrays: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    _refuse_known(arrays)
    for name, format_ in FORMATS.items():
        with _with_names_of(name):
            names = format_.canonical(arrays)
        if names is not None:
            return name, names
    if any(re.search(r"(^|\.)token_embedding\.", name) or re.match(_OF_TEXT, name) for name in arrays):
        raise ValueError("the file is of a text tower alone, which is no image network: take the file with both towers")
    some = ", ".join(list(arrays)[:4])
    raise ValueError(
        f"its {len(arrays)} arrays have names of no known format ({some}, ...). Known are the released ViT, "
        f"big_vision, Big Transfer, timm (VisionTransformer and its hybrids, ResNetV2) and Hugging Face (ViT), and the "
        f"families that docs/pretrained.md lists. Give a file of one of these"
    )


def _refuse_known(arrays: Mapping[str, Any]) -> None:
    """Raise ValueError for a family that is known and not read."""
    for pattern, (family, part, remedy) in _UNREAD.items():
        if name := next((name for name in arrays if re.search(pattern, name)), None):
            raise ValueError(f"the file is of {family}: it has {part} ({name}), which are not read: {remedy}")
    for name, array in arrays.items():
        if name.endswith("weight") and array.dtype.kind in "iu":
            raise ValueError(f"the file is of a quantised network: {name} has integers ({array.dtype}): {_WHOLE}")


@contextlib.contextmanager
def _with_names_of(format_name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"the file has the names of {format_name}, but {error}") from error


def _complete(facts: Facts, stated: dict[str, Any], given: Mapping[str, Any]) -> tuple[Architecture, list[str]]:
    """Return the architecture, and what was assumed."""
    pool = stated.pop("pool", facts.pool)
    if pool != facts.pool and not {pool, facts.pool} <= {"token", "gap", "token_gap"}:
        raise ValueError(f"the configuration beside it states the pooling {pool}, the file's parameters {facts.pool}")
    facts = dataclasses.replace(facts, pool=pool)
    _require_same_network(facts, {name: stated.pop(name) for name in _DECIDED if name in stated})
    known: dict[str, Any] = {"num_heads": facts.num_heads}
    if facts.position_rows is not None:
        known["position_embedding"] = "learned_1d"
    refuse_contradictions(given, known, "the file")
    if idle := given.keys() & _WITHOUT_EFFECT[facts.family]:
        raise ValueError(f"{', '.join(sorted(idle))} would have no effect on a {facts.family}: leave it out")
    choice = {**stated, **given}
    assumptions: list[str] = []
    if facts.needs_rope and "rope" not in choice:
        raise ValueError(
            "the file does not state its rotary positions: give the folder with its config.json, or rope=centred "
            "(DINOv3), grid (EVA-02) or index (Perception Encoder)"
        )
    fields = format_defaults(facts)
    fields["num_heads"] = _num_heads(facts, choice.pop("num_heads", None), assumptions)
    choice.pop("image_size", None)
    stated_size, given_size = (source.get("image_size") for source in (stated, given))
    fields["image_size"], rows = _image_size(facts, stated_size, given_size, assumptions)
    prefix_length = (fields.get("class_tokens") or 0) + fields.get("registers", 0)
    if facts.position_rows is not None and (facts.is_radio or rows != prefix_length):
        fields["position_tokens"] = "patches"
    fields["name"] = _name(facts, fields["num_heads"])
    if facts.position_rows is None and facts.family != "resnet":
        fields["position_embedding"] = facts.fixed_positions
        if not {"position_embedding", "rope"} & choice.keys():  # rotary positions need no table
            assumptions.append(
                f"It has no table of positions; {facts.fixed_positions!r} is assumed. If that is wrong, give "
                "position_embedding=sincos2d or none."
            )
    if fields.get("class_tokens") == int(facts.pool in ("token", "token_gap")):
        fields["class_tokens"] = None  # as the pooling has it
    a = bounded_architecture(fields | choice)
    if a.parts.keys() - {"position_tokens"} and not stated:
        assumptions.append(
            f"WARNING: without the config.json of these weights, gelu={a.gelu}, layer_norm_epsilon="
            f"{a.layer_norm_epsilon:g} and pixels in [-1, 1] are assumed, which other families do not have. Give the "
            "folder with both files."
        )
    return a, assumptions


def _require_same_network(facts: Facts, stated: Mapping[str, Any]) -> None:
    """The configuration beside a file is of its network: if it has more layers, the file may be incomplete.

    Either side may have no head: it was left out of the file, or a library is to build none.
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
            "remove the configuration and give its values as options"
        )


def format_defaults(facts: Facts) -> dict[str, Any]:
    """Fields of the architecture that the file decides, or whose value is the format's: GELU form, epsilons."""
    form = facts.defaults.get("residual_unit", "postactivation")
    own = {field.name: field.default for field in dataclasses.fields(Architecture)}
    names = ("family", "units", "pool", "head", *_DECIDED)
    return {
        **{name: value for name, value in own.items() if value is not dataclasses.MISSING},
        **vars(RESIDUAL_UNITS[form]),
        **facts.defaults,
        **facts.parts,
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
            assumptions.append(f"The file does not state the number of heads; {size.num_heads} is ViT-{name}'s.")
            return size.num_heads
    raise ValueError(
        f"the file does not state the number of heads, and no known size has width {numbers[0]}, depth {numbers[1]} "
        f"and mlp_dim {numbers[2]}: give num_heads, a divisor of {numbers[0]}"
    )


def _image_size(
    facts: Facts, stated: tuple[int, int] | None, given: tuple[int, int] | None, assumptions: list[str]
) -> tuple[tuple[int, int], int]:
    """Return height and width in pixels, and the number of positions that belong to prefix tokens.

    The size that the caller gives counts if no other is stated, or if the file has positions for it alone.
    """
    divisor = resnet_downsampling(facts.units[: MOST_STAGES + 1]) if facts.family == "hybrid" else 1
    height, width = patch = facts.patch_size[0] * divisor, facts.patch_size[1] * divisor
    given = None if given is None else _multiple(given, patch, True, assumptions)
    stated = None if stated is None else _multiple(stated, patch, False, assumptions)
    if facts.position_rows is None or facts.is_radio:  # C-RADIO's file has positions for any size
        size = (given or stated) if facts.is_radio else (stated or given)
        if size is None:
            raise ValueError("the file does not state the image size: give image_size, height and width in pixels")
        return size, 0
    tokens = facts.parts.get("class_tokens", 0)
    possible = {0, tokens, tokens + facts.parts.get("registers", 0)} if facts.prefix_rows is None else facts.prefix_rows
    lengths = {facts.position_rows - rows: rows for rows in sorted(possible)}
    known = [size for size in (stated, given) if size and (size[0] // height) * (size[1] // width) in lengths]
    size = known[0] if known else stated
    side = next((math.isqrt(n) for n in lengths if n > 0 and math.isqrt(n) ** 2 == n), None)
    if size is None and side is not None:
        size = (side * height, side * width)
        assumptions.append(f"A square grid of {side}x{side} patches is assumed, of {size[0]}x{size[1]} images.")
    size = size or given
    if size is None:
        raise ValueError(
            f"its {facts.position_rows} positions are not a square grid of patches: give image_size, height and "
            f"width in pixels, multiples of {height} and {width}"
        )
    patches = (size[0] // height) * (size[1] // width)
    if patches not in lengths:
        raise ValueError(
            f"image_size={size} has {patches} patches of {height}x{width} pixels, the file has positions for "
            f"{' or '.join(map(str, lengths))}"
        )
    return size, lengths[patches]


def _multiple(size: tuple[int, int], patch: tuple[int, int], is_given: bool, assumptions: list[str]) -> tuple[int, int]:
    """The size; of one that a configuration states, without the border that no patch covers."""
    height, width = (pixels // part * part for pixels, part in zip(size, patch, strict=True))
    if (height, width) == size:
        return size
    patches = f"patches of {patch[0]}x{patch[1]} pixels"
    if is_given or height < 1 or width < 1:
        near = f"{max(height, patch[0])},{max(width, patch[1])}"
        raise ValueError(f"image_size={size} is not a multiple of its {patches}: give image_size, such as {near}")
    assumptions.append(
        f"The configuration beside it says {size[0]}x{size[1]} images, where {patches} leave out a border; ours show "
        f"all of the image in {height}x{width}."
    )
    return height, width


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
