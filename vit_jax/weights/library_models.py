"""Models of timm and classes of transformers for which networks are written.

They are described by the parts that they compute. `families` holds the models, and `library_lookup`
finds the one for a network; this module has the parts that several share.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from vit_jax.config.architecture import Architecture
from vit_jax.weights.folding import Normalisation
from vit_jax.weights.packing import PLAIN, Packing

if TYPE_CHECKING:
    from vit_jax.weights.names.entry import Rule
    from vit_jax.weights.names.huggingface_names import HuggingFaceNames

Held = Mapping[str, tuple[object, ...] | Callable[[Architecture], bool]]
ANY = ()


def hold_any(*fields: str) -> Held:
    """Return the table of a model that computes any value of these fields."""
    return dict.fromkeys(fields, ANY)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LibraryModel:
    """A model that a library builds from its `config.json`.

    Attributes:
      name: name of timm's model, or of the class of transformers without a classifier; "" if there
        is none.
      held: field of the architecture → the values that the model computes, or a test. Other parts
        must be as in the paper's ViT.
      packing: how its files pack parameters.
      has_patch_bias: the patch embedding has a bias.
      preference: among models that lack as many parts, the highest is taken, and then the first.
    """

    name: str
    held: Held
    packing: Packing = PLAIN
    has_patch_bias: bool = True
    preference: int = 0

    def find_lacking(self, a: Architecture) -> dict[str, object]:
        """Return the parts of a network that this model does not compute, by field."""
        fields = {**self.held, **a.modern_options}
        return {field: getattr(a, field) for field in fields if not self._holds(field, a)}

    def _holds(self, field: str, a: Architecture) -> bool:
        held = self.held.get(field)
        if held is None:
            return False
        if callable(held):
            return held(a)
        return held == ANY or getattr(a, field) in held


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TimmModel(LibraryModel):
    """A model of timm."""

    epsilon: float = 1e-6  # epsilon of its norms


def state_nothing(a: Architecture, pixels: Normalisation) -> dict[str, object]:
    """Return no arguments, for classes without further ones."""
    return {}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TransformersModel(LibraryModel):
    """A class of transformers.

    Attributes:
      model_type: its name in `config.json`.
      classifier: the class with a classifier; "" if there is none.
      prefix: prefix of the names of the network, below a classifier.
      keeps_prefix: the names have the prefix without a classifier too.
      names: names of its parameters.
      arguments: fields of `config.json` that not all classes have, for a network and the
        normalisation of its pixels; "mlp_ratio" replaces the width of the MLP.
      names_silu: the activation of a gated MLP is stated by its name.
      normalises_pixels: images are normalised before the network, not in it.
      mask_shape: leading axes of the array of a mask token, which holds none of our parameters;
        None without one.
    """

    model_type: str
    classifier: str = ""
    prefix: str = ""
    keeps_prefix: bool = False
    names: "HuggingFaceNames | None" = None
    arguments: Callable[[Architecture, Normalisation], dict[str, object]] = state_nothing
    names_silu: bool = True
    normalises_pixels: bool = True
    mask_shape: tuple[int, ...] | None = None

    def make_rules(self, a: Architecture) -> "list[Rule]":
        """Return the names of the parameters of a network."""
        assert self.names is not None
        prefix = ""
        if a.num_classes or self.keeps_prefix:
            prefix = self.prefix
        return self.names.make_rules(prefix, is_packed=a.mlp == "swiglu")

    def make_arrays(self, a: Architecture, normalisation: Normalisation) -> dict[str, np.ndarray]:
        """Return arrays that the class demands and that hold none of our parameters."""
        if self.mask_shape is None:
            return {}
        prefix = self.prefix if a.num_classes else ""
        zeros = np.zeros((*self.mask_shape, a.width), np.float32)
        return {f"{prefix}embeddings.mask_token": zeros}


def is_eva(a: Architecture) -> bool:
    """Return True for a network of timm's Eva.

    It has rotary positions, or biases of queries and values only.
    """
    return a.rope is not None or a.qkv_bias == "query_value"


# Parts that several families share.

WHOLE_BIAS: Held = {"qkv_bias": ("all", "none")}
PARTIAL_BIAS: Held = {"qkv_bias": ("query_value", "none")}
SQUARE: Held = {"image_size": lambda a: a.image_size[0] == a.image_size[1]}
DISTILLED: Held = {"class_tokens": (2,), "num_classes": lambda a: a.num_classes > 0}
SCALED: Held = {"layer_scale": lambda a: a.layer_scale is not None}

# timm: VisionTransformer without rotary positions, Eva with them.

_COMMON: Held = {
    **hold_any("final_norm", "patch_bias", "layer_scale", "linear_bias"),
    "class_tokens": (None, 0, 1),
    "pool": ("token", "gap", "map"),
}
WITHOUT_REGISTERS: Held = {
    **_COMMON,
    **WHOLE_BIAS,
    "gelu": ANY,
    "embedding_norm": (None, "tokens"),
    "pool_num_heads": lambda a: a.pool_num_heads in (None, a.num_heads),
}
VISION_TRANSFORMER: Held = {**WITHOUT_REGISTERS, **hold_any("registers", "position_tokens")}
GATED_TRANSFORMER: Held = {**VISION_TRANSFORMER, "mlp": ("swiglu",), "pool": ("token", "gap")}
EVA: Held = {**_COMMON, "gelu": ("exact",), "linear_bias": (True,), "pool_num_heads": ANY}

# transformers. All of these classes have a patch bias, but CLIP's.

ANY_CLASS: Held = {"gelu": ANY, "patch_bias": ANY, "head": ("linear",)}
WITHOUT_CLASSES: Held = {**ANY_CLASS, "num_classes": (0,)}
READER_POOLS = ("token", "gap", "token_gap")
"""Poolings of features: without a classifier the user of last_hidden_state pools."""
