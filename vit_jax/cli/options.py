"""Declarations of verbs: options, positional words, and groups of options that several verbs share.

The annotation of a field is its type, with its range and the other options that it needs
(`config.rules`). `words` reads a command line by these declarations, `help_text` describes them,
`verbs` joins both.
"""

import dataclasses
import inspect
import operator
import shlex
import types
import typing
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Any, ClassVar

from vit_jax.config import data_kinds
from vit_jax.config.rules import Range, When, find_rules, get_default

REQUIRED = dataclasses.MISSING
LISTED = tuple(kind.prefix for kind in data_kinds.KINDS if kind.is_listing)
"""Prefixes of data with a path, as in "folder:PATH"."""
OVERRIDE = "config.SECTION.FIELD"
PositiveShare = Annotated[float, Range("(0, 1]")]


def format_command(*words: str) -> str:
    """Return a command of vit-jax as a shell reads it."""
    return shlex.join(["vit-jax", *words])


def is_given(words: Iterable[str], flag: str) -> bool:
    """Return True if a command line has this option with its flag."""
    return any(word.partition("=")[0] == flag for word in words)


class UsageError(ValueError):
    """An error in the words of a command."""


# Declarations.


def option(
    form: str,
    meaning: str,
    default: Any = None,
    *,
    flag: str = "",
    reads_bucket: bool = False,
    is_positional: bool = False,
    bare: Any = None,
) -> Any:
    """Declare an option `--name=FORM`. The form of a Literal is empty.

    A tuple takes several values with commas between them, a list one value each time.

    Args:
      form: the value in the help, such as "FOLDER".
      meaning: the description in the help.
      default: `REQUIRED` for an option without one.
      flag: name on the command line, if the field has another one.
      reads_bucket: accept addresses of buckets (gs://).
      is_positional: accept the value also as a word without the flag, behind the arguments.
      bare: the value of the flag alone; None: the flag needs a value.
    """
    metadata = {
        "form": form,
        "meaning": meaning,
        "flag": flag,
        "reads_bucket": reads_bucket,
        "is_positional": is_positional,
        "bare": bare,
    }
    if default == []:
        return dataclasses.field(default_factory=list, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def switch(meaning: str) -> Any:
    """Declare an option without a value."""
    return option("", meaning, False)


def argument(
    form: str,
    meaning: str,
    default: Any = REQUIRED,
    *,
    reads_bucket: bool = False,
) -> Any:
    """Declare a positional word. A tuple takes one or several."""
    metadata = {"form": form, "meaning": meaning, "reads_bucket": reads_bucket}
    return dataclasses.field(default=default, metadata=metadata)


def group(kind: "type[Group]") -> Any:
    """Declare the options of a group: `--PREFIX.FIELD=VALUE` for each of its fields."""
    return dataclasses.field(default_factory=kind, metadata={"group": kind})


# Declarations as the parser and the help use them.


@dataclasses.dataclass(frozen=True)
class Option:
    """An option or a positional word of a verb."""

    name: str
    """Name of the attribute, with its group: "top", "weights.gelu"."""
    hint: Any
    default: Any
    form: str
    meaning: str
    flag: str = ""
    """Name on the command line: "--top"; empty for a positional word."""
    earlier_flag: str = ""
    """Name before the option was in a group: "--gelu" of "--weights.gelu"."""
    reads_bucket: bool = False
    is_positional: bool = False
    """The value may be a word without the flag."""
    bare: Any = None
    """The value of the flag alone, if it may be alone."""

    @property
    def is_required(self) -> bool:
        """True for an option without a default."""
        return self.default is REQUIRED

    @property
    def is_switch(self) -> bool:
        """True for an option without a value."""
        return plain_type(self.hint) is bool

    @property
    def shown_form(self) -> str:
        """The form of the value: "FOLDER", "direct|short_side", or "" for a switch."""
        if self.bare is not None:
            return f"[{self.form}]"
        if self.form or self.is_switch:
            return self.form
        return "|".join(typing.get_args(plain_type(self.hint)))

    @property
    def is_repeated(self) -> bool:
        """True for an option that may be given several times, and takes one value each time."""
        return typing.get_origin(self.hint) is list

    @property
    def is_series(self) -> bool:
        """True for an option or a positional word with several values."""
        return typing.get_origin(plain_type(self.hint)) is tuple

    @property
    def is_grouped(self) -> bool:
        """True for an option of a group."""
        return "." in self.name

    @property
    def conditions(self) -> list[When]:
        """The rules about other options that make this one effective."""
        return [rule for rule in find_rules(self.hint) if isinstance(rule, When)]

    def to_words(self, value: Any) -> list[str]:
        """Return the words of a command line that set this value; without it if it is no plain value."""
        if isinstance(value, list):
            return value
        if value is True:
            return [self.flag]
        values = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(one, str | int | float) for one in values):
            return [self.flag]
        return [f"{self.flag}={','.join(map(str, values))}"]


