"""Fine-tuning by the real command: the search, kills in the middle of it, and the mistakes that users make."""

import random
import shutil
import signal
import time

import pytest

from tests.integration import commands

RECIPE = "configs/digits_transfer.py"
TINY = ("model.width=16", "model.mlp_dim=32", "model.depth=2", "model.num_heads=2", "total=2 steps")
SHORT = (
    "total=40 steps",
    "global_batch=16",
    "schedule.warmup=4 steps",
    "checkpoint.every=8 steps",
    "evaluation.every=40 steps",
    "logging.every=10 steps",
    "logging.tensorboard=False",
    "search.learning_rates=0.003,0.03",
    "search.validation_fraction=0.3",
    "polyak.factor=0.9",
    "input.train_examples_per_class=30",
)


@pytest.fixture(scope="module")
def source(command, tmp_path_factory):
    """A workdir with weights of the digits 0 to 4."""
    workdir = tmp_path_factory.mktemp("source") / "pretrained"
    overrides = (*TINY, "logging.tensorboard=False", f"input.data_dir={command.data_dir}")
    words = [f"--config={RECIPE}:pretrain", f"--workdir={workdir}", *(f"--config.{o}" for o in overrides)]
    result = command.run_words("pretrain", *words)
    assert result.returncode == 0, result.stderr
    return workdir


def words(command, source, workdir, *overrides):
    fields = (*SHORT, f"input.data_dir={command.data_dir}", f"init_from={source}", *overrides)
    return ["finetune", f"--config={RECIPE}:finetune", f"--workdir={workdir}", *(f"--config.{f}" for f in fields)]


