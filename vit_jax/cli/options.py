"""Verbs and their options: a dataclass declares them, argparse parses them and prints the help.

The annotation of a field is its type, with its range and the other options that it needs (`config.rules`).
"""

import argparse
import dataclasses
import functools
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Annotated, Any, NoReturn

from vit_jax.config import data_kinds
from vit_jax.config.parsing import check_value, parse_text
from vit_jax.config.rules import Range, When, default_of_field, rules_in, rules_of
from vit_jax.storage.files import refuse_bucket
from vit_jax.text.nearest import closest, did_you_mean
from vit_jax.text.printable import printable_lines

LISTED = tuple(kind.prefix for kind in data_kinds.KINDS if kind.is_listing)
"""Prefixes of data with a path, as in "folder:PATH"."""
_KINDS_OF_DATA = tuple(kind.prefix for kind in data_kinds.KINDS if ":" in kind.form)
_WIDTH = 120
_INDENT = 32  # of the meaning of an option
_OVERRIDE = "config.SECTION.FIELD"
_REQUIRED = "the following arguments are required: "  # the message of argparse
_PROBLEMS = {
    "expected one argument": "needs a value",
    "ignored explicit argument": "takes no value",
}
_READ = ("data", "against", "data_dir", "weights")  # options that take gs://
_READING_VERBS = (  # whose positional words do
    *("status", "evaluate", "predict", "export", "convert", "inspect"),
    *("probe", "knn", "fewshot", "features", "duplicates"),
)
REQUIRED = dataclasses.MISSING
PositiveShare = Annotated[float, Range("(0, 1]")]


class UsageError(ValueError):
    """An error in the words of a command."""


# Declarations.


