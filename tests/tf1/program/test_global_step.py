"""`get_global_step()`: weight updates in sessions, micro-batches in estimators, in checkpoints too."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.ipu_pipeline_estimator import IPUPipelineEstimator, IPUPipelineEstimatorSpec
from ipu_pipeline.ipu_session_run_hooks import SessionRunArgs, SessionRunHook
from ipu_pipeline.optimizers import tf1
from ipu_pipeline.pipelining_ops import OptimizerFunctionOutput, pipeline
from tests.support import front, models
from tests.support.estimating import hook_of, make_config, scalars_in, variables_of
from tests.support.front import compile_program

COUNT = 3
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 4, 5)).astype(np.float32), RNG.normal(size=(24, 4, 2)).astype(np.float32)


def dataset():
    return [(X[number], Y[number]) for number in range(len(X))]


def first(x, y):
    with ipu.variable_scope("one"):
        return jnp.tanh(ipu.layers.Dense(6)(x)), y


def second(x, y):
    with ipu.variable_scope("two"):
        return ipu.layers.Dense(2)(x), y


def loss_of(prediction, y):
    return jnp.mean((prediction - y) ** 2)


def plain_loss(variables, x, y):
    x = jnp.tanh(x @ variables["one/dense/kernel"] + variables["one/dense/bias"])
    return loss_of(x @ variables["two/dense/kernel"] + variables["two/dense/bias"], y)


def plain_loop(variables, rates, count=COUNT):
    """SGD on sums of gradients, with a learning rate for each weight update."""
    groups = [[(X[number], Y[number])] for number in range(len(rates) * count)]
    rates = jnp.array(rates, jnp.float32)
    return models.plain_loop(plain_loss, variables, groups, count, optax.sgd(lambda n: rates[n]))[1]


def decayed(step):
    return tf1.exponential_decay(0.1, step, 6, 0.5)


def by_operators(step):
    return 0.1 * 0.5 ** (step.astype(jnp.float32) / 6)


def spec_of(mode, count, make_optimizer):
    def optimize(prediction, y):
        return OptimizerFunctionOutput(make_optimizer(), loss_of(prediction, y))

    return IPUPipelineEstimatorSpec(mode, [first, second], count, optimizer_function=optimize)


def in_closure(mode, count):
    """The rate is computed in the model_fn, and used in the optimizer_function."""
    rate = decayed(ipu.get_global_step())
    return spec_of(mode, count, lambda: optax.sgd(rate))


def in_function(mode, count):
    step = ipu.get_global_step()
    return spec_of(mode, count, lambda: optax.sgd(decayed(step)))


def made_outside(mode, count):
    optimizer = tf1.GradientDescentOptimizer(by_operators(ipu.get_global_step()))
    return spec_of(mode, count, lambda: optimizer)


def through_inputs(mode, count):
    """As Graphcore's documentation has it: a stage may not ask for the global step itself there."""

    def optimize(prediction, y, step, rate):
        del rate
        return OptimizerFunctionOutput(optax.sgd(decayed(step)), loss_of(prediction, y))

    stages = [
        lambda step, rate, x, y: (*first(x, y), step, rate["rate"]),
        lambda x, y, step, rate: (*second(x, y), step, rate),
    ]
    inputs = [ipu.get_global_step(), {"rate": decayed(ipu.get_global_step()), "one": np.float32(1)}]
    return IPUPipelineEstimatorSpec(mode, stages, count, optimizer_function=optimize, inputs=inputs)


class Steps(SessionRunHook):
    """Notes the global step by all ways that a hook has."""

    def __init__(self):
        self.before, self.after = [], []

    def after_create_session(self, session, coord):
        del coord
        self.first = session.run(ipu.get_global_step())

    def before_run(self, run_context):
        self.before.append(run_context.global_step)
        return SessionRunArgs([ipu.get_global_step(), "global_step"])

    def after_run(self, run_context, run_values):
        step = run_context.session.run(ipu.get_global_step())
        assert run_values.results == [step, run_context.global_step]
        self.after.append(int(step))


