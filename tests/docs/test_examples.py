"""The examples of docs/examples: each is run as its first lines say, and does what it says."""

import pathlib
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from docs.examples import augmentation, dataset, loss, schedule, training_loop, vtab_suite
from tests.integration import commands
from tests.tiny import RUN, flags
from tests.train import small_runs as runs
from vit_jax.train.pretrain import pretrain

EXAMPLES = pathlib.Path(__file__).parents[2] / "docs" / "examples"
LENGTH = [
    "total=6 steps",
    "schedule.warmup=2 steps",
    "evaluation.every=3 steps",
    "logging.every=1 steps",
]
LENGTH += ["evaluation.global_batch=304"]  # all test images in one batch
UNCROPPED = ["input.train_crop=none", "input.shift_pixels=0"]
TOGETHER = [  # the options of the examples that fit into one run, as in their first lines
    "data=docs.examples.dataset:open_shapes",
    "input.augmentations=docs.examples.augmentation:random_erasing",
    "objective.loss=docs.examples.loss:focal_loss",
    "optimizer.name=docs.examples.optimizer:muon_in_blocks",
    "optimizer.arguments.weight_decay=0.1",
    "optimizer.weight_decay=0",
    "schedule.decay=docs.examples.schedule:trapezoid",
    "model.position_embedding=docs.examples.positions:LearnedWaves",
    "model.block=docs.examples.block:ParallelBlock",
    "model.pool=docs.examples.pooling:WeightedMean",
    "model.head=docs.examples.head:CosineHead",
    "evaluation.evaluators.trust.kind=docs.examples.evaluator:Confidence",
    "evaluation.evaluators.trust.arguments.threshold=0.5",
    "evaluation.evaluators.trust.every=6 steps",
    "evaluation.metrics=top5_accuracy,docs.examples.metric:brier",
]
ALONE = ["model.network=docs.examples.network:Mixer", "sharding.parameters=fsdp"]


def test_every_file_is_run_here():
    tested = {"tracker", "training_loop", "vtab_suite"}
    for option in TOGETHER + ALONE:
        match = re.search(r"docs\.examples\.(\w+):", option)
        if match is None:
            continue
        name = match[1]
        tested.add(name)
        text = (EXAMPLES / f"{name}.py").read_text()
        assert f"--config.{option}" in text

    assert tested == {path.stem for path in EXAMPLES.glob("*.py")}


def list_steps(lines, name):
    """Return the steps of the lines of metrics that have this one."""
    steps = []
    for line in lines:
        if name in line:
            steps.append(line["step"])
    return steps


@pytest.mark.slow
def test_together(tmp_path):
    config = runs.config(*LENGTH, *UNCROPPED, *TOGETHER)

    summary = pretrain(config, str(tmp_path))

    lines = commands.metrics(tmp_path)
    assert list_steps(lines, "test_accuracy") == [3, 6]
    assert list_steps(lines, "trust_sure_fraction") == [6]
    assert 0 <= summary["trust_sure_accuracy"] <= 1
    assert summary["test_top5_accuracy"] >= summary["test_accuracy"]
    assert 0 <= summary["test_brier"] <= 2
    assert summary["test_images"] == dataset.SIZES["test"]

    rates = []
    for line in lines:
        if "train_loss" in line:
            assert np.isfinite(line["train_loss"])
            rates.append(line["learning_rate"])
    expected_rates = [0, 1.5e-3] + [3e-3] * 4

    assert rates == pytest.approx(expected_rates, rel=1e-5)
    assert summary["exaflops"] > 0


@pytest.mark.slow
def test_a_network_and_a_loop_of_ones_own(tmp_path):
    """The network learns, and the loop of the example computes to the bit what `pretrain` does."""
    options = [
        *LENGTH,
        *UNCROPPED,
        TOGETHER[0],
        *ALONE,
        "total=60 steps",
        "evaluation.every=60 steps",
    ]
    summary = pretrain(runs.config(*options), str(tmp_path))

    assert summary["test_accuracy"] > 0.5  # by chance it would be a third
    assert summary["exaflops"] > 0
    results = training_loop.main("digits", *flags(*RUN, *options))
    for name, value in results.items():
        assert summary[f"test_{name}"] == value


