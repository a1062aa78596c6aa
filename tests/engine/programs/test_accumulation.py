"""How gradients are accumulated: dtypes, counts that are known at run only, groups of micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import engine
from ipu_pipeline.engine.execution.block_runner import BlockSizes, block_sizes
from ipu_pipeline.errors import OutOfRangeError
from ipu_pipeline.pipelining_ops import OptimizerFunctionOutput, PipelineSchedule, pipeline
from tests.support import beside, front, models, scheduled
from tests.support.compilations import compiled_in

ITERATIONS = "batch_serialization_iterations"


def rarely(*values):
    return pytest.param(*values, marks=pytest.mark.thorough)


def make(mapping, reduction, **options):
    return engine.Pipeline(
        scheduled.stages(2),
        optimizer=optax.sgd(0.1, momentum=0.9),
        device_mapping=mapping,
        reduction=reduction,
        **options,
    )


def make_steps(rng, counts):
    return [list(rng.normal(size=(count, 2, scheduled.SIZE)).astype("float32")) for count in counts]


# Counts given at each step.


@pytest.mark.parametrize(
    ("mapping", "options", "capacity"),
    [
        rarely([0, 0], {"reduction": "running_mean", "block_bytes": 200}, 5),  # in parts
        ([0, 1], {"reduction": "mean"}, None),
        # Groups: whole updates in a block, parts of two groups, and of one.
        rarely([0, 0], {"reduction": "sum", "num_serialized": 3}, None),
        ([0, 0], {"reduction": "mean", "num_serialized": 3, "block_bytes": 250}, 6),
        rarely([0, 0], {"reduction": "running_mean", "num_serialized": 3, "block_bytes": 1}, 3),
    ],
    ids=str,
)
def test_counts_that_are_given_at_each_step(mapping, options, capacity, rng):
    """Equal to a plain loop, whatever a block has room for."""
    factor = options.get("num_serialized", 1)
    schedule = {"schedule": "sequential"} if factor > 1 else {}
    pipeline = make(mapping, num_micro_batches=None, **options, **schedule)
    counts = (10, 11, 2) if capacity == 5 else (4, 2, 5)
    steps = make_steps(rng, [count * factor for count in counts])
    state = pipeline.init(jax.random.key(2), steps[0][0])
    expected = models.on_one_device(state)
    for count, step in zip(counts, steps, strict=True):
        state, outputs = pipeline.step(state, step, num_micro_batches=count)
        expected, wanted = beside.step_plainly(pipeline, expected, step)
        models.assert_trees_close(outputs.losses, wanted.losses)
        models.assert_trees_close(state.variables, expected.variables)
        models.assert_trees_close(state.optimizer_state, expected.optimizer_state)
    if capacity is not None:
        number = counts[0] * factor
        assert pipeline.prepare().sizes(number, number).capacity == capacity


@pytest.mark.parametrize("mapping", [[0, 0], [0, 1]])
def test_counts_share_compilations(mapping, rng, caplog):
    pipeline = make(mapping, "mean", num_micro_batches=None)
    (batches,) = make_steps(rng, [100])
    state = pipeline.init(jax.random.key(2), batches[0])

    def compiled(count):
        return compiled_in(lambda: pipeline.step(state, batches[:count], num_micro_batches=count), caplog)

    assert compiled(3)
    for count in (5, 7, 16, 1):
        assert compiled(count) == []
    if mapping == [0, 0]:  # does not fit a block: the parts before the last one are another program
        assert len(compiled(65)) == 1
        assert compiled(100) == []


def test_blocks_of_a_fixed_room():
    assert block_sizes(21, 7, 8, 2**20, 1, True) == BlockSizes(7, 21, 64)
    assert block_sizes(700, 7, 8, 2**20, 1, True) == BlockSizes(7, 63, 64)
    assert block_sizes(65, 65, 8, 2**20, 1, True) == BlockSizes(1, 33, 64)
    assert block_sizes(4, 4, 8, 24, 1, True) == BlockSizes(1, 2, 3)
    assert block_sizes(12, 12, 8, 2**20, 6, True) == BlockSizes(12, 12, 60)
    assert block_sizes(12, 12, 8, 64, 6, False) == BlockSizes(6, 6, 6)
    assert block_sizes(12, 12, 8, 1, 6, False) == BlockSizes(6, 6, 6)


def test_a_count_is_given_once():
    known = make([0, 0], "sum", num_micro_batches=2)
    unknown = make([0, 0], "sum", num_micro_batches=None)
    with pytest.raises(ValueError, match="must be given once.*the pipeline got 2, the step 3"):
        known.step(None, [], num_micro_batches=3)
    with pytest.raises(ValueError, match="must be given once.*the pipeline got None, the step None"):
        unknown.step(None, [])
    with pytest.raises(ValueError, match="num_micro_batches must be an integer of at least 1; got 0"):
        unknown.step(None, [], num_micro_batches=0)
    with pytest.raises(ValueError, match='num_serialized above 1 needs the schedule "sequential"'):
        make([0, 0], "sum", num_micro_batches=2, num_serialized=2)


def counting_model(as_placeholder, elements=None, **options):
    """A program whose count is a placeholder, or computed from one."""
    count = ipu.placeholder(np.int32, [], name="count")
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(elements or front.data())
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def function(rate, traced):
        return pipeline(
            [front.first_stage, front.second_stage],
            count if as_placeholder else traced + 1,
            inputs=[rate],
            infeed_queue=infeed,
            outfeed_queue=outfeed,
            optimizer_function=front.optimizer_function,
            outfeed_loss=True,
            repeat_count=2,
            **options,
        )

    program = front.compile_program(function, [np.float32(0.1), count])

    def run(session, value):
        session.run(program, {count: value if as_placeholder else value - 1})
        return session.run(outfeed.dequeue())

    return infeed, run


@pytest.mark.parametrize(
    ("as_placeholder", "mapping", "method"),
    [(True, [0, 0], "mean"), pytest.param(False, [0, 1], "running_mean", marks=pytest.mark.thorough)],
)
def test_traced_counts(as_placeholder, mapping, method, caplog):
    elements = list(front.data(16)())
    infeed, run = counting_model(as_placeholder, elements, device_mapping=mapping, reduction_method=method)
    with ipu.Session(seed=3) as session:
        session.run(infeed.initializer)
        for value in (0, -2):
            with pytest.raises(
                ValueError, match=f"gradient_accumulation_count must be from 1 to 2147483647.*is {value}"
            ):
                run(session, value)
        assert session.update_count() == 0
        losses = [run(session, 3)]
        variables = session.variables
        assert compiled_in(lambda: losses.append(run(session, 5)), caplog) == []
        assert session.update_count() == 4
        with pytest.raises(OutOfRangeError):
            run(session, 1)
    assert [len(part) for part in losses] == [6, 10]
    with ipu.Session(seed=3) as session:
        known = front.Model(
            elements[:6], gradient_accumulation_count=3, repeat_count=2, reduction_method=method
        )
        session.run(known.initializer)
        models.assert_trees_close(losses[0], known.run(session))
        models.assert_trees_close(variables, session.variables)


def test_the_older_name_of_the_count():
    """Graphcore's first SDKs had `pipeline_depth`."""
    model = front.Model(gradient_accumulation_count=None, pipeline_depth=4)
    (call,) = model.program.calls
    assert call.pipeline.options.num_micro_batches == 4
    with pytest.raises(ValueError, match="pipeline_depth is the older name of gradient_accumulation_count"):
        front.Model(gradient_accumulation_count=4, pipeline_depth=4)


