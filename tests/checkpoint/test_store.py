"""Checkpoints that are written, kept, restored and found again."""

import gc
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
from numpy.testing import assert_array_equal
from orbax.checkpoint.utils import to_shape_dtype_struct

from vit_jax.checkpoint import CheckpointReader, CheckpointStore, workarounds
from vit_jax.checkpoint.reader import has_checkpoints
from vit_jax.config.metric_names import METRICS
from vit_jax.sharding import build_mesh


def build_abstract(shapes, num_devices):
    """Return abstract arrays of these shapes, split over devices."""
    mesh = build_mesh(jax.devices()[:num_devices])
    specs = {
        "query/kernel": PartitionSpec(None, "data"),
        "out/kernel": PartitionSpec(None, None, "data"),
    }
    abstract = {}
    for name, spec in specs.items():
        sharding = NamedSharding(mesh, spec)
        abstract[name] = jax.ShapeDtypeStruct(
            shapes[name],
            np.float32,
            sharding=sharding,
        )
    return abstract


@pytest.fixture
def with_axis_of_heads(open_store, tmp_path):
    """A reader of a step whose attention has an axis of heads, and the arrays without it."""
    query = np.arange(4 * 2 * 3.0, dtype=np.float32)
    out = np.arange(6 * 4.0, dtype=np.float32)
    model = {"query/kernel": query.reshape(1, 4, 2, 3), "out/kernel": out.reshape(1, 2, 3, 4)}

    store = open_store()
    store.save(
        1,
        {"model": jax.tree.map(jnp.asarray, model)},
        metadata={},
        metrics={},
    )
    store.wait()

    expected = {"query/kernel": query.reshape(1, 4, 6), "out/kernel": out.reshape(1, 6, 4)}
    return CheckpointReader(tmp_path), expected


def build_items(value):
    return {
        "progress": {"step": jnp.int32(value)},
        "model": {"a": {"kernel": jnp.full((8, 3), float(value))}},
    }


def save_step(store, step, **metrics):
    metadata = {"class_names": ["x"], "pair": [1, 2]}
    store.save(
        step,
        build_items(step),
        metadata=metadata,
        metrics=metrics,
    )


@pytest.fixture
def open_store(tmp_path):
    """A function that opens a store, which is closed after the test."""
    stores = []

    def open_(**options):
        stores.append(CheckpointStore(tmp_path, **options))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


def test_round_trip_with_metadata(open_store, tmp_path):
    abstract = jax.tree.map(to_shape_dtype_struct, build_items(0))
    store = open_store()

    assert store.latest_step() is None
    assert not has_checkpoints(tmp_path)

    save_step(store, 7)
    store.wait()
    # Half written.
    (tmp_path / "checkpoints/8.orbax-checkpoint-tmp/model").mkdir(parents=True)
    reader = CheckpointReader(tmp_path)
    restored = reader.restore(7, abstract)

    kernel = restored["model"]["a"]["kernel"]
    step = restored["progress"]["step"]
    assert has_checkpoints(tmp_path)
    assert max(reader.all_steps()) == 7
    assert reader.metadata(7) == {"class_names": ["x"], "pair": [1, 2]}
    assert_array_equal(kernel, np.full((8, 3), 7.0))
    assert int(step) == 7


def test_saving_does_not_use_the_service_that_counts_requests_of_a_run(open_store, monkeypatch):
    """Told the number of a step by orbax, it would answer a notice for a request long past."""
    calls = []
    monkeypatch.setattr(
        multihost_utils,
        "reached_preemption_sync_point",
        calls.append,
    )
    store = open_store(keep_latest=1)

    save_step(store, 1)
    save_step(store, 2)
    store.wait()

    assert calls == []


@pytest.mark.parametrize(
    ("name", "values", "kept"),
    [
        ("accuracy", (0.5, 0.9, None, 0.1, 0.2, 0.3), [2, 5, 6]),
        ("loss", (0.5, 0.1, 0.9, None, 0.8, 0.7), [2, 5, 6]),
    ],
)
def test_keeps_the_latest_and_the_best(
    open_store,
    tmp_path,
    name,
    values,
    kept,
):
    metric = f"test_{name}"
    store = open_store(
        keep_latest=2,
        keep_best=1,
        best_metric=metric,
        best_mode=METRICS[name].mode,
    )

    for step, value in enumerate(values, start=1):
        metrics = {}
        if value is not None:
            metrics[metric] = value
        save_step(store, step, **metrics)
    store.wait()

    assert CheckpointReader(tmp_path).all_steps() == kept


def test_the_best_outlives_a_restart(open_store, tmp_path):
    options = {
        "keep_latest": 1,
        "keep_best": 1,
        "best_metric": "test_accuracy",
    }

    store = open_store(**options)
    for step, accuracy in ((1, 0.9), (2, 0.1), (3, 0.2)):
        save_step(store, step, test_accuracy=accuracy)
    store.wait()

    later_store = open_store(**options)
    save_step(later_store, 4, test_accuracy=0.3)
    save_step(later_store, 5)
    later_store.wait()

    assert CheckpointReader(tmp_path).all_steps() == [1, 5]


