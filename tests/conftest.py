"""The harness: eight CPU devices, strict dtype promotion, no accelerator, nothing written outside temporary folders."""

import os
import signal

# Programs here are compiled once and run a few times: without optimisation they compile several times faster.
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")

# A shell's background job is started with Ctrl-C ignored, and what tests start and interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """A TFDS folder in which the digits are prepared."""
    from vit_jax.data import digits

    folder = tmp_path_factory.mktemp("tfds")
    digits.prepare(str(folder))
    return str(folder)


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """Programs compiled once in a session, shared by tests that build the same model and by runs in other processes."""
    folder = str(tmp_path_factory.mktemp("xla"))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return folder
