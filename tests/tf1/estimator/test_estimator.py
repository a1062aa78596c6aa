import functools
import logging
import os
import shutil
import sys
import threading

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.checkpointing import checkpoint_directories
from ipu_pipeline.errors import CheckpointError
from ipu_pipeline.ipu_pipeline_estimator import IPUPipelineEstimator, IPUPipelineEstimatorSpec
from ipu_pipeline.ipu_run_config import IPURunConfig, RunConfig
from ipu_pipeline.ipu_session_run_hooks import SessionRunArgs, SessionRunHook
from ipu_pipeline.pipelining_ops import OptimizerFunctionOutput
from tests.support import front
from tests.support.estimating import (
    assert_same_variables,
    finite_input_fn,
    finite_of,
    hook_of,
    input_fn,
    make_config,
    make_estimator,
    make_small,
    model_fn,
    read_events,
    scalars_in,
    small_model_fn,
    variables_of,
)
from tests.support.resumable import Batches, Inference, loss_of


def train(make, directory):
    """An estimator after 32 steps, with a checkpoint of step 16 too."""
    estimator = make(directory / "model", save_checkpoints_steps=16)
    assert estimator.train(input_fn, steps=32) is estimator
    ipu.config.reset_ipu_configuration()
    return estimator


@pytest.fixture(autouse=True)
def info(caplog):
    caplog.set_level(logging.INFO, "ipu_pipeline")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The small model: predictions are three columns of x times w."""
    return train(make_small, tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The model with all that a checkpoint has to hold."""
    return train(make_estimator, tmp_path_factory.mktemp("whole"))


def copy_of(trained, directory, step=32, make=make_small, **options):
    """An estimator that has what another one had after a step."""
    shutil.copytree(trained.model_dir, directory, ignore=shutil.ignore_patterns("eval*"))
    if step == 16:
        shutil.rmtree(directory / "checkpoints" / "32")
    return make(directory, **options)


# Numbers.


@pytest.mark.parametrize("number", [3, 11, 16])
def test_evaluation_and_prediction(number, trained):
    """Runs are of eight micro-batches, or fewer in the end."""
    data = Batches(num_batches=number)
    batches = list(trained.predict(finite_of(number), yield_single_examples=False))
    assert [batch.shape for batch in batches] == [(4, 3)] * number
    predictions = np.stack(batches)
    w = trained.get_variable_value("w")
    np.testing.assert_allclose(predictions, data.x[..., :3] * w, rtol=1e-5)
    result = trained.evaluate(finite_of(number))
    errors = (predictions - data.y) ** 2
    assert result.keys() == {"loss", "largest", "global_step"}
    assert result["global_step"] == 32
    np.testing.assert_allclose(result["loss"], errors.mean(), rtol=1e-5)
    runs = [errors[begin : begin + 8] for begin in range(0, number, 8)]
    largest = np.average([run.max() for run in runs], weights=[len(run) for run in runs])
    np.testing.assert_allclose(result["largest"], largest, rtol=1e-5)
    if number == 11:
        np.testing.assert_array_equal(list(trained.predict(finite_of(11))), np.concatenate(batches))
        part = trained.evaluate(finite_of(11), steps=8)
        np.testing.assert_allclose(part["loss"], errors[:8].mean(), rtol=1e-5)


def test_prediction_draws_nothing_and_leaves_statistics(whole):
    inference = Inference(2)
    with ipu.Session() as session:
        session.restore(whole.latest_checkpoint())
        expected = inference.run(session)
    found = next(whole.predict(finite_of(1), yield_single_examples=False))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_predictions_one_by_one(trained):
    recording = Recording()
    assert len(list(trained.predict(finite_of(10), hooks=[recording], num_predictions=5))) == 5
    assert recording.calls[-1] == "end"
    generator = trained.predict(input_fn)  # of data without end
    first = [next(generator) for _number in range(40)]
    generator.close()
    np.testing.assert_array_equal(first[0], next(trained.predict(input_fn)))


def changed(**attributes):
    """The small model with other attributes of its specification."""

    def model(mode):
        spec = small_model_fn(mode, {})
        for name, value in attributes.items():
            setattr(spec, name, value)
        return spec

    return model


