"""Which program the host is starting, for whoever asks of a step that hangs."""

from __future__ import annotations

from typing import Any

from ipu_pipeline.engine.execution.templates import Template

__all__ = ["Starting"]


class Starting:
    """The program that a runner starts, or started last. It is noted for each program, so it costs little.

    Attributes:
      template: the program; None before the first one.
      chunk: the number of its micro-batch or chunk.
    """

    __slots__ = ("_first", "_size", "_step", "chunk", "template")

    def __init__(self) -> None:
        """Begins without any."""
        self.template: Template | None = None
        self.chunk = self._step = self._first = 0
        self._size = 1

    def begin(self, step: int, first: int, size: int) -> None:
        """Begins some micro-batches of a step: its number, that of the first, and how many go together."""
        self.template, self._step, self._first, self._size = None, step, first, size

    def describe(self, places: Any) -> str:
        """Such as "stage 2 (encode), forward of micro-batch 5 of step 17"; "" if there is none."""
        template = self.template
        if template is None:
            return ""
        first = self._first + self.chunk * self._size
        last = first + self._size - 1
        which = f"micro-batch {first}" if last == first else f"micro-batches {first} to {last}"
        return f"{places[template.stage]}, {template.kind.words} of {which} of step {self._step}"
