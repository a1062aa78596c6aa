"""Models that are one function, cut into stages: against the whole model, and against a plain loop."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from tests.support import models

COUNT = 4
WIDTH = 8
OPTIONS = {"num_micro_batches": COUNT, "loss": lambda loss: loss, "optimizer": optax.adam(1e-2)}


def make_batches(number=COUNT, size=6):
    rng = np.random.default_rng(1)
    return [
        tuple(rng.normal(size=(size, WIDTH)).astype(np.float32) for _value in range(2))
        for _ in range(number)
    ]


def make_weights(*names, shape=(WIDTH, WIDTH)):
    rng = np.random.default_rng(2)
    return {name: (rng.normal(size=shape) / 3).astype(np.float32) for name in names}


def dense(w, x):
    return jnp.tanh(x @ w)


def train(stages, updates, batches, inputs=(), **options):
    """Trains; returns the pipeline, its state, and the outputs of the last step."""
    pipeline = engine.Pipeline(stages, **{**OPTIONS, **options})
    state = pipeline.init(jax.random.key(3), batches[0], *inputs)
    for _update in range(updates):
        state, outputs = pipeline.step(state, batches, *inputs)
    return pipeline, state, outputs


def check(model, parameters=None, number=2, batches=None, inputs=(), updates=2, **options):
    """Trains a model whole and split: outputs, losses, metrics and parameters are the same.

    Returns:
      The stages, their pipeline and its state.
    """
    batches = batches or make_batches()
    trees = None if parameters is None else [parameters]
    whole, expected, wanted = train([model], updates, batches, inputs, parameters=trees, **options)
    given = {"parameters": parameters, "measure": False, **OPTIONS, **options}
    stages = engine.split(model, number, batches[0], *inputs, **given)
    assert len(stages) == number
    parts = sorted(part for group in stages.groups for part in group)
    assert parts == list(range(len(stages.table.layers)))
    pipeline, state, outputs = train(stages, updates, batches, inputs, **options)
    for name in ("losses", "outputs", "metrics"):
        found, values = getattr(outputs, name), getattr(wanted, name)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, values)
    if parameters is None:
        assert sorted(state.variables) == sorted(expected.variables)
        models.assert_trees_close(state.variables, expected.variables)
    else:
        models.assert_trees_close(stages.parameters(state), whole.parameters(expected)[0])
    return stages, pipeline, state


def skipping(parameters, x, targets):
    """A value of the beginning is read at the end, and so is its weight."""
    first = dense(parameters["first"], x)
    x = first
    for name in "abcd":
        x = x + dense(parameters[name], x)
    return jnp.mean(
        (jnp.concatenate([x, first], 1) @ jnp.tile(parameters["first"].T, (2, 1)) - targets) ** 2
    )


def test_skips_and_tied_weights():
    _stages, pipeline, state = check(skipping, make_weights("first", *"abcd"), number=3)
    assert sorted(state.variables) == [f"model/{name}" for name in ("a", "b", "c", "d", "first")]
    (home,) = state.variables["model/first"].devices()
    assert home == jax.devices()[0]
    assert pipeline.traced.shared() == {"model/first"}


def test_scans_over_layers_are_cut_between_iterations():
    """In both directions, in another dtype, with what each layer returns, and keys of their own."""

    def model(parameters, x, targets):
        cast = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), parameters)
        keys = jax.random.split(engine.next_rng_key(), 3)

        def layer(x, given):
            w, key = given
            x = x + dense(w["w"], x) * jax.random.bernoulli(key, 0.9, x.shape).astype(x.dtype)
            return x * w["g"], jnp.sum(x**2)

        x, sizes = jax.lax.scan(layer, x, (cast["blocks"], keys))
        x, others = jax.lax.scan(layer, x, (parameters["blocks"], keys), reverse=True)
        decay = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(parameters))
        return jnp.mean((x - targets) ** 2) + 1e-5 * jnp.sum(sizes * others[::-1]) + 1e-4 * decay

    blocks = {"w": make_weights("w", shape=(3, WIDTH, WIDTH))["w"], "g": np.ones((3, WIDTH), np.float32)}
    stages, _pipeline, state = check(model, {"blocks": blocks})
    assert len(stages.table.layers) > 6
    names = sorted(name for name in state.variables if "/g/" in name)
    assert names == [f"model/blocks/g/{number}" for number in range(3)]


def over_time(w, x, targets):
    def turn(state, row):
        state = dense(w["a"], state) + row
        return state, state

    _last, x = jax.lax.scan(turn, jnp.zeros((WIDTH,)), dense(w["first"], x))
    return jnp.mean((dense(w["last"], x) - targets) ** 2)


def over_places(w, x, targets):
    """A parameter for each place of a sequence, more than models have layers."""
    x, _none = jax.lax.scan(lambda state, place: (jnp.tanh(state + place), None), x, w["places"])
    return jnp.mean((dense(w["last"], x) - targets) ** 2)


def over_layers(w, x, targets):
    x, _none = jax.lax.scan(lambda x, w: (dense(w, x), None), x, w["stacked"])
    return jnp.mean((dense(w["last"], x) - targets) ** 2)


@pytest.mark.parametrize(
    ("model", "weights", "options"),
    [
        (over_time, make_weights("a", "first"), {}),
        (over_places, make_weights("places", shape=(300, WIDTH)), {}),
        (over_layers, make_weights("stacked", shape=(4, WIDTH, WIDTH)), {"cut_scans": False}),
    ],
)
def test_scans_that_stay_whole(model, weights, options):
    weights, batch = weights | make_weights("last"), make_batches()[0]
    stages = engine.split(model, 2, batch, parameters=weights, measure=False, **options, **OPTIONS)
    state = engine.Pipeline(stages, **OPTIONS).init(jax.random.key(0), batch)
    assert sorted(state.variables) == [f"model/{name}" for name in sorted(weights)]
    jax.tree.map(np.testing.assert_array_equal, stages.parameters(state), weights)


def variables_model(x, targets):
    """A model with variables by name, dropout, a moving mean, a metric, and a checkpoint."""
    for number in range(2):
        with engine.variable_scope(f"layer{number}"):
            w = engine.get_variable("w", (WIDTH, WIDTH))
            x = x + jax.checkpoint(dense)(w, x)
            x = jnp.where(jax.random.bernoulli(engine.next_rng_key(), 0.8, x.shape), x / 0.8, 0)
            mean = engine.get_variable("mean", initializer=np.zeros(WIDTH, "f"), trainable=False)
            engine.assign("mean", 0.9 * mean + 0.1 * jax.lax.stop_gradient(x.mean(0)))
            x = x - mean
            engine.metric("size", jnp.sum(x**2))
    with engine.variable_scope("layer0", reuse=True):
        w = engine.get_variable("w", (WIDTH, WIDTH))
    return jnp.mean((x @ w - targets) ** 2) / (1 + engine.update_count()).astype(jnp.float32)


def test_variables_keys_assignments_and_metrics():
    """Also of micro-batches of another shape, where the model is cut in the same places."""
    batches = [*make_batches(2), *make_batches(2, size=3)]
    stages, _pipeline, _state = check(variables_model, batches=batches)
    assert len(stages.table.layers) > 3


def keep(name, value):
    return engine.get_variable(name, initializer=np.float32(value), trainable=False)


def count_early(parameters, x, targets):
    """The number of micro-batches, needed late: the first stage is ahead of the last."""
    count = keep("count", 0)
    engine.assign("count", count + 1)
    return jnp.mean((run(parameters, x) * (1 + count) - targets) ** 2)


def swap(parameters, x, targets):
    a, b = keep("a", 1), keep("b", 2)
    x = run(parameters, x)
    engine.assign("a", b)
    engine.assign("b", jnp.mean(x))
    return jnp.mean((x * a - targets) ** 2)


def average_weights(parameters, x, targets):
    """New values of parameters and random numbers alone, which no micro-batch is needed for."""
    average = engine.get_variable("average", initializer=np.zeros((WIDTH, WIDTH), "f"), trainable=False)
    drawn = engine.get_variable("drawn", initializer=np.zeros((WIDTH, 512), "f"), trainable=False)
    noise = keep("noise", 0)
    engine.assign("average", 0.9 * average + 0.1 * jax.lax.stop_gradient(parameters["f"]))
    engine.assign("noise", 0.9 * noise + jax.random.normal(engine.next_rng_key()))
    engine.assign("drawn", jax.random.normal(engine.next_rng_key(), drawn.shape) / 100)
    x = run(parameters, x) @ average * (1 + noise)
    return jnp.mean((x * (1 + jnp.mean(x @ drawn)) - targets) ** 2)


def return_old(parameters, x, targets):
    """Values of before, in a metric and in what is returned."""
    mean = keep("mean", 0.5)
    x = run(parameters, x)
    engine.metric("old", mean * 3)
    engine.assign("mean", 0.9 * mean + 0.1 * jnp.mean(x))
    return jnp.mean((x - targets) ** 2), mean * 2


def run(parameters, x):
    for name in sorted(parameters):
        x = dense(parameters[name], x)
    return x


@pytest.mark.parametrize("model", [count_early, swap, return_old])
def test_assigned_variables_are_read_before_they_are_assigned(model):
    options = {"loss": lambda loss, mean: loss * mean} if model is return_old else {}
    check(model, make_weights(*"abcf"), updates=1, **options)


def test_other_micro_batches_are_refused():
    parameters, (x, targets) = make_weights("first", *"abcd"), make_batches()[0]
    stages = engine.split(skipping, 2, (x, targets), parameters=parameters, measure=False, **OPTIONS)
    pipeline = engine.Pipeline(stages, **OPTIONS)
    for other in ({"x": x, "targets": targets}, (x, targets, x), (x,), (x.astype(np.float16), targets)):
        with pytest.raises(
            ValueError, match=r"was split for the inputs and the micro-batch \(float32\[6, 8"
        ):
            pipeline.init(jax.random.key(0), other)


@pytest.mark.thorough
def test_values_of_parameters_alone_with_micro_batches_of_other_shapes():
    check(average_weights, make_weights(*"abf"), batches=[*make_batches(2), *make_batches(2, size=3)])


def test_a_model_that_computes_something_else_for_other_shapes():
    def model(parameters, x, targets):
        x = run(parameters, x)
        return jnp.mean((x - targets) ** 2) if len(x) == 6 else jnp.mean(jnp.abs(x - targets))

    parameters, batches = make_weights(*"abcd"), make_batches()
    stages = engine.split(model, 2, batches[0], parameters=parameters, measure=False, **OPTIONS)
    pipeline = engine.Pipeline(stages, **OPTIONS)
    state = pipeline.init(jax.random.key(0), batches[0])
    with pytest.raises(
        ValueError, match="computes something else for these shapes .* make another pipeline"
    ):
        pipeline.step(state, [*batches[:3], *make_batches(1, size=3)])


def test_weak_types_of_results():
    """A Python number that the model returns does not make the loss float32."""

    def model(parameters, x, targets):
        x = run(jax.tree.map(lambda w: w.astype(jnp.bfloat16), parameters), x.astype(jnp.bfloat16))
        return x, targets.astype(jnp.bfloat16), 2.0, jnp.where(jnp.sum(x) > 0, 2.0, 3.0)

    def loss(x, targets, number, weak):
        return jnp.mean(((x * number * weak - targets) ** 2).astype(jnp.float32))

    parameters, batches = make_weights(*"abc"), make_batches()
    found = []
    for num_stages in (None, 2):
        options = {"loss": loss, "optimizer": optax.sgd(0.0)}
        stages, trees = [model], [parameters]
        if num_stages:
            options = OPTIONS | options
            stages = engine.split(
                model, num_stages, batches[0], parameters=parameters, measure=False, **options
            )
            trees = None
        found.append(train(stages, 1, batches, parameters=trees, **options)[2].losses)
    np.testing.assert_array_equal(found[1], found[0])


def test_short_layers_beside_a_long_one():
    """They are parts, too, where there would be too few otherwise."""

    def model(parameters, x, targets):
        x = jnp.tanh(x @ parameters["wide"]) @ parameters["back"]
        return jnp.mean((run(parameters["narrow"], x) - targets) ** 2)

    weights = {
        "wide": np.zeros((WIDTH, 2**16), "f"),
        "back": np.zeros((2**16, WIDTH), "f"),
        "narrow": make_weights(*"abcd"),
    }
    stages = engine.split(model, 7, make_batches()[0], parameters=weights, measure=False, **OPTIONS)
    assert len(stages) == 7


def test_names_of_slices_that_are_taken():
    def model(parameters, x, targets):
        x, _none = jax.lax.scan(
            lambda x, w: (dense(w, x), None), dense(parameters["w/0"], x), parameters["w"]
        )
        return jnp.mean((x - targets) ** 2)

    weights = make_weights("w/0") | make_weights("w", shape=(4, WIDTH, WIDTH))
    options = {"parameters": weights, "measure": False, **OPTIONS}
    with pytest.raises(ValueError, match="variable model/w/0 has the name of a layer's part of model/w"):
        engine.split(model, 2, make_batches()[0], **options)
    assert len(engine.split(model, 2, make_batches()[0], cut_scans=False, **options)) == 2


def test_initializers_of_stacked_variables_are_checked():
    def model(x, targets):
        stacked = engine.get_variable(
            "w", (4, WIDTH, WIDTH), initializer=lambda _key, shape, dtype: jnp.zeros((3, *shape[1:]), dtype)
        )
        x, _none = jax.lax.scan(lambda x, w: (dense(w, x), None), x, stacked)
        return jnp.mean((x - targets) ** 2)

    batch = make_batches()[0]
    pipeline = engine.Pipeline(engine.split(model, 2, batch, measure=False, **OPTIONS), **OPTIONS)
    with pytest.raises(ValueError, match=r"must return float32\[4, 8, 8\]"):
        pipeline.init(jax.random.key(0), batch)


def test_a_scan_without_iterations_and_a_copy_of_stages():
    def model(parameters, x, targets):
        x, _none = jax.lax.scan(
            lambda x, w: (dense(w, x), None), run(parameters["layers"], x), parameters["z"]
        )
        return jnp.mean((x - targets) ** 2)

    weights = {"layers": make_weights(*"abc"), "z": np.zeros((0, WIDTH, WIDTH), np.float32)}
    stages, _pipeline, _state = check(model, weights, updates=1)
    assert len(copy.deepcopy(stages)) == 2


def test_arguments_and_results_of_any_structure():
    """A dict as micro-batch, an input for the whole step that is read late, and several results."""

    def model(parameters, rate, images, labels):
        x = run(parameters, images)
        error = x * rate - labels["targets"]
        return {"loss": jnp.mean(error**2), "labels": labels, "number": 3.0, "x": x}

    batches = [{"images": x, "labels": {"targets": y}} for x, y in make_batches()]
    check(
        model,
        make_weights(*"abc"),
        batches=batches,
        inputs=(jnp.float32(0.5),),
        updates=1,
        loss=lambda loss, labels, number, x: loss * number,
    )


def test_inference_and_a_model_without_a_feed():
    parameters = make_weights(*"abc")
    options = {"loss": None, "optimizer": None}

    def model(parameters, x, targets):
        return run(parameters, x), targets

    check(model, parameters, updates=1, **options)

    def drawing(parameters):
        return run(parameters, jax.random.normal(engine.next_rng_key(), (4, WIDTH)))

    stages = engine.split(drawing, 2, None, parameters=parameters, measure=False, num_micro_batches=COUNT)
    found = []
    for own, trees in (([drawing], [parameters]), (stages, None)):
        pipeline = engine.Pipeline(own, parameters=trees, num_micro_batches=COUNT)
        state = pipeline.init(jax.random.key(3), None)
        found.append(jax.device_get(pipeline.step(state, [None] * COUNT)[1].outputs))
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_branches_prints_and_what_has_no_use(capfd):
    """Two towers in turn, parameters that nothing reads, and what is printed, in its order."""

    def model(parameters, x, targets):
        a = b = x
        for number, name in enumerate("abcd"):
            if number % 2:
                a = dense(parameters[name], a)
            else:
                b = dense(parameters[name], b)
            if number in (1, 2):
                jax.debug.print("printed {}", number)
        return jnp.mean((a * b - targets) ** 2)

    stages, _pipeline, _state = check(model, make_weights(*"abcde"), updates=1)
    assert stages.table.source == "counted"
    jax.effects_barrier()
    printed = [line for line in capfd.readouterr().out.splitlines() if line.startswith("printed")]
    assert printed.count("printed 1") == printed.count("printed 2") == 2 * COUNT


@pytest.mark.thorough
def test_a_module_of_flax_with_a_scan_over_its_layers():
    linen = pytest.importorskip("flax.linen", reason="Flax is not installed (extra flax)")

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x, _given):
            hidden = linen.Dense(16)(linen.LayerNorm()(x))
            hidden = linen.Dropout(0.2, deterministic=False)(linen.gelu(hidden))
            return x + linen.Dense(WIDTH)(hidden), None

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            layers = linen.scan(
                linen.remat(Block, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=2,
            )
            return linen.Dense(WIDTH)(layers(name="blocks")(x, None)[0])

    module = Model()
    x = make_batches()[0][0]
    with jax.numpy_dtype_promotion("standard"):
        rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        parameters = jax.device_get(module.init(rngs, x))

    def model(parameters, x, targets):
        with jax.numpy_dtype_promotion("standard"):
            x = module.apply(parameters, x, rngs={"dropout": engine.next_rng_key()})
        return jnp.mean((x - targets) ** 2)

    stages, _pipeline, state = check(model, parameters, updates=1)
    assert stages.table.layers[0].startswith("Model/blocks")
    assert "model/params/blocks/Dense_0/kernel/1" in state.variables


def test_initial_values_of_slices_are_those_of_the_whole():
    def model(x, targets):
        stacked = engine.get_variable("stacked", (4, WIDTH, WIDTH))
        x, _none = jax.lax.scan(lambda x, w: (dense(w, x), None), x, stacked)
        return jnp.mean((x - targets) ** 2)

    batch = make_batches()[0]
    whole = engine.Pipeline([model], **OPTIONS).init(jax.random.key(5), batch).variables["stacked"]
    stages = engine.split(model, 2, batch, measure=False, **OPTIONS)
    for seed in (4, 5):
        parts = engine.Pipeline(stages, **OPTIONS).init(jax.random.key(seed), batch).variables
    assert sorted(parts) == [f"stacked/{number}" for number in range(4)]
    for number in range(4):
        np.testing.assert_array_equal(parts[f"stacked/{number}"], whole[number])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_stages": 0}, "split: num_stages must be an integer of at least 1; got 0"),
        (
            {"num_stages": 99},
            r"split: num_stages must be at most \d+, the parts into which the model can be",
        ),
        ({"model": 3}, "split: model must be a function or a Stage; got 3"),
        ({"model": engine.Stage(skipping, {})}, "split: parameters must be None if the model is a Stage"),
        ({"num_micro_batches": None}, "split: num_micro_batches must be given"),
        ({"bytes_per_ipu": 1000}, "bytes_per_ipu must be enough for the fullest IPU"),
        ({"bytes_per_ipu": True}, "split: bytes_per_ipu must be an integer"),
        ({"device_mapping": [0]}, "split: device_mapping must have the number of an IPU for each"),
        ({"tensor_parallel": engine.TensorParallel(2)}, "split: tensor_parallel is not taken into account"),
    ],
)
def test_arguments_that_cannot_be(options, message):
    options = {"model": skipping, "num_stages": 2, "measure": False, **OPTIONS, **options}
    model, number = options.pop("model"), options.pop("num_stages")
    with pytest.raises(ValueError, match=message):
        engine.split(model, number, make_batches()[0], parameters=make_weights("first", *"abcd"), **options)


def test_errors_of_the_model_name_its_line():
    def model(parameters, x, targets):
        return jnp.mean((dense(parameters["a"], x) - targets[:, 1:]) ** 2)

    with pytest.raises(TypeError, match="incompatible shapes") as caught:
        engine.split(model, 2, make_batches()[0], parameters=make_weights("a"), **OPTIONS)
    assert any("return jnp.mean((dense(" in note for note in caught.value.__notes__)


def test_a_state_has_to_be_of_the_model():
    parameters, batch = make_weights("first", *"abcd"), make_batches()[0]
    stages = engine.split(skipping, 2, batch, parameters=parameters, measure=False, **OPTIONS)
    other = engine.Pipeline([skipping], parameters=[parameters], **OPTIONS).init(jax.random.key(0), batch)
    with pytest.raises(ValueError, match="The state has no variable model/a"):
        stages.parameters(other)
    by_name = engine.split(variables_model, 2, batch, measure=False, **OPTIONS)
    with pytest.raises(ValueError, match="The model has no pytree of parameters"):
        by_name.parameters(other)
