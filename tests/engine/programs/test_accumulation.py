"""How gradients are accumulated: dtypes, counts that are known at run only, groups of micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import engine
from ipu_pipeline.engine import reference
from ipu_pipeline.engine.execution.single_device.sizes import BlockSizes, block_sizes
from ipu_pipeline.errors import OutOfRangeError
from ipu_pipeline.pipelining_ops import OptimizerFunctionOutput, PipelineSchedule, pipeline
from tests.support import beside, front, models
from tests.support.compilations import compiled_in


def stages_with_everything():
    """Dropout, assigned statistics, a rate that travels, an output that is an input of the pipeline."""

    def first(rate, x, labels):
        with ipu.variable_scope("first"):
            count = ipu.get_variable("count", initializer=0.0, trainable=False)
            ipu.assign("count", count + 1.0)
            x = ipu.layers.Dropout(0.25)(ipu.layers.Dense(16, activation=jnp.tanh)(x))
        return rate, x + count * 0.01, labels

    def second(rate, x, labels):
        with ipu.variable_scope("second"):
            x = ipu.layers.BatchNormalization()(x)
            return rate, models.cross_entropy(ipu.layers.Dense(10)(x), labels), labels

    return [first, second]


def make(mapping, reduction, **options):
    return engine.Pipeline(
        stages_with_everything(),
        loss=lambda rate, loss, labels: loss,
        optimizer=lambda rate, loss, labels: optax.sgd(rate, momentum=0.9),
        device_mapping=mapping,
        reduction=reduction,
        **options,
    )


def assert_equals_reference(made, counts, rng, factor=1, **options):
    """Steps with these counts, compared one by one with a plain loop.

    Returns:
      The outputs of each step.
    """
    rate = np.float32(0.1)
    steps = [models.mlp_batches(rng, count * factor) for count in counts]
    state = made.init(jax.random.key(2), steps[0][0], rate)
    expected = models.on_one_device(state)
    found = []
    for count, micro_batches in zip(counts, steps, strict=True):
        given = {"num_micro_batches": count} if options else {}
        state, outputs = made.step(state, micro_batches, rate, **given)
        expected, expected_outputs = beside.step_plainly(made, expected, micro_batches, rate)
        models.assert_trees_close(outputs.outputs, expected_outputs.outputs)
        models.assert_trees_close(outputs.losses, expected_outputs.losses)
        models.assert_trees_close(state.variables, expected.variables)
        models.assert_trees_close(state.optimizer_state, expected.optimizer_state)
        found.append(outputs)
    assert float(state.variables["first/count"]) == sum(counts) * factor
    return found


# Counts given at each step.


@pytest.mark.parametrize(
    ("mapping", "reduction"),
    [([0, 0], "mean"), ([0, 0], "running_mean"), ([0, 1], "mean")],
)
def test_counts_that_are_given_at_each_step(mapping, reduction, rng):
    made = make(mapping, reduction, num_micro_batches=None)
    assert_equals_reference(made, [3, 5, 1], rng, given=True)


@pytest.mark.parametrize("mapping", [[0, 0], [0, 1]])
def test_counts_share_compilations(mapping, rng, caplog):
    made = make(mapping, "mean", num_micro_batches=None)
    rate = np.float32(0.1)
    batches = models.mlp_batches(rng, 100)
    state = made.init(jax.random.key(2), batches[0], rate)

    def step(count):
        nonlocal state
        state, _outputs = made.step(state, batches, rate, num_micro_batches=count)

    assert compiled_in(lambda: step(3), caplog)
    for count in (5, 7, 16, 1):
        assert compiled_in(lambda count=count: step(count), caplog) == []
    if mapping == [0, 0]:  # does not fit a block: the parts before the last one are another program
        assert len(compiled_in(lambda: step(65), caplog)) == 1
        assert compiled_in(lambda: step(100), caplog) == []


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


def counting_model(as_placeholder, **options):
    """A program whose count is a placeholder, or computed from one."""
    count = ipu.placeholder(np.int32, [], name="count")
    rate = ipu.placeholder(np.float32, [], name="rate")
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(front.data())
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def function(rate, traced):
        return pipeline(
            [front.first_stage, front.second_stage],
            gradient_accumulation_count=count if as_placeholder else traced + 1,
            inputs=[rate],
            infeed_queue=infeed,
            outfeed_queue=outfeed,
            optimizer_function=front.optimizer_function,
            outfeed_loss=True,
            **options,
        )

    program = front.compile_program(function, [rate, count])

    def run(session, value):
        session.run(program, {rate: 0.1, count: value if as_placeholder else value - 1})
        return session.run(outfeed.dequeue())

    return infeed, run


@pytest.mark.parametrize(
    ("as_placeholder", "mapping", "method"),
    [(True, [0, 0], "mean"), (False, [0, 1], "running_mean")],
)
def test_traced_counts(as_placeholder, mapping, method, caplog):
    infeed, run = counting_model(
        as_placeholder, device_mapping=mapping, repeat_count=2, reduction_method=method
    )
    with ipu.Session(seed=3) as session:
        session.run(infeed.initializer)
        losses = [run(session, 3)]
        assert compiled_in(lambda: losses.append(run(session, 5)), caplog) == []
        assert session.update_count() == 4
        variables = session.variables
    assert [len(part) for part in losses] == [6, 10]
    expected = []
    with ipu.Session(seed=3) as session:
        first = front.Model(gradient_accumulation_count=3, repeat_count=2, reduction_method=method)
        session.run(first.initializer)
        expected.append(first.run(session))
        # The second run's elements follow those of the first.
        rest = list(zip(range(16), front.data()(), strict=False))[6:]
        second = front.Model(
            [element for _number, element in rest],
            gradient_accumulation_count=5,
            repeat_count=2,
            reduction_method=method,
        )
        session.run(second.initializer)
        expected.append(second.run(session))
        models.assert_trees_close(losses, expected)
        models.assert_trees_close(variables, session.variables)


def test_the_older_name_of_the_count():
    """Graphcore's first SDKs had `pipeline_depth`."""
    model = front.Model(gradient_accumulation_count=None, pipeline_depth=4)
    (call,) = model.program.calls
    assert call.pipeline.num_micro_batches == 4
    with pytest.raises(ValueError, match="pipeline_depth is the older name of gradient_accumulation_count"):
        front.Model(gradient_accumulation_count=4, pipeline_depth=4)


