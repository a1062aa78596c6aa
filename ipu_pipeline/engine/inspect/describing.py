"""Summarizes a pipeline or loop before it is compiled. It starts no backend.

Compute is counted from the jaxprs (`jaxprs.costs`), memory by `planning.memory`. The bubble is simulated,
as if every action took as long as its operations say on a device of its own, and counted in time-steps of
the schedule. With N stages, each on its own IPU, and G micro-batches, the latter is (N-1)/(G+N-1) for
Grouped and Interleaved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from ipu_pipeline.engine.inspect.crossings import find_crossings
from ipu_pipeline.engine.inspect.summary import Bubble, SharedVariables, StageSummary
from ipu_pipeline.engine.planning.memory_plans import StageMemory
from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.schedules.checking import Timetable
from ipu_pipeline.engine.schedules.scenarios import Costs, Scenario
from ipu_pipeline.engine.schedules.simulator import predict_step_time
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.tracing.traced import TracedPipeline
from ipu_pipeline.ground.shapes import num_bytes

__all__ = ["estimate_bubble", "find_shared", "summarize_stages"]

_MAX_SIMULATED = 2**15  # actions; of more micro-batches those in the middle take as long as each other


def summarize_stages(
    traced: TracedPipeline,
    programs: Sequence[StagePrograms],
    memory: Sequence[StageMemory],
    trained: Collection[str],
    left_out: Collection[str] = (),
    num_carried: int = 0,
) -> tuple[StageSummary, ...]:
    """What is known of each stage.

    Args:
      traced: the pipeline, or the body of a loop.
      programs: the programs of its stages.
      memory: what the stages hold.
      trained: full names of the variables that are trained.
      left_out: full names of variables that are nobody's.
      num_carried: how many leaves at the beginning of a micro-batch are carried by a loop.
    """
    ipus = [stage.ipu for stage in memory]
    crossings = find_crossings(traced, programs, ipus, num_carried)
    found = []
    for index, (stage, own, held) in enumerate(zip(traced.stages, programs, memory, strict=True)):
        variables = tuple(
            spec
            for spec in stage.variables
            if traced.owners[spec.name] == index and spec.name not in left_out
        )
        sent = [crossing for crossing in crossings if crossing.stage == index]
        both = [own.forward, *([] if own.backward is None else [own.backward])]
        found.append(
            StageSummary(
                index=index,
                ipu=held.ipu,
                level=traced.levels[index],
                place=stage.place,
                variables=variables,
                num_trained=sum(math.prod(spec.shape) for spec in variables if spec.name in trained),
                num_sent_bytes=num_bytes(one.aval for one in sent if not one.is_backward),
                num_returned_bytes=num_bytes(one.aval for one in sent if one.is_backward),
                num_held_bytes=held.num_held_bytes,
                in_flight=held.in_flight,
                num_forward_flop=own.forward.num_operations,
                num_backward_flop=0.0 if own.backward is None else own.backward.num_operations,
                uncounted=frozenset[str]().union(*(program.uncounted for program in both)),
            )
        )
    return tuple(found)


def find_shared(traced: TracedPipeline, left_out: Collection[str] = ()) -> tuple[SharedVariables, ...]:
    """The variables that several stages have, by these stages.

    Args:
      traced: the pipeline.
      left_out: full names of variables that are nobody's.
    """
    having: dict[str, list[int]] = {}
    for index, stage in enumerate(traced.stages):
        for spec in stage.variables:
            having.setdefault(spec.name, []).append(index)
    groups: dict[tuple[int, ...], list[VariableSpec]] = {}
    for name, stages in having.items():
        if len(stages) > 1 and name not in left_out:
            groups.setdefault(tuple(stages), []).append(traced.variables[name])
    return tuple(SharedVariables(stages, tuple(specs)) for stages, specs in groups.items())


def estimate_bubble(
    stages: Sequence[StageSummary],
    make_timetable: Callable[[int], Timetable],
    count: int,
    repeats: bool,
) -> Bubble | None:
    """For how much of a step IPUs wait.

    Args:
      stages: what is known of them.
      make_timetable: the schedule of so many micro-batches, or chunks of them.
      count: how many of them a step has.
      repeats: whether in a long step the schedule does the same again and again, so that a shorter one says
        how long it takes.

    Returns:
      What was estimated; None if all stages are on one IPU.
    """
    ipus = sorted({stage.ipu for stage in stages})
    if len(ipus) == 1:
        return None
    timetable = make_timetable(count)
    num_slots = len(ipus) * timetable.num_time_steps
    of_ipu = {ipu: sum(stage.num_flop for stage in stages if stage.ipu == ipu) for ipu in ipus}
    total = sum(of_ipu.values())
    length = _estimate_length(stages, make_timetable, count, repeats) if total else None
    longest = max(ipus, key=lambda ipu: of_ipu[ipu])
    return Bubble(
        share=None if not length else max(0.0, 1 - count * total / (len(ipus) * length)),
        lock_step_share=1 - len(timetable.order) / num_slots,
        longest_ipu=longest,
        longest_share=of_ipu[longest] / total if total else None,
    )


def _estimate_length(
    stages: Sequence[StageSummary], make_timetable: Callable[[int], Timetable], count: int, repeats: bool
) -> float | None:
    """How long a step takes, in operations; None if it is too long to be simulated."""

    def simulated(number: int) -> float:
        return predict_step_time(
            Scenario(costs, make_timetable(number), number, ipus, levels, training=any(backward))
        )

    backward = [stage.num_backward_flop for stage in stages]
    costs = Costs.of(len(stages), forward=[stage.num_forward_flop for stage in stages], backward=backward)
    ipus, levels = tuple(stage.ipu for stage in stages), tuple(stage.level for stage in stages)
    enough = max(4 * len(stages), _MAX_SIMULATED // (2 * len(stages)))
    if count <= enough:
        return simulated(count)
    if not repeats:
        return None
    half = enough // 2
    each = (simulated(enough) - simulated(half)) / (enough - half)
    return simulated(enough) + (count - enough) * each
