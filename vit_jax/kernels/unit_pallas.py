"""Bottleneck units of ResNets for TPUs, whose maps stay on the chip: a Pallas kernel and its gradient.

One program computes a complete unit of one image: group norms, ReLUs, convolutions and the sum. A group norm needs the
complete map of one image and nothing else, so each map is read once and written once. XLA reads and writes every map
several times, and maps of 64 channels take the memory and the time of 128. The form on a v5e:

* A map is (R, C), its rows are positions. A 3x3 convolution is a product with nine shifted copies of the map, which are
  loads from an unaligned row on. The copies for the left and right columns are zero where a line of the image ends.
* With 64 channels both halves of the 128 lanes hold the same map: kernels are concatenated with themselves, which costs
  nothing. A selection of lanes then makes one tile of two taps of a 3x3 convolution.
* The gradient reads what the first two convolutions returned, and the statistics of the group norms.
* Gradients of kernels are summed over images on the chip, transposed: so the narrow operand is the one to transpose.

Legend: B batch, R positions of a map, I E C input, output and inner channels, L max(C, 128), T rows of the tiles of a
3x3 kernel, N any number.
"""

import functools
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vit_jax.kernels.devices import device_kind, on_shards
from vit_jax.kernels.unit_programs import (
    LANES,
    NUM_TAPS,
    Form,
    ScratchMap,
    Sizes,
    backward,
    forward,
)

MAX_NUMBERS = 2**20  # of a map of one image; with 3,136 x 256 a program needs 32 MiB
MAX_INNER = 256  # 7x7 maps of 512 channels are not faster than by XLA
DEVICE_KINDS = (
    "TPU v5 lite",
    "TPU v5",
    "TPU v6 lite",
)  # those with as much vector memory, and compiled for
VECTOR_MEMORY = 60 * 2**20  # bytes that a program may use
CONVOLUTION, STATISTICS = (
    "convolution",
    "statistics",
)  # names of results, by which rematerialisation may keep them
_float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)


class Parameters(NamedTuple):
    """Parameters of a unit in float32: kernels are standardised, a norm is its scale and its bias.

    The outer norm is the first one of a pre-activated unit (N = I), and the last one of a post-activated unit (N = E),
    whose shortcut has a norm too.
    """

    outer_norms_2N: jax.Array  # (4, E) with the norm of the shortcut
    inner_norms_4C: jax.Array
    conv1_IC: jax.Array
    conv2_HWIO: jax.Array
    conv3_CE: jax.Array
    shortcut_IE: jax.Array | None  # None: I = E, and the input is added


