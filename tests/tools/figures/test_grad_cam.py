"""Grad-CAM against a case worked by hand, and against the formula for a network whose end is
linear.
"""

import jax
import jax.numpy as jnp
from numpy.testing import assert_allclose

from tests.evals.samples import sample_pixels
from tests.weights.small_networks import HYBRID, NETWORKS, weights_of
from vit_jax.api import from_weights
from vit_jax.tools.figures.grad_cam import class_activation, class_activations


def test_a_case_worked_by_hand():
    """Two channels whose mean gradients are 2 and -1: 2 x first - second, where that is positive."""
    first = [1.0, 0.0, 3.0, 1.0]
    second = [0.0, 5.0, 2.0, 2.0]
    first_gradient = [0.0, 4.0, 2.0, 2.0]
    second_gradient = [-4.0, 0.0, 0.0, 0.0]

    def build_map(*channels):
        map_CN = jnp.array(channels)
        return map_CN.T.reshape(1, 2, 2, 2)

    found = class_activation(
        build_map(first, second),
        build_map(first_gradient, second_gradient),
    )

    assert found.ravel().tolist() == [2.0, 0.0, 4.0, 0.0]


def test_of_a_resnet_whose_end_is_linear():
    """Average and linear layer after the last map: the gradient is the class's column of the layer,
    everywhere.
    """
    model = from_weights(weights_of(NETWORKS["postactivation"]))
    pixels = sample_pixels(3, model.architecture.image_size)
    output = model(pixels, intermediates=("stages",))
    label_B = output.logits_BK.argmax(axis=1)
    probability_BK = jax.nn.softmax(output.logits_BK)

    map_BHWC = output.stages_BHWC[-1]
    kernel_CK = model.module.head.linear.kernel[...]
    _, height, width, _ = map_BHWC.shape
    weighted = jnp.einsum(
        "BHWC,CB->BHW",
        map_BHWC,
        kernel_CK[:, label_B],
    )
    expected = jnp.maximum(weighted, 0) / (height * width)
    largest = float(expected.max())

    found = class_activations(model, pixels)

    assert found["label"].tolist() == label_B.tolist()
    assert largest > 0
    assert_allclose(
        found["activation"],
        expected,
        rtol=1e-5,
        atol=1e-5 * largest,
    )
    assert_allclose(
        found["probability"],
        probability_BK.max(axis=1),
        rtol=1e-5,
        atol=1e-5,
    )


def test_of_a_hybrid_it_has_the_size_of_the_map():
    model = from_weights(weights_of(HYBRID))
    pixels = sample_pixels(2, HYBRID.image_size)

    found = class_activations(model, pixels)
    activation = found["activation"]

    assert activation.shape == (2, *HYBRID.map_size)
    assert activation.any()
