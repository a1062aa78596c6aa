"""Replicas that take turns: equal to a plain loop over the micro-batches of all of them."""

import jax
import numpy as np
import optax
import pytest

from ipu_pipeline import engine, reports
from tests.engine.execution.test_replicas import (
    COUNT,
    check,
    make,
    make_steps,
    noisy_stages,
    together_stages,
)
from tests.support import beside, models


@pytest.mark.parametrize(
    ("num_stages", "num_replicas", "num_turns", "options"),
    [
        (2, 4, 2, {"reduction": "mean"}),
        (2, 3, 3, {}),
        (1, 2, 2, {}),
    ],
)
def test_turns_equal_a_plain_loop(num_stages, num_replicas, num_turns, options):
    pipeline = make(models.mlp_stages(num_stages), num_replicas, num_turns=num_turns, **options)
    state, outputs = check(pipeline, make_steps(num_replicas))
    assert np.shape(outputs.losses[0]) == (num_replicas,)
    for variable in state.variables.values():
        assert len(variable.devices()) == num_replicas // num_turns


@pytest.mark.parametrize(("num_replicas", "num_turns"), [(2, 2), (4, 2)])
def test_random_numbers_and_assigned_variables_are_those_of_one_turn(num_replicas, num_turns):
    check(make(noisy_stages(), num_replicas, num_turns=num_turns), make_steps(num_replicas))


def test_gradients_divided_by_all_weights():
    def stage(x, labels):
        number = labels.sum().astype("float32")
        return models.cross_entropy(models.dense("d", 10, x), labels) * number, number

    options = {"loss": lambda loss, _number: loss, "loss_weight": lambda _loss, number: number}
    (step, *_rest) = make_steps(4)
    states = []
    for num_turns in (1, 2):
        pipeline = make([stage], 4, num_turns=num_turns, **options)
        states.append(pipeline.step(pipeline.init(jax.random.key(3), step[0]), step)[0])
    models.assert_trees_close(states[1].variables, states[0].variables)


def test_means_in_sixteen_bits():
    """The sum of two of these gradients is infinite in float16."""

    def stage(x):
        weight = engine.get_variable("w", (), "float16", jax.nn.initializers.zeros)
        return (weight * x).astype("float32")

    pipeline = make([stage], 2, num_turns=2, num_micro_batches=1, optimizer=optax.sgd(1.0))
    step = [np.float16(40000)] * 2
    state, _outputs = pipeline.step(pipeline.init(jax.random.key(0), step[0]), step)
    assert state.variables["w"] == -40000


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_micro_batches_placed_once(num_replicas):
    options = {"num_turns": 2, "dispatch_plan": engine.Chunking(2)}
    pipeline, (step, *_rest) = make(models.mlp_stages(2), num_replicas, **options), make_steps(num_replicas)
    state = pipeline.init(jax.random.key(3), step[0])
    placed = pipeline.place_micro_batches(step)
    first, _outputs = pipeline.step(state, step)
    second, _outputs = pipeline.step(state, placed)
    models.assert_trees_close(second.variables, first.variables, 0.0)


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_data_that_ends_are_missed_before_anything_runs(num_replicas):
    pipeline, (step, *_rest) = (
        make(models.mlp_stages(2), num_replicas, num_turns=2),
        make_steps(num_replicas),
    )
    state = pipeline.init(jax.random.key(3), step[0])
    expected, _outputs = pipeline.step(state, step)
    with pytest.raises(engine.OutOfRangeError, match=f"after 3 of the {4 * num_replicas} micro-batches"):
        pipeline.step(state, step[:3])
    again, _outputs = pipeline.step(state, step)
    models.assert_trees_close(again.variables, expected.variables, 0.0)


