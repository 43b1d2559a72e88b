"""Freed memory stays with the process: large blocks cause page faults once, in any thread."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from vit_jax.imports import malloc

ROOT = Path(__file__).parents[2]
SMALL = 100 * malloc.MIB
"""Temporary memory of a step for which freed memory is kept."""
# Blocks of 80 MiB are larger than the arena of a thread can be.
COUNT_FAULTS = """
import json, resource, sys, threading
from vit_jax.imports import malloc

if sys.argv[1] == "prepared":
    malloc.use_one_arena({})
keeps = malloc.keep_freed_memory(int(sys.argv[2]))
faults = []

def allocate():
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        b"x" * (80 * 2**20)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=allocate)
thread.start()
thread.join()
print(json.dumps([keeps, faults]))
"""

with_glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc",
    reason="another allocator",
)


def count_faults(start, temporary_bytes):
    """Return True if freed memory is kept, and the page faults of each of four large blocks."""
    ended = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS, start, str(temporary_bytes)],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    return json.loads(ended.stdout)


@with_glibc
def test_the_memory_of_steps_is_cleared_once():
    keeps, faults = count_faults("prepared", SMALL)

    assert keeps
    assert max(faults[1:]) < faults[0] / 10


@with_glibc
@pytest.mark.parametrize(
    ("start", "temporary_bytes"),
    [
        ("default", SMALL),
        ("prepared", malloc.LARGEST_STEP + 1),
        ("prepared", malloc.SMALLEST_STEP),
    ],
)
def test_other_steps_and_processes_return_it_to_the_system(start, temporary_bytes):
    keeps, faults = count_faults(start, temporary_bytes)

    assert not keeps
    assert min(faults) > 0.9 * faults[0]


@pytest.fixture
def settings(monkeypatch):
    """The values that glibc would get in a process that has not called `use_one_arena`."""
    values = {}

    def store(parameter, value):
        values[parameter] = value
        return True

    monkeypatch.setattr(malloc, "_set", store)
    monkeypatch.setattr(malloc, "_has_one_arena", False)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    return values


def test_there_are_three_settings(settings):
    malloc.use_one_arena({"HOME": "/root"})

    assert malloc.keep_freed_memory(SMALL)
    assert settings == {-8: 1, -4: 0, -1: -1}


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_of_the_user_stay(settings, name):
    malloc.use_one_arena({name: "4"})

    assert not malloc.keep_freed_memory(SMALL)
    assert not settings


def test_other_allocators_stay_as_they_are(settings, monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    malloc.use_one_arena({})

    assert not malloc.keep_freed_memory(SMALL)
    assert not settings
