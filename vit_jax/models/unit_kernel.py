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

from vit_jax.config.variants import NUM_GROUPS
from vit_jax.models.activations import device_kind, on_shards

LANES = 128
ROWS = 256  # of one product; found by compiling
MAX_NUMBERS = 2**20  # of a map of one image; with 3,136 x 256 a program needs 32 MiB
MAX_INNER = 256  # 7x7 maps of 512 channels are not faster than by XLA
DEVICE_KINDS = ("TPU v5 lite", "TPU v5", "TPU v6 lite")  # those with as much vector memory, and compiled for
VECTOR_MEMORY = 60 * 2**20  # bytes that a program may use
CONVOLUTION, STATISTICS = "convolution", "statistics"  # names of results, by which rematerialisation may keep them
TAPS = tuple((line, column) for line in (-1, 0, 1) for column in (-1, 0, 1))
_NN = (((1,), (0,)), ((), ()))  # a @ b
_TN = (((0,), (0,)), ((), ()))  # a.T @ b
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


class Form(NamedTuple):
    """Everything else that fixes a unit."""

    width: int  # columns of the map
    epsilon: float  # of the group norms
    is_preactivated: bool
    interpret: bool  # run on any device, slowly, as the kernel would on a TPU


def can_compute(num_rows: int, outputs: int, inner: int, dtype: jnp.dtype) -> bool:
    """Return whether a unit fits on the devices of `placed_by` and is faster there than by XLA."""
    if dtype != jnp.bfloat16 or device_kind() not in DEVICE_KINDS:
        return False
    has_tiles = inner == LANES // 2 or inner % LANES == 0
    return has_tiles and inner <= MAX_INNER and num_rows * outputs <= MAX_NUMBERS


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def bottleneck(x_BRI: jax.Array, parameters: Parameters, form: Form) -> jax.Array:
    """Return a unit's output, (B, R, E). `x_BRI` are maps, line after line; operands of products have their dtype."""
    return _save(x_BRI, parameters, form)[0]


def _save(x_BRI: jax.Array, parameters: Parameters, form: Form) -> Any:
    def run(x_BRI: jax.Array, parameters: Parameters) -> tuple[jax.Array, ...]:
        return tuple(_Unit(x_BRI, parameters, form).run_forward(x_BRI, parameters))

    run = on_shards(run, ("map_BRC", "whole"), ("map_BRC",) * 4)
    out_BRE, kept_BRC, *statistics = run(x_BRI, parameters)
    kept_BRC = checkpoint_name(kept_BRC, CONVOLUTION)
    return out_BRE, (x_BRI, parameters, kept_BRC, *(checkpoint_name(x, STATISTICS) for x in statistics))


