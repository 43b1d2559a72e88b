"""Signals to a run of one process; runs of several are in tests/integration."""

import os
import signal

import pytest

from vit_jax.train.interruption import Interrupted, Interruption


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_noted_after_the_first_step(number):
    with Interruption() as interruption:
        assert not interruption.is_requested()
        os.kill(os.getpid(), number)
        assert interruption.is_requested()


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, Interrupted), (signal.SIGINT, KeyboardInterrupt)])
def test_before_the_first_step_there_is_nothing_to_wait_for(number, error):
    with pytest.raises(error), Interruption():
        os.kill(os.getpid(), number)


def test_a_second_ctrl_c_ends_at_once():
    with Interruption() as interruption:
        interruption.is_requested()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)  # is no second one
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with Interruption():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
