"""Measures what pipelines hold of micro-batches in flight, from their buffers."""

from __future__ import annotations

from typing import Any

from ipu_pipeline.engine.execution.contract import Runner

__all__ = ["LiveBytes"]


class LiveBytes:
    """Finds the peak of what each stage holds between forwards and backwards, in bytes.

    Attributes:
      by_replica: the peaks per replica and stage; 0 for a stage without its own backward, or of another
        process.
    """

    def __init__(self, runner: Runner[Any]) -> None:
        """Begins to observe.

        Args:
          runner: what `Pipeline.prepare` returns. Its buffers are looked at after each program.

        Raises:
          TypeError: it runs all stages as one program, on one device, and has no buffers between them.
        """
        self.by_replica = runner.observe_held()

    @property
    def peaks(self) -> list[int]:
        """The peak per stage, in the replica that holds most."""
        return [max(peaks) for peaks in zip(*self.by_replica, strict=True)]
