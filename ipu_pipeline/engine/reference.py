"""The same training step without a pipeline: a plain loop of `jax.grad` over the micro-batches.

It shares the tracing of the stage functions with the pipeline and nothing else: no schedule, no cut
programs, no placement. Every test of a way to run a model compares with it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.option_types import Reduction, ReductionName
from ipu_pipeline.engine.programs.accumulation import count_dtype
from ipu_pipeline.engine.state import Collected, PipelineState, StepOutputs
from ipu_pipeline.engine.tracing import stage_markers, stages
from ipu_pipeline.engine.tracing.stages import Source, TracedPipeline
from ipu_pipeline.engine.updates.optimizer_tracing import Optimizer
from ipu_pipeline.engine.updates.optimizer_wrappers import LossScaled, LossScaleState
from ipu_pipeline.ground.checks import parse_member

Gradients = dict[str, Any]


def gradients(
    traced: TracedPipeline,
    state: PipelineState,
    micro_batch: Any,
    index: int,
    inputs: Sequence[Any],
    trained: Sequence[str],
    loss_scale: Any = None,
) -> tuple[Any, Gradients, list[Any], dict[str, Any]]:
    """Computes one micro-batch.

    Returns:
      The loss, its gradients, the leaves of the last stage's outputs, and the variables afterwards.
    """

    def forward(chosen: dict[str, Any]) -> tuple[Any, tuple[Any, list[Any], dict[str, Any]]]:
        variables = {**state.variables, **chosen}
        new_variables = dict(state.variables)
        count, number = jnp.int32(state.execution_count), jnp.int32(index)
        key = stage_markers.micro_batch_key(state.key, count, number)
        values: dict[Source, Any] = {}
        for place, leaf in enumerate(jax.tree.leaves(tuple(inputs))):
            values[Source("input", place)] = jnp.asarray(leaf)
        for place, leaf in enumerate(jax.tree.leaves(stages.as_arguments(micro_batch))):
            values[Source("element", place)] = jnp.asarray(leaf)
        values[Source("update_count", 0)] = jnp.int32(state.update_count)
        for stage in traced.stages:
            arguments = [variables[spec.name] for spec in stage.variables]
            arguments += [key] if stage.uses_key else []
            arguments += [values[source] for source in stage.inputs]
            results = jaxprs.close(stage.flat)(*arguments)
            values.update(zip(stage.outputs, results, strict=False))
            assigned = results[len(stage.outputs) :][: len(stage.assigned)]
            new_variables.update(
                (spec.name, value) for spec, value in zip(stage.assigned, assigned, strict=True)
            )
        loss = jnp.float32(0) if traced.loss is None else values[traced.loss]
        scaled = loss if loss_scale is None else loss * loss_scale.astype(loss.dtype)
        return scaled, (loss, [values[source] for source in traced.outputs], new_variables)

    chosen = {name: state.variables[name] for name in trained}
    (_scaled, (loss, outputs, variables)), grads = jax.value_and_grad(forward, has_aux=True)(chosen)
    return loss, grads, outputs, variables


@functools.lru_cache(maxsize=4)
def _compile_gradients(traced: TracedPipeline, trained: tuple[str, ...]) -> Callable[..., Any]:
    def call(
        state: PipelineState, micro_batch: Any, index: int, inputs: Sequence[Any], loss_scale: Any
    ) -> Any:
        return gradients(traced, state, micro_batch, index, inputs, trained, loss_scale)

    return jax.jit(call)


class Accumulated(NamedTuple):
    """The results of a replica's micro-batches: variables, gradients, and per micro-batch the rest."""

    variables: dict[str, Any]
    accumulated: Gradients
    outputs: list[list[Any]]
    losses: list[Any]


def _mean(parts: Sequence[Any]) -> Any:
    """The mean over replicas of floating-point numbers; of others, the first replica's value."""
    is_floating = jnp.issubdtype(parts[0].dtype, jnp.floating)
    return parts[0] if len(parts) == 1 or not is_floating else sum(parts[1:], parts[0]) / len(parts)


