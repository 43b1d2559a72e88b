"""Weights of others run no code: metadata may name only packages that the caller allows."""

import dataclasses
import importlib
import json
import os
import re
import shutil
import sys

import pytest

import vit_jax
from tests.evals.samples import DIRECT, NAMES, SEVEN, sample_pixels, sample_weights, write_pngs
from tests.integration.commands import run, succeed
from tests.tiny import RECIPE, flags
from tests.weights.small_networks import arrays_of
from vit_jax.checkpoint.reader import METADATA, METADATA_DIGEST, digest_metadata
from vit_jax.config import load_recipe
from vit_jax.train.starting_weights import initial_weights
from vit_jax.weights.card import build_card
from vit_jax.weights.description import TrainingData, describe
from vit_jax.weights.formats import write_safetensors
from vit_jax.weights.saving import OWN, save_weights

pytestmark = pytest.mark.xdist_group("tiny")
EVIL = """
import pathlib
import shutil

pathlib.Path(__file__).with_name("ran").touch()

from tests.tiny import source
from vit_jax.models import VisionTransformer
from vit_jax.models.block import Block as OurBlock

class Block(OurBlock):
    pass

def build(a, key):
    import dataclasses
    return VisionTransformer(dataclasses.replace(a, network=None), key)

def open_data(split, config, seed):
    return source(20)
"""
TRAINING = TrainingData(
    data="evil:open_data",
    seed=0,
    holdout_fraction=0.1,
    train_split="train",
    test_split="test",
    classes=(),
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A downloaded folder, entered.

    It holds evil.py, weights that name it in two formats, and images of two classes.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    (tmp_path / "evil.py").write_text(EVIL)
    importlib.invalidate_caches()
    weights = dataclasses.replace(
        sample_weights(SEVEN),
        architecture=dataclasses.replace(SEVEN, block="evil:Block"),
    )
    save_weights(weights, tmp_path / "run", OWN)
    write_file(tmp_path / "w.safetensors", network="evil:build")
    write_pngs(tmp_path / "images" / "ant", sample_pixels(2))
    write_pngs(tmp_path / "images" / "bee", sample_pixels(2, seed=1))
    yield tmp_path
    sys.modules.pop("evil", None)


def write_file(path, **named):
    metadata = describe(
        dataclasses.replace(SEVEN, **named),
        NAMES,
        DIRECT,
        None,
    )
    write_safetensors(path, arrays_of(SEVEN, "timm"), metadata)


def make_rule(text, file, package="evil"):
    """Return the pattern of the error about a reference in a file."""
    reference = rf"architecture\.\w+='{text}': \S*{file}\S* names code of {package}"
    return rf"{reference}, .* add --(weights|config)\.allow_code={package} "


VERBS = {
    "predict": ["predict", "W", "images/ant"],
    "convert": ["convert", "W", "converted/"],
    "export": ["export", "W", "--to=stablehlo", "--output=w.stablehlo"],
    "evaluate": ["evaluate", "W", "--data=folder:images"],
    "fewshot": ["fewshot", "W", "--data=folder:images", "--shots=1"],
    "probe": ["probe", "W", "--data=folder:images"],
    "knn": ["knn", "W", "--data=folder:images"],
    "features": ["features", "W", "--data=folder:images", "--output=f.npz"],
    "inspect": ["inspect", "W", "filters", "--output=pictures"],
    "finetune": [
        "finetune",
        f"--config={RECIPE.with_name('finetune.py')}:any,own",
        "--workdir=tuned",
        *flags(
            "init_from=W",
            "data=folder:images",
            "input.image_size=8,12",
            "total=20 steps",
            "global_batch=8",
        ),
    ],
    "vtab": ["vtab", "W", "--suite=mine:TASKS", "--tasks=all", "--workdir=sweep"],
}
SUITE = """
from vit_jax.tools.sweeps.suite import Task
splits = {"train": "train", "validation": "test", "train_and_validation": "train", "test": "test"}
TASKS = [Task(name="mine", group="all", data="mine:open_data", **splits)]

def open_data(split, config, seed):
    from tests.tiny import source
    return source(20)
"""


@pytest.fixture
def suite(here):
    """A module of the user with a suite of one task."""
    (here / "mine.py").write_text(SUITE)
    yield
    sys.modules.pop("mine", None)


def list_words(verb, source):
    """Return the words of a verb with the weights in the place of W."""
    words = []
    for word in VERBS[verb]:
        if word == "W" or "=W" in word:
            word = word.replace("W", source)
        words.append(word)
    return words


@pytest.mark.usefixtures("suite")
@pytest.mark.parametrize("source", ["run", "w.safetensors"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_runs_no_code_of_a_file(here, verb, source):
    outcome = run(list_words(verb, source))

    assert outcome.code == 2
    assert re.search(make_rule("evil:(Block|build)", source), outcome.err), outcome.err

    group = "config" if verb in ("finetune", "vtab") else "weights"
    assert f"--{group}.allow_code=evil " in outcome.err
    assert not (here / "ran").exists()
    assert "evil" not in sys.modules


@pytest.mark.parametrize("source", ["run", "w.safetensors"])
def test_load_model_runs_no_code_of_a_file(here, source):
    with pytest.raises(ValueError, match=make_rule("evil:(Block|build)", source)):
        vit_jax.load_model(source)
    with pytest.raises(ValueError, match=r"--weights\.allow_code=evi,evil "):
        vit_jax.load_model(source, allow_code="evi")

    assert not (here / "ran").exists()


@pytest.mark.parametrize("field", ["network", "block", "position_embedding", "pool", "head"])
def test_every_field_of_a_network(here, field, monkeypatch):
    calls = []
    monkeypatch.setattr(os, "system", lambda *words: calls.append(words))
    write_file(here / "os.safetensors", **{field: "os:system"})

    rule = rf"^architecture\.{field}='os:system': \S*os\.safetensors names code of os,"
    with pytest.raises(ValueError, match=rule):
        vit_jax.load_model("os.safetensors")

    assert calls == []


@pytest.mark.parametrize("source", ["run", "w.safetensors"])
def test_allowed_code_runs(here, source):
    path = min((here / "images/ant").iterdir())

    out = succeed(["predict", source, str(path), "--weights.allow_code=other,evil"])

    assert out.count("000.png") == 1
    assert (here / "ran").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("suite")
@pytest.mark.parametrize(
    ("verb", "options"),
    [
        (
            "finetune",
            flags(
                "data=mine:open_data",
                "search.learning_rates=",
                "schedule.learning_rate=0.1",
                "evaluation.every=1 fraction",
                "checkpoint.every=1 fraction",
            ),
        ),
        ("vtab", ["--lengths=2:1", "--learning_rates=0.1"]),
    ],
    ids=["finetune", "vtab"],
)
def test_allowed_code_is_trained(here, verb, options):
    """The same command resumes; without the option it fails."""
    small = flags(
        "logging.tensorboard=False",
        "global_batch=8",
        "input.image_size=8,12",
    )
    words = [*list_words(verb, "run"), *options, *small]

    succeed([*words, "--allow_code=evil"])
    assert (here / "ran").exists()

    succeed([*words, "--config.allow_code=other,evil"])

    outcome = run(words)
    assert re.search(make_rule("evil:Block", "run"), outcome.err)


@pytest.mark.usefixtures("here")
def test_a_model_of_allowed_code_is_used_and_saved():
    model = vit_jax.load_model("run", allow_code=("evil",))

    assert model.predict(sample_pixels(2)).shape == (2, len(NAMES))

    model.save("saved")
    with pytest.raises(ValueError, match=make_rule("evil:Block", "saved")):
        vit_jax.load_model("saved")


def test_an_allowed_package_does_not_allow_its_imports(here, monkeypatch):
    calls = []
    monkeypatch.setattr(shutil, "rmtree", lambda *words: calls.append(words))
    write_file(here / "w.safetensors", network="evil:shutil.rmtree")

    rule = r"'evil:shutil\.rmtree': \S+ names code of shutil, .* --weights.allow_code=evil,shutil "
    with pytest.raises(ValueError, match=rule):
        vit_jax.load_model("w.safetensors", allow_code=("evil",))

    assert calls == []


def load_tiny_recipe(*fields):
    return load_recipe(str(RECIPE), flags("init_from=run", *fields))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("field", ["model.block=evil:Block", "allow_code=evil"])
def test_the_config_of_the_command_allows_the_same_network(field):
    """Pre-training may start from weights with the parts that the command names."""
    weights = initial_weights(load_tiny_recipe(field))

    assert weights.architecture.block == "evil:Block"


@pytest.mark.usefixtures("here")
def test_other_fields_of_the_config_allow_no_network():
    config = load_tiny_recipe("data=evil:Block")

    with pytest.raises(ValueError, match=make_rule("evil:Block", "run")):
        initial_weights(config)


@pytest.fixture
def downloaded(here, tiny_run):
    """The tiny run, as if its data were evil:open_data."""
    shutil.copytree(tiny_run.workdir, here / "tiny")
    for file in here.glob(f"tiny/checkpoints/*/{METADATA}/{METADATA}"):
        metadata = json.loads(file.read_text())
        metadata["training"] |= {"data": "evil:open_data"}
        del metadata[METADATA_DIGEST]
        digest = digest_metadata(metadata)
        file.write_text(json.dumps(metadata | {METADATA_DIGEST: digest}))

    file = here / "tiny/config.json"
    config = json.loads(file.read_text()) | {"data": "evil:open_data"}
    file.write_text(json.dumps(config))
    return here


def test_a_report_names_data_and_does_not_open_it(downloaded):
    outcome = run(["report", "tiny"])

    assert outcome.code == 0
    assert re.search(r"training\.data='evil:open_data': .*--weights.allow_code=evil ", outcome.err)
    assert "evil:open_data" in (downloaded / "report.html").read_text()
    assert not (downloaded / "ran").exists()


@pytest.mark.slow
def test_a_report_opens_allowed_data(downloaded):
    outcome = run(["report", "tiny", "--weights.allow_code=evil"])

    assert outcome.code == 0
    assert outcome.err == "next: vit-jax predict tiny IMAGE\n"
    assert (downloaded / "ran").exists()


def test_a_report_runs_no_network_of_a_file(downloaded):
    shutil.rmtree(downloaded / "tiny/checkpoints")
    shutil.copytree(downloaded / "run/checkpoints", downloaded / "tiny/checkpoints")

    outcome = run(["report", "tiny", "--without_data"])

    assert outcome.code == 2
    assert re.search(make_rule("evil:Block", "tiny"), outcome.err)
    assert not (downloaded / "ran").exists()


def test_data_that_the_user_names_are_opened(downloaded):
    succeed(["features", "tiny", "--data=evil:open_data", "--output=f.npz"])

    assert (downloaded / "ran").exists()


def test_a_card_prints_a_reference(here):
    card = build_card(sample_weights(training=TRAINING), OWN, "w")

    assert "`evil:open_data`" in card
    assert not (here / "ran").exists()
