"""The part of `--config=FILE:ARGUMENT` after the colon: values by position and by name, rows of a table."""

from collections.abc import Collection
from typing import Any

from vit_jax.config.variants import parse_name
from vit_jax.nearest import did_you_mean


def parse_argument(argument: str, **defaults: Any) -> dict[str, Any]:
    """Reads "ViT-L/16,epochs=14" into the defaults' names and types.

    Values without a name fill the names in the order of `defaults`.
    The type of a default (str, int, float, bool) is that of its value; "" keeps every default.

    Raises:
      ValueError: unknown name, too many values, a name given twice, or a value of another type.
    """
    values: dict[str, Any] = {}
    names, taken = list(defaults), ", ".join(defaults)
    for position, part in enumerate(filter(None, (part.strip() for part in argument.split(",")))):
        name, equals, text = part.partition("=")
        if not equals:
            if position >= len(names):
                raise ValueError(f"{part!r} is one value too many; this recipe takes {taken}.")
            name, text = names[position], part
        if name not in defaults:
            hint = did_you_mean(name, names)
            raise ValueError(f"This recipe has no argument {name!r}.{hint} It takes {taken}.")
        if name in values:
            raise ValueError(f"{argument!r} gives {name} twice; values without a name fill {taken}, in order.")
        values[name] = _convert(name, text, type(defaults[name]))
    return defaults | values


def choose_row(argument: str, rows: Collection[tuple[str, int]]) -> tuple[str, int]:
    """Reads "ViT-L/16,epochs=14" and finds the row of a paper's table that it names.

    A row is a model, which may be given by any of its names, and epochs, needed where the model has several; "" is the
    first row.

    Raises:
      ValueError: the table has no such row, or several.
    """
    chosen = parse_argument(argument, model=next(iter(rows))[0], epochs=0)
    model, epochs = chosen["model"], chosen["epochs"]
    found = [row for row in rows if _is_same_model(row[0], model) and epochs in (row[1], 0)]
    if len(found) == 1:
        return found[0]
    if found:
        lengths = " or ".join(f"epochs={epochs}" for _, epochs in found)
        raise ValueError(f"The paper trained {model} for several lengths: add {lengths}.")
    known = "; ".join(f"{model},epochs={epochs}" for model, epochs in rows)
    raise ValueError(
        f"The paper's table has no row {model}{f',epochs={epochs}' if epochs else ''}. Its rows: {known}. For another "
        "run take the nearest row and override --config.model.name or --config.total."
    )


def _is_same_model(known: str, given: str) -> bool:
    try:
        return parse_name(given) == parse_name(known)
    except ValueError:  # no name at all: the table has no such row either
        return False


def _convert(name: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{name}={text!r}: write true or false.")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not of type {kind.__name__}.") from None
