"""A verb of the command line: its declaration, its words and its help."""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from vit_jax.cli.help_text import find_width, format_help
from vit_jax.cli.options import list_groups, list_options
from vit_jax.cli.outputs import suggest
from vit_jax.cli.words import parse_words, restore_spelling


@dataclasses.dataclass(frozen=True)
class Verb:
    """One verb, called with the words that follow it."""

    declaration: type
    """A class with options as fields and a method `run`."""
    examples: tuple[str, ...]
    appendix: Callable[[int], str] | None = None
    """Returns the end of the help for a number of columns."""

    @functools.cached_property
    def options(self) -> type:
        """The dataclass of the declaration, made on first use: it takes a millisecond."""
        if "__dataclass_fields__" in vars(self.declaration):
            return self.declaration
        return dataclasses.dataclass(frozen=True, kw_only=True)(self.declaration)

    def __call__(self, words: Sequence[str]) -> None:
        spelling = dict[str, str]()
        with restore_spelling(spelling):
            options = parse_words(self.options, words, self.name, spelling).complete(words)
            options.run()
        suggest(options.suggest_next())

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
        """The names of options in the help, without positional words; a group has one."""
        names = []
        for option in list_options(self.options):
            if not option.is_grouped:
                names.append(option.flag.removeprefix("--"))
        for group in list_groups(self.options):
            names.append(f"{group.PREFIX}.FIELD")
        return names

    def help(self, width: int | None = None) -> str:
        """Return the description, every option with its meaning, the examples and the appendix.

        Args:
          width: number of columns; default: the width of the terminal.
        """
        width = width or find_width()
        text = format_help(self.options, self.name, self.examples, width)
        if self.appendix is None:
            return text
        return f"{text}\n{self.appendix(width)}"

    def parse(self, words: Sequence[str]) -> Any:
        """Return the options of these words.

        Raises:
          UsageError: an unknown or missing option, a wrong value, or an option without effect.
        """
        spelling = dict[str, str]()
        with restore_spelling(spelling):
            return parse_words(self.options, words, self.name, spelling)


def verb(*examples: str, appendix: Callable[[int], str] | None = None) -> Callable[[type], Verb]:
    """Make a verb of a class with options as fields and a method `run`.

    The docstring of the class opens the help; `examples` are words after the name of the verb.
    """
    return lambda declaration: Verb(declaration, examples, appendix)
