"""Makes the problem of the best order from a scenario. No JAX."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.engine.schedules.order_problems import OrderProblem
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
      ValueError: the scenario has parallel stages, values that skip stages, execution phases or no
        training; or there is a limit and the memory is not known, or the limit is too low.
    """
    costs, memory, number = scenario.costs, scenario.memory, scenario.costs.num_stages
    edges = [*costs.transfers, *costs.num_sent_bytes]
    for is_wrong, rule in (
        (not scenario.training, "training=True"),
        (len(set(scenario.levels)) < number, "a level of its own for each stage"),
        (any(abs(source - target) > 1 for source, target in edges), "no values that skip stages"),
        (scenario.host_memory is not None, "no execution phases"),
        (memory is None and num_bytes_per_ipu is not None, "memory, for a limit of bytes"),
    ):
        if is_wrong:
            raise ValueError(
                f"PipelineSchedule.searched: a search needs a scenario with {rule}; got {scenario!r}. Or "
                "take a schedule with a name."
            )
    size = scenario.chunk_size

    def of_kind(kind: ActionKind) -> tuple[float, ...]:
        return tuple(costs.of_actions[kind][stage] * size for stage in range(number))

    def of_edges(turn: Callable[[Edge], Edge]) -> tuple[float, ...]:
        return tuple(scenario.transfer(0, turn(edge)) for edge in itertools.pairwise(range(number)))

    held: tuple[int, ...] = ()
    between, constant = held, held
    if memory is not None:
        held = tuple(size * own for own in memory.num_held_bytes)
        between = tuple(size * own for own in memory.num_between_bytes)
        constant = memory.num_constant_bytes
    return OrderProblem(
        scenario.num_micro_batches // size,
        of_kind(ActionKind.FORWARD),
        of_kind(ActionKind.INPUT_GRADIENTS),
        of_kind(ActionKind.WEIGHT_GRADIENTS),
        scenario.device_mapping,
        of_edges(lambda edge: edge),
        of_edges(lambda edge: (edge[1], edge[0])),
        tuple(scenario.update(stage) for stage in range(number)),
        is_fused=scenario.is_fused,
        num_held_bytes=held,
        num_between_bytes=between,
        num_constant_bytes=constant,
        num_bytes_per_ipu=num_bytes_per_ipu,
    )
