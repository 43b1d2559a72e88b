"""Grad-CAM against a case worked by hand, and against the formula for a network whose end is
linear.
"""

import jax.numpy as jnp
import numpy as np

from tests.evals.samples import sample_pixels
from tests.weights.small_networks import HYBRID, NETWORKS, weights_of
from vit_jax.api import from_weights
from vit_jax.tools.figures.grad_cam import class_activation, class_activations


def test_a_case_worked_by_hand():
    """Two channels whose mean gradients are 2 and -1: 2 x first - second, where that is positive."""
    first = jnp.array([[1.0, 0.0], [3.0, 1.0]])
    second = jnp.array([[0.0, 5.0], [2.0, 2.0]])
    first_gradient = jnp.array([[0.0, 4.0], [2.0, 2.0]])
    second_gradient = jnp.array([[-4.0, 0.0], [0.0, 0.0]])
    map_HWC = jnp.stack([first, second], axis=-1)
    gradient_HWC = jnp.stack(
        [first_gradient, second_gradient],
        axis=-1,
    )

    found = class_activation(map_HWC[None], gradient_HWC[None])

    assert found.tolist() == [[[2.0, 0.0], [4.0, 0.0]]]


def test_of_a_resnet_whose_end_is_linear():
    """Average and linear layer after the last map: the gradient is the class's column of the layer,
    everywhere.
    """
    model = from_weights(weights_of(NETWORKS["postactivation"]))
    pixels = sample_pixels(3, model.architecture.image_size)
    output = model(pixels, intermediates=("stages",))
    label = np.asarray(output.logits_BK).argmax(axis=1)

    map_BHWC = np.asarray(output.stages_BHWC[-1])
    column_CB = np.asarray(model.module.head.linear.kernel[...])[:, label]
    num_places = np.prod(map_BHWC.shape[1:3])
    weighted = np.einsum("BHWC,CB->BHW", map_BHWC, column_CB)
    expected = np.maximum(weighted, 0) / num_places
    shares = np.exp(output.logits_BK) / np.exp(output.logits_BK).sum(axis=1, keepdims=True)

    found = class_activations(model, pixels)

    assert found["label"].tolist() == label.tolist()
    assert expected.any()
    assert np.allclose(found["activation"], expected, atol=1e-5 * expected.max())
    assert np.allclose(found["probability"], shares.max(axis=1), atol=1e-5)


def test_of_a_hybrid_it_has_the_size_of_the_map():
    model = from_weights(weights_of(HYBRID))
    found = class_activations(model, sample_pixels(2, HYBRID.image_size))

    assert found["activation"].shape == (2, *HYBRID.map_size)
    assert found["activation"].any()
