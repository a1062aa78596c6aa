"""Profiles of pipelines that never ran: every action takes a time-step of its schedule."""

from ipu_pipeline.engine.inspect import Edge, IpuMemory, LayerFacts, PipelineFacts, StageFacts
from ipu_pipeline.engine.schedules.schedule_arguments import timetable
from ipu_pipeline.engine.schedules.timetables import ActionKind
from ipu_pipeline.reports.profile import DeviceFacts, Event, EventKind, Profile

SLOT = 1000.0  # microseconds from one time-step to the next
ACTION, TRANSFER, UPDATE = 900.0, 60.0, 300.0  # what is taken of them
SENT = 4096


def make_facts(num_stages=4, num_micro_batches=8, schedule="grouped", name="Pipeline", **changed):
    """A pipeline with a stage per IPU; keywords replace what it would be."""
    stages = tuple(
        StageFacts(
            index=index,
            name=f"stage {index} (dense{index})",
            ipu=index,
            level=index,
            layers=(
                LayerFacts(f"dense{index}/a", 100, 400, 1e6),
                LayerFacts(f"dense{index}/b", 300, 1200, 3e6),
            ),
            forward_operations=1e6,
            backward_operations=2e6,
            is_fused=False,
            num_held_bytes=1 << 20,
            in_flight=2 * (num_stages - index) - 1,
        )
        for index in range(num_stages)
    )
    facts = {
        "name": name,
        "kind": "training",
        "schedule": schedule,
        "num_micro_batches": num_micro_batches,
        "num_serialized": 1,
        "chunk_size": 1,
        "is_one_program": num_stages == 1,
        "micro_batch_size": 32,
        "stages": stages,
        "edges": tuple(Edge(index, index + 1, SENT, SENT) for index in range(num_stages - 1)),
        "flows": (),
        "memory": tuple(
            IpuMemory(index, 1600, 3200, 1600, stage.in_flight << 20, 512, 256, 0)
            for index, stage in enumerate(stages)
        ),
    }
    return PipelineFacts(**{"device_word": "IPU", **facts, **changed})


def make_events(facts, num_steps=1, pipeline=0, begin=0.0, gap=0.0):
    """Steps one after another: actions in time-steps, then updates; transfers between."""
    number, count = len(facts.stages), facts.num_micro_batches
    ipus = tuple(stage.ipu for stage in facts.stages)
    table = timetable(facts.schedule, number, count, ipus, True)
    events = []
    for step in range(num_steps):
        for action, time_step in zip(table.order, table.time_steps, strict=True):
            first = begin + (time_step - 1) * SLOT
            is_forward = action.kind is ActionKind.FORWARD
            kind = EventKind.FORWARD if is_forward else EventKind.BACKWARD
            common = (pipeline, action.stage, action.micro_batch, step)
            events.append(Event(kind, first, first + ACTION, ipus[action.stage], *common))
            target = action.stage + (1 if is_forward else -1)
            if 0 <= target < number and ipus[target] != ipus[action.stage]:
                sent = (first + ACTION, first + ACTION + TRANSFER)
                more = {"num_bytes": SENT, "source": ipus[action.stage]}
                events.append(Event(EventKind.TRANSFER, *sent, ipus[target], *common, **more))
        first = begin + table.num_time_steps * SLOT
        for ipu in sorted(set(ipus)):
            events.append(Event(EventKind.UPDATE, first, first + UPDATE, ipu, pipeline, step=step))
        begin = first + UPDATE + gap
    return tuple(sorted(events, key=lambda event: (event.begin, event.end)))


def make_profile(facts=None, events=None, num_steps=1, **changed):
    """A profile of one pipeline, or of what keywords say."""
    facts = facts or make_facts()
    events = make_events(facts, num_steps) if events is None else events
    given = {
        "program": "train.py --steps 1",
        "created": "2026-01-02T03:04:05+00:00",
        "versions": {"ipu_pipeline": "1", "jax": "2"},
        "num_cores": 2,
        "devices": tuple(DeviceFacts(ipu, ipu, "cpu", "cpu") for ipu in range(len(facts.stages))),
        "pipelines": (facts,),
        "events": events,
    }
    return Profile(**{**given, **changed})
