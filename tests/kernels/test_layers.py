"""Layers without a loop on a TPU: results and gradients of a scan, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.small_models import FakeDevices
from vit_jax.kernels import dispatch
from vit_jax.kernels.devices import trace_for

NUM_LAYERS = 4


def run_layer(x, layer):
    """Return the output of a layer with dropout, twice."""
    kernel, fraction, key = layer
    is_kept = jax.random.bernoulli(key, 1 - fraction, x.shape)
    x = jnp.where(is_kept, jnp.tanh(x @ kernel), x)
    return x, {"output": x}


def scan(x, layers):
    return jax.lax.scan(run_layer, x, layers, unroll=NUM_LAYERS)


def make_run(num_devices, unroll):
    """Return the function that runs the layers on TPUs."""
    devices = FakeDevices(
        platform="tpu",
        compute_capability=None,
        num_devices=num_devices,
    )

    @trace_for(devices)
    def run(x, layers):
        return dispatch.scan_layers(run_layer, x, layers, unroll)

    return run


def make_layers():
    """Return an input, kernels, and what else the layers need."""
    kernels = jax.random.normal(jax.random.key(0), (NUM_LAYERS, 8, 8))
    fractions = jnp.linspace(0.0, 0.5, NUM_LAYERS)
    keys = jax.random.split(jax.random.key(1), NUM_LAYERS)
    x = jax.random.normal(jax.random.key(2), (3, 8))
    return x, kernels, fractions, keys


def test_results_and_gradients_are_those_of_a_scan():
    x, kernels, fractions, keys = make_layers()

    def compute(run):
        def loss(x, kernels):
            last, outputs = run(x, (kernels, fractions, keys))
            return jnp.square(last).sum() + outputs["output"].sum(), outputs

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(x, kernels)

    results = compute(make_run(num_devices=1, unroll=NUM_LAYERS))

    jax.tree.map(np.testing.assert_array_equal, results, compute(scan))


@pytest.mark.parametrize(
    ("num_devices", "unroll", "num_loops"),
    [
        (1, NUM_LAYERS, 0),
        (1, 1, 1),
        (2, NUM_LAYERS, 1),
    ],
)
def test_only_one_tpu_without_a_loop_has_another_form(num_devices, unroll, num_loops):
    x, *layers = make_layers()

    jaxpr = jax.make_jaxpr(make_run(num_devices, unroll))(x, tuple(layers))

    names = [equation.primitive.name for equation in jaxpr.eqns]
    assert names.count("scan") == num_loops
    assert names.count("optimization_barrier") == 1 - num_loops
