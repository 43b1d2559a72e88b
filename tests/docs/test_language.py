"""Pages and code use the terms of the glossary; links between pages resolve."""

import re

import pytest

from tests.docs.language import (
    MOST_TERMS,
    find_module_problems,
    find_phrases,
    find_problems,
    read_terms,
)
from tests.test_architecture import RANKS
from tests.tiny import ROOT

PAGES = ["README.md", "configs/README.md", "launch/README.md"]
PAGES += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
RECORDS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "vit_jax").rglob("*.md"))
FOLDERS = ("vit_jax", "configs", "docs", "launch", "tests")
CODE = re.compile(r"```.*?```|`[^`]*`|<!--.*?-->", re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)(?:#([^)\s]+))?")
PLANTED = {
    "a word of the glossary in a comment": "x = 1  # The taps of the network.",
    "a phrase of the glossary in a docstring": '''def run():
    """Skip images that are left out."""''',
    "a word of the glossary in a message": 'message = "The command refuses this value."',
    "a plural of the glossary in a message": 'message = "It writes two pictures to a folder."',
    "a phrase without the glossary": "x = 1  # Likewise for the second.",
    "a comment that begins without its noun": "x = 1  # of the network",
    "a comment over two lines": "# Counts of images that are\n# left out.\nx = 1",
    "a docstring that begins without its noun": '''def run():
    """What the network computes."""''',
    "a docstring that begins with a clause": '''def run():
    """Where the images lie."""''',
    "a docstring that begins with Such": '''class Error(ValueError):
    """Such an error ends the run."""''',
    "the docstring of a module": '"""Of each row."""\ndef run():\n    """Return whether it is."""',
    "an entry without its noun": '''def run(path):
    """Write a file.

    Args:
      path: of the file.
    """''',
    "a variable": "outcome = 1",
    "an argument": "def run(taps):\n    return 1",
    "a class": "class NetworkPicture:\n    size = 1",
    "a participle as the name of a function": "def resized(image):\n    return image",
    "a preposition as the name of a function": "def of_images(paths):\n    return paths",
}
PLAIN = '''"""Resize images."""

# Sides are in pixels. The shorter one decides.
SIDE = 224  # noqa: of no effect


class Seed:
    """A random seed.

    Attributes:
      value: the number of the seed, at least 0.
    """

    @property
    def resized_side(self):
        """The shorter side after resizing."""
        return SIDE


def resize_images(paths):
    """Resize images to `SIDE`."""
    raise ValueError("There are no images in this folder. Give another one.")
'''


def prose_of(page):
    """The text of a page without code, in one line."""
    return re.sub(
        r"\s+",
        " ",
        CODE.sub("", (ROOT / page).read_text()),
    )


def headings_of(path):
    """The anchors of the headings of a page, as GitHub and MkDocs form them."""
    headings = re.findall(
        r"^#+ +(.*)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


def test_the_glossary_has_few_terms_each_once():
    terms = [term for term, _ in read_terms()]

    assert len(set(terms)) == len(terms)
    assert 40 < len(terms) <= MOST_TERMS


@pytest.mark.parametrize("text", PLANTED.values(), ids=PLANTED)
def test_a_planted_problem_is_found(text):
    assert len(list(find_problems(text))) == 1


@pytest.mark.parametrize("folder", ["vit_jax", "configs", "launch"])
def test_code_uses_the_terms_of_the_glossary(folder):
    assert list(find_module_problems((folder,))) == []


def test_plain_text_has_no_problems():
    assert list(find_problems(PLAIN)) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/glossary.md"])
def test_plain_terms(page):
    assert find_phrases(prose_of(page)) == []


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
    text = re.sub(
        r"```.*?```",
        "",
        (ROOT / page).read_text(),
        flags=re.DOTALL,
    )
    named = re.findall(r"`((?:\w+/)*\w+\.py)`", text)
    missing = [name for name in named if not any(path.endswith(f"/{name}") for path in modules)]
    below = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w/.]+)", text)
    missing += [path for path in below if not (ROOT / path).exists()]

    assert set(missing) <= {"setup.py"}


def test_the_architecture_page_has_the_ranks():
    text = (ROOT / "docs/architecture.md").read_text()
    ranks = {
        int(rank): set(names.split())
        for rank, names in re.findall(
            r"^rank (\d+) +(.*)$",
            text,
            re.MULTILINE,
        )
    }

    assert ranks == {rank: set(names) for rank, names in enumerate(RANKS)}
    folders = {
        path.name for path in (ROOT / "vit_jax").iterdir() if (path / "__init__.py").exists()
    }
    assert folders <= set(re.findall(r"`(\w+)/`", text))
