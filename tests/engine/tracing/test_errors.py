"""What errors in stages say: where it happened, and everything that can be found at once."""

import collections
import functools
import pickle
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import engine, layers
from ipu_pipeline.ground.pytrees import check_like, describe_structure, describe_structures
from tests.support import front


def trace(stages, *element, loss=None, optimizer=None):
    optimizer = optax.sgd(0.1) if loss is not None and optimizer is None else optimizer
    pipeline = engine.Pipeline(stages, num_micro_batches=1, loss=loss, optimizer=optimizer)
    pipeline.trace(tuple(np.zeros(shape, "float32") for shape in element))
    return pipeline


def error_of(kind, call, *arguments, **options):
    with pytest.raises(kind) as caught:
        call(*arguments, **options)
    assert caught.type is kind
    return caught.value


def note_of(error):
    (note,) = (note for note in error.__notes__ if note.startswith("This happened"))  # JAX adds its own
    return note


def line_of(text):
    """File, number and text of this file's only line that ends in a text."""
    with open(__file__) as file:
        (found,) = [(n, line) for n, line in enumerate(file, 1) if line.rstrip().endswith(text)]
    return f"{__file__}, line {found[0]}: {found[1].strip()}"


def project(x):
    return x @ jnp.ones((7, 7))  # wrong


def test_errors_print_as_where_users_have_them_from():
    for kind in (ipu.errors.OutOfRangeError, ipu.errors.ProcessError):
        line = traceback.format_exception_only(kind("gone"))[-1]
        assert line == f"ipu_pipeline.errors.{kind.__name__}: gone\n"
        assert type(pickle.loads(pickle.dumps(kind("gone")))) is kind


def test_where_a_stage_fails():
    def encode(images, labels, *more, scale=1):
        with engine.variable_scope("encoder"):
            layers.Dense(3)(images)
            return project(images) * scale, labels, more

    error = error_of(TypeError, trace, [encode], (2, 4), (2,), (5,))
    assert note_of(error).splitlines() == [
        "This happened while tracing stage 0 (encode)",
        "  in scope encoder",
        "  on images: float32[2, 4], labels: float32[2], more[0]: float32[5]",
        f"  at {line_of('# wrong')}",
    ]


def test_the_innermost_scope_is_that_of_the_layer():
    def encode(x):
        with engine.variable_scope("encoder"):
            x = layers.Dense(3)(x)
            return layers.Dense(3)(x.astype("int32"))  # an integer

    assert note_of(error_of(TypeError, trace, [encode], (2, 4))).splitlines() == [
        "This happened while tracing stage 0 (encode)",
        "  in scope encoder/dense_1",
        "  on x: float32[2, 4]",
        f"  at {line_of('# an integer')}",
    ]


def test_scopes_around_a_stage_and_in_it():
    """One whose error the stage caught is left."""
    with engine.variable_scope("outer"):
        error = error_of(TypeError, trace, [project], (2, 4))
    assert "(project)\n  in scope outer\n" in note_of(error)

    def stage(x):
        try:
            with engine.variable_scope("caught"):
                raise RuntimeError("caught")
        except RuntimeError:
            raise KeyError("another") from None

    error = error_of(KeyError, trace, [stage], (2,))
    assert "scope" not in note_of(error)


def test_dict_arguments_and_functions_without_a_signature():
    def stage(features, /, **rest):
        return project(features["image"])

    pipeline = engine.Pipeline([stage], num_micro_batches=1)
    error = error_of(TypeError, pipeline.trace, ({"image": np.zeros((2, 4), "float32")},))
    assert "  on features: {'image': float32[2, 4]}\n" in note_of(error)
    note = note_of(error_of(ValueError, trace, [jnp.linalg.inv], (2, 4)))
    assert "float32[2, 4]" in note
    assert " at " not in note  # no line of it is the user's


