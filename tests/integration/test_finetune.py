"""Fine-tuning by the command: the search, kills in the middle of it, and sources and workdirs that others use."""

import shutil
import signal

import pytest

from tests.integration import commands
from tests.integration.commands import run, succeed
from tests.tiny import NETWORK, ROOT, flags
from vit_jax.train.lifecycle.lock import FILE as LOCK
from vit_jax.train.lifecycle.lock import WorkdirLock

RECIPE = ROOT / "configs" / "digits_transfer.py"
SHORT = (
    "total=24 steps",
    "global_batch=16",
    "schedule.warmup=4 steps",
    "checkpoint.every=8 steps",
    "evaluation.every=24 steps",
    "logging.every=8 steps",
    "search.learning_rates=0.003,0.03",
    "search.validation_fraction=0.3",
    "polyak.factor=0.9",
    "input.train_examples_per_class=30",
)
ONE_RUN = ("total=5 steps", "search.learning_rates=", "schedule.learning_rate=1e-3")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]


@pytest.fixture(scope="module")
def words(data_dir):
    """A function to the words of a verb with a stage of the recipe."""

    def words(verb, stage, workdir, *overrides):
        fields = ("logging.tensorboard=False", f"input.data_dir={data_dir}", *overrides)
        return [verb, f"--config={RECIPE}:{stage}", f"--workdir={workdir}", *flags(*fields)]

    return words


@pytest.fixture(scope="module")
def source(words, tmp_path_factory):
    """A workdir with weights of the digits 0 to 4."""
    workdir = tmp_path_factory.mktemp("source") / "pretrained"
    succeed(words("pretrain", "pretrain", workdir, *NETWORK, "total=2 steps"))

    return workdir


@pytest.fixture(scope="module")
def tuning(words, source):
    return lambda workdir, *overrides: words(
        "finetune",
        "finetune",
        workdir,
        *SHORT,
        f"init_from={source}",
        *overrides,
    )


@pytest.fixture(scope="module")
def uninterrupted(tuning, tmp_path_factory):
    """A finished run and what it printed."""
    workdir = tmp_path_factory.mktemp("finetune") / "run"
    return workdir, succeed(tuning(workdir))


def test_what_the_search_leaves(uninterrupted):
    workdir, out = uninterrupted
    trials = {
        rate: commands.summary(workdir / "search" / f"learning_rate={rate}")
        for rate in ("0.003", "0.03")
    }
    best = min(
        trials,
        key=lambda rate: (-trials[rate]["validation_accuracy"], trials[rate]["validation_loss"]),
    )

    assert commands.summary(workdir)["learning_rate"] == float(best)

    (chosen,) = [line for line in out.splitlines() if "<- chosen" in line]

    assert chosen.startswith(best)
    assert "head/linear/kernel replaced" in out
    assert "positions/table resized from 4x4 to 8x8" in out

    said = ("trial ", "data ", "classes ", "the best ")

    assert [" ".join(line.split()) for line in out.splitlines() if line.startswith(said)] == [
        "trial 1 of 2: learning rate 0.003",
        # 30 % of 30 images of each class held out
        "data digits: 105 training and 45 validation images, 5 classes",
        "classes '5', '6', '7', '8', '9'",
        "trial 2 of 2: learning rate 0.03",
        "data digits: 105 training and 45 validation images, 5 classes",
        "classes '5', '6', '7', '8', '9'",
        f"the best of 2: learning rate {best}",
        "data digits: 150 training and 179 test images, 5 classes",
        "classes '5', '6', '7', '8', '9'",
    ]
    assert commands.summary(workdir)["test_images"] == 179
    assert trials[best]["validation_images"] == 45
    assert not (workdir / "search" / "learning_rate=0.03" / "checkpoints").exists()
    assert commands.checkpoint_steps(workdir)[-1] == 24
    assert not list(workdir.rglob(LOCK))


