"""Compiled programs that are kept for the next pipeline: training again compiles nothing."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.engine.execution import compilation
from ipu_pipeline.engine.execution.compilation import KeptPrograms, current_programs, identify, text_of
from ipu_pipeline.ground import jax_compat
from ipu_pipeline.ipu_pipeline_estimator import IPUPipelineEstimator, IPUPipelineEstimatorSpec
from ipu_pipeline.pipelining_ops import OptimizerFunctionOutput
from tests.support.compilations import compilations
from tests.support.estimating import assert_same_variables, finite_of, input_fn, make_config, make_estimator
from tests.tf1.estimator import test_ipu_estimator, test_replicas_estimator


def lower(function, *arguments, **options):
    return jax.jit(function, **options).lower(*arguments)


def identity(lowered, devices=None, options=None):
    devices = jax.devices()[:1] if devices is None else devices
    return identify(lowered, text_of(lowered), devices, options or {})


ONE, TWO = np.float32(1), np.float32(2)


def test_which_programs_are_the_same():
    def add(number):
        return lambda x: x + np.float32(number)

    known = identity(lower(add(1), ONE))
    assert known is not None
    assert identity(lower(add(1), TWO)) == known
    large = np.zeros(5000, np.float32)
    other = large.copy()
    other[2500] = 1e-7
    first, second = (identity(lower(lambda x, y=y: x + jnp.sum(x * y), large)) for y in (large, other))
    different = [
        identity(lower(add(2), ONE)),
        identity(lower(add(1), np.ones(1, np.float32))),
        identity(lower(add(1), ONE), jax.devices()[1:2]),
        identity(lower(add(1), ONE), options={"xla_cpu_enable_fast_math": True}),
        identity(lower(lambda x: (x + ONE,), ONE)),
        identity(lower(add(1), ONE, donate_argnums=0)),
        first,
        second,
    ]
    assert len({known, *different}) == 1 + len(different)


def test_programs_that_read_other_arguments(monkeypatch):
    """Their text is the same, and a compiled one reads what it was compiled for."""
    first, second = (lower(function, ONE, TWO) for function in (lambda x, y: -x, lambda x, y: -y))
    assert text_of(first) == text_of(second)
    assert identity(first) != identity(second)
    assert identity(lower(lambda x, y: -x, TWO, ONE)) == identity(first)
    monkeypatch.setattr(jax_compat, "_lowering", None)
    assert identity(first) is None
    assert identity(lower(lambda x, y: x - y, ONE, TWO)) is not None


def test_programs_that_call_python():
    def call(x):
        return jax.pure_callback(lambda value: value, jax.ShapeDtypeStruct((), np.float32), x)

    assert identity(lower(call, ONE)) is None
    assert identity(lower(lambda x: jax.debug.print("{}", x) or x, ONE)) is None


def test_what_is_let_go():
    kept = KeptPrograms()
    with kept.building():
        assert current_programs() is kept
    assert current_programs() is None
    kept.keep(("a",), 1)
    kept.keep(("b",), 2)
    kept.keep(None, 3)
    with kept.building():
        assert kept.find(("a",)) == 1
    for _time in range(2):  # one that compiles nothing lets nothing go
        with kept.building():
            assert kept.find(None) is kept.find(("b",)) is None
    assert kept.find(("a",)) == 1


# Estimators.


def test_training_again_compiles_nothing(tmp_path, caplog):
    """It compiled each program anew, which took longer than short trainings."""
    estimator = make_estimator(tmp_path, 1)
    caplog.set_level(logging.INFO, "ipu_pipeline")
    for number in range(2):
        caplog.clear()
        with compilations() as trained:
            estimator.train(input_fn, steps=8)
        told = [message for message in caplog.messages if message.startswith("Compiled ")]
        with compilations() as evaluated:
            estimator.evaluate(finite_of(8))
        assert (len(trained) > 0, len(evaluated) > 0) == (number == 0,) * 2
    (message,) = told
    assert "kept from before)" in message


@pytest.mark.thorough
def test_with_replicas(tmp_path, monkeypatch):
    """Without JAX's persistent cache, the second replica's programs are loaded, and those are kept too.

    One that computes too little to be loaded is compiled for each replica, and again in the next training;
    here all are large enough, whether there is a cache or not.
    """
    monkeypatch.setattr(compilation, "_LEAST_OPERATIONS", 0)
    estimator = test_replicas_estimator.make(tmp_path)
    numbers = []
    for _time in range(2):
        with compilations() as found:
            estimator.train(input_fn, steps=4)
        numbers.append(len(found))
    assert numbers[1] == 0


def make_spec(mode, rate=0.1, target=0.0, watch=lambda x: None):
    """Two small stages; `watch` sees what the first one returns."""

    def first(x, y):
        with ipu.variable_scope("first"):
            x = jnp.tanh(ipu.layers.Dense(8)(x))
        watch(x)
        return x, y

    def second(x, y):
        with ipu.variable_scope("second"):
            return jnp.mean((ipu.layers.Dense(3)(x) - y - target) ** 2)

    return IPUPipelineEstimatorSpec(
        mode,
        [first, second],
        gradient_accumulation_count=4,
        optimizer_function=lambda loss: OptimizerFunctionOutput(optax.sgd(rate), loss),
    )


@pytest.mark.thorough
def test_a_model_that_has_changed(tmp_path):
    """`model_fn` is called again, and may close over something else."""
    settings = {}

    def train(directory, is_again):
        estimator, compiled = None, []
        for changed in ({}, {"rate": 0.2}, {"target": 1.0}):
            settings.clear()
            settings.update(changed)
            if estimator is None or not is_again:
                config = make_config(2, iterations_per_loop=8)
                estimator = IPUPipelineEstimator(
                    lambda mode: make_spec(mode, **settings), tmp_path / directory, config
                )
            with compilations() as found:
                estimator.train(input_fn, steps=8)
            compiled.append(len(found))
        return estimator, compiled

    (again, compiled), (anew, all_compiled) = train("again", True), train("anew", False)
    assert_same_variables(again, anew)
    assert all(0 < some < most for some, most in zip(compiled[1:], all_compiled[1:], strict=True))


@pytest.mark.thorough
def test_what_is_called_back_is_the_new_one(tmp_path):
    told, number = [], {"is": 1}

    def watch(x):
        now = number["is"]
        jax.debug.callback(lambda _value: told.append(now), x)

    estimator = IPUPipelineEstimator(
        lambda mode: make_spec(mode, watch=watch), tmp_path, make_config(2, iterations_per_loop=8)
    )
    for number["is"] in (1, 2):
        estimator.train(input_fn, steps=8)
        jax.effects_barrier()
    assert told == [1] * 8 + [2] * 8


@pytest.mark.thorough
def test_a_model_that_is_not_cut_into_stages(tmp_path):
    """Its loop is another kind of program."""
    estimator = test_ipu_estimator.make_estimator(tmp_path, params={"count": 3})
    data = test_ipu_estimator.dataset()
    for number in range(2):
        with compilations() as trained:
            estimator.train(data, steps=6)
        with compilations() as evaluated:
            estimator.evaluate(data, steps=6)
        assert (len(trained) > 0, len(evaluated) > 0) == (number == 0,) * 2
