"""Detection of the format and the architecture from names, shapes and metadata of a file.

The file decides most fields; a format fixes its defaults (GELU form, epsilons); a configuration beside the file and the
caller's options give the rest. An unknown value is an error that names the option. No data is read here.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
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
from vit_jax.weights.description import MOST_STAGES, bounded_architecture, stored_architecture
from vit_jax.weights.formats import StoredArray, naming
from vit_jax.weights.names import FORMATS, Entry, Facts, released, tokens, with_shape
from vit_jax.weights.overrides import OPTIONS
from vit_jax.weights.published import blocks

_NOT_FIELDS = ("pool", "pooled_tokens")  # of what is stated beside a file
_DECIDED = (
    "patch_size",
    "width",
    "depth",
    "mlp_dim",
    "num_classes",
)  # by the file; a configuration must agree
_FOR_RESNETS = ("group_norm_", "standardization_")  # beginnings of options
# Regular expression of an array, "name:axes:kind" with the kind of its dtype | family | what is not read | remedy if it
# is not to take weights of another family.
_UNREAD = r"""
embeddings\.cls_register_token: | C-RADIO in transformers' names of memory | all prefix tokens in one array
    | save it by save_pretrained, which writes C-RADIO's own names
(.*\.)?head\.output_proj\. | AIMv2 with attention pooling (lit, native) | a pooling head
(.*\.)?(detection_tokens|mid_position_embeddings):|(class_labels_classifier|bbox_predictor)\.
    | a detector (YOLOS, DETR) | tokens or heads for boxes | take weights for classification, such as DeiT's
(.*\.)?relative_position_bias\.|beit\. | BEiT | relative positions
.*encoder\.(layers\.\d+\.ls1|layer\.\d+\.lambda_1): | InternViT or BEiT of Hugging Face | names that are not known
    | take weights of a family that docs/pretrained.md lists, such as timm's InternViT
.*\.[qk]_norm\. | a ViT with qk-norm | norms of queries and keys
.*(relative_position|\.rel_pos[_:]) | Swin, BEiT or a similar network | relative positions
blocks_token_only\. | CaiT | blocks for the class token alone
.*running_mean: | a network with convolutions | batch norm
.*stem\.conv1\. | a ResNet of timm's (D) | a root of several convolutions | take Big Transfer's
.*norm\d?\.weight_g: | a network with weight norm | directions and lengths of weights
(freqs(_t_[xy])?|(.*\.)?rope\.freqs): | RoPE-ViT | learned or mixed rotary frequencies
    | take weights of a family that docs/pretrained.md lists, such as DINOv3
.*\.(SCB|absmax|nested_absmax|quant_map|weight_format):|.*\.quant_state\.|.*weight:\d+:[iu]
    | a quantised network | integers, with scales, in place of weights
    | take the file in float32, float16 or bfloat16
embeds\.proj\.weight:2|(.*/)?embedding/kernel:2|(.*\.)?embeddings\.patch_embedding\.weight:2
    | a NaFlex model | a linear patch embedding for images of any aspect ratio
    | take weights of SigLIP 2 for one resolution, such as google/siglip2-base-patch16-224
