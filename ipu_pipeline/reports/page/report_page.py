"""The page of a trace or a simulation: its text, and the data that `trace.js` and `page.js` draw."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import shlex
import string
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ipu_pipeline.engine.inspect import IpuMemory, PipelineFacts, StageFacts
from ipu_pipeline.engine.schedules import Costs, Layer, LinkSpeed, Scenario, Timeline, schedule_name
from ipu_pipeline.ground.tables import describe_share, describe_time
from ipu_pipeline.reports.analysis import analyse
from ipu_pipeline.reports.memory_over_time import profile_memory_over_time
from ipu_pipeline.reports.page.sections import (
    as_html,
    as_script,
    describe_setting,
    find_best,
    make_tables,
    summarise,
)
from ipu_pipeline.reports.predictions import Study, predict_scenario, study, timeline_events
from ipu_pipeline.reports.profile import Event, EventKind, Profile

# Columns of small integers, which `trace.js` reads. A trace with 40,000 actions has 70,000 events, which
# would be 15 MB of JSON as objects. As columns, it is 2 MB. A column whose entries are all the same is that
# entry. Any other is text: each integer is folded (0, -1, 1, -2 become 0, 1, 2, 3), written in groups of
# seven bits, the lowest first, with the eighth bit set where another one follows (LEB128, as in DWARF), all
# in base64.

Columns: TypeAlias = dict[str, Any]

_KINDS = tuple(EventKind)
_SHARED, _BOUNDED = 1, 2
_PER_MICROSECOND = 1000


def pack(events: Iterable[Event]) -> Columns:
    """Packs events as columns.

    Returns:
      A value for JSON: "count", and columns with an entry for each event, by begin: "kind" (a place in
      "kinds"), "begin" and "length" (in nanoseconds, the begin from the last entry's), "ipu",
      "pipeline", "stage", "batch" (the micro-batch), "step", "source" (all of them -1 for None; the host of
      process n is IPU -1 - n), "bytes",
      "flags" (1: shared, 2: bounded) and "name" (a place in "names").
    """
    ordered = sorted(events, key=lambda event: (event.begin, event.end))
    names: dict[str, int] = {}
    begins = [round(event.begin * _PER_MICROSECOND) for event in ordered]
    ends = [round(event.end * _PER_MICROSECOND) for event in ordered]
    columns = {
        "kind": [_KINDS.index(event.kind) for event in ordered],
        "begin": [begin - before for before, begin in zip([0, *begins], begins, strict=False)],
        "length": [end - begin for begin, end in zip(begins, ends, strict=True)],
        "ipu": [-1 - event.process if event.ipu is None else event.ipu for event in ordered],
        "pipeline": [_number(event.pipeline) for event in ordered],
        "stage": [_number(event.stage) for event in ordered],
        "batch": [_number(event.micro_batch) for event in ordered],
        "step": [_number(event.step) for event in ordered],
        "source": [_number(event.source) for event in ordered],
        "bytes": [event.num_bytes for event in ordered],
        "flags": [_SHARED * event.is_shared + _BOUNDED * event.is_bounded for event in ordered],
        "name": [names.setdefault(event.name, len(names)) for event in ordered],
    }
    packed: Columns = {name: pack_column(values) for name, values in columns.items()}
    return {
        "count": len(ordered),
        "kinds": [kind.value for kind in _KINDS],
        "names": list(names),
        **packed,
    }


def _number(value: int | None) -> int:
    return -1 if value is None else value


def pack_column(values: Sequence[int]) -> int | str:
    """Integers as text, or as one integer if all are equal."""
    if values and all(value == values[0] for value in values):
        return values[0]
    written = bytearray()
    for value in values:
        folded = 2 * value if value >= 0 else -2 * value - 1
        while folded > 127:
            written.append(folded & 127 | 128)
            folded >>= 7
        written.append(folded)
    return base64.b64encode(written).decode()


# The page of a trace.

_NO_PLOTLY = "report.html needs Plotly, which is not installed: pip install 'ipu_pipeline[reports]'"

# Okabe and Ito's colours, which colour-blind readers can tell apart, with the meanings that they have in
# the documentation's figures: blue forwards, orange backwards. They show on a light and on a dark page.
COLOURS = {
    EventKind.FORWARD: "#0072b2",
    EventKind.BACKWARD: "#f2b84b",
    EventKind.INPUT_GRADIENTS: "#f6d58b",
    EventKind.WEIGHT_GRADIENTS: "#e08a5a",
    EventKind.UPDATE: "#009e73",
    EventKind.TRANSFER: "#cc79a7",
    EventKind.INFEED_WAIT: "#a678cf",
    EventKind.OUTFEED: "#7a5c3a",
    EventKind.SPAN: "#007c91",
    EventKind.OTHER: "#98a2ae",
}
# The colours of numbers in the bars.
INKS = dict.fromkeys(EventKind, "#111111") | {EventKind.FORWARD: "#ffffff"}
_TITLES = {EventKind.TRANSFER: "transfer (received)", EventKind.OTHER: "other programs"}
_LINES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a6d3b", "#7f8c99")
_PARTS = {
    "variables": "#0072b2",
    "optimizer state": "#56b4e9",
    "accumulators": "#a678cf",
    "activations": "#009e73",
    "micro-batches": "#f0e442",
    "temporaries": "#e69f00",
    "transfers": "#cc79a7",
    "all": "#56b4e9",
}
_CHANGES = {"": "now", "even": "equal stages"}
# Nothing may be fetched, whatever a name contains.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def write_page(profile: Profile, studies: Sequence[Study] | None = None, is_simulated: bool = False) -> str:
    """Returns the text of `report.html`, which contains all that it needs and fetches nothing."""
    plotly = _read_plotly()
    studies = study(profile) if studies is None else studies
    data = {**_make_data(profile, studies), "isSimulated": is_simulated}
    if is_simulated:
        data["measured"] = pack([])
    return string.Template(_read("page.html")).substitute(
        policy=_POLICY,
        title=as_html(_title(profile.program)),
        style=_read("page.css"),
        heading=_describe_trace(profile),
        choice=_choose_pipeline(profile, data["first"]),
        summaries="".join(_section(index, summarise(pipeline)) for index, pipeline in enumerate(studies)),
        tables="".join(
            _section(index, make_tables(profile, pipeline)) for index, pipeline in enumerate(studies)
        ),
        data=as_script(data),
        plotly=plotly,
        scripts="\n".join(_read(name) for name in ("trace.js", "page.js")),
    )


def _read_plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise RuntimeError(_NO_PLOTLY) from error
    text: str = get_plotlyjs()
    assert "</script" not in text.lower()
    return text


def _read(name: str) -> str:
    return resources.files("ipu_pipeline.reports.page").joinpath(name).read_text(encoding="utf-8")


def _make_data(profile: Profile, studies: Sequence[Study]) -> dict[str, Any]:
    """The data that the scripts draw."""
    pipelines = []
    for index, pipeline in enumerate(studies):
        typical = pipeline.analysis.typical_step
        pipelines.append(
            {
                "name": pipeline.facts.name,
                "ipus": [use.ipu for use in pipeline.analysis.ipus],
                "stages": [{"name": stage.name, "ipu": stage.ipu} for stage in pipeline.facts.stages],
                "replicas": pipeline.facts.num_replicas,
                "steps": [[step.number, step.begin, step.end] for step in pipeline.analysis.steps],
                "typical": None if typical is None else typical.number,
                "hasPhases": pipeline.facts.schedule in ("grouped", "interleaved")
                and len(pipeline.analysis.ipus) > 1,
                "device": pipeline.facts.device_word,
                "settings": _make_settings(pipeline),
                "count": pipeline.analysis.num_micro_batches // pipeline.facts.num_replicas,
                "simulated": _make_simulated(index, pipeline),
                "memory": _make_memory(profile, index, pipeline),
            }
        )
    most = max(range(len(studies)), key=lambda index: studies[index].analysis.num_actions, default=0)
    return {
        "measured": pack(profile.events),
        "pipelines": pipelines,
        "first": most,
        "colours": {kind.value: colour for kind, colour in COLOURS.items()},
        "inks": {kind.value: ink for kind, ink in INKS.items()},
        "titles": {kind.value: _TITLES.get(kind, kind.value) for kind in EventKind},
        "lines": _LINES,
        "parts": _PARTS,
    }


def _make_simulated(index: int, pipeline: Study) -> dict[str, Any]:
    """The simulated timelines, by their names on the page."""
    if pipeline.predictions is None:
        return {}
    links = [(link.source, link.target, link.num_bytes) for link in pipeline.analysis.links]
    simulation = pipeline.predictions.simulation
    timelines = {"free": simulation.free_running, "lock": simulation.lock_step}
    return {
        name: pack(timeline_events(timeline, pipeline.facts, index, links))
        for name, timeline in timelines.items()
    }


def _make_settings(pipeline: Study) -> list[dict[str, Any]]:
    """The points of the chart of what-ifs; empty where memory is not known.

    A step of another number of micro-batches counts as long as it would with the present number.
    """
    if pipeline.predictions is None:
        return []
    (present, *alternatives), best = pipeline.predictions.variants, find_best(pipeline.predictions)
    even = pipeline.predictions.advice.even
    return [
        {
            "change": _CHANGES.get(row.change, row.change.replace("gradient accumulation ", "")),
            "rank": best.index(row) + 1 if row in best else 0,
            "bytes": row.num_peak_bytes,
            "time": present.step_time * present.samples_per_second / row.samples_per_second * 1e6,
            "lines": [
                describe_setting(row),
                f"step {describe_time(row.step_time * 1e6)}, {100 * row.gain:+.1f}% samples/s",
                f"utilisation {describe_share(row.utilisation)}",
            ],
        }
        for row in (*alternatives, *([] if even is None else [even]), present)
        if row.num_peak_bytes is not None and row.samples_per_second
    ]


def _make_memory(profile: Profile, index: int, pipeline: Study) -> dict[str, Any]:
    """The memory of IPUs, for each timeline on the page."""
    memory: dict[str, Any] = {"measured": pack_measured(profile, index)}
    if pipeline.predictions is not None:
        memory["free"] = _pack_simulated(pipeline.facts, pipeline.predictions.simulation.free_running)
        memory["lock"] = _pack_simulated(pipeline.facts, pipeline.predictions.simulation.lock_step)
    return memory


def _describe_trace(profile: Profile) -> str:
    """The heading: what was traced, on which devices, and remarks."""
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions.items())
    kinds = ", ".join(sorted({device.kind for device in profile.devices}))
    number = len(profile.devices)
    devices = f"{number} device{'s' if number != 1 else ''}{f' ({kinds})' if kinds else ''}"
    facts = profile.created
    if number:
        facts += f"; {devices}, {profile.num_cores} cores of the host; {versions}"
    notes = "".join(f"<li>{as_html(note)}</li>" for note in profile.notes)
    title = _title(profile.program)
    lines = [facts] if title == profile.program else [profile.program, facts]
    return (
        f"<h1>{as_html(title)}</h1>\n"
        + "".join(f'<p class="soft">{as_html(line)}</p>\n' for line in lines)
        + (f'<div class="notes"><ul>{notes}</ul></div>\n' if notes else "")
    )


def _title(program: str) -> str:
    """The name of a program's file; the whole text if it does not begin with one."""
    try:
        first = shlex.split(program)[0]
    except (ValueError, IndexError):
        return program or "A trace"
    return Path(first).name if Path(first).suffix == ".py" else program


def _choose_pipeline(profile: Profile, first: int) -> str:
    """A menu of the pipelines, if there are several."""
    if len(profile.pipelines) < 2:
        return ""
    options = "".join(
        f'<option value="{index}"{" selected" if index == first else ""}>'
        f"{as_html(f'{facts.name} ({facts.kind})')}</option>"
        for index, facts in enumerate(profile.pipelines)
    )
    return (
        '<div class="controls"><label>Pipeline <select id="pipeline" autocomplete="off">'
        f"{options}</select></label></div>\n"
    )


def _section(index: int, markup: str) -> str:
    """The part of the page that is shown if a pipeline is chosen."""
    return f'<section data-pipeline="{index}">\n{markup}</section>\n'


def _pack_memory(ipu: int, times: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """Packs the memory of an IPU.

    Returns:
      A value for JSON: "ipu", "count" of times, "times" (in nanoseconds, each from the one before) and
      "parts" with "name" and "values"; columns are as `pack_column` makes them.
    """
    rounded = np.round(np.asarray(times, np.float64) * 1000).astype(np.int64)
    return {
        "ipu": ipu,
        "count": len(rounded),
        "times": pack_column(np.diff(rounded, prepend=0).tolist()),
        "parts": [
            {"name": name, "values": pack_column(np.asarray(values, np.int64).reshape(-1).tolist())}
            for name, values in parts.items()
            if np.any(values)
        ],
    }


def pack_measured(profile: Profile, pipeline: int) -> list[dict[str, Any]]:
    """Packs the memory of each IPU while a pipeline ran, by the plan and the measured times.

    The list is empty without a plan.
    """
    return [
        _pack_memory(
            memory.ipu,
            memory.times,
            {"micro-batches" if name == "feed" else name: part for name, part in memory.parts.items()},
        )
        for memory in profile_memory_over_time(profile, pipeline)
    ]


def _pack_simulated(facts: PipelineFacts, timeline: Timeline) -> list[dict[str, Any]]:
    """Packs the memory of each IPU in a simulated step, with times in seconds; empty if it is not known."""
    plans = {plan.ipu: plan for plan in facts.memory}
    packed = []
    for ipu, (times, sizes) in sorted(timeline.memory.items()):
        parts: dict[str, Any] = {"all": sizes}
        plan = plans.get(ipu % facts.num_ipus_each)
        if plan is not None:
            parts = _find_constant(plan)
            parts["activations"] = np.maximum(0, sizes - sum(parts.values()))
        packed.append(_pack_memory(ipu, times * 1e6, parts))
    return packed


def _find_constant(plan: IpuMemory) -> dict[str, int]:
    """The memory that an IPU holds all the time, by the plan."""
    variables, optimizer_state, accumulators = plan.num_state_bytes
    return {
        "variables": variables,
        "optimizer state": optimizer_state,
        "accumulators": accumulators,
        "micro-batches": plan.num_feed_bytes,
        "temporaries": plan.num_temporary_bytes or 0,
    }


# The page of a simulation.

_SECONDS_PER_UNIT = 1e-3


def write_simulation(scenario: Scenario, title: str) -> str:
    """A page like `report.html`, without anything measured."""
    cluster, name = scenario.cluster, schedule_name(scenario.schedule)
    scaled = dataclasses.replace(
        scenario,
        # What was searched is not searched again for each setting.
        schedule=scenario.schedule if scenario.searched is None else scenario.timetable(),
        costs=_scale(scenario.costs),
        layers=tuple(tuple(map(_scale_layer, layers_of_stage)) for layers_of_stage in scenario.layers),
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
    held_bytes = None if memory is None else memory.num_held_bytes
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
                num_held_bytes=0 if held_bytes is None else held_bytes[index],
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
