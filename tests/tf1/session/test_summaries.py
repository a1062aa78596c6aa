"""Scalars that users of a session write."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.ipu_pipeline_estimator import IPUPipelineEstimator
from tests.engine.tracing.test_metrics import UPDATES, Model, expected
from tests.support.estimating import input_fn, make_config, model_fn, read_events
from tests.support.resumable import MICRO_BATCHES


def lines(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_metrics_of_a_session_are_written_and_go_on_after_a_restore(tmp_path):
    logs = tmp_path / "logs"
    with ipu.Session() as session, ipu.SummaryWriter(logs) as writer:
        Model([0, 0, 0]).run(session)
        writer.write_metrics(session.metrics())
        session.save(tmp_path / "saved")
        others = {"accuracy": jnp.bfloat16(0.5), "none": float("nan"), "infinite": np.inf}
        writer.write(session.update_count(), others)
        writer.write(99, {"later": 1})
    written, (events,) = lines(logs), logs.glob("events*")
    told = [(line["step"], line["name"]) for line in written]
    assert [event[:2] for event in read_events(events)] == told
    for name, values in expected().items():
        own = [(line["step"], line["value"]) for line in written if line["name"] == name]
        assert [step for step, _value in own] == [1, 2, 3]
        np.testing.assert_allclose([value for _step, value in own], values, rtol=1e-5)
    last = {line["name"]: line["value"] for line in written if line["step"] == UPDATES}
    assert (last["accuracy"], last["none"], last["infinite"]) == (0.5, None, None)
    with ipu.Session() as session:
        session.restore(tmp_path / "saved")
        with ipu.SummaryWriter(logs, step=session.update_count()) as writer:
            writer.write(4, {"accuracy": np.ones((1, 1))})
    assert [line["step"] for line in lines(logs)][-2:] == [UPDATES, 4]


@pytest.mark.thorough
def test_an_estimator_writes_means_of_metrics(tmp_path):
    def with_norms(mode, params):
        spec, own = model_fn(mode, params), [None]

        def optimize(*outputs):
            output = own[0](*outputs)
            ipu.metric("twice", 2 * output.loss)
            return dataclasses.replace(output, opt=ipu.optimizers.with_metrics(output.opt, 0.01))

        spec.optimizer_function, own[0] = optimize, spec.optimizer_function
        return spec

    config = make_config(2, 2 * MICRO_BATCHES, log_step_count_steps=2 * MICRO_BATCHES)
    estimator = IPUPipelineEstimator(with_norms, tmp_path, config, {"num_stages": 2})
    estimator.train(input_fn, steps=4 * MICRO_BATCHES)
    found = {(line["step"], line["name"]): line["value"] for line in lines(tmp_path)}
    for step in (2 * MICRO_BATCHES, 4 * MICRO_BATCHES):
        np.testing.assert_allclose(found[step, "twice"], 2 * found[step, "loss"], rtol=1e-5)
        assert found[step, "gradient_norm"] > 0
        np.testing.assert_allclose(found[step, "learning_rate"], 0.01, rtol=1e-6)


def test_what_cannot_be_written_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        ipu.SummaryWriter(tmp_path / "file" / "logs")
    for step in (-1, 1.5, True):
        with pytest.raises(ValueError, match="step must be an integer from 0"):
            ipu.SummaryWriter(tmp_path / "logs", step)
    writer = ipu.SummaryWriter(tmp_path / "logs")
    with pytest.raises(TypeError, match=r"value of 'a' must be a real number; it is float64\[2\]"):
        writer.write(1, {"a": np.ones(2)})
    with pytest.raises(TypeError, match="the value of 'a' must be a real number; it is complex128"):
        writer.write(1, {"a": 1j})
    with pytest.raises(TypeError, match="scalars must be a dict"):
        writer.write(1, [("a", 1)])
    with pytest.raises(TypeError, match="metrics must be a dict"):
        writer.write_metrics([1])
    with pytest.raises(ValueError, match="step must be an integer from 0; got .*1.7"):
        writer.write_metrics({"update": [1.7], "a": [1.0]})
    with pytest.raises(TypeError, match="names must be strings, not empty; got 3"):
        writer.write(1, {3: 1.0})
    with pytest.raises(ValueError, match='must have "update"'):
        writer.write_metrics({"loss": [1.0]})
    with pytest.raises(ValueError, match=r"there are 2 updates, and 'loss' has the shape \[1\]"):
        writer.write_metrics({"update": [1, 2], "loss": [1.0]})
    assert lines(tmp_path / "logs") == []
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="after close"):
        writer.write(1, {"a": 1.0})