def test_an_unusable_count_is_found_before_anything_runs():
    """Also where it is that of the second pipeline."""
    count = ipu.placeholder(np.int32, [], name="count")
    queues = [ipu.ipu_outfeed_queue.IPUOutfeedQueue() for _time in range(2)]

    def function(traced):
        for number, queue in zip((1, traced), queues, strict=True):
            pipeline([lambda: jnp.float32(1)], number, outfeed_queue=queue)

    program = front.compile_program(function, [count])
    with ipu.Session() as session:
        with pytest.raises(ValueError, match="gradient_accumulation_count must be from 1.*is 0"):
            session.run(program, {count: 0})
        assert len(session.run(queues[0].dequeue())) == 0
        session.run(program, {count: 4})
        assert [len(session.run(queue.dequeue())) for queue in queues] == [1, 4]


# Dtypes of accumulators.


def sums_of_ones(accumulator_dtype, mapping, dtype=jnp.bfloat16, **options):
    """Two variables whose 300 gradients are 1 each, after an update by their sum."""

    def stage(name):
        def add(total, x):
            weight = engine.get_variable(name, (), dtype, jax.nn.initializers.zeros)
            return total + weight * x, x

        return add

    made = engine.Pipeline(
        [stage("a"), stage("b")],
        num_micro_batches=300,
        loss=lambda total, _x: total.astype(jnp.float32),
        optimizer=optax.sgd(1.0),
        reduction="sum",
        device_mapping=mapping,
        accumulator_dtype=accumulator_dtype,
        **options,
    )
    ones = [(dtype(0), dtype(1))] * 300
    state, _outputs = made.step(made.init(jax.random.key(0), ones[0]), ones)
    assert {value.dtype for value in state.variables.values()} == {np.dtype(dtype)}
    return {name: float(value) for name, value in state.variables.items()}