def predicting(trained, last):
    """An estimator whose last stage makes something of the predictions."""
    first, end = small_model_fn("infer", {}).computational_stages
    model = changed(computational_stages=[first, lambda x, y: last(end(x, y))])
    return IPUPipelineEstimator(model, trained.model_dir, make_config(2))


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (lambda x: (x, x + 1), "must return exactly one prediction tensor, but got 2"),
        (lambda x: {"a": x, "b": jnp.sum(x)}, "one first axis, over examples"),
        (lambda x: {"a": x, "b": x[:2]}, "one first axis, over examples"),
    ],
)
def test_predictions_that_are_none(trained, last, message):
    with pytest.raises(ValueError, match=message):
        list(predicting(trained, last).predict(finite_of(4)))


def test_predictions_in_dicts_and_tuples(trained):
    estimator = predicting(trained, lambda x: {"a": x, "b": x + 1})
    both = list(estimator.predict(finite_of(5)))
    assert len(both) == 20
    assert all(set(one) == {"a", "b"} for one in both)
    np.testing.assert_allclose(both[3]["b"], both[3]["a"] + 1, rtol=1e-6)
    assert set(next(estimator.predict(finite_of(5), predict_keys="b"))) == {"b"}
    with pytest.raises(ValueError, match="Expected to run at least one output"):
        next(estimator.predict(finite_of(5), predict_keys=["c"]))
    single = predicting(trained, lambda x: (x,))
    np.testing.assert_array_equal(next(single.predict(finite_of(5))), both[0]["a"])
    with pytest.raises(ValueError, match="non-dict predictions"):
        next(single.predict(finite_of(5), predict_keys=["a"]))


def test_a_scalar_of_each_micro_batch_is_one_prediction(trained):
    batches = list(trained.predict(finite_of(5), yield_single_examples=False))
    sums, firsts = [batch.sum() for batch in batches], [batch[0, 0] for batch in batches]
    found = list(predicting(trained, jnp.sum).predict(finite_of(5)))
    np.testing.assert_allclose(found, sums, rtol=1e-5)
    both = list(predicting(trained, lambda x: {"sum": jnp.sum(x), "first": x[0, 0]}).predict(finite_of(5)))
    np.testing.assert_allclose([one["sum"] for one in both], sums, rtol=1e-5)
    np.testing.assert_allclose([one["first"] for one in both], firsts, rtol=1e-5)


# Going on.


@pytest.mark.parametrize("make", [make_small, pytest.param(make_estimator, marks=pytest.mark.thorough)])
def test_max_steps_and_training_that_is_interrupted(make, request, tmp_path, caplog):
    """The same as without, also with random numbers and statistics."""
    trained = request.getfixturevalue("trained" if make is make_small else "whole")
    estimator = copy_of(trained, tmp_path / "model", 16, make, save_checkpoints_secs=1e-9)
    estimator.train(input_fn, max_steps=16)
    assert "Skipping training since max_steps has already saved." in caplog.text
    hook, _ended = raising(ArithmeticError("after a run"))
    with pytest.raises(ArithmeticError, match="after a run"):
        estimator.train(input_fn, hooks=[hook], max_steps=17)
    assert estimator.get_variable_value("global_step") == 20  # whole weight updates
    estimator.evaluate(finite_of(5))
    assert estimator.train(input_fn, max_steps=32) is estimator
    assert_same_variables(estimator, trained)


def other_input_fn():
    return Batches()


@pytest.mark.parametrize("function", [input_fn, other_input_fn])
def test_another_call_begins_with_the_first_element(function, trained, tmp_path):
    """As in TensorFlow, where the call before did its steps; and other data in any case."""
    estimator = copy_of(trained, tmp_path / "model").train(function, steps=8)
    session = ipu.Session()
    session.restore(estimator.latest_checkpoint())
    assert [feed.position.count for feed in session.take_snapshot().feeds] == [8]


