"""Exported by Graphcore's names: `serving`, and an estimator's `export_saved_model`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.errors import CheckpointError
from ipu_pipeline.ipu_estimator import IPUEstimator, IPUEstimatorSpec
from ipu_pipeline.ipu_pipeline_estimator import IPUPipelineEstimator, IPUPipelineEstimatorSpec
from ipu_pipeline.ipu_run_config import IPURunConfig, RunConfig
from ipu_pipeline.ipu_session_run_hooks import IPULoggingTensorHook
from ipu_pipeline.optimizers import tf1
from tests.support import front
from tests.support.estimating import make_config

RNG = np.random.default_rng(1)
X = RNG.normal(size=(12, 5)).astype(np.float32)
KERNELS = {
    "one/dense/kernel": RNG.normal(size=(5, 3)).astype(np.float32),
    "two/dense/kernel": RNG.normal(size=(3, 2)).astype(np.float32),
}
SIGNATURE = [jax.ShapeDtypeStruct((4, 5), np.float32)]


def first(x):
    with ipu.variable_scope("one"):
        return jnp.tanh(ipu.layers.Dense(3, use_bias=False)(x))


def second(x):
    with ipu.variable_scope("two"):
        logits = ipu.layers.Dense(2, use_bias=False)(x)
    return logits, jnp.mean(logits)


def whole(x):
    return second(first(x))


def expected(x):
    return np.tanh(x @ KERNELS["one/dense/kernel"]) @ KERNELS["two/dense/kernel"]


def load(session):
    session.load(KERNELS)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "model"
    program = ipu.serving.export_pipeline(
        [first, second], path, 2, predict_step_signature=SIGNATURE, variable_initializer=load
    )
    return path, program


@pytest.mark.parametrize("rows", [0, 4, 12])
def test_a_pipeline_takes_multiples_of_its_rows(exported, rows):
    path, program = exported
    for loaded in (program, ipu.load_program(path)):
        logits, means = loaded(X[:rows])
        np.testing.assert_allclose(logits, expected(X[:rows]).reshape(rows, 2), rtol=1e-5)
        assert means.shape == (rows // 4,)
        np.testing.assert_allclose(means, [part.mean() for part in logits.reshape(-1, 4, 2)], rtol=1e-5)
    stacked, _means = program.run([(X[:4],), (X[4:8],)])
    np.testing.assert_allclose(stacked, expected(X[:8]).reshape(2, 4, 2), rtol=1e-5)


@pytest.mark.parametrize(
    ("inputs", "named", "error", "message"),
    [
        ([X[:6]], {}, ValueError, r"shape \(4, 5\) that was exported, or a .* 4 rows; got \(6"),
        ([X[:4, :3]], {}, ValueError, r"or a multiple of its 4 rows; got \(4, 3\)"),
        ([X[:4], X[:4]], {}, TypeError, "it takes 1 inputs; got 2"),
        ([], {"x": X[:4]}, TypeError, "inputs are given by position; got 'x' by name"),
        ([X[:4] + 1j], {}, ValueError, "of dtype complex64, does not fit float32"),
    ],
)
def test_wrong_inputs(exported, inputs, named, error, message):
    with pytest.raises(error, match=message):
        exported[1](*inputs, **named)


def test_a_single_step_with_all_that_there_is(tmp_path):
    """Preprocessing, names of outputs, a data set for a signature, and a training's checkpoint."""
    with ipu.Session() as session:
        load(session)
        session.load({"not/exported": np.ones(3)})
        ipu.Saver().save(session, tmp_path / "checkpoints", global_step=7)

    pixels = RNG.integers(0, 255, size=(8, 5)).astype(np.uint8)
    program = ipu.serving.export_single_step(
        whole,
        tmp_path / "model",
        iterations=3,
        input_dataset=[(pixels[:2], np.float32(0.5))],
        predict_step_signature=[jax.ShapeDtypeStruct((2, 5), np.float32)],
        output_names=["logits", "mean"],
        preprocessing_step=lambda pixels, scale: (pixels.astype(jnp.float32) * scale,),
        checkpoint_restore_dir=tmp_path / "checkpoints",
    )
    found = program(pixels, np.float32(1 / 255))
    assert found.keys() == {"logits", "mean"}
    np.testing.assert_allclose(found["logits"], expected(pixels / np.float32(255)), rtol=1e-4)
    assert found["mean"].shape == (4,)


