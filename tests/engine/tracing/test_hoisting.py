"""Variables and random keys inside loops, conditionals, checkpoints and jitted functions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from tests.support import beside, models

WIDTH = 5


def variable(name, **options):
    return engine.get_variable(name, (WIDTH, WIDTH), **options)


def in_scan(x):
    def body(carry, scale):
        noise = jax.random.uniform(engine.next_rng_key(), carry.shape)
        return jnp.tanh(carry @ variable("w")) + noise * scale, jnp.sum(carry)

    x, sums = jax.lax.scan(body, x, jnp.arange(3.0))
    return x + jnp.sum(sums)


def in_nested_scan(x):
    def inner(carry, _element):
        return jnp.tanh(carry @ variable("inner")), None

    def outer(carry, _element):
        carry, _nothing = jax.lax.scan(inner, carry @ variable("outer"), None, length=2)
        return carry, None

    return jax.lax.scan(outer, x, None, length=2)[0]


def in_both_branches(x):
    def function(x):
        return x @ variable("shared")

    return jax.lax.cond(jnp.sum(x) > 0, function, function, x)


def in_switch(x):
    branches = [lambda x: x @ variable("a"), lambda x: x, lambda x: x * 2 @ variable("b")]
    return jax.lax.switch(jnp.int32(jnp.abs(jnp.sum(x)) * 10) % 3, branches, x)


def in_while(x):
    scale = jax.lax.while_loop(
        lambda value: value < jnp.max(engine.get_variable("limit", (), initializer=4.0, trainable=False)),
        lambda value: value + engine.get_variable("increment", (), initializer=1.0, trainable=False),
        jnp.float32(0),
    )
    return x @ variable("w") * scale


def in_checkpoint(x):
    @jax.checkpoint
    def block(x):
        count = engine.get_variable("count", (), initializer=0.0, trainable=False)
        engine.assign("count", count + 1)
        mask = jax.random.bernoulli(engine.next_rng_key(), 0.5, x.shape)
        return jnp.where(mask, jnp.tanh(x @ variable("w")), 0.0)

    return block(block_again(x))


def block_again(x):
    return jax.checkpoint(lambda x: jnp.sin(x @ variable("v")))(x)


@jax.jit
def cached(x):
    return x @ variable("cached")


def in_cached_jit(x):
    return jnp.sin(cached(x)) + x


def in_vmap_and_grad(x):
    rows = jax.vmap(lambda row: jnp.tanh(row @ variable("w")))(x)
    return rows + jax.grad(lambda x: jnp.sum(jnp.sin(x @ variable("v"))))(x)


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(in_scan, marks=pytest.mark.thorough),
        pytest.param(in_nested_scan, marks=pytest.mark.thorough),
        *(in_both_branches, in_switch, in_while, in_checkpoint, in_cached_jit, in_vmap_and_grad),
    ],
)
def test_equals_reference_and_values_reach_the_body(stage, rng):
    micro_batches = [rng.normal(size=(3, WIDTH)).astype("float32") for _ in range(2)]
    for _program in range(1 + (stage is in_cached_jit)):  # what JAX has cached by then does not matter
        pipeline = make(stage, num_micro_batches=2, optimizer=optax.sgd(0.1))
        state, _outputs = beside.train(pipeline, [micro_batches], seed=3)
    assert any(spec.trainable for spec in pipeline.variables.values())
    if "count" in state.variables:
        assert state.variables["count"] == 2  # once per micro-batch


def make(stage, **options):
    return engine.Pipeline([stage, lambda x: jnp.mean(x**2)], **options)


def test_a_scan_s_variable_has_the_gradient_of_the_same_scan_by_hand(rng):
    def stage(x):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ variable("w")), None), x, None, length=3)[0]

    def by_hand(w):
        value = x
        for _iteration in range(3):
            value = jnp.tanh(value @ w)
        return jnp.mean(value**2)

    x = rng.normal(size=(3, WIDTH)).astype("float32")
    pipeline = make(stage, num_micro_batches=1, optimizer=optax.sgd(1.0))
    state = pipeline.init(jax.random.key(0), x)
    new_state, _outputs = pipeline.step(state, [x])
    w = state.variables["w"]
    models.assert_trees_close(new_state.variables["w"], w - jax.jit(jax.grad(by_hand))(w))


def assigning_in_a_scan(x):
    def body(carry, _element):
        total = engine.get_variable("total", (), initializer=0.0, trainable=False)
        engine.assign("total", total + 1)
        return carry, None

    return jax.lax.scan(body, x, None, length=2)[0]


@jax.custom_jvp
def with_a_rule(x):
    return x @ variable("w")


with_a_rule.defjvp(lambda primals, tangents: (with_a_rule(*primals), tangents[0]))


@jax.jit
def cached_noise(x):
    return x + jax.random.uniform(engine.next_rng_key(), x.shape)


TRACED_ONCE = "was asked for in a function that JAX has traced once and used"


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (assigning_in_a_scan, "variable total is assigned inside the body of scan"),
        (with_a_rule, "inside the body of custom_jvp_call"),
        (lambda x: cached(cached(x)), f"variable cached {TRACED_ONCE}"),
        (lambda x: cached_noise(cached_noise(x)), f"a random key {TRACED_ONCE}"),
    ],
)
def test_what_is_refused(stage, message):
    with pytest.raises(ValueError, match=message):
        engine.Pipeline([stage], num_micro_batches=1).trace(np.zeros((3, WIDTH), "float32"))


@jax.jit
def moving_mean(x):
    engine.assign("mean", jnp.mean(x))
    return x


def test_cached_functions_in_several_stages_and_pipelines():
    """Each stage traces them anew: names and keys are those of the call, not of an earlier one."""

    def run(scopes):
        def stage(scope, x):
            with engine.variable_scope(scope):
                engine.get_variable("mean", (), trainable=False)
                return moving_mean(cached_noise(cached(x)))

        stages = [functools.partial(stage, scope) for scope in scopes]
        pipeline = engine.Pipeline(stages, num_micro_batches=1, device_mapping=[0] * len(scopes))
        x = np.zeros((3, WIDTH), "float32")
        state, outputs = pipeline.step(pipeline.init(jax.random.key(0), x), [x])
        assert sorted(state.variables) == sorted(f"{s}/{v}" for s in scopes for v in ("cached", "mean"))
        assert all(state.variables[f"{scope}/mean"] != 0 for scope in scopes)
        return outputs.outputs[0]

    assert not np.array_equal(run("ab"), run("c"))
