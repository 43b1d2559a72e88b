"""Memory of a training step by formula: arrays in tiles, activations kept for the backward pass, temporary arrays.

Which arrays are kept follows from the layers' equations and the rematerialisation policy. How much more exists at the
same time depends on the compiler: the constants below are fitted to compiled steps (table in `plan/README.md`).
No jax here.

Legend: S tokens a block sees, D width, M mlp_dim, T heads.
"""

import itertools
import math
from collections.abc import Iterator

from vit_jax.config.architecture import Architecture
from vit_jax.config.variants import NUM_GROUPS
from vit_jax.cost import convolutions, require_formulas

LANES, ROWS = 128, 8  # a tile of a TPU's memory, of 32-bit values
_VECTORS = (128, 256, 512, 1024)  # tiles of an array of one dimension

WORKING = {"none": 1.75, "dots": 1.25, "full": 1.2}
"""Memory that one block works with, as a multiple of what `none` keeps of it, by policy."""
WORKING_UNIT = {"none": 1.0, "dots": 0.8, "full": 0.9}
"""The same of a residual unit."""
ON_CHIP = 300_000_000
"""Bytes of that which a TPU never writes to its large memory."""
COPIES = {"none": 0.3, "dots": 1.0, "full": 0.17}
"""Copies of gradients beside those that the backward pass collects, as a fraction of these, by policy."""
SUMS = 1.5
"""Gradients summed over micro-batches, and copies of them, as a multiple of the gradients."""
GATHERED = 1.7
"""Copies, float32, of parameters that FSDP has gathered, and of their gradients."""


def padded_bytes(shape: tuple[int, ...], itemsize: int, *, tiled: bool = True) -> int:
    """Bytes of an array; with tiles, in the layout that needs the least padding."""
    if not tiled or not shape:
        return math.prod(shape) * itemsize
    if len(shape) == 1:
        return _up(shape[0], next((tile for tile in _VECTORS if shape[0] <= tile), _VECTORS[-1])) * itemsize
    pairs = itertools.permutations(range(len(shape)), 2)
    return min(_in_tiles(shape, rows, lanes) for rows, lanes in pairs) * itemsize


def _in_tiles(shape: tuple[int, ...], rows: int, lanes: int) -> int:
    """Values of an array whose dimension `lanes` is the minor one and `rows` the next; few rows have smaller tiles."""
    height = next((height for height in (1, 2, 4) if shape[rows] <= height), ROWS)
    rest = math.prod(shape) // (shape[rows] * shape[lanes] or 1)
    return rest * _up(shape[rows], height) * _up(shape[lanes], LANES)


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def passing_bytes(
    architecture: Architecture,
    *,
    images: int,
    gradient_bytes: int,
    layer_parameters: int,
    gathered_parameters: int = 0,
    is_accumulated: bool = False,
    model_shards: int = 1,
    tiled: bool = True,
) -> dict[str, int]:
    """Bytes on one device that exist only within a step: "activations", "gradients" and "temporary".

    The backward pass goes through the layers from the last to the first: it needs, at each of them, what is kept of
    this and all before it, and what it works with. The peak is at the layer where that is most.

    Args:
      architecture: the network; its `remat` decides what is kept.
      images: of one micro-batch, on one device.
      gradient_bytes: of this device's part of all gradients, float32.
      layer_parameters: of the layers that are run by loops, on one device: they are copied in the compute dtype.
      is_accumulated: whether gradients of several micro-batches are summed up.
      gathered_parameters: of FSDP, those that are gathered at one time: one layer's and those outside of layers.
      model_shards: devices that share heads and hidden units.
      tiled: whether memory is in a TPU's tiles.

    Raises:
      ValueError: a part is the user's own code.
    """
    a = architecture
    layers = list(_layers(a, images, a.remat, model_shards, tiled))
    kept = list(itertools.accumulate(layers))
    shares = [(WORKING if place >= len(layers) - a.depth else WORKING_UNIT)[a.remat] for place in range(len(layers))]
    everything = _layers(a, images, "none", model_shards, tiled)
    spared = ON_CHIP if tiled else 0
    working = [max(0, share * size - spared) for share, size in zip(shares, everything, strict=True)]
    peak = max(range(len(layers)), key=lambda layer: kept[layer] + working[layer])
    copies = _itemsize(a) * layer_parameters if _itemsize(a) < 4 or a.remat == "none" else 0
    stacked = copies if a.remat == "none" else 0  # beside the activations
    temporary = working[peak] + COPIES[a.remat] * gradient_bytes + GATHERED * 4 * gathered_parameters + copies - stacked
    temporary += 2 * padded_bytes((images * 3, *a.image_size), _itemsize(a), tiled=tiled)
    temporary += 2 * padded_bytes((images, a.num_classes or 1), 4, tiled=tiled)  # logits and their gradient
    temporary += SUMS * gradient_bytes if is_accumulated else 0
    return {"activations": kept[peak] + stacked, "gradients": gradient_bytes, "temporary": int(temporary)}


