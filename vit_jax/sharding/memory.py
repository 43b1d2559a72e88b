"""Memory of a training step by formula: arrays in tiles, activations kept for the backward pass, temporary arrays.

Which arrays are kept follows from the layers' equations and the rematerialisation policy. How much more exists at the
same time depends on the compiler: the constants below are fitted to compiled steps (table in `plan/README.md`).
No jax here.

Legend: S tokens a block sees, D width, M mlp_dim, T heads.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from vit_jax.config.architecture import UNROLLED, Architecture
from vit_jax.config.variants import NUM_GROUPS
from vit_jax.sharding import convolutions


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one chip at the step's peak."""

    parameters: int
    optimizer: int  # moments and counters
    average: int  # Polyak's; 0 without one
    batch: int  # images, labels and masks
    activations: int  # what the loops over layers keep for the backward pass
    gradients: int  # what the backward loops collect
    temporary: int  # the rest: a layer's work, copies in the compute dtype, layers outside of loops, logits, gaps
    program: int  # the instructions

    @property
    def state(self) -> int:
        """Bytes of the training state."""
        return self.parameters + self.optimizer + self.average

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


def require_formulas(architecture: Architecture) -> Architecture:
    """Return the architecture if formulas know all of its components.

    Raises:
      ValueError: a component is user-defined.
    """
    if architecture.is_standard:
        return architecture
    custom = ", ".join(architecture.custom_components.values())
    raise ValueError(
        f"{custom}: no formula gives the memory of user-defined components. Use the compiled step's figures."
    )


LANES = 128
ROWS = 8  # a tile of a TPU's memory, of 32-bit values
_VECTORS = (128, 256, 512, 1024)  # tiles of an array of one dimension

WORKING = {"none": 1.75, "dots": 1.25, "attention": 1.2, "full": 1.2}
"""Memory that one block works with, as a multiple of what `none` keeps of it, by policy."""
WORKING_WITH_KERNEL = {"tpu": 0.8, "gpu": 0.52}
"""The same if scores stay on the chip and either a policy recomputes or no layer is in a loop."""
WORKING_UNIT = {"none": 1.0, "dots": 0.8, "attention": 0.8, "full": 0.9}
"""The multiple of `WORKING` for a residual unit."""
ON_CHIP = 300_000_000
"""Bytes of temporary arrays that a TPU keeps on the chip."""
COPIES = {"none": 0.3, "dots": 1.0, "attention": 0.17, "full": 0.17}
"""Copies of gradients beside those that the backward pass collects, as a fraction of these, by policy."""
GPU_HIDDEN = {"none": 3.4, "dots": 2.7}
"""Arrays of hidden units that XLA for GPUs keeps of a block outside of loops: values, derivatives, masks."""
DELAYED = 0.6
"""Gradients that wait on TPUs for sums of which each chip keeps a part, as a fraction of activations, outside of loops.

Fitted for v5e, where products run beside these sums (`sharding/mesh.py`); assumed for other TPUs."""
SUMS = 1.5
"""Gradients summed over micro-batches, and copies of them, as a multiple of the gradients."""
GATHERED = 1.7
"""Copies, float32, of parameters that FSDP has gathered, and of their gradients."""


