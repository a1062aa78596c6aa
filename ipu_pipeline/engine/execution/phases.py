"""The execution phases of a step as they end: what leaves the devices, and how far the host runs ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipu_pipeline.engine.devices.rows import Row
from ipu_pipeline.engine.execution.plans import Plan
from ipu_pipeline.engine.execution.readings import Reading, store_slots
from ipu_pipeline.engine.schedules.execution_phases import ExecutionPhases

__all__ = ["PhaseRun"]


class PhaseRun:
    """The phase that runs now, of a column.

    Attributes:
      weights: (IPU, full name) -> what was brought from host memory for it.
    """

    def __init__(
        self, phases: ExecutionPhases, plan: Plan, offloads_activations: bool, reading: Reading
    ) -> None:
        """Begins the first one."""
        self.weights: dict[tuple[int, str], Any] = {}
        self._keeps_values, self._plan = phases.keeps_values, plan
        self._offloads_activations = offloads_activations
        self._underway, self._reading = reading.underway(phases.num_ahead), reading
        self._kept: list[int] = []  # slots that only backwards read from now on
        self._made: list[Any] = []

    def note(self, made: Sequence[Any], kept: Sequence[int] = ()) -> None:
        """Notes what a program of the phase makes, and which slots only backwards read after it."""
        self._made += made
        self._kept += kept

    def end(self, slots: list[Any]) -> None:
        """Ends the phase, sends on its way what leaves the devices, and waits until another may begin."""
        leaving: Sequence[int] = ()
        if not self._keeps_values:
            leaving = range(len(slots))
        elif self._offloads_activations:
            leaving = self._kept
        of_rows: dict[Row, list[int]] = {}
        for slot in leaving:
            if slots[slot] is not None:
                of_rows.setdefault(self._plan.slot_rows[slot], []).append(slot)
        self._made += store_slots(self._reading, slots, of_rows)
        self.weights.clear()
        self._underway.add(self._made)
        self._made, self._kept = [], []
        self._underway.wait()
