"""Replicas of an estimator's pipelines: each trains, evaluates and predicts on its own micro-batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.ipu_pipeline_estimator import IPUPipelineEstimator, IPUPipelineEstimatorSpec
from ipu_pipeline.ipu_run_config import IPURunConfig, RunConfig
from ipu_pipeline.ipu_session_run_hooks import IPULoggingTensorHook
from ipu_pipeline.optimizers import CrossReplicaOptimizer
from ipu_pipeline.pipelining_ops import OptimizerFunctionOutput
from tests.support import front, joined
from tests.support.estimating import hook_of, scalars_in, variables_of
from tests.support.models import assert_trees_close, plain_loop
from tests.support.resumable import Batches

COUNT, RATE = 2, 0.05


def first(x, y):
    with ipu.variable_scope("one"):
        return ipu.layers.Dense(7, activation=jnp.tanh)(x), y


def second(x, y):
    with ipu.variable_scope("two"):
        return ipu.layers.Dense(3)(x), y


def model_fn(mode, params):
    hooks = params.get("hooks")

    def last(x, y):
        prediction, y = second(x, y)
        if hooks and mode == ipu.ModeKeys.TRAIN:
            hooks[0].log({"smallest": jnp.min(y)})
        return prediction if mode == ipu.ModeKeys.PREDICT else (prediction, y)

    def optimizer_function(prediction, y):
        opt = CrossReplicaOptimizer(optax.sgd(RATE)) if params.get("averages", True) else optax.sgd(RATE)
        return OptimizerFunctionOutput(opt, jnp.mean((prediction - y) ** 2))

    def metrics(prediction, y):
        return {"loss": ((prediction - y) ** 2).mean(axis=(1, 2))}

    options = {"optimizer_function": optimizer_function, "eval_metrics_fn": metrics}
    return IPUPipelineEstimatorSpec(mode, [first, last], COUNT, training_hooks=hooks, **options)


def make(model_dir, num_replicas=2, num_shards=2, params=None, **options):
    devices = {"num_shards": num_shards, "num_replicas": num_replicas}
    devices["ipu_options"] = front.ipu_config(num_replicas * num_shards)
    run_config = IPURunConfig(iterations_per_loop=2 * COUNT, **devices)
    defaults = {"tf_random_seed": 7, "log_step_count_steps": 4, "save_summary_steps": 4}
    config = RunConfig(ipu_run_config=run_config, **(defaults | options))
    return IPUPipelineEstimator(model_fn, model_dir, config, params or {})


def dataset(number):
    data = Batches(num_batches=number)
    return [(data.x[index], data.y[index]) for index in range(number)]


def dataset_of(number):
    return functools.partial(dataset, number)


def predict_plainly(variables, x):
    x = jnp.tanh(x @ variables["one/dense/kernel"] + variables["one/dense/bias"])
    return x @ variables["two/dense/kernel"] + variables["two/dense/bias"]


def loss_of(variables, x, y):
    return jnp.mean((predict_plainly(variables, x) - y) ** 2)


def train_plainly(variables, elements, num_replicas):
    """The mean loss, and the variables, after the elements k * R + r with plain jax.grad."""
    groups = list(zip(*[iter(elements)] * num_replicas, strict=True))
    losses, variables, _rest = plain_loop(loss_of, variables, groups, COUNT, optax.sgd(RATE))
    return np.mean(losses), jax.tree.map(np.asarray, variables)


def test_training_equals_a_plain_loop(tmp_path, caplog):
    """A step is a micro-batch of each replica: 4 steps of two take 8 elements; with one they take 4.

    Each call begins with the first element.
    """
    elements = dataset(8)
    params = {"hooks": [IPULoggingTensorHook(every_n_iter=1)]}
    estimator, data = make(tmp_path, params=params), dataset_of(len(elements))
    with caplog.at_level("INFO", "ipu_pipeline.estimator"):
        estimator.train(data, steps=4)
    told = "from step 0 to 4: 2 micro-batches per weight update, up to 4 per run, in each of 2"
    assert told in caplog.text
    found = variables_of(estimator)
    estimator.train(data, steps=4)
    assert estimator.get_variable_value("global_step") == 8
    mean, wanted = train_plainly(found, elements, 2)
    assert_trees_close(variables_of(estimator), wanted)
    reported = {(step, name): value for step, name, value in scalars_in(tmp_path)}
    np.testing.assert_allclose(reported[8, "loss"], mean, rtol=1e-5)
    np.testing.assert_allclose(reported[8, "smallest"], np.min(elements[-1][1]), rtol=1e-5)
    check_evaluation_and_prediction(estimator, wanted)
    single = make(tmp_path, num_replicas=1)
    single.train(data, steps=4)
    assert single.get_variable_value("global_step") == 12
    _mean, wanted = train_plainly(wanted, elements[:4], 1)
    assert_trees_close(variables_of(single), wanted)


def check_evaluation_and_prediction(estimator, variables):
    elements = dataset(11)  # a run takes 8
    losses = [loss_of(variables, *element) for element in elements]
    result = estimator.evaluate(dataset_of(11))
    np.testing.assert_allclose(result["loss"], np.mean(losses), rtol=1e-5)
    part = estimator.evaluate(dataset_of(11), steps=4)  # 8 elements
    np.testing.assert_allclose(part["loss"], np.mean(losses[:8]), rtol=1e-5)
    predicted = np.stack(list(estimator.predict(dataset_of(11)))).reshape(11, 4, 3)
    wanted = np.stack([predict_plainly(variables, x) for x, _y in elements])
    assert_trees_close(predicted, wanted)
    batches = list(estimator.predict(dataset_of(3), yield_single_examples=False))
    assert_trees_close(np.stack(batches), wanted[:3])


def test_several_replicas_need_an_optimizer_that_averages(tmp_path):
    params = {"averages": False}
    with pytest.raises(ValueError, match="num_replicas is 2, but no optimizer averages"):
        make(tmp_path, params=params).train(dataset_of(8), steps=4)
    make(tmp_path, num_replicas=1).train(dataset_of(8), steps=4)  # averages over one
    make(tmp_path, params=params).evaluate(dataset_of(8))  # nothing is averaged


def infer(directory):
    """What an estimator with replicas evaluates and predicts after training, and what popdist knows."""
    estimator, popdist, numbers = make(directory), ipu.popdist, []

    def begin():
        numbers.extend([popdist.isPopdistEnvSet(), popdist.getNumInstances()])
        numbers.extend([popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas()])
        numbers.append(popdist.getReplicaIndexOffset())

    estimator.train(dataset_of(8), [hook_of(begin=begin)], steps=4)
    predicted = np.stack(list(estimator.predict(dataset_of(11))))
    return (estimator.evaluate(dataset_of(11)), predicted), numbers


@pytest.mark.thorough
def test_evaluation_and_prediction_with_replicas_in_two_processes(tmp_path):
    """All processes get what the last stage of each replica gives."""
    expected, numbers = infer(str(tmp_path / "alone"))
    assert numbers == [False, 1, 2, 2, 0]
    (tmp_path / "two").mkdir()
    options = {"directory": tmp_path / "two", "joins_itself": True}
    started = joined.start(infer, 2, None, str(tmp_path / "model"), **options)
    for index, (found, numbers) in enumerate(joined.finish(started, tmp_path / "two", 600)):
        assert_trees_close(found, expected)
        assert numbers == [True, 2, 2, 1, index]
