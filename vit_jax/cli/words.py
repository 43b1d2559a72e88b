"""Parses the words after a verb: options, switches, positional words, and overrides of the config."""

import difflib
import math
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from vit_jax.files import printable_lines


class UsageError(ValueError):
    """The words of the command are wrong."""


def split(
    words: Sequence[str],
    *,
    positional: Sequence[str] = (),
    required: Sequence[str] = (),
    optional: Sequence[str] = (),
    switches: Sequence[str] = (),
) -> tuple[dict[str, str], list[str], tuple[str, ...]]:
    """Options of the verb by name, `--config.FIELD=VALUE` overrides in their order, and further positional words.

    Positional words are options by their name, except for the words, one or more, of a last name that ends in "…"; a last
    name in brackets, "[NAME]", may be left out. A switch has no value. Options may be written with "-" or "_".
    """
    options: dict[str, str] = {}
    overrides: list[str] = []
    plain: list[str] = []
    known = [*required, *optional]
    for word in words:
        if word.startswith("--config.") and "config" in known:
            overrides.append(word)
            continue
        if not word.startswith("--"):
            plain.append(word)
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if name in switches and not equals:
            options[name] = "true"
            continue
        if name not in known:
            shown = [f"--{k}=" for k in known] + [f"--{k}" for k in switches]
            raise UsageError(f"Unknown argument {word!r}.{_hint(name, known, switches)} Known: {', '.join(shown)}")
        if not equals or not value:
            raise UsageError(f"--{name} needs a value: --{name}=VALUE")
        options[name] = value
    last = positional[-1] if positional else ""
    takes_more, may_lack = last.endswith("…"), last.startswith("[")
    if plain and not positional:
        raise UsageError(f"Unknown argument {plain[0]!r}: arguments of this verb begin with --.")
    if len(plain) < len(positional) - may_lack or (len(plain) > len(positional) and not takes_more):
        given = " ".join(plain) or "nothing"
        raise UsageError(f"Expected {' '.join(positional)}, given {given}. See vit-jax --help.")
    num_named = len(positional) - takes_more
    options |= zip((name.strip("[]") for name in positional[:num_named]), plain, strict=False)
    missing = [f"--{name}=" for name in required if name not in options]
    if missing:
        raise UsageError(f"Missing: {', '.join(missing)}. See vit-jax --help.")
    return options, overrides, tuple(plain[num_named:])


def _hint(name: str, known: Sequence[str], switches: Sequence[str]) -> str:
    """Suggests a field of the config, or an option of similar spelling."""
    near = [f"--config.{field}=" for field in _fields_named(name)] if "config" in known else []
    for match in () if near else difflib.get_close_matches(name, [*known, *switches], n=1):
        near = [f"--{match}{'=' if match in known else ''}"]
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _fields_named(name: str) -> list[str]:
    """Fields of a recipe that have this name, in full or after their section."""
    from vit_jax.config import FinetuneConfig, PretrainConfig
    from vit_jax.config.load import field_paths

    paths = [*field_paths(PretrainConfig), *field_paths(FinetuneConfig)]
    fields = dict.fromkeys(path.partition(".NAME")[0] for path in paths)
    return [field for field in fields if name in (field, field.rpartition(".")[2])]


def whole(options: Mapping[str, str], name: str) -> int:
    """The option as an integer from 1, or from 0 where that is meaningful."""
    lowest = 0 if name in ("seed", "max_unreadable") else 1
    if not options[name].isdecimal() or int(options[name]) < lowest:
        raise UsageError(f"--{name}={options[name]}: must be a whole number from {lowest}.")
    return int(options[name])


def fraction(options: Mapping[str, str], name: str) -> float:
    """The option as a number above 0, up to 1."""
    try:
        value = float(options[name])
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise UsageError(f"--{name}={options[name]}: must be a number above 0, up to 1.")
    return value


def wholes(options: Mapping[str, str], name: str, lowest: int = 1) -> tuple[int, ...]:
    """The option as integers with commas between them."""
    texts = options[name].split(",")
    if not all(text.isdecimal() and int(text) >= lowest for text in texts):
        raise UsageError(f"--{name}={options[name]}: must be whole numbers from {lowest}, with commas between them.")
    return tuple(map(int, texts))


def positive(options: Mapping[str, str], name: str, text: str | None = None) -> float:
    """The option, or one `text` of it, as a positive number."""
    text = options[name] if text is None else text
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"--{name}={options[name]}: must be a positive number.")
    return value


def fail(message: str, code: int) -> NoReturn:
    """Ends the program with a message."""
    print(f"vit-jax: {printable_lines(message)}", file=sys.stderr, flush=True)
    sys.exit(code)
