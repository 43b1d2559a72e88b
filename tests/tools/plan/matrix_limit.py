"""The least cycles that the matrix units of a TPU v5e need for a training step.

`python -m tests.tools.plan.matrix_limit` runs it.

Its four units hold 128 x 128 weights each and take a row of 128 values a cycle. Contracted
dimensions and columns are padded to complete tiles, rows are not. A convolution is one product for
each tap of its kernel, as XLA does; that of the root is one product of all taps. In the gradient of
weights the rows are contracted, and the better of the two ways to lay out the channels counts.
Nothing but products is counted.
"""

from collections.abc import Iterator

from vit_jax.config import Architecture, ModelConfig
from vit_jax.config.networks import build_architecture
from vit_jax.sharding import convolutions

UNITS = 4
TILE = 128


def limit(architecture: Architecture, images: int) -> float:
    """Cycles of a step with so many images on a chip."""
    cycles = 0.0
    for place, (count, rows, contracted, columns) in enumerate(_products(architecture, images)):
        forward = rows * _tiles(contracted) * _tiles(columns)
        # Of images there is no gradient
        of_inputs = rows * _tiles(columns) * _tiles(contracted) if place else 0
        of_weights = _tiles(rows) * min(contracted * _tiles(columns), columns * _tiles(contracted))
        cycles += count * (forward + of_inputs + of_weights)
    return cycles / UNITS


def _products(a: Architecture, images: int) -> Iterator[tuple[int, int, int, int]]:
    """How often a product is computed in the forward pass, its rows, contracted dimension and columns."""
    if a.has_resnet:
        root = convolutions.root(a)
        yield 1, images * _area(root), root.kernel**2 * root.inputs, root.outputs
        for unit in convolutions.residual_units(a):
            for conv in unit.convolutions:
                yield conv.kernel**2, images * _area(conv), conv.inputs, conv.outputs
    if a.has_transformer:
        tokens = images * a.sequence_length
        length = a.sequence_length
        head = a.width // a.num_heads
        yield (
            1,
            images * a.grid[0] * a.grid[1],
            a.patch_size[0] * a.patch_size[1] * a.map_channels,
            a.width,
        )
        yield 4 * a.depth, tokens, a.width, a.width
        yield a.depth, tokens, a.width, a.mlp_dim
        yield a.depth, tokens, a.mlp_dim, a.width
        yield a.depth * a.num_heads * images, length, head, length
        yield a.depth * a.num_heads * images, length, length, head
    yield 1, images, a.width, a.num_classes


def _area(conv: convolutions.Convolution) -> int:
    return conv.output_size[0] * conv.output_size[1]


def _tiles(size: int) -> int:
    return -(-size // TILE)


if __name__ == "__main__":
    for name, images in (("R50x1", 64), ("R50+ViT-B/16", 32), ("ViT-B/16", 64), ("ViT-L/16", 64)):
        architecture = build_architecture(
            ModelConfig(name=name), image_size=(224, 224), num_classes=1000
        )
        print(f"{name}, {images} images: {limit(architecture, images) / 1e6:.1f} million cycles")