def option(form: str, meaning: str, default: Any = None, *, flag: str = "") -> Any:
    """Declare an option `--name=FORM`; of a Literal the form is empty.

    A tuple takes several values with commas between them, a list one value each time.
    """
    metadata = {"form": form, "meaning": meaning, "flag": flag}
    if default == []:
        return dataclasses.field(default_factory=list, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def switch(meaning: str) -> Any:
    """Declare an option without a value."""
    return option("", meaning, False)


def argument(form: str, meaning: str, default: Any = REQUIRED) -> Any:
    """Declare a positional word; a tuple takes one or several."""
    return dataclasses.field(default=default, metadata={"form": form, "meaning": meaning})


class Options:
    """The base of all verbs; their fields are options."""

    def chosen(self, *names: str) -> dict[str, Any]:
        """Return these options by name, without those that are None."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def reject_ineffective(self, names: Collection[str], reason: str) -> None:
        """Raise UsageError if one of these options, which have no effect for this reason, differs from its default."""
        shown: list[str] = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.name not in names or value == default_of_field(field):
                continue
            values = value if isinstance(value, tuple) else (value,)
            is_word = value is not True and all(
                isinstance(one, str | int | float) for one in values
            )
            text = f"={','.join(map(str, values))}" if is_word else ""
            shown += value if field.name == "overrides" else [f"--{field.name}{text}"]
        if shown:
            raise UsageError(f"{', '.join(shown)}: has no effect {reason}. Leave it out.")

    def require_effect(self) -> None:
        """Raise UsageError for an option that another one makes ineffective."""
        for name, rules in rules_of(type(self)).items():
            for rule in rules:
                if isinstance(rule, When) and not rule.holds(getattr(self, rule.field)):
                    self.reject_ineffective([name], _reason(rule))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllowCode(Options):
    """The option that every verb with weights or a recipe has."""

    allow_code: str | None = option(
        "PACKAGE,…", "run code of these packages where the weights name it; default: none"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overrides(AllowCode):
    """Changes of a recipe."""

    overrides: list[str] = option(
        "VALUE",
        "change a value of the recipe; `vit-jax show --help` describes all fields",
        [],
        flag=_OVERRIDE,
    )

    def __post_init__(self) -> None:
        allowed = [] if self.allow_code is None else [f"--config.allow_code={self.allow_code}"]
        last = {
            word.partition("=")[0]: word for word in [*self.overrides, *allowed]
        }  # of each field
        self.overrides[:] = last.values()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(Overrides):
    """A recipe with changes of its values."""

    config: str = option(
        "RECIPE[:ARGUMENT]", "a file (configs/digits.py), or an installed recipe (digits)", REQUIRED
    )

    def load(self) -> Any:
        """Return the config."""
        from vit_jax.config import load_recipe

        return load_recipe(self.config, self.overrides)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share(Options):
    """The part of several runs that this machine does."""

    index: Annotated[int | None, Range("[0, inf)"), When("count")] = option(
        "I", "number of this machine, from 0"
    )
    count: Annotated[int | None, Range("[1, inf)")] = option(
        "N", "number of machines that share the runs"
    )

    @property
    def share(self) -> tuple[int, int]:
        """The number of this machine, and that of all."""
        if self.count is not None and (self.index is None or self.index >= self.count):
            raise UsageError(
                f"--index={self.index}: must lie in [0, {self.count}), with --count={self.count}."
            )
        return self.index or 0, self.count or 1


@dataclasses.dataclass(frozen=True)
class Verb:
    """One verb; called with the words that follow it."""

    declaration: type[Any]  # fields, and a method `run`
    examples: tuple[str, ...]
    appendix: Callable[[], str] | None = None  # returns the end of the help

    @functools.cached_property
    def options(self) -> type[Any]:
        """The dataclass of the declaration, made on first use: it takes a millisecond."""
        is_made = "__dataclass_fields__" in vars(self.declaration)
        return (
            self.declaration
            if is_made
            else dataclasses.dataclass(frozen=True, kw_only=True)(self.declaration)
        )

    def __call__(self, words: Sequence[str]) -> None:
        self.parse(words).run()

    @property
    def name(self) -> str:
        """The name on the command line: of LrRange "lr-range"."""
        return re.sub("(?<!^)(?=[A-Z])", "-", self.declaration.__name__).lower()

    @property
    def summary(self) -> str:
        """The first line of the class's docstring."""
        return inspect.cleandoc(self.declaration.__doc__ or "").partition("\n")[0]

    @property
    def flags(self) -> list[str]:
        """The names of all options, without positional words."""
        return list(_named(self.options))

    def help(self) -> str:
        """Return the description, every option with its meaning, the examples and the appendix."""
        text = self._parser().format_help()
        return f"{text}\n{self.appendix()}" if self.appendix else text

    def parse(self, words: Sequence[str]) -> Any:
        """Return the options of these words.

        Raises:
          UsageError: an unknown or missing option, a wrong value, or an option without effect.
        """
        known: list[str] = []
        for word in words:
            if (
                known
                and known[-1].startswith(f"--{_OVERRIDE}=")
                and "=" not in known[-1].partition("=")[2]
            ):
                known[-1] += f"={word}"  # "--config.seed 1"
            else:
                known.append(_known(word, self.options, self.name))
        try:
            values, rest = self._parser().parse_known_intermixed_args(known)
        except argparse.ArgumentError as error:
            message = str(error.message)
            if message.startswith(_REQUIRED):  # from Python 3.13 on it does not call `error`
                self._parser().error(message)
            for theirs, ours in _PROBLEMS.items():
                if message.startswith(theirs):
                    message = f"{error.argument_name} {ours}. See vit-jax {self.name} --help."
            raise UsageError(message) from None
        if rest:
            raise _unknown(rest[0], self.name)
        options = self.options(**vars(values))
        options.require_effect()
        return options

    def _parser(self) -> "_Parser":
        words = [
            field for field in dataclasses.fields(self.options) if "flag" not in field.metadata
        ]
        named = {name: field for name, field in _named(self.options).items() if name != _OVERRIDE}
        needed = [
            f"--{name} {_form(field)}" for name, field in named.items() if _is_required(field)
        ]
        parser = _Parser(
            prog=f"vit-jax {self.name}",
            usage=" ".join([f"vit-jax {self.name}", *map(_form, words), *needed, "[OPTION …]"]),
            description=inspect.cleandoc(self.options.__doc__ or ""),
            epilog="\n".join(
                ["Examples:", *(f"  vit-jax {self.name} {example}" for example in self.examples)]
            ),
            formatter_class=functools.partial(
                argparse.RawDescriptionHelpFormatter, width=_WIDTH, max_help_position=_INDENT
            ),
            add_help=False,
            allow_abbrev=False,
            exit_on_error=False,
        )
        hints = typing.get_type_hints(self.options, include_extras=True)
        for field in words:
            more: Any = {"nargs": "+"} if typing.get_origin(hints[field.name]) is tuple else {}
            if not _is_required(field):
                more = {"nargs": "?", "default": field.default}
            parser.add_argument(field.name, metavar=_form(field), help=_meaning(field, ()), **more)
        for name, field in _named(self.options).items():
            hint = hints[field.name]
            more = {
                "dest": field.name,
                "help": _meaning(field, rules_in(hint)),
                "required": _is_required(field),
            }
            more |= {} if _is_required(field) else {"default": default_of_field(field)}
            if _plain(hint) is bool:
                more["action"] = "store_true"
            else:
                form = _form(field) or "|".join(typing.get_args(_plain(hint)))
                more |= {"metavar": form, "type": functools.partial(_read, f"--{name}", hint)}
                more["action"] = "append" if typing.get_origin(hint) is list else "store"
            parser.add_argument(f"--{name}", **more)
        return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        missing = message.removeprefix(_REQUIRED)
        raise UsageError(f"Missing: {missing}. See {self.prog} --help.")


def verb(*examples: str, appendix: Callable[[], str] | None = None) -> Callable[[type[Any]], Verb]:
    """Make a verb of a class with options as fields and a method `run`; its docstring opens the help."""
    return lambda declaration: Verb(declaration, examples, appendix)


# Fields.


def _named(options: type[Any]) -> dict[str, "dataclasses.Field[Any]"]:
    """Return the options with names by flag: required ones, then those of the class, then those of its bases."""
    fields = {
        field.name: field for field in dataclasses.fields(options) if "flag" in field.metadata
    }
    order = dict.fromkeys(
        name for kind in options.__mro__ for name in inspect.get_annotations(kind) if name in fields
    )
    ordered = sorted((fields[name] for name in order), key=lambda field: not _is_required(field))
    return {field.metadata["flag"] or field.name: field for field in ordered}


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return default_of_field(field) is REQUIRED


def _form(field: "dataclasses.Field[Any]") -> str:
    form: str = field.metadata["form"]
    is_optional = "flag" not in field.metadata and not _is_required(field)
    return f"[{form}]" if is_optional else form


def _meaning(field: "dataclasses.Field[Any]", rules: Iterable[Any]) -> str:
    needed = "".join(
        f"; {_reason(rule, 'not with', 'needs')}" for rule in rules if isinstance(rule, When)
    )
    default = default_of_field(field)
    is_shown = default is not REQUIRED and type(default) in (int, float, str) and default != ""
    suffix = (
        f" (default: {default:g})"
        if type(default) is float
        else f" (default: {default})"
        if is_shown
        else ""
    )
    return (field.metadata["meaning"] + needed + suffix).replace("%", "%%")


# Values.


def _read(flag: str, hint: Any, text: str) -> Any:
    """Return the value of an option in the type of its field."""
    rules = [rule for rule in rules_in(hint) if not isinstance(rule, When)]
    plain = _plain(hint)
    custom = next(filter(callable, rules), None)
    try:
        if not text:
            raise ValueError("must have a value")
        value = custom(text) if custom else check_value("", parse_text(text, plain), plain)
        for number in value if isinstance(value, tuple) else (value,):
            if wrong := next(
                (rule for rule in rules if isinstance(rule, Range) and not rule.allows(number)),
                None,
            ):
                raise ValueError(wrong.rule)
        return value
    except ValueError as error:
        problem = re.sub("^=.*?: ", "", str(error)).rstrip(
            "."
        )  # without the value of `check_value`
        raise argparse.ArgumentTypeError(
            f"{flag}={text}: {problem}{'' if problem.endswith('?') else '.'}"
        ) from None


def _plain(hint: Any) -> Any:
    """Return a type without annotations and None; of a list that of its elements."""
    if hasattr(hint, "__metadata__"):
        return _plain(hint.__origin__)
    parts = [part for part in typing.get_args(hint) if part is not types.NoneType]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return _plain(parts[0])
    if typing.get_origin(hint) is tuple:
        return tuple[tuple(part if part is ... else _plain(part) for part in parts)]  # type: ignore[misc]
    return parts[0] if typing.get_origin(hint) is list else hint


def _known(word: str, options: type[Any], verb: str) -> str:
    """Return a word as the parser takes it: with "_" for "-", an override of the recipe as an option.

    Raises:
      UsageError: there is no such option.
      ValueError: an address of a bucket for an option that takes none.
    """
    is_option = word.startswith("--")
    name, equals, value = word.removeprefix("--").partition("=") if is_option else ("", "", word)
    name = name.replace("-", "_")
    known = _named(options)
    takes_buckets = (
        (not is_option and verb in _READING_VERBS)
        or (name in _READ and verb != "prepare")
        or (name == "workdir" and verb in ("pretrain", "finetune"))
        or name.startswith("config.")  # `config.check` knows these fields
    )
    for path in value.split(","):
        refuse_bucket(path, word, allowed=takes_buckets)
    if not is_option:
        return word
    if word.startswith("--config.") and _OVERRIDE in known:
        return f"--{_OVERRIDE}={word}"
    if name not in known:
        raise _unknown(word, verb, _hint(name, value, known))
    return f"--{name}{equals}{value}"


def _unknown(word: str, verb: str, hint: str = "") -> UsageError:
    return UsageError(f"Unknown argument {word!r}.{hint} See vit-jax {verb} --help.")


def _hint(name: str, value: str, known: Collection[str]) -> str:
    """Return a suggestion: --data=folder:PATH for --folder=PATH, similar options, or fields of the config."""
    has_recipe = _OVERRIDE in known
    if value and name in _KINDS_OF_DATA and ("data" in known or has_recipe):
        return f" Did you mean --{'data' if 'data' in known else 'config.data'}={name}:{value}?"
    if closest(name, known, cutoff=0.8) or not has_recipe:
        return did_you_mean(name, known, "--{}")

    from vit_jax.config import FinetuneConfig, PretrainConfig
    from vit_jax.config.parsing import field_paths
    from vit_jax.config.synonyms import fields_meant

    paths = [*field_paths(PretrainConfig), *field_paths(FinetuneConfig)]
    fields = fields_meant(name, dict.fromkeys(path.partition(".NAME")[0] for path in paths))
    near = " or ".join(
        f"--config.{field}" if "=" in field else f"--config.{field}=" for field in fields
    )
    return f" Did you mean {near}?" if near else did_you_mean(name, known, "--{}")


def _reason(rule: When, excluded: str = "with", needed: str = "without") -> str:
    if rule.values == (False,):
        return f"{excluded} --{rule.field}"
    return f"{needed} --{rule.field}" + (
        f"={' or '.join(map(str, rule.values))}" if rule.values else ""
    )


# Output.


def fields_of_recipes() -> str:
    """Return every field of the schema with its description, type and default."""
    from vit_jax.config.descriptions import read_sections

    parts = ["Fields of a recipe, set by --config.SECTION.FIELD=VALUE:"]
    for section in read_sections():
        parts += ["", textwrap.fill(f"{section.name}: {section.description}", _WIDTH)]
        for field in section.fields:
            default = "required" if field.default is None else f"default {field.default}"
            parts.append(
                entry(section.prefix + field.name, f"{field.description} [{field.type}; {default}]")
            )
    return "\n".join([*parts, ""])


def entry(name: str, meaning: str) -> str:
    """Return a name with its meaning in a column beside it, or below a longer name."""
    indent = " " * _INDENT
    lines = textwrap.fill(meaning, _WIDTH, initial_indent=indent, subsequent_indent=indent)
    return (
        f"  {name}\n{lines}"
        if len(name) > _INDENT - 4
        else f"  {name}".ljust(_INDENT) + lines[_INDENT:]
    )


def fail(message: str, code: int) -> NoReturn:
    """End the program with a message."""
    print(f"vit-jax: {printable_lines(message)}", file=sys.stderr, flush=True)
    sys.exit(code)
