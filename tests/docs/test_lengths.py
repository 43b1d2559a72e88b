"""Pages stay short: a limit of words for each kind of page, and one for all of them."""

import re
import subprocess

import pytest

from tests.tiny import ROOT

MOST_WORDS = {
    "README.md": 700,
    "CONTRIBUTING.md": 1_200,
    "CHANGELOG.md": 1_200,
    ".github/": 100,
    "docs/": 1_300,  # a guide answers one question
    "tests/": 500,
    "launch/": 2_800,  # reference pages of a folder
    "configs/": 2_800,
    "vit_jax/": 1_500,
    "vit_jax/bench/": 3_300,  # records of measurements
}
"""Words by the start of a path; the longest start counts. Bars of tables are words, as for `wc`."""
MOST_WORDS_IN_ALL = 40_000
MOST_LINES_OF_A_VERSION = 25


def list_pages():
    """Return the pages in the repository; without git, as in an archive, all files."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        return listed.stdout.split()
    return [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.md")]


def count_words(page):
    return len((ROOT / page).read_text().split())


@pytest.mark.parametrize("page", list_pages())
def test_a_page_is_short(page):
    starts = [start for start in MOST_WORDS if page.startswith(start)]
    longest = max(starts, key=len)

    assert count_words(page) <= MOST_WORDS[longest]


def test_all_pages_are_short():
    total = sum(count_words(page) for page in list_pages())

    assert total <= MOST_WORDS_IN_ALL


def test_a_version_of_the_changelog_is_short():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.split(r"^## ", text, flags=re.MULTILINE)[1:]

    assert len(versions) >= 4
    for version in versions:
        assert len(version.splitlines()) <= MOST_LINES_OF_A_VERSION, version.splitlines()[0]
