"""Tells processes without any device of a loop how its run ended, and how much was done.

They cannot go through the iterations beside the others, because the number of iterations depends on data
and conditions that they do not have. So they wait until the process of the first device reports the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ipu_pipeline.engine import peers
from ipu_pipeline.engine.devices.remote import absent
from ipu_pipeline.engine.execution.contract import Runner
from ipu_pipeline.engine.state import RunState
from ipu_pipeline.ground.errors import OutOfRangeError, ProcessError

__all__ = ["Done", "has_part", "hear_end", "skip", "telling_end"]

_WHAT = "the end of a loop"


@dataclass
class Done:
    """Counts the iterations that a run has done so far."""

    count: int = 0


def has_part(runner: Runner[Any]) -> bool:
    """Whether this process has a device of a loop; a process that runs alone does."""
    return any(group.is_here for group in runner.placement.groups)


def _teller(runner: Runner[Any]) -> int:
    return int(runner.placement.groups[0].devices[0].process_index)


@contextlib.contextmanager
def telling_end(runner: Runner[Any], done: Done) -> Iterator[None]:
    """Wraps a run in a process that has a part in it: tells the others how it ends."""
    others = peers.current()
    if others is None:
        yield
        return
    try:
        yield
    except BaseException as error:
        told = [done.count, isinstance(error, OutOfRangeError), f"{type(error).__name__}: {error}"]
        with contextlib.suppress(Exception):  # the first error is the one to tell
            others.tell(_WHAT, _teller(runner), json.dumps(told), is_read=False)
        raise
    others.tell(_WHAT, _teller(runner), json.dumps([done.count, False, None]), is_read=False)


def hear_end(runner: Runner[Any], done: Done) -> None:
    """Waits for the end of a run in which this process has no part, and takes over what was done."""
    others = peers.current()
    assert others is not None
    teller = _teller(runner)
    done.count, is_end, text = json.loads(others.tell(_WHAT, teller))
    if text is not None:
        error = OutOfRangeError if is_end else ProcessError
        raise error(f"In process {teller}, which has a part in the loop: {text}")


def skip(runner: Runner[Any], state: RunState, count: int, every: int) -> RunState:
    """The state after `count` iterations in other processes."""
    if runner.placement.updates is None or not count:
        return state
    avals = runner.placement.traced.output_avals
    outputs = [
        {n: absent(aval.shape, aval.dtype, home.groups[-1].replicated) for n, aval in enumerate(avals)}
        for home in runner.homes
    ]
    state = runner.with_optimizer(state, outputs)
    num_updates, num_accumulated = divmod(state.num_accumulated + count, every)
    pipeline = dataclasses.replace(
        state.pipeline, update_count=int(state.pipeline.update_count) + num_updates
    )
    return RunState(pipeline, state.accumulators, num_accumulated)