def _differentiate(form: Form, saved: Any, gradient_BRE: jax.Array) -> Any:
    def run(x_BRI: jax.Array, parameters: Parameters, *others: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return _Unit(x_BRI, parameters, form).run_backward(x_BRI, parameters, *others)

    run = on_shards(run, ("map_BRC", "whole", *("map_BRC",) * 4), ("map_BRC",) * 2)
    dx_BRI, sums = run(*saved, gradient_BRE)
    return dx_BRI, _Unit(saved[0], saved[1], form).collect({name: sum_.sum(0) for name, sum_ in sums.items()})


bottleneck.defvjp(_save, _differentiate)


class _Unit:
    """Sizes of a unit, and the forms that its parameters and gradients have in the kernel."""

    def __init__(self, x_BRI: jax.Array, parameters: Parameters, form: Form):
        self.batch, self.rows, self.inputs = x_BRI.shape
        self.inner, self.outputs = parameters.conv3_CE.shape
        self.dtype, self.has_shortcut = x_BRI.dtype, parameters.shortcut_IE is not None
        self.width, self.epsilon, self.is_preactivated, self.interpret = form
        self.num_outer, self.outer = parameters.outer_norms_2N.shape
        self.lanes = max(self.inner, LANES)
        self.copies = self.lanes // self.inner  # of an inner map in its lanes; also the taps in one tile
        self.tiles = math.ceil(len(TAPS) / self.copies)
        self.border = math.ceil((self.width + 1) / 8) * 8  # rows around a map that is shifted
        self.cores = math.gcd(self.batch, 2)  # v4 and v5p have two, each with its own sums
        self.slices = [slice(start, min(start + ROWS, self.rows)) for start in range(0, self.rows, ROWS)]
        self.inner_map = pltpu.VMEM((self.rows, self.lanes), jnp.float32)
        self.outer_map = pltpu.VMEM((self.rows, self.outer), self.dtype)
        self.shifted_map = pltpu.VMEM((3, self.rows + 2 * self.border, self.lanes), jnp.float32)

    def run_forward(self, x_BRI: jax.Array, p: Parameters) -> list[jax.Array]:
        """Return the output, the two inner maps beside each other, and the norms' statistics."""
        return self._call(
            _forward,
            maps={"x": x_BRI},
            constants=self._norms(p) | self._kernels(p.conv1_IC, p.conv2_HWIO, p.conv3_CE, p.shortcut_IE),
            results={
                "out": jax.ShapeDtypeStruct((self.rows, self.outputs), self.dtype),
                "kept": jax.ShapeDtypeStruct((self.rows, 2 * self.inner), self.dtype),
                "outer_statistics": _float32((self.num_outer, self.outer)),
                "inner_statistics": _float32((4, self.lanes)),
            },
            sums={},
            scratch={"y1": self.inner_map, "y2": self.inner_map, "z": self.shifted_map}
            | ({} if self.is_preactivated else {"y3": self.outer_map}),
        )

    def run_backward(
        self, x_BRI: jax.Array, p: Parameters, *others: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the gradient of the input and, by name, sums that `collect` makes gradients of parameters from."""
        sums = {
            "of_outer_norms": (self.num_outer, self.outer),
            "of_inner_norms": (4, self.lanes),
            "of_conv1": (self.inner, self.inputs),
            "of_conv2": (self.inner, self.tiles * self.lanes),
            "of_conv3": (self.inner, self.outputs),
        } | ({"of_shortcut": (self.inputs, self.outputs)} if self.has_shortcut else {})
        turned_HWOI = jnp.flip(p.conv2_HWIO, (0, 1)).swapaxes(2, 3)
        shortcut_EI = None if p.shortcut_IE is None else p.shortcut_IE.T
        constants = self._norms(p) | self._kernels(p.conv3_CE.T, turned_HWOI, p.conv1_IC.T, shortcut_EI)
        scratch = {"g": self.inner_map, "outer_g": self.outer_map, "z": self.shifted_map, "dy2": self.shifted_map}
        if not self.is_preactivated:  # computes the last convolution again
            again = self._kernels(p.conv1_IC, p.conv2_HWIO, p.conv3_CE, p.shortcut_IE)
            constants |= {f"{name}_again": again[name] for name in ("outward", "shortcut") if name in again}
            scratch |= {"y3": self.outer_map}
        dx_BRI, *found = self._call(
            _backward,
            maps={"x": x_BRI}
            | dict(zip(("kept", "outer_statistics", "inner_statistics", "dout"), others, strict=True)),
            constants=constants,
            results={"dx": jax.ShapeDtypeStruct((self.rows, self.inputs), self.dtype)},
            sums=sums,
            scratch=scratch,
        )
        return dx_BRI, dict(zip(sums, found, strict=True))

    def collect(self, sums: Mapping[str, jax.Array]) -> Parameters:
        """Return these gradients in the form of the parameters."""
        inner = self.inner
        conv2_OHWI = sums["of_conv2"][:, : len(TAPS) * inner].reshape(inner, 3, 3, inner)
        kernels = sums["of_conv1"].T, conv2_OHWI.transpose(1, 2, 3, 0), sums["of_conv3"], sums.get("of_shortcut")
        return Parameters(sums["of_outer_norms"], sums["of_inner_norms"][:, :inner], *kernels)

    def _norms(self, p: Parameters) -> dict[str, jax.Array]:
        """Return the norms, and 0 at each position of the first and, apart, of the last column, else 1."""
        column_R = jnp.arange(self.rows) % self.width
        inside_2R = jnp.stack([column_R != 0, column_R != self.width - 1]).astype(jnp.float32)
        inside_2RL = jnp.broadcast_to(inside_2R[..., None], (2, self.rows, self.lanes))
        return {
            "outer_norms": p.outer_norms_2N,
            "inner_norms": self._beside(p.inner_norms_4C),
            "inside": inside_2RL,
        }

    def _kernels(self, inward: jax.Array, middle: jax.Array, outward: jax.Array, shortcut: Any) -> dict[str, jax.Array]:
        """Return the kernels to the inner channels, between them and from them, for both halves of the lanes."""
        middle_TC = middle.reshape(-1, self.inner)
        middle_TC = jnp.pad(middle_TC, ((0, self.tiles * self.lanes - len(middle_TC)), (0, 0)))
        outward = jnp.pad(outward, ((0, self.lanes - self.inner), (0, 0)))  # takes the first half
        kernels = {"inward": self._beside(inward), "middle": self._beside(middle_TC), "outward": outward}
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

        of_core = [pl.BlockSpec((None, *shape), lambda core, image: (core, 0, 0)) for shape in sums.values()]
        whole = [pl.BlockSpec(x.shape, lambda core, image, x=x: (0,) * x.ndim) for x in constants.values()]
        call = pl.pallas_call(
            lambda *references: body(SimpleNamespace(**dict(zip(names, references, strict=True))), self),
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


def _forward(refs: Any, u: _Unit) -> None:
    if u.is_preactivated:
        sums = _Sums()
        for rows in u.slices:
            sums.add_squares(refs.x[rows].astype(jnp.float32))
        a1, b1 = sums.normalize(refs, "outer", 0, u)

    def enter(rows: slice) -> Any:
        return _relu(refs.x[rows], a1, b1).astype(u.dtype) if u.is_preactivated else refs.x[rows]

    sums = _Sums()
    for rows in u.slices:
        refs.y1[rows] = y1 = _dot(enter(rows), refs.inward[...])
        sums.add_squares(y1)
    a2, b2 = sums.normalize(refs, "inner", 0, u)
    _clear_border(refs.z, u)
    for rows in u.slices:
        _store_shifted(refs.z, rows, _relu(refs.y1[rows], a2, b2), refs.inside, u)
    sums = _Sums()
    for rows in u.slices:
        refs.y2[rows] = y2 = _convolve(refs.z, rows, refs.middle, u)
        sums.add_squares(y2)
    a3, b3 = sums.normalize(refs, "inner", 2, u)
    sums, of_shortcut = _Sums(), _Sums()
    for rows in u.slices:
        y2 = refs.y2[rows]
        y3 = _dot(_relu(y2, a3, b3).astype(u.dtype), refs.outward[...])
        refs.kept[rows] = _join(refs.y1[rows], y2, u).astype(refs.kept.dtype)
        residual = _dot(enter(rows), refs.shortcut[...]) if u.has_shortcut else refs.x[rows].astype(jnp.float32)
        if u.is_preactivated:
            refs.out[rows] = (residual + y3).astype(refs.out.dtype)
        else:
            refs.y3[rows] = y3.astype(u.dtype)
            sums.add_squares(y3)
            of_shortcut.add_squares(residual)
    if u.is_preactivated:
        return
    a, b = sums.normalize(refs, "outer", 0, u)
    if u.has_shortcut:
        shortcut_a, shortcut_b = of_shortcut.normalize(refs, "outer", 2, u)
    for rows in u.slices:
        residual = refs.x[rows]
        if u.has_shortcut:
            residual = shortcut_a * _dot(residual, refs.shortcut[...]) + shortcut_b
        out = jnp.maximum(residual.astype(jnp.float32) + a * refs.y3[rows].astype(jnp.float32) + b, 0.0)
        refs.out[rows] = out.astype(refs.out.dtype)


def _backward(refs: Any, u: _Unit) -> None:
    """Go backwards: g is the gradient of a norm's output, dy that of its input y, which is a g + c y + d."""

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        for name, ref in vars(refs).items():
            if name.startswith("of_"):
                ref[...] = jnp.zeros(ref.shape, ref.dtype)

    _clear_border(refs.z, u)
    _clear_border(refs.dy2, u)
    if u.is_preactivated:
        _end_preactivated(refs, u, *_backward_inner(refs, u, lambda rows: refs.dout[rows]))
    else:
        of_conv3, of_shortcut = _begin_postactivated(refs, u)
        _end_postactivated(refs, u, *_backward_inner(refs, u, of_conv3), of_shortcut)


def _backward_inner(refs: Any, u: _Unit, dy3_of: Callable[[slice], Any]) -> tuple[Any, Any, Any]:
    """Go from the gradient of the third convolution, of which `dy3_of` gives rows, to a, c and d of the first."""
    norm2, norm3 = _Norm(refs, "inner", 0, u), _Norm(refs, "inner", 2, u)
    sums, of_conv3 = _Sums(), _Sums()
    for rows in u.slices:
        y1, y2 = _split(refs.kept[rows].astype(jnp.float32), u)
        dy3, z3 = dy3_of(rows), norm3.a * y2 + norm3.b
        of_conv3.add(_dot(jnp.maximum(z3, 0.0).astype(u.dtype)[:, : u.inner], dy3, _TN))
        refs.g[rows] = g = jnp.where(z3 > 0, _dot(dy3, refs.inward[...]), 0.0)
        sums.add_rows(g, g * y2)
        _store_shifted(refs.z, rows, _relu(y1, norm2.a, norm2.b), refs.inside, u)
    refs.of_conv3[...] += of_conv3.of[0]
    a, c, d = norm3.differentiate(*sums.of)
    for rows in u.slices:
        _, y2 = _split(refs.kept[rows].astype(jnp.float32), u)
        _store_shifted(refs.dy2, rows, a * refs.g[rows] + c * y2 + d, refs.inside, u)
    sums, of_conv2 = _Sums(), _Sums()
    for rows in u.slices:
        dy2 = _shifted(refs.dy2, rows, (0, 0), u).astype(u.dtype)[:, : u.inner]
        of_conv2.add(*(_dot(dy2, _tile(refs.z, rows, place, u), _TN) for place in range(u.tiles)))
        y1, _ = _split(refs.kept[rows].astype(jnp.float32), u)
        refs.g[rows] = g = jnp.where(norm2.a * y1 + norm2.b > 0, _convolve(refs.dy2, rows, refs.middle, u), 0.0)
        sums.add_rows(g, g * y1)
    for place, sum_ in enumerate(of_conv2.of):
        refs.of_conv2[:, place * u.lanes : (place + 1) * u.lanes] += sum_
    return norm2.differentiate(*sums.of)


def _end_preactivated(refs: Any, u: _Unit, a: Any, c: Any, d: Any) -> None:
    norm1 = _Norm(refs, "outer", 0, u)
    sums, of_conv1, of_shortcut = _Sums(), _Sums(), _Sums()
    for rows in u.slices:
        y1, _ = _split(refs.kept[rows].astype(jnp.float32), u)
        dy1, x = (a * refs.g[rows] + c * y1 + d).astype(u.dtype), refs.x[rows].astype(jnp.float32)
        z1, g = norm1.a * x + norm1.b, _dot(dy1, refs.outward[...])
        h1 = jnp.maximum(z1, 0.0).astype(u.dtype)
        of_conv1.add(_dot(dy1[:, : u.inner], h1, _TN))
        if u.has_shortcut:
            of_shortcut.add(_dot(h1, refs.dout[rows], _TN))
            g = g + _dot(refs.dout[rows], refs.shortcut[...])
        g = jnp.where(z1 > 0, g, 0.0)
        refs.outer_g[rows] = g.astype(u.dtype)
        sums.add_rows(g, g * x)
    refs.of_conv1[...] += of_conv1.of[0]
    if u.has_shortcut:
        refs.of_shortcut[...] += of_shortcut.of[0]
    a, c, d = norm1.differentiate(*sums.of)
    for rows in u.slices:
        dx = a * refs.outer_g[rows].astype(jnp.float32) + c * refs.x[rows].astype(jnp.float32) + d
        dx = dx if u.has_shortcut else dx + refs.dout[rows].astype(jnp.float32)
        refs.dx[rows] = dx.astype(refs.dx.dtype)


def _begin_postactivated(refs: Any, u: _Unit) -> tuple[Callable[[slice], Any], Callable[[slice], Any]]:
    """Go through the last ReLU; return functions of rows: the gradients of the last convolution and the shortcut."""
    norm2, norm3 = _Norm(refs, "inner", 2, u), _Norm(refs, "outer", 0, u)
    shortcut_norm = _Norm(refs, "outer", 2, u) if u.has_shortcut else None
    sums, of_shortcut = _Sums(), _Sums()
    for rows in u.slices:
        _, y2 = _split(refs.kept[rows].astype(jnp.float32), u)
        y3 = _dot(_relu(y2, norm2.a, norm2.b).astype(u.dtype), refs.outward_again[...])
        refs.y3[rows] = y3.astype(u.dtype)
        y = z = refs.x[rows].astype(jnp.float32)
        if shortcut_norm:
            y = _dot(refs.x[rows], refs.shortcut_again[...])
            z = shortcut_norm.a * y + shortcut_norm.b
        g = jnp.where(z + norm3.a * y3 + norm3.b > 0, refs.dout[rows].astype(jnp.float32), 0.0)
        refs.outer_g[rows] = g.astype(u.dtype)
        sums.add_rows(g, g * y3)
        if shortcut_norm:
            of_shortcut.add_rows(g, g * y)
    a, c, d = norm3.differentiate(*sums.of)

    def of_conv3(rows: slice) -> Any:
        return (a * refs.outer_g[rows].astype(jnp.float32) + c * refs.y3[rows].astype(jnp.float32) + d).astype(u.dtype)

    if not shortcut_norm:
        return of_conv3, lambda rows: refs.outer_g[rows]
    shortcut_a, shortcut_c, shortcut_d = shortcut_norm.differentiate(*of_shortcut.of)

    def of_shortcut_conv(rows: slice) -> Any:
        y = _dot(refs.x[rows], refs.shortcut_again[...])
        return (shortcut_a * refs.outer_g[rows].astype(jnp.float32) + shortcut_c * y + shortcut_d).astype(u.dtype)

    return of_conv3, of_shortcut_conv


def _end_postactivated(refs: Any, u: _Unit, a: Any, c: Any, d: Any, shortcut_of: Callable[[slice], Any]) -> None:
    of_conv1, of_shortcut = _Sums(), _Sums()
    for rows in u.slices:
        y1, _ = _split(refs.kept[rows].astype(jnp.float32), u)
        dy1, residual = (a * refs.g[rows] + c * y1 + d).astype(u.dtype), shortcut_of(rows)
        of_conv1.add(_dot(dy1[:, : u.inner], refs.x[rows], _TN))
        if u.has_shortcut:
            of_shortcut.add(_dot(refs.x[rows], residual, _TN))
            residual = _dot(residual, refs.shortcut[...])
        dx = _dot(dy1, refs.outward[...]) + residual.astype(jnp.float32)
        refs.dx[rows] = dx.astype(refs.dx.dtype)
    refs.of_conv1[...] += of_conv1.of[0]
    if u.has_shortcut:
        refs.of_shortcut[...] += of_shortcut.of[0]


class _Norm:
    """A group norm a x + b, whose a and b depend on x."""

    def __init__(self, refs: Any, place: str, first: int, u: _Unit):
        """`place` is "outer" or "inner", `first` the row of its scale and its mean."""
        statistics, affine = getattr(refs, f"{place}_statistics"), getattr(refs, f"{place}_norms")
        self.mean, self.inverse = (statistics[row : row + 1] for row in (first, first + 1))
        self.scale, bias = (affine[row : row + 1] for row in (first, first + 1))
        self.a = self.inverse * self.scale
        self.b = bias - self.mean * self.a
        self.gradient, self.first, self.unit = getattr(refs, f"of_{place}_norms"), first, u
        self.channels = getattr(u, place)

    def differentiate(self, g: Any, gx: Any) -> tuple[Any, Any, Any]:
        """Add to the gradients of scale and bias; return a, c and d of the input's gradient a g + c x + d.

        Arguments are the sums of g and g x over positions.
        """
        of_scale = self.inverse * (gx - self.mean * g)
        for row, sum_ in enumerate((of_scale, g), self.first):
            self.gradient[row : row + 1] += sum_
        mean_g, mean_gx = (_group_means(self.scale * x, self.channels, self.unit.rows) for x in (g, of_scale))
        c = -jnp.square(self.inverse) * mean_gx
        return self.a, c, -self.inverse * mean_g - self.mean * c


class _Sums:
    """Sums over slices of rows."""

    def __init__(self) -> None:
        self.of: tuple[Any, ...] = ()

    def add(self, *values: Any) -> None:
        self.of = tuple(a + b for a, b in zip(self.of, values, strict=True)) if self.of else values

    def add_rows(self, *maps: Any) -> None:
        self.add(*(x.sum(0, keepdims=True) for x in maps))

    def add_squares(self, x: Any) -> None:
        self.add_rows(x, x * x)

    def normalize(self, refs: Any, place: str, first: int, u: _Unit) -> tuple[Any, Any]:
        """Store mean and 1 / standard deviation of what `add_squares` got; return a and b of the norm a x + b."""
        statistics, affine = getattr(refs, f"{place}_statistics"), getattr(refs, f"{place}_norms")
        mean, square = (_group_means(x, getattr(u, place), u.rows) for x in self.of)
        inverse = jax.lax.rsqrt(jnp.maximum(square - mean * mean, 0.0) + u.epsilon)
        statistics[first : first + 1], statistics[first + 1 : first + 2] = mean, inverse
        a = inverse * affine[first : first + 1]
        return a, affine[first + 1 : first + 2] - mean * a


def _group_means(sums_1L: Any, channels: int, rows: int) -> Any:
    """Return the mean of each channel's group, from sums over rows."""
    size, lanes = channels // NUM_GROUPS, sums_1L.shape[1]
    if lanes < LANES:  # a rotation needs complete tiles
        return _group_means(jnp.concatenate([sums_1L] * (LANES // lanes), 1), channels, rows)[:, :lanes]
    lane = jax.lax.broadcasted_iota(jnp.int32, sums_1L.shape, 1)
    for step in (2**power for power in range(size.bit_length() - 1)):
        below, above = (pltpu.roll(sums_1L, shift, 1) for shift in (step, lanes - step))
        sums_1L += jnp.where(lane & step != 0, below, above)
    return sums_1L / (size * rows)


def _store_shifted(ref: Any, rows: slice, x_RL: Any, inside: Any, u: _Unit) -> None:
    """Store the map for taps to the left, in the same column and to the right."""
    place = slice(rows.start + u.border, rows.stop + u.border)
    ref[0, place], ref[1, place], ref[2, place] = x_RL * inside[1, rows], x_RL, x_RL * inside[0, rows]


def _clear_border(ref: Any, u: _Unit) -> None:
    zeros = jnp.zeros((3, u.border, u.lanes), ref.dtype)
    ref[:, : u.border], ref[:, u.rows + u.border :] = zeros, zeros


def _shifted(ref: Any, rows: slice, tap: tuple[int, int], u: _Unit) -> Any:
    line, column = tap
    offset = u.border + line * u.width + column
    return ref[column + 1, rows.start + offset : rows.stop + offset]


def _tile(ref: Any, rows: slice, place: int, u: _Unit) -> Any:
    """Return the channels of as many taps as fit beside each other."""
    taps = [_shifted(ref, rows, tap, u) for tap in TAPS[place * u.copies : (place + 1) * u.copies]]
    return (taps[0] if len(taps) == 1 else _halves(taps[0], taps[1], u)).astype(u.dtype)


def _convolve(ref: Any, rows: slice, kernel: Any, u: _Unit) -> Any:
    products = (_dot(_tile(ref, rows, i, u), kernel[i * u.lanes : (i + 1) * u.lanes]) for i in range(u.tiles))
    return functools.reduce(jnp.add, products)


def _join(y1_RL: Any, y2_RL: Any, u: _Unit) -> Any:
    """Return both maps beside each other, (R, 2C)."""
    return jnp.concatenate([y1_RL, y2_RL], 1) if u.copies == 1 else _halves(y1_RL, y2_RL, u)


def _split(kept_RC: Any, u: _Unit) -> tuple[Any, Any]:
    """Return both maps that were joined, each in all lanes."""
    if u.copies == 1:
        return kept_RC[:, : u.lanes], kept_RC[:, u.lanes :]
    turned = pltpu.roll(kept_RC, u.inner, 1)
    return _halves(kept_RC, turned, u), _halves(turned, kept_RC, u)


def _halves(left_RL: Any, right_RL: Any, u: _Unit) -> Any:
    lane = jax.lax.broadcasted_iota(jnp.int32, left_RL.shape, 1)
    return jnp.where(lane < u.inner, left_RL, right_RL)


def _relu(x: Any, a: Any, b: Any) -> Any:
    return jnp.maximum(a * x.astype(jnp.float32) + b, 0.0)


def _dot(a: jax.Array, b: jax.Array, dims: tuple = _NN) -> jax.Array:
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
