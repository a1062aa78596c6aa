"""`Saver.save` right after `global_variables_initializer()`, or after `load`: nothing may be missing."""

import contextlib

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.checkpointing import checkpoint_directories
from ipu_pipeline.pipelining_ops import OptimizerFunctionOutput
from tests.support.front import compile_pipeline, compile_program, session_of
from tests.support.resumable import Training

INITIALIZE = ipu.global_variables_initializer()


def saved_variables(path):
    return checkpoint_directories.read_checkpoint(path).variables


class Small:
    """A pipeline of one stage, or of two, in a scope of its own; the second stage is optional."""

    def __init__(self, scope, width=3, has_second=True, trains=True):
        self.infeed = ipu.ipu_infeed_queue.IPUInfeedQueue([np.ones((2, 3), np.float32)] * 20)
        self.initializer = self.infeed.initializer
        self.outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

        def first(x):
            with ipu.variable_scope(f"{scope}/first"):
                return ipu.layers.Dense(width)(x)

        def second(x):
            with ipu.variable_scope(f"{scope}/second") if has_second else contextlib.nullcontext():
                return jnp.mean((ipu.layers.Dense(3)(x) if has_second else x) ** 2)

        def optimize(loss):
            return OptimizerFunctionOutput(optax.adam(0.1), loss)

        self.program = compile_pipeline(
            [lambda x: second(first(x))],
            2,
            infeed_queue=self.infeed,
            outfeed_queue=self.outfeed,
            optimizer_function=optimize if trains else None,
        )


def assert_complete(path, model):
    scope = next(iter(model.program.variables)).partition("/")[0]  # other tests' models may be there, too
    found = {name: value for name, value in saved_variables(path).items() if name.startswith(f"{scope}/")}
    shapes = {name: value.shape for name, value in found.items()}
    assert shapes == {name: spec.shape for name, spec in model.program.variables.items()}


def run_from(path, model):
    """Runs a model from a checkpoint, which may have other tests' variables, too."""
    with ipu.Session() as session:
        session.restore(path, allow_partial=True)
        session.run(model.initializer)
        session.run(model.program)


def test_another_model_of_the_same_names_is_still_there(tmp_path):
    """As after a notebook's cell was changed and run again: names stood for two shapes, and were lost."""
    earlier = Small("replaced", width=4)
    model = Small("replaced", width=3)
    with ipu.Session(seed=3) as session:
        session.run(INITIALIZE)
        path = ipu.Saver().save(session, tmp_path)
    assert_complete(path, model)
    run_from(path, model)
    with ipu.Session() as session:
        session.take_over(checkpoint_directories.read_checkpoint(path), path, fits=False)
        session.run(earlier.initializer)
        with pytest.raises(ValueError, match=r"replaced/first/dense/\w+ is float32.*4. in this program"):
            session.run(earlier.program)


@pytest.mark.parametrize("fetch", [INITIALIZE, [INITIALIZE], {"a": (INITIALIZE,)}])
def test_a_program_that_is_compiled_after_the_initializer(tmp_path, fetch):
    """In TensorFlow 1 the graph was there first."""
    with ipu.Session(seed=3) as session:
        session.run(INITIALIZE)  # makes those of programs of other tests, if there are some
        model = Small("later")
        path = ipu.Saver().save(session, tmp_path, global_step=ipu.get_global_step())
        assert path == str(tmp_path / "0")
        assert_complete(path, model)
        session.run(fetch)
        assert_complete(ipu.Saver().save(session, tmp_path), model)
    run_from(path, model)


def test_a_program_with_more_variables_is_compiled_later(tmp_path):
    first = Small("grown", has_second=False)
    with ipu.Session(seed=3) as session:
        session.run(INITIALIZE)
        model = Small("grown", trains=False)
        session.run(first.initializer)
        session.run(first.program)
        path = ipu.Saver().save(session, tmp_path)
        assert path == str(tmp_path / "1")
        assert model.program.variables.keys() <= saved_variables(path).keys()
    with session_of(first, seed=3) as session:
        session.run(first.program)
        path = ipu.Saver().save(session, tmp_path)  # what has run has made its variables; no more are added
        assert_complete(path, first)


