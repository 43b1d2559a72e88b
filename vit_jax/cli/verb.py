"""A verb: a function with the table of its arguments and examples, of which its words are read and its help is made."""

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence

from vit_jax.cli.words import Given, split

_WIDTH = 120
_INDENT = 32  # of what an argument means
ALLOW_CODE = {"[--allow_code=PACKAGE,…]": "run code of these packages where the weights name it; none by default"}
RECIPE = {
    "--config=RECIPE[:ARGUMENT]": "a file (configs/digits.py), or a recipe that is installed (digits)",
    "[--config.SECTION.FIELD=VALUE]": "changes a value of the recipe; `vit-jax show --help` describes all fields",
    **ALLOW_CODE,
}
SHARE = {
    "[--index=I]": "of this machine, from 0, among those that divide the runs",
    "[--count=N]": "of these machines",
}


@dataclasses.dataclass(frozen=True)
class Verb:
    """One verb; called with the words that follow it."""

    run: Callable[[Given], None]
    arguments: Mapping[str, str]  # meaning by form, which `split` explains
    examples: tuple[str, ...]
    appendix: Callable[[], str] | None = None  # returns the end of the help

    def __call__(self, words: Sequence[str]) -> None:
        self.run(split(words, self.arguments, self.name))

    @property
    def name(self) -> str:
        return self.run.__name__.replace("_", "-")

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return self._description()[0]

    def help(self) -> str:
        """Return the description, every argument with its meaning, the examples and the appendix."""
        shown = [form for form in self.arguments if not form.startswith("[--")]
        optional = ["[OPTION …]"] if len(shown) < len(self.arguments) else []
        arguments = (entry(form, meaning) for form, meaning in self.arguments.items())
        examples = (f"  vit-jax {self.name} {example}" for example in self.examples)
        usage = " ".join(["vit-jax", self.name, *shown, *optional])
        text = "\n".join((usage, "", *self._description(), "", *arguments, "", "Examples:", *examples, ""))
        return f"{text}\n{self.appendix()}" if self.appendix else text

    def _description(self) -> list[str]:
        return inspect.cleandoc(self.run.__doc__ or "").splitlines()


def verb(
    arguments: Mapping[str, str], *examples: str, appendix: Callable[[], str] | None = None
) -> Callable[[Callable[[Given], None]], Verb]:
    """Make a verb of a function; its docstring opens the help, the text that `appendix` returns ends it."""
    return lambda run: Verb(run, arguments, examples, appendix)


def fields_of_recipes() -> str:
    """Return every field of the schema with its description, type and default."""
    from vit_jax.config.descriptions import read_sections

    parts = ["Fields of a recipe, set by --config.SECTION.FIELD=VALUE:"]
    for section in read_sections():
        parts += ["", textwrap.fill(f"{section.name}: {section.description}", _WIDTH)]
        for field in section.fields:
            default = "required" if field.default is None else f"default {field.default}"
            parts.append(entry(section.prefix + field.name, f"{field.description} [{field.type}; {default}]"))
    return "\n".join([*parts, ""])


def entry(form: str, meaning: str) -> str:
    """Return an argument with its meaning in a column beside it, or below a longer name."""
    name = form[1:-1] if form.startswith("[") else form
    indent = " " * _INDENT
    lines = textwrap.fill(meaning, _WIDTH, initial_indent=indent, subsequent_indent=indent)
    return f"  {name}\n{lines}" if len(name) > _INDENT - 4 else f"  {name}".ljust(_INDENT) + lines[_INDENT:]
