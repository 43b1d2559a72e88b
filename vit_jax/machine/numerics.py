"""Attention and norms on the devices of this process, compared with plain formulas in float32 on the host.

Values and gradients, in the dtypes of training. Every device computes two images. An error is the largest difference,
divided by the largest number of the reference.

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

from vit_jax.config.architecture import named_architecture
from vit_jax.config.schema import AttentionForm, ComputeDtype
from vit_jax.config.variants import NUM_GROUPS
from vit_jax.machine.checks import Finding
from vit_jax.models.activations import placed_by
from vit_jax.models.attention import CORES, Projections, choose_form
from vit_jax.models.block import as_rows
from vit_jax.models.norm import LayerNorm
from vit_jax.models.resnet import GroupNorm
from vit_jax.sharding import Placement, batch_sharding, build_mesh, replicated

FORMS: tuple[AttentionForm, ...] = ("xla", "pallas", "cudnn", "auto")
LENGTHS = (197, 256)  # tokens: kernels pad odd lengths
SIDES = (7, 14)  # height and width of maps
HEAD_DIM, CHANNELS = 64, 64
TOLERANCES = {  # the largest errors, by platform and dtype
    "cpu": {"float32": 1e-5, "bfloat16": 2e-2},
    "gpu": {"float32": 5e-3, "bfloat16": 2e-2},  # products of float32 may be computed in TF32, with 10 bits
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
    mesh, name, rng = _mesh(), f"attention {form}", np.random.default_rng(0)
    platform = Placement(mesh).platform
    if reason := _ELSEWHERE.get((form, platform)):
        return Finding(name, f"not available: {reason}")
    # Scores are -8 on average. Padding has a score of 0, so it would outweigh all tokens if it were not masked.
    bias_3E = np.repeat([[1.0], [-1.0], [0.5]], num_heads * HEAD_DIM, axis=1)
    found, taken, notes = list[Errors](), dict[str, list[str]](), list[str]()
    for dtype in TOLERANCES[platform]:
        for length in LENGTHS:
            try:
                core = _core(form, mesh, length, num_heads, dtype)
            except ValueError as error:
                notes.append(f"{dtype} {length}: {str(error).partition(': ')[2]}")
                continue
            taken.setdefault(core, []).append(f"{dtype} {length}")
            operands = [rng.normal(size=(2 * mesh.size, length, num_heads * HEAD_DIM)) for _ in range(3)]
            functions = functools.partial(_attend, core, num_heads), functools.partial(_attend_plainly, num_heads)
            found.append(_compare(dtype, str(length), *functions, [*operands, bias_3E], mesh))
    if form == "auto":
        notes += [f"{core} for {', '.join(cases)}" for core, cases in taken.items()] if len(taken) > 1 else [*taken]
    elif (form, platform) == ("pallas", "cpu"):
        notes.append("interpreted")
    return _finding(name, found, notes, platform, "another --config.model.attention=")


def layer_norm() -> Finding:
    """Compare the norm of transformers, as blocks call it, with Flax's."""
    width = named_architecture("ViT-B/16").width
    shapes = {str(length): (length, width) for length in LENGTHS}
    return _norm("layer norm", shapes, _normalise_tokens, _normalise_tokens_plainly)


def group_norm() -> Finding:
    """Compare the norm of ResNets with Flax's."""
    shapes = {f"{side}x{side}": (side, side, CHANNELS) for side in SIDES}
    return _norm("group norm", shapes, _normalise_map, _normalise_map_plainly)


def _norm(name: str, shapes: Mapping[str, tuple[int, ...]], compute: Function, plain: Function) -> Finding:
    """`shapes` are of one image, by case."""
    mesh, rng, found = _mesh(), np.random.default_rng(0), list[Errors]()
    platform = Placement(mesh).platform
    for dtype in TOLERANCES[platform]:
        for case, shape in shapes.items():
            x, scale, bias = (rng.normal(size=size) for size in ((2 * mesh.size, *shape), shape[-1:], shape[-1:]))
            run = functools.partial(compute, dtype)
            found.append(_compare(dtype, case, run, plain, [1.0 + x, 1.0 + scale, bias], mesh))
    return _finding(name, found, [], platform, "another JAX")


def _finding(name: str, found: Sequence[Errors], notes: Sequence[str], platform: str, otherwise: str) -> Finding:
    if not found:
        return Finding(name, f"not available: {'; '.join(notes)}")
    parts, figures, is_good = list[str](), dict[str, float](), True
    for dtype, tolerance in TOLERANCES[platform].items():
        of_dtype = [errors for errors in found if errors.dtype == dtype]
        cases = (f"{errors.case} {errors.values:.0e} {errors.gradients:.0e}" for errors in of_dtype)
        parts += [f"{dtype} (at most {tolerance:.0e}) {', '.join(cases)}"] if of_dtype else []
        for errors in of_dtype:
            for kind, error in (("values", errors.values), ("gradients", errors.gradients)):
                figures[f"{dtype}_{errors.case}_{kind}"] = error
                is_good &= error <= tolerance  # NaN is not
    remedy = "" if is_good else _REMEDY.format(otherwise)
    return Finding(name, "; ".join(["errors of values and gradients", *parts, *notes]), remedy, figures)