def list_arguments(kind: type) -> list[Option]:
    """Return the positional words of a verb in their order."""
    hints = typing.get_type_hints(kind, include_extras=True)
    arguments = []
    for field in dataclasses.fields(kind):
        if _is_argument(field):
            arguments.append(_make_option(field, hints[field.name]))
    return arguments


def list_options(kind: type) -> list[Option]:
    """Return the options of a verb: required ones, those of the class, those of its bases, and its groups."""
    hints = typing.get_type_hints(kind, include_extras=True)
    options = []
    grouped = []
    for field in _order_fields(kind):
        if _is_group(field):
            grouped += _list_group(field)
        elif not _is_argument(field):
            options.append(_make_option(field, hints[field.name]))
    options.sort(key=lambda option: not option.is_required)
    return options + grouped


def list_groups(kind: type) -> "list[type[Group]]":
    """Return the groups of options that a verb takes."""
    return [field.metadata["group"] for field in filter(_is_group, _order_fields(kind))]


def plain_type(hint: Any) -> Any:
    """Return a type without annotations and None; of a list, the type of its elements."""
    if hasattr(hint, "__metadata__"):
        return plain_type(hint.__origin__)
    parts = [part for part in typing.get_args(hint) if part is not types.NoneType]
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return plain_type(parts[0])
    if origin is tuple:
        return tuple[tuple(map(plain_type, parts))]  # type: ignore[misc]
    if origin is list:
        return parts[0]
    return hint


