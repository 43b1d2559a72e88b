"""The number of workers; none outlives a killed run."""

import fcntl
import inspect
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import types
from multiprocessing import shared_memory
from pathlib import Path

import grain
import pytest
from absl import flags

from tests.integration.commands import is_running, wait_until
from vit_jax.data import workers
from vit_jax.data.workers import SHARED_MEMORY, choose_parallelism, reclaim

RUN = """
import multiprocessing, os, sys, time
import numpy as np
from vit_jax.config.schema import InputConfig
from vit_jax.data.kinds.in_memory import MemorySource
from vit_jax.data.pipeline import open_batches
from vit_jax.data.stream import TrainStream
from vit_jax.data.transforms import TrainTransform
from vit_jax.data.workers import Parallelism, build_segment_prefix

if __name__ == "__main__":
    source = MemorySource(np.zeros((9, 8, 8, 3), np.uint8), np.arange(9) % 2, ("a", "b"))
    transform = TrainTransform(InputConfig(train_split="train", test_split="test", image_size=(8, 8)))
    stream = TrainStream(source, transform, 4, np.arange(4), seed=0, start_step=0, num_steps=10**6)
    with open_batches(stream, Parallelism(2, 1)) as batches:
        next(batches), next(batches)
        print(*[child.pid for child in multiprocessing.active_children()], build_segment_prefix(), flush=True)
        time.sleep(600)
"""


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(workers.__file__).parents[2])}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
def test_workers_end_with_a_killed_run(tmp_path):
    """Workers look for the run twice a second."""
    (tmp_path / "run.py").write_text(RUN)
    command = [sys.executable, str(tmp_path / "run.py")]

    with subprocess.Popen(
        command,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as run:
        pids = [int(pid) for pid in run.stdout.readline().split()[:2]]
        try:
            assert len(pids) == 2
            assert all(is_running(pid) for pid in pids)

            run.kill()
            wait_until(lambda: not any(is_running(pid) for pid in pids))
        finally:
            run.kill()


def test_the_first_object_of_workers_hides_the_plugin_for_cuda_from_jax():
    program = (
        "import pickle, sys; pickle.load(sys.stdin.buffer); "
        "print(sys.modules['jax_cuda12_plugin'], 'jax' in sys.modules)"
    )

    done = subprocess.run(
        [sys.executable, "-c", program],
        env=ENVIRONMENT,
        input=pickle.dumps(workers._NoCuda()),
        capture_output=True,
        check=True,
    )

    assert done.stdout == b"None False\n"
    assert done.stderr == b""


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="shared memory is no folder")
def test_shared_memory_of_a_killed_group_is_reclaimed_and_of_a_living_one_kept(tmp_path):
    """Workers prepare their next batches meanwhile, and need a moment to end."""

    def left():
        names = (path.name for path in SHARED_MEMORY.iterdir())
        return [name for name in names if f"vj{digits}" in name or name == f"vit_jax-{digits}.lock"]

    def has_all_kinds():
        """Return whether there are the lock, batches, and semaphores."""
        kinds = {name.partition(digits)[0] for name in left()}
        return kinds == {"vit_jax-", "vj", "sem.vj"}

    (tmp_path / "run.py").write_text(RUN)
    command = [sys.executable, str(tmp_path / "run.py")]
    group = subprocess.Popen(
        command,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    with group as run:
        try:
            *pids, prefix = run.stdout.readline().split()
            digits = prefix.strip("/vj_")
            wait_until(has_all_kinds)
            reclaim()
            assert has_all_kinds()
        finally:
            os.killpg(run.pid, signal.SIGKILL)

    wait_until(lambda: not any(is_running(int(pid)) for pid in pids))
    reclaim()

    # Another process may be removing them at this moment.
    wait_until(lambda: left() == [])


def test_private_names():
    """Those of grain and of Python on which workers depend, and the message of grain's error."""
    flags.FLAGS.is_parsed() or flags.FLAGS.mark_as_parsed()
    batches = iter(
        grain.MapDataset.range(2).to_iter_dataset().mp_prefetch(grain.MultiprocessingOptions(1))
    )
    places = {workers._STARTER: batches, workers._SEGMENT_PREFIX: shared_memory}
    places[workers._FIRST_OF_PROCESSES] = multiprocessing.current_process()
    moved = [name for name, place in places.items() if not hasattr(place, name)]

    assert not moved, "correct these names in vit_jax/data/workers.py"
    assert callable(getattr(batches, workers._STARTER).start_prefetch)

    code = Path(inspect.getfile(grain)).parent.rglob("*prefetch.py")

    assert any(workers._LOST_WORKER in file.read_text() for file in code), (
        "correct the message in workers.py"
    )


def test_reclaim_removes_only_files_of_free_locks(tmp_path):
    """The lock of vjabcde is held; other names are of no lock."""
    kept = [
        "vj00000_1234",
        "vjabcde_1234",
        "psm_1234",
        "vit_jax-?????.lock",
        "vit_jax-abcde.lock",
        "sem.mp-01234567",
        "sem.vjabcde-01234567",
        "sem.vj00000-01234567",
        "sem.vj012345-1234567",
    ]
    removed = ["vj01234_1234", "sem.vj01234-abcdefgh", "vit_jax-01234.lock"]
    for name in [*kept, *removed]:
        (tmp_path / name).touch()

    with (tmp_path / "vit_jax-abcde.lock").open() as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        reclaim(tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


@pytest.mark.parametrize(
    ("cores", "given", "expected"),
    [
        (1, (), (0, 1)),
        (2, (), (0, 2)),
        (8, (), (0, 8)),
        (12, (), (2, 6)),
        (64, (), (10, 6)),
        (224, (), (37, 6)),
        (64, (3, 2), (3, 2)),
        (64, (0,), (0, 8)),
        (64, (32,), (32, 2)),
    ],
)
def test_choice_by_cores(monkeypatch, cores, given, expected):
    monkeypatch.setattr(workers, "count_cores", lambda: cores)

    assert choose_parallelism(*given, batch_bytes=1) == expected


def test_too_little_shared_memory(tmp_path):
    with pytest.raises(ValueError, match=r"--shm-size=.*num_workers=0"):
        choose_parallelism(
            2,
            batch_bytes=2**60,
            folder=tmp_path,
        )

    assert choose_parallelism(0, 1, batch_bytes=2**60, folder=tmp_path) == (0, 1)
    assert choose_parallelism(
        2,
        1,
        batch_bytes=2**60,
        folder=tmp_path / "absent",
    ) == (2, 1)


def test_workers_import_nothing_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "multiprocessing.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "")  # as if it were not set
    worker = multiprocessing.get_context("spawn").Process(target=os.getpid)
    starter = types.SimpleNamespace(start_prefetch=worker.start)
    workers.start_workers(types.SimpleNamespace(_prefetch_ds_iter=starter))
    worker.join()

    assert worker.exitcode == 0
    assert os.listdir() == ["multiprocessing.py"]


def test_workers_load_no_jax():
    """grain imports jax where it is installed; no object that a worker unpickles may."""
    program = (
        "import sys; sys.modules['grain'] = sys.modules['grain.experimental'] = type(sys)('grain'); "
        "sys.modules['grain'].index_shuffle = None; "
        "import vit_jax.data.pipeline; "
        "from vit_jax.data.kinds import folder, in_memory, tfds_source; "
        "print('jax' in sys.modules)"
    )

    result = subprocess.run(
        [sys.executable, "-c", program],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert result.stdout.split() == ["False"]


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="segments of shared memory are not files")
def test_the_end_of_a_run_removes_segments_of_workers_that_were_killed(monkeypatch):
    """A worker that is killed between creating a segment and giving it a size leaves an empty one."""
    digits = f"{os.getpid() % 0xFFFFF:05x}"
    lock = SHARED_MEMORY / f"vit_jax-{digits}.lock"
    empty = SHARED_MEMORY / f"vj{digits}_0000"

    for path in (lock, empty):
        path.touch()

    workers._end_run(lock)

    assert not lock.exists()
    assert not empty.exists()

    gone = SHARED_MEMORY / f"vj{digits}_0001"
    monkeypatch.setattr(workers, "_find_segments", lambda lock: [gone])
    workers._end_run(lock)  # another process removed both


LEAVES_AT_ONCE = """
import multiprocessing, os
from tests.integration.commands import is_running, wait_until
from vit_jax.data import workers
workers._start_tracker()
lock = multiprocessing.get_context("spawn").Lock()
assert "PYTHONWARNINGS" not in os.environ
os._exit(3)
"""


def test_a_process_that_leaves_at_once_is_followed_by_no_warning_of_semaphores():
    """The tracker holds the pipe of the errors, so that `run` returns after it has ended."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}

    ended = subprocess.run(
        [sys.executable, "-c", LEAVES_AT_ONCE],
        env=environment,
        capture_output=True,
        text=True,
    )

    assert ended.returncode == 3, ended.stderr
    assert "leaked" not in ended.stderr
