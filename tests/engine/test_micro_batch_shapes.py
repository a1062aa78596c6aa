"""Micro-batches of several shapes in one pipeline, beside what tests/engine/test_features.py compares."""

import dataclasses
import gc
import itertools
import logging
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine, reports
from ipu_pipeline.data.datasets import Buckets
from ipu_pipeline.engine import schedules, watching
from ipu_pipeline.engine.inspect import LiveBytes
from ipu_pipeline.engine.planning import plan_memory, with_dispatch_plan
from tests.support import beside, models
from tests.support.compilations import compilations
from tests.support.watchers import Watcher

NUM_TOKENS, WIDTH = 11, 6


def mix(p, ids, mask):
    x = p["table"][ids]
    return x + jnp.cumsum(jnp.tanh(x @ p["w"]), axis=1), ids, mask


def predict(p, x, ids, mask):
    losses = optax.softmax_cross_entropy_with_integer_labels((x @ p["w"])[:, :-1], ids[:, 1:])
    return jnp.sum(losses * mask[:, 1:])


STAGES = [mix, predict]


def make_parameters():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape, scale=0.3).astype("float32")

    table, w = normal(NUM_TOKENS, WIDTH), normal(WIDTH, WIDTH)
    return [{"table": table, "w": w}, {"w": normal(WIDTH, NUM_TOKENS)}]


def make(count=4, stages=STAGES, **options):
    training = {"loss": lambda loss, *_others: loss, "optimizer": optax.adam(1e-2)}
    given = {"parameters": make_parameters(), **training, **options}
    return engine.Pipeline(stages, num_micro_batches=count, **given)


def texts(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(0, NUM_TOKENS, (2, n)).astype("int32"), np.ones((2, n), "float32")) for n in lengths
    ]


def start(pipeline, micro_batch=None):
    return pipeline.init(jax.random.key(0), texts(4)[0] if micro_batch is None else micro_batch)


def taker(pipeline, steps):
    """Takes the micro-batches of several steps for `Pipeline.run`."""
    elements = itertools.chain.from_iterable(steps)

    def take(wanted):
        leaves = map(jax.tree.leaves, itertools.islice(elements, wanted))
        return list(map(pipeline.place_element, leaves))

    return take


def test_texts_in_buckets_with_a_token_weighted_loss():
    """Padding, its mask and buckets change nothing: the gradients are those of the texts as they are."""
    rng = np.random.default_rng(1)
    examples = [rng.integers(0, NUM_TOKENS, n) for n in (3, 5, 2, 7)]

    def whole(parameters):
        whole_texts = [(jnp.asarray(ids)[None], jnp.ones((1, len(ids)))) for ids in examples]
        losses = [predict(parameters[1], *mix(parameters[0], *text)) for text in whole_texts]
        return sum(losses) / sum(len(ids) - 1 for ids in examples)

    def predict_all(p, x, ids, mask):
        return predict(p, x, ids, mask), jnp.sum(mask[:, 1:])

    parameters = jax.tree.map(jnp.asarray, make_parameters())
    expected = jax.jit(jax.grad(whole))(parameters)
    steps = list(Buckets(examples, [4, 8], 2))
    assert [mask.shape for _ids, mask in steps] == [(2, 4), (2, 8)]
    weighted = {"loss_weight": lambda _total, number: number}
    pipeline = make(2, [mix, predict_all], optimizer=optax.sgd(0.1), **weighted)
    state, _outputs = pipeline.step(start(pipeline, steps[0]), steps)
    after = jax.tree.map(lambda value, gradient: value - 0.1 * gradient, parameters, expected)
    models.assert_trees_close(pipeline.parameters(state), after, 1e-5)


def test_named_shapes_are_compiled_with_the_first():
    pipeline, results = make(2, shapes=texts(5)), []
    state = start(pipeline)
    for _time in range(2):
        pipeline.compile(state)
        with compilations() as names:
            results.append(pipeline.step(state, texts(4, 5))[0].variables)
        assert not [name for name in names if "stage" in name]
        pipeline.set_recomputation(engine.Recomputation.AUTO)
    models.assert_trees_close(*results)


def test_a_wrong_shape_is_told_before_anything_runs():
    with pytest.raises(ValueError, match="shapes must be a list of micro-batches.*got 3 of them"):
        make(max_shapes=2, shapes=texts(4, 5, 6))
    with pytest.raises(ValueError, match="max_shapes must be an integer of at least 1; got 0"):
        make(max_shapes=0)
    wrong = make(shapes=[texts(5)[0][0]])
    with pytest.raises(ValueError, match=r"shapes\[0\] must be a tuple of 2 arrays"):
        start(wrong, texts(4)[0])


