"""Given weights and own data: which network is fine-tuned, what it starts with, and which weights are refused."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from tests import tiny
from tests.rejections import rejects
from tests.train import small_runs as runs
from tests.weights.small_networks import NETWORKS, RESNET, VIT, weights_of
from vit_jax import pytree
from vit_jax.config import AdaptConfig, load_recipe
from vit_jax.train.assemble import assemble
from vit_jax.train.start import adapt, state_of_parameters
from vit_jax.weights.fit import fit, without_head
from vit_jax.weights.saving import save_weights

MLP = NETWORKS["mlp_head"]
RECIPE = load_recipe("configs/finetune.py:any,own")


def config(init_from, *, image_size=(16, 24), **model):
    """Fine-tuning at twice the resolution of the small networks."""
    return dataclasses.replace(
        RECIPE,
        init_from=init_from and str(init_from),
        global_batch=16,
        model=AdaptConfig(**{"compute_dtype": "float32", **model}),
        input=dataclasses.replace(RECIPE.input, image_size=image_size),
        schedule=dataclasses.replace(RECIPE.schedule, learning_rate=0.01),
        search=dataclasses.replace(RECIPE.search, learning_rates=()),
    )


def source(*class_names):
    """One image of each."""
    return tiny.source(len(class_names), class_names)


@pytest.fixture
def save(tmp_path):
    """Returns a function that writes a network's weights and gives their path."""

    def write(a, name="weights.safetensors", format_name="timm", **details):
        path = tmp_path / name
        save_weights(weights_of(a, **details), path, format_name)
        return path

    return write


def head_of(fitted):
    return {name: array for name, array in fitted.parameters.items() if name.startswith("head/linear/")}


def test_weights_get_a_new_head(save):
    path = save(VIT, class_names=("a", "b", "c"))
    architecture, fitted, words = adapt(config(path), source("a", "b", "c"))  # the same names are no reason to keep it
    assert (architecture.num_classes, architecture.image_size, architecture.head) == (3, (16, 24), "linear")
    expected = fit(without_head(weights_of(VIT)), architecture)
    for name, array in expected.parameters.items():
        assert fitted.parameters[name].tobytes() == array.tobytes(), name
    assert not any(array.any() for array in head_of(fitted).values())
    assert words.splitlines()[0].startswith(f"weights  {path} (")
    assert words.splitlines()[1] == f"         {expected.summary()}"


def test_a_hidden_layer_stays_where_the_config_asks(save):
    path = save(MLP, "workdir", "vit_jax")
    for head, has_hidden in (("zero", False), ("zero_keep_hidden", True)):
        architecture, fitted, _ = adapt(config(path, head=head), source("x", "y"))
        assert ("head/hidden/kernel" in fitted.parameters) == has_hidden
        assert fitted.parameters["head/linear/kernel"].shape == (16, 2)
        assert not any(array.any() for array in head_of(fitted).values())
        assert architecture.head == ("mlp" if has_hidden else "linear")


@pytest.mark.parametrize("names", [("a", "b", "c"), None])
def test_a_whole_head_stays_where_the_config_asks(save, names):
    """Of the same classes, or of as many where nobody knows their names."""
    _, fitted, _ = adapt(config(save(VIT, class_names=names), head="keep"), source("a", "b", "c"))
    for name, array in head_of(fitted).items():
        assert array.tobytes() == weights_of(VIT).parameters[name].tobytes()


@pytest.mark.parametrize(
    ("names", "here", "rule"),
    [
        (("a", "b", "c"), ("a", "b"), r"3 .*\['a', 'b', 'c'\].*2 .*\['a', 'b'\].*head=zero"),
        (("a", "b", "c"), ("a", "c", "b"), r"3 .*3 .*\['a', 'c', 'b'\].*head=zero"),
        (None, ("a", "b"), "3 .*not named.*2 .*head=zero"),
    ],
)
def test_a_head_of_other_classes_cannot_stay(save, names, here, rule):
    with rejects("config.model.head='keep'", rule):
        adapt(config(save(VIT, class_names=names), head="keep"), source(*here))


def test_no_weights():
    with rejects("config.init_from", "--config.init_from=PATH"):
        adapt(config(None), source("a", "b"))


def test_a_run_starts_with_these_parameters_and_a_loss_of_ln_k(save):
    """On eight devices that share them out."""
    path = save(RESNET, "workdir", "vit_jax")
    chosen = config(path, image_size=RESNET.image_size)
    chosen = dataclasses.replace(chosen, sharding=dataclasses.replace(chosen.sharding, parameters="fsdp"))
    architecture, fitted, _ = adapt(chosen, source(*"abcdefghij"))
    run = assemble(chosen, architecture, num_examples=160, devices=jax.devices())
    state = state_of_parameters(run, fitted.parameters, str(path))
    leaves = pytree.named_leaves(state.model)
    assert leaves.keys() == fitted.parameters.keys()
    for leaf, array in fitted.parameters.items():
        assert np.asarray(leaves[leaf]).tobytes() == array.tobytes(), leaf
        assert leaves[leaf].sharding == pytree.named_leaves(run.abstract_state.model)[leaf].sharding
    assert int(state.step) == 0
    (batch,) = runs.batches(run, 1)
    sums = run.evaluation_step(state, jax.device_put(batch, run.batch_sharding))
    assert float(sums["loss"]) / 16 == pytest.approx(math.log(10), abs=1e-6)


def test_parameters_of_another_network_are_all_named():
    run = runs.build()
    named = dict(pytree.named_leaves(run.abstract_state.model))
    given = {name: np.zeros(leaf.shape, np.float32) for name, leaf in named.items() if name != "encoder/norm/bias"}
    given["head/linear/bias"] = np.zeros(3, np.float32)
    with rejects("here", "ViT-mu/2") as error:
        state_of_parameters(run, given, "here")
    assert "missing: encoder/norm/bias (16,)" in str(error.value)
    assert "shape: head/linear/bias is (3,), the model has (10,)" in str(error.value)
