"""The harness: eight CPU devices, strict dtype promotion, no accelerator, one cache of compiled programs."""

import contextlib
import dataclasses
import gc
import os
import pathlib
import signal
import time
import types
from importlib.metadata import version

# Before jax is imported, which reads it then; subprocesses inherit it.
os.environ["XLA_FLAGS"] = " ".join(
    dict.fromkeys(
        [
            *os.environ.get("XLA_FLAGS", "").split(),
            "--xla_force_host_platform_device_count=8",
            # Programs run a few times: without optimisation they compile several times faster.
            "--xla_backend_optimization_level=0",
            # One piece of machine code for each program, instead of up to 32: a fifth less time for
            # one core.
            "--xla_cpu_parallel_codegen_split_count=1",
            # This halves the time again. XLA ends a process whose flags it does not know, and later
            # ones do not.
            *(
                ["--xla_cpu_use_fusion_emitters=false"]
                if version("jax").startswith("0.10.")
                else []
            ),
        ]
    )
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiled once, read by every later process on this machine: other workers, commands that tests
# start, later runs.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(
    pathlib.Path(__file__).parents[1] / ".cache" / f"xla-{version('jax')}"
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import pytest

pytest_plugins = ["tests.tiers"]

CACHE = pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
CACHE_DAYS = 7

jax.config.update("jax_numpy_dtype_promotion", "strict")

# A shell's background job is started with Ctrl-C ignored, and what tests start and interrupt would
# inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def is_worker(config):
    """Whether this process is one of several of pytest-xdist, not the one that distributes and reports."""
    return hasattr(config, "workerinput")


def pytest_sessionstart(session):
    """Forget old programs: most are of code that has changed since, or were cut off when a test killed a process."""
    if not is_worker(session.config) and CACHE.is_dir():
        for entry in CACHE.iterdir():
            if entry.stat().st_mtime < time.time() - CACHE_DAYS * 86400:
                entry.unlink(missing_ok=True)


def place_of(nodeid):
    """Return what shares a worker: the group of `pytest.mark.xdist_group`, which xdist appends, or the file."""
    _, separator, group = nodeid.rpartition("@")
    return group if separator and "]" not in group else nodeid.partition("::")[0]


def pytest_collection_modifyitems(items):
    """Begin with the longest files, so that no worker is left with one at the end."""
    from tests.tiers import is_fast

    slow = {place_of(item.nodeid) for item in items if not is_fast(item)}
    items.sort(
        key=lambda item: ("/integration/" not in item.nodeid, place_of(item.nodeid) not in slow)
    )


def pytest_collection_finish():
    """What is imported by now stays: the garbage collector need not look through it again and again."""
    gc.freeze()
    gc.set_threshold(
        50_000, 10, 10
    )  # instead of (700, 10, 10): tracing allocates much and leaves little


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class ByPlace(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return place_of(nodeid)

    config.option.loadscopereorder = False  # the order of collection is the one above
    return ByPlace(config, log)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """A TFDS folder in which the digits are prepared."""
    from vit_jax.data.kinds import digits

    folder = tmp_path_factory.mktemp("tfds")
    digits.prepare(str(folder))

    return str(folder)


def program_of(config, architecture, num_examples, devices, label_shape=()):
    """Return what the programs of a run depend on, and its lengths.

    Where it reads and writes is no part of it.
    """
    from vit_jax.config import resolve

    steps = resolve(config, num_examples=num_examples, num_devices=len(devices))
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    outside = ("init_from", "resume_from", "resume_step", "allow_code", "data", "total")

    for name in (*outside, "evaluation", "checkpoint", "logging", "stop_early"):
        fields.pop(name, None)

    fields |= {
        "schedule": dataclasses.replace(config.schedule, warmup=""),
        "input": config.input.mixup_alpha,
    }
    lengths = dataclasses.replace(  # without periods of what happens between steps
        steps,
        evaluate_every=0,
        checkpoint_every=0,
        log_every=0,
        evaluators_every={},
    )

    return repr((type(config), fields, lengths, architecture, devices, label_shape)), steps


PROGRAMS = {}  # assemblies and compiled train steps of this process, by the program


@contextlib.contextmanager
def shared_programs():
    """Share assemblies and train steps among runs of equal programs: a resumed or similar run compiles nothing."""
    from vit_jax.tools.inspection import replay
    from vit_jax.train import assemble, finetune, pretrain

    build = assemble.assemble
    compile_step = assemble.Assembly.compile_train_step

    def shared(config, architecture, **options):
        key, steps = program_of(config, architecture, **options)
        if key not in PROGRAMS:
            PROGRAMS[key] = build(config, architecture, **options)

        batch = config.evaluation.global_batch or config.global_batch
        chosen = PROGRAMS[key].config
        optimizer = dataclasses.replace(
            config.optimizer,
            accumulation_steps=chosen.optimizer.accumulation_steps,
        )
        model = dataclasses.replace(config.model, remat=chosen.model.remat)
        config = dataclasses.replace(
            config,
            model=model,
            optimizer=optimizer,
            sharding=chosen.sharding,
        )

        return dataclasses.replace(
            PROGRAMS[key],
            config=config,
            steps=steps,
            evaluation_batch=batch,
        )

    def compile_shared(run, start_step=0):
        over = sum(phase.last_step <= start_step for phase in run.steps.phases)
        key = (id(run.train_step_of_leaves), over)  # the first of which PROGRAMS keeps

        if key not in PROGRAMS:
            PROGRAMS[key] = compile_step(run, start_step)
        return PROGRAMS[key]

    with pytest.MonkeyPatch.context() as patch:
        for verb in (pretrain, finetune, replay):
            patch.setattr(verb, "assemble", shared)

        patch.setattr(assemble.Assembly, "compile_train_step", compile_shared)
        yield


@pytest.fixture(scope="module")
def compiled_once():
    """Training runs of a file share programs with each other and with all such files of this process."""
    with shared_programs():
        yield


@pytest.fixture(scope="module")
def cloud():
    """An emulator of Cloud Storage with an empty bucket: the proxy before it."""
    from tests import gcs

    with gcs.cloud_storage() as proxy:
        yield proxy


@pytest.fixture
def bucket_folder(cloud, request):
    """A folder of the bucket for one test, which must leave no injected fault."""
    from tests.gcs import BUCKET
    from vit_jax.storage.buckets import BucketPath

    yield BucketPath(f"gs://{BUCKET}/{request.node.name}")

    assert not cloud.forgive(), "a fault that was injected met no request"


@pytest.fixture(scope="session")
def tiny_run(data_dir, tmp_path_factory):
    """The tiny run, trained by the verb: its config, its workdir, which no test may change, and its summary."""
    from tests import tiny
    from tests.integration import commands

    workdir = tmp_path_factory.mktemp("tiny") / "run"
    with shared_programs():
        commands.succeed(commands.pretraining(data_dir, workdir, *tiny.LENGTH))

    config = tiny.config(*tiny.LENGTH, f"input.data_dir={data_dir}")
    return types.SimpleNamespace(config=config, workdir=workdir, summary=commands.summary(workdir))


@pytest.fixture(autouse=True)
def no_safe_path():
    """Data workers set PYTHONSAFEPATH for the rest of a process; programs that later tests start find this folder."""
    os.environ.pop("PYTHONSAFEPATH", None)
    yield
    os.environ.pop("PYTHONSAFEPATH", None)
