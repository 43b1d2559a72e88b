"""The page of a run: needs nothing else, says what was measured, and names what is missing."""

import dataclasses
import json
import re
import shutil

import pytest

from tests.integration.commands import run, succeed
from vit_jax.checkpoint.store import write_workdir
from vit_jax.weights import load_weights
from vit_jax.weights.saving import describe_weights

pytestmark = pytest.mark.xdist_group("tiny")


@pytest.fixture
def trained(tiny_run):
    return tiny_run.workdir


def cards(page):
    return dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", page))


def pictures(page):
    return re.findall('<img alt="(.*?)" src="data:image/png;base64,', page)


@pytest.mark.slow
def test_a_page_needs_nothing_else(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert succeed(["report", str(trained)]) == "report.html\n"

    page = (tmp_path / "report.html").read_text()
    addresses = re.findall(r'(?:src|href|url|action)\s*[=(]\s*"?([^">)]{5})', page)

    assert {address for address in addresses if not address.startswith("#")} == {"data:"}
    assert "<script" not in page
    assert "@import" not in page

    summary = json.loads((trained / "summary.json").read_text())
    found = cards(page)

    assert found["state"] == "ended, step 6"
    assert found["accuracy"].startswith(f"{summary['test_accuracy']:.2%}  (95 %: ")
    assert found["test loss"] == f"{summary['test_loss']:.4f}"
    assert found["images seen"] == "96"
    assert page.count("<svg") == 3
    assert pictures(page)[:3] == ["mistakes", "confusion", "reliability"]
    assert "<h2>Predictions</h2>" in page
    assert re.search("<th>class</th><th>predicted as</th>", page)

    texts = re.sub("<svg.*?</svg>|<style>.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL)
    assert not re.search(r"\banswers?\b", texts, re.IGNORECASE)
    assert {"filters", "distance", "rollout", "similar"} <= set(pictures(page)[3:])
    assert "<td>model.width</td><td>16</td>" in page


def test_what_is_missing_is_said(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    workdir = tmp_path / "a <b> & c"
    page = tmp_path / "page.html"
    shutil.copytree(trained, workdir)
    (workdir / "summary.json").unlink()
    words = ["report", str(workdir), f"--output={page}"]
    succeed([*words, "--without_data"])
    text = page.read_text()

    assert cards(text)["state"] == "not ended, step 6"
    assert "test accuracy" in cards(text)
    assert pictures(text) == ["filters", "positions"]
    assert "<p>a &lt;b&gt; &amp; c</p>" in text
    assert str(tmp_path) not in text
    assert "images that mixup blends with others (input.mixup_alpha=0.4)" in text

    config = json.loads((workdir / "config.json").read_text())
    (workdir / "config.json").write_text(
        json.dumps(config | {"input": config["input"] | {"mixup_alpha": 0.0}})
    )
    succeed([*words, "--without_data"])

    assert "mixup blends" not in page.read_text()
    assert "<b>" not in text

    shutil.rmtree(workdir / "checkpoints")
    weights = dataclasses.replace(load_weights(trained), training=None)
    write_workdir(workdir, weights.parameters, describe_weights(weights))

    assert run(words).err.startswith(
        "note: The images could not be looked at. The checkpoint does not state the data"
    )

    shutil.rmtree(workdir / "checkpoints")
    outcome = run(words)

    assert outcome.err.startswith("note: There is no checkpoint yet")
    assert "There is no checkpoint yet" in page.read_text()
    assert pictures(page.read_text()) == []


def test_a_run_of_a_study_that_diverged_has_a_reason_and_no_results(trained, tmp_path):
    workdir = tmp_path / "run"
    page = tmp_path / "page.html"
    shutil.copytree(trained, workdir)
    summary = {"test_accuracy": None, "test_loss": None, "diverged": "Step 3: the loss is nan."}
    (workdir / "summary.json").write_text(json.dumps(summary))
    succeed(["report", str(workdir), f"--output={page}", "--without_data"])
    found = cards(page.read_text())

    assert (found["state"], found["reason"]) == ("diverged, step 6", "Step 3: the loss is nan.")
    assert not {"test accuracy", "test loss"} & set(found)


def test_images_that_are_gone_leave_the_rest(trained, tmp_path, monkeypatch):
    def gone(*_, **__):
        raise ValueError("folder:images is not there.")

    monkeypatch.setattr("vit_jax.tools.figures.page.open_labelled", gone)
    outcome = run(["report", str(trained), f"--output={tmp_path / 'x.html'}"])

    assert (outcome.code, outcome.err) == (
        0,
        "note: The images could not be looked at. folder:images is not there.\n",
    )
    assert pictures((tmp_path / "x.html").read_text()) == ["filters", "positions"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Missing: WORKDIR"),
        (["."], "has no metrics (metrics.jsonl, config.json): give the workdir of a run."),
        (
            [".", "--without_data", "--data_dir=x"],
            "--data_dir=x: has no effect with --without_data. Leave it out.",
        ),
        ([".", "--global_batch=0"], "--global_batch=0: must be at least 1."),
    ],
)
def test_refusals(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    code, _, error = run(["report", *words])

    assert (code, message in error) == (2, True), error
    assert not list(tmp_path.iterdir())
