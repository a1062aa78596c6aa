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


def train(stages, updates=3, batches=None, inputs=(), **options):
    """Trains; returns the pipeline, its state, and the losses of the last step."""
    batches = batches or make_batches()
    pipeline = engine.Pipeline(stages, **{**OPTIONS, **options})
    state = pipeline.init(jax.random.key(3), batches[0], *inputs)
    for _update in range(updates):
        state, outputs = pipeline.step(state, batches, *inputs)
    return pipeline, state, jax.device_get(outputs.losses or outputs.outputs)


def check(model, parameters=None, numbers=(3,), batches=None, inputs=(), least=None, **options):
    """Trains a model whole and in several splits: losses and parameters are the same.

    Returns:
      The stages of the last split.
    """
    batches = batches or make_batches()
    trees = None if parameters is None else [parameters]
    whole, expected, losses = train(
        [model], batches=batches, inputs=inputs, parameters=trees, **options, schedule="interleaved"
    )
    states = []
    for number in numbers:
        stages = engine.split(
            model,
            number,
            batches[0],
            *inputs,
            parameters=parameters,
            measure=False,
            **{**OPTIONS, **options},
        )
        assert len(stages) == number
        parts = sorted(part for group in stages.groups for part in group)
        assert parts == list(range(len(stages.table.layers)))
        _pipeline, state, found = train(stages, batches=batches, inputs=inputs, **options)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, losses)
        if parameters is None:
            assert sorted(state.variables) == sorted(expected.variables)
            models.assert_trees_close(state.variables, expected.variables)
        else:
            models.assert_trees_close(stages.parameters(state), whole.parameters(expected)[0])
        states.append(state)
    for state in states:
        assert sorted(state.variables) == sorted(states[0].variables)
    return stages


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
    stages = check(skipping, make_weights("first", *"abcd"), numbers=(1, 3))
    pipeline, state, _losses = train(stages)
    assert sorted(state.variables) == [f"model/{name}" for name in ("a", "b", "c", "d", "first")]
    (home,) = state.variables["model/first"].devices()
    assert home == jax.devices()[0]
    assert pipeline.traced.shared() == {"model/first"}


def test_against_a_plain_loop():
    """`jax.grad` over the micro-batches, summed, and Optax: the losses of each step, and all leaves."""
    parameters, batches = make_weights("first", *"abcd"), make_batches()
    stages = engine.split(skipping, 3, batches[0], parameters=parameters, measure=False, **OPTIONS)
    pipeline = engine.Pipeline(stages, **OPTIONS)
    state = pipeline.init(jax.random.key(0), batches[0])
    optimizer = OPTIONS["optimizer"]
    plain, slots = parameters, optimizer.init(parameters)
    for _update in range(4):
        state, outputs = pipeline.step(state, batches)
        results = [jax.value_and_grad(skipping)(plain, *batch) for batch in batches]
        np.testing.assert_allclose(outputs.losses, [loss for loss, _gradients in results], rtol=1e-5)
        gradients = [own for _loss, own in results]
        total = jax.tree.map(lambda *own: functools.reduce(jnp.add, own), *gradients)
        with jax.numpy_dtype_promotion("standard"):  # Optax counts in integers
            updates, slots = optimizer.update(total, slots, plain)
        plain = optax.apply_updates(plain, updates)
    models.assert_trees_close(stages.parameters(state), plain)


@pytest.mark.parametrize("schedule", ["zero_bubble", "looped"])
def test_schedules_and_mappings(schedule):
    options = {"schedule": schedule}
    if schedule == "looped":
        options["device_mapping"] = [0, 1, 0, 1]
    parameters, batches = make_weights("first", *"abcd"), make_batches()
    whole, expected, losses = train([skipping], parameters=[parameters])
    stages = engine.split(
        skipping, 4, batches[0], parameters=parameters, measure=False, **OPTIONS | options
    )
    _pipeline, state, found = train(stages, **options)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    models.assert_trees_close(stages.parameters(state), whole.parameters(expected)[0])


