"""Checkpoints with other bytes than were written are noticed, in any kind of damage."""

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
from numpy.testing import assert_array_equal

from vit_jax.checkpoint import CheckpointReader, CheckpointStore, DamagedCheckpoint
from vit_jax.checkpoint.digests import compute_digests
from vit_jax.checkpoint.reader import read_workdir
from vit_jax.sharding import build_mesh


def find_arrays(step):
    """Return the file that has the bytes of the kernel."""
    for path in (step / "model").rglob("d/*"):
        if path.stat().st_size > KERNEL.nbytes / 2:
            return path
    raise AssertionError("no file of arrays")


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
        store.save(
            step,
            ITEMS,
            metadata={"names": ["cat", "dog"]},
            metrics={},
        )

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
    """A read either is rejected or returns what was written."""
    file = find_arrays(workdir / "checkpoints/2")
    reader = CheckpointReader(workdir)
    rejected = 0

    rng = np.random.default_rng(1)
    num_bytes = file.stat().st_size

    for position in rng.integers(num_bytes, size=20):
        flip_a_bit(file, position)
        try:
            restored = reader.restore(2, ABSTRACT)
            assert_array_equal(restored["model"]["kernel"], KERNEL)
        except DamagedCheckpoint:
            rejected += 1
        flip_a_bit(file, position)

    assert rejected > 10
    reader.restore(2, ABSTRACT)