@pytest.mark.parametrize("as_placeholder", [True, False])
def test_counts_that_are_not_usable(as_placeholder):
    infeed, run = counting_model(as_placeholder)
    with ipu.Session(seed=3) as session:
        session.run(infeed.initializer)
        for value in (0, -2):
            with pytest.raises(
                ValueError, match=f"gradient_accumulation_count must be from 1 to 2147483647.*is {value}"
            ):
                run(session, value)
        assert session.update_count() == 0
        assert len(run(session, 2)) == 2


def test_an_unusable_count_is_found_before_anything_runs():
    """Also where it is that of the second pipeline."""
    count = ipu.placeholder(np.int32, [], name="count")
    queues = [ipu.ipu_outfeed_queue.IPUOutfeedQueue() for _time in range(2)]

    def function(traced):
        for number, queue in zip((1, traced), queues, strict=True):
            pipeline([lambda: jnp.float32(1)], gradient_accumulation_count=number, outfeed_queue=queue)

    program = front.compile_program(function, [count])
    with ipu.Session() as session:
        with pytest.raises(ValueError, match="gradient_accumulation_count must be from 1.*is 0"):
            session.run(program, {count: 0})
        assert len(session.run(queues[0].dequeue())) == 0
        session.run(program, {count: 4})
        assert [len(session.run(queue.dequeue())) for queue in queues] == [1, 4]


def test_long_counts_known_at_run(rng):
    """An update that does not fit a block: its parts, with a count that is not compiled for."""
    made = make([0, 0], "running_mean", num_micro_batches=None, block_bytes=4 * 300)
    assert_equals_reference(made, [10, 11, 2], rng, given=True)
    assert made.prepare().sizes(10, 10) == BlockSizes(1, 5, 5)


