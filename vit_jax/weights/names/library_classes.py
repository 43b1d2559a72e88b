"""Models of timm and of transformers for which networks are written, by the parts that they compute."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from vit_jax.config.architecture import Architecture

Held = Mapping[str, tuple[object, ...] | Callable[[Architecture], bool]]
ANY = ()


class LibraryModel(NamedTuple):
    """A model that a library builds from its `config.json`."""

    name: str  # of timm's model, or of the class of transformers without a classifier; "" if there is none
    # Field of the architecture → the values that the model computes, or a test. Other parts must be the paper's ViT's.
    held: Held
    model_type: str = ""  # in transformers, as the next fields
    family: str = ""  # of `huggingface.FAMILIES`
    prefix: str = ""  # of the names of the network, below a classifier
    classifier: str = ""  # the class with a classifier
    epsilon: float = 1e-6  # of norms, of timm's model

    def lacking(self, a: Architecture) -> dict[str, object]:
        """Return the parts of a network that this model does not compute, by field."""
        return {
            field: getattr(a, field)
            for field in {**self.held, **a.modern_options}
            if not self._holds(field, a)
        }

    def _holds(self, field: str, a: Architecture) -> bool:
        held = self.held.get(field)
        if callable(held):
            return held(a)
        return held is not None and (held == ANY or getattr(a, field) in held)


def timm_model(a: Architecture) -> LibraryModel:
    """Return timm's model that computes most parts of a network."""
    return _nearest(TIMM if a.family == "vit" else (_TIMM_OTHERS,), a)


def is_eva(a: Architecture) -> bool:
    """Return True for a network of timm's Eva: rotary positions, or biases of queries and values only."""
    return a.rope is not None or a.qkv_bias == "query_value"


def huggingface_model(a: Architecture) -> LibraryModel:
    """Return the class of transformers that computes most parts of a ViT."""
    return _nearest(HUGGINGFACE, a)


def huggingface_class(a: Architecture) -> str:
    """Return the name of that class, with a classifier if the network has one."""
    model = huggingface_model(a)
    return model.classifier if a.num_classes else model.name


def _nearest(models: Sequence[LibraryModel], a: Architecture) -> LibraryModel:
    """Return the model that lacks the fewest parts; one with the same rotary positions first."""
    return min(models, key=lambda model: ("rope" in model.lacking(a), len(model.lacking(a))))


def whole_ratio(a: Architecture) -> int | None:
    """Return the number from which transformers' DINOv2 computes the width of the MLP; None if none does."""

    def hidden(ratio: int) -> int:
        return (int(a.width * ratio * 2 / 3) + 7) // 8 * 8 if a.mlp == "swiglu" else a.width * ratio

    return next((ratio for ratio in range(1, 17) if hidden(ratio) == a.mlp_dim), None)


def _any(*fields: str) -> Held:
    return dict.fromkeys(fields, ANY)


_QKV: Held = {"qkv_bias": ("all", "none")}
_SQUARE: Held = {"image_size": lambda a: a.image_size[0] == a.image_size[1]}
_DISTILLED: Held = {"class_tokens": (2,), "num_classes": lambda a: a.num_classes > 0}
_SCALED: Held = {"layer_scale": lambda a: a.layer_scale is not None}

# timm: VisionTransformer without rotary positions, Eva with them.

_COMMON: Held = {
    **_any("final_norm", "patch_bias", "layer_scale", "linear_bias"),
    "class_tokens": (None, 0, 1),
    "pool": ("token", "gap", "map"),
}
_DEIT: Held = {
    **_COMMON,
    **_QKV,
    "gelu": ANY,
    "embedding_norm": (None, "tokens"),
    "pool_num_heads": lambda a: a.pool_num_heads in (None, a.num_heads),
}
_VIT: Held = {**_DEIT, **_any("registers", "position_tokens")}
_SWIGLU: Held = {**_VIT, "mlp": ("swiglu",), "pool": ("token", "gap")}
_EVA: Held = {**_COMMON, "gelu": ("exact",), "linear_bias": (True,), "pool_num_heads": ANY}
_EVA02: Held = {**_EVA, "mlp": ("gelu", "swiglu", "swiglu_norm"), "attention_norm": ANY}
_INDEX: Held = {**_EVA, **_QKV, "rope": ("index",), "embedding_norm": ("tokens",)}
_DINOV3: Held = {
    **_EVA,
    "position_embedding": ("none",),
    "registers": ANY,
    "mlp": ("gelu", "swiglu"),
}
_AIM: Held = {**_SWIGLU, "norm": ("rms",), "embedding_norm": (None, "patches")}
_PARTIAL: Held = {"qkv_bias": ("query_value", "none")}
TIMM = (
    LibraryModel(
        "vit_base_patch16_clip_224", {**_VIT, "layer_norm_epsilon": (1e-5,)}, epsilon=1e-5
    ),
    LibraryModel("vit_base_patch16_224", _VIT),
    LibraryModel("deit_base_distilled_patch16_224", {**_DEIT, **_DISTILLED, "pool": ("token",)}),
    LibraryModel("vit_giant_patch14_dinov2", _SWIGLU),
    LibraryModel("aimv2_large_patch14_224", _AIM, epsilon=1e-5),
    LibraryModel(
        "vit_base_patch16_dinov3", {**_DINOV3, **_PARTIAL, "rope": ("centred",)}, epsilon=1e-5
    ),
    LibraryModel("eva_giant_patch14_224", {**_EVA, "qkv_bias": ("query_value",)}),
    LibraryModel("eva02_base_patch14_224", {**_EVA02, **_PARTIAL, "rope": ("grid",)}),
    LibraryModel("vit_pe_core_base_patch16_224", {**_INDEX, "pool": ("map",)}, epsilon=1e-5),
    LibraryModel(
        "vit_pe_spatial_base_patch16_512", {**_INDEX, "pool": ("token", "gap")}, epsilon=1e-5
    ),
)
_TIMM_OTHERS = LibraryModel("", {"position_tokens": ANY})  # hybrids and ResNets

