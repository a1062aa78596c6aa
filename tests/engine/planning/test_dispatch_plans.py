"""Chunks of micro-batches: the numbers stay the same; what is chosen, and why."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine, layers
from ipu_pipeline.engine import measured_choices, measuring, reference
from ipu_pipeline.engine.execution import compilation
from ipu_pipeline.engine.inspect import LiveBytes
from ipu_pipeline.engine.pipeline import chunked_step
from ipu_pipeline.engine.planning import dispatch_plans
from ipu_pipeline.ground.tables import describe_bytes
from tests.support import beside, models
from tests.support.compilations import compilations

COUNT, NUM_UPDATES = 8, 2
ONE_BY_ONE = engine.Chunking()
CHUNKS = [engine.Chunking(2), engine.Chunking(4)]
SCALE = np.float32(0.9)


def make(plan, **options):
    options = {
        "num_micro_batches": COUNT,
        "loss": lambda loss, **_others: loss,
        "optimizer": models.showing_gradients(),
        "dispatch_plan": plan,
        **options,
    }
    return engine.Pipeline(models.VARIOUS_STAGES, **options)


def make_steps(num_steps=NUM_UPDATES):
    rng = np.random.default_rng(COUNT)
    return [models.various_batches(rng, COUNT) for _ in range(num_steps)]


def start(pipeline):
    return pipeline.init(jax.random.key(5), make_steps(1)[0][0], SCALE)


@pytest.fixture(scope="module")
def chunked():
    """A pipeline of two chunks, and its state at the start."""
    pipeline = make(CHUNKS[1])
    return pipeline, start(pipeline)


@pytest.fixture(scope="module")
def expected(chunked):
    """State, losses and outputs of a plain loop after each step."""
    pipeline, state = chunked
    state = models.on_one_device(dataclasses.replace(state, optimizer_state=None))
    results = []
    for step in make_steps():
        state, outputs = reference.step(
            pipeline.traced, state, step, SCALE, optimizer=models.showing_gradients()
        )
        results.append((state, outputs.losses, outputs.outputs))
    return results


def assert_same(actual, others):
    jax.tree.map(np.testing.assert_array_equal, actual, others)


# The numbers.


def as_half_jax(step):
    """Two of three are JAX's, each on another device."""
    return [
        jax.device_put(one, jax.devices()[number % 4]) if number % 3 else one
        for number, one in enumerate(step)
    ]


def overwritten(step):
    """The same arrays each time, with other values."""
    arrays = jax.tree.map(np.empty_like, step[0])
    for micro_batch in step:
        for array, values in zip(arrays, micro_batch, strict=True):
            array[...] = values
        yield arrays


def test_chunks_give_what_the_plain_loop_gives_and_hold_what_the_plan_says(chunked, expected):
    pipeline, state = chunked
    live_bytes = LiveBytes(pipeline.prepare())
    for step, (after, losses, outputs) in zip(make_steps(), expected, strict=True):
        with compilations() as found:
            state, actual = pipeline.step(state, as_half_jax(step), SCALE)
        models.assert_trees_close(actual.losses, losses)
        models.assert_trees_close(actual.outputs, outputs)
        models.assert_trees_close(state.variables, after.variables)
        models.assert_trees_close(state.optimizer_state, after.optimizer_state)
    assert not found  # nothing compiles after the first step
    assert state.execution_count == NUM_UPDATES
    for held, planned in zip(live_bytes.peaks, engine.planning.plan_memory(pipeline), strict=True):
        assert held <= planned.num_live_bytes
        assert held == pytest.approx(planned.num_live_bytes, rel=0.3)


def test_an_optimizer_from_outputs_reads_one_micro_batch():
    """The state at the start depends on the first one, the updates on the last one."""

    def last(x, labels):
        logits = models.dense("last", 4, x)
        return {"loss": models.cross_entropy(logits, labels), "logits": logits}

    def optimizer(loss, logits):
        def update(gradients, state, parameters=None):
            factor = -0.01 * loss * state["first"] * jnp.abs(logits).mean()
            return jax.tree.map(lambda gradient: gradient * factor, gradients), state

        return optax.GradientTransformation(lambda _parameters: {"first": loss}, update)

    pipeline = engine.Pipeline(
        [first_stage, last],
        num_micro_batches=4,
        loss=lambda loss, logits: loss,
        optimizer=optimizer,
        dispatch_plan=CHUNKS[0],
    )
    rng = np.random.default_rng(0)
    step = [(rng.normal(size=(2, 4)).astype("float32"), rng.integers(0, 4, 2)) for _ in range(4)]
    beside.train(pipeline, [step] * NUM_UPDATES, seed=5)


