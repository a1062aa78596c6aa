"""Computes a step op by op, as a runner by plans runs it, but in the order of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from ipu_pipeline.engine.devices.feeds import shapes_of
from ipu_pipeline.engine.execution.contract import Request, Runner
from ipu_pipeline.engine.execution.runner import PendingPlan, PlanRunner, Ready, check_alike
from ipu_pipeline.engine.plan.lowering import assigned
from ipu_pipeline.engine.plan.readers.op_by_op import OpByOp, Visit
from ipu_pipeline.engine.schedules.actions import Action
from ipu_pipeline.engine.state import Progress, RunState
from ipu_pipeline.engine.tracing.keys import as_int32, micro_batch_key

__all__ = ["compute"]


def compute(
    runner: Runner[Any],
    state: RunState,
    request: Request,
    elements: Sequence[Any],
    reader: OpByOp,
    visit: Callable[[Visit], None] | None = None,
) -> Progress:
    """Computes a step."""
    lead: PlanRunner = runner.make_single()
    number, maker, registers = lead.num_replicas, lead.maker, list[Any]()
    groups = [elements[first : first + number] for first in range(0, len(elements), number)]
    for place, group in enumerate(groups):
        check_alike(list(map(shapes_of, group)), place)
    runners: list[PlanRunner] = [runner.of_shapes[shapes_of(own[0])].make_single() for own in groups]
    order = [Action(*key, place) for place in range(request.every) for key in maker.code]
    plan = maker.make(order, request.every, makers=[own.maker for own in runners])
    ready = Ready(plan, reader.link(plan, lead.linker.link(plan)), lead.linker.version, is_watched=False)
    changing = [
        {name: maker.registers.find(assigned(maker.layout, name, replica)) for name in maker.assigned_names}
        for replica in range(number)
    ]

    def read_variables(replica: int) -> dict[str, Any]:
        now = {name: registers[register] for name, register in changing[replica].items()}
        return state.pipeline.variables | {name: v for name, v in now.items() if v is not None}

    def feed() -> Iterator[Sequence[Any]]:
        count = jnp.int32(as_int32(state.pipeline.execution_count))
        keys = lead.fold(state.pipeline.key)
        for place, (own, group) in enumerate(zip(runners, groups, strict=True)):
            some = [one.leaves if one else () for one in group]
            placed = own.dealer.place_alone(list(map(own.place_element, some)))
            for replica, (leaves, values) in enumerate(zip(some, placed, strict=True)):
                if visit is not None:
                    key = micro_batch_key(keys[replica], count, jnp.int32(place))
                    visit(Visit(place * number + replica, replica, leaves, key, read_variables(replica)))
                yield values

    fed = feed()
    cursor = lead.begin(ready, state, request, [lambda: next(fed)] * number, registers)
    lead.run_kept(ready, registers, cursor)
    return lead.run(state, PendingPlan(request, request.every, ready, registers))