# transformers. All of these classes have a patch bias, but CLIP's.

_ALL: Held = {"gelu": ANY, "patch_bias": ANY, "head": ("linear",)}
_FEATURES: Held = {**_ALL, "num_classes": (0,)}
_OF_VIT: Held = {**_ALL, **_QKV, "pool": ("token",), "head": ANY}
_POOLS = ("token", "gap", "token_gap")  # without a classifier the reader of last_hidden_state pools
_OF_DINOV2: Held = {
    **_ALL,
    **_QKV,
    **_SCALED,
    "pool": lambda a: a.pool == "token_gap" if a.num_classes else a.pool in _POOLS,
    "class_tokens": (None, 1),
    "mlp": ("gelu", "swiglu"),
    "mlp_dim": lambda a: whole_ratio(a) is not None,
    "position_tokens": ANY,
}
_OF_REGISTERS: Held = {
    **_OF_DINOV2,
    "registers": lambda a: a.registers > 0,
    "position_tokens": ("patches",),
}
_OF_DINOV3: Held = {
    **_FEATURES,
    **_SCALED,
    **_any("registers", "qkv_bias", "linear_bias"),
    "pool": _POOLS,
    "class_tokens": (None, 1),
    "rope": ("centred",),
    "position_embedding": ("none",),
    "mlp": ("gelu", "swiglu"),
}
_OF_CLIP: Held = {**_ALL, **_SQUARE, "pool": ("token",), "embedding_norm": ("tokens",)}
_OF_AIM: Held = {
    **_FEATURES,
    **_SQUARE,
    "pool": ("gap",),
    "norm": ("rms",),
    "mlp": ("swiglu",),
    "embedding_norm": ("patches",),
    "linear_bias": (False,),
    "qkv_bias": ("none",),
}
_OF_RADIO: Held = {
    **_FEATURES,
    **_SQUARE,
    **_QKV,
    **_any("class_tokens", "registers", "layer_scale"),
    "pool": ("token",),
    "position_tokens": ("patches",),
    "final_norm": ("none",),
}


def _classified(stem: str, model_type: str, family: str, held: Held) -> LibraryModel:
    """Return a class of transformers that has a class with a classifier around it."""
    return LibraryModel(
        f"{stem}Model", held, model_type, family, f"{model_type}.", f"{stem}ForImageClassification"
    )


_WITH_TEACHER = _classified("DeiT", "deit", "vit", {**_OF_VIT, **_DISTILLED})
_PROJECTION = ("clip_vision_model", "clip", "vision_model.", "CLIPVisionModelWithProjection")
HUGGINGFACE = (
    _classified("ViT", "vit", "vit", _OF_VIT),
    _classified("DeiT", "deit", "vit", {**_OF_VIT, "registers": (1,)}),
    _WITH_TEACHER._replace(name="", classifier="DeiTForImageClassificationWithTeacher"),
    _classified(
        "IJepa", "ijepa", "vit", {**_ALL, **_QKV, "pool": ("gap",), "class_tokens": (None, 0)}
    ),
    _classified("Dinov2", "dinov2", "dinov2", _OF_DINOV2),
    _classified("Dinov2WithRegisters", "dinov2_with_registers", "dinov2", _OF_REGISTERS),
    LibraryModel("DINOv3ViTModel", _OF_DINOV3, "dinov3_vit", "dinov3"),
    LibraryModel("CLIPVisionModel", _OF_CLIP, *_PROJECTION),
    LibraryModel(
        "SiglipVisionModel",
        {**_FEATURES, **_SQUARE, "pool": ("map",)},
        "siglip_vision_model",
        "clip",
    ),
    LibraryModel("Aimv2VisionModel", _OF_AIM, "aimv2_vision_model", "aimv2"),
    LibraryModel("RadioModel", _OF_RADIO, "radio", "radio"),
)
