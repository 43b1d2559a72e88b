"""Fine-tuning by the command: the search, kills in the middle of it, shared sources and workdirs."""

import shutil
import signal

import pytest

from tests.columns import list_column
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
def make_words(data_dir):
    """Return a function to the words of a verb with a stage of the recipe."""

    def make(verb, stage, workdir, *overrides):
        fields = ("logging.tensorboard=False", f"input.data_dir={data_dir}", *overrides)
        return [verb, f"--config={RECIPE}:{stage}", f"--workdir={workdir}", *flags(*fields)]

    return make


@pytest.fixture(scope="module")
def source(make_words, tmp_path_factory):
    """A workdir with weights of the digits 0 to 4."""
    workdir = tmp_path_factory.mktemp("source") / "pretrained"
    succeed(make_words("pretrain", "pretrain", workdir, *NETWORK, "total=2 steps"))
    return workdir


@pytest.fixture(scope="module")
def tuning(make_words, source):
    """Return a function from a workdir to the words of a fine-tuning run."""

    def make(workdir, *overrides):
        fields = (*SHORT, f"init_from={source}", *overrides)
        return make_words("finetune", "finetune", workdir, *fields)

    return make


@pytest.fixture(scope="module")
def uninterrupted(tuning, tmp_path_factory):
    """The workdir and the output of a finished run."""
    workdir = tmp_path_factory.mktemp("finetune") / "run"
    return workdir, succeed(tuning(workdir))


@pytest.fixture(scope="module")
def trials(uninterrupted):
    """The summaries of the trials, by learning rate."""
    workdir, _ = uninterrupted
    summaries = {}
    for rate in ("0.003", "0.03"):
        summaries[rate] = commands.summary(workdir / "search" / f"learning_rate={rate}")
    return summaries


@pytest.fixture(scope="module")
def best(trials):
    """The learning rate with the highest accuracy, and of equal ones with the lowest loss."""

    def rank(rate):
        return -trials[rate]["validation_accuracy"], trials[rate]["validation_loss"]

    return min(trials, key=rank)


def test_the_search_chooses_the_best_learning_rate(uninterrupted, best):
    workdir, out = uninterrupted

    (chosen,) = (line for line in out.splitlines() if "<- chosen" in line)

    assert commands.summary(workdir)["learning_rate"] == float(best)
    assert chosen.startswith(best)


def test_the_output_of_a_search(uninterrupted, best):
    """30 % of the 30 images of each class are held out in the trials."""
    _, out = uninterrupted

    assert "head/linear/kernel replaced" in out
    assert "positions/table resized from 4x4 to 8x8" in out

    lines = []
    for line in out.splitlines():
        if line.startswith(("trial ", "data ", "classes ", "the best ")):
            lines.append(" ".join(line.split()))
    assert lines == [
        "trial 1 of 2: learning rate 0.003",
        "data digits: 105 training and 45 validation images, 5 classes",
        "classes '5', '6', '7', '8', '9'",
        "trial 2 of 2: learning rate 0.03",
        "data digits: 105 training and 45 validation images, 5 classes",
        "classes '5', '6', '7', '8', '9'",
        f"the best of 2: learning rate {best}",
        "data digits: 150 training and 179 test images, 5 classes",
        "classes '5', '6', '7', '8', '9'",
    ]


def test_the_files_of_a_search(uninterrupted, trials, best):
    """Trials keep no checkpoints."""
    workdir, _ = uninterrupted

    assert commands.summary(workdir)["test_images"] == 179
    assert trials[best]["validation_images"] == 45
    assert not (workdir / "search" / "learning_rate=0.03" / "checkpoints").exists()
    assert commands.checkpoint_steps(workdir)[-1] == 24
    assert not list(workdir.rglob(LOCK))


def test_a_second_run_is_rejected_before_its_first_trial(tuning, tmp_path):
    workdir = tmp_path / "run"
    workdir.mkdir()

    with WorkdirLock(workdir):
        outcome = run(tuning(workdir))
        names = list_column(workdir.iterdir(), "name")

    assert names == [LOCK]
    assert outcome.code == 2
    assert "is used by another run" in outcome.err


