"""Lists in place of stages: parallel stages."""

import jax
import jax.numpy as jnp
import optax
import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine import schedules
from ipu_pipeline.engine.schedules.timetables import Action, ActionKind
from tests.support import beside, models

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


def first(x, labels):
    return models.dense("first", 8, x, jnp.tanh), labels


def left(x, labels):
    return models.dense("left", 6, x, jnp.tanh), labels


def right(x, labels):
    return models.dense("right", 6, x, jnp.tanh) * x.mean()


def join(a, labels, b):
    logits = models.dense("join", 10, jnp.concatenate([a, b], 1), lambda x: x)
    return models.cross_entropy(logits, labels)


@pytest.mark.parametrize("training", [pytest.param(True, marks=pytest.mark.thorough), False])
def test_at_the_beginning_and_at_the_end(training, rng):
    def one(x, labels):
        return {"a": models.dense("one", 8, x, jnp.tanh)}

    def two(x, labels):
        return {"b": models.dense("two", 8, x, jnp.tanh), "labels": labels}

    def loss_a(a, b, labels):
        return models.cross_entropy(models.dense("a", 10, a * b), labels)

    def loss_b(b, labels, a):
        return models.cross_entropy(models.dense("b", 10, a - b), labels)

    options = {"loss": lambda a, b: a + 2 * b, "optimizer": optax.sgd(0.1)} if training else {}
    pipeline = engine.Pipeline([[one, two], [loss_a, loss_b]], num_micro_batches=2, **options)
    step = models.mlp_batches(rng, 2)
    _state, outputs = beside.train(pipeline, [step])
    assert pipeline.num_devices == 4
    assert len(outputs.outputs[0]) == 2
    if not training:  # as one stage that does both

        def both(x, labels):
            values = one(x, labels) | two(x, labels)
            return loss_a(**values), loss_b(**values)

        together = engine.Pipeline([both], num_micro_batches=2)
        _state, plain = together.step(together.init(jax.random.key(0), step[0]), step)
        models.assert_trees_close(outputs.outputs, plain.outputs)


def test_they_run_at_the_same_time():
    levels = (0, 1, 1, 2)
    table = schedules.timetable("grouped", 4, 2, (0, 1, 2, 3), True, levels)
    assert table.rows == (
        (Action(F, 0, 0), Action(F, 0, 1), None, None, None, None, Action(B, 0, 0), Action(B, 0, 1)),
        (None, Action(F, 1, 0), Action(F, 1, 1), None, None, Action(B, 1, 0), Action(B, 1, 1)),
        (None, Action(F, 2, 0), Action(F, 2, 1), None, None, Action(B, 2, 0), Action(B, 2, 1)),
        (None, None, Action(F, 3, 0), Action(B, 3, 0), Action(F, 3, 1), Action(B, 3, 1)),
    )


def test_a_level_waits_for_all_of_the_one_before():
    # Stage 2 is late, so stage 3 cannot start although stage 1 is done.
    forwards = [Action(F, stage, 0) for stage in range(4)]
    rows = [[forwards[0]], [None, forwards[1]], [None, None, forwards[2]], [None, None, forwards[3]]]
    table = schedules.check(rows, 4, 1, (0, 1, 2, 3), False, (0, 1, 1, 2))
    assert dict(zip(table.order, table.time_steps, strict=True))[forwards[3]] == 4


def on_one_ipu(num_stages, num_micro_batches, device_mapping, training, levels):
    """Each micro-batch has another order of the two stages in the middle."""
    del num_stages, device_mapping, training, levels
    orders = [((0, 1, 2, 3), (3, 1, 2, 0)), ((0, 2, 1, 3), (3, 2, 1, 0)), ((0, 2, 1, 3), (3, 1, 2, 0))]
    chosen = [orders[number % 3] for number in range(num_micro_batches)]
    return [
        [
            Action(kind, stage, number)
            for number, order in enumerate(chosen)
            for kind, stages in zip((F, B), order, strict=True)
            for stage in stages
        ]
    ]


@pytest.mark.parametrize("schedule", ["grouped", on_one_ipu])
def test_turns_of_those_on_one_ipu(schedule):
    table = schedules.timetable(schedule, 4, 5, (0,) * 4, True, (0, 1, 1, 2))
    for number in range(5):
        own = [(kind, stage) for kind, stage, micro_batch in table.order if micro_batch == number]
        assert own == [*((F, stage) for stage in range(4)), *((B, stage) for stage in (3, 2, 1, 0))]


@pytest.mark.thorough
def test_a_schedule_with_other_turns_on_one_ipu(rng):
    """With replicas each stage has a program, which reads what another one read before it."""
    pipeline = engine.Pipeline(
        [first, [left, right], join],
        num_micro_batches=3,
        optimizer=optax.sgd(0.1),
        schedule=on_one_ipu,
        device_mapping=[0, [0, 0], 0],
        num_replicas=2,
    )
    beside.train(pipeline, [models.mlp_batches(rng, 6)])


@pytest.mark.parametrize(
    ("middle", "mapping", "message"),
    [
        ([left, right], [0, 1, 2], "a list of them for parallel stages"),
        ([left, right], [0, [1, 1], 2], "each needs a device of its own"),
        ([], None, "a list of parallel stages must have at least one function"),
    ],
)
def test_wrong_mappings(middle, mapping, message):
    with pytest.raises(ValueError, match=message):
        engine.Pipeline([first, middle, join], num_micro_batches=2, device_mapping=mapping)


def test_tuples_and_dicts_do_not_mix(rng):
    def named(x, labels):
        return {"b": x}

    for middle, message in (
        ([left, named], "Return dicts from all of them, or from none"),
        ([named, named], "two of them return a value named 'b'"),
    ):
        pipeline = engine.Pipeline([first, middle, join], num_micro_batches=2)
        with pytest.raises(TypeError, match=message):
            pipeline.trace(models.mlp_batches(rng, 1)[0])
