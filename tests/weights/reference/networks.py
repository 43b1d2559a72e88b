"""The small networks that are compared with timm and Hugging Face, with parameters and images made from seeds.

Used by `write_files.py`, which makes the files that the libraries load, and by the tests, which
make the same again.
"""

import dataclasses
import zlib

import numpy as np

from vit_jax.config.architecture import Architecture
from vit_jax.weights.names import list_shapes

SIZES = {
    "width": 48,
    "depth": 3,
    "mlp_dim": 96,
    "num_heads": 4,
}
VIT = Architecture(
    name="ViT-custom/8",
    image_size=(32, 48),
    patch_size=(8, 8),
    num_classes=5,
    gelu="exact",
    **SIZES,
)
STEM_EPSILONS = {"group_norm_epsilon": 1e-5, "standardization_epsilon": 1e-8}
STEM_EPSILONS["standardization_epsilon_added_to"] = "variance"
HYBRID = dataclasses.replace(
    VIT,
    name="R-custom+ViT-custom/8",
    family="hybrid",
    patch_size=(1, 1),
    depth=1,
    units=(2, 1),
    **STEM_EPSILONS,
)
RESNET = Architecture(
    name="R-customx1",
    family="resnet",
    image_size=(37, 52),  # odd: padding shows
    patch_size=(1, 1),
    num_classes=5,
    width=512,
    depth=0,
    mlp_dim=0,
    num_heads=0,
    units=(1, 2),
    pool="gap",
    residual_unit="preactivation",
    **STEM_EPSILONS,
)
ROOT_HYBRID = dataclasses.replace(
    HYBRID,
    name="R+ViT-custom/8",
    image_size=(32, 64),
    patch_size=(4, 4),
    units=(),
    width=32,
    mlp_dim=64,
)
TIMM = {
    "token": VIT,
    "gap": dataclasses.replace(VIT, pool="gap"),
    "map": dataclasses.replace(VIT, pool="map", gelu="tanh"),
    "hybrid": HYBRID,
    "root_hybrid": ROOT_HYBRID,
    "resnet": RESNET,
    "sincos2d": dataclasses.replace(VIT, position_embedding="sincos2d"),
}
HUGGINGFACE = {
    "token": dataclasses.replace(VIT, layer_norm_epsilon=1e-12),
    "tanh": dataclasses.replace(
        VIT,
        gelu="tanh",
        layer_norm_epsilon=1e-6,
        image_size=(32, 32),
    ),
    "learned_2d": dataclasses.replace(
        VIT,
        position_embedding="learned_2d",
        layer_norm_epsilon=1e-12,
    ),
    "pooler": dataclasses.replace(
        VIT,
        num_classes=0,
        head="mlp",
        layer_norm_epsilon=1e-12,
    ),
}
CASES = {f"timm_{name}": a for name, a in TIMM.items()} | {
    f"huggingface_{name}": a for name, a in HUGGINGFACE.items()
}
NUM_IMAGES = 3


def parameters(a: Architecture) -> dict[str, np.ndarray]:
    """Float32 parameters of sensible size, none of them zero; a function of names and shapes alone."""
    return {name: _values(name, shape) for name, shape in list_shapes(a).items()}


def _values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    normal = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith("scale"):
        values = 1 + 0.2 * normal
    elif name.endswith("kernel"):
        values = normal / np.sqrt(_fan_in(name, shape))
    else:
        values = 0.2 * normal

    return values.astype(np.float32)


def _fan_in(name: str, shape: tuple[int, ...]) -> int:
    has_layers = "/blocks/" in name or "/rest/" in name
    own = shape[has_layers:]

    if any(f"/{word}/" in name for word in ("query", "key", "value")):
        return own[0]

    return int(np.prod(own[:-1]))


def images(a: Architecture) -> np.ndarray:
    """float32 (NUM_IMAGES, H, W, 3) in [-1, 1]."""
    return (
        np.random.default_rng(7).uniform(-1, 1, (NUM_IMAGES, *a.image_size, 3)).astype(np.float32)
    )
