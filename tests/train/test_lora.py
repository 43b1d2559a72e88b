"""LoRA: what is trained, what is computed, and what readers of the run's weights see."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from tests.integration.commands import run, succeed, summary
from tests.models.small_models import apply
from tests.rejections import rejects
from tests.tiny import RECIPE, ROOT, flags
from tests.train import small_runs as runs
from tests.train.test_layouts import assert_same_parameters, layout
from vit_jax import pytree
from vit_jax.arrays import normalise
from vit_jax.config import load_recipe
from vit_jax.config.check import validate
from vit_jax.models import build_model
from vit_jax.models.lora import Lora, build_lora, list_factor_shapes, merge, require_adaptable
from vit_jax.train.assemble import architecture_of, assemble, schedule_of
from vit_jax.weights import load_weights

FACTORS = ("lora_a", "lora_b")
RANK = ("optimizer.lora_rank=2", "optimizer.lora_alpha=6")
TUNING = (
    "data=digits",
    "total=20 steps",
    "global_batch=16",
    "schedule.warmup=2 steps",
    "model.compute_dtype=float32",
)
TUNING += (
    "optimizer.name=adam",
    "optimizer.first_moment_dtype=float32",
    "schedule.learning_rate=0.01",
)


@functools.cache
def build(*fields, network=("model.pool=gap", "model.head=linear"), devices=1):
    """Return an assembly that fine-tunes the tiny network on the first CPU devices."""
    config = load_recipe(
        str(ROOT / "configs/finetune.py:any,own,rule=quick"),
        flags(*TUNING, *fields),
    )
    architecture = architecture_of(runs.config(*network), 10)
    of_layout = {name: getattr(config.model, name) for name in ("remat", "scan_unroll")}
    architecture = dataclasses.replace(
        architecture,
        **{name: value for name, value in of_layout.items() if value},
    )

    return assemble(config, architecture, num_examples=160, devices=jax.devices()[:devices])


def values(model):
    return pytree.named_leaves(jax.device_get(model))


def plain(lora_run, model):
    """The network without factors that `merge` makes."""
    merged = merge(values(model), build_lora(lora_run.config.optimizer))
    shapes = jax.eval_shape(lambda: build_model(lora_run.architecture, jax.random.key(0)))

    return pytree.map_with_names(lambda name, _: merged[name], shapes)


@pytest.fixture(scope="module")
def trained():
    """An assembly with LoRA, its first state on the host, and the state after some steps."""
    made = build(*RANK, "optimizer.weight_decay=0.1")
    return made, values(made.init_state().model), runs.train(made, 4)[0]


def test_factors_and_head_are_trained_and_nothing_else(trained):
    _, first, state = trained
    last = values(state.model)
    changed = {name for name in first if first[name].tobytes() != last[name].tobytes()}

    assert changed == {name for name in first if name.endswith(FACTORS) or name.startswith("head/")}

    trained_size = sum(first[name].size for name in changed)
    moments = sum(leaf.size for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim)

    assert moments == 2 * trained_size, "Adam has no moments of frozen parameters"
    assert all(not first[name].any() for name in first if name.endswith("lora_b"))


def test_the_merged_network_computes_the_same(trained):
    made, _, state = trained
    batch = next(runs.batches(made, 1))
    images = normalise(batch.image_BHWC, "float32")
    adapted = apply(state.model, images).logits_BK
    merged = apply(plain(made, state.model), images).logits_BK

    np.testing.assert_allclose(adapted, merged, rtol=0, atol=1e-6 * float(np.abs(merged).max()))
    assert np.abs(adapted - apply(made.init_state().model, images).logits_BK).max() > 1e-3


def test_gradients_of_factors_are_those_of_the_merged_kernels(trained):
    """With W + s A B: dA = s dW B', dB = s A' dW, where dW is the gradient of the plain network."""
    made, _, state = trained
    batch = next(runs.batches(made, 1))
    images = normalise(batch.image_BHWC, "float32")
    labels = batch.label_B

    def loss(model):
        return -jax.nn.log_softmax(model(images).logits_BK)[np.arange(len(labels)), labels].mean()

    found = values(jax.jit(jax.grad(loss))(state.model))
    of_plain = values(jax.jit(jax.grad(loss))(plain(made, state.model)))
    parameters = values(state.model)
    scale = build_lora(made.config.optimizer).scale

    assert scale == 3.0

    layers = [name.removesuffix("/lora_a") for name in found if name.endswith("/lora_a")]
    assert len(layers) == 6

    for layer in layers:
        kernel = of_plain[f"{layer}/kernel"]
        a = parameters[f"{layer}/lora_a"]
        b = parameters[f"{layer}/lora_b"]

        for name, expected in {
            "lora_a": kernel @ b.swapaxes(1, 2),
            "lora_b": a.swapaxes(1, 2) @ kernel,
        }.items():
            expected = scale * expected
            np.testing.assert_allclose(
                found[f"{layer}/{name}"],
                expected,
                rtol=0,
                atol=1e-5 * np.abs(expected).max(),
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
    (expected, curve), (state, found) = (
        runs.train(build(*RANK, "polyak.factor=0.9", *more, devices=count), 6)
        for more, count in (([], 1), (options, devices))
    )

    np.testing.assert_allclose(runs.losses(found), runs.losses(curve), rtol=1e-5)
    assert_same_parameters(state.polyak, expected.polyak, atol=1e-5)


@pytest.mark.slow
def test_a_step_needs_less_memory():
    """In a loop over layers, full gradients exist for one layer at a time; frozen parameters have no moments."""
    network = ("model.width=256", "model.mlp_dim=1024", "model.depth=8", "model.pool=gap")

    def needed(*fields):
        loop = ("global_batch=2", "model.scan_unroll=1", "model.remat=full")
        made = build(*fields, *loop, network=network)
        batch = runs.first_batch(made)
        sizes = made.train_step.lower(made.abstract_state, batch).compile().memory_analysis()

        return sizes.argument_size_in_bytes + sizes.temp_size_in_bytes

    assert needed("optimizer.lora_rank=4") < 0.3 * needed()


def test_shapes_of_factors():
    shapes = {
        "encoder/blocks/mlp/expand/kernel": (3, 8, 32),
        "encoder/blocks/attention/query/kernel": (3, 8, 8),
    }
    shapes |= {"encoder/blocks/attention/query/bias": (3, 8), "head/linear/kernel": (8, 5)}
    some = list_factor_shapes(shapes, Lora(rank=2, scale=1.0, layers=("query",)))
    query = "encoder/blocks/attention/query"

    assert some == {f"{query}/lora_a": (3, 8, 2), f"{query}/lora_b": (3, 2, 8)}
    assert len(list_factor_shapes(shapes, Lora(rank=8, scale=1.0, layers=()))) == 4
    with rejects("optimizer.lora_rank=9", r"must lie in \[1, 8\]"):
        list_factor_shapes(shapes, Lora(rank=9, scale=1.0, layers=()))

    with rejects("optimizer.lora_layers=gate", "no gate"):
        list_factor_shapes(shapes, Lora(rank=2, scale=1.0, layers=("gate",)))


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
    with rejects(field):
        validate(
            load_recipe(
                str(ROOT / "configs/finetune.py:any,own,rule=quick"),
                flags("data=digits", *fields),
            )
        )


def test_patterns_of_parameters_that_lora_freezes_are_rejected():
    with rejects("optimizer.frozen", "no parameter matches 'embedding/"):
        build(*RANK, "optimizer.frozen=embedding/*")

    kept = build(*RANK, "optimizer.frozen=encoder/blocks/mlp/*")
    assert sum(leaf.size for leaf in jax.tree.leaves(kept.abstract_state.optimizer)) < sum(
        leaf.size for leaf in jax.tree.leaves(build(*RANK).abstract_state.optimizer)
    )


def test_lamb_scales_updates_of_factors_to_their_norms():
    """B begins at zero; its norm counts as that of a standard deviation of 0.02 at least."""
    made = build(*RANK, "optimizer.name=lamb", "schedule.warmup=0 steps")
    state, _ = runs.train(made, 2)
    later, _ = made.train_step(state, runs.first_batch(made))
    before = values(runs.train(made, 2)[0].model)
    after = values(later.model)
    rate = float(schedule_of(made.config, made.steps)(2))

    for factor, least in (("lora_a", 0.0), ("lora_b", 0.02)):
        name = f"encoder/blocks/mlp/expand/{factor}"
        for old, new in zip(
            before[name],
            after[name],
            strict=True,
        ):  # one trust ratio for each layer
            norm = max(np.linalg.norm(old), least * np.sqrt(old.size))
            assert np.linalg.norm(new - old) == pytest.approx(rate * norm, rel=1e-3)


def test_pretraining_has_no_lora():
    with rejects("optimizer.lora_rank=4", "vit-jax finetune"):
        validate(load_recipe(str(RECIPE), flags("optimizer.lora_rank=4")))


@pytest.mark.parametrize("name", ["R50x1", "tests.models.test_own_parts:OwnBlock"])
def test_networks_without_our_blocks_are_rejected(name):
    a = architecture_of(runs.config(), 10)
    other = (
        dataclasses.replace(a, block=name)
        if ":" in name
        else architecture_of(load_recipe("pretrain_jft:R50x1"), 10)
    )

    with rejects("optimizer.lora_rank", "no built-in blocks"):
        require_adaptable(other)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
def test_the_first_loss_is_that_of_full_fine_tuning_and_readers_see_a_plain_network(
    tiny_run, data_dir, tmp_path
):
    fields = (
        "data=digits",
        f"init_from={tiny_run.workdir}",
        f"input.data_dir={data_dir}",
        "input.image_size=8,8",
    )
    fields += (
        "total=4 steps",
        "schedule.warmup=1 steps",
        "global_batch=16",
        "evaluation.every=4 steps",
        "logging.every=1 steps",
    )
    words = [
        "finetune",
        f"--config={ROOT}/configs/finetune.py:any,own,rule=quick",
        *flags(*fields, "logging.tensorboard=False", "model.compute_dtype=float32"),
    ]
    full = tmp_path / "full"
    adapted = tmp_path / "adapted"
    succeed([*words, f"--workdir={full}"])
    out = succeed([*words, f"--workdir={adapted}", "--config.optimizer.lora_rank=4"])

    assert "; trained " in out

    first = [(folder / "metrics.jsonl").read_text().splitlines()[0] for folder in (full, adapted)]
    assert len({line.partition('"train_loss": ')[2].partition(",")[0] for line in first}) == 1

    weights = load_weights(str(adapted))
    assert weights.parameters.keys() == load_weights(str(full)).parameters.keys()
    assert any("LoRA" in note for note in weights.notes)
    assert weights.training.lora_rank == 4

    source = load_weights(str(tiny_run.workdir)).parameters
    kernel = "encoder/blocks/mlp/expand/kernel"

    assert not np.array_equal(weights.parameters[kernel], source[kernel])

    evaluated = succeed(["evaluate", str(adapted), "--data=digits", f"--data_dir={data_dir}"])
    assert f"{summary(adapted)['test_loss']:.4f}" in evaluated

    succeed(
        [*words, f"--workdir={adapted}", "--config.optimizer.lora_rank=4"]
    )  # a finished run stays one

    assert run([*words, f"--workdir={adapted}", "--config.optimizer.lora_rank=2"]).code == 2