def test_where_a_loop_body_fails():
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(front.data())

    def body(total, images, labels):
        with ipu.variable_scope("model"):
            return total + jnp.sum(project(images))

    loop = lambda: ipu.loops.repeat(2, body, [np.float32(0)], infeed)  # noqa: E731
    assert note_of(error_of(TypeError, front.compile_program, loop)).splitlines() == [
        "This happened while tracing the body body of ipu.loops.repeat",
        "  in scope model",
        "  on total: float32[], images: float32[4, 12], labels: int32[4]",
        f"  at {line_of('# wrong')}",
    ]


def test_a_body_reports_all_values_that_come_back_different():
    def body(a, b, c):
        return a.astype("int32"), b, jnp.stack([c, c])

    inputs = [np.float32(0)] * 3
    with pytest.raises(ValueError, match="input 0 is .*int32.*; input 2 is .*comes back") as caught:
        front.compile_program(lambda: ipu.loops.repeat(2, body, inputs))
    assert "input 1" not in str(caught.value)


def shared(shape, dtype="float32"):
    with engine.variable_scope("shared", reuse=True):
        value = engine.get_variable("v", shape, dtype)  # asked for
    return jnp.sum(value).astype("float32")


def first(x):
    return x + shared((3,))


def test_one_conflict_is_raised_as_ever():
    def second(x):
        return x + shared((4,))

    pipeline = engine.Pipeline([first, second], num_micro_batches=1)
    for _time in range(2):  # names are given back
        error = error_of(ValueError, pipeline.trace, np.zeros(2, "float32"))
    assert str(error) == (
        "Trying to share variable shared/v, but specified shape (4,) and dtype float32, and found shape "
        "(3,) and dtype float32."
    )
    assert note_of(error).splitlines() == [
        "This happened while tracing stage 1 (second)",
        "  in scope shared",
        "  on x: float32[2]",
        f"  at {line_of('# asked for')}",
    ]


def test_conflicts_of_several_stages_and_a_loss_are_reported_together():
    def second(x):
        return x + shared((4,)) + shared((4,))  # one fault, though it is asked for twice

    def third(x):
        with engine.variable_scope("shared"):
            x += engine.get_variable("v", (3,))[0]
        return x + shared((3,), "int32")

    error = error_of(ValueError, trace, [first, second, third], (2,), loss=lambda x: x)
    text = str(error)
    assert text.startswith("4 faults were found in the pipeline:\n1. stage 1 (second): Trying to share")
    numbered = [line for line in text.splitlines() if line[0].isdigit()][1:]
    assert len(numbered) == 4
    assert numbered[1].startswith("2. stage 2 (third): Variable shared/v already exists, disallowed.")
    assert numbered[2].startswith("3. stage 2 (third): Trying to share variable shared/v, but specified")
    assert "dtype int32" in numbered[2]
    assert numbered[3].startswith("4. stage 2 (third): The loss must be a scalar, but it has shape (2,)")
    assert text.count("   in scope shared\n   on x: float32[2]\n   at ") == 3


def test_a_failure_is_reported_with_what_was_found_before_and_what_is_certain_after():
    def second(x):
        return x + shared((4,))

    def broken(x):
        return project(x)

    def impossible(x, /, *, y):
        return x + y

    def possible(x, *, y):
        return x + y

    error_of(TypeError, trace, [first, broken, impossible], (2, 4))  # that of all faults
    error = error_of(ValueError, trace, [first, second, broken, possible, impossible], (2, 4))
    text = str(error)
    assert text.startswith("3 faults were found in the pipeline:")
    assert "1. stage 1 (second): Trying to share variable shared/v" in text
    assert "2. stage 2 (broken): TypeError: dot_general requires" in text
    assert f"   at {line_of('# wrong')}" in text
    assert "3. stage 4 (impossible) takes (x, /, *, y): x by position only and y by name only" in text
    assert "stage 3" not in text
    assert isinstance(error.__cause__, TypeError)
    called = [frame.f_code.co_name for frame, _line in traceback.walk_tb(error.__cause__.__traceback__)]
    assert "project" in called  # the failure's own traceback