@pytest.fixture(scope="module")
def uninterrupted(command, source, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finetune") / "run"
    result = command.run_words(*words(command, source, workdir))
    assert result.returncode == 0, result.stderr
    return workdir, result


def test_what_the_search_leaves(uninterrupted):
    workdir, result = uninterrupted
    trials = {rate: commands.summary(workdir / "search" / f"learning_rate={rate}") for rate in ("0.003", "0.03")}
    best = min(trials, key=lambda rate: (-trials[rate]["validation_accuracy"], trials[rate]["validation_loss"]))
    assert commands.summary(workdir)["learning_rate"] == float(best)
    (chosen,) = [line for line in result.stdout.splitlines() if "<- chosen" in line]
    assert chosen.startswith(best)
    assert "head/linear/kernel replaced" in result.stdout
    assert "positions/table resized from 4x4 to 8x8" in result.stdout
    lines = result.stdout.splitlines()
    said = ("trial ", "data ", "classes ", "the best ")
    assert [" ".join(line.split()) for line in lines if line.startswith(said)] == [
        "trial 1 of 2: learning rate 0.003",
        "data digits: 105 training and 45 validation images, 5 classes",  # 30 % of 30 images of each class held out
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
    assert commands.checkpoint_steps(workdir)[-1] == 40


def test_the_first_loss_is_that_of_guessing(command, source, tmp_path):
    overrides = ("total=1 steps", "schedule.warmup=0 steps", "search.learning_rates=", "schedule.learning_rate=1e-3")
    result = command.run_words(*words(command, source, tmp_path / "run", *overrides))
    assert result.returncode == 0, result.stderr
    assert commands.summary(tmp_path / "run")["train_loss"] == pytest.approx(1.6094379, abs=2e-7)  # ln 5


def test_killed_in_the_search_and_after_it(uninterrupted, command, source, tmp_path):
    reference, _ = uninterrupted
    workdir, rng = tmp_path / "run", random.Random(0)
    first, second = (workdir / "search" / f"learning_rate={rate}" for rate in ("0.003", "0.03"))
    for folder in (first, second, workdir):
        process = command.start_words(*words(command, source, workdir))
        commands.wait_for_new_checkpoint(folder, process)
        time.sleep(rng.uniform(0.0, 0.1))
        process.kill()
        process.communicate()
    process = command.start_words(*words(command, source, workdir))
    process.send_signal(signal.SIGCONT)
    result = commands.ended(process)
    assert result.returncode == 0, result.stderr
    for name in ("parameters_sha256", "test_loss", "test_accuracy", "learning_rate"):
        assert commands.summary(workdir)[name] == commands.summary(reference)[name]
    for rate in ("0.003", "0.03"):
        trial = f"search/learning_rate={rate}"
        assert (
            commands.summary(workdir / trial)["parameters_sha256"]
            == (commands.summary(reference / trial)["parameters_sha256"])
        )


def test_sigterm_in_the_search_saves_and_the_same_command_goes_on(uninterrupted, command, source, tmp_path):
    reference, _ = uninterrupted
    workdir = tmp_path / "run"
    process = command.start_words(*words(command, source, workdir))
    commands.wait_for_new_checkpoint(workdir / "search" / "learning_rate=0.003", process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 75, err
    assert "which is saved; the same command goes on" in err
    result = command.run_words(*words(command, source, workdir))
    assert result.returncode == 0, result.stderr
    assert commands.summary(workdir)["parameters_sha256"] == commands.summary(reference)["parameters_sha256"]


def test_a_learning_rate_that_diverges_loses(command, source, tmp_path):
    overrides = ("search.learning_rates=1e30,0.01", "optimizer.clip_global_norm=None")
    result = command.run_words(*words(command, source, tmp_path / "run", *overrides))
    assert result.returncode == 0, result.stderr
    assert commands.summary(tmp_path / "run")["learning_rate"] == 0.01
    assert "diverged" in result.stdout


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("init_from=None",), "config.init_from is not set"),
        (("init_from=/nowhere",), "/nowhere"),
        (("model.name=ViT-B/16",), "width: there 16, ViT-B/16 has 768\n  depth: there 2, ViT-B/16 has 12"),
        (("input.image_size=17,16", "input.shift_pixels=1"), "use an input.image_size of 16 or 18"),
        (("model.head=keep",), "has 5 classes (['0', '1', '2', '3', '4']) and the data 5"),
        (("input.classes=5,elf",), "elf"),
        (("search.learning_rates=0.1,0.1",), "different from each other"),
        (("schedule.learning_rate=0.1",), "are both set"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_mistakes(command, source, tmp_path, overrides, message):
    result = command.run_words(*words(command, source, tmp_path / "run", *overrides))
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_the_source_is_never_written_to(command, source, tmp_path):
    result = command.run_words(*words(command, source, source))
    assert result.returncode == 2
    assert "the same folder" in result.stderr
    assert commands.checkpoint_steps(source) == [2]


def test_a_workdir_of_pretraining_is_refused(command, source, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(source, other)
    result = command.run_words(*words(command, source, other))
    assert result.returncode == 2
    assert "run of the other kind" in result.stderr


def test_a_source_that_is_being_written(command, source, tmp_path):
    """What orbax has not finished carries another name; the newest whole step is taken."""
    live = tmp_path / "live"
    shutil.copytree(source, live)
    shutil.copytree(live / "checkpoints" / "2", live / "checkpoints" / "4.orbax-checkpoint-tmp-7")
    result = command.run_words(*words(command, live, tmp_path / "run", "total=2 steps", "schedule.warmup=0 steps"))
    assert result.returncode == 0, result.stderr
    assert "of step 2)" in result.stdout


def test_a_half_written_checkpoint_is_one_clear_error(command, source, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    data = [path for path in (broken / "checkpoints" / "2").rglob("d/*") if path.is_file()]
    assert data
    for path in data:
        path.write_bytes(path.read_bytes()[:10])
    result = command.run_words(*words(command, broken, tmp_path / "run"))
    assert result.returncode == 2, result.stderr
    (message,) = [line for line in result.stderr.splitlines() if line.startswith("vit-jax:")]
    assert str(broken) in message
    assert "Is it half written, or copied in part?" in message


def test_weights_that_change_under_a_run_are_noticed(uninterrupted, command, source, tmp_path):
    workdir, _ = uninterrupted
    other = tmp_path / "run"
    shutil.copytree(workdir, other)
    start = (other / "start.json").read_text()
    (other / "start.json").write_text(start.replace('"parameters_sha256": "', '"parameters_sha256": "0'))
    result = command.run_words(*words(command, source, other))
    assert result.returncode == 2
    assert "started from other weights" in result.stderr