# Feeds.


def test_data_that_end_within_a_chunk_leave_the_state(chunked, expected):
    first, second = make_steps()
    pipeline, state = chunked
    with pytest.raises(engine.OutOfRangeError, match="ended after 5 of the 8 micro-batches of a step"):
        pipeline.step(state, second[:5], SCALE)
    feed = overwritten([*first, *second])
    for after, _losses, _outputs in expected:
        state, _outputs = pipeline.step(state, feed, SCALE)
        models.assert_trees_close(state.variables, after.variables)
    with pytest.raises(engine.OutOfRangeError, match="ended after 0 of the 8 micro-batches of a step"):
        pipeline.step(state, feed, SCALE)


def test_placed_micro_batches(chunked, expected):
    """They serve twice, share no memory with what was given, and belong to their pipeline."""
    step = make_steps()[0]
    (pipeline, begin), other = chunked, make(CHUNKS[1])
    with pytest.raises(RuntimeError, match="has not been traced"):
        other.place_micro_batches(step)
    given = as_half_jax(jax.tree.map(np.copy, step))
    placed = pipeline.place_micro_batches(given)
    for array in jax.tree.leaves(given):
        if isinstance(array, np.ndarray):
            array[...] = 0
    state, outputs = pipeline.step(begin, placed, SCALE)
    again, same_outputs = pipeline.step(begin, placed, SCALE)
    assert_same(state.variables, again.variables)
    assert_same(outputs.losses, same_outputs.losses)
    after, losses, _outputs = expected[0]
    models.assert_trees_close(outputs.losses, losses)
    models.assert_trees_close(state.variables, after.variables)

    other.trace(step[0], SCALE)
    others = other.place_micro_batches(step)
    with pytest.raises(ValueError, match="micro_batches: they were placed by another pipeline"):
        pipeline.step(state, others, SCALE)
    with pytest.raises(ValueError, match="4 were placed, but a step has 8. Place that many."):
        pipeline.step(state, pipeline.place_micro_batches(step[:4]), SCALE)
    with pytest.raises(ValueError, match="Micro-batch 1 must have the dtype of the first one"):
        pipeline.place_micro_batches([step[0], (step[0][0].astype("float16"), step[0][1])])
    with pytest.raises(ValueError, match="programs handle 4 micro-batches each.*6 do not make whole"):
        pipeline.place_micro_batches(step[:6])
    other.set_recomputation(engine.Recomputation.AUTO)
    with pytest.raises(ValueError, match="before this one got other devices or recomputation"):
        other.step(state, others, SCALE)


@pytest.mark.parametrize("options", [{"device_mapping": [0, 0]}, {"dispatch_plan": ONE_BY_ONE}], ids=str)
def test_placed_and_elsewhere_without_chunks(options):
    """The results are those of NumPy's arrays; what was placed shares no memory with them."""
    pipeline = traced(num_micro_batches=4, **options)
    step = [(number * ELEMENT[0], ELEMENT[1]) for number in range(4)]
    state = pipeline.init(jax.random.key(0), step[0])
    expected = pipeline.step(state, step)
    elsewhere = [jax.device_put(one, jax.devices()[number]) for number, one in enumerate(step)]
    assert_same(pipeline.step(state, elsewhere)[0].variables, expected[0].variables)
    placed = pipeline.place_micro_batches(step)
    for x, _labels in step:
        x[...] = 0
    for _time in range(2):
        after, outputs = pipeline.step(state, placed)
        assert_same((after.variables, outputs.losses), (expected[0].variables, expected[1].losses))


