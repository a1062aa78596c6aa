"""What stages hold between forward and backward: the plan, compiled programs and the executor's buffers."""

import collections
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine.execution import compilation
from ipu_pipeline.engine.inspect import LiveBytes
from ipu_pipeline.engine.planning import plan_ipu_memory, plan_memory
from tests.support import models

WIDTH, SIZE, LAYERS, NUM_MICRO_BATCHES = 24, 16, 2, 8
ACTIVATION = WIDTH * SIZE * 4  # bytes
TRAINING = {"optimizer": optax.sgd(0.1)}


def make_stages(num_stages, num_layers=LAYERS, width=WIDTH):
    def make(index):
        def stage(x, labels):
            for layer in range(num_layers):
                x = models.dense(f"stage{index}/layer{layer}", width, x, lambda a: jnp.tanh(jnp.sin(a)))
                if layer < num_layers - 1:
                    x = engine.recomputation_checkpoint(x)
            return models.cross_entropy(x, labels) if index == num_stages - 1 else (x, labels)

        return stage

    return [make(index) for index in range(num_stages)]


def make_step(num_micro_batches=NUM_MICRO_BATCHES):
    rng = np.random.default_rng(0)
    return [
        (rng.normal(size=(SIZE, WIDTH)).astype("float32"), rng.integers(0, WIDTH, SIZE).astype("int32"))
        for _ in range(num_micro_batches)
    ]


def make(num_stages, schedule, mode, **options):
    options = {"num_micro_batches": NUM_MICRO_BATCHES, **TRAINING, **options}
    pipeline = engine.Pipeline(make_stages(num_stages), schedule=schedule, recompute=mode, **options)
    pipeline.trace(make_step(1)[0])
    return pipeline


def in_flight(schedule, stage, num_stages):
    """By the formula of the design."""
    depth = num_stages - stage
    number = {"grouped": 2 * depth - 1, "interleaved": depth, "sequential": 1}[schedule]
    return min(number, NUM_MICRO_BATCHES)


def measure(pipeline, num_replicas=1):
    """What the stages have held at most in a step."""
    step = make_step(pipeline.options.num_micro_batches * num_replicas)
    state = pipeline.init(jax.random.key(0), step[0])
    live_bytes = LiveBytes(pipeline.prepare())
    pipeline.step(state, step)
    return live_bytes


@pytest.mark.parametrize(
    ("schedule", "num_stages", "mode"),
    [
        ("grouped", 3, None),
        ("interleaved", 2, "auto"),
        ("sequential", 2, "recompute_and_backpropagate_interleaved"),
    ],
)
def test_live_bytes_are_those_of_the_formula(schedule, num_stages, mode):
    pipeline = make(num_stages, schedule, mode, dispatch_plan=engine.Chunking())
    peaks, plan = measure(pipeline).peaks, plan_memory(pipeline)
    for stage in range(num_stages - 1):
        expected = in_flight(schedule, stage, num_stages)
        assert plan[stage].in_flight == expected
        if mode is not None:  # a stage's input, and what is marked
            assert plan[stage].num_held_bytes == LAYERS * ACTIVATION
        assert peaks[stage] == pytest.approx(plan[stage].num_live_bytes, rel=0.05)
        assert peaks[stage] == pytest.approx(expected * plan[stage].num_held_bytes, rel=0.05)
    assert plan[-1].num_live_bytes == 0


@pytest.mark.parametrize(
    ("schedule", "mode", "mapping"),
    [
        ("zero_bubble", "recompute_then_backpropagate", (0, 1, 2)),
        ("zero_bubble", None, (0, 0, 1)),
        # The first stage has no first half: gradients wait for the second one.
        *(("zero_bubble", None, mapping) for mapping in [(0, 1), (0, 1, 0)]),
        ("zero_bubble_h2", "recompute_then_backpropagate", (0, 1)),
    ],
)
def test_live_bytes_of_halves(schedule, mode, mapping):
    """Before the first half what both read, between them what the second reads; all until the second."""
    pipeline = make(len(mapping), schedule, mode, device_mapping=mapping)
    peaks, plan = measure(pipeline).peaks, plan_memory(pipeline)
    fullest = pipeline.timetable(NUM_MICRO_BATCHES).fullest
    known = int(mapping in ((0, 1), (0, 1, 0)))  # the first stage whose moments are the timetable's
    assert [planned.fullest for planned in plan[known:]] == [*fullest[known:]]
    assert peaks == [planned.num_live_bytes for planned in plan]
    assert plan[-1].num_live_bytes > 0
    if len(mapping) == 3 and mode is not None:  # of which only its first half computes again
        assert plan[1].num_held_bytes == ACTIVATION
        assert plan[1].num_between_bytes > 2 * ACTIVATION


