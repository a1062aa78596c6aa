"""Chunks of micro-batches: the numbers stay the same; what is chosen, and why."""

import dataclasses
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import engine
from ipu_pipeline.engine import measuring, reference
from ipu_pipeline.engine.execution.runner import ColumnRunner
from ipu_pipeline.engine.execution.steps import Compute
from ipu_pipeline.engine.inspect import LiveBytes
from ipu_pipeline.engine.planning import choosing
from ipu_pipeline.errors import OutOfRangeError
from tests.support import front, models
from tests.support.compilations import compilations

COUNT, NUM_UPDATES = 8, 3
TOLERANCES = {"float32": 1e-5, "float64": 1e-12}
ONE_BY_ONE = engine.Chunking()
CHUNKS = [engine.Chunking(2), engine.Chunking(4)]


def name_of(value):
    if isinstance(value, engine.Chunking):
        return f"{value.chunk_size}"
    return None


def make(plan, **options):
    options = {
        "num_micro_batches": COUNT,
        "loss": lambda loss, **_others: loss,
        "optimizer": models.showing_gradients(),
        "dispatch_plan": plan,
        **options,
    }
    return engine.Pipeline(models.VARIOUS_STAGES, **options)


def make_steps(dtype="float32", count=COUNT, num_steps=NUM_UPDATES):
    rng = np.random.default_rng(count)
    return [models.various_batches(rng, count, dtype=dtype) for _ in range(num_steps)]


def make_scale(dtype="float32"):
    return np.asarray(0.9, dtype)


@functools.cache
def expected(reduction="sum", dtype="float32", trains=True):
    """State and outputs of a plain loop after each step, and the state before them."""
    optimizer = models.showing_gradients() if trains else None
    options = {} if trains else {"loss": None, "optimizer": None}
    with jax.enable_x64(dtype == "float64"):
        steps = make_steps(dtype)
        pipeline = make(None, device_mapping=[0] * 4, **options)
        start = pipeline.init(jax.random.key(5), steps[0][0], make_scale(dtype))
        start = models.on_one_device(dataclasses.replace(start, optimizer_state=None))
        results, state = [], start
        for step in steps:
            state, outputs = reference.step(
                pipeline.traced,
                state,
                step,
                make_scale(dtype),
                optimizer=optimizer,
                reduction=reduction,
            )
            results.append((state, outputs.losses if trains else [], outputs.outputs))
    return results


def check(pipeline, reduction="sum", dtype="float32", as_feed=iter):
    """Compares all steps with the plain loop."""
    tolerance = TOLERANCES[dtype]
    with jax.enable_x64(dtype == "float64"):
        steps = make_steps(dtype)
        state = pipeline.init(jax.random.key(5), steps[0][0], make_scale(dtype))
        trains = pipeline.updates is not None
        results = expected(reduction, dtype, trains)
        for step, (after, losses, outputs) in zip(steps, results, strict=True):
            state, actual = pipeline.step(state, as_feed(step), make_scale(dtype))
            models.assert_trees_close(actual.losses, losses, tolerance)
            models.assert_trees_close(actual.outputs, outputs, tolerance)
            models.assert_trees_close(state.variables, after.variables, tolerance)
            models.assert_trees_close(state.optimizer_state, after.optimizer_state, tolerance)
    assert state.execution_count == NUM_UPDATES


# The numbers.


@pytest.mark.parametrize("plan", [ONE_BY_ONE, CHUNKS[0]], ids=name_of)
@pytest.mark.each_value
def test_accumulated_gradients(plan):
    (step,) = make_steps(num_steps=1)
    pipeline = make(plan)
    state = pipeline.init(jax.random.key(5), step[0], make_scale())
    executor = pipeline.prepare()
    elements = iter(step)

    def take(wanted):
        del wanted
        return [executor.place_element(jax.tree.leaves(next(elements)))]

    accumulated = pipeline.accumulate(state, take, [make_scale()]).stepped.columns[0]
    merged = pipeline.plan_accumulators().merge(
        accumulated.accumulators, executor.weight_update._add_to_home
    )
    models.assert_trees_close(merged, expected()[0][0].optimizer_state[0].trace)
    assert next(elements, None) is None