def test_nothing_to_feed():
    def first(scale):
        weight = engine.get_variable("first", (3,))
        return weight * scale + jax.random.normal(engine.next_rng_key(), (3,))

    def last(x):
        return jnp.sum((x * engine.get_variable("last", (3,))) ** 2)

    pipeline = engine.Pipeline([first, last], num_micro_batches=COUNT, dispatch_plan=CHUNKS[0], **TRAINING)
    state = pipeline.init(jax.random.key(0), None, SCALE)
    plain, outputs = beside.step_plainly(pipeline, models.on_one_device(state), [None] * COUNT, SCALE)
    for feed in ([], pipeline.place_micro_batches([None] * COUNT)):
        after, actual = pipeline.step(state, feed, SCALE)
        models.assert_trees_close(actual.losses, outputs.losses)
        models.assert_trees_close(after.variables, plain.variables)


@pytest.mark.parametrize("plan", [ONE_BY_ONE, CHUNKS[0]], ids=["1", "2"])
def test_data_that_nobody_reads(plan):
    """They are taken all the same, as many as there are micro-batches."""

    def first(x):
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


@pytest.mark.parametrize("size", [0, True, 2.0])
def test_wrong_sizes(size):
    with pytest.raises(ValueError, match=f"Chunking: chunk_size must be an integer of .*1; got {size}"):
        engine.Chunking(size)


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        (CHUNKS[0], {"device_mapping": [0] * 4}, "all stages are on one device.*Leave it"),
        (CHUNKS[1], {"num_micro_batches": 6}, "dispatch_plan.*must divide the number.*which is 6; got 4"),
        (CHUNKS[1], {"num_micro_batches": None}, "which is only known at run time; got 4"),
    ],
)
def test_wrong_plans(plan, options, message):
    with pytest.raises(ValueError, match=message):
        make(plan, **options)
    with pytest.raises(TypeError, match="dispatch_plan must be a Chunking, or None .*; got 2"):
        make(2)


def test_a_plan_can_be_stored():
    stored = dataclasses.asdict(CHUNKS[0])
    assert stored == {"chunk_size": 2, "reason": "given"}
    assert engine.Chunking(**stored) == CHUNKS[0]
    assert str(CHUNKS[0]).endswith(": given")


# The choice.


def first_stage(x, labels):
    return models.dense("first", 4, x), labels


def last_stage(x, labels):
    return models.cross_entropy(models.dense("last", 4, x), labels)


ELEMENT = np.ones((2, 4), "float32"), np.zeros(2, "int32")
TRAINING = {"optimizer": optax.sgd(0.1)}


def traced(first=first_stage, **options):
    options = {"num_micro_batches": 64, **TRAINING, **options}
    pipeline = engine.Pipeline([first, last_stage], **options)
    pipeline.trace(ELEMENT)
    return pipeline


def test_small_programs_are_put_together():
    plan = traced().dispatch_plan
    assert plan.chunk_size > 2
    assert "a step is estimated to take" in plan.reason
    assert traced().dispatch_plan == plan
    assert traced(dispatch_plan=plan).dispatch_plan is plan
    assert traced(num_micro_batches=8).dispatch_plan.chunk_size == 2  # a step keeps four chunks


def test_a_chunk_holds_no_more_than_it_may():
    pipeline = traced(dispatch_plan=CHUNKS[0])
    num_bytes = max(stage.num_live_bytes for stage in engine.planning.plan_memory(pipeline))
    for limit, size in [(num_bytes, 2), (num_bytes - 1, 1), (0, 1)]:
        plan = traced(max_chunked_bytes=limit).dispatch_plan
        assert plan.chunk_size == size
        assert f"larger chunks would hold more than {describe_bytes(limit)} on a stage" in plan.reason


def printing(x, labels):
    jax.debug.print("{}", x[0, 0])
    return first_stage(x, labels)


