"""What the stages of a pipeline take: their programs, and transfers between them, timed one at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from ipu_pipeline.engine.devices.compiler_options import Options
from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.execution.compiling import update_arguments
from ipu_pipeline.engine.execution.plans import Plan
from ipu_pipeline.engine.execution.program_times import ProgramTime, TimedProgram, time_copy, time_programs
from ipu_pipeline.engine.execution.weight_updates import WeightUpdate
from ipu_pipeline.engine.programs.bindings import Binding, BindingKind
from ipu_pipeline.engine.programs.chunks import ChunkForm
from ipu_pipeline.engine.programs.stage_programs import StageProgram, StagePrograms, Value, ValueKind
from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.engine.schedules.costs import Costs, Edge
from ipu_pipeline.engine.tracing.keys import key_aval
from ipu_pipeline.engine.tracing.traced import TracedPipeline
from ipu_pipeline.engine.updates.accumulators import variable_of

__all__ = [
    "CALLBACKS",
    "Measured",
    "StageTimes",
    "divide_last",
    "join_times",
    "make_measured",
    "program_of",
    "time_stages",
    "time_transfers",
    "time_updates",
    "why_not_timed",
]

CALLBACKS = "functions that print or call back into Python would notice"
_NOTHING = ProgramTime(0.0, 1.0, 0)  # of what is no program
_LIKE_VARIABLES = (BindingKind.VARIABLE, BindingKind.ACCUMULATOR)

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


def program_of(own: StagePrograms, kind: ActionKind) -> StageProgram:
    """A stage's program for a kind of action, which it has."""
    if kind is ActionKind.FORWARD:
        return own.forward
    found = own.weights if kind is ActionKind.WEIGHT_GRADIENTS else own.backward
    assert found is not None
    return found


def time_stages(
    placement: StatePlacement,
    programs: Sequence[StagePrograms],
    chunked: Sequence[StagePrograms],
    plan: Plan,
    chunk: ChunkForm,
    dtypes: Mapping[str, Any],
) -> StageTimes:
    """Times the programs of a plan, each alone, on zeros.

    Args:
      placement: where the stages live; of several replicas, the first one's.
      programs: the pipeline's programs for one micro-batch.
      chunked: the programs of the plan, for the micro-batches of a chunk.
      plan: the programs, jitted.
      chunk: how many of a stage's micro-batches they handle.
      dtypes: dtype of each trained variable's accumulators.
    """
    timed = []
    for (kind, stage), template in plan.templates.items():
        group = template.group
        shapes = _argument_shapes(
            placement.traced, stage, programs[stage], program_of(chunked[stage], kind), dtypes, chunk.axes
        )

        def place(
            shape: jax.ShapeDtypeStruct, binding: Binding, group: DeviceGroup = group
        ) -> jax.ShapeDtypeStruct:
            name = variable_of(binding.key) if binding.kind in _LIKE_VARIABLES else None
            sharding = group.replicated if name is None else placement.sharding_in_program(name, group)
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

        structs = list(map(place, shapes, template.arguments))
        carried = {place: place for place in range(len(template.accumulators))}
        timed.append(TimedProgram(template.jitted, structs, carried, group.devices[0], template.options))
    return dict(zip(plan.templates, time_programs(timed), strict=True))


def _argument_shapes(
    traced: TracedPipeline,
    index: int,
    own: StagePrograms,
    program: StageProgram,
    dtypes: Mapping[str, Any],
    axes: tuple[int, ...],
) -> list[jax.ShapeDtypeStruct]:
    """Finds the shapes and dtypes of a program's arguments.

    Args:
      traced: the pipeline.
      index: the stage that the program belongs to.
      own: the stage's programs, for one micro-batch.
      program: one of these, or what `chunk_programs` made of it.
      dtypes: dtype of each trained variable's accumulators, by full name.
      axes: the leading axes that a chunk adds to a micro-batch's values, see `ChunkForm`.
    """
    stage = traced.stages[index]

    def of_micro_batch(aval: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*axes, *aval.shape), aval.dtype)

    def find(value: Value) -> jax.ShapeDtypeStruct:
        kind = value.kind
        if kind in (ValueKind.VARIABLE, ValueKind.ACCUMULATOR):
            spec = stage.variables[value.index]
            dtype = dtypes[spec.name] if kind is ValueKind.ACCUMULATOR else spec.dtype
            return jax.ShapeDtypeStruct(spec.shape, dtype)
        if kind is ValueKind.INPUT:
            source = stage.inputs[value.index]
            aval = traced.aval(source)
            return of_micro_batch(aval) if source.is_of_micro_batch else aval
        if kind is ValueKind.RESIDUAL:
            return of_micro_batch(own.residuals[value.index])
        if kind is ValueKind.COTANGENT:
            return of_micro_batch(stage.output_avals[value.index])
        if kind is ValueKind.KEY_NUMBER:
            return jax.ShapeDtypeStruct((), np.uint32)
        if kind is ValueKind.KEY:
            return jax.ShapeDtypeStruct((), key_aval().dtype)
        return jax.ShapeDtypeStruct((), np.float32 if kind is ValueKind.LOSS_SCALE else np.int32)

    return [find(value) for value in program.arguments]


