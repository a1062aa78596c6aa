"""Looking into a pipeline: what stages enqueue, and gradients, as a plain loop computes them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import engine
from ipu_pipeline.ipu_outfeed_queue import IPUOutfeedMode, IPUOutfeedQueue
from ipu_pipeline.optimizers import (
    GradientAccumulationOptimizerV2,
    LossScalingOptimizer,
    MapGradientOptimizer,
    OutfeedOptimizer,
    OutfeedOptimizerMode,
    tf1,
)
from ipu_pipeline.pipelining_ops import Chunking, OptimizerFunctionOutput, PipelineSchedule
from tests.support import front

COUNT, UPDATES = 4, 2
MODES = OutfeedOptimizerMode
WEIGHTS = {
    "first/a": np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4),
    "second/b": np.linspace(-1, 1, 16, dtype="float32").reshape(4, 4),
    "tied/table": np.linspace(0.5, 1.5, 4, dtype="float32"),
}


def rows():
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(2, 3)).astype("float32")} for _ in range(COUNT * UPDATES)]


def weight(full_name):
    scope, name = full_name.split("/")
    value = WEIGHTS[full_name]
    with ipu.variable_scope(scope, reuse=True):
        return ipu.get_variable(name, value.shape, initializer=lambda *_: jnp.asarray(value))


class Model(front.Pipelined):
    """Three stages, of which the first and the last share a variable; the first two enqueue."""

    def __init__(self, mapping, optimizer, count=COUNT, **options):
        self.hidden, self.both = IPUOutfeedQueue(), IPUOutfeedQueue()

        def first(x):
            x = jnp.tanh(x @ weight("first/a")) * weight("tied/table")
            self.hidden.enqueue(x)
            return x

        def second(x):
            y = jnp.tanh(x @ weight("second/b"))
            self.both.enqueue({"before": x, "mean": (jnp.mean(y),)})
            return y

        def last(x):
            return jnp.mean((x * weight("tied/table")) ** 2)

        options |= {"repeat_count": UPDATES, "device_mapping": mapping}
        super().__init__([first, second, last], count, rows, optimizer, **options)

    def run(self, session):
        session.run([self.initializer, self.program])


def forward(weights, x):
    hidden = jnp.tanh(x @ weights["first/a"]) * weights["tied/table"]
    x = jnp.tanh(hidden @ weights["second/b"])
    return jnp.mean((x * weights["tied/table"]) ** 2), (hidden, jnp.mean(x))


def plain_loop(rate=0.1, trains=True, gradient_map=lambda gradient: gradient):
    """Hidden values, means, and gradients, per micro-batch; and the sums of these per weight update."""
    weights, seen, sums = WEIGHTS, [], []
    for update in range(UPDATES):
        each = []
        for row in rows()[update * COUNT : (update + 1) * COUNT]:
            gradients, values = jax.grad(forward, has_aux=True)(weights, row["x"])
            each.append(jax.tree.map(gradient_map, gradients))
            seen.append((*values, each[-1]))
        total = jax.tree.map(lambda *leaves: np.sum(leaves, axis=0), *each)
        sums.append(total)
        if trains:
            weights = jax.tree.map(lambda w, g: w - np.float32(rate) * g, weights, total)
    return *(stack(part) for part in zip(*seen, strict=True)), stack(sums)


def stack(trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def assert_close(found, wanted):
    assert found.shape == wanted.shape
    assert np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("mapping", "options", "trains"),
    [
        pytest.param([0, 1, 2], {"dispatch_plan": Chunking(2)}, True, marks=pytest.mark.thorough),
        ([0, 0, 0], {"batch_serialization_iterations": 2, "count": 2}, True),
        ([0, 1, 2], {"accumulate_outfeed": True}, False),
    ],
)
def test_stages_enqueue_for_every_micro_batch_in_order(mapping, options, trains):
    hidden, means, _gradients, _sums = plain_loop(trains=trains)
    with ipu.Session() as session:
        model = Model(mapping, optax.sgd(0.1) if trains else None, **options)
        model.run(session)
        assert_close(session.run(model.hidden.dequeue()), hidden)
        both = session.run(model.both.dequeue())
        assert_close(both["before"], hidden)
        assert_close(both["mean"][0], means)
        assert len(session.run(model.hidden.dequeue())) == 0


@pytest.mark.parametrize(
    ("mapping", "scale", "mode", "make_optimizer"),
    [
        ([0, 0, 0], 2.0**8, MODES.AFTER_COMPUTE, tf1.GradientDescentOptimizer),
        pytest.param([1, 0, 2], None, MODES.AFTER_COMPUTE, optax.sgd, marks=pytest.mark.thorough),
        pytest.param([0, 1, 0], 2.0**8, MODES.BEFORE_APPLY, optax.sgd, marks=pytest.mark.thorough),
    ],
)
def test_gradients_are_those_of_a_plain_loop(mapping, mode, scale, make_optimizer):
    """Also of a variable that two stages share, mapped, and without the scale of the loss."""
    queue = IPUOutfeedQueue()
    inner = MapGradientOptimizer(OutfeedOptimizer(make_optimizer(0.1), queue, mode), lambda g, _w: 2 * g)
    optimizer = inner if scale is None else LossScalingOptimizer(inner, scale)
    _hidden, _means, gradients, sums = plain_loop(gradient_map=lambda gradient: 2 * gradient)
    with ipu.Session() as session:
        options = {"pipeline_schedule": PipelineSchedule.ZeroBubble} if mapping == [1, 0, 2] else {}
        model = Model(mapping, optimizer, **options)
        model.run(session)
        found = session.run(queue.dequeue())
    wanted = gradients if mode is MODES.AFTER_COMPUTE else sums
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_close(found[name], value)


def test_gradients_of_some_variables_only():
    first, last = IPUOutfeedQueue(), IPUOutfeedQueue(IPUOutfeedMode.LAST)
    optimizer = OutfeedOptimizer(optax.sgd(0.1), first, MODES.AFTER_COMPUTE, ["second/b"])
    optimizer = OutfeedOptimizer(optimizer, last, MODES.BEFORE_APPLY, ["tied/table"])
    divisor = np.float32(COUNT)
    _hidden, _means, gradients, sums = plain_loop(rate=0.1 / divisor)
    with ipu.Session() as session:
        model = Model([0, 1, 2], optimizer, reduction_method="running_mean")
        model.run(session)
        found = session.run(first.dequeue())
        assert found.keys() == {"second/b"}
        assert_close(found["second/b"], gradients["second/b"])
        found = session.run(last.dequeue())
        assert found.keys() == {"tied/table"}
        assert_close(found["tied/table"], sums["tied/table"][-1] / divisor)


def test_gradients_of_a_weighted_loss_are_without_its_counter():
    """BEFORE_APPLY shows them divided, as the optimizer gets them."""
    each, applied = IPUOutfeedQueue(), IPUOutfeedQueue()

    def optimize(loss):
        optimizer = OutfeedOptimizer(optax.sgd(0.1), each, MODES.AFTER_COMPUTE)
        optimizer = OutfeedOptimizer(optimizer, applied, MODES.BEFORE_APPLY)
        return OptimizerFunctionOutput(optimizer, loss, loss_weight=jnp.float32(2))

    def loss_of(w, x):
        return jnp.sum((x @ w) ** 2)

    stages = [lambda x: loss_of(weight("first/a"), x)]
    model = front.Pipelined(stages, COUNT, rows, optimizer_function=optimize)
    with front.session_of(model) as session:
        session.run(model.program)
        found, sums = session.run(each.dequeue()), session.run(applied.dequeue())
    wanted = np.stack([jax.grad(loss_of)(WEIGHTS["first/a"], row["x"]) for row in rows()])
    assert found.keys() == sums.keys() == {"first/a"}
    assert_close(found["first/a"], wanted[:COUNT])
    assert_close(sums["first/a"], wanted[:COUNT].sum(axis=0, keepdims=True) / (2 * COUNT))


def test_an_update_enqueues_what_it_computes():
    queue = IPUOutfeedQueue()

    def update(gradients, state, parameters=None):
        queue.enqueue((parameters["second/b"], state))
        return jax.tree.map(lambda gradient: -0.1 * gradient, gradients), state + 1

    optimizer = optax.GradientTransformation(lambda _parameters: jnp.zeros((), jnp.int32), update)
    with ipu.Session() as session:
        model = Model([0, 1, 2], optimizer)
        model.run(session)
        weights, counts = session.run(queue.dequeue())
    np.testing.assert_array_equal(counts, [0, 1])
    assert_close(weights[0], WEIGHTS["second/b"])
    sums = plain_loop()[3]
    assert_close(weights[1], WEIGHTS["second/b"] - np.float32(0.1) * sums["second/b"][0])


def test_what_is_enqueued_is_not_differentiated_and_costs_no_stage_more():
    """Values stay where they are made: nothing crosses to the last stage for them."""
    enqueuing = Model([0, 1, 2], optax.sgd(0.1)).program
    queue, IPUOutfeedQueue.enqueue = IPUOutfeedQueue.enqueue, lambda _self, _value: None
    try:
        plain = Model([0, 1, 2], optax.sgd(0.1)).program
    finally:
        IPUOutfeedQueue.enqueue = queue
    for one, other in zip(enqueuing.placement().calls, plain.placement().calls, strict=True):
        assert one.edges == other.edges


def compile_with(stage, optimizer=None):
    stages = [stage, lambda x: jnp.mean(x @ weight("second/b"))]
    return front.Pipelined(stages, COUNT, rows, optimizer or optax.sgd(0.1))


def test_a_program_that_is_refused_leaves_its_queues():
    taken, free = IPUOutfeedQueue(), IPUOutfeedQueue()
    compile_with(enqueuing(taken, lambda x: x))

    def both(x):
        free.enqueue(x)
        taken.enqueue(x[0])
        return x @ weight("first/a")

    with pytest.raises(ValueError, match="two programs enqueue"):
        compile_with(both)
    compile_with(enqueuing(free, lambda x: x[0]))


def enqueuing(queue, choose):
    def stage(x):
        queue.enqueue(choose(x))
        return x @ weight("first/a")

    return stage


def test_random_keys_are_not_enqueued():
    with pytest.raises(TypeError, match="got a random key. jax.random.key_data makes an array of it"):
        compile_with(enqueuing(IPUOutfeedQueue(), lambda _x: ipu.next_rng_key()))


def test_the_engine_has_no_outfeeds():
    stages = [enqueuing(IPUOutfeedQueue(), lambda x: x), lambda x: jnp.mean(x)]
    own = engine.Pipeline(stages, num_micro_batches=1, optimizer=optax.sgd(0.1))
    state = own.init(jax.random.key(0), rows()[0])
    with pytest.raises(ValueError, match="Return the value from the last stage, or report it with engine"):
        own.step(state, rows()[:1])


def test_a_queue_is_for_one_place():
    queue = IPUOutfeedQueue()

    def twice(x):
        queue.enqueue(x)
        queue.enqueue(x)
        return x @ weight("first/a")

    with pytest.raises(ValueError, match="enqueued to only once in a program"):
        compile_with(twice)

    with pytest.raises(ValueError, match="enqueued to only once in a program"):
        optimizer = OutfeedOptimizer(optax.sgd(0.1), queue, MODES.AFTER_COMPUTE)
        compile_with(enqueuing(queue, lambda x: x), optimizer)
    with pytest.raises(ValueError, match="body of scan, where the value cannot be reached"):
        compile_with(lambda x: jax.lax.map(lambda row: (queue.enqueue(row), row)[1], x) @ weight("first/a"))
    with pytest.raises(RuntimeError, match="called in the compiled function. Call it in a stage"):
        front.compile_program(lambda: (queue.enqueue(np.float32(1)), ipu.loops.repeat(1, lambda: None)))
    with pytest.raises(RuntimeError, match="outside of a program"):
        queue.enqueue(np.float32(1))


def test_wrong_arguments_of_an_outfeed_optimizer():
    queue, sgd = IPUOutfeedQueue(), optax.sgd(0.1)
    with pytest.raises(TypeError, match="outfeed_queue must be an IPUOutfeedQueue; got int"):
        OutfeedOptimizer(sgd, 3)

    class Filtered(IPUOutfeedQueue):
        def enqueue(self, value):
            return super().enqueue({"first/a": value["first/a"]})

    with pytest.raises(TypeError, match="that of Filtered would not be called"):
        OutfeedOptimizer(sgd, Filtered(), MODES.AFTER_COMPUTE)
    OutfeedOptimizer(sgd, Filtered(), MODES.BEFORE_APPLY)
    with pytest.raises(TypeError, match="must be one of OutfeedOptimizerMode.AFTER.*; got 'after'"):
        OutfeedOptimizer(sgd, queue, "after")
    with pytest.raises(ValueError, match="variable_names must be a list of full names"):
        OutfeedOptimizer(sgd, queue, variable_names="first/a")
    for mode in MODES:
        unknown = OutfeedOptimizer(sgd, queue, mode, ["firs/a"])
        with pytest.raises(ValueError, match="'firs/a', which is not trained. Trained are: first/a"):
            compile_with(lambda x: x @ weight("first/a"), unknown)

    def body(x):
        optimizer = GradientAccumulationOptimizerV2(OutfeedOptimizer(sgd, queue), 2)
        optimizer.minimize(jnp.sum(x * ipu.get_variable("w", ())))
        return x

    with pytest.raises(ValueError, match="an OutfeedOptimizer is for pipelines"):
        front.compile_program(lambda: ipu.loops.repeat(1, body, [np.float32(1)]))
