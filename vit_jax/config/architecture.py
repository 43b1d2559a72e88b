"""A network with every number filled in: `models` builds it, `sharding` estimates its memory, checkpoints store it."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from vit_jax.config import schema, variants
from vit_jax.config.parsing import from_dict
from vit_jax.config.rules import (
    Component,
    Count,
    Number,
    Positive,
    Reference,
    Transformer,
    out_of_range,
    reject,
    rules_of,
    without_effect,
)
from vit_jax.config.schema import LEARNED_POSITIONS, AdaptConfig, ModelConfig
from vit_jax.config.variants import (
    BOTTLENECK,
    NUM_GROUPS,
    RESIDUAL_UNITS,
    ROOT_CHANNELS,
    VIT_SIZES,
    parse_name,
)
from vit_jax.imports.references import is_reference

_MODERN_OPTIONS = (
    *(
        "class_tokens",
        "pool_num_heads",
        "registers",
        "position_tokens",
        "rope",
        "layer_scale",
        "mlp",
        "norm",
    ),
    *("embedding_norm", "final_norm", "attention_norm", "patch_bias", "qkv_bias", "linear_bias"),
)
UNROLLED = (
    "none",
    "dots",
)  # policies of rematerialisation with which accelerators need no loop over layers

Family = Literal["vit", "resnet", "hybrid"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture(schema.NetworkOptions):
    """All numbers and forms of a network."""

    name: str
    family: Family = "vit"
    image_size: tuple[int, int]  # height and width of the input in pixels
    patch_size: tuple[
        int, int
    ]  # height and width: in pixels for a ViT, in cells of the ResNet's map for a hybrid
    num_classes: Number  # K, length of the logits; 0 for a network that ends in its features
    patch_outputs: Number = (
        0  # O, numbers predicted for each patch by a network for masked patches, without classes
    )
    width: Transformer[Count]  # D, length of the representation of an image
    depth: Transformer[Count]  # of the transformer, like mlp_dim and num_heads; 0 for a ResNet
    mlp_dim: Transformer[Count]
    num_heads: Transformer[Count]
    units: tuple[
        int, ...
    ] = ()  # of each stage; () for a ViT, and for a hybrid whose ResNet is the root alone
    width_factor: float = 1.0  # multiplies all channels of the ResNet
    pool: schema.Pool | Reference = "token"
    head: schema.HeadForm | Reference = "linear"
    rope_grid: tuple[int, int] | None = (
        None  # rows and columns that "index" scales its places to; None: those it has
    )
    residual_unit: schema.UnitForm = "postactivation"
    group_norm_epsilon: Positive = 1e-6
    standardization_epsilon: Positive = 1e-5
    standardization_epsilon_added_to: schema.AddedTo = "std"
    compute_dtype: schema.ComputeDtype = "float32"
    remat: schema.Policy = (
        "none"  # never auto: `train.layout` decides that before anything is built
    )

    @property
    def custom_components(self) -> dict[str, str]:
        """References to user-defined components, by field."""
        fields = ("network", "block", "position_embedding", "pool", "head")
        return {
            field: getattr(self, field) for field in fields if is_reference(getattr(self, field))
        }

    @property
    def modern_options(self) -> dict[str, Any]:
        """Components of current pre-trained ViTs that the paper's does not have, by field."""
        values = {name: getattr(self, name) for name in _MODERN_OPTIONS}
        others = {
            name: value for name, value in values.items() if value != getattr(Architecture, name)
        }
        return others | ({"gelu": "quick"} if self.gelu == "quick" else {})

    @property
    def is_standard(self) -> bool:
        """Return True without user-defined components: formulas and other formats know the network."""
        return not self.custom_components

    @property
    def scan_unroll_on_accelerators(self) -> int:
        """Return the blocks per iteration on TPUs and GPUs, where a loop copies all activations that it keeps.

        The copies cost a quarter of a step. Policies that keep little have their loop: without one XLA does not
        recompute the rest.
        """
        return self.scan_unroll or (self.depth if self.remat in UNROLLED else 1)

    @property
    def has_transformer(self) -> bool:
        return self.family != "resnet"

    @property
    def has_resnet(self) -> bool:
        return self.family != "vit"

    @property
    def root_channels(self) -> int:
        """Channels after the root of the ResNet."""
        return round(ROOT_CHANNELS * self.width_factor)

    @property
    def map_channels(self) -> int:
        """Channels of what is cut into patches: the image's colours or the ResNet's map."""
        if not self.has_resnet:
            return 3
        return self.stage_channels(len(self.units) - 1) if self.units else self.root_channels

    @property
    def map_size(self) -> tuple[int, int]:
        """Height and width of what is cut into patches: the image or the ResNet's map."""
        divisor = variants.resnet_downsampling(self.units) if self.has_resnet else 1
        height, width = (-(-pixels // divisor) for pixels in self.image_size)
        return height, width

    def stage_channels(self, stage: int) -> int:
        """Output channels of a stage, counted from 0."""
        return self.root_channels * BOTTLENECK * 2**stage

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches; for a ResNet, of its map."""
        return self.map_size[0] // self.patch_size[0], self.map_size[1] // self.patch_size[1]

    @property
    def sequence_length(self) -> int:
        """Number of tokens in a block: class tokens, registers and patches."""
        return self.grid[0] * self.grid[1] + self.prefix_length

    @property
    def num_class_tokens(self) -> int:
        """Number of class tokens."""
        return (
            int(self.pool in ("token", "token_gap"))
            if self.class_tokens is None
            else self.class_tokens
        )

    @property
    def prefix_length(self) -> int:
        """Number of tokens before the patches: class tokens and registers."""
        return self.num_class_tokens + self.registers

    @property
    def feature_width(self) -> int:
        """Length of the pooled features: D for each pooled class token, and D for a mean."""
        pooled = {"token": self.num_class_tokens, "token_gap": self.num_class_tokens + 1}
        return self.width * pooled.get(self.pool, 1)

    @property
    def block_attention(self) -> schema.AttentionForm:
        """Requested form of attention in blocks.

        No kernel computes relative positions. Kernels are for longer sequences than those of axial blocks.
        """
        has_xla_alone = self.position_embedding == "relative" or (
            self.block == "axial" and self.attention == "auto"
        )
        return "xla" if has_xla_alone else self.attention

    @property
    def attention_lengths(self) -> tuple[int, ...]:
        """Tokens that each one sees in the attentions of a block: all; or those of its row, then of its column."""
        rows, columns = self.grid
        return (columns, rows) if self.block == "axial" else (self.sequence_length,)


def build_architecture(
    config: ModelConfig, *, image_size: tuple[int, int], num_classes: int, patch_outputs: int = 0
) -> Architecture:
    """Fill in the numbers that the name stands for.

    Raises:
      ValueError: unknown name, an option that this family has no use for, or numbers that do not fit together
        (patch and image, width and heads).
    """
    name = parse_name(config.name)
    family: Family = "resnet" if name.size is None else "vit" if name.units is None else "hybrid"
    reject(_without_effect(config, family))
    units, patch_size = (
        _cut(config.name, name) if family == "hybrid" else (name.units or (), name.patch)
    )
    form = config.residual_unit or ("preactivation" if family == "resnet" else "postactivation")
    defaults: dict[str, Any] = {
        **vars(RESIDUAL_UNITS[form]),
        "residual_unit": form,
        "pool": "gap" if family == "resnet" or config.block == "axial" else "token",
        "head": "linear" if family == "resnet" or patch_outputs else "mlp",
    }
    if name.size is None:
        width = round(ROOT_CHANNELS * name.width_factor) * BOTTLENECK * 2 ** (len(units) - 1)
        defaults |= {"width": width, "depth": 0, "mlp_dim": 0, "num_heads": 0}
    else:
        defaults |= vars(VIT_SIZES[name.size])
    defaults |= {field: value for field, value in vars(config).items() if value is not None}
    return _checked(
        Architecture(
            family=family,
            units=units,
            width_factor=name.width_factor,
            image_size=image_size,
            patch_size=patch_size,
            num_classes=num_classes,
            patch_outputs=patch_outputs,
            **defaults | _execution(config),
        )
    )


def _execution(config: schema.ComputeOptions) -> dict[str, Any]:
    """Return the options of computing; a run on devices replaces the policy of `auto`."""
    options = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(schema.ComputeOptions)
    }
    return options | ({"remat": "none"} if config.remat == "auto" else {})


FINETUNE_DROPOUT = {"ViT-L/16": 0.1, "ViT-H/14": 0.1, "R50+ViT-B/16": 0.1, "R50+ViT-L/32": 0.1}
"""Dropout of vision_transformer, configs/models.py. It is 0 for other networks, and for weights without a hidden layer
in the head: AugReg's, whose config (configs/augreg.py) sets it to 0, and fine-tuned ones."""


def adapt_architecture(
    a: Architecture, config: AdaptConfig, *, image_size: tuple[int, int], num_classes: int
) -> Architecture:
    """Return the network that fine-tunes weights of `a` on images of this height and width.

    Raises:
      ValueError: `a` is not the network that `config.name` names (every difference is listed), or does not fit the
        image size, or an option has no effect on it.
    """
    if config.name is not None and (different := _different_numbers(a, config.name)):
        lines = "\n".join(
            f"  {field}: there {there}, {config.name} has {here}"
            for field, there, here in different
        )
        raise ValueError(
            f"config.model.name={config.name!r}: must be the network of the weights, {a.name}:\n{lines}"
        )
    dropout = config.dropout_fraction
    if dropout is None:
        published = FINETUNE_DROPOUT if a.head == "mlp" else {}
        dropout = next(
            (value for name, value in published.items() if not _different_numbers(a, name)), 0.0
        )
    reject(_adapting_problems(a, config))
    drops_border = (
        config.uncovered_border == "drop" or image_size == a.image_size
    )  # decided when `a` was made
    resized = at_image_size(
        a, image_size, rope_rescale=config.rope_rescale, drops_border=drops_border
    )
    return _checked(
        dataclasses.replace(
            with_pooling(resized, config.pool, config.final_norm),
            num_classes=num_classes,
            patch_outputs=0,
            head="linear" if config.head == "zero" else a.head,
            head_bias_init=0.0,
            dropout_fraction=dropout,
            stochastic_depth_fraction=config.stochastic_depth_fraction,
            stochastic_depth_form=config.stochastic_depth_form,
            **_execution(config),
        ),
        drops_border=drops_border,
    )


def at_image_size(
    a: Architecture,
    image_size: tuple[int, int],
    *,
    rope_rescale: bool = False,
    drops_border: bool = False,
) -> Architecture:
    """Return the same network for images of another height and width in pixels.

    `rope_rescale` scales rotary positions that count patches to the grid of `a`; `drops_border` ignores pixels that no
    patch covers.

    Raises:
      ValueError: patches do not divide the image size.
    """
    grid = a.grid if rope_rescale and a.rope == "index" and a.rope_grid is None else a.rope_grid
    return _checked(
        dataclasses.replace(a, image_size=image_size, rope_grid=grid), drops_border=drops_border
    )


def with_pooling(a: Architecture, pool: str | None, final_norm: str | None) -> Architecture:
    """Return the same network with another pooling or place of the last norm; None leaves one as it is.

    Class tokens stay, also those that are no longer pooled.

    Raises:
      ValueError: the network has no tokens to pool so.
    """
    fields: dict[str, Any] = (
        {} if final_norm in (None, a.final_norm) else {"final_norm": final_norm}
    )
    if pool not in (None, a.pool):
        is_implied = a.num_class_tokens == int(pool in ("token", "token_gap"))
        class_tokens = None if is_implied else a.num_class_tokens
        fields |= {"pool": pool, "class_tokens": class_tokens, "pool_num_heads": None}
    problem = ""
    if fields and (not a.has_transformer or a.network is not None):
        problem = f"has no effect on {a.name}, which is no built-in transformer. Use None, also for final_norm."
    elif fields.get("pool") == "map":
        problem = "must be token, gap or token_gap: the weights have no attention pooling. Use None, or gap."
    elif fields.get("pool") in ("token", "token_gap") and not a.num_class_tokens:
        problem = "must be gap: the weights have no class token. Use None, or gap."
    if problem:
        raise ValueError(f"config.model.pool={pool!r}: {problem}")
    return _checked(dataclasses.replace(a, **fields), drops_border=True)


def _adapting_problems(a: Architecture, config: AdaptConfig) -> Iterator[str]:
    yield from out_of_range(config, "model.")
    for field in ("dropout_fraction", "stochastic_depth_fraction"):
        if not a.has_transformer and (value := getattr(config, field)):
            yield f"model.{field}={value}: has no effect on {a.name}, without a Transformer. Use 0."
    is_resized = a.has_transformer and a.position_embedding in LEARNED_POSITIONS
    if config.position_resize not in ("corners", "library") and not is_resized:
        resize = config.position_resize
        yield f"model.position_resize={resize!r}: has no effect on {a.name}, without learned positions. Use corners."
    if config.rope_rescale and a.rope != "index":
        yield f"model.rope_rescale=True: has no effect on {a.name}, with rope={a.rope!r}. Use False."
    changes = {"pool": config.pool, "final_norm": config.final_norm}
    changes = {
        name: value for name, value in changes.items() if value not in (None, getattr(a, name))
    }
    if changes and config.head != "zero":
        yield f"model.head={config.head!r}: must be zero with other features ({changes}). Use zero."
    if config.head == "zero_keep_hidden" and a.head != "mlp":
        yield f"model.head='zero_keep_hidden': has no effect on {a.name}, whose head has no hidden layer. Use zero."


def _different_numbers(a: Architecture, name: str) -> list[tuple[str, object, object]]:
    named = named_architecture(name)
    fields = (
        "family",
        "width",
        "depth",
        "mlp_dim",
        "num_heads",
        "patch_size",
        "units",
        "width_factor",
    )
    return [
        (f, getattr(a, f), getattr(named, f)) for f in fields if getattr(a, f) != getattr(named, f)
    ]


def named_architecture(name: str) -> Architecture:
    """Return the network of this name, for one class and an image size that its patches divide."""
    height, width = parse_name(name).patch
    return build_architecture(
        ModelConfig(name=name), image_size=(32 * height, 32 * width), num_classes=1
    )


def read_architecture(values: Mapping[str, Any]) -> Architecture:
    """Return an architecture from the JSON of its `dataclasses.asdict`.

    Raises:
      ValueError: fields are missing, unknown, or do not fit together.
    """
    if missing := sorted(
        {"family", "units", "width_factor"} - set(values)
    ):  # without these it would be a smaller one
        raise ValueError(f"The stored description of the network lacks {', '.join(missing)}.")
    try:
        return _checked(from_dict(Architecture, values, "architecture."), drops_border=True)
    except ValueError as error:
        raise ValueError(f"The stored description of the network cannot be used. {error}") from None


def _cut(text: str, name: variants.ModelName) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return stages and patch of a hybrid, whose number is the total downsampling.

    A full ResNet of four stages divides by 32. For less, the units of removed stages join the last remaining
    one (ViT, sec. 4.1, option ii: R50+ViT-B/16 has stages of 3, 4 and 9). The root alone is counted as dividing by 2,
    as the name R+Ti/16 does, though its convolution and its pooling divide by 4.
    """
    height, width = name.patch
    if name.units == () and height == width and height >= 2 and height % 2 == 0:
        return (), (height // 2, height // 2)
    if name.units and height == width:
        if height in (4, 8, 16, 32):
            stages = height.bit_length() - 2  # 4: one stage, 32: four
            return (*name.units[: stages - 1], sum(name.units[stages - 1 :])), (1, 1)
        if height > 32 and height % 32 == 0:
            return name.units, (height // 32, height // 32)
    allowed = (
        "4, 8, 16, 32 or a multiple of 32, or an even number where the ResNet is the root alone"
    )
    raise ValueError(
        f"model.name={text!r}: the number of a hybrid is its total downsampling: must be {allowed}."
    )


def _without_effect(config: ModelConfig, family: Family) -> Iterator[str]:
    missing = {"vit": "ResNet", "resnet": "Transformer"}.get(family, "")
    for field in dataclasses.fields(ModelConfig):
        value = getattr(config, field.name)
        default = field.default
        if Component(missing) in rules_of(ModelConfig)[field.name] and value != default:
            place = f"on {config.name}, without a {missing}"
            yield f"model.{field.name}={value!r}: has no effect {place}. Leave it at {default!r}."
    yield from without_effect(config, config, "model.")
    if family == "resnet" and config.pool not in (None, "gap"):
        yield f"model.pool={config.pool!r}: must be gap for {config.name}. Use gap or None."
    if family == "hybrid" and config.residual_unit == "preactivation":
        yield "model.residual_unit='preactivation': must be postactivation in a hybrid (ViT, sec. 4.1). Use None."


def _checked(a: Architecture, *, drops_border: bool = False) -> Architecture:
    skipped = () if a.has_transformer else (Component("Transformer"),)
    rules = {
        name: rules for name, rules in rules_of(Architecture).items() if not {*skipped} & {*rules}
    }
    reject(out_of_range(a, "model.", rules), "")
    reject(_problems(a, drops_border), "model.")
    return a


def _problems(a: Architecture, drops_border: bool) -> Iterator[str]:
    fits = {  # what a name cannot say, but a damaged description can
        "vit": not a.units,
        "hybrid": a.residual_unit == "postactivation",
        "resnet": bool(a.units)
        and a.pool == "gap"
        and a.width == a.map_channels
        and a.patch_size == (1, 1),
    }
    if not fits[a.family] or min(a.units, default=1) < 1:
        numbers = f"units {a.units}, pool {a.pool!r}, width {a.width}, patch {a.patch_size} and {a.residual_unit} units"
        yield f"name={a.name!r}: {numbers} make no {a.family}."
    if a.has_resnet and (a.root_channels < NUM_GROUPS or a.root_channels % NUM_GROUPS):
        step = NUM_GROUPS / ROOT_CHANNELS
        yield f"name={a.name!r}: the width factor {a.width_factor:g} must be a multiple of {step:g}, for group norm."
    divisor = variants.resnet_downsampling(a.units) if a.family == "hybrid" else 1
    for axis, image, cells in zip(("height", "width"), a.image_size, a.patch_size, strict=True):
        patch = cells * divisor
        is_covered = patch > 0 and (
            image % patch == 0 or (drops_border and a.family == "vit" and image > patch)
        )
        if image < 1 or not is_covered:
            below = max(image, 0) // max(patch, 1) * patch
            sizes = f"{below} or {below + patch}" if below else str(patch)
            drop = ", or in fine-tuning model.uncovered_border=drop" if a.family == "vit" else ""
            rule = f"patches of {patch} pixels must divide the image {axis} of {image}"
            yield f"name={a.name!r}: {rule}. Use an input.image_size of {sizes}, or another patch size{drop}."
    if a.network is not None and a.initial_values != "paper":
        yield f"initial_values={a.initial_values!r}: has no effect on the custom network {a.network}. Use paper."
    if a.patch_outputs and (a.num_classes or a.family != "vit" or a.head != "linear"):
        yield f"name={a.name!r}: must be a ViT without ResNet and classes, with model.head=linear, for masked patches."
    if a.has_transformer and a.width % a.num_heads:
        yield f"width={a.width} is not divisible by model.num_heads={a.num_heads}."
    if a.width % (divisor := {"sincos2d": 4, "learned_2d": 2}.get(a.position_embedding, 1)):
        yield f"position_embedding={a.position_embedding!r}: needs a width divisible by {divisor}, not {a.width}."
    if a.block == "axial" and a.prefix_length:
        yield f"pool={a.pool!r}: a class token or register has no place in axial blocks. Use gap or map."
    if a.pool_num_heads is not None and (a.pool != "map" or a.width % a.pool_num_heads):
        yield f"pool_num_heads={a.pool_num_heads}: must divide the width of {a.width}, and needs pool=map. Use None."
    if a.pool in ("token", "token_gap") and not a.num_class_tokens:
        yield f"class_tokens=0: pool={a.pool!r} needs a class token. Use 1, or pool=gap."
    if a.rope is not None and (a.width // a.num_heads) % 4:
        yield f"rope={a.rope!r}: heads have {a.width // a.num_heads} values: must be divisible by 4."
    if a.rope is not None and (a.position_embedding == "relative" or a.block is not None):
        yield f"rope={a.rope!r}: relative positions and other blocks have no rotary positions. Use rope=None."
    is_table = a.position_embedding == "learned_1d" and a.position_layers == "stem"
    if a.position_tokens == "patches" and not (is_table and a.prefix_length):
        yield "position_tokens='patches': needs learned_1d positions before the blocks, and a class token. Use all."
    if a.position_embedding in ("learned_2d", "relative") and a.prefix_length > 1:
        yield f"position_embedding={a.position_embedding!r}: has a place for one class token alone. Use learned_1d."
    if a.final_norm == "pooled" and (a.pool not in ("token", "gap") or a.feature_width != a.width):
        yield f"final_norm='pooled': the pooled features of pool={a.pool!r} have no such norm. Use tokens, or pool=gap."
    if a.position_layers != "stem" and a.position_embedding in _NOT_ADDED:
        yield f"position_layers={a.position_layers!r}: {_NOT_ADDED[a.position_embedding]}. Leave it at 'stem'."
    if a.position_layers == "every" and a.position_embedding == "sincos2d":
        yield "position_layers='every': sincos2d has no parameters, so that every block has the same: use 'shared'."
    if a.position_embedding == "relative" and is_reference(a.block):
        yield f"position_embedding='relative' needs the built-in blocks' attention, not {a.block}."
    if a.attention not in ("auto", a.block_attention):
        yield f"attention={a.attention!r}: computes no relative positions. Use auto or xla."


_NOT_ADDED = {
    "none": "position_embedding='none' adds nothing",
    "relative": "relative positions are added to nothing, every block's attention has its own",
}
