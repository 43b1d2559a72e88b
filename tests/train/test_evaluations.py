"""Several evaluations in one run: each with its split, prefix and cadence, resumed as if nothing had happened."""

import numpy as np
import pytest

from tests.integration import commands
from tests.train import small_runs as runs
from tests.train.test_stopping import ask_to_end_at
from vit_jax.data.memory import MemorySource
from vit_jax.train import pretrain as verb
from vit_jax.train.assemble import Datasets
from vit_jax.train.evaluations import build_evaluations
from vit_jax.train.interruption import Interrupted

NAMES = tuple("0123456789")
PIXELS = f"{__name__}:Pixels"
LENGTHS = ["total=6 steps", "schedule.warmup=1 step", "logging.every=1 step", "checkpoint.every=3 steps"]
LENGTHS += [f"optimizer.{field}" for field in ("name=sgd", "first_moment_dtype=bfloat16", "trained=head")]
EVALUATORS = [
    "evaluation.every=3 steps",
    "evaluation.evaluators.v2.split=other",
    "evaluation.evaluators.v2.every=2 steps",
    f"evaluation.evaluators.mine.kind={PIXELS}",
    "evaluation.evaluators.mine.arguments.factor=0.5",
    "checkpoint.best_metric=v2_accuracy",
    "checkpoint.keep_latest=1",
]


class Pixels:
    """The mean pixel of the images that count, and the steps done."""

    def __init__(self, split, run, factor):
        self._split, self._factor = split, factor
        assert run.config.evaluation.evaluators[split.name].kind == PIXELS

    def run(self, state):
        total, count = 0.0, 0.0
        with self._split.open_batches() as batches:
            for batch in batches:
                mask, image = np.asarray(batch.mask_B), np.asarray(batch.image_BHWC, np.float64)
                total, count = total + (image.mean((1, 2, 3)) * mask).sum(), count + mask.sum()
        yield "pixel", self._factor * total / count
        yield "at_step", int(state.step)


class NoRun:
    def __init__(self, split, run):
        pass


def images(seed, count=20):
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 8, 8, 1), np.uint8)
    return MemorySource(pixels, np.arange(count) % 10, NAMES), pixels


DATA = Datasets(images(0, 160)[0], images(1)[0], {"v2": images(2, 24)[0], "mine": images(3)[0]})
CONFIG = runs.config(*LENGTHS, *EVALUATORS, "input.shift_pixels=1")


def pretrain(workdir, monkeypatch):
    monkeypatch.setattr(verb, "open_datasets", lambda config: DATA)
    return verb.pretrain(CONFIG, str(workdir))


def results(workdir):
    """Step and value of every result of an evaluation."""
    found = {}
    for line in commands.metrics(workdir):
        for name, value in line.items():
            if name.startswith(("test_", "v2_", "mine_")):
                found.setdefault(name, []).append((line["step"], value))
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as monkeypatch:
        return workdir, pretrain(workdir, monkeypatch)


def test_each_has_its_split_prefix_and_cadence(uninterrupted):
    workdir, summary = uninterrupted
    found = results(workdir)
    steps = {name: [step for step, _ in values] for name, values in found.items()}
    assert steps == {
        **{name: [3, 6] for name in ("test_loss", "test_accuracy", "test_images", "mine_pixel", "mine_at_step")},
        **{name: [2, 4, 6] for name in ("v2_loss", "v2_accuracy", "v2_images")},
    }
    assert (summary["test_images"], summary["v2_images"], summary["mine_at_step"]) == (20, 24, 6)
    assert summary["mine_pixel"] == pytest.approx(0.5 * images(3)[1].mean(), rel=1e-6)
    assert found["v2_accuracy"][-1] == (6, summary["v2_accuracy"])


def test_the_best_is_that_of_the_evaluator_named(uninterrupted):
    workdir, _ = uninterrupted
    evaluated = results(workdir)["v2_accuracy"]
    best = max(accuracy for _, accuracy in evaluated)
    kept = set(commands.checkpoint_steps(workdir))
    assert max(kept) == 6
    assert kept & {step for step, accuracy in evaluated if accuracy == best}
    assert len(kept) <= 2


def test_evaluations_that_are_owed_are_made_up_for(uninterrupted, tmp_path, monkeypatch):
    """Asked to end in the third of those that are due; test_stopping.py has the other places."""
    ask_to_end_at(9, monkeypatch)
    with pytest.raises(Interrupted, match="stopped after step 3 of 6"):
        pretrain(tmp_path, monkeypatch)
    ask_to_end_at(None, monkeypatch)
    summary = pretrain(tmp_path, monkeypatch)
    assert results(tmp_path) == results(uninterrupted[0])
    assert summary["parameters_sha256"] == uninterrupted[1]["parameters_sha256"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([f"kind={PIXELS}", "arguments.f=1"], r"called with \(split, run\) and arguments=\{'f': 1\}: .*'f'"),
        ([f"kind={__name__}:NoRun"], "kind='.*:NoRun' gives NoRun, which has no method run"),
    ],
)
def test_what_is_no_evaluator_is_refused(options, message):
    run = runs.build(*(f"evaluation.evaluators.mine.{option}" for option in options))
    with pytest.raises(ValueError, match=rf"config\.evaluation\.evaluators\.mine.*{message}"):
        build_evaluations(run, DATA, "test", lambda: None)
