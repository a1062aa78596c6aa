"""Backwards in halves: what each program has, what is kept for the second, and orders of one's own.

`test_features` compares all ways to run them with a plain loop.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine.programs.stage_programs import ValueKind
from ipu_pipeline.engine.schedules.actions import Action, ActionKind
from tests.support import beside, models

F, B, INPUTS, WEIGHTS = ActionKind
COUNT = 4


def make(schedule="zero_bubble", stages=models.VARIOUS_STAGES, **options):
    options = {
        "loss": lambda loss, **_others: loss,
        "optimizer": models.showing_gradients(),
        "num_micro_batches": COUNT,
        **options,
    }
    return engine.Pipeline(stages, schedule=schedule, **options)


def make_steps(num_steps=2):
    rng = np.random.default_rng(0)
    return [models.various_batches(rng, COUNT) for _ in range(num_steps)]


SCALE = np.float32(0.9)


def traced(*arguments, **options):
    pipeline = make(*arguments, **options)
    pipeline.trace(make_steps()[0][0], SCALE)
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
        halved, whole = (traced(s, recompute=recompute) for s in ("zero_bubble", "interleaved"))
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


def weights_by_stage(num_stages, num_micro_batches, device_mapping, training):
    """All weight gradients last, those of earlier stages first, though their inputs come last."""
    assert training
    rows = []
    for ipu in range(max(device_mapping) + 1):
        own = [stage for stage in range(num_stages) if device_mapping[stage] == ipu]
        numbers = range(num_micro_batches)
        rows.append(
            [
                *(Action(F, stage, number) for number in numbers for stage in own),
                *(Action(INPUTS, stage, number) for number in numbers for stage in own[::-1]),
                *(Action(WEIGHTS, stage, number) for stage in own for number in numbers),
            ]
        )
    return rows


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


@pytest.mark.parametrize("mapping", [(0, 0, 1, 1), (0, 1, 0, 1), (1, 0, 0, 0)])
@pytest.mark.parametrize("schedule", [weights_by_stage, some_halved])
def test_orders_of_one_s_own(schedule, mapping):
    pipeline = make(schedule, device_mapping=mapping, donate=False)
    steps = make_steps()
    state = pipeline.init(jax.random.key(5), steps[0][0], SCALE)
    held = []

    def observe(_replica, _template, _chunk, slots):
        held.append(sum(slot is not None for of_chunk in slots.values() for slot in of_chunk))

    pipeline.prepare().observe(observe)
    expected = beside.copied(state)
    for step in steps:
        state, outputs = pipeline.step(state, step, SCALE)
        expected, wanted = beside.step_plainly(pipeline, expected, step, SCALE)
        models.assert_trees_close(outputs.losses, wanted.losses)
        models.assert_trees_close(state.variables, expected.variables)
        models.assert_trees_close(state.optimizer_state, expected.optimizer_state)
    assert max(held) > 0
    assert held[-1] == 0  # each value is gone after its last reader


def test_a_count_for_which_a_schedule_has_halves_after_one_without():
    def schedule(num_stages, num_micro_batches, device_mapping, training):
        function = engine.schedules.zero_bubble if num_micro_batches == 3 else engine.schedules.interleaved
        return function(num_stages, num_micro_batches, device_mapping, training)

    pipeline = make(schedule, num_micro_batches=None)
    (step,) = make_steps(1)
    state = pipeline.init(jax.random.key(5), step[0], SCALE)
    state, _outputs = pipeline.step(state, step, SCALE, num_micro_batches=COUNT)
    with pytest.raises(engine.ScheduleError, match="with 3 micro-batches, stage 0 does its back"):
        pipeline.step(state, step[:3], SCALE, num_micro_batches=3)


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


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_a_backward_s_effects_happen_once(schedule):
    seen = []
    pipeline = make(schedule, printing_stages(seen), loss=lambda loss: loss, optimizer=optax.sgd(0.1))
    (step,) = make_steps(1)
    state = pipeline.init(jax.random.key(5), step[0])
    pipeline.step(state, step)
    jax.effects_barrier()
    assert len(seen) == COUNT


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_prints_of_weight_gradients_happen_once(schedule):
    seen = []

    def show(gradient, _variable):
        jax.debug.callback(lambda value: seen.append(float(value)), jnp.sum(gradient))
        return gradient

    pipeline = make(
        schedule,
        printing_stages([]),
        loss=lambda loss: loss,
        optimizer=optax.sgd(0.1),
        gradient_map=lambda: show,
    )
    (step,) = make_steps(1)
    pipeline.step(pipeline.init(jax.random.key(5), step[0]), step)
    jax.effects_barrier()
    assert len(seen) == 3 * COUNT


def test_steps_are_the_same_whatever_the_schedule():
    """To the last bit, where each program adds up the same."""
    results = []
    for schedule in ("interleaved", "zero_bubble"):
        pipeline = make(schedule)
        (step,) = make_steps(1)
        state = pipeline.init(jax.random.key(5), step[0], SCALE)
        state, _outputs = pipeline.step(state, step, SCALE)
        results.append(dataclasses.asdict(state)["variables"])
    models.assert_trees_close(*results, 1e-6)
