"""Eight CPU devices, strict dtype promotion, one compilation cache for each process of the run."""

import os
import threading

import jax
import numpy as np
import pytest

import ipu_pipeline as ipu

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_configure(config):
    # Many tests compile the same programs: schedules, counts and repeats do not change them. A process of
    # pytest-xdist has a cache of its own, since JAX writes into a file that others may read already.
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    directory = config.cache.mkdir(f"xla{worker}") if hasattr(config, "cache") else None
    if directory is not None:
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True, scope="session")
def no_tfds_data(tmp_path_factory):
    """Where tensorflow-datasets keeps data, there is none, whatever the machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TFDS_DATA_DIR", str(tmp_path_factory.mktemp("tfds")))
        yield


@pytest.fixture(autouse=True)
def fresh_ipu_configuration():
    ipu.config.reset_ipu_configuration()
    yield
    ipu.config.reset_ipu_configuration()


@pytest.fixture(autouse=True)
def no_thread_left():
    yield
    left = [thread for thread in threading.enumerate() if thread.name == "ipu-infeed"]
    for thread in left:
        thread.join(timeout=5)
    assert not any(thread.is_alive() for thread in left)


@pytest.fixture
def less_optimized():
    """XLA compiles faster what runs once; for tests that compile hundreds of models."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def rng():
    return np.random.default_rng(1234)


def pytest_collection_modifyitems(items):
    # The longest tests first, so that at the end of a run no process waits for one.
    items.sort(key=lambda item: "test_random_pipelines" not in item.nodeid)