def estimator_of(make_spec, directory, count=COUNT, per_loop=6, **options):
    config = make_config(2, iterations_per_loop=per_loop, **options)
    return IPUPipelineEstimator(lambda mode: make_spec(mode, count), directory, config)


@pytest.fixture(scope="module")
def initial(tmp_path_factory):
    """The variables before training."""
    make_spec = lambda mode, count: spec_of(mode, count, lambda: optax.sgd(0.0))  # noqa: E731
    estimator = estimator_of(make_spec, tmp_path_factory.mktemp("initial"), per_loop=COUNT)
    return variables_of(estimator.train(dataset, steps=COUNT))


@pytest.mark.parametrize("make_spec", [made_outside, through_inputs])
def test_a_decay_in_an_estimator_goes_by_micro_batches(make_spec, initial, tmp_path):
    hook = Steps()
    estimator = estimator_of(make_spec, tmp_path, per_loop=COUNT)
    estimator.train(dataset, steps=6, hooks=[hook])
    assert (hook.first, hook.before, hook.after) == (0, [0, 3], [3, 6])
    assert estimator.get_variable_value("global_step") == 6
    rates = [0.1 * 0.5 ** (step / 6) for step in (0, 3)]
    models.assert_values_close(variables_of(estimator), plain_loop(initial, rates))


def test_inputs_of_an_estimator_are_those_of_its_runs(initial, tmp_path):
    """Of two weight updates, wherever a checkpoint is saved, and if it is interrupted within one."""

    def fail(*_arguments):
        raise ArithmeticError

    estimator = estimator_of(through_inputs, tmp_path, save_checkpoints_steps=COUNT)
    with pytest.raises(ArithmeticError):
        estimator.train(dataset, steps=12, hooks=[hook_of(after_run=fail)])
    assert estimator.get_variable_value("global_step") == COUNT
    estimator.train(dataset, max_steps=12)
    rates = [0.1 * 0.5 ** (step / 6) for step in (0, 0, 6, 6)]
    models.assert_values_close(variables_of(estimator), plain_loop(initial, rates))


@pytest.mark.thorough
def test_training_goes_on_with_another_accumulation(initial, tmp_path):
    """The global step goes on from the checkpoint's: updates before it were of three micro-batches."""
    estimator_of(in_function, tmp_path).train(dataset, steps=6)
    estimator = estimator_of(in_function, tmp_path, count=2, per_loop=2)
    estimator.train(dataset, steps=4)
    assert estimator.get_variable_value("global_step") == 10
    halfway = plain_loop(initial, [0.1 * 0.5 ** (step / 6) for step in (0, 3)])
    rates = [0.1 * 0.5 ** (step / 6) for step in (6, 8)]
    models.assert_values_close(variables_of(estimator), plain_loop(halfway, rates, count=2))


@pytest.mark.thorough
def test_training_that_is_interrupted_and_in_short_runs_is_the_same(tmp_path):
    def fail(*_arguments):
        raise ArithmeticError

    whole = estimator_of(in_closure, tmp_path / "whole").train(dataset, steps=12)
    parts = estimator_of(in_closure, tmp_path / "parts", save_checkpoints_steps=3)
    with pytest.raises(ArithmeticError):
        parts.train(dataset, max_steps=3, hooks=[hook_of(after_run=fail)])
    parts.train(dataset, max_steps=12)
    for name, value in variables_of(whole).items():
        np.testing.assert_array_equal(variables_of(parts)[name], value)


def test_evaluation_and_prediction_have_the_step_of_the_checkpoint(tmp_path):
    def make_spec(mode, count):
        step = ipu.get_global_step()
        if mode is ipu.ModeKeys.TRAIN:
            return in_function(mode, count)
        stages = [first, lambda x, y: jnp.broadcast_to(step, (x.shape[0],))]

        def metrics(steps):
            return {"loss": np.mean(steps), "step": np.max(steps)}

        return IPUPipelineEstimatorSpec(mode, stages, count, eval_metrics_fn=metrics)

    estimator = estimator_of(make_spec, tmp_path)
    with pytest.warns(UserWarning, match="There is no checkpoint"):
        assert estimator.evaluate(dataset)["step"] == 0
    estimator.train(dataset, steps=6)
    hook = Steps()
    found = estimator.evaluate(dataset, hooks=[hook])
    assert found == {"loss": 6, "step": 6, "global_step": 6}
    assert set(hook.before + hook.after) == {6}
    assert next(estimator.predict(dataset)) == 6


