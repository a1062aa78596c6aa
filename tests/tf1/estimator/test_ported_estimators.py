"""What Graphcore's own tests of its estimators ask, and the tests of ours do not ask already.

What differs from the originals is said at each place. Feature columns, TensorFlow's own `Estimator` and
event traces have no counterpart.
"""

import numpy as np
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.ipu_estimator import IPUEstimator, IPUEstimatorSpec
from ipu_pipeline.ipu_pipeline_estimator import IPUPipelineEstimator, IPUPipelineEstimatorSpec
from ipu_pipeline.ipu_run_config import IPURunConfig, RunConfig
from ipu_pipeline.ipu_session_run_hooks import SessionRunHook
from ipu_pipeline.optimizers import tf1
from ipu_pipeline.pipelining_ops import (
    GradientAccumulationReductionMethod,
    OptimizerFunctionOutput,
    PipelineSchedule,
)
from tests.support import front
from tests.support.estimating import scalars_in

pytestmark = pytest.mark.filterwarnings("ignore:There is no checkpoint")  # also in the originals


class SessionRunCounter(SessionRunHook):
    def __init__(self):
        self.count = 0

    def after_run(self, *_arguments):
        self.count += 1


def make_config(iterations_per_loop=1, num_shards=1, num_replicas=1, **options):
    ipu_options = front.ipu_config(num_shards * num_replicas)
    return RunConfig(
        IPURunConfig(iterations_per_loop, ipu_options, num_replicas=num_replicas, num_shards=num_shards),
        **options,
    )


def regression_data(batch_size, num_samples=20, num_features=5):
    rng = np.random.default_rng(1234)
    target = rng.random((num_features, 1), np.float32)
    x = rng.random((num_samples, num_features), np.float32)
    batches = [x[first : first + batch_size] for first in range(0, num_samples, batch_size)]
    while True:
        yield from ((batch, batch @ target) for batch in batches)


def regression_model(features, labels, mode, params):
    with ipu.variable_scope("vs", use_resource=True):
        predictions = ipu.layers.Dense(units=1)(features)
    loss = ((predictions - labels) ** 2).mean()
    return IPUEstimatorSpec(mode, loss=loss, train_op=tf1.GradientDescentOptimizer(0.1).minimize(loss))


def test_train(tmp_path):
    def input_fn(params):
        assert params["batch_size"] == 2
        return lambda: regression_data(params["batch_size"])

    estimator = IPUEstimator(regression_model, tmp_path, make_config(2), train_batch_size=2)
    counter = SessionRunCounter()
    estimator.train(input_fn=input_fn, steps=4, hooks=[counter])
    assert (counter.count, estimator.get_variable_value("global_step")) == (2, 4)
    estimator.train(input_fn=input_fn, steps=4, hooks=[counter])
    assert (counter.count, estimator.get_variable_value("global_step")) == (4, 8)
    # Different: the last loop is shorter; theirs is as long as the others, and ends at step 10.
    estimator.train(input_fn=input_fn, max_steps=9, hooks=[counter])
    assert (counter.count, estimator.get_variable_value("global_step")) == (5, 9)
    with pytest.raises(ValueError, match="must be a multiple of iterations_per_loop"):
        estimator.train(input_fn=input_fn, steps=1)


def sum_model(features, labels, mode):
    # Different: a model that trains has a variable; the originals' train_op is an identity of the loss.
    weight = ipu.get_variable("w", initializer=0.0)
    loss = (features + labels).sum() + 0 * weight
    return IPUEstimatorSpec(
        mode,
        loss=loss,
        predictions=features,
        train_op=tf1.GradientDescentOptimizer(0.1).minimize(loss),
        eval_metric_ops={
            "feature_mean": ipu.metrics.mean(features),
            "label_mean": ipu.metrics.mean(labels),
        },
    )


def increasing(batch_size, count=10):
    values = np.arange(count, dtype=np.float32).reshape(-1, batch_size, 1)
    return lambda: [(batch, batch) for batch in values]


def losses_in(directory):
    return [value for _step, name, value in scalars_in(directory) if name == "loss"]


def test_losses_are_averaged_over_a_loop(tmp_path):
    config = make_config(2, save_summary_steps=1, log_step_count_steps=1)
    counter = SessionRunCounter()
    # Different: 4 steps of batches of 2, not 6: our data sets do not begin again by themselves.
    IPUEstimator(sum_model, tmp_path, config).train(increasing(2), steps=4, hooks=[counter])
    assert counter.count == 2
    assert losses_in(tmp_path) == [6, 22]


def test_metrics_of_a_list_of_values(tmp_path):
    def metrics_fn(features, labels):
        return {
            "accuracy": ipu.metrics.accuracy(labels, features),
            "precision": ipu.metrics.precision(labels, features),
            "recall": ipu.metrics.recall(labels, features),
        }

    def model_fn(features, labels, mode):
        return IPUEstimatorSpec(mode, loss=np.float32(0), eval_metrics=(metrics_fn, [features, labels]))

    data = np.array([[[0, 0], [0, 1]], [[0, 1], [0, 1]]], np.int32)
    scores = IPUEstimator(model_fn, tmp_path, make_config()).evaluate(
        lambda: [(features, labels) for features, labels in data], steps=2
    )
    assert (scores["accuracy"], scores["precision"], scores["recall"]) == (0.75, 1.0, 0.5)


