"""Networks of big_vision, and the weights from which its fine-tuning starts."""

from vit_jax.config.migration.foreign_fields import DTYPES, ForeignFields, Section
from vit_jax.config.networks import build_named_architecture
from vit_jax.config.variants import parse_name

POOLS = {"gap": "gap", "tok": "token", "map": "map"}
POSITIONS = {"learn": "learned_1d", "sincos2d": "sincos2d"}
RESIDUAL_UNITS = {"bit": "postactivation", "bit_paper": "preactivation"}
NEW_HEAD = {"head/kernel", "head/bias"}
FILES = {
    "howto-i21k-Ti/16": "vit_models/augreg/Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0",
    "howto-i21k-S/32": "vit_models/augreg/S_32-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0",
    "howto-i21k-S/16": "vit_models/augreg/S_16-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0",
    "howto-i21k-B/32": "vit_models/augreg/B_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0",
    "howto-i21k-B/16": "vit_models/augreg/B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0",
    "howto-i21k-B/8": "vit_models/augreg/B_8-i21k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.0-sd_0.0",
    "howto-i21k-L/16": "vit_models/augreg/L_16-i21k-300ep-lr_0.001-aug_strong1-wd_0.1-do_0.0-sd_0.0",
    "i1k-s16-90ep": "big_vision/vit_s16_i1k_90ep",
    "i1k-s16-150ep": "big_vision/vit_s16_i1k_150ep",
    "i1k-s16-300ep": "big_vision/vit_s16_i1k_300ep",
}
"""Names that big_vision has for released weights, with their files in buckets."""


def convert_network(fields: ForeignFields) -> Section:
    """Return the section `model` of a network to train."""
    section = {"head_bias_init": fields.take("init_head_bias", 0.0)}
    name = fields.require("model_name")
    if name == "vit":
        return section | _convert_vit(fields)
    if name in RESIDUAL_UNITS:
        resnet = _name_resnet(fields)
        return section | {
            "name": resnet,
            "residual_unit": RESIDUAL_UNITS[name],
            "compute_dtype": "float32",
        }
    fix = f"only vit, {' and '.join(RESIDUAL_UNITS)} can be converted"
    fields.reject(
        "model_name",
        name,
        fix,
    )
    fields.drop("model")
    return section | {"name": "ViT-B/16"}


def _convert_vit(fields: ForeignFields) -> Section:
    """Return the options of a Vision Transformer."""
    name = _name_vit(fields)
    section: Section = {
        "name": name,
        "pool": fields.take_choice(
            "model.pool_type",
            POOLS,
            "gap",
        ),
        "head": _convert_head(fields, name),
        "position_embedding": fields.take_choice(
            "model.posemb",
            POSITIONS,
            "learn",
        ),
        "dropout_fraction": fields.take("model.dropout", 0.0),
        "compute_dtype": fields.take_choice(
            "model.dtype_mm",
            DTYPES,
            "float32",
        ),
    }
    for size in ("width", "depth", "mlp_dim", "num_heads"):
        if f"model.{size}" in fields:
            section[size] = fields.take(f"model.{size}")
    if section["position_embedding"] == "learned_1d":
        width = section.get("width") or build_named_architecture(name).width
        section["position_stddev"] = width**-0.5
    fields.expect(
        "model.head_zeroinit",
        True,
        fix="remove it: a new head begins at zero",
    )
    return section


def _name_vit(fields: ForeignFields) -> str:
    """Return the name of a Vision Transformer; numbers beside its variant replace some of it."""
    variant = fields.take("model.variant", "B/16")
    size, _, patch = str(variant).partition("/")
    patch_size = fields.take("model.patch_size")
    if patch_size is not None:
        patch = "x".join(map(str, patch_size))
    name = f"ViT-{size}/{patch or 16}"
    try:
        parse_name(name)
    except ValueError:
        fields.reject(
            "model.variant",
            variant,
            "must be a size and a patch, such as B/16",
        )
        return "ViT-B/16"
    return name


def _convert_head(fields: ForeignFields, name: str) -> str:
    """Return the form of the head: `rep_size` is a hidden layer of the network's width."""
    rep_size = fields.take("model.rep_size", False)
    width = fields.peek("model.width") or build_named_architecture(name).width
    if rep_size not in (True, False, width):
        fields.reject(
            "model.rep_size",
            rep_size,
            "must be True, False or the width",
        )
    return "mlp" if rep_size else "linear"


def _name_resnet(fields: ForeignFields) -> str:
    """Return the name of a ResNet of `depth` layers and a factor `width` on its channels."""
    depth = fields.take("model.depth", 50)
    width = fields.take("model.width", 1)
    name = f"R{depth}x{width:g}"
    try:
        parse_name(name)
    except ValueError:
        fields.reject(
            "model.depth",
            depth,
            "must be 26, 50, 101, 152 or 200",
        )
        return "R50x1"
    return name


# Weights.


def convert_weights(fields: ForeignFields) -> Section:
    """Return `init_from` and the section `model` of a fine-tuning run."""
    network = convert_network(fields)
    if network["head_bias_init"]:
        fix = "remove it: a new head begins at zero"
        fields.reject(
            "init_head_bias",
            network["head_bias_init"],
            fix,
        )
    name = network["name"]

    replaced = set(fields.take("model_load.dont_load", ()))
    if replaced not in (set(), NEW_HEAD):
        fix = f"must be {sorted(NEW_HEAD)}: a new head"
        fields.reject(
            "model_load.dont_load",
            sorted(replaced),
            fix,
        )
    head = "keep"
    if replaced and network.get("head") == "mlp":
        head = "zero_keep_hidden"
    elif replaced:
        head = "zero"
    return {
        "init_from": _convert_address(fields, name),
        "model": {
            "name": name,
            "head": head,
            "dropout_fraction": network.get("dropout_fraction", 0.0),
            "compute_dtype": network.get("compute_dtype", "float32"),
        },
    }


def _convert_address(fields: ForeignFields, name: str) -> str:
    """Return the address of weights that big_vision calls by a short name, or their path."""
    source = fields.take("model_init")
    if source in FILES:
        return f"gs://{FILES[source]}.npz"
    if source in ("L", "M", "S"):
        return f"gs://bit_models/BiT-{source}-{name}.npz"
    if not str(source).endswith(".npz"):
        fix = "must be the path or gs:// address of an .npz file; `vit-jax weights` lists addresses"
        fields.reject(
            "model_init",
            source,
            fix,
        )
    return str(source)
