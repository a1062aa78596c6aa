"""engine.Pipeline: its arguments, its state, and models that are not a plain chain."""

import concurrent.futures
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine import Action, ActionKind, OutOfRangeError
from ipu_pipeline.engine.state import Collected
from ipu_pipeline.engine.step_micro_batches import StepFeed
from tests.support import beside, models
from tests.support.compilations import compilations


def first(x):
    return x


def make(stages, *, count=4, optimizer=None, loss=first, **options):
    return engine.Pipeline(
        stages, num_micro_batches=count, loss=loss, optimizer=optimizer or optax.sgd(0.1), **options
    )


def run_both(pipeline, micro_batches, *inputs, updates=2, **others):
    return beside.train(pipeline, [micro_batches] * updates, *inputs, **others)


def arrays(rng, count, *shapes):
    return [tuple(rng.normal(size=shape).astype("float32") for shape in shapes) for _ in range(count)]


def test_integers_booleans_constants_and_stages_without_variables(rng):
    def stage0(x, indices):
        return {"x": x, "is_even": indices % 2 == 0, "indices": indices, "constant": jnp.arange(3)}

    def stage1(*, x, is_even, indices, constant):
        table = engine.get_variable("table", (7, 6))
        return {"y": x + table[indices], "is_even": is_even, "constant": constant}

    def stage2(y, is_even, constant):
        return jnp.mean(jnp.where(is_even[:, None], y, 0.0) ** 2), constant, is_even

    micro_batches = [(x, rng.integers(0, 7, 3).astype("int32")) for (x,) in arrays(rng, 4, (3, 6))]
    pipeline = make([stage0, stage1, stage2], loss=lambda loss, constant, is_even: loss)
    _state, outputs = run_both(pipeline, micro_batches)
    np.testing.assert_array_equal(outputs.outputs[2][1], np.arange(3))
    np.testing.assert_array_equal(outputs.outputs[2][2], micro_batches[2][1] % 2 == 0)


@pytest.mark.parametrize("mapping", [(0, 1, 2), (0, 0, 0)])
def test_a_value_passed_on_twice_gets_the_sum_of_its_gradients(mapping, rng):
    stages = [
        lambda x: x * engine.get_variable("w", (), initializer=1.0),
        lambda y: (y, {"again": y, "and": (y,)}),
        lambda a, rest: a + 10 * rest["again"] + 100 * rest["and"][0],
    ]
    pipeline = make(stages, count=1, optimizer=optax.sgd(1.0), device_mapping=mapping)
    state = pipeline.init(jax.random.key(0), np.float32(1))
    state, outputs = pipeline.step(state, [np.float32(1)])
    assert outputs.losses == [111]
    assert state.variables["w"] == 1 - 111


def test_printing_gradients(rng, capfd):
    @jax.custom_vjp
    def printing(x):
        return x

    def backward(_residual, gradient):
        jax.debug.print("gradient of {} numbers", gradient.size)
        return (gradient,)

    printing.defvjp(lambda x: (x, None), backward)

    def first_stage(x):
        jax.debug.print("forward")
        return printing(models.dense("a", 6, x))

    pipeline = make([first_stage, lambda x: jnp.mean(models.dense("b", 2, x) ** 2)])
    micro_batches = arrays(rng, 4, (3, 6))
    jax.block_until_ready(pipeline.step(pipeline.init(jax.random.key(0), micro_batches[0]), micro_batches))
    jax.effects_barrier()
    printed = capfd.readouterr().out
    assert printed.count("gradient of 18 numbers") == 4
    assert printed.count("forward") == 4


def test_stopped_gradients_across_stages(rng):
    def halved(x):
        return jax.lax.while_loop(lambda c: jnp.sum(c**2) > 1, lambda c: c * 0.5, x)  # no reverse mode

    def stage0(x):
        y = models.dense("a", 6, x)
        return y, jax.lax.stop_gradient(y)

    pipeline = make([stage0, lambda y, z: jnp.mean(models.dense("b", 6, y) * halved(z))])
    run_both(pipeline, arrays(rng, 4, (3, 6)))