def as_jax(step):
    return jax.tree.map(jnp.asarray, step)


def as_half_jax(step):
    return [as_jax(one) if number % 3 else one for number, one in enumerate(step)]


def overwritten(step):
    """The same arrays each time, with other values."""
    arrays = jax.tree.map(np.empty_like, step[0])
    for micro_batch in step:
        for array, values in zip(arrays, micro_batch, strict=True):
            array[...] = values
        yield arrays


def as_jax_elsewhere(step):
    """Every micro-batch on another device."""
    return [jax.device_put(one, jax.devices()[number % 4]) for number, one in enumerate(step)]


@pytest.mark.parametrize("as_feed", [as_jax, as_half_jax, as_jax_elsewhere, overwritten])
@pytest.mark.parametrize("plan", [ONE_BY_ONE, CHUNKS[1]], ids=name_of)
@pytest.mark.each_value
def test_feeds(plan, as_feed):
    check(make(plan), as_feed=as_feed)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("plan", [ONE_BY_ONE, CHUNKS[0]], ids=name_of)
@pytest.mark.each_value
def test_sums_and_some_of_the_outputs(plan, dtype):
    """Sums keep their dtypes, those of integers too."""
    _state, losses, outputs = expected(dtype=dtype)[0]
    options = {"sum_collected": True, "collect_outputs": lambda shapes: [True, False, True, True, True]}
    with jax.enable_x64(dtype == "float64"):
        (step,) = make_steps(dtype, num_steps=1)
        pipeline = make(plan, **options)
        state = pipeline.init(jax.random.key(5), step[0], make_scale(dtype))
        _state, actual = pipeline.step(state, step, make_scale(dtype))
        models.assert_trees_close(actual.losses, [sum(losses)], TOLERANCES[dtype])
        leaves = zip(*map(jax.tree.leaves, outputs), strict=True)
        sums = [sum(one[1:], one[0]) for place, one in enumerate(leaves) if place != 1]
        models.assert_trees_close(actual.outputs, [sums], TOLERANCES[dtype])


@pytest.mark.parametrize("plan", [ONE_BY_ONE, CHUNKS[1]], ids=name_of)
@pytest.mark.each_value
def test_an_optimizer_from_outputs_reads_one_micro_batch(plan):
    """The state at the start depends on the first one, the updates on the last one."""

    def optimizer(loss, logits, **_others):
        def init(parameters):
            return {"first": loss}

        def update(gradients, state, parameters=None):
            factor = -0.01 * loss * state["first"] * jnp.abs(logits).mean()
            return jax.tree.map(lambda gradient: gradient * factor, gradients), state

        return optax.GradientTransformation(init, update)

    steps = make_steps(num_steps=2)
    pipeline = make(plan, optimizer=optimizer)
    state = pipeline.init(jax.random.key(5), steps[0][0], make_scale())
    plain = models.on_one_device(state)
    for step in steps:
        state, _outputs = pipeline.step(state, step, make_scale())
        plain, _outputs = reference.step(pipeline.traced, plain, step, make_scale(), optimizer=optimizer)
        models.assert_trees_close(state.variables, plain.variables)
        models.assert_trees_close(state.optimizer_state, plain.optimizer_state)


# Feeds.


