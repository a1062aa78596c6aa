"""Placeholders that functions use without being given them: inputs of the program, and of who uses them."""

import copy
import gc
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import loops
from ipu_pipeline.pipelining_ops import OptimizerFunctionOutput
from tests.support import front, models

ROWS = np.linspace(-1, 1, 24).reshape(6, 4)


class Program(front.Pipelined):
    """Three stages and an optimizer function, all of which use placeholders from around them."""

    def __init__(self, mapping, dtype=np.float32):
        self.rate = ipu.placeholder(dtype, name="rate")
        self.scale = ipu.placeholder(dtype, [4], name="scale")
        self.count = ipu.placeholder(np.int32, name="count")
        self.dtype = dtype

        def first(x):
            weights = ipu.get_variable("a", (4, 4), dtype, 0.1)
            return jnp.tanh(x @ weights) * self.scale

        def passing(x):
            return x, self.scale

        def last(x, scale):
            weights = ipu.get_variable("b", (4,), dtype, 0.3)
            return jnp.sum(scale * (x * self.scale) @ weights) ** 2

        def optimizer_function(loss):
            return OptimizerFunctionOutput(optax.adam(self.rate * 2), loss * 2)

        options = {"optimizer_function": optimizer_function, "device_mapping": mapping, "repeat_count": 2}
        super().__init__([first, passing, last], self.count, [*ROWS.astype(dtype)] * 8, **options)

    def run_calls(self, calls):
        with front.session_of(self) as session:
            feeds = [{self.rate: rate, self.scale: scale, self.count: 3} for rate, scale in calls]
            outputs = [self.run(session, feed) for feed in feeds]
            return session.variables, np.ravel(outputs)

    def expected(self, calls):
        parameters = {"a": jnp.full((4, 4), 0.1, self.dtype), "b": jnp.full(4, 0.3, self.dtype)}
        state = optax.adam(0.0).init(parameters)
        rows, outputs = iter([*ROWS.astype(self.dtype)] * 8), []

        @jax.jit
        @jax.value_and_grad
        def differentiate(p, x, scale):
            return jnp.sum(scale * (jnp.tanh(x @ p["a"]) * scale * scale) @ p["b"]) ** 2

        for rate, scale in [call for call in calls for _update in range(2)]:
            total = jax.tree.map(jnp.zeros_like, parameters)
            for _micro_batch in range(3):
                value, gradients = differentiate(parameters, next(rows), scale.astype(self.dtype))
                outputs.append(value)
                total = jax.tree.map(lambda one, other: one + 2 * other, total, gradients)
            with jax.numpy_dtype_promotion("standard"):
                changes, state = optax.adam(self.dtype(rate) * 2).update(total, state, parameters)
            parameters = optax.apply_updates(parameters, changes)
        return parameters, np.array(outputs)


def test_equal_to_a_plain_loop():
    with jax.enable_x64(True):
        program = Program([1, 0, 1], np.float64)
        assert program.program.placeholders == [program.count, program.scale, program.rate]
        calls = [(0.1, np.linspace(0.5, 1, 4)), (0.01, np.linspace(1, 0.2, 4))]
        variables, outputs = program.run_calls(calls)
        expected, expected_outputs = program.expected(calls)
        models.assert_trees_close(variables, expected, 1e-12)
        np.testing.assert_allclose(outputs, expected_outputs, rtol=1e-12)


def test_it_must_be_fed():
    program, message = Program([0, 0, 0]), "You must feed a value for placeholder 'scale'"
    with front.session_of(program) as session, pytest.raises(ValueError, match=message):
        program.run(session, {program.rate: 1.0, program.count: 3})


def test_only_what_is_used_is_an_input():
    unused = ipu.placeholder(np.float32, name="unused")
    used = ipu.placeholder(np.float32, name="used")
    given = ipu.placeholder(np.float32, name="given")
    compiled = front.compile_program(lambda x: x * used, inputs=[given])
    assert compiled.placeholders == [given, used]
    both = front.compile_program(lambda x: x * given, inputs=[given])
    with ipu.Session() as session:
        assert session.run(compiled, {given: 2, used: 3}) == [6]
        assert session.run(both, {given: 3}) == [9]
        with pytest.raises(ValueError, match="unused"):
            session.run(compiled, {given: 2, used: 3, unused: 1})


