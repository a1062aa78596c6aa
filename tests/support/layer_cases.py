"""One layer as the middle stage of a pipeline, compared with a function of its variables and inputs.

The stage in the middle is the one whose forward and backward are two programs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ipu_pipeline import engine
from tests.support import models

# XLA keeps more digits than 16-bit floats have between some operations, not always the same on both sides.
AS_WRITTEN = {"xla_allow_excess_precision": False}


def tolerance(dtype):
    """For `models.assert_trees_close`: rounding, and no more."""
    return {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}[dtype]


def loss_weights(outputs):
    """What the loss multiplies the outputs by: other numbers for each of them."""
    return np.random.default_rng(5).normal(size=outputs.shape).astype("float32")


def loss(outputs):
    return jnp.sum(outputs.astype(jnp.float32) * loss_weights(outputs))


def outputs_and_gradients(layer, x, training=None):
    """Applies a layer to one micro-batch in a program that trains.

    Returns the outputs, the variables before and the gradients, by name within the layer; the inputs, if
    they are floating-point, are a trained variable called `inputs`.
    """
    is_floating = jnp.issubdtype(x.dtype, jnp.floating)

    def source(element):
        return engine.get_variable("inputs", x.shape, x.dtype, x) if is_floating else element

    def apply(inputs):
        return layer(inputs) if training is None else layer(inputs, training=training)

    pipeline = engine.Pipeline(
        [source, apply, lambda outputs: (loss(outputs), outputs)],
        num_micro_batches=1,
        loss=lambda loss, outputs: loss,
        optimizer=optax.trace(decay=0.0),  # its state is the last gradient
        forward_options=[AS_WRITTEN] * 3,
        backward_options=[AS_WRITTEN] * 2,
    )
    state = pipeline.init(jax.random.key(1), x)
    new_state, outputs = pipeline.step(state, [x])
    (_loss, outputs) = outputs.outputs[0]

    def by_short_name(values):
        return {name.rpartition("/")[2]: np.asarray(value) for name, value in values.items()}

    return (
        np.asarray(outputs),
        by_short_name(state.variables),
        by_short_name(new_state.optimizer_state.trace),
    )


def check(layer, x, reference, tolerance, training=None):
    """Compares outputs and all gradients with those of `reference(variables, x) -> outputs`.

    Returns the outputs.
    """
    outputs, variables, gradients = outputs_and_gradients(layer, x, training)
    inputs = variables.pop("inputs", x)
    trained = {name: value for name, value in variables.items() if name in gradients}
    fixed = {name: value for name, value in variables.items() if name not in gradients}

    def reference_loss(trained, x):
        outputs = reference({**trained, **fixed}, x)
        return loss(outputs), outputs

    is_floating = "inputs" in gradients
    with jax.numpy_dtype_promotion("standard"):  # for Flax
        differentiate = jax.grad(reference_loss, argnums=(0, 1) if is_floating else (0,), has_aux=True)
        expected, expected_outputs = jax.jit(differentiate, compiler_options=AS_WRITTEN)(trained, inputs)
    expected_gradients = dict(expected[0])
    if is_floating:
        expected_gradients["inputs"] = expected[1]
    models.assert_trees_close(outputs, np.asarray(expected_outputs), tolerance)
    models.assert_trees_close(gradients, expected_gradients, tolerance)
    return outputs


def dtypes_of(stage, x):
    """Names of the dtypes of what a stage returns, and of the variables by name; nothing is run."""
    seen = []

    def noted(x):
        outputs = stage(x)
        seen.extend(y.dtype.name for y in jax.tree.leaves(outputs))
        return outputs

    pipeline = engine.Pipeline([noted], num_micro_batches=1)
    pipeline.trace(x)
    return seen, {name: spec.dtype.name for name, spec in pipeline.variables.items()}