def test_captures_and_unreachable_markers_do_not_end_the_search():
    @jax.custom_jvp
    def unreachable(x):
        return x + engine.get_variable("w", ())

    unreachable.defjvp(lambda primals, tangents: (primals[0], tangents[0]))

    def outer(value):
        def captures(x):
            return x + value

        trace([captures, lambda x: unreachable(x), lambda x: shared((3,)) + shared((4,))], (2,))
        return value

    with pytest.raises(ValueError, match="^3 faults") as caught:
        jax.make_jaxpr(outer)(np.float32(1))
    text = str(caught.value)
    place = "a computed value" if jax.__version_info__ >= (0, 10) else "computed at "
    assert f"1. stage 0 (captures): Trying to capture the tensor float32[] ({place}" in text
    assert "2. stage 1 (<lambda>): get_variable, next_rng_key, assign, metric, enqueue or" in text
    assert "3. stage 2 (<lambda>): Trying to share variable shared/v" in text


def test_no_trainable_variables_with_another_fault():
    error = error_of(ValueError, trace, [lambda x: x], (2,), loss=lambda x: x)
    assert "1. stage 0 (<lambda>): The loss must be a scalar, but it has shape (2,)" in str(error)
    assert "2. the optimizer: No variables to optimize" in str(error)


def test_an_assigned_variable_with_another_shape_is_one_fault():
    def count(size):
        def stage(x):
            with engine.variable_scope("s", reuse=True):
                value = engine.get_variable("count", (size,), initializer=0.0, trainable=False)
                engine.assign("count", value + 1)
            return x

        return stage

    error = error_of(ValueError, trace, [count(2), count(3)], (2,))
    assert str(error).startswith("Trying to share variable s/count")


def test_a_pipeline_of_the_front_reports_all_before_anything_compiles():
    def second_stage(rate, x, labels):
        with ipu.variable_scope("first/dense", reuse=True):
            kernel = ipu.get_variable("kernel", (5, 5))
        return rate, jnp.sum(x) * jnp.sum(kernel) * jnp.ones(3)

    text = str(error_of(ValueError, front.Model, computational_stages=[front.first_stage, second_stage]))
    assert text.startswith("2 faults")
    assert "1. stage 1 (second_stage): Trying to share variable first/dense/kernel" in text
    assert "   on rate: float32[], x: float32[4, 16], labels: int32[4]\n" in text
    assert "2. stage 1 (second_stage): The loss must be a scalar" in text


def test_all_leaves_of_a_micro_batch_that_differ():
    def like(**leaves):
        return {name: np.zeros(shape, "float32") for name, shape in leaves.items()}

    expected = jax.eval_shape(lambda: like(a=(2,), b=(3,), c=()))
    assert len(check_like(like(a=(2,), b=(3,), c=()), expected, "It")) == 3
    text = str(error_of(ValueError, check_like, like(a=(1,), b=(3,), c=(1,)), expected, "It"))
    assert text.startswith(
        "It must have the shape and dtype of the first one, at ['a'], float32[2]; got float32[1]; "
        "at ['c'], float32[]; got float32[1]. "
    )
    assert "drop_remainder" in text
    text = str(error_of(ValueError, check_like, like(a=(1,), d=(), c=()), expected, "It"))
    assert text.startswith("It must be a dict with the keys 'a', 'b', 'c', ")
    assert " got a dict with the keys 'a', 'c', 'd'" in text
    assert text.endswith(
        "Missing: ['b']. Unexpected: ['d']. It must have, at ['a'], float32[2]; got float32[1]."
    )
    one = r"^It must have the shape .* first one, float32\[2\]; got float32\[1\]"
    with pytest.raises(ValueError, match=one):
        check_like(np.zeros(1, "float32"), expected["a"], "It")


