"""The forms of attention against one another and against float32; the norm in one pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.small_models import FakeDevices
from tests.models.test_vit import small
from vit_jax.kernels import attention_pallas
from vit_jax.kernels.devices import trace_for
from vit_jax.models import attention as attentions
from vit_jax.models.attention import Attention, Projections, attend
from vit_jax.models.norm import LayerNorm

# Images, tokens, heads, head dimension: tiles shared, filled, spanned; one block of queries and two.
SHAPES = [
    (2, 49, 3, 64),
    (1, 197, 4, 64),
    (1, 50, 16, 72),
    (1, 65, 8, 80),
    (1, 50, 16, 88),
    (1, 50, 4, 96),
    (1, 37, 2, 128),
    (1, 17, 1, 192),
    (1, 700, 2, 64),
]

FIRST_SHAPE, *OTHER_SHAPES = SHAPES
SLOW = pytest.mark.slow
SLOW_SHAPES = [pytest.param(*shape, marks=SLOW) for shape in OTHER_SHAPES]
# The bound of the relative norm of a difference; bfloat16 rounds to 4e-3.
TOLERANCE = {
    "float32": 5e-6,
    "bfloat16": 8e-3,
}


def projections(images, tokens, heads, head_dim, dtype):
    """Return query, key, value and bias of a dtype, and the gradient of the attention output."""
    rng = np.random.default_rng(0)
    width = heads * head_dim

    def sample(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    query = sample(images, tokens, width)
    key = sample(images, tokens, width)
    value = sample(images, tokens, width)
    gradient = sample(images, tokens, width)
    bias = sample(3, width)
    return [query, key, value, bias], gradient


def results(form, operands, gradient, heads):
    """Return the attention output and the gradients of all operands in float32."""

    def compute_attention(*operands):
        return attend(Projections(*operands), heads, form)

    @jax.jit
    def compute(operands, gradient):
        output, pull_back = jax.vjp(compute_attention, *operands)
        gradients = pull_back(gradient.astype(output.dtype))
        return output, *gradients

    arrays = compute(operands, gradient)
    return list(map(np.float32, arrays))


def distances(actual, expected):
    """Return the norm of each difference, relative to the norm of the expected array."""
    relative_norms = []
    for here, there in zip(actual, expected, strict=True):
        norm = np.linalg.norm(here - there)
        relative_norm = norm / np.linalg.norm(there)
        relative_norms.append(float(relative_norm))
    return relative_norms


@pytest.mark.parametrize(
    ("images", "tokens", "heads", "head_dim"),
    [FIRST_SHAPE, *SLOW_SHAPES],
)
def test_the_kernel_computes_attention_and_its_gradient(
    images,
    tokens,
    heads,
    head_dim,
):
    """In bfloat16 it is as near to the exact result of the same operands as XLA's form is."""
    operands, gradient = projections(
        images,
        tokens,
        heads,
        head_dim,
        "bfloat16",
    )
    exact_operands = list(map(jnp.float32, operands))
    exact = results("xla", exact_operands, gradient, heads)

    def measure_errors(form, operands):
        arrays = results(form, operands, gradient, heads)
        return np.array(distances(arrays, exact))

    in_float32 = measure_errors("pallas", exact_operands)
    by_kernel = measure_errors("pallas", operands)
    by_xla = measure_errors("xla", operands)

    assert in_float32.max() < TOLERANCE["float32"]
    assert by_kernel.max() < TOLERANCE["bfloat16"]
    assert (by_kernel < 1.25 * by_xla).all()


@pytest.mark.parametrize(
    ("heads", "head_dim", "tokens", "group"),
    [
        (12, 64, 196, 12),
        (16, 64, 197, 16),
        (3, 64, 197, 3),  # all there are, though no complete tile
        (16, 80, 257, 8),
        (16, 104, 197, 16),
        (16, 64, 577, 4),
        (16, 64, 1025, 2),
        (16, 88, 1025, None),
        (16, 72, 730, None),
    ],
)
def test_heads_of_a_program(heads, head_dim, tokens, group):
    count = attention_pallas.count_heads_per_program(heads, head_dim, tokens)

    assert count == group


def test_what_does_not_fit_the_kernel_is_rejected_where_it_is_asked_for():
    operands, _ = projections(1, 1025, 16, 88, "bfloat16")
    message = r"cannot hold 1025 tokens with heads of 88.*model.attention=xla"

    def compute():
        return attend(Projections(*operands), 16, "pallas")

    with pytest.raises(ValueError, match=message):
        jax.eval_shape(compute)


@pytest.mark.parametrize(
    ("platform", "dtype", "tokens", "form"),
    [
        ("tpu", "bfloat16", 50, "pallas"),
        ("tpu", "float32", 50, "xla"),
        ("cpu", "bfloat16", 50, "xla"),
        # Nobody says where it runs.
        (None, "bfloat16", 50, "xla"),
        # Too long.
        ("tpu", "bfloat16", 2000, "xla"),
    ],
)
def test_auto_takes_the_kernel_on_tpus_in_bfloat16(
    platform,
    dtype,
    tokens,
    form,
    monkeypatch,
):
    forms = []

    def record_form(projections, num_heads, form):
        forms.append(form)
        return projections.query_BQE

    monkeypatch.setattr(attentions, "attend", record_form)
    attention = Attention(384, 2, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
    x = jnp.zeros((1, tokens, 384), dtype)
    first = x[:, :1]
    devices = None
    if platform is not None:
        devices = FakeDevices(platform=platform)

    with trace_for(devices):
        jax.eval_shape(lambda: attention(x, x))
        jax.eval_shape(lambda: attention(first, x))

    assert forms == [form, "xla"], "one query is no self-attention"


@pytest.mark.parametrize("mean", [0.0, 10.0, 100.0])
def test_the_norm_in_one_pass_loses_what_its_bound_says(mean):
    """The variance is the mean of squares less the square of the mean.

    Its error is some float32 epsilons of the square of mean over deviation.
    """
    architecture = small(width=768, num_heads=12)
    norm = LayerNorm(architecture)
    rng = np.random.default_rng(0)
    sample = rng.normal(mean, 1.0, size=(64, 768))
    x = jnp.float32(sample)

    x64 = np.float64(x)
    centred = x64 - x64.mean(-1, keepdims=True)
    variance = x64.var(-1, keepdims=True)
    exact = centred / np.sqrt(variance + norm.epsilon)

    difference = np.abs(norm(x) - exact)
    error = difference.max() / np.abs(exact).max()
    epsilon = np.finfo(np.float32).eps

    assert error < 4 * epsilon * (1 + mean**2)


def test_the_norm_of_a_constant_is_finite():
    architecture = small(width=768, num_heads=12)
    norm = LayerNorm(architecture)

    constant = jnp.full((2, 768), 1000.1)
    normed = np.asarray(norm(constant))

    # No variance below zero, no infinity.
    assert np.abs(normed).max() < 1.0
