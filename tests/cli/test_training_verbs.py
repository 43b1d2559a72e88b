"""Mistakes users make with the verbs that train, each with the message that mends it."""

import os
import signal
import subprocess
import sys

import pytest

from tests.integration.commands import run
from tests.tiny import RECIPE, ROOT
from vit_jax import cli
from vit_jax.hosts import exits


def refused(words):
    """The message of a command whose words are wrong."""
    outcome = run(words)
    assert outcome.code == 2
    assert outcome.err.startswith("vit-jax: ")
    return outcome.err


@pytest.fixture
def fails(data_dir, tmp_path):
    """Runs a command that must fail before it trains; returns its message."""

    def fail(*words, workdir=tmp_path / "new" / "workdir"):
        given = [f"--config={RECIPE}", f"--workdir={workdir}", f"--config.input.data_dir={data_dir}"]
        before = sorted(tmp_path.rglob("*"))
        message = refused(["pretrain", *given, *words])
        assert sorted(tmp_path.rglob("*")) == before, "a refused command leaves nothing behind"
        return message

    return fail


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("global_batch=100", ["100", "8 device", "96 or 104"]),
        ("data=None", ["config.data is not set", "tfds:NAME", "folder:PATH"]),
        ("data=tfds:cifar11", ["cifar10"]),
        ("data=tfds:cifar10", ["not prepared", "vit-jax prepare cifar10"]),
        ("data=folder:/nowhere/at/all", ["/nowhere/at/all"]),
        ("input.train_split=training", ["training", "train"]),
        ("input.holdout_fraction=0.1", ["--config.input.holdout_fraction=0.1: without effect on digits"]),
        ("init_from=/nowhere", ["/nowhere", "there is no such file"]),
        ("resume_from=/nowhere", ["resume_from", "not a workdir"]),
        ("logging.wandb_project=x", ["wandb"]),
        ("batch_size=64", ["no field 'batch_size'", "Did you mean global_batch?"]),
        (
            "optimizer.arguments.b1=high",
            ["optax:lion' with config.optimizer.arguments={'b1': 'high'} fails at an update"],
        ),
        ("optimizer.arguments.beta=0.9", ["optax:lion' cannot be called with learning_rate and", "'beta'"]),
        ("model.attention=cudnn", ["'cudnn' needs an NVIDIA GPU, and here is cpu"]),
    ],
)
def test_a_value_that_cannot_work(fails, override, parts):
    lion = ["name=optax:lion", "weight_decay=0"] if override.startswith("optimizer.") else []
    message = fails(*(f"--config.optimizer.{field}" for field in lion), f"--config.{override}")
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["pretain"], ["no verb 'pretain'", "'pretrain'"]),
        (["pretrain"], ["--config=", "--workdir="]),
        (["pretrain", f"--config={RECIPE}"], ["--workdir="]),
        (["pretrain", f"--config={RECIPE}", "--workdri=x"], ["'--workdri=x'", "--workdir="]),
        (["prepare"], ["Expected DATASET, given nothing", "vit-jax prepare --help"]),
        (["prepare", "cifar10", "--config.seed=3"], ["Unknown argument '--config.seed=3'"]),
        (["show", f"--config={RECIPE}", "digits"], ["Unknown argument 'digits'", "begin with --"]),
        (["bench", f"--config={RECIPE}", "--steps=0"], ["--steps=0: must be a whole number from 1"]),
        (
            ["finetune", f"--config={RECIPE}", "--workdir=x"],
            ["a recipe for pretrain, not for finetune: vit-jax pretrain --config="],
        ),
    ],
)
def test_words_that_are_wrong(words, parts):
    message = refused(words)
    for part in parts:
        assert part in message


