"""An evaluator whose images have sets of correct classes, as ImageNet ReaL."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from tests.rejections import rejects
from tests.tiny import source
from tests.train import small_runs as runs
from vit_jax.arrays import normalise
from vit_jax.config import validate
from vit_jax.data.kinds.in_memory import MemorySource
from vit_jax.evals.label_sets import open_label_sets
from vit_jax.train.evaluations import build_evaluations
from vit_jax.train.inputs import Datasets, open_datasets

COUNT = 21
IMAGES = source(COUNT, seed=3)
FIELD = "evaluation.evaluators.real.label_sets"
OVERRIDES = (
    f"{FIELD}=real.json",
    "evaluation.metrics=top5_accuracy,f1_macro,calibration_error",
    "evaluation.global_batch=8",
    "checkpoint.best_metric=real_accuracy",
)


class Named(MemorySource):
    """Images in files with these numbers."""

    numbers = ()

    def name_of(self, index):
        return f"val/n01440764/ILSVRC2012_val_{self.numbers[index]:08}.JPEG"


def open_images(split, config, seed):
    return IMAGES


def predict(run, state, images):
    """Return the classes of images, the most probable first."""
    pixels = normalise(
        np.repeat(
            images,
            3,
            axis=3,
        ),
        "float32",
    )
    logits_BK = state.evaluated_model()(pixels).logits_BK
    return np.argsort(
        -np.asarray(logits_BK),
        axis=1,
        kind="stable",
    )


def make_label_sets(order_NK):
    """Return sets of which the n-th has the prediction on place n % 3; each fourth set is empty."""
    label_sets = []
    for n, order_K in enumerate(order_NK.tolist()):
        label_set = [order_K[9], order_K[n % 3]]
        if n % 4 == 0:
            label_set = []
        label_sets.append(label_set)
    return label_sets


def test_predictions_in_the_set_are_right(tmp_path):
    """Batches of 8 end with padding; images with an empty set are skipped."""
    run = runs.build(*OVERRIDES)
    state = run.init_state()
    label_sets = make_label_sets(
        predict(
            run,
            state,
            IMAGES.images,
        )
    )
    path = tmp_path / "real.json"
    path.write_text(json.dumps(label_sets))
    images = open_label_sets(IMAGES, str(path))
    data = Datasets(
        source(160),
        source(16, seed=1),
        others={"real": images.source},
        correct={"real": images.correct_NS},
    )

    test, real = build_evaluations(
        run,
        data,
        lambda: None,
    )
    results = dict(real.evaluator.run(state))

    kept = [n for n in range(COUNT) if n % 4 != 0]
    right = [n for n in kept if n % 3 == 0]
    assert results["images"] == len(kept) == 15
    assert results["accuracy"] == pytest.approx(len(right) / len(kept))
    assert results["top5_accuracy"] == 1
    assert set(results) == {"accuracy", "top5_accuracy", "calibration_error", "images"}
    assert {"accuracy", "loss", "f1_macro"} <= set(dict(test.evaluator.run(state)))


def build_config(path, **fields):
    config = runs.config(
        f"data={__name__}:open_images",
        f"{FIELD}={path}",
    )
    return dataclasses.replace(config, **fields)


def test_a_run_opens_the_sets_before_it_trains(tmp_path):
    path = tmp_path / "sets.json"
    path.write_text(json.dumps([[], [0, 1]] + [[2]] * (COUNT - 2)))

    data = open_datasets(build_config(path))

    assert len(data.others["real"]) == COUNT - 1
    assert data.correct["real"][:2].tolist() == [[0, 1], [2, -1]]


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (None, "sets.json"),
        ("[[1], [2]]", "has 2 lists, must have 21, one for each image"),
        (json.dumps([[10]] * COUNT), "lists of classes, 0 to 9"),
        (json.dumps([[]] * COUNT), "no image has a label"),
    ],
    ids=["no file", "another number", "another class", "no label"],
)
def test_files_that_do_not_fit(tmp_path, content, rule):
    path = tmp_path / "sets.json"
    if content is not None:
        path.write_text(content)

    with rejects(FIELD, rule):
        open_datasets(build_config(path))


def test_a_feature_of_other_data():
    with rejects(FIELD, "must be a JSON file .NAME.json., or a feature"):
        open_datasets(build_config("real_label"))


def test_validation_images_are_matched_by_the_number_of_their_file(tmp_path):
    images = source(2, seed=1)
    named = Named(
        images.images,
        images.labels,
        images.class_names,
    )
    named.numbers = (3, 1)
    path = tmp_path / "real.json"
    path.write_text("[[7], [], [4, 5]]")

    found = open_label_sets(named, str(path))

    assert found.correct_NS.tolist() == [[4, 5], [7, -1]]


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (["input.classes=0,1"], "label_sets: must not be set with input.classes"),
        (["evaluation.evaluators.real.kind=knn"], "label_sets.*kind"),
        (["checkpoint.best_metric=real_loss"], "checkpoint.best_metric='real_loss'"),
    ],
)
def test_options_that_do_not_fit(overrides, rule):
    with rejects("", rule):
        validate(runs.config(f"{FIELD}=real.json", *overrides))


def test_the_program_without_sets_is_unchanged():
    run = runs.build("evaluation.evaluators.v2.split=other")
    batch = runs.first_batch(run)

    results = jax.eval_shape(run.evaluation_step, run.init_state(), batch)

    assert not results.rows