def test_training_ends_with_the_data_and_begins_again(tmp_path, caplog):
    estimator, recording = make_small(tmp_path), Recording("loss")
    estimator.train(finite_of(14), hooks=[recording], steps=80)
    assert estimator.get_variable_value("global_step") == 12
    assert "Training ends at step 12: The infeed's data ended after 14 elements" in caplog.text
    assert [call[1] for call in recording.calls if call[0] == "after"] == [8, 12]
    assert recording.calls[-1] == "end"
    estimator.train(finite_of(14), steps=80)
    assert estimator.get_variable_value("global_step") == 24
    names = [name for _step, name, _value in scalars_in(tmp_path)]
    assert names[:3] == ["loss", "steps/s", "examples/s"]


def test_data_of_just_the_steps_begin_again_and_other_arguments_are_other_data(tmp_path):
    estimator = make_small(tmp_path)
    for number, batches in enumerate((16, 16, 24), 1):
        estimator.train(finite_of(batches), steps=16)
        assert estimator.get_variable_value("global_step") == 16 * number


def test_a_data_set_that_fails_loses_no_update(tmp_path):
    def failing():
        for number, element in enumerate(Batches()):
            if number == 13:
                raise KeyError("broken record")
            yield element

    estimator = make_small(tmp_path)
    with pytest.raises(KeyError, match="broken record"):
        estimator.train(lambda: failing, steps=80)
    assert estimator.get_variable_value("global_step") == 12
    assert_same_variables(estimator, make_small(tmp_path / "whole").train(input_fn, max_steps=12))


@pytest.mark.parametrize(("most", "kept"), [(2, ["12", "16"]), (0, ["12", "16", "4", "8"])])
def test_checkpoints_that_are_kept(most, kept, tmp_path):
    make_small(tmp_path, save_checkpoints_steps=4, keep_checkpoint_max=most).train(input_fn, steps=16)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == kept


def test_another_optimizer_is_told_what_to_do(trained, tmp_path):
    copy_of(trained, tmp_path / "model")

    def momentum(y, target):
        return OptimizerFunctionOutput(optax.sgd(0.1, momentum=0.9), loss_of(y, target))

    model = changed(optimizer_function=momentum)
    estimator = IPUPipelineEstimator(model, tmp_path / "model", make_config(2))
    wanted = "another optimizer: its state differs in .*mu.*another model_dir, where warm_start_from"
    with pytest.raises(CheckpointError, match=wanted):
        estimator.train(input_fn, steps=8)
    assert estimator.get_variable_value("global_step") == 32  # nothing was written


def test_damaged_checkpoints_are_skipped(trained, tmp_path):
    """Also if one is damaged, or goes away, between two calls."""
    directory = tmp_path / "model"
    estimator = copy_of(trained, directory)
    newest = directory / "checkpoints" / "32"
    max(newest.rglob("d/*"), key=lambda path: path.stat().st_size).write_bytes(b"damaged")
    (directory / "checkpoints" / "99").mkdir()
    with pytest.warns(UserWarning, match="step 16 restored: .*99 is not complete.* is damaged"):
        assert estimator.evaluate(finite_of(4))["global_step"] == 16
    with pytest.warns(UserWarning, match="step 16 restored"):
        estimator.train(input_fn, max_steps=32)
    assert_same_variables(estimator, trained)
    (newest / "checkpoint.json").write_text("damaged")
    with pytest.warns(UserWarning, match="step 16 restored"):
        estimator.train(input_fn, steps=16)
    assert_same_variables(estimator, trained)
    for checkpoint in (directory / "checkpoints").iterdir():
        (checkpoint / "checkpoint.json").write_text("damaged")
    for use in uses_of(estimator):
        with pytest.raises(CheckpointError, match="None of the checkpoints"):
            use()
    shutil.rmtree(directory)
    assert_same_variables(estimator.train(input_fn, steps=32), trained)


def uses_of(estimator):
    return (
        lambda: estimator.train(input_fn, steps=8),
        lambda: estimator.evaluate(finite_of(4)),
        lambda: next(estimator.predict(finite_of(4))),
    )


def test_another_model_is_refused(whole):
    message = "of another shape or dtype: a/dense/bias is float32.16., not"
    for use in uses_of(make_estimator(whole.model_dir, params={"width": 8})):
        with pytest.raises(CheckpointError, match=message):
            use()


