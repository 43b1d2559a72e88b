"""Residual units for TPUs, whose maps stay on the chip: a Pallas kernel and its gradient.

One program computes a complete unit of one image: group norms, ReLUs, convolutions and the sum. A
group norm needs the complete map of one image and nothing else, so each map is read once and
written once. XLA reads and writes every map several times, and maps of 64 channels take the memory
and the time of 128. The form on a v5e:

* A map is (R, C), its rows are positions. A 3x3 convolution is a product with nine shifted copies
  of the map, one for each window offset, which are loads from an unaligned row on. The copies for
  the left and right columns are zero where a line of the image ends.
* With 64 channels both halves of the 128 lanes hold the same map: kernels are concatenated with
  themselves, which costs nothing. A selection of lanes then makes one tile of two window offsets.
* The gradient reads what the first two convolutions returned, and the statistics of the group
  norms.
* Gradients of kernels are summed over images on the chip, and transposed, so that the narrow
  operand of their product is the one to transpose.

Legend: B batch, R positions of a map, I E C input, output and inner channels, L max(C, 128), T rows
of the tiles of a 3x3 kernel, N any number.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import ArrayLike

from vit_jax.kernels import CONVOLUTION, STATISTICS
from vit_jax.kernels.devices import device_kind, map_shards
from vit_jax.kernels.unit_backward import run_backward
from vit_jax.kernels.unit_forward import run_forward
from vit_jax.kernels.unit_parameters import Form, UnitParameters
from vit_jax.kernels.unit_sizes import (
    KERNEL_SIZE,
    LANES,
    NUM_OFFSETS,
    Ref,
    ScratchMap,
    UnitSizes,
)

MAX_NUMBERS = 2**20  # values of one image's map; with 3,136 x 256 a program needs 32 MiB
MAX_INNER = 256  # 7x7 maps of 512 channels are not faster than by XLA
DEVICE_KINDS = ("TPU v5 lite", "TPU v5", "TPU v6 lite")  # with enough vector memory, compiled for
VECTOR_MEMORY_BYTES = 60 * 2**20  # limit of a program
Arrays = dict[str, Array]
_float32 = functools.partial(ShapeDtypeStruct, dtype=jnp.float32)


def can_compute(
    shape_HWI: tuple[int, ...],
    inner: int,
    outputs: int,
    stride: int,
    dtype: jnp.dtype,
) -> bool:
    """Return whether a unit fits on the devices of `trace_for` and is faster there than by XLA.

    Args:
      shape_HWI: shape of the input of one image.
      inner: channels between the convolutions.
      outputs: channels of the output.
      stride: stride of the 3x3 convolution.
      dtype: dtype of the maps.
    """
    if dtype != jnp.bfloat16 or device_kind() not in DEVICE_KINDS:
        return False

    height, width, inputs = shape_HWI
    channels = max(inputs, outputs // stride**2)
    largest_map = height * width * channels
    if inner > MAX_INNER or largest_map > MAX_NUMBERS:
        return False
    if stride == 1:
        return inner == LANES // 2 or inner % LANES == 0

    # Lines and columns are split, in maps of complete tiles.
    fills_lanes = inner % LANES == inputs % LANES == 0
    can_split = height % stride == width % stride == 0
    return fills_lanes and can_split


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def compute_bottleneck(
    x_BRI: Array,
    parameters: UnitParameters,
    form: Form,
) -> Array:
    """Return a unit's output, (B, R / stride², E).

    Args:
      x_BRI: maps, line after line; operands of products have their dtype.
      parameters: parameters of the unit, in float32.
      form: properties that fix the program.
    """
    out_BRE, _ = _save(x_BRI, parameters, form)
    return out_BRE


def _save(
    x_BRI: Array,
    parameters: UnitParameters,
    form: Form,
) -> tuple[Array, Any]:
    """Name inner maps and statistics for rematerialisation."""
    call = _UnitCall(x_BRI, parameters, form)
    names = list(call.results)

    def run(
        x_BRI: Array,
        parameters: UnitParameters,
    ) -> tuple[Array, ...]:
        call = _UnitCall(x_BRI, parameters, form)
        return tuple(call.call_forward(x_BRI, parameters))

    argument_layouts = ("map_BRC", "whole")
    result_layouts = ("map_BRC",) * len(names)
    run = map_shards(run, argument_layouts, result_layouts)
    out_BRE, *others = run(x_BRI, parameters)

    kept = {}
    for name, x in zip(names[1:], others, strict=True):
        kind = CONVOLUTION if name.startswith("kept") else STATISTICS
        kept[name] = checkpoint_name(x, kind)
    return out_BRE, (x_BRI, parameters, kept)


def _differentiate(
    form: Form,
    saved: Any,
    gradient_BRE: Array,
) -> tuple[Array, UnitParameters]:
    """Return the gradients of the input and of the parameters."""

    def run(
        x_BRI: Array,
        parameters: UnitParameters,
        others: Arrays,
    ) -> tuple[Array, Arrays]:
        call = _UnitCall(x_BRI, parameters, form)
        return call.call_backward(x_BRI, parameters, others)

    x_BRI, parameters, kept = saved
    others = kept | {"dout": gradient_BRE}
    argument_layouts = ("map_BRC", "whole", "map_BRC")
    result_layouts = ("map_BRC", "map_BRC")
    run = map_shards(run, argument_layouts, result_layouts)
    dx_BRI, sums_of_cores = run(x_BRI, parameters, others)

    sums = {name: sum_of_cores.sum(0) for name, sum_of_cores in sums_of_cores.items()}
    call = _UnitCall(x_BRI, parameters, form)
    return dx_BRI, call.collect(sums)


compute_bottleneck.defvjp(_save, _differentiate)


class _UnitCall(UnitSizes):
    """Calls of the kernel, and the forms that parameters and gradients of a unit have in it.

    Attributes:
      batch: number of images.
      cores: cores that share the images, each with separate sums; v4 and v5p have two.
      num_outer: rows of the outer norms, two for each norm.
      rows_of_kernel: rows of the tiles of a 3x3 kernel, T.
      results: shapes and dtypes of the results of the forward program for one image, by name.
    """

    def __init__(
        self,
        x_BRI: Array,
        parameters: UnitParameters,
        form: Form,
    ):
        self.batch, rows, inputs = x_BRI.shape
        inner, outputs = parameters.conv3_CE.shape
        super().__init__(
            rows,
            (inputs, inner, outputs),
            x_BRI.dtype,
            has_shortcut=parameters.shortcut_IE is not None,
            form=form,
        )
        self.num_outer = len(parameters.outer_norms_2N)
        self.cores = math.gcd(self.batch, 2)
        num_tiles = math.ceil(NUM_OFFSETS / self.copies)
        self.rows_of_kernel = num_tiles * self.lanes
        self.results = self._describe_results()

    def _describe_results(self) -> dict[str, ShapeDtypeStruct]:
        """Return the results of the forward program by name: output, inner maps, statistics."""
        results = {"out": self._describe_map(self.out_rows, self.outputs)}
        if self.copies > 1:
            results["kept"] = self._describe_map(self.rows, 2 * self.inner)
        else:
            results["kept1"] = self._describe_map(self.rows, self.inner)
            results["kept2"] = self._describe_map(self.out_rows, self.inner)

        results["outer_statistics"] = _float32((self.num_outer, self.outer))
        results["inner_statistics"] = _float32((4, self.lanes))
        return results

    def _describe_map(self, rows: int, channels: int) -> ShapeDtypeStruct:
        """Return shape and dtype of a map of one image."""
        return ShapeDtypeStruct((rows, channels), self.dtype)

    def call_forward(
        self,
        x_BRI: Array,
        parameters: UnitParameters,
    ) -> list[Array]:
        """Return `results`: the output, the two inner maps, and the statistics of norms."""
        constants = self._lay_out_norms(parameters)
        constants |= self._lay_out_kernels(
            parameters.conv1_IC,
            parameters.conv2_HWIO,
            parameters.conv3_CE,
            parameters.shortcut_IE,
        )

        scratch = {
            "y1": ScratchMap.describe(self.rows, self.lanes),
            "y2": ScratchMap.describe(self.out_rows, self.lanes),
            "z": self._describe_shifted_map(self.num_planes),
        }
        if not self.is_preactivated:
            scratch["y3"] = self._describe_outer_map()
        scratch |= self._describe_shortcut_maps()

        return self._call(
            run_forward,
            maps={"x": x_BRI},
            constants=constants,
            results=self.results,
            sums={},
            scratch=scratch,
        )

    def call_backward(
        self,
        x_BRI: Array,
        parameters: UnitParameters,
        others: Mapping[str, Array],
    ) -> tuple[Array, Arrays]:
        """Return the gradient of the input, and the sums by name that `collect` reads."""
        sums = {
            "grad_outer_norms": (self.num_outer, self.outer),
            "grad_inner_norms": (4, self.lanes),
            "grad_conv1": (self.inner, self.inputs),
            "grad_conv2": (self.inner, self.rows_of_kernel),
            "grad_conv3": (self.inner, self.outputs),
        }
        if self.has_shortcut:
            sums["grad_shortcut"] = (self.inputs, self.outputs)

        dx = self._describe_map(self.rows, self.inputs)
        dx_BRI, *arrays = self._call(
            run_backward,
            maps={"x": x_BRI, **others},
            constants=self._lay_out_backward_constants(parameters),
            results={"dx": dx},
            sums=sums,
            scratch=self._describe_backward_scratch(),
        )
        sums_by_name = dict(zip(sums, arrays, strict=True))
        return dx_BRI, sums_by_name

    def _lay_out_backward_constants(self, parameters: UnitParameters) -> Arrays:
        """Return norms, masks and transposed kernels by name."""
        turned_HWIO = jnp.flip(parameters.conv2_HWIO, (0, 1))
        turned_HWOI = turned_HWIO.swapaxes(2, 3)
        shortcut_EI = None
        if parameters.shortcut_IE is not None:
            shortcut_EI = parameters.shortcut_IE.T

        constants = self._lay_out_norms(parameters)
        constants |= self._lay_out_kernels(
            parameters.conv3_CE.T,
            turned_HWOI,
            parameters.conv1_IC.T,
            shortcut_EI,
        )
        if self.is_preactivated:
            return constants

        # A post-activated unit computes the last convolution and the shortcut again.
        again = self._lay_out_kernels(
            parameters.conv1_IC,
            parameters.conv2_HWIO,
            parameters.conv3_CE,
            parameters.shortcut_IE,
        )
        constants["outward_again"] = again["outward"]
        if self.has_shortcut:
            constants["shortcut_again"] = again["shortcut"]
        return constants

    def _describe_backward_scratch(self) -> dict[str, Any]:
        """Return the arrays of the backward program in the memory of the chip."""
        scratch = {
            "g": ScratchMap.describe(self.rows, self.lanes),
            "z": self._describe_shifted_map(self.num_planes),
            "dy2": self._describe_shifted_map(1),
            "outer_g": self._describe_outer_map(),
        }
        scratch |= self._describe_shortcut_maps()
        if self.is_strided:
            scratch["y1"] = ScratchMap.describe(self.rows, self.lanes)
            scratch["plane"] = ScratchMap.describe(self.out_rows, self.lanes)
        if not self.is_preactivated:
            scratch["y3"] = self._describe_outer_map()
        return scratch

    def _describe_shifted_map(self, planes: int) -> Any:
        """Return planes of an inner map with borders, one copy for each column of a window."""
        rows = self.out_rows + 2 * self.border
        shape = (planes, KERNEL_SIZE, rows, self.lanes)
        return pltpu.VMEM(shape, jnp.float32)

    def _describe_outer_map(self) -> Any:
        """Return a map of the size of the outer norm's map."""
        shape = (self.outer_rows, self.outer)
        return pltpu.VMEM(shape, self.dtype)

    def _describe_shortcut_maps(self) -> dict[str, Any]:
        """Return the input of a strided shortcut, complete and where it is read."""
        if not self.is_strided:
            return {}
        return {
            "wide": ScratchMap.describe(self.rows, self.inputs),
            "narrow": ScratchMap.describe(self.out_rows, self.inputs),
        }

    def collect(self, sums: Mapping[str, Array]) -> UnitParameters:
        """Return these gradients in the form of the parameters."""
        inner = self.inner
        conv2_CT = sums["grad_conv2"]
        conv2_CT = conv2_CT[:, : NUM_OFFSETS * inner]
        conv2_OHWI = conv2_CT.reshape(inner, KERNEL_SIZE, KERNEL_SIZE, inner)
        conv1_IC = sums["grad_conv1"].T
        conv2_HWIO = conv2_OHWI.transpose(1, 2, 3, 0)

        inner_norms_4L = sums["grad_inner_norms"]
        return UnitParameters(
            conv1_IC=conv1_IC,
            conv2_HWIO=conv2_HWIO,
            conv3_CE=sums["grad_conv3"],
            shortcut_IE=sums.get("grad_shortcut"),
            outer_norms_2N=sums["grad_outer_norms"],
            inner_norms_4C=inner_norms_4L[:, :inner],
        )

    def _lay_out_norms(self, parameters: UnitParameters) -> Arrays:
        """Return the norms, and two masks: without the first and without the last output column."""
        column_R = jnp.arange(self.out_rows) % self.out_width
        last_column = self.out_width - 1
        is_after_first_R = column_R != 0
        is_before_last_R = column_R != last_column
        is_inside_2R = jnp.stack([is_after_first_R, is_before_last_R])
        inside_2R = is_inside_2R.astype(jnp.float32)

        shape_2RL = (2, self.out_rows, self.lanes)
        inside_2RL = jnp.broadcast_to(inside_2R[..., None], shape_2RL)
        return {
            "outer_norms": parameters.outer_norms_2N,
            "inner_norms": self._copy_to_lanes(parameters.inner_norms_4C),
            "inside": inside_2RL,
        }

    def _lay_out_kernels(
        self,
        inward: Array,
        middle: Array,
        outward: Array,
        shortcut: Array | None,
    ) -> Arrays:
        """Return kernels in the dtype of maps, for both halves of the lanes.

        Args:
          inward: kernel from the channels of the input, or the gradient of the output, (N, C).
          middle: kernel between inner channels, (3, 3, C, C).
          outward: kernel from inner channels, (C, N).
          shortcut: kernel of the shortcut, if it has one.
        """
        middle_TC = middle.reshape(-1, self.inner)
        middle_TC = _append_zeros(middle_TC, self.rows_of_kernel)
        outward = _append_zeros(outward, self.lanes)  # takes the first half of the lanes
        kernels = {
            "inward": self._copy_to_lanes(inward),
            "middle": self._copy_to_lanes(middle_TC),
            "outward": outward,
        }
        if shortcut is not None:
            kernels["shortcut"] = shortcut

        for name, kernel in kernels.items():
            kernels[name] = kernel.astype(self.dtype)
        return kernels

    def _copy_to_lanes(self, x_NC: Array) -> Array:
        """Return an array for both halves of the lanes, (N, L)."""
        return jnp.concatenate([x_NC] * self.copies, 1)

    def _call(
        self,
        body: Callable[[SimpleNamespace, UnitSizes], None],
        *,
        maps: Mapping[str, Array],
        constants: Mapping[str, Array],
        results: Mapping[str, ShapeDtypeStruct],
        sums: Mapping[str, tuple[int, int]],
        scratch: Mapping[str, Any],
    ) -> list[Array]:
        """Run `body` for each image, with a reference by each of these names.

        Args:
          body: called with the references and with sizes.
          maps: (B, R, N), of which a program reads its image.
          constants: read by all programs.
          results: shapes of the results of each image.
          sums: shapes of sums over images, in float32.
          scratch: arrays in the memory of the chip.
        """
        names = (*maps, *constants, *results, *sums, *scratch)

        def run(*references: Ref) -> None:
            body(_name_references(names, references), self)

        in_specs = []
        for x in maps.values():
            shape_of_image = x.shape[1:]
            in_specs.append(self._make_image_block(shape_of_image))
        for x in constants.values():
            in_specs.append(_make_complete_block(x))

        out_specs = []
        out_shape = []
        for result in results.values():
            shape = (self.batch, *result.shape)
            out_specs.append(self._make_image_block(result.shape))
            out_shape.append(ShapeDtypeStruct(shape, result.dtype))
        for sum_shape in sums.values():
            out_specs.append(_make_core_block(sum_shape))
            out_shape.append(_float32((self.cores, *sum_shape)))

        compiler_params = pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=VECTOR_MEMORY_BYTES,
        )
        call = pl.pallas_call(
            run,
            grid=(self.cores, self.batch // self.cores),
            in_specs=in_specs,
            out_specs=out_specs,
            out_shape=out_shape,
            scratch_shapes=list(scratch.values()),
            compiler_params=compiler_params,
            interpret=self.interpret,
            name="unit_backward" if sums else "unit_forward",
            metadata={"programs": str(self.batch)},  # `plan` counts their cycles by it
        )
        arrays = (*maps.values(), *constants.values())
        return list(call(*arrays))

    def _make_image_block(self, shape: tuple[int, ...]) -> pl.BlockSpec:
        """Return the block of a map that the program of an image reads or writes."""
        images_per_core = self.batch // self.cores

        def find_image(core: ArrayLike, image: ArrayLike) -> tuple:
            return core * images_per_core + image, 0, 0

        return pl.BlockSpec((None, *shape), find_image)


def _append_zeros(x_RN: Array, num_rows: int) -> Array:
    """Return an array with zeros below its rows, up to this number of rows."""
    num_missing = num_rows - len(x_RN)
    return jnp.pad(x_RN, ((0, num_missing), (0, 0)))


def _name_references(
    names: Sequence[str],
    references: Sequence[Ref],
) -> SimpleNamespace:
    """Return references by name; the arrays of a scratch map become one map."""
    named_references = {}
    for name, ref in zip(names, references, strict=True):
        if isinstance(ref, list):
            ref = ScratchMap(ref)
        named_references[name] = ref
    return SimpleNamespace(**named_references)


def _make_core_block(shape: tuple[int, ...]) -> pl.BlockSpec:
    """Return the block of sums that all programs of a core add to."""

    def find_core(core: ArrayLike, image: ArrayLike) -> tuple:
        return core, 0, 0

    return pl.BlockSpec((None, *shape), find_core)


def _make_complete_block(x: Array) -> pl.BlockSpec:
    """Return the block of an array that all programs read completely."""
    origin = (0,) * x.ndim
    return pl.BlockSpec(x.shape, lambda core, image: origin)