@jax.custom_vjp
def foreign(x):
    return jax.ffi.ffi_call("foreign", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


foreign.defvjp(lambda x: (foreign(x), None), lambda _kept, g: (foreign(g),))


def calling(function):
    return lambda x, labels: first_stage(function(models.weight("own", x, size=4)[:2]) + x, labels)


def calling_back(x):
    return jax.pure_callback(np.sin, x, jax.lax.stop_gradient(x))


ORDER = "the schedule was chosen for its order or its memory"
SAVING = "recomputation or offloading saves memory, which chunks would need"
PRINTS = "stages print or call back into Python"
UNKNOWN = "ffi_call(foreign) has no known cost, and is not measured here"
INFERENCE = {"loss": None, "optimizer": None}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_micro_batches": None}, "the number of micro-batches is only known at run time"),
        ({"schedule": "interleaved"}, ORDER),
        ({"schedule": "sequential"}, ORDER),
        ({"recompute": "auto"}, SAVING),
        ({"offload": ["weights"]}, SAVING),
        ({"first": printing}, PRINTS),
        ({"first": printing, **INFERENCE}, PRINTS),
        ({"first": calling(calling_back)}, PRINTS),
        ({"first": calling(calling_back), **INFERENCE}, PRINTS),
        ({"first": calling(foreign)}, UNKNOWN),
        ({"first": calling(foreign), **INFERENCE}, UNKNOWN),
        ({"first": calling(jax.checkpoint(lambda x: jax.lax.map(foreign, x)))}, UNKNOWN),
    ],
)
def test_where_every_action_stays_a_program(options, reason):
    assert traced(**options).dispatch_plan == engine.Chunking(reason=reason)


def test_programs_of_unknown_cost_may_be_measured(monkeypatch):
    """What was measured counts, whatever is in the programs."""
    for options in ({}, INFERENCE):
        assert traced(calling(jnp.sin), **options).dispatch_plan.chunk_size > 2  # of known costs
    seconds = {1: 0.4, 2: 0.3, 4: 0.1, 8: 0.2, 16: 0.5}
    monkeypatch.setattr(measuring, "_make_step", lambda *_arguments: lambda: None)
    monkeypatch.setattr(measuring, "time_in_turns", lambda *_arguments: seconds)
    first = calling(foreign)
    plan = engine.measure_dispatch_plan(traced(first), None, [ELEMENT] * 64)
    assert plan.chunk_size == 4
    assert traced(first, dispatch_plan=plan).dispatch_plan is plan


def test_one_device_has_no_plan():
    assert traced(device_mapping=[0, 0]).dispatch_plan is None


def test_recomputation_is_chosen_for_anew():
    pipeline = traced()
    chosen = pipeline.dispatch_plan.chunk_size
    pipeline.set_recomputation(engine.Recomputation.AUTO)
    assert pipeline.dispatch_plan.chunk_size == 1
    pipeline.set_recomputation(None)
    assert pipeline.dispatch_plan.chunk_size == chosen > 1


def test_sizes_to_choose_from():
    sizes = {1: [1], 7: [1], 8: [1, 2], 12: [1, 2], 16: [1, 2, 4], 64: [1, 2, 4, 8, 16]}
    sizes[4096] = sizes[64]
    assert {count: dispatch_plans.possible_chunk_sizes(count) for count in sizes} == sizes


@functools.cache
def traced_once():
    return traced()


def choose(cost, platform="cpu", max_live_bytes=16, rehearsal=None, **changes):
    """For stages of an estimated cost, which hold as many bytes as a chunk has micro-batches."""
    pipeline = traced_once()
    programs = [
        dataclasses.replace(
            own,
            forward=dataclasses.replace(
                own.forward, num_operations=cost if own.backward else 3 * cost, **changes
            ),
            backward=own.backward and dataclasses.replace(own.backward, num_operations=2 * cost),
        )
        for own in pipeline.programs
    ]
    step = dataclasses.replace(
        chunked_step(pipeline),
        programs=programs,
        live_bytes=lambda size: size,
        max_live_bytes=max_live_bytes,
    )
    return dispatch_plans.choose_dispatch_plan(step, platform, rehearsal)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(dispatch_plans, "count_cores", lambda: 2)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_short_and_long_programs(platform):
    plan = choose(1e3, platform)
    assert plan.chunk_size > 1
    assert re.match(r"a step is estimated to take .*s, with \d+ per program .*; a stage", plan.reason)
    held_back = choose(1e3, platform, 1)  # no room for chunks
    assert held_back == engine.Chunking(reason="larger chunks would hold more than 1 B on a stage")
    alone = choose(1e13, platform, rehearsal=Steps({}))  # what counts as long is not timed
    assert alone.chunk_size == 1
    assert alone.reason.startswith("a step is estimated to take")


