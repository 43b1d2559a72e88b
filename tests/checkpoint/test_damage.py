"""Checkpoints with other bytes than were written are noticed, whatever was damaged."""

import errno
import os
import pathlib
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
from vit_jax.checkpoint.digests import compute_digests
from vit_jax.checkpoint.reader import read_workdir
from vit_jax.sharding import build_mesh

KERNEL = np.random.default_rng(0).normal(size=(64, 48)).astype(np.float32)
ITEMS = {
    "progress": {"step": np.int32(1)},
    "model": {"kernel": jnp.asarray(KERNEL), "bias": np.ones(3, np.float32)},
}
SHAPES = {"kernel": KERNEL.shape, "bias": (3,)}
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
        path
        for path in (workdir / "checkpoints/2/model").rglob("d/*")
        if path.stat().st_size > KERNEL.nbytes / 2
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


def rename_in(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def rename_in_description(step, old, new):
    rename_in(step / "model/_METADATA", old, new)


DAMAGES = {
    "truncated metadata": lambda step: (step / "metadata/metadata").write_bytes(b'{"names"'),
    "empty metadata": lambda step: (step / "metadata/metadata").write_bytes(b""),
    "changed metadata": lambda step: flip_a_bit(step / "metadata/metadata", 12),
    "empty manifest": lambda step: (step / "model/manifest.ocdbt").write_bytes(b""),
    "no arrays": lambda step: shutil.rmtree(step / "model/ocdbt.process_0"),
    "empty folder": lambda step: [shutil.rmtree(step), step.mkdir()],
    "truncated arrays": lambda step: [
        os.truncate(path, 20) for path in step.glob("model/ocdbt.process_0/d/*")
    ],
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
    "no description": lambda step: (step / "model/_METADATA").unlink(),
    "truncated description": lambda step: os.truncate(step / "model/_METADATA", 20),
    "another description": lambda step: (step / "model/_METADATA").write_text("[]"),
    "another key in the description": lambda step: rename_in_description(
        step,
        "key_metadata",
        "kez_metadata",
    ),
    "another option in the description": lambda step: rename_in_description(
        step,
        "skip_deserialize",
        "rkip_deserialize",
    ),
    "another key of the layout": lambda step: rename_in(
        step / "model/_sharding",
        "sharding_type",
        "sharding_typf",
    ),
    "another class of the layout": lambda step: rename_in(
        step / "model/_sharding",
        "SingleDevice",
        "SinyleDevice",
    ),
    "another type in the description": lambda step: rename_in_description(
        step,
        "np.ndarray",
        "mp.ndarray",
    ),
    "no manifest": lambda step: (step / "model/manifest.ocdbt").unlink(),
    "changed manifest": lambda step: flip_a_bit(step / "model/manifest.ocdbt", 30),
    "empty arrays": lambda step: [os.truncate(path, 0) for path in step.glob("model/d/*")],
    "deeply nested metadata": lambda step: (step / "metadata/metadata").write_text("[" * 100_000),
    "deeply nested description": lambda step: (step / "model/_METADATA").write_text("[" * 100_000),
    "linked to itself": lambda step: [
        (step / "model/_METADATA").unlink(),
        (step / "model/_METADATA").symlink_to("_METADATA"),
    ],
}


@pytest.mark.parametrize(
    "damage",
    DAMAGES.values(),
    ids=[name.replace(" ", "_") for name in DAMAGES],
)
def test_damage_is_one_line_and_the_step_before_is_read(workdir, damage, caplog):
    damage(workdir / "checkpoints" / "2")
    with pytest.raises(
        DamagedCheckpoint, match=r"checkpoints/2 is damaged: (?!.*damaged)[^\n]*[^.]\.$"
    ):
        CheckpointReader(workdir).restore(2, ABSTRACT)

    parameters, metadata, what = read_workdir(workdir, lambda _: SHAPES)
    np.testing.assert_array_equal(parameters["kernel"], KERNEL)
    assert (metadata, what) == ({"names": ["cat", "dog"]}, "parameters of step 1")

    (message,) = [
        record.getMessage() for record in caplog.records if "damaged" in record.getMessage()
    ]

    assert message.endswith("Read instead: parameters of step 1.")

    shutil.rmtree(workdir / "checkpoints" / "1")
    with pytest.raises(
        ValueError, match=r"No checkpoint in .* can be used\. .*\n.*checkpoints/2 is damaged"
    ):
        read_workdir(workdir, lambda _: SHAPES)


def behind_orbax(error):
    """As orbax raises an error that reading an array has met."""
    outer = Exception(
        "Encountered error while reading array index: (slice(0, 64, 1),). See full TensorStore details"
    )
    outer.__cause__ = error

    return outer


TENSORSTORE = 'Error opening "zarr" driver: Error reading local file "/d/1"'
PASSING = {
    "no device": RuntimeError("Unable to initialize backend 'cuda': no device"),
    "no memory": MemoryError(),
    "no memory of a device": jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
    "failing storage": OSError(errno.EIO, "Input/output error"),
    "no permission": PermissionError(errno.EACCES, "Permission denied"),
    "stop": KeyboardInterrupt(),
}
PASSING_IN_TENSORSTORE = {
    "storage": (
        errno.EIO,
        ValueError(f"UNKNOWN: {TENSORSTORE}: Input/output error [os_error_code='5']"),
    ),
    "permission": (
        errno.EACCES,
        ValueError(f"PERMISSION_DENIED: {TENSORSTORE} [OS error 13: EACCES]"),
    ),
    "memory": (errno.EIO, behind_orbax(ValueError(f"RESOURCE_EXHAUSTED: {TENSORSTORE}"))),
    "network": (
        errno.ESTALE,
        behind_orbax(ValueError(f"ABORTED: {TENSORSTORE} [os_error_code='116']")),
    ),
}


def fail_with(error):
    def fail(*_, **__):
        raise error

    return fail


@pytest.mark.parametrize(
    ("method", "name"),
    [(method, name) for method in ("restore", "metadata") for name in PASSING],
)
def test_an_error_that_says_nothing_about_the_files_is_raised_as_it_is(
    written, monkeypatch, method, name
):
    error = PASSING[name]
    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, method, fail_with(error))

    for read in (
        lambda: CheckpointReader(written).restore(2, ABSTRACT),
        lambda: read_workdir(written, lambda _: SHAPES),
    ):
        with pytest.raises(type(error)) as raised:
            read()

        assert raised.value is error


