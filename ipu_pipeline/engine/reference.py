"""The same training step without a pipeline: a plain loop of `jax.grad` over the micro-batches.

It shares the tracing of the stage functions with the pipeline and nothing else: no schedule, no cut
programs, no placement. Every test of a way to run a model compares with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ipu_pipeline.engine import jaxprs, keys, stages
from ipu_pipeline.engine.optimizer_tracing import Optimizer
from ipu_pipeline.engine.programs import Reduction
from ipu_pipeline.engine.state import PipelineState, StepOutputs

__all__ = ["Gradients", "gradients", "step"]

Gradients = dict[str, Any]


def gradients(
    traced: stages.TracedPipeline,
    state: PipelineState,
    micro_batch: Any,
    index: int,
    inputs: Sequence[Any],
    trained: Sequence[str],
) -> tuple[Any, Gradients, list[Any], dict[str, Any]]:
    """One micro-batch.

    Args:
      traced: the pipeline's stages.
      state: the variables, key and execution count.
      micro_batch: a pytree of arrays.
      index: the micro-batch's.
      inputs: pytrees of arrays that are constant during the step.
      trained: full names of the variables to differentiate.

    Returns:
      The loss, its gradients, the leaves of the last stage's outputs, and the variables afterwards.
    """

    def forward(chosen: dict[str, Any]) -> tuple[Any, tuple[list[Any], dict[str, Any]]]:
        variables = {**state.variables, **chosen}
        new_variables = dict(state.variables)
        count, number = jnp.int32(state.execution_count), jnp.int32(index)
        key = keys.micro_batch_key(state.key, count, number)
        values: dict[stages.Source, Any] = {}
        for place, leaf in enumerate(jax.tree.leaves(tuple(inputs))):
            values[stages.Source("input", place)] = jnp.asarray(leaf)
        for place, leaf in enumerate(jax.tree.leaves(stages.as_arguments(micro_batch))):
            values[stages.Source("element", place)] = jnp.asarray(leaf)
        for stage in traced.stages:
            arguments = [variables[spec.name] for spec in stage.variables]
            arguments += [key] if stage.uses_key else []
            arguments += [values[source] for source in stage.inputs]
            results = jaxprs.close(stage.flat)(*arguments)
            values.update(zip(stage.outputs, results, strict=False))
            assigned = results[len(stage.outputs) :]
            new_variables.update(
                (spec.name, value) for spec, value in zip(stage.assigned, assigned, strict=True)
            )
        loss = jnp.float32(0) if traced.loss is None else values[traced.loss]
        return loss, ([values[source] for source in traced.outputs], new_variables)

    chosen = {name: state.variables[name] for name in trained}
    (loss, (outputs, variables)), grads = jax.value_and_grad(forward, has_aux=True)(chosen)
    return loss, grads, outputs, variables


def step(
    traced: stages.TracedPipeline,
    state: PipelineState,
    micro_batches: Sequence[Any],
    *inputs: Any,
    optimizer: Optimizer | None = None,
    reduction: str | Reduction = "sum",
    trained: Sequence[str] | None = None,
) -> tuple[PipelineState, StepOutputs]:
    """The counterpart of `Pipeline.step`, on whatever device the arrays are on.

    Args:
      traced: the pipeline's stages, `Pipeline.traced`.
      state: the state before; not changed. All its leaves on one device.
      micro_batches: all micro-batches of the step.
      *inputs: pytrees of arrays that are constant during the step.
      optimizer: as given to the pipeline.
      reduction: as given to the pipeline.
      trained: as given to the pipeline.

    Returns:
      The new state and the outputs.
    """
    reduction = Reduction(reduction)
    if trained is None:
        trained = [name for name, spec in traced.variables.items() if spec.trainable]
    accumulated: Gradients = {}
    all_outputs: list[list[Any]] = []
    losses: list[Any] = []
    running = state
    for index, micro_batch in enumerate(micro_batches):
        differentiated = trained if optimizer is not None else ()
        loss, grads, outputs, variables = gradients(
            traced, running, micro_batch, index, inputs, differentiated
        )
        running = dataclasses.replace(running, variables=variables)
        all_outputs.append(outputs)
        losses.append(loss)
        for name, gradient in grads.items():
            if index == 0:
                accumulated[name] = gradient
            elif reduction is Reduction.RUNNING_MEAN:
                accumulated[name] += (gradient - accumulated[name]) / (index + 1)
            else:
                accumulated[name] += gradient
    unflatten = traced.output_tree.unflatten
    step_outputs = StepOutputs(
        [unflatten(outputs) for outputs in all_outputs], losses if optimizer is not None else []
    )
    running = dataclasses.replace(running, execution_count=np.int32(state.execution_count + 1))
    if optimizer is None:
        return running, step_outputs
    if reduction is Reduction.MEAN:
        accumulated = {name: value / len(micro_batches) for name, value in accumulated.items()}

    def transformation(outputs: list[Any]) -> tuple[Any, dict[str, Any]]:
        if isinstance(optimizer, optax.GradientTransformation):
            return optax.with_extra_args_support(optimizer), {}
        args, kwargs = stages.as_arguments(unflatten(outputs))
        made = optimizer(*args, **kwargs)
        pair = (made, {}) if isinstance(made, optax.GradientTransformation) else made
        return optax.with_extra_args_support(pair[0]), pair[1]

    parameters = {name: state.variables[name] for name in trained}
    optimizer_state = state.optimizer_state
    if optimizer_state is None:
        optimizer_state = transformation(all_outputs[0])[0].init(parameters)
    made, extra = transformation(all_outputs[-1])
    with jax.numpy_dtype_promotion("standard"):
        changes, optimizer_state = made.update(accumulated, optimizer_state, parameters, **extra)
        parameters = optax.apply_updates(parameters, changes)
    return (
        dataclasses.replace(
            running,
            variables={**running.variables, **parameters},
            optimizer_state=optimizer_state,
            update_count=np.int32(state.update_count + 1),
        ),
        step_outputs,
    )
