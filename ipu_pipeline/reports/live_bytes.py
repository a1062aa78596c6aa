"""What the executor holds of micro-batches in flight, measured from its buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipu_pipeline.engine.execution.executor import Executor
from ipu_pipeline.engine.execution.templates import Template
from ipu_pipeline.engine.schedules.actions import ActionKind

__all__ = ["LiveBytes"]


class LiveBytes:
    """An executor's observer that finds the peak of each stage's bytes between forwards and backwards.

    Attributes:
      peaks: per stage, in bytes; 0 for one without a backward of its own.
    """

    def __init__(self, executor: Executor) -> None:
        """Begins to observe.

        Args:
          executor: whose buffers are looked at after each dispatch.
        """
        templates = executor.plan.templates
        num_stages = 1 + max(stage for _kind, stage in templates)
        self.peaks = [0] * num_stages
        self._running: list[set[int]] = [set() for _ in range(num_stages)]  # chunks in flight
        # A cotangent comes from the stage behind: it is sent, not held.
        sent = {
            slot
            for known in templates.values()
            for _row, _results, slots in known.transfers
            for slot in slots
        }
        self._held: dict[int, list[int]] = {}
        for (kind, stage), template in templates.items():
            if kind is ActionKind.BACKWARD:
                forward = {slot for _place, slot in templates[ActionKind.FORWARD, stage].loads}
                read = [slot for _place, slot in template.loads]
                self._held[stage] = [slot for slot in read if slot in forward or slot not in sent]
        executor.observer = self._observe

    def _observe(self, template: Template, chunk: int, values: Sequence[Sequence[Any] | None]) -> None:
        running = self._running[template.stage]
        if template.kind is ActionKind.FORWARD:
            running.add(chunk)
        else:
            running.remove(chunk)
        for stage, held in self._held.items():
            arrays = [_read(values, chunk, slot) for chunk in self._running[stage] for slot in held]
            unique = {id(array): array.nbytes for array in arrays if array is not None}
            self.peaks[stage] = max(self.peaks[stage], sum(unique.values()))


def _read(values: Sequence[Sequence[Any] | None], chunk: int, slot: int) -> Any:
    slots = values[chunk]
    return None if slots is None else slots[slot]