def _compare(
    dtype: str, case: str, compute: Function, plain: Function, operands: Sequence[np.ndarray], mesh: Mesh
) -> Errors:
    """Run both on the same numbers. Operands of one dimension are parameters, which training keeps in float32."""
    given = [x.astype(np.float32 if x.ndim == 1 else jnp.dtype(dtype)) for x in operands]
    weight = np.random.default_rng(1).normal(size=operands[0].shape).astype(np.float32)
    results = program(compute, mesh)(*(jax.device_put(x, place_of(x, mesh)) for x in (*given, weight)))
    with jax.default_device(_host()), jax.default_matmul_precision("highest"):
        expected = jax.jit(functools.partial(_with_gradients, plain))(*(x.astype(np.float32) for x in given), weight)
    values, *gradients = (_error(a, b) for a, b in zip(results, expected, strict=True))
    return Errors(dtype, case, values, float(np.max(gradients)))


def program(compute: Function, mesh: Mesh) -> Any:
    """Return the jitted function from operands and weight to values and gradients."""
    return jax.jit(placed_by(Placement(mesh))(functools.partial(_with_gradients, compute)))


def place_of(operand: Any, mesh: Mesh) -> NamedSharding:
    """Split images over the devices; parameters are on all."""
    return batch_sharding(mesh) if operand.ndim > 2 else replicated(mesh)


def _with_gradients(function: Function, *operands: jax.Array) -> list[jax.Array]:
    """Return the function's values, and the gradients of their sum weighted by the last operand."""
    *given, weight = operands

    def total(*given: jax.Array) -> tuple[jax.Array, jax.Array]:
        values = function(*given)
        return (values.astype(jnp.float32) * weight).sum(), values

    gradients, values = jax.grad(total, argnums=tuple(range(len(given))), has_aux=True)(*given)
    return [values, *gradients]


def _error(found: jax.Array, expected: jax.Array) -> float:
    a, b = (np.asarray(x).astype(np.float64) for x in (found, expected))
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
    with placed_by(Placement(mesh)):
        return choose_form(form, length=length, num_heads=num_heads, head_dim=HEAD_DIM, dtype=jnp.dtype(dtype))


def _attend(core: str, num_heads: int, *operands: jax.Array) -> jax.Array:
    return CORES[core](Projections(*operands), num_heads)


def _attend_plainly(num_heads: int, *operands: jax.Array) -> jax.Array:
    *tokens_BSE, bias_3E = operands
    heads = ((x + b).reshape(*x.shape[:2], num_heads, -1) for x, b in zip(tokens_BSE, bias_3E, strict=True))
    return jax.nn.dot_product_attention(*heads, implementation="xla").reshape(operands[0].shape)


def _with_parameters(norm: Any, scale: jax.Array, bias: jax.Array) -> Any:
    norm.scale, norm.bias = nnx.Param(scale), nnx.Param(bias)
    return norm


def _normalise_tokens(dtype: ComputeDtype, x_BSD: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    architecture = dataclasses.replace(named_architecture("ViT-B/16"), compute_dtype=dtype)
    return _with_parameters(LayerNorm(architecture), scale_D, bias_D)(as_rows(x_BSD)).reshape(x_BSD.shape)


def _normalise_tokens_plainly(x_BSD: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    epsilon = named_architecture("ViT-B/16").layer_norm_epsilon
    norm = nnx.LayerNorm(len(scale_D), epsilon=epsilon, use_fast_variance=False, rngs=nnx.Rngs(0))
    return _with_parameters(norm, scale_D, bias_D)(x_BSD)


def _normalise_map(dtype: ComputeDtype, x_BHWC: jax.Array, scale_C: jax.Array, bias_C: jax.Array) -> jax.Array:
    architecture = dataclasses.replace(named_architecture("R50x1"), compute_dtype=dtype)
    return _with_parameters(GroupNorm(len(scale_C), architecture), scale_C, bias_C)(x_BHWC)


def _normalise_map_plainly(x_BHWC: jax.Array, scale_C: jax.Array, bias_C: jax.Array) -> jax.Array:
    epsilon, rngs = named_architecture("R50x1").group_norm_epsilon, nnx.Rngs(0)
    norm = nnx.GroupNorm(len(scale_C), NUM_GROUPS, epsilon=epsilon, use_fast_variance=False, rngs=rngs)
    return _with_parameters(norm, scale_C, bias_C)(x_BHWC)
