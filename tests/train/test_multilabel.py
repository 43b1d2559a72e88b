"""Images that may have several labels, from a table to predictions: trained, evaluated and served."""

import csv
import dataclasses
import json

import cv2
import jax
import numpy as np
import pytest
from jax import export
from numpy.testing import assert_allclose

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

DIVISORS = {"bright": 2, "odd": 3, "tall": 5}

CLASSES = tuple(DIVISORS)

NUM_IMAGES = 40

TEST_NUMBERS = range(20, 40)


def list_labels(number):
    return [name for name, divisor in DIVISORS.items() if number % divisor == 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of forty images, of which some have no label, with a table that has a line for each."""
    folder = tmp_path_factory.mktemp("several")
    lines = ["image,labels,split"]
    for number in range(NUM_IMAGES):
        labels = list_labels(number)
        level = 200 if "bright" in labels else 100
        image = np.full((8, 8, 3), level, np.uint8)
        cv2.imwrite(str(folder / f"{number}.png"), image)

        split = "test" if number in TEST_NUMBERS else "train"
        lines.append(f"{number}.png,{'|'.join(labels)},{split}")

    (folder / "table.csv").write_text("\n".join(lines))
    return folder


SIGMOID = "objective.loss=sigmoid"


@pytest.fixture(scope="module")
def data(folder):
    return f"csv:{folder}/table.csv"


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """The workdir of a short run with mixup."""
    workdir = tmp_path_factory.mktemp("runs") / "several"
    fields = (
        *RUN,
        f"data={data}",
        SIGMOID,
        "total=4 steps",
        "schedule.warmup=1 steps",
        "evaluation.every=2 steps",
        "checkpoint.every=4 steps",
        "input.mixup_alpha=0.4",
    )
    succeed(["pretrain", f"--config={RECIPE}", f"--workdir={workdir}", *flags(*fields)])
    return workdir


def list_paths(folder, numbers):
    return [f"{folder}/{number}.png" for number in numbers]


@pytest.fixture(scope="module")
def probability_of_test(trained, folder):
    """The probabilities (20, 3) of the test images, by the network that was trained."""
    return vit_jax.load_model(trained).predict(list_paths(folder, TEST_NUMBERS))


def build_test_labels():
    """Return the labels (20, 3) of the test images."""
    rows = [[name in list_labels(number) for name in CLASSES] for number in TEST_NUMBERS]
    return np.array(rows)


def compute_average_precision(is_true_N, score_N):
    """Return the mean precision over the thresholds at which an image of the class is found.

    Images of equal scores are found at once.
    """
    precisions = []
    for threshold in score_N[is_true_N]:
        precisions.append(is_true_N[score_N >= threshold].mean())
    return np.mean(precisions)


@pytest.fixture(scope="module")
def evaluation(trained, data, tmp_path_factory):
    """The result of `evaluate`, and the folder of its report and of a table of classes."""
    folder = tmp_path_factory.mktemp("evaluation")
    words = [
        "evaluate",
        str(trained),
        f"--data={data}",
        "--global_batch=8",
        "--json",
        f"--report={folder}/report",
        f"--csv={folder}/classes.csv",
    ]
    return json.loads(succeed(words)), folder


@pytest.mark.slow
def test_an_evaluation_has_the_results_of_the_run(trained, evaluation):
    result, _ = evaluation
    summary = json.loads((trained / "summary.json").read_text())

    assert vit_jax.load_model(trained).is_multilabel
    for name in ("mean_average_precision", "f1_micro", "f1_macro", "loss"):
        assert result[name] == pytest.approx(summary[f"test_{name}"], abs=1e-5), name
    assert result["images"] == 20
    assert summary["test_images"] == 20
    assert "test_accuracy" not in summary


@pytest.mark.slow
def test_metrics_agree_with_their_definitions(evaluation, probability_of_test):
    result, _ = evaluation
    labels = build_test_labels()
    precisions = []
    for is_true_N, score_N in zip(labels.T, probability_of_test.T, strict=True):
        precisions.append(compute_average_precision(is_true_N, score_N))
    logits = np.log(probability_of_test / (1 - probability_of_test))
    loss_B = (np.logaddexp(0, logits) - logits * labels).sum(axis=1)

    classes = result["classes"]
    found = [each["average_precision"] for each in classes]

    assert result["mean_average_precision"] == pytest.approx(np.mean(precisions), abs=1e-6)
    assert found == pytest.approx(precisions, abs=1e-6)
    assert [each["class"] for each in classes] == ["bright", "odd", "tall"]
    assert [each["images"] for each in classes] == [10, 7, 4]
    assert result["loss"] == pytest.approx(loss_B.mean(), rel=1e-4)


def join_classes(is_class):
    return "|".join(np.array(CLASSES)[is_class])


@pytest.mark.slow
def test_a_report_has_a_row_for_each_image_and_no_confusions(evaluation, probability_of_test):
    _, folder = evaluation
    report = folder / "report"
    names = {path.name for path in report.iterdir()}
    with open(report / "images.csv", newline="") as file:
        rows = list(csv.DictReader(file))

    assert names == {"average_precision.png", "classes.csv", "images.csv", "result.json"}
    assert (folder / "classes.csv").read_text() == (report / "classes.csv").read_text()
    assert list(rows[0]) == ["image", "labels", "answers", "is_right", *CLASSES]
    assert [row["labels"] for row in rows[:5]] == ["bright|tall", "odd", "bright", "", "bright|odd"]
    for row, probability_K in zip(rows, probability_of_test, strict=True):
        expected = join_classes(probability_K >= 0.5)
        assert [float(row[name]) for name in CLASSES] == pytest.approx(probability_K, abs=1e-5)
        assert row["answers"] == expected
        assert row["is_right"] == str(int(row["labels"] == expected))


@pytest.mark.slow
def test_an_evaluation_prints_precision(trained, data, evaluation):
    result, _ = evaluation

    text = succeed(["evaluate", str(trained), f"--data={data}", "--global_batch=8"])

    assert f"mean_average_precision {result['mean_average_precision']:.2%}" in text
    assert "lowest_precision" in text


@pytest.mark.slow
def test_checkpoints_are_judged_by_precision(trained, data):
    config = load_recipe(str(RECIPE), flags(f"data={data}", SIGMOID))
    with_metric = with_best_metric(config, open_datasets(config))

    lines = []
    for line in (trained / "metrics.jsonl").read_text().splitlines():
        lines.append(json.loads(line))

    steps = [line["step"] for line in lines if "test_mean_average_precision" in line]
    names = set().union(*lines)

    assert with_metric.checkpoint.best_metric == "test_mean_average_precision"
    assert steps == [2, 4]
    assert "train_loss" in lines[-2]
    assert not any("accuracy" in name for name in names)
    assert CheckpointReader(trained).all_steps() == [2, 4], "the best is saved where none is due"


def select_probable(probability_K, threshold):
    """Return the classes that are probable enough, with their probabilities."""
    probable = {}
    for name, probability in zip(CLASSES, probability_K.tolist(), strict=True):
        if probability >= threshold:
            probable[name] = probability
    return probable


@pytest.mark.slow
def test_predictions_are_the_labels_that_are_probable_enough(trained, folder):
    paths = list_paths(folder, (20, 21))
    probability = vit_jax.load_model(trained).predict(paths)
    between = np.sort(probability.ravel())[2:4].mean()
    words = ["predict", str(trained), *paths]

    for options, threshold in (
        ([f"--threshold={between}"], between),
        ([], 0.5),
        (["--threshold=1"], 1.0),
    ):
        records = json.loads(succeed([*words, "--json", *options]))
        for record, probability_K in zip(records, probability, strict=True):
            classes = {each["class"]: each["probability"] for each in record["predictions"]}
            assert classes == pytest.approx(select_probable(probability_K, threshold), abs=1e-6)
            assert list(classes.values()) == sorted(classes.values(), reverse=True)

    none = succeed([*words, "--threshold=1"])
    top = json.loads(succeed([*words, "--json", "--threshold=0.001", "--top=1"]))

    assert none.splitlines()[0].endswith("   none")
    assert len(top[0]["predictions"]) == 1


@pytest.fixture(scope="module")
def logits_of_black(trained):
    """An image of zeros, and its logits in float64, of a network that is taken for single-label."""
    pixels = np.zeros((1, 8, 8, 3), np.uint8)
    model = dataclasses.replace(
        vit_jax.load_model(trained),
        is_multilabel=False,
    )
    logits = np.asarray(model(pixels).logits_BK, np.float64)
    softmax = np.exp(logits) / np.exp(logits).sum()
    assert_allclose(model.predict(pixels), softmax, atol=1e-5)
    return pixels, logits


@pytest.mark.slow
def test_converted_weights_state_several_labels(trained, logits_of_black, tmp_path):
    pixels, logits = logits_of_black
    file = tmp_path / "w.npz"

    succeed(["convert", str(trained), str(file)])
    probability = vit_jax.load_model(file).predict(pixels)
    with_new_head = vit_jax.load_model(file, num_classes=4)

    assert load_weights(file).is_multilabel
    assert not with_new_head.is_multilabel, "a new head has to be trained"
    assert_allclose(probability, 1 / (1 + np.exp(-logits)), atol=1e-5)


@pytest.mark.slow
def test_an_exported_program_gives_sigmoids(trained, logits_of_black, tmp_path):
    pixels, logits = logits_of_black
    output = tmp_path / "program"

    succeed(["export", str(trained), "--to=stablehlo", f"--output={output}"])
    program = export.deserialize(bytearray(output.read_bytes()))
    description = json.loads((tmp_path / "program.json").read_text())

    assert_allclose(
        program.call(pixels),
        1 / (1 + np.exp(-logits)),
        atol=1e-5,
    )
    assert description["output"]["meaning"] == "probabilities: sigmoid of each logit"


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
def test_options_for_one_label_are_rejected(data, fields, named):
    config = load_recipe(str(RECIPE), flags(f"data={data}", *fields))
    validate(config)

    with rejects(f"config.{named}", "single-label|multi-label"):
        open_datasets(config)


@pytest.fixture(scope="module")
def single_label_data(folder, tmp_path_factory):
    """A table of twelve of the images with one label each."""
    lines = ["image,label,split"]
    for number in range(12):
        split = "train" if number % 2 else "test"
        lines.append(f"{folder}/{number}.png,{CLASSES[number % 3]},{split}")

    path = tmp_path_factory.mktemp("one") / "one.csv"
    path.write_text("\n".join(lines))
    return f"csv:{path}"


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
def test_verbs_reject_the_other_kind_of_data(trained, data, single_label_data, tmp_path):
    """These verbs judge or learn one class."""
    evaluated = run(["evaluate", str(trained), f"--data={single_label_data}"])
    features = run(["fewshot", str(trained), f"--data={data}", f"--cache={tmp_path}/cache"])

    assert evaluated.code == 2
    assert "several labels" in evaluated.err
    assert features.code == 2
    assert "Use vit-jax probe" in features.err


@pytest.mark.slow
def test_data_with_one_label_have_no_metric_for_several(single_label_data):
    metric = "checkpoint.best_metric=test_f1_macro"
    config = load_recipe(
        str(RECIPE),
        flags(f"data={single_label_data}", SIGMOID, metric),
    )
    validate(config)

    with rejects("config.checkpoint.best_metric='test_f1_macro'", "single-label"):
        open_datasets(config)


@pytest.mark.slow
def test_a_saved_probe_has_sigmoids(trained, data, tmp_path):
    probe = f"{tmp_path}/probe"
    words = ["probe", str(trained), f"--data={data}", f"--cache={tmp_path}/cache", "--penalty=1"]

    out = succeed([*words, f"--output={probe}", "--json"])
    result = json.loads(out)["datasets"][data]
    evaluated = json.loads(succeed(["evaluate", probe, f"--data={data}", "--json"]))
    precision = evaluated["mean_average_precision"]

    assert load_weights(tmp_path / "probe").is_multilabel
    assert precision == pytest.approx(result["mean_average_precision"], abs=1e-5)
    assert evaluated["loss"] == pytest.approx(result["loss"], rel=1e-3)


@pytest.mark.slow
def test_a_step_by_the_formula():
    """The loss is the mean over the examples in the mask of all micro-batches."""
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (16, 8, 8, 3), np.uint8)
    label = rng.integers(0, 2, (16, 10), np.int32)
    mask = np.ones(16, np.float32)
    mask[[3, 9, 10]] = 0
    config = runs.config(
        SIGMOID,
        "input.mixup_alpha=0",
        "optimizer.accumulation_steps=2",
    )
    run = assemble(
        config,
        architecture_of(config, 10),
        num_examples=160,
        devices=jax.devices()[:1],
        label_shape=(10,),
    )
    state = run.init_state()
    normalised = (image.astype(np.float32) - 127.5) / 127.5
    logits = np.asarray(state.model(normalised).logits_BK, np.float64)
    loss_B = (np.logaddexp(0, logits) - logits * label).sum(axis=1)

    batch = Batch(
        image_BHWC=image,
        label_B=label,
        mask_B=mask,
    )
    _, metrics = run.train_step(
        state,
        jax.device_put(batch, run.batch_sharding),
    )

    assert float(metrics["train_loss"]) == pytest.approx(loss_B[mask > 0].mean(), rel=1e-4)
    assert "train_accuracy" not in metrics


def test_a_search_is_decided_by_precision():
    trials = {
        0.1: {"validation_mean_average_precision": 0.5, "validation_loss": 1.0},
        0.3: {"validation_mean_average_precision": 0.625, "validation_loss": 2.0},
        1.0: {"validation_accuracy": None, "validation_loss": None},
    }

    heading, *lines = table(trials, 0.3).splitlines()
    widths = {len(line.removesuffix("  <- chosen")) for line in lines}

    assert choose(trials) == 0.3
    assert heading == "learning rate  validation mean average precision  validation loss"
    assert lines[1].split() == ["0.3", "62.50%", "2.0000", "<-", "chosen"]
    assert widths == {len(heading)}
