"""Merges the traces of all processes of a run: at the end, each process sends its trace to the others.

Processes on one machine have the same clock. Clocks of different machines are compared once, when all
processes have met: these go on within about a millisecond of each other, so the difference between the
clocks is the difference between the times that they show then.
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import platform
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ipu_pipeline.engine.inspect import IpuMemory, PipelineFacts
from ipu_pipeline.engine.processes import Peers
from ipu_pipeline.reports.profile import Profile, read_profile

__all__ = ["Part", "exchange", "merge"]

_PIECE = 1 << 19  # characters that are sent at once; the store's messages have a limit


@dataclasses.dataclass(frozen=True)
class Part:
    """The recording of a process.

    Attributes:
      profile: its trace; None if nothing ran.
      origin: when its times begin, in nanoseconds since the epoch by its clock.
      clock: identifies the clock: equal texts are the same clock.
      now: the time of that clock when all processes had met.
    """

    profile: Profile | None
    origin: float
    clock: str
    now: float


def exchange(peers: Peers, profile: Profile | None, origin: float) -> list[Part]:
    """Returns the parts of all processes, by their numbers. Every process calls it."""
    peers.meet("report")
    told = {"clock": _name_clock(), "now": time.time_ns(), "origin": origin}
    told["profile"] = None if profile is None else profile.to_json()
    text = base64.b64encode(zlib.compress(json.dumps(told).encode())).decode()
    pieces = [text[place : place + _PIECE] for place in range(0, len(text), _PIECE)]
    number = max(map(int, peers.exchange("report", str(len(pieces)))))
    rounds = [peers.exchange("report", (pieces[place : place + 1] or [""])[0]) for place in range(number)]
    return [_read("".join(own)) for own in zip(*rounds, strict=True)]


def _read(text: str) -> Part:
    told = json.loads(zlib.decompress(base64.b64decode(text)))
    profile = None if told["profile"] is None else read_profile(told["profile"])
    return Part(profile, told["origin"], told["clock"], told["now"])


def _name_clock() -> str:
    """Identifies the clock: the machine, since it was started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return platform.node()


def merge(parts: Sequence[Part]) -> Profile | None:
    """Merges the traces of all processes, by the clock of the first; None if nothing ran in any."""
    known = [(number, part.profile, _begin(part, parts[0])) for number, part in enumerate(parts)]
    recorded = [(number, profile, begin) for number, profile, begin in known if profile is not None]
    if not recorded:
        return None
    first = min(begin for _number, _profile, begin in recorded)
    profiles = [profile for _number, profile, _begin in recorded]
    events, num_programs = [], 0
    for number, profile, begin in recorded:
        shift = (begin - first) / 1e3
        last = num_programs
        for event in profile.events:
            program = None if event.program is None else event.program + last
            num_programs = max(num_programs, (program or 0) + 1)
            moved = (event.begin + shift, event.end + shift)
            events.append(
                dataclasses.replace(event, begin=moved[0], end=moved[1], program=program, process=number)
            )
    return dataclasses.replace(
        profiles[0],
        devices=tuple(
            sorted(
                {device for one in profiles for device in one.devices}, key=lambda one: (one.ipu, one.id)
            )
        ),
        pipelines=tuple(_merge_facts(own) for own in _alike(profiles)),
        events=tuple(sorted(events, key=lambda event: (event.begin, event.end))),
        num_lost=sum(one.num_lost for one in profiles),
        num_dropped=sum(one.num_dropped for one in profiles),
        notes=tuple(f"Process {number}: {note}" for number, one, _begin in recorded for note in one.notes),
    )


def _begin(part: Part, first: Part) -> float:
    """The origin of a part, by the clock of another one."""
    return part.origin if part.clock == first.clock else part.origin - part.now + first.now


def _alike(profiles: Sequence[Profile]) -> Iterator[list[PipelineFacts]]:
    """Yields, for each pipeline, the facts of each process that has it."""
    for together in itertools.zip_longest(*(one.pipelines for one in profiles)):
        yield [facts for facts in together if facts is not None]


def _merge_facts(own: Sequence[PipelineFacts]) -> PipelineFacts:
    def merge_memory(plans: Sequence[IpuMemory]) -> IpuMemory:
        """Merges plans of one IPU: only the process that compiled the programs knows the temporaries."""
        return next((plan for plan in plans if plan.num_temporary_bytes is not None), plans[0])

    memories: list[tuple[Any, ...]] = list(zip(*(facts.memory for facts in own), strict=False))
    return dataclasses.replace(
        own[0],
        num_micro_batches=max(facts.num_micro_batches or 1 for facts in own),
        memory=tuple(merge_memory(plans) for plans in memories),
    )
