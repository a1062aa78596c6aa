"""`ipu-pipeline monitor`: lists the user's running pipelines, with their IPUs, speed and memory."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ipu_pipeline.ground.tables import align, describe_bytes, printable, shorten
from ipu_pipeline.processes import board
from ipu_pipeline.processes.launcher import Failure, JobHistory

_HEADINGS = (
    "pid",
    "program",
    "pipeline",
    "run by",
    "state",
    "IPUs",
    "updates",
    "speed",
    "planned",
    "process",
    "since",
)
_NUMBERS = ("pid", "updates", "speed", "planned", "process")
_MAX_NAME = 32


def add(parser: argparse.ArgumentParser) -> None:
    """Adds a description and arguments to the command's parser; see `main`."""
    parser.description = (
        "List your running pipelines on this machine, with their IPUs, the number of weight updates "
        "(executions in inference), samples or micro-batches per second, the largest planned memory of "
        "an IPU, and the memory of the process. Programs with IPU_PIPELINE_ANNOUNCE=0 are not shown."
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON: `programs`, each with `pid`, `program`, `started`, `resident_bytes`, `job` "
        "(null, or `begun`, `restarts`, `failures`, `goodput`) and `runs`, each with `name`, `state`, "
        "`since`, `trains`, `unit`, `count` (updates), `handled` and `rate` (units in total and per second)"
        ", `batch_size`, `samples_per_second`, `process`, `num_processes` and `ipus`, each with `ipu`, "
        "`device`, `platform`, `kind` and `planned_bytes`. Unknown values are null",
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=2.0,
        metavar="SECONDS",
        help="repeat every SECONDS (2), until Ctrl-C",
    )
    parser.set_defaults(call=lambda parsed: _monitor(parsed.json, parsed.watch))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"must be a number of seconds from 0.1 to 86400; got {text!r}")
    return seconds


def _monitor(as_json: bool, interval: float | None) -> int:
    if interval is None:
        print(_describe(as_json))  # noqa: T201  # a program
        return 0
    clears = sys.stdout.isatty() and not as_json
    try:
        while True:
            text = _describe(as_json)
            print(f"\033[H\033[2J{text}" if clears else text, flush=True)  # noqa: T201  # a program
            time.sleep(interval)
    except KeyboardInterrupt:
        return 130


def _describe(as_json: bool) -> str:
    entries = board.read_all()
    for reason in entries.refused:
        print(f"ipu-pipeline monitor: {printable(reason)}.", file=sys.stderr)  # noqa: T201  # a program
    programs = [_complete(announced) for announced in entries.announced]
    if as_json:
        return json.dumps({"programs": programs})
    if not programs:
        return "No pipelines are running."
    rows = [row for program in programs for row in _make_rows(program)]
    lines, headings = [_HEADINGS, *rows], list(_HEADINGS)
    if not any(run["num_processes"] > 1 for program in programs for run in program["runs"]):
        place = headings.index("run by")
        del headings[place]
        lines = [(*line[:place], *line[place + 1 :]) for line in lines]
    table = align(lines, [headings.index(name) for name in _NUMBERS])
    return "\n".join([*table, *_describe_jobs(programs)])


