"""`ipu-pipeline report`: summarizes a profile and rebuilds its page."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ipu_pipeline.command_line.main import open_page
from ipu_pipeline.ground.tables import describe_share, describe_speed, describe_time, printable, say_device
from ipu_pipeline.reports.analysis import PipelineAnalysis
from ipu_pipeline.reports.page import write_page
from ipu_pipeline.reports.predictions import Study, study
from ipu_pipeline.reports.profile import read_profile, to_chrome_trace
from ipu_pipeline.reports.report_files import check_directory, write_reports

_PROFILE, _TRACE, _PAGE = "profile.json", "trace.json", "report.html"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds a description and arguments to the command's parser; see `main`."""
    parser.description = (
        "Print a summary of DIR/profile.json, and rebuild report.html and trace.json from it. The page "
        "needs the extra `reports`."
    )
    parser.add_argument("directory", metavar="DIR", help="a directory that `ipu-pipeline profile` wrote")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--open", action="store_true", help="open the report in a browser")
    parser.set_defaults(call=lambda parsed: report(parsed.directory, parsed.json, parsed.open))


def report(directory: str, as_json: bool = False, opens: bool = False) -> int:
    """Rebuilds the page of a trace, and prints a summary."""
    folder = Path(directory)
    try:
        profile = read_profile(_read(folder))
        studies = study(profile)
        texts = {_PAGE: write_page(profile, studies), _TRACE: to_chrome_trace(profile)}
        check_directory(folder, texts)
        write_reports(folder, texts)
    except (OSError, ValueError, RuntimeError) as error:
        return _refuse(str(error))
    page = folder / _PAGE
    processes = {device.ipu: device.process for device in profile.devices}
    if as_json:
        entries = [_as_entries(pipeline, processes) for pipeline in studies]
        print(json.dumps({"page": str(page.absolute()), "pipelines": entries}, indent=2))  # noqa: T201
    else:
        lines = [line for pipeline in studies for line in _as_lines(pipeline, processes)]
        notes = [f"Note: {note}" for note in profile.notes]
        summary = [f"The page is {page.absolute()}", *notes, *lines]
        print("\n".join(map(printable, summary)))  # noqa: T201
    if opens:
        open_page(page)
    return 0


def _refuse(fault: str) -> int:
    print(f"ipu-pipeline report: {printable(fault)}", file=sys.stderr)  # noqa: T201  # a program
    return 2


def _read(folder: Path) -> str:
    """The text of a directory's profile."""
    if not folder.is_dir():
        raise ValueError(f"there is no directory {str(folder)!r}")
    try:
        return (folder / _PROFILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(
            f"the directory {str(folder)!r} has no {_PROFILE}; ipu-pipeline profile SCRIPT writes one"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{_PROFILE}: it is damaged ({error}). Record the trace again.") from error


def _as_lines(pipeline: Study, processes: Mapping[int, int]) -> list[str]:
    """The summary of a pipeline for people."""
    facts, analysis, word = pipeline.facts, pipeline.analysis, pipeline.facts.device_word
    if not analysis.steps:
        return ["", f"{facts.name}: no step of it was recorded"]
    speed, unit = analysis.samples_per_second, "samples/s"
    if speed is None:
        speed, unit = analysis.micro_batches_per_second, "micro-batches/s"
    balanced = analysis.balanced_utilisation
    beside = "" if balanced is None else f" ({describe_share(balanced)} if all stages took equally long)"
    limiting = analysis.stages[analysis.limiting_stage]
    limit = (
        f"stage {limiting.stage} on IPU {analysis.limiting_ipu}, {describe_time(limiting.length)} for a "
        "micro-batch"
    )
    if analysis.is_even and len(analysis.ipus) > 1:
        limit = "none: all IPUs are about equally busy"
    if pipeline.is_held_back_by_host:
        limit = "the host, for which IPUs wait more than for each other"
    rows = [
        ("step", describe_time(analysis.step_time)),
        ("speed", f"{describe_speed(speed)} {unit}"),
        ("utilisation", describe_share(analysis.utilisation) + beside),
        ("held back by" if pipeline.is_held_back_by_host else "limiting stage", say_device(limit, word)),
        *zip(
            [f"{word} {use.ipu}" for use in analysis.ipus], _describe_uses(analysis, processes), strict=True
        ),
    ]
    rows += [("advice", sentence) for sentence in pipeline.advice]
    width = max(len(name) for name, _value in rows)
    return [
        "",
        f"{facts.name} ({facts.kind}, {facts.schedule}, {analysis.num_micro_batches} micro-batches a step"
        + (f" of {facts.num_replicas} replicas)" if facts.num_replicas > 1 else ")"),
        *(f"  {name.ljust(width)}  {value}" for name, value in rows),
    ]


def _describe_uses(analysis: PipelineAnalysis, processes: Mapping[int, int]) -> list[str]:
    """Describes how busy each IPU is, with a column for its process if there are several."""
    busy = [f"busy {describe_share(use.utilisation)}" for use in analysis.ipus]
    if not any(processes.values()):
        return busy
    width = max(map(len, busy))
    return [
        f"{share.ljust(width)}  process {processes[use.ipu]}" if use.ipu in processes else share
        for share, use in zip(busy, analysis.ipus, strict=True)
    ]


def _as_entries(pipeline: Study, processes: Mapping[int, int]) -> dict[str, Any]:
    """The summary of a pipeline for programs; times are in microseconds, the scenario's in seconds.

    Takes the same arguments as `_as_lines`.
    """
    facts, analysis, predicted = pipeline.facts, pipeline.analysis, pipeline.predictions
    return {
        "name": facts.name,
        "kind": facts.kind,
        "schedule": facts.schedule,
        **dataclasses.asdict(analysis),
        "ipus": [{**dataclasses.asdict(use), "process": processes.get(use.ipu)} for use in analysis.ipus],
        "bubble": analysis.bubble,
        "advice": " ".join(pipeline.advice) or None,
        "host": None
        if pipeline.host is None
        else {**dataclasses.asdict(pipeline.host), "idle": pipeline.host.idle},
        "scenario": None if predicted is None else predicted.simulation.scenario.as_dict(),
    }
