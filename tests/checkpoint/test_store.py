import gc
import itertools
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint.utils import to_shape_dtype_struct

from vit_jax.checkpoint import CheckpointReader, CheckpointStore, workarounds
from vit_jax.checkpoint.reader import has_checkpoints
from vit_jax.config.metric_names import METRICS
from vit_jax.sharding import build_mesh


def items(value):
    return {
        "progress": {"step": jnp.int32(value)},
        "model": {"a": {"kernel": jnp.full((8, 3), float(value))}},
    }


def save(store, step, **metrics):
    store.save(step, items(step), metadata={"class_names": ["x"], "pair": [1, 2]}, metrics=metrics)


@pytest.fixture
def open_store(tmp_path):
    stores = []

    def open_(**options):
        stores.append(CheckpointStore(tmp_path, **options))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


def test_round_trip_with_metadata(open_store, tmp_path):
    store = open_store()
    assert store.latest_step() is None
    assert not has_checkpoints(tmp_path)

    save(store, 7)
    store.wait()

    assert has_checkpoints(tmp_path)

    (tmp_path / "checkpoints/8.orbax-checkpoint-tmp/model").mkdir(parents=True)  # half written
    again = CheckpointReader(tmp_path)

    assert max(again.all_steps()) == 7
    assert again.metadata(7) == {"class_names": ["x"], "pair": [1, 2]}

    restored = again.restore(7, jax.tree.map(to_shape_dtype_struct, items(0)))
    np.testing.assert_array_equal(restored["model"]["a"]["kernel"], np.full((8, 3), 7.0))
    assert int(restored["progress"]["step"]) == 7


def test_saving_asks_nothing_of_the_service_that_counts_a_runs_questions(open_store, monkeypatch):
    """Told the number of a step by orbax, it would answer a notice for a question long past."""
    asked = []
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", asked.append)
    store = open_store(keep_latest=1)

    for step in (1, 2):
        save(store, step)

    store.wait()
    assert asked == []


@pytest.mark.parametrize(
    ("name", "values", "kept"),
    [
        ("accuracy", (0.5, 0.9, None, 0.1, 0.2, 0.3), [2, 5, 6]),
        ("loss", (0.5, 0.1, 0.9, None, 0.8, 0.7), [2, 5, 6]),
    ],
)
def test_keeps_the_latest_and_the_best(open_store, tmp_path, name, values, kept):
    store = open_store(
        keep_latest=2,
        keep_best=1,
        best_metric=f"test_{name}",
        best_mode=METRICS[name].mode,
    )
    for step, value in enumerate(values, start=1):
        save(store, step, **({} if value is None else {f"test_{name}": value}))

    store.wait()
    assert CheckpointReader(tmp_path).all_steps() == kept


def test_the_best_outlives_a_restart(open_store, tmp_path):
    options = {"keep_latest": 1, "keep_best": 1, "best_metric": "test_accuracy"}
    store = open_store(**options)

    for step, accuracy in ((1, 0.9), (2, 0.1), (3, 0.2)):
        save(store, step, test_accuracy=accuracy)

    store.wait()
    again = open_store(**options)
    save(again, 4, test_accuracy=0.3)
    save(again, 5)
    again.wait()

    assert CheckpointReader(tmp_path).all_steps() == [1, 5]


def test_restores_onto_another_layout(open_store, tmp_path):
    store = open_store()
    save(store, 1)
    store.wait()
    sharding = NamedSharding(build_mesh(jax.devices()), PartitionSpec("data"))
    abstract = {
        "model": {"a": {"kernel": jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=sharding)}}
    }
    kernel = CheckpointReader(tmp_path).restore(1, abstract)["model"]["a"]["kernel"]

    assert kernel.sharding == sharding
    np.testing.assert_array_equal(kernel, np.ones((8, 3)))


