"""The harness: eight CPU devices, strict dtype promotion and one cache of compiled programs."""

import contextlib
import ctypes
import dataclasses
import gc
import os
import pathlib
import signal
import time
import types
from importlib.metadata import version

XLA_FLAGS = [
    *os.environ.get("XLA_FLAGS", "").split(),
    "--xla_force_host_platform_device_count=8",
    # Programs run a few times: without optimisation they compile several times faster.
    "--xla_backend_optimization_level=0",
    # One piece of machine code for each program, instead of up to 32, takes one core a fifth less
    # time.
    "--xla_cpu_parallel_codegen_split_count=1",
]
if version("jax").startswith("0.10."):
    # This halves the time again. XLA ends a process whose flags it does not know, and later
    # versions do not know it.
    XLA_FLAGS.append("--xla_cpu_use_fusion_emitters=false")

# Set before jax is imported, which reads it then; subprocesses inherit it.
os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys(XLA_FLAGS))
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
MEMORY = pathlib.Path("/proc/self/statm")
MEMORY_LIMIT = 2 * 2**30
"""Bytes of a process from which on it forgets its programs after a file of tests."""

jax.config.update("jax_numpy_dtype_promotion", "strict")

# A shell's background job is started with Ctrl-C ignored, and what tests start and interrupt would
# inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def is_worker(config):
    """Return whether this process is one of several of pytest-xdist, not the one that reports."""
    return hasattr(config, "workerinput")


def pytest_sessionstart(session):
    """Remove old programs from the cache.

    Most are of code that has changed since, or were cut off when a test killed a process.
    """
    if is_worker(session.config) or not CACHE.is_dir():
        return
    oldest = time.time() - CACHE_DAYS * 86400
    for entry in CACHE.iterdir():
        with contextlib.suppress(FileNotFoundError):  # other tests that begin now remove them, too
            if entry.stat().st_mtime < oldest:
                entry.unlink()


def get_worker_scope(nodeid):
    """Return the name of the tests that share a worker with this one.

    It is the group of `pytest.mark.xdist_group`, which xdist appends, or the file.
    """
    _, separator, group = nodeid.rpartition("@")
    if separator and "]" not in group:
        return group
    return nodeid.partition("::")[0]


def pytest_collection_modifyitems(items):
    """Begin with the longest files, so that no worker is left with one at the end."""
    from tests.tiers import is_fast

    slow = {get_worker_scope(item.nodeid) for item in items if not is_fast(item)}

    def rank(item):
        is_integration = "/integration/" in item.nodeid
        is_slow = get_worker_scope(item.nodeid) in slow
        return not is_integration, not is_slow

    items.sort(key=rank)


def pytest_collection_finish():
    """Keep imported modules out of the garbage collector, and let it run rarely.

    The default threshold is (700, 10, 10); tracing allocates much and leaves little.
    """
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def forget_programs():
    """Drop the compiled programs of this process and give their memory back to the system.

    Those of a file of tests take up to 0.7 GB, and JAX keeps all.
    """
    jax.clear_caches()
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """Bound the memory of this process: several run side by side."""
    result = yield

    is_last = nextitem is None or get_worker_scope(nextitem.nodeid) != get_worker_scope(item.nodeid)
    if is_last and MEMORY.exists():
        num_pages = int(MEMORY.read_text().split()[1])
        if num_pages * os.sysconf("SC_PAGE_SIZE") > MEMORY_LIMIT:
            forget_programs()
    return result


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_xdist_auto_num_workers():
    """Start one process more than there are cores.

    Tests of shells and of several processes leave a core idle while they wait.
    """
    num_cores = yield
    return num_cores + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class ScopeScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return get_worker_scope(nodeid)

    config.option.loadscopereorder = False  # the order of collection is the one above
    return ScopeScheduling(config, log)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """A TFDS folder in which the digits are prepared."""
    from vit_jax.data.kinds import digits

    folder = tmp_path_factory.mktemp("tfds")
    digits.prepare(str(folder))

    return str(folder)


