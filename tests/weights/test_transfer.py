"""Weights made to fit another head and another resolution: what changes, what does not, and what is told of it."""

import collections
import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.small_models import abstract, apply, images
from tests.weights.small_networks import NETWORKS, VIT, assert_same, weights_of
from vit_jax import pytree
from vit_jax.arrays import Targets
from vit_jax.objectives import Classification
from vit_jax.weights.names import stacked_shapes
from vit_jax.weights.position_embedding import resize_grid
from vit_jax.weights.transfer import fit, without_head

MLP = NETWORKS["mlp_head"]
HEAD = ("head/linear/kernel", "head/linear/bias")


def changed(a, **fields):
    return dataclasses.replace(a, **fields)


def doubled(a):
    return changed(a, image_size=(2 * a.image_size[0], 2 * a.image_size[1]))


def model_of(a, parameters):
    return pytree.from_named_leaves(abstract(a), jax.tree.map(jnp.asarray, dict(parameters)))


def words_of(fitted):
    return {fate.name: fate.words for fate in fitted.fates}


@pytest.mark.parametrize(("num_classes", "loss"), [(10, 2.302585), (100, 4.605170), (1000, 6.907755)])
def test_a_new_head_has_a_loss_of_ln_k(num_classes, loss):
    """The network itself, with parameters that tell images apart, on labels of every kind."""
    target = changed(doubled(MLP), num_classes=num_classes, head="linear")
    model = model_of(target, fit(without_head(weights_of(MLP)), target).parameters)
    output = apply(model, images(target, batch=4))
    assert np.asarray(output.features_BD).std(axis=0).min() > 1e-4
    label_BK = jax.nn.one_hot(jnp.array([0, 1, num_classes // 2, num_classes - 1]), num_classes)
    sums = Classification("softmax").sums(output, Targets(label_BK, jnp.ones(4)))
    assert float(sums["loss"]) / 4 == pytest.approx(math.log(num_classes), abs=1e-6)
    assert float(sums["loss"]) / 4 == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_new_head_leaves_all_else_to_the_bit(name):
    source = NETWORKS[name]
    weights = weights_of(source)
    before = {name: array.copy() for name, array in weights.parameters.items()}
    target = changed(source, num_classes=7, head="linear")
    fitted = fit(without_head(weights), target)
    assert {name: array.shape for name, array in fitted.parameters.items()} == stacked_shapes(target)
    for head in HEAD:
        assert fitted.parameters[head].dtype == np.float32
        assert not fitted.parameters[head].any()
    rest = {name: array for name, array in fitted.parameters.items() if not name.startswith("head/")}
    assert_same(rest, {name: array for name, array in before.items() if not name.startswith("head/")})
    assert_same(weights.parameters, before)  # nothing was changed in place


@pytest.mark.parametrize("resize", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_of_either_network_has_one_fate(name, resize):
    source = NETWORKS[name]
    weights = weights_of(source)
    target = changed(doubled(source) if resize else source, num_classes=7, head="linear")
    fitted = fit(without_head(weights), target)
    names = collections.Counter(fate.name for fate in fitted.fates)
    assert names == collections.Counter(stacked_shapes(source).keys() | stacked_shapes(target).keys())
    for name, words in words_of(fitted).items():
        given, made = weights.parameters.get(name), fitted.parameters.get(name)
        if words == "copied":
            assert made.tobytes() == given.tobytes()
        elif words == "replaced":
            assert name in HEAD
        elif words == "left out":
            assert made is None
            assert name.startswith("head/hidden/")
        else:
            assert resize
            assert name in ("positions/table", "positions/row_table", "positions/column_table")
            assert words.startswith("resized from ")


def test_the_summary_names_what_was_not_copied():
    target = changed(doubled(MLP), num_classes=5, head="linear")
    summary = fit(without_head(weights_of(MLP)), target).summary()
    num_copied = len(stacked_shapes(target)) - 3
    assert re.fullmatch(
        rf"{num_copied} parameters copied, head/\w+/\w+ .*positions/table resized from 2x3 to 4x6", summary
    )
    for name, words in (("linear/kernel", "replaced"), ("linear/bias", "replaced"), ("hidden/kernel", "left out")):
        assert f", head/{name} {words}, " in summary


def test_a_hidden_layer_is_kept_where_the_target_has_one():
    weights = weights_of(MLP)
    fitted = fit(without_head(weights), MLP)  # the same number of classes, and still a fresh last layer
    for name in ("head/hidden/kernel", "head/hidden/bias"):
        assert fitted.parameters[name].tobytes() == weights.parameters[name].tobytes()
        assert words_of(fitted)[name] == "copied"
    assert not any(fitted.parameters[name].any() for name in HEAD)


def test_a_head_of_the_same_classes_is_kept_unless_it_is_taken_away():
    weights = weights_of(MLP)
    kept = fit(weights, doubled(MLP))
    for name in (*HEAD, "head/hidden/kernel", "head/hidden/bias"):
        assert kept.parameters[name].tobytes() == weights.parameters[name].tobytes()
        assert words_of(kept)[name] == "copied"


def test_other_classes_begin_at_zero_and_the_bias_where_the_target_says():
    fitted = fit(weights_of(VIT), changed(VIT, num_classes=4, head_bias_init=-10.0))
    assert fitted.parameters["head/linear/kernel"].tolist() == [[0.0] * 4] * 16
    assert fitted.parameters["head/linear/bias"].tolist() == [-10.0] * 4
    assert fitted.parameters["head/linear/bias"].dtype == np.float32


def test_a_hidden_layer_goes_with_the_head_if_that_is_said():
    empty = without_head(weights_of(MLP), keep_hidden=False)
    assert empty.architecture == changed(VIT, num_classes=0)
    assert {name: array.shape for name, array in empty.parameters.items()} == stacked_shapes(empty.architecture)


def test_weights_without_a_head_say_so():
    weights = weights_of(MLP, class_names=("a", "b", "c"))
    empty = without_head(weights)
    assert empty.architecture == changed(MLP, num_classes=0)
    assert {name: array.shape for name, array in empty.parameters.items()} == stacked_shapes(empty.architecture)
    assert empty.class_names is None


@pytest.mark.parametrize("name", ["token", "gap", "hybrid"])
@pytest.mark.parametrize("method", ["corners", "bicubic"])
def test_positions_are_resized_in_two_dimensions(name, method):
    """From 2 x 3 patches to 4 x 6; the row of a class token stays as it is."""
    source = NETWORKS[name]
    target = doubled(source)
    (height, width), num_first = source.grid, int(source.pool == "token")
    weights = weights_of(source)
    fitted = fit(weights, target, position_resize=method)
    old, new = weights.parameters["positions/table"][0], fitted.parameters["positions/table"]
    assert new.shape == (1, num_first + 4 * height * width, source.width)
    assert new[0, :num_first].tobytes() == old[:num_first].tobytes()
    patches = resize_grid(old[num_first:].reshape(height, width, -1), target.grid, method)
    assert new[0, num_first:].tobytes() == patches.tobytes()
    assert words_of(fitted)["positions/table"] == f"resized from {height}x{width} to {2 * height}x{2 * width}"


def test_tables_of_rows_and_columns_are_resized_each_along_itself():
    source = NETWORKS["learned_2d"]  # 2 rows and 3 columns
    weights = weights_of(source)
    fitted = fit(weights, changed(source, image_size=(16, 12)))
    rows, expected = fitted.parameters["positions/row_table"], weights.parameters["positions/row_table"]
    assert rows.shape == (4, 8)
    for channel in range(8):
        np.testing.assert_allclose(
            rows[:, channel], np.interp([0, 1 / 3, 2 / 3, 1], [0, 1], expected[:, channel]), rtol=0, atol=1e-6
        )
    words = words_of(fitted)
    assert words["positions/row_table"] == "resized from 2x1 to 4x1"
    assert words["positions/column_table"] == words["positions/class_row"] == "copied"


def test_every_mismatch_is_listed_at_once():
    weights = weights_of(VIT)
    parameters = {name: array for name, array in weights.parameters.items() if name != "class_token"}
    parameters["encoder/extra/bias"] = np.zeros(3, np.float32)
    weights = dataclasses.replace(weights, parameters=parameters, source="w.npz (released)")
    target = changed(doubled(VIT), width=24, depth=5, num_classes=7, name="ViT-other/4")
    with pytest.raises(ValueError, match=r"^w\.npz \(released\) does not fit ViT-other/4 \(ViT-custom/4 is") as error:
        fit(without_head(weights), target)
    told = str(error.value)
    assert "missing: class_token (1, 1, 24)" in told
    assert "left over: encoder/extra/bias (3,)" in told
    assert "shape: encoder/blocks/mlp/expand/kernel is (2, 16, 24), the model has (5, 24, 24)" in told
    different = {
        name
        for name, shape in stacked_shapes(target).items()
        if shape != stacked_shapes(doubled(VIT))[name] and name not in (*HEAD, "class_token")
    }
    assert {line.split()[1] for line in told.splitlines() if "shape:" in line} == different


def test_another_patch_size_or_pooling_does_not_fit():
    with pytest.raises(ValueError, match=r"shape: embedding/kernel is \(4, 4, 3, 16\), the model has \(2, 2, 3, 16\)"):
        fit(weights_of(VIT), changed(VIT, patch_size=(2, 2)))
    with pytest.raises(ValueError, match=r"left over: class_token .*\n.*shape: positions/table is \(1, 7, 16\)"):
        fit(weights_of(VIT), changed(VIT, pool="gap"))


def test_a_hidden_layer_that_is_not_there_is_missed():
    with pytest.raises(ValueError, match=r"missing: head/hidden/bias \(16,\)\n  missing: head/hidden/kernel"):
        fit(without_head(weights_of(VIT)), MLP)
