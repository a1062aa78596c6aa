"""`ipu-pipeline schedule`: the staircase of a schedule, as text."""

from __future__ import annotations

import argparse
import json
import shutil
from typing import Any

from ipu_pipeline.command_line.scenario_options import (
    DEFAULT_MICRO_BATCHES,
    DEFAULT_STAGES,
    add_pipeline,
    check_size,
    find_mapping,
    tell_example,
)
from ipu_pipeline.command_line.tables import show
from ipu_pipeline.engine.schedules import (
    SCHEDULES,
    Action,
    Costs,
    Scenario,
    ScheduleError,
    Timetable,
    find_ramps,
    find_slots,
    format_staircase,
    timetable,
)

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Adds a description and arguments to the command's parser; see `main`."""
    parser.description = (
        "Print the staircase of a schedule, with a line for each device and a column for each time-step. "
        "F3 is the forward pass of micro-batch 3 and B3 its backward pass; I3 and W3 are a split backward "
        "pass (input and weight gradients). If a device has several stages, F2.3 is the forward pass in "
        "stage 2. A dot is an idle time-step. The schedule searched assumes that forward, input and weight "
        "gradients take equally long."
    )
    add_pipeline(parser)
    parser.add_argument(
        "--width",
        type=_width,
        metavar="N",
        help="characters per line, 0 for no limit; the terminal's width by default",
    )
    parser.set_defaults(call=lambda parsed: _run(parser, parsed))


def _width(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number from 0; got {text!r}")
    return int(text)


def _run(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    num_stages = parsed.stages or DEFAULT_STAGES
    count, training = parsed.micro_batches or DEFAULT_MICRO_BATCHES, not parsed.inference
    schedule = parsed.schedule or "grouped"
    mapping = find_mapping(parser, parsed.device_mapping, num_stages, schedule)
    check_size(parser, num_stages, count, training)
    try:
        table = _make_table(schedule, num_stages, count, mapping, training)
    except ScheduleError as error:
        parser.error(f"argument --device-mapping: {error}")
    phases = find_ramps(table, mapping)
    if parsed.json:
        slots = find_slots(table, mapping, range(1, table.num_time_steps + 1))
        show(
            json.dumps(
                {
                    "schedule": schedule,
                    "num_stages": num_stages,
                    "num_micro_batches": count,
                    "device_mapping": mapping,
                    "training": training,
                    "num_time_steps": table.num_time_steps,
                    "in_flight": table.in_flight,
                    "phases": [phase._asdict() for phase in phases],
                    "ipus": [[_describe(action) for action in row] for row in slots],
                }
            )
        )
        return 0
    ipus = len(set(mapping))
    waits = 1 - len(table.order) / (ipus * table.num_time_steps)
    width = shutil.get_terminal_size().columns if parsed.width is None else parsed.width
    purpose = next((f"\n{known.purpose}" for known in SCHEDULES if known.name == schedule), "")
    show(
        f"{schedule}: {num_stages} stages on {ipus} devices, {count} micro-batches, "
        f"{table.num_time_steps} time-steps, devices idle for {waits:.0%} of them\n\n"
        f"{format_staircase(table, mapping, width or None)}\n"
        f"in flight at most, by stage: {' '.join(map(str, table.in_flight))}{purpose}"
        f"{tell_example(parser, parsed)}"
    )
    return 0


def _make_table(
    schedule: Any, num_stages: int, count: int, mapping: tuple[int, ...], training: bool
) -> Timetable:
    if schedule == "searched" and training:
        costs = Costs.of(num_stages, forward=1.0, backward=2.0)
        return Scenario(costs, schedule, count, mapping).timetable()
    return timetable(schedule, num_stages, count, mapping, training)


def _describe(action: Action | None) -> dict[str, Any] | None:
    if action is None:
        return None
    return {"kind": action.kind.name.lower(), "stage": action.stage, "micro_batch": action.micro_batch}