def test_the_data_end_with_a_count_known_at_run():
    rate = ipu.placeholder(np.float32, [])
    count = ipu.placeholder(np.int32, [])
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(front.data(7))
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    program = front.compile_program(
        lambda rate, count: pipeline(
            [front.first_stage, front.second_stage],
            gradient_accumulation_count=count,
            repeat_count=5,
            inputs=[rate],
            infeed_queue=infeed,
            outfeed_queue=outfeed,
            optimizer_function=front.optimizer_function,
            outfeed_loss=True,
            device_mapping=[0, 0],
        ),
        [rate, count],
    )
    with ipu.Session() as session:
        session.run(infeed.initializer)
        with pytest.raises(OutOfRangeError):
            session.run(program, {rate: 0.1, count: 3})
        assert session.update_count() == 2
        assert len(session.run(outfeed.dequeue())) == 6


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
        device_mapping=mapping,
        accumulator_dtype=accumulator_dtype,
        **options,
    )
    ones = [(dtype(0), dtype(1))] * 300
    state, _outputs = made.step(made.init(jax.random.key(0), ones[0]), ones)
    assert {value.dtype for value in state.variables.values()} == {np.dtype(dtype)}
    return {name: float(value) for name, value in state.variables.items()}


@pytest.mark.parametrize("options", [{}, {"block_bytes": 400}])
@pytest.mark.parametrize("mapping", [[0, 0], [0, 1]])
def test_accumulator_dtypes(mapping, options):
    # In bfloat16, 256 + 1 is 256.
    assert sums_of_ones(None, mapping, **options) == {"a": -256, "b": -256}
    assert sums_of_ones(jnp.float32, mapping, **options) == {"a": -300, "b": -300}
    seen = []

    def choose(variable):
        seen.append((variable.name, variable.shape, variable.dtype))
        return "float32" if variable.name == "a" else None

    assert sums_of_ones(choose, mapping, **options) == {"a": -300, "b": -256}
    assert seen == [("a", (), jnp.bfloat16), ("b", (), jnp.bfloat16)]


@pytest.mark.parametrize("mapping", [[0, 0], [0, 1]])
@pytest.mark.parametrize("size", [1, 2])
def test_wide_accumulators_equal_the_reference(mapping, size, rng):
    """A float16 model with a momentum, which then is wide too."""
    group = {"num_serialized": size, "schedule": "sequential"} if mapping == [0, 0] else {}
    optimizer = optax.sgd(0.1, momentum=0.9)

    def stage(x, labels):
        kernel = engine.get_variable("kernel", (12, 10), jnp.float16)
        return x @ kernel, labels

    def last(x, labels):
        bias = engine.get_variable("bias", (10,), jnp.float16)
        return models.cross_entropy((x + bias).astype(jnp.float32), labels)

    made = engine.Pipeline(
        [stage, last],
        num_micro_batches=4 // group.get("num_serialized", 1),
        loss=lambda loss: loss,
        optimizer=optimizer,
        device_mapping=mapping,
        accumulator_dtype=jnp.float32,
        **group,
    )
    steps = [models.mlp_batches(rng, 4, dtype="float16") for _step in range(2)]
    state = made.init(jax.random.key(1), steps[0][0])
    expected = models.on_one_device(state)
    for batches in steps:
        state, _outputs = made.step(state, batches)
        expected, _expected_outputs = reference.step(
            made.traced,
            expected,
            batches,
            optimizer=optimizer,
            accumulator_dtypes=dict.fromkeys(("kernel", "bias"), jnp.float32),
        )
        models.assert_trees_close(state.variables, expected.variables, 2e-3)  # roundings of float16
        models.assert_trees_close(state.optimizer_state, expected.optimizer_state, 2e-3)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.optimizer_state)} == {np.dtype(np.float32)}


@pytest.mark.parametrize("mapping", [[0, 0], [0, 1]])
def test_accumulators_are_sums_by_hand(mapping, rng):
    """Gradients of a float16 model in float32: what has been accumulated before the update."""

    def stage(x):
        kernel = engine.get_variable("kernel", (12, 3), jnp.float16)
        return jnp.tanh(x @ kernel)

    def last(x):
        bias = engine.get_variable("bias", (3,), jnp.float16)
        return jnp.sum(jnp.square(x + bias))

    made = engine.Pipeline(
        [stage, last],
        num_micro_batches=6,
        loss=lambda loss: loss,
        optimizer=optax.sgd(0.1),
        device_mapping=mapping,
        accumulator_dtype=jnp.float32,
        block_bytes=0,  # parts of one micro-batch: five have run when the update is due
    )
    batches = [rng.normal(size=(4, 12)).astype(np.float16) for _number in range(6)]
    state = made.init(jax.random.key(1), batches[0])
    executor = made.prepare()
    left = iter(batches)
    pending = made.accumulate(state, lambda _wanted: [executor.place_element([next(left)])], [])
    num_summed = 6 if mapping == [0, 1] else 5
    accumulators = (
        pending.begun.totals.accumulators if num_summed == 5 else pending.stepped.columns[0].accumulators
    )
    place = models.on_one_device(state)
    grads = [
        reference.gradients(made.traced, place, batch, index, (), ["kernel", "bias"])[1]
        for index, batch in enumerate(batches[:num_summed])
    ]
    for name in ("kernel", "bias"):
        total = sum(np.asarray(grad[name], np.float32) for grad in grads)
        assert accumulators[name].dtype == np.float32
        models.assert_trees_close(accumulators[name], total, 2e-3)  # roundings of float16
        assert not np.array_equal(total, total.astype(np.float16))


