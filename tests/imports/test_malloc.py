"""Commands that train on CPUs get huge pages, which cause few page faults."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from vit_jax.imports import malloc

ROOT = Path(__file__).parents[2]
COUNT_FAULTS = """
import json, os, resource, sys
from vit_jax.imports import malloc

if sys.argv[1] == "huge":
    malloc.use_huge_pages(os.environ)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
b"x" * (80 * 2**20)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(json.dumps([sys.argv[1:], faults]))
"""
ON_REQUEST = "always [madvise] never"


def count_faults(pages):
    """Return the words that a process gets, and the page faults of a large block in it."""
    environment = {}
    for name, value in os.environ.items():
        if not name.startswith(malloc._USER_SETTINGS):
            environment[name] = value
    ended = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS, pages, "more words"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        check=True,
    )
    return json.loads(ended.stdout)


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not malloc._gives_pages_on_request(Path("/")),
    reason="another allocator, or no huge pages on request",
)
def test_huge_pages_cause_few_faults():
    words, faults = count_faults("huge")
    _, faults_of_small_pages = count_faults("small")

    assert words == ["huge", "more words"]
    assert faults < faults_of_small_pages / 10


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Return a function that asks for huge pages and returns the commands that replace the process."""
    commands = []

    def run(environment=None, choices=ON_REQUEST):
        if choices is not None:
            setting = tmp_path / malloc._LINUX_SETTING
            setting.parent.mkdir(parents=True)
            setting.write_text(choices)
        malloc.use_huge_pages(environment or {}, tmp_path)
        return commands

    monkeypatch.setattr(os, "execve", lambda *command: commands.append(command))
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(sys, "executable", "/bin/python")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "vit_jax", "pretrain", "digits"])
    monkeypatch.setattr(sys, "argv", ["/vit_jax/__main__.py", "pretrain", "digits"])
    return run


def test_the_command_stays_the_same(start):
    command = ["/bin/python", "-m", "vit_jax", "pretrain", "digits"]
    environment = {"HOME": "/root", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

    assert start({"HOME": "/root"}) == [("/bin/python", command, environment)]


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_of_the_user_stay(start, name):
    assert not start({name: "4"})


@pytest.mark.parametrize("choices", ["[always] madvise never", "always madvise [never]", None])
def test_other_systems_stay_as_they_are(start, choices):
    assert not start(choices=choices)


def test_other_allocators_stay_as_they_are(start, monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))

    assert not start()


def test_a_program_that_sets_the_words_continues(start, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "program.py"])

    assert not start()
