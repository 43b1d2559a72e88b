"""When something periodic is due. The only place where steps are compared with intervals."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Cadence:
    """Due after every `every` steps and after the last one.

    Attributes:
      every: interval in steps, at least 1.
      last: total steps of the run.
    """

    every: int
    last: int

    def is_due(self, step: int) -> bool:
        """Args: step: steps done so far; 0 is never due."""
        return step > 0 and (step % self.every == 0 or step == self.last)