def can_compute(
    shape_HWI: tuple[int, ...], inner: int, outputs: int, stride: int, dtype: jnp.dtype
) -> bool:
    """Return whether a unit fits on the devices of `placed_by` and is faster there than by XLA.

    `shape_HWI` is that of an input, `inner` and `outputs` are channels.
    """
    if dtype != jnp.bfloat16 or device_kind() not in DEVICE_KINDS:
        return False
    height, width, inputs = shape_HWI
    if stride == 1:
        has_tiles = inner == LANES // 2 or inner % LANES == 0
    else:  # splits the lines and the columns, in maps of complete tiles
        has_tiles = inner % LANES == inputs % LANES == height % stride == width % stride == 0
    largest = height * width * max(inputs, outputs // stride**2)
    return has_tiles and inner <= MAX_INNER and largest <= MAX_NUMBERS


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def bottleneck(x_BRI: jax.Array, parameters: Parameters, form: Form) -> jax.Array:
    """Return a unit's output, (B, R / stride², E).

    `x_BRI` are maps, line after line; operands of products have their dtype.
    """
    return _save(x_BRI, parameters, form)[0]


def _save(x_BRI: jax.Array, parameters: Parameters, form: Form) -> Any:
    names = _Unit(x_BRI, parameters, form).results

    def run(x_BRI: jax.Array, parameters: Parameters) -> tuple[jax.Array, ...]:
        return tuple(_Unit(x_BRI, parameters, form).run_forward(x_BRI, parameters))

    run = on_shards(run, ("map_BRC", "whole"), ("map_BRC",) * len(names))
    found = dict(zip(names, run(x_BRI, parameters), strict=True))
    out_BRE = found.pop("out")
    kept = {
        name: checkpoint_name(x, CONVOLUTION if name.startswith("kept") else STATISTICS)
        for name, x in found.items()
    }
    return out_BRE, (x_BRI, parameters, kept)


def _differentiate(form: Form, saved: Any, gradient_BRE: jax.Array) -> Any:
    def run(
        x_BRI: jax.Array, parameters: Parameters, others: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        return _Unit(x_BRI, parameters, form).run_backward(x_BRI, parameters, others)

    x_BRI, parameters, kept = saved
    run = on_shards(run, ("map_BRC", "whole", "map_BRC"), ("map_BRC",) * 2)
    dx_BRI, sums = run(x_BRI, parameters, kept | {"dout": gradient_BRE})
    return dx_BRI, _Unit(x_BRI, parameters, form).collect(
        {name: sum_.sum(0) for name, sum_ in sums.items()}
    )


bottleneck.defvjp(_save, _differentiate)


class _Unit(Sizes):
    """A unit, and the forms that its parameters and gradients have in the kernel."""

    def __init__(self, x_BRI: jax.Array, parameters: Parameters, form: Form):
        self.batch, rows, inputs = x_BRI.shape
        has_shortcut = parameters.shortcut_IE is not None
        (inner, outputs) = parameters.conv3_CE.shape
        super().__init__(rows, (inputs, inner, outputs), x_BRI.dtype, has_shortcut, form)
        self.num_outer = len(parameters.outer_norms_2N)
        self.cores = math.gcd(self.batch, 2)  # v4 and v5p have two, each with its own sums
        self.rows_of_kernel = math.ceil(NUM_TAPS / self.copies) * self.lanes
        if self.copies > 1:
            kept = {"kept": (rows, 2 * inner)}
        else:
            kept = {"kept1": (rows, inner), "kept2": (self.out_rows, inner)}
        maps = {"out": (self.out_rows, outputs)} | kept
        self.results = {
            name: jax.ShapeDtypeStruct(shape, self.dtype) for name, shape in maps.items()
        } | {
            "outer_statistics": _float32((self.num_outer, self.outer)),
            "inner_statistics": _float32((4, self.lanes)),
        }

    def run_forward(self, x_BRI: jax.Array, p: Parameters) -> list[jax.Array]:
        """Return `results`: the output, the two inner maps, and the norms' statistics."""
        return self._call(
            forward,
            maps={"x": x_BRI},
            constants=self._norms(p)
            | self._kernels(p.conv1_IC, p.conv2_HWIO, p.conv3_CE, p.shortcut_IE),
            results=self.results,
            sums={},
            scratch={
                "y1": ScratchMap.shapes(self.rows, self.lanes),
                "y2": ScratchMap.shapes(self.out_rows, self.lanes),
                "z": self._shifted_map(self.num_planes),
            }
            | ({} if self.is_preactivated else {"y3": self._outer_map()})
            | self._shortcut_maps(),
        )

    def run_backward(
        self, x_BRI: jax.Array, p: Parameters, others: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the gradient of the input and, by name, sums that `collect` makes gradients of parameters from."""
        sums = {
            "of_outer_norms": (self.num_outer, self.outer),
            "of_inner_norms": (4, self.lanes),
            "of_conv1": (self.inner, self.inputs),
            "of_conv2": (self.inner, self.rows_of_kernel),
            "of_conv3": (self.inner, self.outputs),
        } | ({"of_shortcut": (self.inputs, self.outputs)} if self.has_shortcut else {})
        turned_HWOI = jnp.flip(p.conv2_HWIO, (0, 1)).swapaxes(2, 3)
        shortcut_EI = None if p.shortcut_IE is None else p.shortcut_IE.T
        constants = self._norms(p) | self._kernels(
            p.conv3_CE.T, turned_HWOI, p.conv1_IC.T, shortcut_EI
        )
        scratch = {
            "g": ScratchMap.shapes(self.rows, self.lanes),
            "z": self._shifted_map(self.num_planes),
            "dy2": self._shifted_map(1),
            "outer_g": self._outer_map(),
        } | self._shortcut_maps()
        if self.is_strided:
            scratch |= {
                "y1": ScratchMap.shapes(self.rows, self.lanes),
                "plane": ScratchMap.shapes(self.out_rows, self.lanes),
            }
        if not self.is_preactivated:  # computes the last convolution again
            again = self._kernels(p.conv1_IC, p.conv2_HWIO, p.conv3_CE, p.shortcut_IE)
            constants |= {
                f"{name}_again": again[name] for name in ("outward", "shortcut") if name in again
            }
            scratch["y3"] = self._outer_map()
        dx_BRI, *found = self._call(
            backward,
            maps={"x": x_BRI, **others},
            constants=constants,
            results={"dx": jax.ShapeDtypeStruct((self.rows, self.inputs), self.dtype)},
            sums=sums,
            scratch=scratch,
        )
        return dx_BRI, dict(zip(sums, found, strict=True))

    def _shifted_map(self, planes: int) -> Any:
        return pltpu.VMEM((planes, 3, self.out_rows + 2 * self.border, self.lanes), jnp.float32)

    def _outer_map(self) -> Any:
        return pltpu.VMEM((self.outer_rows, self.outer), self.dtype)

    def _shortcut_maps(self) -> dict[str, Any]:
        """Return the input of a strided shortcut, complete and where it is read."""
        if not self.is_strided:
            return {}
        return {
            "wide": ScratchMap.shapes(self.rows, self.inputs),
            "narrow": ScratchMap.shapes(self.out_rows, self.inputs),
        }

    def collect(self, sums: Mapping[str, jax.Array]) -> Parameters:
        """Return these gradients in the form of the parameters."""
        inner = self.inner
        conv2_OHWI = sums["of_conv2"][:, : NUM_TAPS * inner].reshape(inner, 3, 3, inner)
        kernels = (
            sums["of_conv1"].T,
            conv2_OHWI.transpose(1, 2, 3, 0),
            sums["of_conv3"],
            sums.get("of_shortcut"),
        )
        return Parameters(sums["of_outer_norms"], sums["of_inner_norms"][:, :inner], *kernels)

    def _norms(self, p: Parameters) -> dict[str, jax.Array]:
        """Return the norms, and 0 where the output has its first and, apart, its last column, else 1."""
        column_R = jnp.arange(self.out_rows) % self.out_width
        inside_2R = jnp.stack([column_R != 0, column_R != self.out_width - 1]).astype(jnp.float32)
        inside_2RL = jnp.broadcast_to(inside_2R[..., None], (2, self.out_rows, self.lanes))
        return {
            "outer_norms": p.outer_norms_2N,
            "inner_norms": self._beside(p.inner_norms_4C),
            "inside": inside_2RL,
        }

    def _kernels(
        self, inward: jax.Array, middle: jax.Array, outward: jax.Array, shortcut: Any
    ) -> dict[str, jax.Array]:
        """Return the kernels to the inner channels, between them and from them, for both halves of the lanes."""
        middle_TC = middle.reshape(-1, self.inner)
        middle_TC = jnp.pad(middle_TC, ((0, self.rows_of_kernel - len(middle_TC)), (0, 0)))
        outward = jnp.pad(outward, ((0, self.lanes - self.inner), (0, 0)))  # takes the first half
        kernels = {
            "inward": self._beside(inward),
            "middle": self._beside(middle_TC),
            "outward": outward,
        }
        kernels |= {} if shortcut is None else {"shortcut": shortcut}
        return {name: kernel.astype(self.dtype) for name, kernel in kernels.items()}

    def _beside(self, x_NC: jax.Array) -> jax.Array:
        return jnp.concatenate([x_NC] * self.copies, 1)

    def _call(
        self,
        body: Callable[..., None],
        *,
        maps: Mapping[str, jax.Array],  # of which a program reads its image's
        constants: Mapping[str, jax.Array],
        results: Mapping[str, jax.ShapeDtypeStruct],  # of each image
        sums: Mapping[str, tuple[int, int]],  # over images, in float32
        scratch: Mapping[str, Any],
    ) -> list[jax.Array]:
        """Run `body` for each image, with a reference by each of these names."""
        images = self.batch // self.cores  # of a core
        names = (*maps, *constants, *results, *sums, *scratch)

        def of_image(shape: tuple[int, ...]) -> pl.BlockSpec:
            return pl.BlockSpec((None, *shape), lambda core, image: (core * images + image, 0, 0))

        of_core = [
            pl.BlockSpec((None, *shape), lambda core, image: (core, 0, 0))
            for shape in sums.values()
        ]
        whole = [
            pl.BlockSpec(x.shape, lambda core, image, x=x: (0,) * x.ndim)
            for x in constants.values()
        ]

        def run(*references: Any) -> None:
            wrapped = (ScratchMap(ref) if isinstance(ref, list) else ref for ref in references)
            body(SimpleNamespace(**dict(zip(names, wrapped, strict=True))), self)

        call = pl.pallas_call(
            run,
            grid=(self.cores, images),
            in_specs=[*(of_image(x.shape[1:]) for x in maps.values()), *whole],
            out_specs=[*(of_image(x.shape) for x in results.values()), *of_core],
            out_shape=[
                *(jax.ShapeDtypeStruct((self.batch, *x.shape), x.dtype) for x in results.values()),
                *(_float32((self.cores, *shape)) for shape in sums.values()),
            ],
            scratch_shapes=list(scratch.values()),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VECTOR_MEMORY
            ),
            interpret=self.interpret,
            name="unit_backward" if sums else "unit_forward",
            metadata={"programs": str(self.batch)},  # by which `plan` counts their cycles
        )
        return list(call(*maps.values(), *constants.values()))