@pytest.fixture
def mlflow(monkeypatch):
    """Replace mlflow; return its calls."""
    calls = []

    def record(name):
        def call(*arguments, **options):
            calls.append((name, *arguments, *options.items()))
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))

        return call

    names = ("start_run", "log_params", "log_metrics", "end_run")
    module = types.SimpleNamespace(**{name: record(name) for name in names})
    monkeypatch.setitem(sys.modules, "mlflow", module)
    yield calls
    sys.modules.pop("docs.examples.tracker", None)


@pytest.mark.slow
def test_the_tracker_receives_config_and_metrics_and_resumes(mlflow, tmp_path):
    fields = ("total=2 steps", "schedule.warmup=0 steps", "logging.every=1 steps")
    config = runs.config(*fields, "logging.writers=docs.examples.tracker:MLflow")

    pretrain(config, str(tmp_path))
    pretrain(config, str(tmp_path))

    lines = commands.metrics(tmp_path)
    (_, parameters) = mlflow[1]

    assert mlflow[0] == ("start_run", ("run_name", tmp_path.name))
    assert parameters["logging.every"] == "1 steps"
    written = []
    for call in mlflow[2:-3]:
        written.append({"step": call[2][1], **call[1]})
    assert written == lines
    assert mlflow[-3:] == [("end_run",), ("start_run", ("run_id", "r1")), ("end_run",)]


@pytest.mark.slow
def test_a_suite_of_ones_own(data_dir, tmp_path):
    """The command of its first lines, for one task and two steps."""
    config = runs.config(
        *UNCROPPED,
        "total=1 steps",
        "schedule.warmup=0 steps",
    )
    pretrain(config, str(tmp_path / "small"))
    command = re.search(r"    vit-jax (vtab .*)\n", vtab_suite.__doc__)[1]
    words = command.replace("runs/", f"{tmp_path}/").split()

    out = commands.succeed(
        [
            *words,
            "--tasks=ink",
            "--learning_rates=0.1",
            "--lengths=2:1",
            f"--data_dir={data_dir}",
            "--config.logging.tensorboard=False",
            "--config.global_batch=48",
        ]
    )

    assert re.search(r"^\| ink +\| appearance .*\| +360 \|", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("digit", 8),
        ("parity", 0),
        ("loop", 1),
        ("ink", 0),
        ("side", 1),
    ],
)
def test_answers_of_the_suite_by_hand(name, label):
    """For an 8 with ink in its right half alone, a quarter of all."""
    pixels = np.zeros((8, 8))
    pixels[:, 4:] = 0.5
    task = getattr(vtab_suite, name)

    assert task.answer(8, pixels) == label


def test_focal_loss_by_hand():
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.25]]))
    label = jnp.array([[0.0, 1.0, 0.0]])

    (found,) = loss.focal_loss(logits, label)

    expected = 0.75**2 * np.log(4)
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_trapezoid_by_hand():
    rate = schedule.trapezoid(
        learning_rate=1.0,
        warmup_steps=10,
        total_steps=100,
    )

    expected = {0: 0, 5: 0.5, 10: 1, 80: 1, 90: 0.5, 100: 0}
    for step, value in expected.items():
        assert float(rate(step)) == pytest.approx(value, abs=1e-6)
    traced = jax.jit(rate)(jnp.int32(5))

    assert float(traced) == pytest.approx(0.5, abs=1e-6)


def test_random_erasing_repeats_and_leaves_its_input_alone():
    image = np.zeros((16, 16, 3), np.uint8)

    def erase(seed):
        rng = np.random.default_rng(seed)
        return augmentation.random_erasing(image, rng)

    results = np.stack([erase(seed) for seed in range(8)])

    assert not image.any()
    assert_array_equal(erase(0), results[0])
    is_erased = results.any(axis=3)
    fractions = is_erased.mean(axis=(1, 2))
    assert 0 < fractions.max() <= augmentation.LARGEST_SIDE**2
    assert fractions.min() == 0