@pytest.mark.parametrize(
    "error",
    [
        KeyError("sharding_type"),
        TypeError("no such argument"),
        ValueError("no sharding"),
        AssertionError("odd"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("method", ["restore", "metadata"])
def test_any_other_exception_of_a_read_is_damage_and_the_step_before_is_tried(
    written, monkeypatch, method, error
):
    original = getattr(ocp.PyTreeCheckpointHandler, method)

    def fail_at_step_2(handler, path, *words, **options):
        if "/checkpoints/2/" in str(path):
            raise error
        return original(handler, path, *words, **options)

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, method, fail_at_step_2)
    with pytest.raises(DamagedCheckpoint, match=type(error).__name__) as raised:
        CheckpointReader(written).restore(2, ABSTRACT)

    assert "\n" not in str(raised.value)
    assert read_workdir(written, lambda _: SHAPES)[2] == "parameters of step 1"


def damage_at_random(folder, generator):
    """Change, cut or lengthen one of the files that describe the arrays of an item; return its name."""
    files = sorted(
        path for path in (folder / "model").rglob("*") if path.is_file() and path.parent.name != "d"
    )
    file = files[generator.integers(len(files))]
    content = bytearray(file.read_bytes())
    place = int(generator.integers(max(len(content), 1)))
    kind = generator.integers(4)

    if kind == 0:
        content[place : place + 1] = generator.bytes(1)
    elif kind == 1:
        content[place : place + 1] = b"x"
    elif kind == 2:
        content[place:place] = generator.bytes(3)
    else:
        del content[place:]

    file.write_bytes(content)
    return file.name


@pytest.mark.parametrize("seed", range(12))
def test_a_random_damage_is_one_line_or_harmless(workdir, seed):
    name = damage_at_random(workdir / "checkpoints/2", np.random.default_rng(seed))
    try:
        restored = CheckpointReader(workdir).restore(2, ABSTRACT)
        np.testing.assert_array_equal(restored["model"]["kernel"], KERNEL)
    except DamagedCheckpoint as error:
        message = str(error)
    else:
        message = ""

    assert "\n" not in message, name
    np.testing.assert_array_equal(read_workdir(workdir, lambda _: SHAPES)[0]["kernel"], KERNEL)


@pytest.mark.parametrize(
    ("number", "error"),
    PASSING_IN_TENSORSTORE.values(),
    ids=PASSING_IN_TENSORSTORE,
)
def test_a_passing_error_of_tensorstore_is_an_error_of_the_system(
    written, monkeypatch, number, error
):
    """Which ends a run with the exit code after which launchers start it again."""
    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", fail_with(error))
    with pytest.raises(OSError, match=r"checkpoints/2'") as raised:
        CheckpointReader(written).restore(2, ABSTRACT)

    assert (raised.value.errno, isinstance(raised.value, ValueError)) == (number, False)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENOMEM, errno.EMFILE])
