import numpy as np
import pytest

from tests.weights.reference import networks
from tests.weights.small_networks import NETWORKS, assert_same
from vit_jax.weights.names.ours import stack, stacked_name, stacked_shapes, unstack, unstacked_shapes


@pytest.mark.parametrize("network", NETWORKS)
def test_stacking_and_taking_apart_are_inverse(network):
    a = NETWORKS[network]
    parameters = networks.parameters(a)
    apart = unstack(parameters)
    assert {name: array.shape for name, array in apart.items()} == unstacked_shapes(a)
    assert_same(stack(apart, stacked_shapes(a)), parameters)


def test_layers_are_numbered_and_in_their_places():
    parameters = {
        "encoder/blocks/mlp/expand/bias": np.arange(12.0).reshape(12, 1),
        "stem/stage2/first/conv1/kernel": np.full((1,), -1.0),
        "stem/stage2/rest/conv1/kernel": np.arange(2.0).reshape(2, 1),
        "encoder/norm/scale": np.ones(1),
    }
    apart = {name: float(array[0]) for name, array in unstack(parameters).items()}
    assert apart["encoder/blocks/10/mlp/expand/bias"] == 10
    assert apart["stem/stage2/unit1/conv1/kernel"] == -1
    assert apart["stem/stage2/unit2/conv1/kernel"] == 0
    assert apart["stem/stage2/unit3/conv1/kernel"] == 1
    assert apart["encoder/norm/scale"] == 1
    assert stacked_name("stem/stage2/unit3/conv1/kernel") == ("stem/stage2/rest/conv1/kernel", 1)