def test_inputs_and_features_by_name(tmp_path):
    factor = ipu.placeholder(np.float32, [], name="factor")

    stages, data = [lambda factor, a, b: factor * a - b], [{"a": X[:4], "b": X[4:8]}]
    program = ipu.serving.export_pipeline(
        stages, tmp_path / "model", 1, inputs=[factor], input_dataset=data
    )
    found = program(a=X[:8], b=X[4:], feed={"factor": 2.0})
    np.testing.assert_allclose(found, 2 * X[:8] - X[4:], rtol=1e-6)
    np.testing.assert_allclose(program({"a": X[:4], "b": X[4:8]}, feed={"factor": 0}), -X[4:8])
    with pytest.raises(TypeError, match="the inputs must be 'a', 'b'; got 'a'"):
        program(a=X[:4])
    with pytest.raises(ValueError, match="All inputs must have the same number of micro-batches"):
        program(a=X[:4], b=X[4:])


def test_a_folder_that_is_not_empty(tmp_path):
    (tmp_path / "kept.txt").write_text("kept")
    options = {"predict_step_signature": SIGNATURE, "variable_initializer": load}
    purging = {**options, "purge_export_dir": True}
    with pytest.raises(ValueError, match=r'Directory ".*" is not empty. Please specify an empty directory'):
        ipu.serving.export_single_step(whole, tmp_path, 1, **options)
    with pytest.raises(ZeroDivisionError):  # what fails removes nothing
        ipu.serving.export_single_step(lambda x: x / (1 // 0), tmp_path, 1, **purging)
    assert (tmp_path / "kept.txt").exists()
    for _time in range(2):
        program = ipu.serving.export_single_step(whole, tmp_path, 1, **purging)
    assert not (tmp_path / "kept.txt").exists()
    np.testing.assert_allclose(program(X[:4])[0], expected(X[:4]), rtol=1e-5)


def test_initial_values_are_said(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.warns(UserWarning, match="the initial values of one/dense/kernel, two/dense/kernel are"):
        ipu.serving.export_single_step(whole, tmp_path / "empty", 1, predict_step_signature=[X[:4]])
    with pytest.raises(CheckpointError, match="There is no checkpoint at"):
        ipu.serving.export_single_step(
            whole, tmp_path / "new", 1, SIGNATURE, checkpoint_restore_dir=tmp_path / "nowhere"
        )
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"predict_step_signature": None}, ValueError, "one of `predict_step_signature` and `input_"),
        ({"input_dataset": [X[:4]]}, ValueError, "Both are given"),
        ({"predict_step_signature": SIGNATURE[0]}, TypeError, "must be a list or tuple; got Shape"),
        ({"predict_step_signature": []}, ValueError, "`predict_step_signature` cannot be empty"),
        ({"predict_step_signature": ["x"]}, TypeError, "predict_step_signature.0. must be a jax"),
        ({"predict_step_signature": SIGNATURE * 2}, ValueError, r"\(2\) does not match the number of arg"),
        ({"iterations": 0}, ValueError, "iterations must be"),
        ({"output_names": ["a"]}, ValueError, "a name for each output of the last stage, which returns 2"),
        ({"output_names": 3}, TypeError, "output_names must be a string or a list"),
        ({"variable_initializer": 3}, TypeError, "variable_initializer must be a function that"),
        ({"checkpoint_restore_dir": "x"}, ValueError, "both give the variables their values"),
        ({"preprocessing_step_signature": SIGNATURE}, ValueError, "is given without preprocessing_step"),
        (
            {"preprocessing_step": lambda x: x[:2], "preprocessing_step_signature": SIGNATURE},
            ValueError,
            r"what predict_step_signature says, float32\[4, 5\]; it returns float32\[2, 5\]",
        ),
    ],
)
def test_wrong_arguments(options, error, message, tmp_path):
    given = {"iterations": 1, "predict_step_signature": SIGNATURE, "variable_initializer": load, **options}
    with pytest.raises(error, match=message):
        ipu.serving.export_single_step(whole, tmp_path / "model", **given)
    assert not (tmp_path / "model").exists()