"""
_REMEDY = "take weights of a family that docs/pretrained.md lists"
_UNNAMED = (
    "The file does not name its network: norms before each branch are assumed, as most models of timm have them. If "
    "its name is known, give it, such as architecture=vit_base_patch16_224."
)
_OF_TEXT = (
    r"text_(model|encoder|projection)\.|logit_(scale|bias)$|temperature$|(.*\.)?token_embedding\."
)


@dataclasses.dataclass(frozen=True)
class Recognised:
    """A file whose network is known."""

    format: str  # "released", "big_vision", "bit", "timm" or "huggingface"
    architecture: Architecture
    entries: Sequence[Entry]  # arrays that the file must have, under the format's own names
    names: Mapping[
        str, str
    ]  # the format's own name → name in the file; everything that must be read
    ignored: Sequence[str]  # names in the file that are not part of the network
    folded_rows: int  # leading rows of the table of positions that belong to class tokens, and are added to these
    facts: Facts
    assumptions: Sequence[str]  # a sentence for each value that the file does not state


def recognise(
    arrays: Mapping[str, StoredArray],
    metadata: Mapping[str, object],
    *,
    stated: Mapping[str, object] | None = None,
    options: Mapping[str, object] | None = None,
) -> Recognised:
    """Find the format and the network of a file.

    Fields of the architecture that the arrays and our metadata do not have are `stated` by a configuration beside the
    file, or `options` of the caller, from `vit_jax.weights.OPTIONS`, which take precedence.

    Raises:
      ValueError: an unknown format, a network that ours cannot compute, an option that is missing or contradicts it.
    """
    chosen = validated_options(options or {})
    chosen.pop("architecture", None)  # `stated` has its facts
    name, names = _find_format(arrays)
    shapes = {canonical: arrays[in_file].shape for canonical, in_file in names.items()}
    label = "big_vision" if name == "released" and released.is_big_vision(shapes, names) else name
    with naming(f"the file has the names of {name}"):
        facts = FORMATS[name].facts(shapes)
        facts = tokens.with_tokens(facts, arrays) if facts.is_radio else facts
    if metadata:
        architecture = stored_architecture(metadata)
        assumptions = list[str]()
        refuse_contradictions(chosen, dataclasses.asdict(architecture), "the file's metadata")
    else:
        architecture, assumptions = _complete(facts, stated or {}, chosen)
        if name == "timm" and not stated and architecture.has_transformer:
            assumptions.append(_UNNAMED)
    folded = 0
    if architecture.position_tokens == "patches" and facts.position_rows is not None:
        folded = max(0, facts.position_rows - math.prod(architecture.grid))
    entries = FORMATS[name].entries(
        architecture, shapes, facts.absent, is_distilled=facts.is_distilled
    )
    if folded:
        shape = (1, math.prod(architecture.grid) + folded, architecture.width)
        entries = with_shape(entries, "positions/table", shape)
    if facts.is_radio:
        entries = with_shape(
            entries, "class_token", (1, architecture.prefix_length, architecture.width)
        )
    used = set(names.values())
    ignored = [in_file for in_file in arrays if in_file not in used]
    return Recognised(label, architecture, entries, names, ignored, folded, facts, assumptions)


def validated_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not None, image_size as a tuple; ValueError for a value that no network has."""
    chosen = {name: value for name, value in options.items() if value is not None}
    for name, value in chosen.items():
        form, _ = OPTIONS[name]
        is_possible = type(value) in (int, float) and 0 < value < math.inf
        rule = "a number above 0, such as 1e-6"
        if "|" in form:
            is_possible = value in form.split("|")
            rule = f"one of {form.replace('|', ', ')}"
        elif name == "architecture":
            is_possible = isinstance(value, str) and architectures.is_known(value)
            rule = "a model of timm or a model type of transformers that is read, such as vit_base_patch16_224"
        elif name == "num_heads":
            is_possible = type(value) is int and value > 0
            rule = "a divisor of the network's width"
        elif name == "image_size":
            size = chosen[name] = tuple(value)
            is_possible = len(size) == 2 and all(
                type(pixels) is int and pixels > 0 for pixels in size
            )
            rule = "height and width in pixels, such as 224,224"
        if not is_possible:
            raise ValueError(f"{name}={value!r}: must be {rule}.")
    return chosen


def refuse_contradictions(
    options: Mapping[str, object], known: Mapping[str, object], source: str
) -> None:
    """Raise ValueError for an option whose value is known, if it is another; the image size may change."""
    for name, value in options.items():
        if name != "image_size" and known.get(name) is not None and known[name] != value:
            raise ValueError(
                f"{name}={value!r}: must be {known[name]!r}, as {source} states. Omit the option."
            )


