"""The error of a file that cannot be decoded."""


class UnreadableImage(ValueError):
    """A file cannot be opened or decoded; the message says why."""
