"""Studies of the pipelines of a profile, for people to read: what was measured and simulated of each."""

from __future__ import annotations

from dataclasses import dataclass

from ipu_pipeline.engine.inspect import PipelineFacts
from ipu_pipeline.engine.schedules import Scenario
from ipu_pipeline.reports.analysis import PipelineAnalysis, analyse
from ipu_pipeline.reports.host_time import HostTime, find_host_time
from ipu_pipeline.reports.predictions import Predictions, make_scenario, predict
from ipu_pipeline.reports.profile import Profile

__all__ = ["Study", "find_scenario", "study"]


@dataclass(frozen=True)
class Study:
    """A pipeline or loop.

    Attributes:
      facts: its description.
      analysis: its measurements.
      predictions: its simulations; None if it cannot be simulated.
      host: how long it waited for the host; None if nothing was measured.
    """

    facts: PipelineFacts
    analysis: PipelineAnalysis
    predictions: Predictions | None
    host: HostTime | None = None

    @property
    def advice(self) -> tuple[str, ...]:
        """Advice on what to change, in sentences, beginning with what IPUs wait for most."""
        found = [] if self.predictions is None else [self.predictions.advice.sentence]
        if self.host is not None and self.host.is_told:
            found.insert(0 if self.host.is_first else len(found), self.host.sentence)
        return tuple(found)


def study(profile: Profile) -> tuple[Study, ...]:
    """Analyses and simulates the pipelines of a profile, in their order."""
    analyses = analyse(profile)
    return tuple(
        Study(facts, analysis, predict(profile, facts, analysis), host)
        for facts, analysis, host in zip(
            profile.pipelines, analyses, find_host_time(profile, analyses), strict=True
        )
    )


def find_scenario(profile: Profile) -> Scenario:
    """Makes a scenario of the pipeline of a profile that has most actions; costs are in seconds.

    Raises:
      ValueError: none can be simulated.
    """
    analyses = sorted(analyse(profile), key=lambda analysis: -analysis.num_actions)
    for analysis in analyses:
        scenario = make_scenario(profile.pipelines[analysis.pipeline], analysis)
        if scenario is not None:
            return scenario
    raise ValueError(
        "the profile has no pipeline that can be simulated: one with a named schedule, of which a step and "
        "all stages were recorded."
    )
