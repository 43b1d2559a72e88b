"""The errors of files that cannot be decoded, and of images of other bands."""

from collections.abc import Sequence


class UnreadableImage(ValueError):
    """A file cannot be opened or decoded; the message says why."""


class WrongBands(ValueError):
    """An image has other bands than the run wants."""


def require_numbers(numbers: Sequence[int], num_bands: int) -> None:
    """Raise WrongBands for numbers of bands, counted from 1, beyond the last one."""
    last = max(numbers)
    if last > num_bands:
        raise WrongBands(
            f"it has {spell_bands(num_bands)}, and input.bands={tuple(numbers)} wants band "
            f"{last}. Choose bands from 1 to {num_bands}."
        )


def spell_bands(number: int) -> str:
    """Return a number with its noun."""
    return f"{number} band" if number == 1 else f"{number} bands"
