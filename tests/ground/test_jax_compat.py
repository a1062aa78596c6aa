"""Private names of JAX: they are taken away, and training, saving and restoring give the same."""

import ast
import contextlib
import functools
import importlib
import sys

import jax
import numpy as np
import orbax.checkpoint  # noqa: F401  # by the package, at its first checkpoint; not while a name is away
import pytest

from ipu_pipeline.ground import jax_compat, jax_processes, warned
from tests.checkpointing.written_before.write import as_numbers
from tests.support.programs import start
from tests.test_rooms import rooms

NAMES = tuple(jax_compat.NAMES)
assert jax_processes.__name__ in sys.modules  # whose names are among them


@contextlib.contextmanager
def taken_away(path):
    """Within it, looking for the name fails as if JAX had never had it."""
    module, _, names = path.partition(":")
    *outer, name = names.split(".")
    owner = functools.reduce(getattr, outer, importlib.import_module(module))
    if not hasattr(owner, name):  # not in this version of JAX
        yield
        return
    value = vars(owner)[name]
    delattr(owner, name)
    try:
        with pytest.raises(AttributeError):
            getattr(owner, name)
        yield
    finally:
        setattr(owner, name, value)


@contextlib.contextmanager
def without(*paths):
    """The package and its tests, imported anew where JAX has not these names; gives what imports modules.

    JAX itself needs the names, so they are away only while the package looks them up.
    """

    def forget():
        ours = [name for name in sys.modules if name.split(".")[0] in ("ipu_pipeline", "tests")]
        return {name: sys.modules.pop(name) for name in ours if name != "tests.conftest"}

    known = forget()
    try:
        with contextlib.ExitStack() as away:
            for path in paths:
                away.enter_context(taken_away(path))
            found = importlib.import_module("ipu_pipeline.ground.jax_compat")
            importlib.import_module("ipu_pipeline.ground.jax_processes")
        assert found is not jax_compat
        yield importlib.import_module
    finally:
        forget()
        sys.modules.update(known)


def train(import_module, directory):
    """Losses, variables and checkpoints of training whose second half is run again by another session."""
    ipu = import_module("ipu_pipeline")
    training = import_module("tests.support.resumable").Training(repeat_count=2)
    with ipu.Session(seed=3) as session:
        training.start(session)
        losses = [training.run(session, 1)]
        session.save(directory)
        kept = session.take_snapshot()  # which shares memory with what goes on
        losses.append(training.run(session, 1))
        variables = session.variables
    with ipu.Session(seed=4) as session:
        session.restore(directory)
        read = session.take_snapshot()
        training.start(session)
        np.testing.assert_array_equal(training.run(session, 1), losses[1])
        jax.tree.map(np.testing.assert_array_equal, session.variables, variables)
    ipu.config.reset_ipu_configuration()
    return [losses, variables, flat(kept.arrays()), flat(read.arrays())]


def flat(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): as_numbers(leaf) for path, leaf in leaves}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return train(importlib.import_module, tmp_path_factory.mktemp("with") / "checkpoint")


@pytest.mark.thorough  # all at once are taken away below
@pytest.mark.parametrize("start", range(8))
def test_training_and_checkpoints_without_some(start, expected, tmp_path):
    """Three or four that are for different things; those beside each other are for one."""
    with without(*NAMES[start::8]) as import_module:
        found = train(import_module, tmp_path / "checkpoint")
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_training_and_checkpoints_without_any(expected, tmp_path):
    with without(*NAMES) as import_module:
        found = train(import_module, tmp_path / "checkpoint")
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# What a name is there for, where that is not seen in the training above.

MOVING = [
    "jax._src.compilation_cache:_get_cache",
    "jax.experimental.serialize_executable:serialize",
    "jaxlib.xla_client:Client.deserialize_executable",
    "jaxlib.xla_client:CompileOptions",
    "jaxlib.xla_client:DeviceAssignment",
]


def together_and_alone(names):
    """Parametrizes a test by the names that are away: all of them, and in `make thorough` each alone."""
    alone = [pytest.param([name], marks=pytest.mark.thorough) for name in names]
    return pytest.mark.parametrize("names", [names, *alone])


SOURCES = [name for name in NAMES if "source_info_util" in name]


@together_and_alone(SOURCES)
def test_shards_without(names):
    with without(*names) as import_module:
        shards = import_module("tests.engine.loops.test_shards")
        shards.test_the_innermost_scope_counts()
        shards.test_nested_and_cached_jit()
        shards.test_where_variables_live()
        shards.test_scopes_inside_bodies(jax.checkpoint, "jax.checkpoint", True)
        shards.test_assigned_variables_and_a_return_to_their_shard(np.random.default_rng(0))


OTHERWISE = [
    "jax:make_user_context",
    "jax.interpreters.partial_eval:dce_rules",
    "jax.interpreters.ad:primitive_jvps",
]


