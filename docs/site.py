"""Hooks of the documentation site (mkdocs.yml): pages generated from code, and links that leave docs/.

The home page is the README. A linked file outside docs/ becomes a page under repository/ with its
unchanged text, so every link of the site resolves and is checked.
"""

import ast
import dataclasses
import json
import os
import pathlib
import posixpath
import re
from collections.abc import Iterator
from typing import Any

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]

OUTSIDE = "repository"
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)")
FENCED = re.compile(r"(^ *```.*?^ *```)", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".sh": "sh", ".json": "json", ".yaml": "yaml", ".sbatch": "sh"}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages without a file in docs/."""
    made = {"commands.md": commands(), "config.md": options(), **python()}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    waiting = [
        "README.md",
        *(f"docs/{file.src_uri}" for file in files if file.src_uri.endswith(".md")),
    ]
    waiting += [
        path.removeprefix(f"{OUTSIDE}/")
        for path in _named_in_nav(config.nav)
        if path.startswith(OUTSIDE)
    ]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        page = page_of(path)
        if page not in made and files.get_file_from_path(page) is None:
            files.append(File.generated(config, page, content=text_of(path)))
        if path.endswith(".md") and page not in made:
            new = {
                target for target in linked_from(path) if target not in seen and needs_page(target)
            }
            seen |= new
            waiting += sorted(new)
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Convert links between files of the repository into links between pages."""
    path = file_of(page.file.src_uri)

    def rewrite(match: re.Match[str]) -> str:
        return posixpath.relpath(
            page_of(target_of(path, match[1])), posixpath.dirname(page.file.src_uri) or "."
        )

    parts = FENCED.split(markdown)
    parts[::2] = [LINK.sub(rewrite, part) for part in parts[::2]]
    return "".join(parts)


# Files of the repository and their pages.


def target_of(path: str, link: str) -> str:
    """Return the target of a link in a file, from the repository's root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def needs_page(path: str) -> bool:
    """Return True for files outside docs/, and for code and folders in it."""
    return (
        not path.startswith("docs/") or path.endswith((".py", ".ipynb")) or (ROOT / path).is_dir()
    )


def page_of(path: str) -> str:
    """Return the page of a file of the repository."""
    if path == "README.md":
        return "index.md"
    inside = path.removeprefix("docs/")
    if (ROOT / path / "README.md").is_file():
        return page_of(f"{path}/README.md")
    if not needs_page(path):
        return inside
    return f"{OUTSIDE}/{path}" if path.endswith(".md") else f"{OUTSIDE}/{path}.md"


def file_of(page: str) -> str:
    """Return the file of a page; for a generated page a path in docs/ that does not exist."""
    if page == "index.md":
        return "README.md"
    inside = page.removeprefix(f"{OUTSIDE}/")
    if inside == page:
        return f"docs/{page}"
    return inside if (ROOT / inside).is_file() else inside.removesuffix(".md")


def linked_from(path: str) -> Iterator[str]:
    """Yield existing targets of a page's links; the build of the site reports others."""
    for part in FENCED.split(text_of(path))[::2]:
        for link in LINK.findall(part):
            target = target_of(path, link)
            if (ROOT / target / "README.md").is_file():
                target = f"{target}/README.md"
            if (ROOT / target).exists():
                yield target


def text_of(path: str) -> str:
    """Return the text of a page: code as a block, a folder as a list of names."""
    file = ROOT / path
    if file.is_dir():
        names = sorted(
            name for name in os.listdir(file) if not name.startswith((".", "__pycache__"))
        )
        return "\n".join([f"# {path}", "", *(f"* `{name}`" for name in names), ""])
    text = file.read_text()
    if path.endswith(".md"):
        return text
    if path.endswith(".ipynb"):
        return notebook(text)
    return f"# {path}\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{text.rstrip()}\n````\n"


def notebook(text: str) -> str:
    """Return the cells of a notebook: code as blocks, each followed by its stored results."""
    parts = list[str]()
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"````python\n{source}\n````")
        results = ["".join(output["data"]["text/plain"]) for output in cell.get("outputs", ())]
        parts += [f"````text\n{result}\n````" for result in results]
    return "\n\n".join(parts)


def _named_in_nav(nav: Any) -> Iterator[str]:
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from _named_in_nav(value) if isinstance(value, list) else [value]


# Generated pages.


def commands() -> str:
    """Return the page with the help of every verb and fields of groups; recipes have their own page."""
    from vit_jax.cli import VERBS
    from vit_jax.cli.groups import GROUPS
    from vit_jax.cli.help_text import describe_group_fields

    parts = [
        "# Commands",
        "",
        "The output of `vit-jax VERB --help`. [Config](config.md) lists the fields of a recipe.",
        "",
    ]
    for name, verb in VERBS.items():
        text = dataclasses.replace(verb, appendix=None).help(100).rstrip()
        parts += [f"## {name}", "", verb.summary, "", "````text", text, "````", ""]
    for group in GROUPS:
        text = describe_group_fields(group, 100)
        parts += [f"## --{group.PREFIX}.FIELD", "", "````text", text, "````", ""]
    return "\n".join(parts)


def python() -> dict[str, str]:
    """Return a page of docstrings for each part of the package, and a list of them."""
    rooms = sorted(
        path for path in (ROOT / "vit_jax").iterdir() if (path / "__init__.py").is_file()
    )
    rooms += sorted(
        path for path in (ROOT / "vit_jax").glob("*.py") if not path.name.startswith("__")
    )
    lines = list[str]()
    pages = dict[str, str]()
    for path in rooms:
        module = f"vit_jax.{path.stem}"
        source = path / "__init__.py" if path.is_dir() else path
        about = (
            (ast.get_docstring(ast.parse(source.read_text())) or "")
            .partition("\n\n")[0]
            .replace("\n", " ")
        )
        pages[f"python/{path.stem}.md"] = f"# {module}\n\n::: {module}\n"
        lines.append(f"| [`{module}`](python/{path.stem}.md) | {about} |")
    public = "`import vit_jax` provides [`vit_jax.api`](python/api.md)."
    table = "\n".join(["| part | holds |", "|---|---|", *lines])
    pages["python.md"] = f"# Python\n\n{public}\n\n{table}\n"
    return pages


def options() -> str:
    """Return the page of all options of a run, with type, default and description."""
    from vit_jax.config.descriptions import read_sections

    parts = ["# Config", "", "Every option of a run. `--config.SECTION.FIELD=VALUE` sets one.", ""]
    parts += [
        "`vit-jax show --help` prints the same descriptions; they are in `vit_jax/config/schema.py`.",
        "",
    ]
    for section in read_sections():
        path = f"config.{section.prefix}".rstrip(".")
        parts += [f"## {path}: {section.name}", "", section.description, ""]
        parts += ["| field, type, default | description |", "|---|---|"]
        for field in section.fields:
            default = "required" if field.default is None else f"default `{field.default}`"
            escaped = field.description.replace("|", "\\|")
            parts.append(f"| `{field.name}`<br>`{field.type}`<br>{default} | {escaped} |")
        parts.append("")
    return "\n".join(parts)
