import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import engine, layers
from ipu_pipeline.engine.tracing import scopes
from ipu_pipeline.engine.tracing.specs import initial_value
from ipu_pipeline.ground import checks
from tests.support import beside, front


def trace(*stages):
    """The specifications of the variables that stages ask for."""
    pipeline = engine.Pipeline(stages, num_micro_batches=1)
    pipeline.trace(np.zeros((2, 3), "float32"))
    return pipeline.variables


def test_scopes_nest_and_reopen():
    def stage(x):
        with engine.variable_scope("a"), engine.variable_scope("b/c"):
            engine.get_variable("v", ())
        with engine.variable_scope("a"):
            engine.get_variable("v", ())
        return x

    assert list(trace(stage)) == ["a/b/c/v", "a/v"]


def test_a_variable_that_exists_needs_reuse():
    def without(x):
        for _time in range(2):
            with engine.variable_scope("a"):
                x += engine.get_variable("v", ())
        return x

    with pytest.raises(ValueError, match=r"Variable a/v already exists.*reuse=True"):
        trace(without)

    def with_reuse(x):
        with engine.variable_scope("a"):
            x += engine.get_variable("v", (), initializer=2.0)
        with engine.variable_scope("a", reuse=True):
            return x + engine.get_variable("v") * engine.get_variable("v", ())

    assert list(trace(with_reuse)) == ["a/v"]


def value_of(*arguments, seed=0, **options):
    def stage(x):
        engine.get_variable(*arguments, **options)
        return x

    (spec,) = trace(stage).values()
    return initial_value(spec, jax.random.key(seed)), spec


def test_initial_values():
    matrix, _spec = value_of("m", (4, 5))
    limit = np.sqrt(6 / 9)
    assert np.abs(matrix).max() <= limit
    assert np.unique(matrix).size == 20
    assert not np.array_equal(matrix, value_of("m", (4, 5), seed=1)[0])
    assert not np.array_equal(matrix, value_of("n", (4, 5))[0])
    np.testing.assert_array_equal(value_of("c", (2,), initializer=3)[0], [3, 3])
    np.testing.assert_array_equal(value_of("d", initializer=[1.0, 2.0])[0], [1, 2])
    counter, spec = value_of("i", (), jnp.int32)
    assert (counter, counter.dtype) == (0, jnp.int32)
    assert not spec.trainable
    key = jax.random.fold_in(jax.random.key(0), checks.hash_name("u"))
    np.testing.assert_array_equal(
        value_of("u", (3,), initializer=jax.nn.initializers.normal())[0],
        jax.nn.initializers.normal()(key, (3,), jnp.float32),
    )


@pytest.mark.parametrize(("shape", "fan"), [((400,), 400), ((), 1)])
def test_the_default_initializer_of_vectors_and_scalars(shape, fan):
    """As TensorFlow 1: Glorot uniform for every rank, with both fans the size of a vector."""
    first, spec = value_of("b", shape)
    values = np.array([first, *(initial_value(spec, jax.random.key(seed)) for seed in range(1, 40))])
    limit = np.sqrt(6 / (2 * fan))
    assert np.abs(values).max() <= limit
    assert np.abs(values).max() > 0.9 * limit
    assert abs(values.mean()) < 0.2 * limit
    named, _spec = value_of("b", shape, initializer="glorot_uniform")
    np.testing.assert_array_equal(named, values[0])


@pytest.mark.parametrize(
    ("initializer", "dtype"),
    [
        (1, "int32"),
        ([1, 2], "int32"),
        (True, "bool"),
        (1.0, "float32"),
        (np.ones(2), "float32"),
        (np.float16(1), "float16"),
        (np.arange(3), "int32"),
        (np.arange(3, dtype=np.uint8), "uint8"),
        (jnp.ones(2, jnp.bfloat16), "bfloat16"),
    ],
)
def test_the_dtype_of_a_constant_initializer(initializer, dtype):
    value, spec = value_of("c", initializer=initializer)
    assert value.dtype == spec.dtype == dtype
    assert spec.trainable is bool(jnp.issubdtype(spec.dtype, jnp.floating))
    assert value_of("c", None, jnp.float32, initializer)[1].dtype == "float32"


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("",), {}, "name must be a non-empty string"),
        (("a//b", ()), {}, "without empty parts"),
        (("v",), {}, r"Shape of a new variable \(v\) must be fully defined"),
        (("v", (-1,)), {}, "non-negative integers"),
        (("v", (None, 2)), {}, "non-negative integers"),
        (("v", (), "text"), {}, "'text' is not a dtype"),
        (("v", (), object), {}, "'object'> is not a dtype of numbers"),
        (("v", (), "float64"), {}, "jax_enable_x64"),
        (("v", (3,)), {"initializer": [1.0, 2.0]}, r"array of shape \(2,\), but shape=\(3,\)"),
        (("v", (3,), np.int32), {"initializer": 2.5}, "Variable v: .* 2.5 has values that int32 does not"),
        (("v", (), np.int32), {"initializer": 2**31}, "Variable v: .* 2147483648 has values that int32"),
        (("v", (), np.float32), {"initializer": 1j}, "Variable v: .* 1j has values that float32"),
    ],
)
def test_wrong_variables(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        value_of(*arguments, **options)


def test_an_initializer_may_return_a_list():
    value, _spec = value_of("v", (2,), initializer=lambda *_arguments: [0.5, 1])
    assert value.tolist() == [0.5, 1]


def test_an_initializer_with_another_result():
    with pytest.raises(ValueError, match=r"variable v must return float32\[3\]; it returned float32\[1\]"):
        value_of("v", (3,), initializer=lambda key, shape, dtype: jnp.zeros(1))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("missing", 1.0, "there is no variable 'missing'.*There are: trained, kept"),
        ("trained", 1.0, "trained is trainable"),
        ("kept", np.zeros(2, "float32"), r"kept is float32\[\], but the value is float32\[2\]"),
        ("kept", 1, r"kept is float32\[\], but the value is int32\[\]"),
    ],
)
def test_assign_errors(name, value, message):
    def stage(x):
        engine.get_variable("trained", ())
        engine.get_variable("kept", (), trainable=False)
        with engine.variable_scope("s"):
            engine.assign("kept", jnp.float32(1))  # by its full name
        engine.assign(name, value)
        return x

    with pytest.raises(ValueError, match=message):
        trace(stage)


