"""Hooks of the documentation site (mkdocs.yml): pages from code, and links that leave docs/.

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

from docs import tables

ROOT = pathlib.Path(__file__).parents[1]

OUTSIDE = "repository"
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)")
FENCED = re.compile(r"(^ *```.*?^ *```)", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".sh": "sh", ".json": "json", ".yaml": "yaml", ".sbatch": "sh"}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages without a file in docs/."""
    generated = {
        "commands.md": build_commands_page(),
        "config.md": build_config_page(),
        "families.md": f"# Families of weights\n\n{tables.families()}",
        **build_python_pages(),
    }
    for page, text in generated.items():
        files.append(File.generated(config, page, content=text))

    waiting = ["README.md"]
    for file in files:
        if file.src_uri.endswith(".md"):
            waiting.append(f"docs/{file.src_uri}")
    for path in _list_paths(config.nav):
        if path.startswith(OUTSIDE):
            waiting.append(path.removeprefix(f"{OUTSIDE}/"))

    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        page = find_page(path)
        if page in generated:
            continue
        if files.get_file_from_path(page) is None:
            files.append(File.generated(config, page, content=read_text(path)))
        if path.endswith(".md"):
            for target in sorted(set(list_targets(path)) - seen):
                if needs_page(target):
                    seen.add(target)
                    waiting.append(target)
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Convert links between files of the repository into links between pages."""
    path = find_file(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri) or "."

    def rewrite(match: re.Match[str]) -> str:
        target = resolve_link(path, match[1])
        return posixpath.relpath(find_page(target), folder)

    parts = FENCED.split(markdown)
    parts[::2] = [LINK.sub(rewrite, part) for part in parts[::2]]
    return "".join(parts)


# Files of the repository and their pages.


def resolve_link(path: str, link: str) -> str:
    """Return the target of a link in a file, from the repository's root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def needs_page(path: str) -> bool:
    """Return True for files outside docs/, and for code and folders in it."""
    if not path.startswith("docs/") or path.endswith((".py", ".ipynb")):
        return True
    return (ROOT / path).is_dir()


def find_page(path: str) -> str:
    """Return the page of a file of the repository."""
    if path == "README.md":
        return "index.md"
    if (ROOT / path / "README.md").is_file():
        return find_page(f"{path}/README.md")
    if not needs_page(path):
        return path.removeprefix("docs/")
    page = f"{OUTSIDE}/{path}"
    return page if path.endswith(".md") else f"{page}.md"


def find_file(page: str) -> str:
    """Return the file of a page; for a generated page a path in docs/ that does not exist."""
    if page == "index.md":
        return "README.md"
    path = page.removeprefix(f"{OUTSIDE}/")
    if path == page:
        return f"docs/{page}"
    return path if (ROOT / path).is_file() else path.removesuffix(".md")


def list_targets(path: str) -> Iterator[str]:
    """Yield existing targets of a page's links; the build of the site reports others."""
    for part in FENCED.split(read_text(path))[::2]:
        for link in LINK.findall(part):
            target = resolve_link(path, link)
            if (ROOT / target / "README.md").is_file():
                target = f"{target}/README.md"
            if (ROOT / target).exists():
                yield target


def read_text(path: str) -> str:
    """Return the text of a page: code as a block, a folder as a list of names."""
    file = ROOT / path
    if file.is_dir():
        lines = [f"# {path}", ""]
        for name in sorted(os.listdir(file)):
            if not name.startswith((".", "__pycache__")):
                lines.append(f"* `{name}`")
        return "\n".join([*lines, ""])
    text = file.read_text()
    if path.endswith(".md"):
        return text
    if path.endswith(".ipynb"):
        return convert_notebook(text)
    language = LANGUAGES.get(file.suffix, "text")
    return f"# {path}\n\n````{language}\n{text.rstrip()}\n````\n"


def convert_notebook(text: str) -> str:
    """Return the cells of a notebook: code as blocks, each followed by its stored results."""
    parts = list[str]()
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts.append(f"````python\n{source}\n````")
        for output in cell.get("outputs", ()):
            result = "".join(output["data"]["text/plain"])
            parts.append(f"````text\n{result}\n````")
    return "\n\n".join(parts)


def _list_paths(nav: Any) -> Iterator[str]:
    """Yield the paths of mkdocs.yml's navigation, which is nested."""
    if isinstance(nav, str):
        yield nav
        return
    for entry in nav.values() if isinstance(nav, dict) else nav:
        yield from _list_paths(entry)


# Generated pages.


def build_commands_page() -> str:
    """Return the page with the help of every verb, and the fields of groups of options."""
    from vit_jax.cli import VERBS
    from vit_jax.cli.groups import GROUPS
    from vit_jax.cli.help_text import describe_group_fields

    lines = [
        "# Commands",
        "",
        "The output of `vit-jax VERB --help`. [Config](config.md) lists the fields of a recipe.",
        "",
    ]
    for name, verb in VERBS.items():
        text = dataclasses.replace(verb, appendix=None).help(100).rstrip()
        lines += [f"## {name}", "", verb.summary, "", "````text", text, "````", ""]
    for group in GROUPS:
        text = describe_group_fields(group, 100)
        lines += [f"## --{group.PREFIX}.FIELD", "", "````text", text, "````", ""]
    return "\n".join(lines)


def build_python_pages() -> dict[str, str]:
    """Return a page of docstrings for each part of the package, and the page that lists them."""
    package = ROOT / "vit_jax"
    folders = [path for path in package.iterdir() if (path / "__init__.py").is_file()]
    modules = [path for path in package.glob("*.py") if not path.name.startswith("__")]
    rows = list[str]()
    pages = dict[str, str]()
    for path in [*sorted(folders), *sorted(modules)]:
        module = f"vit_jax.{path.stem}"
        page = f"python/{path.stem}.md"
        pages[page] = f"# {module}\n\n::: {module}\n"
        rows.append(f"| [`{module}`]({page}) | {_read_summary(path)} |")
    public = "`import vit_jax` provides [`vit_jax.api`](python/api.md)."
    table = "\n".join(["| part | holds |", "|---|---|", *rows])
    pages["python.md"] = f"# Python\n\n{public}\n\n{table}\n"
    return pages


def _read_summary(path: pathlib.Path) -> str:
    """Return the first paragraph of the docstring of a module or a package, on one line."""
    file = path / "__init__.py" if path.is_dir() else path
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    summary, _, _ = docstring.partition("\n\n")
    return summary.replace("\n", " ")


def build_config_page() -> str:
    """Return the page of all options of a run, with type, default and description."""
    from vit_jax.config.descriptions import read_sections

    lines = [
        "# Config",
        "",
        "Every option of a run. `--config.SECTION.FIELD=VALUE` sets one.",
        "",
        "`vit-jax show --help` prints the same descriptions; "
        "they are in `vit_jax/config/schema.py`.",
        "",
    ]
    for section in read_sections():
        path = f"config.{section.prefix}".rstrip(".")
        lines += [f"## {path}: {section.name}", "", section.description, ""]
        lines += ["| field, type, default | description |", "|---|---|"]
        for field in section.fields:
            default = "required" if field.default is None else f"default `{field.default}`"
            escaped = field.description.replace("|", "\\|")
            lines.append(f"| `{field.name}`<br>`{field.type}`<br>{default} | {escaped} |")
        lines.append("")
    return "\n".join(lines)
