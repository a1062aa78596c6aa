"""`Program.summary()`: what a program will need and do, before it runs."""

from __future__ import annotations

from dataclasses import dataclass

from ipu_pipeline.engine.inspect import PipelineSummary

__all__ = ["ProgramSummary"]


@dataclass(frozen=True)
class ProgramSummary:
    """What the pipelines and loops of a program will need and do; `str` makes a table of each.

    Attributes:
      calls: its pipelines and loops, in order.
    """

    calls: tuple[PipelineSummary, ...]

    def __str__(self) -> str:
        """The tables, one after another."""
        if not self.calls:
            return "The program has no pipelines and no loops."
        return "\n\n".join(map(str, self.calls))