@pytest.mark.parametrize(
    ("mapping", "options"),
    [
        pytest.param([0, 0], {"block_bytes": 400}, marks=pytest.mark.thorough),
        ([0, 1], {"dispatch_plan": engine.Chunking(100)}),
    ],
)
def test_accumulator_dtypes(mapping, options):
    # In bfloat16, 256 + 1 is 256.
    seen = []

    def choose(variable):
        seen.append((variable.name, variable.shape, variable.dtype))
        return "float32" if variable.name == "a" else None

    assert sums_of_ones(choose, mapping, **options) == {"a": -300, "b": -256}
    assert seen == [("a", (), jnp.bfloat16), ("b", (), jnp.bfloat16)]


@pytest.mark.parametrize(
    "group", [{}, pytest.param({"num_serialized": 2, "schedule": "sequential"}, marks=pytest.mark.thorough)]
)
def test_wide_accumulators_equal_the_reference(group, rng):
    """A float16 model with a momentum, which then is wide too."""

    def stage(x, labels):
        logits = x @ engine.get_variable("w", (12, 10), jnp.float16)
        return models.cross_entropy(logits.astype("float32"), labels)

    pipeline = engine.Pipeline(
        [lambda x, labels: (x, labels), stage],
        num_micro_batches=4 // group.get("num_serialized", 1),
        optimizer=optax.sgd(0.1, momentum=0.9),
        device_mapping=[0, 0] if group else [0, 1],
        accumulator_dtype=jnp.float32,
        **group,
    )
    step = models.mlp_batches(rng, 4, dtype="float16")
    wide = {"w": jnp.float32}
    state, _outputs = beside.train(  # roundings of float16
        pipeline, [step] * 2, seed=1, bound=2e-3, accumulator_dtypes=wide
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(state.optimizer_state)} == {np.dtype(np.float32)}


def test_accumulator_dtypes_of_the_front():
    chosen = []

    def choose(variable):
        chosen.append(variable.name)
        return jnp.float16 if variable.name.endswith("bias") else None

    model = front.Model(gradient_accumulation_dtype=choose)
    assert sorted(chosen) == [
        f"{stage}/dense/{name}" for stage in ("first", "second") for name in ("bias", "kernel")
    ]
    with front.session_of(model) as session:
        model.run(session)
    for given, message in (
        (jnp.int32, " must be a floating-point dtype; got int32"),
        ("wide", " must be a dtype; got 'wide'"),
        (lambda variable: "int8", " of variable first/dense/kernel must be a floating-point dtype"),
    ):
        with pytest.raises(ValueError, match=f"gradient_accumulation_dtype{message}"):
            front.Model(gradient_accumulation_dtype=given)
    with pytest.warns(UserWarning, match="gradient_accumulation_dtype will have no effect"):
        front.Model(optimizer_function=None, outfeed_loss=False, gradient_accumulation_dtype=jnp.float32)


# Reduction methods, given in every form.


def test_reduction_methods_in_every_form():
    method = ipu.gradient_accumulation.GradientAccumulationReductionMethod
    for given, wanted in (("Mean", "mean"), (method.RUNNING_MEAN, "running_mean")):
        (call,) = front.Model(reduction_method=given).program.calls
        assert call.pipeline.options.reduction == wanted


# Groups of micro-batches.


