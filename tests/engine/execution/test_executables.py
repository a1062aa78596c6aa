"""Programs that are the same on several devices: compiled once, with the same numbers as apart."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from ipu_pipeline import engine
from ipu_pipeline.engine.execution.compilation import Executable, KeptPrograms
from tests.support import beside, models
from tests.support.compilations import compilations

WIDTH, COUNT, NUM_STAGES = 16, 4, 4


def block(scale=1.0):
    def stage(x, target):
        width = x.shape[-1]
        kernel = engine.get_variable("kernel", (width, width))
        bias = engine.get_variable("bias", (width,), initializer=jax.nn.initializers.normal(0.1))
        return jnp.tanh(x @ kernel + bias) * scale, target

    return stage


def last_block(x, target):
    return jnp.mean((block()(x, target)[0] - target) ** 2)


def named(function, index):
    def stage(*arguments):
        with engine.variable_scope(f"block{index}"):
            return function(*arguments)

    return stage


def make(scales=(1.0,) * (NUM_STAGES - 1), last=last_block, stages=None, **options):
    blocks = [named(block(scale), index) for index, scale in enumerate(scales)]
    return engine.Pipeline(
        stages or [*blocks, named(last, len(scales))],
        num_micro_batches=COUNT,
        optimizer=optax.adam(0.01),
        **{"dispatch_plan": engine.Chunking(2), **options},
    )


def run(pipeline, width=WIDTH):
    """Compares two steps with a plain loop; the names of the programs of stages that XLA compiled."""
    rng = np.random.default_rng(0)
    steps = [
        [tuple(rng.normal(size=(2, 4, width)).astype("float32")) for _ in range(COUNT)] for _ in range(2)
    ]
    state = pipeline.init(jax.random.key(0), steps[0][0])
    plain = models.on_one_device(state)
    compiled = []
    for step in steps:
        with compilations() as found:
            state, outputs = pipeline.step(state, step)
        compiled.append(found)
        plain, expected = beside.step_plainly(pipeline, plain, step)
        models.assert_trees_close(outputs.losses, expected.losses)
    models.assert_trees_close(state.variables, plain.variables)
    models.assert_trees_close(state.optimizer_state, plain.optimizer_state)
    for name, value in state.variables.items():
        (device,) = value.devices()
        assert device.id == int(name.removeprefix("block").split("/")[0])
    first, second = compiled
    assert not second
    return sorted(name.removeprefix("jit(").removesuffix(")") for name in first if "stage" in name)


SHARED = [
    "stage0_forward",
    "stage3_forward_backward",
    "stage2_backward",
    "stage0_backward",  # without a cotangent of its inputs
    "stage0_update",  # with Adam's count
    "stage1_update",
]


def test_equal_stages_are_compiled_once(no_cache):
    assert run(make()) == sorted(SHARED)


def test_gradients_of_several_shapes_are_added_where_stages_are_equal(no_cache):
    """What adds the gradients of variables that stages share is the same program for all shapes."""

    def shared(index, function):
        def stage(x, target):
            with engine.variable_scope(f"shared{index % 2}", reuse=engine.AUTO_REUSE):
                return function(x, target)

        return stage

    def make_shared(**options):
        functions = [block()] * 3 + [last_block]
        stages = [shared(index, function) for index, function in enumerate(functions)]
        return make(stages=stages, **options)

    rng = np.random.default_rng(0)
    step = [tuple(rng.normal(size=(2, 4, 1024)).astype("float32")) for _ in range(COUNT)]
    found = []
    for options in ({}, {"device_mapping": [0] * 4, "dispatch_plan": None}):
        pipeline = make_shared(**options)
        state = pipeline.init(jax.random.key(0), step[0])
        found.append(pipeline.step(state, step)[0].variables)
    models.assert_trees_close(*found)


def dropping(x, target):
    x, target = block()(x, target)
    for _draw in range(2):
        x = jnp.where(jax.random.bernoulli(engine.next_rng_key(), 0.5, x.shape), x, 0)
    return x, target


@pytest.mark.thorough
def test_stages_that_draw_are_compiled_once(no_cache):
    functions = [dropping] * (NUM_STAGES - 1) + [last_block]
    stages = [named(function, index) for index, function in enumerate(functions)]
    compiled = run(make(stages=stages, recompute="auto"))
    assert compiled == sorted([*SHARED, "stage1_backward"])  # with the numbers of its keys


@pytest.mark.thorough
def test_unequal_stages_are_compiled_apart(no_cache):
    compiled = run(make(scales=(1.0, 0.5, 0.5)))
    assert compiled == sorted([*SHARED, "stage1_forward"])


@pytest.mark.thorough
def test_options_of_the_compiler_keep_stages_apart(no_cache):
    names = ("xla_cpu_enable_fast_math", "xla_llvm_disable_expensive_passes")
    options = [{}, {names[0]: False}, {names[1]: True}, {}]
    compiled = run(make(forward_options=options))
    assert compiled == sorted([*SHARED, "stage1_forward", "stage2_forward"])


@pytest.mark.thorough
def test_with_a_persistent_cache_each_is_compiled(no_cache, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    assert len(run(make())) == 3 * NUM_STAGES - 1


@pytest.mark.thorough
def test_stages_that_call_back_are_compiled_apart(no_cache):
    def last(x, target):
        jax.debug.callback(lambda value: None, x)
        return last_block(x, target)

    assert len(run(make(last=last))) == 3 * NUM_STAGES - 1


def test_what_cannot_be_loaded_is_compiled(monkeypatch, no_cache):
    def fail(*_arguments):
        raise NotImplementedError("of JAX")

    monkeypatch.setattr(Executable, "load", fail)
    assert len(run(make(scales=(1.0, 1.0)))) == 3 * 3 - 1


@pytest.mark.thorough
def test_what_runs_in_the_thread_that_starts_it_is_compiled_apart(no_cache):
    assert len(run(make(), width=2)) == 3 * NUM_STAGES - 1


def test_what_calls_python_is_not_written_out(no_cache, monkeypatch):
    """Rules of derivatives may do so where stages do not."""
    written, write = [], Executable.__init__

    def record(executable, compiled):
        written.append("callback" in compiled.as_text())
        write(executable, compiled)

    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, None), lambda _saved, grad: (jax.pure_callback(np.copy, grad, grad),))

    def call(x, target):
        return same(block()(x, target)[0]), target

    monkeypatch.setattr(Executable, "__init__", record)
    run(make(stages=[*(named(call, index) for index in range(3)), named(last_block, 3)]))
    assert written
    assert not any(written)


def test_what_was_loaded_is_not_written_out_for_others(no_cache):
    """A kept program that was loaded itself stood for its equals: the second training failed."""
    kept = KeptPrograms()
    for scales in ((1.0, 1.0, 0.5), (0.5, 1.0, 1.0)):
        with kept.building():
            run(make(scales=scales))


def test_short_programs_are_lowered_with_the_settings_of_the_caller(no_cache):
    """They were lowered in a thread, in which JAX computes with 32 bits."""

    def stage(x, target):
        kernel = engine.get_variable("kernel", (3,), dtype="float64")
        return x * kernel + jnp.argmax(x, -1).astype(x.dtype)[:, None], target

    def last(x, target):
        return jnp.mean((stage(x, target)[0] - target) ** 2)

    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        pipeline = make(stages=[*(named(stage, index) for index in range(3)), named(last, 3)])
        step = [tuple(rng.normal(size=(2, 2, 3))) for _micro_batch in range(COUNT)]
        state = pipeline.init(jax.random.key(0), step[0])
        plain = models.on_one_device(state)
        state, outputs = pipeline.step(state, step)
        plain, expected = beside.step_plainly(pipeline, plain, step)
        models.assert_trees_close(outputs.losses, expected.losses)
        models.assert_trees_close(state.variables, plain.variables)


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_ctrl_c_while_equal_stages_are_compiled(number, no_cache, monkeypatch):
    """What has been loaded by then hinders no later run."""
    pipeline = make()
    step = [tuple(np.ones((2, 4, WIDTH), "float32"))] * COUNT
    state = pipeline.init(jax.random.key(0), step[0])
    load, calls = Executable.load, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == number:
            raise KeyboardInterrupt
        return load(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Executable, "load", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipeline.step(state, step)
    run(pipeline)