def padded_bytes(shape: tuple[int, ...], itemsize: int, *, tiled: bool = True) -> int:
    """Bytes of an array; with tiles, in the layout that needs the least padding."""
    if not tiled or not shape:
        return math.prod(shape) * itemsize
    if len(shape) == 1:
        return (
            _up(shape[0], next((tile for tile in _VECTORS if shape[0] <= tile), _VECTORS[-1]))
            * itemsize
        )
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
    """Return the bytes on one device that exist within a step alone: "activations", "gradients" and "temporary".

    The peak is at the layer of the backward pass where kept activations and working memory are most.

    Args:
      architecture: the network; its `remat` decides what is kept.
      images: of one micro-batch, on one device.
      gradient_bytes: of this device's shard of all gradients, float32.
      layer_parameters: of the layers run by loops, on one device: they are copied in the compute dtype.
      gathered_parameters: of FSDP, those that are gathered at one time: one layer's and those outside of layers.
      is_accumulated: gradients of several micro-batches are summed up.
      model_shards: devices that share heads and hidden units.
      tiled: memory is in a TPU's tiles.

    Raises:
      ValueError: a component is user-defined.
    """
    sizes = _Sizes(architecture, images, model_shards, tiled)
    remat = architecture.remat
    depth = architecture.depth
    layers = list(sizes.kept(remat))
    everything = list(sizes.kept("none"))
    kept = list(itertools.accumulate(layers))
    num_units = len(layers) - depth
    is_spared = sizes.has_kernel and (remat != "none" or sizes.is_unrolled)
    working_share = WORKING_WITH_KERNEL["tpu" if tiled else "gpu"] if is_spared else WORKING[remat]
    shares = [WORKING_UNIT[remat]] * num_units + [working_share] * depth
    spared = ON_CHIP if tiled else 0
    working = [
        max(0, share * size - spared) for share, size in zip(shares, everything, strict=True)
    ]
    peak = max(range(len(layers)), key=lambda layer: kept[layer] + working[layer])
    copies = sizes.itemsize * layer_parameters if sizes.itemsize < 4 or remat == "none" else 0
    stacked = copies if remat == "none" else 0  # beside the activations
    temporary = (
        working[peak]
        + COPIES[remat] * gradient_bytes
        + GATHERED * 4 * gathered_parameters
        + copies
        - stacked
    )
    if gathered_parameters and tiled and sizes.is_unrolled:
        temporary += DELAYED * kept[-1]
    temporary += 2 * sizes.padded(images * 3, *architecture.image_size)
    temporary += 2 * sizes.padded(
        images, architecture.num_classes or 1, itemsize=4
    )  # logits and their gradient
    temporary += SUMS * gradient_bytes if is_accumulated else 0
    return {
        "activations": kept[peak] + stacked,
        "gradients": gradient_bytes,
        "temporary": int(temporary),
    }


