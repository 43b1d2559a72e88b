"""The verb plan: its words, its report, and its errors, without a compiler."""

import json

import pytest

from tests.integration.commands import run, succeed
from tests.plan import small_plans as small

COMMAND = ["plan", f"--config={small.RECIPE}", *small.WORDS]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            [*COMMAND, "--topology=h100:4", "--price=2.5"],
            ("machine  h100:4: 4 x H100 SXM", "data     digits: 1,437 images, 10 classes", "price"),
        ),
        (  # the largest recipe needs no more words
            ["plan", "--config=configs/pretrain_jft.py:ViT-H/14", "--topology=v5e:16x16", "--arithmetic"],
            ("JFT-300M: 303,000,000 images, 18,291 classes", "1,035,645 steps", "fits"),
        ),
        (  # fine-tuning counts its search
            ["plan", "--config=configs/finetune.py:ViT-B/16,cifar10", "--topology=h100:8"],
            (
                "ViT-B/16 on 384x384 images, 512 a step",
                "4 learning rates and the final run: 50,000 steps, 25,600,000 images",
            ),
        ),
    ],
    ids=["digits", "jft", "finetune"],
)
def test_a_report(words, parts):
    out = succeed(words)
    for part in parts:
        assert part in out


def test_json():
    words = ["--topology=v5e:2x2", "--slices=2", "--arithmetic", "--json", "--num_examples=320", "--num_classes=7"]
    values = json.loads(succeed([*COMMAND, *words]))
    assert values["num_chips"] == 8
    assert values["mesh"] == {"replica": 2, "data": 4, "model": 1}
    assert values["dataset"]["num_classes"] == 7
    assert values["totals"]["steps"] == 100 * 320 // 32


def test_search():
    outcome = run([*COMMAND, "--topology=h100:2", "--search", "--json"])
    assert json.loads(outcome.out)["winner"]["fits"]
    assert "planning 1 of 4: " in outcome.err
    assert "add to the command:" in succeed([*COMMAND, "--topology=h100:2", "--search"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Missing: --topology="),
        (["--topology=v5e:5x5"], "a slice of v5e is one of"),
        (["--topology=h100:4", "--price=cheap"], "the price of one chip for one hour"),
        (["--topology=h100:4", "--price=-1"], "0 or more"),
        (["--topology=h100:4", "--tries=3"], "--tries has no effect without --search"),
        (["--topology=h100:4", "--batches"], "--batches has no effect without --search"),
        (["--topology=h100:4", "--search", "--hlo=x.txt"], "leave --search out"),
        (["--topology=v5e:2x2", "--arithmetic", "--hlo=x.txt"], "--arithmetic compiles none"),
        (["--topology=h100:4", "--hlo=x.txt"], "there is no program to write: compilers for GPUs need the GPU"),
        (["--topology=v5e:2x2", "--hlo=no/such/folder/x.txt"], "must be a file in an existing folder"),
        (["--topology=v5e:2x2", "--hlo=."], "must be a file in an existing folder"),
        (["--topology=h100:4", "--slices=0"], "--slices=0"),
        (["--topology=h100:4", "--num_classes=none"], "--num_classes=none"),
        (["--topology=h100:3"], "is not divisible by 3 device(s)"),
    ],
)
def test_what_is_refused(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = run([*COMMAND, *words])
    assert outcome.code == 2
    assert message in outcome.err
    assert not list(tmp_path.iterdir())


def test_fine_tuning_of_any_weights_names_no_network():
    outcome = run(["plan", "--config=configs/finetune.py:any,cifar10", "--topology=h100:8"])
    assert outcome.code == 2
    assert "--config.model.name=ViT-B/16" in outcome.err
