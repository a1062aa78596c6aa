"""The model of `resumable` for an estimator."""

import functools
import json
import struct
from pathlib import Path

import numpy as np
import optax
from tensorboardX.proto.event_pb2 import Event

import ipu_pipeline as ipu
from ipu_pipeline.checkpointing.checkpoint_directories import read_checkpoint
from ipu_pipeline.ipu_pipeline_estimator import IPUPipelineEstimator, IPUPipelineEstimatorSpec
from ipu_pipeline.ipu_run_config import IPURunConfig, RunConfig
from ipu_pipeline.ipu_session_run_hooks import SessionRunHook
from ipu_pipeline.pipelining_ops import OptimizerFunctionOutput
from tests.support import front
from tests.support.resumable import MICRO_BATCHES, Batches, loss_of, make_stages


def spec_of(mode, stages, params):
    """A specification for stages whose last returns predictions, and targets unless it predicts."""

    def optimizer_function(prediction, y):
        return OptimizerFunctionOutput(optax.adam(1e-2), loss_of(prediction, y))

    def metrics(prediction, y):
        errors = (prediction - y) ** 2
        return {"loss": errors.mean(axis=(1, 2, 3)[: errors.ndim - 1]), "largest": errors.max()}

    options = {"optimizer_function": optimizer_function, "eval_metrics_fn": metrics}
    options |= {"training_hooks": params.get("training_hooks"), **params.get("options", {})}
    return IPUPipelineEstimatorSpec(mode, stages, MICRO_BATCHES, **options)


def model_fn(mode, params):
    stages = make_stages(params["num_stages"], params.get("width", 16))
    if mode == ipu.ModeKeys.PREDICT:
        last = stages[-1]
        stages[-1] = lambda x, y: last(x, y)[0]
    return spec_of(mode, stages, params)


def small_model_fn(mode, params):
    """Two stages with one variable: with it, training takes a fifth of the seconds."""

    def first(x, y):
        return x[:, :3] * ipu.get_variable("w", (3,)), y

    def last(x, y):
        return x if mode == ipu.ModeKeys.PREDICT else (x, y)

    return spec_of(mode, [first, last], params)


def input_fn():
    return Batches()


def finite_input_fn(num_batches=10):
    data = Batches(num_batches=num_batches)
    return [(data.x[number], data.y[number]) for number in range(num_batches)]


def make_config(num_stages=2, iterations_per_loop=8, **options):
    ipu_options = front.ipu_config(num_stages) if num_stages > 1 else None
    run_config = IPURunConfig(iterations_per_loop, ipu_options, num_shards=num_stages)
    defaults = {"ipu_run_config": run_config, "tf_random_seed": 7, "log_step_count_steps": 16}
    defaults["save_summary_steps"] = options.get("log_step_count_steps", 16)
    return RunConfig(**(defaults | options))


def make_estimator(model_dir, num_stages=2, params=None, warm_start_from=None, **options):
    config, params = make_config(num_stages, **options), {"num_stages": num_stages, **(params or {})}
    return IPUPipelineEstimator(model_fn, model_dir, config, params, warm_start_from)


def variables_of(estimator):
    """The variables in an estimator's newest checkpoint, read once."""
    return {
        name: np.array(value)
        for name, value in read_checkpoint(estimator.latest_checkpoint()).variables.items()
    }


def assert_same_variables(one, other):
    mine, theirs = variables_of(one), variables_of(other)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)


finite_of = functools.partial(functools.partial, finite_input_fn)


def read_events(path):
    """(step, tag, value) of a TensorBoard event file: records of a length, its CRC, data and their CRC."""
    content, found = path.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        event = Event.FromString(content[12 : 12 + length])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        content = content[16 + length :]
    return found


def make_small(model_dir, params=None, warm_start_from=None, **options):
    """An estimator of the small model, for two IPUs."""
    config = make_config(2, **options)
    return IPUPipelineEstimator(small_model_fn, model_dir, config, params or {}, warm_start_from)


def hook_of(kind=SessionRunHook, **methods):
    """A hook, or a listener of saves, with functions as its methods."""
    hook = kind()
    for name, function in methods.items():
        setattr(hook, name, function)
    return hook


def scalars_in(directory):
    """(step, name, value) of the lines that an estimator wrote."""
    lines = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["name"], line["value"]) for line in lines]