def test_scans_over_layers_are_cut_between_iterations():
    """In both directions, in another dtype, with what each layer returns, and keys of their own."""

    def model(parameters, x, targets):
        cast = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), parameters)
        keys = jax.random.split(engine.next_rng_key(), 6)

        def layer(x, given):
            w, key = given
            x = x + dense(w["w"], x) * jax.random.bernoulli(key, 0.9, x.shape).astype(x.dtype)
            return x * w["g"], jnp.sum(x**2)

        x, sizes = jax.lax.scan(layer, x, (cast["blocks"], keys))
        x, others = jax.lax.scan(layer, x, (parameters["blocks"], keys), reverse=True)
        decay = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(parameters))
        return jnp.mean((x - targets) ** 2) + 1e-5 * jnp.sum(sizes * others[::-1]) + 1e-4 * decay

    blocks = {"w": make_weights("w", shape=(6, WIDTH, WIDTH))["w"], "g": np.ones((6, WIDTH), np.float32)}
    stages = check(model, {"blocks": blocks})
    assert len(stages.table.layers) > 12
    _pipeline, state, _losses = train(stages)
    names = sorted(name for name in state.variables if "/g/" in name)
    assert names == [f"model/blocks/g/{number}" for number in range(6)]


def test_scans_over_time_stay_whole():
    def model(w, x, targets):
        def turn(state, row):
            state = dense(w["a"], state) + row
            return state, state

        x = dense(w["first"], x)
        _last, x = jax.lax.scan(turn, jnp.zeros((WIDTH,)), x)
        return jnp.mean((dense(w["b"], x) - targets) ** 2)

    stages = check(model, make_weights("a", "b", "first"), numbers=(2,))
    assert list(stages.table.layers)
    assert sorted(train(stages)[1].variables) == ["model/a", "model/b", "model/first"]


def variables_model(x, targets):
    """A model with variables by name, dropout, a moving mean, a metric, and a checkpoint."""
    for number in range(4):
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
    stages = check(variables_model)
    assert len(stages.table.layers) > 3
    batches = make_batches()
    found = []
    for own in ([variables_model], stages):
        pipeline = engine.Pipeline(own, **OPTIONS)
        state = pipeline.init(jax.random.key(3), batches[0])
        _state, outputs = pipeline.step(state, batches)
        found.append(outputs.metrics)
    assert sorted(found[0]) == [f"layer{number}/size" for number in range(4)]
    for name, values in found[0].items():
        np.testing.assert_allclose(found[1][name], values, rtol=1e-5)


def keep(name, value):
    return engine.get_variable(name, initializer=np.float32(value), trainable=False)


def count_early(parameters, x, targets):
    """The number of micro-batches, needed late: the first stage is ahead of the last."""
    count = keep("count", 0)
    engine.assign("count", count + 1)
    return jnp.mean((run(parameters, x) * (1 + count) - targets) ** 2)


def count_late(parameters, x, targets):
    count = keep("count", 0)
    x = run(parameters, x) * (1 + count)
    engine.assign("count", count + 1)
    return jnp.mean((x - targets) ** 2)


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


@pytest.mark.parametrize("model", [count_early, count_late, swap, average_weights, return_old])
def test_assigned_variables_are_read_before_they_are_assigned(model):
    options = {"loss": lambda loss, mean: loss * mean} if model is return_old else {}
    check(model, make_weights(*"abcdef"), numbers=(4,), **options)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, targets: {"x": x, "targets": targets},
        lambda x, targets: (x, targets, x),
        lambda x, targets: (x,),
        lambda x, targets: (x.astype(np.float16), targets),
    ],
)
def test_other_micro_batches_are_refused(change):
    parameters, batches = make_weights("first", *"abcd"), make_batches()
    stages = engine.split(skipping, 2, batches[0], parameters=parameters, measure=False, **OPTIONS)
    pipeline = engine.Pipeline(stages, **OPTIONS)
    with pytest.raises(
        ValueError, match=r"was split for the inputs and the micro-batch \(float32\[6, 8\], "
    ):
        pipeline.init(jax.random.key(0), change(*batches[0]))


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (skipping, make_weights("first", *"abcd")),
        (variables_model, None),
        (average_weights, make_weights(*"abcdef")),
    ],
)
def test_micro_batches_of_other_shapes(model, parameters):
    """Cut in the same places: skips, variables, dropout, assignments and metrics, as in the whole model."""
    check(model, parameters, (3,), [*make_batches(2), *make_batches(1, size=3), *make_batches(1, size=4)])


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
    for num_stages in (None, 1, 3):
        options = {"loss": loss, "optimizer": optax.sgd(0.0)}
        stages, trees = [model], [parameters]
        if num_stages:
            options = OPTIONS | options
            stages = engine.split(
                model, num_stages, batches[0], parameters=parameters, measure=False, **options
            )
            trees = None
        found.append(train(stages, updates=1, parameters=trees, **options)[2])
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])


