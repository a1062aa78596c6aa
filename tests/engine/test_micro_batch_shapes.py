"""Micro-batches of several shapes in one pipeline, beside what tests/engine/test_features.py compares."""

import dataclasses
import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from ipu_pipeline.data.buckets import Buckets
from tests.support import beside, models

NUM_TOKENS, WIDTH = 11, 6


def embed(p, ids, mask):
    return p["table"][ids], ids, mask


def mix(p, x, ids, mask):
    return x + jnp.cumsum(jnp.tanh(x @ p["w"]), axis=1), ids, mask


def predict(p, x, ids, mask):
    losses = optax.softmax_cross_entropy_with_integer_labels((x @ p["w"])[:, :-1], ids[:, 1:])
    return jnp.sum(losses * mask[:, 1:])


STAGES = [embed, mix, predict]


def make_parameters():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape, scale=0.3).astype("float32")

    return [
        {"table": normal(NUM_TOKENS, WIDTH)},
        {"w": normal(WIDTH, WIDTH)},
        {"w": normal(WIDTH, NUM_TOKENS)},
    ]


def make(count=4, stages=STAGES, **options):
    options = {
        "parameters": make_parameters(),
        "loss": lambda loss: loss,
        "optimizer": optax.adam(1e-2),
    } | options
    return engine.Pipeline(stages, num_micro_batches=count, **options)


def texts(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(0, NUM_TOKENS, (2, n)).astype("int32"), np.ones((2, n), "float32")) for n in lengths
    ]


def start(pipeline, micro_batch):
    return pipeline.init(jax.random.key(0), micro_batch)


def losses_of(outputs):
    return np.asarray(jax.device_get(outputs.losses))


def test_texts_in_buckets_with_a_token_weighted_loss():
    """Padding, its mask and buckets change nothing: the gradients are those of the texts as they are."""
    rng = np.random.default_rng(1)
    examples = [rng.integers(0, NUM_TOKENS, n) for n in (3, 5, 2, 7, 4, 8, 6, 3)]

    def whole(parameters, ids):
        a = mix(parameters[1], *embed(parameters[0], ids[None], jnp.ones((1, len(ids)))))
        return predict(parameters[2], *a)

    parameters = jax.tree.map(jnp.asarray, make_parameters())
    gradients = [jax.grad(whole)(parameters, jnp.asarray(ids)) for ids in examples]
    num_tokens = sum(len(ids) - 1 for ids in examples)
    expected = jax.tree.map(lambda *parts: sum(parts) / num_tokens, *gradients)
    steps = list(Buckets(examples, [4, 8], 2))
    assert [mask.shape for _ids, mask in steps] == [(2, 4), (2, 8), (2, 8), (2, 4)]

    def predict_all(p, x, ids, mask):
        return predict(p, x, ids, mask), jnp.sum(mask[:, 1:])

    for mapping in ([0, 1, 2], [0, 0, 0]):
        pipeline = make(
            stages=[embed, mix, predict_all],
            optimizer=optax.sgd(0.1),
            loss=lambda total, _number: total,
            loss_weight=lambda _total, number: number,
            device_mapping=mapping,
        )
        state, _outputs = pipeline.step(start(pipeline, steps[0]), steps)
        after = jax.tree.map(lambda value, gradient: value - 0.1 * gradient, parameters, expected)
        models.assert_trees_close(pipeline.parameters(state), after, 1e-5)


@pytest.mark.parametrize("mapping", [[0, 1, 2], [0, 0, 0]])
def test_too_many_shapes(mapping):
    pipeline = make(max_shapes=2, device_mapping=mapping)
    state = start(pipeline, texts(4)[0])
    state, _outputs = pipeline.step(state, texts(4, 5, 4, 5))
    with pytest.raises(ValueError, match=r"max_shapes is 2, .*int32\[2, 6\].* number 3.*larger max_shapes"):
        pipeline.step(state, texts(4, 5, 6, 4))
    expected = beside.step_plainly(pipeline, beside.copied(state), texts(5, 5, 4, 4))[0]
    state, _outputs = pipeline.step(state, texts(5, 5, 4, 4))  # nothing is lost
    models.assert_trees_close(state.variables, expected.variables)


def test_shapes_that_change_within_a_chunk_at_first_and_later():
    pipeline = make(dispatch_plan=engine.Chunking(2), schedule="interleaved")
    steps = [texts(*lengths) for lengths in [(4, 5, 5, 4), (5, 5, 5, 5), (5, 5, 4, 6)]]
    beside.train(pipeline, [texts(4, 4, 4, 4), texts(5, 5, 4, 4), *steps])


