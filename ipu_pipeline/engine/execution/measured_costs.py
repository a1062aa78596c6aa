"""What the stages of a pipeline take: their programs, and transfers between them, timed one at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.execution.program_times import ProgramTime, TimedProgram, time_copy, time_programs
from ipu_pipeline.engine.plan.plan import ALL, Op, Plan, Value
from ipu_pipeline.engine.programs.bindings import Binding, BindingKind
from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.engine.schedules.costs import Costs, Edge
from ipu_pipeline.engine.updates.cutting import Updates

__all__ = [
    "CALLBACKS",
    "Measured",
    "StageTimes",
    "divide_last",
    "join_times",
    "make_measured",
    "time_stages",
    "time_transfers",
    "time_updates",
    "why_not_timed",
]

CALLBACKS = "functions that print or call back into Python would notice"
_NOTHING = ProgramTime(0.0, 1.0, 0)  # of what is no program

StageTimes: TypeAlias = "dict[tuple[ActionKind, int], ProgramTime]"  # by kind and stage


def why_not_timed(programs: Sequence[StagePrograms]) -> str:
    """Why stages cannot be run on zeros to time them, in words; empty if they can."""
    everything = [program for own in programs for program in (own.forward, *own.backwards)]
    if any(program.reaches_python for program in everything):
        return CALLBACKS
    endless = next((program.name for program in everything if program.loops_by_data), None)
    if endless is not None:
        return (
            "a loop that ends when its data says so may not end on them, and "
            f"{endless} has one (jax.lax.while_loop)"
        )
    return ""


def time_stages(plan: Plan, structs: Mapping[Value, Any]) -> StageTimes:
    """Times the programs of the first replica's stages, each alone, on zeros; `structs`: of all values."""
    found = {
        (one.program.kind, one.program.stage): _timed(one, structs)
        for one in _runs(plan)
        if one.program.kind is not None and one.replica in (0, ALL)
    }
    return dict(zip(found, time_programs(list(found.values())), strict=True))


def time_updates(
    plan: Plan, updates: Updates | None, structs: Mapping[Value, Any]
) -> dict[int, ProgramTime]:
    """Times the programs of a weight update, each alone, on zeros.

    Returns:
      What those of each stage's place take together, by stage; nothing if they call back into Python, or
      have a loop that may not end on zeros.
    """
    if updates is None or updates.has_callbacks or any(own.loops_by_data for own in updates.updates):
        return {}
    timed = [one for one in _runs(plan) if one.program.kind is None and one.program.binds]
    found: dict[int, ProgramTime] = {}
    times = time_programs([_timed(one, structs) for one in timed])
    for stage, own in zip((one.program.stage for one in timed), times, strict=True):
        found[stage] = join_times([found[stage], own] if stage in found else [own])
    return found


def _runs(plan: Plan) -> list[Any]:
    """The instructions that start programs, over values."""
    blocks = dict.fromkeys(numbered.block for numbered in plan.blocks)
    return [one for block in blocks for one in block.code if one.op is Op.RUN]


def _timed(one: Any, structs: Mapping[Value, Any]) -> TimedProgram:
    program, arguments = one.program, [structs[value] for value in one.reads]
    carried = {
        place: result
        for place, bind in enumerate(program.binds)
        for result, bound in enumerate(program.results)
        if _is_new(bind, bound)
    }
    return TimedProgram(program.jitted, arguments, carried, program.group.devices[0], program.options)


def _is_new(argument: Any, result: Any) -> bool:
    """Whether a result is what an argument becomes."""
    if isinstance(argument, Binding):
        return argument.kind is BindingKind.ACCUMULATOR and argument in result
    return bool(argument == result)


