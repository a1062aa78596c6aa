"""Faults in models: nans, checks of stages, steps op by op for a debugger, and steps in another mesh."""

import dataclasses
import logging
import re
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

from ipu_pipeline import engine
from ipu_pipeline.engine.execution import observation
from tests.support import beside, models, programs

W, V = np.full((3, 4), 0.5, "float32"), np.full((4, 1), 0.1, "float32")
BOTH = pytest.mark.parametrize("mapping", [[0, 1], [0, 0]])


def line_of(text):
    """File, number and text of this file's only line that ends in a text."""
    with open(__file__) as file:
        (found,) = [(n, line) for n, line in enumerate(file, 1) if line.rstrip().endswith(text)]
    return f"at {__file__}, line {found[0]}: {found[1].strip()}"


def first(p, x, y):
    return jnp.tanh(x @ p["w"]), y


def last(p, h, y):
    logarithm = jnp.log(y)  # the culprit
    kept = jnp.where(y > 0, logarithm, 0.0)
    return ((h @ p["v"]) * kept + jnp.where(y < -5, logarithm, 0.0)).mean()


def make(stages=(first, last), num_micro_batches=3, parameters=({"w": W}, {"v": V}), **options):
    given = {
        "loss": lambda loss, *_others: loss,
        "optimizer": optax.sgd(0.1),
        "parameters": list(parameters),
    }
    return engine.Pipeline(list(stages), num_micro_batches=num_micro_batches, **given | options)


def batches(*labels, rows=2):
    return [(np.ones((rows, 3), "float32"), np.full((rows, 1), y, "float32")) for y in labels]


def start(pipeline):
    return pipeline.init(jax.random.key(0), batches(1)[0])


def error_of(pipeline, state, data):
    with pytest.raises(FloatingPointError) as caught:
        pipeline.step(state, data)
    return str(caught.value)


@BOTH
def test_a_nan_has_a_line_a_stage_and_a_micro_batch_and_leaves_the_state(mapping):
    pipeline = make(check_nans=True, device_mapping=mapping)
    state = start(pipeline)
    # A nan that `where` drops is none, in micro-batch 0; in micro-batch 2 it is not dropped.
    assert error_of(pipeline, state, batches(-1, 2, -9)) == (
        "invalid value (nan) encountered in log: stage 1 (last), forward, micro-batch 2\n  "
        + line_of("# the culprit")
    )
    plain, wanted = beside.step_plainly(pipeline, beside.copied(state), batches(1, 2, 3))
    after, outputs = pipeline.step(state, batches(1, 2, 3))
    models.assert_trees_close(outputs.losses, wanted.losses)
    models.assert_trees_close(after.variables, plain.variables)
    models.assert_trees_close(pipeline.step(after, batches(-1, 2, 3))[0].update_count, 2)


def test_jax_debug_nans_does_the_same():
    pipeline = make(num_replicas=2, num_micro_batches=2)
    state = start(pipeline)
    with jax.debug_nans(True):
        text = error_of(pipeline, state, batches(1, 1, 1, -9))
        assert "in log: stage 1 (last), forward, micro-batch 3 (of replica 1)\n" in text
        assert pipeline.step(state, batches(1, 1, 1, 1))[0].update_count == 1


def distance(p, h, y):
    return jnp.sqrt(((h @ p["v"]) ** 2).sum()) * y.mean()  # its derivative


def in_a_loop(p, x, y):
    def body(carried, row):
        return carried * 0.7, jnp.arccos(row[:2] / carried - 1)  # the iteration

    return jax.lax.scan(body, jnp.ones(2), x @ p["w"])[1], y


@pytest.mark.parametrize(
    ("stages", "parameters", "wanted", "line"),
    [
        (
            (first, distance),
            [{"w": W}, {"v": V * 0}],
            "mul: stage 1 (distance), backward",
            "# its derivative",
        ),
        (
            (distance, lambda p, loss: loss * p),
            [{"v": V[:3] * 0}, np.float32(1)],
            "mul: stage 0 (distance), backward",
            "# its derivative",
        ),
        (
            (in_a_loop, last),
            [{"w": W}, {"v": V[:2]}],
            "acos: stage 0 (in_a_loop), forward",
            "# the iteration",
        ),
    ],
)
def test_where_a_nan_is_made(stages, parameters, wanted, line):
    pipeline = make(stages, 2, parameters, check_nans=True)
    text = error_of(pipeline, start(pipeline), batches(1, 1))
    assert f"{wanted}, micro-batch 0" in text
    assert line_of(line) in text


