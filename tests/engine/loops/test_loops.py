"""Loops on the device, on one IPU and on shards."""

import contextlib
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import loops
from ipu_pipeline.engine.loop import Loop
from ipu_pipeline.errors import OutOfRangeError
from ipu_pipeline.ipu_infeed_queue import IPUInfeedQueue
from ipu_pipeline.ipu_outfeed_queue import IPUOutfeedMode, IPUOutfeedQueue
from ipu_pipeline.optimizers import GradientAccumulationOptimizerV2, MapGradientOptimizer
from tests.support import front, models
from tests.support.compilations import compiled_in

OPTIMIZERS = {
    "sgd": optax.sgd,
    "momentum": lambda rate: optax.sgd(rate, momentum=0.9),
    "adam": lambda rate: optax.adam(rate),
    "injected": lambda rate: optax.inject_hyperparams(optax.sgd)(learning_rate=rate),
}
RATE = 0.1


def unsharded(_index):
    return contextlib.nullcontext()


class LoopModel:
    """The model of `tests.support.front` in a loop."""

    def __init__(self, count, every, optimizer="sgd", sharded=False, dataset=None, mode=None, **options):
        self.rate = ipu.placeholder(np.float32, [], name="rate")
        self.infeed = IPUInfeedQueue(front.data() if dataset is None else dataset)
        self.outfeed = IPUOutfeedQueue(mode or IPUOutfeedMode.ALL)
        shard = ipu.scopes.ipu_shard if sharded else unsharded

        def body(rate, x, labels):
            with shard(0):
                rate, x, labels = front.first_stage(rate, x, labels)
            with shard(1):
                rate, loss = front.second_stage(rate, x, labels)
            wrapped = GradientAccumulationOptimizerV2(OPTIMIZERS[optimizer](rate), every, **options)
            return rate, wrapped.minimize(loss), self.outfeed.enqueue(loss)

        self.program = front.compile_program(
            lambda rate: loops.repeat(count, body, [rate], self.infeed), inputs=[self.rate]
        )
        self.initializer = self.infeed.initializer

    def run(self, session, rate=RATE):
        (value,) = session.run(self.program, {self.rate: rate})
        assert value == np.float32(rate)
        return session.run(self.outfeed.dequeue())


def weight(name="w"):
    return ipu.get_variable(name, (), initializer=1.0)


def minimize(loss, rate=1.0, every=1, accumulation=None, **options):
    """A step of gradient descent; `accumulation` are the optimizer's options, the others `minimize`'s."""
    wrapped = GradientAccumulationOptimizerV2(optax.sgd(rate), every, **(accumulation or {}))
    return wrapped.minimize(loss, **options)


