"""The words after a verb, read into the values of its options.

An option that has moved into a group is also read by its earlier name. Errors name an option as it
was written.
"""

import collections
import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vit_jax.cli.options import (
    OVERRIDE,
    Option,
    Options,
    UsageError,
    list_arguments,
    list_options,
    plain_type,
)
from vit_jax.config import data_kinds
from vit_jax.config.parsing import check_value
from vit_jax.config.rules import Range, find_rules
from vit_jax.config.value_text import parse_text
from vit_jax.storage.files import reject_bucket
from vit_jax.text.nearest import closest

# Prefixes of data with a name or a path.
_KINDS_OF_DATA = tuple(kind.prefix for kind in data_kinds.KINDS if ":" in kind.form)
# "-f" is an option; "-", "-1" and "-a b" are not.
_DASHED = re.compile(r"-(?!\d+$|\d*\.\d+$)\S+")
_EARLIER_FIELDS = {"--allow_code": "--config.allow_code"}  # fields of a recipe
# In errors of verbs with a recipe.
_RECIPE_SPELLING = {"--weights.allow_code": "--config.allow_code"}


def parse_words(kind: type, words: Sequence[str], verb: str, spelling: dict[str, str]) -> Any:
    """Return the options of a verb with the values of these words.

    Args:
      kind: the dataclass of the verb.
      words: words of the command line after the verb.
      verb: name of the verb, for messages.
      spelling: receives the name of each option as it was written, by its flag.

    Raises:
      UsageError: an unknown or missing option, a wrong value, or an option without effect.
      ValueError: the address of a bucket for an option that takes none.
    """
    reader = _Reader(kind, verb, spelling)
    reader.read(words)

    options = reader.build()
    options.require_effect()
    return options


@contextlib.contextmanager
def restore_spelling(spelling: Mapping[str, str]) -> Iterator[None]:
    """Name options in errors of this context as they were written: "--gelu" for "--weights.gelu"."""
    try:
        yield
    except ValueError as error:
        if error.args and isinstance(error.args[0], str):
            message, *others = error.args
            error.args = (_rename(message, spelling), *others)
        raise


def _rename(message: str, spelling: Mapping[str, str]) -> str:
    """Return a message with the names of options as they were written."""
    for flag, written in spelling.items():
        pattern = rf"(?<![\w-]){re.escape(flag)}(?!\w|\.\w)"
        message = re.sub(pattern, written, message)
    return message


