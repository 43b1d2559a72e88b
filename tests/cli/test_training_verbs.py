"""Mistakes users make with the verbs that train, each with the message that mends it."""

import json
import pathlib
import subprocess
import sys

import pytest

from vit_jax import cli

ROOT = pathlib.Path(__file__).parents[2]
RECIPE = str(ROOT / "configs" / "digits.py")


@pytest.fixture
def fails(capsys, data_dir, tmp_path):
    """Runs a command that must fail before it trains; returns its message."""

    def run(*words, workdir=None, config=RECIPE, code=2):
        workdir = workdir or tmp_path / "workdir"
        with pytest.raises(SystemExit) as exit_:
            cli.main(
                [
                    "pretrain",
                    f"--config={config}",
                    f"--workdir={workdir}",
                    f"--config.input.data_dir={data_dir}",
                    *words,
                ]
            )
        assert exit_.value.code == code
        message = capsys.readouterr().err
        assert message.startswith("vit-jax: ")
        return message

    return run


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("model.widht=64", ["no field 'model.widht'", "model.width"]),
        ("learning_rate=1e-3", ["schedule.learning_rate"]),
        ("model=3", ["is a section", "model.name"]),
        ("global_batch=many", ["wrong type", "int"]),
        ("model.pool=average", ["'average'", "'token', 'gap', 'map'"]),
        ("schedule.warmup=5", ["duration", "500 steps"]),
        ("input.image_size=8", ["tuple"]),
        ("global_batch=100", ["100", "8 device", "96 or 104"]),
        ("model.name=ViT-mu/3", ["do not divide", "3"]),
        ("model.name=ViT-X/16", ["not a known model", "ViT-"]),
        ("schedule.warmup=900 epochs", ["must end before the run does"]),
        ("data=None", ["config.data is not set", "tfds:NAME", "folder:PATH"]),
        ("data=tfds:cifar11", ["cifar10"]),
        ("data=tfds:cifar10", ["not prepared", "vit-jax prepare cifar10"]),
        ("data=folder:/nowhere/at/all", ["/nowhere/at/all"]),
        ("input.train_split=training", ["training", "train"]),
        ("input.train_split=test", ["both 'test'", "tested on the images it trains on"]),
        ("input.holdout_fraction=0.1", ["--config.input.holdout_fraction=0.1: without effect on digits"]),
        ("input.shift_pixels=-1", ["shift_pixels"]),
        ("init_from=/nowhere", ["/nowhere", "there is no such file"]),
        ("resume_from=/nowhere", ["resume_from", "not a workdir"]),
        ("logging.wandb_project=x", ["wandb"]),
        ("logging.profile_start_step=100000", ["profile_start_step", "the steps 1 to"]),
    ],
)
def test_a_value_that_cannot_work(fails, override, parts):
    message = fails(f"--config.{override}")
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["pretain"], ["no verb 'pretain'", "'pretrain'"]),
        (["pretrain"], ["--config=", "--workdir="]),
        (["pretrain", f"--config={RECIPE}"], ["--workdir="]),
        (["pretrain", f"--config={RECIPE}", "--workdri=x"], ["'--workdri=x'", "--workdir="]),
        (["pretrain", f"--config={RECIPE}", "--workdir"], ["--workdir needs a value"]),
        (["pretrain", "--config=configs/digit.py", "--workdir=x"], ["Did you mean digits?"]),
        (["pretrain", f"--config={RECIPE}:epoch=3", "--workdir=x"], ["'epochs'"]),
        (["prepare"], ["Expected DATASET, given nothing", "vit-jax --help"]),
        (["prepare", "cifar10", "--config.seed=3"], ["Unknown argument '--config.seed=3'"]),
        (["show", f"--config={RECIPE}", "digits"], ["Unknown argument 'digits'", "begin with --"]),
        (["show", f"--config={RECIPE}", "--config.model.name=ViT-B16"], ["not a known model", "ViT-B/16"]),
        (["bench", f"--config={RECIPE}", "--steps=0"], ["--steps=0: must be a whole number from 1"]),
        (["finetune", f"--config={RECIPE}", "--workdir=x"], ["a recipe for PretrainConfig, not for finetune"]),
    ],
)
def test_words_that_are_wrong(capsys, words, parts):
    with pytest.raises(SystemExit) as exit_:
        cli.main(words)
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    for part in parts:
        assert part in message


def test_a_traceback_on_request(monkeypatch):
    monkeypatch.setenv("VIT_JAX_TRACEBACK", "1")
    with pytest.raises(ValueError, match="no recipe"):
        cli.main(["show", "--config=nowhere.py"])


def test_a_workdir_of_another_config_names_the_fields(fails, tmp_path):
    workdir = tmp_path / "run"
    workdir.mkdir()
    from vit_jax.config import load_recipe, to_dict

    stored = to_dict(load_recipe(RECIPE))
    stored["seed"], stored["model"]["depth"], stored["logging"]["every"] = 7, 9, "1 steps"
    (workdir / "config.json").write_text(json.dumps(stored))
    (workdir / "checkpoints" / "5").mkdir(parents=True)
    message = fails(workdir=workdir)
    assert "seed: there 7, given 0" in message
    assert "model.depth: there 9, given 4" in message
    assert "logging" not in message, "how a run is shown may change"


def test_a_damaged_config_file(fails, tmp_path):
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    assert "damaged" in fails(workdir=tmp_path)


def test_a_workdir_that_cannot_be_written(fails, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in fails(workdir=tmp_path / "file" / "run")


def test_folders_without_use(fails, tmp_path):
    empty, single = tmp_path / "empty", tmp_path / "single"
    empty.mkdir()
    (single / "cats").mkdir(parents=True)
    (single / "cats" / "1.png").write_bytes(b"x")
    assert str(empty) in fails(f"--config.data=folder:{empty}")
    assert "cats" in fails(f"--config.data=folder:{single}")


def test_folders_that_have_splits(fails, tmp_path):
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
    assert "belongs" not in fails("--config.seed=4", "--config.resume_from=/nowhere", workdir=tmp_path)


def test_show_prints_every_effective_value(capsys):
    cli.main(["show", f"--config={RECIPE}", "--config.seed=3"])
    out = capsys.readouterr().out
    assert "seed: 3\n" in out
    assert "model.num_heads: " in out


def test_help_tells_every_verb(capsys):
    cli.main([])
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[1] for line in lines if line.startswith("  vit-jax ")} == set(cli.VERBS)


def test_help_loads_nothing_heavy():
    """So that it comes at once."""
    program = "import sys; sys.argv = ['vit-jax', '--help']; from vit_jax.cli import main; main(); "
    program += "assert not {'jax', 'numpy', 'tensorflow', 'ml_collections'} & set(sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "pretrain" in result.stdout
