"""Several evaluations in one run: each with its split, prefix and cadence, also after a resume."""

import dataclasses
from typing import get_args

import jax
import numpy as np
import pytest

from tests.evals.samples import extractor_of
from tests.integration import commands
from tests.rejections import rejects
from tests.tiny import source
from tests.train import small_runs as runs
from vit_jax.api import from_weights
from vit_jax.config import EvaluatorConfig
from vit_jax.config.evaluators import FROZEN_EVALUATORS, FrozenKind
from vit_jax.data.kinds.in_memory import MemorySource
from vit_jax.data.transforms import build_fewshot_transform
from vit_jax.data.unreadable import TooManyUnreadable, UnreadableLog
from vit_jax.evals.fewshot import FewShot, measure_few_shot
from vit_jax.sharding import build_mesh, replicate
from vit_jax.train import pretrain as verb
from vit_jax.train.cadence import Cadence, ScheduledEvaluator
from vit_jax.train.evaluations import build_evaluations, with_stated_mode
from vit_jax.train.frozen_evaluators import FROZEN_MEASURES
from vit_jax.train.inputs import Datasets, open_datasets
from vit_jax.weights import load_weights

pytestmark = pytest.mark.usefixtures("compiled_once")

PIXELS = f"{__name__}:Pixels"
LENGTHS = [
    "total=6 steps",
    "schedule.warmup=1 step",
    "logging.every=1 step",
    "checkpoint.every=3 steps",
    "optimizer.name=sgd",
    "optimizer.first_moment_dtype=bfloat16",
    "optimizer.trained=head",
]
EVALUATORS = [
    "evaluation.every=3 steps",
    "evaluation.evaluators.v2.split=other",
    "evaluation.evaluators.v2.every=2 steps",
    f"evaluation.evaluators.mine.kind={PIXELS}",
    "evaluation.evaluators.mine.arguments.factor=0.5",
    "evaluation.evaluators.few.kind=fewshot",
    "evaluation.evaluators.few.arguments.shots=1,2",
    "evaluation.evaluators.near.kind=knn",
    "evaluation.evaluators.near.arguments.neighbours=3",
    "evaluation.evaluators.near.every=6 steps",
    "checkpoint.best_metric=v2_accuracy",
    "checkpoint.keep_latest=1",
]


class Pixels:
    """The mean pixel of the images in the mask, and the number of steps."""

    def __init__(self, split, run, factor):
        self._split = split
        self._factor = factor
        assert run.config.evaluation.evaluators[split.name].kind == PIXELS

    def run(self, state):
        total = 0.0
        count = 0.0

        with self._split.open_batches() as batches:
            for batch in batches:
                mask = np.asarray(batch.mask_B)
                image = np.asarray(batch.image_BHWC, np.float64)
                total += (image.mean((1, 2, 3)) * mask).sum()
                count += mask.sum()

        yield "pixel", self._factor * total / count
        yield "at_step", int(state.step)


FEW = source(20, seed=4)


class NoRun:
    def __init__(self, split, run):
        pass


OTHERS = {
    "v2": source(24, seed=2),
    "mine": source(20, seed=3),
    "few": FEW,
    "near": FEW,
}
DATA = Datasets(
    source(160),
    source(20, seed=1),
    others=OTHERS,
    train_sources={
        "few": source(40, seed=5),
        "near": FEW,
    },
)

PREFIXES = ("test_", "v2_", "mine_", "few_", "near_")
TWO_BATCHES = "evaluation.global_batch=16"
CONFIG = runs.config(*LENGTHS, *EVALUATORS, TWO_BATCHES)


def pretrain(workdir, monkeypatch):
    monkeypatch.setattr(verb, "open_datasets", lambda config: DATA)
    return verb.pretrain(CONFIG, str(workdir))


def read_results(workdir):
    """Return step and value of every result of an evaluation."""
    results = {}
    for line in commands.metrics(workdir):
        for name, value in line.items():
            if name.startswith(PREFIXES):
                results.setdefault(name, []).append((line["step"], value))

    return results


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as monkeypatch:
        return workdir, pretrain(workdir, monkeypatch)


@pytest.mark.slow
def test_each_has_its_split_prefix_and_cadence(uninterrupted):
    workdir, summary = uninterrupted
    results = read_results(workdir)
    mean_pixel = OTHERS["mine"].images.mean()

    steps = {}
    for name, values in results.items():
        steps[name] = [step for step, _ in values]

    assert steps == {
        "test_loss": [3, 6],
        "test_accuracy": [3, 6],
        "test_images": [3, 6],
        "mine_pixel": [3, 6],
        "mine_at_step": [3, 6],
        "v2_loss": [2, 4, 6],
        "v2_accuracy": [2, 4, 6],
        "v2_images": [2, 4, 6],
        "few_1shot_accuracy": [3, 6],
        "few_1shot_spread": [3, 6],
        "few_2shot_accuracy": [3, 6],
        "few_2shot_spread": [3, 6],
        "near_3nn_accuracy": [6],
    }
    assert summary["test_images"] == 20
    assert summary["v2_images"] == 24
    assert summary["mine_at_step"] == 6
    assert summary["mine_pixel"] == pytest.approx(0.5 * mean_pixel, rel=1e-6)
    assert results["v2_accuracy"][-1] == (6, summary["v2_accuracy"])


