"""Private names of JAX: they are taken away, and training, saving and restoring give the same."""

import ast
import contextlib
import functools
import importlib
import re
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint  # noqa: F401  # by the package, at its first checkpoint; not while a name is away
import pytest

from ipu_pipeline.ground import jax_compat, jax_processes
from tests.checkpointing.written_before.write import as_numbers
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
def forgotten():
    """Within it, the package and its tests are imported anew."""

    def forget():
        ours = [name for name in sys.modules if name.split(".")[0] in ("ipu_pipeline", "tests")]
        return {name: sys.modules.pop(name) for name in ours if name != "tests.conftest"}

    known, finders = forget(), list(sys.meta_path)
    try:
        yield
    finally:
        forget()
        sys.modules.update(known)
        sys.meta_path[:] = finders


@contextlib.contextmanager
def without(*paths):
    """The package and its tests, imported anew where JAX has not these names; gives what imports modules.

    JAX itself needs the names, so they are away only while the package looks them up.
    """
    with forgotten():
        with contextlib.ExitStack() as away:
            for path in paths:
                away.enter_context(taken_away(path))
            found = importlib.import_module("ipu_pipeline.ground.jax_compat")
            importlib.import_module("ipu_pipeline.ground.jax_processes")
        assert found is not jax_compat
        yield importlib.import_module


def train(import_module, directory):
    """Losses, variables and checkpoints of training whose second half is run again by another session."""
    ipu = import_module("ipu_pipeline")
    training = import_module("tests.support.resumable").Training(
        repeat_count=2, optimizer=optax.sgd(1e-2, momentum=0.9)
    )
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


def differentiate(import_module):
    """What a step gives whose stages cache functions, loop and differentiate, and whose update loops."""
    engine = import_module("ipu_pipeline.engine")

    @jax.jit
    def cached(x):
        noise = jax.random.uniform(engine.next_rng_key(), x.shape)
        return x @ engine.get_variable("w", (4, 4)) + noise

    def first(x):
        def energy(x):
            engine.metric("energy", jnp.sum(x**2))
            return jnp.sum(x**2)

        with engine.variable_scope("a"):
            return cached(x) + 0.1 * jax.grad(energy)(x)

    def second(x):
        with engine.variable_scope("b"):
            x = cached(x)

        def body(carry, _element):
            return jnp.tanh(carry @ engine.get_variable("w", (4, 4))), None

        return jnp.mean(jax.lax.scan(body, x, None, length=3)[0] ** 2)

    def update(gradients, state, parameters=None):
        def body(carry, _element):
            return jax.tree.map(lambda leaf: leaf * 0.5, carry), None

        return jax.lax.scan(body, gradients, None, length=2)[0], state

    optimizer = optax.GradientTransformation(lambda parameters: optax.EmptyState(), update)
    pipeline = engine.Pipeline([first, second], num_micro_batches=2, loss=lambda x: x, optimizer=optimizer)
    x = np.linspace(-1, 1, 8, dtype="float32").reshape(2, 4)
    state, outputs = pipeline.step(pipeline.init(jax.random.key(0), x), [x, 2 * x])
    return [np.array(outputs.losses), flat(state.variables), flat(outputs.metrics)]


def shard(import_module):
    """Variables after a loop whose body is cut by scopes, and where everything lies."""
    ipu = import_module("ipu_pipeline")
    front, inner = import_module("tests.support.front"), jax.jit(jnp.tanh)
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue([np.ones((3, 4), "float32")] * 2)

    def body(x):
        with ipu.scopes.ipu_shard(0):
            early = ipu.get_variable("early", (4, 4))  # in this scope, although the other uses it
            count = ipu.get_variable("count", (), initializer=0.0, trainable=False)
            ipu.assign("count", count + 1)
            x = inner(x @ ipu.get_variable("a", (4, 4)))
        with ipu.scopes.ipu_shard(1), jax.named_scope("block"):
            x = inner(x) @ early  # traced under 0, used under 1
        with ipu.scopes.ipu_shard(0):
            loss = jnp.mean(jnp.sin(x) ** 2)
        optimizer = ipu.optimizers.GradientAccumulationOptimizerV2(optax.sgd(0.1), 1)
        return optimizer.minimize(loss)

    def wrong(x):
        def scoped(x):
            with ipu.scopes.ipu_shard(1):
                return jnp.sin(x)

        return jax.checkpoint(jax.jit(scoped))(x @ ipu.get_variable("a", (4, 4)))

    program = front.compile_program(lambda: ipu.loops.repeat(2, body, [], infeed))
    with pytest.raises(ValueError, match=r"ipu_shard\(1\) is opened inside the body of jax.checkpoint"):
        front.compile_program(lambda: ipu.loops.repeat(2, wrong, [np.ones((3, 4), "float32")]))
    with ipu.Session(seed=3) as session:
        session.run(infeed.initializer)
        session.run(program)
        variables = flat(session.variables)
    ipu.config.reset_ipu_configuration()
    return [variables, str(program.placement())]


def run_programs(import_module, directory):
    return [train(import_module, directory), differentiate(import_module), shard(import_module)]


def check(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return run_programs(importlib.import_module, tmp_path_factory.mktemp("with") / "checkpoint")


@pytest.mark.thorough  # all at once are taken away below
@pytest.mark.parametrize("start", range(8))
def test_programs_without_some(start, expected, tmp_path):
    """Three or four that are for different things; those beside each other are for one."""
    with without(*NAMES[start::8]) as import_module:
        check(run_programs(import_module, tmp_path / "checkpoint"), expected)


def test_programs_without_any(expected, tmp_path):
    with without(*NAMES) as import_module:
        check(run_programs(import_module, tmp_path / "checkpoint"), expected)


# What a name is there for, where that is not seen in the programs above.

MOVING = [
    "jax._src.compilation_cache:_get_cache",
    "jax.experimental.serialize_executable:serialize",
    "jaxlib.xla_client:Client.deserialize_executable",
    "jaxlib.xla_client:CompileOptions",
    "jaxlib.xla_client:DeviceAssignment",
]


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
        executables = import_module("ipu_pipeline.engine.execution.compilation")
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
    texts = {module: path.read_text() for module, path in rooms.MODULES.items() if module not in own}
    assert len(texts) > 100
    maybe = re.compile(
        rf"jaxlib|jax\._|from jax|import jax\.(?!numpy as jnp\n)|jax\.({'|'.join(PRIVATE)})"
        "|source_info|name_stack"
    )
    found = {module: find_private_names(text) for module, text in texts.items() if maybe.search(text)}
    assert {module: names for module, names in found.items() if names} == {}


def test_what_is_due_to_a_version_is_explained():
    error = jax.errors.JaxRuntimeError(
        "NOT_FOUND: No registered implementation for annotate_device_placement"
    )
    assert "cannot place arrays in host memory within" in jax_compat.explain_compilation(error)
    assert jax_compat.explain_compilation(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")) is None


def test_the_warning_names_the_line_that_imports(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.99.0")
    code = compile("import sys\nfrom ipu_pipeline import engine\nengine.Pipeline", "a program", "exec")
    with forgotten(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        exec(code, {})  # noqa: S102
    assert [(one.filename, one.lineno) for one in told] == [("a program", 3)]