def test_an_infeed_that_ends_within_a_chunk():
    """What was completed stands, and the data begin again with the initializer."""
    found = []
    for mapping in ([0, 0], [0, 1]):
        model = front.Model(
            front.data(num_batches=2 * COUNT + 3),
            gradient_accumulation_count=COUNT,
            repeat_count=3,
            device_mapping=mapping,
        )
        (call,) = model.program.calls
        if mapping == [0, 1]:
            assert call.pipeline.dispatch_plan.chunk_size == 2
        with ipu.Session(seed=1) as session:
            session.run(model.initializer)
            with pytest.raises(OutOfRangeError, match="ended after 19 elements"):
                session.run(model.program, {model.rate: 0.1})
            losses = session.run(model.outfeed.dequeue())
            completed = session.variables
            with pytest.raises(OutOfRangeError, match="ended after 19 elements"):
                session.run(model.program, {model.rate: 0.1})
            assert_same(session.variables, completed)
            session.run(model.initializer)
            with pytest.raises(OutOfRangeError):
                session.run(model.program, {model.rate: 0.1})
            found.append((losses, completed, session.variables))
    models.assert_trees_close(found[1], found[0])
    assert np.shape(found[0][0]) == (2, COUNT) or np.size(found[0][0]) == 2 * COUNT


def assert_same(actual, others):
    jax.tree.map(np.testing.assert_array_equal, actual, others)


def test_an_infeed_of_jax_arrays():
    def iterate():
        for element in front.data()():
            yield jax.tree.map(jnp.asarray, element)

    found = []
    for data in (front.data(), iterate):
        model = front.Model(data, gradient_accumulation_count=COUNT)
        with ipu.Session(seed=1) as session:
            session.run(model.initializer)
            found.append([model.run(session) for _ in range(3)])
    assert_same(found[1], found[0])


def test_data_that_end_within_a_chunk_leave_the_state():
    first, second = make_steps(num_steps=2)
    pipeline = make(CHUNKS[0])
    state = pipeline.init(jax.random.key(5), first[0], make_scale())
    with pytest.raises(engine.OutOfRangeError, match="ended after 5 of the 8 micro-batches of a step"):
        pipeline.step(state, second[:5], make_scale())
    feed = iter([*first, *second])
    for after, _losses, _outputs in expected()[:2]:
        state, _outputs = pipeline.step(state, feed, make_scale())
        models.assert_trees_close(state.variables, after.variables)
    with pytest.raises(engine.OutOfRangeError, match="ended after 0 of the 8 micro-batches of a step"):
        pipeline.step(state, feed, make_scale())


@pytest.mark.parametrize("as_feed", [list, as_jax, as_half_jax])
@pytest.mark.parametrize(
    ("mapping", "plan"),
    [
        ([0, 0, 0, 0], None),
        ([0, 1, 0, 1], engine.Chunking()),
        ([0, 1, 2, 3], CHUNKS[0]),
    ],
    ids=name_of,
)
@pytest.mark.each_value
def test_placed_micro_batches_serve_twice(mapping, plan, as_feed):
    step, _other = make_steps(num_steps=2)
    pipeline = make(plan, device_mapping=mapping)
    start = pipeline.init(jax.random.key(5), step[0], make_scale())
    given = as_feed(jax.tree.map(np.copy, step))
    placed = pipeline.place_micro_batches(given)
    for array in jax.tree.leaves(given):
        if isinstance(array, np.ndarray):
            array[...] = 0  # no memory is shared
    state, outputs = pipeline.step(start, placed, make_scale())
    again, same_outputs = pipeline.step(start, placed, make_scale())
    assert_same(state.variables, again.variables)
    assert_same(outputs.losses, same_outputs.losses)
    after, losses, _outputs = expected()[0]
    models.assert_trees_close(outputs.losses, losses)
    models.assert_trees_close(state.variables, after.variables)
    further, _outputs = pipeline.step(state, placed, make_scale())
    fed, _outputs = pipeline.step(state, step, make_scale())
    assert_same(further.variables, fed.variables)


