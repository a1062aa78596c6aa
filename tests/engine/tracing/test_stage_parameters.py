"""Stages that are functions of a pytree of parameters: `parameters=`, `Shared`, and the way back."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from tests.engine.test_pipeline import arrays, make, run_both
from tests.support import models


def tanh_layer(p, x):
    return jnp.tanh(x @ p["w"] + p["b"])


def head(p, x):
    return jnp.mean((x @ p) ** 2)


def start(rng):
    def layer():
        return {"w": rng.normal(size=(6, 6)).astype("float32"), "b": np.zeros(6, "float32")}

    return [layer(), layer(), rng.normal(size=(6, 2)).astype("float32")]


STAGES = [tanh_layer, tanh_layer, head]


def tied_stages():
    def embed(p, ids, labels):
        return p["table"]["in"][ids] * p["scale"], labels

    def project(p, x, labels):
        return models.cross_entropy(jnp.tanh(x @ p["w"]) @ p["tied"]["in"].T + p["tied"]["bias"], labels)

    return [embed, project]


def tied_parameters(rng):
    def normal(*shape):
        return rng.normal(size=shape).astype("float32")

    table = engine.Shared("words", {"in": normal(10, 6), "bias": normal(10)})
    return [{"scale": np.float32(2), "table": table}, {"w": normal(6, 6), "tied": table}]


def without_shared(parameters):
    return [{k: getattr(v, "value", v) for k, v in stage.items()} for stage in parameters]


def test_parameters_equal_plain_jax(rng):
    """Tied embeddings: the gradients of both stages are added, and there is one variable."""
    parameters = tied_parameters(rng)
    step = [tuple(rng.integers(0, 10, 4).astype("int32") for _ in range(2)) for _ in range(4)]
    pipeline = make(tied_stages(), parameters=parameters)
    state = pipeline.init(jax.random.key(0), step[0])
    assert sorted(state.variables) == ["stage0/scale", "stage1/w", "words/bias", "words/in"]
    assert state.variables["stage1/w"].devices() == {jax.devices()[1]}
    given = without_shared(parameters)
    models.assert_trees_close(pipeline.parameters(state), given, 0.0)

    def tied(words, first, second):
        return [{**first, "table": words}, {**second, "tied": words}]

    def plain(parameters, ids, labels):
        first, second = tied(*parameters)
        return tied_stages()[1](second, *tied_stages()[0](first, ids, labels))

    before = (given[0].pop("table"), given[0], {"w": given[1]["w"]})
    state, outputs = pipeline.step(state, step)
    losses, expected, _left = models.plain_loop(
        plain, before, [[each] for each in step], 4, optax.sgd(0.1), "MEAN"
    )
    models.assert_trees_close(list(outputs.losses), list(losses[:, 0]))
    models.assert_trees_close(pipeline.parameters(state), tied(*expected))


def test_a_variable_shared_twice_within_a_stage(rng):
    w = engine.Shared("w", rng.normal(size=(6, 6)).astype("float32"))
    stages = [lambda p, x: jnp.tanh(x @ p[0]) @ p[1], head]
    pipeline = make(stages, parameters=[[w, w], rng.normal(size=(6, 2)).astype("float32")])
    state, _outputs = run_both(pipeline, arrays(rng, 4, (3, 6)), updates=1)
    assert sorted(state.variables) == ["stage1/parameter", "w"]
    assert pipeline.parameters(state)[0][0] is pipeline.parameters(state)[0][1]


@pytest.mark.parametrize("is_shared", [False, True])
def test_evaluation_by_shapes_on_the_trainer_s_state(is_shared, rng):
    """Without values an evaluator cannot start, but it runs on the state of the pipeline that trains."""
    parameters, micro_batches = start(rng), arrays(rng, 4, (3, 6))
    if is_shared:
        parameters = [engine.Shared(f"layer{number}", own) for number, own in enumerate(parameters)]
    trainer = make(STAGES, parameters=parameters)
    shapes = jax.eval_shape(lambda: parameters)
    evaluator = engine.Pipeline(STAGES, parameters=shapes, num_micro_batches=2)
    state = trainer.init(jax.random.key(0), micro_batches[0])
    state, _outputs = trainer.step(state, micro_batches)
    _state, outputs = evaluator.step(state, micro_batches[:2])
    _state, losses = trainer.step(state, micro_batches)
    models.assert_trees_close(outputs.outputs, losses.losses[:2])
    with pytest.raises(ValueError, match=r"stage 0 \(tanh_layer\)\['b'\] must be an array to start from"):
        evaluator.init(jax.random.key(0), micro_batches[0])


def test_other_values_go_into_a_state(rng):
    micro_batches = arrays(rng, 4, (3, 6))
    other = start(rng)
    pipeline, expected = (
        make(STAGES, parameters=own, optimizer=optax.adam(0.1)) for own in (start(rng), other)
    )
    state = pipeline.init(jax.random.key(0), micro_batches[0])
    float64 = jax.tree.map(lambda leaf: leaf.astype("float64"), other)  # as NumPy makes them
    state, _outputs = pipeline.step(pipeline.with_parameters(state, float64), micro_batches)
    wanted, _outputs = expected.step(expected.init(jax.random.key(0), micro_batches[0]), micro_batches)
    models.assert_trees_close(state.variables, wanted.variables, 0.0)
    for given, message in (
        (
            [*other[:2], np.zeros((6, 3), "float32")],
            "parameters[2] must be float32[6, 2]; got float32[6, 3]",
        ),
        ([other[0], {"w": other[1]["w"]}, other[2]], "parameters[1] must be a dict with the keys 'b'"),
        (other[:2], "parameters must be a list of 3 pytrees, one for each stage; got a list of 2"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            pipeline.with_parameters(state, given)
    with pytest.raises(ValueError, match="no variable stage0/b, which is one of the parameters of stage 0"):
        pipeline.parameters(engine.PipelineState({}, None, 0, 0, jax.random.key(0)))


def test_shared_values_of_a_list_are_one(rng):
    parameters = tied_parameters(rng)
    pipeline = make(tied_stages(), parameters=parameters)
    state = pipeline.init(jax.random.key(0), tuple(np.zeros(4, "int32") for _ in range(2)))
    plain = without_shared(parameters)
    for given in (parameters, plain):
        models.assert_trees_close(pipeline.with_parameters(state, given).variables, state.variables, 0.0)
    plain[1]["tied"] = jax.tree.map(lambda leaf: leaf + 1, plain[1]["tied"])
    message = r"words/bias is shared.* parameters\[0\]\['table'\]\['bias'\] and "
    with pytest.raises(ValueError, match=message):
        pipeline.with_parameters(state, plain)


def test_parallel_stages_and_stages_without_parameters(rng):
    w = rng.normal(size=(2, 6, 6)).astype("float32")
    parameters = [[w[0], {"w": w[1]}], None]
    pipeline = make(
        [[lambda p, x: x @ p, lambda p, x: x @ p["w"]], lambda p, a, b: jnp.mean((a - b) ** 2)],
        parameters=parameters,
    )
    state, _outputs = run_both(pipeline, arrays(rng, 4, (3, 6)), updates=1)
    found = pipeline.parameters(state)
    assert jax.tree.structure(found) == jax.tree.structure(parameters)
    changed = pipeline.with_parameters(state, parameters)
    models.assert_trees_close(pipeline.parameters(changed), parameters, 0.0)
    functions = engine.Pipeline([lambda x: x, engine.Stage(lambda p, x: x * p, w)], num_micro_batches=1)
    state = functions.init(jax.random.key(0), np.float32(1))
    assert functions.parameters(state)[0] is None
    with pytest.raises(ValueError, match=r"parameters\[0\] must be None"):
        functions.with_parameters(state, [w, w])


def test_integers_and_booleans_are_constants(rng):
    own = {"w": rng.normal(size=6).astype("float32"), "order": np.arange(6)[::-1], "on": np.array(True)}
    pipeline = make(
        [lambda p, x: jnp.mean(jnp.where(p["on"], p["w"][p["order"]] * x, x))],
        parameters=[own],
        optimizer=optax.adamw(0.1, weight_decay=1.0),
    )
    step = arrays(rng, 4, (3, 6))
    state, _outputs = pipeline.step(pipeline.init(jax.random.key(0), step[0]), step)
    (found,) = pipeline.parameters(state)
    np.testing.assert_array_equal(found["order"], np.arange(6)[::-1])
    assert found["on"]
    assert list(state.optimizer_state[0].mu) == ["stage0/w"]


@pytest.mark.thorough
def test_random_keys_of_stages_are_those_of_the_step(rng):
    def stage(p, x):
        return p * jnp.where(jax.random.bernoulli(engine.next_rng_key(), 0.5, x.shape), x, 0)

    pipeline = make([stage, lambda p, x: jnp.mean(stage(p, x))], parameters=[np.float32(2), np.float32(3)])
    run_both(pipeline, arrays(rng, 4, (30,)), updates=1)


def test_a_function_of_a_key_makes_parameters_that_are_shared():
    def init(key):
        return {"table": engine.Shared("table", jax.random.normal(key, (4, 4)))}

    stages = [lambda p, x: x @ p["table"]] * 2
    pipeline = engine.Pipeline(stages, parameters=[init, init], num_micro_batches=1)
    state = pipeline.init(jax.random.key(0), np.ones(4, "float32"))
    assert list(state.variables) == ["table"]


W = np.zeros((2, 2), "float32")
FAULTS = {
    "number": ([W], "parameters must be a list of 2 pytrees, one for each stage; got a list of 1."),
    "a dict": ({"a": W, "b": W}, "parameters must be a list of 2 pytrees, one for each stage; got a dict."),
    "no array": ([{"heads": 4}, W], "parameters of stage 0 (stage)['heads'] must be an array; got int 4."),
    "text": ([W, [W, "relu"]], "parameters of stage 1 (stage)[1] must be an array; got str 'relu'."),
    "a key": (
        [jax.eval_shape(jax.random.key, 0), W],
        "stage 0 (stage) must be an array of numbers or booleans",
    ),
    "nested": (
        [engine.Shared("a", [engine.Shared("b", W)]), W],
        "parameters of stage 0 (stage)[0]: a Shared cannot stand within another one, a.",
    ),
    "shapes": (
        [engine.Shared("a", W), engine.Shared("a", W[0])],
        "a is shared, so it must have the same shape and dtype everywhere; parameters of stage 0 (stage) "
        "is float32[2, 2], parameters of stage 1 (stage) float32[2].",
    ),
    "values": (
        [engine.Shared("a", W), engine.Shared("a", W + 1)],
        "a is shared, so it must have one value; the values in parameters of stage 0 (stage) and ",
    ),
    "one name": (
        [{"a/b": W, "a": {"b": W}}, W],
        "['a']['b'] and parameters of stage 0 (stage)['a/b'] would both be the variable stage0/a/b.",
    ),
    "a name of a stage": (
        [{"w": W}, engine.Shared("stage0/w", W)],
        "stage 0 (stage)['w'] and parameters of stage 1 (stage) would both be the variable stage0/w.",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_errors(fault):
    def stage(p, x):
        raise AssertionError

    parameters, message = FAULTS[fault]
    with pytest.raises(ValueError, match=re.escape(message)):
        engine.Pipeline([stage, stage], parameters=parameters, num_micro_batches=1)


def test_errors_of_names_and_of_stages():
    message = "Shared: name must be a non-empty string without empty parts; got ''"
    with pytest.raises(ValueError, match=message):
        engine.Shared("", W)
    stages = [engine.Stage(head, W), head]
    with pytest.raises(ValueError, match=r"stages\[0\] is a Stage, which has parameters of its own"):
        engine.Pipeline(stages, parameters=[W, W], num_micro_batches=1)
    named = [engine.Stage(functools.partial(head), W, name="head")] * 2
    with pytest.raises(ValueError, match="would both be the variable head/parameter. Rename one"):
        engine.Pipeline(named, num_micro_batches=1)


def run_layers(p, x):
    for layer in p:
        x = jnp.tanh(x @ layer["w"])
    return x


def cut(layers, sizes, last):
    """Stages of so many of the layers each, and a head in the last of them."""
    given = iter(layers)
    parameters = [[next(given) for _layer in range(size)] for size in sizes]
    parameters[-1] = [parameters[-1], last]
    stages = [run_layers] * (len(sizes) - 1) + [lambda p, x: head(p[1], run_layers(p[0], x))]
    return make(stages, parameters=parameters, optimizer=optax.adam(0.01))


def test_names_that_do_not_depend_on_the_split(rng, tmp_path):
    """Layers as whole values with names: a state of one split is one of all, in memory and on disk."""

    def draw(size):
        return rng.normal(size=(6, size)).astype("float32")

    layers = [engine.Shared(f"layer{number}", {"w": draw(6)}) for number in range(2)]
    last = engine.Shared("head", draw(2))
    micro_batches = arrays(rng, 4, (3, 6))
    first, second = cut(layers, [2], last), cut(layers, [1, 1], last)
    state, other = (p.init(jax.random.key(0), micro_batches[0]) for p in (first, second))
    assert sorted(state.variables) == ["head", "layer0/w", "layer1/w"]
    models.assert_trees_close(state.variables, other.variables, 0.0)
    state, _outputs = first.step(state, micro_batches)
    engine.save(tmp_path / "state", state)
    moved = [state, engine.resplit(state, second), engine.restore(tmp_path / "state", second)]
    models.assert_trees_close(second.parameters(moved[1])[0][0], first.parameters(state)[0][0][0], 0.0)
    expected, _outputs = first.step(state, micro_batches)
    for own in moved:
        found, _outputs = second.step(own, micro_batches)
        models.assert_trees_close(found.variables, expected.variables)
        models.assert_trees_close(found.optimizer_state, expected.optimizer_state)


def test_functions_make_values_with_names(rng):
    """As all of a stage's parameters, or a part of them; two stages have the same layer."""
    layer = engine.Shared("layer", lambda key: {"w": jax.random.normal(key, (6, 6)) / 2})
    (x,) = arrays(rng, 1, (3, 6))
    pipeline = make(
        [lambda p, x: run_layers([p], x), lambda p, x: head(p["own"], run_layers([p["layer"]], x))],
        parameters=[layer, {"own": np.ones((6, 2), "float32"), "layer": layer}],
    )
    state = pipeline.init(jax.random.key(0), x)
    assert sorted(state.variables) == ["layer/w", "stage1/own"]
    alone = make([lambda p, x: head(jnp.eye(6), run_layers([p], x))], parameters=[layer])
    in_another_stage = alone.init(jax.random.key(0), x).variables["layer/w"]
    np.testing.assert_array_equal(in_another_stage, state.variables["layer/w"])
    found = pipeline.parameters(state)
    assert found[0]["w"] is found[1]["layer"]["w"]
    again = pipeline.with_parameters(state, found)
    models.assert_trees_close(again.variables, state.variables, 0.0)


def test_a_function_that_takes_no_key():
    with pytest.raises(TypeError, match="takes 0 positional arguments") as caught:
        engine.Pipeline([head], parameters=[engine.Shared("a", lambda: W)], num_micro_batches=1)
    assert "the shapes of the a in the parameters of stage 0 (head)" in caught.value.__notes__[0]
