"""Losses that are sums over tokens: the gradients of a step are those of the mean over all its tokens."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import engine
from ipu_pipeline.optimizers import LossScalingOptimizer
from ipu_pipeline.optimizers.wrappers import unwrap
from tests.support import joined, models

LENGTHS = [5, 1, 0, 4, 2, 5, 3, 1]  # of the tokens that count, in each micro-batch
COUNT = 4  # micro-batches of a step, in each replica


def micro_batches(dtype="float32", lengths=LENGTHS):
    rng = np.random.default_rng(0)
    for length in lengths:
        yield rng.normal(size=(5, 3)).astype(dtype), (np.arange(5) < length).astype(dtype)


def parameters(dtype="float32"):
    rng = np.random.default_rng(1)
    return [{"w": rng.normal(size=(3, 4)).astype(dtype)}, rng.normal(size=(4, 2)).astype(dtype)]


def first(p, tokens, mask):
    return jnp.tanh(tokens @ p["w"]), mask


def last(p, x, mask):
    """The sum over the tokens that count, and their number."""
    return jnp.sum(mask * jnp.sum((x @ p) ** 2, axis=-1)), jnp.sum(mask)


def make(make_optimizer, dtype="float32", weigh=lambda loss, weight: weight, **options):
    given = {
        "stages": [first, last],
        "parameters": parameters(dtype),
        "num_micro_batches": COUNT,
        "loss": lambda loss, weight: loss,
        "loss_weight": weigh,
        "optimizer": make_optimizer(),
    }
    return engine.Pipeline(**given | options)


def train(pipeline, given, updates):
    """The state after some steps, each of its part of the micro-batches, and the losses."""
    state = pipeline.init(jax.random.key(0), given[0])
    losses, per_step = [], COUNT * pipeline.num_replicas
    for number in range(updates):
        state, outputs = pipeline.step(state, given[number * per_step : (number + 1) * per_step])
        losses += outputs.losses
    return state, losses


def plain_loop(make_optimizer, given, per_step, dtype="float32"):
    """The same in plain JAX: the mean over all tokens of a step."""

    def loss(own, tokens, mask, weight):
        return last(own[1], *first(own[0], tokens, mask))[0] / weight

    groups = []
    for start in range(0, len(given), per_step):
        part = given[start : start + per_step]
        weight = sum(mask.sum() for _tokens, mask in part)
        groups += [[(*each, weight)] for each in part]
    own = jax.tree.map(jnp.asarray, parameters(dtype))
    return models.plain_loop(loss, own, groups, per_step, make_optimizer())[1]


def clipped():
    return optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(0.05))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"device_mapping": [0, 0], "reduction": "running_mean"}, marks=pytest.mark.thorough),
        {"reduction": "mean", "donate": True},
        pytest.param(
            {"num_replicas": 2, "schedule": "zero_bubble", "shard": ["optimizer_state", "weights"]},
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["one device", "two devices", "replicas"],
)
def test_equals_the_mean_over_all_tokens(options):
    """Also with a micro-batch without tokens."""
    given = list(micro_batches())
    pipeline = make(clipped, **options)
    per_step = COUNT * pipeline.num_replicas
    state, losses = train(pipeline, given, len(given) // per_step)
    models.assert_trees_close(pipeline.parameters(state), plain_loop(clipped, given, per_step), 1e-5)
    if pipeline.num_replicas == 1:
        plain = jax.jit(lambda own, tokens, mask: last(own[1], *first(own[0], tokens, mask))[0])
        expected = [plain(parameters(), *own) for own in given[:COUNT]]
        np.testing.assert_allclose(losses[:COUNT], expected, rtol=1e-5)  # they are not divided


@pytest.mark.thorough
def test_in_float64():
    def sgd():
        return optax.sgd(0.1)

    with jax.enable_x64(True):
        given = list(micro_batches("float64"))[:COUNT]
        pipeline = make(sgd, "float64")
        state, _losses = train(pipeline, given, 1)
        expected = plain_loop(sgd, given, COUNT, "float64")
        models.assert_trees_close(pipeline.parameters(state), expected, 1e-12)


def test_whole_numbers_and_low_precision():
    """Weights are counted in float32, whatever the accumulators' dtype."""
    given = list(micro_batches())
    pipeline = make(
        clipped, weigh=lambda _loss, weight: weight.astype(jnp.int32), accumulator_dtype=jnp.bfloat16
    )
    state, _losses = train(pipeline, given, 2)
    models.assert_trees_close(pipeline.parameters(state), plain_loop(clipped, given, COUNT), 2e-2)


def test_with_loss_scaling():
    given = list(micro_batches())
    pipeline = make(lambda: unwrap(LossScalingOptimizer(optax.sgd(0.1), 1024)).transformation)
    state, _losses = train(pipeline, given, 2)
    expected = plain_loop(lambda: optax.sgd(0.1), given, COUNT)
    models.assert_trees_close(pipeline.parameters(state), expected, 1e-5)