def test_live_bytes_of_replicas():
    """Each holds what one alone would."""
    pipeline = make(2, "grouped", "auto", num_replicas=2, num_micro_batches=4)
    live_bytes = measure(pipeline, 2)
    planned = [stage.num_live_bytes for stage in plan_memory(pipeline)]
    assert planned[0] > 0
    assert live_bytes.peaks == pytest.approx(planned, rel=0.05)
    assert [*live_bytes.by_replica] == [live_bytes.peaks] * 2


def test_live_bytes_are_those_between_programs():
    pipeline = make(1, "sequential", None)
    with pytest.raises(TypeError, match="whose stages are programs of their own; got a Block"):
        LiveBytes(pipeline.prepare())


def traced(stages):
    pipeline = engine.Pipeline(stages, num_micro_batches=NUM_MICRO_BATCHES, **TRAINING)
    pipeline.trace(make_step(1)[0])
    return pipeline


@functools.cache
def temp_bytes(mode):
    """Temporary memory of everything as one program."""
    micro_batch = (
        np.random.default_rng(0).normal(size=(512, 64)).astype("float32"),
        np.zeros(512, "int32"),
    )
    options = {"num_micro_batches": 2, "device_mapping": [0, 0], "recompute": mode}
    pipeline = engine.Pipeline(make_stages(2, 4, 64), **options, **TRAINING)
    state = pipeline.init(jax.random.key(0), micro_batch)
    pipeline.step(state, [micro_batch] * 2)
    return plan_ipu_memory(pipeline)[0].num_temporary_bytes


@pytest.mark.parametrize(
    "mode", ["recompute_then_backpropagate", pytest.param("auto", marks=pytest.mark.thorough)]
)
def test_recomputation_on_one_ipu_needs_less_memory(mode):
    assert temp_bytes(mode) < 0.75 * temp_bytes(None)


def test_the_plan_of_one_ipu_and_of_shared_ones():
    plan = plan_memory(make(2, "grouped", "recompute_then_backpropagate", device_mapping=[0, 0]))
    assert [stage.num_live_bytes for stage in plan] == [ACTIVATION, 0]
    plan = plan_memory(make(4, "interleaved", "auto", device_mapping=[0, 1, 0, 1]))
    assert [stage.ipu for stage in plan] == [0, 1, 0, 1]
    assert plan[0].in_flight >= 4  # an IPU with two stages is slower, so that more are on their way


def test_forwards_only_hold_nothing():
    pipeline = engine.Pipeline(make_stages(3), num_micro_batches=4)
    pipeline.trace(make_step(1)[0])
    assert [stage.num_live_bytes for stage in plan_memory(pipeline)] == [0, 0, 0]


def test_jax_checkpoint_bounds_what_is_kept():
    def make_stage(index):
        def stage(x, labels):
            for layer in range(LAYERS):
                name = f"stage{index}/layer{layer}"
                block = jax.checkpoint(lambda x, name=name: models.dense(name, WIDTH, x, jnp.tanh))
                x = block(jnp.tanh(jnp.sin(x)) if layer == 0 else x)
            return models.cross_entropy(x, labels) if index == 1 else (x, labels)

        return stage

    pipeline = traced([make_stage(0), make_stage(1)])
    # What each block takes; nothing from within them.
    assert plan_memory(pipeline)[0].num_residual_bytes == LAYERS * ACTIVATION


# What an IPU takes.

MOMENTUM = optax.sgd(0.1, momentum=0.9)


def bytes_by_device(tree, memory_kind="device"):
    """Bytes of the leaves on each device, each array counted once."""
    found = collections.Counter()
    for array in {id(leaf): leaf for leaf in jax.tree.leaves(tree)}.values():
        if isinstance(array, jax.Array) and array.sharding.memory_kind == memory_kind:
            for device in array.devices():
                found[device.id] += array.nbytes
    return found


