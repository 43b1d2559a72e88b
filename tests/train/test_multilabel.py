"""Images that may have several labels, from a table to predictions: trained, evaluated and served."""

import csv
import dataclasses
import json

import cv2
import jax
import numpy as np
import pytest
import scipy.special
from jax import export
from numpy.testing import assert_allclose

import vit_jax
from tests.columns import list_column
from tests.integration.commands import metrics, run, succeed
from tests.rejections import rejects
from tests.tiny import RECIPE, RUN, flags
from tests.train import small_runs as runs
from vit_jax.arrays import Batch
from vit_jax.checkpoint import CheckpointReader
from vit_jax.config import load_recipe
from vit_jax.config.check import validate
from vit_jax.tools.sweeps.suite import Task
from vit_jax.tools.sweeps.vtab import find_unavailable
from vit_jax.train.assemble import assemble
from vit_jax.train.evaluations import with_best_metric
from vit_jax.train.inputs import open_datasets
from vit_jax.train.rate_search import choose, table
from vit_jax.train.state_builder import architecture_of
from vit_jax.weights import load_weights

DIVISORS = {"bright": 2, "odd": 3, "tall": 5}
CLASSES = tuple(DIVISORS)
NUM_IMAGES = 40
TEST_NUMBERS = range(20, 40)


def list_labels(number):
    labels = []
    for name, divisor in DIVISORS.items():
        if number % divisor == 0:
            labels.append(name)
    return labels


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
    succeed(
        [
            "pretrain",
            f"--config={RECIPE}",
            f"--workdir={workdir}",
            *flags(*fields),
        ]
    )
    return workdir


def list_paths(folder, numbers):
    return [f"{folder}/{number}.png" for number in numbers]


@pytest.fixture(scope="module")
def probability_of_test(trained, folder):
    """The probabilities (20, 3) of the test images, by the network that was trained."""
    model = vit_jax.load_model(trained)
    paths = list_paths(folder, TEST_NUMBERS)
    return model.predict(paths)


def build_test_labels():
    """Return the labels (20, 3) of the test images."""
    numbers = np.array(TEST_NUMBERS)
    divisors = np.array(list(DIVISORS.values()))
    return numbers[:, None] % divisors == 0


def compute_sigmoid(logits):
    return 1 / (1 + np.exp(-logits))


def compute_losses(logits, labels):
    """Return the binary cross-entropy of each image, summed over the classes."""
    losses = np.logaddexp(0, logits) - logits * labels
    return losses.sum(axis=1)


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
        expected = pytest.approx(summary[f"test_{name}"], abs=1e-5)
        assert result[name] == expected, name
    assert result["images"] == 20
    assert summary["test_images"] == 20
    assert "test_accuracy" not in summary


@pytest.mark.slow
def test_metrics_agree_with_their_definitions(evaluation, probability_of_test):
    result, _ = evaluation
    labels = build_test_labels()
    precisions = []
    for column in range(3):
        precision = compute_average_precision(
            labels[:, column],
            probability_of_test[:, column],
        )
        precisions.append(precision)
    mean_precision = pytest.approx(np.mean(precisions), abs=1e-6)
    odds = probability_of_test / (1 - probability_of_test)
    loss_B = compute_losses(np.log(odds), labels)

    classes = result["classes"]
    found = list_column(classes, "average_precision")

    assert result["mean_average_precision"] == mean_precision
    assert found == pytest.approx(precisions, abs=1e-6)
    assert list_column(classes, "class") == ["bright", "odd", "tall"]
    assert list_column(classes, "images") == [10, 7, 4]
    assert result["loss"] == pytest.approx(loss_B.mean(), rel=1e-4)


def join_classes(is_class):
    names = np.array(CLASSES)
    return "|".join(names[is_class])


@pytest.mark.slow
def test_a_report_has_a_row_for_each_image_and_no_confusions(evaluation, probability_of_test):
    _, folder = evaluation
    report = folder / "report"
    names = list_column(report.iterdir(), "name")
    table = (folder / "classes.csv").read_text()
    with open(report / "images.csv", newline="") as file:
        header, *rows = csv.reader(file)
    first_labels = list_column(rows[:5], 1)

    assert sorted(names) == [
        "average_precision.png",
        "classes.csv",
        "images.csv",
        "result.json",
    ]
    assert (report / "classes.csv").read_text() == table
    assert header == ["image", "labels", "answers", "is_right", *CLASSES]
    assert first_labels == ["bright|tall", "odd", "bright", "", "bright|odd"]
    for row, probability_K in zip(rows, probability_of_test, strict=True):
        _, labels, predicted, is_right, *columns = row
        expected = join_classes(probability_K >= 0.5)
        found = list(map(float, columns))

        assert found == pytest.approx(probability_K, abs=1e-5)
        assert predicted == expected
        assert is_right == str(int(labels == expected))


@pytest.mark.slow
def test_an_evaluation_prints_precision(trained, data, evaluation):
    result, _ = evaluation
    precision = result["mean_average_precision"]

    text = succeed(
        [
            "evaluate",
            str(trained),
            f"--data={data}",
            "--global_batch=8",
        ]
    )

    assert f"mean_average_precision {precision:.2%}" in text
    assert "lowest_precision" in text


