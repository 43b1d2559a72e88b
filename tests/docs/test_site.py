"""The documentation site: built without a warning, with the pages that are made of the code, and links that hold."""

import html
import os
import re
import subprocess
import sys

import pytest

from tests.integration.commands import HANG_SECONDS
from tests.tiny import ROOT
from vit_jax.cli import VERBS

README_LINES = 150


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", f"--site-dir={folder}"],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    return folder


def read_words(page):
    """Return the text of a page without marks, in one line."""
    text = page.read_text().replace("<br>", " ")
    without_marks = re.sub("<[^>]*>", "", text)
    return " ".join(without_marks.split())


@pytest.mark.tools
def test_pages_made_of_the_code(site):
    commands = (site / "commands.html").read_text()

    for verb in VERBS:
        assert f'<h2 id="{verb}">' in commands
    assert "weights.num_heads" in commands
    assert "images.value_range" in commands
    config = html.unescape(read_words(site / "config.html"))
    assert (
        "position_stddev float > 0 default 0.02 Transformer: standard deviation of learned positions"
        in config
    )
    families = read_words(site / "families.html")
    assert "hf://facebook/dinov2-{small,base,large,giant}" in families
    assert "The network to train: name selects its sizes" in config
    assert "config.model: ModelConfig" in config
    assert "config.evaluation.evaluators.NAME: EvaluatorConfig" in config
    pools = "pool 'token' | 'gap' | 'map' | 'token_gap' | Reference | None"
    assert f"{pools} default None How tokens become one feature vector" in config
    assert "vit_jax.models.vit.VisionTransformer" in (site / "python/models.html").read_text()


@pytest.mark.tools
def test_every_link_leads_to_a_file(site):
    """Also those to code, which stands outside docs/."""
    assert "def main(" in read_words(site / "repository/docs/examples/training_loop.py.html")
    notebook = read_words(site / "repository/docs/examples/api.ipynb.html")
    assert "model = vit_jax.create_model(" in notebook
    assert "million parameters, 8x8 pixels, 10 classes" in notebook
    broken = []
    for page in site.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text()):
            is_local = not link.startswith(("http", "data:", "mailto:", "/"))
            if is_local and not (page.parent / link).exists():
                broken.append((page.name, link))
    assert broken == []


@pytest.mark.tools
def test_pages_load_nothing_from_a_network(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(r'src="(https?:[^"]+)', page.read_text())
        assert loaded == [], page.name


def test_the_readme_is_short_and_leads_on():
    text = (ROOT / "README.md").read_text()

    assert len(text.splitlines()) <= README_LINES
    named = re.findall(r"\(docs/([^)#/]+)", text)
    for path in (ROOT / "docs").glob("*.md"):
        assert path.name in named, "a page that the README does not name"
