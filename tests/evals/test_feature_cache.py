"""Folders of a cache: named when they are complete; unfinished ones of other processes stay."""

import contextlib
import errno
import hashlib
import json
import os
import shutil

import numpy as np
import pytest

from vit_jax.evals.feature_cache import RECORD, STALE_SECONDS, Cache, Entry, write_rows
from vit_jax.storage.files import WriteError
from vit_jax.train.lifecycle.lock import FILE, WorkdirLock, is_abandoned

ROWS = np.arange(12, dtype=np.float32).reshape(6, 2)


def make_entry(cache):
    return Entry(
        folder=cache / "entry",
        about='{"of": 1}',
        files=("a.npy",),
        num_rows=len(ROWS),
        cache=Cache(cache, WorkdirLock, is_abandoned),
    )


def fill(entry, folder, rows=ROWS):
    described = write_rows(
        folder / "a.npy",
        [rows[:4], rows[4:]],
        len(rows),
    )
    entry.write_record(folder, {"a.npy": described})


def write(entry, rows=ROWS):
    with entry.new_folder() as folder:
        fill(entry, folder, rows)


def assert_complete(entry, rows=ROWS):
    """Check that an entry is the only one of its cache, and what it holds."""
    arrays = entry.find()
    assert np.array_equal(arrays["a.npy"], rows)
    assert os.listdir(entry.folder.parent) == ["entry"]


def test_one_name_once_complete(tmp_path):
    """An unfinished entry has a lock; a finished one has the permissions of a shared cache."""
    entry = make_entry(tmp_path / "new/cache")

    assert entry.find() is None

    with entry.new_folder() as folder:
        assert folder.parent == entry.folder.parent
        assert (folder / FILE).exists()

        fill(entry, folder)
        assert entry.find() is None

    assert_complete(entry)
    files = os.listdir(entry.folder)
    mode = entry.folder.stat().st_mode
    assert sorted(files) == ["a.npy", "about.json"]
    assert mode == entry.folder.parent.stat().st_mode


@pytest.mark.parametrize("dtype", [bool, np.uint64, np.float32])
def test_rows_are_an_array_file(tmp_path, dtype):
    rows = ROWS.astype(dtype)

    described = write_rows(
        tmp_path / "a.npy",
        [rows[:1], rows[1:]],
        len(rows),
    )

    found = np.load(tmp_path / "a.npy")
    assert np.array_equal(found, rows)
    assert found.dtype == dtype
    assert described["dtype"] == np.dtype(dtype).name
    assert described["shape"] == [6, 2]


@pytest.mark.parametrize("num_rows", [5, 7])
def test_another_number_of_rows_is_never_published(tmp_path, num_rows):
    def write_other():
        with make_entry(tmp_path).new_folder() as folder:
            write_rows(folder / "a.npy", [ROWS], num_rows)

    with pytest.raises(RuntimeError, match=f"a.npy: 6 of {num_rows} rows"):
        write_other()

    assert os.listdir(tmp_path) == []


def test_rows_of_a_split_that_has_changed_its_length(tmp_path):
    write(make_entry(tmp_path))
    longer = Entry(
        folder=tmp_path / "entry",
        about='{"of": 1}',
        files=("a.npy",),
        num_rows=7,
    )

    with pytest.raises(ValueError, match=r"a.npy has .* shape \(6, 2\)"):
        longer.read(longer.folder)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_another_process_publishes_first(tmp_path, is_damaged):
    """A published entry stays unless it is damaged; an opened entry stays readable."""
    entry = make_entry(tmp_path)
    with entry.new_folder() as folder:
        fill(entry, folder)
        opened = entry.read(folder)["a.npy"]
        write(entry)

        if is_damaged:
            (entry.folder / "a.npy").write_bytes(b"")

        inode = entry.folder.stat().st_ino

    inode_now = entry.folder.stat().st_ino
    assert (inode_now == inode) is not is_damaged
    assert_complete(entry)
    assert np.array_equal(opened, ROWS)


def test_another_process_publishes_between_the_check_and_the_name(tmp_path, monkeypatch):
    entry = make_entry(tmp_path)
    rename = type(tmp_path).rename
    calls = []

    def rename_late(path, target):
        if not calls:
            calls.append(path)
            write(entry)
        return rename(path, target)

    monkeypatch.setattr(type(tmp_path), "rename", rename_late)
    write(entry)

    assert calls
    assert_complete(entry)


def write_array_with_digest(content):
    """Damage of an array file whose record has the digest of the damaged file."""

    def damage(folder):
        (folder / "a.npy").write_bytes(content)
        digest = hashlib.sha256(content)
        path = folder / RECORD
        record = json.loads(path.read_text())
        record["arrays"]["a.npy"]["sha256"] = digest.hexdigest()
        path.write_text(json.dumps(record))

    return damage


def write_nested_record(folder):
    path = folder / RECORD
    path.write_text("[" * 500_000)


