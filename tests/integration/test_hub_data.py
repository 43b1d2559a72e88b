"""Verbs on a dataset of the Hugging Face Hub: a run records its commit, and keeps it."""

import json

import pytest

from tests.data.packed_files import picture, write_parquet
from tests.hub import hub as hub  # a fixture
from tests.integration.commands import pretraining, run, succeed
from vit_jax.data.kinds import hub_parquet

pytestmark = [pytest.mark.usefixtures("compiled_once"), pytest.mark.slow]
DATA = "hf://datasets/owner/pets"
SHORT = ("total=2 steps", "schedule.warmup=0 steps", "evaluation.every=2 steps")


@pytest.fixture
def pets(hub, tmp_path):
    """Return a function that pushes images of two classes, with a card and a note."""
    hub_parquet.open_dataset.cache_clear()
    files = {}
    for split, size in (("train", 32), ("test", 16)):
        labels = [number % 2 for number in range(size)]
        images = []
        for number in range(size):
            images.append({"bytes": picture(number, size=(8, 8)), "path": None})
        path = write_parquet(
            tmp_path / "made.parquet",
            labels,
            names=("cat", "dog"),
            images=images,
        )
        files[f"data/{split}-00000-of-00001.parquet"] = path.read_bytes()

    def push(note):
        hub_parquet.open_dataset.cache_clear()
        return hub.push("owner/pets", files | {"NOTE": note}, {"license": ["mit"]})

    return push


def test_a_run_records_and_keeps_the_commit(pets, tmp_path):
    commit = pets(b"first")
    workdir = tmp_path / "run"
    words = pretraining("unused", workdir, *SHORT, f"data={DATA}")

    out = succeed(words)

    assert f"{DATA}@{commit}: 32 training and 16 test images, 2 classes" in out
    assert "licence  mit\n" in out
    assert json.loads((workdir / "config.json").read_text())["data"] == f"{DATA}@{commit}"

    newer = pets(b"second")
    assert newer != commit
    succeed(words)

    rejected = run([*words[:-1], f"--config.data={DATA}@main"])
    assert rejected.code == 2
    assert f"{DATA}@{newer}" in rejected.err

    out = succeed(["evaluate", str(workdir), f"--data={DATA}"])
    assert f"test of {DATA}@{commit}, 16 of 16 images" in out


def test_features_probes_and_checks(pets, tmp_path):
    pets(b"")
    workdir = tmp_path / "run"
    words = pretraining("unused", workdir, *SHORT, f"data={DATA}")
    assert "checked: " in succeed([*words, "--check", "--devices=8"])
    succeed(words)

    features = tmp_path / "features.npz"
    succeed(["features", str(workdir), f"--data={DATA}", f"--output={features}", "--cache=none"])
    out = succeed(["probe", str(workdir), f"--data={DATA}", "--cache=none"])

    assert features.exists()
    assert "accuracy" in out


def test_fine_tuning_on_the_hub(pets, tmp_path):
    commit = pets(b"")
    succeed(pretraining("unused", tmp_path / "run", *SHORT, f"data={DATA}"))
    words = [
        "finetune",
        "--config=finetune:any,own,quick",
        f"--workdir={tmp_path}/tuned",
        f"--config.init_from={tmp_path}/run",
        f"--config.data={DATA}",
        "--config.total=2 steps",
        "--config.schedule.warmup=0 steps",
        "--config.global_batch=16",
        "--config.input.image_size=8,8",
        "--config.logging.tensorboard=False",
    ]

    succeed(words)
    pets(b"newer")
    succeed(words)

    stored = json.loads((tmp_path / "tuned/config.json").read_text())
    assert stored["data"] == f"{DATA}@{commit}"