def kept_bytes(
    architecture: Architecture, images: int, *, model_shards: int = 1, tiled: bool = True
) -> int:
    """Return the bytes that the forward pass keeps for the backward pass, in all layers."""
    return sum(_Sizes(architecture, images, model_shards, tiled).kept(architecture.remat))


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Bytes of a network's arrays on one of the devices that share its model."""

    a: Architecture
    images: int
    shards: int
    tiled: bool

    @property
    def itemsize(self) -> int:
        return {"float32": 4, "bfloat16": 2}[self.a.compute_dtype]

    def padded(self, *dims: int, itemsize: int | None = None) -> int:
        return padded_bytes(dims, itemsize or self.itemsize, tiled=self.tiled)

    def kept(self, remat: str) -> Iterator[int]:
        """Return the bytes that this policy keeps of the root, each residual unit and each block."""
        require_formulas(self.a)
        if self.a.has_resnet:
            conv = convolutions.root(
                self.a
            )  # no policy computes it again, nor its norm, where it has one
            each = self._map if self.a.residual_unit == "preactivation" else self._normed
            yield each(conv.output_size, conv.outputs)
            for unit in convolutions.residual_units(self.a):
                yield self._unit(unit, remat)
        if self.a.has_transformer:
            yield from itertools.repeat(self._block(remat), self.a.depth)

    def _block(self, remat: str) -> int:
        a = self.a
        images = self.images
        tokens = self.a.sequence_length
        halves = len(self.a.attention_lengths)
        stream = self.padded(images * tokens, a.width)
        means = 4 * self.padded(images, tokens, itemsize=4)  # two of each norm
        if remat == "full":
            return stream + halves * means
        by_heads = self.padded(images * tokens, a.width // self.shards)
        if remat == "attention":
            return stream + halves * (stream + by_heads + means)
        rows = _up(tokens, ROWS if self.tiled else 1)
        hidden = self.padded(images * rows, a.mlp_dim // self.shards) * (
            1 if a.mlp == "gelu" else 2
        )  # and the gate
        if (
            self.is_unrolled and not self.tiled
        ):  # XLA for GPUs keeps normalised tokens, dropout and GELU's derivative
            return int(stream + halves * (4 * stream + 4 * by_heads + GPU_HIDDEN[remat] * hidden))
        if remat == "dots" or self.is_unrolled:
            return stream + halves * (stream + 4 * by_heads + hidden + means)
        norms = 6 * self.padded(images * rows, a.width, itemsize=4)
        scores = (
            0 if self.has_kernel else sum(self._scores(length) for length in a.attention_lengths)
        )
        return halves * (norms + 2 * stream + 4 * by_heads + 6 * hidden) + scores

    @property
    def is_unrolled(self) -> bool:
        """Return whether XLA sees all blocks at once. It then keeps as much with the policy none as with dots."""
        is_light = self.a.remat in UNROLLED
        return is_light and self.has_kernel and self.a.scan_unroll_on_accelerators >= self.a.depth

    @property
    def has_kernel(self) -> bool:
        """Return whether attention keeps its scores on the chip: by Pallas on TPUs, by cuDNN on GPUs."""
        return self.itemsize == 2 and self.a.block_attention in (
            "auto",
            "pallas" if self.tiled else "cudnn",
        )

    def _scores(self, length: int) -> int:
        """The weights of an attention to so many tokens, in float32 and in the compute dtype; the keys of offsets."""
        a = self.a
        lines = self.images * self.a.sequence_length // length
        rows = lines * (a.num_heads // self.shards) * length
        scores = self.padded(rows, length, itemsize=4) + self.padded(rows, length)
        offsets = (
            self.padded(length * length, a.width // a.num_heads)
            if a.position_embedding == "relative"
            else 0
        )
        return scores * _up(length, ROWS if self.tiled else 1) // length + offsets

    def _unit(self, unit: convolutions.Unit, remat: str) -> int:
        """Return bytes of a residual unit: its input, outputs of its convolutions, or inputs and outputs of its norms.

        Norms before the convolutions see the input and what the first two gave, norms after them what all gave.
        """
        entering = (unit.main[0].size, unit.main[0].inputs)
        inner = [(conv.output_size, conv.outputs // self.shards) for conv in unit.main[:2]]
        if self.a.residual_unit == "preactivation":
            plain = []
            normed = [entering, *inner]
        else:
            plain = [entering]
            normed = inner + [(conv.output_size, conv.outputs) for conv in unit.convolutions[2:]]
        if remat == "full":
            return self._map(*entering)
        if remat in ("dots", "attention"):
            return sum(self._map(*each) for each in (*plain, *normed))
        kernels = sum(conv.parameters for conv in unit.convolutions) * (2 * 4 + self.itemsize)
        return (
            kernels
            + sum(self._map(*each) for each in plain)
            + sum(self._normed(*each) for each in normed)
        )

    def _normed(self, size: tuple[int, int], channels: int) -> int:
        """A map at a group norm: centred and whitened by groups, scaled, in the compute dtype, and ReLU's mask."""
        groups = (self.images, *size, NUM_GROUPS, max(channels // NUM_GROUPS, 1))
        plain = self._map(size, channels)
        float32 = plain * 4 // self.itemsize
        return 2 * self.padded(*groups, itemsize=4) + float32 + plain + float32 // 4

    def _map(self, size: tuple[int, int], channels: int) -> int:
        """A map in the compute dtype; its channels lie along the lanes, unless the images can."""
        lanes = self.images if self.images % LANES == 0 else channels
        values = math.prod(size) * self.images * channels
        return values * self.itemsize * (_up(lanes, LANES) if self.tiled else lanes) // lanes