@pytest.mark.slow
def test_the_best_is_that_of_the_evaluator_named(uninterrupted):
    workdir, _ = uninterrupted
    evaluated = read_results(workdir)["v2_accuracy"]
    best = max(accuracy for _, accuracy in evaluated)
    best_steps = {step for step, accuracy in evaluated if accuracy == best}

    kept = set(commands.checkpoint_steps(workdir))

    assert max(kept) == 6
    assert kept & best_steps
    assert len(kept) <= 2


@pytest.mark.slow
def test_owed_evaluations_are_run_on_resume(
    uninterrupted,
    tmp_path,
    monkeypatch,
):
    """The run is asked to end in the third evaluation that is due.

    test_early_stopping.py has the other places.
    """
    workdir, expected = uninterrupted
    runs.interrupt(lambda: pretrain(tmp_path, monkeypatch), 9, 3, monkeypatch)

    summary = pretrain(tmp_path, monkeypatch)

    assert read_results(tmp_path) == read_results(workdir)
    assert summary["parameters_sha256"] == expected["parameters_sha256"]


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ([f"kind={PIXELS}", "arguments.f=1"], r"arguments=\{'f': 1\}"),
        ([f"kind={__name__}:NoRun"], "NoRun'.*method run"),
        (["kind=knn", "arguments.neighbours=99"], "99 neighbours.*20 training images"),
        (["kind=knn", "arguments.temperature=abc"], "temperature='abc'"),
        (["kind=fewshot", "arguments.shots=0"], "shots=.*whole numbers.*1"),
        (["kind=knn", "arguments.layer=block:9"], "layer='block:9'.*block:1 to block:2"),
    ],
)
def test_what_is_no_evaluator_is_rejected(options, rule):
    run = runs.build(*(f"evaluation.evaluators.mine.{option}" for option in options))
    both = dataclasses.replace(
        DATA,
        train_sources={"mine": DATA.others["mine"]},
    )

    with rejects("", rule):
        build_evaluations(run, both, lambda: None)


@pytest.mark.slow
def test_features_are_those_of_the_evaluated_parameters(uninterrupted):
    """The few-shot accuracy of a run is computed from its checkpoint.

    It has the average of parameters, not the last ones.
    """
    workdir, summary = uninterrupted
    model = from_weights(load_weights(str(workdir)))
    module = jax.device_put(
        model.module,
        replicate(build_mesh(jax.devices())),
    )
    extractor = extractor_of(
        dataclasses.replace(model, module=module),
        transform=build_fewshot_transform((8, 8)),
        global_batch=16,
    )

    train = extractor.extract(DATA.train_sources["few"])
    test = extractor.extract(DATA.others["few"])
    result = measure_few_shot(FewShot(shots=(1, 2)), train, test, 10)

    for shots in (1, 2):
        mean = np.mean(result.accuracies[shots, 1024.0])
        assert summary[f"few_{shots}shot_accuracy"] == pytest.approx(mean)


def build_config(data_dir, **evaluators):
    config = runs.config(f"input.data_dir={data_dir}")
    evaluation = dataclasses.replace(config.evaluation, evaluators=evaluators)
    return dataclasses.replace(config, evaluation=evaluation)


def test_kinds_on_frozen_features_are_those_of_the_schema():
    assert list(FROZEN_MEASURES) == list(FROZEN_EVALUATORS) == list(get_args(FrozenKind))


def test_frozen_features_have_training_images_of_their_split(data_dir):
    few = EvaluatorConfig(
        kind="fewshot",
        data="digits",
        train_split="train[:50%]",
    )

    data = open_datasets(build_config(data_dir, few=few))

    assert len(data.train_sources["few"]) == 718
    assert len(data.others["few"]) == 360


def test_splits_of_frozen_features_must_have_the_same_classes(data_dir):
    other = EvaluatorConfig(kind="fewshot", data=f"{__name__}:open_splits_that_differ")

    with rejects("splits", "different classes"):
        open_datasets(build_config(data_dir, x=other))


def test_frozen_features_are_of_all_images_also_if_a_part_is_trained_on(data_dir):
    config = runs.config(
        f"input.data_dir={data_dir}",
        "input.train_examples=100",
        "evaluation.evaluators.few.kind=fewshot",
    )

    data = open_datasets(config)

    assert len(data.train) == 100
    assert len(data.train_sources["few"]) == 1437
    assert len(data.test) == 360


def open_splits_that_differ(split, config, seed):
    names = ("a", "b") if split == config.train_split else ("a", "c")
    return MemorySource(
        np.zeros((2, 8, 8, 1), np.uint8),
        np.arange(2),
        names,
    )


class Regret:
    """An evaluator of the caller that states a direction."""

    directions = {"regret": "min"}  # noqa: RUF012

    def run(self, state):
        yield "regret", 0.5


def test_a_run_takes_the_direction_that_an_evaluator_of_the_caller_states():
    config = runs.config()
    checkpoint = dataclasses.replace(config.checkpoint, best_metric="mine_regret")
    config = dataclasses.replace(config, checkpoint=checkpoint)
    evaluator = ScheduledEvaluator("mine", Regret(), Cadence(1, 6))

    assert with_stated_mode(config, [evaluator]).checkpoint.best_mode == "min"
    assert with_stated_mode(config, []) is config


def test_too_many_unreadable_images_end_an_evaluation_in_every_process():
    log = UnreadableLog(source(20), None)
    evaluator = ScheduledEvaluator(
        "mine",
        Regret(),
        Cadence(1, 6),
        [log],
    )

    assert evaluator.run(None) == {"mine_regret": 0.5}

    log.problem = "3 images cannot be read"
    with pytest.raises(TooManyUnreadable, match=r"^mine: 3 images"):
        evaluator.run(None)