def test_warm_start(trained, whole, tmp_path):
    seen, (w,) = [], variables_of(trained).values()

    def note(session, coord):
        assert coord is None
        seen.append(np.array(session.variable_value("w")))

    watching = hook_of(after_create_session=note)
    for source in (trained.model_dir, trained.latest_checkpoint()):
        directory = tmp_path / os.path.basename(source)
        estimator = make_small(directory, warm_start_from=source, save_checkpoints_steps=4)
        estimator.train(input_fn, hooks=[watching], steps=8)
        np.testing.assert_array_equal(seen.pop(), w)
        assert estimator.get_variable_value("global_step") == 8
    estimator.train(input_fn, hooks=[watching], steps=8)
    assert not np.array_equal(seen.pop(), w)  # from its own checkpoint
    wide = make_estimator(tmp_path / "wide", params={"width": 8}, warm_start_from=whole.model_dir)
    with pytest.raises(CheckpointError, match="another shape"):
        wide.train(input_fn, steps=8)
    (tmp_path / "broken" / "checkpoints" / "8").mkdir(parents=True)
    small = make_small(tmp_path / "small", warm_start_from=tmp_path / "broken")
    with (
        pytest.warns(UserWarning, match="were skipped"),
        pytest.raises(CheckpointError, match="not complete"),
    ):
        small.train(input_fn, steps=8)


def test_without_a_checkpoint(tmp_path):
    estimator = make_small(tmp_path)
    assert estimator.latest_checkpoint() is None
    with pytest.raises(ValueError, match="Couldn't find trained model at"):
        estimator.get_variable_names()
    with pytest.warns(UserWarning, match="the initial values of the variables are used"):
        assert estimator.evaluate(finite_of(4))["global_step"] == 0
    with pytest.warns(UserWarning, match="no checkpoint in"):
        assert len(list(estimator.predict(finite_of(4)))) == 16


def test_a_given_checkpoint(trained, tmp_path):
    """Evaluating an older one drops no scalars."""
    directory = tmp_path / "model"
    estimator = copy_of(trained, directory)
    early = directory / "checkpoints" / "16"
    assert estimator.evaluate(finite_of(4))["global_step"] == 32
    assert estimator.evaluate(finite_of(4), checkpoint_path=early)["global_step"] == 16
    assert [step for step, _name, _value in scalars_in(directory / "eval")] == [32, 32, 16, 16]
    one = next(estimator.predict(finite_of(4), checkpoint_path=str(early)))
    assert not np.array_equal(one, next(estimator.predict(finite_of(4))))
    with pytest.raises(CheckpointError, match="There is no checkpoint at"):
        estimator.evaluate(finite_of(4), checkpoint_path=tmp_path / "nowhere")


def test_variable_names_and_values(whole):
    names = whole.get_variable_names()
    assert names == sorted(names)
    assert {"global_step", "a/dense/kernel", "norm/batch_normalization/moving_mean"} <= set(names)
    assert whole.get_variable_value("a/dense/kernel").shape == (6, 16)
    with pytest.raises(ValueError, match="there is no variable 'nothing'; there are a/dense/bias"):
        whole.get_variable_value("nothing")


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(CheckpointError, match="last checkpoint of training, of step 8, could not be"):
        make_small(tmp_path).train(input_fn, steps=8)


def test_a_snapshot_that_fails_does_not_end_training(trained, tmp_path, monkeypatch, caplog):
    failures = [MemoryError("no room for the copies")]
    take_snapshot = ipu.Session.take_snapshot

    def fail_once(session, **options):
        if failures:
            raise failures.pop()
        return take_snapshot(session, **options)

    monkeypatch.setattr(ipu.Session, "take_snapshot", fail_once)
    estimator = make_small(tmp_path, save_checkpoints_steps=16).train(input_fn, steps=32)
    assert "The checkpoint of step 16 could not be taken. Training goes on." in caplog.text
    assert os.listdir(tmp_path / "checkpoints") == ["32"]
    assert_same_variables(estimator, trained)


# Hooks.