def test_a_second_run_is_rejected_before_its_first_trial(tuning, tmp_path):
    (tmp_path / "run").mkdir()
    with WorkdirLock(tmp_path / "run"):
        outcome = run(tuning(tmp_path / "run"))
        assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]

    assert outcome.code == 2
    assert "is used by another run" in outcome.err


def test_ended_in_a_trial_and_after_them(uninterrupted, tuning, tmp_path):
    """By kill -9 in the second trial, then by SIGTERM, which saves; what follows is what would have followed."""
    reference = uninterrupted[0]
    workdir = tmp_path / "run"
    trials = [f"search/learning_rate={rate}" for rate in ("0.003", "0.03")]

    for folder, number in ((trials[1], signal.SIGKILL), (".", signal.SIGTERM)):
        process = commands.start_held(tuning(workdir), workdir / folder)
        commands.wait_for_new_checkpoint(workdir / folder, process)
        process.send_signal(number)
        (outcome,) = commands.finish([process])

        assert outcome.code == (75 if number == signal.SIGTERM else -number), outcome.err
        assert ("which is saved; the same command resumes it" in outcome.err) is (
            number == signal.SIGTERM
        )

    succeed(tuning(workdir))
    for folder, names in (
        (".", ("test_loss", "test_accuracy", "learning_rate")),
        *((trial, ()) for trial in trials),
    ):
        found = commands.summary(workdir / folder)
        expected = commands.summary(reference / folder)

        for name in ("parameters_sha256", *names):
            assert found[name] == expected[name], (folder, name)


def test_a_learning_rate_that_diverges_loses(tuning, tmp_path):
    overrides = (
        "search.learning_rates=1e30,0.01",
        "optimizer.clip_global_norm=None",
        "total=5 steps",
    )

    assert "diverged" in succeed(tuning(tmp_path / "run", *overrides))
    assert commands.summary(tmp_path / "run")["learning_rate"] == 0.01


def test_the_source_is_never_written_to(tuning, source):
    outcome = run(tuning(source))

    assert outcome.code == 2
    assert "the same folder" in outcome.err
    assert commands.checkpoint_steps(source) == [2]


def test_a_source_that_is_being_written(tuning, source, tmp_path):
    """Checkpoints that orbax has not finished have longer names: the newest complete step is taken.

    The first loss with a new head of zeros is that of guessing.
    """
    live = tmp_path / "live"
    shutil.copytree(source, live)
    shutil.copytree(live / "checkpoints" / "2", live / "checkpoints" / "4.orbax-checkpoint-tmp-7")
    out = succeed(tuning(tmp_path / "run", *ONE_RUN, "logging.every=1 steps", f"init_from={live}"))

    assert "of step 2)" in out
    assert commands.losses(tmp_path / "run")[1] == pytest.approx(1.6094379, abs=2e-7)  # ln 5


def test_a_half_written_checkpoint_is_one_clear_error(tuning, source, tmp_path):
    """In a process of its own: reads of orbax that fail after the refusal would be blamed on the next test."""
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    data = [path for path in (broken / "checkpoints" / "2").rglob("d/*") if path.is_file()]

    assert data

    for path in data:
        path.write_bytes(path.read_bytes()[:10])

    (outcome,) = commands.finish([commands.start(tuning(tmp_path / "run", f"init_from={broken}"))])

    assert outcome.code == 2, outcome.err

    (message,) = [line for line in outcome.err.splitlines() if line.startswith("vit-jax:")]

    assert str(broken) in message
    assert "Is it half written, or copied in part?" in message


def test_weights_that_change_under_a_run_are_noticed(uninterrupted, tuning, tmp_path):
    other = tmp_path / "run"
    shutil.copytree(uninterrupted[0], other)
    start = (other / "start.json").read_text()
    (other / "start.json").write_text(
        start.replace('"parameters_sha256": "', '"parameters_sha256": "0')
    )
    outcome = run(tuning(other))

    assert outcome.code == 2
    assert "started from other weights" in outcome.err
