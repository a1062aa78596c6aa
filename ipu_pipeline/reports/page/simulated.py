"""The page of a pipeline that is only simulated."""

from __future__ import annotations

import dataclasses
import datetime

from ipu_pipeline.engine.inspect import PipelineFacts, StageFacts
from ipu_pipeline.engine.schedules import Costs, Layer, LinkSpeed, Scenario, schedule_name
from ipu_pipeline.reports.analysis import analyse
from ipu_pipeline.reports.page.writing import write_page
from ipu_pipeline.reports.predictions import predict_scenario, timeline_events
from ipu_pipeline.reports.profile import Profile
from ipu_pipeline.reports.studies import Study

__all__ = ["write_simulation"]

_SECONDS_PER_UNIT = 1e-3


def write_simulation(scenario: Scenario, title: str) -> str:
    """A page like `report.html`, without anything measured."""
    cluster, name = scenario.cluster, schedule_name(scenario.schedule)
    scaled = dataclasses.replace(
        scenario,
        # What was searched is not searched again for each setting.
        schedule=scenario.schedule if scenario.searched is None else scenario.timetable(),
        costs=_scale(scenario.costs),
        layers=tuple(tuple(map(_scale_layer, own)) for own in scenario.layers),
        cluster=dataclasses.replace(
            cluster, within=_scale_speed(cluster.within), between=_scale_speed(cluster.between)
        ),
    )
    predictions = predict_scenario(scaled)
    facts = _describe(scaled, predictions.simulation.timetable.in_flight, name)
    events = [
        dataclasses.replace(event, step=0)
        for event in timeline_events(predictions.simulation.free_running, facts, 0)
    ]
    profile = Profile(
        program=title,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions={},
        num_cores=0,
        devices=(),
        pipelines=(facts,),
        events=tuple(sorted(events, key=lambda event: (event.begin, event.end))),
        notes=("Nothing was measured: a step was simulated. A cost of 1 is shown as 1 ms.",),
    )
    (analysis,) = analyse(profile)
    return write_page(profile, [Study(facts, analysis, predictions)], is_simulated=True)


def _scale(costs: Costs) -> Costs:
    """Converts costs to seconds."""

    def scale(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(value * _SECONDS_PER_UNIT for value in values)

    return dataclasses.replace(
        costs,
        forward=scale(costs.forward),
        backward=scale(costs.backward),
        weight_gradients=scale(costs.weight_gradients),
        update=scale(costs.update),
        transfers={edge: time * _SECONDS_PER_UNIT for edge, time in costs.transfers.items()},
        host=costs.host * _SECONDS_PER_UNIT,
    )


def _scale_layer(layer: Layer) -> Layer:
    """Converts what a layer takes to seconds."""
    times = {name: getattr(layer, name) * _SECONDS_PER_UNIT for name in ("forward", "backward", "update")}
    return dataclasses.replace(layer, **times)


def _scale_speed(speed: LinkSpeed) -> LinkSpeed:
    """Converts a link's speed to seconds."""
    return LinkSpeed(speed.latency * _SECONDS_PER_UNIT, speed.bandwidth / _SECONDS_PER_UNIT)


def _describe(scenario: Scenario, in_flight: tuple[int, ...], schedule: str) -> PipelineFacts:
    """Describes a scenario as if it had been a pipeline."""
    memory, halved = scenario.memory, scenario.halved
    held = None if memory is None else memory.num_held_bytes
    number = scenario.costs.num_stages
    return PipelineFacts(
        name="simulation",
        kind="training" if scenario.training else "inference",
        schedule=schedule,
        num_micro_batches=scenario.num_micro_batches,
        num_serialized=1,
        chunk_size=scenario.chunk_size,
        is_one_program=False,
        micro_batch_size=scenario.micro_batch_size if scenario.micro_batch_size > 1 else None,
        stages=tuple(
            StageFacts(
                index=index,
                name=f"stage {index}",
                ipu=scenario.device_mapping[index],
                level=scenario.levels[index],
                layers=(),
                forward_operations=0.0,
                backward_operations=0.0,
                is_fused=scenario.is_fused and index == number - 1,
                num_held_bytes=0 if held is None else held[index],
                in_flight=in_flight[index] * scenario.chunk_size,
                is_halved=index in halved,
                num_between_bytes=0 if memory is None else memory.num_between_bytes[index],
            )
            for index in range(number)
        ),
        edges=(),
        flows=(),
        memory=(),
        num_replicas=scenario.cluster.num_replicas,
    )
