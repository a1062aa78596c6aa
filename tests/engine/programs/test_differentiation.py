"""What is in a stage's programs: residuals, pass-through values, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine.programs.stage_programs import ValueKind
from tests.support import beside, models

BATCH, WIDTH = 4, 6


def trace(stages, element=None, **options):
    pipeline = engine.Pipeline(stages, num_micro_batches=2, optimizer=optax.sgd(0.1), **options)
    pipeline.trace((np.zeros((BATCH, WIDTH), "float32"),) if element is None else element)
    return pipeline


def num_bytes(avals):
    return sum(int(np.prod(aval.shape)) * aval.dtype.itemsize for aval in avals)


MLP_ELEMENT = np.zeros((BATCH, 12), "float32"), np.zeros(BATCH, "int32")


def train(pipeline, rng, bound=1e-5):
    """One update of a pipeline without labels, beside a plain loop; returns the new state."""
    micro_batches = [(rng.normal(size=(BATCH, WIDTH)).astype("float32"),) for _ in range(2)]
    return beside.train(pipeline, [micro_batches], bound=bound)[0]


def kernel(name="kernel", shape=(WIDTH, WIDTH)):
    return engine.get_variable(name, shape)


def mean_square(x):
    return jnp.mean(x * x)


def test_residual_bytes_of_an_mlp_are_those_computed_by_hand():
    pipeline = trace(models.mlp_stages(2), MLP_ELEMENT)
    # Stage 0 is relu(relu(x @ w0 + b0) @ w1 + b1), 12 -> 16 -> 16. Its backward needs x, which is an
    # input and not a residual; where the two sums are positive, a byte each; and the first relu's value.
    mask = BATCH * 16
    assert num_bytes(pipeline.programs[0].residuals) == mask + BATCH * 16 * 4 + mask
    assert pipeline.programs[1].residuals == ()
    assert pipeline.programs[1].backward is None


def x_times_transposed(x):
    return x @ kernel().T


def bfloat16_cast(x):
    return (x.astype(jnp.bfloat16) @ kernel().astype(jnp.bfloat16)).astype(jnp.float32)


def weight_normalised(x):
    w, g = kernel(), engine.get_variable("g", (WIDTH,), initializer=1.0)
    return x @ (w / jnp.linalg.norm(w, axis=0) * g)


def product_of_weights(x):
    return x @ (kernel("first") @ kernel("second"))


@pytest.mark.parametrize(
    ("stage", "stored"),
    [
        (x_times_transposed, 0),
        (bfloat16_cast, BATCH * WIDTH * 2),  # x in bfloat16
        (weight_normalised, 0),
        (product_of_weights, 0),
    ],
)
def test_nothing_computed_from_weights_alone_is_stored(stage, stored, rng):
    pipeline = trace([stage, mean_square])
    assert num_bytes(pipeline.programs[0].residuals) == stored
    # XLA may leave roundings to bfloat16 out where it fuses, which the reference's single steps cannot.
    train(pipeline, rng, 1e-2 if stage is bfloat16_cast else 1e-5)


def transposed_in_a_scan(x):
    def body(carry, w):
        return jnp.tanh(carry @ w.T), None

    return jax.lax.scan(body, x, kernel("stack", (3, WIDTH, WIDTH)))[0]


def test_a_scan_over_layers_stores_no_weights():
    """Its backward needs w.T of every layer, which does not depend on the data."""
    pipeline = trace([lambda x: x @ kernel("first"), transposed_in_a_scan, mean_square])
    assert (3, WIDTH, WIDTH) not in [aval.shape for aval in pipeline.programs[1].residuals]


def test_an_assigned_variable_that_the_backward_needs_is_stored_as_it_was(rng):
    def stage(x):
        scale = engine.get_variable("scale", (WIDTH,), initializer=2.0, trainable=False)
        y = x @ kernel() * scale
        engine.assign("scale", scale * 0.5)
        return y

    pipeline = trace([stage, mean_square], schedule="grouped")
    assert num_bytes(pipeline.programs[0].residuals) == WIDTH * 4
    state = train(pipeline, rng)
    np.testing.assert_array_equal(state.variables["scale"], np.full(WIDTH, 0.5, "float32"))


def kinds(program, kind):
    return [value.index for value in program.arguments if value.kind is kind]


def test_values_that_are_passed_on_are_in_no_program():
    def first(rate, x, labels):
        return rate, x @ kernel(), labels

    def second(rate, x, labels):
        return rate, x, labels

    def third(rate, x, labels):
        return rate, models.cross_entropy(x, labels)

    element = (np.zeros((), "float32"), np.zeros((BATCH, WIDTH), "float32"), np.zeros(BATCH, "int32"))
    pipeline = trace([first, second, third], element, loss=lambda rate, loss: loss)
    assert kinds(pipeline.programs[0].forward, ValueKind.INPUT) == [1]
    assert pipeline.programs[0].forward.results[0][0].index == 1
    assert pipeline.programs[1].forward.arguments == ()
    assert pipeline.programs[1].forward.results == ()
    assert pipeline.programs[1].backward is None
    assert kinds(pipeline.programs[2].forward, ValueKind.INPUT) == [1, 2]


def test_no_gradient_for_what_needs_none():
    def first(x):
        return x * 2, (x > 0), jnp.sum(x)  # no variables: no gradients

    def second(x, positive, total):
        return jnp.where(positive, x, 0.0) @ kernel("a") + total, jax.lax.stop_gradient(x @ kernel("b"))

    def third(x, stopped):
        return mean_square(x + stopped)

    pipeline = trace([first, second, third])
    assert pipeline.programs[0].backward is None
    assert pipeline.programs[0].residuals == ()
    backward = pipeline.programs[1].backward
    assert not any(value.kind is ValueKind.INPUT_COTANGENT for (value,) in backward.results)
    assert [value.index for (value,) in backward.results] == [0]  # of "a", and not of "b"


def test_last_stage_is_one_program_and_others_two():
    pipeline = trace(models.mlp_stages(3), MLP_ELEMENT)
    programs = [program for stage in pipeline.programs for program in (stage.forward, stage.backward)]
    assert [program.name for program in programs if program] == [
        *("stage0_forward", "stage0_backward", "stage1_forward", "stage1_backward"),
        "stage2_forward_backward",
    ]


def test_an_output_that_the_backward_needs_too_is_returned_once():
    pipeline = trace([lambda x: jnp.tanh(x @ kernel()), mean_square])
    forward = pipeline.programs[0].forward
    values = [value.kind for values in forward.results for value in values]
    assert len(forward.results) < len(values)
    assert ValueKind.RESIDUAL in values
