"""Attention and norms on the devices of this process, compared with plain formulas in float32 on the host.

Values and gradients, in the dtypes of training. Every device computes two images. An error is the
largest difference, divided by the largest number of the reference.

Legend: B batch, S sequence length, T heads, E = T h of all heads, H W height and width, C channels.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from vit_jax.config.network_options import AttentionForm, ComputeDtype
from vit_jax.config.networks import build_named_architecture
from vit_jax.config.sizes import NUM_GROUPS
from vit_jax.kernels import dispatch
from vit_jax.kernels.devices import trace_for
from vit_jax.models.attention import Projections, attend
from vit_jax.models.norm import LayerNorm
from vit_jax.models.resnet import GroupNorm
from vit_jax.sharding import Placement, batch_sharding, build_mesh, replicated
from vit_jax.tools.machine.checks import Finding

FORMS: tuple[AttentionForm, ...] = ("xla", "pallas", "cudnn", "auto")
LENGTHS = (197, 256)  # tokens: kernels pad odd lengths
SIDES = (7, 14)  # height and width of maps
HEAD_DIM = 64
CHANNELS = 64
TOLERANCES: dict[str, dict[ComputeDtype, float]] = {  # the largest errors, by platform and dtype
    "cpu": {"float32": 1e-5, "bfloat16": 2e-2},
    "gpu": {
        "float32": 5e-3,
        "bfloat16": 2e-2,
    },  # products of float32 may be computed in TF32, with 10 bits
    "tpu": {"float32": 2e-2, "bfloat16": 2e-2},  # or in bfloat16, with 7
}
_ELSEWHERE = {  # forms that other devices have
    ("pallas", "gpu"): "it is for TPUs",
    ("cudnn", "cpu"): "it is for NVIDIA GPUs",
    ("cudnn", "tpu"): "it is for NVIDIA GPUs",
}
_REMEDY = "the device or its software computes wrong results: report these lines, and train with {} until then"
Function = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Errors:
    """The errors of one case, such as 197 tokens in bfloat16."""

    dtype: str
    case: str
    values: float
    gradients: float


def attention(form: AttentionForm, num_heads: int) -> Finding:
    """Compare a value of `config.model.attention` with JAX's plain attention."""
    mesh = _mesh()
    rng = np.random.default_rng(0)
    platform = Placement(mesh).platform
    if reason := _ELSEWHERE.get((form, platform)):
        return Finding(f"not available: {reason}")
    # Scores are -8 on average. Padding has a score of 0, so it would outweigh all tokens if it were
    # not masked.
    bias_3E = np.repeat([[1.0], [-1.0], [0.5]], num_heads * HEAD_DIM, axis=1)
    errors = list[Errors]()
    taken = dict[str, list[str]]()
    notes = list[str]()
    for dtype in TOLERANCES[platform]:
        for length in LENGTHS:
            try:
                core = _core(form, mesh, length, num_heads, dtype)
            except ValueError as error:
                notes.append(f"{dtype} {length}: {str(error).partition(': ')[2]}")
                continue
            taken.setdefault(core, []).append(f"{dtype} {length}")
            operands = [
                rng.normal(size=(2 * mesh.size, length, num_heads * HEAD_DIM)) for _ in range(3)
            ]
            functions = (
                functools.partial(_attend, core, num_heads),
                functools.partial(_attend_plainly, num_heads),
            )
            errors.append(_compare(dtype, str(length), *functions, [*operands, bias_3E], mesh))
    if form == "auto":
        notes += (
            [f"{core} for {', '.join(cases)}" for core, cases in taken.items()]
            if len(taken) > 1
            else [*taken]
        )
    elif (form, platform) == ("pallas", "cpu"):
        notes.append("interpreted")
    return _finding(errors, notes, platform, "another --config.model.attention=")


def layer_norm() -> Finding:
    """Compare the norm of transformers, as blocks call it, with Flax's."""
    a = build_named_architecture("ViT-B/16")
    plain = functools.partial(nnx.LayerNorm, a.width, epsilon=a.layer_norm_epsilon)
    shapes = {str(length): (length, a.width) for length in LENGTHS}
    return _norm(
        shapes, lambda dtype: LayerNorm(dataclasses.replace(a, compute_dtype=dtype)), plain
    )


def group_norm() -> Finding:
    """Compare the norm of ResNets with Flax's."""
    a = build_named_architecture("R50x1")
    plain = functools.partial(nnx.GroupNorm, CHANNELS, NUM_GROUPS, epsilon=a.group_norm_epsilon)
    shapes = {f"{side}x{side}": (side, side, CHANNELS) for side in SIDES}
    return _norm(
        shapes,
        lambda dtype: GroupNorm(CHANNELS, dataclasses.replace(a, compute_dtype=dtype)),
        plain,
    )