@pytest.mark.parametrize(
    ("mapping", "plan"),
    [([0, 0, 0, 0], None), ([0, 1, 0, 1], engine.Chunking()), ([0, 1, 2, 3], CHUNKS[1])],
)
def test_errors_of_placed_micro_batches(mapping, plan):
    (step,) = make_steps(num_steps=1)
    pipeline, other = make(plan, device_mapping=mapping), make(plan, device_mapping=mapping)
    with pytest.raises(RuntimeError, match="has not been traced"):
        pipeline.place_micro_batches(step)
    state = pipeline.init(jax.random.key(5), step[0], make_scale())
    other.init(jax.random.key(5), step[0], make_scale())
    with pytest.raises(ValueError, match="micro_batches: they were placed by another pipeline"):
        pipeline.step(state, other.place_micro_batches(step), make_scale())
    with pytest.raises(ValueError, match="4 were placed, but a step has 8. Place that many."):
        pipeline.step(state, pipeline.place_micro_batches(step[:4]), make_scale())
    with pytest.raises(ValueError, match="Micro-batch 1 must have the dtype of the first one"):
        pipeline.place_micro_batches([step[0], (step[0][0].astype("float16"), step[0][1])])
    placed = pipeline.place_micro_batches(step)
    pipeline.set_recomputation(engine.Recomputation.AUTO)
    with pytest.raises(ValueError, match="before this one got other devices or recomputation"):
        pipeline.step(state, placed, make_scale())
    if plan is not None and plan.chunk_size == 4:
        with pytest.raises(ValueError, match="programs handle 4 micro-batches each.*6 do not make whole"):
            pipeline.place_micro_batches(step[:6])


def test_nothing_to_feed():
    def first(scale):
        with engine.variable_scope("first"):
            return engine.get_variable("kernel", (3,)) * scale + jax.random.normal(
                engine.next_rng_key(), (3,)
            )

    def last(x):
        with engine.variable_scope("last"):
            return jnp.sum((x * engine.get_variable("kernel", (3,))) ** 2)

    pipeline = engine.Pipeline(
        [first, last],
        num_micro_batches=COUNT,
        loss=lambda loss: loss,
        optimizer=optax.sgd(0.1),
        dispatch_plan=CHUNKS[0],
    )
    pipeline.trace(None, make_scale())
    state = pipeline.init(jax.random.key(0), None, make_scale())
    plain, outputs = reference.step(
        pipeline.traced,
        models.on_one_device(state),
        [None] * COUNT,
        make_scale(),
        optimizer=optax.sgd(0.1),
    )
    for feed in ([], pipeline.place_micro_batches([None] * COUNT)):
        after, actual = pipeline.step(state, feed, make_scale())
        models.assert_trees_close(actual.losses, outputs.losses)
        models.assert_trees_close(after.variables, plain.variables)


@pytest.mark.parametrize("plan", [ONE_BY_ONE, CHUNKS[0]], ids=name_of)
def test_data_that_nobody_reads(plan):
    """They are taken all the same, as many as there are micro-batches."""

    def first(x):
        with engine.variable_scope("first"):
            return engine.get_variable("kernel", (3,))

    pipeline = engine.Pipeline([first, jnp.sum], num_micro_batches=COUNT, dispatch_plan=plan)
    step = [np.float32(number) for number in range(COUNT)]
    state = pipeline.init(jax.random.key(0), step[0])
    feed = iter([*step, *step[:3]])
    state, outputs = pipeline.step(state, feed)
    assert len(outputs.outputs) == COUNT
    with pytest.raises(engine.OutOfRangeError, match="ended after 3 of the 8 micro-batches"):
        pipeline.step(state, feed)
    _state, outputs = pipeline.step(state, pipeline.place_micro_batches(step))
    assert len(outputs.outputs) == COUNT


