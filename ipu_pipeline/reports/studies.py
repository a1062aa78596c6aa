"""Studies of the pipelines of a profile, for people to read: what was measured and simulated of each."""

from __future__ import annotations

from dataclasses import dataclass

from ipu_pipeline.engine.inspect import PipelineFacts
from ipu_pipeline.engine.schedules import Advice, Scenario
from ipu_pipeline.reports.analysis import PipelineAnalysis, analyse
from ipu_pipeline.reports.host_time import HostTime, find_host_time
from ipu_pipeline.reports.predictions import Predictions, find_shared_cores, make_scenario, predict
from ipu_pipeline.reports.profile import Profile
from ipu_pipeline.reports.wording import describe_share, say_device

__all__ = ["Measured", "Study", "find_measured", "say_advice", "study"]

_LEAST_GAIN = 0.02  # of all the time: less of what the pipeline gains is not told beside the host


def say_advice(advice: Advice, host: HostTime | None) -> tuple[str, ...]:
    """What to change, in sentences, beginning with what IPUs wait for most.

    If that is the host, the pipeline's stages do not hold each other back, and a better pipeline gains in
    the rest of the time only.
    """
    if host is None or not host.is_told:
        return (advice.sentence,)
    if not host.is_first:
        return advice.sentence, host.sentence
    rest = 1.0 - host.share
    gain = 1.0 / (host.share + rest / (1.0 + advice.gain)) - 1.0
    if gain < _LEAST_GAIN:
        return (host.sentence,)
    sentence = advice.sentence[0].lower() + advice.sentence[1:]
    of_all = f"Of all the time, that is {describe_share(gain)} more samples per second."
    return host.sentence, f"In the other {describe_share(rest)} of the time, {sentence} {of_all}"


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
        sentences: tuple[str, ...] = ()
        if self.predictions is not None:
            sentences = say_advice(self.predictions.advice, self.host)
        elif self.host is not None and self.host.is_told:
            sentences = (self.host.sentence,)
        return tuple(say_device(sentence, self.facts.device_word) for sentence in sentences)

    @property
    def is_held_back_by_host(self) -> bool:
        """Whether IPUs wait for the host more than for each other."""
        return self.host is not None and self.host.is_first


def study(profile: Profile) -> tuple[Study, ...]:
    """Analyses and simulates the pipelines of a profile, in their order."""
    analyses = analyse(profile)
    return tuple(
        Study(facts, analysis, predict(profile, facts, analysis), host)
        for facts, analysis, host in zip(
            profile.pipelines, analyses, find_host_time(profile, analyses), strict=True
        )
    )


@dataclass(frozen=True)
class Measured:
    """A pipeline that was measured, to simulate it, also with other settings.

    Attributes:
      scenario: the pipeline as it was.
      shared_cores: the number of cores that its IPUs share; None if they do not, or that is not known.
      is_measured: whether the costs are what programs take alone.
      host: how long it waited for the host; None if that is not known.
      is_profile: whether all this is from a profile, with costs in seconds.
    """

    scenario: Scenario
    shared_cores: int | None = None
    is_measured: bool = False
    host: HostTime | None = None
    is_profile: bool = False


def find_measured(profile: Profile) -> Measured:
    """Finds the pipeline of a profile that has most actions, of those that can be simulated."""
    found = analyse(profile)
    hosts = find_host_time(profile, found)
    for analysis in sorted(found, key=lambda analysis: -analysis.num_actions):
        facts = profile.pipelines[analysis.pipeline]
        scenario = make_scenario(facts, analysis)
        if scenario is not None:
            cores = find_shared_cores(profile, facts)
            return Measured(scenario, cores, facts.costs is not None, hosts[analysis.pipeline], True)
    raise ValueError(
        "the profile has no pipeline that can be simulated: one with a named schedule, of which a step and "
        "all stages were recorded."
    )