def test_a_step_without_any_tokens():
    """Its gradients are 0, and the optimizer updates with these."""
    given = list(micro_batches(lengths=[3, 2, 1, 4, 0, 0, 0, 0]))
    pipeline = make(lambda: optax.sgd(0.1, momentum=0.5), device_mapping=(0, 0))
    before, _losses = train(pipeline, given[:4], 1)
    state, _outputs = pipeline.step(before, given[4:])
    name = "stage1/parameter"
    expected = before.variables[name] - np.float32(0.1 * 0.5) * before.optimizer_state[0].trace[name]
    np.testing.assert_allclose(state.variables[name], expected, rtol=1e-6)


def test_the_state_is_that_of_a_pipeline_without_weights(tmp_path):
    given = list(micro_batches())
    weighted, plain = make(clipped, donate=True), make(clipped, weigh=None)
    state, _losses = train(weighted, given, 1)
    start = plain.init(jax.random.key(0), given[0])
    assert jax.tree.structure(state) == jax.tree.structure(start)
    assert sorted(state.variables) == sorted(weighted.variables)
    assert "_loss_weight" not in str(engine.inspect.summarize(weighted))
    engine.save(tmp_path / "state", state)
    evaluator = engine.Pipeline([first, last], parameters=jax.eval_shape(parameters), num_micro_batches=4)
    evaluator.trace(given[0])
    _state, outputs = evaluator.step(state, given[:4])
    _state, again = evaluator.step(engine.restore(tmp_path / "state", evaluator), given[:4])
    models.assert_trees_close(outputs.outputs, again.outputs, 0.0)
    assert jax.tree.structure(engine.restore(tmp_path / "state", plain)) == jax.tree.structure(start)
    for other in (state, engine.restore(tmp_path / "state", weighted), engine.resplit(start, weighted)):
        assert sorted(other.variables) == sorted(weighted.variables)
        has_begun = other.update_count
        found, _outputs = weighted.step(other, given[4:])
        if has_begun:
            models.assert_trees_close(weighted.parameters(found), plain_loop(clipped, given, COUNT), 1e-5)


def test_another_thread_steps_the_pipeline_while_a_state_is_placed():
    """It got the other thread's variables that count weights, which a step with `donate` destroys."""
    pipeline, given = make(lambda: optax.sgd(0.1)), list(micro_batches())
    other = pipeline.init(jax.random.key(1), given[0])
    state, _outputs = pipeline.step(pipeline.init(jax.random.key(0), given[0]), given[:COUNT])
    expected = pipeline.place(state).variables

    def step_once(frame, event, _argument):  # where a thread may give way to another one
        if event == "return" and frame.f_code.co_filename.endswith("pipeline_states.py"):
            sys.setprofile(None)
            pipeline.step(other, given[:COUNT])

    sys.setprofile(step_once)
    found = pipeline.place(state).variables
    assert sys.getprofile() is None
    assert found.keys() == expected.keys() > state.variables.keys()
    assert all(found[name] is expected[name] for name in found)


def test_some_variables_only():
    given = list(micro_batches())
    pipeline = make(clipped, trained=["stage0/w"])
    state, _losses = train(pipeline, given, 2)
    np.testing.assert_array_equal(pipeline.parameters(state)[1], parameters()[1])
    assert not np.array_equal(pipeline.parameters(state)[0]["w"], parameters()[0]["w"])
    with pytest.raises(ValueError, match="is not trainable. Trainable are: stage0/w, stage1/parameter.$"):
        make(clipped, trained=["_loss_weight/float32"]).trace(given[0])


def train_in_processes():
    """In each of two processes: one has the tokens' stage, the other the loss."""
    ipu.set_num_devices(2)
    given = list(micro_batches())
    pipeline = make(clipped)
    state, losses = train(pipeline, given, 2)
    return jax.device_get(pipeline.parameters(engine.gathered(state))), len(losses)


@pytest.mark.thorough
def test_in_two_processes(tmp_path):
    expected = plain_loop(clipped, list(micro_batches()), COUNT)
    started = joined.start(train_in_processes, 2, None, directory=tmp_path, joins_itself=True)
    found = joined.finish(started, tmp_path, 600)
    assert [number for _parameters, number in found] == [0, 8]
    for own, _number in found:
        models.assert_trees_close(own, expected, 1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weigh": lambda _loss, weight: weight[None]}, r"must be a scalar, .* it is float32\[1\]"),
        (
            {"weigh": lambda _loss, weight: weight > 0},
            "must be a scalar, an integer or floating-point number",
        ),
        ({"weigh": lambda loss: loss}, r"takes \(loss\), but what the last stage returns gives it"),
        ({"weigh": 5}, "must be a function of what the last stage returns"),
        ({"loss": None, "optimizer": None}, "says what loss is divided by, so it needs loss and"),
        (
            {"gradient_map": lambda: lambda gradient, variable: gradient},
            "and a gradient map cannot be combined",
        ),
    ],
)
def test_wrong_weights(options, message):
    (given,) = micro_batches(lengths=[1])
    with pytest.raises((ValueError, TypeError), match=f"loss_weight {message}"):
        make(clipped, **options).trace(given)


def test_weights_are_no_variables_to_optimize():
    (given,) = micro_batches(lengths=[1])
    constant = make(clipped, stages=[lambda x, mask: (jnp.sum(x), jnp.sum(mask))], parameters=None)
    with pytest.raises(ValueError, match="No variables to optimize"):
        constant.trace(given)