# Arguments.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunk_size": 0}, "chunk_size must be an integer of at least 1; got 0"),
        ({"chunk_size": True}, "chunk_size must be an integer of at least 1; got True"),
        ({"chunk_size": 2.0}, "chunk_size must be an integer of at least 1; got 2.0"),
    ],
)
def test_errors_of_a_plan(arguments, message):
    with pytest.raises(ValueError, match=f"Chunking: {message}"):
        engine.Chunking(**arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dispatch_plan": 2}, TypeError, "must be a Chunking, or None to have it chosen; got 2"),
        ({"device_mapping": [0] * 4}, ValueError, "all stages are on one IPU.*Leave it out"),
        ({"num_micro_batches": 6}, ValueError, "must divide the number.*which is 6; got 4"),
        ({"num_micro_batches": None}, ValueError, "which is known at run only; got 4"),
    ],
    ids=str,
)
def test_errors_of_the_argument(options, error, message):
    with pytest.raises(error, match=f"dispatch_plan.*{message}"):
        make(**{"plan": None, "dispatch_plan": CHUNKS[1], **options})


@pytest.mark.parametrize("plan", [ONE_BY_ONE, *CHUNKS], ids=name_of)
def test_a_plan_can_be_stored(plan):
    stored = dataclasses.asdict(plan)
    assert stored == {"chunk_size": plan.chunk_size, "reason": "given"}
    assert engine.Chunking(**stored) == plan
    assert str(plan).endswith(": given")


# The choice.


def traced(**options):
    pipeline = make(None, **options)
    (step,) = make_steps(num_steps=1)
    pipeline.trace(step[0], make_scale())
    return pipeline


def test_small_programs_are_put_together():
    plan = traced(num_micro_batches=64).dispatch_plan
    assert plan.chunk_size > 2
    assert "a step is estimated to take" in plan.reason
    assert traced(num_micro_batches=64).dispatch_plan == plan
    assert traced().dispatch_plan.chunk_size == 2  # a step keeps four chunks


def test_the_chosen_plan_is_followed_and_can_be_given():
    for given in (None, traced().dispatch_plan):
        pipeline = make(given)
        check(pipeline)
        assert pipeline.prepare()._chunk.size == pipeline.dispatch_plan.chunk_size
        assert (pipeline.dispatch_plan is given) == (given is not None)


def test_a_chunk_holds_no_more_than_it_may():
    pipeline = traced(num_micro_batches=64)
    chosen = pipeline.dispatch_plan.chunk_size
    assert chosen > 2
    most = {size: max(m.num_live_bytes for m in pipeline._plan_memory(64, size)) for size in (1, 2, chosen)}
    for limit, size in [(most[chosen], chosen), (most[2], 2), (most[2] - 1, 1), (0, 1)]:
        plan = traced(num_micro_batches=64, max_chunked_bytes=limit).dispatch_plan
        assert plan.chunk_size == size
        held = max(m.num_live_bytes for m in traced(num_micro_batches=64).plan_memory())
        assert held == most[chosen]
        assert (f"larger chunks would hold more than {limit:,} bytes on a stage" in plan.reason) == (
            size < chosen
        )


def printing(scale, x, labels):
    jax.debug.print("{}", x[0, 0])
    return models.first_stage(scale, x, labels)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_micro_batches": None}, "the number of micro-batches is known at run only"),
        ({"schedule": "interleaved"}, "the schedule was chosen for its order or its memory"),
        ({"schedule": "sequential"}, "the schedule was chosen for its order or its memory"),
        ({"recompute": "auto"}, "recomputation or offloading is to save memory"),
        ({"offload": ["weights"]}, "recomputation or offloading is to save memory"),
    ],
    ids=str,
)
def test_where_every_action_stays_a_program(options, reason):
    assert traced(**options).dispatch_plan == engine.Chunking(reason=reason)


def test_stages_that_print_stay_programs_of_their_own():
    pipeline = engine.Pipeline([printing, *models.VARIOUS_STAGES[1:]], num_micro_batches=COUNT)
    (step,) = make_steps(num_steps=1)
    pipeline.trace(step[0], make_scale())
    reason = "stages print or call back into Python"
    assert pipeline.dispatch_plan == engine.Chunking(reason=reason)


