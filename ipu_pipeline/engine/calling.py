"""Calls stage functions as plain Python, on arrays, so that a debugger can stop in them.

What stages ask for (variables, random keys, the number of the update) has values then, and what they hand
out (metrics, assignments) is dropped: a step takes it from the programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.devices.placing import put
from ipu_pipeline.engine.plan.readers.op_by_op import Visit
from ipu_pipeline.engine.tracing import frames
from ipu_pipeline.engine.tracing.faults import describe_arguments
from ipu_pipeline.engine.tracing.stage_meshes import in_mesh
from ipu_pipeline.engine.tracing.stages import StageFunction, as_arguments, concatenate, name_places
from ipu_pipeline.engine.tracing.surroundings import Surroundings

__all__ = ["StageCaller"]


class StageCaller:
    """Calls the stages of a pipeline for one micro-batch after another."""

    def __init__(
        self,
        functions: Sequence[Sequence[StageFunction]],
        loss: Callable[..., Any] | None,
        surroundings: Surroundings,
        element_tree: Any,
        inputs: Sequence[Any],
        update_count: int,
        group: DeviceGroup,
    ) -> None:
        """Calls nothing yet."""
        self._functions, self._loss, self._surroundings = functions, loss, surroundings
        self._element_tree, self._inputs = element_tree, inputs
        self._update_count, self._group = jnp.int32(update_count), group
        self._places = name_places(functions)

    def __call__(self, visit: Visit) -> None:
        """Calls all stages and the loss for a micro-batch."""
        with jax.disable_jit():
            self._surroundings.run(self._call, visit, self._surroundings.names.copy())

    def _call(self, visit: Visit, names: frames.ProgramNames) -> None:
        given = (list(visit.leaves), dict(visit.variables), visit.key, self._inputs)
        flat, tree = jax.tree.flatten(given)
        leaves, variables, key, inputs = jax.tree.unflatten(tree, put(flat, self._group))
        values = frames.Values(variables, key, self._update_count)
        element = jax.tree.unflatten(self._element_tree, leaves)
        args, kwargs = as_arguments(element)
        arguments = ((*inputs, *args), kwargs)
        for level, (parallel, places) in enumerate(zip(self._functions, self._places, strict=True)):
            results = []
            for function, place in zip(parallel, places, strict=True):
                frame = frames.Frame(
                    names,
                    self._loss is not None,
                    place,
                    is_stage=True,
                    is_traced_again=True,
                    values=values,
                )
                try:
                    with frames.frame(frame), in_mesh(self._group.replicated.mesh):
                        results.append(function(*arguments[0], **arguments[1]))
                        if self._loss is not None and level == len(self._functions) - 1:
                            args, kwargs = as_arguments(results[-1])
                            self._loss(*args, **kwargs)
                except Exception as error:
                    error.add_note(
                        f"This happened in {place}, called for micro-batch {visit.number}\n"
                        f"  on {describe_arguments(function, *arguments)}"
                    )
                    raise
            arguments = concatenate([as_arguments(result) for result in results], places)
