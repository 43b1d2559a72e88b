"""Columns of tables in tests: one value of every row or object."""


def get_value(row, name):
    """Return an item of a row by its key or position, or an attribute by its dotted name."""
    if isinstance(name, int) or isinstance(row, dict):
        return row[name]

    value = row
    for part in name.split("."):
        value = getattr(value, part)
    return value


def list_column(rows, name):
    """Return the value with this name from each row, in their order."""
    return [get_value(row, name) for row in rows]
