"""`ipu-pipeline schedule`: a schedule's staircase as text, and options shared with `simulate`."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ipu_pipeline.command_line.main import show
from ipu_pipeline.engine.schedules import (
    MAX_ACTIONS,
    SCHEDULES,
    Action,
    Costs,
    Scenario,
    ScheduleError,
    SearchedSchedule,
    Timetable,
    check_schedule,
    find_ramps,
    find_slots,
    format_staircase,
    named_schedules,
    schedule_name,
    timetable,
)

# Options that describe a pipeline, for commands that run none.

DEFAULT_STAGES, DEFAULT_MICRO_BATCHES = 4, 8
# Schedules with two stages on each device: stages go around the devices, or down and up again.
_AROUND = {"looped", "looped_zero_bubble"}
_DOWN_AND_UP = {"zero_bubble_v", "v_half", "v_min", "dual_pipe_v"}


def at_least_one(text: str) -> int:
    """The type of options that count something."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1; got {text!r}")
    return value


def number(text: str) -> float:
    """The type of options that are a time."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value >= 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0; got {text!r}")
    return value


def numbers(text: str) -> list[float]:
    """The type of options that are a time, or a list of times."""
    return [number(part) for part in text.split(",")]


def _mapping(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"must be numbers from 0, as in 0,1,1,0; got {text!r}")
    return [int(part) for part in parts]


def _width(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number from 0; got {text!r}")
    return int(text)


def _schedule(text: str) -> str:
    try:
        schedule = check_schedule(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not isinstance(schedule, SearchedSchedule) and schedule not in named_schedules():
        raise argparse.ArgumentTypeError(f"must be a name, not a file; got {text!r}")
    return schedule_name(schedule)


# The option and its value's placeholder -> (the value's type, help). A flag has neither value nor type.
Options = Mapping[str, tuple[Callable[[str], Any] | None, str]]
OF_PIPELINE: Options = {
    "--stages N": (at_least_one, f"number of stages; {DEFAULT_STAGES} by default"),
    "--micro-batches N": (
        at_least_one,
        "micro-batches per weight update (gradient accumulation count); "
        f"{DEFAULT_MICRO_BATCHES} by default",
    ),
    "--schedule NAME": (
        _schedule,
        f"one of {', '.join(named_schedules())}, a name that another library uses, or searched (an "
        "order made for these costs); grouped by default",
    ),
    "--device-mapping LIST": (
        _mapping,
        "the device of each stage, from 0, such as 0,1,1,0. By default each stage has its own device, "
        "or two stages share one if the schedule needs that",
    ),
    "--inference": (None, "forward passes only"),
    "--json": (None, "print JSON"),
}


def add_options(parser: argparse.ArgumentParser, options: Options) -> None:
    """Adds options to a command's parser; those that are left out are None, and flags False."""
    for usage, (kind, text) in options.items():
        flag, _, metavar = usage.partition(" ")
        if kind is None:
            parser.add_argument(flag, action="store_true", help=text)
        else:
            parser.add_argument(flag, type=kind, metavar=metavar, help=text)


def tell_example(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> str:
    """The command of the example that is shown if no option was given; empty if one was."""
    if vars(parsed) != {"command": parsed.command, **vars(parser.parse_args([]))}:
        return ""
    return (
        f"\n\nThis is ipu-pipeline {parsed.command} --stages {DEFAULT_STAGES} --micro-batches "
        f"{DEFAULT_MICRO_BATCHES}; --help lists more options."
    )


def find_mapping(
    parser: argparse.ArgumentParser, devices: Sequence[int] | None, num_stages: int, schedule: object
) -> tuple[int, ...]:
    """The device of each stage; ends the program if the option does not fit the number of stages."""
    if devices is None and schedule in {*_AROUND, *_DOWN_AND_UP}:
        if num_stages % 2:
            parser.error(
                f"argument --stages: {schedule} has two stages on each device; got {num_stages}. Give an "
                "even number, or --device-mapping."
            )
        devices = [*range(num_stages // 2)]
        devices += devices if schedule in _AROUND else devices[::-1]
    mapping = tuple(range(num_stages)) if devices is None else tuple(devices)
    if len(mapping) != num_stages:
        parser.error(
            f"argument --device-mapping: must have a device for each of the {num_stages} stages; got "
            f"{len(mapping)}. Give {num_stages} numbers, or another --stages."
        )
    return mapping


def check_size(parser: argparse.ArgumentParser, num_stages: int, count: int, training: bool) -> None:
    """Ends the program if there are more actions than a schedule may have."""
    number_of_actions = num_stages * count * (2 if training else 1)
    if number_of_actions > MAX_ACTIONS:
        parser.error(
            f"argument --micro-batches: {count} on {num_stages} stages are {number_of_actions} actions; a "
            f"schedule has up to {MAX_ACTIONS}. Give fewer."
        )


def spread(
    parser: argparse.ArgumentParser, option: str, values: Sequence[float], count: int, of: str
) -> float | list[float]:
    """Returns one number, or a list of `count` numbers; ends the program if it is neither."""
    if len(values) == 1:
        return values[0]
    if len(values) != count:
        parser.error(
            f"argument {option}: must be one number or {count}, one per {of}; got {len(values)}. Give "
            f"{count}, or another --stages."
        )
    return list(values)


# The command.


def add(parser: argparse.ArgumentParser) -> None:
    """Adds a description and arguments to the command's parser; see `main`."""
    parser.description = (
        "Print the staircase of a schedule, with a line for each device and a column for each time-step. "
        "F3 is the forward pass of micro-batch 3 and B3 its backward pass; I3 and W3 are a split backward "
        "pass (input and weight gradients). If a device has several stages, F2.3 is the forward pass in "
        "stage 2. A dot is an idle time-step. The schedule searched assumes that forward, input and weight "
        "gradients take equally long."
    )
    width = "characters per line, 0 for no limit; the terminal's width by default"
    add_options(parser, {**OF_PIPELINE, "--width N": (_width, width)})
    parser.set_defaults(call=lambda parsed: _run(parser, parsed))


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
    purpose = next((f"\n{entry.purpose}" for entry in SCHEDULES if entry.name == schedule), "")
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
