"""No checkpoint counts as saved whose arrays cannot be found again."""

import errno
import os

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal
from orbax.checkpoint._src.serialization import ocdbt_utils

from vit_jax.checkpoint import CheckpointReader, CheckpointStore, SaveError
from vit_jax.checkpoint.presence import MANIFEST, MissingArrays, require_arrays, require_exact_path
from vit_jax.checkpoint.store import write_workdir

BIAS = np.ones(2, np.float32)
ITEMS = {
    "model": {
        "a": {"kernel": jnp.ones((8, 3))},
        "bias": BIAS,
    }
}


def save(store, step):
    store.save(step, ITEMS, metadata={}, metrics={})


@pytest.fixture
def item(tmp_path):
    """The item "model" of a complete checkpoint."""
    store = CheckpointStore(tmp_path)
    save(store, 1)
    store.close()

    return tmp_path / "checkpoints/1/model"


@pytest.mark.parametrize("character", ["\\", "[", "]", "*", "?", "\udcff"])
def test_paths_that_are_written_elsewhere_are_rejected(tmp_path, character):
    rule = r"^workdir='[^\n]*another folder\.$"

    for name in (f"my{character}run", f"my{character}/run"):
        folder = tmp_path / name
        with pytest.raises(ValueError, match=rule):
            CheckpointStore(folder)
        with pytest.raises(ValueError, match=rule):
            write_workdir(folder, {"bias": BIAS}, {})

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name",
    ["run#1", "a%41 b", "é", "日本", "{a,b}", "$HOME", "a'b\"c", "a\nb"],
)
def test_other_unusual_paths_are_written_and_read(tmp_path, name):
    workdir = tmp_path / name
    abstract = {"model": {"bias": np.zeros_like(BIAS)}}
    require_exact_path(workdir)

    write_workdir(workdir, {"bias": BIAS}, {})
    restored = CheckpointReader(workdir).restore(0, abstract)

    assert_array_equal(restored["model"]["bias"], BIAS)


@pytest.mark.parametrize(
    "damage",
    [
        os.unlink,
        lambda file: os.truncate(file, 40),
        lambda file: os.truncate(file, 0),
    ],
)
def test_an_item_without_a_whole_manifest_is_rejected(item, damage):
    require_arrays(item)
    damage(item / MANIFEST)

    with pytest.raises(MissingArrays, match=MANIFEST):
        require_arrays(item)


def test_an_array_that_is_not_in_the_manifest_is_named(item):
    description = item / "_METADATA"
    text = description.read_text()
    description.write_text(text.replace('"bias"', '"scale"'))

    with pytest.raises(MissingArrays, match="1 of 2 arrays are missing, such as scale"):
        require_arrays(item)


def test_a_save_whose_arrays_are_not_merged_fails_and_keeps_the_step_before(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    store.wait()

    async def merge_nothing(*words, **options):
        return None

    monkeypatch.setattr(ocdbt_utils, "merge_ocdbt_per_process_files", merge_nothing)
    save(store, 2)

    with pytest.raises(SaveError, match=rf"{MANIFEST} is missing.*\n.*step 1 is intact"):
        store.wait()

    assert CheckpointReader(tmp_path).all_steps() == [1]

    store.close()


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (
            OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
            "ulimit -n 65536",
        ),
        (
            ValueError("kvstore: Open failed: Too many open files [errno 24]"),
            "ulimit -n 65536",
        ),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            "Make room, or repair the folder",
        ),
    ],
)
def test_a_save_that_fails_for_the_limit_of_open_files_blames_the_limit(
    tmp_path,
    monkeypatch,
    error,
    cure,
):
    async def fail(*words, **options):
        raise RuntimeError("The save failed") from error

    monkeypatch.setattr(ocdbt_utils, "merge_ocdbt_per_process_files", fail)
    store = CheckpointStore(tmp_path)
    save(store, 1)

    with pytest.raises(SaveError, match=rf"could not be written(.|\n)*{cure}"):
        store.wait()

    store.close()