def test_nans_that_no_operation_of_a_stage_makes():
    def update(gradient, _variable):
        return jnp.sqrt(gradient - 9)  # the update

    pipeline = make(num_micro_batches=1, check_nans=True, optimizer=optax.stateless_with_tree_map(update))
    state, given = start(pipeline), batches(2)
    given[0][0][0, 0] = np.nan
    worn = dataclasses.replace(state, variables={**state.variables, "stage1/v": jnp.full((4, 1), np.nan)})
    what = "invalid value (nan) encountered in sqrt: the weight update of variable stage0/w\n  "
    assert error_of(pipeline, state, given).startswith("A nan came with leaf 0 of the micro-batch; found")
    assert error_of(pipeline, worn, batches(2)).startswith("A nan came with variable stage1/v; found")
    assert error_of(pipeline, state, batches(2)) == what + line_of("# the update")


@pytest.mark.thorough
def test_nans_of_micro_batches_of_other_shapes():
    pipeline = make(num_micro_batches=2, max_shapes=2, check_nans=True)
    state = start(pipeline)
    text = error_of(pipeline, state, [*batches(1), *batches(-9, rows=5)])
    assert "log: stage 1 (last), forward, micro-batch 1" in text


def test_nans_of_placed_micro_batches():
    pipeline = make()
    state = start(pipeline)
    early = pipeline.place_micro_batches(batches(1, -9, 1))
    with jax.debug_nans(True):
        placed = pipeline.place_micro_batches(batches(1, -9, 1))
        assert "in log: stage 1 (last), forward, micro-batch 1" in error_of(pipeline, state, placed)
        with pytest.raises(ValueError, match="placed before jax_debug_nans or jax_disable_jit"):
            pipeline.step(state, early)


def checked(p, x, y):
    def body(carried, row):
        checkify.check(row < 5, "row is {}", row)
        return carried, row

    checkify.check(jnp.all(y < 3), "{} is too large", y.max())
    return jnp.tanh(jax.lax.scan(body, 0.0, x[:, 0])[1][:, None] * (x @ p["w"])), y


@BOTH
def test_checks_of_stages_are_errors_of_the_step(mapping):
    pipeline = make((checked, last), device_mapping=mapping)
    state = start(pipeline)
    with pytest.raises(checkify.JaxRuntimeError) as caught:
        pipeline.step(state, batches(1, 4, 5))
    assert str(caught.value).startswith("4.0 is too large")
    assert str(caught.value).endswith("This happened in stage 0 (checked), micro-batch 1.")
    in_loop = batches(1, 2, 1)
    in_loop[2][0][1, 0] = 7
    message = r"row is 7.0(.|\n)*stage 0 \(checked\), micro-batch 2"
    with pytest.raises(checkify.JaxRuntimeError, match=message):
        pipeline.step(state, in_loop)
    after, outputs = pipeline.step(state, batches(1, 2, 1))  # the state is as it was
    plain = make(device_mapping=mapping)  # what is checked and 1 does not change
    same, wanted = plain.step(start(plain), batches(1, 2, 1))
    models.assert_trees_close(outputs.losses, wanted.losses)
    models.assert_trees_close(after.variables, same.variables)


def test_a_stage_may_return_the_error_of_checkify():
    safe = checkify.checkify(last, errors=checkify.float_checks)
    stages = (first, safe, lambda p, error, loss: (loss, error))
    pipeline = make(stages, 2, ({"w": W}, {"v": V}, ()))
    _state, outputs = pipeline.step(start(pipeline), batches(1, -9))
    told = [error.get() for _loss, error in outputs.outputs]
    assert told[0] is None
    assert "nan generated by primitive: log" in told[1]


@pytest.mark.thorough
def test_checks_with_replicas_and_chunks():
    pipeline = make((checked, last), num_micro_batches=4, num_replicas=2, dispatch_plan=engine.Chunking(2))
    state = start(pipeline)
    with pytest.raises(checkify.JaxRuntimeError, match="micro-batch 5"):
        pipeline.step(state, batches(1, 1, 1, 1, 1, 4, 1, 1))


@pytest.mark.parametrize("options", [{}, {"dispatch_plan": engine.Chunking(2), "offload": ["activations"]}])
def test_op_by_op_stages_are_called_with_arrays(options):
    seen = []

    def looking(p, x, y):
        if not isinstance(x, jax.core.Tracer):
            seen.append((float(p["w"].sum()), int(engine.update_count()), float(y[0, 0])))
        noise = jax.random.normal(engine.next_rng_key(), x.shape)
        engine.metric("mean", x.mean())
        return jnp.tanh((x + noise) @ p["w"]), y

    pipeline = make((looking, last), 2, optimizer=optax.sgd(0.03, momentum=0.9), **options)
    before = start(pipeline)
    with jax.disable_jit():
        state, outputs = pipeline.step(before, batches(1, 2))
    assert seen == [(6.0, 0, 1.0), (6.0, 0, 2.0)]
    same, wanted = pipeline.step(before, batches(1, 2))
    assert len(seen) == 2
    models.assert_trees_close(outputs.losses, wanted.losses)
    models.assert_trees_close(state.variables, same.variables)
    models.assert_trees_close(state.optimizer_state, same.optimizer_state)
    assert outputs.metrics == wanted.metrics
    assert pipeline.step(state, batches(1, 2))[0].update_count == 2


