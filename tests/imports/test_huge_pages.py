"""Commands that train on CPUs ask Linux for huge pages."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from vit_jax.imports import huge_pages

ROOT = Path(__file__).parents[2]
LIST_REQUESTS = """
import json, os, sys
from vit_jax.imports import huge_pages

if sys.argv[1] == "huge":
    huge_pages.use_huge_pages(os.environ)
block = b"x" * (80 * 2**20)
with open("/proc/self/smaps") as mappings:
    flags = [line.split()[1:] for line in mappings if line.startswith("VmFlags:")]
print(json.dumps([sys.argv[1:], any("hg" in words for words in flags)]))
"""
ON_REQUEST = "always [madvise] never"


def find_requests(program, pages):
    """Return the words that a program gets, and whether it asks Linux for huge pages."""
    program.write_text(LIST_REQUESTS)
    environment = {}
    for name, value in os.environ.items():
        if not name.startswith(huge_pages._USER_SETTINGS):
            environment[name] = value
    ended = subprocess.run(
        [sys.executable, program, pages, "more words"],
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
    )
    return json.loads(ended.stdout)


@pytest.mark.skipif(
    not huge_pages._asks_for_pages() or not huge_pages._gives_pages_on_request(Path("/")),
    reason="another allocator, or no huge pages on request",
)
def test_large_blocks_ask_for_huge_pages(tmp_path):
    """The request, not the pages: whether Linux has free ones depends on other processes."""
    command = tmp_path / "vit-jax"

    assert find_requests(command, "huge") == [["huge", "more words"], True]
    assert find_requests(command, "small") == [["small", "more words"], False]


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Return a function that asks for huge pages and returns the commands that replace the process."""
    commands = []

    def run(environment=None, choices=ON_REQUEST):
        if choices is not None:
            setting = tmp_path / huge_pages._LINUX_SETTING
            setting.parent.mkdir(parents=True)
            setting.write_text(choices)
        huge_pages.use_huge_pages(environment or {}, tmp_path)
        return commands

    monkeypatch.setattr(os, "execve", lambda *command: commands.append(command))
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(sys, "executable", "/bin/python")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "vit_jax", "pretrain", "digits"])
    monkeypatch.setattr(sys, "argv", ["/vit_jax/__main__.py", "pretrain", "digits"])
    return run


def test_the_command_stays_the_same(start):
    command = ["/bin/python", "-m", "vit_jax", "pretrain", "digits"]
    ((program, words, environment),) = start({"HOME": "/root"})

    assert program == "/bin/python"
    assert words == command
    assert environment["HOME"] == "/root"
    assert environment["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_of_the_user_stay(start, name):
    assert not start({name: "4"})


@pytest.mark.parametrize("choices", ["[always] madvise never", "always madvise [never]", None])
def test_other_systems_stay_as_they_are(start, choices):
    assert not start(choices=choices)


@pytest.mark.parametrize("library", [("", ""), ("glibc", "2.34"), ("glibc", "2.9.1")])
def test_other_allocators_stay_as_they_are(start, monkeypatch, library):
    monkeypatch.setattr(platform, "libc_ver", lambda: library)

    assert not start()


@pytest.mark.parametrize(
    "options",
    [["-m", "vit_jax"], ["-I", "-m", "vit_jax"], ["/env/bin/vit-jax"], ["-O", "bin/vit-jax"]],
)
def test_the_command_is_replaced(start, monkeypatch, options):
    monkeypatch.setattr(sys, "orig_argv", ["python", *options, "pretrain", "digits"])

    assert len(start()) == 1


@pytest.mark.parametrize(
    "options",
    [
        ["launch.py"],
        ["-c", "read_input(); main()"],
        ["-m", "pdb", "-m", "vit_jax"],
        ["/opt/debugpy", "--connect", "127.0.0.1:5678", "-m", "vit_jax"],
        ["/env/bin/coverage", "run", "-m", "vit_jax"],
        [],
    ],
)
def test_other_programs_run_once(start, monkeypatch, options):
    """Their statements before the command would run again, without the input they read."""
    monkeypatch.setattr(sys, "orig_argv", ["python", *options, "pretrain", "digits"])

    assert not start()


def test_a_program_that_sets_the_words_continues(start, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "vit_jax"])

    assert not start()


def test_a_process_is_replaced_once(start):
    """The loader hides GLIBC_TUNABLES from programs with capabilities."""
    ((_, _, environment),) = start()
    del environment["GLIBC_TUNABLES"]

    assert len(start(environment, choices=None)) == 1


def test_a_forbidden_replacement_leaves_the_process(start, monkeypatch):
    def forbid(*command):
        raise PermissionError

    monkeypatch.setattr(os, "execve", forbid)

    assert not start()
