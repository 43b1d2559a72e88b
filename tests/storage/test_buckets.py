"""Objects of a bucket: paths, conditions, ranges, retries and mirrors."""

import errno
import io
import os
import stat
import sys

import pytest

from tests import gcs
from tests.rejections import rejects
from vit_jax.storage import buckets, files, gcs_client
from vit_jax.storage.buckets import BucketPath

ROOT = f"gs://{gcs.BUCKET}"


@pytest.fixture
def folder(bucket_folder):
    return bucket_folder


@pytest.fixture
def fast(monkeypatch):
    """Pauses of hundredths of a second between attempts."""
    retry = pytest.importorskip("google.cloud.storage.retry")
    quick = retry.DEFAULT_RETRY.with_delay(0.01, 0.05)
    monkeypatch.setattr(retry, "DEFAULT_RETRY", quick)


def test_a_path_is_pathlibs_with_the_scheme_kept():
    path = BucketPath("gs://b/runs/a")

    assert str(path) == "gs://b/runs/a"
    assert os.fspath(path / "x.json") == "gs://b/runs/a/x.json"
    assert path.name == "a"
    assert str(path.parent) == "gs://b/runs"
    assert path.bucket == "b"
    assert path.key == "runs/a"
    assert path.with_name("c") == BucketPath("gs://b/runs/c")
    inner = path / "x"
    assert inner.relative_to(path).parts == ("x",)
    assert isinstance(path.with_suffix(".x"), BucketPath)
    assert path.absolute() is path
    assert len({path, BucketPath("gs://b/runs//a/")}) == 1


def list_names(paths):
    return [path.name for path in paths]


def test_files_and_folders(folder):
    assert not folder.exists()
    assert not list(folder.iterdir())

    one = folder / "a/one.json"
    two = folder / "a/b/two.txt"
    files.write_atomically(one, '{"x": 1}')
    files.write_atomically(two, b"two")
    status = two.stat()

    assert files.read_json(one) == {"x": 1}
    assert folder.is_dir()
    assert not one.is_dir()
    assert one.is_file()
    assert list(one.parent.iterdir()) == [one, two.parent]
    assert list(folder.glob("a/*.json")) == [one]
    assert list(folder.rglob("*.txt")) == [two]
    assert stat.S_ISREG(status.st_mode)
    assert status.st_size == 3

    old = folder / "a"
    moved = old.rename(folder / "c")
    content = (moved / "b/two.txt").read_bytes()

    assert content == b"two"
    assert not old.exists()

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
    # The reply to the write that did it was lost.
    assert path.write_bytes(b"two", first) == second


def test_reads_are_of_ranges_and_of_one_generation(folder, cloud):
    content = os.urandom(3 * buckets.READ_AHEAD_BYTES)
    size = len(content)
    path = folder / "large"
    path.write_bytes(content)
    num_requests = len(cloud.requests)

    with files.open_regular(path) as file:
        assert files.measure_size(file) == size

        file.seek(-10, io.SEEK_END)
        assert file.read() == content[-10:]

        # The second read takes bytes that were read ahead.
        file.seek(5)
        assert file.read(7) == content[5:12]
        assert file.read(3) == content[12:15]
        # The status of the object, and two ranges.
        assert len(cloud.requests) - num_requests == 3

        path.write_bytes(b"another" * size)
        file.seek(2 * buckets.READ_AHEAD_BYTES)
        with pytest.raises(OSError, match="another process"):
            file.read(4)

    assert files.read_range(path, 7 * size - 3, 10) == b"her"
    assert files.read_range(path, 7 * size, 10) == b""


@pytest.mark.parametrize("status", [429, 500, 503])
def test_failures_that_pass_are_retried(folder, cloud, fast, status):
    path = folder / "object"

    cloud.inject("POST /upload", status, times=2)
    path.write_bytes(b"content")
    cloud.inject("GET ", status, times=2)
    assert path.read_bytes() == b"content"

    cloud.inject("GET ", status, times=2)
    assert list_names(folder.iterdir()) == ["object"]


