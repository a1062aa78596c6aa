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
OPTIONS = {"num_micro_batches": COUNT, "optimizer": optax.adam(1e-2)}


def make_batches(number=COUNT, size=6):
    rng = np.random.default_rng(1)
    return [tuple(rng.normal(size=(2, size, WIDTH)).astype("float32")) for _ in range(number)]


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


def split(model, parameters=None, number=2, batch=None, inputs=(), **options):
    """Stages of a model, by counted operations."""
    options = {"parameters": parameters, "measure": False, **OPTIONS, **options}
    return engine.split(model, number, batch or make_batches()[0], *inputs, **options)


def check(model, parameters=None, number=2, batches=None, inputs=(), updates=2, **options):
    """Trains a model whole and split: outputs, losses, metrics and parameters are the same.

    Returns:
      The stages, their pipeline and its state.
    """
    batches = batches or make_batches()
    trees = None if parameters is None else [parameters]
    whole, expected, wanted = train([model], updates, batches, inputs, parameters=trees, **options)
    stages = split(model, parameters, number, batches[0], inputs, **options)
    assert len(stages) == number
    parts = sorted(part for group in stages.groups for part in group)
    assert parts == list(range(len(stages.table.layers)))
    pipeline, state, outputs = train(stages, updates, batches, inputs, **options)
    for name in ("losses", "outputs", "metrics"):
        found, values = getattr(outputs, name), getattr(wanted, name)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, values)
    if parameters is None:
        models.assert_trees_close(state.variables, expected.variables)
    else:
        models.assert_trees_close(stages.parameters(state), whole.parameters(expected)[0])
    return stages, pipeline, state


def skipping(parameters, x, targets):
    """A value of the beginning is read at the end, and so is its weight."""
    x = first = dense(parameters["first"], x)
    for name in "abcd":
        x = x + dense(parameters[name], x)
    last = jnp.concatenate([x, first], 1) @ jnp.tile(parameters["first"].T, (2, 1))
    return jnp.mean((last - targets) ** 2)


def test_skips_and_tied_weights():
    _stages, pipeline, state = check(skipping, make_weights("first", *"abcd"), number=3)
    assert sorted(state.variables) == [f"model/{name}" for name in ("a", "b", "c", "d", "first")]
    (home,) = state.variables["model/first"].devices()
    assert home == jax.devices()[0]
    assert pipeline.traced.shared() == {"model/first"}


def test_scans_over_layers_are_cut_between_iterations():
    """In both directions, in another dtype, with what each layer returns, keys, and a decay by rank."""

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
    decay = optax.adamw(1e-2, weight_decay=0.5, mask=lambda tree: jax.tree.map(lambda w: w.ndim > 1, tree))
    stages, _pipeline, state = check(model, {"blocks": blocks}, optimizer=decay)
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
    return jnp.mean((dense(w["last"], scan(w["stacked"], x)) - targets) ** 2)


def scan(stacked, x):
    return jax.lax.scan(lambda x, w: (dense(w, x), None), x, stacked)[0]


@pytest.mark.parametrize(
    ("model", "weights", "options"),
    [
        (over_time, make_weights("a", "first"), {}),
        (over_places, make_weights("places", shape=(300, WIDTH)), {}),
        (over_layers, make_weights("stacked", shape=(4, WIDTH, WIDTH)), {"cut_scans": False}),
    ],
)
def test_scans_that_stay_whole(model, weights, options):
    weights = weights | make_weights("last")
    stages = split(model, weights, **options)
    state = engine.Pipeline(stages, **OPTIONS).init(jax.random.key(0), make_batches()[0])
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
    x, targets = make_batches()[0]
    pipeline = engine.Pipeline(split(skipping, make_weights("first", *"abcd")), **OPTIONS)
    message = r"was split for the inputs and the micro-batch \(float32\[6, 8"
    for other in ({"x": x, "targets": targets}, (x, targets, x), (x,), (x.astype(np.float16), targets)):
        with pytest.raises(ValueError, match=message):
            pipeline.init(jax.random.key(0), other)


