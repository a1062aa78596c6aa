"""Elements of several shapes in `pipelining_ops.pipeline`, queues, sessions and the estimator."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.ipu_infeed_queue import IPUInfeedQueue
from ipu_pipeline.ipu_outfeed_queue import IPUOutfeedQueue
from ipu_pipeline.ipu_pipeline_estimator import IPUPipelineEstimator, IPUPipelineEstimatorSpec
from ipu_pipeline.pipelining_ops import OptimizerFunctionOutput, pipeline
from tests.support import front, models
from tests.support.estimating import make_config

RATE = np.float32(0.1)


def batches(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [
        (rng.normal(size=(n, 12)).astype("float32"), rng.integers(0, 10, n).astype("int32")) for n in sizes
    ]


def first_stage(rate, x, labels):
    return rate, jnp.tanh(x * ipu.get_variable("a", (12,))), labels


def second_stage(rate, x, labels):
    logits = (x * ipu.get_variable("b", (12,)))[:, :10]
    return rate, jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def plain_losses(variables, data):
    """The losses of a plain loop with SGD and updates of three elements, and the variables after it."""
    a, b = sorted(variables)

    def loss_of(values, x, labels):
        logits = (jnp.tanh(x * values[a]) * values[b])[:, :10]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    groups = [[one] for one in data]
    losses, values, _rest = models.plain_loop(loss_of, variables, groups, 3, optax.sgd(RATE))
    return losses[:, 0], jax.tree.map(np.asarray, values)


def test_placeholders_that_are_captured():
    """Stages and optimizer are traced again when the function that captured them was compiled long ago.

    In a scope, whose name the variables of all shapes have; in two runs.
    """
    data, rate = batches([4, 3, 2, 3, 4, 2]), ipu.placeholder(np.float32, [])
    infeed, outfeed = IPUInfeedQueue(data), IPUOutfeedQueue()
    stages = [
        lambda x, labels: first_stage(None, x * (10 * rate), labels)[1:],
        lambda x, labels: second_stage(None, x, labels)[1],
    ]
    options = {"infeed_queue": infeed, "outfeed_queue": outfeed, "device_mapping": [0, 0]}
    options["shapes"] = [data[1]]  # traced while the function is compiled; the third when it comes

    def optimize(loss):
        return OptimizerFunctionOutput(optax.sgd(rate), loss)

    def model():
        with ipu.variable_scope("net"):
            return pipeline(stages, 3, optimizer_function=optimize, **options)

    program = front.compile_program(model)
    with ipu.Session() as session:
        session.run([infeed.initializer, ipu.global_variables_initializer()])
        before = {name: np.array(session.variable_value(name)) for name in program.variables}
        for _run in range(2):
            session.run(program, {rate: RATE})
        losses = session.run(outfeed.dequeue())
        after = {name: np.array(session.variable_value(name)) for name in program.variables}
    assert all(name.startswith("net/") for name in after)
    expected, values = plain_losses(before, data)  # 10 * rate is 1
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    models.assert_values_close(after, values)


def test_outputs_of_different_shapes_and_an_end_of_the_data():
    data = batches([4, 4, 3])
    stages = [lambda x, labels: (x * 2, labels), lambda x, labels: (x, labels.sum())]
    model = front.Pipelined(stages, 1, data, repeat_count=3)
    with front.session_of(model) as session:
        doubled, sums = model.run(session)
        assert doubled.dtype == object
        for found, (x, _labels) in zip(doubled, data, strict=True):
            np.testing.assert_array_equal(found, 2 * x)
        np.testing.assert_array_equal(sums, [labels.sum() for _x, labels in data])
        with pytest.raises(ipu.errors.OutOfRangeError, match="ended after 3 elements"):
            model.run(session)


def test_one_shape_only():
    model = front.Model(batches([4, 4, 2]), max_shapes=1)
    message = r"element 2 .*float32\[4, 12\]; got float32\[2, 12\].*drop_remainder"
    with front.session_of(model) as session, pytest.raises(ValueError, match=message):
        model.run(session)


@pytest.mark.parametrize(
    "options", [{}, {"device_mapping": [0, 0], "repeat_count": 2}], ids=["two IPUs", "one"]
)
def test_too_many_shapes_leave_the_data_where_they_are(options):
    """On one IPU, a call takes the data of several updates at once, and counts those of the first."""
    model = front.Model(batches([4, 4, 2, 3, 4, 4]), max_shapes=2, **options)
    with front.session_of(model) as session:
        with pytest.raises(ValueError, match="max_shapes is 2"):
            for _run in range(2):
                model.run(session)
        assert model.infeed.position.count == 3


def compile_loop(count, infeed):
    def body(total, x, labels):
        return total + x.sum() + labels.sum().astype(x.dtype)

    return front.compile_program(lambda: ipu.loops.repeat(count, body, [jnp.float32(0)], infeed))


def test_loops_have_one_shape():
    infeed = IPUInfeedQueue(batches([4, 2]))
    program = compile_loop(2, infeed)
    with ipu.Session() as session:
        session.run(infeed.initializer)
        with pytest.raises(ValueError, match="element 1 of the dataset must have the shape and dtype"):
            session.run(program)


def test_one_infeed_of_programs_with_one_shape_and_with_several():
    """What was fetched ahead for one is checked when the other takes it; NumPy might have broadcast it."""
    infeed = IPUInfeedQueue(batches([4, 4, 1, 4]), prefetch_depth=4)
    stages = [lambda x, labels: (x, labels), lambda x, labels: (x, labels.sum())]
    several = front.compile_pipeline(stages, 1, infeed_queue=infeed, outfeed_queue=IPUOutfeedQueue())
    one = compile_loop(3, infeed)
    with ipu.Session() as session:
        session.run(infeed.initializer)
        session.run(several)
        with pytest.raises(ValueError, match=r"element 2 of the dataset must have.*float32\[1, 12\]"):
            session.run(one)
        assert infeed.position.count == 1


def test_estimators(tmp_path, monkeypatch):
    """Evaluation of a last, smaller batch: the metrics of all examples. Predictions have its rows."""
    data = batches([4, 4, 4, 2])

    def model_fn(mode):
        def first(x, labels):
            return x[:, :10] * ipu.get_variable("w", (10,)), labels

        def last(logits, labels):
            if mode == "train":
                return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
            return {"logits": logits, "labels": labels} if mode == "eval" else logits

        def metrics(logits, labels):
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            accuracy = ipu.metrics.accuracy(labels, np.argmax(logits, -1))
            return {"loss": ipu.metrics.mean(losses), "accuracy": accuracy}

        options = {"optimizer_function": front.minimizing(optax.sgd(0.1)), "eval_metrics_fn": metrics}
        return IPUPipelineEstimatorSpec(mode, [first, last], 2, **options)

    estimator = IPUPipelineEstimator(model_fn, tmp_path, make_config(2, iterations_per_loop=2))
    estimator.train(lambda: data, steps=4)
    found = estimator.evaluate(lambda: data)
    logits = list(estimator.predict(lambda: data))
    assert len(logits) == 14
    labels = np.concatenate([labels for _x, labels in data])
    expected = float(jnp.mean(optax.softmax_cross_entropy_with_integer_labels(np.stack(logits), labels)))
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    assert found["accuracy"] == pytest.approx(float(np.mean(np.argmax(logits, -1) == labels)))
    monkeypatch.setenv("IPU_PIPELINE_SYNTHETIC_DATA", "zeros")
    assert estimator.evaluate(lambda: data)["loss"] > 0
