"""A program that goes on with fewer devices than it asks for."""

import jax
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.ground import warned
from ipu_pipeline.pipelining_ops import pipeline
from ipu_pipeline.processes import devices
from ipu_pipeline.processes.launched import FEWER_VARIABLE
from tests.support import front, models
from tests.tf1.test_replicas_front import (
    COUNT,
    UPDATES,
    Model,
    average,
    elements_of,
    loop,
    plain_loss,
    select,
    started,
)


@pytest.fixture(autouse=True)
def begun():
    """The devices are those of JAX, which has begun: no more can be made."""
    assert len(jax.devices()) == 8


@pytest.fixture
def fewer(monkeypatch):
    monkeypatch.setattr(warned, "_warned", set())
    monkeypatch.setenv(FEWER_VARIABLE, "1")


def test_nothing_takes_turns_where_there_are_enough(fewer):
    model = Model(elements_of(2 * COUNT), 2)
    with started(model, 4) as (session, _variables):
        assert model.run(session).shape == (COUNT, 2)


VIRTUAL = devices.VIRTUAL_VARIABLE


@pytest.mark.parametrize(
    ("variables", "number", "error", "message"),
    [
        ({}, 16, RuntimeError, "16 devices are needed"),
        ({FEWER_VARIABLE: "1"}, [8, 4], RuntimeError, "12 devices are needed"),  # not with several groups
        ({FEWER_VARIABLE: "yes"}, 4, ValueError, "must be 0 or 1; it is 'yes'"),
        ({VIRTUAL: "3"}, 16, RuntimeError, f"16 devices are needed, .* {VIRTUAL} lets each .* have 3"),
        ({VIRTUAL: "none"}, 4, ValueError, f"{VIRTUAL} must be a whole number from 1; it is 'none'"),
    ],
)
def test_only_if_the_environment_lets_it(variables, number, error, message, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=message):
        select(number)


def test_ipus_share_devices_where_there_are_too_few_for_one_replica(fewer, tmp_path):
    """Two replicas of ten IPUs, four of which have a stage."""
    select(20)
    elements = elements_of(2 * COUNT * UPDATES)
    model = Model(elements, opt=average(optax.sgd(0.1)), device_mapping=[0, 3, 6, 9])
    with started(model) as (session, variables):
        with (
            pytest.warns(UserWarning, match="devices for 1 of the 2 replicas"),
            pytest.warns(UserWarning, match="There are 8 devices .*, which has 10: its IPUs share them"),
        ):
            losses = model.run(session, UPDATES - 1)
        with ipu.reports.capture(tmp_path) as captured:
            losses = np.concatenate([losses, model.run(session)])
        expected, wanted = loop(plain_loss, variables, elements, 2, optax.sgd(0.1))
        models.assert_trees_close(losses, expected)
        models.assert_trees_close(session.variables, wanted)
    ((one, other),) = model.program.placement().replicas  # they take turns on the same devices
    assert one == other
    kinds = [event.kind for event in captured.profile.events]
    assert (kinds.count("forward"), kinds.count("backward")) == (24, 24)


def test_not_in_loops(fewer):
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(np.ones([64, 2, 4], np.float32))

    def body(x):
        return average(optax.sgd(0.1)).minimize((ipu.layers.Dense(1)(x) ** 2).mean())

    program = front.compile_program(lambda: ipu.loops.repeat(4, body, infeed_queue=infeed))
    select(16)
    with ipu.Session() as session:
        session.run(infeed.initializer)
        message = "The 16 replicas of a loop cannot take turns.* needs 16 devices"
        with pytest.raises(ValueError, match=message):
            session.run(program)


def test_values_of_each_replica_go_to_it(fewer):
    """A loop with a device for each of eight replicas, and a pipeline in which they take turns."""
    summed = ipu.ipu_infeed_queue.IPUInfeedQueue(np.arange(64, dtype=np.float32), replication_factor=8)
    fed = ipu.ipu_infeed_queue.IPUInfeedQueue(np.ones([64, 4], np.float32), replication_factor=8)
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    stages = [lambda total, x: (total, x * 2), lambda total, x: total + 0 * x.sum()]

    def model():
        total = ipu.loops.repeat(3, lambda total, x: total + x, [np.float32(0)], infeed_queue=summed)
        return pipeline(stages, 2, inputs=[total], infeed_queue=fed, outfeed_queue=outfeed)

    program = front.compile_program(model)
    select(16)
    with ipu.Session() as session:
        session.run(summed.initializer)
        session.run(fed.initializer)
        with pytest.warns(UserWarning, match="devices for 4 of the 8 replicas"):
            session.run(program)
        found = session.run(outfeed.dequeue())
    np.testing.assert_array_equal(found, [[3 * replica + 24 for replica in range(8)]] * 2)
