"""Mistakes of users with the verbs that train, each with the message that helps."""

import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.integration.commands import rejected, run
from tests.tiny import RECIPE, ROOT, source
from vit_jax import cli
from vit_jax.cli import training
from vit_jax.data.kinds.in_memory import MemorySource
from vit_jax.hosts import exits


@pytest.fixture
def fails(data_dir, tmp_path):
    """Return a function that runs a command that must fail before it trains, and returns its
    message.
    """

    def fail(*words, workdir=tmp_path / "new" / "workdir"):
        before = sorted(tmp_path.rglob("*"))
        message = rejected(
            [
                "pretrain",
                f"--config={RECIPE}",
                f"--workdir={workdir}",
                f"--config.input.data_dir={data_dir}",
                *words,
            ]
        )
        assert sorted(tmp_path.rglob("*")) == before, "a rejected command leaves nothing behind"
        return message

    return fail


def test_a_value_that_cannot_work(fails):
    """These values are rejected once the data are open."""
    assert "config.global_batch=100" in fails("--config.global_batch=100")

    message = fails("--config.input.holdout_fraction=0.1")
    assert "--config.input.holdout_fraction=0.1" in message
    assert "digits" in message


def halve(image, rng):
    return image / 2


CUSTOM_PARTS = "tests.models.test_own_parts"


class FloatSource(MemorySource):
    def image_of(self, index):
        return super().image_of(index).astype(np.float32)


def open_floats(split, config, seed):
    digits = source(20)
    return FloatSource(
        np.zeros((20, 8, 8, 1), np.uint8),
        digits.labels,
        digits.class_names,
    )


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        (
            "objective.loss=optax:sigmoid_binary_cross_entropy",
            r"config\.objective\.loss .*shape \(\d+, 10\)",
        ),
        (
            f"data={__name__}:open_floats",
            r"config\.data='\S+:open_floats', split 'train': .*float32 .*uint8",
        ),
        (
            f"input.augmentations={__name__}:halve",
            r"augmentation \S+:halve returned float64 .*return uint8",
        ),
        (
            f"model.position_embedding={CUSTOM_PARTS}:ShortPositions",
            r"ShortPositions returns positions",
        ),
        (
            f"model.pool={CUSTOM_PARTS}:NoPooling",
            r"config\.model\.pool: NoPooling returns",
        ),
        (
            f"model.head={CUSTOM_PARTS}:LogitsAlone",
            r"config\.model\.head: LogitsAlone returns",
        ),
    ],
    ids=["loss", "data", "augmentation", "positions", "pool", "head"],
)
def test_custom_code_that_does_not_fit(fails, override, rule):
    assert re.search(rule, fails(f"--config.{override}"))


def test_check(tmp_path, capsys):
    words = [f"--config={RECIPE}", f"--workdir={tmp_path / 'run'}", "--check"]
    cli.main(["pretrain", *words, "--devices=8", "--slices=2"])
    line = capsys.readouterr().out

    assert "1,437 training and 360 test images of 10 classes" in line
    assert "on 8 devices (2 replica x 4 data x 1 model)" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--check", "--config.data=None"], "config.data=None: must be set"),
        (["--check", "--config.model.num_heads=7"], "num_heads=7"),
        (["--check", "--devices=6", "--slices=4"], "--devices=6: must be divisible by --slices=4"),
        (["--devices=6"], "--devices=6: has no effect without --check"),
    ],
)
def test_mistakes_of_a_check(tmp_path, words, rule):
    given = [f"--config={RECIPE}", f"--workdir={tmp_path / 'run'}"]

    assert rule in rejected(["pretrain", *given, *words])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("recipe", "rule"),
    [
        (RECIPE, "vit-jax pretrain --config="),
        (f"{ROOT}/configs/finetune.py:ViT-B/16,cifar10", "config.init_from"),
    ],
)
def test_mistakes_of_a_check_of_fine_tuning(tmp_path, recipe, rule):
    words = [f"--config={recipe}", f"--workdir={tmp_path / 'run'}", "--check"]

    assert rule in rejected(["finetune", *words])
    assert not list(tmp_path.iterdir())


def test_a_traceback_on_request(monkeypatch):
    monkeypatch.setenv("VIT_JAX_TRACEBACK", "1")
    with pytest.raises(ValueError, match="no recipe"):
        cli.main(["show", "--config=nowhere.py"])


def test_a_start_that_failed_does_not_bind_the_workdir(fails, tmp_path):
    init_from = "--config.init_from=/nowhere"
    resume_from = "--config.resume_from=/nowhere"

    assert "/nowhere" in fails(init_from, workdir=tmp_path)
    assert "resume_from" in fails(init_from, resume_from, workdir=tmp_path)

    (tmp_path / "file").write_text("")
    assert f"{tmp_path}/file/run" in fails(workdir=tmp_path / "file" / "run")
    assert "resume_from='/nowhere'" in fails("--config.seed=4", resume_from, workdir=tmp_path)


LIST_RECIPES = """
import sys
from vit_jax.cli import main
main(['--help'])
main(['evaluate', '--help'])
main(['recipes'])
heavy = {'jax', 'flax', 'numpy', 'tensorflow', 'ml_collections'}
assert not heavy & set(sys.modules)
"""


def test_help_and_the_list_of_recipes_load_nothing_heavy():
    command = [sys.executable, "-c", LIST_RECIPES]
    subprocess.run(
        command,
        check=True,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("verb", ["pretrain", "finetune"])
def test_sigterm_while_a_run_prepares_has_the_code_that_starts_it_again(
    verb,
    monkeypatch,
    tmp_path,
):
    before = signal.getsignal(signal.SIGTERM)
    (tmp_path / "recipe.py").write_text("import signal\nsignal.raise_signal(signal.SIGTERM)\n")
    monkeypatch.setattr(os, "_exit", sys.exit)
    outcome = run([verb, f"--config={tmp_path / 'recipe.py'}", "--workdir=y"])

    assert outcome.code == exits.PREEMPTED
    assert "stopped before the first step: there is nothing to save" in outcome.err
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["folder:x", "--short_side=256"], "--output="),
        (["folder:x", "--short_side=256", "--output=y", "--data_dir=z"], "--data_dir="),
        (["cifar10", "--short_side=256"], "--short_side="),
        (["folder:x", "--short_side=9", "--output=y", "--quality=101"], "--quality=101"),
        (["folder:/nowhere", "--short_side=9", "--output=y"], "/nowhere"),
    ],
)
def test_prepare_takes_what_its_kind_of_data_needs(words, message):
    assert message in rejected(["prepare", *words])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_the_end_of_a_run_names_the_checkpoint_that_is_kept(
    error,
    tmp_path,
    capsys,
):
    def loop():
        raise error

    for message in ("no checkpoint was written", "the last checkpoint, of step 1,500, is kept"):
        with pytest.raises(SystemExit):
            training.run_training(loop, str(tmp_path))
        assert message in capsys.readouterr().err
        (tmp_path / "checkpoints/1500").mkdir(parents=True, exist_ok=True)