def test_steps_at_the_same_time_and_within_each_other(rng):
    pipeline = make(models.mlp_stages(2))
    micro_batches = models.mlp_batches(rng, 4)
    states = [pipeline.init(jax.random.key(seed), micro_batches[0]) for seed in range(2)]
    expected = [pipeline.step(state, micro_batches)[0].variables for state in states]

    def nested():
        for number, micro_batch in enumerate(micro_batches):
            if number == 2:
                inner, _outputs = pipeline.step(states[1], micro_batches)
                models.assert_trees_close(inner.variables, expected[1], 0.0)
            yield micro_batch

    outer, _outputs = pipeline.step(states[0], nested())
    models.assert_trees_close(outer.variables, expected[0], 0.0)


def test_threads_take_the_first_step_at_the_same_time(rng):
    micro_batches = models.mlp_batches(rng, 4)

    def step(pipeline):
        return pipeline.step(pipeline.init(jax.random.key(0), micro_batches[0]), micro_batches)[0].variables

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        found = list(threads.map(step, [make(models.mlp_stages(2))] * 3))
    models.assert_trees_close(found, [step(make(models.mlp_stages(2)))] * 3, 0.0)


@pytest.mark.parametrize(("schedule", "mapping"), [("zero_bubble", (0, 1, 2)), ("interleaved", (0, 0, 0))])
def test_arrays_that_are_written_in_place(schedule, mapping, rng):
    """In a forward, and in the backward of a custom derivative."""

    @jax.custom_vjp
    def activated(y):
        return jnp.tanh(y)

    def backward(output, gradient):
        result = jax.new_ref(jnp.zeros_like(gradient))
        result[...] = gradient * (1 - output**2)
        return (result[...],)

    activated.defvjp(lambda y: (jnp.tanh(y), jnp.tanh(y)), backward)

    def middle(y):
        array = jax.new_ref(models.dense("b", 6, y, activated))
        array[0] = 2 * array[1]
        return array[...]

    def last(y):
        return jnp.mean(models.dense("c", 6, y, activated) ** 2)

    stages = [lambda x: models.dense("a", 6, x), middle, last]
    run_both(make(stages, schedule=schedule, device_mapping=mapping), arrays(rng, 4, (3, 6)))