def plain_loss(variables, x, labels):
    x = jax.nn.relu(x @ variables["first/dense/kernel"] + variables["first/dense/bias"])
    logits = x @ variables["second/dense/kernel"] + variables["second/dense/bias"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def plain(variables, batches, every, optimizer, reduction, rate=RATE):
    """Losses and variables of a plain loop of jax.grad, and what is left accumulated."""
    groups, transformation = [[batch] for batch in batches], OPTIMIZERS[optimizer](rate)
    losses, *rest = models.plain_loop(plain_loss, variables, groups, every, transformation, reduction)
    return losses[:, 0], *rest


@pytest.mark.parametrize(
    ("count", "every", "num_runs", "reduction", "optimizer", "sharded"),
    [
        (7, 3, 3, "RUNNING_MEAN", "injected", True),
        (2, 5, 5, "MEAN", "momentum", False),
        (3, 1, 2, "SUM", "adam", True),
    ],
)
def test_equals_a_plain_loop(count, every, num_runs, reduction, optimizer, sharded):
    """Also where the count is no multiple: the next run goes on with what was accumulated."""
    model = LoopModel(count, every, optimizer, sharded, reduction_method=reduction)
    with front.session_of(model, seed=3) as session:
        session.run(ipu.global_variables_initializer())
        start = session.variables
        losses = np.concatenate([model.run(session) for _run in range(num_runs)])
        batches = itertools.islice(front.data()(), num_runs * count)
        expected, variables, left = plain(start, batches, every, optimizer, reduction)
        assert not left
        models.assert_trees_close(losses, expected)
        models.assert_trees_close(session.variables, jax.tree.map(np.asarray, variables))
        assert session.update_count("GradientAccumulationOptimizerV2") == num_runs * count // every


def test_float64():
    outfeed = IPUOutfeedQueue()
    elements = [np.random.default_rng(seed).normal(size=(3, 4)) for seed in range(7)]

    def loss_of(variables, x):
        return jnp.mean(jnp.tanh(x @ variables["a"]) ** 2)

    def body(elements, number):
        loss = loss_of({"a": ipu.get_variable("a", (4, 5), "float64")}, elements[number])
        optimizer = GradientAccumulationOptimizerV2(optax.adam(0.01), 3, reduction_method="RUNNING_MEAN")
        return elements, number + 1, optimizer.minimize(loss), outfeed.enqueue(loss)

    with jax.enable_x64(True), ipu.Session() as session:
        program = front.compile_program(lambda: loops.repeat(7, body, [np.stack(elements), np.int64(0)])[1])
        session.run(ipu.global_variables_initializer())
        variables = session.variables
        assert session.run(program) == [7]
        losses = session.run(outfeed.dequeue())
        groups = [[(x,)] for x in elements]
        expected, variables, _left = models.plain_loop(
            loss_of, variables, groups, 3, optax.adam(0.01), "RUNNING_MEAN"
        )
        assert losses.dtype == np.float64
        models.assert_trees_close(losses, expected[:, 0], 1e-12)
        models.assert_trees_close(session.variables, jax.tree.map(np.asarray, variables), 1e-12)


# Values that are carried, captured and enqueued.


def test_carried_values_and_the_rate_of_the_iteration():
    """The rate falls in every iteration; the update uses that of its last one."""
    infeed, outfeed = IPUInfeedQueue(front.data()), IPUOutfeedQueue()

    def body(rate, total, constant, x, labels):
        with ipu.scopes.ipu_shard(0):
            _rate, hidden, labels = front.first_stage(rate, x, labels)
        with ipu.scopes.ipu_shard(1):
            loss = front.second_stage(rate, hidden, labels)[1]
            total = {"sum": total["sum"] + loss, "count": total["count"] + 1}
        train_op = GradientAccumulationOptimizerV2(optax.sgd(rate), 2).minimize(loss)
        return rate * 0.5, [train_op], total, (train_op, {"op": outfeed.enqueue(rate)}), constant

    def function(rate):
        zero = {"sum": np.float32(0), "count": np.int32(0)}
        return loops.repeat(4, body, [rate, zero, rate * 3.0], infeed)

    program = front.compile_program(function, inputs=[np.float32(0.8)])
    with front.session_of(infeed, seed=3) as session:
        session.run(ipu.global_variables_initializer())
        variables = session.variables
        rate, total, constant = session.run(program)
        np.testing.assert_allclose(session.run(outfeed.dequeue()), [0.8, 0.4, 0.2, 0.1])
        batches = list(itertools.islice(front.data()(), 4))
        losses = []
        for pair, used in ((batches[:2], 0.4), (batches[2:], 0.1)):
            found, variables, _left = plain(variables, pair, 2, "sgd", "SUM", used)
            losses += list(found)
        np.testing.assert_allclose([rate, constant], [0.05, 2.4], rtol=1e-6)
        assert total["count"] == 4
        np.testing.assert_allclose(total["sum"], sum(losses), rtol=1e-5)
        models.assert_trees_close(session.variables, jax.tree.map(np.asarray, variables))


def test_values_captured_from_outside():
    infeed = IPUInfeedQueue([np.float32(n) for n in (1, 2, 3)])

    def function(rate, scale):
        used = rate / 2.0

        def body(x):
            with ipu.scopes.ipu_shard(0):
                x = x * scale * weight("w")
            with ipu.scopes.ipu_shard(1):
                return GradientAccumulationOptimizerV2(optax.sgd(used), 1).minimize(x + used)

        return loops.repeat(3, body, [], infeed)

    program = front.compile_program(function, inputs=[np.float32(0.25), np.float32(2)])
    with ipu.Session() as session:
        session.run([infeed.initializer, program])
        assert session.variables["w"] == 1 - 0.125 * 2 * (1 + 2 + 3)


@pytest.mark.parametrize(
    ("mode", "sharded"),
    [(IPUOutfeedMode.ALL, True), (IPUOutfeedMode.ALL, False), (IPUOutfeedMode.LAST, False)],
)
def test_enqueued_structures(mode, sharded):
    first, second = IPUOutfeedQueue(mode), IPUOutfeedQueue(mode)
    shard = ipu.scopes.ipu_shard if sharded else unsharded

    def body(n):
        with shard(0):
            first.enqueue({"n": n, "pair": (n * 2, 7.0)})
        with shard(1):
            second.enqueue([jnp.full((2,), n), n + 1])  # neither operation is returned
            return n + 1

    program = front.compile_program(lambda: loops.repeat(3, body, np.int32(5)))
    with ipu.Session() as session:
        assert session.run(program) == [8]
        found = session.run([first.dequeue(), second.dequeue()])
    n = np.int32(7) if mode is IPUOutfeedMode.LAST else np.array([5, 6, 7], "int32")
    sevens = np.full(n.shape, 7.0, "float32")
    expected = [{"n": n, "pair": (n * 2, sevens)}, [np.stack([n, n], axis=-1), n + 1]]
    models.assert_trees_close(found, expected, 0)


def test_computing_around_loops_and_several_of_them():
    def function(x):
        x = loops.repeat(3, lambda x: x * 2.0, [x + 1.0])
        y, z = loops.repeat(2, lambda y, z: (y + z, z), [x - 1.0, x])
        return {"x": x, "y": y * 10.0, "z": z}

    program = front.compile_program(function, inputs=[np.float32(1)])
    with ipu.Session() as session:
        assert session.run(program) == {"x": 16, "y": 470, "z": 16}


def test_counts_that_are_traced_or_zero():
    n = ipu.placeholder(np.int32, [])
    program = front.compile_program(
        lambda n: (loops.repeat(n, lambda x: x + 1, [np.int32(0)]), loops.repeat(0, lambda x: x + 1, [1])),
        inputs=[n],
    )
    with ipu.Session() as session:
        for count in (0, 1, 5, 3000, -2):
            assert session.run(program, {n: count}) == [max(0, count), 1]


@pytest.mark.parametrize("sharded", [False, True])
def test_while_loop(sharded):
    """The elements that a loop did not need come first in the next run."""
    infeed = IPUInfeedQueue([np.float32(n) for n in range(1, 9)])
    outfeed = IPUOutfeedQueue()
    shard = ipu.scopes.ipu_shard if sharded else unsharded

    def body(total, limit, x):
        with shard(0):
            total = total + x
        with shard(1):
            return total, limit, outfeed.enqueue(x * 1.0)

    def function(limit):
        return loops.while_loop(lambda total, limit: total < limit, body, [np.float32(0), limit], infeed)[0]

    limit = ipu.placeholder(np.float32)
    program = front.compile_program(function, inputs=[limit])
    with front.session_of(infeed) as session:
        for bound, elements in ((5.0, [1, 2, 3]), (0.0, []), (21.5, [4, 5, 6, 7])):
            assert session.run(program, {limit: bound}) == [sum(elements)]
            np.testing.assert_array_equal(session.run(outfeed.dequeue()), elements)
        assert session.run(program, {limit: 8.0}) == [8]  # the last element, and no look beyond it
        with pytest.raises(OutOfRangeError):
            session.run(program, {limit: 1.0})


def test_a_while_loop_that_trains_and_has_no_feed():
    def body(n):
        minimize(weight("w") * 1.0, 0.5, 2)
        return n + 1

    n = ipu.placeholder(np.int32)
    program = front.compile_program(lambda n: loops.while_loop(lambda n: n < 500, body, [n]), inputs=[n])
    with ipu.Session() as session:
        for begin, updates in ((0, 250), (497, 251), (499, 252)):
            assert session.run(program, {n: begin}) == [500]
            assert session.variables["w"] == 1 - updates


def test_while_loop_with_a_constant_made_on_a_device():
    def body(total, limit):
        with ipu.scopes.ipu_shard(0):
            total = total + 1.0
        with ipu.scopes.ipu_shard(1):
            return total * 1.0, limit

    def function(x):
        return loops.while_loop(lambda total, limit: total < limit, body, [np.float32(0), x * 2.0])[0]

    program = front.compile_program(function, inputs=[np.float32(3)])
    with ipu.Session() as session:
        assert session.run(program) == [6]


def test_a_while_loop_waits_for_no_more_than_it_needs():
    asked = []
    wake = threading.Event()

    def data():
        for number in itertools.count(1):
            asked.append(number)
            if number > 3:
                assert wake.wait(600)
            yield np.float32(number)

    infeed = IPUInfeedQueue(data, prefetch_depth=2)
    program = front.compile_program(
        lambda: loops.while_loop(lambda t: t < 6, lambda t, x: t + x, [0.0], infeed)
    )
    with front.session_of(infeed) as session:
        assert session.run(program) == [6]  # and the fourth element has not come
        assert len(asked) <= 3 + 2 + 1
        wake.set()


# Optimizers.


def variables_after(*programs):
    """What there is after programs have run in a session of their own."""
    with ipu.Session() as session:
        for program in programs:
            session.run(program)
        return session.variables


def run_once(optimizer, count=4):
    """A loop of `w * 3` and `v * w` over two variables; the variables after it."""

    def body():
        w = ipu.get_variable("w", (), initializer=2.0)
        v = ipu.get_variable("v", (2,), initializer=1.0)
        ipu.get_variable("unused", (), initializer=5.0)
        optimizer.minimize(w * 3.0 + jnp.sum(v) * w)

    return variables_after(front.compile_program(lambda: loops.repeat(count, body)))


def test_map_gradient():
    """Each iteration's gradient is mapped, before accumulation, and with its variable."""
    inner = MapGradientOptimizer(optax.sgd(1.0), lambda g, v: jnp.minimum(g, 2.0))

    def add(optimizer):
        return MapGradientOptimizer(optimizer, lambda g, v: g + v)

    for optimizer in (
        GradientAccumulationOptimizerV2(add(inner), 2),
        add(GradientAccumulationOptimizerV2(inner, 2)),
    ):
        variables = run_once(optimizer, 2)
        # The gradient of w is 5, of v it is 2; that of `unused` is zero, and mapped too.
        assert variables["w"] == 2 - 2 * (2 + 2)
        np.testing.assert_array_equal(variables["v"], 1 - 2 * (2 + 1))
        assert variables["unused"] == 5 - 2 * (0 + 5)
    alone = MapGradientOptimizer(optax.sgd(1.0), lambda g, v: jnp.sign(g))  # without accumulation
    assert run_once(alone, 3)["w"] == 2 - 3


def test_accumulator_dtypes():
    seen = {}

    def dtype(variable):
        seen[variable.name] = variable.shape
        return jnp.bfloat16 if variable.name == "v" else None

    for given in (dtype, "float16"):
        variables = run_once(GradientAccumulationOptimizerV2(optax.sgd(1.0), 4, dtype=given))
        assert variables["w"].dtype == np.float32
        assert variables["w"] == 2 - 4 * 5
    assert seen == {"w": (), "v": (2,), "unused": ()}
    # 1 more makes no difference in bfloat16.
    assert variables_after(train_on("w", 300, 300, dtype="bfloat16")) == {"w": 1 - 256}


def test_accumulators_wider_than_their_variable():
    """The optimizer runs in the wider dtype, and so does its state."""

    def body():
        optimizer = GradientAccumulationOptimizerV2(optax.sgd(1.0, momentum=0.9), 300, dtype="float32")
        optimizer.minimize(ipu.get_variable("w", (), "bfloat16", initializer=0.0).astype("float32"))

    program = front.compile_program(lambda: loops.repeat(300, body))
    with ipu.Session() as session:
        session.run(program)
        assert session.variables == {"w": jnp.bfloat16(-300)}  # in bfloat16, 256 + 1 is 256
        (trace,) = session.optimizer_state("GradientAccumulationOptimizerV2").values()
        assert (trace, trace.dtype) == (300, np.float32)


def test_var_list_and_global_norm():
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    optimizer = GradientAccumulationOptimizerV2(clipped, 1)

    class OnlyW:
        def minimize(self, loss):
            return optimizer.minimize(loss, var_list=["w"], name="only")

    variables = run_once(OnlyW(), 1)
    assert variables["w"] == 1
    np.testing.assert_array_equal(variables["v"], 1)
    variables = run_once(optimizer, 1)  # on one device, updates may join all variables
    np.testing.assert_allclose(variables["w"], 2 - 5 / np.sqrt(25 + 8), rtol=1e-6)


@pytest.mark.parametrize("sharded", [False, True])
def test_two_losses_of_different_variables(sharded):
    """Adversarial training: each loss depends on the variables that the other one trains."""
    shard = ipu.scopes.ipu_shard if sharded else unsharded
    data = np.random.default_rng(3).normal(size=(6, 2, 4)).astype(np.float32)
    infeed, tf1 = IPUInfeedQueue(list(data)), ipu.optimizers.tf1

    def losses_of(generator, critic, x):
        fake = jnp.tanh(x @ generator)
        scores = jnp.tanh(fake @ critic)
        return jnp.mean((scores - 1) ** 2), jnp.mean(scores**2) + jnp.mean((x @ critic - 1) ** 2)

    def body(rate, x):
        with shard(0):
            generator, critic = (ipu.get_variable(name, [4, 4]) for name in ("generator", "critic"))
        with shard(1):
            first, second = losses_of(generator, critic, x)
        train = tf1.AdamOptimizer(rate).minimize(first, var_list=["generator"])
        return rate * 0.9, train, minimize(second, rate, var_list=["critic"])

    program = front.compile_program(lambda: loops.repeat(6, body, [np.float32(RATE)], infeed))
    with ipu.Session(seed=3) as session:
        session.run([infeed.initializer, ipu.global_variables_initializer()])
        before = session.variables
        session.run(program)
        found = {name: session.variables[name] for name in ("generator", "critic")}
        count = session.update_count("Adam")
    assert count == 6
    adam = tf1.AdamOptimizer(lambda number: RATE * 0.9**number)
    generator, critic, rate = before["generator"], before["critic"], RATE
    state = adam.init(generator)
    for x in data:
        of_generator = jax.grad(lambda g, x=x, c=critic: losses_of(g, c, x)[0])(generator)
        of_critic = jax.grad(lambda c, x=x, g=generator: losses_of(g, c, x)[1])(critic)
        change, state = adam.update(of_generator, state)
        generator, critic = generator + change, critic - np.float32(rate) * of_critic
        rate *= 0.9
    models.assert_values_close(found, {"generator": generator, "critic": critic})


def test_optimizer_state_is_shared_by_name_and_what_was_accumulated_is_checked():
    first = LoopModel(4, 3)
    second = LoopModel(2, 3)
    other = LoopModel(2, 2)
    with ipu.Session(seed=3) as session:
        session.run([first.initializer, second.initializer, other.initializer])
        first.run(session)
        with pytest.raises(ValueError, match="of 1 iterations .* 3 mini-batches, SUM of first/dense/bias"):
            other.run(session)
        second.run(session)
        assert session.update_count("GradientAccumulationOptimizerV2") == 2
        other.run(session)
        assert session.update_count("GradientAccumulationOptimizerV2") == 3


def test_initializing_forgets_what_was_accumulated():
    model = LoopModel(4, 3)
    with front.session_of(model, seed=3) as session:
        losses = model.run(session)
        session.run([ipu.global_variables_initializer(), model.initializer])
        np.testing.assert_array_equal(model.run(session), losses)


def train_on(variable, count, every=1, name=None, **options):
    """A program that trains one variable by a gradient of 1."""

    def body():
        return minimize(weight(variable) * 1.0, every=every, accumulation={"name": name, **options})

    return front.compile_program(lambda: loops.repeat(count, body))


def test_programs_that_train_different_variables_under_one_name():
    a, b = train_on("a", 2), train_on("b", 3)
    assert variables_after(a, b, a) == {"a": -3, "b": -2}
    told = r"SUM of a float32\[\]. This program accumulates by .* of b"
    with pytest.raises(ValueError, match=told):
        variables_after(train_on("a", 2, 3), train_on("b", 3, 3))


def run_pipeline(stages, count=2, *, rate=0.0, **options):
    """Calls a pipeline whose last stage returns a loss."""
    return ipu.pipelining_ops.pipeline(
        stages,
        count,
        outfeed_queue=IPUOutfeedQueue(),
        optimizer_function=lambda x: ipu.pipelining_ops.OptimizerFunctionOutput(optax.sgd(rate), x),
        **options,
    )


@pytest.mark.parametrize("name", ["Loop", "Pipeline"])
def test_what_is_called_as_an_optimizer_leaves_what_it_accumulated(name):
    """A loop without a training step is called Loop, and a pipeline Pipeline, as an optimizer may be."""
    two, one = train_on("w", 2, 3, name), train_on("w", 1, 3, name)
    if name == "Loop":
        between = front.compile_program(lambda: loops.repeat(1, lambda x: x + weight(), [0.0]))
    else:
        between = front.compile_program(lambda: run_pipeline([lambda: weight() * 1.0], 1))
    assert variables_after(two, between, one)["w"] == -2


@pytest.mark.parametrize(
    ("method", "count", "bound"),
    [("RUNNING_MEAN", 3000, 0), ("MEAN", 200, 1e-6)],  # of MEAN, sums that fit
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_means_in_sixteen_bits(dtype, method, count, bound):
    """Counts are not rounded to them."""
    variables = variables_after(train_on("w", count, count, dtype=dtype, reduction_method=method))
    assert abs(variables["w"]) <= bound


# Python that is called back.


class Broken:
    """A function of Python that stages call back, and that can be made to fail."""

    def __init__(self):
        self.is_broken = False

    def _call(self, x):
        if self.is_broken:
            raise ArithmeticError("called back")
        return x

    def __call__(self, x):
        return jax.pure_callback(self._call, jax.ShapeDtypeStruct((), np.float32), jax.lax.stop_gradient(x))

    def fail(self, session, program):
        self.is_broken = True
        with pytest.raises(Exception, match="called back"):
            session.run(program)
        self.is_broken = False


def test_an_error_on_the_device_leaves_what_was_accumulated():
    """The call waits for work large enough to run beside the host, which goes on before it fails."""
    broken = Broken()

    def body():
        with ipu.scopes.ipu_shard(0):
            w = weight("w")
            square = jnp.full((600, 600), w)
            for _ in range(3):
                square = jnp.tanh(square @ square)
        with ipu.scopes.ipu_shard(1):
            y = broken(square.mean())
        with ipu.scopes.ipu_shard(0):
            return minimize(w * y, 0.25, 4)

    program = front.compile_program(lambda: loops.repeat(2, body))
    with ipu.Session() as session:
        session.run(program)
        broken.fail(session, program)
        session.run(program)
        assert session.variables["w"] == 0


@pytest.mark.parametrize("mapping", ["loop", [0, 0], [0, 1]])
def test_an_error_on_the_device_leaves_the_state_before_it(mapping):
    broken = Broken()

    def first():
        w = weight("w")
        return w * broken(w)

    def function():
        if mapping == "loop":
            return loops.repeat(2, lambda: minimize(first(), 0.5, 2))
        return run_pipeline([first, lambda x: x * 1.0], rate=0.5, device_mapping=mapping)

    program = front.compile_program(function)
    with ipu.Session() as session:
        session.run(program)
        assert session.variables["w"] == 0
        session.load({"w": 1.0})
        broken.fail(session, program)
        assert session.variables["w"] == 1
        session.run(program)
        assert session.variables["w"] == 0


def test_what_is_printed_is_printed_once(capsys):
    """Also where the optimizer's state at the start depends on the first iteration."""

    def body(x):
        with ipu.scopes.ipu_shard(0):
            w = weight("w")
            jax.debug.print("x is {}", x, ordered=False)
            x = x + 1.0
        with ipu.scopes.ipu_shard(1):
            loss = w * x
        optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=x * 0.1)
        return x, GradientAccumulationOptimizerV2(optimizer, 1).minimize(loss)

    program = front.compile_program(lambda: loops.repeat(3, body, [np.float32(1)]))
    with ipu.Session() as session:
        assert session.run(program) == [4]
        jax.effects_barrier()
    assert capsys.readouterr().out == "x is 1.0\nx is 2.0\nx is 3.0\n"


# Layers that train differently, and random keys.


def test_dropout_and_batch_normalization():
    infeed, test_infeed = IPUInfeedQueue(front.data()), IPUInfeedQueue(front.data())
    masks, outputs = IPUOutfeedQueue(), IPUOutfeedQueue()
    traced = []

    def network(x):
        traced.append("network")
        with ipu.scopes.ipu_shard(0), ipu.variable_scope("model"):
            x = ipu.layers.BatchNormalization()(x)
        with ipu.scopes.ipu_shard(1):
            return ipu.layers.Dropout(0.5)(x)

    def body(x, _labels):
        y = network(x)
        return masks.enqueue(y == 0), minimize(jnp.mean(y**2), 0.0)

    program = front.compile_program(lambda: loops.repeat(4, body, [], infeed))
    assert len(traced) == 1
    evaluation = front.compile_program(
        lambda: loops.repeat(2, lambda x, _labels: outputs.enqueue((x, network(x))), [], test_infeed)
    )
    with ipu.Session(seed=1) as session:
        session.run([infeed.initializer, test_infeed.initializer])
        session.run(program)
        session.run(program)
        found = session.run(masks.dequeue())
        assert len({mask.tobytes() for mask in found}) == 8  # other ones in each iteration and run
        assert 0.3 < found.mean() < 0.7
        mean, variance = np.zeros(12), np.ones(12)
        for x, _labels in itertools.islice(front.data()(), 8):
            mean = 0.99 * mean + 0.01 * x.mean(0)
            variance = 0.99 * variance + 0.01 * x.var(0)
        before, scope = session.variables, "model/batch_normalization"
        np.testing.assert_allclose(before[f"{scope}/moving_mean"], mean, atol=1e-6)
        np.testing.assert_allclose(before[f"{scope}/moving_variance"], variance, rtol=1e-5)
        session.run(evaluation)
        x, y = session.run(outputs.dequeue())
        np.testing.assert_allclose(y, (x - mean) / np.sqrt(variance + 1e-3), atol=1e-5)
        models.assert_trees_close(session.variables, before, 0)


def test_random_keys_do_not_depend_on_shards():
    def run(shard):
        queue = IPUOutfeedQueue()

        def body():
            with shard(0):
                a = jax.random.normal(ipu.next_rng_key(), (2,))
            with shard(1), ipu.variable_scope("b"):
                queue.enqueue((a, jax.random.normal(ipu.next_rng_key(), (2,))))

        program = front.compile_program(lambda: loops.repeat(3, body))
        with ipu.Session(seed=9) as session:
            session.run(program)
            session.run(program)
            return session.run(queue.dequeue())

    whole, sharded = run(unsharded), run(ipu.scopes.ipu_shard)
    np.testing.assert_array_equal(whole, sharded)
    assert len(np.unique(whole)) == 24


# The end of the data, blocks, compilations.


def test_the_end_of_the_data_keeps_completed_iterations():
    model = LoopModel(8, 2, sharded=True, dataset=front.data(5))
    with ipu.Session(seed=3) as session:
        session.run(ipu.global_variables_initializer())
        start = session.variables
        for _run in range(2):  # the second one goes on with what the fifth element left accumulated
            session.run(model.initializer)
            with pytest.raises(OutOfRangeError, match="ended after 5 elements"):
                model.run(session)
        expected, variables, left = plain(start, 2 * list(front.data(5)()), 2, "sgd", "SUM")
        assert not left
        models.assert_trees_close(session.run(model.outfeed.dequeue()), expected)
        models.assert_trees_close(session.variables, jax.tree.map(np.asarray, variables))


def test_an_error_in_the_data_comes_with_its_traceback():
    def broken():
        yield from front.data(3)()
        raise ArithmeticError("in the data set")

    model = LoopModel(8, 2, dataset=broken)
    with front.session_of(model, seed=3) as session:
        with pytest.raises(ArithmeticError, match="in the data set") as caught:
            model.run(session)
        assert "broken" in str(caught.traceback[-1])
        assert len(session.run(model.outfeed.dequeue())) == 3


def test_a_loop_is_one_program_that_is_compiled_once(caplog):
    model = LoopModel(20, 3)
    with front.session_of(model, seed=3) as session:
        model.run(session)
        assert compiled_in(lambda: [model.run(session) for _run in range(3)], caplog) == []


def test_what_a_run_is_cut_into_changes_nothing(monkeypatch):
    """Random keys, carried values and accumulation go on from block to block."""
    found = []
    for block_bytes, room in ((2**26, 10), (1000, 3), (1, 1)):
        monkeypatch.setattr(Loop.__init__, "__defaults__", (None, block_bytes))
        infeed, outfeed = IPUInfeedQueue(front.data()), IPUOutfeedQueue()

        def body(rate, x, _labels, outfeed=outfeed):
            x = ipu.layers.Dropout(0.5)(x)
            loss = jnp.mean(x @ ipu.get_variable("w", (12,)) ** 2)
            train_op = minimize(loss, rate, 3, {"reduction_method": "RUNNING_MEAN"})
            return rate * 0.9, train_op, outfeed.enqueue((loss, x == 0))

        program = front.compile_program(
            lambda body=body, infeed=infeed: loops.repeat(10, body, [np.float32(0.2)], infeed)
        )
        with front.session_of(infeed, seed=3) as session:
            rates = [session.run(program[0]) for _run in range(2)]
            found.append((rates, *session.run(outfeed.dequeue()), session.variables))
        assert [kind.room for kind, _donate in program.calls[0].loop.runner._functions] == [room]
    assert len({mask.tobytes() for mask in found[0][2]}) == 20
    for other in found[1:]:
        models.assert_trees_close(other, found[0], 1e-6)


def test_traced_counts_are_not_compiled_for_one_by_one(caplog):
    n = ipu.placeholder(np.int32, [])
    program = front.compile_program(
        lambda n: loops.repeat(n, lambda x: x * 1.5, [np.float32(1)]), inputs=[n]
    )
    with ipu.Session() as session:
        session.run(program, {n: 9})

        def run_others():
            for count in range(10, 17):
                np.testing.assert_allclose(session.run(program[0], {n: count}), 1.5**count, rtol=1e-6)

        assert compiled_in(run_others, caplog) == []


def test_other_devices_for_what_was_fetched_ahead():
    model = LoopModel(3, 1, sharded=True)
    with front.session_of(model, seed=3) as session:
        losses = []
        for chosen in ([0, 1], [2, 3]):
            config = ipu.config.IPUConfig()
            config.select_ipus = chosen
            config.configure_ipu_system()
            losses.append(model.run(session))
        session.run([ipu.global_variables_initializer(), model.initializer])
        models.assert_trees_close(losses, [model.run(session) for _run in range(2)])


def test_one_infeed_for_programs_that_take_it_differently():
    """Blocks of several sizes, single elements on two devices: none is lost, repeated or out of order."""
    infeed = IPUInfeedQueue([(np.float32(n), np.full(3, n, "int32")) for n in range(1000)])

    def loop(count, shard, queue):
        def body(x, y):
            with shard(0):
                x = x * 1.0
            with shard(1):
                return queue.enqueue((x, y + 0))

        return loops.repeat(count, body, [], infeed)

    def while_loop(queue):
        def body(n, x, y):
            return n + 1, queue.enqueue((x * 1.0, y + 0))

        return loops.while_loop(lambda n: n < 4, body, [0], infeed)

    def pipe(mapping, queue):
        stages = [lambda x, y: (x * 1.0, y), lambda x, y: (x, y + 0)]
        options = {"repeat_count": 2, "infeed_queue": infeed, "outfeed_queue": queue}
        return ipu.pipelining_ops.pipeline(stages, 3, device_mapping=mapping, **options)

    makers = [
        lambda queue: loop(5, unsharded, queue),
        lambda queue: loop(2, ipu.scopes.ipu_shard, queue),
        lambda queue: pipe([0, 0], queue),
        while_loop,
        lambda queue: pipe([0, 1], queue),
        lambda queue: loop(7, unsharded, queue),
    ]
    queues = [IPUOutfeedQueue() for _maker in makers]
    programs = [
        front.compile_program(lambda make=make, queue=queue: make(queue))
        for make, queue in zip(makers, queues, strict=True)
    ]
    found = []
    with front.session_of(infeed) as session:
        for number in np.random.default_rng(1).integers(0, len(programs), 30):
            session.run(programs[number])
            x, y = session.run(queues[number].dequeue())
            np.testing.assert_array_equal(y, np.stack([x] * 3, axis=1))
            found += x.tolist()
    assert found == list(range(len(found)))
    assert len(found) > 100


def test_a_session_ends_only_its_own_pass_over_the_data():
    model = LoopModel(2, 1)
    first, second = ipu.Session(seed=3), ipu.Session(seed=3)
    first.run(model.initializer)
    before = model.run(first)
    second.run(model.initializer)
    first.close()
    np.testing.assert_array_equal(model.run(second), before)
    second.close()
    third = ipu.Session()
    with pytest.raises(RuntimeError, match="ended, by its `deleter` or with its session"):
        model.run(third)


# Compiled functions without a loop.


def test_a_compiled_function_that_trains():
    """Without a loop it is the body of one that runs once; its values may differ from its inputs."""
    batches = list(itertools.islice(front.data()(), 4))
    x, labels = (ipu.placeholder(one.dtype, one.shape) for one in batches[0])
    outfeed = IPUOutfeedQueue()

    def step(x, labels):
        with ipu.scopes.ipu_shard(0):
            rate, hidden, labels = front.first_stage(np.float32(RATE), x, labels)
        with ipu.scopes.ipu_shard(1):
            _rate, loss = front.second_stage(rate, hidden, labels)
        drawn = jax.random.uniform(ipu.next_rng_key())
        return {"loss": loss, "drawn": drawn}, minimize(loss, RATE, 2), outfeed.enqueue(loss)

    program = front.compile_program(step, inputs=[x, labels])
    with ipu.Session(seed=3) as session:
        session.run(ipu.global_variables_initializer())
        start = session.variables
        found = [session.run(program, {x: batch[0], labels: batch[1]})[0] for batch in batches]
        after = session.variables
        np.testing.assert_array_equal(session.run(outfeed.dequeue()), [one["loss"] for one in found])
    losses, variables, _left = plain(start, batches, 2, "sgd", "SUM")
    models.assert_trees_close(np.array([one["loss"] for one in found]), losses)
    models.assert_trees_close(after, jax.tree.map(np.asarray, variables))
    assert len({float(one["drawn"]) for one in found}) == len(batches)


def test_a_compiled_function_that_returns_keys():
    program = front.compile_program(lambda: (jax.random.split(ipu.next_rng_key(), 3), ipu.next_rng_key()))
    with ipu.Session() as session:
        many, one = session.run(program)
        again = session.run(program[1])
    assert (many.shape, one.shape) == ((3,), ())
    assert not np.array_equal(jax.random.key_data(one), jax.random.key_data(again))


def test_a_compiled_function_that_only_enqueues():
    outfeed = IPUOutfeedQueue()
    program = front.compile_program(lambda: outfeed.enqueue(np.float32(4)))
    with ipu.Session() as session:
        assert session.run(program) is None
        assert session.run(outfeed.dequeue()) == [4]


# Errors.


def compile_loop(body, n=2, inputs=None, **options):
    return front.compile_program(lambda: loops.repeat(n, body, inputs, **options))


def compile_while(condition, inputs=(1.0,)):
    return front.compile_program(lambda: loops.while_loop(condition, lambda *values: values, list(inputs)))


def scan(body):
    jax.lax.scan(lambda carry, _: (carry, body(carry) and None), 1.0, None, length=2)


STEPS = optax.MultiSteps(optax.sgd(0.1), 2)
QUEUE = IPUOutfeedQueue()  # nothing is run that enqueues to it
NESTED = GradientAccumulationOptimizerV2(GradientAccumulationOptimizerV2(optax.sgd(1.0), 2), 2)
STACKING = MapGradientOptimizer(optax.sgd(1.0), lambda g, v: jnp.stack([g, v]))


@pytest.mark.parametrize(
    ("body", "inputs", "message"),
    [
        (lambda x: (x, x), [1.0], r"must return as many values as .* feed, 1, .* returns 2 \(float32\[\]"),
        (lambda x: None, [1.0], r"feed, 1, .* returns 0 \(none\)"),
        (lambda x: x.astype("int32"), [1.0], r"input 0 is float32\[\], and int32\[\] comes back"),
        (lambda x: jnp.stack([x, x]), [1.0], r"input 0 is float32\[\], and float32\[2\] comes back"),
        (lambda x, y: {"y": y, "x": x}, [1.0, 2.0], r"structure, \[\*, \*\], .* \[\{'x': \*, 'y': \*\}\]"),
        (lambda d: {"b": d["a"]}, [{"a": 1.0}], "must return its inputs' structure"),
        (lambda x, y: ((x,), y), [1.0, 2.0], "must return its inputs' structure"),
        (lambda: minimize(jnp.ones(2) * weight()), [], r"floating-point scalar; got float32\[2\]"),
        (lambda: minimize(jnp.int32(3)), [], r"floating-point scalar; got int32\[\]"),
        (lambda: minimize(jnp.float32(3)), [], "No variables to optimize"),
        (lambda: minimize(weight(), var_list=["x"]), [], "'x' of var_list does not exist.* are: w"),
        (lambda: minimize(weight(), var_list="w"), [], "var_list must be a list of full names"),
        (lambda: minimize(weight(), var_list=[]), [], "var_list is empty; None trains all"),
        (lambda: minimize(weight(), global_step=3), [], "global_step must be None.* got 3"),
        (lambda: scan(lambda c: minimize(c * weight())), [], "minimize is called inside the body of scan"),
        (lambda: NESTED.minimize(weight()), [], "only once; two are nested"),
        (
            lambda: STACKING.minimize(weight()),
            [],
            r"must return the gradient's shape .* returned float32\[2\]",
        ),
        (lambda: [QUEUE.enqueue(1.0), QUEUE.enqueue(1.0)], [], "can be enqueued to only once"),
        (lambda: QUEUE.enqueue(()), [], "there is nothing to enqueue"),
        (
            lambda: QUEUE.enqueue(ipu.placeholder(np.float32, name="p")),
            [],
            "Trying to capture the tensor p",
        ),
        (
            lambda x: jax.lax.cond(x > 0, lambda x: QUEUE.enqueue(x) and x, lambda x: x, x),
            [1.0],
            "enqueue is called inside the body of cond",
        ),
    ],
)
def test_wrong_bodies(body, inputs, message):
    with pytest.raises(ValueError, match=message):
        compile_loop(body, inputs=inputs)


@pytest.mark.parametrize("n", [1.5, None, True, "3"])
def test_counts_that_are_no_integers(n):
    with pytest.raises(TypeError, match="n must be an integer"):
        compile_loop(lambda: None, n)


def two_losses_and_a_print():
    w, v = weight(), weight("v")
    shown = jax.lax.cond(w > 0, lambda x: (jax.debug.print("{}", x), 2 * x)[1], jnp.negative, w)
    return [minimize(shown * v, var_list=["v"]), minimize(w * v, var_list=["w"])]


WRONG_CALLS = {
    TypeError: {
        "body must be a function": lambda: compile_loop(3),
        "infeed_queue is not an instance": lambda: compile_loop(lambda: None, infeed_queue=[1]),
        r"takes \(x, y\), but the inputs .* gives? it \(float32\[\]\)": (
            lambda: compile_loop(lambda x, y: x, inputs=[1.0])
        ),
        "must have arrays only; got str": lambda: compile_loop(lambda: QUEUE.enqueue("text")),
    },
    ValueError: {
        "n must be from 0 to 2147483647; got -1": lambda: compile_loop(lambda: None, -1),
        "inputs must have at least one": lambda: compile_while(lambda: True, []),
        r"condition must return a boolean scalar; it returned float32\[\]": (
            lambda: compile_while(lambda x: x)
        ),
        "condition asks for variable w": lambda: compile_while(lambda x: weight() > x),
        "can be enqueued to only once in a program": lambda: front.compile_program(
            lambda: [loops.repeat(1, lambda: QUEUE.enqueue(1.0)) for _twice in range(2)]
        ),
    },
    RuntimeError: {
        "not placed on an IPU device": lambda: loops.repeat(1, lambda: None),
        "within a computational stage or the body of a loop": (
            lambda: compile_loop(lambda: loops.repeat(1, lambda: None))
        ),
        r"called in the compiled function. .* ipu.loops.repeat": lambda: front.compile_program(
            lambda: (minimize(weight()), loops.repeat(1, lambda: None))
        ),
        "minimize .*outside of a program": lambda: minimize(jnp.float32(1)),
        "enqueue .*outside of a program": lambda: QUEUE.enqueue(1.0),
    },
    NotImplementedError: {
        "called twice in the body of one loop": (
            lambda: compile_loop(lambda: [minimize(weight()), minimize(jnp.sin(1.0))])
        ),
        "accumulate, average or place their state differently .num_mini_batches": (
            lambda: compile_loop(
                lambda: [
                    minimize(weight(), var_list=["w"]),
                    minimize(weight("v"), every=2, var_list=["v"]),
                ]
            )
        ),
        r"prints or calls back within a loop, a branch or jax.checkpoint \(cond\)": (
            lambda: compile_loop(two_losses_and_a_print)
        ),
    },
}


@pytest.mark.parametrize(
    ("error", "message"), [(error, message) for error, calls in WRONG_CALLS.items() for message in calls]
)
def test_wrong_calls(error, message):
    with pytest.raises(error, match=message):
        WRONG_CALLS[error][message]()


def test_a_jitted_function_enqueues():
    jitted = jax.jit(lambda x: (QUEUE.enqueue(x), x)[1])
    compile_loop(jitted, 1, [1.0])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"opt": 0.1}, TypeError, "must be an optax.GradientTransformation.* got float"),
        ({"opt": STEPS}, TypeError, r"MultiSteps, of which \.gradient_transformation\(\) gives one"),
        ({"num_mini_batches": 2.0}, TypeError, "num_mini_batches must be an integer; got 2.0"),
        ({"num_mini_batches": 0}, ValueError, "num_mini_batches must be from 1 to .*; got 0"),
        ({"reduction_method": "max"}, ValueError, "Cannot parse"),
        ({"dtype": "int32"}, ValueError, "dtype must be a floating-point dtype; got int32"),
        ({"offload_weight_update_variables": "yes"}, TypeError, "{} must be True, False or None"),
        ({"replicated_optimizer_state_sharding": "yes"}, TypeError, "{} must be True or False"),
    ],
)
def test_wrong_optimizers(given, error, message):
    with pytest.raises(error, match=message.format(*given)):
        GradientAccumulationOptimizerV2(**{"opt": optax.sgd(1.0), "num_mini_batches": 1, **given})


def test_a_gradient_map_that_is_no_function():
    with pytest.raises(TypeError, match="gradient_mapping_function must be a function"):
        MapGradientOptimizer(optax.sgd(1.0), 3)
