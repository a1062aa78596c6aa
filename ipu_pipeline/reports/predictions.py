"""Predictions for a pipeline that was measured, and studies of what was measured and predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from ipu_pipeline.engine.inspect import PipelineFacts, find_layer_costs
from ipu_pipeline.engine.schedules import (
    Advice,
    Cluster,
    Costs,
    Layer,
    Memory,
    Scenario,
    ScheduleName,
    Simulation,
    Timeline,
    Variant,
    advise,
    named_schedules,
    predict_step_time,
    schedule_name,
    simulate,
    what_if,
)
from ipu_pipeline.ground.tables import describe_share, describe_time, say_device
from ipu_pipeline.reports.analysis import HostTime, PipelineAnalysis, analyse, find_host_time
from ipu_pipeline.reports.profile import Event, EventKind, Profile

# Predictions. The costs are what programs, transfers and weight updates take alone, as splits and dispatch
# plans are chosen by. Where that was not measured, they are the trace's, in which the time that the host
# takes to start programs is not known, and taken to be 0. A layer that moves to another stage takes a part
# of its stage's time along, equal to its part of the stage's operations, which is an estimate.

_MAX_ACTIONS = 200_000  # in a step that is simulated
_MAX_SIMULATED = 500_000  # actions of all counts, and of all splits: this takes some seconds
_MOST_SPLITS = 6  # the number that is shown
_MICROSECONDS = 1e6
_TOGETHER = {"reduce": "averaging of gradients", "gather": "gathering of what was updated"}


@dataclass(frozen=True)
class Predictions:
    """The results of simulations. Times are in seconds.

    Attributes:
      simulation: the simulation of the pipeline as it is.
      variants: other settings, after the present one; only the best few of the other splits.
      advice: what to change.
      notes: remarks, in sentences.
      cores: the number of cores that the IPUs share; None if each has its own, or what programs need is
        not known.
      shared_step_time: the time of a step on these; the rest is for IPUs with cores of their own.
    """

    simulation: Simulation
    variants: tuple[Variant, ...]
    advice: Advice
    notes: tuple[str, ...]
    cores: int | None = None
    shared_step_time: float | None = None


def make_scenario(facts: PipelineFacts, analysis: PipelineAnalysis) -> Scenario | None:
    """Makes a scenario for the simulator of a pipeline as it was measured; costs are in seconds.

    Returns:
      The scenario; None for a loop, for a schedule that is the user's own, and if no step was recorded, or
      the times of a stage are not known.
    """
    if facts.kind == "loop" or facts.schedule not in named_schedules() or not analysis.step_time:
        return None
    costs = _read_costs(facts, analysis) if facts.costs is None else facts.costs
    if costs is None:
        return None
    return scenario_of(facts, costs, analysis.num_micro_batches // facts.num_replicas)


def scenario_of(facts: PipelineFacts, costs: Costs, count: int) -> Scenario:
    """Makes the scenario of a pipeline from what it costs."""
    divides = count % facts.chunk_size == 0
    last = facts.stages[-1].level
    is_fused = facts.stages[-1].is_fused and [stage.level for stage in facts.stages].count(last) == 1
    mapping = tuple(stage.ipu for stage in facts.stages)
    return Scenario(
        dataclasses.replace(costs, is_fused=is_fused),
        schedule=cast(ScheduleName, facts.schedule),
        num_micro_batches=max(1, count),
        device_mapping=mapping,
        levels=tuple(stage.level for stage in facts.stages),
        training=facts.kind == "training",
        chunk_size=facts.chunk_size if divides else 1,
        memory=_make_memory(facts),
        micro_batch_size=facts.micro_batch_size or 1,
        cluster=Cluster(facts.num_replicas),
        # Stages that the engine cut are where they should be.
        layers=((),) * len(facts.stages)
        if facts.cuts
        else find_layer_costs(
            [stage.layers for stage in facts.stages],
            costs,
            [stage.num_held_bytes for stage in facts.stages],
            mapping,
            facts.memory,
        ),
    )


def _read_costs(facts: PipelineFacts, analysis: PipelineAnalysis) -> Costs | None:
    """The costs of programs in the trace; None if it lacks those of a stage."""
    forward = [use.forward for use in analysis.stages if use.forward is not None]
    if len(forward) < len(facts.stages):
        return None
    update = [0.0] * len(forward)
    for use in analysis.ipus:
        first = facts.stages_on(use.ipu)[0]
        update[first] = max(update[first], use.update / _MICROSECONDS)
    return Costs.of(
        len(forward),
        forward=[cost / _MICROSECONDS for cost in forward],
        backward=[(use.backward or 0.0) / _MICROSECONDS for use in analysis.stages],
        weight_gradients=[
            # Where there are no halves, it is not known what they would take.
            (use.backward or 0.0) / 2 / _MICROSECONDS
            if use.weight_gradients is None
            else use.weight_gradients / _MICROSECONDS
            for use in analysis.stages
        ],
        update=update,
        transfer={
            (link.source, link.target): link.length / facts.chunk_size / _MICROSECONDS
            for link in analysis.links
            if link.length is not None and link.source != link.target
        },
    )


def _make_memory(facts: PipelineFacts) -> Memory | None:
    if not facts.memory:
        return None
    constant = [0] * (1 + max(stage.ipu for stage in facts.stages))
    # The bytes that phases bring are known for the fullest moment, with the micro-batches held then.
    is_brought = any(plan.num_brought_bytes for plan in facts.memory)
    for plan in facts.memory:
        if plan.ipu < len(constant):
            num_other_bytes = plan.num_feed_bytes + (plan.num_temporary_bytes or 0)
            num_other_bytes += plan.num_activation_bytes if is_brought else 0
            constant[plan.ipu] = sum(plan.num_state_bytes) + num_other_bytes
    held_bytes = tuple(0 if is_brought else stage.num_held_bytes for stage in facts.stages)
    between = tuple(
        stage.num_between_bytes if stage.is_halved and not is_brought else num_held_bytes
        for stage, num_held_bytes in zip(facts.stages, held_bytes, strict=True)
    )
    return Memory(tuple(constant), held_bytes, between)


def predict(profile: Profile, facts: PipelineFacts, analysis: PipelineAnalysis) -> Predictions | None:
    """Simulates a pipeline of a profile.

    Returns:
      The predictions; None where there is no scenario (see `make_scenario`), or its step has too many
      actions.
    """
    scenario = make_scenario(facts, analysis)
    if scenario is None or scenario.num_actions > _MAX_ACTIONS:
        return None
    cores = find_shared_cores(profile, facts)
    is_shared = cores is not None
    predictions = predict_scenario(scenario, cores, is_measured=facts.costs is not None)
    notes = []
    if is_shared:
        assumption = (
            "that take as long as was measured here, whatever the others do"
            if facts.costs is None
            else "that take as long as these do while nothing else runs"
        )
        notes.append(
            f"These {facts.device_word}s are virtual: they share {cores} cores of the host. The "
            f"predictions are for devices {assumption}."
        )
    if facts.costs is None and not facts.is_one_program:
        notes.append(
            "What programs take alone was not measured. The predictions are by their times in this trace."
        )
    if any(plan.num_brought_bytes for plan in facts.memory):
        notes.append(
            "The time in which phases bring state from host memory is not in a trace, and taken to be 0: "
            "the simulated step is shorter than the measured one. In a Scenario, host_memory sets it."
        )
    if facts.cuts:
        notes.append("The engine cut these stages where a step is shortest, so no layers are moved here.")
    if any(row.split for row in predictions.variants):
        notes.append(
            "The time of a layer is estimated: its stage's time is divided in proportion to operations."
            if scenario.layers
            else "The stages' layers are not known, so what moves between stages is a share of their time."
        )
    return dataclasses.replace(predictions, notes=tuple(notes))


def say_seconds(time: float) -> str:
    """Describes a time of a scenario whose costs are in seconds."""
    return describe_time(time * _MICROSECONDS)


def find_shared_cores(profile: Profile, facts: PipelineFacts) -> int | None:
    """The number of cores that the IPUs of a pipeline share; None if they do not."""
    is_shared = {device.platform for device in profile.devices} == {"cpu"} and len(facts.ipus) > 1
    return profile.num_cores if is_shared else None


def predict_scenario(
    scenario: Scenario,
    shared_cores: int | None = None,
    *,
    is_measured: bool = True,
    is_whole: bool = False,
    step: str = "",
    describe: Callable[[float], str] = say_seconds,
) -> Predictions:
    """Simulates a scenario, other settings and what is advised. The page and `ipu-pipeline simulate` do."""
    number, num_ipus = scenario.num_actions, len(scenario.ipus)
    settled = scenario
    simulation = simulate(scenario)
    if scenario.searched is not None:  # it is not searched again for each split
        settled = dataclasses.replace(scenario, schedule=simulation.timetable)
    num_splits = 2 * (scenario.costs.num_stages - 1)
    has_splits = is_whole or number * num_splits <= _MAX_SIMULATED
    none: list[list[Layer]] = [[] for _stage in scenario.costs.forward]
    variants = what_if(
        settled,
        None if has_splits and num_ipus > 1 else none,
        None if is_whole or 23 * number <= _MAX_SIMULATED else (),
    )
    if settled is not scenario:
        name = schedule_name(scenario.schedule)
        variants = [
            dataclasses.replace(row, schedule=name) if row.scenario.schedule is settled.schedule else row
            for row in variants
        ]
    if num_ipus == 1:  # actions run one after another, whatever their order
        variants = [row for row in variants if "schedule" not in row.change]
    splits = [row for row in variants if row.split]
    if not is_whole:
        splits = sorted(splits, key=lambda row: -row.gain)[:_MOST_SPLITS]
    rows = [row for row in variants if not row.split] + splits
    cores = shared_cores if is_measured else None
    step = step or ("a step" if shared_cores is None else "a simulated step")
    advice = advise(settled, variants=rows, describe=describe, step=step, shared_cores=cores)
    shared_step_time = None
    if cores is not None:
        shared_step_time = predict_step_time(dataclasses.replace(scenario, cores=cores))
    return Predictions(simulation, tuple(rows), advice, (), cores, shared_step_time)


def timeline_events(
    timeline: Timeline, facts: PipelineFacts, pipeline: int, links: Sequence[tuple[int, int, float]] = ()
) -> list[Event]:
    """Converts a simulated step to events, as a trace has them."""
    ipus, num_replicas = [stage.ipu for stage in facts.stages], facts.num_replicas
    events = []
    for kind, stage, micro_batch, ipu, begin, end in timeline.intervals():
        span = (begin * _MICROSECONDS, end * _MICROSECONDS, ipu)
        if end > begin and kind in _TOGETHER:
            events.append(Event(EventKind.OTHER, *span, name=_TOGETHER[kind]))
        elif end > begin:
            of = None if kind == "update" else stage
            events.append(Event(EventKind(kind), *span, pipeline, of, micro_batch))
    sizes = {(source, target): size for source, target, size in links}
    for sending in timeline.transfers():
        first = sending.micro_batch % num_replicas * facts.num_ipus_each
        events.append(
            Event(
                EventKind.TRANSFER,
                sending.begin * _MICROSECONDS,
                sending.end * _MICROSECONDS,
                first + ipus[sending.target],
                pipeline,
                sending.source,
                sending.micro_batch,
                num_bytes=round(sizes.get((sending.source, sending.target), 0)),
                source=first + ipus[sending.source],
            )
        )
    return events


# Studies, for people to read: what was measured and simulated of each pipeline.

_LEAST_GAIN = 0.02  # of all the time: less of what the pipeline gains is not told beside the host


def say_advice(advice: Advice, host: HostTime | None) -> tuple[str, ...]:
    """Says what to change, in sentences, beginning with what IPUs wait for most.

    If that is the host, the pipeline's stages do not hold each other back, and a better pipeline gains in
    the rest of the time only.
    """
    if host is None or not host.is_told:
        return (advice.sentence,)
    if not host.is_first:
        return advice.sentence, host.sentence
    busy_share = 1.0 - host.share
    gain = 1.0 / (host.share + busy_share / (1.0 + advice.gain)) - 1.0
    if gain < _LEAST_GAIN:
        return (host.sentence,)
    sentence = advice.sentence[0].lower() + advice.sentence[1:]
    of_all = f"Of all the time, that is {describe_share(gain)} more samples per second."
    return host.sentence, f"In the other {describe_share(busy_share)} of the time, {sentence} {of_all}"


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
class MeasuredRun:
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


def find_measured(profile: Profile) -> MeasuredRun:
    """Finds the pipeline of a profile that has most actions, of those that can be simulated."""
    analyses = analyse(profile)
    hosts = find_host_time(profile, analyses)
    for analysis in sorted(analyses, key=lambda analysis: -analysis.num_actions):
        facts = profile.pipelines[analysis.pipeline]
        scenario = make_scenario(facts, analysis)
        if scenario is not None:
            cores = find_shared_cores(profile, facts)
            return MeasuredRun(scenario, cores, facts.costs is not None, hosts[analysis.pipeline], True)
    raise ValueError(
        "the profile has no pipeline that can be simulated: one with a named schedule, of which a step and "
        "all stages were recorded."
    )
