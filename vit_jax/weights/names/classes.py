"""Models of timm and of transformers for which networks are written, by the parts that they compute."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.config.architecture import Architecture

Held = Mapping[str, tuple[Any, ...] | Callable[[Architecture], bool]]
ANY = ()


class LibraryModel(NamedTuple):
    """A model that a library builds from its `config.json`."""

    name: str  # of timm's model, or of the class of transformers without a classifier; "" if there is none
    # Field of the architecture → the values that the model computes, or a test. Other parts must be the paper's ViT's.
    held: Held
    model_type: str = ""  # as the next: of transformers
    family: str = ""  # of `huggingface.FAMILIES`
    prefix: str = ""  # of the names of the network, below a classifier
    classifier: str = ""  # the class with a classifier
    epsilon: float = 1e-6  # of norms, of timm's model

    def lacking(self, a: Architecture) -> dict[str, Any]:
        """Return the parts of a network that this model does not compute, by field."""
        return {field: getattr(a, field) for field in {**self.held, **a.parts} if not self._holds(field, a)}

    def _holds(self, field: str, a: Architecture) -> bool:
        held = self.held.get(field)
        if callable(held):
            return held(a)
        return held is not None and (held == ANY or getattr(a, field) in held)


def timm_model(a: Architecture) -> LibraryModel:
    """Return timm's model that computes most parts of a network."""
    return _nearest(TIMM if a.family == "vit" else (_TIMM_OTHERS,), a)


def huggingface_model(a: Architecture) -> LibraryModel:
    """Return the class of transformers that computes most parts of a ViT."""
    return _nearest(HUGGINGFACE, a)


def huggingface_class(a: Architecture) -> str:
    """Return the name of that class, with a classifier if the network has one."""
    model = huggingface_model(a)
    return model.classifier if a.num_classes else model.name


def _nearest(models: Sequence[LibraryModel], a: Architecture) -> LibraryModel:
    """Return the model with the fewest parts lacking; one with the same rotary positions first."""

    def distance(model: LibraryModel) -> tuple[bool, int]:
        lacking = model.lacking(a)
        return "rope" in lacking, len(lacking)

    return min(models, key=distance)


# timm: VisionTransformer without rotary positions, Eva with them.

_POOLED: Held = {"class_tokens": (None, 0, 1), "pool": ("token", "gap", "map")}
_ANY_NORMS: Held = {"final_norm": ANY, "patch_bias": ANY, "layer_scale": ANY, "linear_bias": ANY}
_VIT: Held = {
    **_POOLED,
    **_ANY_NORMS,
    **dict.fromkeys(("gelu", "registers", "position_tokens"), ANY),
    "embedding_norm": (None, "tokens"),
    "qkv_bias": ("all", "none"),
    "pool_num_heads": lambda a: a.pool_num_heads in (None, a.num_heads),
}
_EVA: Held = {**_POOLED, **_ANY_NORMS, "gelu": ("exact",), "linear_bias": (True,), "pool_num_heads": ANY}
_GRID: Held = {
    **_EVA,
    "rope": ("grid",),
    "mlp": ("gelu", "swiglu", "swiglu_norm"),
    "attention_norm": ANY,
    "qkv_bias": ("query_value", "none"),
}
_INDEX: Held = {**_EVA, "rope": ("index",), "embedding_norm": ("tokens",), "qkv_bias": ("all", "none")}
_CENTRED: Held = {
    **_EVA,
    "rope": ("centred",),
    "position_embedding": ("none",),
    "registers": ANY,
    "mlp": ("gelu", "swiglu"),
    "qkv_bias": ("query_value", "none"),
}
TIMM = (
    LibraryModel("vit_base_patch16_clip_224", {**_VIT, "layer_norm_epsilon": (1e-5,)}, epsilon=1e-5),
    LibraryModel("vit_base_patch16_224", _VIT),
    LibraryModel(
        "deit_base_distilled_patch16_224",
        {
            **{field: held for field, held in _VIT.items() if field not in ("registers", "position_tokens")},
            "class_tokens": (2,),
            "pool": ("token",),
            "num_classes": lambda a: a.num_classes > 0,
        },
    ),
    LibraryModel("vit_giant_patch14_dinov2", {**_VIT, "mlp": ("swiglu",), "pool": ("token", "gap")}),
    LibraryModel(
        "aimv2_large_patch14_224",
        {**_VIT, "norm": ("rms",), "mlp": ("swiglu",), "pool": ("token", "gap"), "embedding_norm": (None, "patches")},
        epsilon=1e-5,
    ),
    LibraryModel("vit_base_patch16_dinov3", _CENTRED, epsilon=1e-5),
    LibraryModel("eva02_base_patch14_224", _GRID),
    LibraryModel("vit_pe_core_base_patch16_224", {**_INDEX, "pool": ("map",)}, epsilon=1e-5),
    LibraryModel("vit_pe_spatial_base_patch16_512", {**_INDEX, "pool": ("token", "gap")}, epsilon=1e-5),
)
_TIMM_OTHERS = LibraryModel("", {"position_tokens": ANY})  # hybrids and ResNets