def _find_format(arrays: Mapping[str, StoredArray]) -> tuple[str, dict[str, str]]:
    kinds = {
        f"{name}:{len(array.shape)}:{array.dtype.kind}": name for name, array in arrays.items()
    }
    for pattern, family, feature, *remedy in (re.split(r"\s+\|\s", row) for row in blocks(_UNREAD)):
        if odd := next((name for kind, name in kinds.items() if re.match(pattern, kind)), None):
            fix = remedy[0] if remedy else _REMEDY
            raise ValueError(
                f"the file is of {family}: it has {feature} ({odd}), which are not read: {fix}"
            )
    for name, format_ in FORMATS.items():
        with naming(f"the file has the names of {name}"):
            if names := format_.canonical(arrays):
                return name, names
    is_of_text = any(re.match(_OF_TEXT, name) for name in arrays)
    raise ValueError(
        "the file is of a text tower alone, which is no image network: take the file with both towers"
        if is_of_text
        else f"its {len(arrays)} arrays have names of no known format ({', '.join(list(arrays)[:4])}, ...). Known are "
        "the released ViT, big_vision, Big Transfer, timm and Hugging Face, and the families that docs/pretrained.md "
        "lists. Give a file of one of these"
    )


def _complete(
    facts: Facts, stated: Mapping[str, Any], chosen: Mapping[str, Any]
) -> tuple[Architecture, list[str]]:
    """Return the architecture, and the assumptions."""
    _require_same_network(facts, stated)
    facts = dataclasses.replace(facts, pool=stated.get("pool", facts.pool))
    _require_pooled_tokens(facts, stated)
    known = {
        "num_heads": facts.num_heads,
        "position_embedding": facts.position_rows and "learned_1d",
    }
    refuse_contradictions(chosen, known, "the file")
    if "rope" in stated and chosen.get("rope", stated["rope"]) != stated["rope"]:
        raise ValueError(
            f"rope={chosen['rope']!r}: must be {stated['rope']}, by the network's name. Omit the option."
        )
    for name in chosen.keys() - {"image_size"}:
        if facts.family == ("vit" if name.startswith(_FOR_RESNETS) else "resnet"):
            raise ValueError(
                f"{name}={chosen[name]!r}: must not be set, as it has no effect on a {facts.family}."
            )
    choice = {
        name: value
        for name, value in {**stated, **chosen}.items()
        if name not in (*_NOT_FIELDS, *_DECIDED)
    }
    assumptions: list[str] = []
    if facts.needs_rope and "rope" not in choice:
        raise ValueError(
            "the file does not state its rotary positions: give the folder with its config.json, or its name in timm, "
            "such as architecture=vit_small_patch16_dinov3"
        )
    fields = format_defaults(facts)
    fields["num_heads"] = _num_heads(facts, choice.pop("num_heads", None), assumptions)
    choice.pop("image_size", None)
    sizes = stated.get("image_size"), chosen.get("image_size")
    fields["image_size"], rows = _image_size(facts, *sizes, assumptions)
    prefix_length = (fields.get("class_tokens") or 0) + fields.get("registers", 0)
    if facts.position_rows is not None and (facts.is_radio or rows != prefix_length):
        fields["position_tokens"] = "patches"
    fields["name"] = _name(facts, fields["num_heads"])
    if facts.position_rows is None and facts.family != "resnet":
        fields["position_embedding"] = facts.fixed_positions
        if (
            "position_embedding" not in choice and choice.get("rope") is None
        ):  # rotary positions need no table
            assumptions.append(
                f"It has no table of positions; {facts.fixed_positions!r} is assumed. If that is wrong, give "
                "position_embedding=sincos2d or none."
            )
    if fields.get("class_tokens") == int(facts.pool in ("token", "token_gap")):
        fields["class_tokens"] = None  # as the pooling has it
    if choice.get("rope_grid") == _grid(fields):
        choice["rope_grid"] = None
    a = bounded_architecture(fields | choice)
    if a.modern_options.keys() - {"position_tokens"} and not stated:
        assumptions.append(
            f"WARNING: without the config.json of these weights, gelu={a.gelu}, layer_norm_epsilon="
            f"{a.layer_norm_epsilon:g} and pixels in [-1, 1] are assumed, which other families do not have. Give the "
            "folder with both files."
        )
    return a, assumptions


