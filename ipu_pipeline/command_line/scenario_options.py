"""Options that describe a pipeline, for commands that run none."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from ipu_pipeline.engine.schedules import (
    MAX_ACTIONS,
    SearchedSchedule,
    check_schedule,
    named_schedules,
    schedule_name,
)

__all__ = [
    "DEFAULT_MICRO_BATCHES",
    "DEFAULT_STAGES",
    "add_pipeline",
    "at_least_one",
    "check_size",
    "find_mapping",
    "number",
    "numbers",
    "spread",
    "tell_example",
]

DEFAULT_STAGES, DEFAULT_MICRO_BATCHES = 4, 8
# Schedules with two stages on each device: stages go around the devices, or down and up again.
_AROUND = {"looped", "looped_zero_bubble"}
_DOWN_AND_UP = {"zero_bubble_v", "v_half", "v_min", "dual_pipe_v"}


def add_pipeline(parser: argparse.ArgumentParser) -> None:
    """Adds the options that a schedule and its simulation share. None means not given."""
    parser.add_argument(
        "--stages", type=at_least_one, metavar="N", help=f"number of stages; {DEFAULT_STAGES} by default"
    )
    parser.add_argument(
        "--micro-batches",
        type=at_least_one,
        metavar="N",
        help="micro-batches per weight update (gradient accumulation count); "
        f"{DEFAULT_MICRO_BATCHES} by default",
    )
    parser.add_argument(
        "--schedule",
        type=_schedule,
        metavar="NAME",
        help=f"one of {', '.join(named_schedules())}, a name that another library uses, or searched (an "
        "order made for these costs); grouped by default",
    )
    parser.add_argument(
        "--device-mapping",
        type=_mapping,
        metavar="LIST",
        help="the device of each stage, from 0, such as 0,1,1,0. By default each stage has its own device, "
        "or two stages share one if the schedule needs that",
    )
    parser.add_argument(
        "--inference",
        action="store_true",
        help="forward passes only",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def tell_example(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> str:
    """The command of the example that is shown if no option was given; empty if one was."""
    if vars(parsed) != {"command": parsed.command, **vars(parser.parse_args([]))}:
        return ""
    return (
        f"\n\nThis is ipu-pipeline {parsed.command} --stages {DEFAULT_STAGES} --micro-batches "
        f"{DEFAULT_MICRO_BATCHES}; --help lists more options."
    )


def _schedule(text: str) -> str:
    try:
        found = check_schedule(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not isinstance(found, SearchedSchedule) and found not in named_schedules():
        raise argparse.ArgumentTypeError(f"must be a name, not a file; got {text!r}")
    return schedule_name(found)


def find_mapping(
    parser: argparse.ArgumentParser, given: Sequence[int] | None, num_stages: int, schedule: object
) -> tuple[int, ...]:
    """The device of each stage; ends the program if the option does not fit the number of stages."""
    if given is None and schedule in {*_AROUND, *_DOWN_AND_UP}:
        if num_stages % 2:
            parser.error(
                f"argument --stages: {schedule} has two stages on each device; got {num_stages}. Give an "
                "even number, or --device-mapping."
            )
        given = [*range(num_stages // 2)]
        given += given if schedule in _AROUND else given[::-1]
    mapping = tuple(range(num_stages)) if given is None else tuple(given)
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


def spread(
    parser: argparse.ArgumentParser, option: str, given: Sequence[float], count: int, of: str
) -> float | list[float]:
    """One number, or a list of `count` numbers; ends the program if it is neither."""
    if len(given) == 1:
        return given[0]
    if len(given) != count:
        parser.error(
            f"argument {option}: must be one number or {count}, one per {of}; got {len(given)}. Give "
            f"{count}, or another --stages."
        )
    return list(given)