@pytest.mark.thorough
def test_values_of_parameters_alone_with_micro_batches_of_other_shapes():
    check(average_weights, make_weights(*"abf"), batches=[*make_batches(2), *make_batches(2, size=3)])


def test_a_model_that_computes_something_else_for_other_shapes():
    def model(parameters, x, targets):
        x = run(parameters, x)
        return jnp.mean((x - targets) ** 2) if len(x) == 6 else jnp.mean(jnp.abs(x - targets))

    batches = make_batches()
    pipeline = engine.Pipeline(split(model, make_weights(*"abcd")), **OPTIONS)
    state = pipeline.init(jax.random.key(0), batches[0])
    message = "computes something else for these shapes .* make another pipeline"
    with pytest.raises(ValueError, match=message):
        pipeline.step(state, [*batches[:3], *make_batches(1, size=3)])


def test_weak_types_of_results():
    """A Python number that the model returns does not make the loss float32."""

    def model(parameters, x, targets):
        x = run(jax.tree.map(lambda w: w.astype(jnp.bfloat16), parameters), x.astype(jnp.bfloat16))
        return x, targets.astype(jnp.bfloat16), 2.0, jnp.where(jnp.sum(x) > 0, 2.0, 3.0)

    def loss(x, targets, number, weak):
        return jnp.mean(((x * number * weak - targets) ** 2).astype(jnp.float32))

    parameters, options = make_weights(*"abc"), {"loss": loss, "optimizer": optax.sgd(0.0)}
    whole = train([model], 1, make_batches(), parameters=[parameters], **options)
    parts = train(split(model, parameters, **options), 1, make_batches(), **options)
    np.testing.assert_array_equal(parts[2].losses, whole[2].losses)


def test_short_layers_beside_a_long_one():
    """They are parts, too, where there would be too few otherwise."""

    def model(parameters, x, targets):
        x = jnp.tanh(x @ parameters["wide"]) @ parameters["back"]
        return jnp.mean((run(parameters["narrow"], x) - targets) ** 2)

    wide, back = np.zeros((WIDTH, 2**16), "f"), np.zeros((2**16, WIDTH), "f")
    assert len(split(model, {"wide": wide, "back": back, "narrow": make_weights(*"abcd")}, 7)) == 7


def test_names_of_slices_that_are_taken():
    def model(parameters, x, targets):
        return jnp.mean((scan(parameters["w"], dense(parameters["w/0"], x)) - targets) ** 2)

    weights = make_weights("w/0") | make_weights("w", shape=(4, WIDTH, WIDTH))
    with pytest.raises(ValueError, match="variable model/w/0 has the name of a layer's part of model/w"):
        split(model, weights)
    assert len(split(model, weights, cut_scans=False)) == 2


def of_stacked(x, targets, **options):
    return jnp.mean((scan(engine.get_variable("stacked", (4, WIDTH, WIDTH), **options), x) - targets) ** 2)


def test_initializers_of_stacked_variables_are_checked():
    def model(x, targets):
        return of_stacked(
            x, targets, initializer=lambda _key, shape, dtype: jnp.zeros((3, *shape[1:]), dtype)
        )

    pipeline = engine.Pipeline(split(model), **OPTIONS)
    with pytest.raises(ValueError, match=r"must return float32\[4, 8, 8\]"):
        pipeline.init(jax.random.key(0), make_batches()[0])


def test_a_scan_without_iterations_and_a_copy_of_stages():
    def model(parameters, x, targets):
        return jnp.mean((scan(parameters["z"], run(parameters["layers"], x)) - targets) ** 2)

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
    options = {"inputs": (jnp.float32(0.5),), "loss": lambda loss, labels, number, x: loss * number}
    check(model, make_weights(*"abc"), batches=batches, updates=1, **options)


