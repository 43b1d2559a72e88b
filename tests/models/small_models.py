"""Models with made-up parameters, and what tests ask of them."""

import types

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose

from vit_jax.models import abstract_model as abstract


class FakeDevices(types.SimpleNamespace):
    """Devices of some platform that leave activations as they are."""

    num_devices = 1

    def __call__(self, name, activation):
        return activation


def filled(architecture):
    """The model with made-up parameters, also in the head, which starts at zero.

    Initialisers take long to compile.
    """
    rng = np.random.default_rng(0)

    def sample(leaf):
        return jnp.float32(0.2 * rng.normal(size=leaf.shape))

    return jax.tree.map(sample, abstract(architecture))


def apply(model, image_BHWC, intermediates=None, **options):
    fixed = {}
    if intermediates is not None:
        fixed["intermediates"] = intermediates

    def run(model, x, options):
        return model(x, **options, **fixed)

    return jax.jit(run)(model, image_BHWC, options)


def assert_intermediates_change_nothing(model, x, output):
    """Assert that the logits of an output with intermediates are those without."""
    plain = apply(model, x)
    assert_allclose(
        plain.logits_BK,
        output.logits_BK,
        rtol=1e-5,
        atol=1e-6,
    )


def assert_same_up_to_rounding(a, b, tolerance=1e-5):
    """Sums in another order differ by some float32 epsilons of the largest term, here the largest value."""
    leaves = jax.tree.leaves(a)
    others = jax.tree.leaves(b)
    scale = max(float(jnp.abs(leaf).max()) for leaf in leaves)

    for x, y in zip(leaves, others, strict=True):
        assert_allclose(x, y, rtol=0, atol=tolerance * scale)


def assert_each_close(actual, expected, tolerance):
    """Assert that arrays agree in pairs, relative to the largest value of each."""
    here = jax.tree.leaves(actual)
    there = jax.tree.leaves(expected)

    for array, expected_array in zip(here, there, strict=True):
        assert_same_up_to_rounding(expected_array, array, tolerance)


def images(architecture, batch=2, seed=1):
    key = jax.random.key(seed)
    shape = (batch, *architecture.image_size, 3)
    return jax.random.uniform(key, shape, minval=-1.0)


def find_equations(program, name):
    """Return the equations of a program whose primitive has this name."""
    found = []
    for equation in program.eqns:
        if equation.primitive.name == name:
            found.append(equation)
    return found


def size(tree):
    leaves = jax.tree.leaves(tree)
    return sum(leaf.size for leaf in leaves)


def layers_of(stacked, depth=2):
    """Return the parameters of each layer of a stack."""

    def read_layer(layer):
        return jax.tree.map(lambda leaf: leaf[layer], stacked)

    return [read_layer(layer) for layer in range(depth)]


def embedded(model, x):
    """Return the tokens before positions, with the class token first if there is one."""
    tokens = model.embedding(x)
    if model.class_token is None:
        return tokens

    class_token = model.class_token[...]
    class_tokens = jnp.tile(class_token, (len(x), 1, 1))
    return jnp.concatenate([class_tokens, tokens], 1)
