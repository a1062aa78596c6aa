"""How the actions of one program share its time.

A program may hold several actions: the last stage's forward and backward, the micro-batches of a chunk, or
all of a block on one device. XLA does not say where one ends and the next begins, so each gets the part of
the program's time that its estimated operations (`engine/jaxprs/costs`) are of the program's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ipu_pipeline.engine.inspect import Launch, LaunchKind, Runner
from ipu_pipeline.engine.jaxprs.costs import count_equations
from ipu_pipeline.reports.events import Event, EventKind

__all__ = ["Shares", "find_shares"]

_BACKWARD_PER_FORWARD = 2.0  # of a stage whose operations cannot be counted: two products for each one
_PER_TRAINED = 10.0  # operations of a weight update for each element, as of functions element by element


class _Part(NamedTuple):
    """An action, and what it takes in comparison with the others of its program."""

    kind: EventKind
    stage: int | None
    micro_batch: int | None
    step: int
    weight: float


@dataclass(frozen=True)
class Shares:
    """What the actions of a runner take.

    Attributes:
      ipus: of the stages.
      forward: operations of each stage's forward, for a micro-batch.
      backward: likewise of its backward; 0 where there is none.
      update: of a weight update, where one program does all.
      is_fused: whether the last stage's forward and backward are one program.
      num_serialized: of a block, micro-batches that a stage handles before the next one starts.
      is_loop: whether micro-batches are iterations, which are counted on.
      num_replicas: how many there are. Their micro-batches are numbered as the elements that they are.
    """

    ipus: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: float
    is_fused: bool
    num_serialized: int
    is_loop: bool
    num_replicas: int = 1

    @property
    def num_ipus(self) -> int:
        """How many IPUs a replica has, with those that have no stage."""
        return max(self.ipus) + 1

    def element(self, number: int, ipu: int) -> int:
        """The number of a replica's micro-batch among those of all replicas, by an IPU of it."""
        return number * self.num_replicas + ipu // self.num_ipus

    def divide(
        self, launch: Launch, ipu: int, pipeline: int, program: int, begin: float, end: float
    ) -> Iterator[Event]:
        """The events of a program's run.

        Args:
          launch: the program.
          ipu: where it ran.
          pipeline: the number of the pipeline.
          program: the number of the run.
          begin: of the run, in microseconds.
          end: of the run.
        """
        parts = self._parts(launch)
        total = math.fsum(part.weight for part in parts)
        reached = 0.0
        for part in parts:
            first = begin + (end - begin) * (reached / total)
            reached += part.weight
            yield Event(
                part.kind,
                first,
                begin + (end - begin) * min(1.0, reached / total),
                ipu,
                pipeline,
                part.stage,
                None if part.micro_batch is None else self.element(part.micro_batch, ipu),
                part.step,
                program=program,
                is_shared=len(parts) > 1,
            )

    def count(self, launch: Launch) -> int:
        """How many actions a program does."""
        return len(self._parts(launch))

    def _parts(self, launch: Launch) -> list[_Part]:
        numbers = range(launch.first, launch.first + launch.count)
        if launch.kind == LaunchKind.UPDATE:
            return [_Part(EventKind.UPDATE, None, None, launch.step, 1.0)]
        if launch.kind == LaunchKind.BLOCK:
            return list(self._block(launch))
        stage = launch.stage
        if launch.kind == LaunchKind.BACKWARD:
            return [_Part(EventKind.BACKWARD, stage, number, launch.step, 1.0) for number in numbers]
        return [part for number in numbers for part in self._forward(stage, number, launch.step)]

    def _forward(self, stage: int, number: int, step: int) -> Iterator[_Part]:
        """What a stage's forward program does for a micro-batch."""
        yield _Part(EventKind.FORWARD, stage, number, step, self.forward[stage])
        if self.is_fused and stage == len(self.ipus) - 1:
            yield _Part(EventKind.BACKWARD, stage, number, step, self.backward[stage])

    def _block(self, launch: Launch) -> Iterator[_Part]:
        stages = range(len(self.ipus))
        for begin in range(0, launch.count, self.num_serialized):
            places = range(begin, min(begin + self.num_serialized, launch.count))
            named = [self._name(launch, place) for place in places]
            for stage in stages:
                for number, step in named:
                    yield from self._forward(stage, number, step)
            for stage in reversed(stages):
                if self.backward[stage] and not (self.is_fused and stage == stages[-1]):
                    for number, step in named:
                        yield _Part(EventKind.BACKWARD, stage, number, step, self.backward[stage])
            if launch.updates and (launch.accumulated + places[-1] + 1) % launch.every == 0:
                yield _Part(EventKind.UPDATE, None, None, named[-1][1], self.update)

    def _name(self, launch: Launch, place: int) -> tuple[int, int]:
        """The number of a block's micro-batch, and its step."""
        if self.is_loop:
            return launch.first + place, launch.step
        step, number = divmod(launch.accumulated + place, launch.every)
        return number, launch.step + step


def find_shares(runner: Runner[Any], num_serialized: int) -> Shares:
    """What the actions of a runner take, by the operations of its programs."""
    residence, programs = runner.residence, runner.programs
    traced, updates = residence.traced, residence.updates
    forward = [max(own.forward.num_operations, 1.0) for own in programs]
    backward = [0.0 if own.backward is None else max(own.backward.num_operations, 1.0) for own in programs]
    # Where there is a loss, the last stage's forward goes on to its gradients.
    is_fused = updates is not None and programs[-1].backward is None
    if is_fused:
        both = programs[-1].forward
        alone = count_equations(traced.stages[-1].flat.equations)
        if both.uncounted or alone >= both.num_operations:
            forward[-1], backward[-1] = 1.0, _BACKWARD_PER_FORWARD
        else:
            forward[-1], backward[-1] = max(alone, 1.0), max(both.num_operations - alone, 1.0)
    trained = {name for _stage, name in residence.accumulator_plan.keys} if updates is not None else set()
    update = sum(_PER_TRAINED * math.prod(traced.variables[name].shape) for name in trained)
    return Shares(
        tuple(row.ipu for row in residence.rows),
        tuple(forward),
        tuple(backward),
        max(update, 1.0),
        is_fused,
        num_serialized,
        runner.iterated is not None,
        residence.rows[0].num_replicas,
    )
