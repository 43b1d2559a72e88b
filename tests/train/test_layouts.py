"""However the mesh is cut and whatever is spread over it, training is that of one device."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.train import small_runs as runs
from tests.train.test_golden_losses import with_network
from vit_jax import pytree

WIDE = ["model.width=32", "model.num_heads=8"]  # heads for eight model shards
NUM_STEPS = 10
# Parameters, replicas, model shards, attention; the data axis has the rest of eight devices
LAYOUTS = [
    ("replicated", 1, 1, "xla"),
    ("fsdp", 2, 2, "pallas"),
    ("fsdp", 1, 8, "xla"),  # a data axis of one device, and one head for each model shard
]
NO_GRADIENT = "attention/key/bias"
"""It moves all logits of a query alike, so its gradient is 0, and Adam makes steps of what rounding leaves of that."""


def layout(parameters, replicas, model):
    sizes = (f"sharding.num_replicas={replicas}", f"sharding.num_model_shards={model}")
    return [f"sharding.parameters={parameters}", *sizes]


def assert_same_parameters(a, b, atol):
    a = pytree.named_leaves(a)
    b = pytree.named_leaves(b)

    for name in a:
        bound = 1e-3 if name.endswith(NO_GRADIENT) else atol
        np.testing.assert_allclose(
            np.asarray(a[name]),
            np.asarray(b[name]),
            rtol=0,
            atol=bound,
            err_msg=name,
        )


@pytest.fixture(scope="module")
def one_device():
    return runs.train(runs.build(*WIDE), NUM_STEPS)


@pytest.mark.newest
@pytest.mark.parametrize(("parameters", "replicas", "model", "attention"), LAYOUTS)
def test_every_layout_gives_the_run_of_one_device(
    one_device, parameters, replicas, model, attention
):
    options = (*WIDE, *layout(parameters, replicas, model), f"model.attention={attention}")
    state, curve = runs.train(runs.build(*options, devices=8), NUM_STEPS)

    np.testing.assert_allclose(runs.losses(curve), runs.losses(one_device[1]), rtol=1e-5)
    assert_same_parameters(state.model, one_device[0].model, atol=1e-5)


@pytest.mark.slow
def test_resnet_and_transformer_in_one_likewise():
    one = with_network("R14x0.5+ViT-mu/4")
    eight = dataclasses.replace(one, sharding=runs.config(*layout("fsdp", 2, 2)).sharding)
    units = {"units": (1,)}  # instead of all four, which XLA compiles for long
    _, expected = runs.train(runs.assemble_config(one, **units), 5)
    _, curve = runs.train(runs.assemble_config(eight, devices=8, **units), 5)

    np.testing.assert_allclose(runs.losses(curve), runs.losses(expected), rtol=1e-4)


@pytest.mark.newest
@pytest.mark.parametrize(
    "options",
    [
        ("model.block=axial", "model.position_embedding=relative"),
        (
            "model.rope=centred",
            "model.registers=2",
            "model.mlp=swiglu_norm",
            "model.layer_scale=0.1",
        ),
    ],
    ids=["axial", "parts"],
)
def test_axial_blocks_and_parts_likewise(options):
    one, curve_of_one = runs.train(runs.build(*options), 5)
    eight, curve = runs.train(runs.build(*options, *layout("fsdp", 2, 2), devices=8), 5)

    np.testing.assert_allclose(runs.losses(curve), runs.losses(curve_of_one), rtol=1e-5)
    assert_same_parameters(eight.model, one.model, atol=1e-5)


@pytest.mark.parametrize("model", [1, 2])
def test_moments_and_average_lie_with_their_parameters(model):
    run = runs.build(*layout("fsdp", 2, model), "polyak.factor=0.9", devices=8)
    state = run.init_state()

    for tree in (state.model, state.polyak, state.optimizer[1].mu, state.optimizer[1].nu):
        kernel = tree.encoder.blocks.mlp.expand.kernel[...]
        # Each of the two replicas has all of it.
        assert kernel.addressable_shards[0].data.size == kernel.size // 4

    image = runs.first_batch(run).image_BHWC  # shared by model shards
    assert {shard.data.shape[0] for shard in image.addressable_shards} == {16 // 8 * model}


@pytest.mark.parametrize("step", ["train_step", "evaluation_step"])
def test_what_the_compiler_is_told_reaches_both_steps(monkeypatch, step):
    monkeypatch.setattr(
        "vit_jax.train.step_compiler.compiler_options",
        lambda mesh: {"no_such_option": "1"},
    )
    run = runs.assemble_config(runs.config())

    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        getattr(run, step)(run.init_state(), runs.first_batch(run))