def test_a_slow_reply_is_requested_again(folder, cloud, fast, monkeypatch):
    """A reply is held until the client asks again: it may ask more often on a busy machine."""
    path = folder / "object"
    path.write_bytes(b"content")
    generation = path.stat().generation
    monkeypatch.setattr(gcs_client, "TIMEOUT_SECONDS", (60.0, 0.5))
    num_requests = len(cloud.requests)

    cloud.inject("GET .*alt=media", is_held=True)
    assert path.read_bytes() == b"content"

    # The first request is carried out, and its reply comes too late to be heard.
    cloud.inject("POST /upload", is_held=True)
    path.write_bytes(b"other", generation)
    assert path.read_bytes() == b"other"

    requests = cloud.requests[num_requests:]
    assert sum("POST /upload" in request for request in requests) > 1
    assert sum("alt=media" in request for request in requests) > 2


def test_retries_end(folder, cloud, fast, monkeypatch):
    monkeypatch.setattr(gcs_client, "RETRY_SECONDS", 1.0)
    cloud.inject("GET ", 503, times=1000)

    message = r"does not answer \(status 503\)"
    with pytest.raises(OSError, match=message) as raised:
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
def test_without_permission_the_error_names_the_role_at_once(
    folder,
    cloud,
    status,
    kind,
    words,
):
    path = folder / "x"

    cloud.inject(".", status)
    with pytest.raises(kind, match=words):
        path.read_bytes()

    cloud.inject(".", status)
    with pytest.raises(kind, match=words):
        path.write_bytes(b"", 0)

    cloud.inject(".", status)
    with pytest.raises(kind, match=words):
        list(folder.iterdir())


def test_a_bucket_that_does_not_exist(cloud):
    path = BucketPath("gs://no-such-bucket/x")
    rule = "there is no such object or bucket"

    with pytest.raises(FileNotFoundError, match=rule):
        path.write_bytes(b"")
    with rejects("gs://no-such-bucket/x", f"cannot be read: {rule}"):
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
        files.expand_path(address)


def test_without_the_library_the_extra_is_named(monkeypatch):
    gcs_client.set_up_libraries.cache_clear()
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    message = r"gs://b/x: gs:// needs gcsfs.*pip install .*\[gcs\].*gcsfuse"

    with pytest.raises(ValueError, match=message):
        files.expand_path("gs://b/x")


def test_a_mirror_has_names_and_sizes_and_reads_from_the_bucket(
    folder,
    tmp_path,
    monkeypatch,
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stored_one = folder / "a/one.bin"
    stored_one.write_bytes(b"0123456789")
    (folder / "info.json").write_bytes(b"{}")
    (folder / "b.bin").write_bytes(b"old")

    local = files.mirror(str(folder), ".json")
    one = local / "a/one.bin"
    status = one.stat()

    assert local == tmp_path / "vit_jax/gs" / gcs.BUCKET / folder.key
    assert status.st_size == 10
    assert status.st_blocks == 0
    assert (local / "info.json").read_text() == "{}"
    assert files.read_bounded(one, 100) == b"0123456789"
    assert files.read_range(one, 3, 4) == b"3456"

    # The mirror reads the generation that was listed.
    (folder / "b.bin").write_bytes(b"newer")
    with pytest.raises(OSError, match="another process"):
        files.read_bounded(local / "b.bin", 100)

    # A later process lists again.
    stored_one.unlink()
    (local / "b.index").write_bytes(b"kept")
    files.mirror.cache_clear()
    files.mirror(str(folder), ".json")
    names = list_names(local.rglob("*.*"))

    assert files.read_bounded(local / "b.bin", 100) == b"newer"
    assert sorted(names) == ["b.bin", "b.index", "info.json"]
    if os.getuid():
        with pytest.raises(PermissionError):
            (local / "b.bin").read_bytes()


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
    options = gcs_client.request_options()

    assert silence.remaining_seconds() == gcs_client.LATER_RETRY_SECONDS
    assert max(options["timeout"]) == gcs_client.LATER_RETRY_SECONDS

    path = BucketPath(f"{ROOT}/x")
    cause = exceptions.ServiceUnavailable("gone")

    with (
        pytest.raises(gcs_client.NoAnswer),
        gcs_client.raise_system_errors(path),
    ):
        raise exceptions.RetryError("timeout", cause=cause)

    assert silence.remaining_seconds() == gcs_client.LATER_RETRY_SECONDS

    with (
        pytest.raises(FileNotFoundError),
        gcs_client.raise_system_errors(path),
    ):
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

    retry = gcs_client.request_options()["retry"]
    repeat = retry(request)

    assert repeat() == 1000.0
