"""`train_and_evaluate`, and listeners of saves."""

import json
import os
import pathlib
import signal

import numpy as np
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.ipu_session_run_hooks import CheckpointSaverListener
from ipu_pipeline.tf1.estimator import training
from tests.support.estimating import (
    assert_same_variables,
    finite_input_fn,
    finite_of,
    hook_of,
    input_fn,
    make_small,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An estimator after 32 steps that nothing interrupted."""
    return make_small(tmp_path_factory.mktemp("trained")).train(input_fn, steps=32)


class Saves(CheckpointSaverListener):
    def __init__(self, stop_at=None):
        self.calls = []
        self.stop_at = stop_at

    def begin(self):
        self.calls.append("begin")

    def before_save(self, session, global_step):
        assert session.run(ipu.get_global_step()) == global_step
        self.calls.append(("before", global_step))

    def after_save(self, session, global_step):
        self.calls.append(("after", global_step, session.update_count("ipu_pipeline_estimator_train")))
        return global_step == self.stop_at

    def end(self, session, global_step):
        assert session.variables
        self.calls.append(("end", global_step))


def evaluated_steps(estimator, folder="eval"):
    lines = pathlib.Path(estimator.model_dir, folder, "metrics.jsonl").read_text().splitlines()
    return sorted({json.loads(line)["step"] for line in lines})


def test_every_checkpoint_is_evaluated_and_training_is_the_same(trained, tmp_path):
    listener, steps = Saves(), []
    hook = hook_of(before_run=lambda run_context: steps.append(run_context.global_step))
    estimator = make_small(tmp_path, save_checkpoints_steps=12)
    result, exported = ipu.train_and_evaluate(
        estimator,
        ipu.TrainSpec(input_fn, 32, saving_listeners=[listener]),
        ipu.EvalSpec(finite_of(5), None, "test", hooks=[hook], throttle_secs=0),
    )
    assert exported == []
    assert evaluated_steps(estimator, "eval_test") == [12, 24, 32]
    assert steps == [12, 24, 32]
    assert result == estimator.evaluate(finite_of(5))
    assert_same_variables(estimator, trained)
    saves = [(("before", step), ("after", step, step // 4)) for step in (12, 24, 32)]
    assert listener.calls == ["begin", *[call for pair in saves for call in pair], ("end", 32)]
    again, _exported = ipu.train_and_evaluate(  # nothing is left to train
        estimator, ipu.TrainSpec(input_fn, 32), ipu.EvalSpec(finite_of(5), None)
    )
    assert again == result


def test_evaluations_that_are_throttled(tmp_path):
    estimator = make_small(tmp_path, save_checkpoints_steps=4)
    ipu.train_and_evaluate(estimator, ipu.TrainSpec(input_fn, 20), ipu.EvalSpec(input_fn, steps=8))
    assert evaluated_steps(estimator) == [4, 20]


def test_data_that_end(tmp_path):
    estimator = make_small(tmp_path)
    spec = ipu.EvalSpec(finite_of(5), None)
    result, _exported = ipu.train_and_evaluate(estimator, ipu.TrainSpec(finite_of(14), 80), spec)
    assert result["global_step"] == 12
    estimator = make_small(tmp_path / "none")
    with pytest.warns(UserWarning, match="train: nothing was trained.*ended after 3.*Give more of them"):
        found = ipu.train_and_evaluate(estimator, ipu.TrainSpec(finite_of(3), 80), spec)
    assert found == (None, [])
    assert estimator.latest_checkpoint() is None


def test_a_listener_ends_training(tmp_path):
    listener = Saves(stop_at=8)
    estimator = make_small(tmp_path, save_checkpoints_steps=4)
    estimator.train(input_fn, steps=32, saving_listeners=[listener])
    assert estimator.get_variable_value("global_step") == 8
    assert listener.calls[-2:] == [("after", 8, 2), ("end", 8)]


def test_a_signal_that_comes_to_another_process_in_the_last_run(tmp_path, monkeypatch):
    """Training has come to its end, but that process ends, and the others with it."""
    steps = [0]
    last = hook_of(after_run=lambda run_context, _values: steps.append(run_context.global_step))
    largest = lambda number, _what: signal.SIGTERM if steps[-1] >= 16 else number  # noqa: E731
    monkeypatch.setattr(training, "largest", largest)
    estimator = make_small(tmp_path)
    with pytest.raises(SystemExit) as end:
        estimator.train(input_fn, hooks=[last], max_steps=16)
    assert end.value.code == 128 + signal.SIGTERM
    assert estimator.get_variable_value("global_step") == 16


def test_what_fails_leaves_the_last_checkpoint(trained, tmp_path):
    """Interrupted training is saved; then a listener fails, and then an evaluation."""
    estimator, spec = make_small(tmp_path, save_checkpoints_steps=8), ipu.EvalSpec(finite_of(5), None)

    def interrupt(_session, _global_step):
        os.kill(os.getpid(), signal.SIGTERM)

    def fail(_session, global_step):
        raise ArithmeticError(f"at step {global_step}")

    interrupting, failing = (hook_of(CheckpointSaverListener, after_save=one) for one in (interrupt, fail))
    train_spec = ipu.TrainSpec(input_fn, 32, saving_listeners=[interrupting])
    with pytest.raises(SystemExit) as end:
        ipu.train_and_evaluate(estimator, train_spec, spec)
    assert end.value.code == 128 + signal.SIGTERM
    assert estimator.get_variable_value("global_step") == 8
    with pytest.raises(ArithmeticError, match="at step 16"):
        estimator.train(input_fn, max_steps=32, saving_listeners=[failing])
    with pytest.raises(ValueError, match="empty"):
        ipu.train_and_evaluate(estimator, ipu.TrainSpec(input_fn, 32), ipu.EvalSpec(list, None))
    assert estimator.get_variable_value("global_step") == 24
    make_small(tmp_path).train(input_fn, max_steps=32)
    assert_same_variables(estimator, trained)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ipu.TrainSpec(input_fn), ValueError, "max_steps must be an integer above 0; got None"),
        (lambda: ipu.TrainSpec([1], 8), TypeError, "TrainSpec: input_fn must be a function"),
        (lambda: ipu.TrainSpec(lambda x: x, 8), ValueError, "following not expected args: .'x'."),
        (lambda: ipu.TrainSpec(input_fn, 8, [1]), TypeError, "must be SessionRunHook instances"),
        (lambda: ipu.TrainSpec(input_fn, 8, None, [hook_of()]), TypeError, "of CheckpointSaverListener"),
        (lambda: ipu.EvalSpec(input_fn, 0), ValueError, "steps must be an integer above 0, or None; got 0"),
        (
            lambda: ipu.EvalSpec(input_fn, exporters=["best"]),
            NotImplementedError,
            "exporters must be None, since those of TensorFlow write its SavedModel. Call the estimator's",
        ),
        (lambda: ipu.EvalSpec(input_fn, throttle_secs=-1), ValueError, "throttle_secs must be a number of"),
        (lambda: ipu.EvalSpec(None), TypeError, "EvalSpec: input_fn must be a function"),
    ],
)
def test_wrong_specifications(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_what_cannot_be_evaluated_is_told_before_training(tmp_path):
    estimator, train_spec = make_small(tmp_path), ipu.TrainSpec(input_fn, 32)
    with pytest.raises(ValueError, match=r"steps \(100\) must be a multiple of iterations_per_loop \(8\)"):
        ipu.train_and_evaluate(estimator, train_spec, ipu.EvalSpec(input_fn))
    with pytest.raises(TypeError, match="eval_spec must be a EvalSpec; got TrainSpec"):
        ipu.train_and_evaluate(estimator, train_spec, train_spec)
    with pytest.raises(TypeError, match="estimator must be an IPUPipelineEstimator or IPUEstimator"):
        ipu.train_and_evaluate(train_spec, train_spec, ipu.EvalSpec(finite_input_fn))
    with pytest.warns(UserWarning, match="start_delay_secs has no effect"):
        ipu.EvalSpec(input_fn, start_delay_secs=1)
    assert not os.listdir(tmp_path)
    assert np.isfinite(ipu.EvalSpec(input_fn).throttle_secs)