def with_positions(p, ids, mask):
    x, *others = mix(p, ids, mask)
    return x + engine.get_variable("positions", ids.shape[1:])[:, None], *others


def summed(p, x, ids, mask):
    return predict(p, x, ids, mask), x


def by_length(p, x, ids, mask):
    loss = predict(p, x, ids, mask)
    return (loss, loss) if x.shape[1] == 5 else loss


@pytest.mark.parametrize(
    ("stages", "options", "message"),
    [
        ([with_positions, predict], {}, r"variable positions is float32\[5\], in place of float32\[4\]"),
        (
            [mix, summed],
            {"sum_collected": True},
            r"summed over the micro-batches is float32\[\], float32\[2, 5, 6\]",
        ),
        ([mix, by_length], {}, "the last stage returns a tuple of 2 arrays, in place of an array"),
        (
            [mix, summed],
            {"optimizer": lambda _loss, x: optax.sgd(0.1 * jnp.mean(x))},
            "the optimizer's update reads other outputs",
        ),
    ],
)
def test_what_must_not_depend_on_shapes(stages, options, message):
    pipeline = make(2, stages, **options)
    state = start(pipeline)
    with pytest.raises(ValueError, match=message):
        pipeline.step(state, texts(4, 5))


def test_an_error_in_a_new_shape_s_trace_says_so_and_loses_nothing(caplog):
    """Where there is none, compiling says which shapes."""

    def strict(p, ids, mask):
        assert ids.shape[1] < 6, "too long"
        return mix(p, ids, mask)

    pipeline = make(stages=[strict, predict], donate=True)
    state = start(pipeline)
    with pytest.raises(AssertionError, match="too long") as caught:
        pipeline.step(state, texts(4, 4, 7, 4))
    assert "other shapes than the first one, int32[2, 4], float32[2, 4]" in caught.value.__notes__[-1]
    with caplog.at_level(logging.INFO, "ipu_pipeline"):
        state, _outputs = pipeline.step(state, texts(4, 5, 4, 4))
    assert state.update_count == 1
    told = "programs for micro-batches of int32[2, 5], float32[2, 5] (2 of at most 8 shapes) in"
    assert told in caplog.text