def time_updates(
    weight_update: WeightUpdate, dtypes: Mapping[str, Any], options: Options
) -> dict[int, ProgramTime]:
    """Times the programs of a weight update, each alone, on zeros.

    Args:
      weight_update: the programs.
      dtypes: dtype of each trained variable's accumulators.
      options: XLA's options for them.

    Returns:
      What those of each stage's place take together, by stage; nothing if they call back into Python, or
      have a loop that may not end on zeros.
    """
    placement = weight_update.placement
    updates, traced = placement.updates, placement.traced
    if updates is None or updates.has_callbacks or any(own.loops_by_data for own in updates.updates):
        return {}
    accumulators = {
        name: jax.ShapeDtypeStruct(traced.variables[name].shape, dtype) for name, dtype in dtypes.items()
    }
    timed = []
    calls = update_arguments(accumulators, weight_update, traced.output_avals)
    for program, jitted, (group, structs) in zip(updates.updates, weight_update.jitted, calls, strict=True):
        carried = {
            place: program.results.index(value)
            for place, value in enumerate(program.arguments)
            if value in program.results
        }
        timed.append(TimedProgram(jitted, structs, carried, group.devices[0], options))
    found: dict[int, ProgramTime] = {}
    for program, own in zip(updates.updates, time_programs(timed), strict=True):
        before = [found[program.stage]] if program.stage in found else []
        found[program.stage] = join_times([*before, own])
    return found


def time_transfers(
    placement: StatePlacement, plan: Plan, chunk: ChunkForm, *, with_skips: bool
) -> dict[Edge, float]:
    """Times what goes from stage to stage, in seconds, each transfer alone.

    Args:
      placement: where the stages live; of several replicas, the first one's.
      plan: the programs.
      chunk: how many of a stage's micro-batches they handle.
      with_skips: whether transfers that skip stages count. Where the order of a step is asked, they do not:
        they are there before what goes through the stages, but for stages so short that their times are
        noise.
    """
    groups, traced = placement.groups, placement.traced
    last = len(groups) - 1
    found: dict[Edge, float] = {}
    for (kind, stage), template in plan.templates.items():
        goes_back = kind is not ActionKind.FORWARD or stage == last
        way = range(stage - 1, -1, -1) if goes_back else range(stage + 1, last + 1)
        for send in template.sends:
            reader = next((other for other in way if groups[other] is send.target), None)
            if reader is None or (abs(reader - stage) > 1 and not with_skips):
                continue
            avals = []
            for slot in send.sources:
                binding = plan.slot_values[slot]
                aval = traced.aval(binding.key if binding.kind is BindingKind.VALUE else binding.key[0])
                avals.append(jax.ShapeDtypeStruct((*chunk.axes, *aval.shape), aval.dtype))
            # Stages of one device stand for stages of others where layers are measured on two devices.
            away = (group for group in groups if group.devices != template.group.devices)
            is_away = send.target.devices != template.group.devices
            target = send.target if is_away else next(away, send.target)
            taken = time_copy(avals, template.group, target)
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

    Args:
      num_stages: the number of stages.
      times: see `time_stages`.
      transfers: see `time_transfers`.
      updates: see `time_updates`.
      chunk_size: the micro-batches of a chunk.
      host: how long the host takes to start a program.
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
    """Divides what the last stage's program takes: its forward, and its backward or the first half of it.

    Args:
      costs: what was measured.
      forward: the operations of the forward.
      backward: the operations of the backward, or of its first half.
      is_halved: whether the program has only the first half.
    """
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