class Recording(SessionRunHook):
    """Notes what is called, and with what."""

    def __init__(self, fetches=None, stop_after=None):
        self.calls, self.fetches, self.stop_after = [], fetches, stop_after

    def begin(self):
        self.calls.append("begin")

    def after_create_session(self, session, coord):
        self.calls.append(("created", sorted(session.variables)[:1], coord))

    def before_run(self, run_context):
        self.calls.append(("before", run_context.global_step))
        return None if self.fetches is None else SessionRunArgs(self.fetches)

    def after_run(self, run_context, run_values):
        self.calls.append(("after", run_context.global_step, run_values.results))
        run_context.add_scalar("from the hook", 100 + run_context.global_step)
        if run_context.global_step == self.stop_after:
            run_context.request_stop()

    def end(self, session):
        self.calls.append("end")
        assert session.variables


def test_hooks_see_every_run(tmp_path):
    in_spec = Recording()
    given = Recording({"l": "loss", "s": ["global_step", "w"]}, stop_after=24)
    estimator = IPUPipelineEstimator(
        lambda mode: small_model_fn(mode, {"training_hooks": [in_spec]}),
        tmp_path,
        make_config(2, log_step_count_steps=8),
    )
    estimator.train(input_fn, hooks=[given], steps=80)
    assert estimator.get_variable_value("global_step") == 24
    assert in_spec.calls == [
        "begin",
        ("created", ["w"], None),
        *[call for step in (0, 8, 16) for call in (("before", step), ("after", step + 8, None))],
        "end",
    ]
    results = [call[2] for call in given.calls if call[0] == "after"]
    assert [result["s"][0] for result in results] == [8, 16, 24]
    np.testing.assert_array_equal(results[-1]["s"][1], estimator.get_variable_value("w"))
    found = {(step, name): value for step, name, value in scalars_in(tmp_path)}
    assert found[24, "from the hook"] == 124
    np.testing.assert_allclose(found[24, "loss"], results[-1]["l"])
    recording = Recording("loss")
    result = estimator.evaluate(finite_of(12), hooks=[recording])
    losses = [call[2] for call in recording.calls if call[0] == "after"]
    np.testing.assert_allclose((losses[0] * 8 + losses[1] * 4) / 12, result["loss"], rtol=1e-6)
    recording = Recording(stop_after=24)
    assert len(list(estimator.predict(finite_of(40), hooks=[recording]))) == 32
    assert recording.calls[-1] == "end"


def raising(error, when="after_run"):
    """A hook that fails, and what it notes at the end."""

    def fail(*_arguments):
        raise error

    ended = []
    return hook_of(**{when: fail, "end": ended.append}), ended


def test_hooks_that_fail(tmp_path):
    """Training ends without `end`; leaving the program saves what was trained."""
    (hook, ended), estimator = raising(ZeroDivisionError()), make_small(tmp_path / "fails")
    with pytest.raises(ZeroDivisionError):
        estimator.train(input_fn, hooks=[hook], steps=16)
    assert not ended
    wanted = 'fetches must be "loss", "global_step" or names of variables; got'
    with pytest.raises(ValueError, match=wanted):
        estimator.train(input_fn, hooks=[Recording("nothing")], steps=16)
    with pytest.raises(TypeError, match="before_run must return SessionRunArgs"):
        estimator.train(input_fn, hooks=[hook_of(before_run=lambda context: "loss")], steps=16)
    estimator = make_small(tmp_path / "leaves")
    hook, _ended = raising(SystemExit(3))
    with pytest.raises(SystemExit):
        estimator.train(input_fn, hooks=[hook], steps=16)
    assert estimator.get_variable_value("global_step") == 8


# Scalars.


def test_scalars_are_in_both_kinds_of_files(tmp_path):
    estimator = make_small(tmp_path, log_step_count_steps=8).train(input_fn, steps=16)
    estimator.evaluate(finite_of(4))
    estimator.evaluate(finite_of(4), name="again")
    for directory in (tmp_path, tmp_path / "eval", tmp_path / "eval_again"):
        (events,) = directory.glob("events.out.tfevents.*")
        found, lines = zip(*read_events(events), strict=True), zip(*scalars_in(directory), strict=True)
        (steps, names, values), (wanted_steps, wanted_names, wanted) = found, lines
        assert (steps, names) == (wanted_steps, wanted_names)
        np.testing.assert_allclose(values, wanted, rtol=1e-6)
    assert [name for _step, name, _value in scalars_in(tmp_path)] == ["loss", "steps/s", "examples/s"] * 2
    assert [name for _step, name, _value in scalars_in(tmp_path / "eval")] == ["loss", "largest"]


