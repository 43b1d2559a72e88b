"""Checkpoints of chosen steps, and the mean of several weights."""

import dataclasses

import numpy as np
import pytest

from tests.weights.reference import networks
from tests.weights.small_networks import TRAINING, VIT, assert_same, weights_of
from vit_jax.checkpoint.store import CheckpointStore
from vit_jax.weights import load_weights
from vit_jax.weights.averaging import load_average
from vit_jax.weights.saving import convert, describe_weights, save_weights

CLASSES = ("ant", "bee", "cat")


def shift(parameters, change):
    return {name: array + np.float32(change) for name, array in parameters.items()}


@pytest.fixture
def run(tmp_path):
    """A run whose parameters grow by 1 a step, at the steps 3, 4 and 8; with Polyak averages at 8."""
    weights = weights_of(VIT, class_names=CLASSES)
    metadata = describe_weights(weights)
    store = CheckpointStore(tmp_path / "run", keep_latest=3)
    for step in (3, 4, 8):
        items = {"model": shift(weights.parameters, step)}
        if step == 8:
            items["polyak"] = shift(weights.parameters, 100)
        store.save(step, items, metadata=metadata, metrics={})
    store.close()
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("step", "polyak", "change"),
    [
        (3, True, 3),
        (4, True, 4),
        (8, True, 100),
        (8, False, 8),
    ],
)
def test_a_checkpoint_of_a_step(run, step, polyak, change):
    read = load_weights(f"{run}@{step}", polyak=polyak)

    assert_same(read.parameters, shift(networks.parameters(VIT), change))
    assert f"of step {step}" in read.source


def test_a_step_without_a_checkpoint(run):
    with pytest.raises(
        ValueError, match=r"run@5: there is no checkpoint of step 5\. Use one of 3, 4, 8"
    ):
        load_weights(f"{run}@5")


def test_a_folder_whose_name_has_the_form_of_a_step(run):
    folder = run.rename(run.with_name("mine@3"))

    read = load_weights(folder)

    assert "of step 8" in read.source


def test_the_mean_of_steps(run):
    sources = [f"{run}@{step}" for step in (3, 4, 8)]

    averaged = load_average(sources, polyak=False)

    assert averaged.class_names == CLASSES
    assert averaged.source == f"mean of {', '.join(sources)}"
    for name, array in networks.parameters(VIT).items():
        found = averaged.parameters[name]
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, array + 5, rtol=1e-6)


def test_the_mean_of_equal_weights_is_theirs_to_the_bit(run):
    source = f"{run}@3"

    averaged = load_average([source, source, source])

    weights = load_weights(source)
    assert_same(averaged.parameters, weights.parameters)


def test_the_mean_is_written_in_another_format(run, tmp_path):
    mean = tmp_path / "mean.npz"

    sources = [f"{run}@3", f"{run}@4"]

    report = convert(sources, str(mean))
    read = load_weights(mean)

    assert "The parameters are the mean of 2 weights." in report.notes
    assert read.class_names == CLASSES
    averaged = load_average(sources)
    assert_same(read.parameters, averaged.parameters)


@pytest.mark.parametrize(
    ("network", "class_names", "words"),
    [
        ({"mlp_dim": 20}, CLASSES, "Its mlp_dim is 20, not 24"),
        ({"gelu": "exact"}, CLASSES, "Its gelu is exact, not tanh"),
        ({}, ("bee", "ant", "cat"), "must have the classes of"),
    ],
    ids=["shape", "form", "classes"],
)
def test_weights_that_have_no_mean(
    network,
    class_names,
    words,
    run,
    tmp_path,
):
    architecture = dataclasses.replace(VIT, **network)
    other = weights_of(architecture, class_names=class_names)
    save_weights(other, tmp_path / "other", "vit_jax")

    with pytest.raises(ValueError, match=words):
        load_average([str(run), str(tmp_path / "other")])


FILES = dataclasses.replace(TRAINING, held_up_to={"ant": "0a", "bee": "1b", "cat": "2c"})
BANDS = {"count": 3, "numbers": [3, 2, 1], "mean": [0.0] * 3, "std": [1.0] * 3}


def average_two(tmp_path, first, second):
    """Average weights of VIT, with these changes of their metadata."""
    sources = []
    for name, changes in (("first", first), ("second", second)):
        weights = weights_of(VIT, class_names=CLASSES)
        weights = dataclasses.replace(weights, **changes)
        save_weights(weights, tmp_path / name, "vit_jax")
        sources.append(str(tmp_path / name))
    return load_average(sources)


def test_the_execution_of_a_run_may_change(tmp_path):
    looped = dataclasses.replace(VIT, remat="full", scan_unroll=2, attention="xla")

    averaged = average_two(tmp_path, {}, {"architecture": looped})

    assert averaged.architecture == VIT


def test_runs_with_other_held_out_images_have_no_mean(tmp_path):
    """The mean would be evaluated on training images of the second one."""
    other = dataclasses.replace(FILES, seed=5, held_up_to={"ant": "0b", "bee": "00", "cat": "2d"})

    with pytest.raises(ValueError, match=r"second.*trained on the images of .*first.*seed 5"):
        average_two(tmp_path, {"training": FILES}, {"training": other})


@pytest.mark.parametrize("changes", [{"lora_rank": 8}, {"data": "folder:others", "seed": 4}])
def test_runs_without_common_hold_out_problems_have_a_mean(tmp_path, changes):
    other = dataclasses.replace(FILES, **changes)

    averaged = average_two(tmp_path, {"training": FILES}, {"training": other})

    assert averaged.training == FILES


def test_a_library_states_other_fields(tmp_path):
    stated = {"pixel_range": [-1.0, 1.0], "resize": "direct", "exif_orientation": True}
    normalisation = {"mean": [0.5] * 3, "std": [0.5] * 3}
    of_library = {"resize": "direct"} | normalisation

    averaged = average_two(tmp_path, {"preprocessing": stated}, {"preprocessing": of_library})

    assert averaged.preprocessing == stated


@pytest.mark.parametrize("field", ["bands", "resize"])
def test_networks_that_take_other_images_have_no_mean(tmp_path, field):
    stated = {"pixel_range": [-1.0, 1.0], "resize": "direct", "bands": BANDS}
    other = stated | {"resize": "short_side"}
    if field == "bands":
        other = stated | {"bands": BANDS | {"numbers": [1, 2, 3]}}

    with pytest.raises(ValueError, match=f"take the images of .*first.*Its {field} is"):
        average_two(tmp_path, {"preprocessing": stated}, {"preprocessing": other})


def test_one_source_has_no_mean(run):
    with pytest.raises(ValueError, match="must be at least two weights to average"):
        load_average([str(run)])
