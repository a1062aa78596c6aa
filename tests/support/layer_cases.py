"""One layer as the middle stage of a pipeline, compared with a function of its variables and inputs.

The stage in the middle is the one whose forward and backward are two programs.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen

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


class Case(NamedTuple):
    """A layer, and what it is compared with.

    Attributes:
      layer: the layer.
      x: a micro-batch; if it is of floating-point numbers, their gradients are compared too.
      reference: `reference(variables, x) -> outputs`, of the variables by name within the layer.
      tolerance: of `models.assert_trees_close`.
      training: of the call, unless it is None.
    """

    layer: Any
    x: Any
    reference: Callable | None = None
    tolerance: float = 1e-5
    training: bool | None = None


def run_cases(cases):
    """Applies layers to one micro-batch each in a program that trains.

    Returns for each case the outputs, the variables before and the gradients, by name within the layer; the
    inputs, if they are floating-point, are a trained variable called `inputs`.
    """

    names = [""] if len(cases) == 1 else [f"case{number}/" for number in range(len(cases))]

    def scope(number):
        name = names[number].rstrip("/")
        return engine.variable_scope(name) if name else contextlib.nullcontext()

    def source(*elements):
        taken = []
        for number, (case, element) in enumerate(zip(cases, elements, strict=True)):
            with scope(number):
                is_floating = jnp.issubdtype(case.x.dtype, jnp.floating)
                own = (case.x.shape, case.x.dtype, case.x)
                taken.append(engine.get_variable("inputs", *own) if is_floating else element)
        return tuple(taken)

    def apply(*inputs):
        outputs = []
        for number, (case, x) in enumerate(zip(cases, inputs, strict=True)):
            with scope(number):
                options = {} if case.training is None else {"training": case.training}
                outputs.append(case.layer(x, **options))
        return tuple(outputs)

    pipeline = engine.Pipeline(
        [source, apply, lambda *outputs: (sum(map(loss, outputs)), outputs)],
        num_micro_batches=1,
        loss=lambda loss, outputs: loss,
        optimizer=optax.trace(decay=0.0),  # its state is the last gradient
        forward_options=[AS_WRITTEN] * 3,
        backward_options=[AS_WRITTEN] * 2,
    )
    elements = tuple(case.x for case in cases)
    state = pipeline.init(jax.random.key(1), elements)
    new_state, outputs = pipeline.step(state, [elements])
    (_loss, outputs) = outputs.outputs[0]

    def own(values, number):
        return {
            name.rpartition("/")[2]: np.asarray(value)
            for name, value in values.items()
            if name.startswith(names[number])
        }

    return [
        (np.asarray(output), own(state.variables, number), own(new_state.optimizer_state.trace, number))
        for number, output in enumerate(outputs)
    ]


def check_all(cases):
    """Compares outputs and all gradients with those of references, in one program for all.

    A failure shows the number of the case. Returns the outputs.
    """
    found, arguments = run_cases(cases), []
    for case, (_outputs, variables, gradients) in zip(cases, found, strict=True):
        inputs = variables.pop("inputs", case.x)
        trained = {name: value for name, value in variables.items() if name in gradients}
        if "inputs" in gradients:
            trained["inputs"] = inputs
        arguments.append((trained, variables, inputs))

    def reference_loss(all_trained, rest):
        outputs = []
        for case, trained, (variables, inputs) in zip(cases, all_trained, rest, strict=True):
            variables = {name: trained.get(name, value) for name, value in variables.items()}
            outputs.append(case.reference(variables, trained.get("inputs", inputs)))
        return sum(map(loss, outputs)), outputs

    with jax.numpy_dtype_promotion("standard"):  # for Flax
        differentiate = jax.jit(jax.grad(reference_loss, has_aux=True), compiler_options=AS_WRITTEN)
        expected, outputs = differentiate([one[0] for one in arguments], [one[1:] for one in arguments])
    for number, case in enumerate(cases):
        models.assert_trees_close(
            {number: (found[number][0], found[number][2])},
            {number: (np.asarray(outputs[number]), expected[number])},
            case.tolerance,
        )
    return [one[0] for one in found]


def flax_convolution(layer, features, groups):
    """Flax's module with the arguments of a layer."""
    return linen.Conv(
        features,
        layer.kernel_size,
        layer.strides,
        layer.padding.upper(),
        kernel_dilation=layer.dilation_rate,
        feature_group_count=groups,
        use_bias=layer.use_bias,
    )


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