def make_array_file(header):
    length = len(header).to_bytes(2, "little")
    return b"\x93NUMPY\x01\0" + length + header


EMPTY_ARCHIVE = b"PK\x05\x06" + bytes(18)
LARGE_SHAPE = b"{'descr': '<f4', 'fortran_order': False, 'shape': (9%s,)}" % (b"9" * 30)
DAMAGE = {
    "nested record": write_nested_record,
    "empty array": write_array_with_digest(b""),
    "archive": write_array_with_digest(EMPTY_ARCHIVE),
    "header that does not end": write_array_with_digest(make_array_file(b"(")),
    "shape that is too large": write_array_with_digest(make_array_file(LARGE_SHAPE)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_no_content_is_an_error(tmp_path, damage):
    entry = make_entry(tmp_path)
    write(entry)
    damage(entry.folder)

    assert entry.find() is None

    write(entry)

    assert_complete(entry)


def make_link(path):
    target = path.parent.with_name("target")
    target.mkdir()
    (target / "kept").touch()
    path.symlink_to(target)


NO_FOLDERS = {
    "file": lambda path: path.touch(),
    "pipe": os.mkfifo,
    "link": make_link,
}


@pytest.mark.parametrize("name", ["entry", ".unfinished_old"])
@pytest.mark.parametrize("make", NO_FOLDERS.values(), ids=NO_FOLDERS)
def test_files_in_the_place_of_folders_are_replaced_or_removed(
    tmp_path,
    make,
    name,
):
    """A pipe is not waited for, and the target of a link stays."""
    cache = tmp_path / "cache"
    cache.mkdir()
    make(cache / name)
    for path in (cache / name, tmp_path / "target"):
        with contextlib.suppress(FileNotFoundError):
            os.utime(path, (0, 0))
    entry = make_entry(cache)

    write(entry)

    assert_complete(entry)
    if make is make_link:
        assert os.listdir(tmp_path / "target") == ["kept"]


def test_a_cache_behind_a_link_is_made(tmp_path):
    link = tmp_path / "link"
    cache = tmp_path / "disk" / "cache"
    link.symlink_to(cache)

    write(make_entry(link))

    assert os.listdir(cache) == ["entry"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_removes_its_folder_alone(tmp_path, error):
    entry = make_entry(tmp_path)
    with entry.new_folder() as others:
        with pytest.raises(error), entry.new_folder():
            raise error

        assert list(tmp_path.iterdir()) == [others]

        fill(entry, others)

    assert_complete(entry)


def test_a_full_disk_publishes_nothing(tmp_path):
    def parts():
        yield ROWS[:4]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        pytest.raises(WriteError, match="entry cannot be written: No space left"),
        make_entry(tmp_path).new_folder() as new,
    ):
        write_rows(new / "a.npy", parts(), len(ROWS))

    assert os.listdir(tmp_path) == []


def test_a_folder_that_was_removed_is_not_published(tmp_path):
    entry = make_entry(tmp_path)
    with pytest.raises(WriteError, match="No such file"), entry.new_folder() as folder:
        shutil.rmtree(folder)

    assert os.listdir(tmp_path) == []


HOUR = 3600
OWNERS = {  # what a lock says of its owner, its age, whether the folder is removed
    "ended here": ({"started": "1"}, 0, True),
    "alive here and suspended": ({}, 48 * HOUR, False),
    "elsewhere, renewed": ({"host": "elsewhere"}, HOUR, False),
    "in another container, renewed": ({"namespace": "pid:[1]"}, HOUR, False),
    "elsewhere, not renewed": ({"host": "elsewhere"}, 25 * HOUR, True),
    "not locked yet": (None, 0, False),
    "never locked": (None, 25 * HOUR, True),
}


@pytest.mark.parametrize(("changes", "age", "is_removed"), OWNERS.values(), ids=OWNERS)
def test_folders_of_processes_that_were_killed(
    tmp_path,
    changes,
    age,
    is_removed,
):
    entry = make_entry(tmp_path)
    left = tmp_path / ".unfinished_0_1_entry"  # also of an earlier version
    left.mkdir()

    with contextlib.ExitStack() as stack:
        if changes is not None:
            lock = WorkdirLock(left, renewal_seconds=10 * HOUR)
            stack.enter_context(lock)
            file = left / FILE
            owner = json.loads(file.read_text())
            file.write_text(json.dumps(owner | changes))

        written = left.stat().st_mtime - age
        for path in (*left.iterdir(), left):
            os.utime(path, (written, written))

        write(entry)

        assert left.exists() is not is_removed

    assert entry.find() is not None
    assert STALE_SECONDS == 24 * HOUR


def test_a_clock_of_the_file_system_that_is_wrong(tmp_path, monkeypatch):
    """Ages are measured by one clock, that of the file system."""
    left = tmp_path / ".unfinished_1"
    left.mkdir()
    monkeypatch.setattr("time.time", lambda: left.stat().st_mtime + 1000 * HOUR)
    write(make_entry(tmp_path))

    assert left.exists()
