"""Names and messages of any origin, made fit for a terminal."""

import re

# Control characters, separators of lines, marks that turn the direction of text, and surrogates.
_UNPRINTABLE = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(name: str) -> str:
    """Return a name on one line with control characters escaped; other Unicode stays unchanged."""
    return _UNPRINTABLE.sub(_escape, name)


def _escape(match: re.Match[str]) -> str:
    return ascii(match[0])[1:-1]


def printable_lines(message: str) -> str:
    """Return a message with control characters escaped and its line breaks kept."""
    return "\n".join(map(printable, message.split("\n")))


def shorten(text: str, most: int) -> str:
    """Return a text with at most this number of characters, and "…" for the others."""
    if len(text) <= most:
        return text
    return f"{text[:most]}…"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that is not blank, or the name of its class."""
    for line in str(error).splitlines():
        if line.strip():
            return line
    return type(error).__name__
