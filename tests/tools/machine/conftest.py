"""The machine of the tests, without what other programs take of it."""

import pytest

from vit_jax.tools.machine import checks


@pytest.fixture
def enough_memory(monkeypatch):
    """The checks of memory are good, however much other programs use."""
    monkeypatch.setattr(checks, "LEAST_MEMORY_BYTES", 0)
    monkeypatch.setattr(checks, "LEAST_SHARED_BYTES", 0)