def test_a_state_of_numpy_arrays_is_copied(rng):
    stages = [lambda x: x * engine.get_variable("kept", (64,), trainable=False)]
    pipeline, x = engine.Pipeline(stages, num_micro_batches=1), np.ones(64, "float32")
    state = pipeline.init(jax.random.key(0), x)
    host = np.zeros(80, "float32")
    host = host[(-host.ctypes.data % 64) // 4 :][:64]  # aligned, so that JAX would share it
    host[:] = 3
    state, _outputs = pipeline.step(dataclasses.replace(state, variables={"kept": host}), [x])
    host[:] = 7
    np.testing.assert_array_equal(state.variables["kept"], np.full(64, 3, "float32"))


def test_inputs_among_the_outputs(rng):
    pipeline = engine.Pipeline([lambda c, x: (x, c), lambda x, c: (x, c)], num_micro_batches=2)
    constant = np.arange(3.0)
    state = pipeline.init(jax.random.key(0), np.float32(1), constant)
    _state, outputs = pipeline.step(state, [np.float32(1)] * 2, constant)
    constant[:] = 7
    for x, c in outputs.outputs:
        assert isinstance(c, jax.Array)
        assert c.dtype == np.float32
        np.testing.assert_array_equal(c, [0, 1, 2])
        assert x == 1


def test_a_failed_trace_can_be_repeated():
    losses = iter([lambda x: x, jnp.sum])
    pipeline = make([stage_with_variable], loss=lambda x: next(losses)(x))
    x = np.zeros(3, "float32")
    with pytest.raises(ValueError, match="loss must be a scalar"):
        pipeline.trace(x)
    pipeline.trace(x)


def test_an_optimizer_that_captures_a_traced_value():
    def function(rate):
        pipeline = make([stage_with_variable], loss=jnp.sum, optimizer=lambda x: optax.sgd(rate))
        pipeline.trace(np.zeros(3, "float32"))

    with pytest.raises(ValueError, match="Trying to capture the tensor float32.*in the optimizer"):
        jax.make_jaxpr(function)(np.float32(1))


def test_a_loss_made_by_an_earlier_stage(rng):
    pipeline = make([lambda x: jnp.mean(models.dense("a", 6, x) ** 2), lambda loss: loss])
    run_both(pipeline, arrays(rng, 4, (3, 6)))


def test_each_stage_s_variables_are_on_its_own_device(rng):
    optimizer = optax.sgd(0.1, momentum=0.9)
    pipeline = make(models.mlp_stages(3), optimizer=optimizer, device_mapping=[3, 0, 2])
    micro_batches = models.mlp_batches(rng, 4)
    state, _outputs = pipeline.step(pipeline.init(jax.random.key(0), micro_batches[0]), micro_batches)
    for index, ipu in enumerate([3, 3, 0, 2]):
        device = {jax.devices()[ipu]}
        for name in (f"dense{index}/kernel", f"dense{index}/bias"):
            assert state.variables[name].devices() == device
            assert state.optimizer_state[0].trace[name].devices() == device


def test_donate_reuses_the_state_s_memory(rng):
    micro_batches, optimizer = models.mlp_batches(rng, 4), optax.sgd(0.1, momentum=0.9)
    pipelines = [make(models.mlp_stages(2), optimizer=optimizer, donate=donate) for donate in (False, True)]
    # After a step all is XLA's own; some memory of initial values may be NumPy's.
    before = [
        own.step(own.init(jax.random.key(0), micro_batches[0]), micro_batches)[0] for own in pipelines
    ]
    pointers = [{n: a.unsafe_buffer_pointer() for n, a in own.variables.items()} for own in before]
    kept, donated = (
        own.step(state, micro_batches)[0] for own, state in zip(pipelines, before, strict=True)
    )
    assert [{a.is_deleted() for a in own.variables.values()} for own in before] == [{False}, {True}]
    assert {n: a.unsafe_buffer_pointer() for n, a in donated.variables.items()} == pointers[1]
    models.assert_trees_close(donated.variables, kept.variables, 0.0)


def test_random_keys_differ_by_micro_batch_and_step_and_not_by_split(rng):
    def noise(x):
        with engine.variable_scope("noise"):
            return x * 0 + jax.random.uniform(engine.next_rng_key(), x.shape)

    (x,) = arrays(rng, 1, (3,))
    found = []
    for stages in ([lambda x: (noise(x), noise(x))], [lambda x: (noise(x), x), lambda a, x: (a, noise(x))]):
        pipeline = engine.Pipeline(stages, num_micro_batches=2)
        state = pipeline.init(jax.random.key(5), x)
        state, one = pipeline.step(state, [x, x])
        state, two = pipeline.step(state, [x, x])
        assert (state.update_count, state.execution_count) == (0, 2)
        _state, three = pipeline.step(dataclasses.replace(state, key=jax.random.key(6)), [x, x])
        found.append(np.array(jax.tree.leaves([one.outputs, two.outputs, three.outputs])))
    np.testing.assert_array_equal(found[0], found[1])
    assert len(np.unique(found[0].reshape(12, -1), axis=0)) == 12


def test_only_some_variables_trained(rng):
    trained = ["dense0/kernel", "dense3/bias"]
    pipeline = make(
        models.mlp_stages(2),
        optimizer=optax.sgd(0.1, momentum=0.9),
        trained=lambda variables: [name for name in variables if name in trained],
    )
    micro_batches = models.mlp_batches(rng, 4)
    start = pipeline.init(jax.random.key(0), micro_batches[0])
    state, _outputs = run_both(pipeline, micro_batches, trained=trained, updates=1)
    changed = [n for n in start.variables if not np.array_equal(start.variables[n], state.variables[n])]
    assert changed == trained
    with pytest.raises(ValueError, match="'nothing' to train does not exist"):
        make(models.mlp_stages(2), trained=["nothing"]).trace(micro_batches[0])


def test_a_user_s_schedule(rng):
    def all_forwards_first(num_stages, num_micro_batches, device_mapping, training):
        kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
        return [
            [Action(kind, stage, number) for kind in kinds for number in range(num_micro_batches)]
            for stage in range(num_stages)
        ]

    pipeline = make(models.mlp_stages(2), schedule=all_forwards_first)
    run_both(pipeline, models.mlp_batches(rng, 4), updates=1)


def test_compile_counts(rng):
    micro_batches, counts = models.mlp_batches(rng, 8), []
    for count in (2, 8):
        options = {"reduction": "running_mean", "dispatch_plan": engine.Chunking()}
        pipeline = make(models.mlp_stages(3), count=count, donate=True, **options)
        state = jax.block_until_ready(pipeline.init(jax.random.key(0), micro_batches[0]))
        for _step in range(3):
            with compilations() as compiled:
                state, outputs = pipeline.step(state, micro_batches[:count])
                jax.block_until_ready((state, outputs.losses))
            counts.append(len(compiled))
    # Two forwards, two backwards, the last stage's one, three updates; nothing after the first step.
    assert counts == [8, 0, 0] * 2


def test_too_few_or_too_many_micro_batches_leave_the_state_alone(rng):
    pipeline = make(models.mlp_stages(2), donate=True)
    micro_batches = models.mlp_batches(rng, 4)
    state = pipeline.init(jax.random.key(0), micro_batches[0])
    with pytest.raises(OutOfRangeError, match="ended after 3 of the 4 micro-batches"):
        pipeline.step(state, micro_batches[:3])
    with pytest.raises(ValueError, match="a step takes 4; the list has 5. Give each step its own, or all"):
        pipeline.step(state, [*micro_batches, micro_batches[0]])
    expected, _outputs = beside.step_plainly(pipeline, beside.copied(state), micro_batches)
    state, _outputs = pipeline.step(state, micro_batches)  # the accumulators start from zero again
    models.assert_trees_close(state.variables, expected.variables)


def test_micro_batches_that_change(rng):
    pipeline = make(models.mlp_stages(2), max_shapes=1)
    micro_batches = models.mlp_batches(rng, 4)
    state = pipeline.init(jax.random.key(0), micro_batches[0])
    ragged = [*micro_batches[:3], *models.mlp_batches(rng, 1, size=3)]
    message = r"Micro-batch 3 .*float32\[4, 12\]; got float32\[3, 12\].*drop_remainder"
    with pytest.raises(ValueError, match=message):
        pipeline.step(state, ragged)


def test_arguments_that_change_afterwards_do_not_matter(rng):
    """`device_put` of an aligned NumPy array shares its memory on a CPU."""
    pipeline = make(models.mlp_stages(2))
    micro_batches = models.mlp_batches(rng, 4)
    state = pipeline.init(jax.random.key(0), micro_batches[0])
    expected, _outputs = pipeline.step(state, [jax.tree.map(np.array, mb) for mb in micro_batches])

    def reusing_one_buffer():
        x, labels = (np.empty_like(part) for part in micro_batches[0])
        for new_x, new_labels in micro_batches:
            x[:], labels[:] = new_x, new_labels
            yield x, labels
        x[:] = np.nan

    actual, _outputs = pipeline.step(state, reusing_one_buffer())
    models.assert_trees_close(actual.variables, expected.variables, 0.0)


def stage_with_variable(x):
    return x * engine.get_variable("v", ())


@pytest.mark.parametrize(
    ("stages", "loss", "error", "message"),
    [
        ([stage_with_variable], lambda x: x, ValueError, r"loss must be a scalar, but it has shape \(3,\)"),
        (
            [stage_with_variable],
            lambda x: jnp.int32(1),
            ValueError,
            "floating-point number, but it is int32",
        ),
        (  # of which the mean of both was advised
            [stage_with_variable],
            lambda x: (jnp.sum(x), jnp.max(x)),
            TypeError,
            r"loss must be a scalar by itself; got a tuple of 2 arrays. Return other values from the last",
        ),
        (
            [stage_with_variable],
            lambda x: {"loss": jnp.sum(x)},
            TypeError,
            "itself; got a dict with the key",
        ),
        ([stage_with_variable], lambda x: None, TypeError, "by itself; got None"),
        (
            [lambda x: (stage_with_variable(x), x)],
            None,
            TypeError,
            "loss is not given, so the last stage must return .* It returns a tuple of 2",
        ),
        ([lambda x: x], jnp.sum, ValueError, "No variables to optimize"),
        (
            [stage_with_variable, lambda x, y: x],
            jnp.sum,
            TypeError,
            r"stage 1 \(<lambda>\) takes \(x, y\), but what stage 0 \(stage_with_variable\) returns "
            r"gives it \(float32\[3\]\): missing a required argument: 'y'",
        ),
    ],
)
def test_wrong_stages(stages, loss, error, message):
    with pytest.raises(error, match=message):
        make(stages, loss=loss).trace(np.zeros(3, "float32"))


def test_what_a_stage_with_parameters_takes():
    def embed(parameters, ids, targets):
        return parameters[ids], targets

    pipeline = make([embed], parameters=[np.ones(3, "float32")])
    message = r"stage 0 \(embed\) takes \(ids, targets\) after its parameters, but the inputs .*"
    missing = r"\(int32\[1\]\): missing a required argument: 'targets'"
    with pytest.raises(TypeError, match=message + missing):
        pipeline.trace((np.ones(1, "int32"),))


def test_a_custom_rule_that_uses_a_value_of_the_stage():
    def stage(x):
        y = x * 2
        scaled = jax.custom_vjp(lambda v: v * y)
        scaled.defvjp(lambda v: (v * y, None), lambda _residual, g: (g * y,))
        return scaled(models.dense("a", 6, x))

    with pytest.raises(ValueError, match=r"stage 0 \(stage\): a function with custom derivatives"):
        make([stage, jnp.mean]).trace(np.zeros((3, 6), "float32"))


def test_an_error_in_a_stage_names_it():
    def broken(x):
        return x @ jnp.ones((7, 7))

    with pytest.raises(TypeError) as error:
        make([stage_with_variable, broken]).trace(np.zeros((2, 3), "float32"))
    (note,) = (n for n in error.value.__notes__ if n.startswith("This happened"))
    assert note.startswith("This happened while tracing stage 1 (broken)\n  on x: float32[2, 3]\n  at ")


def test_init_with_a_raw_key():
    pipeline = engine.Pipeline([stage_with_variable], num_micro_batches=1)
    with pytest.raises(ValueError, match=r"key must be a random key from jax.random.key"):
        pipeline.init(np.zeros(2, "uint32"), np.float32(1))


def test_counts_that_would_not_fit_into_a_schedule():
    stages = [lambda x: x * engine.get_variable("w", ()), lambda x: x]
    with pytest.raises(ValueError, match="are 8589934588 actions; .* has up to 4194304"):
        make(stages, count=2**31 - 1)
    one = make(stages, count=2**31 - 1, device_mapping=[0, 0])
    one.trace(np.float32(1))
    assert len(engine.planning.plan_memory(one)) == 2
    with pytest.raises(ValueError, match="devices have numbers up to 65535; got 1099511627776"):
        make(stages, device_mapping=[0, 2**40])


@pytest.mark.parametrize(("mapping", "count"), [(None, 3), ([0, 0], 2)])
def test_compiled_before_the_first_step(mapping, count, caplog):
    """Nothing is compiled afterwards, and nothing has changed."""
    pipeline = make(
        models.mlp_stages(2), count=count, optimizer=optax.adam(0.1), device_mapping=mapping, donate=True
    )
    micro_batches = models.mlp_batches(np.random.default_rng(0), count)
    state = pipeline.init(jax.random.key(0), micro_batches[0])
    before = jax.device_get(state.variables)
    pipeline.compile(state)
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.variables))
    with jax.log_compiles(True):
        pipeline.step(state, iter(micro_batches))
    compiled = [record.getMessage() for record in caplog.records if "Compiling jit(" in record.getMessage()]
    assert [text for text in compiled if "block" in text or "stage" in text] == []