def _order_fields(kind: type) -> "list[dataclasses.Field]":
    """Return the fields of the class, then those of its bases."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    ordered = dict[str, "dataclasses.Field"]()
    for parent in kind.__mro__:
        for name in inspect.get_annotations(parent):
            if name in fields:
                ordered.setdefault(name, fields[name])
    return list(ordered.values())


def _is_group(field: "dataclasses.Field") -> bool:
    return "group" in field.metadata


def _is_argument(field: "dataclasses.Field") -> bool:
    return not _is_group(field) and "flag" not in field.metadata


def _make_option(field: "dataclasses.Field", hint: Any) -> Option:
    metadata = field.metadata
    flag = ""
    if not _is_argument(field):
        flag = "--" + (metadata["flag"] or field.name)
    return Option(
        name=field.name,
        hint=hint,
        default=get_default(field),
        form=metadata["form"],
        meaning=metadata["meaning"],
        flag=flag,
        reads_bucket=metadata["reads_bucket"],
        is_positional=metadata.get("is_positional", False),
        bare=metadata.get("bare"),
    )


def _list_group(field: "dataclasses.Field") -> list[Option]:
    """Return the options of a group, each with its name before it was in the group."""
    kind = field.metadata["group"]
    options = []
    for inner in list_options(kind):
        renamed = dataclasses.replace(
            inner,
            name=f"{field.name}.{inner.name}",
            flag=f"--{kind.PREFIX}.{inner.name}",
            earlier_flag=inner.flag,
        )
        options.append(renamed)
    return options


# Bases of verbs.


class Options:
    """The base of all verbs; their fields are options."""

    def complete(self, words: Sequence[str]) -> "Options":
        """Return the options of these words with values for those that a short form omits."""
        return self

    def suggest_next(self) -> str:
        """Return the command that usually follows this one; "" if there is none."""
        return ""

    def to_words(self, excluded: Collection[str] = ()) -> list[str]:
        """Return the words of all options that differ from their defaults, without arguments."""
        words = []
        for option in list_options(type(self)):
            value = operator.attrgetter(option.name)(self)
            if option.name not in excluded and value != option.default:
                words += option.to_words(value)
        return words

    def collect_values(self, *names: str) -> dict[str, Any]:
        """Return these options by name, without those that are None."""
        values = {}
        for name in names:
            value = getattr(self, name)
            if value is not None:
                values[name] = value
        return values

    def reject_ineffective(self, names: Collection[str], reason: str) -> None:
        """Raise UsageError if one of these options, which have no effect for this reason, differs from its default.

        Args:
          names: attributes; the name of a group stands for all its options.
          reason: the end of the message.
        """
        shown = []
        for option in list_options(type(self)):
            group_name = option.name.partition(".")[0]
            if option.name not in names and group_name not in names:
                continue
            value = operator.attrgetter(option.name)(self)
            if value != option.default:
                shown += option.to_words(value)
        if shown:
            raise UsageError(f"{', '.join(shown)}: has no effect {reason}. Leave it out.")

    def require_effect(self) -> None:
        """Raise UsageError for an option that another one makes ineffective."""
        options = {option.name: option for option in list_options(type(self))}
        for option in options.values():
            prefix = option.name.removesuffix(option.name.rpartition(".")[2])
            for rule in option.conditions:
                other = prefix + rule.field  # a field of the same group
                if not rule.holds(operator.attrgetter(other)(self)):
                    reason = describe_condition(rule, options[other].flag)
                    self.reject_ineffective([option.name], reason)


def describe_condition(
    rule: When,
    flag: str,
    *,
    excluded: str = "with",
    needed: str = "without",
) -> str:
    """Return the state of another option that makes an option ineffective: "without --json"."""
    if rule.values == (False,):
        return f"{excluded} {flag}"
    if not rule.values:
        return f"{needed} {flag}"
    return f"{needed} {flag}={' or '.join(map(str, rule.values))}"


class Group(Options):
    """The base of groups of options.

    The first line of a group's docstring is its description in the help.
    """

    PREFIX: ClassVar[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overrides(Options):
    """Changes of a recipe."""

    overrides: list[str] = option(
        "VALUE",
        "change a value of the recipe; all fields: `vit-jax show --help`",
        [],
        flag=OVERRIDE,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(Overrides):
    """A recipe with changes of its values."""

    config: str = option(
        "RECIPE[:ARGUMENT]",
        "recipe: digits, configs/digits.py, or a config as JSON",
        REQUIRED,
    )

    def load(self) -> Any:
        """Return the config."""
        from vit_jax.config import load_recipe

        return load_recipe(self.config, self.overrides)

    def suggest_run(self) -> str:
        """Return the command that trains the recipe."""
        return suggest_recipe(self.config, self.overrides)


def suggest_recipe(recipe: str, overrides: Sequence[str], workdir: str | None = None) -> str:
    """Return the command that trains a recipe; a workdir is chosen by default."""
    from vit_jax.config import FinetuneConfig, load_recipe

    config = load_recipe(recipe, overrides)
    verb = "finetune" if isinstance(config, FinetuneConfig) else "pretrain"
    words = [verb, f"--config={recipe}"]
    if workdir is not None:
        words.append(f"--workdir={workdir}")
    words += overrides
    if config.data is None:
        words.append("--config.data=DATA")
    if verb == "finetune" and config.init_from is None:
        words.append("--config.init_from=WEIGHTS")
    return format_command(*words)


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
        """The number of this machine, and the number of all machines."""
        if self.count is None:
            return self.index or 0, 1
        if self.index is None or self.index >= self.count:
            raise UsageError(
                f"--index={self.index}: must lie in [0, {self.count}), with --count={self.count}."
            )
        return self.index, self.count