@pytest.mark.parametrize("mapping", [[0, 1, 2], [0, 0, 0]])
def test_named_shapes_are_compiled_with_the_first(mapping):
    pipeline = make(shapes=texts(5, 6), device_mapping=mapping)
    state = start(pipeline, texts(4)[0])
    assert [key[0] for key in pipeline._others] == [(2, 5), (2, 6)]
    pipeline.compile(state)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        listener := lambda event, _seconds, fun_name="", **_others: compiled.append((event, fun_name))
    )
    try:
        pipeline.step(state, texts(4, 5, 6, 4))
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    names = [name for event, name in compiled if event.endswith("backend_compile_duration")]
    # On one device an update whose shapes differ is done in parts, whose programs are others.
    assert not [name for name in names if "stage" in name]


def test_a_wrong_shape_is_told_before_anything_runs():
    with pytest.raises(ValueError, match="shapes must be a list of micro-batches.*got 3 of them"):
        make(max_shapes=2, shapes=texts(4, 5, 6))
    with pytest.raises(ValueError, match="max_shapes must be an integer of at least 1; got 0"):
        make(max_shapes=0)
    wrong = make(shapes=[texts(5)[0][0]])
    with pytest.raises(ValueError, match=r"shapes\[0\] must be a tuple of 2 arrays"):
        start(wrong, texts(4)[0])


def test_compiling_says_which_shapes(caplog):
    pipeline = make()
    state = start(pipeline, texts(4)[0])
    with caplog.at_level(logging.INFO, "ipu_pipeline"):
        pipeline.step(state, texts(4, 4, 4, 9))
    assert (
        "programs for micro-batches of int32[2, 9], float32[2, 9] (2 of at most 8 shapes) in" in caplog.text
    )


def test_what_must_not_depend_on_shapes():
    def with_positions(x):
        return x + engine.get_variable("positions", x.shape[1:])

    def last(x):
        return jnp.sum(x**2)

    rng = np.random.default_rng(0)
    batches = [rng.normal(size=(2, n)).astype("float32") for n in (4, 5)]
    pipeline = make(2, [with_positions, last], parameters=None)
    state = start(pipeline, batches[0])
    with pytest.raises(ValueError, match=r"variable positions is float32\[5\], in place of float32\[4\]"):
        pipeline.step(state, batches)

    def summed(p, x, ids, mask):
        return predict(p, x, ids, mask), x

    of_sums = make(2, [embed, mix, summed], loss=lambda loss, _x: loss, sum_collected=True)
    state = start(of_sums, texts(4)[0])
    with pytest.raises(
        ValueError, match=r"summed over the micro-batches is float32\[\], float32\[2, 5, 6\]"
    ):
        of_sums.step(state, texts(4, 5))

    def by_length(p, x, ids, mask):
        loss = predict(p, x, ids, mask)
        return (loss, loss) if x.shape[1] == 5 else loss

    other = make(2, [embed, mix, by_length], loss=lambda loss, *_others: loss)
    state = start(other, texts(4)[0])
    with pytest.raises(
        ValueError, match="the last stage returns a tuple of 2 arrays, in place of an array"
    ):
        other.step(state, texts(4, 5))

    reading = make(
        2,
        [embed, mix, summed],
        loss=lambda loss, _x: loss,
        optimizer=lambda _loss, x: optax.sgd(0.1 * jnp.mean(x)),
    )
    state = start(reading, texts(4)[0])
    with pytest.raises(ValueError, match="the optimizer's update reads other outputs"):
        reading.step(state, texts(4, 5))


def test_an_error_in_a_new_shape_s_trace_says_so_and_loses_nothing():
    def strict(p, x, ids, mask):
        assert x.shape[1] < 6, "too long"
        return mix(p, x, ids, mask)

    pipeline = make(stages=[embed, strict, predict], donate=True)
    state = start(pipeline, texts(4)[0])
    with pytest.raises(AssertionError, match="too long") as caught:
        pipeline.step(state, texts(4, 4, 7, 4))
    assert "other shapes than the first one, int32[2, 4], float32[2, 4]" in caught.value.__notes__[-1]
    state, _outputs = pipeline.step(state, texts(4, 5, 4, 4))
    assert state.update_count == 1


def test_replicas_take_the_same_shapes_at_a_time():
    pipeline = make(2, num_replicas=2)
    state = start(pipeline, texts(4)[0])
    with pytest.raises(ValueError, match="Micro-batches 2 to 3 of a step go to the 2 replicas.*in_a_row=2"):
        pipeline.step(state, texts(4, 4, 5, 4))
    phased = make(
        2,
        num_replicas=2,
        schedule="sequential",
        execution_phases=engine.ExecutionPhases(of_levels=(0, 0, 1)),
    )
    state = start(phased, texts(4)[0])
    with pytest.raises(ValueError, match="Micro-batches 0 to 1 of a step go to the 2 replicas"):
        phased.step(state, texts(4, 5, 5, 4))


def test_groups_have_the_same_shapes():
    pipeline = make(2, num_serialized=2, schedule="sequential", device_mapping=[0, 0, 0])
    state = start(pipeline, texts(4)[0])
    with pytest.raises(ValueError, match="num_serialized is 2: the micro-batches from 2 to 3"):
        pipeline.step(state, texts(4, 4, 4, 5))