def test_accumulator_dtypes_of_the_front(rng):
    chosen = []

    def choose(variable):
        chosen.append(variable.name)
        return jnp.float16 if variable.name.endswith("bias") else None

    model = front.Model(gradient_accumulation_dtype=choose)
    assert sorted(chosen) == [
        "first/dense/bias",
        "first/dense/kernel",
        "second/dense/bias",
        "second/dense/kernel",
    ]
    with ipu.Session() as session:
        session.run(model.initializer)
        model.run(session)
    accumulators = model.program.calls[0].pipeline._accumulators
    assert {name: value.dtype.name for name, value in accumulators.items()} == {
        name: "float16" if name.endswith("bias") else "float32" for name in chosen
    }
    with pytest.raises(
        ValueError, match="gradient_accumulation_dtype must be a floating-point dtype; got int32"
    ):
        front.Model(gradient_accumulation_dtype=jnp.int32)
    with pytest.raises(ValueError, match="gradient_accumulation_dtype must be a dtype; got 'wide'"):
        front.Model(gradient_accumulation_dtype="wide")
    message = "gradient_accumulation_dtype of variable first/dense/kernel must be a floating-point dtype"
    with pytest.raises(ValueError, match=message):
        front.Model(gradient_accumulation_dtype=lambda variable: "int8")
    with pytest.warns(UserWarning, match="gradient_accumulation_dtype will have no effect"):
        front.Model(optimizer_function=None, outfeed_loss=False, gradient_accumulation_dtype=jnp.float32)


# Reduction methods, given in every form.


def test_reduction_methods_in_every_form():
    method = ipu.gradient_accumulation.GradientAccumulationReductionMethod
    forms = {
        "sum": ("sum", method.SUM),
        "mean": ("MEAN", "Mean", method.MEAN),
        "running_mean": ("running_mean", "Running_Mean", method.RUNNING_MEAN),
    }
    for wanted, given in forms.items():
        for form in given:
            (call,) = front.Model(reduction_method=form).program.calls
            assert call.pipeline.options.reduction == wanted


# Groups of micro-batches.


@pytest.mark.parametrize(
    ("reduction", "block_bytes", "count"),
    [("sum", 2**20, None), ("mean", 2100, None), ("running_mean", 1, 4)],
)
def test_groups_equal_the_reference(reduction, block_bytes, count, rng):
    """Whole updates in a block, parts of two groups, and of one."""
    made = make(
        [0, 0],
        reduction,
        num_micro_batches=count,
        num_serialized=3,
        schedule="sequential",
        block_bytes=block_bytes,
    )
    options = {} if count else {"given": True}
    assert_equals_reference(made, [4, 4] if count else [4, 2, 5], rng, factor=3, **options)
    sizes = made.prepare().sizes(12, 12)
    assert (sizes.unit, sizes.capacity) == {2**20: (12, 12), 2100: (3, 6), 1: (3, 3)}[block_bytes]