def test_where_a_derivative_fails():
    @jax.custom_vjp
    def identity(x):
        return x

    def backward(_residual, _cotangent):
        raise KeyError("no derivative")

    identity.defvjp(lambda x: (x, None), backward)

    def fails_in_a_rule(rate, x, labels):
        rate, h, labels = front.first_stage(rate, x, labels)
        return rate, identity(h), labels

    def has_no_derivative(rate, x, labels):
        rate, h, labels = front.first_stage(rate, x, labels)
        return rate, jax.lax.while_loop(lambda v: v.sum() < 0, lambda v: v * 2, h), labels

    for stage, kind, line in (
        (fails_in_a_rule, KeyError, 'raise KeyError("no derivative")'),
        (has_no_derivative, ValueError, "return rate, jax.lax.while_loop("),
    ):
        error = error_of(kind, front.Model, computational_stages=[stage, front.second_stage])
        note = note_of(error)
        assert note.startswith(f"This happened while differentiating stage 0 ({stage.__name__})\n  at ")
        assert "test_errors.py, line" in note
        assert line in note


def last_line_of(kind, call, *arguments, **options):
    """The last line of the traceback of the error that a call ends in."""
    with pytest.raises(kind) as caught:
        call(*arguments, **options)
    return "".join(traceback.format_exception(caught.value)).rstrip().splitlines()[-1].strip()


def test_tracebacks_end_with_our_lines():
    """They ended with JAX's note that it had removed its internal frames."""
    wrong = f"at {line_of('# wrong')}"
    assert last_line_of(TypeError, trace, [project], (2, 4)) == wrong
    model = [front.first_stage, lambda rate, x, _labels: (rate, project(x))]
    assert last_line_of(TypeError, front.Model, computational_stages=model) == wrong
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(front.data())
    loop = lambda: ipu.loops.repeat(2, lambda x, y, z: project(y), [np.float32(0)], infeed)  # noqa: E731
    assert last_line_of(TypeError, front.compile_program, loop) == wrong

    def update(*_arguments):
        raise RuntimeError("of the optimizer")

    optimizer = optax.GradientTransformation(lambda _parameters: (), update)
    last = last_line_of(RuntimeError, trace, [layers.Dense(1)], (2, 4), loss=jnp.sum, optimizer=optimizer)
    assert last == "RuntimeError: of the optimizer"
    bare = lambda: (ipu.rand_ops.dropout(jnp.zeros(3)), ipu.loops.repeat(1, lambda: None))  # noqa: E731
    assert "Error: ipu.rand_ops.dropout" in last_line_of(RuntimeError, front.compile_program, bare)


def test_a_partial_is_named_by_what_it_wraps():
    def encode(_number, x):
        return project(x)

    wrapped = functools.partial(functools.partial(encode), 1)
    stage = engine.Stage(functools.partial(encode), {"w": np.zeros(2, "float32")})
    for own in (wrapped, stage):
        note = note_of(error_of(TypeError, trace, [own], (2, 4)))
        assert note.startswith("This happened while tracing stage 0 (encode)\n")
    loop = lambda: ipu.loops.repeat(2, functools.partial(encode, 1), [np.zeros((2, 4))])  # noqa: E731
    error = error_of(TypeError, front.compile_program, loop)
    assert "the body encode of ipu.loops.repeat" in note_of(error)


def test_methods_of_tensorflows_optimizers_on_optaxs():
    method = "compute_gradients"
    with pytest.raises(AttributeError, match=method) as caught:
        front.Model(optimizer_function=lambda rate, loss: getattr(optax.sgd(rate), method)(loss))
    note = note_of(caught.value)
    assert f"  {method}() is a method of TensorFlow's optimizers, and Optax's have none." in note
    assert "OptimizerFunctionOutput(optimizer, loss)" in note
    assert "GradientAccumulationOptimizerV2(optimizer, 1).minimize(loss)" in note
    other = error_of(
        AttributeError, front.Model, optimizer_function=lambda _rate, _loss: getattr(jnp, method)
    )
    assert "TensorFlow" not in note_of(other)


