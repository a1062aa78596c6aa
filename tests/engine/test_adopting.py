"""States that lack variables of a pipeline, or have others."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from tests.support import models

X = np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4)
MICRO_BATCHES = [X, X**2]


def layer(p, x):
    return jnp.tanh(x @ p["w"])


def head(p, x):
    return jnp.mean((x @ p) ** 2)


def draw(shape):
    return lambda key: jax.random.normal(key, shape) / 2


def make(names, optimizer=None, size=2, **options):
    """A pipeline of layers with names, and a head with the name of the last one."""
    *layers, last = names
    parameters = [engine.Shared(name, lambda key: {"w": draw((4, 4))(key)}) for name in layers]
    return engine.Pipeline(
        [*[layer] * len(layers), head],
        parameters=[*parameters, engine.Shared(last, draw((4, size)))],
        num_micro_batches=2,
        optimizer=optax.adam(0.1) if optimizer is None else optimizer,
        **options,
    )


def train(pipeline, updates=2):
    state = pipeline.init(jax.random.key(0), X)
    for _update in range(updates):
        state, _outputs = pipeline.step(state, MICRO_BATCHES * pipeline.num_replicas)
    return state


def adopt(pipeline, state):
    pipeline.trace(X)
    return pipeline.adopt(state)


OLD = ("a", "b", "old")


@functools.cache
def old_state():
    return train(make(OLD))


def test_another_head_and_a_layer_more():
    """What was trained goes on with its optimizer state; the loop in plain JAX does the same."""
    state, optimizer = old_state(), optax.adam(0.1)
    pipeline = make(("a", "c", "b", "head"), num_replicas=2, shard=["weights"])
    adopted, adoption = adopt(pipeline, state)
    assert adoption == engine.Adoption(("a/w", "b/w"), ("c/w", "head"), ("old",), True)
    assert (adopted.update_count, adopted.execution_count) == (2, 2)
    start = pipeline.init(jax.random.key(0), X).variables
    expected = models.on_one_device({name: state.variables.get(name, start[name]) for name in start})
    models.assert_trees_close(adopted.variables, expected, 0.0)
    known, new = models.on_one_device(state.optimizer_state[0]), optimizer.init(expected)[0]
    mu, nu = (
        {name: own.get(name, zeros[name]) for name in zeros}
        for own, zeros in ((known.mu, new.mu), (known.nu, new.nu))
    )
    opt_state = (known._replace(mu=mu, nu=nu), optax.EmptyState())

    def loss(variables):
        total = 0.0
        for x in MICRO_BATCHES:
            for name in ("a/w", "c/w", "b/w"):
                x = layer({"w": variables[name]}, x)
            total += head(variables["head"], x)
        return total / len(MICRO_BATCHES)

    found, _outputs = pipeline.step(adopted, MICRO_BATCHES * pipeline.num_replicas)
    total = jax.jit(jax.grad(loss))(expected)
    with jax.numpy_dtype_promotion("standard"):
        changes, _state = optimizer.update(total, opt_state, expected)
        models.assert_trees_close(found.variables, optax.apply_updates(expected, changes))


def test_what_it_says():
    _state, adoption = adopt(make(("a", "c", "b", "head")), old_state())
    assert str(adoption).splitlines() == [
        "taken: 2 variables, a/w, b/w",
        "new: 2 variables, c/w, head",
        "left in the state: 1 variable, old",
        "optimizer state: taken",
    ]
    same, adoption = adopt(make(OLD), old_state())
    assert "new: 0 variables\nleft in the state: 0 variables\n" in str(adoption)
    assert same.optimizer_state[0].count == 2


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": optax.sgd(0.1, momentum=0.9)},
        {"optimizer": optax.adam(0.1, mu_dtype=jnp.bfloat16)},
        {"trained": ["head"]},
    ],
    ids=["another optimizer", "other dtypes", "new variables only"],
)
def test_an_optimizer_state_that_does_not_fit(options):
    pipeline = make(("a", "b", "head"), **options)
    state, adoption = adopt(pipeline, old_state())
    assert adoption.takes_optimizer_state is False
    assert "optimizer state: new" in str(adoption)
    fresh = pipeline.init_optimizer_state(state.variables)
    jax.tree.map(np.testing.assert_array_equal, state.optimizer_state, fresh)
    pipeline.step(state, MICRO_BATCHES)


def test_counts_without_variables_go_on():
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    old, new = (make(names, optax.sgd(schedule)) for names in (OLD, ("a", "b", "head")))
    state, adoption = adopt(new, train(old))
    assert adoption.takes_optimizer_state
    assert jax.tree.leaves(state.optimizer_state) == [2]


def test_evaluation():
    """Without an optimizer it takes no optimizer state; a state of it has none to give."""
    shapes = {"a": {"w": jax.ShapeDtypeStruct((4, 4), "f4")}, "old": jax.ShapeDtypeStruct((4, 2), "f4")}
    parameters = [engine.Shared(name, own) for name, own in shapes.items()]
    evaluator = engine.Pipeline([layer, head], parameters=parameters, num_micro_batches=2)
    state, adoption = adopt(evaluator, old_state())
    assert adoption == engine.Adoption(("a/w", "old"), (), ("b/w",), None)
    assert state.optimizer_state is None
    assert "optimizer state: none" in str(adoption)
    evaluator.step(state, MICRO_BATCHES)
    _state, adoption = adopt(make(OLD), state)
    assert (adoption.new, adoption.takes_optimizer_state) == (("b/w",), False)


def test_variables_that_weights_are_counted_in():
    weighted = make(("a", "b", "head"), loss_weight=lambda loss: 1)
    state, adoption = adopt(weighted, old_state())
    assert adoption.new == ("head",)
    assert sorted(state.variables) == ["a/w", "b/w", "head"]
    weighted.step(state, MICRO_BATCHES)


def test_errors():
    state, larger = old_state(), make(OLD, size=3)
    shapes = engine.Pipeline(
        [layer, lambda p, x: x * p],
        parameters=[
            engine.Shared("a", {"w": np.ones((4, 4), "float32")}),
            jax.ShapeDtypeStruct((), "float32"),
        ],
        num_micro_batches=1,
    )
    for pipeline, message in (
        (larger, r"old is float32\[4, 2\] there, float32\[4, 3\] here. To begin such a"),
        (make("xyz"), "has none of the pipeline's variables. It has .*old; the pipeline has x"),
        (shapes, "parameters of stage 1 .* must be an array to start from; got a Shap"),
    ):
        with pytest.raises(ValueError, match=message):
            adopt(pipeline, state)
    without = dataclasses.replace(state, variables={n: v for n, v in state.variables.items() if n != "old"})
    assert adopt(larger, without)[1].new == ("old",)
    with pytest.raises(RuntimeError, match="has not been traced"):
        make(OLD).adopt(state)
    message = "Pipeline.adopt: state must be what init or step returned; got dict"
    with pytest.raises(TypeError, match=message):
        make(OLD).adopt(state.variables)


def test_errors_about_states_that_lack_variables_say_how_to_go_on():
    state, pipeline = old_state(), make(("a", "c", "head"))
    pipeline.trace(X)
    mend = r"Pipeline.adopt\(state\) takes the variables"
    for use in (lambda: pipeline.step(state, MICRO_BATCHES), lambda: pipeline.parameters(state)):
        with pytest.raises(ValueError, match=f"has no variable c/w.*{mend}"):
            use()
    with pytest.raises(ValueError, match=f"{mend} of the same names"):
        engine.resplit(state, pipeline)
