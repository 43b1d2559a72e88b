"""Two runs never write into one workdir, and a crashed one does not keep it."""

import errno
import json
import os
import subprocess
import sys
import threading

import pytest

from vit_jax.train.lifecycle import lock as locks
from vit_jax.train.lifecycle.lock import FILE, WorkdirLock, WorkdirLost

HOLD = """
import os, pathlib, sys
from vit_jax.train.lifecycle.lock import WorkdirLock
WorkdirLock(pathlib.Path(sys.argv[1])).__enter__()
print("locked", flush=True)
sys.stdin.read()
os._exit(9)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process of this machine that holds the lock."""
    words = [sys.executable, "-c", HOLD, str(tmp_path)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        words,
        stdin=pipe,
        stdout=pipe,
        text=True,
    )

    assert process.stdout.readline() == "locked\n"

    with process:
        yield process
        process.kill()


def change_owner(folder, **changes):
    """Change the facts of a lock's owner."""
    owner = json.loads((folder / FILE).read_text())
    (folder / FILE).write_text(json.dumps(owner | changes))


def test_the_second_run_names_the_first_and_a_crash_leaves_the_workdir_free(tmp_path, holder):
    message = rf"used by another run: process {holder.pid} on .*, since 20"

    with pytest.raises(ValueError, match=message):
        WorkdirLock(tmp_path).__enter__()

    holder.stdin.close()
    assert holder.wait() == 9
    assert (tmp_path / FILE).exists()

    with WorkdirLock(tmp_path) as lock:
        lock.check()
    assert not (tmp_path / FILE).exists()


def test_a_process_with_the_number_of_one_that_has_ended_does_not_count(tmp_path, holder):
    change_owner(tmp_path, started="1")
    with WorkdirLock(tmp_path):
        pass


def test_of_another_machine_it_expires_without_renewal(tmp_path, holder):
    holder.kill()
    change_owner(tmp_path, host="elsewhere")
    lines = []

    with WorkdirLock(tmp_path, say=lines.append, expiry_seconds=0.2) as lock:
        lock.check()

    (line,) = lines
    assert "on elsewhere: waiting up to 0 s" in line


def test_of_another_machine_it_holds_while_it_is_renewed(tmp_path):
    """No one renews a copy of the lock; the owner goes on to renew the first one."""
    file = tmp_path / FILE
    copy = tmp_path / "other"
    copy.mkdir()

    with WorkdirLock(tmp_path, renewal_seconds=0.01):
        while json.loads(file.read_text())["renewals"] < 3:
            pass

        (copy / FILE).write_text(file.read_text())
        change_owner(copy, boot="elsewhere")
        with WorkdirLock(copy, expiry_seconds=0.2, say=lambda line: None):
            pass

        change_owner(tmp_path, boot="elsewhere")
        with pytest.raises(ValueError, match="used by another run"):
            WorkdirLock(tmp_path, expiry_seconds=600, say=lambda line: None).__enter__()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_workdir_that_is_removed_or_replaced_is_noticed(tmp_path, is_replaced):
    folder = tmp_path / "run"
    folder.mkdir()

    with WorkdirLock(folder) as lock:
        lock.check()
        folder.rename(tmp_path / "gone")
        if is_replaced:
            folder.mkdir()

        with pytest.raises(WorkdirLost, match="was removed or replaced"):
            lock.check()

    assert not (folder / FILE).exists()


def test_a_workdir_that_is_taken_over_is_noticed(tmp_path):
    with WorkdirLock(tmp_path) as lock:
        lock.check()
        change_owner(tmp_path, token="another", host="elsewhere")
        message = r"taken over by process \d+ on elsewhere"

        with pytest.raises(WorkdirLost, match=message):
            lock.check()

    assert (tmp_path / FILE).exists(), "the lock of another run stays"


NO_LOCKS = {
    "empty": lambda file: file.write_text(""),
    "a list": lambda file: file.write_text("[]"),
    "incomplete": lambda file: file.write_text('{"token": 1}'),
    "binary": lambda file: file.write_text("\x00\xff"),
    "nested": lambda file: file.write_text("[" * 60_000),
    "with odd values": lambda file: file.write_text(json.dumps(locks._this_process() | ODD)),
    "large": lambda file: [file.touch(), os.truncate(file, 2**40)],
    "pipe": os.mkfifo,
    "device": lambda file: file.symlink_to("/dev/zero"),
    "link to itself": lambda file: file.symlink_to(FILE),
}
ODD = {
    "token": "../../elsewhere",
    "since": "",
    "pid": "x",
    "started": "1",
}


@pytest.mark.parametrize(
    "make",
    NO_LOCKS.values(),
    ids=[name.replace(" ", "_") for name in NO_LOCKS],
)
def test_a_file_that_is_no_lock_is_replaced(tmp_path, make):
    make(tmp_path / FILE)
    with WorkdirLock(tmp_path, expiry_seconds=0.1) as lock:
        lock.check()
        assert [path.name for path in tmp_path.iterdir()] == [FILE]


def race(folder, count):
    """Return the locks that were won by threads that try at one moment, and the errors of the others."""
    start = threading.Barrier(count)
    won = []
    errors = []

    def enter():
        # With the usual expiry: a busy machine may stop a thread for longer than a short one.
        lock = WorkdirLock(folder, say=lambda line: None)
        start.wait()

        try:
            won.append(lock.__enter__())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=enter) for _ in range(count)]
    for thread in threads:
        thread.start()

    for thread in threads:
        thread.join()

    return won, errors


def leave_dead_owners(folder):
    """Leave a lock as after two killed runs, of which one was about to replace the other's lock."""
    path = folder / FILE
    for _ in range(2):
        owner = WorkdirLock(folder)._owner | {"started": "1", "renewals": 0}
        path.write_text(json.dumps(owner))
        path = locks.claim_of(path, path.read_bytes())


def prepare_folder(folder, state):
    folder.mkdir()
    if state == "void":
        leave_dead_owners(folder)
    elif state == "not a lock":
        (folder / FILE).write_text("[]")


@pytest.fixture
def short_turns():
    """Threads take turns within a few statements."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("short_turns")
@pytest.mark.parametrize(
    "links",
    [True, False],
    ids=["hard links", "without hard links"],
)
@pytest.mark.parametrize("state", ["free", "void", "not a lock"])
@pytest.mark.parametrize("count", [2, 5])
def test_of_several_at_one_moment_one_wins(
    tmp_path,
    monkeypatch,
    count,
    state,
    links,
):
    """Neither the winner nor the losers leave other files."""

    def fail(*_, **__):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    if not links:
        monkeypatch.setattr(os, "link", fail)

    for number in range(40):
        folder = tmp_path / str(number)
        prepare_folder(folder, state)

        won, errors = race(folder, count)
        assert len(won) == 1, (won, errors)
        assert all("used by another run" in str(error) for error in errors), errors

        won[0].check()
        assert [path.name for path in folder.iterdir()] == [FILE]

        won[0].__exit__(None, None, None)
        assert list(folder.iterdir()) == []