def test_micro_batches_are_converted_or_refused():
    """Masks were dropped, what float32 does not have became inf, and JAX refused big-endian arrays."""
    pipeline = engine.Pipeline([lambda x: x * 2], num_micro_batches=1)
    plain = np.arange(3, dtype="f4")
    state = pipeline.init(jax.random.key(0), {"x": plain.astype(">f8")})
    for kind in ("f4", ">f4", ">f8"):
        _state, outputs = pipeline.step(state, [{"x": plain.astype(kind)}])
        np.testing.assert_array_equal(outputs.outputs[0], [0, 2, 4])
    masked, large = np.ma.masked_array(plain, [0, 0, 1]), plain.astype("f8") + 1e300
    for x, message in (
        (masked, " is a masked array: 1 of its 3"),
        (large, ", of dtype float64, does not fit float32"),
    ):
        with pytest.raises(ValueError, match=rf"Micro-batch 0, at \['x'\]{message}"):
            pipeline.step(state, [{"x": x}])
    integers = engine.Pipeline([lambda x: x * 2], num_micro_batches=1)
    state = integers.init(jax.random.key(0), np.zeros(1, "i4"))
    with pytest.raises(ValueError, match="of dtype int64, does not fit int32: it has 1099511627776"):
        integers.step(state, [np.array([2**40])])


