"""The verb plan: its words, its report, and its errors, without a compiler."""

import json
import re

import pytest

from tests.integration.commands import rejected, run, succeed
from tests.tools.plan import small_plans as small
from vit_jax.imports import backend

COMMAND = ["plan", f"--config={small.RECIPE}", *small.WORDS]


DIGITS = [*COMMAND, "--topology=h100:4", "--price=2.5", "--arithmetic"]
JFT = [
    "plan",
    "--config=configs/pretrain_jft.py:ViT-H/14",
    "--topology=v5e:16x16",
    "--arithmetic",
]
FINETUNE = [
    "plan",
    "--config=configs/finetune.py:ViT-B/16,cifar10",
    "--topology=h100:8",
    "--arithmetic",
]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            DIGITS,
            [
                "machine  h100:4: 4 x H100 SXM",
                "data     digits: 1,437 images, 10 classes",
                "price",
            ],
        ),
        (
            JFT,
            [
                "JFT-300M: 303,000,000 images, 18,291 classes",
                "1,035,645 steps",
                "fits",
            ],
        ),
        (
            FINETUNE,
            [
                "ViT-B/16 on 384x384 images, 512 a step",
                "4 learning rates and the final run: 50,000 steps",
            ],
        ),
    ],
    ids=["digits", "jft", "finetune"],
)
def test_a_report(words, parts):
    out = succeed(words)
    for part in parts:
        assert part in out


def test_json():
    words = [
        "--topology=v5e:2x2",
        "--slices=2",
        "--arithmetic",
        "--json",
        "--num_examples=320",
        "--num_classes=7",
    ]
    values = json.loads(succeed([*COMMAND, *words]))

    assert values["num_chips"] == 8
    assert values["mesh"] == {"replica": 2, "data": 4, "model": 1}
    assert values["dataset"]["num_classes"] == 7
    assert values["totals"]["steps"] == 100 * 320 // 32


def test_search():
    words = [*COMMAND, "--topology=h100:2", "--search", "--arithmetic"]
    outcome = run([*words, "--json"])

    assert json.loads(outcome.out)["winner"]["fits"]
    assert "planning 1 of 4: " in outcome.err
    assert "add to the command:" in succeed(words)


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--topology=h100:4", "--price=cheap"], "--price=cheap"),
        (["--topology=h100:4", "--price=-1"], "--price=-1"),
        (["--topology=h100:4", "--tries=3"], "--tries.*--search"),
        (["--topology=h100:4", "--batches"], "--batches.*--search"),
        (["--topology=h100:4", "--search", "--hlo=x.txt"], "--hlo.*--search"),
        (["--topology=v5e:2x2", "--arithmetic", "--hlo=x.txt"], "--hlo.*--arithmetic"),
        (["--topology=h100:4", "--hlo=x.txt"], "--hlo=x.txt.*compiler for GPUs is not installed"),
        (
            ["--topology=v5e:2x2", "--hlo=no/such/folder/x.txt"],
            "--hlo=no/such/folder/x.txt.*is no folder",
        ),
        (["--topology=v5e:2x2", "--hlo=."], "--hlo=.*is a folder"),
    ],
)
def test_options_that_do_not_fit_each_other(
    words,
    rule,
    tmp_path,
    monkeypatch,
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(backend, "plugins", dict)
    err = rejected([*COMMAND, *words])

    assert re.search(rule, err)
    assert not list(tmp_path.iterdir())
