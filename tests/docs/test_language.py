"""The pages use the terms of the field; links between them resolve."""

import re

import pytest

from tests.test_architecture import RANKS
from tests.tiny import ROOT

PAGES = ["README.md", "configs/README.md", "launch/README.md"]
PAGES += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
RECORDS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "vit_jax").rglob("*.md"))
FOLDERS = ("vit_jax", "configs", "docs", "launch", "tests")
CODE = re.compile(r"```.*?```|`[^`]*`|<!--.*?-->", re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)(?:#([^)\s]+))?")
AVOIDED = [  # phrases with a plain or usual term
    r"own images",
    r"of (?:one's|your|its) own",
    r"taps?",
    r"tally",
    r"left (?:out|alone)",
    r"leaves? (?:out|alone)",
    r"pictures?",
    r"refus(?:e|es|ed)",
    r"start(?:s|ed)? again",
    r"queued? again",
    r"all the same",
    r"likewise",
    r"so many",
    r"of them then",
    r"is no \w+ at all",
    r"has never",
    r"never yet",
    r"draws? (?:of|from) ",
    r"business of",
    r"(?:issue|review|walk)(?:er|s)? #\d+",
    r"reviewers?",
]


def prose_of(page):
    """The text of a page without code, in one line."""
    return re.sub(r"\s+", " ", CODE.sub("", (ROOT / page).read_text()))


def headings_of(path):
    """The anchors of the headings of a page, as GitHub and MkDocs form them."""
    headings = re.findall(
        r"^#+ +(.*)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES)
def test_plain_terms(page):
    found = [
        match[0]
        for phrase in AVOIDED
        for match in re.finditer(rf"\b{phrase}\b", prose_of(page), re.IGNORECASE)
    ]
    assert found == []


@pytest.mark.parametrize("page", [*PAGES, *RECORDS, "CONTRIBUTING.md"])
def test_links_resolve(page):
    path = ROOT / page
    broken = []
    for target, anchor in LINK.findall(re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)):
        file = (path.parent / target).resolve()
        if not file.exists() or (
            anchor and file.suffix == ".md" and anchor not in headings_of(file)
        ):
            broken.append(f"{target}#{anchor}")
    assert broken == []


@pytest.fixture(scope="module")
def modules():
    return [path.as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize("page", [*PAGES, *RECORDS])
def test_paths_exist(page, modules):
    """Modules and folders of the repository that a page names; of a module the end of its path suffices."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    named = re.findall(r"`((?:\w+/)*\w+\.py)`", text)
    missing = [name for name in named if not any(path.endswith(f"/{name}") for path in modules)]
    below = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w/.]+)", text)
    missing += [path for path in below if not (ROOT / path).exists()]
    assert set(missing) <= {"my_losses.py", "setup.py"}


def test_the_architecture_page_has_the_ranks():
    text = (ROOT / "docs/architecture.md").read_text()
    ranks = {
        int(rank): set(names.split())
        for rank, names in re.findall(r"^rank (\d+) +(.*)$", text, re.MULTILINE)
    }
    assert ranks == {rank: set(names) for rank, names in enumerate(RANKS)}
    folders = {
        path.name for path in (ROOT / "vit_jax").iterdir() if (path / "__init__.py").exists()
    }
    assert folders <= set(re.findall(r"`(\w+)/`", text))
