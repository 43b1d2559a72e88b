"""Signals to a run of one process; runs of several are in tests/integration."""

import os
import re
import signal
import subprocess
import sys

import pytest

from vit_jax.train.lifecycle.interruption import Interruption


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_noted_after_the_first_step(number):
    before = signal.getsignal(number)
    with Interruption() as interruption:
        assert not interruption.is_requested()
        os.kill(os.getpid(), number)
        assert interruption.is_requested()

    assert signal.getsignal(number) == before


def test_before_the_first_step_ctrl_c_has_nothing_to_wait_for():
    with pytest.raises(KeyboardInterrupt), Interruption():
        os.kill(os.getpid(), signal.SIGINT)


IN_A_CALLBACK = """
import gc, os, signal
from vit_jax.imports.backend import forbid_cuda
forbid_cuda()  # its plugin prints lines where there is no GPU
from vit_jax.train.lifecycle.interruption import Interruption

with Interruption():
    gc.callbacks.append(lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    gc.collect()
print("was not ended")
"""


def test_before_the_first_step_sigterm_ends_it_wherever_python_is():
    """Python prints and forgets an exception in a callback of the garbage collector; JAX has one."""
    result = subprocess.run(
        [sys.executable, "-c", IN_A_CALLBACK],
        capture_output=True,
        text=True,
        timeout=600,
    )

    assert (result.returncode, result.stdout) == (75, "")
    assert re.fullmatch(
        "vit-jax: stopped before the first step: there is nothing to save; .*\n",
        result.stderr,
    )


def test_a_second_ctrl_c_ends_at_once():
    with Interruption() as interruption:
        interruption.is_requested()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)  # is no second one

        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
