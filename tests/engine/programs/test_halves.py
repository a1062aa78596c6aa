"""Backwards in halves: what each program has, what is kept for the second, and orders of one's own.

`test_features` compares all ways to run them with a plain loop.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine.programs.stage_programs import ValueKind
from ipu_pipeline.engine.schedules.timetables import ActionKind
from tests.support import beside, models, scheduled

F, B, INPUTS, WEIGHTS = ActionKind
COUNT = 2


def make(schedule="zero_bubble", stages=models.VARIOUS_STAGES, **options):
    options = {
        "loss": lambda loss, **_others: loss,
        "optimizer": models.showing_gradients(),
        "num_micro_batches": COUNT,
        **options,
    }
    return engine.Pipeline(stages, schedule=schedule, **options)


def traced(*arguments, **options):
    pipeline = make(*arguments, **options)
    pipeline.trace(models.various_batches(np.random.default_rng(0), 1)[0], np.float32(0.9))
    return pipeline


def kinds_of(program, side):
    values = getattr(program, side)
    return {value.kind for one in values for value in ((one,) if side == "arguments" else one)}


def test_what_each_half_takes_and_gives():
    first, second, _third, last = traced().programs
    assert first.backward is None  # nothing before it is differentiated
    assert kinds_of(first.weights, "results") == {ValueKind.ACCUMULATOR}
    assert kinds_of(second.backward, "results") == {ValueKind.INPUT_COTANGENT, ValueKind.RESIDUAL}
    assert kinds_of(second.weights, "results") == {ValueKind.ACCUMULATOR}
    assert ValueKind.ACCUMULATOR not in kinds_of(second.backward, "arguments")
    assert last.backward is None  # its forward does the first half
    assert ValueKind.INPUT_COTANGENT in kinds_of(last.forward, "results")
    assert ValueKind.ACCUMULATOR not in kinds_of(last.forward, "results")


def make_plain(schedule, stages, **options):
    """Stages of which the last one returns the loss alone."""
    return make(schedule, stages, loss=lambda loss: loss, **options)


@pytest.mark.parametrize("recompute", [None, "auto"])
def test_halves_cost_what_the_whole_costs(recompute):
    halved, whole = (
        make_plain(schedule, scheduled.stages(3), recompute=recompute)
        for schedule in ("zero_bubble", "interleaved")
    )
    for pipeline in (halved, whole):
        pipeline.trace(np.ones((2, scheduled.SIZE), "float32"))
    for pair in zip(halved.programs, whole.programs, strict=True):
        programs = [(one.forward, *one.backwards) for one in pair]
        costs = [sum(program.num_operations for program in own) for own in programs]
        assert costs[0] <= costs[1]


def test_a_stage_without_variables_has_no_second_half():
    def middle(scale, h, x, labels, is_even):
        return scale, jnp.sin(h), x, labels, is_even

    def last(scale, h, x, labels, is_even):
        del x, is_even
        return {"loss": scale * jnp.mean((h.sum(1) - labels.astype(h.dtype)) ** 2)}

    pipeline = traced(stages=[models.first_stage, middle, last])
    for own in pipeline.programs[1:]:
        assert own.weights is None
    assert pipeline.programs[1].backward is not None


def some_halved(num_stages, num_micro_batches, device_mapping, training):
    """One stage in halves, and of that one micro-batch whole."""

    def change(action):
        if action is None or (action.kind, action.stage) != (B, 1) or not action.micro_batch:
            return [action]
        return [action._replace(kind=kind) for kind in (INPUTS, WEIGHTS)]

    rows = engine.schedules.interleaved(num_stages, num_micro_batches, device_mapping, training)
    return [[one for action in row for one in change(action)] for row in rows]


def test_orders_of_one_s_own():
    pipeline = make_plain(some_halved, scheduled.stages(3), device_mapping=(0, 1, 0))
    step = list(np.random.default_rng(0).normal(size=(COUNT, 2, scheduled.SIZE)).astype("float32"))
    beside.train(pipeline, [step])


def test_a_count_for_which_a_schedule_has_halves_after_one_without():
    def schedule(num_stages, num_micro_batches, device_mapping, training):
        function = engine.schedules.zero_bubble if num_micro_batches == 3 else engine.schedules.interleaved
        return function(num_stages, num_micro_batches, device_mapping, training)

    pipeline = make_plain(schedule, scheduled.stages(2), num_micro_batches=None)
    step = [np.ones((2, scheduled.SIZE), "float32")] * 3
    state = pipeline.init(jax.random.key(5), step[0])
    state, _outputs = pipeline.step(state, step[:2], num_micro_batches=2)
    with pytest.raises(engine.ScheduleError, match="with 3 micro-batches, stage 0 splits its back"):
        pipeline.step(state, step, num_micro_batches=3)


def printing_stages(seen):
    """Three stages, of which the middle one prints in its backward."""

    @jax.custom_vjp
    def shown(x):
        return x

    def backward(_residual, cotangent):
        jax.debug.callback(lambda value: seen.append(float(value)), jnp.sum(cotangent))
        return (cotangent,)

    shown.defvjp(lambda x: (x, None), backward)

    def first(x, labels):
        return jnp.tanh(x @ models.weight("first", x)), labels

    def middle(x, labels):
        return shown(jnp.tanh(x @ models.weight("middle", x))), labels

    def last(x, labels):
        return models.cross_entropy(x @ models.weight("last", x, size=models.NUM_CLASSES), labels)

    return [first, middle, last]


@pytest.mark.parametrize(
    "schedule", [pytest.param("interleaved", marks=pytest.mark.thorough), "zero_bubble"]
)
def test_effects_of_a_backward_and_of_a_gradient_map_happen_once(schedule):
    in_backward, in_map = [], []

    def show(gradient, _variable):
        jax.debug.callback(lambda value: in_map.append(float(value)), jnp.sum(gradient))
        return gradient

    options = {"optimizer": optax.sgd(0.1), "gradient_map": lambda: show}
    pipeline = make_plain(schedule, printing_stages(in_backward), **options)
    step = models.various_batches(np.random.default_rng(0), COUNT)
    pipeline.step(pipeline.init(jax.random.key(5), step[0]), step)
    jax.effects_barrier()
    assert len(in_backward) == COUNT
    assert len(in_map) == 3 * COUNT
