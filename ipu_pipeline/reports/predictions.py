"""What the simulator says of a pipeline that was measured: the same step, and what other settings would give.

The costs are the medians of the trace: of forwards, backwards, weight updates and transfers. What the host
takes to start programs is not in a trace, and taken to be nothing. A layer that moves to another stage takes
along the part of the stage's time that its parameters are of the stage's, which is an estimate.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ipu_pipeline.engine.schedules.lock_step import named_schedules
from ipu_pipeline.engine.schedules.scenarios import Costs, Memory, Scenario
from ipu_pipeline.engine.schedules.simulator import Simulation, predict_step_time, simulate
from ipu_pipeline.engine.schedules.timelines import Timeline
from ipu_pipeline.reports.analysis import PipelineAnalysis
from ipu_pipeline.reports.events import Event, EventKind
from ipu_pipeline.reports.profile import PipelineFacts, Profile
from ipu_pipeline.reports.wording import describe_time

__all__ = ["Predictions", "Setting", "make_scenario", "predict", "timeline_events"]

MAX_ACTIONS = 200_000  # of a step that is simulated
_COUNTS = (0.5, 2, 4)  # times as many micro-batches per update
_MOST_MOVES = 6
_WORTH_IT = 1.02  # gains below that are within what measuring leaves open


@dataclass(frozen=True)
class Setting:
    """A pipeline with something changed.

    Attributes:
      what: in words.
      kind: "present", "schedule", "count", "split" or "even".
      step_time: predicted, in microseconds.
      speed: samples per second; micro-batches if it is not known how many samples they have.
      gain: the speed over the present one's, which is predicted as well.
      utilisation: of all IPUs; 0 to 1.
      num_peak_bytes: the most that an IPU holds, by the plan; None if that is not known.
      advice: what to do, as the begin of a sentence; empty where nobody can do it as such.
    """

    what: str
    kind: str
    step_time: float
    speed: float
    gain: float
    utilisation: float
    num_peak_bytes: int | None
    advice: str

    @property
    def is_present(self) -> bool:
        """Whether nothing is changed."""
        return self.kind == "present"


@dataclass(frozen=True)
class Predictions:
    """What was simulated.

    Attributes:
      simulation: of the pipeline as it is.
      settings: the present one first.
      has_samples: whether speeds are in samples.
      advice: a sentence.
      notes: what is to be known of the predictions, in sentences.
    """

    simulation: Simulation
    settings: tuple[Setting, ...]
    has_samples: bool
    advice: str
    notes: tuple[str, ...]


def make_scenario(facts: PipelineFacts, analysis: PipelineAnalysis) -> Scenario | None:
    """What is to be simulated, with costs in microseconds.

    Returns:
      The scenario; None of a loop, of a schedule that is the user's own, and where the trace lacks something.
    """
    if facts.kind == "loop" or facts.schedule not in named_schedules() or not analysis.step_time:
        return None
    trains = facts.kind == "training"
    forward = [use.forward for use in analysis.stages]
    backward = [use.backward or 0.0 for use in analysis.stages]
    known = [cost for cost in forward if cost is not None]
    if len(known) < len(forward):
        return None
    update = [0.0] * len(forward)
    for use in analysis.ipus:
        first = next(stage.index for stage in facts.stages if stage.ipu == use.ipu)
        update[first] = use.update
    chunk_size = facts.chunk_size if analysis.num_micro_batches % facts.chunk_size == 0 else 1
    transfers = {
        (link.source, link.target): link.length / facts.chunk_size
        for link in analysis.links
        if link.length is not None
    }
    levels = tuple(stage.level for stage in facts.stages)
    try:
        return Scenario(
            Costs.of(
                len(known),
                forward=known,
                backward=backward,
                update=update,
                transfer=transfers,
                is_fused=facts.stages[-1].is_fused,
            ),
            schedule=facts.schedule,
            num_micro_batches=max(1, analysis.num_micro_batches),
            device_mapping=tuple(stage.ipu for stage in facts.stages),
            levels=levels,
            training=trains,
            chunk_size=chunk_size,
            memory=_make_memory(facts),
            micro_batch_size=facts.micro_batch_size or 1,
        )
    except ValueError:  # such as parallel stages at the end
        return None


def _make_memory(facts: PipelineFacts) -> Memory | None:
    if not facts.memory:
        return None
    constant = [0] * (1 + max(stage.ipu for stage in facts.stages))
    for plan in facts.memory:
        if plan.ipu < len(constant):
            constant[plan.ipu] = (
                plan.num_variable_bytes
                + plan.num_optimizer_bytes
                + plan.num_accumulator_bytes
                + plan.num_feed_bytes
                + (plan.num_temporary_bytes or 0)
            )
    return Memory(tuple(constant), tuple(stage.num_held_bytes for stage in facts.stages))


def predict(profile: Profile, facts: PipelineFacts, analysis: PipelineAnalysis) -> Predictions | None:
    """Simulates a pipeline of a profile.

    Args:
      profile: the profile.
      facts: the pipeline.
      analysis: of the pipeline.

    Returns:
      The predictions; None where there is no scenario (see `make_scenario`), or its step has too many actions.
    """
    scenario = make_scenario(facts, analysis)
    if scenario is None or _num_actions(scenario) > MAX_ACTIONS:
        return None
    simulation = simulate(scenario)
    present = _setting("as it is", "present", scenario, None, "")
    settings = [present]
    for what, kind, other, advice in _variants(facts, analysis, scenario):
        if _num_actions(other) <= MAX_ACTIONS:
            settings.append(_setting(what, kind, other, present, advice))
    notes = []
    platforms = {device.platform for device in profile.devices}
    if platforms == {"cpu"} and len(scenario.ipus) > 1:
        notes.append(
            f"These IPUs are virtual devices that share {profile.num_cores} cores of the host. Predictions are "
            "for devices that each take as long as was measured here, whatever the others do."
        )
    if any(setting.kind == "split" for setting in settings):
        notes.append("A layer that moves is taken to need the part of its stage's time that it has of its parameters.")
    has_samples = facts.micro_batch_size is not None
    return Predictions(simulation, tuple(settings), has_samples, _advise(facts, settings), tuple(notes))


def _num_actions(scenario: Scenario) -> int:
    return scenario.costs.num_stages * scenario.num_micro_batches * 2


def _setting(what: str, kind: str, scenario: Scenario, present: Setting | None, advice: str) -> Setting:
    step_time = predict_step_time(scenario)
    work = scenario.work_of_ipus()
    speed = scenario.num_samples / step_time * 1e6 if step_time else 0.0
    gain = 1.0 if present is None or not present.speed else speed / present.speed
    utilisation = sum(work.values()) / (len(work) * step_time) if step_time else 0.0
    return Setting(what, kind, step_time, speed, gain, utilisation, _peak(scenario), advice)


def _peak(scenario: Scenario) -> int | None:
    """The most that an IPU holds, from the micro-batches in flight."""
    if scenario.memory is None:
        return None
    held = list(scenario.memory.num_constant_bytes)
    in_flight = scenario.timetable().in_flight
    for stage, ipu in enumerate(scenario.stage_ipus):
        held[ipu] += in_flight[stage] * scenario.chunk_size * scenario.memory.num_held_bytes[stage]
    return max(held)


def _variants(
    facts: PipelineFacts, analysis: PipelineAnalysis, scenario: Scenario
) -> Iterator[tuple[str, str, Scenario, str]]:
    """What may be changed: in words, its kind, the scenario, and advice."""
    if len(scenario.ipus) > 1:
        for schedule in named_schedules():
            if schedule != scenario.schedule:
                chunk_size = scenario.chunk_size if schedule == "grouped" else 1
                changed = dataclasses.replace(scenario, schedule=schedule, chunk_size=chunk_size)
                name = schedule.capitalize()
                yield f"schedule {name}", "schedule", changed, f"Use the schedule {name}"
    if scenario.training:
        for factor in _COUNTS:
            number = int(scenario.num_micro_batches * factor)
            if number >= 1 and number != scenario.num_micro_batches:
                chunk_size = math.gcd(scenario.chunk_size, number)
                changed = dataclasses.replace(scenario, num_micro_batches=number, chunk_size=chunk_size)
                yield (
                    f"{number} micro-batches per weight update",
                    "count",
                    changed,
                    f"Accumulate {number} micro-batches per weight update instead of "
                    f"{scenario.num_micro_batches}, which trains with larger batches,",
                )
    if len(scenario.ipus) > 1:
        yield from _splits(facts, analysis, scenario)


def _splits(
    facts: PipelineFacts, analysis: PipelineAnalysis, scenario: Scenario
) -> Iterator[tuple[str, str, Scenario, str]]:
    """Layers moved from the limiting IPU to stages beside theirs; and all stages even, which nothing beats."""
    limiting = [stage for stage in facts.stages if stage.ipu == analysis.limiting_ipu]
    found = []
    for stage in limiting:
        for target, place in ((stage.index - 1, 0), (stage.index + 1, -1)):
            if not 0 <= target < len(facts.stages) or facts.stages[target].ipu == stage.ipu:
                continue
            for number in range(1, len(stage.layers)):
                moved = stage.layers[:number] if place == 0 else stage.layers[-number:]
                parameters = sum(layer.num_parameters for layer in moved)
                if not 0 < parameters < stage.num_parameters:
                    continue
                share = parameters / stage.num_parameters
                what = (
                    f"layer {moved[0].name!r}" if number == 1
                    else f"layers {moved[0].name!r} to {moved[-1].name!r}"
                )  # fmt: skip
                where = f"from stage {stage.index} to stage {target}"
                changed = _move(scenario, stage.index, target, share)
                found.append(
                    (predict_step_time(changed), f"{what} {where}", "split", changed, f"Move {what} {where}")
                )
    found.sort(key=lambda entry: entry[0])
    for _time, *entry in found[:_MOST_MOVES]:
        yield tuple(entry)  # type: ignore[misc]  # mypy does not know how long it is
    costs, number = scenario.costs, scenario.costs.num_stages
    even = dataclasses.replace(
        costs,
        forward=(sum(costs.forward) / number,) * number,
        backward=(sum(costs.backward) / number,) * number,
    )
    if len(set(scenario.stage_ipus)) == number:
        changed = dataclasses.replace(scenario, costs=even)
        yield "a perfectly even split (a bound)", "even", changed, ""


def _move(scenario: Scenario, source: int, target: int, share: float) -> Scenario:
    """A scenario in which a stage hands over a part of its time."""

    def moved(costs: tuple[float, ...]) -> tuple[float, ...]:
        own = list(costs)
        own[target] += share * own[source]
        own[source] *= 1 - share
        return tuple(own)

    costs = scenario.costs
    changed = dataclasses.replace(costs, forward=moved(costs.forward), backward=moved(costs.backward))
    return dataclasses.replace(scenario, costs=changed, memory=None)


def _advise(facts: PipelineFacts, settings: list[Setting]) -> str:
    """What to do, with what it would give."""
    present = settings[0]

    def best(*kinds: str) -> Setting | None:
        gaining = [one for one in settings if one.kind in kinds and one.gain >= _WORTH_IT]
        return max(gaining, key=lambda one: one.gain, default=None)

    # What leaves the training as it is comes first; a larger batch needs another learning rate.
    found = best("schedule", "split") or best("count")
    even = best("even")
    if found is not None and found.advice:
        return (
            f"{found.advice}: predicted {100 * (found.gain - 1):.0f}% more "
            f"{'samples' if facts.micro_batch_size is not None else 'micro-batches'} per second "
            f"({describe_time(found.step_time)} a step instead of {describe_time(present.step_time)})."
        )
    if even is not None:
        return (
            f"Make the stages more even: at most {100 * (even.gain - 1):.0f}% more "
            f"{'samples' if facts.micro_batch_size is not None else 'micro-batches'} per second are predicted for "
            "stages that all take equally long."
        )
    return f"Leave it as it is: no other setting here is predicted to gain {100 * (_WORTH_IT - 1):.0f}%."


def timeline_events(timeline: Timeline, facts: PipelineFacts, pipeline: int) -> list[Event]:
    """The events of a simulated step, in microseconds, as they would be in a trace."""
    events = [
        Event(EventKind(kind), begin, end, ipu, pipeline, None if kind == "update" else stage, micro_batch)
        for kind, stage, micro_batch, ipu, begin, end in timeline.intervals()
        if end > begin
    ]
    edges = {}
    for edge in facts.edges:
        edges[edge.source, edge.target] = edge.num_forward_bytes
        edges[edge.target, edge.source] = edge.num_backward_bytes
    ipus = [stage.ipu for stage in facts.stages]
    events += [
        Event(
            EventKind.TRANSFER,
            sending.begin,
            sending.end,
            ipus[sending.target],
            pipeline,
            sending.source,
            sending.micro_batch,
            source=ipus[sending.source],
        )
        for sending in timeline.transfers()
    ]
    return events