def test_metrics_scalars_and_hooks_tell_the_same_step(tmp_path):
    """That of the micro-batches of one replica."""

    def model(mode):
        def optimize(prediction, y):
            ipu.metric("step", ipu.get_global_step())
            opt = ipu.optimizers.CrossReplicaOptimizer(optax.sgd(0.1))
            return OptimizerFunctionOutput(opt, loss_of(prediction, y))

        stages = [lambda x, y: second(*first(x, y))]
        return IPUPipelineEstimatorSpec(mode, stages, COUNT, optimizer_function=optimize)

    options = front.ipu_config(2)
    run_config = ipu.ipu_run_config.IPURunConfig(3, options, num_replicas=2)
    config = ipu.ipu_run_config.RunConfig(run_config, save_summary_steps=3)
    hook = Steps()
    IPUPipelineEstimator(model, tmp_path, config).train(dataset, steps=6, hooks=[hook])
    assert hook.after == [3, 6]
    steps = [(step, value) for step, name, value in scalars_in(tmp_path) if name == "step"]
    assert steps == [(3, 0), (6, 3)]


# Sessions.


def test_a_session_counts_weight_updates(initial, tmp_path):
    """With a rate that decays by them, computed before the pipeline, as TensorFlow 1 code has it.

    It is among the inputs, which stay the same during a run.
    """
    step = ipu.get_global_step()
    stages = [lambda rate, *xy: (rate, *first(*xy)), lambda rate, *xy: (rate, *second(*xy))]
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(dataset())
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    options = {"repeat_count": 2, "infeed_queue": infeed, "outfeed_queue": outfeed, "outfeed_loss": True}

    def optimize(rate, prediction, y):
        return OptimizerFunctionOutput(optax.sgd(rate), loss_of(prediction, y))

    def model():
        rate = decayed(ipu.get_global_step())
        return pipeline(stages, COUNT, inputs=[rate], optimizer_function=optimize, **options)

    with ipu.Session(seed=7) as session:
        assert session.run(step) == 0
        program = compile_program(model)
        session.run([infeed.initializer, program])
        session.run(program)
        assert session.run({"step": step, "losses": outfeed.dequeue()})["step"] == 4
        rates = [0.1 * 0.5 ** (update / 6) for update in (0, 0, 2, 2)]
        models.assert_values_close(session.variables, plain_loop(initial, rates))
        path = ipu.Saver().save(session, tmp_path, global_step=step)
    assert path == str(tmp_path / "4")
    with ipu.Session() as session:
        session.restore(path)
        assert session.run([step]) == [4]


def test_a_loop_counts_its_weight_updates():
    def body(x, y):
        loss = loss_of(second(*first(x, y))[0], y)
        return tf1.GradientDescentOptimizer(0.1).minimize(loss, global_step=ipu.get_global_step())

    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(dataset())
    program = compile_program(lambda: ipu.loops.repeat(5, body, infeed_queue=infeed))
    with ipu.Session(seed=7) as session:
        session.run([infeed.initializer, program])
        assert session.run(ipu.get_global_step()) == 5


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda step: jnp.exp(step), "outside of a program.*optimizers.tf1"),
        (lambda step: float(step + 1), "outside of a program"),
        (lambda step: bool(step < 3), "outside of a program"),
        (lambda step: compile_program(lambda: 2 * step), "the compiled function, which has no such number"),
        (
            lambda step: compile_program(lambda: ipu.loops.repeat(2, lambda s: s, inputs=[step])),
            "the compiled function, which has no such number",
        ),
    ],
)
def test_where_the_global_step_has_no_value(use, message):
    with pytest.raises(RuntimeError, match=message):
        use(ipu.get_global_step())


def test_what_is_computed_from_it_says_so():
    value = 1 - ipu.get_global_step() * 2
    assert repr(value) == "a value computed from the global step"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = value.nothing