NOT_IN_PROGRAM = (
    "init_from",
    "resume_from",
    "resume_step",
    "allow_code",
    "data",
    "total",
    "evaluation",
    "checkpoint",
    "logging",
    "stop_early",
)


"""Fields of a config that do not change the programs of a run."""


def describe_program(
    config,
    architecture,
    num_examples,
    devices,
    label_shape=(),
    teacher_weights=None,
):
    """Return a description of the programs of a run, and its lengths. The config names a teacher.

    Paths and the periods of evaluation, checkpoints and logs are no part of it.
    """
    from vit_jax.config import resolve

    steps = resolve(
        config,
        num_examples=num_examples,
        num_devices=len(devices),
    )
    lengths = dataclasses.replace(
        steps,
        evaluate_every=0,
        checkpoint_every=0,
        log_every=0,
        evaluators_every={},
    )
    fields = {}
    for field in dataclasses.fields(config):
        if field.name not in NOT_IN_PROGRAM:
            fields[field.name] = getattr(config, field.name)
    fields["schedule"] = dataclasses.replace(config.schedule, warmup="")
    fields["input"] = (config.input.mixup_alpha, config.input.patch_dropout)

    described = (type(config), fields, lengths, architecture, devices, label_shape)
    return repr(described), steps


PROGRAMS = {}  # assemblies and compiled train steps of this process, by the program


def keep_compiled_fields(config, compiled):
    """Return a config with the fields that were chosen when a program was compiled."""
    optimizer = dataclasses.replace(
        config.optimizer,
        accumulation_steps=compiled.optimizer.accumulation_steps,
    )
    model = dataclasses.replace(config.model, remat=compiled.model.remat)
    return dataclasses.replace(
        config,
        model=model,
        optimizer=optimizer,
        sharding=compiled.sharding,
    )


@contextlib.contextmanager
def shared_programs():
    """Share assemblies and train steps among runs of equal programs.

    A resumed or similar run compiles nothing.
    """
    from vit_jax.tools.inspection import replay
    from vit_jax.train import assemble, finetune, pretrain

    build = assemble.assemble
    compile_step = assemble.Assembly.compile_train_step

    def assemble_shared(config, architecture, **options):
        key, steps = describe_program(config, architecture, **options)
        if key not in PROGRAMS:
            PROGRAMS[key] = build(config, architecture, **options)

        assembly = PROGRAMS[key]
        return dataclasses.replace(
            assembly,
            config=keep_compiled_fields(config, assembly.config),
            steps=steps,
        )

    def compile_shared(run, start_step=0):
        num_past_phases = sum(phase.last_step <= start_step for phase in run.steps.earlier_phases)
        key = (id(run.train_step_of_leaves), num_past_phases)  # PROGRAMS keeps the function
        if key not in PROGRAMS:
            PROGRAMS[key] = compile_step(run, start_step)
        return PROGRAMS[key]

    with pytest.MonkeyPatch.context() as patch:
        for verb in (pretrain, finetune, replay):
            patch.setattr(verb, "assemble", assemble_shared)
        patch.setattr(
            assemble.Assembly,
            "compile_train_step",
            compile_shared,
        )
        yield


@pytest.fixture(scope="module")
def compiled_once():
    """Training runs of a file share programs with all such files of this process."""
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
    """The tiny run, trained by the verb: its config, workdir and summary.

    No test may change the workdir.
    """
    from tests import tiny
    from tests.integration import commands

    workdir = tmp_path_factory.mktemp("tiny") / "run"
    with shared_programs():
        commands.succeed(commands.pretraining(data_dir, workdir, *tiny.LENGTH))

    config = tiny.config(*tiny.LENGTH, f"input.data_dir={data_dir}")
    return types.SimpleNamespace(
        config=config,
        workdir=workdir,
        summary=commands.summary(workdir),
    )


@pytest.fixture(autouse=True)
def no_safe_path():
    """Data workers set PYTHONSAFEPATH for the rest of a process.

    It is removed, so that programs that later tests start find this folder.
    """
    os.environ.pop("PYTHONSAFEPATH", None)
    yield
    os.environ.pop("PYTHONSAFEPATH", None)
