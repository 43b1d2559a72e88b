"""Two runs never write into one workdir, and a crashed one does not keep it."""

import json
import os
import subprocess
import sys

import pytest

from vit_jax.train.lock import FILE, WorkdirLock, WorkdirLost

HOLD = """
import os, pathlib, sys
from vit_jax.train.lock import WorkdirLock
WorkdirLock(pathlib.Path(sys.argv[1])).__enter__()
print("locked", flush=True)
sys.stdin.read()
os._exit(9)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process of this machine that holds the lock."""
    words, pipe = [sys.executable, "-c", HOLD, str(tmp_path)], subprocess.PIPE
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout.readline() == "locked\n"
    with process:
        yield process
        process.kill()


def pretend(folder, **changes):
    """Changes what the lock says of its owner."""
    owner = json.loads((folder / FILE).read_text())
    (folder / FILE).write_text(json.dumps(owner | changes))


def test_the_second_run_says_who_has_it_and_a_crash_leaves_it_free(tmp_path, holder):
    with pytest.raises(ValueError, match=rf"used by another run: process {holder.pid} on .*, since 20"):
        WorkdirLock(tmp_path).__enter__()
    holder.stdin.close()
    assert holder.wait() == 9
    assert (tmp_path / FILE).exists()
    with WorkdirLock(tmp_path) as lock:
        lock.check()
    assert not (tmp_path / FILE).exists()


def test_a_process_with_the_number_of_one_that_has_ended_does_not_count(tmp_path, holder):
    pretend(tmp_path, started="1")
    with WorkdirLock(tmp_path):
        pass


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.write_text("[" * 10_000)], ids=["pipe", "deep"])
def test_a_lock_that_nobody_wrote_does_not_count(tmp_path, make):
    make(tmp_path / FILE)
    with WorkdirLock(tmp_path) as lock:
        lock.check()


def test_of_another_machine_it_expires_without_renewal(tmp_path, holder):
    holder.kill()
    pretend(tmp_path, host="elsewhere")
    lines = []
    with WorkdirLock(tmp_path, say=lines.append, expiry_seconds=0.2) as lock:
        lock.check()
    (line,) = lines
    assert "on elsewhere: waiting up to 0 s" in line


def test_of_another_machine_it_holds_while_it_is_renewed(tmp_path):
    with WorkdirLock(tmp_path, renewal_seconds=0.01):
        text = (tmp_path / FILE).read_text
        while json.loads(text())["renewals"] < 3:
            pass
        other = tmp_path / "other"
        other.mkdir()
        (other / FILE).write_text(text())
        pretend(other, boot="elsewhere")
        with WorkdirLock(other, expiry_seconds=0.2, say=lambda line: None):
            pass  # no one renews the copy
        pretend(tmp_path, boot="elsewhere")  # and its owner goes on to renew it
        with pytest.raises(ValueError, match="used by another run"):
            WorkdirLock(tmp_path, expiry_seconds=600, say=lambda line: None).__enter__()


@pytest.mark.parametrize("loss", ["removed", "replaced", "taken over"])
def test_a_workdir_that_is_lost_is_noticed(tmp_path, loss):
    folder = tmp_path / "run"
    folder.mkdir()
    with WorkdirLock(folder) as lock:
        lock.check()
        if loss == "taken over":
            pretend(folder, token="another", host="elsewhere")
        else:
            folder.rename(tmp_path / "gone")
        if loss == "replaced":
            folder.mkdir()
        message = r"taken over by process \d+ on elsewhere" if loss == "taken over" else "was removed or replaced"
        with pytest.raises(WorkdirLost, match=message):
            lock.check()
    assert (folder / FILE).exists() is (loss == "taken over"), "the lock of another is left alone"


@pytest.mark.parametrize("content", ["", "[]", '{"token": 1}', "\x00\xff"])
def test_a_file_that_is_no_lock_is_replaced(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    with WorkdirLock(tmp_path) as lock:
        lock.check()
