"""The words after a verb: options, switches, positional words, and overrides of the config."""

import difflib
import math
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn


class UsageError(ValueError):
    """The words of the command are wrong."""


def split(
    words: Sequence[str],
    *,
    positional: Sequence[str] = (),
    required: Sequence[str] = (),
    optional: Sequence[str] = (),
    switches: Sequence[str] = (),
) -> tuple[dict[str, str], list[str]]:
    """Options of the verb by name, and `--config.FIELD=VALUE` overrides in their order.

    A positional name that ends in "…" takes one word or more, joined by newlines. A switch has no value; it is there
    or not. Options may be written with "-" or "_".
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
            near = difflib.get_close_matches(name, [*known, *switches], n=1)
            hint = f" Did you mean --{near[0]}{'=' if near[0] in known else ''}?" if near else ""
            raise UsageError(f"Unknown argument {word!r}.{hint} Known: {', '.join(shown)}")
        if not equals or not value:
            raise UsageError(f"--{name} needs a value: --{name}=VALUE")
        options[name] = value
    options |= _take_positional(plain, positional)
    missing = [f"--{name}=" for name in required if name not in options]
    if missing:
        raise UsageError(f"Missing: {', '.join(missing)}. See vit-jax --help.")
    return options, overrides


def _take_positional(plain: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    takes_more = bool(names) and names[-1].endswith("…")
    if plain and not names:
        raise UsageError(f"Unknown argument {plain[0]!r}: arguments of this verb begin with --.")
    if len(plain) < len(names) or (len(plain) > len(names) and not takes_more):
        raise UsageError(f"Expected {' '.join(names)}, given {' '.join(plain) or 'nothing'}. See vit-jax --help.")
    if takes_more:
        plain = [*plain[: len(names) - 1], "\n".join(plain[len(names) - 1 :])]
    return dict(zip(names, plain, strict=True))


def whole(options: Mapping[str, str], name: str) -> int:
    """The option as a number that makes sense for its name."""
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


def fail(message: str, code: int) -> NoReturn:
    """Ends the program with a message."""
    print(f"vit-jax: {message}", file=sys.stderr, flush=True)
    sys.exit(code)