def step(
    traced: TracedPipeline | Sequence[TracedPipeline],
    state: PipelineState,
    micro_batches: Sequence[Any],
    *inputs: Any,
    optimizer: Optimizer | None = None,
    reduction: ReductionName | Reduction = "mean",
    trained: Sequence[str] | None = None,
    accumulator_dtypes: Mapping[str, Any] | None = None,
    num_replicas: int = 1,
) -> tuple[PipelineState, StepOutputs]:
    """The counterpart of `Pipeline.step`, on the device of the arrays.

    Returns:
      The new state and the outputs.
    """
    reduction = parse_member(Reduction, reduction, "reduction")
    of_each = [traced] * len(micro_batches) if isinstance(traced, TracedPipeline) else traced
    traced = of_each[0]
    if trained is None:
        trained = [name for name, spec in traced.variables.items() if spec.trainable]
    specs = {name: traced.variables[name] for name in trained}
    dtypes = {name: spec.dtype for name, spec in specs.items()}
    dtypes |= {name: np.dtype(dtype) for name, dtype in (accumulator_dtypes or {}).items()}
    loss_scale = None
    if isinstance(state.optimizer_state, LossScaleState):
        loss_scale = state.optimizer_state.scale
    elif isinstance(optimizer, LossScaled):
        loss_scale = jnp.float32(optimizer.initial_scale)

    def accumulate(replica: int) -> Accumulated:
        running, accumulated = (
            state,
            {name: jnp.zeros(spec.shape, dtypes[name]) for name, spec in specs.items()},
        )
        if num_replicas > 1:
            running = dataclasses.replace(state, key=jax.random.fold_in(state.key, np.uint32(replica)))
        all_outputs, losses = [], []
        for index, micro_batch in enumerate(micro_batches[replica::num_replicas]):
            differentiated = tuple(trained) if optimizer is not None else ()
            execution_count: Any = stage_markers.as_int32(
                state.execution_count
            )  # traced like any other value
            stateless = dataclasses.replace(
                running, optimizer_state=None, update_count=0, execution_count=execution_count
            )
            traced_stages = of_each[replica + index * num_replicas]
            loss, grads, outputs, variables = _compile_gradients(traced_stages, differentiated)(
                stateless, micro_batch, index, inputs, loss_scale
            )
            running = dataclasses.replace(running, variables=variables)
            all_outputs.append(outputs)
            losses.append(loss)
            for name, gradient in grads.items():
                before = accumulated[name]
                if reduction is Reduction.RUNNING_MEAN:
                    wide = count_dtype(before.dtype)
                    before, gradient = before.astype(wide), gradient.astype(wide)
                    after = before + (gradient - before) / (index + 1)
                else:
                    after = before + gradient.astype(before.dtype)
                accumulated[name] = after.astype(dtypes[name])
        return Accumulated(dict(running.variables), accumulated, all_outputs, losses)

    parts = [accumulate(replica) for replica in range(num_replicas)]
    first = parts[0]
    assigned = {spec.name for stage in traced.stages for spec in stage.assigned}
    variables = {
        name: _mean([part.variables[name] for part in parts]) if name in assigned else value
        for name, value in first.variables.items()
    }
    accumulated = {name: _mean([part.accumulated[name] for part in parts]) for name in specs}
    all_outputs = first.outputs
    running = dataclasses.replace(state, variables=variables)

    def unflatten(leaves: Sequence[Any]) -> Any:
        return traced.output_tree.unflatten(leaves[: traced.output_tree.num_leaves])

    if num_replicas == 1:
        together = list(zip(first.outputs, first.losses, strict=True))
    else:
        outputs_of = zip(*(part.outputs for part in parts), strict=True)
        losses_of = zip(*(part.losses for part in parts), strict=True)
        together = [
            ([jnp.stack(leaves) for leaves in zip(*replica_leaves, strict=True)], jnp.stack(losses))
            for replica_leaves, losses in zip(outputs_of, losses_of, strict=True)
        ]
    collected = [
        Collected(outputs, None if optimizer is None else loss, None) for outputs, loss in together
    ]
    step_outputs = StepOutputs(collected, unflatten)
    running = dataclasses.replace(running, execution_count=int(state.execution_count) + 1)
    if optimizer is None:
        return running, step_outputs
    if reduction is Reduction.MEAN:
        accumulated = {
            name: value.astype(count_dtype(value.dtype)) / len(first.losses)
            for name, value in accumulated.items()
        }

    def transformation(outputs: list[Any]) -> tuple[Any, dict[str, Any]]:
        if isinstance(optimizer, optax.GradientTransformation):
            return optax.with_extra_args_support(optimizer), {}
        args, kwargs = stages.as_arguments(unflatten(outputs))
        result = optimizer(*args, **kwargs)
        pair = (result, {}) if isinstance(result, optax.GradientTransformation) else result
        return optax.with_extra_args_support(pair[0]), pair[1]

    with jax.numpy_dtype_promotion("standard"):
        wide_dtypes = {name: jnp.promote_types(specs[name].dtype, dtypes[name]) for name in trained}
    parameters = {name: state.variables[name].astype(wide_dtypes[name]) for name in trained}
    accumulated = {name: value.astype(wide_dtypes[name]) for name, value in accumulated.items()}
    optimizer_state = state.optimizer_state
    if optimizer_state is None:
        optimizer_state = transformation(all_outputs[0])[0].init(parameters)
    update, extra = transformation(all_outputs[-1])
    with jax.numpy_dtype_promotion("standard"):
        changes, optimizer_state = update.update(accumulated, optimizer_state, parameters, **extra)
        parameters = optax.apply_updates(parameters, changes)
    parameters = {name: value.astype(specs[name].dtype) for name, value in parameters.items()}
    return (
        dataclasses.replace(
            running,
            variables={**running.variables, **parameters},
            optimizer_state=optimizer_state,
            update_count=int(state.update_count) + 1,
        ),
        step_outputs,
    )
