"""Execution phases: levels of a pipeline that run as one, and the values offloaded between phases.

A micro-batch goes through all phases before the next one begins: forwards phase by phase, and then
backwards in the opposite order. The last phase's backwards belong to the phase of its forwards, or are a
phase of their own. With two phases: forward 0, forward and backward 1, backward 0; or forward 0, forward 1,
backward 1, backward 0.

Source: PopTorch's phased execution, and PopART's execution phases.
"""

from __future__ import annotations

from dataclasses import dataclass

from ipu_pipeline.engine.schedules.actions import ActionKind

__all__ = ["ExecutionPhases"]


@dataclass(frozen=True, kw_only=True)
class ExecutionPhases:
    """The phases of a pipeline's levels.

    Example:
      >>> phases = engine.ExecutionPhases(of_levels=(0, 0, 1, 1))

    Attributes:
      of_levels: the phase of each entry of `stages`, ascending from 0 without gaps.
      shares_last: whether the last phase's backwards belong to the phase of its forwards. False needs a
        last entry that is alone in its level and keeps nothing, because the last stage's forward and
        backward are one program, which then starts the backwards.
      num_ahead: the number of earlier phases that may still be on the devices when a phase's data are
        brought there: 0 waits for the previous phase to end, 1 for the phase before that. None: no limit.
      keeps_values: whether values that go from phase to phase stay on the devices. False: they wait in host
        memory, like everything else of a micro-batch.
    """

    of_levels: tuple[int, ...]
    shares_last: bool = True
    num_ahead: int | None = None
    keeps_values: bool = True

    def __post_init__(self) -> None:
        """Checks the fields."""
        object.__setattr__(self, "of_levels", tuple(self.of_levels))
        steps = [
            after - before for before, after in zip((0, *self.of_levels), self.of_levels, strict=False)
        ]
        if not self.of_levels or self.of_levels[0] != 0 or set(steps) - {0, 1}:
            raise ValueError(
                "execution_phases.of_levels must ascend from 0 without gaps, with the phase of each entry "
                f"of stages; got {list(self.of_levels)}."
            )
        if not self.shares_last and self.of_levels[-2:-1] != self.of_levels[-1:]:
            raise ValueError(
                "execution_phases: without shares_last the last phase needs two entries of stages or more, "
                "as the last stage's forward and backward are one program; got the phases "
                f"{list(self.of_levels)}. End with a stage that only returns what it is given."
            )
        is_count = isinstance(self.num_ahead, int) and self.num_ahead >= 0
        if self.num_ahead is not None and not is_count:
            raise ValueError(
                f"execution_phases.num_ahead must be an integer from 0, or None; got {self.num_ahead}."
            )

    def check(self, num_levels: int, schedule: object, num_serialized: int) -> None:
        """Checks the phases against the rest of a pipeline.

        Raises:
          ValueError: they contradict each other.
        """
        if len(self.of_levels) != num_levels:
            raise ValueError(
                f"execution_phases.of_levels must have one phase for each of the {num_levels} entries of "
                f"stages; got {list(self.of_levels)}."
            )
        if schedule != "sequential" or num_serialized > 1:
            raise ValueError(
                'execution_phases need the schedule "sequential" and num_serialized 1, as a micro-batch '
                f"goes through all phases before the next one; got {schedule!r} and {num_serialized}."
            )

    def find(self, kind: ActionKind, level: int) -> tuple[ActionKind, int]:
        """The direction and number of the phase in which a stage of a level has its forward or backward."""
        phase, last = self.of_levels[level], len(self.of_levels) - 1
        if phase < self.of_levels[-1]:
            return kind, phase
        if self.shares_last:
            return ActionKind.FORWARD, phase
        return (ActionKind.BACKWARD if level == last else kind), phase
