"""A network that is small enough to count by hand."""

from vit_jax.config import Architecture

# Maps: 8 x 6 after the root, 4 x 3 after pooling and in the first stage, 2 x 2 in the second.
TINY_RESNET = Architecture(
    name="tiny",
    family="resnet",
    image_size=(16, 12),
    patch_size=(1, 1),
    num_classes=5,
    width=256,
    depth=0,
    mlp_dim=0,
    num_heads=0,
    units=(2, 1),
    width_factor=0.5,
    pool="gap",
    residual_unit="preactivation",
)
