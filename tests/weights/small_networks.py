"""Small networks of every kind with seeded parameters, and arrays of them in every format."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from tests.weights.reference import networks
from vit_jax.config.architecture import Architecture
from vit_jax.weights import Weights
from vit_jax.weights.description import TrainingData
from vit_jax.weights.names import FORMATS, unstack

SIZES = {
    "width": 16,
    "depth": 2,
    "mlp_dim": 24,
    "num_heads": 2,
}
VIT = Architecture(
    name="ViT-custom/4",
    image_size=(8, 12),
    patch_size=(4, 4),
    num_classes=3,
    **SIZES,
)
SQUARE = dataclasses.replace(VIT, image_size=(12, 12))
HYBRID = dataclasses.replace(
    VIT,
    name="R-customx0.5+ViT-custom/8",
    family="hybrid",
    image_size=(16, 24),
    patch_size=(1, 1),
    units=(2, 1),
    width_factor=0.5,
)
ROOT_HYBRID = dataclasses.replace(
    HYBRID,
    name="Rx0.5+ViT-custom/4",
    patch_size=(2, 2),
    units=(),
)
RESNET = dataclasses.replace(
    networks.RESNET,
    name="R-customx0.5",
    image_size=(20, 24),
    num_classes=3,
    width=256,
    width_factor=0.5,
    standardization_epsilon=1e-10,
)
NETWORKS = {
    "token": VIT,
    "mlp_head": dataclasses.replace(VIT, head="mlp"),
    "gap": dataclasses.replace(VIT, pool="gap"),
    "map": dataclasses.replace(VIT, pool="map", gelu="exact"),
    "sincos2d": dataclasses.replace(
        VIT,
        pool="gap",
        position_embedding="sincos2d",
    ),
    "learned_2d": dataclasses.replace(VIT, position_embedding="learned_2d"),
    "headless": dataclasses.replace(VIT, num_classes=0),
    "pooler": dataclasses.replace(VIT, num_classes=0, head="mlp"),
    "deep": dataclasses.replace(VIT, depth=11),
    "hybrid": HYBRID,
    "root_hybrid": ROOT_HYBRID,
    "resnet": RESNET,
    "postactivation": dataclasses.replace(RESNET, residual_unit="postactivation"),
}
# No other format has names for these networks.
OURS = {
    "relative": dataclasses.replace(VIT, position_embedding="relative"),
    "every": dataclasses.replace(VIT, position_layers="every"),
    "every_2d": dataclasses.replace(
        VIT,
        position_layers="every",
        position_embedding="learned_2d",
    ),
    "shared": dataclasses.replace(VIT, position_layers="shared"),
    "axial": dataclasses.replace(VIT, block="axial", pool="gap"),
    "axial_relative": dataclasses.replace(
        VIT,
        block="axial",
        pool="map",
        position_embedding="relative",
    ),
}
TRAINING = TrainingData(
    data="folder:/my/images",
    seed=3,
    holdout_fraction=0.4,
    train_split="train",
    test_split="test",
    classes=(),
)
PREPROCESSING = {
    "image_size": [8, 12],
    "resize": "short_side",
    "crop_fraction": 0.875,
    "pixel_range": [-1.0, 1.0],
}


def weights_of(a: Architecture, **details) -> Weights:
    """Return weights with seeded parameters."""
    return Weights(a, networks.parameters(a), **details)


def arrays_of(
    a: Architecture,
    format_name: str,
    parameters: Mapping[str, np.ndarray] | None = None,
):
    """Return the arrays of a network as a file of another format has them."""
    apart = unstack(parameters or networks.parameters(a), a.num_heads)
    entries = FORMATS[format_name].make_entries(a)
    return {entry.name: entry.write(apart) for entry in entries}


def assert_same(read: Mapping[str, np.ndarray], written: Mapping[str, np.ndarray]) -> None:
    """Assert equal names and shapes, and every bit."""
    assert read.keys() == written.keys()

    for name, array in written.items():
        assert read[name].dtype == np.float32, name
        assert read[name].shape == array.shape, name
        assert read[name].tobytes() == array.tobytes(), name