class _Reader:
    """Collects the values of a verb's options from words.

    Args:
      kind: the dataclass of the verb.
      verb: its name.
      spelling: receives the name of each option as it was written, by its flag.
    """

    def __init__(self, kind: type, verb: str, spelling: dict[str, str]):
        self.kind = kind
        self.verb = verb
        self.arguments = list_arguments(kind)
        self.options = list_options(kind)
        self.has_recipe = False

        # By the flag, and by the earlier flag.
        self.by_flag = dict[str, Option]()
        for option in self.options:
            if option.flag == f"--{OVERRIDE}":
                self.has_recipe = True
                continue
            self.by_flag[option.flag] = option
            if option.earlier_flag:
                self.by_flag.setdefault(option.earlier_flag, option)

        self.values = dict[str, Any]()
        # The last word for each field.
        self.overrides = dict[str, str]()
        self.positional = list[str]()

        # The flag of each option that was given, or its earlier flag.
        self.forms = dict[str, str]()
        self.spelling = spelling
        if self.has_recipe:
            self.spelling.update(_RECIPE_SPELLING)

    def read(self, words: Sequence[str]) -> None:
        """Read all words; raise UsageError for the first wrong one."""
        remaining = collections.deque(words)
        while remaining:
            word = remaining.popleft()
            if self.has_recipe and word.startswith("--config."):
                self._read_override(word, remaining)
            elif word.startswith("--"):
                self._read_option(word, remaining)
            elif _is_option(word):
                raise self._reject(word)
            else:
                self.positional.append(word)

        self._read_arguments()
        self._require_all()

    def build(self) -> Options:
        """Return the options with the values that were read."""
        sections = collections.defaultdict[str, dict[str, Any]](dict)
        for path, value in self.values.items():
            group, _, name = path.rpartition(".")
            sections[group][name] = value

        values = sections[""]
        for field in dataclasses.fields(self.kind):
            if field.name in sections:
                make_group = field.metadata["group"]
                values[field.name] = make_group(**sections[field.name])
        if self.has_recipe:
            values["overrides"] = list(self.overrides.values())

        options: Options = self.kind(**values)
        return options

    # Options.

    def _read_override(self, word: str, remaining: collections.deque[str]) -> None:
        """Read "--config.seed=1", or "--config.seed" and the word "1"."""
        if "=" not in word and remaining:
            word = f"{word}={remaining.popleft()}"
        flag, _, value = word.partition("=")
        _reject_buckets(value, word, allowed=True)  # `config.check` knows these fields
        self._record_form(flag, flag, flag)
        self.overrides[flag] = word

    def _read_option(self, word: str, remaining: collections.deque[str]) -> None:
        """Read "--top=3", "--json", or "--top" and the word "3"."""
        written, equals, value = word.partition("=")
        form = "--" + written.removeprefix("--").replace("-", "_")
        if self.has_recipe and form in _EARLIER_FIELDS:
            if not equals:
                value = self._take_value(written, remaining)
            flag = _EARLIER_FIELDS[form]
            self._record_form(flag, form, written)
            self.overrides[flag] = f"{flag}={value}"
            return

        option = self.by_flag.get(form)
        if option is None:
            _reject_buckets(value, word, allowed=False)
            raise self._reject(word, self._suggest(form, value))

        self._record_form(option.flag, form, written)
        _reject_buckets(value, word, allowed=option.reads_bucket)
        if option.is_switch:
            if equals:
                raise UsageError(f"{written} takes no value. See vit-jax {self.verb} --help.")
            self.values[option.name] = True
            return

        if not equals and option.bare is not None:
            self.values[option.name] = option.bare
            return
        if not equals:
            value = self._take_value(written, remaining)
            word = f"{written} {value}"
            _reject_buckets(value, word, allowed=option.reads_bucket)
        self._store(option, read_value(written, option.hint, value))

    def _store(self, option: Option, value: Any) -> None:
        """Keep the last value of an option, or all values of one that may be repeated."""
        if option.is_repeated:
            self.values.setdefault(option.name, []).append(value)
        else:
            self.values[option.name] = value

    def _take_value(self, written: str, remaining: collections.deque[str]) -> str:
        """Return the next word, the value of the option that was written without one."""
        if not remaining or _is_option(remaining[0]):
            raise UsageError(f"{written} needs a value. See vit-jax {self.verb} --help.")
        return remaining.popleft()

    def _record_form(self, flag: str, form: str, written: str) -> None:
        """Record how an option was written.

        Args:
          flag: the option's flag.
          form: its flag or its earlier flag.
          written: the form with dashes as they were written.

        Raises:
          UsageError: the option was given by its other name before.
        """
        if self.forms.get(flag, form) != form:
            other = self.spelling.pop(flag)  # the message has both names
            raise UsageError(f"{other}, {written}: are two names of one option. Give one of them.")
        self.forms[flag] = form
        self.spelling[flag] = written

    # Positional words, and words that are missing.

    def _read_arguments(self) -> None:
        """Distribute the positional words: the last argument may take several.

        Raises:
          UsageError: a word is left.
        """
        words = self.positional
        for argument in self.arguments:
            taken = words if argument.is_series else words[:1]
            words = words[len(taken) :]

            for word in taken:
                _reject_buckets(word, word, allowed=argument.reads_bucket)
            if taken and argument.is_series:
                self.values[argument.name] = taken
            elif taken:
                self.values[argument.name] = taken[0]

        words = self._read_positional_options(words)
        if words:
            _reject_buckets(words[0], words[0], allowed=False)
            raise self._reject(words[0])

    def _read_positional_options(self, words: list[str]) -> list[str]:
        """Give the next words to options that may be words; return the others."""
        for option in self.options:
            if not option.is_positional or not words:
                continue
            word = words[0]
            if option.name in self.values:
                raise UsageError(
                    f"{word}, {option.flag}=: are two values of {option.form}. Give one of them."
                )
            _reject_buckets(word, word, allowed=option.reads_bucket)
            self.spelling.setdefault(f"{option.flag}={word}", word)
            self._store(option, read_value(option.form, option.hint, word))
            words = words[1:]
        return words

    def _require_all(self) -> None:
        """Raise UsageError if a required word or option is missing."""
        missing = []
        for option in (*self.arguments, *self.options):
            if option.is_required and option.name not in self.values:
                is_word = option.is_positional or not option.flag
                missing.append(option.form if is_word else option.flag)

        if missing:
            raise UsageError(f"Missing: {', '.join(missing)}. See vit-jax {self.verb} --help.")

    # Unknown words.

    def _reject(self, word: str, hint: str = "") -> UsageError:
        """Return the error for a word that the verb does not take."""
        return UsageError(f"Unknown argument {word!r}.{hint} See vit-jax {self.verb} --help.")

    def _suggest(self, form: str, value: str) -> str:
        """Return " Did you mean ...?" with the option for this flag and value, "" without any."""
        meant = self._find_meant(form, value)
        if not meant:
            return ""
        return f" Did you mean {meant}?"

    def _find_meant(self, form: str, value: str) -> str:
        """Return --data=folder:PATH for --folder=PATH, a similar option, or fields of the config."""
        name = form.removeprefix("--")
        if value and name in _KINDS_OF_DATA:
            if "--data" in self.by_flag:
                return f"--data={name}:{value}"
            if self.has_recipe:
                return f"--config.data={name}:{value}"

        field = name.rpartition(".")[2]
        earlier_flag = f"--{field}"
        if field != name and earlier_flag in self.by_flag:  # with the prefix of another group
            return self.by_flag[earlier_flag].flag

        near = self._find_near(form, cutoff=0.8)
        if not near and self.has_recipe:
            near = " or ".join(_find_fields(name))
        return near or self._find_near(form, cutoff=0.6)

    def _find_near(self, form: str, cutoff: float) -> str:
        """Return the flag of the option whose name is the most similar one, "" without any."""
        names = {}
        for flag, option in self.by_flag.items():
            names[flag.removeprefix("--")] = option.flag

        name = form.removeprefix("--")
        near = closest(name, names, cutoff=cutoff)
        if not near:
            return ""
        return names[near[0]]


