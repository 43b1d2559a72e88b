"""Loaded by Python where this folder is on PYTHONPATH: holds a run at its first new checkpoint until a signal comes.

Without it a small run could end before a test has seen the checkpoint and sent the signal. Of
several processes JAX's service sees the signal: the file HELD_RELEASE then ends the wait, once it
exists. HELD_CALL=module:function holds another verb after its first call of the function, and makes
HELD_FILE.
"""

import importlib
import itertools
import os
import pathlib
import sys
import threading
import time

if (
    "HELD_FOLDER" in os.environ or "HELD_CALL" in os.environ
):  # what is held imports JAX before the command does this
    from vit_jax.imports.backend import hide_cuda

    hide_cuda(os.environ, pathlib.Path("/"))

if folder := os.environ.get("HELD_FOLDER"):
    from vit_jax.train.lifecycle.interruption import Interruption

    before = os.environ["HELD_BEFORE"].split()
    is_requested = Interruption.is_requested
    release = pathlib.Path(os.environ.get("HELD_RELEASE", os.devnull + "/none"))

    def held(self):
        """Asked after every step, and after every batch of an evaluation."""
        requested = is_requested(self)
        complete = set()
        for path in pathlib.Path(folder, "checkpoints").glob("*"):
            if path.name.isdigit():
                complete.add(path.name)

        while complete - set(before) and not self._requested and not release.exists():
            time.sleep(0.05)
        return requested or self._requested

    Interruption.is_requested = held

if held_call := os.environ.get("HELD_CALL"):
    module, _, name = held_call.partition(":")
    function = getattr(importlib.import_module(module), name)

    calls = itertools.count()

    def is_ending(thread):
        """Return whether a thread waits for a pool of threads to end."""
        frame = sys._current_frames()[thread.ident]
        while frame is not None and frame.f_code.co_name != "shutdown":
            frame = frame.f_back
        return frame is not None

    def hold(*words, **options):
        """Hold the main thread for ever, and others until it ends them; the first calls pass."""
        result = function(*words, **options)
        main = threading.main_thread()
        if next(calls) < int(os.environ.get("HELD_AFTER", 0)):
            return result
        pathlib.Path(os.environ["HELD_FILE"]).touch()
        while threading.current_thread() is main or not is_ending(main):
            time.sleep(0.05)
        return result

    setattr(sys.modules[module], name, hold)