def test_what_an_array_can_do():
    def use(p, flag):
        return [
            p + 1,
            1 - p,
            jnp.arange(2.0) @ p,
            p[0],
            p.astype(np.int32),
            p.sum(),
            jnp.where(flag, p, 0),
            jax.nn.relu(p),
            jax.jit(jnp.sin)(p),
            jax.lax.cond(flag, lambda: p, lambda: -p),
            jax.lax.scan(lambda carry, x: (carry + x * p[1], x), 0.0, p)[0],
            jnp.where(p == 2.0, 10.0, 20.0),
            jnp.where(p != 2.0, 10.0, 20.0),
            np.float32(2) * p,
            np.ones(2, np.float32) - p,
            jnp.asarray(len(p)),
        ]

    p, flag = ipu.placeholder(np.float32, [2], name="p"), ipu.placeholder(bool, name="flag")
    other, value = ipu.placeholder(np.float32, name="other"), np.array([-1.5, 2.0], np.float32)
    with ipu.Session() as session:
        found = session.run(front.compile_program(lambda: tuple(use(p, flag))), {p: value, flag: True})
        assert session.run(front.compile_program(lambda: p), {p: value})[0].tolist() == value.tolist()
    expected = use(jnp.asarray(value), jnp.asarray(True))
    for one, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-6)
    assert (p == p, p == other, p != other, p == 1.0, p != 1.0) == (True, False, True, False, True)


def test_in_loops_and_their_counts():
    number = ipu.placeholder(np.int32, name="number")
    factor = ipu.placeholder(np.float32, name="factor")
    compiled = front.compile_program(lambda: loops.repeat(number, lambda x: x * factor, [1.0]))
    with ipu.Session() as session:
        assert session.run(compiled, {number: 3, factor: 2.0}) == [8]


def test_in_inference_and_inputs():
    offset = ipu.placeholder(np.float32, name="offset")
    model = front.Pipelined([lambda x: x * 2, lambda x: x + offset], 2, inputs=[offset])
    with ipu.Session() as session:
        assert np.ravel(model.run(session, {offset: 5.0})).tolist() == [15, 15]


def test_outside_of_programs():
    p = ipu.placeholder(np.float32, name="p")
    for use in (lambda: p + 1, lambda: jnp.asarray(p), lambda: np.asarray(p), lambda: p.sum()):
        with pytest.raises(ValueError, match="Trying to capture the tensor p .* outside of a program"):
            use()
    with pytest.raises(AttributeError, match="placeholder 'p'.* has no attribute 'wibble'"):
        _ = p.wibble
    assert p == p
    assert {p: 1}[p] == 1

    with pytest.raises(ValueError, match="capture the tensor late .*made by the function that is being"):
        front.compile_program(lambda: ipu.placeholder(np.float32, name="late") + 1)


def test_a_variable_that_another_stage_got():
    table = []

    def embed(tokens):
        with ipu.variable_scope("embeddings"):
            table.append(ipu.get_variable("table", (10, 4)))
        return table[-1][tokens]

    def classify(x):
        return x @ table[-1].T

    message = (
        r"stage 1 \(classify\) uses the value of variable embeddings/table that another function got.*"
        r"variable_scope\('embeddings', reuse=True\): get_variable\('table'\)"
    )
    with pytest.raises(ValueError, match=message):
        front.Pipelined([embed, classify], 1, inputs=[np.arange(3)])


def test_copies_are_the_same_and_trees_have_them_as_leaves():
    p = ipu.placeholder(np.float32, name="p")
    assert copy.deepcopy({"rate": p})["rate"] is p is copy.copy(p)
    assert repr(pickle.loads(pickle.dumps(p))) == repr(p)
    tree = {"rate": p, "n": 3}
    assert jax.tree.map(lambda leaf: leaf, tree) == tree
    assert len(jax.tree.leaves(tree)) == 2


def test_programs_keep_no_placeholders_but_their_own():
    from ipu_pipeline.tf1.graph import live_placeholders

    gc.collect()
    before = len(live_placeholders())
    for _time in range(4):
        own = ipu.placeholder(np.float32)
        kept = front.Pipelined([lambda x, own=own: x * own], 1, inputs=[1.0]).program
        del own
        gc.collect()
        assert len(live_placeholders()) == before + 1
    del kept


def test_masked_arrays_and_other_byte_orders():
    """A mask was dropped; NumPy's big-endian arrays were refused as inputs, without naming these."""
    x = ipu.placeholder(np.float32, [3], name="x")
    plain = np.arange(3.0)
    masked = np.ma.masked_array(plain, [0, 1, 0])
    with pytest.raises(ValueError, match=r"^inputs\[0\] is a masked array: 1 of its 3 elements"):
        front.compile_program(lambda a: a, [masked])
    given = [plain.astype(">f8"), x, plain.astype(">f4")]
    program = front.compile_program(lambda a, x, b: a + b + x, given)
    with ipu.Session() as session:
        for value in (plain.astype(">f4"), np.ma.masked_array(plain)):
            np.testing.assert_array_equal(session.run(program, {x: value})[0], 3 * plain)
        with pytest.raises(ValueError, match="The value fed to placeholder 'x' .* is a masked array: 1 of"):
            session.run(program, {x: masked})
