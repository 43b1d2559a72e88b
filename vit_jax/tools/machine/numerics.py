"""Attention and norms on the devices of this process, compared with a reference on the host.

The reference are plain formulas in float32. Values and gradients are compared, in the dtypes of
training. Every device computes two images. An error is the largest difference, divided by the
largest number of the reference.

Legend: B batch, S sequence length, T heads, E = T h of all heads, H W height and width, C channels.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
from vit_jax.sharding import Placement, batch_sharding, build_mesh, replicate
from vit_jax.tools.machine.checks import Finding

FORMS: tuple[AttentionForm, ...] = ("xla", "pallas", "cudnn", "auto")
LENGTHS = (197, 256)  # tokens: kernels pad odd lengths
SIDES = (7, 14)  # height and width of maps
HEAD_DIM = 64
CHANNELS = 64
TOLERANCES: dict[str, dict[ComputeDtype, float]] = {  # the largest errors, by platform and dtype
    "cpu": {"float32": 1e-5, "bfloat16": 2e-2},
    # Products of float32 may be computed in TF32, with 10 bits.
    "gpu": {"float32": 5e-3, "bfloat16": 2e-2},
    # Products of float32 may be computed in bfloat16, with 7 bits.
    "tpu": {"float32": 2e-2, "bfloat16": 2e-2},
}
_MISSING_FORMS = {  # reasons, by form and platform
    ("pallas", "gpu"): "it is for TPUs",
    ("cudnn", "cpu"): "it is for NVIDIA GPUs",
    ("cudnn", "tpu"): "it is for NVIDIA GPUs",
}
_REMEDY = (
    "the device or its software computes wrong results: report these lines, "
    "and train with {} until then"
)
Function = Callable[..., jax.Array]


class Case(NamedTuple):
    """A dtype, and the sizes of the inputs in words, such as 197 tokens in bfloat16."""

    dtype: ComputeDtype
    sizes: str


class Errors(NamedTuple):
    """The largest relative errors of one case."""

    case: Case
    values: float
    gradients: float


def check_attention(form: AttentionForm, num_heads: int) -> Finding:
    """Compare a value of `config.model.attention` with JAX's plain attention."""
    mesh = _build_local_mesh()
    platform = Placement(mesh).platform
    reason = _MISSING_FORMS.get((form, platform))
    if reason is not None:
        return Finding(f"not available: {reason}")

    # Scores are -8 on average. Padding has a score of 0, so it would outweigh all tokens if it were
    # not masked.
    width = num_heads * HEAD_DIM
    bias_3E = np.repeat([[1.0], [-1.0], [0.5]], width, axis=1)
    compute_plainly = functools.partial(_attend_plainly, num_heads)
    rng = np.random.default_rng(0)
    errors = list[Errors]()
    cases_of_form = dict[str, list[str]]()
    notes = list[str]()
    for dtype, length in itertools.product(TOLERANCES[platform], LENGTHS):
        case = Case(dtype, str(length))
        try:
            used_form = _choose_form(form, mesh, length, num_heads, dtype)
        except ValueError as error:
            _, _, reason = str(error).partition(": ")
            notes.append(f"{dtype} {length}: {reason}")
            continue

        cases = cases_of_form.setdefault(used_form, [])
        cases.append(f"{dtype} {length}")

        shape = (2 * mesh.size, length, width)
        queries = rng.normal(size=shape)
        keys = rng.normal(size=shape)
        values = rng.normal(size=shape)
        errors_of_case = _measure_errors(
            case,
            functools.partial(_attend, used_form, num_heads),
            compute_plainly,
            [queries, keys, values, bias_3E],
            mesh,
        )
        errors.append(errors_of_case)

    if form == "auto":
        notes += _describe_forms(cases_of_form)
    elif (form, platform) == ("pallas", "cpu"):
        notes.append("interpreted")
    return _build_finding(errors, notes, platform, "another --config.model.attention=")


