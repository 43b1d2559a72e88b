"""Tables of documentation pages, generated from code.

A table stands between the comments `<!-- generated: NAME -->` and `<!-- end of generated -->`.
`PAGES` has the names. `UPDATE_GOLDEN=1 pytest tests/docs/test_tables.py` renews all tables.
"""

import ast
import datetime
import pathlib
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vit_jax.config.data_kinds import KINDS
from vit_jax.data.kinds.image_files import DECODED
from vit_jax.data.kinds.vtab_tasks import TASKS
from vit_jax.evals.splits import RELEASED
from vit_jax.weights.published import RELEASE_HEAD, list_cells, list_releases

ROOT = pathlib.Path(__file__).parents[1]
BLOCK = re.compile(
    r"(?<=<!-- generated: )([\w -]+?)( -->\n).*?(?=<!-- end of generated -->\n)", re.DOTALL
)


def renew(text: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """Return a page with its generated blocks renewed.

    Raises:
      ValueError: the page does not have each of these blocks once, or has another one.
    """
    names = [match[1] for match in BLOCK.finditer(text)]
    if sorted(names) != sorted(blocks):
        raise ValueError(
            f"The page has the generated blocks {names}: it must have {list(blocks)}, each once."
        )
    return BLOCK.sub(lambda match: f"{match[1]}{match[2]}{blocks[match[1]]()}", text)


def table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    text = format_row(columns) + "|" + "---|" * len(columns) + "\n"
    for line in lines:
        text += format_row(line)
    return text


def format_row(cells: Sequence[str]) -> str:
    """Return a line of a table."""
    line = "|"
    for cell in cells:
        line += f" {cell} |" if cell else " |"
    return f"{line}\n"


def find_origin() -> dict[str, str]:
    """Return the commit of the checkout and the date, which recorded figures carry."""
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.check_output(command, cwd=ROOT, text=True).strip()
    return {"commit": commit, "date": datetime.date.today().isoformat()}


def describe_origin(command: str, rows: Iterable[Mapping[str, Any]], note: str = "") -> str:
    """Return the line below a table: the command that renews it, and the origin of its figures.

    Args:
      command: a command of the shell.
      rows: recorded figures. Each has "commit" and "date"; measured ones also have "measured_on",
        the name of the machine.
      note: a further sentence.
    """
    commits = set()
    dates = set()
    machines = set()
    for row in rows:
        commits.add(f"`{row['commit']}`")
        dates.add(row["date"])
        if "measured_on" in row:
            machines.add(row["measured_on"])

    days = " to ".join(sorted({min(dates), max(dates)}))
    facts = [*sorted(commits), days, *sorted(machines)]
    sentences = [f"`{command}`: {', '.join(facts)}."]
    if note:
        sentences.append(note)
    return f"\n{' '.join(sentences)}\n"


def vtab_tasks() -> str:
    """Return the table of the tasks of VTAB-1k."""
    columns = (
        "task",
        "group",
        "dataset of TFDS, version",
        "classes",
        "`val200`",
        "`test`",
        "in training",
    )
    lines = []
    for task in TASKS:
        missing = []
        if not task.flip:
            missing.append("no mirroring")
        if not task.crop:
            missing.append("no crop")
        lines.append(
            [
                f"`{task.name}`",
                task.group,
                f"`{task.dataset}` {task.version.replace(',', ' or ')}",
                str(task.num_classes),
                f"`{task.val200}`",
                f"`{task.test}`",
                ", ".join(missing) or "–",
            ]
        )
    return table(columns, lines)


def families() -> str:
    """Return the table of current families of pre-trained networks."""
    lines = []
    for release in list_releases():
        name, *cells = list_cells(release)
        addresses = "<br>".join(f"`{address}`" for address in release.addresses)
        lines.append([name, addresses, *cells])
    return table((RELEASE_HEAD[0], "on the Hub", *RELEASE_HEAD[1:]), lines)


def released_datasets() -> str:
    """Return the table of the datasets of the released few-shot evaluation."""
    lines = ([f"`{name}`", f"`{known.data}`", *known[1:]] for name, known in RELEASED.items())
    return table(("name", "data", "learns from", "tested on"), lines)


def kinds_of_data() -> str:
    """Return the table of the kinds of data."""
    lines = ([f"`{kind.form}`", kind.description, f"`{kind.example}`"] for kind in KINDS)
    return table(("`--config.data=`, `--data=`", "data", "example"), lines)


def image_formats() -> str:
    """Return the table of formats and layouts of images."""
    lines = ([row.format, row.decoded, row.rejected or "–"] for row in DECODED)
    return table(("format", "decoded", "unreadable, with a message that names it"), lines)


def examples() -> str:
    """Return the table of docs/examples.

    It shows the first paragraph of each docstring, and its paragraph "`option` takes ...".
    """
    lines = []
    for path in sorted((ROOT / "docs/examples").glob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        paragraphs = [paragraph.replace("\n", " ") for paragraph in docstring.split("\n\n")]
        part, _, example = paragraphs[0].rstrip(".").partition(": ")
        part = re.sub("^An? ", "", part)
        option = "–"
        form = "–"
        for paragraph in paragraphs:
            match = re.fullmatch(r"(`.+) takes? (.+)\.", paragraph)
            if match:
                option, form = match.groups()
                break
        link = f"[`{path.name}`](examples/{path.name})"
        lines.append([part[0].lower() + part[1:], option, form, f"{link}: {example}"])
    return table(("part", "option", "it is", "example"), lines)


PAGES = {  # page: the functions of its blocks, by name
    "docs/vtab.md": {"VTAB tasks": vtab_tasks},
    "docs/frozen_features.md": {"few-shot datasets": released_datasets},
    "docs/extend.md": {"examples": examples},
    "docs/data.md": {"kinds of data": kinds_of_data, "image formats": image_formats},
}
