"""Training of the last blocks, the final norm and the head of a network."""

import dataclasses

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.rejections import rejects
from tests.train import small_runs as runs
from tests.train.test_golden_losses import with_network
from tests.train.test_layouts import assert_same_parameters, layout
from tests.train.test_lora import FINETUNE, TUNING, build, flags, read_leaves
from vit_jax import pytree
from vit_jax.checkpoint import CheckpointReader, CheckpointStore
from vit_jax.config import load_recipe
from vit_jax.config.check import validate
from vit_jax.optim.by_name import count_trained_blocks, find_trained
from vit_jax.sharding.memory import count_passing_bytes
from vit_jax.train.assemble import assemble
from vit_jax.train.state import TrainState, items_of
from vit_jax.train.state_builder import architecture_of, require_encoder

LAST = ("optimizer.trained=last:1",)
LOOP = ("model.scan_unroll=1", "model.remat=full")
NETWORK = ("model.pool=gap", "model.head=linear")
BLOCKS = "encoder/blocks/"
AFTER = ("encoder/norm/", "head/")


def list_changed_layers(before, after):
    """Return whether each layer of stacked arrays differs."""
    is_changed = (after != before).reshape(len(after), -1)
    return is_changed.any(axis=1).tolist()


@pytest.mark.parametrize(
    "fields",
    [
        (),
        pytest.param(LOOP, marks=pytest.mark.slow),
        pytest.param(
            ("optimizer.name=lamb", "optimizer.layer_decay=0.5", "polyak.factor=0.9"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one by one", "loop", "lamb with layer decay"],
)
def test_the_last_block_the_norm_and_the_head_change_and_nothing_else(fields):
    run = build(*LAST, "optimizer.weight_decay=0.1", *fields)
    before = read_leaves(run.init_state().model)

    state, _ = runs.train(run, 4)

    for name, array in read_leaves(state.model).items():
        if not name.startswith(BLOCKS):
            assert (array != before[name]).any() == name.startswith(AFTER), name
            continue
        *first, last = list_changed_layers(before[name], array)
        assert not any(first), name
        assert last or name.endswith("key/bias"), name  # softmax ignores this bias


@pytest.mark.slow
def test_the_resnet_of_a_hybrid_is_frozen():
    """It has one stage instead of four, which XLA compiles for long."""
    hybrid = architecture_of(with_network("R14x0.5+ViT-mu/4"), 10)
    hybrid = dataclasses.replace(hybrid, units=(1,))
    config = load_recipe(FINETUNE, flags(*TUNING, *LAST))
    run = assemble(config, hybrid, num_examples=160, devices=jax.devices()[:1])
    before = read_leaves(run.init_state().model)

    state, _ = runs.train(run, 3)  # rate 0, then a head of zeros, which stops gradients

    after = read_leaves(state.model)
    changed = []
    for name, array in before.items():
        if (after[name] != array).any():
            changed.append(name)
    assert any(name.startswith("stem/") for name in before)
    assert any(name.startswith(BLOCKS) for name in changed)
    assert all(name.startswith((BLOCKS, *AFTER)) for name in changed), changed


def test_a_resumed_run_continues_to_the_bit(tmp_path):
    """A checkpoint has moments of the last block alone."""
    run = build(*LAST)
    first, *others = runs.batches(run, 3)
    state, _ = run.train_step(run.init_state(), place(run, first))
    store = CheckpointStore(tmp_path)
    store.save(1, items_of(state), metadata={}, metrics={})
    store.close()

    reader = CheckpointReader(tmp_path)
    items = reader.restore(1, items_of(run.abstract_state))
    resumed = TrainState(
        items["progress"]["step"],
        items["model"],
        items["optimizer"],
        None,
    )
    for batch in others:
        placed = place(run, batch)
        state, _ = run.train_step(state, placed)
        resumed, _ = run.train_step(resumed, placed)

    expected = pytree.name_leaves(jax.device_get(state))
    actual = pytree.name_leaves(jax.device_get(resumed))
    for name, array in actual.items():
        assert array.tobytes() == expected[name].tobytes(), name


def place(run, batch):
    return jax.device_put(batch, run.batch_sharding)


def compute_gradients(run):
    """Return the gradients of the first batch by name."""
    parts = run.step_parts
    state = run.init_state()
    inputs = parts.prepare_inputs(state.step, runs.first_batch(run))
    # The head begins at zero, which would stop all gradients.
    model = jax.tree.map(lambda leaf: leaf + 0.01, state.model)
    compute = jax.jit(parts.compute_gradients)
    gradients, _ = compute(model, inputs)
    return read_leaves(gradients)


@pytest.mark.slow
def test_gradients_are_those_of_full_training():
    expected = compute_gradients(build())

    gradients = compute_gradients(build(*LAST))

    for name, gradient in gradients.items():
        if name.startswith(BLOCKS):
            *_, expected_of_last = expected[name]
            assert not gradient[:-1].any(), name
            assert_allclose(gradient[-1], expected_of_last, rtol=1e-4, atol=1e-6)
        elif name.startswith(AFTER):
            assert_allclose(gradient, expected[name], rtol=1e-4, atol=1e-6)
        else:
            assert not gradient.any(), name


def test_moments_are_of_the_last_block_alone():
    state = build(*LAST).abstract_state

    moments = pytree.name_leaves(state.optimizer)

    num_layers = []
    for name, leaf in moments.items():
        if BLOCKS in name:
            num_layers.append(leaf.shape[0])
    assert set(num_layers) == {1}


@pytest.mark.slow
def test_frozen_blocks_return_intermediates_and_drop_nothing():
    run = build(
        *LAST,
        "model.dropout_fraction=0.5",
        network=(*NETWORK, "model.dropout_fraction=0.5"),
    )
    parts = run.step_parts
    state = run.init_state()
    inputs = parts.prepare_inputs(state.step, runs.first_batch(run))
    options = {"intermediates": ("blocks", "attention")}

    trained = parts.predict(state.model, inputs, **options).blocks_LBSD
    plain = state.model(inputs.images, **options).blocks_LBSD

    assert len(trained) == len(plain) > 1
    assert_allclose(trained[:-1], plain[:-1], rtol=1e-4, atol=1e-5)
    assert not np.allclose(trained[-1], plain[-1], atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "devices"),
    [
        (layout("fsdp", 2, 2), 8),
        (LOOP, 1),
        (["model.remat=dots", "optimizer.accumulation_steps=2"], 1),
    ],
    ids=["8 devices", "loop", "micro-batches"],
)
def test_every_layout_gives_the_same_run(options, devices):
    fields = (*LAST, "polyak.factor=0.9", "optimizer.layer_decay=0.5")

    expected, expected_curve = runs.train(build(*fields), 6)
    state, curve = runs.train(build(*fields, *options, devices=devices), 6)

    assert_allclose(runs.losses(curve), runs.losses(expected_curve), rtol=1e-5)
    assert_same_parameters(state.polyak, expected.polyak, atol=1e-5)


def measure_temporary(*fields):
    """Return the bytes of temporary arrays of a step whose activations are most of its memory."""
    network = (*NETWORK, "model.depth=8")
    run = build("global_batch=64", "model.remat=none", *fields, network=network)
    lowered = run.train_step.lower(run.abstract_state, runs.first_batch(run))
    memory = lowered.compile().memory_analysis()
    return memory.temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [1, 8])
def test_frozen_blocks_keep_no_activations(unroll):
    unrolled = f"model.scan_unroll={unroll}"

    of_all = measure_temporary(unrolled)
    of_last = measure_temporary(*LAST, unrolled)

    assert of_last < 0.35 * of_all


def test_formulas_count_activations_of_the_last_blocks():
    architecture = build(*LAST).architecture
    sizes = {}
    for trained_blocks in (None, 1, 0):
        sizes[trained_blocks] = count_passing_bytes(
            architecture,
            images=64,
            gradient_bytes=0,
            layer_parameters=0,
            trained_blocks=trained_blocks,
        )["activations"]

    assert sizes[None] == architecture.depth * sizes[1]
    assert sizes[0] == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ((), None),
        (("optimizer.trained=head",), 0),
        (("optimizer.frozen=embedding/*,encoder/blocks/*",), 0),
        (("optimizer.trained=last:2",), 2),
        (("optimizer.frozen=embedding/*",), None),
    ],
)
def test_blocks_with_a_backward_pass(fields, expected):
    run = build(*fields)

    trained = find_trained(run.config.optimizer)

    assert count_trained_blocks(run.abstract_state.model, trained) == expected


