"""What a compiled program returns, and what `Session.run` takes and gives: as in TensorFlow 1."""

import collections
import gc
import weakref

import jax.numpy as jnp
import numpy as np
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import loops
from ipu_pipeline.tf1.program.program import Computed
from tests.support import front

MATRIX = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_a_single_value_is_a_list_of_one():
    """`[0]` of the result was the first row of a matrix once."""
    found = front.results(lambda: MATRIX * 2)
    assert isinstance(found, list)
    np.testing.assert_array_equal(found, [MATRIX * 2])


def test_values_can_be_taken_one_by_one():
    first, second = compiled = front.compile_program(lambda: (MATRIX, jnp.float32(7)))
    (only,) = front.compile_program(lambda: [MATRIX + 1])
    assert len(compiled) == 2
    with ipu.Session() as session:
        np.testing.assert_array_equal(session.run(first), MATRIX)
        assert session.run(second) == session.run(compiled[1]) == session.run(compiled[-1]) == 7
        assert [session.run(one).shape for one in compiled] == [(2, 3), ()]
        np.testing.assert_array_equal(session.run(only), MATRIX + 1)
        np.testing.assert_array_equal(session.run([only, second])[0], MATRIX + 1)
        everything, one, rest = session.run([compiled, compiled[1], compiled[:1]])
    assert [value.shape for value in everything] == [(2, 3), ()]
    assert one == 7
    assert [value.shape for value in rest] == [(2, 3)]


def test_operators_on_values_are_computed_when_they_are_run():
    first, second = front.compile_program(lambda: (MATRIX, np.float32(6)))
    (other,) = front.compile_program(lambda: np.float32(3))
    total = np.float32(2) * first[0] / second - abs(-other)
    with ipu.Session() as session:
        found, rest = session.run([total, {"mean": MATRIX @ MATRIX.T + second}])
        np.testing.assert_allclose(found, 2 * MATRIX[0] / 6 - 3)
        np.testing.assert_array_equal(rest["mean"], MATRIX @ MATRIX.T + 6)
        assert session.run(second**2 % 5) == 1
    with pytest.raises(TypeError, match="not iterable"):
        list(first)
    for wrong in (None, ipu.get_global_step(), [second, 1], ipu.placeholder(np.float32, [])):
        with pytest.raises(TypeError, match="operand of add, with"):
            first + wrong
    with pytest.raises(TypeError, match="operand of getitem, with slice"):
        first[:second]


def test_variables_are_no_fetches():
    kept = []

    def function():
        kept.append(ipu.get_variable("w", (3,)))
        return kept[0]

    program = front.compile_program(function)
    with ipu.Session() as session:
        for fetch in (kept[0], [program, "w"], ipu.global_variables()[0]):
            with pytest.raises(TypeError, match="Session.variables has the values of variables, by name"):
                session.run(fetch)


def test_what_is_computed_wrong_loses_nothing_and_what_is_shared_is_computed_once():
    queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    (matrix,) = front.compile_program(lambda: (MATRIX, queue.enqueue(np.float32(3))))
    with ipu.Session() as session:
        with pytest.raises(ValueError, match="matmul"):
            session.run([matrix @ matrix, queue.dequeue()])
        assert session.run(queue.dequeue()) == [3]
        calls = []
        shared = Computed(lambda value: calls.append(value) or value, (matrix,))
        found, twice = session.run([shared, (shared + shared) / 2])
        np.testing.assert_array_equal(found, twice)
    assert len(calls) == 1


def counting():
    def body(number):
        count = ipu.get_variable("count", initializer=0, trainable=False)
        ipu.assign("count", count + 1)
        return number + 1

    return loops.repeat(1, body, [np.int32(0)]), ipu.get_variable("other", initializer=5)


def test_a_program_runs_once_however_often_it_is_there():
    compiled = front.compile_program(counting)
    Pair = collections.namedtuple("Pair", "left right")
    with ipu.Session() as session:
        found = session.run({"a": compiled, "b": [compiled[0], Pair(compiled[1], compiled)]})
        assert session.variables["count"] == 1
        assert found == {"a": [1, 5], "b": [1, Pair(5, [1, 5])]}
        session.run((compiled[0], compiled[0]))
        assert session.variables["count"] == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda: None,
        list,
        lambda: loops.repeat(1, lambda: None),
        lambda: (loops.repeat(1, lambda: None), loops.repeat(2, lambda: None)),
        lambda: {"op": loops.repeat(1, lambda: None)},
    ],
)
def test_a_function_without_values_makes_one_operation(function):
    compiled = front.compile_program(function)
    assert compiled  # though it has no values
    with ipu.Session() as session:
        assert session.run(compiled) is None
        assert session.run([compiled, compiled]) == [None, None]
    for use in (list, len, lambda program: program[0]):
        with pytest.raises(TypeError, match="returns no values.*session.run\\(program\\)"):
            use(compiled)


def test_operations_behind_values_are_left_out():
    def function():
        total = loops.repeat(3, lambda x: x + 1, [0.0])
        return total, MATRIX, loops.repeat(1, lambda: None), loops.repeat(1, lambda: None)

    total, _matrix = compiled = front.compile_program(function)
    with ipu.Session() as session:
        assert session.run(total) == 3
        assert len(session.run(compiled)) == 2


def test_an_operation_before_a_value_is_refused():
    with pytest.raises(ValueError, match="operation 'repeat' at position 1, before a value"):
        front.compile_program(lambda: (MATRIX, loops.repeat(1, lambda: None), MATRIX))


def test_dicts_and_nested_structures_are_kept():
    compiled = front.compile_program(lambda: {"loss": jnp.float32(1), "all": (MATRIX, [jnp.float32(2)])})
    assert list(compiled) == ["loss", "all"] or set(compiled) == {"loss", "all"}
    with ipu.Session() as session:
        found = session.run(compiled)
        assert found["loss"] == session.run(compiled["loss"]) == 1
        assert isinstance(found["all"], tuple)
        assert session.run(compiled["all"][1]) == found["all"][1] == [2]


def test_a_placeholder_that_is_returned_is_a_value():
    p = ipu.placeholder(np.float32, name="p")
    (value,) = compiled = front.compile_program(lambda: p)
    with ipu.Session() as session:
        assert session.run(compiled, {p: 3}) == [3]
        assert session.run(value, {p: 4}) == 4


def test_a_value_keeps_its_program_and_no_circle_does():
    compiled = front.compile_program(lambda: MATRIX)
    known = weakref.ref(compiled)
    (value,) = compiled
    del compiled
    gc.collect()
    with ipu.Session() as session:
        np.testing.assert_array_equal(session.run(value), MATRIX)
    gc.collect()
    gc.disable()
    try:
        del value
        assert known() is None
    finally:
        gc.enable()