def test_inference_and_a_model_without_a_feed():
    parameters = make_weights(*"abc")

    def model(parameters, x, targets):
        return run(parameters, x), targets

    check(model, parameters, updates=1, loss=None, optimizer=None)

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
    batch = make_batches()[0]
    whole = engine.Pipeline([of_stacked], **OPTIONS).init(jax.random.key(5), batch).variables["stacked"]
    stages = split(of_stacked)
    for seed in (4, 5):
        parts = engine.Pipeline(stages, **OPTIONS).init(jax.random.key(seed), batch).variables
    assert sorted(parts) == [f"stacked/{number}" for number in range(4)]
    for number in range(4):
        np.testing.assert_array_equal(parts[f"stacked/{number}"], whole[number])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"number": 0}, "split: num_stages must be an integer of at least 1; got 0"),
        ({"number": 99}, r"split: num_stages must be at most \d+, the parts into which the model can be"),
        ({"model": 3}, "split: model must be a function or a Stage; got 3"),
        ({"model": engine.Stage(skipping, {})}, "split: parameters must be None if the model is a Stage"),
        ({"num_micro_batches": None}, "split: num_micro_batches must be given"),
        ({"bytes_per_ipu": 1000}, "bytes_per_ipu must be enough for the fullest device"),
        ({"bytes_per_ipu": True}, "split: bytes_per_ipu must be an integer"),
        ({"device_mapping": [0]}, "split: device_mapping must have the number of a device for each"),
        ({"tensor_parallel": engine.TensorParallel(2)}, "split: tensor_parallel is not supported"),
    ],
)
def test_arguments_that_cannot_be(options, message):
    given = {"model": skipping, "parameters": make_weights("first", *"abcd"), **options}
    with pytest.raises(ValueError, match=message):
        split(**given)


def test_errors_of_the_model_name_its_line():
    def model(parameters, x, targets):
        return jnp.mean((dense(parameters["a"], x) - targets[:, 1:]) ** 2)

    with pytest.raises(TypeError, match="incompatible shapes") as caught:
        split(model, make_weights("a"))
    assert any("return jnp.mean((dense(" in note for note in caught.value.__notes__)


def test_a_state_has_to_be_of_the_model():
    parameters, batch = make_weights("first", *"abcd"), make_batches()[0]
    other = engine.Pipeline([skipping], parameters=[parameters], **OPTIONS).init(jax.random.key(0), batch)
    with pytest.raises(ValueError, match="The state has no variable model/a"):
        split(skipping, parameters).parameters(other)
    with pytest.raises(ValueError, match="The model has no pytree of parameters"):
        split(variables_model).parameters(other)
    pipeline = engine.Pipeline(split(variables_model), **OPTIONS)
    with pytest.raises(
        ValueError, match="No stage has a pytree of parameters: .*variables=other.variables"
    ):
        pipeline.with_parameters(other, pipeline.parameters(other))


def test_the_pipeline_has_the_models_parameters():
    """They were None for each stage, also as what replaces them: a copy had its initial weights."""
    weights = make_weights("stacked", shape=(4, WIDTH, WIDTH)) | make_weights("last")
    stages = split(over_layers, weights)
    pipeline = engine.Pipeline([*stages], **OPTIONS)
    state = pipeline.init(jax.random.key(0), make_batches()[0])
    jax.tree.map(np.testing.assert_array_equal, pipeline.parameters(state), weights)
    for factor in (np.float32(2), jnp.float32(3)):  # NumPy's arrays and JAX's
        others = jax.tree.map(lambda leaf, factor=factor: factor * leaf, weights)
        changed = pipeline.with_parameters(state, others)
        assert changed.variables.keys() == state.variables.keys()
        jax.tree.map(np.testing.assert_array_equal, pipeline.parameters(changed), others)
    with pytest.raises(ValueError, match=r"parameters\['stacked'\] must be float32\[4, "):
        pipeline.with_parameters(state, {**weights, "stacked": weights["stacked"][:2]})
    beside = engine.Pipeline([*stages, lambda loss: loss], **OPTIONS)
    with pytest.raises(ValueError, match="other stages besides those of engine.split"):
        beside.parameters(state)