def replace_text(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def empty_folder(step):
    shutil.rmtree(step)
    step.mkdir()


def truncate_all(files, size):
    for path in files:
        os.truncate(path, size)


def link_description(step, target):
    description = step / "model/_METADATA"
    description.unlink()
    description.symlink_to(target)


def add_large_file(step):
    path = step / "model/process_0"
    path.touch()
    os.truncate(path, 2**30)


def link_folder(step):
    model = step / "model"
    model.rename(step.parent.parent / "elsewhere")
    model.symlink_to("../../elsewhere")


def replace_by_pipe(step):
    description = step / "model/_METADATA"
    description.unlink()
    os.mkfifo(description)


def replace_in_description(old, new):
    return lambda step: replace_text(
        step / "model/_METADATA",
        old,
        new,
    )


def replace_in_layout(old, new):
    return lambda step: replace_text(
        step / "model/_sharding",
        old,
        new,
    )


def write_text(name, text):
    return lambda step: (step / name).write_text(text)


def flip(name, position):
    return lambda step: flip_a_bit(step / name, position)


def remove(name):
    return lambda step: (step / name).unlink()


def truncate(pattern, size):
    return lambda step: truncate_all(step.glob(pattern), size)


def link(target):
    return lambda step: link_description(step, target)


def remove_arrays(step):
    shutil.rmtree(step / "model/ocdbt.process_0")


def link_to_endless_file(step):
    path = step / "model/process_0"
    path.symlink_to("/dev/zero")


DEEP = "[" * 100_000


DAMAGES = {
    "truncated metadata": write_text("metadata/metadata", '{"names"'),
    "empty metadata": write_text("metadata/metadata", ""),
    "changed metadata": flip("metadata/metadata", 12),
    "empty manifest": write_text("model/manifest.ocdbt", ""),
    "no arrays": remove_arrays,
    "empty folder": empty_folder,
    "truncated arrays": truncate("model/ocdbt.process_0/d/*", 20),
    "endless description": link("/dev/zero"),
    "endless metadata of arrays": link_to_endless_file,
    "large metadata of arrays": add_large_file,
    "linked folder": link_folder,
    "pipe": replace_by_pipe,
    "no description": remove("model/_METADATA"),
    "truncated description": truncate("model/_METADATA", 20),
    "another description": write_text("model/_METADATA", "[]"),
    "another key in the description": replace_in_description("key_metadata", "kez_metadata"),
    "another option in the description": replace_in_description(
        "skip_deserialize",
        "rkip_deserialize",
    ),
    "another key of the layout": replace_in_layout("sharding_type", "sharding_typf"),
    "another class of the layout": replace_in_layout("SingleDevice", "SinyleDevice"),
    "another type in the description": replace_in_description("np.ndarray", "mp.ndarray"),
    "no manifest": remove("model/manifest.ocdbt"),
    "changed manifest": flip("model/manifest.ocdbt", 30),
    "empty arrays": truncate("model/d/*", 0),
    "deeply nested metadata": write_text("metadata/metadata", DEEP),
    "deeply nested description": write_text("model/_METADATA", DEEP),
    "linked to itself": link("_METADATA"),
}


def read_parameters(workdir):
    """Return parameters, metadata and the words for what was read."""
    return read_workdir(workdir, lambda _: SHAPES)


@pytest.mark.parametrize(
    "damage",
    DAMAGES.values(),
    ids=[name.replace(" ", "_") for name in DAMAGES],
)
def test_damage_is_one_line_and_the_step_before_is_read(
    workdir,
    damage,
    caplog,
):
    damage(workdir / "checkpoints" / "2")
    one_line = r"checkpoints/2 is damaged: (?!.*damaged)[^\n]*[^.]\.$"

    with pytest.raises(DamagedCheckpoint, match=one_line):
        CheckpointReader(workdir).restore(2, ABSTRACT)

    parameters, metadata, words = read_parameters(workdir)
    (message,) = [text for text in caplog.messages if "damaged" in text]

    assert_array_equal(parameters["kernel"], KERNEL)
    assert metadata == {"names": ["cat", "dog"]}
    assert words == "parameters of step 1"
    assert message.endswith("Read instead: parameters of step 1.")

    shutil.rmtree(workdir / "checkpoints" / "1")
    no_checkpoint = r"No checkpoint in .* can be used\. .*\n.*checkpoints/2 is damaged"
    with pytest.raises(ValueError, match=no_checkpoint):
        read_parameters(workdir)


def wrap_by_orbax(error):
    """Return the error that orbax raises for an error while reading an array."""
    outer = Exception(
        "Encountered error while reading array index: (slice(0, 64, 1),). "
        "See full TensorStore details"
    )
    outer.__cause__ = error
    return outer


TENSORSTORE = 'Error opening "zarr" driver: Error reading local file "/d/1"'
STORAGE_FAILS = ValueError(f"UNKNOWN: {TENSORSTORE}: Input/output error [os_error_code='5']")
NO_PERMISSION = ValueError(f"PERMISSION_DENIED: {TENSORSTORE} [OS error 13: EACCES]")
NO_MEMORY = ValueError(f"RESOURCE_EXHAUSTED: {TENSORSTORE}")
ABORTED = ValueError(f"ABORTED: {TENSORSTORE} [os_error_code='116']")
PASSING = {
    "no device": RuntimeError("Unable to initialize backend 'cuda': no device"),
    "no memory": MemoryError(),
    "no memory of a device": jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
    "failing storage": OSError(errno.EIO, "Input/output error"),
    "no permission": PermissionError(errno.EACCES, "Permission denied"),
    "stop": KeyboardInterrupt(),
}
PASSING_IN_TENSORSTORE = {
    "storage": (errno.EIO, STORAGE_FAILS),
    "permission": (errno.EACCES, NO_PERMISSION),
    "memory": (errno.EIO, wrap_by_orbax(NO_MEMORY)),
    "network": (errno.ESTALE, wrap_by_orbax(ABORTED)),
}


def fail_with(error):
    def fail(*_, **__):
        raise error

    return fail


@pytest.mark.parametrize("method", ["restore", "metadata"])
@pytest.mark.parametrize("name", PASSING)
def test_an_error_that_says_nothing_about_the_files_is_raised_as_it_is(
    written,
    monkeypatch,
    method,
    name,
):
    error = PASSING[name]
    monkeypatch.setattr(
        ocp.PyTreeCheckpointHandler,
        method,
        fail_with(error),
    )

    with pytest.raises(type(error)) as of_restore:
        CheckpointReader(written).restore(2, ABSTRACT)
    with pytest.raises(type(error)) as of_read:
        read_parameters(written)

    assert of_restore.value is error
    assert of_read.value is error


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
    written,
    monkeypatch,
    method,
    error,
):
    original = getattr(ocp.PyTreeCheckpointHandler, method)

    def fail_at_step_2(handler, path, *words, **options):
        if "/checkpoints/2/" in str(path):
            raise error
        return original(handler, path, *words, **options)

    monkeypatch.setattr(
        ocp.PyTreeCheckpointHandler,
        method,
        fail_at_step_2,
    )

    with pytest.raises(DamagedCheckpoint, match=type(error).__name__) as raised:
        CheckpointReader(written).restore(2, ABSTRACT)
    _, _, words = read_parameters(written)

    assert "\n" not in str(raised.value)
    assert words == "parameters of step 1"


