"""Loaded by Python where this folder is on PYTHONPATH: holds a run at its first new checkpoint until a signal comes.

Without it a small run could end before a test has seen the checkpoint and sent the signal.
"""

import os
import pathlib
import time

if folder := os.environ.get("HELD_FOLDER"):
    from vit_jax.train.interruption import Interruption

    before, is_requested = os.environ["HELD_BEFORE"].split(), Interruption.is_requested

    def held(self):
        """Asked after every step, and after every batch of an evaluation."""
        requested = is_requested(self)
        complete = {path.name for path in pathlib.Path(folder, "checkpoints").glob("*") if path.name.isdigit()}
        while complete - set(before) and not self._requested:
            time.sleep(0.05)
        return requested or self._requested

    Interruption.is_requested = held
