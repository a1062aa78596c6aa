"""Measures what stages hold of micro-batches in flight, from their buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ipu_pipeline.engine.execution.columns import Column
from ipu_pipeline.engine.execution.contract import Runner
from ipu_pipeline.engine.execution.templates import Template
from ipu_pipeline.engine.programs.bindings import BindingKind
from ipu_pipeline.engine.schedules.actions import ActionKind

__all__ = ["Held", "LiveBytes"]


class Held:
    """Finds the most that each stage of a replica holds between forwards and backwards.

    Attributes:
      peaks: per stage, in bytes.
    """

    def __init__(self, columns: Callable[[], Iterable[Column]]) -> None:
        """Begins before anything has run. `columns` returns what runs the replica, for all shapes."""
        self._columns = columns
        num_stages = 1 + max(stage for _kind, stage in next(iter(columns())).plan.templates)
        self.peaks = [0] * num_stages
        # by stage, the chunks in flight, each with the slots that are held of it
        self._running: list[dict[int, set[int]]] = [{} for _ in range(num_stages)]
        self._held_after: dict[Template, set[int]] = {}

    @staticmethod
    def _find_held(template: Template, templates: Mapping[tuple[ActionKind, int], Template]) -> set[int]:
        """The slots that a stage holds of a micro-batch once one of its programs has run."""

        def read(kind: ActionKind) -> set[int]:
            other = templates.get((kind, template.stage))
            return set() if other is None else {slot for _place, slot in other.loads}

        later = read(ActionKind.WEIGHT_GRADIENTS)
        if template.kind is ActionKind.INPUT_GRADIENTS:
            return later
        if template.kind is not ActionKind.FORWARD:
            return set()
        next_read = read(ActionKind.BACKWARD) | read(ActionKind.INPUT_GRADIENTS)
        if not next_read:
            return later
        # A cotangent comes from the stage behind, so until it is used it is sent, not held.
        cotangents = {
            slot
            for known in templates.values()
            for place, slot in known.loads
            if known.arguments[place].kind is BindingKind.COTANGENT
        }
        return (next_read | later) - cotangents

    def look(self, template: Template, chunk: int, slots: Mapping[int, Sequence[Any]]) -> None:
        """Measures after a program and what follows it."""
        if template not in self._held_after:
            for known in (column.plan.templates for column in self._columns()):
                self._held_after |= {one: self._find_held(one, known) for one in known.values()}
        self._running[template.stage][chunk] = self._held_after[template]
        for stage, running in enumerate(self._running):
            arrays = [slots[number][slot] for number, places in running.items() for slot in places]
            here = (array for array in arrays if array is not None and array.addressable_shards)
            # With tensor parallelism, one device's part.
            unique = {id(array): array.addressable_shards[0].data.nbytes for array in here}
            self.peaks[stage] = max(self.peaks[stage], sum(unique.values()))


class LiveBytes:
    """Measures the peak memory of each stage between forwards and backwards, in bytes.

    Attributes:
      by_replica: the peaks per replica and stage; 0 for a stage without its own backward, or of another
        process.
    """

    def __init__(self, runner: Runner[Any]) -> None:
        """Starts observing.

        Args:
          runner: the result of `Pipeline.prepare`. Its buffers are measured after each program.

        Raises:
          TypeError: it runs all stages as one program, on one device, which has no buffers between them.
        """
        self.by_replica = runner.observe_held()

    @property
    def peaks(self) -> list[int]:
        """The peak per stage, the largest of all replicas."""
        return [max(peaks) for peaks in zip(*self.by_replica, strict=True)]
