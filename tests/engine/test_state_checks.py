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
        loss=lambda loss: loss,
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
    uses = {
        "Pipeline.step": lambda: pipeline.step(old, MICRO_BATCHES),
        "Pipeline.parameters": lambda: pipeline.parameters(old),
        "Pipeline.with_parameters": lambda: pipeline.with_parameters(old, PARAMETERS),
        "Pipeline.compile": lambda: pipeline.compile(old),
        "engine.save": lambda: engine.save(tmp_path / "a", old),
        "engine.resplit": lambda: engine.resplit(old, pipeline),
    }
    for caller, use in uses.items():
        with pytest.raises(ValueError, match=f"{caller}: the state's variable stage0/w has been deleted"):
            use()
    with pytest.raises(ValueError, match="stage0/w has been deleted. With donate=True .*state, outputs ="):
        evaluator.step(old, MICRO_BATCHES)
    mixed = dataclasses.replace(old, variables=state.variables)
    with pytest.raises(ValueError, match=r"the state's optimizer_state\[0\].* has been deleted"):
        pipeline.step(mixed, MICRO_BATCHES)
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

    def of_micro_batch(x):
        return loss_of(pipeline, state, (x for _number in range(2)))

    for call in (
        lambda: jax.jit(lambda: loss_of(pipeline, state))(),
        lambda: jax.grad(of_variables)(state.variables),
        lambda: jax.vmap(of_micro_batch)(np.ones((4, 2, 3), "float32")),
    ):
        with pytest.raises(TypeError, match="Pipeline.step was called in a function .*by itself"):
            call()
    with pytest.raises(TypeError, match=r"Pipeline.init was called in .*Pipeline.trace\("):
        jax.eval_shape(lambda: init(pipeline))
    with pytest.raises(TypeError, match="Pipeline.place_micro_batches was called in a function"):
        jax.jit(pipeline.place_micro_batches)(MICRO_BATCHES)


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