def test_another_number_of_turns_later():
    pipeline, steps = make(models.mlp_stages(2), 4), make_steps(4)
    state = pipeline.init(jax.random.key(3), steps[0][0])
    expected = beside.copied(state)
    for num_turns, step in zip((1, 4, 2), steps, strict=True):
        pipeline.set_replicas(4, num_turns=num_turns)
        state, _outputs = pipeline.step(state, step)
        expected, _wanted = beside.step_plainly(pipeline, expected, step)
        models.assert_trees_close(state.variables, expected.variables)


@pytest.mark.parametrize("num_turns", [2, 4])
def test_a_fault_in_a_later_turn_is_found(num_turns):
    options = {"num_turns": num_turns, "check_nans": True, "optimizer": optax.sgd(0.1)}
    pipeline, (step, *_rest) = make(noisy_stages(), 4, **options), make_steps(4)
    state = pipeline.init(jax.random.key(3), step[0])
    expected, wanted = pipeline.step(state, step)
    x, labels = step[6]
    with pytest.raises(FloatingPointError, match=r"micro-batch 6 \(of replica 2\)"):
        pipeline.step(state, [*step[:6], (np.full_like(x, np.nan), labels), *step[7:]])
    with jax.disable_jit():
        again, outputs = pipeline.step(state, step)
    models.assert_trees_close(again.variables, expected.variables)
    models.assert_trees_close(outputs.losses, wanted.losses)


def test_a_report_has_what_ran(tmp_path):
    pipeline, (step, *_rest) = make(models.mlp_stages(2), 4, num_turns=2), make_steps(4)
    state = pipeline.init(jax.random.key(3), step[0])
    state, _outputs = pipeline.step(state, step)
    with reports.capture(tmp_path) as captured:
        pipeline.step(state, step)
    (one,) = captured.profile.pipelines
    assert (one.num_replicas, one.num_micro_batches) == (2, 2 * COUNT)
    forwards = [event for event in captured.profile.events if event.kind == "forward"]
    whole = make(models.mlp_stages(2), 4)
    whole.trace(step[0])
    (memory, *_others), (one_turn, *_rest) = pipeline.plan_ipu_memory(), whole.plan_ipu_memory()
    assert memory.num_accumulator_bytes == 2 * one_turn.num_accumulator_bytes
    assert len({(event.stage, event.micro_batch) for event in forwards}) == len(forwards) == 8 * COUNT


def test_what_is_refused():
    with pytest.raises(ValueError, match="num_turns must be a divisor of num_replicas, 4, .*; got 3"):
        make(models.mlp_stages(2), 4, num_turns=3)
    with pytest.raises(ValueError, match="num_turns must be an integer of at least 1"):
        make(models.mlp_stages(2), 4, num_turns=0)
    with pytest.raises(ValueError, match="joins_assigned must be True where replicas take turns"):
        make(models.mlp_stages(2), 4, num_turns=2, joins_assigned=False)
    pipeline = make(models.mlp_stages(2), 4, joins_assigned=False)
    with pytest.raises(ValueError, match="joins_assigned must be True where replicas take turns"):
        pipeline.set_replicas(4, num_turns=2)
    pipeline, (step, *_rest) = make(together_stages(), 2, num_turns=2), make_steps(2)
    with pytest.raises(ValueError, match=r"stage 0 \(first\).*devices for 1 of 2 replicas \(num_turns\)"):
        pipeline.init(jax.random.key(3), step[0])


def test_micro_batches_of_one_shape_only():
    pipeline, (step, *_rest) = make(models.mlp_stages(2), 2, num_turns=2), make_steps(2)
    state = pipeline.init(jax.random.key(3), step[0])
    x, labels = step[3]
    with pytest.raises(ValueError, match="take turns.*pad them"):
        pipeline.step(state, [*step[:3], (x[:-1], labels[:-1]), *step[4:]])


def test_nothing_is_guessed():
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    pipeline = make(models.mlp_stages(2), 2, num_turns=2, post_validation=True, optimizer=clipped)
    (step, *_rest) = make_steps(2)
    with pytest.warns(UserWarning, match="post_validation has no effect: replicas take turns"):
        pipeline.init(jax.random.key(3), step[0])