@jax.custom_vjp
def foreign(x):
    return jax.ffi.ffi_call("foreign", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


foreign.defvjp(lambda x: (foreign(x), None), lambda _kept, g: (foreign(g),))


def calling(function, is_trained=True, **options):
    def stage(scale, x, labels):
        return models.second_stage(
            scale, function(models.weight("first", x)[0]) + x, x, labels, labels % 2 == 0
        )

    training = (
        {"loss": lambda loss, **_others: loss, "optimizer": models.showing_gradients()}
        if is_trained
        else {}
    )
    pipeline = engine.Pipeline(
        [stage, *models.VARIOUS_STAGES[2:]], num_micro_batches=64, **training, **options
    )
    (step,) = make_steps(num_steps=1)
    pipeline.trace(step[0], make_scale())
    return pipeline


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (foreign, "ffi_call(foreign) has no known cost, and is not measured here"),
        (
            jax.checkpoint(lambda x: jax.lax.map(foreign, x)),
            "ffi_call(foreign) has no known cost, and is not measured here",
        ),
        (
            lambda x: jax.pure_callback(np.sin, x, jax.lax.stop_gradient(x)),
            "stages print or call back into Python",
        ),
    ],
)
def test_programs_of_unknown_cost_stay_programs_of_their_own(function, reason, is_trained):
    assert calling(jnp.sin, is_trained).dispatch_plan.chunk_size > 2
    assert calling(function, is_trained).dispatch_plan == engine.Chunking(reason=reason)


def test_programs_of_unknown_cost_may_be_measured(monkeypatch):
    """What was measured counts, whatever is in the programs."""
    seconds = {1: 0.4, 2: 0.3, 4: 0.1, 8: 0.2, 16: 0.5}
    monkeypatch.setattr(
        measuring,
        "_time",
        lambda pipeline, *_others: seconds[pipeline.dispatch_plan.chunk_size],
    )
    (step,) = make_steps(count=64, num_steps=1)
    plan = engine.measure_dispatch_plan(calling(foreign), None, step, make_scale())
    assert plan.chunk_size == 4
    assert calling(foreign, dispatch_plan=plan).dispatch_plan is plan


def test_the_summary_says_why_there_are_no_chunks():
    def first(rate, x, labels):
        return front.first_stage(rate, jax.pure_callback(np.sin, x, x), labels)

    summary = str(front.Model(computational_stages=[first, front.second_stage]).program.summary())
    assert "one micro-batch per program: stages print or call back into Python" in summary


def test_one_device_has_no_plan():
    assert traced(device_mapping=[0, 0, 0, 0]).dispatch_plan is None


def test_recomputation_is_chosen_for_anew():
    pipeline = traced()
    assert pipeline.dispatch_plan.chunk_size == 2
    pipeline.set_recomputation(engine.Recomputation.AUTO)
    assert pipeline.dispatch_plan.chunk_size == 1
    pipeline.set_recomputation(None)
    assert pipeline.dispatch_plan.chunk_size == 2


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        (1, [1]),
        (7, [1]),
        (8, [1, 2]),
        (12, [1, 2]),
        (16, [1, 2, 4]),
        (64, [1, 2, 4, 8, 16]),
        (4096, [1, 2, 4, 8, 16]),
    ],
)
def test_sizes_to_choose_from(count, sizes):
    assert choosing.possible_chunk_sizes(count) == sizes