def test_short_layers_beside_a_long_one():
    """They are parts, too, where there would be too few otherwise."""

    def model(parameters, x, targets):
        x = jnp.tanh(x @ parameters["wide"]) @ parameters["back"]
        return jnp.mean((run(parameters["narrow"], x) - targets) ** 2)

    rng = np.random.default_rng(0)
    wide = {
        "wide": (rng.normal(size=(WIDTH, 2**16)) / 3).astype(np.float32),
        "back": (rng.normal(size=(2**16, WIDTH)) / 256).astype(np.float32),
    }
    check(model, wide | {"narrow": make_weights(*"abcd")}, numbers=(2, 7))


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

    stages = check(model, {"layers": make_weights(*"abc"), "z": np.zeros((0, WIDTH, WIDTH), np.float32)})
    assert len(copy.deepcopy(stages)) == 3


def test_arguments_and_results_of_any_structure():
    """A dict as micro-batch, an input for the whole step that is read late, and several results."""

    def model(parameters, rate, images, labels):
        x = images
        for name in "abc":
            x = dense(parameters[name], x)
        error = x * rate - labels["targets"]
        return {"loss": jnp.mean(error**2), "labels": labels, "number": 3.0, "x": x}

    batches = [{"images": x, "labels": {"targets": y}} for x, y in make_batches()]
    check(
        model,
        make_weights(*"abc"),
        batches=batches,
        inputs=(jnp.float32(0.5),),
        loss=lambda loss, labels, number, x: loss * number,
    )


def test_inference_and_a_model_without_a_feed():
    parameters = make_weights(*"abc")
    options = {"loss": None, "optimizer": None}

    def model(parameters, x, targets):
        for name in "abc":
            x = dense(parameters[name], x)
        return x, targets

    check(model, parameters, **options)

    def drawing(parameters):
        x = jax.random.normal(engine.next_rng_key(), (4, WIDTH))
        for name in "abc":
            x = dense(parameters[name], x)
        return x

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
        for number, name in enumerate("abcdef"):
            if number % 2:
                a = dense(parameters[name], a)
            else:
                b = dense(parameters[name], b)
            if number in (1, 4):
                jax.debug.print("printed {}", number)
        return jnp.mean((a * b - targets) ** 2)

    stages = check(model, make_weights(*"abcdefg"), numbers=(2, 3))
    assert stages.table.source == "counted"
    jax.effects_barrier()
    printed = [line for line in capfd.readouterr().out.splitlines() if line.startswith("printed")]
    assert printed.count("printed 1") == printed.count("printed 4") == 3 * 3 * COUNT


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
                length=4,
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

    stages = check(model, parameters)
    assert stages.table.layers[0].startswith("Model/blocks")
    names = sorted(train(stages, updates=1)[1].variables)
    assert "model/params/blocks/Dense_0/kernel/3" in names


def test_a_scan_with_more_iterations_than_models_have_layers_stays_whole():
    """A parameter for each place of a sequence, and not for each layer."""

    def model(parameters, x, targets):
        def turn(state, place):
            state = jnp.tanh(state + place)
            return state, None

        x, _none = jax.lax.scan(turn, dense(parameters["a"], x), parameters["places"])
        return jnp.mean((dense(parameters["b"], x) - targets) ** 2)

    weights = make_weights("a", "b") | make_weights("places", shape=(300, WIDTH))
    stages = check(model, weights, numbers=(2,))
    assert sorted(train(stages, updates=1)[1].variables) == ["model/a", "model/b", "model/places"]


def test_scans_stay_whole_if_that_is_asked():
    def model(parameters, x, targets):
        x, _none = jax.lax.scan(lambda x, w: (dense(w, x), None), x, parameters["stacked"])
        return jnp.mean((dense(parameters["last"], x) - targets) ** 2)

    weights = make_weights("last") | make_weights("stacked", shape=(4, WIDTH, WIDTH))
    batch = make_batches()[0]
    options = {"parameters": weights, "measure": False, **OPTIONS}
    stages = engine.split(model, 2, batch, cut_scans=False, **options)
    _pipeline, state, _losses = train(stages)
    assert state.variables["model/stacked"].shape == (4, WIDTH, WIDTH)
    assert jax.tree.map(np.shape, stages.parameters(state)) == jax.tree.map(np.shape, weights)


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
    other = train([skipping], updates=1, parameters=[parameters])[1]
    with pytest.raises(ValueError, match="The state has no variable model/a"):
        stages.parameters(other)
    by_name = engine.split(variables_model, 2, batch, measure=False, **OPTIONS)
    with pytest.raises(ValueError, match="The model has no pytree of parameters"):
        by_name.parameters(other)
