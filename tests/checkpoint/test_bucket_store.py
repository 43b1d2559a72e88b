"""Checkpoints in a bucket, which cannot rename: one is complete when orbax has written its last object."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal
from orbax.checkpoint.utils import to_shape_dtype_struct

from vit_jax.checkpoint import CheckpointReader, CheckpointStore, DamagedCheckpoint, SaveError

pytestmark = pytest.mark.slow


@pytest.fixture
def workdir(bucket_folder):
    return bucket_folder


def items(value):
    return {
        "progress": {"step": jnp.int32(value)},
        "model": {"kernel": jnp.full((8, 3), float(value))},
    }


def save(store, step, **metrics):
    store.save(
        step,
        items(step),
        metadata={"class_names": ["x"]},
        metrics=metrics,
    )
    store.wait()


def kernel(workdir, step):
    restored = CheckpointReader(workdir).restore(
        step,
        jax.tree.map(to_shape_dtype_struct, items(0)),
    )
    return np.asarray(restored["model"]["kernel"])


def test_what_is_kept_completed_and_found_again(workdir):
    store = CheckpointStore(
        workdir,
        keep_latest=1,
        keep_best=1,
        best_metric="test_accuracy",
    )
    save(store, 1, test_accuracy=0.5)
    save(store, 2)
    store.complete(
        2,
        metadata={"owes_evaluation": False},
        metrics={"test_accuracy": 0.9},
    )
    save(store, 3, test_accuracy=0.1)
    store.close()
    reader = CheckpointReader(workdir)

    assert reader.all_steps() == [2, 3], "the best, as was found later, and the latest"
    assert reader.metadata(2) == {"class_names": ["x"], "owes_evaluation": False}

    again = CheckpointStore(
        workdir,
        keep_latest=1,
        keep_best=1,
        best_metric="test_accuracy",
    )
    save(again, 4, test_accuracy=0.2)
    again.close()

    assert CheckpointReader(workdir).all_steps() == [2, 4]
    assert_array_equal(kernel(workdir, 4), np.full((8, 3), 4.0))


def test_what_is_damaged_or_not_complete(workdir):
    store = CheckpointStore(workdir, keep_latest=3)
    for step in (1, 2, 3):
        save(store, step)

    store.close()
    folder = workdir / "checkpoints"
    (folder / "1" / "commit_success.txt").unlink()

    for path, _ in (folder / "2" / "model").objects():
        if path.parent.name == "d":
            path.write_bytes(b"x" * 100)

    (folder / "3" / "metadata" / "metadata").write_bytes(b"{")
    assert CheckpointReader(workdir).all_steps() == [2, 3]

    for step in (2, 3):
        with pytest.raises(DamagedCheckpoint, match=f"gs://.*/checkpoints/{step} is damaged"):
            kernel(workdir, step)


def test_no_permission_to_write(workdir, cloud):
    store = CheckpointStore(workdir)
    save(store, 1)
    cloud.inject("POST /upload", 403, times=1000)

    with pytest.raises(
        SaveError, match=r"could not be written to gs://.*checkpoints: .*\n.*step 1 is intact"
    ):
        save(store, 2)

    cloud.forgive()
    with pytest.raises(SaveError):  # the same once more
        store.close()

    assert CheckpointReader(workdir).all_steps() == [1]


def test_failures_that_pass_are_retried(workdir, cloud):
    store = CheckpointStore(workdir)
    cloud.inject("POST /upload", 503, times=3)
    cloud.inject("GET ", 503, times=1)
    save(store, 1)
    store.close()

    assert not cloud.forgive()
    assert_array_equal(kernel(workdir, 1), np.full((8, 3), 1.0))
