"""LoRA: what is trained, what is computed, and what readers of the run's weights see."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose

from tests.integration.commands import run, succeed, summary
from tests.models.small_models import FakeDevices, apply
from tests.rejections import rejects
from tests.tiny import RECIPE, ROOT, flags
from tests.train import small_runs as runs
from tests.train.test_layouts import assert_same_parameters, layout
from vit_jax import pytree
from vit_jax.arrays import normalise
from vit_jax.checkpoint import CheckpointReader, CheckpointStore
from vit_jax.config import load_recipe
from vit_jax.config.check import validate
from vit_jax.kernels.devices import trace_for
from vit_jax.models import attention, build_model
from vit_jax.models.lora import (
    Lora,
    build_lora,
    list_factor_shapes,
    merge,
    require_adaptable,
)
from vit_jax.models.mlp import Mlp
from vit_jax.optim.schedules import build_schedule
from vit_jax.train.assemble import assemble
from vit_jax.train.state_builder import architecture_of
from vit_jax.weights import load_weights

FACTORS = ("lora_a", "lora_b")
QUERY = "encoder/blocks/attention/query"
RANK = ("optimizer.lora_rank=2", "optimizer.lora_alpha=6")
TUNING = (
    "data=digits",
    "total=20 steps",
    "global_batch=16",
    "schedule.warmup=2 steps",
    "model.compute_dtype=float32",
    "optimizer.name=adam",
    "optimizer.first_moment_dtype=float32",
    "schedule.learning_rate=0.01",
)

FINETUNE = f"{ROOT}/configs/finetune.py:any,own,rule=quick"


@functools.cache
def build(
    *fields,
    network=("model.pool=gap", "model.head=linear"),
    devices=1,
):
    """Return an assembly that fine-tunes the tiny network on the first CPU devices."""
    config = load_recipe(FINETUNE, flags(*TUNING, *fields))
    architecture = architecture_of(runs.config(*network), 10)
    if config.model.remat:
        architecture = dataclasses.replace(architecture, remat=config.model.remat)
    if config.model.scan_unroll:
        architecture = dataclasses.replace(architecture, scan_unroll=config.model.scan_unroll)

    return assemble(
        config,
        architecture,
        num_examples=160,
        devices=jax.devices()[:devices],
    )


def read_leaves(model):
    return pytree.name_leaves(jax.device_get(model))


def build_merged(lora_run, model):
    """Return the network without factors that `merge` makes."""
    merged = merge(
        read_leaves(model),
        build_lora(lora_run.config.optimizer),
    )

    def build_plain():
        return build_model(lora_run.architecture, jax.random.key(0))

    shapes = jax.eval_shape(build_plain)
    return pytree.map_with_names(lambda name, _: merged[name], shapes)


def count_numbers(tree):
    count = 0
    for leaf in jax.tree.leaves(tree):
        if leaf.ndim:
            count += leaf.size
    return count


@pytest.fixture(scope="module")
def trained():
    """An assembly with LoRA, its first state on the host, and the state after some steps."""
    run = build(*RANK, "optimizer.weight_decay=0.1")
    first = read_leaves(run.init_state().model)
    state, _ = runs.train(run, 4)
    return run, first, state


def is_trained(name):
    return name.endswith(FACTORS) or name.startswith("head/")


def test_factors_and_head_are_trained_and_nothing_else(trained):
    _, first, state = trained
    last = read_leaves(state.model)
    trained_size = 0

    for name, leaf in first.items():
        is_changed = leaf.tobytes() != last[name].tobytes()
        assert is_changed == is_trained(name), name
        if is_changed:
            trained_size += leaf.size
        if name.endswith("lora_b"):
            assert not leaf.any(), name

    moments = count_numbers(state.optimizer)
    assert moments == 2 * trained_size, "Adam has no moments of frozen parameters"


def read_images(run):
    """Return normalised images and labels of a batch."""
    batch = next(runs.batches(run, 1))
    return normalise(batch.image_BHWC, "float32"), batch.label_B


def test_the_merged_network_computes_the_same(trained):
    run, _, state = trained
    images, _ = read_images(run)

    merged_model = build_merged(run, state.model)
    untrained_model = run.init_state().model

    adapted = apply(state.model, images).logits_BK
    merged = apply(merged_model, images).logits_BK
    untrained = apply(untrained_model, images).logits_BK

    largest = float(np.abs(merged).max())
    assert_allclose(adapted, merged, rtol=0, atol=1e-6 * largest)
    largest_change = np.abs(adapted - untrained).max()
    assert largest_change > 1e-3


def test_merged_kernels_follow_the_rule_of_peft():
    """W + (alpha / r) B A, with the kernels of PyTorch, (O, I), (O, r) and (r, I)."""
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(160, 96))
    a = rng.normal(size=(4, 96))
    b = rng.normal(size=(160, 4))
    expected = kernel + 12 / 4 * b @ a
    parameters = {
        f"{QUERY}/kernel": np.float32(kernel.T[None]),
        f"{QUERY}/lora_a": np.float32(a.T[None]),
        f"{QUERY}/lora_b": np.float32(b.T[None]),
    }

    merged = merge(parameters, Lora(rank=4, scale=12 / 4, layers=()))

    assert list(merged) == [f"{QUERY}/kernel"]
    assert_allclose(
        merged[f"{QUERY}/kernel"][0].T,
        expected,
        rtol=0,
        atol=1e-6 * expected.max(),
    )


def multiply_merged_kernels(x, layers, output_scale=None):
    """Return the products of `multiply_layers` in the form W + scale A B."""
    assert output_scale is None
    products = []
    for layer in layers:
        product = jnp.matmul(
            layer.lora_a[...],
            layer.lora_b[...],
            precision="highest",
        )
        kernel = layer.kernel[...] + layer.lora_scale * product
        products.append(x @ kernel)
    return products


@pytest.mark.slow
def test_a_branch_has_the_losses_of_merged_kernels(monkeypatch):
    _, branch_curve = runs.train(build(*RANK), 20)

    monkeypatch.setattr(attention, "multiply_layers", multiply_merged_kernels)
    merged_run = build.__wrapped__(*RANK)
    _, merged_curve = runs.train(merged_run, 20)

    assert_allclose(runs.losses(branch_curve), runs.losses(merged_curve), rtol=1e-5)


def test_frozen_kernels_are_stored_in_the_compute_dtype(tmp_path):
    """A checkpoint that holds them in float32, as earlier ones do, is restored."""
    run = build(*RANK, "model.compute_dtype=bfloat16")
    state = run.abstract_state
    dtypes = {}
    earlier = {}
    for name, leaf in pytree.name_leaves(state.model).items():
        dtypes[name] = leaf.dtype
        earlier[name] = jnp.full(leaf.shape, 1.001, jnp.float32)
    store = CheckpointStore(tmp_path)
    store.save(1, {"model": earlier}, metadata={}, metrics={})
    store.close()

    restored = CheckpointReader(tmp_path).restore(1, {"model": state.model})

    leaves = pytree.name_leaves(restored["model"])
    for name, leaf in leaves.items():
        is_frozen_kernel = name.startswith("encoder/blocks/") and name.endswith("kernel")
        expected = "bfloat16" if is_frozen_kernel else "float32"
        assert dtypes[name] == leaf.dtype == expected, name
        assert_allclose(np.float32(leaf), 1.001, rtol=2**-8)
    merged = merge(jax.device_get(leaves), build_lora(run.config.optimizer))
    assert {array.dtype for array in merged.values()} == {np.dtype("float32")}


@pytest.mark.parametrize("is_gated", [False, True], ids=["GELU", "gated"])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_activated_units_are_computed_again(is_gated, platform):
    """The backward pass keeps hidden units, of the gate also, and computes what follows them."""
    mlp = Mlp(
        8,
        40,
        form="exact",
        is_gated=is_gated,
        dtype=jnp.bfloat16,
        rngs=nnx.Rngs(0),
    )
    mlp.contract.lora_scale = 1.0
    mlp.contract.lora_a = nnx.Param(jnp.ones((40, 2)))
    mlp.contract.lora_b = nnx.Param(jnp.ones((2, 8)))
    x_RD = jnp.linspace(-1, 1, 16 * 8, dtype=jnp.bfloat16).reshape(16, 8)

    def differentiate(mlp, x_RD):
        _, pull_back = jax.vjp(Mlp.__call__, mlp, x_RD)
        kept = [leaf.shape for leaf in jax.tree.leaves(pull_back)]
        assert kept.count((16, 40)) == 1 + is_gated
        return pull_back(jnp.ones_like(x_RD))

    with trace_for(FakeDevices(platform=platform)):
        gradients, _ = jax.jit(differentiate)(mlp, x_RD)

    assert np.abs(gradients.contract.lora_a[...]).max() > 0


def assert_near(actual, expected):
    largest = np.abs(expected).max()
    assert_allclose(actual, expected, rtol=0, atol=1e-5 * largest)


def test_gradients_of_factors_are_those_of_the_merged_kernels(trained):
    """With W + s A B: dA = s dW B', dB = s A' dW, where dW is the gradient of the plain network."""
    run, _, state = trained
    images, labels = read_images(run)
    scale = build_lora(run.config.optimizer).scale
    parameters = read_leaves(state.model)

    def loss(model):
        log_probability_BK = jax.nn.log_softmax(model(images).logits_BK)
        return -log_probability_BK[np.arange(len(labels)), labels].mean()

    compute_gradient = jax.jit(jax.grad(loss))
    gradients = read_leaves(compute_gradient(state.model))
    of_merged = read_leaves(compute_gradient(build_merged(run, state.model)))
    layers = []
    for name in gradients:
        if name.endswith("/lora_a"):
            layers.append(name.removesuffix("/lora_a"))

    assert scale == 3.0
    assert len(layers) == 6
    for layer in layers:
        kernel = of_merged[f"{layer}/kernel"]
        a = parameters[f"{layer}/lora_a"]
        b = parameters[f"{layer}/lora_b"]
        assert_near(
            gradients[f"{layer}/lora_a"],
            scale * kernel @ b.swapaxes(1, 2),
        )
        assert_near(
            gradients[f"{layer}/lora_b"],
            scale * a.swapaxes(1, 2) @ kernel,
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "devices"),
    [
        (layout("fsdp", 2, 2), 8),
        (["model.remat=full", "model.scan_unroll=1"], 1),
        (["model.remat=dots", "optimizer.accumulation_steps=2"], 1),
    ],
    ids=["8 devices", "loop", "micro-batches"],
)
def test_every_layout_gives_the_same_run(options, devices):
    fields = (*RANK, "polyak.factor=0.9")

    expected, expected_curve = runs.train(build(*fields), 6)
    state, curve = runs.train(
        build(*fields, *options, devices=devices),
        6,
    )

    assert_allclose(
        runs.losses(curve),
        runs.losses(expected_curve),
        rtol=1e-5,
    )
    assert_same_parameters(
        state.polyak,
        expected.polyak,
        atol=1e-5,
    )


def measure_memory(*fields):
    """Return the bytes of the arguments and temporary arrays of a step in a loop over layers."""
    network = ("model.width=256", "model.mlp_dim=1024", "model.depth=8", "model.pool=gap")
    loop = ("global_batch=2", "model.scan_unroll=1", "model.remat=full")
    run = build(*fields, *loop, network=network)

    batch = runs.first_batch(run)
    lowered = run.train_step.lower(run.abstract_state, batch)
    step = lowered.compile()
    sizes = step.memory_analysis()
    return sizes.argument_size_in_bytes + sizes.temp_size_in_bytes


@pytest.mark.slow
def test_a_step_needs_less_memory():
    """Full gradients exist for one layer at a time; frozen parameters have no moments."""
    assert measure_memory("optimizer.lora_rank=4") < 0.3 * measure_memory()


SHAPES = {
    "encoder/blocks/mlp/expand/kernel": (3, 8, 32),
    f"{QUERY}/kernel": (3, 8, 8),
    f"{QUERY}/bias": (3, 8),
    "head/linear/kernel": (8, 5),
}


def test_shapes_of_factors():
    of_query = list_factor_shapes(
        SHAPES,
        Lora(
            rank=2,
            scale=1.0,
            layers=("query",),
        ),
    )
    of_all = list_factor_shapes(
        SHAPES,
        Lora(
            rank=8,
            scale=1.0,
            layers=(),
        ),
    )

    assert of_query == {
        f"{QUERY}/lora_a": (3, 8, 2),
        f"{QUERY}/lora_b": (3, 2, 8),
    }
    assert len(of_all) == 4


@pytest.mark.parametrize(
    ("lora", "field", "rule"),
    [
        (Lora(rank=9, scale=1.0, layers=()), "lora_rank=9", r"must lie in \[1, 8\]"),
        (Lora(rank=2, scale=1.0, layers=("gate",)), "lora_layers=gate", "no gate"),
    ],
    ids=["rank", "layers"],
)
def test_factors_that_the_network_cannot_have(lora, field, rule):
    with rejects(f"optimizer.{field}", rule):
        list_factor_shapes(SHAPES, lora)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (("optimizer.lora_rank=0",), "optimizer.lora_rank=0"),
        (("optimizer.lora_alpha=8",), "optimizer.lora_alpha"),
        (("optimizer.lora_layers=query",), "optimizer.lora_layers"),
        (("optimizer.lora_rank=4", "optimizer.trained=head"), "optimizer.lora_rank"),
    ],
)
def test_values_without_meaning_are_rejected(fields, field):
    config = load_recipe(FINETUNE, flags("data=digits", *fields))

    with rejects(field):
        validate(config)


@pytest.mark.parametrize("frozen", ["encoder/*", "*lora_*"])
def test_frozen_factors_are_rejected(frozen):
    with rejects("config.optimizer.lora_rank=2", "no effect.*freezes all factors"):
        build(*RANK, f"optimizer.frozen={frozen}")


def test_patterns_of_parameters_that_lora_freezes_are_rejected():
    with rejects("optimizer.frozen", "no parameter matches 'embedding/"):
        build(*RANK, "optimizer.frozen=embedding/*")


def test_patterns_freeze_factors():
    partial = build(*RANK, "optimizer.frozen=encoder/blocks/mlp/*").abstract_state.optimizer
    complete = build(*RANK).abstract_state.optimizer

    assert count_numbers(partial) < count_numbers(complete)


@pytest.mark.parametrize(
    ("factor", "least"),
    [("lora_a", 0.0), ("lora_b", 0.02)],
)
def test_lamb_scales_updates_of_factors_to_their_norms(factor, least):
    """B begins at zero; its norm counts as that of a standard deviation of 0.02 at least.

    Each layer has one trust ratio.
    """
    run = build(*RANK, "optimizer.name=lamb", "schedule.warmup=0 steps")
    rate = float(build_schedule(run.config.schedule, run.steps)(2))
    name = f"encoder/blocks/mlp/expand/{factor}"

    state, _ = runs.train(run, 2)
    before = read_leaves(state.model)[name]
    later, _ = run.train_step(state, runs.first_batch(run))
    after = read_leaves(later.model)[name]

    for old, new in zip(before, after, strict=True):
        least_norm = least * np.sqrt(old.size)
        norm = max(np.linalg.norm(old), least_norm)
        change = np.linalg.norm(new - old)
        assert change == pytest.approx(rate * norm, rel=1e-3)


def test_pretraining_has_no_lora():
    with rejects("optimizer.lora_rank=4", "vit-jax finetune"):
        validate(load_recipe(str(RECIPE), flags("optimizer.lora_rank=4")))


@pytest.mark.parametrize("network", ["resnet", "custom block"])
def test_networks_without_built_in_blocks_are_rejected(network):
    if network == "resnet":
        architecture = architecture_of(load_recipe("pretrain_jft:R50x1"), 10)
    else:
        block = "tests.models.test_own_parts:OwnBlock"
        architecture = dataclasses.replace(
            architecture_of(runs.config(), 10),
            block=block,
        )

    with rejects("optimizer.lora_rank", "no built-in blocks"):
        require_adaptable(architecture)


def read_first_loss(workdir):
    """Return the text of the loss of the first logged step."""
    text = (workdir / "metrics.jsonl").read_text()
    first_line, *_ = text.splitlines()
    _, _, rest = first_line.partition('"train_loss": ')
    loss, _, _ = rest.partition(",")
    return loss


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
def test_the_first_loss_is_that_of_full_fine_tuning_and_readers_see_a_plain_network(
    tiny_run,
    data_dir,
    tmp_path,
):
    fields = (
        "data=digits",
        f"init_from={tiny_run.workdir}",
        f"input.data_dir={data_dir}",
        "input.image_size=8,8",
        "total=4 steps",
        "schedule.warmup=1 steps",
        "global_batch=16",
        "evaluation.every=4 steps",
        "checkpoint.every=4 steps",
        "logging.every=1 steps",
        "logging.tensorboard=False",
        "model.compute_dtype=float32",
    )
    words = ["finetune", f"--config={FINETUNE}", *flags(*fields)]
    full = tmp_path / "full"
    adapted = tmp_path / "adapted"
    with_lora = [*words, f"--workdir={adapted}", "--config.optimizer.lora_rank=4"]
    kernel = "encoder/blocks/mlp/expand/kernel"

    succeed([*words, f"--workdir={full}"])
    out = succeed(with_lora)
    weights = load_weights(str(adapted))
    source = load_weights(str(tiny_run.workdir))
    evaluated = succeed(["evaluate", str(adapted), "--data=digits", f"--data_dir={data_dir}"])

    assert "; trained " in out
    assert read_first_loss(full) == read_first_loss(adapted)
    expected = load_weights(str(full))
    assert weights.parameters.keys() == expected.parameters.keys()
    assert any("LoRA" in note for note in weights.notes)
    assert weights.training.lora_rank == 4
    assert not np.array_equal(weights.parameters[kernel], source.parameters[kernel])
    assert f"{summary(adapted)['test_loss']:.4f}" in evaluated

    # A finished run stays one.
    succeed(with_lora)
    other_rank = run([*words, f"--workdir={adapted}", "--config.optimizer.lora_rank=2"])

    assert other_rank.code == 2
