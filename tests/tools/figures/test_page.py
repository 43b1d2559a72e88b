"""The page of a run: it needs nothing else, says what was measured, and names what is missing."""

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


def read_text(page):
    """Return the text of a page without figures and styles."""
    return re.sub(
        "<svg.*?</svg>|<style>.*?</style>|<[^>]*>",
        " ",
        page,
        flags=re.DOTALL,
    )


@pytest.fixture
def trained(tiny_run):
    return tiny_run.workdir


def read_cards(page):
    return dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", page))


def list_figures(page):
    return re.findall('<img alt="(.*?)" src="data:image/png;base64,', page)


@pytest.mark.slow
def test_a_page_needs_nothing_else(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert succeed(["report", str(trained)]) == "report.html\n"

    page = (tmp_path / "report.html").read_text()
    check_that_nothing_is_fetched(page)

    summary = json.loads((trained / "summary.json").read_text())
    found = read_cards(page)
    assert found["state"] == "ended, step 6"
    assert found["accuracy"].startswith(f"{summary['test_accuracy']:.2%}  (95 %: ")
    assert found["test loss"] == f"{summary['test_loss']:.4f}"
    assert found["images seen"] == "96"

    names = list_figures(page)
    assert page.count("<svg") == 3
    assert names[:3] == ["mistakes", "confusion", "reliability"]
    assert {"filters", "distance", "rollout", "similar"} <= set(names[3:])

    assert "<h2>Predictions</h2>" in page
    assert "<td>model.width</td><td>16</td>" in page
    assert re.search("<th>class</th><th>predicted as</th>", page)
    assert not re.search(r"\banswers?\b", read_text(page), re.IGNORECASE)


def check_that_nothing_is_fetched(page):
    addresses = re.findall(r'(?:src|href|url|action)\s*[=(]\s*"?([^">)]{5})', page)
    elsewhere = {address for address in addresses if not address.startswith("#")}

    assert elsewhere == {"data:"}
    assert "<script" not in page
    assert "@import" not in page


@pytest.fixture
def report(trained, tmp_path, monkeypatch):
    """A copy of a run without its summary; returns its folder and a function that runs the verb."""
    monkeypatch.chdir(tmp_path)
    workdir = tmp_path / "a <b> & c"
    page = tmp_path / "page.html"
    shutil.copytree(trained, workdir)
    (workdir / "summary.json").unlink()

    def write(*more):
        outcome = run(["report", str(workdir), f"--output={page}", *more])
        return page.read_text(), outcome.err

    return workdir, write


def test_a_page_without_data_names_what_is_missing(report, tmp_path):
    _, write = report
    page, _ = write("--without_data")

    assert read_cards(page)["state"] == "not ended, step 6"
    assert "test accuracy" in read_cards(page)
    assert list_figures(page) == ["filters", "positions"]
    assert "<p>a &lt;b&gt; &amp; c</p>" in page
    assert "<b>" not in page
    assert str(tmp_path) not in page


@pytest.mark.parametrize("alpha", [0.0, 0.4])
def test_a_page_of_a_run_with_mixup_mentions_it(report, alpha):
    workdir, write = report
    config = json.loads((workdir / "config.json").read_text())
    config["input"]["mixup_alpha"] = alpha
    (workdir / "config.json").write_text(json.dumps(config))

    page, _ = write("--without_data")

    mention = "images that mixup blends with others (input.mixup_alpha=0.4)"
    assert (mention in page) == (alpha > 0)
    assert ("mixup blends" in page) == (alpha > 0)


def test_a_page_of_a_checkpoint_that_does_not_state_its_data(report, trained):
    workdir, write = report
    shutil.rmtree(workdir / "checkpoints")
    weights = dataclasses.replace(load_weights(trained), training=None)
    write_workdir(workdir, weights.parameters, describe_weights(weights))

    _, err = write()

    reason = "The checkpoint does not state the data"
    assert err.startswith(f"note: The images could not be looked at. {reason}")


def test_a_page_of_a_run_without_a_checkpoint(report):
    workdir, write = report
    shutil.rmtree(workdir / "checkpoints")

    page, err = write()

    assert err.startswith("note: There is no checkpoint yet")
    assert "There is no checkpoint yet" in page
    assert list_figures(page) == []


def test_a_run_of_a_study_that_diverged_has_a_reason_and_no_results(trained, tmp_path):
    workdir = tmp_path / "run"
    page = tmp_path / "page.html"
    shutil.copytree(trained, workdir)
    summary = {
        "test_accuracy": None,
        "test_loss": None,
        "diverged": "Step 3: the loss is nan.",
    }
    (workdir / "summary.json").write_text(json.dumps(summary))

    succeed(["report", str(workdir), f"--output={page}", "--without_data"])

    found = read_cards(page.read_text())
    assert found["state"] == "diverged, step 6"
    assert found["reason"] == "Step 3: the loss is nan."
    assert "test accuracy" not in found
    assert "test loss" not in found


def test_images_that_are_gone_leave_the_rest(trained, tmp_path, monkeypatch):
    def reject(*_, **__):
        raise ValueError("folder:images is not there.")

    monkeypatch.setattr("vit_jax.tools.figures.page.open_labelled", reject)
    page = tmp_path / "x.html"
    note = "note: The images could not be looked at. folder:images is not there.\n"

    outcome = run(["report", str(trained), f"--output={page}"])

    assert outcome.code == 0
    assert outcome.err == f"{note}next: vit-jax predict {trained} IMAGE\n"
    assert list_figures(page.read_text()) == ["filters", "positions"]


NO_METRICS = "has no metrics (metrics.jsonl, config.json): give the workdir of a run."

NO_EFFECT = "--data_dir=x: has no effect with --without_data. Leave it out."


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Missing: WORKDIR"),
        (["."], NO_METRICS),
        ([".", "--without_data", "--data_dir=x"], NO_EFFECT),
        ([".", "--global_batch=0"], "--global_batch=0: must be at least 1."),
    ],
)
def test_rejections(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    code, _, error = run(["report", *words])

    assert code == 2, error
    assert message in error
    assert not list(tmp_path.iterdir())
