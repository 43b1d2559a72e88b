"""The help of verbs, in the width of the terminal."""

import inspect
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence

from vit_jax.cli.options import (
    Group,
    Option,
    describe_condition,
    list_arguments,
    list_groups,
    list_options,
)

_USUAL_SIZE = (100, 40)  # columns and lines of an output that is no terminal
_LEAST_WIDTH = 40
_MOST_INDENT = 32  # columns before the meaning of an option
_GROUP_TITLE = "Fields of {0}, set by --{0}.FIELD=VALUE in the verbs that take them:"


def find_width() -> int:
    """Return the number of columns of the terminal."""
    columns = shutil.get_terminal_size(_USUAL_SIZE).columns
    return max(_LEAST_WIDTH, columns)


def format_help(kind: type, verb: str, examples: Sequence[str], width: int) -> str:
    """Return usage, description, every word with its meaning, and the examples of a verb.

    Args:
      kind: the dataclass of the verb.
      verb: its name.
      examples: words after the verb.
      width: number of columns.
    """
    blocks = [_format_usage(kind, verb, width)]

    description = inspect.cleandoc(kind.__doc__ or "")
    for paragraph in description.split("\n\n"):
        blocks.append(_fill(paragraph, width))

    entries = _list_entries(kind)
    blocks.append(_format_entries(entries, width))

    commands = ["Examples:"]
    for example in examples:
        commands.append(_fold_command(f"vit-jax {verb} {example}", width))
    blocks.append("\n".join(commands))

    return "\n\n".join(blocks) + "\n"


def format_entry(name: str, meaning: str, width: int, indent: int = _MOST_INDENT) -> str:
    """Return a name with its meaning in a column beside it, or below a longer name."""
    spaces = " " * indent
    lines = _fill(meaning, width, first_indent=spaces, indent=spaces)
    if len(name) > indent - 4:
        return f"  {name}\n{lines}"
    return f"  {name}".ljust(indent) + lines[indent:]


def describe_recipe_fields(width: int) -> str:
    """Return every field of a recipe with its description, type and default."""
    from vit_jax.config.descriptions import read_sections

    parts = ["Fields of a recipe, set by --config.SECTION.FIELD=VALUE:"]
    for section in read_sections():
        parts.append("")
        parts.append(textwrap.fill(f"{section.name}: {section.description}", width))
        for field in section.fields:
            default = "required"
            if field.default is not None:
                default = f"default {field.default}"
            meaning = f"{field.description} [{field.type}; {default}]"
            parts.append(format_entry(section.prefix + field.name, meaning, width))
    return "\n".join(parts)


def describe_group_fields(group: type[Group], width: int) -> str:
    """Return every field of a group of options with its description, form and default."""
    parts = [_fill(_GROUP_TITLE.format(group.PREFIX), width)]
    for option in list_options(group):
        form = option.shown_form or "a switch"
        meaning = f"{option.meaning} [{form}]{_describe_default(option)}"
        parts.append(format_entry(f"{group.PREFIX}.{option.name}", meaning, width))
    return "\n".join(parts)


# Parts of the help.


def _format_usage(kind: type, verb: str, width: int) -> str:
    """Return the words of a verb that are required, or positional."""
    words = [f"usage: vit-jax {verb}"]
    for argument in list_arguments(kind):
        words.append(_name_argument(argument))

    for option in list_options(kind):
        if option.is_required and option.is_positional:
            words.append(option.shown_form)
        elif option.is_required:
            words.append(f"{option.flag} {option.shown_form}")
    words.append("[OPTION …]")

    return _fill(" ".join(words), width, indent=" " * len("usage: "))


def _list_entries(kind: type) -> dict[str, str]:
    """Return the meanings of positional words, options and groups by their names with forms."""
    entries = {}
    for argument in list_arguments(kind):
        meaning = argument.meaning + _describe_default(argument)
        entries[_name_argument(argument)] = meaning

    options = {option.name: option for option in list_options(kind)}
    for option in options.values():
        if not option.is_grouped:
            name = f"{option.flag} {option.shown_form}".rstrip()
            entries[name] = _describe_option(option, options)

    for group in list_groups(kind):
        entries[f"--{group.PREFIX}.FIELD VALUE"] = _describe_group(group)
    return entries


def _format_entries(entries: Mapping[str, str], width: int) -> str:
    """Return all names with their meanings in one column, as narrow as the names allow."""
    longest = max(map(len, entries))
    indent = min(longest + 4, _MOST_INDENT, width // 3)

    lines = []
    for name, meaning in entries.items():
        lines.append(format_entry(name, meaning, width, indent))
    return "\n".join(lines)


def _name_argument(argument: Option) -> str:
    """Return "IMAGE…", or "[PATTERN]" of an optional word."""
    if argument.is_required:
        return argument.form
    return f"[{argument.form}]"


def _describe_option(option: Option, options: Mapping[str, Option]) -> str:
    """Return meaning, conditions and default of an option.

    Args:
      option: an option without a group.
      options: all options of the verb by name.
    """
    meaning = option.meaning
    for rule in option.conditions:
        other = options[rule.field].flag
        condition = describe_condition(rule, other, excluded="not with", needed="needs")
        meaning += f"; {condition}"
    return meaning + _describe_default(option)


def _describe_default(option: Option) -> str:
    """Return " (default: 3)"; "" of an option that is unset by default."""
    default = option.default
    if type(default) is float:
        return f" (default: {default:g})"
    if type(default) is int or (type(default) is str and default):
        return f" (default: {default})"
    return ""


def _describe_group(group: type[Group]) -> str:
    """Return the first line of a group's docstring and the names of its fields."""
    docstring = inspect.cleandoc(group.__doc__ or "")
    title = docstring.partition("\n")[0].rstrip(".")
    title = title[0].lower() + title[1:]
    names = ", ".join(option.name for option in list_options(group))
    return f"{title} (`vit-jax show --help`): {names}"


# Lines.


def _fill(text: str, width: int, *, first_indent: str = "", indent: str = "") -> str:
    """Return a paragraph in lines of this width; names with hyphens are not broken."""
    return textwrap.fill(
        text,
        width,
        initial_indent=first_indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )


def _fold_command(command: str, width: int) -> str:
    """Return a command in lines of this width, with backslashes before line breaks."""
    lines = [" "]
    indent = " " * 5
    for word in re.findall(r"(?:'[^']*'|\S)+", command):
        if len(lines[-1]) + len(word) + len("  \\") > width:
            lines[-1] += " \\"
            lines.append(indent)
        lines[-1] += f" {word}"
    return "\n".join(lines)
