"""Measures what stages hold of micro-batches in flight, from the buffers of a replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ipu_pipeline.engine.execution.columns import Column
from ipu_pipeline.engine.execution.templates import Template
from ipu_pipeline.engine.schedules.actions import ActionKind

__all__ = ["Held"]


class Held:
    """Finds the most that each stage of a replica holds between forwards and backwards.

    Attributes:
      peaks: per stage, in bytes.
    """

    def __init__(self, column: Column) -> None:
        """Begins before anything has run."""
        templates = column.plan.templates
        num_stages = 1 + max(stage for _kind, stage in templates)
        self.peaks = [0] * num_stages
        self._running: list[set[int]] = [set() for _ in range(num_stages)]  # chunks in flight
        # A cotangent comes from the stage behind, so it is sent, not held.
        sent = {slot for known in templates.values() for send in known.sends for slot in send.targets}
        self._held: dict[int, list[int]] = {}
        for (kind, stage), template in templates.items():
            if kind is ActionKind.BACKWARD:
                forward = {slot for _place, slot in templates[ActionKind.FORWARD, stage].loads}
                read = [slot for _place, slot in template.loads]
                self._held[stage] = [slot for slot in read if slot in forward or slot not in sent]

    def look(self, template: Template, chunk: int, slots: Mapping[int, Sequence[Any]]) -> None:
        """Measures after a program and what follows it."""
        own = self._running[template.stage]
        if template.kind is ActionKind.FORWARD:
            own.add(chunk)
        else:
            own.remove(chunk)
        for stage, places in self._held.items():
            arrays = [slots[number][slot] for number in self._running[stage] for slot in places]
            here = (array for array in arrays if array is not None and array.addressable_shards)
            unique = {id(array): array.nbytes for array in here}
            self.peaks[stage] = max(self.peaks[stage], sum(unique.values()))