@pytest.fixture
def saved(open_store, tmp_path):
    """A reader of one saved step."""
    store = open_store()
    save_step(store, 1)
    store.wait()
    return CheckpointReader(tmp_path)


def test_restores_onto_another_layout(saved):
    mesh = build_mesh(jax.devices())
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    abstract = jax.ShapeDtypeStruct(
        (8, 3),
        jnp.float32,
        sharding=sharding,
    )

    restored = saved.restore(1, {"model": {"a": {"kernel": abstract}}})
    kernel = restored["model"]["a"]["kernel"]

    assert kernel.sharding == sharding
    assert_array_equal(kernel, np.ones((8, 3)))


def test_every_mismatch_is_listed_at_once(saved):
    wrong = {"a": {"kernal": jnp.zeros((8, 3)), "bias": jnp.zeros(3)}}
    abstract = jax.tree.map(to_shape_dtype_struct, wrong)

    with pytest.raises(ValueError, match="is not of this model") as raised:
        saved.restore(1, {"model": abstract})

    message = str(raised.value)
    assert "missing: a/kernal (8, 3) (nearest: a/kernel)" in message
    assert "missing: a/bias (3,)" in message
    assert "left over: a/kernel (8, 3)" in message


def test_an_item_that_was_not_saved_is_named(saved):
    abstract = {"a": {"kernel": jax.ShapeDtypeStruct((8, 3), jnp.float32)}}

    with pytest.raises(ValueError, match="no item 'polyak'"):
        saved.restore(1, {"polyak": abstract})


@pytest.mark.slow
def test_saving_leaves_nothing_in_memory(open_store):
    """Objects of Python are counted: orbax's count of bytes left 48 at each save."""
    store = open_store()
    counts = []

    for step in range(1, 13):
        save_step(store, step)
        store.wait()
        gc.collect()
        counts.append(len(gc.get_objects()))

    growth = np.diff(counts[2:])
    assert growth.min() < 10


def run_in_thread(target):
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()


@pytest.mark.parametrize("num_devices", [1, 4])
def test_attention_with_an_axis_of_heads_is_read(with_axis_of_heads, num_devices):
    """Checkpoints before 0.3 have the same numbers in the same order, and the same digest."""
    reader, expected = with_axis_of_heads
    shapes = {name: array.shape for name, array in expected.items()}
    abstract = build_abstract(shapes, num_devices)

    restored = reader.restore(1, {"model": abstract})["model"]

    for name, array in expected.items():
        assert_array_equal(restored[name], array)
        assert restored[name].sharding == abstract[name].sharding


def build_placeholders(arrays):
    placeholders = {}
    for name, array in arrays.items():
        placeholders[name] = np.broadcast_to(np.float32(0), array.shape)
    return placeholders


def test_attention_with_an_axis_of_heads_is_read_into_memory(with_axis_of_heads):
    reader, expected = with_axis_of_heads

    placeholders = build_placeholders(expected)

    restored = reader.restore(1, {"model": placeholders})

    found = restored["model"]["query/kernel"]
    assert_array_equal(found, expected["query/kernel"])


def test_attention_of_another_width_is_rejected(with_axis_of_heads):
    reader, expected = with_axis_of_heads
    wrong = build_placeholders(expected)
    wrong["query/kernel"] = np.zeros((1, 4, 5), np.float32)

    with pytest.raises(ValueError, match="shape: query/kernel is"):
        reader.restore(1, {"model": wrong})


def test_no_program_is_compiled_to_save_a_small_array_that_all_devices_hold(open_store, caplog):
    mesh = build_mesh(jax.devices())
    everywhere = NamedSharding(mesh, PartitionSpec())
    kernel = jax.device_put(np.ones((24, 11), np.float32), everywhere)
    store = open_store()

    with jax.log_compiles():
        store.save(
            1,
            {"model": {"kernel": kernel}},
            metadata={},
            metrics={},
        )

    for message in caplog.messages:
        assert "slice" not in message


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

        async_serialize()
        gc.collect()
        other()
        gc.collect()

    (warning,) = caught
    name = str(warning.message).split("'")[1]

    assert name.endswith(".other")


def test_errors_in_threads_of_orbax_are_not_printed(monkeypatch):
    """The store raises them itself; Python would print a hundred lines of tracebacks."""
    printed = []
    monkeypatch.setattr(
        threading,
        "excepthook",
        lambda report: printed.append(report.exc_type),
    )
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    # It wraps the hook above, too.
    workarounds.apply.__wrapped__()

    def end_of_loop():
        raise RuntimeError("Event loop is closed")

    run_in_thread(lambda: ocp.type_handlers.get_type_handler(complex))
    run_in_thread(end_of_loop)
    run_in_thread(lambda: 1 / 0)

    assert printed == [ZeroDivisionError]
