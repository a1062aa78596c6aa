"""Synthetic data: which values are made up, and that what is dequeued has the shapes of real data."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import loops
from ipu_pipeline.ground import user_warnings
from ipu_pipeline.ipu_infeed_queue import IPUInfeedQueue
from ipu_pipeline.ipu_outfeed_queue import IPUOutfeedMode, IPUOutfeedQueue
from ipu_pipeline.optimizers import CrossReplicaOptimizer
from ipu_pipeline.queues.synthetic_data import make_values, uses_synthetic_data
from tests.support import front
from tests.support.estimating import finite_of, input_fn, make_estimator

OWN, FLAGS = "IPU_PIPELINE_SYNTHETIC_DATA", "TF_POPLAR_FLAGS"
USE = "--use_synthetic_data"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv(OWN, raising=False)
    monkeypatch.delenv(FLAGS, raising=False)
    monkeypatch.setattr(user_warnings, "_warned", set())
    return monkeypatch


# Which values.


def drawn(value):
    return value.size == np.unique(value).size


@pytest.mark.parametrize(
    ("variables", "floats", "integer"),
    [
        ({OWN: "zeros"}, 0, 0),
        ({OWN: "random"}, drawn, 0),
        ({OWN: " Random "}, drawn, 0),
        ({OWN: "random", FLAGS: f"{USE}=false"}, drawn, 0),
        ({FLAGS: USE}, 0, 0),
        ({FLAGS: f"{USE} --synthetic_data_initializer=zeros"}, 0, 0),
        ({FLAGS: f"--synthetic-data-initializer=random {USE}"}, drawn, 0),
        ({FLAGS: f"{USE} --synthetic_data_initializer=normal"}, drawn, 1),
        ({FLAGS: f"{USE} --synthetic_data_initializer=uniform"}, drawn, 0),
        ({FLAGS: f"{USE} --synthetic_data_initializer=3.7"}, 3, 3),
    ],
)
def test_values(environment, variables, floats, integer):
    for name, value in variables.items():
        environment.setenv(name, value)
    assert uses_synthetic_data()
    for dtype in (np.float16, jnp.bfloat16, np.float32, np.int8, np.int32, np.uint8):
        values = make_values(jax.ShapeDtypeStruct((2, 5), dtype))
        assert (values.shape, values.dtype) == ((2, 5), np.dtype(dtype))
        wanted = floats if jnp.issubdtype(dtype, jnp.inexact) else integer
        if callable(wanted):
            assert wanted(values.astype(np.float64))
            assert np.all(np.isfinite(values.astype(np.float64)))
        else:
            np.testing.assert_array_equal(values.astype(np.float64), wanted)


def test_large_arrays_and_empty_ones(environment):
    environment.setenv(OWN, "random")
    large = make_values(jax.ShapeDtypeStruct((300, 400), np.float32))
    assert abs(large.mean()) < 0.05
    assert 0.9 < large.std() < 1.1
    assert make_values(jax.ShapeDtypeStruct((0, 3), np.float32)).shape == (0, 3)
    np.testing.assert_array_equal(large, make_values(jax.ShapeDtypeStruct((300, 400), np.float32)))


def test_no_synthetic_data(environment):
    options = "", f"{USE}=0", "--synthetic_data_initializer=normal"
    for name, value in ((OWN, ""), *((FLAGS, option) for option in options)):
        assert not uses_synthetic_data()
        environment.setenv(name, value)
    assert not uses_synthetic_data()


def test_unknown_values_name_what_there_is(environment):
    for name, value, message in (
        (OWN, "ones", "IPU_PIPELINE_SYNTHETIC_DATA must be zeros or random, or not be set; got 'ones'"),
        (FLAGS, f"{USE}=maybe", "--use_synthetic_data must be true or false; got 'maybe'"),
        (FLAGS, f"{USE} --synthetic_data_initializer=ones", "zeros, random, normal, uniform or a number"),
        (FLAGS, "--synthetic_data_initializer=nan", "uniform or a number; got 'nan'"),
        (FLAGS, f'{USE} "', "must be flags such as --use_synthetic_data"),
    ):
        with environment.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(ValueError, match=message):
                uses_synthetic_data()


def test_a_number_that_does_not_fit(environment):
    environment.setenv(FLAGS, f"{USE} --synthetic_data_initializer=300")
    with pytest.raises(ValueError, match="300 does not fit int8, .* Give a number from -128 to 127"):
        make_values(jax.ShapeDtypeStruct((), np.int8))


def test_other_flags_warn(environment):
    environment.setenv(FLAGS, f"{USE} --use_ipu_model")
    with pytest.warns(UserWarning, match="--use_ipu_model has no effect here"):
        assert uses_synthetic_data()


# What is dequeued.


def select(number):
    front.ipu_config(number).configure_ipu_system()


def shapes_of(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def check(environment, program, queues, initializer):
    """Dequeues on real data and on synthetic data: the same shapes, and zeros that can be written to."""
    with ipu.Session(seed=1) as session:
        session.run([initializer, ipu.global_variables_initializer()])
        found = []
        for word in ("", "zeros", "random"):
            environment.setenv(OWN, word)
            for _run in range(2):
                session.run(program)
            found.append([session.run(queue.dequeue()) for queue in queues])
        real, *made_up = found
        assert any(np.any(leaf) for leaf in jax.tree.leaves(real))
        for values in made_up:
            assert shapes_of(values) == shapes_of(real)
            for leaf in jax.tree.leaves(values):
                assert not np.any(leaf)
                leaf += 1
        for queue, first in zip(queues, real, strict=True):
            if queue.outfeed_mode is IPUOutfeedMode.ALL:
                again = jax.tree.leaves(session.run(queue.dequeue()))
                assert [len(leaf) for leaf in again] == [0] * len(jax.tree.leaves(first))
        assert all(np.all(np.isfinite(value)) for value in session.variables.values())


def pipelined(queues, **options):
    """A program of two stages, which enqueues in a stage, at its end and in its optimizer."""
    own, inner, updating = queues

    def first(x, labels):
        with ipu.variable_scope("first"):
            x = ipu.layers.Dense(16)(x)
        inner.enqueue({"x": x, "most": jnp.max(x)})
        return x, labels

    def last(x, labels):
        with ipu.variable_scope("second"):
            logits = ipu.layers.Dense(10)(x)
        loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
        return loss if options.get("outfeed_loss") else (loss, jnp.argmax(logits, 1) + 1)

    def update(gradients, state, parameters=None):
        updating.enqueue(optax.tree.norm(gradients))
        return jax.tree.map(lambda leaf: -0.1 * leaf, gradients), state

    optimizer = optax.GradientTransformation(lambda parameters: (), update)
    if options.pop("replicated", False):
        optimizer = CrossReplicaOptimizer(optimizer)
    model = front.Pipelined([first, last], 3, front.data(), optimizer, outfeed_queue=own, **options)
    return model.program, model.initializer


@pytest.mark.parametrize("options", [{"accumulate_outfeed": True, "repeat_count": 2}, {"replicated": True}])
def test_pipelines(environment, options):
    """It was (0,), so that `losses[-1]` raised, and a mean was nan."""
    select(4 if "replicated" in options else 2)
    queues = [IPUOutfeedQueue(), IPUOutfeedQueue(IPUOutfeedMode.LAST), IPUOutfeedQueue()]
    program, initializer = pipelined(queues, outfeed_loss=True, **options)
    check(environment, program, queues, initializer)


def test_loops(environment):
    select(1)
    queue, last = IPUOutfeedQueue(), IPUOutfeedQueue(IPUOutfeedMode.LAST)
    infeed = IPUInfeedQueue(front.data())

    def body(total, x, labels):
        with ipu.variable_scope("first"):
            x = ipu.layers.Dense(10)(x)
        loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(x, labels))
        opt = ipu.optimizers.GradientAccumulationOptimizerV2(optax.sgd(0.1), 2)
        return total + 1, opt.minimize(loss), queue.enqueue((loss, x)), last.enqueue(loss)

    program = front.compile_program(functools.partial(loops.repeat, 5, body, [np.float32(0)], infeed))
    check(environment, program, [queue, last], infeed.initializer)


def test_the_last_element_needs_one(environment):
    environment.setenv(OWN, "zeros")
    select(2)
    queues = [IPUOutfeedQueue(IPUOutfeedMode.LAST) for _queue in range(3)]
    program, initializer = pipelined(queues)
    with ipu.Session() as session:
        session.run(initializer)
        with pytest.raises(ValueError, match="nothing has been enqueued yet"):
            session.run(queues[0].dequeue())
        session.run(program)
        loss, classes = session.run(queues[0].dequeue())
        assert (loss.shape, classes.shape) == ((), (4,))


@pytest.mark.thorough
def test_estimators(environment, tmp_path):
    """Losses are zeros, and there are as many predictions as on real data."""
    environment.setenv(OWN, "random")
    estimator = make_estimator(tmp_path / "model")
    estimator.train(input_fn, steps=16)
    assert estimator.get_variable_value("global_step") == 16
    assert estimator.evaluate(finite_of(11)) == {"loss": 0, "largest": 0, "global_step": 16}
    assert estimator.evaluate(input_fn, steps=8)["loss"] == 0
    predictions = list(estimator.predict(finite_of(11)))
    assert len(predictions) == 44
    assert {(one.shape, bool(np.any(one))) for one in predictions} == {((3,), False)}
