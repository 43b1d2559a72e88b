"""A workdir in a bucket: its lock, and runs that are killed, resumed and locked out."""

import contextlib
import json

import pytest

from vit_jax.train.lifecycle.lock import FILE, BucketLock, WorkdirLost, lock_of
from vit_jax.train.run_files import read_metrics
from vit_jax.train.writers import ObjectLines


@pytest.fixture
def workdir(bucket_folder):
    return bucket_folder


def pretend(workdir, **changes):
    """Changes what the lock says of its owner, who may renew it meanwhile."""
    while True:
        with contextlib.suppress(FileExistsError):
            found, generation = (workdir / FILE).read_generation()
            return (workdir / FILE).write_bytes(
                json.dumps(json.loads(found) | changes).encode(),
                generation,
            )


def test_the_lock_names_the_process_and_host_that_have_it(workdir):
    with lock_of(workdir) as lock:
        assert isinstance(lock, BucketLock)

        pretend(workdir, host="vm-7", pid=1234)
        with pytest.raises(
            ValueError, match=r"used by another run: process 1234 on vm-7, since 20.*End that run"
        ):
            hold_renewed(workdir)


def hold_renewed(workdir):
    """Enter a lock that its owner on another machine goes on to renew."""

    def renew(line):
        pretend(workdir, renewals=1000)

    BucketLock(workdir, say=renew, expiry_seconds=5).__enter__()


def test_a_lock_that_is_not_renewed_is_taken_over_and_its_owner_learns_of_it(workdir):
    lines = []
    with BucketLock(workdir, renewal_seconds=1000) as lost:
        pretend(workdir, host="vm-7")
        with BucketLock(workdir, say=lines.append, expiry_seconds=0.2):
            lost._renewed = -1000.0  # long ago
            with pytest.raises(WorkdirLost, match="taken over by process"):
                lost.check()

        assert not (workdir / FILE).exists()
        with pytest.raises(WorkdirLost, match="was removed"):
            lost.check()

    assert "on vm-7: waiting up to 0 s" in lines[0]


def test_a_renewal_does_not_bring_back_a_lock_that_was_taken_over(workdir):
    with BucketLock(workdir, renewal_seconds=0.01) as lock:
        while json.loads((workdir / FILE).read_text())["renewals"] < 2:
            pass

        pretend(
            workdir,
            token="another",
            host="vm-7",
            pid=77,
        )
        while lock._renewed > 0:
            pass

        with pytest.raises(WorkdirLost, match="by process 77 on vm-7"):
            lock.check()

    assert json.loads((workdir / FILE).read_text())["token"] == "another"


def test_the_owner_sends_no_request_between_renewals(workdir, cloud):
    with BucketLock(workdir, renewal_seconds=1000) as lock:
        before = len(cloud.requests)
        lock.check()
        assert len(cloud.requests) == before


def test_metrics_are_written_as_a_whole_and_not_over_those_of_another_run(workdir, cloud):
    lines = ObjectLines(workdir, 0)
    before = len(cloud.requests)

    for step in range(1, 6):
        lines.write(step, {"train_loss": 1.0 / step})

    # For the first; then after ten seconds, or before a checkpoint.
    assert len(cloud.requests) - before == 1

    lines.flush()
    assert [line["step"] for line in read_metrics(workdir)] == [1, 2, 3, 4, 5]

    again = ObjectLines(workdir, 3)
    again.write(4, {"train_loss": 0.5})

    assert [line["step"] for line in read_metrics(workdir)] == [1, 2, 3, 4]

    lines.write(6, {"train_loss": 0.1})
    with pytest.raises(FileExistsError, match="another process"):
        lines.close()
