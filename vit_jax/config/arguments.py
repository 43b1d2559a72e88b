"""The argument of a recipe, `--config=FILE:ARGUMENT`: values by position or name, or a row."""

from collections.abc import Collection
from typing import Any

from vit_jax.config.parsing import check_value
from vit_jax.config.value_text import parse_text
from vit_jax.config.variants import parse_name
from vit_jax.text.nearest import did_you_mean


def parse_argument(argument: str, **defaults: Any) -> dict[str, Any]:
    """Read "ViT-L/16,epochs=14" into the names and types of the defaults.

    Values without a name fill the names in the order of `defaults`.
    The type of a default (str, int, float, bool) is that of its value; "" keeps every default.

    Raises:
      ValueError: unknown name, too many values, a name twice, or a value of another type.
    """
    values: dict[str, Any] = {}
    names = list(defaults)
    taken = ", ".join(defaults)
    words = filter(None, map(str.strip, argument.split(",")))
    for position, word in enumerate(words):
        name, equals, text = word.partition("=")
        if not equals:
            if position >= len(names):
                raise ValueError(f"{word!r}: is one value too many. This recipe takes {taken}.")
            name = names[position]
            text = word
        if name not in defaults:
            hint = did_you_mean(name, names)
            raise ValueError(f"{name!r}: must be one of the recipe's arguments: {taken}.{hint}")
        if name in values:
            raise ValueError(
                f"{argument!r}: must not set {name} twice. "
                f"Values without a name fill {taken}, in order."
            )
        kind = type(defaults[name])
        values[name] = check_value(name, parse_text(text, kind), kind)
    return defaults | values


def require_known(argument: str, value: str, known: Collection[str]) -> None:
    """Raise ValueError, which quotes the argument as it was given, unless its value is known."""
    if value not in known:
        raise ValueError(f"{argument}: must be one of {', '.join(known)}.")


def choose_row(argument: str, rows: Collection[tuple[str, int]]) -> tuple[str, int]:
    """Return the row of a paper's table that "ViT-L/16,epochs=14" names.

    A row is a model, by any of its names, and epochs, which a model with several rows needs; "" is
    the first row.

    Raises:
      ValueError: the table has no such row, or several.
    """
    first_model, _ = next(iter(rows))
    values = parse_argument(argument, model=first_model, epochs=0)
    model = values["model"]
    epochs = values["epochs"]
    matches = []
    for row in rows:
        if _is_same_model(row[0], model) and epochs in (row[1], 0):
            matches.append(row)
    if len(matches) == 1:
        return matches[0]
    if matches:
        lengths = " or ".join(f"epochs={epochs}" for _, epochs in matches)
        raise ValueError(
            f"model={model}: must have a length, as the paper has several. Add {lengths}."
        )

    text = model
    if epochs:
        text = f"{model},epochs={epochs}"
    known = "; ".join(map("{0[0]},epochs={0[1]}".format, rows))
    raise ValueError(
        f"{text}: must be a row of the paper's table: {known}. "
        "Or override --config.model.name, total."
    )


def _is_same_model(known: str, name: str) -> bool:
    try:
        return parse_name(name) == parse_name(known)
    except ValueError:  # not a name of a model
        return False
