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


def list_files(folder, pattern):
    """Return the paths of files below a folder of the repository, relative to the root."""
    paths = (ROOT / folder).rglob(pattern)
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


PAGES = ["README.md", "configs/README.md", "launch/README.md", *list_files("docs", "*.md")]
RECORDS = list_files("vit_jax", "*.md")
FOLDERS = ("vit_jax", "configs", "docs", "launch", "tests")
CODE = re.compile(r"```.*?```|`[^`]*`|<!--.*?-->", re.DOTALL)
BLOCK = re.compile(r"```.*?```", re.DOTALL)
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
LINKED = re.compile(r"\[([^]]*)\]\([^)]*\)")
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


def read_prose(page):
    """Return the text of a page without code, in one line."""
    text = (ROOT / page).read_text()
    return re.sub(r"\s+", " ", CODE.sub("", text))


def read_without_blocks(path):
    """Return the text of a page without blocks of code."""
    return BLOCK.sub("", path.read_text())


def list_anchors(path):
    """Return the anchors of the headings of a page, as GitHub and MkDocs form them."""
    anchors = set()
    for heading in HEADING.findall(read_without_blocks(path)):
        plain = LINKED.sub(r"\1", heading).lower()
        words = re.sub(r"[^\w\- ]", "", plain).strip()
        anchors.add(words.replace(" ", "-"))
    return anchors


def test_the_glossary_has_few_terms_each_once():
    terms = dict(read_terms())

    assert len(terms) == len(read_terms())
    assert 40 < len(terms) <= MOST_TERMS


@pytest.mark.parametrize("text", PLANTED.values(), ids=PLANTED)
def test_a_planted_problem_is_found(text):
    (problem,) = find_problems(text)

    assert problem


@pytest.mark.parametrize("folder", ["vit_jax", "configs", "launch"])
def test_code_uses_the_terms_of_the_glossary(folder):
    assert list(find_module_problems((folder,))) == []


def test_plain_text_has_no_problems():
    assert list(find_problems(PLAIN)) == []


@pytest.mark.parametrize("page", sorted({*PAGES} - {"docs/glossary.md"}))
def test_plain_terms(page):
    assert find_phrases(read_prose(page)) == []


def is_broken(page, target, anchor):
    """Return True if a link of a page leads to no file, or to no heading."""
    file = (page.parent / target).resolve()
    if not file.exists():
        return True
    if not anchor or file.suffix != ".md":
        return False
    return anchor not in list_anchors(file)


@pytest.mark.parametrize("page", [*PAGES, *RECORDS, "CONTRIBUTING.md"])
def test_links_resolve(page):
    path = ROOT / page
    broken = []
    for target, anchor in LINK.findall(read_without_blocks(path)):
        if is_broken(path, target, anchor):
            broken.append(f"{target}#{anchor}")

    assert broken == []


@pytest.fixture(scope="module")
def modules():
    """The paths of all modules, each with a line break behind it."""
    modules = []
    for folder in FOLDERS:
        modules += list_files(folder, "*.py")
    return "".join(f"/{module}\n" for module in modules)


@pytest.mark.parametrize("page", [*PAGES, *RECORDS])
def test_paths_exist(page, modules):
    """Modules and folders of the repository that a page names; of a module the end of its path suffices."""
    text = read_without_blocks(ROOT / page)
    missing = set()
    for name in re.findall(r"`((?:\w+/)*\w+\.py)`", text):
        if f"/{name}\n" not in modules:
            missing.add(name)
    for path in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w/.]+)", text):
        if not (ROOT / path).exists():
            missing.add(path)

    assert missing <= {"setup.py"}


def test_the_architecture_page_has_the_ranks():
    text = (ROOT / "docs/architecture.md").read_text()
    ranks = re.findall(r"^rank (\d+) +(.*)$", text, re.MULTILINE)

    assert len(ranks) == len(RANKS)
    for rank, names in ranks:
        assert set(names.split()) == set(RANKS[int(rank)])


def test_the_architecture_page_has_every_folder():
    text = (ROOT / "docs/architecture.md").read_text()
    listed = re.findall(r"`(\w+)/`", text)

    for file in (ROOT / "vit_jax").glob("*/__init__.py"):
        assert file.parent.name in listed
