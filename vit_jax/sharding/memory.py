"""Memory of a training step by formula: arrays in tiles, kept activations, temporary arrays.

The layers' equations and the rematerialisation policy say which arrays the backward pass needs.
How much more exists at the same time depends on the compiler: the constants below are fitted to
compiled steps (table in `bench/PLANS.md`). No jax here.

Legend: S tokens a block sees, D width, M mlp_dim, T heads.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from vit_jax.config.architecture import UNROLLED, Architecture
from vit_jax.config.sizes import NUM_GROUPS
from vit_jax.sharding import convolutions


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one chip at the step's peak.

    Attributes:
      parameters: the network's parameters.
      optimizer: moments and counters.
      average: the Polyak average; 0 without one.
      batch: images, labels and masks.
      activations: arrays that the loops over layers keep for the backward pass.
      gradients: arrays that the backward loops collect.
      temporary: work of a layer, copies in the compute dtype, layers outside of loops, logits,
        gaps.
      program: the instructions.
    """

    parameters: int
    optimizer: int
    average: int
    batch: int
    activations: int
    gradients: int
    temporary: int
    program: int

    @property
    def state(self) -> int:
        """Bytes of the training state."""
        return self.parameters + self.optimizer + self.average

    @property
    def total(self) -> int:
        """Bytes of all arrays and of the program."""
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
        f"{custom}: no formula gives the memory of user-defined components. "
        "Use the compiled step's figures."
    )


LANES = 128
ROWS = 8
"""A tile of a TPU's memory has this many rows and lanes of 32-bit values."""
_VECTORS = (128, 256, 512, 1024)
"""Lengths of the tiles of an array of one dimension."""

WORKING = {"none": 1.75, "dots": 1.25, "attention": 1.2, "full": 1.2}
"""Memory that one block works with, as a multiple of what `none` keeps of it, by policy."""
WORKING_WITH_KERNEL = {"tpu": 0.8, "gpu": 0.52}
"""The same multiple if scores stay on the chip and either a policy recomputes or no layer is in a
loop."""
WORKING_UNIT = {"none": 1.0, "dots": 0.8, "attention": 0.8, "full": 0.9}
"""The multiple of `WORKING` for a residual unit."""
ON_CHIP = 300_000_000
"""Bytes of temporary arrays that a TPU keeps on the chip."""
COPIES = {"none": 0.3, "dots": 1.0, "attention": 0.17, "full": 0.17}
"""Copies of gradients by policy, as a fraction of the gradients of the backward pass."""
GPU_HIDDEN = {"none": 3.4, "dots": 2.7}
"""Arrays of hidden units that XLA for GPUs keeps of a block outside of loops: values, derivatives,
masks."""
GPU_ACTIVATED = 1.0
"""Arrays of activated units among them that a block does not keep if it computes them again."""
DELAYED = 0.6
"""Gradients outside of loops that wait on TPUs for sums, as a fraction of activations.

Each chip keeps a part of these sums. Fitted for v5e, where products run beside them
(`sharding/mesh.py`); assumed for other TPUs.
"""
SUMS = 1.5
"""Gradients summed over micro-batches, and copies of them, as a multiple of the gradients."""
GATHERED = 1.7
"""Copies, float32, of parameters that FSDP has gathered, and of their gradients."""


def count_padded_bytes(shape: tuple[int, ...], itemsize: int, *, tiled: bool = True) -> int:
    """Return the bytes of an array; with tiles, in the layout that needs the least padding."""
    if not tiled or not shape:
        return math.prod(shape) * itemsize
    if len(shape) == 1:
        tile = _find_tile(shape[0], _VECTORS)
        return _round_up(shape[0], tile) * itemsize

    pairs = itertools.permutations(range(len(shape)), 2)
    return min(_count_in_tiles(shape, rows, lanes) for rows, lanes in pairs) * itemsize


def _count_in_tiles(shape: tuple[int, ...], rows: int, lanes: int) -> int:
    """Return the number of values of an array with padding.

    The dimension `lanes` is the minor one and `rows` the next; few rows have smaller tiles.
    """
    num_rows = shape[rows]
    num_lanes = shape[lanes]
    height = _find_tile(num_rows, (1, 2, 4, ROWS))
    others = math.prod(shape) // (num_rows * num_lanes or 1)
    return others * _round_up(num_rows, height) * _round_up(num_lanes, LANES)


