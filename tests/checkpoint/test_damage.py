"""Checkpoints with other bytes than were written are noticed, whatever was damaged."""

import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from vit_jax.checkpoint import CheckpointReader, CheckpointStore, DamagedCheckpoint
from vit_jax.checkpoint.digests import array_digests
from vit_jax.checkpoint.reader import read_workdir
from vit_jax.sharding import build_mesh

KERNEL = np.random.default_rng(0).normal(size=(64, 48)).astype(np.float32)
ITEMS = {"progress": {"step": np.int32(1)}, "model": {"kernel": KERNEL, "bias": np.ones(3, np.float32)}}
ABSTRACT = jax.tree.map(ocp.utils.to_shape_dtype_struct, jax.tree.map(jnp.asarray, ITEMS))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A workdir with steps 1 and 2."""
    workdir = tmp_path_factory.mktemp("written")
    store = CheckpointStore(workdir, keep_latest=2)
    for step in (1, 2):
        store.save(step, ITEMS, metadata={"names": ["cat", "dog"]}, metrics={})
    store.close()
    return workdir


@pytest.fixture
def workdir(written, tmp_path):
    shutil.copytree(written, tmp_path / "run")
    return tmp_path / "run"


def flip_a_bit(file, position):
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def test_every_flipped_bit_of_the_arrays_is_noticed_or_harmless(workdir):
    """What is read is either refused or what was written."""
    (file,) = [
        path for path in (workdir / "checkpoints/2/model").rglob("d/*") if path.stat().st_size > KERNEL.nbytes / 2
    ]
    refused = 0
    for position in np.random.default_rng(1).integers(file.stat().st_size, size=20):
        flip_a_bit(file, position)
        try:
            restored = CheckpointReader(workdir).restore(2, ABSTRACT)
            np.testing.assert_array_equal(restored["model"]["kernel"], KERNEL)
        except DamagedCheckpoint:
            refused += 1
        flip_a_bit(file, position)
    assert refused > 10
    CheckpointReader(workdir).restore(2, ABSTRACT)


DAMAGES = {
    "truncated metadata": lambda step: (step / "metadata/metadata").write_bytes(b'{"names"'),
    "empty metadata": lambda step: (step / "metadata/metadata").write_bytes(b""),
    "changed metadata": lambda step: flip_a_bit(step / "metadata/metadata", 12),
    "empty manifest": lambda step: (step / "model/manifest.ocdbt").write_bytes(b""),
    "no arrays": lambda step: shutil.rmtree(step / "model/ocdbt.process_0"),
    "empty folder": lambda step: [shutil.rmtree(step), step.mkdir()],
    "truncated arrays": lambda step: [os.truncate(path, 20) for path in step.glob("model/ocdbt.process_0/d/*")],
    "endless description": lambda step: [
        (step / "model/_METADATA").unlink(),
        (step / "model/_METADATA").symlink_to("/dev/zero"),
    ],
    "endless metadata of arrays": lambda step: (step / "model/process_0").symlink_to("/dev/zero"),
    "large metadata of arrays": lambda step: [
        (step / "model/process_0").touch(),
        os.truncate(step / "model/process_0", 2**30),
    ],
    "linked folder": lambda step: [
        (step / "model").rename(step.parent.parent / "elsewhere"),
        (step / "model").symlink_to("../../elsewhere"),
    ],
    "pipe": lambda step: [(step / "model/_METADATA").unlink(), os.mkfifo(step / "model/_METADATA")],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=[name.replace(" ", "_") for name in DAMAGES])
def test_damage_is_one_line_and_the_step_before_is_read(workdir, damage, caplog):
    damage(workdir / "checkpoints" / "2")
    with pytest.raises(DamagedCheckpoint, match=r"checkpoints/2 is damaged: [^\n]*\.$"):
        CheckpointReader(workdir).restore(2, ABSTRACT)
    shapes = {"kernel": KERNEL.shape, "bias": (3,)}
    parameters, metadata, what = read_workdir(workdir, lambda metadata: shapes)
    np.testing.assert_array_equal(parameters["kernel"], KERNEL)
    assert (metadata, what) == ({"names": ["cat", "dog"]}, "parameters of step 1")
    (message,) = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
    assert message.endswith("Read instead: parameters of step 1.")
    shutil.rmtree(workdir / "checkpoints" / "1")
    with pytest.raises(ValueError, match=r"No checkpoint in .* can be used\. .*\n.*checkpoints/2 is damaged"):
        read_workdir(workdir, lambda metadata: shapes)


def test_a_checkpoint_from_before_there_were_digests_is_read(workdir):
    (workdir / "checkpoints/2/metadata/metadata").write_text('{"names": ["cat", "dog"]}')
    reader = CheckpointReader(workdir)
    assert reader.metadata(2) == {"names": ["cat", "dog"]}
    np.testing.assert_array_equal(reader.restore(2, ABSTRACT)["model"]["kernel"], KERNEL)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
def test_a_digest_does_not_depend_on_the_layout(dtype):
    array = jnp.asarray(np.random.default_rng(2).normal(size=(8, 6, 5)) * 3).astype(dtype)
    mesh = build_mesh(jax.devices())
    expected = array_digests({"a": array})
    for spec in (PartitionSpec(), PartitionSpec("data")):
        assert array_digests({"a": jax.device_put(array, NamedSharding(mesh, spec))}) == expected


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.integers(0, 29), st.integers(0, 31), st.integers(0, 29))
def test_a_digest_changes_with_a_bit_and_with_an_exchange(place, bit, other):
    words = np.random.default_rng(3).integers(2**32, size=30, dtype=np.uint32)
    changed, exchanged = words.copy(), words.copy()
    changed[place] ^= np.uint32(1 << bit)
    exchanged[[place, other]] = exchanged[[other, place]]
    digests = array_digests({"words": words, "changed": changed, "exchanged": exchanged})
    assert digests["changed"] != digests["words"]
    assert (digests["exchanged"] != digests["words"]) is (place != other)
