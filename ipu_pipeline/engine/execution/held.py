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
        # by stage, the chunks in flight, each with the slots that are held for its backward
        self._running: list[dict[int, set[int]]] = [{} for _ in range(num_stages)]
        # A cotangent comes from the stage behind, so it is sent, not held, until the first half is done.
        sent = {slot for known in templates.values() for send in known.sends for slot in send.targets}
        self._read: list[dict[ActionKind, set[int]]] = [{} for _ in range(num_stages)]
        for (kind, stage), template in templates.items():
            self._read[stage][kind] = {slot for _place, slot in template.loads}
        self._held: list[set[int]] = []
        for read in self._read:
            forward = read.get(ActionKind.FORWARD, set())
            later = set[int]().union(*(read[kind] for kind in read if kind is not ActionKind.FORWARD))
            self._held.append({slot for slot in later if slot in forward or slot not in sent})

    def look(self, template: Template, chunk: int, slots: Mapping[int, Sequence[Any]]) -> None:
        """Measures after a program and what follows it."""
        own, kinds = self._running[template.stage], self._read[template.stage]
        if template.kind is ActionKind.FORWARD:
            own[chunk] = self._held[template.stage]
        elif template.kind is ActionKind.INPUT_GRADIENTS and ActionKind.WEIGHT_GRADIENTS in kinds:
            own[chunk] = kinds[ActionKind.WEIGHT_GRADIENTS]
        else:
            del own[chunk]
        for stage, running in enumerate(self._running):
            arrays = [slots[number][slot] for number, places in running.items() for slot in places]
            here = (array for array in arrays if array is not None and array.addressable_shards)
            unique = {id(array): array.nbytes for array in here}
            self.peaks[stage] = max(self.peaks[stage], sum(unique.values()))
