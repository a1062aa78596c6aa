"""States that cannot be used: destroyed by a step, of another type, or in a function that JAX traces."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine

PARAMETERS = [{"w": np.full((3, 3), 0.5, "float32")}, np.full((3, 1), 0.5, "float32")]
MICRO_BATCHES = [np.ones((2, 3), "float32")] * 2


def make(**options):
    return engine.Pipeline(
        [lambda p, x: jnp.tanh(x @ p["w"]), lambda p, x: jnp.mean((x @ p) ** 2)],
        parameters=PARAMETERS,
        num_micro_batches=2,
        optimizer=optax.sgd(0.1, momentum=0.9),
        **options,
    )


def init(pipeline):
    return pipeline.init(jax.random.key(0), MICRO_BATCHES[0])


@pytest.mark.parametrize("mapping", [(0, 1), (0, 0)])
def test_a_state_that_a_step_has_destroyed(mapping, tmp_path):
    pipeline, evaluator = make(donate=True, device_mapping=mapping), make(device_mapping=mapping)
    old = init(pipeline)
    evaluator.step(old, MICRO_BATCHES)  # which knows the state from here on
    state, _outputs = pipeline.step(old, MICRO_BATCHES)
    mixed, text = dataclasses.replace(old, variables=state.variables), "the state's variable stage0/w"
    for use, message in (
        (lambda: pipeline.step(old, MICRO_BATCHES), f"Pipeline.step: {text}"),
        (lambda: pipeline.parameters(old), f"Pipeline.parameters: {text}"),
        (lambda: pipeline.with_parameters(old, PARAMETERS), f"Pipeline.with_parameters: {text}"),
        (lambda: pipeline.compile(old), f"Pipeline.compile: {text}"),
        (lambda: engine.save(tmp_path / "a", old), f"engine.save: {text}"),
        (lambda: engine.resplit(old, pipeline), f"engine.resplit: {text}"),
        (lambda: pipeline.step(mixed, MICRO_BATCHES), r"the state's optimizer_state\[0\].*"),
    ):
        with pytest.raises(ValueError, match=f"{message} has been deleted"):
            use()
    with pytest.raises(ValueError, match="stage0/w has been deleted. With donate=True .*state, outputs ="):
        evaluator.step(old, MICRO_BATCHES)
    pipeline.step(state, MICRO_BATCHES)  # the state that it returned goes on


def test_parameters_that_a_step_has_destroyed():
    pipeline = make(donate=True)
    state = init(pipeline)
    old = pipeline.parameters(state)  # these are not copies
    state, _outputs = pipeline.step(state, MICRO_BATCHES)
    with pytest.raises(ValueError, match=r"parameters\[0\]\['w'\] has been deleted"):
        pipeline.with_parameters(state, old)


def test_what_is_no_state():
    pipeline = make()
    pair = pipeline.step(init(pipeline), MICRO_BATCHES)
    with pytest.raises(TypeError, match="got tuple. step returns a pair: `state, outputs ="):
        pipeline.step(pair, MICRO_BATCHES)
    with pytest.raises(TypeError, match="parameters: state must be what init or step returned; got dict."):
        pipeline.parameters(pair[0].variables)


def loss_of(pipeline, state, micro_batches=MICRO_BATCHES):
    return pipeline.step(state, micro_batches)[1].losses[0]


def test_calls_in_functions_that_are_traced():
    pipeline = make()
    state = init(pipeline)

    def of_variables(variables):
        return loss_of(pipeline, dataclasses.replace(state, variables=variables))

    step = "Pipeline.step was called in a function .*by itself"
    for call, message in (
        (jax.jit(lambda: loss_of(pipeline, state)), step),
        (lambda: jax.grad(of_variables)(state.variables), step),
        (lambda: jax.vmap(lambda x: loss_of(pipeline, state, [x, x]))(np.ones((4, 2, 3), "float32")), step),
        (lambda: jax.eval_shape(lambda: init(pipeline)), r"Pipeline.init was called in .*Pipeline.trace\("),
        (
            lambda: jax.jit(pipeline.place_micro_batches)(MICRO_BATCHES),
            "Pipeline.place_micro_batches was called in a function",
        ),
    ):
        with pytest.raises(TypeError, match=message):
            call()


def test_calls_that_only_look_at_a_state_may_be_traced():
    pipeline = make()
    state = init(pipeline)
    on_one = jax.device_put(state.variables, jax.devices()[0])

    def total(variables):
        parameters = pipeline.parameters(dataclasses.replace(state, variables=variables))
        return sum(map(jnp.sum, jax.tree.leaves(parameters)))

    assert jax.jit(total)(on_one) == 6


def test_steps_with_constants_in_a_function_that_is_differentiated():
    """Nothing of them is traced."""
    pipeline = make()
    state = init(pipeline)
    expected = float(loss_of(pipeline, state))
    assert jax.grad(lambda x: x * float(loss_of(pipeline, state)))(1.0) == expected


@pytest.mark.parametrize("mapping", [(0, 1), (0, 0)])
def test_one_array_in_several_places_of_a_state(mapping):
    """With donate on one device XLA was asked to destroy it twice."""
    found = []
    for donate in (True, False):
        array = jnp.full((3, 3), 0.2)
        pipeline = make(donate=donate, device_mapping=mapping)
        state = init(pipeline)
        trace = dict.fromkeys(state.variables, array) | {
            "stage1/parameter": state.variables["stage1/parameter"]
        }
        momentum = state.optimizer_state[0]._replace(trace=trace)
        state = dataclasses.replace(
            state,
            variables={**state.variables, "stage0/w": array},
            optimizer_state=(momentum, *state.optimizer_state[1:]),
        )
        found.append(pipeline.step(state, MICRO_BATCHES)[0].variables)
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_numpy_arrays_in_a_state():
    pipeline = make()
    state = init(pipeline)
    expected = pipeline.step(state, MICRO_BATCHES)[0].variables
    own = np.full((3, 3), 0.5, "float32")

    def step(value):
        variables = {**state.variables, "stage0/w": value}
        return pipeline.step(dataclasses.replace(state, variables=variables), MICRO_BATCHES)[0].variables

    for value in (own.astype(">f4"), np.ma.masked_array(own)):
        jax.tree.map(np.testing.assert_array_equal, step(value), expected)
    with pytest.raises(
        ValueError, match="Variable stage0/w is a masked array: 1 of its 9 elements are mask"
    ):
        step(np.ma.masked_array(own, mask=[[1, 0, 0], [0] * 3, [0] * 3]))
    with pytest.raises(ValueError, match="Variable stage0/w must be an array; the state has list."):
        step(own.tolist())


def test_trees_and_pickles_of_version_0_1_0_are_read():
    """Orbax compares trees, with their empty dicts; a pickle has attributes by name."""
    state = init(make())
    names = ["variables", "optimizer_state", "update_count", "execution_count", "key"]
    is_child = {"is_leaf": lambda value: value is not state}
    assert [path[0].name for path, _ in jax.tree_util.tree_leaves_with_path(state, **is_child)] == names
    old = object.__new__(engine.PipelineState)
    old.__setstate__({name: getattr(state, name) for name in names})
    assert jax.tree.structure(old) == jax.tree.structure(state)
    between = dataclasses.replace(old, accumulators={"w": 1.0}, num_accumulated=2)
    assert jax.tree.map(lambda leaf: leaf, between).accumulators == {"w": 1.0}
