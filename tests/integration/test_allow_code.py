"""Weights of others run no code: what their metadata names is imported only from packages that the caller allows."""

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
    """A downloaded folder, entered: evil.py, weights that name it in every format, and two images."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    (tmp_path / "evil.py").write_text(EVIL)
    importlib.invalidate_caches()
    weights = sample_weights(dataclasses.replace(SEVEN))
    named = dataclasses.replace(
        weights,
        architecture=dataclasses.replace(SEVEN, block="evil:Block"),
    )
    save_weights(named, tmp_path / "run", OWN)
    write_file(tmp_path / "w.safetensors", network="evil:build")
    write_pngs(tmp_path / "images" / "ant", sample_pixels(2))
    write_pngs(tmp_path / "images" / "bee", sample_pixels(2, seed=1))
    yield tmp_path
    sys.modules.pop("evil", None)


def write_file(path, **named):
    metadata = describe(dataclasses.replace(SEVEN, **named), NAMES, DIRECT, None)
    write_safetensors(path, arrays_of(SEVEN, "timm"), metadata)


def refused(text, file, package="evil"):
    """A pattern for the one message."""
    names = rf"architecture\.\w+='{text}': \S*{file}\S* names code of {package}"
    return rf"{names}, .* add --(weights|config)\.allow_code={package} "


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
        *("finetune", f"--config={RECIPE.with_name('finetune.py')}:any,own", "--workdir=tuned"),
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


@pytest.mark.parametrize("source", ["run", "w.safetensors"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_runs_no_code_of_a_file(here, verb, source):
    (here / "mine.py").write_text(SUITE)
    outcome = run(
        [word.replace("W", source) if "=W" in word or word == "W" else word for word in VERBS[verb]]
    )
    sys.modules.pop("mine", None)

    assert outcome.code == 2
    assert re.search(refused("evil:(Block|build)", source), outcome.err), outcome.err

    has_recipe = verb in ("finetune", "vtab")

    assert f"--{'config' if has_recipe else 'weights'}.allow_code=evil " in outcome.err
    assert not (here / "ran").exists()
    assert "evil" not in sys.modules


@pytest.mark.parametrize("source", ["run", "w.safetensors"])
def test_load_model_runs_no_code_of_a_file(here, source):
    with pytest.raises(ValueError, match=refused("evil:(Block|build)", source)):
        vit_jax.load_model(source)
    with pytest.raises(ValueError, match=r"--weights\.allow_code=evi,evil "):
        vit_jax.load_model(source, allow_code="evi")

    assert not (here / "ran").exists()


@pytest.mark.parametrize(
    "field",
    [
        "network",
        "block",
        "position_embedding",
        "pool",
        "head",
    ],
)
def test_every_field_of_a_network(here, field, monkeypatch):
    called = []
    monkeypatch.setattr(os, "system", lambda *words: called.append(words))
    write_file(here / "os.safetensors", **{field: "os:system"})

    with pytest.raises(
        ValueError,
        match=rf"^architecture\.{field}='os:system': \S*os\.safetensors names code of os,",
    ):
        vit_jax.load_model("os.safetensors")

    assert called == []


@pytest.mark.parametrize("source", ["run", "w.safetensors"])
def test_allowed_code_runs(here, source):
    (path, *_) = sorted((here / "images/ant").iterdir())

    assert (
        succeed(["predict", source, str(path), "--weights.allow_code=other,evil"]).count("000.png")
        == 1
    )
    assert (here / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["finetune", "vtab"])
def test_allowed_code_is_trained(here, verb):
    """The same command resumes; without the option it fails."""
    (here / "mine.py").write_text(SUITE)
    overrides = flags("data=mine:open_data", "search.learning_rates=", "schedule.learning_rate=0.1")
    overrides = overrides if verb == "finetune" else ["--lengths=2:1", "--learning_rates=0.1"]
    overrides += flags("logging.tensorboard=False", "global_batch=8", "input.image_size=8,12")
    words = [
        word.replace("W", "run") if "=W" in word or word == "W" else word for word in VERBS[verb]
    ] + overrides
    succeed([*words, "--allow_code=evil"])

    assert (here / "ran").exists()

    succeed([*words, "--config.allow_code=other,evil"])

    assert re.search(refused("evil:Block", "run"), run(words).err)

    sys.modules.pop("mine", None)


def test_a_model_of_allowed_code_is_used_and_saved(here):
    model = vit_jax.load_model("run", allow_code=("evil",))

    assert model.predict(sample_pixels(2)).shape == (2, len(NAMES))

    model.save("saved")
    with pytest.raises(ValueError, match=refused("evil:Block", "saved")):
        vit_jax.load_model("saved")


def test_an_allowed_package_does_not_allow_what_it_imports(here, monkeypatch):
    called = []
    monkeypatch.setattr(shutil, "rmtree", lambda *words: called.append(words))
    write_file(here / "w.safetensors", network="evil:shutil.rmtree")
    pattern = (
        r"'evil:shutil\.rmtree': \S+ names code of shutil, .* --weights.allow_code=evil,shutil "
    )

    with pytest.raises(ValueError, match=pattern):
        vit_jax.load_model("w.safetensors", allow_code=("evil",))

    assert called == []


def test_the_config_of_the_command_allows_the_same_network(here):
    """Pre-training that starts from weights with the parts that the command names."""
    from vit_jax.train.starting_weights import initial_weights

    config = vit_jax.config.load_recipe(
        str(RECIPE),
        flags("init_from=run", "model.block=evil:Block"),
    )

    assert initial_weights(config).architecture.block == "evil:Block"

    other = vit_jax.config.load_recipe(str(RECIPE), flags("init_from=run", "data=evil:Block"))
    with pytest.raises(ValueError, match=refused("evil:Block", "run")):
        initial_weights(other)

    allowed = vit_jax.config.load_recipe(str(RECIPE), flags("init_from=run", "allow_code=evil"))

    assert initial_weights(allowed).architecture.block == "evil:Block"


@pytest.fixture
def downloaded(here, tiny_run):
    """The tiny run, as if its data were evil:open_data."""
    shutil.copytree(tiny_run.workdir, here / "tiny")
    for file in here.glob(f"tiny/checkpoints/*/{METADATA}/{METADATA}"):
        metadata = json.loads(file.read_text())
        metadata["training"] |= {"data": "evil:open_data"}
        del metadata[METADATA_DIGEST]
        file.write_text(json.dumps(metadata | {METADATA_DIGEST: digest_metadata(metadata)}))

    config = json.loads((here / "tiny/config.json").read_text())
    (here / "tiny/config.json").write_text(json.dumps(config | {"data": "evil:open_data"}))

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
    assert outcome.err == ""
    assert (downloaded / "ran").exists()


def test_a_report_runs_no_network_of_a_file(downloaded):
    shutil.rmtree(downloaded / "tiny/checkpoints")
    shutil.copytree(downloaded / "run/checkpoints", downloaded / "tiny/checkpoints")
    outcome = run(["report", "tiny", "--without_data"])

    assert outcome.code == 2
    assert re.search(refused("evil:Block", "tiny"), outcome.err)
    assert not (downloaded / "ran").exists()


def test_data_that_the_user_names_are_opened(downloaded):
    succeed(["features", "tiny", "--data=evil:open_data", "--output=f.npz"])
    assert (downloaded / "ran").exists()


def test_a_card_prints_a_reference(here):
    card = build_card(sample_weights(training=TRAINING), OWN, "w")

    assert "`evil:open_data`" in card
    assert not (here / "ran").exists()
