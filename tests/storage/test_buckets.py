import contextlib
import errno
import io
import os
import stat

import pytest

from tests import gcs
from vit_jax.storage import buckets, files, gcs_client
from vit_jax.storage.buckets import BucketPath

ROOT = f"gs://{gcs.BUCKET}"


@pytest.fixture
def folder(bucket_folder):
    return bucket_folder


@pytest.fixture
def fast(monkeypatch):
    """Time limits of a second, and pauses of hundredths."""
    retry = pytest.importorskip("google.cloud.storage.retry")
    monkeypatch.setattr(retry, "DEFAULT_RETRY", retry.DEFAULT_RETRY.with_delay(0.01, 0.05))
    monkeypatch.setattr(gcs_client, "TIMEOUT_SECONDS", (1.0, 0.5))
    monkeypatch.setattr(gcs_client, "RETRY_SECONDS", 1.0)


def test_a_path_is_pathlibs_with_the_scheme_kept():
    path = BucketPath("gs://b/runs/a")
    expected = ("gs://b/runs/a", "gs://b/runs/a/x.json", "a")

    assert (str(path), os.fspath(path / "x.json"), path.name) == expected
    assert (str(path.parent), path.bucket, path.key) == ("gs://b/runs", "b", "runs/a")
    assert path.with_name("c") == BucketPath("gs://b/runs/c")
    assert (path / "x").relative_to(path).parts == ("x",)
    assert isinstance(path.with_suffix(".x"), BucketPath)
    assert path.absolute() is path
    assert len({path, BucketPath("gs://b/runs//a/")}) == 1


def test_files_and_folders(folder):
    assert not folder.exists()
    assert not list(folder.iterdir())

    files.write_atomically(folder / "a" / "one.json", '{"x": 1}')
    files.write_atomically(folder / "a" / "b" / "two.txt", b"two")

    assert files.read_json(folder / "a" / "one.json") == {"x": 1}

    expected = [True, False, True]
    assert [
        folder.is_dir(),
        (folder / "a/one.json").is_dir(),
        (folder / "a/one.json").is_file(),
    ] == expected
    assert [path.name for path in (folder / "a").iterdir()] == ["one.json", "b"]
    assert list(folder.glob("a/*.json")) == [folder / "a" / "one.json"]
    assert [path.name for path in folder.rglob("*.txt")] == ["two.txt"]

    found = (folder / "a" / "b" / "two.txt").stat()
    assert (stat.S_ISREG(found.st_mode), found.st_size) == (True, 3)

    moved = (folder / "a").rename(folder / "c")
    assert ((moved / "b" / "two.txt").read_bytes(), (folder / "a").exists()) == (b"two", False)

    files.remove_tree(folder)
    assert not folder.exists()


def test_a_write_with_a_precondition_replaces_only_what_it_names(folder):
    path = folder / "object"
    first = path.write_bytes(b"one", 0)

    with pytest.raises(FileExistsError, match="another process"):
        path.write_bytes(b"two", 0)

    second = path.write_bytes(b"two", first)
    with pytest.raises(FileExistsError, match="another process"):
        path.write_bytes(b"three", first)

    assert path.read_generation() == (b"two", second)
    assert (
        path.write_bytes(b"two", first) == second
    )  # as when the reply to the write that did it was lost


def test_reads_are_of_ranges_and_of_one_generation(folder, cloud):
    content = os.urandom(3 * buckets.READ_AHEAD_BYTES)
    path = folder / "large"
    path.write_bytes(content)
    before = len(cloud.requests)

    with files.open_regular(path) as file:
        assert files.measure_size(file) == len(content)

        file.seek(-10, io.SEEK_END)
        assert file.read() == content[-10:]

        file.seek(5)
        assert file.read(7) == content[5:12]
        assert file.read(3) == content[12:15]  # of what was read ahead
        assert len(cloud.requests) - before == 3  # its facts, and two ranges

        path.write_bytes(b"another" * len(content))
        file.seek(2 * buckets.READ_AHEAD_BYTES)

        with pytest.raises(OSError, match="another process"):
            file.read(4)

    assert files.read_range(path, 7 * len(content) - 3, 10) == b"her"
    assert files.read_range(path, 7 * len(content), 10) == b""


@pytest.mark.parametrize("status", [429, 500, 503])
def test_failures_that_pass_are_retried(folder, cloud, fast, status):
    path = folder / "object"
    cloud.inject("POST /upload", status, times=2)
    path.write_bytes(b"content")
    cloud.inject("GET ", status, times=2)

    assert path.read_bytes() == b"content"

    cloud.inject("GET ", status, times=2)
    assert [path.name for path in folder.iterdir()] == ["object"]


def test_a_slow_answer_is_asked_for_again(folder, cloud, fast):
    path = folder / "object"
    path.write_bytes(b"content")
    cloud.inject("GET ", seconds=0.9)

    assert path.read_bytes() == b"content"

    cloud.inject("POST /upload", seconds=0.9)
    path.write_bytes(
        b"other",
        path.stat().generation,
    )  # the first request is carried out, too late to be heard

    assert path.read_bytes() == b"other"


