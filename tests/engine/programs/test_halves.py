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
from ipu_pipeline.engine.schedules.actions import ActionKind
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


def test_halves_cost_what_the_whole_costs():
    for recompute in (None, "auto"):
        halved, whole = (
            make(schedule, scheduled.stages(3), loss=lambda loss: loss, recompute=recompute)
            for schedule in ("zero_bubble", "interleaved")
        )
        for pipeline in (halved, whole):
            pipeline.trace(np.ones((2, scheduled.SIZE), "float32"))
        for own, other in zip(halved.programs, whole.programs, strict=True):
            costs = [
                sum(program.num_operations for program in (one.forward, *one.backwards))
                for one in (own, other)
            ]
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
    rows = engine.schedules.interleaved(num_stages, num_micro_batches, device_mapping, training)
    changed = []
    for row in rows:
        own = []
        for action in row:
            is_half = action is not None and (action.kind, action.stage) == (B, 1) and action.micro_batch
            if is_half:
                own += [action._replace(kind=kind) for kind in (INPUTS, WEIGHTS)]
            else:
                own.append(action)
        changed.append(own)
    return changed


def test_orders_of_one_s_own():
    pipeline = make(some_halved, scheduled.stages(3), device_mapping=(0, 1, 0), loss=lambda loss: loss)
    step = list(np.random.default_rng(0).normal(size=(COUNT, 2, scheduled.SIZE)).astype("float32"))
    beside.train(pipeline, [step])


def test_a_count_for_which_a_schedule_has_halves_after_one_without():
    def schedule(num_stages, num_micro_batches, device_mapping, training):
        function = engine.schedules.zero_bubble if num_micro_batches == 3 else engine.schedules.interleaved
        return function(num_stages, num_micro_batches, device_mapping, training)

    pipeline = make(schedule, scheduled.stages(2), num_micro_batches=None, loss=lambda loss: loss)
    step = [np.ones((2, scheduled.SIZE), "float32")] * 2
    state = pipeline.init(jax.random.key(5), step[0])
    state, _outputs = pipeline.step(state, step, num_micro_batches=2)
    with pytest.raises(engine.ScheduleError, match="with 3 micro-batches, stage 0 does its back"):
        pipeline.step(state, [*step, step[0]], num_micro_batches=3)


def printing_stages(seen):
    """Two stages; the first prints in its backward, and its weight gradient is looked at."""

    @jax.custom_vjp
    def shown(x):
        return x

    def forward(x):
        return x, None

    def backward(_residual, cotangent):
        jax.debug.callback(lambda value: seen.append(float(value)), jnp.sum(cotangent))
        return (cotangent,)

    shown.defvjp(forward, backward)

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

    pipeline = make(
        schedule,
        printing_stages(in_backward),
        loss=lambda loss: loss,
        optimizer=optax.sgd(0.1),
        gradient_map=lambda: show,
    )
    step = models.various_batches(np.random.default_rng(0), COUNT)
    pipeline.step(pipeline.init(jax.random.key(5), step[0]), step)
    jax.effects_barrier()
    assert len(in_backward) == COUNT
    assert len(in_map) == 3 * COUNT