def _describe_forms(cases_of_form: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the forms that "auto" chooses, with their cases if there are several forms."""
    if len(cases_of_form) == 1:
        return list(cases_of_form)
    notes = []
    for form, cases in cases_of_form.items():
        notes.append(f"{form} for {', '.join(cases)}")
    return notes


def check_layer_norm() -> Finding:
    """Compare the norm of transformers, as blocks call it, with Flax's."""
    a = build_named_architecture("ViT-B/16")
    shapes = {str(length): (length, a.width) for length in LENGTHS}
    build_plain = functools.partial(
        nnx.LayerNorm,
        a.width,
        epsilon=a.layer_norm_epsilon,
    )

    def build(dtype: ComputeDtype) -> LayerNorm:
        return LayerNorm(dataclasses.replace(a, compute_dtype=dtype))

    return _check_norm(shapes, build, build_plain)


def check_group_norm() -> Finding:
    """Compare the norm of ResNets with Flax's."""
    a = build_named_architecture("R50x1")
    shapes = {f"{side}x{side}": (side, side, CHANNELS) for side in SIDES}
    build_plain = functools.partial(
        nnx.GroupNorm,
        CHANNELS,
        NUM_GROUPS,
        epsilon=a.group_norm_epsilon,
    )

    def build(dtype: ComputeDtype) -> GroupNorm:
        return GroupNorm(CHANNELS, dataclasses.replace(a, compute_dtype=dtype))

    return _check_norm(shapes, build, build_plain)


def _check_norm(
    shapes: Mapping[str, tuple[int, ...]],
    build: Callable[[ComputeDtype], nnx.Module],
    build_plain: Callable[..., nnx.Module],
) -> Finding:
    """Compare norms for images of these shapes, by case."""
    mesh = _build_local_mesh()
    platform = Placement(mesh).platform
    rng = np.random.default_rng(0)
    errors = list[Errors]()

    def compute(dtype: ComputeDtype, *operands: jax.Array) -> jax.Array:
        return _normalise(build(dtype), *operands)

    def compute_plainly(*operands: jax.Array) -> jax.Array:
        norm = build_plain(use_fast_variance=False, rngs=nnx.Rngs(0))
        return _normalise(norm, *operands)

    for dtype, sizes in itertools.product(TOLERANCES[platform], shapes):
        shape = shapes[sizes]
        num_channels = shape[-1]
        x = 1.0 + rng.normal(size=(2 * mesh.size, *shape))
        scale = 1.0 + rng.normal(size=num_channels)
        bias = rng.normal(size=num_channels)
        errors_of_case = _measure_errors(
            Case(dtype, sizes),
            functools.partial(compute, dtype),
            compute_plainly,
            [x, scale, bias],
            mesh,
        )
        errors.append(errors_of_case)
    return _build_finding(errors, [], platform, "another JAX")


def _normalise(
    norm: Any,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
) -> jax.Array:
    """Apply a norm with these parameters, to tokens as blocks do."""
    norm.scale = nnx.Param(scale)
    norm.bias = nnx.Param(bias)
    if x.ndim != 3:
        return norm(x)
    return norm(dispatch.flatten_tokens(x)).reshape(x.shape)


def _build_finding(
    errors: Sequence[Errors],
    notes: Sequence[str],
    platform: str,
    alternative: str,
) -> Finding:
    """Return the finding of a part of the network; `alternative` is for users whose part is wrong."""
    if not errors:
        return Finding(f"not available: {'; '.join(notes)}")

    lines = ["errors of values and gradients"]
    figures = dict[str, float]()
    remedy = ""
    for dtype, tolerance in TOLERANCES[platform].items():
        texts = []
        for case, values, gradients in errors:
            if case.dtype != dtype:
                continue
            texts.append(f"{case.sizes} {values:.0e} {gradients:.0e}")
            figures[f"{dtype}_{case.sizes}_values"] = values
            figures[f"{dtype}_{case.sizes}_gradients"] = gradients
            # Errors that are NaN are not good.
            are_good = values <= tolerance and gradients <= tolerance
            if not are_good:
                remedy = _REMEDY.format(alternative)
        if texts:
            lines.append(f"{dtype} (at most {tolerance:.0e}) {', '.join(texts)}")

    text = "; ".join([*lines, *notes])
    return Finding(text, remedy, figures)


def _measure_errors(
    case: Case,
    compute: Function,
    compute_plainly: Function,
    operands: Sequence[np.ndarray],
    mesh: Mesh,
) -> Errors:
    """Run both functions on the same numbers.

    Operands of one dimension are parameters, which training keeps in float32.
    """
    inputs = []
    for operand in operands:
        dtype = jnp.dtype(case.dtype)
        if operand.ndim == 1:
            dtype = jnp.dtype(np.float32)
        inputs.append(operand.astype(dtype))
    rng = np.random.default_rng(1)
    weight = rng.normal(size=operands[0].shape).astype(np.float32)

    on_devices = []
    for array in (*inputs, weight):
        sharding = choose_sharding(array, mesh)
        on_devices.append(jax.device_put(array, sharding))
    run = jit_with_gradients(compute, mesh)
    results = run(*on_devices)

    with jax.default_device(_find_host()), jax.default_matmul_precision("highest"):
        run_plainly = jax.jit(functools.partial(_compute_with_gradients, compute_plainly))
        exact_inputs = [array.astype(np.float32) for array in inputs]
        expected = run_plainly(*exact_inputs, weight)

    value_error, *gradient_errors = map(_measure_relative_error, results, expected)
    largest_gradient_error = float(np.max(gradient_errors))
    return Errors(case, value_error, largest_gradient_error)


def jit_with_gradients(compute: Function, mesh: Mesh) -> jax.stages.Wrapped:
    """Return the jitted function from operands and weight to values and gradients."""
    compute_all = functools.partial(_compute_with_gradients, compute)
    trace_for_devices = trace_for(Placement(mesh))
    return jax.jit(trace_for_devices(compute_all))


def choose_sharding(operand: np.ndarray | jax.ShapeDtypeStruct, mesh: Mesh) -> NamedSharding:
    """Return the sharding of an operand: images are split over the devices, parameters are on all."""
    if operand.ndim > 2:
        return batch_sharding(mesh)
    return replicate(mesh)


def _compute_with_gradients(function: Function, *operands: jax.Array) -> list[jax.Array]:
    """Return the function's values, and the gradients of their sum weighted by the last operand."""
    *inputs, weight = operands

    def compute_sum(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        values = function(*inputs)
        weighted = values.astype(jnp.float32) * weight
        return weighted.sum(), values

    argument_numbers = tuple(range(len(inputs)))
    gradients, values = jax.grad(compute_sum, argument_numbers, has_aux=True)(*inputs)
    return [values, *gradients]


def _measure_relative_error(result: jax.Array, expected: jax.Array) -> float:
    """Return the largest difference, divided by the largest number of the reference."""
    computed = np.asarray(result).astype(np.float64)
    reference = np.asarray(expected).astype(np.float64)
    largest_error = np.abs(computed - reference).max()
    largest_number = np.abs(reference).max()
    return float(largest_error / largest_number)


def _build_local_mesh() -> Mesh:
    return build_mesh(jax.local_devices())


def _find_host() -> jax.Device:
    """Return a CPU, or the first device if `JAX_PLATFORMS` allows no CPU."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


def _choose_form(
    form: AttentionForm,
    mesh: Mesh,
    length: int,
    num_heads: int,
    dtype: str,
) -> str:
    """Return the form that `form` takes on these devices; ValueError if there is none."""
    with trace_for(Placement(mesh)):
        return dispatch.choose_attention(
            form,
            length=length,
            num_heads=num_heads,
            head_dim=HEAD_DIM,
            dtype=jnp.dtype(dtype),
        )


def _attend(form: str, num_heads: int, *operands: jax.Array) -> jax.Array:
    query_BSE, key_BSE, value_BSE, bias_3E = operands
    projections = Projections(query_BSE, key_BSE, value_BSE, tuple(bias_3E))
    return attend(projections, num_heads, form)


def _attend_plainly(num_heads: int, *operands: jax.Array) -> jax.Array:
    *tokens_BSE, bias_3E = operands
    operands_BSTh = []
    for tokens, bias in zip(tokens_BSE, bias_3E, strict=True):
        batch, length, _ = tokens.shape
        biased = tokens + bias
        operands_BSTh.append(biased.reshape(batch, length, num_heads, -1))
    attended = jax.nn.dot_product_attention(*operands_BSTh, implementation="xla")
    return attended.reshape(operands[0].shape)
