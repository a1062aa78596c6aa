"""Meshes within stages: `shard_map`, constraints and Flax's annotations, equal to plain JAX."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ipu_pipeline import engine
from ipu_pipeline.engine.progress import Compilation
from tests.support import models

COUNT = 2
RNG = np.random.default_rng(3)
SPECS = {"up": P(None, "model"), "offset": P("model"), "down": P("model")}


def divide(spec):
    return next((own for name, own in SPECS.items() if name in spec.name), None)


def make_parameters(rng):
    shapes = {"up": (4, 8), "offset": (8,), "down": (8, 4)}
    return {name: rng.normal(0, 0.5, shape).astype("float32") for name, shape in shapes.items()}


def plain_block(p, x):
    around = jnp.sin(jnp.roll(p["offset"], 1)).mean() + (p["offset"] ** 2).sum()
    return x + jnp.tanh(x @ p["up"] + p["offset"]) @ p["down"] + around


def mapped_block(p, x):
    """`plain_block` by hand: each device has its units; `ppermute`, `all_gather` and `psum` join them."""

    def part(p, x):
        size = jax.lax.axis_size("model")
        last = jax.lax.ppermute(p["offset"][-1:], "model", [(i, (i + 1) % size) for i in range(size)])
        rolled = jnp.concatenate([last, p["offset"][:-1]])
        own = jnp.tanh(x @ p["up"] + p["offset"]) @ p["down"]
        squares = (jax.lax.all_gather(p["offset"], "model", tiled=True) ** 2).sum()
        return jax.lax.psum(own, "model") + jax.lax.pmean(jnp.sin(rolled).mean(), "model") + squares

    specs = {"in_specs": (SPECS, P()), "out_specs": P(), "check_vma": False}
    return x + jax.shard_map(part, mesh=engine.stage_mesh(), **specs)(p, x)


@jax.custom_vjp
def tanh(x):
    return jnp.tanh(x)


def tanh_backward(y, cotangent):
    assert engine.stage_mesh().axis_names == ("replica", "model")
    return (jax.lax.with_sharding_constraint(cotangent * (1 - y**2), P(None, "model")),)


tanh.defvjp(lambda x: (jnp.tanh(x), jnp.tanh(x)), tanh_backward)


def constrained_block(p, x):
    """`plain_block` with constraints, also in a rule of a custom derivative and in bodies."""
    own = NamedSharding(engine.stage_mesh(), P(None, "model"))

    def body(carry, _):
        hidden = tanh(jax.lax.with_sharding_constraint(x @ p["up"] + p["offset"], P("replica", "model")))
        return carry + jax.lax.with_sharding_constraint(hidden, own) @ p["down"] / 2, None

    x, _ = jax.checkpoint(lambda x: jax.lax.scan(body, x, None, length=2))(x)
    return x + jnp.sin(jnp.roll(p["offset"], 1)).mean() + (p["offset"] ** 2).sum()


def make(block, size, parameters=None, **options):
    """Two stages of a block, the second one with a loss."""
    rng = np.random.default_rng(1)

    def first(p, x, y):
        return block(p, x), y

    def last(p, x, y):
        return jnp.mean((block(p, x) - y) ** 2)

    given = {
        "stages": [first, last],
        "parameters": parameters or [make_parameters(rng), make_parameters(rng)],
        "num_micro_batches": COUNT,
        "tensor_parallel": None if size is None else engine.TensorParallel(size, divide),
        "optimizer": optax.sgd(0.1),
    }
    return engine.Pipeline(**{**given, **options})


def make_step(num_replicas=1):
    rng = np.random.default_rng(2)
    return [tuple(rng.normal(size=(2, 3, 4)).astype("float32")) for _ in range(COUNT * num_replicas)]


def check(pipeline, block=plain_block, num_replicas=1):
    """Compares a step with plain JAX, per leaf. Returns the pipeline's state."""

    def loss(parameters, x, y):
        return jnp.mean((block(parameters[1], block(parameters[0], x)) - y) ** 2)

    step = make_step(num_replicas)
    state = pipeline.init(jax.random.key(0), step[0])
    parameters = jax.tree.map(np.asarray, pipeline.parameters(state))
    groups, sgd = [[pair] for pair in step], optax.sgd(0.1)
    _losses, expected, _left = models.plain_loop(loss, parameters, groups, len(step), sgd, "MEAN")
    state, _outputs = pipeline.step(state, step)
    models.assert_trees_close(pipeline.parameters(state), expected)
    return state


