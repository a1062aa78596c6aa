"""The page as a whole: its text, and the data that `trace.js` and `page.js` draw."""

from __future__ import annotations

import shlex
import string
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ipu_pipeline.reports.events import EventKind
from ipu_pipeline.reports.page.columns import pack
from ipu_pipeline.reports.page.escaping import as_html, as_script
from ipu_pipeline.reports.page.figures import make_tables, summarise
from ipu_pipeline.reports.page.memory import pack_measured, pack_simulated
from ipu_pipeline.reports.predictions import timeline_events
from ipu_pipeline.reports.profile import Profile
from ipu_pipeline.reports.studies import Study, study

__all__ = ["COLOURS", "INKS", "write_page"]

_NO_PLOTLY = "report.html needs Plotly, which is not installed: pip install 'ipu_pipeline[reports]'"

# Green and red as in Graphcore's pictures; the red is dark enough to be told apart without seeing its hue.
COLOURS = {
    EventKind.FORWARD: "#6cc19b",
    EventKind.BACKWARD: "#b3261e",
    EventKind.INPUT_GRADIENTS: "#cf4a3c",
    EventKind.WEIGHT_GRADIENTS: "#f0ab99",
    EventKind.UPDATE: "#2458a6",
    EventKind.TRANSFER: "#d99a00",
    EventKind.INFEED_WAIT: "#a678cf",
    EventKind.OUTFEED: "#7a5c3a",
    EventKind.SPAN: "#007c91",
    EventKind.OTHER: "#98a2ae",
}
IDLE = "#dfe5ec"
# The colours of numbers in the bars.
INKS = dict.fromkeys(EventKind, "#ffffff") | {
    EventKind.FORWARD: "#0b2117",
    EventKind.WEIGHT_GRADIENTS: "#3a0d05",
    EventKind.OTHER: "#111111",
}
_TITLES = {EventKind.TRANSFER: "transfer (to this IPU)", EventKind.OTHER: "other programs"}
_LINES = ("#2458a6", "#b3261e", "#1f7a55", "#a86f00", "#7040a0", "#5b4630", "#007c91", "#4a5561")
_PARTS = {
    "variables": "#2458a6",
    "optimizer state": "#7fa6d9",
    "accumulators": "#a678cf",
    "activations": "#6cc19b",
    "micro-batches": "#d9c46c",
    "temporaries": "#d98f66",
    "transfers": "#d99a00",
    "all": "#7fa6d9",
}
# Nothing may be fetched, whatever a name contains.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def write_page(profile: Profile, studies: Sequence[Study] | None = None, is_simulated: bool = False) -> str:
    """Returns the text of `report.html`, which contains all that it needs and fetches nothing.

    Args:
      profile: the profile.
      studies: the studies of its pipelines; None: they are made here.
      is_simulated: whether its events were simulated, not measured.

    Raises:
      RuntimeError: Plotly is not installed (the extra `reports`).
    """
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
        summaries="".join(_section(index, summarise(one)) for index, one in enumerate(studies)),
        tables="".join(_section(index, make_tables(profile, one)) for index, one in enumerate(studies)),
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
    for index, one in enumerate(studies):
        typical = one.analysis.typical_step
        pipelines.append(
            {
                "name": one.facts.name,
                "ipus": [use.ipu for use in one.analysis.ipus],
                "stages": [{"name": stage.name, "ipu": stage.ipu} for stage in one.facts.stages],
                "replicas": one.facts.num_replicas,
                "steps": [[step.number, step.begin, step.end] for step in one.analysis.steps],
                "typical": None if typical is None else typical.number,
                "hasPhases": one.facts.schedule in ("grouped", "interleaved")
                and len(one.analysis.ipus) > 1,
                "simulated": _make_simulated(index, one),
                "memory": _make_memory(profile, index, one),
            }
        )
    most = max(range(len(studies)), key=lambda index: studies[index].analysis.num_actions, default=0)
    return {
        "measured": pack(profile.events),
        "pipelines": pipelines,
        "first": most,
        "colours": {kind.value: colour for kind, colour in COLOURS.items()} | {"idle": IDLE},
        "inks": {kind.value: ink for kind, ink in INKS.items()},
        "titles": {kind.value: _TITLES.get(kind, kind.value) for kind in EventKind},
        "lines": _LINES,
        "parts": _PARTS,
    }


def _make_simulated(index: int, one: Study) -> dict[str, Any]:
    """The simulated timelines, by their names on the page."""
    if one.predictions is None:
        return {}
    links = [(link.source, link.target, link.num_bytes) for link in one.analysis.links]
    simulation = one.predictions.simulation
    both = {"free": simulation.free_running, "lock": simulation.lock_step}
    return {
        name: pack(timeline_events(timeline, one.facts, index, links)) for name, timeline in both.items()
    }


def _make_memory(profile: Profile, index: int, one: Study) -> dict[str, Any]:
    """The memory of IPUs, for each timeline on the page."""
    found: dict[str, Any] = {"measured": pack_measured(profile, index)}
    if one.predictions is not None:
        found["free"] = pack_simulated(one.facts, one.predictions.simulation.free_running)
        found["lock"] = pack_simulated(one.facts, one.predictions.simulation.lock_step)
    return found


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
