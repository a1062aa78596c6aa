"""CPU devices, strict dtype promotion, little optimization, one compilation cache for the whole run."""

import gc
import importlib.metadata
import itertools
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import threading
import weakref

# Nearly every program here runs once or twice: XLA's optimizations, and its newer code generator, which
# compiles half as fast, would take longer than they save. Processes that tests start get the same.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# Newer versions of XLA do not start with the flag.
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"

import jax
import numpy as np
import pytest
from jax._src import lru_cache  # how JAX writes its cache; there is no public way to say it
from jax._src.interpreters import mlir  # nor how it makes contexts of MLIR
from jax.experimental.compilation_cache import compilation_cache

import ipu_pipeline as ipu
from ipu_pipeline.ground import user_warnings
from ipu_pipeline.processes import announcements, board
from ipu_pipeline.tf1.program import program
from tests.support import leaks, programs

pytest_plugins = ["tests.support.budget"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what is to run in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")


def put(cache, key, value):
    """Writes an entry at once, since another process may be reading; JAX writes it piece by piece."""
    path = pathlib.Path(cache.path) / f"{key}-cache"
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(value)
        os.replace(file.name, path)


def share_contexts(make, programs=100):
    """What makes a context of MLIR once for so many programs of a thread.

    JAX makes one for each program, which takes longer than to write a small program in it.
    """
    own = threading.local()

    def make_ir_context():
        if getattr(own, "left", 0) == 0:
            own.context, own.left = make(), programs
        own.left -= 1
        return own.context

    return make_ir_context


if jax.__version_info__ < (0, 11):  # later ones do not live as long
    mlir.make_ir_context = share_contexts(mlir.make_ir_context)


def pytest_configure(config):
    # Many tests compile the same programs: schedules, counts and repeats do not change them.
    directory = config.cache.mkdir("xla") if hasattr(config, "cache") else None
    if directory is not None:
        assert lru_cache._CACHE_SUFFIX == "-cache"
        lru_cache.LRUCache.put = put
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # Each process has a folder for temporary files, so that it knows who left one. `tmp_path` is elsewhere:
    # of the last runs it stays.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="tests-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    # Programs that tests start announce themselves, but not to the user's monitor. This process does not:
    # the thread that looks at what runs holds it for a moment, maybe when a test asks whether it is gone.
    os.environ[announcements.SWITCH_VARIABLE] = "0"
    if directory is not None:
        os.environ[board.DIRECTORY_VARIABLE] = str(config.cache.mkdir("announced"))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Imports the tests without looking for garbage, and never looks for it among what they imported."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        # Tracing makes so many objects that all are looked at again and again; `fresh_caches` collects.
        gc.set_threshold(20_000, 20, 50)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish():
    gc.unfreeze()  # plugins import more at the end, and look for who refers to what


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Each test draws the same random numbers in every run: torch's seed is another one in each process."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # what is tested may use it
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def no_tfds_data(tmp_path_factory):
    """Where tensorflow-datasets keeps data, there is none, whatever the machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TFDS_DATA_DIR", str(tmp_path_factory.mktemp("tfds")))
        yield


@pytest.fixture(autouse=True, scope="module")
def programs_of_other_modules():
    """They live until they are collected, and sessions here would initialize and save their variables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "_programs", weakref.WeakValueDictionary())
        yield


@pytest.fixture(autouse=True)
def fresh_ipu_configuration():
    ipu.config.reset_ipu_configuration()
    yield
    ipu.config.reset_ipu_configuration()


@pytest.fixture(autouse=True)
def nothing_left():
    """A test that leaves something behind fails itself, and not whichever test this process runs later."""
    before = leaks.state()
    yield
    programs.end_what_is_left()
    left = leaks.differences(before)
    assert not left, "\n".join(left)


@pytest.fixture(autouse=True, scope="module")
def fresh_caches():
    """Lets go of what a module's tests compiled: with it, collecting garbage takes longer and longer.

    What is alive after that stays: modules that the tests imported.
    """
    yield
    jax.clear_caches()
    gc.collect()
    gc.freeze()


@pytest.fixture
def optimized():
    """XLA optimizes as for users; for tests of what it makes of a program."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def no_cache():
    """Without JAX's persistent cache, which takes the place of what some tests are about."""
    directory = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", directory)
    compilation_cache.reset_cache()


@pytest.fixture
def no_garbage():
    """What earlier tests left is freed now, and not while this test counts the arrays that are alive."""
    gc.collect()


@pytest.fixture
def nothing_warned(monkeypatch):
    """What is told once in a process is told again."""
    monkeypatch.setattr(user_warnings, "_warned", set())


@pytest.fixture
def rng():
    return np.random.default_rng(1234)


# Of what a test marked `each_value` has as arguments, `make test` runs as few cases as have every value,
# and `make thorough` as few more as have every pair of values. With this variable it runs all of them.
EVERY_CASE = "EVERY_CASE" in os.environ


def pytest_collection_modifyitems(config, items):
    """Chooses the cases of tests marked `each_value`."""
    cases = {}
    for item in items:
        if item.get_closest_marker("each_value") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = set()
    for of_test in cases.values():
        arguments = [name_arguments(item.callspec) for item in of_test]
        kept = cover(arguments, 1)
        more = range(len(of_test)) if EVERY_CASE else cover(arguments, 2, kept)
        for number, item in enumerate(of_test):
            if number not in kept:
                item.add_marker(pytest.mark.thorough)
                if number not in more:
                    left_out.add(item)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def name_arguments(callspec):
    """A test's arguments as text."""
    return {name: repr(value) for name, value in callspec.params.items()}


def cover(cases, size, begun=()):
    """The numbers of some cases in which all the values stand that some `size` arguments have together.

    Greedy: again and again the case with most combinations that have not been seen, of several the first.

    Args:
      cases: argument -> its value as text, for each case.
      size: 1 for every value of each argument, 2 for every pair of values.
      begun: numbers of cases that are taken in any case.
    """
    found = [set(itertools.combinations(case.items(), min(size, len(case)))) for case in cases]
    kept = set(begun)
    left = set().union(*found).difference(*(found[number] for number in kept))
    while left:
        number = max(range(len(found)), key=lambda n: len(found[n] & left))
        kept.add(number)
        left -= found[number]
    return kept