def _find_tile(length: int, sizes: tuple[int, ...]) -> int:
    """Return the first size of a tile that holds a length, or the last one."""
    for size in sizes:
        if length <= size:
            return size
    return sizes[-1]


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def count_passing_bytes(
    architecture: Architecture,
    *,
    images: int,
    image_size: tuple[int, int] | None = None,
    gradient_bytes: int,
    layer_parameters: int,
    gathered_parameters: int = 0,
    trained_blocks: int | None = None,
    recomputes_activation: bool = False,
    is_accumulated: bool = False,
    model_shards: int = 1,
    tiled: bool = True,
) -> dict[str, int]:
    """Return the bytes on one device that exist within a step alone.

    They are those of "activations", "gradients" and "temporary" arrays at the peak: the layer of
    the backward pass where kept activations and working memory are most.

    Args:
      architecture: the network, with its rematerialisation policy.
      images: number of images of one micro-batch, on one device.
      image_size: height and width before patches are dropped; None: those of the network.
      gradient_bytes: bytes of this device's shard of all gradients, float32.
      layer_parameters: parameters, on one device, of the layers that loops run and copy.
      gathered_parameters: those of one layer and outside of layers, which FSDP gathers at one time.
      trained_blocks: number of blocks with a backward pass, the last ones, if no other layer has one.
      recomputes_activation: MLPs keep no activated units, as with LoRA.
      is_accumulated: gradients of several micro-batches are summed up.
      model_shards: devices that share heads and hidden units.
      tiled: memory is in a TPU's tiles.

    Raises:
      ValueError: a component is user-defined.
    """
    sizes = _Sizes(architecture, images, model_shards, tiled, trained_blocks, recomputes_activation)
    remat = architecture.remat
    if sizes.is_unrolled and not tiled:
        # XLA for GPUs converts them to float32 in the kernels of the update.
        gradient_bytes = gradient_bytes * sizes.itemsize // 4
    activations, temporary = _find_peak(sizes, remat)
    temporary += COPIES[remat] * gradient_bytes
    temporary += GATHERED * 4 * gathered_parameters

    layer_copies = sizes.count_layer_copies(layer_parameters)
    if remat == "none":  # copies are stacked beside the activations
        activations += layer_copies
    elif sizes.itemsize < 4:
        temporary += layer_copies

    if gathered_parameters and tiled and sizes.is_unrolled:
        temporary += DELAYED * sum(sizes.kept(remat))
    temporary += sizes.count_ends(image_size or architecture.image_size)
    if is_accumulated:
        temporary += SUMS * gradient_bytes
    return {
        "activations": activations,
        "gradients": gradient_bytes,
        "temporary": int(temporary),
    }


def _find_peak(sizes: "_Sizes", remat: str) -> tuple[int, float]:
    """Return the kept activations and the working memory of the layer with the largest sum."""
    peak: tuple[int, float] = (0, 0.0)
    layers = zip(itertools.accumulate(sizes.kept(remat)), sizes.working(remat), strict=True)
    for kept, working in layers:
        if kept + working > sum(peak):
            peak = (kept, working)
    return peak


def count_kept_bytes(
    architecture: Architecture,
    images: int,
    *,
    model_shards: int = 1,
    tiled: bool = True,
) -> int:
    """Return the bytes that the forward pass keeps for the backward pass, in all layers."""
    return sum(_Sizes(architecture, images, model_shards, tiled).kept(architecture.remat))