def test_a_captured_value_is_told_by_the_line_that_computes_it():
    def program(x):
        doubled = jnp.stack([x, x]) * 2  # captured

        def stage(rows, _labels):
            return rows * doubled[0]

        return ipu.pipelining_ops.pipeline(
            [stage, lambda rows: rows],
            gradient_accumulation_count=2,
            infeed_queue=ipu.ipu_infeed_queue.IPUInfeedQueue(front.data()),
            outfeed_queue=ipu.ipu_outfeed_queue.IPUOutfeedQueue(),
        )

    with pytest.raises(ValueError, match="which may only use its arguments") as caught:
        front.compile_program(program, [ipu.placeholder(np.float32, [], "x")])
    told = (
        f"Trying to capture the tensor float32[2] (computed at {line_of('# captured')}) in stage 0 (stage)"
    )
    assert told in str(caught.value)


Pair = collections.namedtuple("Pair", "first second")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "an array"),
        ((1,), "a tuple of 1 array"),
        ((1, 2), "a tuple of 2 arrays"),
        ([], "an empty list"),
        (None, "None"),
        ({"b": 1, "a": 2}, "a dict with the keys 'a', 'b'"),
        ((1, {"a": 2}, [None]), "a tuple of (an array, a dict with the key 'a', a list of (None))"),
        ({"a": (1, 2)}, "a dict {'a': a tuple of 2 arrays}"),
        (Pair(1, [2]), "a Pair(first: an array, second: a list of 1 array)"),
    ],
)
def test_structures_are_told_as_they_are_written(value, text):
    assert describe_structure(jax.tree.structure(value)) == text


def test_a_micro_batch_of_another_structure():
    both = describe_structures(jax.tree.structure(1), jax.tree.structure([1]))
    assert both == ["an array", "a list of 1 array"]
    pipeline = engine.Pipeline([lambda x, y: x + y], num_micro_batches=2)
    x = np.zeros(2, "float32")
    error = error_of(ValueError, pipeline.step, pipeline.init(jax.random.key(0), (x, x)), [(x, x), x])
    assert str(error) == "Micro-batch 1 must be a tuple of 2 arrays, as the first one; got an array."


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: ipu.rand_ops.dropout(x), "ipu.rand_ops.dropout"),
        (lambda x: ipu.layers.Dropout(0.5)(x, training=True), "ipu.layers.Dropout"),
        (lambda _x: ipu.next_rng_key(), "next_rng_key"),
    ],
)
def test_random_numbers_name_what_was_called(call, name):
    message = f"{name} was called outside of a computational stage, in the compiled"
    with pytest.raises(RuntimeError, match=message):
        front.compile_program(lambda: (call(jnp.zeros(3)), ipu.loops.repeat(1, lambda: None)))


def test_an_orthogonal_initializer_in_16_bits_is_told_what_to_pass():
    flax = pytest.importorskip("flax.linen", reason="Flax is not installed (extra flax)")
    orthogonal = flax.initializers.orthogonal()

    def init(initializer):
        def stage(x):
            dense = flax.Dense(3, kernel_init=initializer, param_dtype=jnp.float16)
            return layers.Flax(dense)(x)

        pipeline = engine.Pipeline([stage], num_micro_batches=1)
        return pipeline.init(jax.random.key(0), np.zeros((2, 4), "float32"))

    error = error_of(NotImplementedError, init, orthogonal)
    place, mend = error.__notes__
    assert place == "This happened while making the initial value of variable flax/kernel: float16[4, 3]"
    assert "initializer(key, shape, jnp.float32).astype(dtype)" in mend
    state = init(lambda key, shape, dtype: orthogonal(key, shape, jnp.float32).astype(dtype))
    assert state.variables["flax/kernel"].dtype == jnp.float16