def run(pipeline):
    """The state after a step."""
    step = make_step()
    return pipeline.step(pipeline.init(jax.random.key(0), step[0]), step)[0]


def test_the_state_that_is_on_each_ipu():
    pipeline = make(
        3, "grouped", None, device_mapping=(2, 2, 0), optimizer=MOMENTUM, dispatch_plan=engine.Chunking()
    )
    state = pipeline.init(jax.random.key(0), make_step(1)[0])
    plans = plan_ipu_memory(pipeline)
    assert [plan.ipu for plan in plans] == [0, 2]
    variables, optimizer = bytes_by_device(state.variables), bytes_by_device(state.optimizer_state)
    for plan in plans:
        assert plan.num_variable_bytes == plan.num_accumulator_bytes == variables[plan.ipu]
        assert plan.num_optimizer_bytes == optimizer[plan.ipu]
        assert plan.num_host_bytes == 0
        own = [stage for stage in plan_memory(pipeline) if stage.ipu == plan.ipu]
        assert plan.num_activation_bytes == sum(stage.num_live_bytes for stage in own)
        assert plan.num_device_bytes == (
            plan.num_variable_bytes
            + plan.num_optimizer_bytes
            + plan.num_accumulator_bytes
            + plan.num_activation_bytes
            + plan.num_feed_bytes
        )


def test_an_ipu_that_only_infers_has_its_variables_alone():
    pipeline = engine.Pipeline(make_stages(3), num_micro_batches=NUM_MICRO_BATCHES)
    variables = bytes_by_device(pipeline.init(jax.random.key(0), make_step(1)[0]).variables)
    for plan in plan_ipu_memory(pipeline):
        assert plan.num_variable_bytes == variables[plan.ipu] > 0
        assert plan.num_optimizer_bytes == plan.num_accumulator_bytes == plan.num_activation_bytes == 0


def test_the_temporaries_are_those_of_the_largest_program(monkeypatch):
    # Else, without a persistent cache of JAX, a program that two IPUs share is compiled for one of them.
    monkeypatch.setattr(compilation, "is_portable", lambda _devices: False)
    pipeline = make(3, "grouped", None, dispatch_plan=engine.Chunking())
    before = plan_ipu_memory(pipeline)
    assert [plan.num_temporary_bytes for plan in before] == [None] * 3
    compiled = {0: [], 1: [], 2: []}
    original = jax.stages.Lowered.compile

    def compile_and_note(lowered, *arguments, **options):
        made = original(lowered, *arguments, **options)
        (device,) = jax.tree.leaves(made.input_shardings)[0].device_set
        compiled[device.id].append(made.memory_analysis().temp_size_in_bytes)
        return made

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_and_note)
    run(pipeline)
    assert all(len(sizes) >= 2 for sizes in compiled.values())
    after = plan_ipu_memory(pipeline)
    assert [plan.num_temporary_bytes for plan in after] == [max(compiled[ipu]) for ipu in range(3)]
    for known, plan in zip(before, after, strict=True):
        assert plan.num_device_bytes == known.num_device_bytes + plan.num_temporary_bytes


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize("plan", [engine.Chunking(), engine.Chunking(2)])
def test_what_is_fed_waits_where_it_is_read(plan):
    pipeline = make(3, "grouped", None, dispatch_plan=plan)
    before = bytes_by_device(jax.live_arrays())
    placed = pipeline.place_micro_batches(make_step())
    found = bytes_by_device(jax.live_arrays()) - before
    every = pipeline.updated_every(None)
    ahead = pipeline.prepare().num_fetched(every, every)
    for own in plan_ipu_memory(pipeline):
        assert own.num_feed_bytes == found[own.ipu] * ahead // NUM_MICRO_BATCHES
    (x, labels) = make_step(1)[0]
    assert found == {0: NUM_MICRO_BATCHES * x.nbytes, 2: NUM_MICRO_BATCHES * labels.nbytes}
    del placed