def choose(cost, platform, max_live_bytes, measure=None):
    """For four stages of an estimated cost, which hold as many bytes as a chunk has micro-batches."""
    pipeline = traced(num_micro_batches=64)
    programs = [
        dataclasses.replace(
            own,
            forward=dataclasses.replace(own.forward, num_operations=cost),
            backward=own.backward and dataclasses.replace(own.backward, num_operations=2 * cost),
        )
        for own in pipeline.programs
    ]
    step = dataclasses.replace(
        pipeline._chunked_step,
        programs=programs,
        live_bytes=lambda size: size,
        max_live_bytes=max_live_bytes,
    )
    return choosing.choose_dispatch_plan(step, platform, measure)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_short_and_long_programs(platform):
    plan = choose(1e3, platform, 16)
    assert plan.chunk_size > 1
    assert "a step is estimated to take" in plan.reason
    assert choose(1e3, platform, 16) == plan
    held_back = choose(1e3, platform, 1)  # no room for chunks
    assert held_back.chunk_size == 1
    assert held_back.reason.endswith("larger chunks would hold more than 1 bytes on a stage")
    alone = choose(1e13, platform, 16)
    assert alone.chunk_size == 1
    assert alone.reason.endswith("beside which dispatches cost little")


def test_two_hundredths_are_worth_chunks_and_less_is_not():
    assert choose(1e8, "cpu", 16).chunk_size > 1
    assert choose(1e9, "cpu", 16).chunk_size == 1


def measured(seconds, overhead=1e-4, cores=None, of_chunks=None):
    """What a test says that programs take: a forward for a micro-batch; a backward takes twice as long."""

    def find(chunk_size):
        own = seconds if of_chunks is None or chunk_size == 1 else of_chunks(chunk_size)
        return engine.Costs.of(4, forward=own, backward=2 * own)

    return lambda: choosing.MeasuredCosts(find, overhead, cores)


def spread(seconds, overhead=1e-4):
    return lambda chunk_size: seconds - overhead + overhead / chunk_size


@pytest.mark.parametrize("cores", [None, 2])
def test_measured_programs(cores):
    def choose_measured(*arguments, **options):
        return choose(1e3, "cpu", 16, measured(*arguments, cores=cores, **options))

    plan = choose_measured(1.5e-4, of_chunks=spread(1.5e-4))
    assert plan.chunk_size > 1
    assert "a step with" in plan.reason
    assert plan.reason.endswith("of its time one by one")
    assert choose_measured(1.5e-4, of_chunks=spread(1.5e-4)) == plan
    alone = choose_measured(1.0)
    assert alone.chunk_size == 1
    assert alone.reason.endswith("takes 2000.0 ms, beside which dispatches cost little")
    slower = choose_measured(1.5e-4, of_chunks=lambda _size: 1.6e-4)  # chunks that are slow in fact
    assert slower.chunk_size == 1
    assert "per program 1" in slower.reason  # more than 100%


def test_what_counts_as_long_is_not_measured():
    def measure():
        raise AssertionError("It was measured.")

    assert choose(1e13, "cpu", 16, measure) == choose(1e13, "cpu", 16)


