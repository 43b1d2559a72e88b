"""A file is replaced completely or stays as it was, and reads are bounded."""

import io
import os
import secrets
import socket
import stat
import subprocess
import sys
import threading

import pytest

from tests.rejections import rejects
from tests.tiny import ROOT
from vit_jax.storage.files import (
    MAX_JSON_DEPTH,
    WriteError,
    make_folder,
    open_atomically,
    parse_json,
    read_bounded,
    read_json,
    read_lines,
    read_range,
    write_atomically,
)


def test_readers_see_the_old_file_until_the_end(tmp_path):
    """A temporary file on the same file system replaces the file in one step by a rename."""
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    with open_atomically(str(path)) as file:
        file.write(b"new")
        assert os.path.dirname(file.name) == str(tmp_path)
        assert path.read_bytes() == b"old"

    assert path.read_bytes() == b"new"


def test_content_is_on_disk_before_the_name(tmp_path, monkeypatch):
    path = tmp_path / "a"
    synced = []

    def fsync(number):
        synced.append((os.fstat(number).st_size, path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)

    write_atomically(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"

    write_atomically(path, "größer\n")
    assert path.read_text("utf-8") == "größer\n"
    assert synced == [
        (2, False),
        (9, True),
    ]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_leaves_the_file_as_it_was(tmp_path, error):
    path = tmp_path / "a"
    path.write_text("old")

    def fail():
        with open_atomically(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        fail()

    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_temporary_names_are_never_shared(tmp_path, monkeypatch):
    """Processes of two containers have equal numbers: a name that exists belongs to another process."""
    tokens = iter(["11", "11", "22"])
    monkeypatch.setattr(secrets, "token_hex", lambda *_: next(tokens))

    path = tmp_path / "a"
    with open_atomically(path) as file:
        file.write(b"first")
        with (
            pytest.raises(WriteError, match="File exists"),
            open_atomically(path),
        ):
            pass

        write_atomically(path, "second")

    assert path.read_text() == "first"
    assert os.listdir(tmp_path) == ["a"]


def test_a_new_file_has_the_usual_permissions(tmp_path):
    usual = tmp_path / "usual"
    written = tmp_path / "a"

    usual.touch()
    write_atomically(written, "x")

    assert written.stat().st_mode == usual.stat().st_mode


def test_a_long_name_can_be_written(tmp_path):
    name = "é" * 127

    write_atomically(tmp_path / name, "x")

    assert len(os.listdir(tmp_path)) == 1


@pytest.mark.parametrize("existing", [True, False])
def test_a_link_stays_and_its_target_is_written(tmp_path, existing):
    folder = tmp_path / "folder"
    folder.mkdir()
    target = folder / "target"
    relative = folder / "relative"
    link = tmp_path / "link"

    if existing:
        target.write_text("old")

    relative.symlink_to("target")
    link.symlink_to(relative)

    with open_atomically(link) as file:
        file.write(b"new")
        assert os.path.dirname(file.name) == str(folder)

    assert target.read_text() == "new"
    assert not target.is_symlink()
    assert link.is_symlink()
    assert relative.is_symlink()
    assert sorted(os.listdir(folder)) == ["relative", "target"]


def test_links_in_a_circle_are_rejected(tmp_path):
    first = tmp_path / "a"
    first.symlink_to("b")
    (tmp_path / "b").symlink_to("a")

    with rejects(str(first), "Too many levels of symbolic links"):
        write_atomically(first, "x")

    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_pipe_is_written_into(tmp_path):
    """Larger than a pipe holds, through a link, and with a position that is moved back."""
    pipe = tmp_path / "pipe"
    found = []
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to("pipe")
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # a reader, before anything is written
    os.set_blocking(end, True)

    with os.fdopen(end, "rb") as reader:

        def read_all():
            found.append(reader.read())

        thread = threading.Thread(target=read_all)
        with open_atomically(tmp_path / "link") as file:
            thread.start()
            file.write(bytes(200_000))
            file.seek(0)
            file.write(b"begin")

        thread.join()

    assert found == [b"begin" + bytes(199_995)]
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


def test_an_error_writes_nothing_into_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(end, "rb") as reader:
        with pytest.raises(TypeError), open_atomically(pipe) as file:
            file.writelines([b"half", "no bytes"])

        assert reader.read() == b""


def test_a_device_stays_a_device(tmp_path):
    device = tmp_path / "null"
    dev_null = os.makedev(1, 3)
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, dev_null)
        device.write_bytes(b"")
    except PermissionError:
        pytest.skip("only root can create devices, and only on some file systems")

    (tmp_path / "link").symlink_to("null")
    for name in ("null", "link"):
        write_atomically(tmp_path / name, "x")

    assert stat.S_ISCHR(device.lstat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["link", "null"]


def test_what_cannot_be_a_file_is_rejected(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()  # empty: a rename would replace a link to it
    (tmp_path / "link").symlink_to("folder")
    monkeypatch.chdir(tmp_path)  # a socket's path has at most 108 bytes

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        problems = {
            "pipe": "no program reads this pipe",
            "link": "Is a directory",
            "socket": "it is a socket",
        }

        for name, problem in problems.items():
            path = tmp_path / name
            with rejects(str(path), problem), open_atomically(path):
                raise AssertionError("rejected before the content is computed")

    status = (tmp_path / "socket").lstat()
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", "pipe", "socket"]
    assert stat.S_ISSOCK(status.st_mode)


PRINT = r"""
import os, sys
from vit_jax.storage.files import write_atomically
print("before")
write_atomically(sys.argv[1], "content\n")
print("after", flush=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["pipe", "file", "terminal"])
def test_standard_output_of_any_kind(tmp_path, kind):
    """Through a link as /dev/stdout, in order with what the process prints."""
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")
    (tmp_path / "file").write_text("kept\n")

    if kind == "terminal":
        reading, writing = os.openpty()
    elif kind == "pipe":
        reading, writing = os.pipe()
    else:
        file = tmp_path / "file"
        reading = os.open(file, os.O_RDONLY)
        writing = os.open(file, os.O_WRONLY | os.O_APPEND)

    subprocess.run(
        [sys.executable, "-c", PRINT, str(tmp_path / "stdout")],
        cwd=ROOT,
        stdout=writing,
        check=True,
    )
    output = os.read(reading, 1000).decode()
    printed = output.replace("\r\n", "\n")

    kept = "kept\n" if kind == "file" else ""
    assert printed == f"{kept}before\ncontent\nafter\n"
    assert sorted(os.listdir(tmp_path)) == ["file", "stdout"]

    for descriptor in (reading, writing):
        os.close(descriptor)


def test_a_folder_is_made_where_a_link_leads(tmp_path):
    link = tmp_path / "link"
    link.symlink_to("target")
    with make_folder(link):
        write_atomically(link / "a", "x")

    assert (tmp_path / "target/a").read_text() == "x"
    assert link.is_symlink()
    with pytest.raises(KeyError), make_folder(link):
        raise KeyError

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with rejects(str(pipe), "it is not a folder"), make_folder(pipe):
        pass

    assert stat.S_ISFIFO(pipe.lstat().st_mode)


@pytest.mark.parametrize("name", ["missing/a", "folder"])
def test_refusals_of_the_system_are_explained(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/b").touch()

    message = rf"{name} cannot be written: .*choose a path in an existing folder"
    with pytest.raises(ValueError, match=message):
        write_atomically(tmp_path / name, "x")

    assert os.listdir(tmp_path) == ["folder"]


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"12345")

    assert read_bounded(path, 5) == b"12345"
    assert read_range(path, 1, 3) == b"234"
    assert read_range(path, 1, -1) == b""
    with pytest.raises(ValueError, match="larger than 4 bytes"):
        read_bounded(path, 4)

    with pytest.raises(FileNotFoundError):
        read_bounded(tmp_path / "none", 5)

    sparse = tmp_path / "sparse"
    with open(sparse, "wb") as file:
        file.truncate(60 * 10**9)

    with rejects("", "larger than 5 bytes"):
        read_bounded(sparse, 5)

    # It states a size of 0.
    content = read_bounded("/proc/self/stat", 4096)
    assert content.startswith(f"{os.getpid()} ".encode())
    with rejects("", "larger than 5 bytes"):
        read_bounded("/proc/self/stat", 5)


def test_only_regular_files_are_read(tmp_path):
    link = tmp_path / "link"
    pipe = tmp_path / "pipe"
    link.symlink_to("/dev/zero")
    os.mkfifo(pipe)

    for path in (link, pipe, tmp_path):
        with pytest.raises(ValueError, match="not a regular file"):
            read_bounded(path, 5)


def test_a_file_that_is_replaced_by_a_pipe_is_not_waited_for(tmp_path, monkeypatch):
    path = tmp_path / "pipe"
    regular = os.stat(__file__)
    os.mkfifo(path)
    monkeypatch.setattr(os, "stat", lambda _: regular)  # the status before it was replaced

    with rejects("", "not a regular file"):
        read_bounded(path, 5)


def nest_lists(depth):
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "not JSON"),
        (b'{"a": ', "not JSON"),
        (b"\xff", "not JSON"),
        (b"\x00", "not JSON"),
        (b"1" * 5000, "limit"),
        (nest_lists(10_000), "deeper than 64"),
        (nest_lists(66), "deeper than 64"),
        (b'"%s"' % bytes(2**15), "larger than 32,768 bytes"),
    ],
    ids=[
        "empty",
        "cut",
        "not_text",
        "nul",
        "long_number",
        "deep",
        "a_level_too_deep",
        "large",
    ],
)
def test_what_is_no_json_is_one_error(tmp_path, content, rule):
    path = tmp_path / "a.json"
    path.write_bytes(content)

    with rejects("a.json", rule):
        read_json(path, 2**15)


def test_json_of_the_greatest_depth():
    text = "[" * MAX_JSON_DEPTH + "0" + "]" * MAX_JSON_DEPTH
    assert repr(parse_json(text)) == text
    assert parse_json("\ufeff[1, NaN]".encode())[0] == 1


def test_lines_are_bounded():
    lines = read_lines(io.BytesIO(b"ab\n\nc"), 3)
    assert list(lines) == [b"ab\n", b"\n", b"c"]
    with rejects("line 2", "longer than 3 characters"):
        list(read_lines(io.StringIO("ab\nabcd"), 3))
