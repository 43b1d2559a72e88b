"""The form of a reference to a user's code: the text "package.module:name"."""

import re

_FORM = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_reference(text: object) -> bool:
    """Return whether this is text of the form "package.module:name"."""
    return isinstance(text, str) and _FORM.fullmatch(text) is not None