def is_unrolled(architecture: Architecture, *, tiled: bool) -> bool:
    """Return True if XLA sees all blocks at once, with attention in a kernel; `tiled` on TPUs."""
    return _Sizes(architecture, 1, 1, tiled).is_unrolled


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Bytes of a network's arrays on one of the devices that share its model.

    Attributes:
      a: the network.
      images: number of images of a micro-batch on one device.
      shards: devices that share heads and hidden units.
      tiled: memory is in a TPU's tiles.
      trained_blocks: number of blocks that keep activations; None: all layers keep some.
      recomputes_activation: MLPs keep no activated units.
    """

    a: Architecture
    images: int
    shards: int
    tiled: bool
    trained_blocks: int | None = None
    recomputes_activation: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of a value in the compute dtype."""
        return {"float32": 4, "bfloat16": 2}[self.a.compute_dtype]

    def count_padded(self, *dims: int, itemsize: int | None = None) -> int:
        """Return the bytes of an array; values are in the compute dtype unless stated."""
        return count_padded_bytes(dims, itemsize or self.itemsize, tiled=self.tiled)

    def count_layer_copies(self, num_parameters: int) -> int:
        """Return the bytes of all layers' parameters that the backward pass reads."""
        num_bytes = self.itemsize * num_parameters
        if self.trained_blocks is None:
            return num_bytes
        return num_bytes * self.trained_blocks // max(self.a.depth, 1)

    def count_ends(self, image_size: tuple[int, int]) -> int:
        """Return the bytes of the pixels, and of the logits with their gradient."""
        pixels = self.count_padded(self.images * self.a.channels, *image_size)
        if self.trained_blocks is None:
            pixels *= 2  # they are kept for the gradient of the first layer
        logits = self.count_padded(self.images, self.a.num_classes or 1, itemsize=4)
        return pixels + 2 * logits

    def kept(self, remat: str) -> Iterator[int]:
        """Yield the bytes that this policy keeps of the root, each residual unit and each block."""
        require_formulas(self.a)
        if self.trained_blocks is not None:
            yield from itertools.repeat(self._count_block(remat), self.trained_blocks)
            return
        if self.a.has_resnet:
            # No policy recomputes the root, nor its norm, which only postactivation has.
            root = convolutions.root(self.a)
            if self.a.residual_unit == "preactivation":
                yield self._count_map(root.output_size, root.outputs)
            else:
                yield self._count_normed_map(root.output_size, root.outputs)
            for unit in convolutions.residual_units(self.a):
                yield self._count_unit(unit, remat)
        if self.a.has_transformer:
            yield from itertools.repeat(self._count_block(remat), self.a.depth)

    def working(self, remat: str) -> list[float]:
        """Return the bytes that each layer works with in the backward pass, beside kept ones."""
        platform = "tpu" if self.tiled else "gpu"
        on_chip = ON_CHIP if self.tiled else 0
        block_share = WORKING[remat]
        if self.has_kernel and (remat != "none" or self.is_unrolled):
            block_share = WORKING_WITH_KERNEL[platform]

        everything = list(self.kept("none"))
        num_units = max(0, len(everything) - self.a.depth)
        shares = [WORKING_UNIT[remat]] * num_units
        shares += [block_share] * (len(everything) - num_units)
        sizes = zip(shares, everything, strict=True)
        return [max(0, share * size - on_chip) for share, size in sizes]

    def _count_block(self, remat: str) -> int:
        """Return the bytes that this policy keeps of a block, which attends once or twice."""
        a = self.a
        images = self.images
        tokens = a.sequence_length
        halves = len(self.a.attention_lengths)
        stream = self.count_padded(images * tokens, a.width)
        means = 4 * self.count_padded(images, tokens, itemsize=4)  # two of each norm
        if remat == "full":
            return stream + halves * means

        by_heads = self.count_padded(images * tokens, a.width // self.shards)
        if remat == "attention":
            return stream + halves * (stream + by_heads + means)

        rows = self._round_up_rows(tokens)
        activated = self.count_padded(images * rows, a.mlp_dim // self.shards)
        hidden = activated
        if a.mlp != "gelu":
            hidden *= 2  # with the gate
        if self.is_unrolled and not self.tiled:
            # XLA for GPUs keeps normalised tokens, dropout and GELU's derivative.
            kept_hidden = GPU_HIDDEN[remat] * hidden
            if self.recomputes_activation:
                kept_hidden -= GPU_ACTIVATED * activated
            return int(stream + halves * (4 * stream + 4 * by_heads + kept_hidden))
        if self.is_unrolled and a.mlp == "gelu" and a.gelu == "exact":
            hidden += activated  # XLA for TPUs computes the form with tanh again
        if remat == "dots" or self.is_unrolled:
            return stream + halves * (stream + 4 * by_heads + hidden + means)

        norms = 6 * self.count_padded(images * rows, a.width, itemsize=4)
        scores = 0
        if not self.has_kernel:
            scores = sum(map(self._count_scores, a.attention_lengths))
        return halves * (norms + 2 * stream + 4 * by_heads + 6 * hidden) + scores

    @property
    def is_unrolled(self) -> bool:
        """True if XLA sees all blocks at once.

        It then keeps as much with the policy none as with dots.
        """
        is_light = self.a.remat in UNROLLED
        return is_light and self.has_kernel and self.a.scan_unroll_on_accelerators >= self.a.depth

    @property
    def has_kernel(self) -> bool:
        """True if attention keeps its scores on the chip: by Pallas on TPUs, by cuDNN on GPUs."""
        kernel = "pallas" if self.tiled else "cudnn"
        return self.itemsize == 2 and self.a.block_attention in ("auto", kernel)

    def _round_up_rows(self, length: int) -> int:
        """Return a number of rows with the padding of tiles."""
        if not self.tiled:
            return length
        return _round_up(length, ROWS)

    def _count_scores(self, length: int) -> int:
        """Return the bytes of attention weights over `length` tokens, and of the keys of offsets.

        The weights exist in float32 and in the compute dtype.
        """
        a = self.a
        lines = self.images * a.sequence_length // length
        rows = lines * (a.num_heads // self.shards) * length
        scores = self.count_padded(rows, length, itemsize=4) + self.count_padded(rows, length)
        scores = scores * self._round_up_rows(length) // length

        if a.position_embedding != "relative":
            return scores
        return scores + self.count_padded(length * length, a.width // a.num_heads)

    def _count_unit(self, unit: convolutions.Unit, remat: str) -> int:
        """Return the bytes that this policy keeps of a residual unit.

        They are its input, the outputs of its convolutions, or the inputs and outputs of its norms.
        Norms before the convolutions see the input and the outputs of the first two, norms after
        them all outputs.
        """
        entering = (unit.main[0].size, unit.main[0].inputs)
        if remat == "full":
            return self._count_map(*entering)

        plain = []
        normed = [(conv.output_size, conv.outputs // self.shards) for conv in unit.main[:2]]
        if self.a.residual_unit == "preactivation":
            normed.append(entering)
        else:
            plain.append(entering)
            for conv in unit.convolutions[2:]:
                normed.append((conv.output_size, conv.outputs))
        if remat in ("dots", "attention"):
            return sum(itertools.starmap(self._count_map, plain + normed))

        num_parameters = sum(conv.parameters for conv in unit.convolutions)
        kernels = num_parameters * (2 * 4 + self.itemsize)
        maps = sum(itertools.starmap(self._count_map, plain))
        normed_maps = sum(itertools.starmap(self._count_normed_map, normed))
        return kernels + maps + normed_maps

    def _count_normed_map(self, size: tuple[int, int], channels: int) -> int:
        """Return the bytes of a map at a group norm.

        They are: centred and whitened by groups, scaled, in the compute dtype, and ReLU's mask.
        """
        groups = (self.images, *size, NUM_GROUPS, max(channels // NUM_GROUPS, 1))
        by_groups = self.count_padded(*groups, itemsize=4)
        plain = self._count_map(size, channels)
        float32 = plain * 4 // self.itemsize
        mask = float32 // 4
        return 2 * by_groups + float32 + plain + mask

    def _count_map(self, size: tuple[int, int], channels: int) -> int:
        """Return the bytes of a map in the compute dtype.

        On TPUs its channels lie along the lanes, unless the images can.
        """
        num_bytes = math.prod(size) * self.images * channels * self.itemsize
        if not self.tiled:
            return num_bytes
        lanes = channels
        if self.images % LANES == 0:
            lanes = self.images
        return num_bytes * _round_up(lanes, LANES) // lanes