# Estimators.


def pipeline_model(mode):
    step = ipu.get_global_step()
    hook = IPULoggingTensorHook(at_end=True)

    def last(x):
        logits, _mean = second(x)
        if mode == ipu.ModeKeys.PREDICT:
            hook.log(logits)
            return {"logits": logits, "step": step}
        return jnp.mean(logits**2)

    hooks = [hook] if mode == ipu.ModeKeys.PREDICT else None
    options = {"optimizer_function": front.minimizing(optax.sgd(0.1)), "prediction_hooks": hooks}
    return IPUPipelineEstimatorSpec(mode, [first, last], 2, **options)


def input_fn():
    return [X[begin : begin + 4] for begin in (0, 4, 8)] * 4


def test_the_prediction_of_a_pipeline_estimator(tmp_path):
    estimator = IPUPipelineEstimator(pipeline_model, tmp_path, make_config(2, iterations_per_loop=4))
    with pytest.raises(ValueError, match="Couldn't find trained model at"):
        estimator.export_saved_model(tmp_path / "exports", lambda: SIGNATURE[0])
    estimator.train(input_fn, steps=8)
    path = estimator.export_saved_model(tmp_path / "exports", lambda: SIGNATURE[0])
    received = ipu.placeholder("float32", (4, 5))
    other = estimator.export_saved_model(str(tmp_path / "exports"), lambda: received)
    assert path != other
    wanted = np.stack([one["logits"] for one in estimator.predict(lambda: [X[:4], X[4:8]], "logits")])
    for found in (path, other):
        result = ipu.load_program(found)(X[:8])
        np.testing.assert_allclose(result["logits"], wanted, rtol=1e-5)
        assert result["step"].tolist() == [8, 8]


def test_the_prediction_of_an_estimator_of_one_stage(tmp_path):
    def model(features, labels, mode):
        logits, _mean = whole(features["x"])
        if mode == ipu.ModeKeys.PREDICT:
            return IPUEstimatorSpec(mode, predictions=logits)
        loss = jnp.mean((logits - labels) ** 2)
        optimizer = ipu.optimizers.CrossReplicaOptimizer(tf1.GradientDescentOptimizer(0.1))
        return IPUEstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss))

    options = front.ipu_config(2)
    config = RunConfig(IPURunConfig(2, options, num_replicas=2))
    estimator = IPUEstimator(model, tmp_path, config)
    estimator.train(lambda: [({"x": X[:4]}, X[:4, :2])] * 8, steps=4)
    path = estimator.export_saved_model(tmp_path / "exports", lambda: {"x": X[:4]})
    wanted = list(estimator.predict(lambda: [{"x": X[:4]}, {"x": X[4:8]}, {"x": X[8:]}]))
    np.testing.assert_allclose(ipu.load_program(path)(x=X), wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"assets_extra": {"a": "b"}}, NotImplementedError, "assets_extra must be None.*copy such files"),
        ({"as_text": True}, NotImplementedError, "as_text must be False; got True"),
        ({"experimental_mode": "eval"}, NotImplementedError, "experimental_mode must be .*PREDICT"),
        ({"serving_input_receiver_fn": X}, TypeError, "must be a function that returns what a micro-batch"),
        ({"serving_input_receiver_fn": lambda: "x"}, TypeError, "serving_input_receiver_fn returns must"),
    ],
)
def test_wrong_exports(options, error, message, tmp_path):
    estimator = IPUPipelineEstimator(pipeline_model, tmp_path, make_config(2, iterations_per_loop=2))
    if "receiver" in message:
        estimator.train(input_fn, steps=2)
    given = {"serving_input_receiver_fn": lambda: SIGNATURE[0], **options}
    with pytest.raises(error, match=message):
        estimator.export_saved_model(tmp_path / "exports", **given)
    assert not (tmp_path / "exports").exists()