@pytest.mark.parametrize("iterations", [1, 3])
def test_each_stage_takes_a_group_before_the_next_one_starts(iterations):
    """Seen by callbacks that the values pass through, so that they come in the order of the computation."""
    events = []

    def passed(what, x, number):
        def note(x, number):
            events.append((what, int(number)))
            return x

        return jax.pure_callback(note, jax.ShapeDtypeStruct((), jnp.float32), x, number)

    @jax.custom_vjp
    def watched(x, number):
        return passed("forward 0", x, number)

    def backward(number, cotangent):
        return passed("backward 0", cotangent, number), None

    watched.defvjp(lambda x, number: (watched(x, number), number), backward)

    @jax.custom_vjp
    def watched_last(x, number):
        return passed("stage 1", x, number)

    watched_last.defvjp(
        lambda x, number: (watched_last(x, number), number), lambda _number, cotangent: (cotangent, None)
    )

    def first(number):
        weight = ipu.get_variable("weight", (), initializer=jax.nn.initializers.ones)
        return watched(weight * number.astype(jnp.float32), number), number

    def second(x, number):
        scale = ipu.get_variable("scale", (), initializer=jax.nn.initializers.ones)
        return jnp.square(watched_last(x, number) * scale)

    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue([np.int32(number) for number in range(6)])
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    program = front.compile_program(
        lambda: pipeline(
            [first, second],
            gradient_accumulation_count=6 // iterations,
            batch_serialization_iterations=iterations,
            infeed_queue=infeed,
            outfeed_queue=outfeed,
            optimizer_function=lambda loss: OptimizerFunctionOutput(optax.sgd(0.1), loss),
            device_mapping=[0, 0],
        )
    )
    with ipu.Session() as session:
        session.run(infeed.initializer)
        session.run(program)
        jax.effects_barrier()
        assert len(session.run(outfeed.dequeue())) == 6
    groups = [range(start, start + iterations) for start in range(0, 6, iterations)]
    order = ("forward 0", "stage 1", "backward 0")
    assert events == [(kind, number) for group in groups for kind in order for number in group]


@pytest.mark.parametrize("as_placeholder", [False, True])
def test_batch_serialization_of_the_front(as_placeholder):
    """As many elements in one go are the same, whichever way they are grouped."""

    def run(count, iterations):
        placeholder = ipu.placeholder(np.int32, [])
        infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(front.data())
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

        def function(rate, _count):
            return pipeline(
                [front.first_stage, front.second_stage],
                gradient_accumulation_count=placeholder if as_placeholder else count,
                batch_serialization_iterations=iterations,
                inputs=[rate],
                infeed_queue=infeed,
                outfeed_queue=outfeed,
                optimizer_function=front.optimizer_function,
                repeat_count=2,
            )

        program = front.compile_program(function, [np.float32(0.1), placeholder])
        assert program.num_ipus == (1 if iterations > 1 else 2)
        with ipu.Session(seed=2) as session:
            session.run(infeed.initializer)
            session.run(program, {placeholder: count})
            assert session.update_count() == 2
            return session.run(outfeed.dequeue()), session.variables

    found = [run(count, iterations) for count, iterations in ((6, 1), (2, 3), (1, 6))]
    assert len(found[0][0][1]) == 12
    for other in found[1:]:
        models.assert_trees_close(other, found[0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"batch_serialization_iterations": 0},
            ValueError,
            "batch_serialization_iterations must be from 1.*got 0",
        ),
        (
            {"batch_serialization_iterations": 1.5},
            TypeError,
            "batch_serialization_iterations must be an integer",
        ),
        (
            {"batch_serialization_iterations": 2, "device_mapping": [0, 1]},
            NotImplementedError,
            r"all the pipeline stages need to be mapped to a single IPU; device_mapping is \[0, 1\]",
        ),
        (
            {"batch_serialization_iterations": 2, "pipeline_schedule": PipelineSchedule.Grouped},
            NotImplementedError,
            "Batch serialization is only supported with the `Sequential` schedule; got Grouped",
        ),
        (
            {"batch_serialization_iterations": 2, "reduction_method": "mean"},
            ValueError,
            "batch_serialization_iterations != 1 is only supported when reduction_method is Gradient",
        ),
        (
            {"batch_serialization_iterations": 2, "gradient_accumulation_count": 2**30},
            ValueError,
            "gradient_accumulation_count times batch_serialization_iterations must be at most 2147483647",
        ),
    ],
)
def test_wrong_batch_serialization(options, error, message):
    with pytest.raises(error, match=message):
        front.Model(**options)
    with pytest.raises(ValueError, match='num_serialized above 1 needs the schedule "sequential"'):
        make([0, 0], "sum", num_micro_batches=2, num_serialized=2)


# Replicas.


@pytest.mark.parametrize("argument", ["replicated_optimizer_state_sharding", "replicated_weight_sharding"])
def test_nothing_is_sharded_over_one_replica(argument):
    with pytest.warns(UserWarning, match=f"{argument} will have no effect since there is one replica"):
        front.Model(**{argument: True})
    with pytest.raises(TypeError, match=f"{argument} must be True or False; got 'yes'"):
        front.Model(**{argument: "yes"})
    front.Model(**{argument: False})