def time_transfers(
    plan: Plan, groups: Sequence[DeviceGroup], structs: Mapping[Value, Any], *, with_skips: bool
) -> dict[Edge, float]:
    """Times what goes from stage to stage, in seconds, each transfer alone."""
    last = len(groups) - 1
    found: dict[Edge, float] = {}
    blocks = [
        block for block in dict.fromkeys(own.block for own in plan.blocks) if isinstance(block.name, tuple)
    ]
    sends = [(block.name, one) for block in blocks for one in block.code if one.op is Op.SEND]
    for (kind, stage), one in sends:
        if one.replica != 0:
            continue
        goes_back = kind is not ActionKind.FORWARD or stage == last
        way = range(stage - 1, -1, -1) if goes_back else range(stage + 1, last + 1)
        reader = next((other for other in way if groups[other] is one.group), None)
        if reader is None or (abs(reader - stage) > 1 and not with_skips):
            continue
        # Stages of one device stand for stages of others where layers are measured on two devices.
        own = groups[stage]
        away = (group for group in groups if group.devices != own.devices)
        target = one.group if one.group.devices != own.devices else next(away, one.group)
        taken = time_copy([structs[value] for value in one.reads], own, target)
        found[stage, reader] = found.get((stage, reader), 0.0) + taken
    return found


class Measured(NamedTuple):
    """What was measured of a pipeline.

    Attributes:
      costs: what a micro-batch and an update take, in seconds.
      num_temporary_bytes: the most that a program of each stage takes besides arguments and results.
    """

    costs: Costs
    num_temporary_bytes: tuple[int, ...]


def make_measured(
    num_stages: int,
    times: StageTimes,
    transfers: Mapping[Edge, float],
    updates: Mapping[int, ProgramTime],
    chunk_size: int,
    host: float = 0.0,
) -> Measured:
    """Makes the costs of a micro-batch from the times of chunks.

    If a stage's backward is not split, half of it counts as weight gradients.
    """

    def of(kind: ActionKind) -> list[ProgramTime]:
        return [times.get((kind, stage), _NOTHING) for stage in range(num_stages)]

    forward, weights = of(ActionKind.FORWARD), of(ActionKind.WEIGHT_GRADIENTS)
    halves = zip(of(ActionKind.BACKWARD), of(ActionKind.INPUT_GRADIENTS), weights, strict=True)
    backward = [join_times(parts) for parts in halves]
    update = [updates.get(stage, _NOTHING) for stage in range(num_stages)]
    costs = Costs.of(
        num_stages,
        forward=[own.seconds / chunk_size for own in forward],
        backward=[own.seconds / chunk_size for own in backward],
        update=[own.seconds for own in update],
        weight_gradients=[
            (own.seconds + whole.seconds / 2) / chunk_size
            for own, whole in zip(weights, of(ActionKind.BACKWARD), strict=True)
        ],
        transfer={edge: taken / chunk_size for edge, taken in transfers.items()},
        host=host,
        forward_cores=[own.cores for own in forward],
        backward_cores=[own.cores for own in backward],
    )
    together = zip(forward, backward, update, strict=True)
    return Measured(costs, tuple(max(own.num_temporary_bytes for own in parts) for parts in together))


def divide_last(costs: Costs, forward: float, backward: float, *, is_halved: bool) -> Costs:
    """Divides what the last stage's program takes into its forward and its backward or first half."""
    both, weights = costs.forward[-1], costs.weight_gradients[-1]
    own = both * forward / (forward + backward)
    rest = both - own
    busy = rest * costs.forward_cores[-1] + weights * costs.backward_cores[-1]
    return dataclasses.replace(
        costs,
        forward=(*costs.forward[:-1], own),
        backward=(*costs.backward[:-1], rest + weights),
        backward_cores=(*costs.backward_cores[:-1], busy / (rest + weights) if rest + weights else 1.0),
        weight_gradients=(*costs.weight_gradients[:-1], weights if is_halved else rest / 2),
    )


def join_times(parts: Sequence[ProgramTime]) -> ProgramTime:
    """What programs take that run one after another."""
    seconds = sum(own.seconds for own in parts)
    busy = sum(own.seconds * own.cores for own in parts)
    return ProgramTime(
        seconds, busy / seconds if seconds else 1.0, max(own.num_temporary_bytes for own in parts)
    )