def list_descriptions(folder):
    """Return the files that describe the arrays of an item."""
    files = []
    for path in sorted((folder / "model").rglob("*")):
        if path.is_file() and path.parent.name != "d":
            files.append(path)
    return files


def damage_at_random(folder, generator):
    """Change, cut or lengthen a file that describes the arrays of an item; return its name."""
    files = list_descriptions(folder)
    number = generator.integers(len(files))
    file = files[number]
    content = bytearray(file.read_bytes())
    index = int(generator.integers(max(len(content), 1)))
    kind = generator.integers(4)

    if kind == 0:
        content[index : index + 1] = generator.bytes(1)
    elif kind == 1:
        content[index : index + 1] = b"x"
    elif kind == 2:
        content[index:index] = generator.bytes(3)
    else:
        del content[index:]

    file.write_bytes(content)
    return file.name


@pytest.mark.parametrize("seed", range(12))
def test_a_random_damage_is_one_line_or_harmless(workdir, seed):
    name = damage_at_random(workdir / "checkpoints/2", np.random.default_rng(seed))
    message = ""

    try:
        restored = CheckpointReader(workdir).restore(2, ABSTRACT)
        assert_array_equal(restored["model"]["kernel"], KERNEL)
    except DamagedCheckpoint as error:
        message = str(error)
    parameters, _, _ = read_parameters(workdir)

    assert "\n" not in message, name
    assert_array_equal(parameters["kernel"], KERNEL)


@pytest.mark.parametrize(
    ("number", "error"),
    PASSING_IN_TENSORSTORE.values(),
    ids=PASSING_IN_TENSORSTORE,
)
def test_a_passing_error_of_tensorstore_is_an_error_of_the_system(
    written,
    monkeypatch,
    number,
    error,
):
    """It ends a run with the exit code after which launchers start it again."""
    monkeypatch.setattr(
        ocp.PyTreeCheckpointHandler,
        "restore",
        fail_with(error),
    )

    with pytest.raises(OSError, match=r"checkpoints/2'") as raised:
        CheckpointReader(written).restore(2, ABSTRACT)

    assert raised.value.errno == number
    assert not isinstance(raised.value, ValueError)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENOMEM, errno.EMFILE])
@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (os, "open"),
        (pathlib.Path, "stat"),
    ],
)
def test_metadata_that_cannot_be_read_now_are_not_damaged(
    written,
    monkeypatch,
    owner,
    method,
    number,
):
    original = getattr(owner, method)
    message = os.strerror(number)

    def fail(path, *words, **options):
        if str(path).endswith("/2/metadata/metadata"):
            raise OSError(number, message, str(path))
        return original(path, *words, **options)

    monkeypatch.setattr(owner, method, fail)

    with pytest.raises(OSError, match=message) as of_metadata:
        CheckpointReader(written).metadata(2)
    with pytest.raises(OSError, match=message) as of_read:
        read_parameters(written)

    assert not isinstance(of_metadata.value, ValueError)
    assert not isinstance(of_read.value, ValueError)


def test_a_checkpoint_from_before_there_were_digests_is_read(workdir):
    (workdir / "checkpoints/2/metadata/metadata").write_text('{"names": ["cat", "dog"]}')
    reader = CheckpointReader(workdir)

    assert reader.metadata(2) == {"names": ["cat", "dog"]}
    assert_array_equal(reader.restore(2, ABSTRACT)["model"]["kernel"], KERNEL)


@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec("data")], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
def test_a_digest_does_not_depend_on_the_layout(dtype, spec):
    numbers = np.random.default_rng(2).normal(size=(8, 6, 5)) * 3
    array = jnp.asarray(numbers).astype(dtype)
    sharding = NamedSharding(build_mesh(jax.devices()), spec)

    sharded = jax.device_put(array, sharding)

    assert compute_digests({"a": sharded}) == compute_digests({"a": array})


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
