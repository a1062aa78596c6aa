"""What the library tells its launcher of the trainings in a process."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Progress"]


class Progress:
    """How far the trainings of a job have come.

    Attributes:
      useful: how many seconds of runs of trainings are known, each run counted once.
      furthest: the names of trainings -> the furthest global step that each is known to have reached.
    """

    def __init__(self, on_first: Callable[[int, int, int | None], None]) -> None:
        """Knows of none."""
        self.useful = 0.0
        self.furthest: dict[str, int] = {}
        self._on_first = on_first
        self._num_redone: int | None = None

    def hear(self, line: str) -> None:
        """Takes a line about a training, as `processes.launched` tells it."""
        kind, *values = line.split()
        if kind == "resumed":
            self._num_redone = max(self._num_redone or 0, int(values[0]))
        elif kind == "progress":
            training, run, step, useful = values
            self.useful = max(self.useful, float(useful))
            if not self.furthest:
                self._on_first(int(run), int(step), self._num_redone)
            self.furthest[training] = max(self.furthest.get(training, -1), int(step))
