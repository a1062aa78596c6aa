"""What the executor holds of micro-batches in flight, measured from its buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipu_pipeline.engine.execution.executor import Executor
from ipu_pipeline.engine.execution.templates import Part, Template
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
        parts: dict[tuple[ActionKind, int], Part] = {}
        for template in executor.plan.templates.values():
            for part in template.parts:
                parts.setdefault((part.kind, part.stage), part)
        num_stages = 1 + max(stage for _kind, stage in parts)
        self.peaks = [0] * num_stages
        self._running: list[set[int]] = [set() for _ in range(num_stages)]  # chunks in flight
        # A cotangent comes from the stage behind: it is sent, not held.
        sent = {
            slot for part in parts.values() for _row, _results, slots in part.transfers for slot in slots
        }
        self._held: dict[int, list[int]] = {}
        for (kind, stage), part in parts.items():
            if kind is ActionKind.BACKWARD:
                forward = {slot for _place, slot in parts[ActionKind.FORWARD, stage].loads}
                read = [slot for _place, slot in part.loads]
                self._held[stage] = [slot for slot in read if slot in forward or slot not in sent]
        executor.observer = self._observe

    def _observe(
        self, template: Template, chunks: tuple[int, ...], values: Sequence[Sequence[Any] | None]
    ) -> None:
        for part, chunk in zip(template.parts, chunks, strict=True):
            if part.kind is ActionKind.FORWARD:
                self._running[part.stage].add(chunk)
            else:
                self._running[part.stage].remove(chunk)
        for stage, held in self._held.items():
            arrays = [_read(values, chunk, slot) for chunk in self._running[stage] for slot in held]
            unique = {id(array): array.nbytes for array in arrays if array is not None}
            self.peaks[stage] = max(self.peaks[stage], sum(unique.values()))


def _read(values: Sequence[Sequence[Any] | None], chunk: int, slot: int) -> Any:
    slots = values[chunk]
    return None if slots is None else slots[slot]
