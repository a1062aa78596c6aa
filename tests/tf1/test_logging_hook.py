import logging

import jax.numpy as jnp
import numpy as np
import pytest

from ipu_pipeline.ipu_outfeed_queue import IPUOutfeedMode
from ipu_pipeline.ipu_pipeline_estimator import IPUPipelineEstimator
from ipu_pipeline.ipu_session_run_hooks import IPULoggingTensorHook
from ipu_pipeline.pipelining_ops import OptimizerFunctionOutput
from tests.support.estimating import (
    assert_same_variables,
    finite_of,
    input_fn,
    make_config,
    make_small,
    scalars_in,
    small_model_fn,
    variables_of,
)
from tests.support.resumable import Batches


def logging_model(hooks, logs, mode_of_hooks="training_hooks"):
    """The small model; of the first output of a stage, what the function for it makes is logged."""

    def fn(mode):
        spec = small_model_fn(mode, {})

        def wrap(number, stage):
            def logging_stage(*values):
                outputs = stage(*values)
                if number in logs:
                    hook, tensors = logs[number]
                    hook.log(tensors(outputs[0] if isinstance(outputs, tuple) else outputs))
                return outputs

            return logging_stage

        spec.computational_stages = [
            wrap(number, one) for number, one in enumerate(spec.computational_stages)
        ]
        setattr(spec, mode_of_hooks, tuple(hooks))
        return spec

    return fn


def logged(caplog, word):
    return [message for message in caplog.messages if word in message]


@pytest.fixture(autouse=True)
def info(caplog):
    caplog.set_level(logging.INFO, "ipu_pipeline")


def test_stages_log_and_training_stays_the_same(tmp_path, caplog):
    first = IPULoggingTensorHook(every_n_iter=2)
    second = IPULoggingTensorHook(
        every_n_iter=1,
        logging_mode=IPUOutfeedMode.ALL,
        formatter=lambda values: f"second {sorted(values)} {values['sum'].shape}",
    )
    logs = {
        0: (first, lambda x: {"mean": jnp.mean(x), "x": x[0, :2]}),
        1: (second, lambda x: {"sum": jnp.sum(x, axis=0)}),
    }
    fn = logging_model([first, second], logs)
    estimator = IPUPipelineEstimator(fn, tmp_path / "logged", make_config(2))
    estimator.train(input_fn, steps=40)
    lines = logged(caplog, "mean = ")
    assert len(lines) == 3  # of 5 runs
    assert " sec)" not in lines[0]
    assert all(line.endswith(" sec)") and "x = [" in line for line in lines[1:])
    assert logged(caplog, "second") == ["second ['sum'] (8, 3)"] * 5
    caplog.clear()
    estimator.train(input_fn, steps=8)  # the same hooks once more
    assert len(logged(caplog, "mean = ")) == 1
    plain = make_small(tmp_path / "plain").train(input_fn, steps=40).train(input_fn, steps=8)
    assert_same_variables(estimator, plain)
    names = {name for _step, name, _value in scalars_in(tmp_path / "logged")}
    assert names == {"loss", "steps/s", "examples/s", "mean"}  # "x" is no scalar


def test_values_are_those_of_the_last_micro_batch(tmp_path):
    seen = []
    hook = IPULoggingTensorHook(at_end=True, formatter=lambda values: seen.append(values) or "seen")
    fn = logging_model([hook], {0: (hook, lambda x: [x])})
    IPUPipelineEstimator(fn, tmp_path, make_config(2)).train(input_fn, steps=16)
    (values,) = seen
    before = make_small(tmp_path / "before", iterations_per_loop=4).train(input_fn, steps=12)
    *_rest, (x, _y) = (element for element, _number in zip(Batches(), range(16), strict=False))
    np.testing.assert_allclose(values["tensor_0"], x[:, :3] * variables_of(before)["w"], rtol=1e-5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return make_small(tmp_path_factory.mktemp("trained")).train(input_fn, steps=8)


@pytest.mark.parametrize("mode", ["evaluation_hooks", "prediction_hooks"])
def test_evaluation_and_prediction(mode, trained, caplog):
    hook = IPULoggingTensorHook(every_n_iter=1, logging_mode=IPUOutfeedMode.ALL)
    fn = logging_model([hook], {0: (hook, lambda x: {"shape of all": jnp.mean(x)})}, mode)
    estimator = IPUPipelineEstimator(fn, trained.model_dir, make_config(2))
    if mode == "evaluation_hooks":
        assert estimator.evaluate(finite_of(10)) == pytest.approx(trained.evaluate(finite_of(10)), rel=1e-5)
    else:
        found, expected = (list(one.predict(finite_of(10))) for one in (estimator, trained))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    lines = logged(caplog, "shape of all")
    numbers = [len(line.split("[")[1].split("]")[0].split()) for line in lines]
    assert numbers == [8, 2]  # and none of the copies that fill the last execution


def test_every_n_secs_and_losses_of_low_precision_that_do_not_overflow(tmp_path, caplog):
    hook = IPULoggingTensorHook(every_n_secs=1e-9)

    def fn(mode):
        spec = logging_model([hook], {0: (hook, jnp.mean)})(mode)
        inner = spec.optimizer_function

        def optimizer_function(prediction, y):
            made = inner(prediction, y)
            loss = (made.loss * 0 + 9000).astype(jnp.float16)
            return OptimizerFunctionOutput(made.opt, loss)

        spec.optimizer_function = optimizer_function
        return spec

    IPUPipelineEstimator(fn, tmp_path, make_config(2)).train(input_fn, steps=16)
    assert [value for _step, name, value in scalars_in(tmp_path) if name == "loss"] == [9000, 9000]
    assert len(logged(caplog, "tensor_0 = ")) == 2


def test_wrong_uses(tmp_path):
    hook, other = IPULoggingTensorHook(at_end=True), IPULoggingTensorHook(at_end=True)
    mean, listed = (hook, jnp.mean), "must be in the specification's training_hooks"
    for logs, hooks, error, message in (
        ({}, (hook,), RuntimeError, "outfeed was not enqueued. Did you forget to call the log function"),
        ({0: mean, 1: mean}, (hook,), RuntimeError, "log function more than once"),
        ({0: (hook, lambda _x: {"a": "text"})}, (hook,), TypeError, "log: a must be an array; got str"),
        ({0: mean}, (), RuntimeError, listed),
        ({0: mean, 1: (other, jnp.mean)}, (hook,), RuntimeError, listed),
    ):
        estimator = IPUPipelineEstimator(logging_model(hooks, logs), tmp_path, make_config(2))
        with pytest.raises(error, match=message):
            estimator.train(input_fn, steps=8)
    with pytest.raises(RuntimeError, match="must be called in a stage"):
        hook.log(jnp.ones(2))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"every_n_iter": 1, "every_n_secs": 1},
            ValueError,
            "Cannot provide both every_n_iter and every_n_secs",
        ),
        ({}, ValueError, "Either every_n_iter, every_n_secs or at_end should be provided"),
        ({"every_n_iter": 0}, ValueError, "every_n_iter must be an integer of at least 1; got 0"),
        ({"every_n_secs": -1}, ValueError, "every_n_secs must be above 0; got -1"),
        ({"at_end": True, "logging_mode": "last"}, TypeError, "logging_mode must .*IPUOutfeedMode.ALL"),
    ],
)
def test_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message):
        IPULoggingTensorHook(**options)
