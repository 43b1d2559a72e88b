"""Accuracies of small test sets have an interval: of 95 %, or from the lowest to the highest seed."""

import re

import pytest

from tests.docs.test_lengths import list_pages
from tests.tiny import ROOT
from vit_jax.evals.intervals import FEW_IMAGES

PUBLISHED = {"configs/README.md", "vit_jax/weights/README.md"}
"""Pages with results of others, on test sets that are not small."""
SUBJECT = re.compile(
    r"accurac|top-1|\breach|\bcorrect|\bright\b|\berror (?:rate|of)|\bclassif",
    re.IGNORECASE,
)
OTHER_RESULTS = re.compile(r"exaFLOPs|compute|time|parameters|GFLOPs|learning|loss|file|speed")
PERCENTAGE = re.compile(r"(?<![\d.,])\d{1,3}\.\d+(?=\**$| ?%|±| \()")
SPREAD = re.compile(r"±|\d to \d|% to \d|\bseeds\b")
CHANGE = re.compile(r"\bfrom \d[\d.]* ?%? to \d")
"""Two results, which are no interval of one."""
RESULT = re.compile(r"\d\.\d+ ?%|accurac\w+ (?:of |is )?(?:\d{1,3} ?%|0\.\d+)", re.IGNORECASE)
"""A result in a sentence: percent with decimals, or after its name in any form."""
EXEMPT = re.compile(r"\bPaper\b|\bpublished\b|\bauthors\b")
NUMBER_OF_IMAGES = re.compile(r"(\d[\d,]*) test images")
FENCE = "```"


def find_bare_accuracies(text):
    """Return the lines of a page with an accuracy in percent that has no interval.

    Rows of tables count if they, the head or the sentence before name accuracies. A section on a test set that
    is not small says so: "10,000 test images".
    """
    problems = []
    for section in re.split(r"^#+ ", text, flags=re.MULTILINE):
        if is_large(section):
            continue
        problems += find_in_code(section) + find_in_tables(section) + find_in_sentences(section)
    return problems


def is_large(section):
    counts = [int(count.replace(",", "")) for count in NUMBER_OF_IMAGES.findall(section)]
    return any(count >= FEW_IMAGES for count in counts)


def find_in_code(section):
    """Return lines of printed output."""
    problems = []
    for block in section.split(FENCE)[1::2]:
        for line in block.splitlines():
            if SUBJECT.search(line) and PERCENTAGE.search(line) and not SPREAD.search(line):
                problems.append(line)
    return problems


def find_in_tables(section):
    """Return rows of tables of accuracies with a cell that has no interval."""
    prose = "".join(section.split(FENCE)[::2])
    problems = []
    for table in re.findall(r"(?:^\|.*\n)+", prose, flags=re.MULTILINE):
        head, _, *rows = table.splitlines()
        before = prose[: prose.index(table)].strip().splitlines()
        title = f"{' '.join(before[-2:])} {head}"
        if "seeds" in head or EXEMPT.search(title):
            continue
        for row in rows:
            if not SUBJECT.search(f"{title} {row}") or EXEMPT.search(row):
                continue
            problems += [row for cell in list_result_cells(head, row) if not SPREAD.search(cell)]
    return problems


def list_result_cells(head, row):
    """Return the cells with percentages, without the first and columns of other results."""
    names = head.split("|")[2:]
    cells = []
    for name, cell in zip(names, row.split("|")[2:], strict=False):
        if not OTHER_RESULTS.search(name) and PERCENTAGE.search(cell.strip()):
            cells.append(cell)
    return cells


def find_in_sentences(section):
    """Return sentences outside of tables and code."""
    prose = "".join(section.split(FENCE)[::2])
    prose = re.sub(r"^\|.*\n", "", prose, flags=re.MULTILINE)
    problems = []
    for paragraph in re.split(r"\n\s*\n|\n(?=[*-] )", prose):
        for sentence in re.split(r"(?<=[.:;]) +(?=[A-Z`])", paragraph.replace("\n", " ")):
            has_spread = SPREAD.search(CHANGE.sub("", sentence))
            is_bare = not has_spread and not EXEMPT.search(sentence)
            if is_bare and SUBJECT.search(sentence) and RESULT.search(sentence):
                problems.append(sentence)
    return problems


@pytest.mark.parametrize("page", sorted(set(list_pages()) - PUBLISHED))
def test_accuracies_of_small_test_sets_have_an_interval(page):
    assert find_bare_accuracies((ROOT / page).read_text()) == []


TABLE = """## Results

Accuracy on 360 test images:

| model | {head} | exaFLOPs |
|---|---|---|
| ViT | {cell} | 1.25 |
"""


@pytest.mark.parametrize(
    "text",
    [
        TABLE.format(head="test accuracy, %", cell="98.33"),
        TABLE.format(head="after 2 epochs", cell="**98.33**"),
        TABLE.format(head="test accuracy", cell="98.33 %"),
        "## Results\n\nThe test accuracy is 98.33 % after\n100 epochs.\n",
        "```\ntest accuracy 98.33%, test loss 0.1022\n```\n",
        "## Results\n\nThe hybrid classifies 97.2 % of the images correctly.\n",
        "## Results\n\nThe error rate is 1.67 %.\n",
        "## Results\n\nA ViT has an accuracy of 97 % after 10 epochs.\n",
        "## Results\n\nA probe has a test accuracy of 0.983.\n",
        "## Results\n\nDistillation raises the accuracy from 93.1 to 95.0 %.\n",
    ],
)
def test_an_accuracy_without_interval_is_found(text):
    assert len(find_bare_accuracies(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        TABLE.format(head="test accuracy, %", cell="98.33±1.4"),
        TABLE.format(head="test accuracy, %", cell="98.33 (97.50 to 99.44)"),
        TABLE.format(head="seeds 0 to 2, accuracy", cell="98.33, 97.50, 99.44"),
        TABLE.format(head="steps", cell="many") + "\n10,000 test images: accuracy 98.33 %.\n",
        "## Results\n\nPaper: an accuracy of 88.79 %.\n",
        "```\ntest accuracy 98.33% (95 %: 96.41% to 99.23%)\n```\n",
    ],
)
def test_intervals_seeds_and_large_test_sets_are_enough(text):
    assert find_bare_accuracies(text) == []
