"""A file is replaced completely or stays as it was, and nothing else is left behind; what is read is bounded."""

import os

import pytest

from vit_jax.files import first_line, open_atomically, printable, printable_lines, read_bounded, write_atomically


def test_readers_see_the_old_file_until_the_end(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with open_atomically(str(path)) as file:
        file.write(b"new")
        assert os.path.dirname(file.name) == str(tmp_path)  # the same file system: a rename replaces it in one step
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def test_content_is_on_disk_before_the_name(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append((os.fstat(number).st_size, path.exists())))
    path = tmp_path / "a"
    write_atomically(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    write_atomically(path, "größer\n")
    assert path.read_text("utf-8") == "größer\n"
    assert synced == [(2, False), (9, True)]


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


def test_leftovers_of_a_killed_process_are_no_obstacle(tmp_path):
    (tmp_path / f".a.{os.getpid()}.tmp").write_text("half")
    write_atomically(tmp_path / "a", "new")
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("name", ["missing/a", "folder"])
def test_refusals_of_the_system_are_explained(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/b").touch()
    with pytest.raises(ValueError, match=rf"{name} cannot be written: .*choose an existing folder"):
        write_atomically(tmp_path / name, "x")
    assert os.listdir(tmp_path) == ["folder"]


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5) == b"12345"
    with pytest.raises(ValueError, match="larger than 4 bytes"):
        read_bounded(path, 4)
    (tmp_path / "link").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "."):
        with pytest.raises(ValueError, match="not a regular file"):
            read_bounded(tmp_path / name, 5)
    with pytest.raises(FileNotFoundError):
        read_bounded(tmp_path / "none", 5)


def test_names_have_no_power_over_a_terminal():
    kept = "café 日本\u00a0👩\u200d🚀 cafe\u0301 שלום a\\b"
    assert printable(kept) == kept
    assert printable("\x1b]0;owned\x07\n\r\t\x9b2J\udce9\u2028\u202e") == (
        r"\x1b]0;owned\x07\n\r\t\x9b2J\udce9\u2028\u202e"
    )
    assert printable_lines("a\n\x1b[31m\nb") == "a\n\\x1b[31m\nb"


def test_of_a_long_error_one_line_is_told():
    assert first_line(ValueError(" \n\nDisk full: a\n  Traceback")) == "Disk full: a"
    assert first_line(OSError(" \n")) == first_line(OSError()) == "OSError"
