"""Computation that takes time and no core: the same numbers, and devices that sleep at the same time."""

import collections
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine import emulation
from tests.support import beside, models
from tests.support.programs import run_each


@pytest.fixture
def slept(monkeypatch):
    """How often each time was slept for, in milliseconds; nothing sleeps."""
    times = collections.Counter()
    sleep_by(monkeypatch, lambda seconds: times.update([round(seconds * 1e3, 3)]))
    return times


def sleep_by(monkeypatch, function):
    monkeypatch.setattr(emulation, "_ends", types.SimpleNamespace(wait=function))


def make_pipeline(num_devices, **options):
    def first(w, x):
        return engine.emulate(jnp.tanh(x @ w), 1.25)

    def last(w, x):
        return engine.emulate(jnp.mean((x @ w) ** 2), 0.25, 2.25)  # whose gradient is constant

    draw = np.random.default_rng(0).normal
    return engine.Pipeline(
        [first, last],
        parameters=[draw(size=(64, 64)).astype("float32") for _stage in range(2)],
        num_micro_batches=4,
        optimizer=optax.adam(0.01),
        device_mapping=[0, num_devices - 1],
        **options,
    )


@pytest.mark.parametrize(
    ("num_devices", "options"),
    [(1, {}), (2, {"dispatch_plan": engine.Chunking(1)}), (2, {"schedule": "zero_bubble"})],
    ids=str,
)
def test_a_step_equals_a_plain_loop_and_takes_the_times(slept, num_devices, options):
    step = [np.random.default_rng(n).normal(size=(8, 64)).astype("float32") for n in range(4)]
    pipeline = make_pipeline(num_devices, **options)
    state = pipeline.init(jax.random.key(0), step[0])
    plain = models.on_one_device(state)
    for _update in range(2):
        state, outputs = pipeline.step(state, step)
        jax.block_until_ready(state)
        slept.clear()
        plain, expected = beside.step_plainly(pipeline, plain, step)
        models.assert_trees_close(outputs.losses, expected.losses)
        models.assert_trees_close(state.variables, plain.variables)
    jax.block_until_ready(pipeline.step(state, step))
    slept.clear()
    jax.block_until_ready(pipeline.step(state, step))
    assert slept == {1.25: 4, 2.5: 4, 0.25: 4, 2.25: 4}


def test_devices_sleep_at_the_same_time(monkeypatch):
    both = threading.Barrier(2)
    sleep_by(monkeypatch, lambda _seconds: both.wait(60))
    double = jax.jit(lambda x: engine.emulate(2 * x, 0.75))
    arrays = [jax.device_put(np.ones(4096, "float32"), device) for device in jax.devices()[:2]]
    for doubled in [double(array) for array in arrays]:
        np.testing.assert_array_equal(doubled, np.full(4096, 2))


def test_a_program_ends_while_its_devices_sleep(tmp_path):
    """Nobody waits for what they compute, for an hour."""
    program = """
import jax, numpy as np
from ipu_pipeline import engine
jax.config.update("jax_num_cpu_devices", 2)
sleep = jax.jit(lambda x: engine.emulate(2 * x, 3.6e6))
for device in jax.devices():
    x = jax.device_put(np.ones(4096, "float32"), device)
    kept = sleep(sleep(x))
print("ends")
"""
    assert run_each({"emulated": program}, tmp_path, as_tests=True)["emulated"] == "ends\n"


def test_an_interrupt_comes_after_the_program_that_sleeps(tmp_path):
    """Small programs run in the main thread. Ctrl-C there aborted the process, with an invalid pointer."""
    program = """
import signal, time
import jax, numpy as np
from ipu_pipeline import engine
from ipu_pipeline.engine import emulation
class Interrupting:
    is_new = True
    def wait(self, seconds):
        if self.is_new:
            self.is_new = False
            signal.raise_signal(signal.SIGINT)
    def set(self):
        pass
emulation._ends = Interrupting()
sleep = jax.jit(lambda x: engine.emulate(x, 1.0))
ones = jax.block_until_ready(jax.device_put(np.ones(3, "float32")))  # else another thread may run it
try:
    x = sleep(ones)
    while True:
        time.sleep(60)
except KeyboardInterrupt:
    print(np.asarray(x))
"""
    assert run_each({"emulated": program}, tmp_path, as_tests=True)["emulated"] == "[1. 1. 1.]\n"


def test_arrays_of_any_shape(slept):
    x = np.arange(6, dtype="float32").reshape(3, 2)
    np.testing.assert_array_equal(jax.vmap(lambda row: engine.emulate(row, 1.5))(x), x)
    np.testing.assert_array_equal(engine.emulate(jnp.bfloat16(3), 0), 3)
    assert engine.emulate(3.0, 2.5) == 3
    assert slept == {1.5: 1, 2.5: 1}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((np.ones(2), -1.0), ValueError, "forward_ms must be a finite number of at least 0; got -1"),
        ((np.ones(2), 1, float("inf")), ValueError, "backward_ms must be a finite.*got inf"),
        ((np.ones(2, "int32"), 1.0), TypeError, "x must have floating-point numbers; got int32"),
    ],
)
def test_what_cannot_be_emulated(arguments, error, message):
    with pytest.raises(error, match=message):
        engine.emulate(*arguments)


def test_what_is_not_counted_does_not_leave_all_time_to_the_update():
    """Reports divide the time of a single program by these operations."""
    pipeline = make_pipeline(1)
    pipeline.trace(np.ones((8, 64), "float32"))
    last = engine.inspect.find_facts(pipeline).stages[-1]  # one program has both directions
    assert last.forward_operations + last.backward_operations >= 3 * 2 * 8 * 64 * 64
    assert last.backward_operations == pytest.approx(2 * last.forward_operations)