@pytest.mark.parametrize(
    ("block", "size", "options"),
    [
        (mapped_block, 2, {}),
        pytest.param(mapped_block, None, {"num_replicas": 2}, marks=pytest.mark.thorough),
        pytest.param(constrained_block, 2, {"recompute": "auto"}, marks=pytest.mark.thorough),
        pytest.param(
            mapped_block,
            2,
            {"num_replicas": 2, "shard": ["optimizer_state", "weights"]},
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_equal_to_plain_jax(block, size, options):
    check(make(block, size, **options), num_replicas=options.get("num_replicas", 1))


def test_a_reshard_that_names_no_axis():
    """It says nothing on automatic axes, and is left out: JAX 0.9 cannot compile it without a mesh."""

    def block(p, x):
        return jax.sharding.reshard(x @ p["up"] @ p["down"], P())

    pipeline = make(block, 2)
    pipeline.init(jax.random.key(0), make_step()[0])
    for stage in pipeline.traced.stages:
        assert "reshard" not in [equation.primitive.name for equation in stage.flat.equations]


def test_op_by_op_and_nans():
    """Stages are called with a mesh of devices; a nan that is made in `shard_map` is found."""

    def block(p, x):
        x = jax.lax.with_sharding_constraint(x @ p["up"], P(None, "model"))
        add = jax.shard_map(lambda x: jax.lax.psum(x, "model"), in_specs=P(None, "model"), out_specs=P())
        return add(x)

    def last(p, x, y):
        return jnp.mean(x @ p["up"].T[: x.shape[1]] - y)

    step = make_step()
    parameters = [{"up": make_parameters(RNG)["up"]} for _stage in range(2)]
    stages = [lambda p, x, y: (block(p, x), y), last]
    pipeline = make(None, 2, parameters, stages=stages, check_nans=True, reduction="sum")
    state = pipeline.init(jax.random.key(0), step[0])
    expected, _outputs = pipeline.step(state, step)
    with jax.disable_jit():
        found, _outputs = pipeline.step(state, step)
    models.assert_trees_close(found.variables, expected.variables)
    infinite = np.array([[np.inf, -np.inf, 0, 0]] * 3, "float32")
    with pytest.raises(FloatingPointError, match=r"stage 0 .*, forward, micro-batch 1"):
        pipeline.step(state, [step[0], (infinite, step[1][1])])


def test_equal_stages_share_a_program(monkeypatch, no_cache):
    """A program with `shard_map` names no devices, so one executable serves equal stages."""
    loaded = []
    monkeypatch.setattr(Compilation, "note_loaded", lambda _self, number: loaded.append(number))
    options = {"stages": [mapped_block] * 2, "loss": None, "optimizer": None}
    pipeline = make(None, None, **options)
    step = [np.ones((4096, 4), "float32")] * COUNT  # smaller programs are compiled for each device
    pipeline.step(pipeline.init(jax.random.key(0), step[0]), step)
    assert loaded == [1]


# Flax.

RULES = (("batch", "replica"), ("embed", None), ("mlp", "model"))


class LinenBlock(nn.Module):
    """A block whose axes have logical names."""

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        up = nn.with_logical_partitioning(init, ("embed", "mlp"))
        hidden = nn.Dense(8, use_bias=False, kernel_init=up, name="up")(x)
        hidden = nn.with_logical_constraint(jnp.tanh(hidden), ("batch", "mlp"))
        down = nn.with_partitioning(init, ("model", None))
        return x + nn.Dense(4, use_bias=False, kernel_init=down, name="down")(hidden)


def test_linen():
    module = LinenBlock()
    parameters = jax.jit(module.init)(jax.random.key(1), make_step()[0][0])

    def block(p, x):
        with nn.logical_axis_rules(RULES):
            return module.apply(p, x)

    state = check(make(block, 2, [parameters, jax.tree.map(jnp.copy, parameters)]), module.apply)
    divided = [value for name, value in state.variables.items() if "up" in name]
    assert [value.addressable_shards[0].data.shape for value in divided] == [(4, 4)] * 2


class NnxBlock(nnx.Module):
    """A block with annotated parameters."""

    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        up, down = (nnx.with_partitioning(init, spec) for spec in ((None, "model"), ("model", None)))
        self.up = nnx.Linear(4, 8, use_bias=False, kernel_init=up, rngs=rngs)
        self.down = nnx.Linear(8, 4, use_bias=False, kernel_init=down, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


@pytest.mark.thorough
def test_nnx():
    """Parameters that were made in a mesh of the user's, merged in stages."""
    with jax.set_mesh(jax.make_mesh((1, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)):
        parts = [nnx.split(NnxBlock(nnx.Rngs(seed))) for seed in range(2)]
    graph = parts[0][0]
    parameters = [jax.tree.map(np.asarray, nnx.to_pure_dict(state)) for _graph, state in parts]

    def block(p, x):
        scale = nnx.Param(jnp.ones(4), out_sharding=(None,))  # made in the stage: in its mesh
        return nnx.merge(graph, p)(x) * scale

    check(make(block, 2, parameters), lambda p, x: nnx.merge(graph, p)(x))


# What is refused.


def map_over(axis):
    return lambda p, x: jax.shard_map(lambda x: jax.lax.pmean(x, axis), in_specs=P(), out_specs=P())(x)


def user_mesh():
    return jax.make_mesh((2,), ("model",))


WRONG = {
    "axis of replicas": (map_over("replica"), "would see one replica.* Use engine.cross_replica_sum"),
    "other axis": (
        lambda p, x: jax.lax.with_sharding_constraint(x, P("data")),
        "data.*not found in mesh.*name these or None",
    ),
    "no shard_map": (lambda p, x: jax.lax.psum(x, "model"), "unbound axis.*within jax.shard_map"),
    "a mesh of one's own": (
        lambda p, x: jax.shard_map(lambda x: x, mesh=user_mesh(), in_specs=P(), out_specs=P())(x),
        "should match the mesh.*pass mesh=engine.stage_mesh",
    ),
    "devices": (
        lambda p, x: jax.lax.with_sharding_constraint(x, NamedSharding(user_mesh(), P())),
        "names the devices of a mesh.*Give it a PartitionSpec alone",
    ),
}


@pytest.mark.parametrize(("block", "message"), WRONG.values(), ids=WRONG)
def test_what_is_not_usable(block, message):
    pipeline = make(block, None)
    with pytest.raises((ValueError, NameError)) as raised:
        pipeline.trace(make_step()[0])
    text = "\n".join([str(raised.value), *raised.value.__notes__])
    assert re.search(message, text, re.DOTALL), text
    assert "stage 0 (first)" in text


def test_outside_of_stages_and_with_other_replicas():
    with pytest.raises(RuntimeError, match="stage_mesh was called outside of a stage"):
        engine.stage_mesh()

    def together(inner):
        def block(p, x):
            x = jax.nn.relu(jax.lax.with_sharding_constraint(x @ p["up"], P("model"))) @ p["down"]
            x, _ = jax.lax.scan(lambda x, _: (jax.nn.relu(x), None), inner(p, x), None, length=2)
            return x + engine.cross_replica_sum(x) * 0

        return make(block, None, num_replicas=2)

    def plain(p, x):
        return jax.nn.relu(jax.nn.relu(x @ p["up"]) @ p["down"])

    check(together(lambda p, x: x), plain, num_replicas=2)
    with pytest.raises(ValueError, match=r"with other replicas .* and with jax.shard_map"):
        together(mapped_block).init(jax.random.key(0), make_step()[0])