def test_jax_waits_for_what_a_step_returns():
    """In inference the new state does not depend on it; JAX ignored the object that has it."""
    waited = []

    class Late:
        def __init__(self, name):
            self.name = name

        def block_until_ready(self):
            waited.append(self.name)

    parts = [Collected([Late("output")], Late("loss"), None), Collected([Late("outputs")], None, 2)]
    jax.block_until_ready(engine.StepOutputs(parts, list))
    assert waited == ["output", "loss", "outputs"]


def test_an_optimizer_whose_masks_do_not_fit():
    parameters = [{"w": np.ones((3, 2), "float32")}]
    optimizer = optax.adamw(0.1, mask=[{"w": True}])
    pipeline = make([lambda p, x: jnp.mean(x @ p["w"])], parameters=parameters, optimizer=optimizer)
    message = "pytree structure error" if jax.__version_info__ >= (0, 10) else "Expected list"
    with pytest.raises(ValueError, match=message) as caught:
        pipeline.trace(np.ones((2, 3), "float32"))
    mend = "a dict from full name to array (masks and labels of Optax have to fit it): 'stage0/w'"
    assert mend in caught.value.__notes__[-1]


def plain_loss(variables, x, labels):
    """The same model without this library."""
    for index in range(len(models.SIZES)):
        x = x @ variables[f"dense{index}/kernel"] + variables[f"dense{index}/bias"]
        x = x if index == len(models.SIZES) - 1 else jax.nn.relu(x)
    return models.cross_entropy(x, labels)