@pytest.mark.parametrize(
    "options", [{}, {"dispatch_plan": engine.Chunking(2)}, {"device_mapping": [0, 0, 0]}]
)
def test_placed_micro_batches(options):
    pipeline, step = make(**options), texts(4, 5, 5, 4)
    state = start(pipeline, step[0])
    expected, _outputs = pipeline.step(state, step)
    for _time in range(2):
        after, _outputs = pipeline.step(state, pipeline.place_micro_batches(step))
        models.assert_trees_close(after.variables, expected.variables, 0.0)
    alike = texts(5, 5, 5, 5)
    fed, _outputs = pipeline.step(state, alike)
    placed, _outputs = pipeline.step(state, pipeline.place_micro_batches(alike))
    models.assert_trees_close(placed.variables, fed.variables, 1e-6)


def test_a_last_smaller_batch_in_evaluation():
    pipeline = make()
    state = start(pipeline, texts(4)[0])
    evaluator = make(None, loss=None, optimizer=None)
    batches = texts(4, 4, 4)
    smaller = (batches[2][0][:1], batches[2][1][:1])
    _state, outputs = evaluator.step(state, [*batches[:2], smaller], num_micro_batches=3)
    found = jax.device_get(outputs.outputs)
    _state, alone = evaluator.step(state, [smaller], num_micro_batches=1)
    assert found[2] == jax.device_get(alone.outputs[0])
    _state, again = evaluator.step(state, batches[:1], num_micro_batches=1)  # fewer than there are stages
    assert jax.device_get(again.outputs[0]) == found[0]


def test_guessed_updates_are_done_again_with_the_shapes_that_they_had():
    def clipped(bound):
        return optax.chain(optax.clip_by_global_norm(bound), optax.sgd(0.1))

    found = []
    for guesses in (False, True):
        pipeline = make(optimizer=clipped(2.0), post_validation=guesses, schedule="interleaved")
        steps = [
            texts(*lengths, seed=n) for n, lengths in enumerate([(4, 5, 4, 5), (5, 4, 4, 4), (3, 3, 5, 4)])
        ]
        state = pipeline.place(start(pipeline, steps[0][0]))
        elements = itertools.chain.from_iterable(steps)

        def take(wanted, pipeline=pipeline, elements=elements):
            leaves = [pipeline.check_element(one, 0) for one in itertools.islice(elements, wanted)]
            return list(map(pipeline.place_element, leaves))

        found.append(pipeline.run(state, take, [], lambda *_told: None, 3))
    models.assert_trees_close(found[1].variables, found[0].variables, 0.0)


def test_questions_about_one_of_the_shapes():
    pipeline = make()
    state = start(pipeline, texts(4)[0])
    longer = pipeline.for_shapes(texts(8)[0])
    assert pipeline.for_shapes(texts(4)[0]) is pipeline
    assert pipeline.for_shapes(texts(8)[0]) is longer
    assert [2 * own.num_live_bytes for own in pipeline.plan_memory()] == [
        own.num_live_bytes for own in longer.plan_memory()
    ]
    with pytest.raises(ValueError, match="Micro-batch 0 must be a tuple of 2 arrays"):
        pipeline.trace(texts(8)[0][0])
    pipeline.trace(texts(8)[0])
    _state, outputs = pipeline.step(state, texts(8, 4, 8, 4))
    assert len(losses_of(outputs)) == 4


def test_an_interrupt_while_another_shape_compiles(monkeypatch):
    pipeline, step = make(), texts(4, 4, 6, 4)
    state = start(pipeline, step[0])
    expected = beside.step_plainly(pipeline, beside.copied(state), step)[0]
    runner_kind = type(pipeline.prepare())
    compiled = runner_kind.compile

    def interrupted(self, *arguments):
        if self.shapes:
            raise KeyboardInterrupt
        compiled(self, *arguments)

    monkeypatch.setattr(runner_kind, "compile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipeline.step(state, step)
    monkeypatch.undo()
    after, _outputs = pipeline.step(state, step)
    models.assert_trees_close(after.variables, expected.variables)


def test_other_recomputation_devices_and_plans_have_the_same_shapes():
    pipeline, step = make(), texts(4, 6, 6, 4)
    state = start(pipeline, step[0])
    expected, _outputs = pipeline.step(state, step)
    for other in (
        pipeline.with_recomputation(engine.Recomputation.AUTO),
        pipeline.with_dispatch_plan(engine.Chunking(2)),
    ):
        after, _outputs = other.step(state, step)
        models.assert_trees_close(after.variables, expected.variables)
    pipeline.set_recomputation(engine.Recomputation.AUTO)
    after, _outputs = pipeline.step(state, step)
    models.assert_trees_close(after.variables, expected.variables)
    pipeline.prepare(jax.devices()[3:])
    after, _outputs = pipeline.step(dataclasses.replace(state), step)
    models.assert_trees_close(jax.device_get(after.variables), jax.device_get(expected.variables))