def test_only_some_variables_were_loaded(tmp_path):
    model = Small("loaded")
    with ipu.Session(seed=3) as session:
        session.load({"loaded/first/dense/kernel": np.eye(3)})
        session.save(tmp_path / "loaded")
        assert_complete(tmp_path / "loaded", model)
        saved = saved_variables(tmp_path / "loaded")
        assert {value.dtype.name for value in saved.values()} == {"float32"}
        kept = session.variables
    with ipu.Session() as session:
        session.restore(tmp_path / "loaded")
        assert {name: value.tolist() for name, value in session.variables.items()} == {
            name: value.tolist() for name, value in kept.items()
        }
    np.testing.assert_array_equal(kept["loaded/first/dense/kernel"], np.eye(3))
    assert kept["loaded/second/dense/kernel"].any()


def test_another_session_has_nothing_to_save(tmp_path):
    with ipu.Session() as session, ipu.Session() as other:
        session.run(INITIALIZE)
        with pytest.raises(ValueError, match="There is nothing to save.*when global_variables_initializer"):
            ipu.Saver().save(other, tmp_path)
    assert not any(tmp_path.iterdir())


def test_no_program_has_variables(tmp_path, monkeypatch):
    for module in ("resumption", "session"):
        monkeypatch.setattr(f"ipu_pipeline.tf1.session.{module}.compiled_programs", list)
    with ipu.Session() as session:
        session.run(INITIALIZE)
        with pytest.raises(ValueError, match="was run, but no program that is still referred to has var"):
            session.save(tmp_path / "new")


def test_training_on_from_it_is_training_from_the_start(tmp_path):
    """In TensorFlow 1 the checkpoint has the optimizer's slots; here they begin where they begin anyway."""
    training = Training(1)
    with session_of(training, seed=3) as session:
        losses = training.run(session, 3)
        with ipu.Session(seed=3) as initial:
            initial.run(INITIALIZE)
            path = ipu.Saver().save(initial, tmp_path)
        session.run(INITIALIZE)  # forgets what was trained, and where the data stand
        assert session.update_count() == 0
        assert ipu.Saver().save(session, tmp_path / "again") == str(tmp_path / "again" / "0")
        with session_of(training, seed=3) as expected:
            training.run(expected, 3)
    for found in (path, tmp_path / "again" / "0"):
        with ipu.Session(seed=99) as other:
            other.restore(found, allow_partial=True)
            training.start(other)
            np.testing.assert_array_equal(training.run(other, 3), losses)
            assert other.update_count() == 3
            for name, value in expected.variables.items():
                np.testing.assert_array_equal(other.variables[name], value)
            state = other.optimizer_state()
            for name, value in expected.optimizer_state().items():
                np.testing.assert_array_equal(state[name], value)


def test_a_loop_trains_on_from_it(tmp_path):
    def run(session):
        infeed = ipu.ipu_infeed_queue.IPUInfeedQueue([np.full((2, 3), n, np.float32) for n in range(8)])

        def body(x):
            with ipu.variable_scope("looped"):
                loss = jnp.mean(ipu.layers.Dense(2)(x) ** 2)
            return ipu.optimizers.GradientAccumulationOptimizerV2(optax.adam(0.1), 2).minimize(loss)

        program = compile_program(lambda: ipu.loops.repeat(4, body, infeed_queue=infeed))
        session.run(infeed.initializer)
        session.run(program)
        return program

    with ipu.Session(seed=3) as session:
        program = run(session)
        with ipu.Session(seed=3) as initial:
            initial.run(INITIALIZE)
            initial.save(tmp_path / "initial")
    with ipu.Session() as other:
        other.restore(tmp_path / "initial", allow_partial=True)
        run(other)
        for name in program.variables:
            np.testing.assert_array_equal(other.variables[name], session.variables[name])
