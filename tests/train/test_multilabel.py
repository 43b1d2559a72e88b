"""Images that may have several labels, from a table to answers: trained, evaluated and asked by the verbs."""

import csv
import dataclasses
import json

import cv2
import jax
import numpy as np
import pytest
from jax import export

import vit_jax
from tests.integration.commands import run, succeed
from tests.rejections import rejects
from tests.tiny import RECIPE, RUN, flags
from tests.train import small_runs as runs
from vit_jax.arrays import Batch
from vit_jax.checkpoint import CheckpointReader
from vit_jax.config import load_recipe
from vit_jax.config.check import validate
from vit_jax.tools.sweeps.suite import Task
from vit_jax.tools.sweeps.vtab import find_unavailable
from vit_jax.train.assemble import architecture_of, assemble
from vit_jax.train.evaluations import with_best_metric
from vit_jax.train.inputs import open_datasets
from vit_jax.train.rate_search import choose, table
from vit_jax.weights import load_weights

CLASSES = ("bright", "odd", "tall")
SIGMOID = "objective.loss=sigmoid"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Forty images, of which some have no label; a line for each."""
    folder = tmp_path_factory.mktemp("several")
    lines = ["image,labels,split"]

    for number in range(40):
        labels = [
            name for name, divisor in zip(CLASSES, (2, 3, 5), strict=True) if number % divisor == 0
        ]
        image = np.full((8, 8, 3), 100 + 100 * (number % 2 == 0), np.uint8)
        cv2.imwrite(str(folder / f"{number}.png"), image)
        lines.append(f"{number}.png,{'|'.join(labels)},{'train' if number < 20 else 'test'}")

    (folder / "table.csv").write_text("\n".join(lines))
    return f"csv:{folder}/table.csv"


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """The workdir of a short run with mixup."""
    workdir = tmp_path_factory.mktemp("runs") / "several"
    fields = (*RUN, f"data={data}", SIGMOID, "total=4 steps", "schedule.warmup=1 steps")
    fields += ("evaluation.every=2 steps", "checkpoint.every=4 steps", "input.mixup_alpha=0.4")
    succeed(["pretrain", f"--config={RECIPE}", f"--workdir={workdir}", *flags(*fields)])

    return workdir


def true_labels():
    """Of the test images."""
    return np.array([[number % divisor == 0 for divisor in (2, 3, 5)] for number in range(20, 40)])


def precision_by_definition(is_true_N, score_N):
    """The mean precision over the thresholds at which an image of the class is found; of equal scores all at once."""
    found = [is_true_N[score_N >= threshold].mean() for threshold in score_N[is_true_N]]
    return np.mean(found)


@pytest.mark.slow
def test_what_is_evaluated_is_what_was_trained(trained, data, tmp_path):
    """The run's last results, those of evaluate, and the definition on the network's own probabilities agree."""
    summary = json.loads((trained / "summary.json").read_text())
    words = [
        "evaluate",
        str(trained),
        f"--data={data}",
        "--global_batch=8",
        "--json",
        f"--report={tmp_path}/report",
    ]
    found = json.loads(succeed([*words, f"--csv={tmp_path}/classes.csv"]))
    model = vit_jax.load_model(trained)

    assert model.is_multilabel

    folder = data.removeprefix("csv:").removesuffix("table.csv")
    probability = model.predict([f"{folder}{number}.png" for number in range(20, 40)])
    expected = [
        precision_by_definition(*both) for both in zip(true_labels().T, probability.T, strict=True)
    ]

    assert found["mean_average_precision"] == pytest.approx(np.mean(expected), abs=1e-6)
    assert [one["average_precision"] for one in found["classes"]] == pytest.approx(
        expected, abs=1e-6
    )
    assert [(one["class"], one["images"]) for one in found["classes"]] == [
        ("bright", 10),
        ("odd", 7),
        ("tall", 4),
    ]

    for name in ("mean_average_precision", "f1_micro", "f1_macro", "loss"):
        assert found[name] == pytest.approx(summary[f"test_{name}"], abs=1e-5), name

    assert (found["images"], summary["test_images"]) == (20, 20)
    assert "test_accuracy" not in summary

    logits = np.log(probability / (1 - probability))
    loss = (np.logaddexp(0, logits) - logits * true_labels()).sum(axis=1).mean()

    assert found["loss"] == pytest.approx(loss, rel=1e-4)

    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert names == {"average_precision.png", "classes.csv", "images.csv", "result.json"}, (
        "and no confusions"
    )
    assert (tmp_path / "classes.csv").read_text() == (tmp_path / "report/classes.csv").read_text()

    with open(tmp_path / "report/images.csv", newline="") as file:
        header, *rows = csv.reader(file)

    assert header == ["image", "labels", "answers", "is_right", *CLASSES]
    assert [row[1] for row in rows[:5]] == ["bright|tall", "odd", "bright", "", "bright|odd"]
    np.testing.assert_allclose(np.array([row[4:] for row in rows], float), probability, atol=1e-5)

    answers = ["|".join(np.array(CLASSES)[row >= 0.5]) for row in probability]
    assert [row[2] for row in rows] == answers
    assert [row[3] for row in rows] == [
        str(int(row[1] == answer)) for row, answer in zip(rows, answers, strict=True)
    ]

    text = succeed(words[:4])
    assert f"mean_average_precision {found['mean_average_precision']:.2%}" in text
    assert "lowest_precision" in text


@pytest.mark.slow
def test_checkpoints_are_judged_by_precision(trained, data):
    config = load_recipe(str(RECIPE), flags(f"data={data}", SIGMOID))
    opened = open_datasets(config)

    assert with_best_metric(config, opened).checkpoint.best_metric == "test_mean_average_precision"

    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "test_mean_average_precision" in line] == [2, 4]
    assert "train_loss" in lines[-2]
    assert not any("accuracy" in name for line in lines for name in line)
    assert CheckpointReader(trained).all_steps() == [2, 4], (
        "also that of a step at which none is due but the best"
    )


@pytest.mark.slow
def test_predictions_are_the_labels_that_are_probable_enough(trained, data, tmp_path):
    folder = data.removeprefix("csv:").removesuffix("table.csv")
    paths = [f"{folder}{number}.png" for number in (20, 21)]
    probability = vit_jax.load_model(trained).predict(paths)
    threshold = np.sort(probability.ravel())[2:4].mean()
    words = ["predict", str(trained), *paths, "--json"]

    for given, least in (
        ([f"--threshold={threshold}"], threshold),
        ([], 0.5),
        (["--threshold=1"], 1.0),
    ):
        found = json.loads(succeed([*words, *given]))
        for record, row in zip(found, probability, strict=True):
            expected = {
                name: value
                for name, value in zip(CLASSES, row.tolist(), strict=True)
                if value >= least
            }
            classes = {one["class"]: one["probability"] for one in record["predictions"]}

            assert classes == pytest.approx(expected, abs=1e-6)
            assert list(classes.values()) == sorted(classes.values(), reverse=True)

    assert succeed([*words[:-1], "--threshold=1"]).splitlines()[0].endswith("   none")
    assert len(json.loads(succeed([*words, "--threshold=0.001", "--top=1"]))[0]["predictions"]) == 1


@pytest.mark.slow
def test_weights_say_that_each_class_is_a_question(trained, tmp_path):
    succeed(["convert", str(trained), str(tmp_path / "w.npz")])
    weights = load_weights(tmp_path / "w.npz")

    assert weights.is_multilabel
    assert not vit_jax.load_model(tmp_path / "w.npz", num_classes=4).is_multilabel, (
        "a new head has to be trained"
    )

    pixels = np.zeros((1, 8, 8, 3), np.uint8)
    alone = dataclasses.replace(vit_jax.load_model(trained), is_multilabel=False)
    logits = np.asarray(alone(pixels).logits_BK, np.float64)
    found = vit_jax.load_model(tmp_path / "w.npz").predict(pixels)

    np.testing.assert_allclose(found, 1 / (1 + np.exp(-logits)), atol=1e-5)

    succeed(["export", str(trained), "--to=stablehlo", f"--output={tmp_path}/program"])
    program = export.deserialize(bytearray((tmp_path / "program").read_bytes()))

    np.testing.assert_allclose(program.call(pixels), found, atol=1e-5)

    described = json.loads((tmp_path / "program.json").read_text())
    assert described["output"]["meaning"] == "probabilities: sigmoid of each logit"
    np.testing.assert_allclose(
        alone.predict(pixels),
        np.exp(logits) / np.exp(logits).sum(),
        atol=1e-5,
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ([], "objective.loss='softmax'"),
        ([SIGMOID, "input.sampling=balanced"], "input.sampling='balanced'"),
        ([SIGMOID, "objective.class_weights=1,1,5"], "objective.class_weights=(1.0, 1.0, 5.0)"),
        (
            [SIGMOID, "evaluation.evaluators.few.kind=fewshot"],
            "evaluation.evaluators.few.kind='fewshot'",
        ),
    ],
)
def test_what_asks_for_the_one_class_is_rejected(data, fields, named):
    config = load_recipe(str(RECIPE), flags(f"data={data}", *fields))
    validate(config)

    with rejects(f"config.{named}", "single-label|multi-label"):
        open_datasets(config)


def test_tasks_of_a_sweep_have_one_label(data):
    task = Task(
        name="tags",
        group="own",
        data=data,
        train="train",
        validation="test",
        train_and_validation="train",
    )
    (reason,) = find_unavailable([task], load_recipe("configs/finetune.py:any,own", [])).values()

    assert reason.endswith("its images may have several labels, and a task has one for each.")


@pytest.mark.slow
def test_the_other_kind_of_data_is_rejected(trained, data, tmp_path):
    """By verbs that judge or learn one class, and of data with one label by what is for several."""
    folder = data.removeprefix("csv:").removesuffix("table.csv")
    lines = [
        f"{folder}{number}.png,{CLASSES[number % 3]},{'train' if number % 2 else 'test'}"
        for number in range(12)
    ]
    (tmp_path / "one.csv").write_text("\n".join(["image,label,split", *lines]))
    of_one = f"csv:{tmp_path}/one.csv"
    cache = f"--cache={tmp_path}/cache"
    evaluation = (["evaluate", str(trained), f"--data={of_one}"], "several labels")
    features = (["fewshot", str(trained), f"--data={data}", cache], "Use vit-jax probe")

    for words, message in (evaluation, features):
        outcome = run(words)
        assert outcome.code == 2
        assert message in outcome.err

    config = load_recipe(
        str(RECIPE),
        flags(f"data={of_one}", SIGMOID, "checkpoint.best_metric=test_f1_macro"),
    )
    validate(config)

    with rejects("config.checkpoint.best_metric='test_f1_macro'", "single-label"):
        open_datasets(config)


@pytest.mark.slow
def test_a_saved_probe_has_sigmoids(trained, data, tmp_path):
    words = ["probe", str(trained), f"--data={data}", f"--cache={tmp_path}/cache", "--penalty=1"]
    out = succeed([*words, f"--output={tmp_path}/probe", "--json"])
    result = json.loads(out)["datasets"][data]

    assert load_weights(tmp_path / "probe").is_multilabel

    evaluated = json.loads(succeed(["evaluate", f"{tmp_path}/probe", f"--data={data}", "--json"]))
    expected = pytest.approx(result["mean_average_precision"], abs=1e-5)

    assert evaluated["mean_average_precision"] == expected
    assert evaluated["loss"] == pytest.approx(result["loss"], rel=1e-3)


@pytest.mark.slow
def test_a_step_by_the_formula():
    """The loss is that of the examples that count, over all micro-batches."""
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (16, 8, 8, 3), np.uint8)
    label = rng.integers(0, 2, (16, 10), np.int32)
    mask = np.ones(16, np.float32)
    mask[[3, 9, 10]] = 0
    config = runs.config(SIGMOID, "input.mixup_alpha=0", "optimizer.accumulation_steps=2")
    architecture = architecture_of(config, 10)
    run = assemble(
        config,
        architecture,
        num_examples=160,
        devices=jax.devices()[:1],
        label_shape=(10,),
    )
    state = run.init_state()
    logits = np.asarray(
        state.model((image.astype(np.float32) - 127.5) / 127.5).logits_BK,
        np.float64,
    )
    batch = jax.device_put(Batch(image_BHWC=image, label_B=label, mask_B=mask), run.batch_sharding)
    _, metrics = run.train_step(state, batch)
    loss = (np.logaddexp(0, logits) - logits * label).sum(axis=1)[mask > 0].mean()

    assert float(metrics["train_loss"]) == pytest.approx(loss, rel=1e-4)
    assert "train_accuracy" not in metrics


def test_a_search_is_decided_by_precision():
    trials = {
        0.1: {"validation_mean_average_precision": 0.5, "validation_loss": 1.0},
        0.3: {"validation_mean_average_precision": 0.625, "validation_loss": 2.0},
        1.0: {"validation_accuracy": None, "validation_loss": None},
    }

    assert choose(trials) == 0.3

    heading, *lines = table(trials, 0.3).splitlines()
    assert heading == "learning rate  validation mean average precision  validation loss"
    assert lines[1].split() == ["0.3", "62.50%", "2.0000", "<-", "chosen"]
    assert {len(line.removesuffix("  <- chosen")) for line in lines} == {len(heading)}
