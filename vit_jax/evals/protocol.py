"""What every evaluator has in common. When it runs is not its business."""

from collections.abc import Iterator
from typing import Any, Protocol


class Evaluator(Protocol):
    """Built once with its data; run as often as wanted."""

    def run(self, state: Any) -> Iterator[tuple[str, float]]:
        """Yields the names and values of everything measured on a training state."""