@pytest.mark.parametrize(("owner", "method"), [(os, "open"), (pathlib.Path, "stat")])
def test_metadata_that_cannot_be_read_now_are_not_damaged(
    written, monkeypatch, owner, method, number
):
    original = getattr(owner, method)

    def fail(path, *words, **options):
        if str(path).endswith("/2/metadata/metadata"):
            raise OSError(number, os.strerror(number), str(path))
        return original(path, *words, **options)

    monkeypatch.setattr(owner, method, fail)
    for read in (
        lambda: CheckpointReader(written).metadata(2),
        lambda: read_workdir(written, lambda _: SHAPES),
    ):
        with pytest.raises(OSError, match=os.strerror(number)) as raised:
            read()

        assert not isinstance(raised.value, ValueError)


def test_a_checkpoint_from_before_there_were_digests_is_read(workdir):
    (workdir / "checkpoints/2/metadata/metadata").write_text('{"names": ["cat", "dog"]}')
    reader = CheckpointReader(workdir)

    assert reader.metadata(2) == {"names": ["cat", "dog"]}
    np.testing.assert_array_equal(reader.restore(2, ABSTRACT)["model"]["kernel"], KERNEL)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
def test_a_digest_does_not_depend_on_the_layout(dtype):
    array = jnp.asarray(np.random.default_rng(2).normal(size=(8, 6, 5)) * 3).astype(dtype)
    mesh = build_mesh(jax.devices())
    expected = compute_digests({"a": array})

    for spec in (PartitionSpec(), PartitionSpec("data")):
        assert compute_digests({"a": jax.device_put(array, NamedSharding(mesh, spec))}) == expected


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.integers(0, 29), st.integers(0, 31), st.integers(0, 29))
def test_a_digest_changes_with_a_bit_and_with_an_exchange(place, bit, other):
    words = np.random.default_rng(3).integers(2**32, size=30, dtype=np.uint32)
    changed = words.copy()
    exchanged = words.copy()
    changed[place] ^= np.uint32(1 << bit)
    exchanged[[place, other]] = exchanged[[other, place]]
    digests = compute_digests({"words": words, "changed": changed, "exchanged": exchanged})

    assert digests["changed"] != digests["words"]
    assert (digests["exchanged"] != digests["words"]) is (place != other)