def kept_bytes(architecture: Architecture, images: int, *, model_shards: int = 1, tiled: bool = True) -> int:
    """What the forward pass keeps for the backward pass, in all layers together."""
    return sum(_layers(architecture, images, architecture.remat, model_shards, tiled))


def _layers(a: Architecture, images: int, remat: str, model_shards: int, tiled: bool) -> Iterator[int]:
    """Bytes kept of each residual unit and block."""
    require_formulas(a)
    if a.has_resnet:
        yield _root(a, images, tiled)
        for unit in convolutions.residual_units(a):
            yield _unit(a, unit, images, remat, model_shards, tiled)
    if a.has_transformer:
        block = _block(a, images, remat, model_shards, tiled)
        yield from itertools.repeat(block, a.depth)


def _block(a: Architecture, images: int, remat: str, shards: int, tiled: bool) -> int:
    size, tokens = _itemsize(a), a.sequence_length

    def of(*dims: int, itemsize: int = size) -> int:
        return padded_bytes(dims, itemsize, tiled=tiled)

    stream = of(images * tokens, a.width)
    if remat == "full":
        return stream
    # The tokens of each head lie along the lanes, unless the images can.
    lanes, others = (images, tokens) if images % LANES == 0 else (tokens, images)
    heads = a.num_heads // shards
    head_dim = a.width // a.num_heads
    by_heads = others * heads * padded_bytes((head_dim, lanes), size, tiled=tiled)
    hidden = of(images * _up(tokens, ROWS if tiled else 1), a.mlp_dim // shards)
    if remat == "dots":
        return 2 * stream + 3 * by_heads + hidden
    weights = images * heads * tokens
    attention = padded_bytes((weights, tokens), 4, tiled=tiled) + padded_bytes((weights, tokens), size, tiled=tiled)
    if tiled:
        attention = attention * _up(tokens, ROWS) // tokens
    norms = 6 * of(images * _up(tokens, ROWS if tiled else 1), a.width, itemsize=4)
    return norms + 2 * stream + 4 * by_heads + attention + 6 * hidden


def _unit(a: Architecture, unit: convolutions.Unit, images: int, remat: str, shards: int, tiled: bool) -> int:
    """Of a residual unit: its input; what its convolutions gave; or everything that its norms see and make.

    Norms before the convolutions see the input and what the first two gave, norms after them what all gave.
    """

    def of(size: tuple[int, int], channels: int) -> int:
        return _map(a, size, channels, images, tiled)

    entering = (unit.main[0].size, unit.main[0].inputs)
    inner = [(conv.output_size, conv.outputs // shards) for conv in unit.main[:2]]
    if a.residual_unit == "preactivation":
        plain, normed = [], [entering, *inner]
    else:
        plain, normed = [entering], inner + [(conv.output_size, conv.outputs) for conv in unit.convolutions[2:]]
    if remat == "full":
        return of(*entering)
    if remat == "dots":
        return sum(of(*each) for each in (*plain, *normed))
    kernels = sum(conv.parameters for conv in unit.convolutions) * (2 * 4 + _itemsize(a))
    norms = sum(_normed(a, size, channels, images, tiled) for size, channels in normed)
    return kernels + sum(of(*each) for each in plain) + norms


def _normed(a: Architecture, size: tuple[int, int], channels: int, images: int, tiled: bool) -> int:
    """A map at a group norm: centred and whitened by groups, scaled, in the compute dtype, and what ReLU let pass."""
    groups = (images, *size, NUM_GROUPS, max(channels // NUM_GROUPS, 1))
    float32 = _map(a, size, channels, images, tiled) * 4 // _itemsize(a)
    return 2 * padded_bytes(groups, 4, tiled=tiled) + float32 + _map(a, size, channels, images, tiled) + float32 // 4


def _map(a: Architecture, size: tuple[int, int], channels: int, images: int, tiled: bool) -> int:
    """A map in the compute dtype; its channels lie along the lanes, unless the images can."""
    lanes = images if images % LANES == 0 else channels
    values = math.prod(size) * images * channels
    return values * _itemsize(a) * (_up(lanes, LANES) if tiled else lanes) // lanes


def _root(a: Architecture, images: int, tiled: bool) -> int:
    """Of the root, which no policy computes again: what its convolution gave, and its norm where it has one."""
    conv = convolutions.root(a)
    each = _map if a.residual_unit == "preactivation" else _normed
    return each(a, conv.output_size, conv.outputs, images, tiled)


def _itemsize(a: Architecture) -> int:
    return {"float32": 4, "bfloat16": 2}[a.compute_dtype]