@pytest.mark.parametrize("mapping", [[0, 1], [0, 0]])
def test_gradients_equal_a_loop_without_this_package(mapping, rng):
    # optax.trace without decay keeps the gradients that the update was given.
    optimizer = optax.trace(decay=0.0)
    pipeline = make(models.mlp_stages(2), count=2, optimizer=optimizer, device_mapping=mapping)
    step = models.mlp_batches(rng, 2)
    state = pipeline.init(jax.random.key(0), step[0])
    variables = models.on_one_device(state.variables)
    state, _outputs = pipeline.step(state, step)
    grads = [jax.jit(jax.grad(plain_loss))(variables, *micro_batch) for micro_batch in step]
    mean = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]) / len(leaves), *grads)
    models.assert_trees_close(state.optimizer_state.trace, mean)


def test_counts_beyond_32_bits(rng):
    def first(x, labels):
        noise = jax.random.normal(engine.next_rng_key(), x.shape)
        return models.dense("first", 10, x + noise), labels

    stages = [first, lambda x, labels: models.cross_entropy(models.dense("last", 10, x), labels)]
    split, together = (make(stages, count=2, device_mapping=mapping) for mapping in ([0, 1], [0, 0]))
    steps = [models.mlp_batches(rng, 2) for _ in range(2)]
    counts = {"update_count": 2**31 - 1, "execution_count": 2**32 - 1}
    state, outputs = beside.train(split, steps, change=lambda state: dataclasses.replace(state, **counts))
    assert (state.update_count, state.execution_count) == (2**31 + 1, 2**32 + 1)
    same = dataclasses.replace(together.init(jax.random.key(0), steps[0][0]), **counts)
    for step in steps:
        same, others = together.step(same, step)
    assert (same.update_count, same.execution_count) == (2**31 + 1, 2**32 + 1)
    models.assert_trees_close(others.losses, outputs.losses)
    models.assert_trees_close(same.variables, state.variables)
    # Keys begin again.
    again = dataclasses.replace(beside.copied(state), execution_count=1, optimizer_state=None)
    wanted = beside.step_plainly(split, again, steps[0])[1]
    for pipeline, after in ((split, state), (together, same)):
        models.assert_trees_close(pipeline.step(after, steps[0])[1].losses, wanted.losses)