@pytest.mark.parametrize("value", ["last", "last:0", "last:", "last:-1", "last:1.5", "first:2"])
def test_other_values_are_rejected(value):
    with rejects("config.optimizer.trained", "'all', 'head' or 'last:N'"):
        load_recipe(FINETUNE, flags("data=digits", f"optimizer.trained={value}"))


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        (("optimizer.lora_rank=4",), "lora_rank.*'last:2'"),
        (("model.channel_weights=zero", "input.channels=4"), "channel_weights.*last:N"),
    ],
)
def test_fields_without_meaning_are_rejected(fields, rule):
    config = load_recipe(FINETUNE, flags("data=digits", "optimizer.trained=last:2", *fields))

    with rejects("config", rule):
        validate(config)


def test_a_network_without_an_encoder_is_rejected():
    resnet = architecture_of(load_recipe("pretrain_jft:R50x1"), 10)

    with rejects(
        "config.optimizer.trained='last:1'", "R50x1.*no built-in encoder.*optimizer.frozen"
    ):
        require_encoder(resnet, "last:1", is_standard=True)


def test_a_network_of_the_caller_is_rejected():
    vit = build(*LAST).architecture

    with rejects("config.optimizer.trained='last:1'", "no built-in encoder"):
        require_encoder(vit, "last:1", is_standard=False)
