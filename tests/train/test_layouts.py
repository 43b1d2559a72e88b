"""On every mesh, with any parameters spread over it, training is that of one device."""

import dataclasses

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.tiny import MIXUP
from tests.train import small_runs as runs
from tests.train.test_golden_losses import with_network
from vit_jax import pytree

# Heads for eight model shards.
WIDE = [MIXUP, "model.width=32", "model.num_heads=8"]
NUM_STEPS = 10
# Parameters, replicas, model shards, attention; the data axis has the rest of eight devices. In the
# last one it has one device, and each model shard one head. The second one divides all axes.
LAYOUTS = [
    pytest.param("replicated", 1, 1, "xla", marks=pytest.mark.slow),
    pytest.param("fsdp", 2, 2, "pallas", marks=pytest.mark.newest),
    pytest.param("fsdp", 1, 8, "xla", marks=pytest.mark.slow),
]
# It moves all logits of a query alike, so its gradient is 0, and Adam makes steps of the rounding.
NO_GRADIENT = "attention/key/bias"


def layout(parameters, replicas, model):
    return [
        f"sharding.parameters={parameters}",
        f"sharding.num_replicas={replicas}",
        f"sharding.num_model_shards={model}",
    ]


def assert_same_parameters(a, b, atol):
    expected = pytree.name_leaves(b)
    for name, leaf in pytree.name_leaves(a).items():
        assert_allclose(
            np.asarray(leaf),
            np.asarray(expected[name]),
            rtol=0,
            atol=1e-3 if name.endswith(NO_GRADIENT) else atol,
            err_msg=name,
        )


@pytest.fixture(scope="module")
def one_device():
    return runs.train(runs.build(*WIDE), NUM_STEPS)


@pytest.mark.parametrize(("parameters", "replicas", "model", "attention"), LAYOUTS)
def test_every_layout_gives_the_run_of_one_device(
    one_device,
    parameters,
    replicas,
    model,
    attention,
):
    expected, expected_curve = one_device
    options = (*WIDE, *layout(parameters, replicas, model), f"model.attention={attention}")

    state, curve = runs.train(
        runs.build(*options, devices=8),
        NUM_STEPS,
    )

    assert_allclose(
        runs.losses(curve),
        runs.losses(expected_curve),
        rtol=1e-5,
    )
    assert_same_parameters(
        state.model,
        expected.model,
        atol=1e-5,
    )


@pytest.mark.slow
def test_every_layout_of_a_hybrid_gives_the_run_of_one_device():
    """It has one stage and no average: XLA compiles four stages for long."""
    hybrid = with_network("R14x0.5+ViT-mu/4")
    one = dataclasses.replace(hybrid, polyak=runs.config("polyak.factor=None").polyak)
    eight = dataclasses.replace(one, sharding=runs.config(*layout("fsdp", 2, 2)).sharding)

    _, expected = runs.train(runs.assemble_config(one, units=(1,)), 5)
    _, curve = runs.train(
        runs.assemble_config(eight, devices=8, units=(1,)),
        5,
    )

    assert_allclose(
        runs.losses(curve),
        runs.losses(expected),
        rtol=1e-4,
    )


@pytest.mark.slow
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
def test_every_layout_of_axial_blocks_and_parts_gives_the_run_of_one_device(options):
    """The other tests have mixup, the average and unrolled blocks, which XLA compiles for long."""
    fields = (*options, "input.mixup_alpha=0.0", "model.scan_unroll=1", "polyak.factor=None")

    one, expected = runs.train(runs.build(*fields), 5)
    eight, curve = runs.train(
        runs.build(*fields, *layout("fsdp", 2, 2), devices=8),
        5,
    )

    assert_allclose(
        runs.losses(curve),
        runs.losses(expected),
        rtol=1e-5,
    )
    assert_same_parameters(eight.model, one.model, atol=1e-5)


@pytest.mark.parametrize("model", [1, 2])
def test_moments_and_average_lie_with_their_parameters(model):
    """Each of the two replicas has all of a parameter; model shards share images."""
    run = runs.build(
        *layout("fsdp", 2, model),
        "polyak.factor=0.9",
        devices=8,
    )
    state = run.init_state()
    moments = state.optimizer[1]

    for tree in (state.model, state.polyak, moments.mu, moments.nu):
        kernel = tree.encoder.blocks.mlp.expand.kernel[...]
        assert kernel.addressable_shards[0].data.size == kernel.size // 4

    image = runs.first_batch(run).image_BHWC
    sizes = {shard.data.shape[0] for shard in image.addressable_shards}

    assert sizes == {16 // 8 * model}


@pytest.mark.parametrize("step", ["train_step", "evaluation_step"])
def test_what_the_compiler_is_told_reaches_both_steps(monkeypatch, step):
    monkeypatch.setattr(
        "vit_jax.train.assemble.compiler_options",
        lambda mesh, has_units: {"no_such_option": "1"},
    )
    run = runs.assemble_config(runs.config())

    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        getattr(run, step)(run.init_state(), runs.first_batch(run))
