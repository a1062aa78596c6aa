"""When the parts of a call were done, by the host's clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

__all__ = ["CallTimes"]

Latency = tuple[float, float, float]


@dataclass(eq=False)
class CallTimes:
    """Times of the last call, in seconds of `time.perf_counter`.

    Attributes:
      input: when the tensors of each micro-batch were handed over.
      input_complete: when they were in the feed of the devices.
      output: when the outputs of each micro-batch were asked for.
      output_complete: when they were on the host.
    """

    input: list[float] = field(default_factory=list)
    input_complete: list[float] = field(default_factory=list)
    output: list[float] = field(default_factory=list)
    output_complete: list[float] = field(default_factory=list)

    def note_outputs(self, asked: float) -> None:
        """Notes that all outputs came just now."""
        number = len(self.input)
        self.output = [asked] * number
        self.output_complete = [time.perf_counter()] * number

    def latency(self, start: str, end: str) -> Latency:
        """The least, the greatest and the mean time of a micro-batch from one point to another.

        Args:
          start: the name of the first point, an attribute.
          end: likewise, of the second.
        """
        spans = [last - first for first, last in zip(getattr(self, start), getattr(self, end), strict=True)]
        if not spans:
            return (0.0, 0.0, 0.0)
        return (min(spans), max(spans), sum(spans) / len(spans))
