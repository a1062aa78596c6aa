"""`ipu_shard`: a scoped body cut into stages."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import engine
from ipu_pipeline.engine.loop import Loop, trace_body
from ipu_pipeline.engine.state import PipelineState
from ipu_pipeline.engine.tracing import frames
from ipu_pipeline.engine.tracing.specs import initial_value
from ipu_pipeline.engine.tracing.stages import Source
from ipu_pipeline.optimizers import GradientAccumulationOptimizerV2
from ipu_pipeline.scopes import ipu_shard
from tests.support import models

SHAPE = (3, 4)


def trace(body):
    """A body of `body(x) -> loss` that trains with one iteration per update."""

    def call(carried, fed):
        # optax.trace without decay keeps the gradients that the update was given.
        GradientAccumulationOptimizerV2(optax.trace(decay=0.0), 1).minimize(body(*fed))
        return carried

    element = (jax.ShapeDtypeStruct(SHAPE, "float32"),)
    return trace_body(call, [], element, frames.ProgramNames(), "the body")


def begin(body):
    """A loop with as many devices as there are shards, and its state at the start."""
    loop = Loop(trace(body))
    loop.prepare(jax.devices())
    key = jax.random.key(5)
    variables = {name: initial_value(spec, key) for name, spec in loop.variables.items()}
    return loop, loop.place(PipelineState(variables, None, np.int32(0), np.int32(0), key))


def run(body, x):
    """The loop, and by name the variables, gradients and new variables of one iteration."""
    loop, state = begin(body)
    start = jax.tree.map(np.array, state.variables)  # the loop may take their memory
    state = models.run_loop(loop, state, [[x]])
    assert state.num_accumulated == 0
    new = jax.tree.map(np.asarray, state.variables)
    return loop, start, jax.tree.map(np.asarray, state.optimizer_state.trace), new


def kernel(name, shape=(4, 4), **options):
    return ipu.get_variable(name, shape, **options)


def mean_square(x):
    return jnp.mean(x**2)


# Cutting.


def test_runs_skips_and_returns():
    def body(x):
        with ipu_shard(0):
            a = x @ kernel("a")
        with ipu_shard(1):
            b = jnp.tanh(a) @ kernel("b")
        with ipu_shard(0):
            c = b * 2.0
        with ipu_shard(2):
            return mean_square(c + a)  # a skips from 0 to 2

    traced = trace(body)
    assert traced.shards == (0, 1, 0, 2)
    stages = traced.pipeline.stages
    assert [stage.inputs for stage in stages] == [
        (Source("element", 0),),
        (Source("output", 0, 0),),
        (Source("output", 0, 1),),
        (Source("output", 0, 2), Source("output", 0, 0)),
    ]
    assert traced.pipeline.owners == {"a": 0, "b": 1}
    assert traced.pipeline.loss == Source("output", 0, 3)


def test_operations_outside_of_scopes_stay_with_the_shard_before_them():
    def body(x):
        x = x * 2.0  # before all scopes: with the first one
        with ipu_shard(1):
            x = x @ kernel("a")
        x = jnp.sin(x)  # with 1
        with ipu_shard(0):
            x = jnp.cos(x)
        return mean_square(x)  # with 0

    traced = trace(body)
    assert traced.shards == (1, 0)
    primitives = [[eq.primitive.name for eq in stage.flat.equations] for stage in traced.pipeline.stages]
    assert primitives[0] == ["mul", "dot_general", "sin"]
    assert primitives[1][0] == "cos"


def test_the_innermost_scope_counts():
    def body(x):
        with ipu_shard(0):
            x = x @ kernel("a")
            with ipu_shard(1), jax.named_scope("block"):
                x = jnp.sin(x)
            x = jnp.cos(x)
        return mean_square(x)

    assert trace(body).shards == (0, 1, 0)


def test_nested_and_cached_jit():
    inner = jax.jit(lambda x: jnp.tanh(x))

    @jax.jit
    def outer(x):
        with ipu_shard(1):
            x = inner(x)
        return x * 2.0

    def body(x):
        with ipu_shard(0):
            x = inner(x @ kernel("a"))
        with ipu_shard(2):
            x = inner(x)  # traced under shard 0, used under 2
        return mean_square(outer(x))

    assert trace(body).shards == (0, 2, 1)


def test_where_variables_live():
    def body(x):
        free = kernel("free")  # outside of all scopes: where it is used first
        with ipu_shard(0):
            early = kernel("early")  # in the scope of 0, although 1 uses it
            x = jnp.sin(x)
        with ipu_shard(1):
            x = x @ early
            x = x @ free
        with ipu_shard(2):
            late = kernel("late")  # no operation in this scope
        with ipu_shard(3):
            return mean_square(x @ late)

    traced = trace(body)
    assert traced.shards == (0, 1, 2, 3)
    assert traced.pipeline.owners == {"free": 1, "early": 0, "late": 2}
    assert traced.pipeline.stages[2].flat.equations == []


def test_loss_and_outputs_that_the_last_shard_does_not_make():
    def body(x):
        with ipu_shard(0):
            loss = mean_square(x @ kernel("a"))
        with ipu_shard(1):
            ipu.ipu_outfeed_queue.IPUOutfeedQueue().enqueue((jnp.sin(x), loss, x, 3.0))
        return loss

    traced = trace(body)
    assert traced.shards == (0, 1)
    assert [eq.primitive.name for eq in traced.pipeline.stages[1].flat.equations] == ["sin", "copy"]
    ((_entry, places),) = traced.enqueued
    kinds = [traced.pipeline.outputs[place] for place in places]
    assert kinds[1] == Source("output", 0, 0)
    assert kinds[2] == Source("element", 0)
    assert {kinds[0].stage, kinds[3].stage} == {1}


# Errors.


def with_own_jvp(function):
    ruled = jax.custom_jvp(function)
    ruled.defjvp(lambda primals, tangents: (ruled(*primals), tangents[0]))
    return ruled


def with_own_vjp(function):
    ruled = jax.custom_vjp(function)
    ruled.defvjp(lambda x: (ruled(x), None), lambda _, g: (g,))
    return ruled


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0], "jax.lax.scan"),
        (lambda f: lambda x: jax.lax.cond(x[0, 0] > 0, f, lambda y: y, x), "jax.lax.cond"),
        (lambda f: jax.checkpoint(f), "jax.checkpoint"),
        (lambda f: lambda x: jax.lax.fori_loop(0, 2, lambda i, c: f(c), x), "jax.lax.scan"),
        (lambda f: lambda x: jax.lax.while_loop(lambda c: False, f, x), "jax.lax.while_loop"),
        (lambda f: lambda x: jax.lax.map(f, x), "jax.lax.scan"),
        (with_own_jvp, "jax.custom_jvp"),
        (with_own_vjp, "jax.custom_vjp"),
    ],
)
def test_scopes_inside_bodies(wrap, name):
    def inner(x):
        with ipu_shard(1):
            return jnp.sin(x)

    for function in (wrap(inner), wrap(jax.jit(inner))):
        with pytest.raises(ValueError, match=rf"ipu_shard\(1\) is opened inside the body of {name}"):
            trace(lambda x, function=function: mean_square(function(x @ kernel("a"))))


@pytest.mark.parametrize("index", [1.0, "0", None, True, np.float32(1)])
def test_index_type(index):
    with pytest.raises(TypeError, match="ipu_shard: index must be an integer"), ipu_shard(index):
        pass


def test_scopes_inside_a_rule():
    plain = jax.custom_vjp(jnp.sin)

    def forward(x):
        with ipu_shard(1):
            return jnp.sin(x), None

    plain.defvjp(forward, lambda _, g: (g,))
    with pytest.raises(RuntimeError, match="ipu_shard"):  # the rule runs when the body has been traced
        Loop(trace(lambda x: mean_square(plain(x @ kernel("a")))))


def test_index_range_and_place():
    with pytest.raises(ValueError, match="index must be at least 0; got -1"), ipu_shard(-1):
        pass
    with pytest.raises(RuntimeError, match="ipu_shard was called outside of a program"), ipu_shard(0):
        pass
    frame = frames.Frame(frames.ProgramNames(), True, "stage 0 (encoder)", is_stage=True)
    refused = pytest.raises(RuntimeError, match=r"in stage 0 \(encoder\).*device_mapping")
    with frames.frame(frame), refused, ipu_shard(0):
        pass


def test_a_variable_assigned_from_another_shard():
    def body(x):
        with ipu_shard(0):
            x = x @ kernel("a")
            ipu.get_variable("count", (), trainable=False)
        with ipu_shard(1):
            y = jnp.sum(x)
            ipu.assign("count", y)
        return mean_square(x) + y

    with pytest.raises(ValueError, match="variable count lives on shard 0, .* computed on shard 1"):
        trace(body)


# Values.


def test_assigned_variables_and_a_return_to_their_shard(rng):
    def body(x):
        with ipu_shard(0):
            count = ipu.get_variable("count", initializer=0.0, trainable=False)
            total = ipu.get_variable("total", initializer=0.0, trainable=False)
            x = x @ kernel("a") + count
            ipu.assign("count", count + 1.0)
        with ipu_shard(1):
            x = jnp.sin(x)
        with ipu_shard(0):
            ipu.assign("total", total + jnp.sum(x))
        return mean_square(x)

    x = rng.normal(size=SHAPE).astype("float32")
    loop, start, gradients, new = run(body, x)
    assert loop.body.shards == (0, 1, 0)

    def plain(a):
        y = jnp.sin(x @ a)
        return mean_square(y), jnp.sum(y)

    expected, total = jax.grad(plain, has_aux=True)(start["a"])
    models.assert_trees_close(gradients, {"a": expected})
    assert new["count"] == 1
    models.assert_trees_close(new["total"], np.asarray(total))


def test_state_stays_where_its_shard_is(rng):
    def body(x):
        with ipu_shard(2):
            x = x @ kernel("a")
        with ipu_shard(1):
            return mean_square(x @ kernel("b"))

    loop, state = begin(body)
    assert loop.num_devices == 3
    state = models.run_loop(loop, state, [[rng.normal(size=SHAPE).astype("float32")]] * 2)
    places = {"a": [jax.devices()[2]], "b": [jax.devices()[1]]}
    for kept in (state.variables, state.accumulators, state.optimizer_state.trace):
        assert {name: list(value.devices()) for name, value in kept.items()} == places


# Generated models against plain JAX.


@jax.custom_vjp
def reversed_gradient(x):
    """Has a rule that is not its derivative, which shows that the rule survives."""
    return jnp.tanh(x)


reversed_gradient.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (-g * x,))


@jax.custom_jvp
def doubled_tangent(x):
    """Likewise."""
    return jnp.sin(x)


doubled_tangent.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), 2 * tangents[0]))

shared_jit = jax.jit(lambda x, y: jnp.tanh(x) * 0.5 + y)  # cached between shards
nested_jit = jax.jit(lambda x: shared_jit(jnp.sin(x), x))


def scanned(x, w):
    return jax.lax.scan(lambda carry, row: (jnp.tanh(carry + row @ w), row), jnp.zeros(4), x)[0] + x


def conditional(x, y):
    return jax.lax.cond(jnp.sum(x) > 0, lambda a, b: a * b, lambda a, b: a - b, x, y)


class Generated:
    """A random model: the same graph for the library and for plain JAX."""

    def __init__(self, seed):
        self.seed = seed

    def loss(self, get, shard, x):
        rng = np.random.default_rng(self.seed)
        num_shards = rng.integers(2, 5)
        values = [x, jnp.cos(x)]
        kernels = []

        def operation(index):
            one = values[rng.integers(len(values))]  # from anywhere before: skips
            two = values[rng.integers(len(values))]
            kind = rng.integers(11)
            if kind <= 2 or (kind <= 4 and not kernels):
                kernels.append(get(f"w{index}", (4, 4)))
                return jnp.tanh(one @ kernels[-1])
            if kind <= 4:  # a variable again, perhaps on another shard
                return scanned(one, kernels[rng.integers(len(kernels))])
            if kind == 5:
                return shared_jit(one, two)
            if kind == 6:
                return nested_jit(one)
            if kind == 7:
                return reversed_gradient(one) + two
            if kind == 8:
                return doubled_tangent(one)
            if kind == 9:
                return conditional(one, two)
            return jax.checkpoint(lambda a: jnp.sin(a) * a)(one + jax.lax.stop_gradient(two))

        for index in range(rng.integers(3, 9)):
            place = rng.integers(-1, num_shards)  # -1: outside of all scopes
            with contextlib.nullcontext() if place < 0 else shard(int(place)):
                if rng.random() < 0.2:  # the scope is opened in a function that is jitted
                    inner = rng.integers(num_shards)
                    value = values[-1]

                    def jitted(a, inner=inner):
                        with shard(int(inner)):
                            return jnp.sin(a) + 0.1

                    values.append(jax.jit(jitted)(value))
                else:
                    values.append(operation(index))
        if not kernels:
            values.append(values[-1] @ get("w", (4, 4)))
        with shard(int(rng.integers(num_shards))):
            return sum(jnp.mean(value**2) for value in values[1:])


@pytest.mark.parametrize("block", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in range(1, 3))])
def test_generated_models_have_the_gradients_of_plain_jax(block):
    num_split, shapes = 0, set()
    num_models = 10 if block else 2
    for seed in range(block * 10, block * 10 + num_models):
        model = Generated(seed)
        x = np.random.default_rng(seed).normal(size=SHAPE).astype("float32")
        loop, start, gradients, _new = run(lambda x, model=model: model.loss(kernel, ipu_shard, x), x)

        def plain(variables, model=model, x=x):
            return model.loss(lambda name, _shape: variables[name], lambda _: contextlib.nullcontext(), x)

        expected = jax.jit(jax.grad(plain))(start)
        models.assert_trees_close(gradients, jax.tree.map(np.asarray, expected))
        num_split += len(set(loop.body.shards)) > 1
        shapes.add(loop.body.shards)
    assert num_split >= 0.7 * num_models
    assert len(shapes) >= 0.4 * num_models


@pytest.mark.parametrize("shards", [(0, 0), (0, 1)])
def test_what_each_ipu_takes(shards):
    def body(x):
        with ipu_shard(shards[0]):
            x = jnp.tanh(x @ kernel("first"))
        with ipu_shard(shards[1]):
            return mean_square(x @ kernel("second"))

    x = np.random.default_rng(0).normal(size=SHAPE).astype("float32")
    loop, start, trace_, _new = run(body, x)
    sizes = {name: value.nbytes for name, value in start.items()}
    assert sizes == {name: value.nbytes for name, value in trace_.items()}
    for plan in engine.planning.plan_ipu_memory(loop, 1):
        own = sum(
            sizes[name] for name, ipu in zip(("first", "second"), shards, strict=True) if ipu == plan.ipu
        )
        assert plan.num_variable_bytes == plan.num_optimizer_bytes == plan.num_accumulator_bytes == own
        assert plan.num_temporary_bytes is not None
        if len(set(shards)) == 2:
            assert plan.num_feed_bytes == (x.nbytes if plan.ipu == 0 else 0)
