"""The least cycles that the matrix units of a TPU v5e need for a training step.

`python -m tests.tools.plan.matrix_limit` runs it.

Its four units hold 128 x 128 weights each and take a row of 128 values a cycle. Contracted
dimensions and columns are padded to complete tiles, rows are not. A convolution is one product for
each tap of its kernel, as XLA does; that of the root is one product of all taps. In the gradient of
weights the rows are contracted, and the better of the two ways to lay out the channels counts.
Nothing but products is counted.
"""

from collections.abc import Iterator
from typing import NamedTuple

from vit_jax.config import Architecture, ModelConfig
from vit_jax.config.networks import build_architecture
from vit_jax.sharding import convolutions

UNITS = 4
TILE = 128


class Product(NamedTuple):
    """A matrix product, computed `count` times in the forward pass."""

    count: int
    rows: int
    contracted: int
    columns: int


def limit(architecture: Architecture, images: int) -> float:
    """Return the cycles of a step with this number of images on a chip."""
    cycles = 0.0
    for index, product in enumerate(_list_products(architecture, images)):
        contracted_tiles = _count_tiles(product.contracted)
        column_tiles = _count_tiles(product.columns)
        forward = product.rows * contracted_tiles * column_tiles
        # The images, which the first product reads, have no gradient.
        input_gradient = forward if index > 0 else 0
        weight_gradient = _count_tiles(product.rows) * min(
            product.contracted * column_tiles, product.columns * contracted_tiles
        )
        cycles += product.count * (forward + input_gradient + weight_gradient)
    return cycles / UNITS


def _list_products(a: Architecture, images: int) -> Iterator[Product]:
    """Yield the products of the forward pass."""
    if a.has_resnet:
        yield from _list_resnet_products(a, images)
    if a.has_transformer:
        yield from _list_transformer_products(a, images)
    yield Product(1, images, a.width, a.num_classes)


def _list_resnet_products(a: Architecture, images: int) -> Iterator[Product]:
    root = convolutions.root(a)
    yield Product(
        1,
        images * _area(root),
        root.kernel**2 * root.inputs,
        root.outputs,
    )

    for unit in convolutions.residual_units(a):
        for conv in unit.convolutions:
            yield Product(
                conv.kernel**2,
                images * _area(conv),
                conv.inputs,
                conv.outputs,
            )


def _list_transformer_products(a: Architecture, images: int) -> Iterator[Product]:
    length = a.sequence_length
    tokens = images * length
    patches = images * a.grid[0] * a.grid[1]
    patch_values = a.patch_size[0] * a.patch_size[1] * a.map_channels
    head = a.width // a.num_heads
    heads = a.depth * a.num_heads * images

    yield Product(1, patches, patch_values, a.width)
    yield Product(4 * a.depth, tokens, a.width, a.width)
    yield Product(a.depth, tokens, a.width, a.mlp_dim)
    yield Product(a.depth, tokens, a.mlp_dim, a.width)
    yield Product(heads, length, head, length)
    yield Product(heads, length, length, head)


def _area(conv: convolutions.Convolution) -> int:
    return conv.output_size[0] * conv.output_size[1]


def _count_tiles(size: int) -> int:
    return -(-size // TILE)


def main() -> None:
    """Print the limit of four networks."""
    for name, images in (("R50x1", 64), ("R50+ViT-B/16", 32), ("ViT-B/16", 64), ("ViT-L/16", 64)):
        model = ModelConfig(name=name)
        architecture = build_architecture(
            model,
            image_size=(224, 224),
            num_classes=1000,
        )
        cycles = limit(architecture, images)
        print(f"{name}, {images} images: {cycles / 1e6:.1f} million cycles")


if __name__ == "__main__":
    main()