def test_where_measuring_fails_the_estimate_decides(monkeypatch):
    """There may be no room for a program beside a state."""

    def fail(*_arguments, **_options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(ColumnRunner, "measure", fail)
    pipeline = make(None)
    check(pipeline)
    assert pipeline.dispatch_plan == traced().dispatch_plan
    assert not pipeline.dispatch_plan.reason.startswith("measured")


# What is compiled and held.


@pytest.mark.parametrize("as_feed", [list, as_jax])
@pytest.mark.parametrize("plan", [ONE_BY_ONE, CHUNKS[0], None], ids=name_of)
@pytest.mark.each_value
def test_nothing_compiles_after_the_first_step(plan, as_feed):
    first, second, third = (as_feed(step) for step in make_steps())
    pipeline = make(plan)
    state = pipeline.init(jax.random.key(5), first[0], make_scale())
    with compilations() as found:
        state, outputs = pipeline.step(state, first, make_scale())
        assert len(outputs.losses) == len(outputs.outputs) == COUNT
    assert found
    with compilations() as found:
        for step in (second, third):
            state, outputs = pipeline.step(state, step, make_scale())
            assert len(outputs.losses) == len(outputs.outputs) == COUNT
    assert not found


WIDE = 37  # a micro-batch has far fewer numbers than the weights


def wide_stages(num_stages):
    def make_stage(index):
        def stage(x):
            with engine.variable_scope(f"stage{index}"):
                x = jnp.tanh(x @ engine.get_variable("kernel", (WIDE, WIDE)))
            return jnp.sum(x**2) if index == num_stages - 1 else x

        return stage

    return [make_stage(index) for index in range(num_stages)]


@pytest.mark.parametrize("mapping", [[0, 1, 2], [0, 1, 0]])
@pytest.mark.parametrize("plan", [ONE_BY_ONE, CHUNKS[0]], ids=name_of)
@pytest.mark.each_value
def test_micro_batches_make_no_arrays_of_the_weights_size(plan, mapping):
    found = {}
    for count in (8, 16):
        pipeline = engine.Pipeline(
            wide_stages(3),
            num_micro_batches=count,
            loss=lambda loss: loss,
            optimizer=optax.sgd(0.1),
            device_mapping=mapping,
            dispatch_plan=plan,
        )
        step = [np.full((1, WIDE), number, "float32") for number in range(count)]
        state = pipeline.init(jax.random.key(0), step[0])
        for own in pipeline.programs:
            assert all(aval.size < WIDE * WIDE for aval in own.residuals)
        state, _outputs = pipeline.step(state, step)  # leaves the accumulators for the next one
        gc.collect()
        numbers = []

        def observe(*_told, numbers=numbers):
            numbers.append(sum(array.size >= WIDE * WIDE for array in jax.live_arrays()))

        pipeline.prepare().observe(observe)
        before = sum(array.size >= WIDE * WIDE for array in jax.live_arrays())
        pipeline.step(state, step)
        order = pipeline.prepare().order(count // plan.chunk_size)
        assert len(numbers) == sum(isinstance(action, Compute) for action, _chunk in order)
        assert len(set(numbers)) == 1
        found[count] = numbers[0] - before
        del pipeline, state
        gc.collect()
    assert found[8] == found[16] == 0


@pytest.mark.parametrize("plan", [ONE_BY_ONE, *CHUNKS], ids=name_of)
@pytest.mark.parametrize("mapping", [[0, 1, 2, 3], [0, 1, 0, 1]])
@pytest.mark.each_value
def test_chunks_hold_what_the_plan_says(plan, mapping):
    (step,) = make_steps(num_steps=1, count=16)
    pipeline = make(plan, num_micro_batches=16, device_mapping=mapping)
    state = pipeline.init(jax.random.key(5), step[0], make_scale())
    live_bytes = LiveBytes(pipeline.prepare())
    pipeline.step(state, step, make_scale())
    for found, planned in zip(live_bytes.peaks, pipeline.plan_memory(), strict=True):
        assert found <= planned.num_live_bytes
        assert found == pytest.approx(planned.num_live_bytes, rel=0.3)


@pytest.mark.parametrize("plan", [ONE_BY_ONE, CHUNKS[0]], ids=name_of)
@pytest.mark.each_value
def test_nothing_is_held_after_its_last_reader(plan):
    (step,) = make_steps(num_steps=1)
    pipeline = make(plan)
    state = pipeline.init(jax.random.key(5), step[0], make_scale())
    executor, num_chunks = pipeline.prepare(), len(step) // plan.chunk_size
    held = []

    def observe(_replica, _template, _chunk, slots):
        held.append(
            [sum(slot is not None for slot in slots.get(number, ())) for number in range(num_chunks)]
        )

    executor.observe(observe)
    pipeline.step(state, step, make_scale())
    assert max(map(sum, held)) > 0
    assert held[-1] == [0] * len(held[-1])
    assert held[-2][0] == 0  # the first one's are gone before the last one's