ALL = ["weights", "gradient_accumulation_buffers", "weight_update_variables"]


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize(
    ("offload", "mapping"),
    [(ALL, (0, 1, 2)), pytest.param(ALL[1:2], (0, 0, 0), marks=pytest.mark.thorough)],
    ids=str,
)
def test_what_is_offloaded_is_in_host_memory(offload, mapping):
    pipeline = make(3, "grouped", None, device_mapping=mapping, offload=offload, optimizer=MOMENTUM)
    before = bytes_by_device(jax.live_arrays(), "pinned_host")
    state = run(pipeline)
    host = bytes_by_device(jax.live_arrays(), "pinned_host") - before
    for plan in plan_ipu_memory(pipeline):
        assert plan.num_host_bytes == host[plan.ipu] > 0
        rest = bytes_by_device((state.variables, state.optimizer_state))[plan.ipu]
        assert plan.num_variable_bytes + plan.num_optimizer_bytes + plan.num_accumulator_bytes == rest


def test_each_kind_is_offloaded_alone():
    for place, kind in enumerate(ALL):
        pipeline = make(2, "grouped", None, offload=[kind], optimizer=MOMENTUM)
        (plan, *_others) = plan_ipu_memory(pipeline)
        left = [plan.num_variable_bytes, plan.num_accumulator_bytes, plan.num_optimizer_bytes]
        assert left.pop(place) == 0
        assert left == [plan.num_host_bytes] * 2  # all three are of one size


def test_a_shared_variable_is_copied_and_has_two_accumulators():
    def first(x, labels):
        return x @ models.weight("tied", x, size=WIDTH), labels

    def last(x, labels):
        return models.cross_entropy(x @ models.weight("tied", x, reuse=True, size=WIDTH).T, labels)

    num_bytes = 4 * WIDTH * WIDTH
    owner, other = plan_ipu_memory(traced([first, last]))
    assert owner.num_variable_bytes == other.num_variable_bytes == num_bytes
    assert owner.num_accumulator_bytes == other.num_accumulator_bytes == num_bytes


def test_one_device_has_what_is_in_flight_among_its_temporaries():
    pipeline = make(3, "grouped", None, device_mapping=[0, 0, 0])
    (before,) = plan_ipu_memory(pipeline)
    assert before.num_temporary_bytes is None
    state = run(pipeline)
    (plan,) = plan_ipu_memory(pipeline)
    assert plan.num_variable_bytes == bytes_by_device(state.variables)[0]
    assert plan.num_activation_bytes == 0
    held = sum(stage.num_live_bytes for stage in plan_memory(pipeline))
    assert plan.num_temporary_bytes == pytest.approx(held, rel=0.6)  # XLA keeps what suits it
    assert plan.num_feed_bytes % sum(leaf.nbytes for leaf in make_step(1)[0]) == 0
    assert plan.num_feed_bytes > 0
    grouped = {
        "device_mapping": [0, 0, 0],
        "num_micro_batches": 2,
        "num_serialized": NUM_MICRO_BATCHES // 2,
    }
    (in_groups,) = plan_ipu_memory(make(3, "sequential", None, **grouped))
    assert in_groups.num_feed_bytes == plan.num_feed_bytes


def test_one_device_keeps_no_gradients_between_steps():
    """Its program took the accumulators of the step before, and copied them before it added to them."""
    shape = (37, 41)  # of no other test's arrays
    pipeline = engine.Pipeline(
        [lambda w, x: x @ w],
        parameters=[np.zeros(shape, "float32")],
        num_micro_batches=2,
        loss=jnp.sum,
        optimizer=optax.adam(0.1),
        donate=True,
    )
    micro_batches = [np.ones((1, 37), "float32")] * 2
    state = pipeline.init(jax.random.key(0), micro_batches[0])
    for _step in range(2):
        state, _outputs = pipeline.step(state, micro_batches)
    jax.block_until_ready(state)
    gc.collect()
    assert sum(array.shape == shape for array in jax.live_arrays()) == 3  # the weight and Adam's moments
    (plan,) = plan_ipu_memory(pipeline)
    assert plan.num_accumulator_bytes == 37 * 41 * 4
    assert plan.num_temporary_bytes < plan.num_accumulator_bytes


def test_the_count_must_be_known():
    pipeline = make(2, "grouped", None, num_micro_batches=None)
    for plan in (plan_memory, plan_ipu_memory):
        with pytest.raises(ValueError, match="plan_memory: num_micro_batches must be given"):
            plan(pipeline)
    assert len(plan_memory(pipeline, 3)) == 2
    assert plan_ipu_memory(pipeline, 4)[0].num_activation_bytes > 0