def test_variables_as_tensorflow_has_them_to_assign_to():
    def stage(x, assign):
        assign(engine.get_variable("kept", (), trainable=False))
        return x

    with pytest.raises(TypeError, match="or the array that get_variable returned .* computed from that"):
        trace(functools.partial(stage, assign=lambda kept: engine.assign(kept + 1, kept)))
    with pytest.raises(AttributeError) as error:
        trace(functools.partial(stage, assign=lambda kept: kept.assign(kept + 1)))
    assert "an array, as get_variable returns one: assign(variable, value)" in error.value.__notes__[0]


def test_reading_after_assigning():
    def stage(x):
        v = engine.get_variable("v", (), initializer=1.0, trainable=False)
        engine.assign(v, v + 3)
        engine.assign_sub("v", 1.0)
        engine.assign_add(v, -1)
        with scopes.absolute_scope("", reuse=True):
            return v, engine.get_variable("v")

    pipeline = engine.Pipeline([stage], num_micro_batches=2)
    state = pipeline.init(jax.random.key(0), np.float32(0))
    state, outputs = pipeline.step(state, [np.float32(0)] * 2)
    assert [tuple(map(float, pair)) for pair in outputs.outputs] == [(1, 2), (2, 3)]
    assert state.variables["v"] == 3


@pytest.mark.parametrize(
    ("function", "arguments"), [("get_variable", ("v", ())), ("next_rng_key", ()), ("assign", ("v", 1.0))]
)
def test_outside_of_a_program(function, arguments):
    with pytest.raises(RuntimeError, match=f"{function} was called outside of a program"):
        getattr(engine, function)(*arguments)


@pytest.mark.parametrize("name", ["", "a//b", "/a", 3])
def test_wrong_scopes(name):
    with pytest.raises(ValueError, match="variable_scope: name must be"), engine.variable_scope(name):
        pass
    with pytest.raises(ValueError, match="use_resource"), engine.variable_scope("a", use_resource=False):
        pass


def layer_names(stages):
    return sorted(name for name in trace(*stages) if name.endswith("kernel"))


def test_layer_names_do_not_depend_on_the_split():
    def dense(x):
        return layers.Dense(3)(x)

    together = layer_names([lambda x: dense(dense(dense(x)))])
    assert together == ["dense/kernel", "dense_1/kernel", "dense_2/kernel"]
    assert layer_names([dense, dense, dense]) == together


def test_outside_of_stages_a_conflict_is_an_error_of_its_own():
    def twice():
        ipu.get_variable("w", (2,))
        return ipu.get_variable("w", (2,))

    def shared():
        ipu.get_variable("w", (2,))
        with ipu.variable_scope("w", reuse=True):
            pass
        with scopes.absolute_scope("", reuse=True):
            return ipu.get_variable("w", (3,))

    for function, message in (
        (twice, "Variable w already exists, disallowed"),
        (shared, r"share variable w, but specified shape \(3,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            front.compile_program(function)


def test_assign_outside_of_stages():
    def function():
        ipu.get_variable("w", (), trainable=False)
        ipu.assign("w", 1.0)
        return ipu.loops.repeat(1, lambda: None)

    with pytest.raises(RuntimeError, match="assign.'w', .... was called outside of a computational stage"):
        front.compile_program(function)


@pytest.mark.parametrize(
    ("function", "inputs", "message"),
    [
        ("no function", None, "computation must be a function; got 'no function'"),
        (lambda x: x, [[1, [2, 3]]], "input"),
        (lambda x: x, "text", "input"),
    ],
)
def test_what_cannot_be_compiled(function, inputs, message):
    with pytest.raises(TypeError, match=message):
        front.compile_program(function, inputs)


def test_one_input_needs_no_list():
    program = front.compile_program(lambda x: x * 2, np.float32(3))
    with ipu.Session() as session:
        assert session.run(program) == [6]


def test_a_variable_of_size_zero(rng):
    def last(h):
        return jnp.mean((h - 1) ** 2) + jnp.sum(h @ engine.get_variable("empty", (3, 0)))

    stages = [lambda x: x @ engine.get_variable("w", (4, 3)), last]
    options = {"optimizer": optax.sgd(0.1), "device_mapping": [0, 0]}
    pipeline = engine.Pipeline(stages, num_micro_batches=2, **options)
    step = list(rng.normal(size=(2, 2, 4)).astype("float32"))
    state, _outputs = beside.train(pipeline, [step])
    assert state.variables["empty"].shape == (3, 0)
