"""Commands of two words, weights and data, and the long commands that they print."""

import json
import pathlib
import re
import shlex

import cv2
import numpy as np
import pytest

from tests.integration.commands import run, succeed
from tests.tools.sweeps import small_suite
from tests.weights.test_families import write
from tests.weights.test_photographs import GOLDEN as PHOTOGRAPHS
from vit_jax import cli
from vit_jax.cli.short_forms import choose_new_folder, name_data
from vit_jax.config import load_recipe, to_dict
from vit_jax.train.lifecycle.workdir import has_same_config


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with weights of DINOv2, images of two classes, and an empty folder."""
    monkeypatch.chdir(tmp_path)
    weights = write("huggingface/dinov2", tmp_path / "dino")
    processor = str(PHOTOGRAPHS["huggingface/dinov2 processor"])
    (weights / "preprocessor_config.json").write_text(processor)
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        folder = tmp_path / "pics" / name
        folder.mkdir(parents=True)
        for number in range(10):
            image = rng.integers(0, 256, (40, 50, 3), np.uint8)
            cv2.imwrite(str(folder / f"{number}.png"), image)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.npz").touch()
    return tmp_path


def read_command(text):
    """Return the words of the long command that a short form prints."""
    (command,) = re.findall(
        r"^command:? +vit-jax (.*)$",
        text,
        re.MULTILINE,
    )
    return shlex.split(command)


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("finetune pics dino", "weights must be first.* Use vit-jax finetune dino pics"),
        ("probe pics dino", "weights must be first.* Use vit-jax probe dino pics"),
        ("evaluate pics dino", "weights must be first.* Use vit-jax evaluate dino pics"),
        ("knn pics pics", "pics: must be weights, and is data"),
        ("finetune dino dino", "DATA=dino: must be data, and is weights"),
        ("finetune dino pcs", "DATA=pcs: there is no such file or folder.* mean 'pics'"),
        ("pretrain a.npz", "DATA=a.npz: must have its kind.* npz:a.npz"),
        ("pretrain nowhere", "DATA=nowhere: there is no such file or folder.*folder:PATH"),
        ("finetune dino empty", "folder:empty: must have images .* has none"),
        ("knn dino empty", "folder:empty: must have images .* has none"),
        ("finetune dino", r"Missing: DATA\. Use vit-jax finetune WEIGHTS DATA"),
        ("finetune", "Missing: WEIGHTS DATA"),
        ("pretrain", r"Missing: DATA\. Use vit-jax pretrain DATA"),
        ("evaluate dino", "Missing: DATA"),
        ("pretrain pics --doctor", "--doctor: must be with --config= and --workdir="),
        ("finetune dino pics --config.data=digits", "two values of data"),
        ("probe dino pics --data=digits", "two values of DATA"),
        ("evaluate dino pics", "has no classes, only features.*Fine-tune it first"),
    ],
)
def test_mistakes(here, words, rule):
    if "evaluate dino pics" in words:
        write("huggingface/siglip", here / "dino")

    outcome = run(shlex.split(words))
    message = outcome.err.splitlines()[-1]  # notes on the weights come before it

    assert outcome.code == 2
    assert re.search(rule, message), message
    assert not (here / "runs").exists()


def test_the_long_command_is_the_same_run(here):
    printed = succeed(["finetune", "dino", "pics", "--check", "--config.seed=3"])
    verb, *words = read_command(printed)
    options = cli.VERBS[verb].parse(words)
    config = load_recipe(options.config, options.overrides)

    assert options.complete(words) is options
    assert options.config == "finetune:dinov3,own"
    assert options.workdir == "runs/pics"
    assert options.check
    assert config.init_from == "dino"
    assert config.data == "folder:pics"
    assert config.seed == 3
    assert config.total == "200 steps"
    assert config.global_batch == 16
    assert "recipe   finetune:dinov3,own: for the family of the weights" in printed
    assert not (here / "runs").exists()


def test_any_has_the_rule_of_the_weights(here):
    words = ["--config=finetune:any,cifar10", "--config.init_from=dino"]
    note = "note: recipe finetune:any,cifar10,rule=dinov3: for the family of the weights"

    run_words = ["--config.data=folder:pics", "--workdir=runs/a"]
    check = run(["finetune", *words, *run_words, "--check"])
    plan = run(["plan", *words, "--topology=v5e:1x1", "--arithmetic", "--lora"])

    assert note in check.err
    assert "adam, 10,000 steps" in check.out
    assert note in plan.err
    assert re.search(r"trained 19,\d+$", plan.out, re.MULTILINE)
    assert "--config=finetune:any,cifar10,rule=dinov3 " in plan.err
    assert "--config.optimizer.lora_rank=16" in plan.err


def test_lists_and_sweeps_have_the_rule_of_the_weights(here):
    words = ["--config=finetune:any,own", "--config.init_from=dino"]
    note = "note: recipe finetune:any,own,rule=dinov3: for the family of the weights"

    shown = run(["show", *words, "--json"])
    swept = run(
        [
            "sweep",
            *words,
            "--config.data=folder:pics",
            "--dry_run",
            "--workdir=runs/a",
            "--grid=seed=0,1",
            "--topology=h100:1",
            "--config.global_batch=2",
        ]
    )

    assert shown.err.count(note) == 1
    assert json.loads(shown.out)["optimizer"]["layer_decay"] == 0.75
    assert swept.err.count(note) == 1
    assert swept.out.count("180") == 2  # steps, of one rate: the paper's search has five runs


def test_image_sizes_are_compared_by_memory_and_time(here):
    words = ["--config=finetune:any,own", "--config.init_from=dino", "--config.data=folder:pics"]
    sizes = ["--grid=input.image_size=32;128;512", "--topology=h100:1"]
    options = ["--config.global_batch=16", "--dry_run", "--workdir=runs/a"]

    out = succeed(["sweep", *words, *sizes, *options])
    settings = []
    hours = []
    memory = []
    for line in out.splitlines():
        if "image_size=" in line:
            _, *row, _ = line.split("|")
            settings.append(row[0].strip())
            hours.append(float(row[5]))
            memory.append(float(row[-1]))

    assert settings == [
        "input.image_size=32",
        "input.image_size=128",
        "input.image_size=512",
    ]
    assert memory == sorted(memory)
    assert memory[0] < memory[-1]
    assert hours[0] < hours[-1]


@pytest.mark.parametrize(
    ("given", "rule", "size"),
    [
        ([], "dinov3", "224x224"),
        (["--learning_rates=0.01"], "", "384x384"),  # suits one rule only
    ],
)
def test_vtab_has_the_rule_of_the_weights(here, given, rule, size):
    words = ["--tasks=all", f"--suite={small_suite.MODULE}:SUITE", "--workdir=runs/v", "--dry-run"]

    outcome = run(["vtab", "dino", *words, *given])

    assert (f"recipe finetune:any,vtab,rule={rule}:" in outcome.err) == bool(rule)
    assert f"images of {size} pixels" in outcome.out


@pytest.mark.parametrize("words", ["dino pics", "--config=finetune:any,own"])
def test_lora_is_written_as_overrides(here, words):
    data = ["--config.data=folder:pics", "--config.init_from=dino"]
    given = words.split() if words == "dino pics" else [words, *data]

    outcome = run(["finetune", *given, "--lora=4", "--check"])
    _, *long_words = read_command(outcome.out)
    options = cli.VERBS["finetune"].parse(long_words)
    config = load_recipe(options.config, options.overrides)

    assert options.lora is None
    assert config.optimizer.lora_rank == 4
    assert config.optimizer.name == "adam"
    assert config.optimizer.layer_decay == 0.75  # of the rule
    assert config.schedule.learning_rate == 0.001


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["plan", "--config=digits", "--topology=h100:8", "--lora"], "a recipe of fine-tuning"),
        (["plan", "--config=finetune", "--topology=h100:8", "--lora=0"], "--lora=0: .* at least 1"),
    ],
)
def test_mistakes_with_lora(words, rule):
    assert re.search(rule, run(words).err)


def test_pretraining_by_one_word(here):
    verb, *words = read_command(succeed(["pretrain", "pics", "--check"]))
    options = cli.VERBS[verb].parse(words)

    assert options.config == "pretrain_own:ViT-Ti/16,examples=18"
    assert options.workdir == "runs/pics"
    assert load_recipe(options.config, options.overrides).global_batch == 16


def test_the_digits_have_their_recipe(here):
    verb, *words = read_command(succeed(["pretrain", "digits", "--check"]))

    options = cli.VERBS[verb].parse(words)

    assert options.config == "digits"
    assert options.workdir == "runs/digits"


def test_a_recipe_alone_has_a_workdir(here):
    words = ["pretrain", "--config=digits", "--check"]
    folder = here / "runs" / "digits"

    first = succeed(words)
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    second = succeed(words)

    assert "--workdir=runs/digits" in read_command(first)
    assert "--workdir=runs/digits-2" in read_command(second)


def test_a_run_of_the_same_config_is_resumed(here):
    """Fields of the execution may differ; values that the run has resolved are those requested."""
    config = load_recipe("finetune:any,own", ["--config.init_from=dino"])
    folder = here / "runs" / "pics"
    folder.mkdir(parents=True)
    stored = json.loads(json.dumps(to_dict(config)))
    stored["input"]["image_size"] = [48, 48]
    stored["requested"] = {"input.image_size": None}
    (folder / "config.json").write_text(json.dumps(stored))

    other_execution = load_recipe(
        "finetune:any,own",
        ["--config.init_from=dino", "input.num_workers=1"],
    )
    other_weights = load_recipe("finetune:any,own", ["init_from=other"])
    other_recipe = load_recipe("digits")

    assert has_same_config(folder, config)
    assert has_same_config(folder, other_execution)
    assert not has_same_config(folder, other_weights)
    assert not has_same_config(folder, other_recipe)
    (folder / "config.json").write_text("{")
    assert not has_same_config(folder, config)


def test_a_probe_writes_a_classifier_to_a_new_folder(here):
    outcome = run(["probe", "dino", "pics", "--penalty=1", "--cache=none"])

    assert outcome.code == 0, outcome.err
    assert read_command(outcome.err)[:3] == ["probe", "dino", "--data=folder:pics"]
    assert "--output=runs/pics-probe" in read_command(outcome.err)
    assert outcome.err.endswith("next: vit-jax predict runs/pics-probe IMAGE\n")
    assert (here / "runs/pics-probe").is_dir()


def test_earlier_forms_choose_nothing(here):
    outcome = run(["probe", "dino", "--data=folder:pics", "--penalty=1", "--cache=none"])

    assert outcome.code == 0, outcome.err
    assert "command" not in outcome.err
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("folder:/my/photos", "photos"),
        ("csv:labels.csv#comma", "labels"),
        ("npz:cells.npz", "cells"),
        ("tfds:cifar10", "cifar10"),
        ("digits", "digits"),
        ("folder:my photos/", "my-photos"),
        ("wds:shards/*.tar", "shards"),
    ],
)
def test_the_name_of_data(data, name):
    assert name_data(data) == name


def test_a_new_folder_is_free(here):
    (here / "runs/a").mkdir(parents=True)

    assert choose_new_folder("a") == "runs/a"

    (here / "runs/a/file").write_text("")
    pathlib.Path("runs/a-2").symlink_to("nowhere")

    assert choose_new_folder("a") == "runs/a-3"
