"""Computes a step op by op in the order of the data, or calls its stage functions as plain Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.devices.feeds import shapes_of
from ipu_pipeline.engine.devices.placement import put
from ipu_pipeline.engine.execution.contract import Request, Runner
from ipu_pipeline.engine.execution.runner import PendingPlan, PlanRunner, ReadyPlan, check_alike
from ipu_pipeline.engine.plan.lowering import assigned
from ipu_pipeline.engine.plan.op_by_op import OpByOp, Visit
from ipu_pipeline.engine.schedules.timetables import Action
from ipu_pipeline.engine.state import PipelineState, Progress
from ipu_pipeline.engine.tracing import frames
from ipu_pipeline.engine.tracing.faults import describe_arguments
from ipu_pipeline.engine.tracing.frames import Surroundings
from ipu_pipeline.engine.tracing.stage_markers import as_int32, micro_batch_key
from ipu_pipeline.engine.tracing.stage_meshes import in_mesh
from ipu_pipeline.engine.tracing.stages import StageFunction, as_arguments, concatenate, name_places


def compute(
    runner: Runner[Any],
    state: PipelineState,
    request: Request,
    elements: Sequence[Any],
    reader: OpByOp,
    visit: Callable[[Visit], None] | None = None,
) -> Progress:
    """Computes a step op by op, with the instructions of a runner's plan, in the order of the data."""
    lead: PlanRunner = runner.make_single()
    number, maker, registers = lead.num_replicas, lead.maker, list[Any]()
    groups = [elements[first : first + number] for first in range(0, len(elements), number)]
    for place, group in enumerate(groups):
        check_alike(list(map(shapes_of, group)), place)
    runners: list[PlanRunner] = [runner.of_shapes[shapes_of(group[0])].make_single() for group in groups]
    order = [Action(*key, place) for place in range(request.every) for key in maker.code]
    plan = maker.make(order, request.every, makers=[shape_runner.maker for shape_runner in runners])
    blocks = reader.link(plan, lead.linker.link(plan))
    ready = ReadyPlan(plan, blocks, lead.linker.version, is_watched=False)
    changing = [
        {name: maker.registers.find(assigned(maker.layout, name, replica)) for name in maker.assigned_names}
        for replica in range(number)
    ]

    def read_variables(replica: int) -> dict[str, Any]:
        now = {name: registers[register] for name, register in changing[replica].items()}
        return state.variables | {name: v for name, v in now.items() if v is not None}

    def feed() -> Iterator[Sequence[Any]]:
        count = jnp.int32(as_int32(state.execution_count))
        keys = lead.fold(state.key)
        for place, (shape_runner, group) in enumerate(zip(runners, groups, strict=True)):
            some = [element.leaves if element else () for element in group]
            placed = shape_runner.dealer.place_alone(list(map(shape_runner.place_element, some)))
            for replica, (leaves, values) in enumerate(zip(some, placed, strict=True)):
                if visit is not None:
                    key = micro_batch_key(keys[replica], count, jnp.int32(place))
                    visit(Visit(place * number + replica, replica, leaves, key, read_variables(replica)))
                yield values

    fed = feed()
    cursor = lead.begin(ready, state, request, [lambda: next(fed)] * number, registers)
    lead.run_kept(ready, registers, cursor)
    return lead.run(state, PendingPlan(request, request.every, ready, registers))


# Stage functions as plain Python, on arrays, so that a debugger can stop in them. What they hand out
# (metrics, assignments) is dropped: a step takes it from the programs.


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
        call_values = (list(visit.leaves), dict(visit.variables), visit.key, self._inputs)
        flat, tree = jax.tree.flatten(call_values)
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