def test_three_hundredths_are_worth_chunks_and_less_is_not():
    assert choose(3e7).chunk_size > 1
    assert choose(1e9).chunk_size == 1


class Steps:
    """Steps of known times, by size; `asked` is what was timed."""

    def __init__(self, seconds, compile_seconds=2.0):
        self.seconds, self.compile_seconds, self.asked = seconds, compile_seconds, []

    def time(self, sizes):
        self.asked.append(list(sizes))
        return {size: self.seconds[size] for size in sizes}


@pytest.mark.parametrize(
    ("compile_seconds", "seconds", "asked", "chosen"),
    [
        # Estimates are right, and another plan would take long to compile.
        (2.0, {16: 3e-3}, [[16]], 16),
        # It is quick to compile.
        (0.1, {16: 3e-3, 8: 2e-3}, [[16], [16, 8]], 8),
        (0.1, {16: 3e-3, 8: 2.98e-3}, [[16], [16, 8]], 8),
        (0.1, {16: 3e-3, 8: 3.1e-3}, [[16], [16, 8]], 16),
        # Programs take far longer than their operations say.
        (2.0, {16: 0.2, 2: 0.11}, [[16], [16, 2]], 2),
        (2.0, {16: 0.2, 2: 0.21}, [[16], [16, 2]], 16),
        (0.1, {16: 0.2, 2: 0.12, 1: 0.11}, [[16], [16, 2], [16, 2, 1]], 1),
        # The step is so long that dispatches do not matter.
        (2.0, {16: 2.0}, [[16]], 1),
    ],
)
def test_steps_are_timed(compile_seconds, seconds, asked, chosen):
    steps = Steps(seconds, compile_seconds)
    plan = choose(1e3, rehearsal=steps)
    assert steps.asked == asked
    assert plan.chunk_size == chosen
    if len(asked) > 1:
        own = dispatch_plans.describe_seconds(seconds.pop(chosen))
        other = min(seconds, key=seconds.get)
        slower = dispatch_plans.describe_seconds(seconds[other])
        expected = f"a step takes {own}, with {other} per program {slower}"
        assert plan.reason.startswith(expected)


def test_of_programs_of_unknown_cost_one_by_one_is_timed_first():
    for alone, together, chosen in [(8e-3, 6e-3, 16), (0.2, 0.3, 1)]:
        steps = Steps({1: alone, **dict.fromkeys([2, 4, 8, 16], together)})
        assert choose(1e3, rehearsal=steps, uncounted=frozenset(["foreign"])).chunk_size == chosen
        assert steps.asked[0] == [1]