def test_scalars_of_steps_that_come_again_are_dropped(tmp_path):
    options = {"log_step_count_steps": 4, "iterations_per_loop": 4, "save_checkpoints_steps": 8}
    estimator = make_small(tmp_path, **options).train(input_fn, steps=16)
    before = scalars_in(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "16")
    with open(tmp_path / "metrics.jsonl", "a") as stream:
        stream.write('{"step": 8, "name"')
    estimator.train(input_fn, max_steps=16)
    after = scalars_in(tmp_path)
    assert [line[:2] for line in after] == [line[:2] for line in before]
    assert [line for line in after if line[1] == "loss"] == [line for line in before if line[1] == "loss"]


def test_without_tensorboardx(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    make_small(tmp_path).train(input_fn, steps=8)
    assert "tensorboardX is not installed" in caplog.text
    assert len(scalars_in(tmp_path)) == 3
    assert not list(tmp_path.glob("events*"))


# Arguments.


def spec(**options):
    given = {"mode": "train", STAGES: [lambda x: x], COUNT: 4}
    return IPUPipelineEstimatorSpec(**{**given, "optimizer_function": lambda *outputs: None, **options})


def estimator_of(**options):
    given = {"model_fn": small_model_fn, "model_dir": "nowhere", "config": make_config(1)}
    return IPUPipelineEstimator(**{**given, **options})


FOUR, ONE = front.ipu_config(4), front.ipu_config(1)
COUNT, STAGES = "gradient_accumulation_count", "computational_stages"
WRONG = [
    (spec, {"optimizer_function": None}, ValueError, "must contain `optimizer_function` when training"),
    (spec, {"mode": "eval"}, ValueError, "must contain `eval_metrics_fn` when evaluating"),
    (spec, {COUNT: None}, ValueError, "must contain `gradient_accumulation_count`"),
    (spec, {COUNT: 0}, ValueError, "must contain `gradient_accumulation_count`"),
    (spec, {COUNT: -1}, ValueError, "an integer of at least 1; got -1"),
    (spec, {COUNT: 2.0}, ValueError, "an integer of at least 1; got 2.0"),
    (spec, {"mode": "test"}, ValueError, "mode must be one of train, eval, infer; got 'test'"),
    (spec, {"training_hooks": [1]}, TypeError, "All hooks must be SessionRunHook instances, given: 1"),
    (spec, {"accumulate_outfeed": True}, ValueError, "The `accumulate_outfeed` pipeline keyword argument"),
    (spec, {"infeed_queue": None}, ValueError, "The `infeed_queue` pipeline keyword argument cannot"),
    (spec, {"shedule": 1}, TypeError, "pipelining_ops.pipeline has no argument 'shedule'"),
    (IPURunConfig, {"num_shards": 2}, ValueError, "more than one device, but `ipu_options` is None"),
    (IPURunConfig, {"ipu_options": 2}, TypeError, "ipu_options must be an IPUConfig instance"),
    (IPURunConfig, {"num_shards": 2, "ipu_options": FOUR}, ValueError, r"times 2 shards\), .* 4 devices"),
    (
        IPURunConfig,
        {"ordinal": 1, "ipu_options": ONE},
        ValueError,
        r"Only 1 device\(s\) available to choose",
    ),
    (IPURunConfig, {"num_replicas": 2}, ValueError, "`ipu_options` is None: .* auto_select_ipus = 2"),
    (IPURunConfig, {"num_replicas": 2, "ipu_options": FOUR}, ValueError, r"2 devices \(2 replicas times 1"),
    (IPURunConfig, {"num_replicas": 0}, ValueError, "num_replicas must be an integer of at least 1; got 0"),
    (IPURunConfig, {"iterations_per_loop": 0}, ValueError, "iterations_per_loop must be .* 1; got 0"),
    (RunConfig, {"ipu_run_config": 1}, TypeError, "ipu_run_config must be an IPURunConfig"),
    (RunConfig, {"save_checkpoints_steps": 1, "save_checkpoints_secs": 1}, ValueError, "not provide both"),
    (RunConfig, {"save_checkpoints_steps": 0}, ValueError, "steps must be an integer of at least 1; got 0"),
    (RunConfig, {"log_step_count_steps": 1.5}, ValueError, "log_step_count_steps must be an integer"),
    (RunConfig, {"save_summary_steps": 0}, ValueError, "save_summary_steps must be .* least 1; got 0"),
    (RunConfig, {"keep_checkpoint_max": -1}, ValueError, "keep_checkpoint_max must be .* of at least 0"),
    (RunConfig, {"save_checkpoints_secs": 0}, ValueError, "save_checkpoints_secs must be a number above 0"),
    (RunConfig, {"tf_random_seed": "1"}, ValueError, "tf_random_seed must be an integer"),
    (estimator_of, {"config": None}, ValueError, "must be provided with type `ipu_run_config.RunConfig`"),
    (estimator_of, {"params": [1]}, ValueError, "`params` is expected to be of type `dict`"),
    (estimator_of, {"params": {"input_fn": 1}}, ValueError, "are reserved keys but existed in params"),
    (estimator_of, {"config": RunConfig(model_dir="x")}, ValueError, "are set both in constructor and"),
    (estimator_of, {"model_fn": lambda features, labels: 1}, ValueError, "not have `features` or `labels`"),
    (estimator_of, {"model_fn": lambda mode, extra: 1}, ValueError, r"not expected args: \['extra'\]"),
    (estimator_of, {"model_fn": 3}, TypeError, "model_fn must be a function"),
]


def test_wrong_arguments():
    for function, options, error, message in WRONG:
        with pytest.raises(error, match=message):
            function(**options)


def test_the_model_dir(tmp_path, caplog):
    assert IPUPipelineEstimator(model_fn, config=RunConfig(model_dir=tmp_path)).model_dir == str(tmp_path)
    estimator = IPUPipelineEstimator(model_fn, config=make_config(1), params={"a": [1]})
    assert "Using temporary folder as model directory" in caplog.text
    assert os.path.isdir(estimator.model_dir)
    os.rmdir(estimator.model_dir)
    estimator.params["a"].append(2)
    assert estimator.params == {"a": [1]}
    assert estimator.model_fn is model_fn
    assert estimator.config.keep_checkpoint_max == 5


def test_wrong_steps(trained):
    for arguments, message in (
        ({}, "One of `steps` or `max_steps` must be specified"),
        ({"steps": 8, "max_steps": 8}, "Can not provide both steps and max_steps"),
        ({"steps": 0}, "Must specify steps > 0, given: 0"),
        ({"max_steps": -1}, "Must specify max_steps > 0, given: -1"),
        ({"max_steps": True}, "Must specify max_steps > 0, given: True"),
        ({"steps": 12}, r"steps \(12\) must be a multiple of iterations_per_loop \(8\)"),
    ):
        with pytest.raises(ValueError, match=message):
            trained.train(input_fn, **arguments)


@pytest.mark.parametrize(
    ("model", "config", "error", "message"),
    [
        (changed(**{COUNT: 8}), (2, 4), ValueError, "iterations_per_loop` .got 4. cannot be less than "),
        (changed(), (2, 6), ValueError, r"\(got 6\) must be divisible by `gradient_acc.* \(got 4\)"),
        (changed(), (4,), ValueError, "requires 2 devices, but `IPURunConfig.num_shards` was set to 4"),
        (changed(), (1,), ValueError, "requires 2 devices, but `IPURunConfig.num_shards` was set to 1"),
        (changed(**{STAGES: []}), (2,), ValueError, "requires 0 devices"),
        (
            lambda mode: small_model_fn(mode, {"options": {"device_mapping": [0, 1, 2]}}),
            (2,),
            ValueError,
            "requires 3 devices",
        ),
        (lambda: 3, (2,), TypeError, "must return `IPUPipelineEstimatorSpec`; got int"),
        (lambda: small_model_fn("infer", {}), (2,), ValueError, "with mode train, .* for infer"),
    ],
)
def test_what_does_not_fit_the_configuration(model, config, error, message, tmp_path):
    config = make_config(*config)
    estimator = IPUPipelineEstimator(model, tmp_path, config)
    with pytest.raises(error, match=message):
        estimator.train(input_fn, steps=config.ipu_run_config.iterations_per_loop)
    assert not (tmp_path / "checkpoints").exists()


def test_wrong_input_functions(trained):
    with pytest.raises(TypeError, match="input_fn must be a function"):
        trained.train(Batches(), steps=8)
    with pytest.raises(ValueError, match="not expected args: .'extra'.. It may take mode, params, config"):
        trained.evaluate(lambda extra: 1)
    for use in (
        lambda: trained.train(lambda: 3, steps=8),
        lambda: trained.train(lambda: (np.zeros((4, 2)), np.zeros(4)), steps=8),
        lambda: trained.evaluate(lambda: None),
        lambda: next(trained.predict(lambda: iter([1]))),
    ):
        with pytest.raises(ValueError, match="input_fn must return Dataset"):
            use()
    with pytest.raises(ValueError, match="The dataset of the infeed is empty"):
        trained.evaluate(list)
    seen = []
    trained.evaluate(lambda mode, params, config: seen.append((mode, params, config)) or finite_of(4)())
    assert seen == [("eval", {}, trained.config)]


@pytest.mark.parametrize(
    ("metrics", "error", "message"),
    [
        (lambda *outputs: 3, TypeError, "The `eval_metrics_fn` must return a dict, but got <class 'int'>"),
        (lambda *outputs: {"other": 3}, KeyError, "must contain 'loss'; it has 'other'"),
    ],
)
def test_wrong_metrics(trained, metrics, error, message):
    model = changed(eval_metrics_fn=metrics)
    with pytest.raises(error, match=message):
        IPUPipelineEstimator(model, trained.model_dir, make_config(2)).evaluate(finite_of(4))


# The rest.


def test_training_in_another_thread(trained, tmp_path):
    """Signals are handled in the main thread only."""
    estimator = make_small(tmp_path)
    thread = threading.Thread(target=functools.partial(estimator.train, input_fn, steps=32))
    thread.start()
    thread.join()
    assert_same_variables(estimator, trained)


def test_other_pipeline_arguments(tmp_path):
    """They reach the pipeline: batch serialization takes more elements per update."""
    options = {"batch_serialization_iterations": 2, "device_mapping": [0, 0]}
    config = make_config(1, iterations_per_loop=16)
    estimator = IPUPipelineEstimator(small_model_fn, tmp_path, config, {"options": options})
    estimator.train(input_fn, steps=16)
    with ipu.Session() as session:
        session.restore(estimator.latest_checkpoint())
        assert [feed.position.count for feed in session.take_snapshot().feeds] == [16]
        assert session.update_count("ipu_pipeline_estimator_train") == 2


def test_losses_accumulate_in_the_dtype_that_is_given(trained, tmp_path):
    model = changed(loss_accumulator_dtype=jnp.float16)
    IPUPipelineEstimator(model, tmp_path, make_config(2)).train(input_fn, steps=8)
    (rough,) = [value for _step, name, value in scalars_in(tmp_path) if name == "loss"]
    (_step, _name, fine), *_rest = scalars_in(trained.model_dir)
    assert rough != fine
    np.testing.assert_allclose(rough, fine, rtol=1e-2)  # the three digits of float16


def test_training_that_fails_at_once_leaves_the_checkpoint(trained, tmp_path):
    """Neither the name of its own data with the other's position, nor the other's as at an end."""
    estimator = copy_of(trained, tmp_path / "model", 16)
    document = checkpoint_directories.read_document(estimator.latest_checkpoint())
    hook, _ended = raising(ArithmeticError("before the first update"), "before_run")
    for function in (other_input_fn, input_fn):
        with pytest.raises(ArithmeticError, match="before the first update"):
            estimator.train(function, hooks=[hook], steps=32)
        assert checkpoint_directories.read_document(estimator.latest_checkpoint()) == document
    with pytest.warns(UserWarning, match="nothing was trained, .* ended within the first weight update"):
        estimator.train(functools.partial(finite_input_fn, 2), steps=32)
    assert checkpoint_directories.read_document(estimator.latest_checkpoint()) == document
    estimator.train(input_fn, steps=16)  # goes on with its data
    assert_same_variables(estimator, trained)