@pytest.mark.slow
def test_checkpoints_are_judged_by_precision(trained, data):
    config = load_recipe(str(RECIPE), flags(f"data={data}", SIGMOID))
    metric = "test_mean_average_precision"

    with_metric = with_best_metric(config, open_datasets(config))
    lines = metrics(trained)
    evaluations = [line for line in lines if metric in line]
    names = set().union(*lines)
    saved_steps = CheckpointReader(trained).all_steps()

    assert with_metric.checkpoint.best_metric == metric
    assert list_column(evaluations, "step") == [2, 4]
    assert "train_loss" in lines[-2]
    assert not any("accuracy" in name for name in names)
    assert saved_steps == [2, 4], "the best is saved where none is due"


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

    def predict(*options):
        out = succeed([*words, "--json", *options])
        return list_column(json.loads(out), "predictions")

    for options, threshold in (
        ([f"--threshold={between}"], between),
        ([], 0.5),
        (["--threshold=1"], 1.0),
    ):
        predictions = predict(*options)
        for predicted, probability_K in zip(predictions, probability, strict=True):
            names = list_column(predicted, "class")
            values = list_column(predicted, "probability")
            found = dict(zip(names, values, strict=True))
            expected = select_probable(probability_K, threshold)

            assert found == pytest.approx(expected, abs=1e-6)
            assert values == sorted(values, reverse=True)

    none = succeed([*words, "--threshold=1"])
    top = predict("--threshold=0.001", "--top=1")

    assert none.splitlines()[0].endswith("   none")
    assert len(top[0]) == 1


@pytest.fixture(scope="module")
def logits_of_black(trained):
    """An image of zeros, and its logits in float64, of a network that is taken for single-label."""
    pixels = np.zeros((1, 8, 8, 3), np.uint8)
    model = dataclasses.replace(
        vit_jax.load_model(trained),
        is_multilabel=False,
    )
    logits = np.float64(model(pixels).logits_BK)
    softmax = scipy.special.softmax(logits)

    assert_allclose(model.predict(pixels), softmax, atol=1e-5)
    return pixels, logits


@pytest.mark.slow
def test_converted_weights_state_several_labels(
    trained,
    logits_of_black,
    tmp_path,
):
    pixels, logits = logits_of_black
    file = tmp_path / "w.npz"

    succeed(["convert", str(trained), str(file)])
    probability = vit_jax.load_model(file).predict(pixels)
    with_new_head = vit_jax.load_model(file, num_classes=4)

    assert load_weights(file).is_multilabel
    assert not with_new_head.is_multilabel, "a new head has to be trained"
    assert_allclose(probability, compute_sigmoid(logits), atol=1e-5)


@pytest.mark.slow
def test_an_exported_program_gives_sigmoids(
    trained,
    logits_of_black,
    tmp_path,
):
    pixels, logits = logits_of_black
    output = tmp_path / "program"

    succeed(["export", str(trained), "--to=stablehlo", f"--output={output}"])
    program = export.deserialize(bytearray(output.read_bytes()))
    description = json.loads((tmp_path / "program.json").read_text())

    assert_allclose(
        program.call(pixels),
        compute_sigmoid(logits),
        atol=1e-5,
    )
    assert description["output"]["meaning"] == "probabilities: sigmoid of each logit"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ([], "objective.loss='softmax'"),
        ([SIGMOID, "input.sampling=balanced"], "input.sampling='balanced'"),
        (
            [SIGMOID, "objective.class_weights=1,1,5"],
            "objective.class_weights=(1.0, 1.0, 5.0)",
        ),
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
    recipe = load_recipe("configs/finetune.py:any,own", [])

    (reason,) = find_unavailable([task], recipe).values()

    assert reason.endswith("its images may have several labels, and a task has one for each.")


@pytest.mark.slow
def test_verbs_reject_the_other_kind_of_data(
    trained,
    data,
    single_label_data,
    tmp_path,
):
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
    out = succeed(
        [
            "probe",
            str(trained),
            f"--data={data}",
            f"--cache={tmp_path}/cache",
            "--penalty=1",
            f"--output={probe}",
            "--json",
        ]
    )
    result = json.loads(out)["datasets"][data]
    precision = pytest.approx(result["mean_average_precision"], abs=1e-5)
    loss = pytest.approx(result["loss"], rel=1e-3)

    out = succeed(["evaluate", probe, f"--data={data}", "--json"])
    evaluated = json.loads(out)

    assert load_weights(tmp_path / "probe").is_multilabel
    assert evaluated["mean_average_precision"] == precision
    assert evaluated["loss"] == loss


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
    normalised = (np.float32(image) - 127.5) / 127.5
    logits = np.float64(state.model(normalised).logits_BK)
    loss_B = compute_losses(logits, label)
    expected = np.average(loss_B, weights=mask)

    batch = Batch(
        image_BHWC=image,
        label_B=label,
        mask_B=mask,
    )
    _, metrics = run.train_step(
        state,
        jax.device_put(batch, run.batch_sharding),
    )

    train_loss = float(metrics["train_loss"])

    assert train_loss == pytest.approx(expected, rel=1e-4)
    assert "train_accuracy" not in metrics


def test_a_search_is_decided_by_precision():
    trials = {
        0.1: {
            "validation_mean_average_precision": 0.5,
            "validation_loss": 1.0,
        },
        0.3: {
            "validation_mean_average_precision": 0.625,
            "validation_loss": 2.0,
        },
        1.0: {
            "validation_accuracy": None,
            "validation_loss": None,
        },
    }

    heading, *lines = table(trials, 0.3).splitlines()
    widths = {len(line.removesuffix("  <- chosen")) for line in lines}

    assert choose(trials) == 0.3
    assert heading == "learning rate  validation mean average precision  validation loss"
    assert lines[1].split() == ["0.3", "62.50%", "2.0000", "<-", "chosen"]
    assert widths == {len(heading)}