def _grid(fields: Mapping[str, Any]) -> tuple[int, int]:
    """Return rows and columns of patches."""
    (height, width), (patch_height, patch_width) = fields["image_size"], fields["patch_size"]
    return height // patch_height, width // patch_width


def _require_pooled_tokens(facts: Facts, stated: Mapping[str, object]) -> None:
    """Raise ValueError if the network beside a file pools other tokens than ours: attention all, the mean patches."""
    ours = {"map": "all", "gap": "patches"}.get(facts.pool)
    prefix_length = facts.modern_options.get("class_tokens", 0) + facts.modern_options.get(
        "registers", 0
    )
    theirs = stated.get("pooled_tokens", ours)
    if prefix_length and ours is not None and theirs != ours:
        raise ValueError(
            f"it pools {'all tokens' if theirs == 'all' else 'patches without prefix tokens'} by {facts.pool}, which "
            f"is not supported: {_REMEDY}"
        )


def _require_same_network(facts: Facts, stated: Mapping[str, object]) -> None:
    """Raise ValueError if the configuration beside a file is of another network.

    If it has more layers, the file may be incomplete. Either side may have no head. Poolings without parameters agree.
    """
    same = set() if facts.num_classes and stated.get("num_classes") != 0 else {"num_classes"}
    same |= {"pool"} if "map" not in (facts.pool, stated.get("pool")) else set()
    different = [
        f"{name} {stated[name]} there, {getattr(facts, name)} in the file"
        for name in stated
        if name in (*_DECIDED, "pool") and name not in same and stated[name] != getattr(facts, name)
    ]
    if different:
        raise ValueError(
            f"the configuration beside it is of another network: {'; '.join(different)}. Bring both from one place, or "
            "remove the configuration and give its values as options"
        )


def format_defaults(facts: Facts) -> dict[str, Any]:
    """Return the fields of the architecture that the file decides or the format fixes: GELU form, epsilons."""
    defaults = {field.name: field.default for field in dataclasses.fields(Architecture)}
    names = ("family", "units", "pool", "head", *_DECIDED)
    return {
        **{name: value for name, value in defaults.items() if value is not dataclasses.MISSING},
        **vars(RESIDUAL_UNITS[facts.defaults.get("residual_unit", "postactivation")]),
        **facts.defaults,
        **facts.modern_options,
        **{name: getattr(facts, name) for name in names},
        "width_factor": facts.root_channels / ROOT_CHANNELS,
    }


def _num_heads(facts: Facts, chosen: int | None, assumptions: list[str]) -> int:
    if facts.num_heads is not None:
        return facts.num_heads
    if chosen is not None:
        if chosen < 1 or facts.width % chosen:
            raise ValueError(
                f"num_heads={chosen}: must divide the width. Give a divisor of {facts.width}."
            )
        return chosen
    numbers = (facts.width, facts.depth, facts.mlp_dim)
    for name, size in VIT_SIZES.items():
        if (size.width, size.depth, size.mlp_dim) == numbers:
            assumptions.append(
                f"The file does not state the number of heads; {size.num_heads} is ViT-{name}'s."
            )
            return size.num_heads
    raise ValueError(
        f"the file does not state the number of heads, and no known size has width {numbers[0]}, depth {numbers[1]} "
        f"and mlp_dim {numbers[2]}: give num_heads, a divisor of {numbers[0]}"
    )