def test_a_method_that_has_become_a_function_names_it():
    pipeline = engine.Pipeline([lambda x: x], num_micro_batches=1)
    with pytest.raises(
        AttributeError, match=r"'plan_memory'; use engine.planning.plan_memory\(pipeline\)$"
    ):
        pipeline.plan_memory()
    with pytest.raises(AttributeError, match="no attribute 'plan'$"):
        pipeline.plan()


def test_an_error_within_a_property_is_told_as_it_is(monkeypatch):
    """A method that was missing inside was told as the property's own absence."""
    pipeline = make(models.mlp_stages(2))
    monkeypatch.setattr("ipu_pipeline.engine.pipeline.begin_first_run", lambda: pipeline.options.missing)
    with pytest.raises(AttributeError, match="'PipelineOptions' object has no attribute 'missing'"):
        _ = pipeline.place_element


def test_two_steps_share_their_accumulators_and_another_mapping_has_its_own(rng, monkeypatch):
    pipeline, other = (make(models.mlp_stages(2), device_mapping=devices) for devices in ([0, 1], [1, 0]))
    micro_batches = models.mlp_batches(rng, 4)
    state, given = (one.init(jax.random.key(0), micro_batches[0]) for one in (pipeline, other))
    state, _outputs = pipeline.step(state, micro_batches)
    with monkeypatch.context() as patched:
        patched.setattr(pipeline.runner, "make_accumulators", None)
        state, _outputs = pipeline.step(state, micro_batches)
    other.take_accumulators(pipeline)
    for _step in range(2):
        given, _outputs = other.step(given, micro_batches)
    models.assert_trees_close(given.variables, state.variables, 0.0)


@pytest.mark.parametrize(("has_peers", "left"), [(False, 2), (True, 4)])
def test_after_an_error_the_next_step_begins_at_the_same_place_in_all_processes(has_peers, left):
    data = iter(range(8))
    take = StepFeed(data, 4, lambda: has_peers).placing(lambda element, number: element / (1 - number))
    assert take(1) == [0]
    with pytest.raises(ZeroDivisionError):
        take(1)
    assert next(data) == left