def test_every_mismatch_is_listed_at_once(open_store, tmp_path):
    store = open_store()
    save(store, 1)
    store.wait()
    wrong = {"model": {"a": {"kernal": jnp.zeros((8, 3)), "bias": jnp.zeros(3)}}}

    with pytest.raises(ValueError, match="is not of this model") as raised:
        CheckpointReader(tmp_path).restore(
            1,
            {"model": jax.tree.map(to_shape_dtype_struct, wrong["model"])},
        )

    for part in (
        "missing: a/kernal (8, 3) (nearest: a/kernel)",
        "missing: a/bias (3,)",
        "left over: a/kernel (8, 3)",
    ):
        assert part in str(raised.value)

    with pytest.raises(ValueError, match="no item 'polyak'"):
        CheckpointReader(tmp_path).restore(
            1,
            {"polyak": jax.tree.map(to_shape_dtype_struct, wrong["model"])},
        )


@pytest.mark.slow
def test_saving_leaves_nothing_in_memory(open_store):
    """What is left counts Python's objects; orbax's own counting of bytes left 48 at each save."""
    store = open_store()
    counts = []

    for step in range(1, 13):
        save(store, step)
        store.wait()
        gc.collect()
        counts.append(len(gc.get_objects()))

    assert min(later - earlier for earlier, later in itertools.pairwise(counts[2:])) < 10


@pytest.mark.parametrize("spread", [False, True])
def test_attention_with_an_axis_of_heads_is_read(open_store, tmp_path, spread):
    """As checkpoints were before 0.3: the numbers are the same, in the same order, and so is their digest."""
    kernel = np.arange(4 * 2 * 3.0, dtype=np.float32)
    out = np.arange(6 * 4.0, dtype=np.float32)
    earlier = {"query/kernel": kernel.reshape(1, 4, 2, 3), "out/kernel": out.reshape(1, 2, 3, 4)}
    now = {"query/kernel": kernel.reshape(1, 4, 6), "out/kernel": out.reshape(1, 6, 4)}
    store = open_store()
    store.save(1, {"model": jax.tree.map(jnp.asarray, earlier)}, metadata={}, metrics={})
    store.wait()
    specs = {
        "query/kernel": PartitionSpec(None, "data"),
        "out/kernel": PartitionSpec(None, None, "data"),
    }
    mesh = build_mesh(jax.devices()[: 4 if spread else 1])
    layout = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    abstract = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout[name])
        for name, x in now.items()
    }
    reader = CheckpointReader(tmp_path)
    restored = reader.restore(1, {"model": abstract})["model"]

    for name, array in now.items():
        np.testing.assert_array_equal(restored[name], array)
        assert restored[name].sharding == abstract[name].sharding

    placeholders = {name: np.broadcast_to(np.float32(0), x.shape) for name, x in now.items()}
    in_memory = reader.restore(1, {"model": placeholders})["model"]

    np.testing.assert_array_equal(in_memory["query/kernel"], now["query/kernel"])

    wrong = {
        "query/kernel": np.zeros((1, 4, 5), np.float32),
        "out/kernel": placeholders["out/kernel"],
    }

    with pytest.raises(ValueError, match="shape: query/kernel is"):
        reader.restore(1, {"model": wrong})


def test_no_program_is_compiled_to_save_a_small_array_that_all_devices_hold(open_store, caplog):
    everywhere = NamedSharding(build_mesh(jax.devices()), PartitionSpec())
    kernel = jax.device_put(np.ones((24, 11), np.float32), everywhere)

    with jax.log_compiles():
        open_store().save(1, {"model": {"kernel": kernel}}, metadata={}, metrics={})

    assert not [message for message in caplog.messages if "slice" in message]


def test_abandoned_writes_of_orbax_give_no_warning(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)

    async def async_serialize():
        pass

    async def other():
        pass

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        workarounds.apply.__wrapped__()

        for function in (async_serialize, other):
            function()
            gc.collect()

    assert [str(warning.message).split("'")[1].split(".")[-1] for warning in caught] == ["other"]


def test_errors_in_threads_of_orbax_are_not_printed(monkeypatch):
    """The store raises them itself; Python would print a hundred lines of tracebacks."""
    printed = []
    monkeypatch.setattr(threading, "excepthook", lambda report: printed.append(report.exc_type))
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    workarounds.apply.__wrapped__()  # wraps the hook above, too

    def end_of_loop():
        raise RuntimeError("Event loop is closed")

    for target in (lambda: ocp.type_handlers.get_type_handler(complex), end_of_loop, lambda: 1 / 0):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()

    assert printed == [ZeroDivisionError]