def test_op_by_op_an_error_names_the_micro_batch():
    def failing(p, x, y):
        if not isinstance(y, jax.core.Tracer) and float(y[0, 0]) == 2:
            raise ZeroDivisionError("here")
        return first(p, x, y)

    pipeline = make((failing, last))
    state = start(pipeline)
    with jax.disable_jit(), pytest.raises(ZeroDivisionError, match="here") as caught:
        pipeline.step(state, batches(1, 2, 3))
    assert "This happened in stage 0 (failing), called for micro-batch 1" in caught.value.__notes__[0]
    assert pipeline.step(state, batches(1, 2, 3))[0].update_count == 1


@BOTH
def test_the_mesh_of_the_caller_does_not_matter(mapping):
    plain, pipeline = make(device_mapping=mapping), make(device_mapping=mapping)
    _state, wanted = plain.step(start(plain), batches(1, 2, 3))
    with jax.set_mesh(jax.make_mesh((4,), ("x",))):
        _state, outputs = pipeline.step(start(pipeline), batches(1, 2, 3))
        assert not jax.sharding.get_abstract_mesh().empty
        assert list(map(float, outputs.losses)) == list(map(float, wanted.losses))


class Hang(logging.Handler):
    """A wait that ends when a warning has been told; its clock goes on by a minute at each look."""

    def __init__(self):
        super().__init__()
        self.text, self.now, self.is_begun, self.is_told = "", 0.0, False, threading.Event()

    def emit(self, record):
        self.text = self.text or record.getMessage()
        self.is_told.set()

    def monotonic(self):
        self.now += 61 * self.is_begun
        return self.now

    def wait(self):
        self.is_begun = True
        observation._woken.set()  # it looks again and again
        self.is_told.wait(300)  # the hang
        self.is_begun = False


def end_watch():
    """Has the thread look at once whether there are steps, and end."""
    observation._woken.set()
    if (thread := observation._thread) is not None:
        thread.join(300)
    observation._woken.clear()
    assert observation._thread is None


@pytest.fixture
def hang(monkeypatch):
    end_watch()
    handler, logger = Hang(), logging.getLogger("ipu_pipeline")
    monkeypatch.setattr(observation, "time", types.SimpleNamespace(monotonic=handler.monotonic))
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    end_watch()


@BOTH
def test_a_step_that_waits_for_its_data_says_so(hang, mapping):
    def data():
        yield from batches(1, 1)
        hang.wait()
        yield from batches(1)

    pipeline = make(device_mapping=mapping)
    pipeline.step(start(pipeline), data())
    assert hang.text.startswith("A step of a pipeline has not ended after 60 s.")
    assert "The host waits for micro-batch 2 of the data." in hang.text
    assert f"Python is {line_of('# the hang')} (thread MainThread)" in hang.text


def test_a_step_that_hangs_says_in_which_stage(hang):
    def wait(y):
        if y[0, 0] == 7:
            threads.append(threading.current_thread())
            hang.wait()
        return y

    def hanging_stage(p, x, y):
        return jnp.tanh(x @ p["w"]), jax.pure_callback(wait, jax.eval_shape(lambda: y), y)

    threads, pipeline = [], make((hanging_stage, last))
    state, _outputs = pipeline.step(start(pipeline), batches(1, 7, 1))
    jax.block_until_ready(state)
    program = r"stage 0 \(hanging_stage\), forward of micro-batch 1"
    if threads != [threading.main_thread()]:  # the device was busy: the host went on, maybe to the end
        program = r"stage \d \(\w+\), [a-z ]+(of micro-batch \d)?"
    host = rf"the last it came to is {program} of step 0\."
    assert re.search(rf"{host}|have not come are of: stage 0 \(hanging_stage\)", hang.text)
    assert f"Python is {line_of('# the hang')}" in hang.text


_AT_THE_END = """
import atexit, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))  # runs last
import numpy as np, jax, optax
from ipu_pipeline import engine
pipeline = engine.Pipeline([lambda w, x: w * x], parameters=[np.float32(1)], num_micro_batches=1,
                           optimizer=optax.sgd(0.1))
state = pipeline.init(jax.random.key(0), np.float32(1))
pipeline.step(state, [np.float32(1)])
print([thread.name for thread in threading.enumerate()])
"""


@pytest.mark.thorough
def test_its_thread_ends_before_python_does():
    """Python ends a thread when it comes back from a function of JAX, whose C++ then aborts the process."""
    result = programs.start("-c", _AT_THE_END, as_tests=True)
    assert result.stdout.splitlines() == ["['MainThread', 'ipu_pipeline step watch']", "['MainThread']"]
    assert result.returncode == 0, result.stderr