def test_retries_end(folder, cloud, fast):
    cloud.inject("GET ", 503, times=1000)
    with pytest.raises(OSError, match=r"does not answer \(status 503\)") as raised:
        (folder / "object").read_bytes()

    assert cloud.forgive() > 900
    assert raised.value.errno == errno.EIO


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (403, PermissionError, "403.*roles/storage.objectUser"),
        (401, PermissionError, "auth application-default login"),
    ],
)
def test_without_permission_it_is_said_at_once_which_is_needed(folder, cloud, status, kind, words):
    path = folder / "x"
    for action in (
        path.read_bytes,
        lambda: path.write_bytes(b"", 0),
        lambda: list(folder.iterdir()),
    ):
        cloud.inject(".", status)
        with pytest.raises(kind, match=words):
            action()


def test_a_bucket_that_does_not_exist(cloud):
    path = BucketPath("gs://no-such-bucket/x")
    with pytest.raises(FileNotFoundError, match="no such object or bucket"):
        path.write_bytes(b"")

    with pytest.raises(
        ValueError, match="gs://no-such-bucket/x: cannot be read: there is no such object or bucket"
    ):
        files.mirror(str(path))


@pytest.mark.parametrize(
    ("address", "rule"),
    [
        ("gs://", "must name a bucket"),
        ("gs:///x", "must name a bucket"),
        ("gs://b/../c", r"must not have '\.\.'"),
    ],
)
def test_addresses_that_are_none(address, rule):
    with pytest.raises(ValueError, match=rule):
        files.expanded(address)


def test_without_the_library_the_extra_is_named(monkeypatch):
    gcs_client.set_up_libraries.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)

    with pytest.raises(
        ValueError, match=r"gs://b/x: gs:// needs gcsfs.*pip install .*\[gcs\].*gcsfuse"
    ):
        files.expanded("gs://b/x")


def test_a_mirror_has_names_and_sizes_and_reads_from_the_bucket(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (folder / "a" / "one.bin").write_bytes(b"0123456789")
    (folder / "info.json").write_bytes(b"{}")
    (folder / "b.bin").write_bytes(b"old")
    local = files.mirror(str(folder), ".json")
    one = local / "a" / "one.bin"

    assert local == tmp_path / "vit_jax" / "gs" / gcs.BUCKET / folder.key

    expected = (10, 0, "{}")
    assert (one.stat().st_size, one.stat().st_blocks, (local / "info.json").read_text()) == expected
    assert files.read_bounded(one, 100) == b"0123456789"
    assert files.read_range(one, 3, 4) == b"3456"

    (folder / "b.bin").write_bytes(b"newer")
    with pytest.raises(OSError, match="another process"):  # of the generation that was listed
        files.read_bounded(local / "b.bin", 100)

    (folder / "a" / "one.bin").unlink()
    (local / "b.index").write_bytes(b"kept")
    files.mirror.cache_clear()  # as a later process
    files.mirror(str(folder), ".json")

    assert files.read_bounded(local / "b.bin", 100) == b"newer"

    expected = ["b.bin", "b.index", "info.json"]
    assert sorted(path.name for path in local.rglob("*") if path.is_file()) == expected

    if os.getuid():
        with pytest.raises(PermissionError), contextlib.closing(open(local / "b.bin", "rb")):
            pass


def test_requests_share_the_time_of_silence(monkeypatch):
    exceptions = pytest.importorskip("google.api_core.exceptions")
    now = [1000.0]
    silence = gcs_client._Silence(lambda: now[0])
    monkeypatch.setattr(gcs_client, "_silence", silence)

    assert silence.remaining_seconds() == gcs_client.RETRY_SECONDS

    silence.begin()
    now[0] += 50
    silence.begin()  # a further failure: the silence is that of before

    assert silence.remaining_seconds() == gcs_client.RETRY_SECONDS - 50

    now[0] += 500
    assert silence.remaining_seconds() == gcs_client.LATER_RETRY_SECONDS
    assert max(gcs_client.request_options()["timeout"]) == gcs_client.LATER_RETRY_SECONDS

    path = BucketPath(f"{ROOT}/x")
    with pytest.raises(gcs_client.NoAnswer), gcs_client.raise_system_errors(path):
        raise exceptions.RetryError("timeout", cause=exceptions.ServiceUnavailable("gone"))

    assert silence.remaining_seconds() == gcs_client.LATER_RETRY_SECONDS
    with pytest.raises(FileNotFoundError), gcs_client.raise_system_errors(path):
        raise exceptions.NotFound("answered")

    assert silence.remaining_seconds() == gcs_client.RETRY_SECONDS


def test_a_failure_that_is_repeated_begins_the_silence(monkeypatch):
    exceptions = pytest.importorskip("google.api_core.exceptions")
    silence = gcs_client._Silence(lambda: 1000.0)
    monkeypatch.setattr(gcs_client, "_silence", silence)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    failures = [exceptions.ServiceUnavailable("once")]

    def request():
        if failures:
            raise failures.pop()
        return silence._began

    assert gcs_client.request_options()["retry"](request)() == 1000.0