# transformers. All of these classes have a patch bias, but CLIP's.


def _is_square(a: Architecture) -> bool:
    return a.image_size[0] == a.image_size[1]


def whole_ratio(a: Architecture) -> int | None:
    """Return the number from which transformers' DINOv2 computes the width of the MLP; None if none does."""

    def hidden(ratio: int) -> int:
        return (int(a.width * ratio * 2 / 3) + 7) // 8 * 8 if a.mlp == "swiglu" else a.width * ratio

    return next((ratio for ratio in range(1, 17) if hidden(ratio) == a.mlp_dim), None)


_ALL: Held = {"gelu": ANY, "patch_bias": ANY, "head": ("linear",)}
_FEATURES: Held = {**_ALL, "num_classes": (0,)}
_OF_VIT: Held = {**_ALL, "pool": ("token",), "qkv_bias": ("all", "none"), "head": ANY}
# Without a classifier the reader of last_hidden_state pools.
_ANY_POOL: Held = {"pool": ("token", "gap", "token_gap"), "class_tokens": (None, 1)}
_OF_DINOV2: Held = {
    **_ALL,
    **_ANY_POOL,
    "pool": lambda a: a.pool == "token_gap" if a.num_classes else a.pool in ("token", "gap", "token_gap"),
    "layer_scale": lambda a: a.layer_scale is not None,
    "mlp": ("gelu", "swiglu"),
    "mlp_dim": lambda a: whole_ratio(a) is not None,
    "qkv_bias": ("all", "none"),
    "position_tokens": ANY,
}
HUGGINGFACE = (
    LibraryModel("ViTModel", _OF_VIT, "vit", "vit", "vit.", "ViTForImageClassification"),
    LibraryModel("DeiTModel", {**_OF_VIT, "registers": (1,)}, "deit", "vit", "deit.", "DeiTForImageClassification"),
    LibraryModel(
        "",
        {**_OF_VIT, "class_tokens": (2,), "num_classes": lambda a: a.num_classes > 0},
        "deit",
        "vit",
        "deit.",
        "DeiTForImageClassificationWithTeacher",
    ),
    LibraryModel(
        "IJepaModel",
        {**_ALL, "pool": ("gap",), "class_tokens": (None, 0), "qkv_bias": ("all", "none")},
        "ijepa",
        "vit",
        "ijepa.",
        "IJepaForImageClassification",
    ),
    LibraryModel("Dinov2Model", _OF_DINOV2, "dinov2", "dinov2", "dinov2.", "Dinov2ForImageClassification"),
    LibraryModel(
        "Dinov2WithRegistersModel",
        {**_OF_DINOV2, "registers": lambda a: a.registers > 0, "position_tokens": ("patches",)},
        "dinov2_with_registers",
        "dinov2",
        "dinov2_with_registers.",
        "Dinov2WithRegistersForImageClassification",
    ),
    LibraryModel(
        "DINOv3ViTModel",
        {
            **_FEATURES,
            **_ANY_POOL,
            "rope": ("centred",),
            "position_embedding": ("none",),
            "layer_scale": lambda a: a.layer_scale is not None,
            "mlp": ("gelu", "swiglu"),
            **dict.fromkeys(("registers", "qkv_bias", "linear_bias"), ANY),
        },
        "dinov3_vit",
        "dinov3",
    ),
    LibraryModel(
        "CLIPVisionModel",
        {**_ALL, "pool": ("token",), "embedding_norm": ("tokens",), "image_size": _is_square},
        "clip_vision_model",
        "clip",
        "vision_model.",
        "CLIPVisionModelWithProjection",
    ),
    LibraryModel(
        "SiglipVisionModel", {**_FEATURES, "pool": ("map",), "image_size": _is_square}, "siglip_vision_model", "clip"
    ),
    LibraryModel(
        "Aimv2VisionModel",
        {
            **_FEATURES,
            "pool": ("gap",),
            "norm": ("rms",),
            "mlp": ("swiglu",),
            "embedding_norm": ("patches",),
            "linear_bias": (False,),
            "qkv_bias": ("none",),
            "image_size": _is_square,
        },
        "aimv2_vision_model",
        "aimv2",
    ),
    LibraryModel(
        "RadioModel",
        {
            **_FEATURES,
            **dict.fromkeys(("class_tokens", "registers", "layer_scale"), ANY),
            "pool": ("token",),
            "position_tokens": ("patches",),
            "final_norm": ("none",),
            "qkv_bias": ("all", "none"),
            "image_size": _is_square,
        },
        "radio",
        "radio",
    ),
)
