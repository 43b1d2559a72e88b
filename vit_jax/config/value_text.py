"""Values of fields from text of the command line."""

import ast
import contextlib
import functools
import typing
from collections.abc import Callable, Mapping
from typing import Any

from vit_jax.config.hints import allows_none, is_list, plain_type

_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def parse_text(text: str, hint: object) -> object:
    """Return a word of the command line in a type, or unchanged where `check_value` rejects it.

    "None" unsets a field that may be unset. A value of any type is written as in Python; all other
    words are text.
    """
    if text == "None" and allows_none(hint):
        return None
    if is_list(hint):
        return _parse_list(text, typing.get_args(hint)[0])

    kind = plain_type(hint)
    if kind is str:
        return text
    if kind is bool:
        return _TRUTH.get(text.lower(), text)

    for read in (ast.literal_eval, float):
        with contextlib.suppress(ValueError, SyntaxError):
            return read(text)
    return text


def parse_override(text: str, hint: object) -> object:
    """Return the value of `--config.field=text`.

    The parsers of ml_collections' config_flags come first, then `parse_text`.
    """
    if hint is Any or is_list(hint) or (text == "None" and allows_none(hint)):
        return parse_text(text, hint)
    parse = _flag_parsers().get(plain_type(hint))
    if parse is not None:
        with contextlib.suppress(TypeError, ValueError):
            return parse(text)
    return parse_text(text, hint)


def _parse_list(text: str, item: object) -> tuple[object, ...]:
    """Return values with commas between them; brackets and quotation marks are optional."""
    words = text.strip().strip("()[]").split(",")
    values = []
    for word in words:
        bare = word.strip().strip("'\"")
        if bare:
            values.append(parse_text(bare, item))
    return tuple(values)


@functools.cache
def _flag_parsers() -> Mapping[object, Callable[[str], object]]:
    """Return the parsers of ml_collections' config_flags by type."""
    # Imported here, because other options and configs made in Python need neither.
    from absl import flags
    from ml_collections.config_flags import tuple_parser

    return {
        bool: flags.BooleanParser().parse,
        float: flags.FloatParser().parse,
        int: flags.IntegerParser().parse,
        str: flags.ArgumentParser().parse,
        tuple: tuple_parser.TupleParser().parse,
    }
