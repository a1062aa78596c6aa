"""Divides the time of a program among its actions.

A program may hold several actions: the last stage's forward and backward, the micro-batches of a chunk, or
all of a block on one device. XLA does not say where one ends and the next begins, so the program's time is
divided in proportion to the actions' estimated operations (`engine/jaxprs/costs`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ipu_pipeline.engine.inspect import Launch, LaunchKind, PipelineDetails
from ipu_pipeline.reports.events import Event, EventKind

__all__ = ["Shares"]

_PER_TRAINED = 10.0  # operations of a weight update per element, counted as elementwise functions


class _Part(NamedTuple):
    """An action, and its cost relative to the others of its program."""

    kind: EventKind
    stage: int | None
    micro_batch: int | None
    step: int
    weight: float


@dataclass(frozen=True)
class Shares:
    """The costs of the actions of a pipeline's programs.

    Attributes:
      facts: the pipeline.
    """

    facts: PipelineDetails

    @property
    def update(self) -> float:
        """The operations of a weight update, if one program does everything."""
        return max(_PER_TRAINED * self.facts.num_trained, 1.0)

    def divide(
        self, launch: Launch, ipu: int, pipeline: int, program: int, begin: float, end: float
    ) -> Iterator[Event]:
        """The events of a program's run."""
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
                None if part.micro_batch is None else self.facts.element(part.micro_batch, ipu),
                part.step,
                program=program,
                is_shared=len(parts) > 1,
            )

    def count(self, launch: Launch) -> int:
        """The number of actions of a program."""
        return len(self._parts(launch))

    def _parts(self, launch: Launch) -> list[_Part]:
        numbers = range(launch.first, launch.first + launch.count)
        if launch.kind == LaunchKind.UPDATE:
            return [_Part(EventKind.UPDATE, None, None, launch.step, 1.0)]
        if launch.kind == LaunchKind.BLOCK:
            return list(self._block(launch))
        stage = launch.stage
        if launch.kind == LaunchKind.FORWARD:
            return [part for number in numbers for part in self._forward(stage, number, launch.step)]
        return [_Part(EventKind(launch.kind), stage, number, launch.step, 1.0) for number in numbers]

    def _forward(self, stage: int, number: int, step: int) -> Iterator[_Part]:
        """The actions of a stage's forward program for a micro-batch."""
        own = self.facts.stages[stage]
        yield _Part(EventKind.FORWARD, stage, number, step, own.forward_operations)
        if own.is_fused and own.is_halved:
            first = own.backward_operations - own.weight_operations
            yield _Part(EventKind.INPUT_GRADIENTS, stage, number, step, first)
        elif own.is_fused:
            yield _Part(EventKind.BACKWARD, stage, number, step, own.backward_operations)

    def _block(self, launch: Launch) -> Iterator[_Part]:
        stages, size = self.facts.stages, self.facts.num_serialized
        for begin in range(0, launch.count, size):
            places = range(begin, min(begin + size, launch.count))
            named = [self._name(launch, place) for place in places]
            for stage in stages:
                for number, step in named:
                    yield from self._forward(stage.index, number, step)
            for stage in reversed(stages):
                weight = 0.0 if stage.is_fused else stage.backward_operations
                if weight:
                    for number, step in named:
                        yield _Part(EventKind.BACKWARD, stage.index, number, step, weight)
            if launch.updates and (launch.accumulated + places[-1] + 1) % launch.every == 0:
                yield _Part(EventKind.UPDATE, None, None, named[-1][1], self.update)

    def _name(self, launch: Launch, place: int) -> tuple[int, int]:
        """The number of a block's micro-batch, and its step."""
        if self.facts.kind == "loop":
            return launch.first + place, launch.step
        step, number = divmod(launch.accumulated + place, launch.every)
        return number, launch.step + step
