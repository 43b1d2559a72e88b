"""GELU for GPUs and TPUs over all numbers of 16 bits, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from tests.models.small_models import FakeDevices
from vit_jax.kernels import dispatch
from vit_jax.kernels.devices import trace_for
from vit_jax.kernels.gelu import gelu_of_kept_input

FORMS = pytest.mark.parametrize(
    "approximate",
    [False, True],
    ids=["exact", "tanh"],
)
GPU = FakeDevices(
    platform="gpu",
    compute_capability=None,
)
CPU = FakeDevices(
    platform="cpu",
    compute_capability=None,
)
TPU = FakeDevices(
    platform="tpu",
    compute_capability=None,
)
CUBIC = 0.044715
SLOPE = 2 * np.sqrt(2 / np.pi)
FLAT = 700.0  # exp overflows soon after


def list_finite_numbers(dtype):
    """Return the finite numbers among all 65,536 of the type."""
    bits = np.arange(2**16, dtype=np.uint16)
    numbers = bits.view(dtype)
    wide_numbers = numbers.astype(np.float32)
    is_finite = np.isfinite(wide_numbers)
    return numbers[is_finite]


def compute_reference(x, approximate):
    """Return values and derivatives in float64."""
    x = x.astype(np.float64)
    if approximate:
        return compute_tanh_reference(x)

    half_square = 0.5 * np.square(np.minimum(abs(x), 100))
    density = np.exp(-half_square)
    density /= np.sqrt(2 * np.pi)
    distribution = special.ndtr(x)
    value = x * distribution
    derivative = distribution + x * density
    return value, derivative


def compute_tanh_reference(x):
    """Return values and derivatives of the form with tanh, by a sigmoid."""
    inner = SLOPE * (x + CUBIC * x**3)
    inner = np.clip(inner, -FLAT, FLAT)
    is_flat = abs(inner) == FLAT
    sigmoid = special.expit(inner)
    complement = special.expit(-inner)
    value = x * sigmoid

    derivative = SLOPE * (1 + 3 * CUBIC * x**2)
    derivative *= complement
    derivative *= value
    derivative += sigmoid
    derivative[is_flat] = sigmoid[is_flat]
    return value, derivative


def compute_errors(gelu, x, approximate):
    """Return the absolute errors of values and derivatives; infinite where they are NaN."""

    def differentiate(x):
        value, pull_back = jax.vjp(lambda x: gelu(x, approximate), x)
        ones = jnp.ones_like(x)
        (derivative,) = pull_back(ones)
        return value, derivative

    results = jax.jit(differentiate)(x)
    references = compute_reference(x, approximate)
    errors = []
    for result, reference in zip(results, references, strict=True):
        wide_result = np.asarray(result, np.float64)
        error = abs(wide_result - reference)
        error[np.isnan(error)] = np.inf
        errors.append(error)
    return errors


@FORMS
def test_bfloat16_is_nowhere_less_accurate_than_jax(approximate):
    x = list_finite_numbers(jnp.bfloat16)

    actual = compute_errors(gelu_of_kept_input, x, approximate)
    expected = compute_errors(jax.nn.gelu, x, approximate)

    for error, limit in zip(actual, expected, strict=True):
        assert np.isfinite(error).all()
        assert (error <= limit).all()


@FORMS
def test_float16_is_rounded_once(approximate):
    """Half a unit in the last place, and 2e-6 where the derivative is 0."""
    x = list_finite_numbers(np.float16)

    errors = compute_errors(gelu_of_kept_input, x, approximate)

    references = compute_reference(x, approximate)
    if approximate:  # the value is JAX's
        errors = errors[1:]
        references = references[1:]
    for error, reference in zip(errors, references, strict=True):
        _, exponent = np.frexp(reference)
        last_bit = np.maximum(exponent - 11, -24)
        unit = np.ldexp(1.0, last_bit)
        limit = 0.52 * unit + 2e-6
        assert (error <= limit).all()


@FORMS
def test_infinity_and_nan(approximate):
    x = jnp.array([jnp.inf, jnp.nan], jnp.bfloat16)

    infinity, nan = gelu_of_kept_input(x, approximate)

    assert infinity == jnp.inf
    assert jnp.isnan(nan)


@FORMS
@pytest.mark.parametrize(
    "dtype",
    [
        jnp.bfloat16,
        jnp.float32,
    ],
)
def test_cpus_keep_their_program(dtype, approximate):
    x = jnp.ones(3, dtype)

    def compute(x):
        return dispatch.gelu(x, approximate).sum()

    def compute_by_jax(x):
        return jax.nn.gelu(x, approximate).sum()

    with trace_for(CPU):
        program = jax.make_jaxpr(jax.grad(compute))(x)

    expected = jax.make_jaxpr(jax.grad(compute_by_jax))(x)
    assert str(program) == str(expected)


@FORMS
def test_float32_on_gpus_has_the_numbers_of_jax(approximate):
    x = jnp.linspace(-6, 6, 101)

    def compute(x):
        return dispatch.gelu(x, approximate).sum()

    def compute_by_jax(x):
        return jax.nn.gelu(x, approximate).sum()

    with trace_for(GPU):
        value, gradient = jax.value_and_grad(compute)(x)

    expected_value, expected_gradient = jax.value_and_grad(compute_by_jax)(x)
    assert value == expected_value
    np.testing.assert_array_equal(gradient, expected_gradient)


def test_only_the_exact_form_keeps_its_input_on_tpus():
    x = jnp.ones(3, jnp.bfloat16)

    def trace(function, approximate):
        def compute(x):
            return function(x, approximate).sum()

        with trace_for(TPU):
            return str(jax.make_jaxpr(jax.grad(compute))(x))

    assert trace(dispatch.gelu, False) == trace(gelu_of_kept_input, False)
    assert trace(dispatch.gelu, True) == trace(jax.nn.gelu, True)