@together_and_alone(OTHERWISE)
def test_what_is_found_out_by_other_means(names):
    """Contexts of cached functions, what a loop does not need, and what stages differentiate themselves."""
    with without(*names) as import_module:
        hoisting = import_module("tests.engine.tracing.test_hoisting")
        hoisting.test_cached_functions_in_several_stages_and_pipelines()
        dce_rules = import_module("ipu_pipeline.ground.jax_compat").dce_rules
        assert bool(dce_rules) == (OTHERWISE[1] not in names)
        import_module("tests.engine.updates.test_updates_joined").check("loops", 2)
        hoisting.test_a_scan_s_variable_has_the_gradient_of_the_same_scan_by_hand(np.random.default_rng(0))
        import_module("tests.engine.tracing.test_metrics").test_nothing_is_differentiated_through_a_metric()


def test_arrays_that_are_written_in_place_are_refused_without():
    def stage(x):
        array = jax.new_ref(x)
        array[...] = 2 * x
        return array[...]

    with without("jax._src.state.discharge:discharge_state") as import_module:
        engine = import_module("ipu_pipeline.engine")
        pipeline = engine.Pipeline([stage, lambda x: x], num_micro_batches=2)
        with pytest.raises(ValueError, match=r"Stages cannot use jax\.new_ref .*Write x = x\.at"):
            pipeline.trace(np.ones(3, np.float32))


@pytest.mark.parametrize("name", ["", *MOVING])
def test_executables_are_moved_to_other_devices_only_with(name, no_cache):
    with without(*filter(None, [name])) as import_module:
        executables = import_module("ipu_pipeline.engine.execution.executables")
        assert executables.is_portable(jax.devices("cpu")[:1]) == (not name)


def test_a_cache_that_cannot_be_reset(tmp_path, no_cache):
    with without("jax.experimental.compilation_cache.compilation_cache:reset_cache") as import_module:
        import_module("ipu_pipeline").config.enable_executable_cache(tmp_path / "cache")
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "cache")


# The names are in one module alone.

MODULES = {"jax", "jax.ad_checkpoint", "jax.export", "jax.extend", "jax.numpy", "jax.scipy", "jax.sharding"}
EXPERIMENTAL = {"io_callback"}  # what the reference documentation describes
PRIVATE = {"core", "experimental", "extend", "interpreters", "lib", "make_user_context", "memory"}


def find_private_names(source):
    """What of JAX a module names that only `jax_compat` may."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if not is_public(alias.name)]
        elif isinstance(node, ast.ImportFrom):
            is_described = (
                node.module == "jax.experimental" and {a.name for a in node.names} <= EXPERIMENTAL
            )
            if not is_public(node.module) and not is_described:
                found.append(node.module)
            elif node.module == "jax":
                found += [f"jax.{a.name}" for a in node.names if not is_public(f"jax.{a.name}")]
        elif isinstance(node, ast.Attribute):
            is_of_jax = isinstance(node.value, ast.Name) and node.value.id == "jax"
            if (is_of_jax and node.attr in PRIVATE) or node.attr in ("source_info", "name_stack"):
                found.append(ast.unparse(node))
    return found


def is_public(module):
    return module.split(".")[0] not in ("jax", "jaxlib") or module in MODULES


def test_private_names_are_found():
    source = """
import jax, jaxlib.xla_client, numpy
from jax import core, numpy as jnp
from jax.extend import core as jex_core
from jax._src import config
from jax.experimental import io_callback
from jax.experimental import io_callback, pallas
jax.core.Tracer, jax.Array, jax.memory, equation.source_info
"""
    assert sorted(find_private_names(source)) == [
        "equation.source_info",
        "jax._src",
        "jax.core",
        "jax.core",
        "jax.experimental",
        "jax.memory",
        "jaxlib.xla_client",
    ]


def test_no_other_module_has_private_names():
    own = ("ground.jax_compat", "ground.jax_core", "ground.jax_processes")
    paths = {module: path for module, path in rooms.MODULES.items() if module not in own}
    assert len(paths) > 100
    found = {module: find_private_names(path.read_text()) for module, path in paths.items()}
    assert {module: names for module, names in found.items() if names} == {}


@pytest.mark.parametrize("version", [(0, 99, 1), (0, 11, 0), (0, 8, 2)])
def test_another_jax_warns_once(version, monkeypatch):
    monkeypatch.setattr(warned, "_warned", set())
    for text in (jax_compat.OLDEST_TESTED, jax.__version__, jax_compat.NEWEST_TESTED):
        jax_compat.warn_of_untested(tuple(map(int, text.split("."))))
    given = ".".join(map(str, version))
    with pytest.warns(UserWarning, match=f"tested with JAX 0.9.0 to 0.10.2, and this is {given}") as told:
        jax_compat.warn_of_untested(version)
    assert len(told) == 1
    jax_compat.warn_of_untested(version)  # a second warning would be an error


def test_what_is_due_to_a_version_is_explained():
    error = jax.errors.JaxRuntimeError(
        "NOT_FOUND: No registered implementation for annotate_device_placement"
    )
    assert "cannot place arrays in host memory within" in jax_compat.explain_compilation(error)
    assert jax_compat.explain_compilation(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")) is None


def test_the_warning_names_the_line_that_imports():
    code = """
import warnings, jax
jax.__version_info__ = (0, 99, 0)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    from ipu_pipeline import engine
    engine.Pipeline
print([(one.filename, one.lineno) for one in told])
"""
    assert start("-c", code).stdout.strip() == "[('<string>', 7)]"