def watch(events, forward, backward=None):
    """A function of a value and a number that notes the number when the value, or its gradient, passes."""

    def passed(what, x, number):
        def note(x, number):
            events.append((what, int(number)))
            return x

        return jax.pure_callback(note, jax.ShapeDtypeStruct((), jnp.float32), x, number)

    @jax.custom_vjp
    def watched(x, number):
        return passed(forward, x, number)

    def pull_back(number, cotangent):
        return passed(backward, cotangent, number) if backward else cotangent, None

    watched.defvjp(lambda x, number: (watched(x, number), number), pull_back)
    return watched


@pytest.mark.parametrize("iterations", [pytest.param(1, marks=pytest.mark.thorough), 3])
def test_each_stage_takes_a_group_before_the_next_one_starts(iterations):
    """Seen by callbacks that the values pass through, so that they come in the order of the computation."""
    events = []

    def first(number):
        weight = ipu.get_variable("weight", (), initializer=1.0)
        watched = watch(events, "forward 0", "backward 0")
        return watched(weight * number.astype(jnp.float32), number), number

    def second(x, number):
        return jnp.square(
            watch(events, "stage 1")(x, number) * ipu.get_variable("scale", (), initializer=1.0)
        )

    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue([np.int32(number) for number in range(6)])
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    program = front.compile_pipeline(
        [first, second],
        6 // iterations,
        batch_serialization_iterations=iterations,
        infeed_queue=infeed,
        outfeed_queue=outfeed,
        optimizer_function=lambda loss: OptimizerFunctionOutput(optax.sgd(0.1), loss),
        device_mapping=[0, 0],
    )
    with front.session_of(infeed) as session:
        session.run(program)
        jax.effects_barrier()
        assert len(session.run(outfeed.dequeue())) == 6
    groups = [range(start, start + iterations) for start in range(0, 6, iterations)]
    order = ("forward 0", "stage 1", "backward 0")
    assert events == [(kind, number) for group in groups for kind in order for number in group]


@pytest.mark.thorough
def test_batch_serialization_of_the_front():
    """As many elements in one go are the same, whichever way they are grouped."""

    def run(count, iterations):
        options = {"gradient_accumulation_count": count, ITERATIONS: iterations, "outfeed_loss": False}
        model = front.Model(repeat_count=2, **options)
        assert model.program.num_ipus == (1 if iterations > 1 else 2)
        with front.session_of(model, seed=2) as session:
            outputs = model.run(session)
            assert session.update_count() == 2
            return outputs, session.variables

    one_by_one = run(6, 1)
    assert len(one_by_one[0][1]) == 12
    models.assert_trees_close(run(2, 3), one_by_one)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({ITERATIONS: 0}, ValueError, f"{ITERATIONS} must be from 1.*got 0"),
        ({ITERATIONS: 1.5}, TypeError, f"{ITERATIONS} must be an integer"),
        (
            {"device_mapping": [0, 1]},
            NotImplementedError,
            r"all the pipeline stages need to be mapped to a single IPU; device_mapping is \[0, 1\]",
        ),
        (
            {"pipeline_schedule": PipelineSchedule.Grouped},
            NotImplementedError,
            "Batch serialization is only supported with the `Sequential` schedule; got Grouped",
        ),
        (
            {"reduction_method": "mean"},
            ValueError,
            f"{ITERATIONS} != 1 is only supported when reduction_method is Gradient",
        ),
        (
            {"gradient_accumulation_count": 2**30},
            ValueError,
            f"gradient_accumulation_count times {ITERATIONS} must be at most 2147483647",
        ),
    ],
)
def test_wrong_batch_serialization(options, error, message):
    with pytest.raises(error, match=message):
        front.Model(**{ITERATIONS: 2, **options})


# Replicas.


@pytest.mark.parametrize("argument", ["replicated_optimizer_state_sharding", "replicated_weight_sharding"])
def test_nothing_is_sharded_over_one_replica(argument):
    with pytest.warns(UserWarning, match=f"{argument} will have no effect since there is one replica"):
        front.Model(**{argument: True})
    with pytest.raises(TypeError, match=f"{argument} must be True or False; got 'yes'"):
        front.Model(**{argument: "yes"})
    front.Model(**{argument: False})
