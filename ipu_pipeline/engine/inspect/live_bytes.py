"""Measures the memory that pipelines hold for micro-batches in flight, from their buffers."""

from __future__ import annotations

from typing import Any

from ipu_pipeline.engine.execution.contract import Runner

__all__ = ["LiveBytes"]


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
