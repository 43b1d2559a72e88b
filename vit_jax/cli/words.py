"""Parses the words after a verb: options, switches, positional words, and overrides of the config."""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from vit_jax.files import printable_lines, refuse_bucket
from vit_jax.nearest import closest

LISTED = ("csv", "folder", "parquet", "wds")  # kinds of data with a path, as in "folder:PATH"
_KINDS_OF_DATA = (*LISTED, "tfds", "vtab")


class UsageError(ValueError):
    """The words of the command are wrong."""


class Given(NamedTuple):
    """What the words of a command say."""

    options: dict[str, str]  # by name, positional words too; a switch is "true"
    overrides: list[str]  # --config.FIELD=VALUE, in their order
    more: tuple[str, ...]  # what belongs to the positional argument that ends in "…"


def split(words: Sequence[str], arguments: Mapping[str, str], verb: str) -> Given:
    """Reads the words by the verb's table of arguments, from their form to their meaning.

    The forms: `NAME` and `NAME…` are positional, one word or several, and a last `[NAME]` may be left out;
    `--name=VALUE` must be given, `[--name=VALUE]` and the switch `[--name]` may be; `--name=a|b` is one of these;
    `[--config.…]` stands for all overrides, and with it `--allow_code=` is one of them. `--name=VALUE…` may be given
    several times, also as two words; its values are lines of one text. Users may write "-" for "_".

    Raises:
      UsageError: a word that is none of them, a value that is not allowed, or something missing.
    """
    positional = [form for form in arguments if not form.strip("[").startswith("--")]
    named = {form.strip("[]-").partition("=")[0]: form for form in arguments if form not in positional}
    takes_overrides = any(name.startswith("config.") for name in named)
    given = Given({}, [], ())
    plain: list[str] = []
    following = iter(words)
    for word in following:
        _refuse_buckets(word)
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        form = named.get(name, "").rstrip("]")
        is_repeated = form.endswith("…") and not form.endswith(",…")
        if not word.startswith("--"):
            plain.append(word)
        elif word.startswith("--config.") and takes_overrides:
            given.overrides.append(word)
        elif name not in named or (equals and "=" not in named[name]):
            hint = _hint_of_data(name, value, named, takes_overrides) or _hint(name, named, takes_overrides)
            raise UsageError(f"Unknown argument {word!r}.{hint} See vit-jax {verb} --help.")
        elif name == "allow_code" and takes_overrides:
            given.overrides.append(f"--config.{name}={_value(name, named[name], value)}")
        elif is_repeated:
            value = _value(name, named[name], value if equals else next(following, ""))
            given.options[name] = "\n".join(filter(None, (given.options.get(name), value)))
        else:
            given.options[name] = _value(name, named[name], value)
    several = [form for form in positional if form.endswith("…")]
    single = positional[: len(positional) - len(several)]
    if plain and not positional:
        raise UsageError(f"Unknown argument {plain[0]!r}: arguments of this verb begin with --.")
    num_needed = sum(not form.startswith("[") for form in positional)
    if len(plain) < num_needed or (len(plain) > len(positional) and not several):
        expected, found = " ".join(positional), " ".join(plain) or "nothing"
        raise UsageError(f"Expected {expected}, given {found}. See vit-jax {verb} --help.")
    given.options.update(zip((form.strip("[]") for form in single), plain, strict=False))
    missing = [f"--{name}=" for name, form in named.items() if not form.startswith("[") and name not in given.options]
    if missing:
        raise UsageError(f"Missing: {', '.join(missing)}. See vit-jax {verb} --help.")
    return given._replace(more=tuple(plain[len(single) :]))


def _refuse_buckets(word: str) -> None:
    """No verb reads or writes a bucket, as an option, a word of its own, or one in a list."""
    value = word.partition("=")[2] if word.startswith("--") else word
    for path in value.split(","):
        refuse_bucket(path, word)


def _value(name: str, form: str, value: str) -> str:
    """The value given for an argument of this form, "true" for a switch."""
    _, equals, allowed = form.strip("[]").partition("=")
    if equals and not value:
        raise UsageError(f"--{name} needs a value: --{name}=VALUE")
    choices = allowed.split("|")
    if len(choices) > 1 and value not in choices:
        raise UsageError(f"--{name}={value}: choose {', '.join(choices[:-1])} or {choices[-1]}.")
    return value if equals else "true"


def _hint_of_data(name: str, value: str, named: Mapping[str, str], takes_overrides: bool) -> str:
    """Return a suggestion for --folder=PATH and the like, which are values of --data=."""
    option = "data" if "data" in named else "config.data" if takes_overrides else ""
    return f" Did you mean --{option}={name}:{value}?" if option and value and name in _KINDS_OF_DATA else ""


def _hint(name: str, named: Mapping[str, str], takes_overrides: bool) -> str:
    """Suggests an option of similar spelling, or a field of the config."""
    close = closest(name, named, cutoff=0.8)
    near = [] if close or not takes_overrides else [f"--config.{field}" for field in _fields_meant_by(name)]
    close = close if close or near else closest(name, named)
    near += [f"--{match}{'=' if '=' in named[match] else ''}" for match in close]
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _fields_meant_by(name: str) -> list[str]:
    """Fields of a recipe that are meant by a word without their sections, each with "=" at the end."""
    from vit_jax.config import FinetuneConfig, PretrainConfig
    from vit_jax.config.load import field_paths
    from vit_jax.config.synonyms import fields_meant

    paths = [*field_paths(PretrainConfig), *field_paths(FinetuneConfig)]
    fields = dict.fromkeys(path.partition(".NAME")[0] for path in paths)
    return [field if "=" in field else f"{field}=" for field in fields_meant(name, fields)]


def whole(options: Mapping[str, str], name: str) -> int:
    """Return the option as an integer from 1, or from another lowest number where that is meaningful."""
    lowest = {"seed": 0, "max_unreadable": 0, "distance": 0, "folds": 2}.get(name, 1)
    if not options[name].isdecimal() or int(options[name]) < lowest:
        raise UsageError(f"--{name}={options[name]}: must be a whole number from {lowest}.")
    return int(options[name])


def fraction(options: Mapping[str, str], name: str, most: float = 1) -> float:
    """Return the option as a number above 0, up to `most`."""
    try:
        value = float(options[name])
    except ValueError:
        value = math.nan
    if not 0 < value <= most:
        raise UsageError(f"--{name}={options[name]}: must be a number above 0, up to {most:g}.")
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


def value_range(options: Mapping[str, str]) -> tuple[float, float] | None:
    """Return --value_range=LOW,HIGH as two numbers; None where it is not given."""
    if (text := options.get("value_range")) is None:
        return None
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        low = high = math.nan
    if not -math.inf < low < high < math.inf:
        raise UsageError(f"--value_range={text}: must be LOW,HIGH, two finite numbers, LOW < HIGH.")
    return low, high


def share(options: Mapping[str, str]) -> tuple[int, int]:
    """The number of this machine, from 0, and of all: of --index= and --count=, which deal runs to several machines."""
    index, count = options.get("index", "0"), options.get("count", "1")
    if not index.isdecimal() or not count.isdecimal() or int(index) >= int(count):
        raise UsageError(f"--index={index} --count={count}: give the number of this machine, from 0, and that of all.")
    if len({"index", "count"} & options.keys()) == 1:
        raise UsageError("--index= and --count= belong together: give both, or neither.")
    return int(index), int(count)


def fail(message: str, code: int) -> NoReturn:
    """Ends the program with a message."""
    print(f"vit-jax: {printable_lines(message)}", file=sys.stderr, flush=True)
    sys.exit(code)