# Values.


def read_value(written: str, hint: Any, text: str) -> Any:
    """Return the value of an option in the type of its field.

    Raises:
      UsageError: the text has another type, or a rule of the field does not allow the value.
    """
    try:
        if not text:
            raise ValueError("must have a value")
        value = _convert(text, hint)
        _require_ranges(value, hint)
    except ValueError as error:
        problem = re.sub("^=.*?: ", "", str(error))  # `check_value` names the value
        problem = problem.rstrip(".")
        if not problem.endswith("?"):
            problem += "."
        raise UsageError(f"{written}={text}: {problem}") from None
    return value


def _convert(text: str, hint: Any) -> Any:
    """Return a value by the function that annotates its type, or in its type."""
    for rule in find_rules(hint):
        if callable(rule):
            return rule(text)

    plain = plain_type(hint)
    return check_value("", parse_text(text, plain), plain)


def _require_ranges(value: Any, hint: Any) -> None:
    """Raise ValueError if a number, or one of several, is outside the range of its type."""
    numbers = value if isinstance(value, tuple) else (value,)
    for rule in find_rules(hint):
        if not isinstance(rule, Range):
            continue
        if not all(map(rule.allows, numbers)):
            raise ValueError(rule.rule)


# Words.


def _is_option(word: str) -> bool:
    """Return True for "-f" and "--name", False for "-", "-1" and other words."""
    return word.startswith("--") or _DASHED.fullmatch(word) is not None


def _reject_buckets(value: str, word: str, *, allowed: bool) -> None:
    """Raise ValueError if a value holds the address of a bucket; `allowed`: gs:// is read here."""
    for path in value.split(","):
        reject_bucket(path, word, allowed=allowed)


def _find_fields(name: str) -> list[str]:
    """Return the options that set the fields of a recipe with this name or a similar meaning."""
    from vit_jax.config import FinetuneConfig, PretrainConfig
    from vit_jax.config.parsing import list_field_paths
    from vit_jax.config.synonyms import find_meant_fields

    paths = [*list_field_paths(PretrainConfig), *list_field_paths(FinetuneConfig)]
    known = dict.fromkeys(path.partition(".NAME")[0] for path in paths)

    flags = []
    for field in find_meant_fields(name, known):
        flag = f"--config.{field}"
        if "=" not in flag:  # some have the value that is meant
            flag += "="
        flags.append(flag)
    return flags
