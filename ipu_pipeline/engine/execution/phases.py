"""The execution phases of a step as they begin and end: what is brought to the devices, and what leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipu_pipeline.engine.devices.placing import put
from ipu_pipeline.engine.devices.rows import Row
from ipu_pipeline.engine.devices.underway import Underway
from ipu_pipeline.engine.execution.dispatches import Plan
from ipu_pipeline.engine.execution.templates import Template
from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.engine.schedules.execution_phases import ExecutionPhases

__all__ = ["PhaseRun"]


class PhaseRun:
    """Goes from phase to phase with the programs of a step.

    Attributes:
      weights: (IPU, full name) -> what was brought from host memory for the phase that runs now.
    """

    def __init__(
        self, phases: ExecutionPhases, levels: Sequence[int], plan: Plan, offloads_activations: bool
    ) -> None:
        """Begins before the first phase.

        Args:
          phases: of the pipeline.
          levels: of its stages.
          plan: its programs.
          offloads_activations: whether what is kept for backwards leaves the devices.
        """
        self.weights: dict[tuple[int, str], Any] = {}
        self._phases, self._levels, self._plan = phases, levels, plan
        self._offloads_activations = offloads_activations
        self._underway = Underway(phases.num_ahead)
        self._now: tuple[int, ActionKind, int] | None = None
        self._slots: list[Any] = []  # of the micro-batch
        self._kept: list[int] = []  # slots that only backwards read from now on
        self._made: list[Any] = []

    def enter(self, template: Template, chunk: int, slots: list[Any]) -> None:
        """Ends the phase before, and waits until another one may begin, if a program is the first of one.

        Args:
          template: of the program that comes next.
          chunk: the number of its micro-batch.
          slots: values of the micro-batch; those that leave the devices are replaced.
        """
        now = (chunk, *self._phases.find(template.kind, self._levels[template.stage]))
        if now != self._now:
            self.end()
            self._now, self._slots = now, slots

    def note(self, template: Template, results: Sequence[Any]) -> None:
        """Notes a program that was started, and what it makes."""
        self._kept += template.kept
        if template.row.is_here:
            self._made += results

    def end(self) -> None:
        """Ends the phase that runs now, if there is one, and sends on its way what leaves the devices."""
        if self._now is None:
            return
        if not self._phases.keeps_values:
            self._store(range(len(self._slots)))
        elif self._offloads_activations:
            self._store(self._kept)
        self.weights.clear()
        self._underway.add(self._made)
        self._now, self._slots, self._kept, self._made = None, [], [], []
        self._underway.wait()

    def _store(self, places: Sequence[int]) -> None:
        of_rows: dict[Row, list[int]] = {}
        for slot in places:
            if self._slots[slot] is not None:
                of_rows.setdefault(self._plan.slot_rows[slot], []).append(slot)
        for row, own in of_rows.items():
            stored = put([self._slots[slot] for slot in own], row, offloaded=True)
            self._made += stored
            for slot, value in zip(own, stored, strict=True):
                self._slots[slot] = value
