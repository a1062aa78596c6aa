"""Makes the problem of the best order from a scenario. No JAX."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.engine.schedules.order_problems import OrderProblem

if TYPE_CHECKING:
    from ipu_pipeline.engine.schedules.scenarios import Edge, Scenario

__all__ = ["make_problem"]



def make_problem(scenario: Scenario, num_bytes_per_ipu: int | None = None) -> OrderProblem:
    """Makes the problem of a scenario; its schedule does not matter.

    A micro-batch of the problem is a chunk. The time of the host, cores that IPUs share, and what replicas
    do together are not part of it: each comes on top of a step time that is found.

    Args:
      scenario: the costs, and with a limit the memory.
      num_bytes_per_ipu: the most that an IPU may hold; None: anything.

    Raises:
      ValueError: the scenario has parallel stages, execution phases, no training, or values that skip
        stages and may arrive later than what goes through these; or there is a limit and the memory is not
        known, or the limit is too low.
    """
    costs, memory, number = scenario.costs, scenario.memory, scenario.costs.num_stages
    edges = {*costs.transfers, *costs.num_sent_bytes}
    late = [edge for edge in sorted(edges) if abs(edge[0] - edge[1]) > 1 and _may_be_late(scenario, edge)]
    for is_wrong, rule in (
        (not scenario.training, "training=True"),
        (len(set(scenario.levels)) < number, "a level of its own for each stage"),
        (bool(late), f"values that skip stages faster than what goes through these, unlike {late}"),
        (scenario.host_memory is not None, "no execution phases"),
        (memory is None and num_bytes_per_ipu is not None, "memory, for a limit of bytes"),
    ):
        if is_wrong:
            raise ValueError(
                f"PipelineSchedule.searched: a search needs a scenario with {rule}; got {scenario!r}. Or "
                "take a schedule with a name."
            )
    size = scenario.chunk_size
    held: tuple[int, ...] = ()
    between, constant = held, held
    if memory is not None:
        held = tuple(size * own for own in memory.num_held_bytes)
        between = tuple(size * own for own in memory.num_between_bytes)
        constant = memory.num_constant_bytes

    def of_kind(kind: ActionKind) -> tuple[float, ...]:
        return tuple(size * own for own in costs.of_actions[kind])

    pairs = list(itertools.pairwise(range(number)))
    problem = OrderProblem(
        scenario.num_micro_batches // size,
        of_kind(ActionKind.FORWARD),
        of_kind(ActionKind.INPUT_GRADIENTS),
        of_kind(ActionKind.WEIGHT_GRADIENTS),
        scenario.device_mapping,
        tuple(scenario.transfer(0, edge) for edge in pairs),
        tuple(scenario.transfer(0, (after, before)) for before, after in pairs),
        tuple(scenario.update(stage) for stage in range(number)),
        is_fused=scenario.is_fused,
        num_held_bytes=held,
        num_between_bytes=between,
        num_constant_bytes=constant,
    )
    if num_bytes_per_ipu is None:
        return problem
    for ipu, needed in enumerate(problem.num_least_bytes):
        if needed > num_bytes_per_ipu:
            raise ValueError(
                f"PipelineSchedule.searched: bytes_per_ipu must be enough for one micro-batch; IPU {ipu} "
                f"needs {needed:,} bytes ({problem.num_constant_bytes[ipu]:,} of them all the time), and "
                f"the limit is {num_bytes_per_ipu:,}. Raise it, or recompute or offload activations."
            )
    return dataclasses.replace(problem, num_bytes_per_ipu=num_bytes_per_ipu)


def _may_be_late(scenario: Scenario, edge: Edge) -> bool:
    """Whether what skips stages may arrive after what goes through them.

    It cannot if its link is free whenever the program that sends has run, and it takes no longer than the
    programs and transfers on the other way.
    """
    source, target = edge
    turn = 1 if target > source else -1
    kind = ActionKind.FORWARD if turn > 0 else ActionKind.INPUT_GRADIENTS
    times = scenario.costs.of_actions[kind]
    way = range(source, target, turn)
    through = sum(scenario.transfer(0, (stage, stage + turn)) for stage in way)
    through += scenario.chunk_size * sum(times[stage] for stage in way[1:])
    own = times[source]
    if turn < 0 and scenario.is_fused and source == scenario.costs.num_stages - 1:
        own += scenario.costs.forward[source]
    return scenario.transfer(0, edge) > min(scenario.chunk_size * own, through)