def _describe_jobs(programs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each job that was started again, with the pids of its processes."""
    pids: dict[tuple[float, str], list[str]] = {}
    goodputs: dict[tuple[float, str], float] = {}
    for program in programs:
        job = program["job"]
        if job is not None and job["restarts"]:
            failures = tuple(
                Failure(**{field: failure[field] for field in Failure.__dataclass_fields__})
                for failure in job["failures"]
            )
            text = printable(JobHistory(job["begun"], job["restarts"], failures).describe())
            key = (job["begun"], text)
            pids.setdefault(key, []).append(str(program["pid"]))
            goodputs[key] = max(goodputs.get(key, 0.0), job["goodput"] or 0.0)
    return [
        f"{', '.join(numbers)}: {key[1]}{f' Goodput: {goodputs[key]:.2f}.' if goodputs[key] else ''}"
        for key, numbers in pids.items()
    ]


def _complete(announced: Mapping[str, Any]) -> dict[str, Any]:
    """Completes a program's announcement with facts from the system; leaves out what identifies it."""
    process = announced["process"]
    return {
        "pid": process["pid"],
        "program": announced["program"],
        "started": announced["started"],
        "resident_bytes": board.resident_bytes(process["pid"]),
        "job": announced["job"],
        "runs": [_complete_run(run) for run in announced["runs"]],
    }


def _complete_run(run: Mapping[str, Any]) -> dict[str, Any]:
    rate, size = run["rate"], run["batch_size"]
    is_known = rate is not None and size is not None and run["unit"] == "micro-batch"
    return {**run, "samples_per_second": rate * size if is_known else None}


def _make_rows(program: Mapping[str, Any]) -> list[tuple[str, ...]]:
    size = program["resident_bytes"]
    head = (str(program["pid"]), _shown(Path(program["program"]).name))
    tail = "" if size is None else describe_bytes(size)
    runs = [
        (
            _shown(run["name"]),
            f"process {run['process']} of {run['num_processes']}" if run["num_processes"] > 1 else "",
            _shown(run["state"]),
            _describe_ipus(run["ipus"], "ipu" if run["num_processes"] > 1 else "device"),
            f"{run['count']:,}",
            _describe_rate(run),
            _describe_planned(run["ipus"]),
        )
        for run in program["runs"]
    ] or [("",) * 7]
    sinces = [_describe_time(run["since"]) for run in program["runs"]] or [
        _describe_time(program["started"])
    ]
    return [
        (*(head if number == 0 else ("", "")), *run, tail if number == 0 else "", since)
        for number, (run, since) in enumerate(zip(runs, sinces, strict=True))
    ]


def _describe_ipus(ipus: Sequence[Mapping[str, Any]], number: str) -> str:
    """Devices by kind: `0..3 cpu`."""
    by_kind: dict[str, list[int]] = {}
    for ipu in ipus:
        by_kind.setdefault(ipu["kind"], []).append(ipu[number])
    return "; ".join(
        f"{_describe_numbers(sorted(numbers))} {_shown(kind)}" for kind, numbers in by_kind.items()
    )


def _describe_numbers(numbers: Sequence[int]) -> str:
    is_run = list(numbers) == list(range(numbers[0], numbers[0] + len(numbers)))
    if len(numbers) > 2 and is_run:
        return f"{numbers[0]}..{numbers[-1]}"
    return shorten(", ".join(map(str, numbers)), _MAX_NAME)


def _describe_rate(run: Mapping[str, Any]) -> str:
    rate, unit = run["rate"], f"{run['unit']}s"
    if run["samples_per_second"] is not None:
        rate, unit = run["samples_per_second"], "samples"
    elif run["unit"] == "micro-batch":
        unit = "micro-batches"
    if rate is None:
        return ""
    return f"{rate:,.{0 if rate >= 100 else 1 if rate >= 10 else 2}f} {unit}/s"


def _describe_planned(ipus: Sequence[Mapping[str, Any]]) -> str:
    """The memory of the IPU that takes most."""
    planned = [(ipu["planned_bytes"], ipu["ipu"]) for ipu in ipus if ipu["planned_bytes"] is not None]
    if not planned:
        return ""
    most, number = max(planned, key=lambda pair: (pair[0], -pair[1]))
    return describe_bytes(most) if len(ipus) == 1 else f"{describe_bytes(most)} on IPU {number}"


def _describe_time(seconds: float) -> str:
    try:
        moment = datetime.fromtimestamp(seconds)
    except (OverflowError, OSError, ValueError):
        return ""
    today = datetime.now().date() == moment.date()
    return moment.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M")


def _shown(text: str) -> str:
    return shorten(printable(text), _MAX_NAME)
