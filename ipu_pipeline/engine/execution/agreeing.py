"""What the processes of a pipeline or loop agree on: whether there are micro-batches for a step, and more.

Only processes with stages that read the feed take micro-batches. If the data of one of them end, it ends
the step, and the others would wait for values that never come. So all micro-batches of a step are there
before it begins: each process that reads some tells all others, and waits for the others that read.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ipu_pipeline.engine import peers
from ipu_pipeline.engine.devices.links import links, naming_peers
from ipu_pipeline.engine.devices.remote import is_here
from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.ground.errors import OutOfRangeError, ProcessError

__all__ = ["agree_on_elements", "answer_everywhere"]


def agree_on_elements(
    placement: StatePlacement, readers: Collection[int], hearers: Collection[int], error: Exception | None
) -> None:
    """Raises in all processes if one did not get the micro-batches of a step. All of them call it.

    An error counts before the end of the data, and of these that of the process with the least number.
    """
    own = None
    if error is not None:
        own = (isinstance(error, OutOfRangeError), f"{type(error).__name__}: {error}")
    told = _tell_all(placement, "micro-batches", readers, hearers, own)
    failed = {process: one for process, one in told.items() if one is not None}
    if not failed:
        return
    first = min(failed, key=lambda process: (failed[process][0], process))
    if error is not None and first == links().process:
        raise error
    is_end, text = failed[first]
    kind = OutOfRangeError if is_end else ProcessError
    raise kind(f"In process {first}, which reads the micro-batches: {text}") from error


def answer_everywhere(placement: StatePlacement, asked: Sequence[Any], homes: Sequence[Any]) -> list[bool]:
    """Waits for the boolean scalars of a condition, in all processes that have a part in a loop."""
    if not placement.has_peers:
        return list(map(bool, asked))
    what = "condition of a loop"
    here = [number for number, home in enumerate(homes) if is_here(home)]
    with peers.waiting(f"the {what}"), naming_peers():
        own = {number: bool(np.asarray(asked[number])) for number in here}
    processes = {home.process_index for home in homes}
    told = _tell_all(placement, what, processes, placement.groups[0].processes, list(own.items()))
    answers = dict(answer for one in told.values() for answer in one)
    return [answers[number] for number in range(len(homes))]


def _tell_all(
    placement: StatePlacement, what: str, tellers: Collection[int], hearers: Collection[int], own: Any
) -> dict[int, Any]:
    """Has some processes tell all others something, as JSON. Returns what each tells."""
    subject, time = placement.name_agreement(what)
    here = links().process
    if here in tellers:
        text = json.dumps([subject, time, own])
        with peers.waiting(f"the {what}"):  # until the others have connected, the first time
            for process in hearers:
                if process != here:
                    links().tell(process, text)

    told = {here: own} if here in tellers else {}
    with peers.waiting(f"the {what}"):
        for process in sorted(set(tellers) - {here}):
            told[process] = _hear(process, subject, time)
    return told


def _hear(process: int, subject: str, time: int) -> Any:
    """Waits for what a process tells. Skips texts of agreements that an error here ended."""
    other, other_time, told = None, -1, None
    while (other, other_time) != (subject, time):
        if other is not None and not (other == subject and other_time < time):
            raise ProcessError(
                f"Process {process} is at another place ({other}, time {other_time}) than this process "
                f"({subject}, time {time}). All must do the same things in the same order."
            )
        other, other_time, told = json.loads(links().hear(process))
    return told