def test_an_interrupt_while_another_shape_compiles(monkeypatch):
    pipeline, step = make(), texts(4, 4, 6, 4)
    state, _outputs = pipeline.step(start(pipeline, step[0]), texts(4, 4, 4, 4))

    def interrupted(_lowered, *_arguments, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipeline.step(state, step)
    after, _outputs = pipeline.step(state, step)
    expected = beside.step_plainly(pipeline, beside.copied(state), step)[0]
    models.assert_trees_close(after.variables, expected.variables)


def test_replicas_take_the_same_shapes_at_a_time():
    pipeline = make(2, num_replicas=2)
    state = start(pipeline)
    with pytest.raises(ValueError, match="Micro-batches 2 to 3 of a step go to the 2 replicas.*in_a_row=2"):
        pipeline.step(state, texts(4, 4, 5, 4))
    phases = engine.ExecutionPhases(of_levels=(0, 1))
    phased = make(2, num_replicas=2, schedule="sequential", execution_phases=phases)
    state = start(phased)
    with pytest.raises(ValueError, match="Micro-batches 0 to 1 of a step go to the 2 replicas"):
        phased.step(state, texts(4, 5, 5, 4))


def test_replicas_join_once_what_is_cut():
    """What is left of a step goes on behind what was in flight; only then replicas join."""
    pipeline = make(num_replicas=2, dispatch_plan=engine.Chunking(2))
    beside.train(pipeline, [texts(4, 4, 4, 4, 5, 5, 4, 4), texts(5, 5, 4, 4, 4, 4, 5, 5)])


def test_groups_have_the_same_shapes():
    pipeline = make(2, num_serialized=2, schedule="sequential", device_mapping=[0, 0])
    state = start(pipeline)
    with pytest.raises(ValueError, match="num_serialized is 2: the micro-batches from 2 to 3"):
        pipeline.step(state, texts(4, 4, 4, 5))


@pytest.mark.parametrize("options", [{"dispatch_plan": engine.Chunking(2)}, {"device_mapping": [0, 0]}])
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
    state = start(pipeline)
    evaluator = make(None, loss=None, optimizer=None)
    batches = texts(4, 4, 4)
    smaller = (batches[2][0][:1], batches[2][1][:1])
    _state, outputs = evaluator.step(state, [*batches[:2], smaller], num_micro_batches=3)
    found = jax.device_get(outputs.outputs)
    _state, alone = evaluator.step(state, [smaller], num_micro_batches=1)
    assert found[2] == jax.device_get(alone.outputs[0])
    _state, again = evaluator.step(state, batches[:1], num_micro_batches=1)  # fewer than there are stages
    assert jax.device_get(again.outputs[0]) == found[0]


def test_questions_about_one_of_the_shapes():
    pipeline = make()
    state = start(pipeline)
    longer = pipeline.for_shapes(texts(8)[0])
    assert pipeline.for_shapes(texts(4)[0]) is pipeline
    assert pipeline.for_shapes(texts(8)[0]) is longer
    short, long = ([plan.num_live_bytes for plan in plan_memory(own)] for own in (pipeline, longer))
    assert [2 * own for own in short] == long
    with pytest.raises(ValueError, match="Micro-batch 0 must be a tuple of 2 arrays"):
        pipeline.trace(texts(8)[0][0])
    pipeline.trace(texts(8)[0])
    _state, outputs = pipeline.step(state, texts(8, 4, 8, 4))
    assert len(outputs.losses) == 4


def test_other_devices_and_plans_have_the_same_shapes():
    pipeline, step = make(), texts(4, 6, 6, 4)
    state = start(pipeline, step[0])
    expected, _outputs = pipeline.step(state, step)
    after, _outputs = with_dispatch_plan(pipeline, engine.Chunking(2)).step(state, step)
    models.assert_trees_close(after.variables, expected.variables)
    pipeline.prepare(jax.devices()[3:])
    after, _outputs = pipeline.step(dataclasses.replace(state), step)
    models.assert_trees_close(jax.device_get(after.variables), jax.device_get(expected.variables))


def test_an_order_that_is_searched_for_all_shapes():
    beside.train(make(schedule="searched", shapes=texts(5)), [texts(4, 5, 5, 4)])


def test_a_schedule_for_one_number_of_micro_batches(tmp_path):
    """A step that has begun with alike micro-batches goes on in the order of the same rows."""
    schedules.write_csv(make(schedule="interleaved").timetable(4).rows, tmp_path / "rows.csv")
    beside.train(make(schedule=str(tmp_path / "rows.csv")), [texts(4, 4, 5, 4)])


def test_shapes_that_change_within_a_chunk_of_execution_phases():
    """It went on trying to take a whole chunk, for ever."""
    phases = engine.ExecutionPhases(of_levels=(0, 1))
    pipeline = make(schedule="sequential", execution_phases=phases, dispatch_plan=engine.Chunking(2))
    beside.train(pipeline, [texts(4, 4, 5, 5), texts(4, 5, 5, 4)])


@pytest.mark.parametrize("first", [3, pytest.param(60, marks=pytest.mark.thorough)])
def test_blocks_have_room_for_their_shapes(first):
    """On one device: an update of long ones is done in parts, and several of short ones at once."""
    steps = [texts(60, 60), texts(60, 3), *[texts(3, 3)] * 3, texts(60, 60), texts(3, 60)]
    pipeline = make(2, device_mapping=[0, 0], block_bytes=1500)
    state = start(pipeline, texts(first)[0])
    expected, take, told = beside.copied(state), taker(pipeline, steps), []
    every = pipeline.updated_every(None)
    most = pipeline.prepare().num_fetched(len(steps) * every, every)

    def bounded(wanted):
        assert wanted <= most  # an infeed has no more ready, so it would never give them
        return take(wanted)

    state = pipeline.run(pipeline.place(state), bounded, [], lambda _told, number: told.append(number), 7)
    assert max(told) == (3 if first == 3 else 1)
    for step in steps:
        expected, _outputs = beside.step_plainly(pipeline, expected, step)
    models.assert_trees_close(state.variables, expected.variables)


def test_updates_before_one_with_a_wrong_shape_are_done():
    done, message = [], r"max_shapes is 2, .*int32\[2, 6\].* number 3.*larger max_shapes"
    for mapping in ([0, 1], [0, 0]):
        pipeline = make(2, device_mapping=mapping, max_shapes=2)
        state = pipeline.place(start(pipeline))
        take = taker(pipeline, [texts(4, 4), texts(5, 5), texts(4, 4), texts(4, 6)])
        with pytest.raises(ValueError, match=message):
            pipeline.run(state, take, [], lambda _told, number: done.append(number), 4)
    assert sum(done) == 2 * 3


def test_threads_that_meet_shapes_at_the_same_time():
    pipeline, lengths = make(2), (5, 6)
    state = start(pipeline)
    barrier = threading.Barrier(len(lengths))

    def run(length):
        barrier.wait()
        return pipeline.step(state, texts(length, 4))[0].variables

    with ThreadPoolExecutor(len(lengths)) as threads:
        found = list(threads.map(run, lengths))
    for length, variables in zip(lengths, found, strict=True):
        expected, _outputs = beside.step_plainly(pipeline, beside.copied(state), texts(length, 4))
        models.assert_trees_close(variables, expected.variables)


def test_what_places_micro_batches_does_not_hold_the_pipeline():
    """An infeed holds it for long; the pipeline's program may be gone."""
    pipeline = make(dispatch_plan=engine.Chunking(2))
    pipeline.trace(texts(4)[0])
    place, known = pipeline.place_element, weakref.ref(pipeline)
    del pipeline
    gc.collect()
    assert known() is None
    del place


def test_named_shapes_where_the_optimizer_s_state_depends_on_outputs():
    def optimizer(loss):
        return optax.GradientTransformation(
            lambda _parameters: loss * 1.0,
            lambda gradients, first, _parameters: (jax.tree.map(lambda g: -g / first, gradients), first),
        )

    pipeline = make(2, shapes=texts(5), optimizer=optimizer)
    state, outputs = pipeline.step(start(pipeline), texts(5, 4))
    assert jax.tree.leaves(state.optimizer_state) == [jax.device_get(outputs.losses)[0]]


def test_other_shapes_are_traced_with_the_first_one_s_settings():
    pipeline = make()
    with jax.default_matmul_precision("float32"), jax.numpy_rank_promotion("raise"):
        pipeline.trace(texts(4)[0])

    def find_precisions(one):
        equations = [equation for stage in one.traced.stages for equation in stage.flat.equations]
        return [equation.params["precision"] for equation in equations if "precision" in equation.params]

    found = find_precisions(pipeline.for_shapes(texts(5)[0]))
    assert found == find_precisions(pipeline) == [(jax.lax.Precision.HIGHEST,) * 2] * 2


def test_shapes_are_asked_of_with_the_first_one_s_structure_and_dtypes():
    pipeline = make()
    pipeline.trace(texts(4)[0])
    ids, mask = texts(5)[0]
    with pytest.raises(ValueError, match=r"The micro-batch must have the dtype.*float32\[2, 4\]; got"):
        pipeline.for_shapes((ids, mask.astype("int32")))


def test_reports_of_several_shapes(tmp_path):
    """On one device the runner for other shapes was unknown to the recording, which was an error."""
    pipeline = make(2, device_mapping=[0, 0])
    state = start(pipeline)
    with reports.capture(tmp_path) as captured:
        for step in (texts(4, 4), texts(4, 5)):
            state, _outputs = pipeline.step(state, step)
    steps = [event.step for event in captured.profile.events if event.kind == "forward"]
    # On a busy machine, JAX's profiler misses a program now and then.
    assert sorted(steps) == [0] * 4 + [1] * 4 or captured.profile.num_lost > 0


def test_live_bytes_of_several_shapes():
    """In steps of one of the shapes, and of several, which run otherwise from then on."""
    pipeline = make(dispatch_plan=engine.Chunking())
    state = start(pipeline)
    live_bytes = LiveBytes(pipeline.prepare())
    for step in (texts(8, 8, 8, 8), texts(4, 8, 4, 8), texts(16, 16, 16, 16)):
        pipeline.step(state, step)
        of_shapes = pipeline.for_shapes(step[-1])
        planned = [stage.num_live_bytes for stage in plan_memory(of_shapes)]
        assert live_bytes.peaks == planned


def test_a_step_goes_on_while_its_micro_batches_are_made():
    """Programs start as soon as their micro-batch is there, and a watcher hears of all of them."""
    pipeline, launches = make(dispatch_plan=engine.Chunking()), []

    class Noting(Watcher):
        def run(self, launch, function, arguments):
            launches.append(launch.step)
            return function(*arguments)

    def make_step():
        for micro_batch in texts(4, 4, 5, 4):
            started.append(len(launches))
            yield micro_batch

    state = start(pipeline)
    with watching.watching(Noting()):
        for _step in range(2):
            started = []
            state, _outputs = pipeline.step(state, make_step())
            assert started == sorted(set(started))
    assert launches.count(0) == launches.count(1)