def _image_size(
    facts: Facts,
    stated: tuple[int, int] | None,
    chosen: tuple[int, int] | None,
    assumptions: list[str],
) -> tuple[tuple[int, int], int]:
    """Return height and width in pixels, and the number of positions that belong to prefix tokens.

    The size that the caller gives counts if no other is stated, or if the file has positions for it alone.
    """
    divisor = resnet_downsampling(facts.units[: MOST_STAGES + 1]) if facts.family == "hybrid" else 1
    height, width = patch = facts.patch_size[0] * divisor, facts.patch_size[1] * divisor
    chosen = chosen and _multiple(chosen, patch, None)
    stated = stated and _multiple(stated, patch, assumptions)
    lengths: dict[int, int] = {}  # number of patches → rows of prefix tokens before their positions
    if facts.is_radio:  # the file has positions for any size
        size = chosen or stated
    elif facts.position_rows is None:
        size = stated or chosen
    else:
        tokens = facts.modern_options.get("class_tokens", 0)
        possible = facts.prefix_rows or {
            0,
            tokens,
            tokens + facts.modern_options.get("registers", 0),
        }
        lengths = {facts.position_rows - rows: rows for rows in sorted(possible)}
        fitting = [
            size
            for size in (stated, chosen)
            if size and (size[0] // height) * (size[1] // width) in lengths
        ]
        size = fitting[0] if fitting else stated
        side = next((math.isqrt(n) for n in lengths if n > 0 and math.isqrt(n) ** 2 == n), None)
        if size is None and side is not None:
            size = (side * height, side * width)
            assumptions.append(
                f"A square grid of {side}x{side} patches is assumed, of {size[0]}x{size[1]} images."
            )
        size = size or chosen
    if size is None:
        raise ValueError(
            "the file does not state the image size, and its positions are not a square grid of patches: give "
            f"image_size, height and width in pixels, multiples of {height} and {width}"
        )
    patches = (size[0] // height) * (size[1] // width)
    if lengths and patches not in lengths:
        raise ValueError(
            f"image_size={size} has {patches} patches of {height}x{width} pixels, the file has positions for "
            f"{' or '.join(map(str, lengths))}"
        )
    return size, lengths.get(patches, 0)


def _multiple(
    size: tuple[int, int], patch: tuple[int, int], assumptions: list[str] | None
) -> tuple[int, int]:
    """Return the size; with assumptions, without a border that no patch covers."""
    height, width = (pixels // part * part for pixels, part in zip(size, patch, strict=True))
    patches = f"patches of {patch[0]}x{patch[1]} pixels"
    if (height, width) == size:
        return size
    if assumptions is None or height < 1 or width < 1:
        near = f"{max(height, patch[0])},{max(width, patch[1])}"
        raise ValueError(
            f"image_size={size}: must be a multiple of its {patches}. Give image_size, such as {near}."
        )
    assumptions.append(
        f"The configuration beside it says {size[0]}x{size[1]} images, where {patches} leave out a border; ours show "
        f"all of the image in {height}x{width}."
    )
    return height, width


def _name(facts: Facts, num_heads: int) -> str:
    """Return the usual name of the network, as far as its sizes have one."""
    numbers = (facts.width, facts.depth, facts.mlp_dim, num_heads)
    size = f"ViT-{next((name for name, row in VIT_SIZES.items() if tuple(vars(row).values()) == numbers), 'custom')}"
    factor = (
        "" if facts.root_channels == ROOT_CHANNELS else f"x{facts.root_channels / ROOT_CHANNELS:g}"
    )
    height, width = facts.patch_size
    if facts.family == "vit":
        return f"{size}/{height}" if height == width else f"{size}/{height}x{width}"
    if not facts.units:
        return f"R{factor}+{size}/{2 * height}"
    stages = len(facts.units)
    joined = {  # a hybrid of fewer stages has the units of all
        (*units[: stages - 1], sum(units[stages - 1 :])): str(depth)
        for depth, units in RESNET_UNITS.items()
    }
    resnet = f"R{joined.get(facts.units, '-custom')}"
    if facts.family == "resnet":
        return f"{resnet}{factor or 'x1'}"
    return f"{resnet}{factor}+{size}/{resnet_downsampling(facts.units) * height}"