def test_data_sets_of_dicts(tmp_path):
    def model_fn(features, labels, mode):
        total = features["x0"] + features["x1"]
        if mode == ipu.ModeKeys.PREDICT:
            assert labels is None
            return IPUEstimatorSpec(mode, predictions=total)
        spec = sum_model(total, labels["y0"] + labels["y1"], mode)
        return IPUEstimatorSpec(
            mode, loss=spec.loss, train_op=spec.train_op, eval_metric_ops={"mean": ipu.metrics.mean(total)}
        )

    def input_fn():
        values = [np.full((1, 1), value, np.float32) for value in (1, 2, 3, 4)]
        return [({"x0": values[0], "x1": values[1]}, {"y0": values[2], "y1": values[3]})]

    estimator = IPUEstimator(model_fn, tmp_path, make_config())
    estimator.train(input_fn, steps=1)
    assert next(estimator.predict(input_fn)) == 3
    assert estimator.evaluate(input_fn, steps=1)["loss"] == 10


def test_hooks_of_the_model_function(tmp_path):
    counters = {f"{kind}_hooks": SessionRunCounter() for kind in ("training", "evaluation", "prediction")}

    def model_fn(features, labels, mode):
        spec = sum_model(features, 0 if labels is None else labels, mode)
        fields = ("loss", "predictions", "train_op", "eval_metric_ops")
        hooks = {name: [counter] for name, counter in counters.items()}
        return IPUEstimatorSpec(mode, **{name: getattr(spec, name) for name in fields}, **hooks)

    def counts():
        return [counter.count for counter in counters.values()]

    estimator = IPUEstimator(model_fn, tmp_path, make_config())
    estimator.train(increasing(1), steps=1)
    assert counts() == [1, 0, 0]
    estimator.evaluate(increasing(1), steps=1)
    assert counts() == [1, 1, 0]
    predictions = estimator.predict(increasing(1))
    assert counts() == [1, 1, 0]  # nothing runs before the first prediction is asked for
    next(predictions)
    assert counts() == [1, 1, 1]


def pipelined(stages, count, tmp_path, iterations=None, num_shards=2, **options):
    return IPUPipelineEstimator(
        lambda mode: IPUPipelineEstimatorSpec(mode, stages, gradient_accumulation_count=count, **options),
        model_dir=tmp_path,
        config=make_config(count if iterations is None else iterations, num_shards, save_summary_steps=1),
    )


def line(features, labels):
    return ipu.get_variable("w", initializer=2.0) * features, labels


def add(partial, labels):
    return partial + labels


@pytest.mark.parametrize("method", list(GradientAccumulationReductionMethod))
def test_training_by_an_analytical_gradient(method, tmp_path):
    x, y, rate, count, updates = 1.5, 1.0, 0.5, 4, 2
    estimator = pipelined(
        [line, add],
        count,
        tmp_path,
        count * updates,
        optimizer_function=lambda loss: OptimizerFunctionOutput(tf1.GradientDescentOptimizer(rate), loss),
        reduction_method=method,
        pipeline_schedule=PipelineSchedule.Sequential,
    )
    w, expected = 2.0, []
    for run in range(2):
        estimator.train(lambda: [(np.float32(x), np.float32(y))] * count * updates, steps=count * updates)
        assert estimator.get_variable_value("global_step") == count * updates * (run + 1)
        losses = []
        for _update in range(updates):
            losses.append(w * x + y)
            w -= rate * x * (count if method is GradientAccumulationReductionMethod.SUM else 1)
        expected.append(np.mean(losses))
        assert abs(estimator.get_variable_value("w") - w) < 1e-5
    np.testing.assert_allclose(losses_in(tmp_path), expected, rtol=1e-5)


def scaled(features):
    return ipu.get_variable("w", initializer=1.0) * features


def test_pipelines_evaluate_what_a_dict_names(tmp_path):
    estimator = pipelined(
        [scaled, lambda x: x, lambda partial: {"squared": partial**2, "partial": partial}],
        2,
        tmp_path,
        device_mapping=[0, 1, 0],
        eval_metrics_fn=lambda partial, squared: {"mean": ipu.metrics.mean(partial), "loss": squared},
    )
    features = np.arange(2, dtype=np.float32)
    found = estimator.evaluate(lambda: list(features[:, np.newaxis]), steps=2)
    assert (found["mean"], found["loss"]) == (0.5, 0.5)


def test_pipelines_take_the_global_step(tmp_path):
    count, updates = 4, 2

    def first(step, features, labels):
        return step, *line(features, labels)

    def model_fn(mode):
        return IPUPipelineEstimatorSpec(
            mode,
            [first, lambda step, partial, labels: (step, partial + labels)],
            gradient_accumulation_count=count,
            optimizer_function=lambda step, loss: OptimizerFunctionOutput(
                tf1.GradientDescentOptimizer(0.1 - 0.001 * step), loss
            ),
            eval_metrics_fn=lambda step, loss: {"observed": ipu.metrics.mean(step), "loss": loss},
            inputs=[ipu.get_global_step().astype(np.float32)],
        )

    estimator = IPUPipelineEstimator(model_fn, tmp_path, make_config(count * updates, 2))
    data = [(np.float32(1.5), np.float32(1))] * count * updates
    for _run in range(2):
        estimator.train(lambda: data, steps=count * updates)
    assert estimator.evaluate(lambda: data, steps=count * updates)["observed"] == 2 * count * updates
    # As TensorFlow 1 computes it, from the step of each weight update.
    w = 2.0
    for step in range(0, 2 * count * updates, count):
        w -= (0.1 - 0.001 * step) * count * 1.5
    assert abs(estimator.get_variable_value("w") - w) < 1e-5
