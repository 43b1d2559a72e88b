"""Problems of language in pages and in the text of modules, by docs/glossary.md."""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.tiny import ROOT

GLOSSARY = ROOT / "docs" / "glossary.md"
MOST_TERMS = 60
SHORTEST_SENTENCE = 3  # words of a string that is checked
# Phrases that have a plain or usual term, besides those of the glossary.
AVOIDED = (
    r"own images",
    r"of (?:one's|your|its|their) own",
    r"all the same",
    r"likewise",
    r"so many",
    r"of (?:them )?then",
    r"of ours",
    r"is no \w+ at all",
    r"has never",
    r"never yet",
    r"business of",
    r"(?:issue|review|walk)(?:er|s)? #\d+",
    r"reviewers?",
)
# The first word of a clause without its noun.
RELATIVE = re.compile(
    r"(?:[Oo]f|[Tt]hat|[Ww]hat|[Ww]hatever|[Ww]hose|[Ww]hich|[Ww]hether|[Ss]uch|where|as)\b"
)
DOCSTRING_START = re.compile(rf"{RELATIVE.pattern}|Where\b")
QUOTED = re.compile(r"`[^`]*`")
DIRECTIVE = re.compile(r"(?:noqa|type:|fmt:|ruff:|!)")
SECTION = re.compile(r"(?:Args|Attributes|Raises|Returns|Yields):")
ENTRY = re.compile(r" +\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*: +(?P<text>\S.*)")
CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
PREPOSITIONS = frozenset({"of", "at", "on", "by", "for"})
# Names in docs/extend.md, and of other libraries, which stay.
DOCUMENTED = frozenset({"evaluated_model", "reached_preemption"})
NO_PARTICIPLES = frozenset({"embed", "seed", "need", "speed", "feed", "shed", "red"})

Problem = tuple[int, str]
"""The number of a line, and what is wrong in it."""


@functools.cache
def read_terms() -> list[tuple[str, list[str]]]:
    """Return the terms of the glossary, each with the phrases that are not used for it."""
    rows = re.findall(
        r"^\| (.+?) \| .+? \|(.*)\|$",
        GLOSSARY.read_text(),
        re.MULTILINE,
    )
    terms = []
    for term, avoided in rows[1:]:
        phrases = map(str.strip, avoided.split(","))
        terms.append((term, list(filter(None, phrases))))
    return terms


@functools.cache
def build_pattern() -> re.Pattern[str]:
    """Return the pattern of all phrases that are not used in prose; a noun also in the plural."""
    phrases = list(AVOIDED)
    for _, avoided in read_terms():
        phrases += [f"{re.escape(phrase)}s?" for phrase in avoided]
    return re.compile(rf"\b(?:{'|'.join(phrases)})\b", re.IGNORECASE)


def find_phrases(text: str) -> list[str]:
    """Return the phrases of a text that are not used."""
    one_line = re.sub(r"\s+", " ", QUOTED.sub("", text))
    pattern = build_pattern()
    return [match[0] for match in pattern.finditer(one_line)]


def find_problems(text: str) -> Iterator[Problem]:
    """Yield the problems in comments, docstrings, messages and names of a module."""
    tree = ast.parse(text)
    yield from _check_comments(text)
    yield from _check_names(tree)

    documentation = set()
    for line, string in _iterate_docstrings(tree):
        documentation.add(id(string))
        yield from _check_prose(
            line,
            string.value,
            "docstring",
            DOCSTRING_START,
        )
        yield from _check_entries(line, string.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_sentence = len(node.value.split()) >= SHORTEST_SENTENCE
            if is_sentence and id(node) not in documentation:
                yield from _check_phrases(
                    node.lineno,
                    node.value,
                    "message",
                )


def _check_comments(text: str) -> Iterator[Problem]:
    previous_line = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        comment = token.string.lstrip("# ")
        line, column = token.start
        is_alone = not token.line[:column].strip()
        continues = is_alone and line == previous_line + 1
        previous_line = line
        if DIRECTIVE.match(comment):
            continue
        if continues:
            yield from _check_phrases(line, comment, "comment")
        else:
            yield from _check_prose(line, comment, "comment")


def _check_prose(
    line: int,
    text: str,
    kind: str,
    first_words: re.Pattern[str] = RELATIVE,
) -> Iterator[Problem]:
    start = first_words.match(text)
    if start:
        yield line, f"{kind} begins with {start[0]!r}: {_shorten(text)}"
    yield from _check_phrases(line, text, kind)


def _check_phrases(line: int, text: str, kind: str) -> Iterator[Problem]:
    for phrase in find_phrases(text):
        yield line, f"{kind} has {phrase!r}: {_shorten(text)}"


def _check_entries(line: int, docstring: str) -> Iterator[Problem]:
    """Check the descriptions of arguments, attributes and errors."""
    is_inside = False
    for text in docstring.splitlines():
        if SECTION.fullmatch(text.strip()):
            is_inside = True
        elif not text.strip():
            is_inside = False
        entry = ENTRY.fullmatch(text)
        if is_inside and entry and RELATIVE.match(entry["text"]):
            yield line, f"entry without a noun: {_shorten(text)}"


def _iterate_docstrings(tree: ast.AST) -> Iterator[tuple[int, ast.Constant]]:
    """Yield docstrings, also those below constants and fields."""
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            yield node.lineno, node.value


def _check_names(tree: ast.AST) -> Iterator[Problem]:
    words_avoided = set()
    for _, avoided in read_terms():
        for phrase in avoided:
            if " " not in phrase:
                words_avoided.add(phrase.lower())

    for node in ast.walk(tree):
        name = _name_of(node)
        if name is None:
            continue
        snake_case = CAMEL.sub("_", name).lower()
        words = snake_case.strip("_").split("_")
        singulars = [word.rstrip("s") for word in words]
        for word in words_avoided.intersection(words + singulars):
            yield node.lineno, f"name {name!r} has {word!r}"
        if isinstance(node, ast.FunctionDef) and not _is_value(node):
            yield from _check_verb(node, words[0])


def _check_verb(function: ast.FunctionDef, word: str) -> Iterator[Problem]:
    if function.name in DOCUMENTED:
        return
    is_participle = word.endswith("ed") and word not in NO_PARTICIPLES
    if is_participle or word in PREPOSITIONS:
        yield function.lineno, f"function {function.name!r} begins with no verb"


def _name_of(node: ast.AST) -> str | None:
    """Return the name that a node defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return None


def _is_value(function: ast.FunctionDef) -> bool:
    """Return True for a property, whose name is a noun."""
    decorators = map(ast.unparse, function.decorator_list)
    return any("property" in decorator for decorator in decorators)


def _shorten(text: str) -> str:
    return re.sub(r"\s+", " ", text.strip())[:70]


def find_module_problems(folders: tuple[str, ...]) -> Iterator[str]:
    """Yield the problems of all modules of folders, with the path and the line of each."""
    for folder in folders:
        for path in sorted(Path(ROOT / folder).rglob("*.py")):
            for line, problem in find_problems(path.read_text()):
                yield f"{path.relative_to(ROOT)}:{line}: {problem}"