def _norm(
    shapes: Mapping[str, tuple[int, ...]],
    make: Callable[[ComputeDtype], Any],
    make_plain: Callable[..., Any],
) -> Finding:
    """Compare norms for images of these shapes, by case."""
    mesh = _mesh()
    rng = np.random.default_rng(0)
    errors = list[Errors]()
    platform = Placement(mesh).platform

    def normalise(norm: Any, x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        norm.scale = nnx.Param(scale)
        norm.bias = nnx.Param(bias)
        rows = dispatch.flatten_tokens(x) if x.ndim == 3 else x
        return norm(rows).reshape(x.shape)

    def compute(dtype: ComputeDtype, *operands: jax.Array) -> jax.Array:
        return normalise(make(dtype), *operands)

    def compute_plainly(*operands: jax.Array) -> jax.Array:
        return normalise(make_plain(use_fast_variance=False, rngs=nnx.Rngs(0)), *operands)

    for dtype in TOLERANCES[platform]:
        for case, shape in shapes.items():
            x, scale, bias = (
                rng.normal(size=size) for size in ((2 * mesh.size, *shape), shape[-1:], shape[-1:])
            )
            operands = [1.0 + x, 1.0 + scale, bias]
            errors.append(
                _compare(
                    dtype, case, functools.partial(compute, dtype), compute_plainly, operands, mesh
                )
            )
    return _finding(errors, [], platform, "another JAX")


def _finding(
    errors: Sequence[Errors], notes: Sequence[str], platform: str, otherwise: str
) -> Finding:
    if not errors:
        return Finding(f"not available: {'; '.join(notes)}")
    lines = ["errors of values and gradients"]
    figures = dict[str, float]()
    is_good = True
    for dtype, tolerance in TOLERANCES[platform].items():
        cases = [one for one in errors if one.dtype == dtype]
        texts = [f"{one.case} {one.values:.0e} {one.gradients:.0e}" for one in cases]
        lines += [f"{dtype} (at most {tolerance:.0e}) {', '.join(texts)}"] if cases else []
        for one in cases:
            figures |= {
                f"{dtype}_{one.case}_values": one.values,
                f"{dtype}_{one.case}_gradients": one.gradients,
            }
            is_good &= one.values <= tolerance and one.gradients <= tolerance  # NaN is not
    return Finding(
        "; ".join([*lines, *notes]), "" if is_good else _REMEDY.format(otherwise), figures
    )


def _compare(
    dtype: str,
    case: str,
    compute: Function,
    plain: Function,
    operands: Sequence[np.ndarray],
    mesh: Mesh,
) -> Errors:
    """Run both on the same numbers.

    Operands of one dimension are parameters, which training keeps in float32.
    """
    inputs = [x.astype(np.float32 if x.ndim == 1 else jnp.dtype(dtype)) for x in operands]
    weight = np.random.default_rng(1).normal(size=operands[0].shape).astype(np.float32)
    results = program(compute, mesh)(
        *(jax.device_put(x, place_of(x, mesh)) for x in (*inputs, weight))
    )
    with jax.default_device(_host()), jax.default_matmul_precision("highest"):
        expected = jax.jit(functools.partial(_with_gradients, plain))(
            *(x.astype(np.float32) for x in inputs), weight
        )
    values, *gradients = (_error(a, b) for a, b in zip(results, expected, strict=True))
    return Errors(dtype, case, values, float(np.max(gradients)))


def program(compute: Function, mesh: Mesh) -> Any:
    """Return the jitted function from operands and weight to values and gradients."""
    return jax.jit(trace_for(Placement(mesh))(functools.partial(_with_gradients, compute)))


def place_of(operand: Any, mesh: Mesh) -> NamedSharding:
    """Split images over the devices; parameters are on all."""
    return batch_sharding(mesh) if operand.ndim > 2 else replicated(mesh)


def _with_gradients(function: Function, *operands: jax.Array) -> list[jax.Array]:
    """Return the function's values, and the gradients of their sum weighted by the last operand."""
    *inputs, weight = operands

    def total(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        values = function(*inputs)
        return (values.astype(jnp.float32) * weight).sum(), values

    gradients, values = jax.grad(total, argnums=tuple(range(len(inputs))), has_aux=True)(*inputs)
    return [values, *gradients]


def _error(result: jax.Array, expected: jax.Array) -> float:
    a, b = (np.asarray(x).astype(np.float64) for x in (result, expected))
    return float(np.abs(a - b).max() / np.abs(b).max())


def _mesh() -> Mesh:
    return build_mesh(jax.local_devices())


def _host() -> jax.Device:
    """Return a CPU, or the first device where `JAX_PLATFORMS` allows no CPU."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


def _core(form: AttentionForm, mesh: Mesh, length: int, num_heads: int, dtype: str) -> str:
    """Return the form that `form` takes here; ValueError if there is none."""
    with trace_for(Placement(mesh)):
        return dispatch.choose_attention(
            form, length=length, num_heads=num_heads, head_dim=HEAD_DIM, dtype=jnp.dtype(dtype)
        )


def _attend(core: str, num_heads: int, *operands: jax.Array) -> jax.Array:
    return attend(Projections(*operands), num_heads, core)


def _attend_plainly(num_heads: int, *operands: jax.Array) -> jax.Array:
    *tokens_BSE, bias_3E = operands
    heads = (
        (x + b).reshape(*x.shape[:2], num_heads, -1)
        for x, b in zip(tokens_BSE, bias_3E, strict=True)
    )
    return jax.nn.dot_product_attention(*heads, implementation="xla").reshape(operands[0].shape)