def stop_at_checkpoint(words, folder, number):
    """Send a signal to a run at its first new checkpoint in a folder; return the outcome."""
    process = commands.start_held(words, folder)
    commands.wait_for_new_checkpoint(folder, process)
    process.send_signal(number)
    (outcome,) = commands.finish([process])
    return outcome


def test_runs_that_end_in_a_trial_and_after_the_trials_are_resumed(
    uninterrupted,
    tuning,
    tmp_path,
):
    """The run is killed in the second trial, then stopped by SIGTERM, which saves.

    The resumed run is equal to the uninterrupted one.
    """
    reference, _ = uninterrupted
    workdir = tmp_path / "run"
    saved = "which is saved; the same command resumes it"

    killed = stop_at_checkpoint(
        tuning(workdir),
        workdir / "search/learning_rate=0.03",
        signal.SIGKILL,
    )
    assert killed.code == -signal.SIGKILL, killed.err
    assert saved not in killed.err

    stopped = stop_at_checkpoint(tuning(workdir), workdir, signal.SIGTERM)
    assert stopped.code == 75, stopped.err
    assert saved in stopped.err

    succeed(tuning(workdir))
    found = commands.summary(workdir)
    expected = commands.summary(reference)
    for name in ("parameters_sha256", "test_loss", "test_accuracy", "learning_rate"):
        assert found[name] == expected[name], name
    for trial in ("search/learning_rate=0.003", "search/learning_rate=0.03"):
        found = commands.summary(workdir / trial)
        expected = commands.summary(reference / trial)
        assert found["parameters_sha256"] == expected["parameters_sha256"], trial


def test_a_learning_rate_that_diverges_loses(tuning, tmp_path):
    words = tuning(
        tmp_path / "run",
        "search.learning_rates=1e30,0.01",
        "optimizer.clip_global_norm=None",
        "total=5 steps",
    )

    out = succeed(words)

    assert "diverged" in out
    assert commands.summary(tmp_path / "run")["learning_rate"] == 0.01


def test_the_source_is_never_written_to(tuning, source):
    outcome = run(tuning(source))

    assert outcome.code == 2
    assert "the same folder" in outcome.err
    assert commands.checkpoint_steps(source) == [2]


def test_a_source_that_is_being_written(tuning, source, tmp_path):
    """The newest complete step is taken: unfinished checkpoints of orbax have longer names.

    The first loss with a new head of zeros is that of guessing, ln 5.
    """
    live = tmp_path / "live"
    shutil.copytree(source, live)
    shutil.copytree(live / "checkpoints" / "2", live / "checkpoints" / "4.orbax-checkpoint-tmp-7")
    workdir = tmp_path / "run"

    out = succeed(
        tuning(
            workdir,
            *ONE_RUN,
            "logging.every=1 steps",
            f"init_from={live}",
        )
    )

    assert "of step 2)" in out
    assert commands.losses(workdir)[1] == pytest.approx(1.6094379, abs=2e-7)


def test_a_half_written_checkpoint_is_one_clear_error(
    tuning,
    source,
    tmp_path,
):
    """The run is a process: reads of orbax that fail after the error would reach the next test."""
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    files = [path for path in (broken / "checkpoints" / "2").rglob("d/*") if path.is_file()]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[:10])

    process = commands.start(tuning(tmp_path / "run", f"init_from={broken}"))
    (outcome,) = commands.finish([process])

    assert outcome.code == 2, outcome.err
    (message,) = (line for line in outcome.err.splitlines() if line.startswith("vit-jax:"))
    assert str(broken) in message
    assert "Is it half written, or copied in part?" in message


def test_weights_that_change_under_a_run_are_noticed(
    uninterrupted,
    tuning,
    tmp_path,
):
    workdir = tmp_path / "run"
    shutil.copytree(uninterrupted[0], workdir)
    key = '"parameters_sha256": "'
    start = (workdir / "start.json").read_text()
    (workdir / "start.json").write_text(start.replace(key, f"{key}0"))

    outcome = run(tuning(workdir))

    assert outcome.code == 2
    assert "started from other weights" in outcome.err