def test_where_measuring_fails_the_estimate_decides(monkeypatch):
    """There may be no room for a program beside a state."""

    def fail(*_arguments, **_options):
        failed.append(True)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    failed, pipeline = [], traced(num_micro_batches=8)
    monkeypatch.setattr(measured_choices, "_plans", {})
    monkeypatch.setattr(measured_choices, "find_directory", lambda: None)
    monkeypatch.setattr(measured_choices.StepTimes, "time", fail)
    pipeline.step(pipeline.init(jax.random.key(0), ELEMENT), [ELEMENT] * 8)
    assert failed
    assert pipeline.dispatch_plan == traced(num_micro_batches=8).dispatch_plan


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The directory of choices; nothing is known of earlier tests."""
    monkeypatch.setattr(measured_choices, "_plans", {})
    monkeypatch.setattr(measured_choices, "find_directory", lambda: tmp_path)
    return tmp_path


def train(num_replicas=1, **options):
    pipeline = traced(num_micro_batches=8, num_replicas=num_replicas, **options)
    state = pipeline.init(jax.random.key(0), ELEMENT)
    plan = pipeline.dispatch_plan
    before = {name: np.asarray(value) for name, value in state.variables.items()}
    rng = np.random.default_rng(0)
    labels = np.array([0, 3], "int32")
    batches = [(rng.normal(size=(2, 4)).astype("float32"), labels) for _ in range(8 * num_replicas)]
    state, outputs = pipeline.step(state, batches)
    assert pipeline.dispatch_plan is plan
    assert state.update_count == state.execution_count == 1
    return plan, [before, state.variables, state.optimizer_state, outputs.losses]


@pytest.mark.parametrize(
    "options",
    [{}, {"donate": True}, {"num_replicas": 2}, {"optimizer": optax.adam(0.1)}],
    ids=["plain", "donate", "replicas", "adam"],
)
def test_steps_on_zeros_leave_no_trace(kept, options):
    plan, found = train(**options)
    assert plan.reason.startswith("a step takes")
    _plan, expected = train(**options, dispatch_plan=plan)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_later_processes_choose_the_same_without_timing(kept, monkeypatch):
    plan = train()[0]
    assert len(list(kept.iterdir())) == 1
    monkeypatch.setattr(measured_choices, "_plans", {})
    monkeypatch.setattr(measured_choices.StepTimes, "time", lambda *_arguments: pytest.fail("timed again"))
    assert train()[0] == plan


@pytest.mark.parametrize("text", ["", '{"chunk_size": 0}', '{"chunk_size": 3}', '{"reason": 1}'])
def test_a_file_without_a_usable_plan_is_replaced(kept, monkeypatch, text):
    plan = train()[0]
    (path,) = kept.iterdir()
    written = path.read_text()
    path.write_text(text)
    monkeypatch.setattr(measured_choices, "_plans", {})
    monkeypatch.setattr(
        measured_choices, "choose_dispatch_plan", lambda *given: given[2].time([2]) and plan
    )
    assert train()[0] == plan
    assert path.read_text() == written


def test_a_choice_is_for_one_pipeline(kept):
    def looping(number):
        return calling(lambda x: jax.lax.fori_loop(0, number, lambda _place, y: jnp.tanh(y), x))

    def with_gradient(number):
        @jax.custom_vjp
        def identity(x):
            return x * 1

        identity.defvjp(lambda x: (x * 1, None), lambda _kept, g: (jax.lax.reduce_precision(g, 8, number),))
        return calling(identity)

    adam, loops, gradients = optax.adam(0.1), map(looping, (2, 3)), map(with_gradient, (7, 8))
    firsts = [{"first": first} for first in (*loops, *gradients)]
    for number, options in enumerate([{}, {"optimizer": adam}, *firsts], 1):
        for _time in range(2):
            train(**options)
            assert len(list(kept.iterdir())) == number


def test_the_kind_of_random_key_may_change(no_cache, monkeypatch):
    """Steps on zeros have keys of JAX's default; what was compiled for these is compiled again."""
    monkeypatch.setattr(compilation, "_LEAST_OPERATIONS", 0)  # one program is loaded for two devices

    def dropping(name):
        return lambda x: layers.Dropout(0.5)(x @ models.weight(name, x, size=8))

    losses = {}
    for kinds in (["rbg", "threefry2x32"], ["threefry2x32", "rbg"]):
        pipeline = engine.Pipeline(
            list(map(dropping, "abcd")), num_micro_batches=8, loss=jnp.mean, **TRAINING
        )
        for kind in kinds:
            state = pipeline.init(jax.random.key(1, impl=kind), np.ones([2, 8], "float32"))
            _state, outputs = pipeline.step(state, [np.ones([2, 8], "float32")] * 8)
            losses.setdefault(kind, []).append([float(loss) for loss in outputs.losses])
    for first, second in losses.values():
        assert first == second
    assert losses["rbg"][0] != losses["threefry2x32"][0]


# What is held.


def test_a_micro_batch_holds_no_copy_of_the_weights():
    width = 37  # a micro-batch has far fewer numbers than the weights
    stages = [
        lambda x: models.dense("first", width, x, jnp.tanh),
        lambda x: jnp.sum(models.dense("last", width, x, jnp.tanh) ** 2),
    ]
    pipeline = engine.Pipeline(stages, num_micro_batches=8, dispatch_plan=CHUNKS[0], **TRAINING)
    pipeline.trace(np.ones((1, width), "float32"))
    assert 0 < engine.planning.plan_memory(pipeline)[0].num_held_bytes < 4 * width * width