def test_a_check_reads_recipe_and_changes_and_nothing_else(tmp_path):
    words = [f"--config={RECIPE}", f"--workdir={tmp_path / 'run'}", "--check"]
    cli.main(["pretrain", *words, "--config.data=folder:/not/here"])
    assert "must lie in [0, 1)" in refused(["pretrain", *words, "--config.model.dropout_fraction=2"])
    assert "config.data is not set" in refused(["pretrain", *words, "--config.data=None"])
    assert "'100 epochs' is 2245 of 2245 steps" in refused(["pretrain", *words, "--config.schedule.warmup=100 epochs"])
    part = "--config.input.train_split=train[:50%]"  # of which nobody knows how many they are
    cli.main(["pretrain", *words, "--config.schedule.warmup=100 epochs", part])
    assert "is a recipe for pretrain" in refused(["finetune", *words])
    words[0] = f"--config={ROOT}/configs/finetune.py:ViT-B/16,cifar10"
    assert "config.init_from is not set" in refused(["finetune", *words])
    assert not list(tmp_path.iterdir())


def test_a_traceback_on_request(monkeypatch):
    monkeypatch.setenv("VIT_JAX_TRACEBACK", "1")
    with pytest.raises(ValueError, match="no recipe"):
        cli.main(["show", "--config=nowhere.py"])


def test_folders_that_have_splits_or_nothing(fails, tmp_path):
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "empty") in fails(f"--config.data=folder:{tmp_path}/empty")
    for name in ("train/cat/1.png", "train/dog/1.png"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    data = f"--config.data=folder:{tmp_path}"
    assert f"Give folder:{tmp_path}/train" in fails(data)
    assert "both 'train'" in fails(data, "--config.input.test_split=train")
    (tmp_path / "train").rename(tmp_path / "fit")
    idle = (data, "--config.input.holdout_fraction=0.5", "--config.input.train_split=fit")
    assert f"holdout_fraction=0.5: without effect on folder:{tmp_path}; only" in fails(*idle)


def test_a_start_that_failed_does_not_bind_the_workdir(fails, tmp_path):
    assert "no such file" in fails("--config.init_from=/nowhere", workdir=tmp_path)
    assert "both set" in fails("--config.init_from=/nowhere", "--config.resume_from=/nowhere", workdir=tmp_path)
    (tmp_path / "file").write_text("")
    assert "cannot be written" in fails(workdir=tmp_path / "file" / "run")
    assert "belongs" not in fails("--config.seed=4", "--config.resume_from=/nowhere", workdir=tmp_path)


def test_help_loads_nothing_heavy():
    """So that it comes at once."""
    program = "import sys; from vit_jax.cli import main; main(['--help']); main(['evaluate', '--help']); "
    program += "assert not {'jax', 'numpy', 'tensorflow', 'ml_collections'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("verb", ["pretrain", "finetune"])
def test_sigterm_while_a_run_prepares_has_the_code_that_starts_it_again(verb, monkeypatch, capfd, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    (tmp_path / "recipe.py").write_text("import signal\nsignal.raise_signal(signal.SIGTERM)\n")
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as exit_:
        cli.main([verb, f"--config={tmp_path / 'recipe.py'}", "--workdir=y"])
    assert exit_.value.code == exits.PREEMPTED
    assert "stopped before the first step: there is nothing to save" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["folder:x", "--short_side=256"], "needs --output= too"),
        (
            ["folder:x", "--short_side=256", "--output=y", "--data_dir=z"],
            "--data_dir= is not for a dataset of a f",
        ),
        (["cifar10", "--short_side=256"], "--short_side= is not for a dataset of the TFDS catalogue"),
        (["folder:x", "--short_side=0", "--output=y"], "--short_side=0: must be a whole number from 1"),
        (
            ["folder:x", "--short_side=9", "--output=y", "--quality=101"],
            "--quality=101: must be a whole number",
        ),
        (["folder:/nowhere", "--short_side=9", "--output=y"], "'/nowhere' is no folder with images"),
    ],
)
def test_prepare_takes_what_its_kind_of_data_needs(words, message):
    assert message in refused(["prepare", *words])
