"""What is computed from a profile for people to read: of each pipeline what was measured and simulated."""

from __future__ import annotations

from dataclasses import dataclass

from ipu_pipeline.reports.analysis import PipelineAnalysis, analyse
from ipu_pipeline.reports.predictions import Predictions, predict
from ipu_pipeline.reports.profile import PipelineFacts, Profile

__all__ = ["Study", "study"]


@dataclass(frozen=True)
class Study:
    """A pipeline or loop.

    Attributes:
      facts: what it is.
      analysis: what was measured.
      predictions: what was simulated; None where it cannot be.
    """

    facts: PipelineFacts
    analysis: PipelineAnalysis
    predictions: Predictions | None


def study(profile: Profile) -> tuple[Study, ...]:
    """Analyses and simulates the pipelines of a profile, in their order."""
    return tuple(
        Study(facts, analysis, predict(profile, facts, analysis))
        for facts, analysis in zip(profile.pipelines, analyse(profile), strict=True)
    )
