"""What was measured of a run: an event for each action, with its true begin and end on the device."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["COMPILING", "REHEARSAL", "Event", "EventKind", "busy_time"]

# Spans that are none of the user's: what runs would not do again, or do because they are recorded.
COMPILING, REHEARSAL = "compiling", "rehearsal for the trace"


class EventKind(enum.StrEnum):
    """What an event is."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    TRANSFER = "transfer"  # from IPU to IPU
    INFEED_WAIT = "infeed wait"  # of the host, for micro-batches
    OUTFEED = "outfeed"  # of the host, which takes or copies what was enqueued
    SPAN = "span"  # of the host: what the user's program named, as with poptorch.profiling.Channel
    OTHER = "other"  # a program that is none of a stage's, such as one of the user's own

    @property
    def is_computation(self) -> bool:
        """Whether an IPU is busy with it."""
        return self in (EventKind.FORWARD, EventKind.BACKWARD, EventKind.UPDATE, EventKind.OTHER)


@dataclass(frozen=True)
class Event:
    """Something that an IPU or the host did. Times are in microseconds from the trace's begin.

    Attributes:
      kind: what it was.
      begin: when it began.
      end: when it ended.
      ipu: which IPU; of a transfer, the one that received; None of the host's.
      pipeline: the number of the pipeline in the trace; None if it is of none.
      stage: whose; of a transfer, the stage that made what was sent; None if it is of none.
      micro_batch: its number within the step, of a loop the iteration; None of updates and the like.
      step: the number of the weight update, or execution in inference; None if it is of none.
      num_bytes: what a transfer moved, or the host took; 0 of computations.
      source: of a transfer, the IPU that sent.
      program: the number of the program's run. Events of one number are shared: one program did them all.
      is_shared: whether its begin or its end within the program was not seen by itself: it is reckoned from
        the estimated operations of the events that share the program.
      is_bounded: of a transfer, whether its end was not seen: it is the latest that it can have been.
      name: of a program that is no stage's, and of a span.
      process: the process whose host or device it was.
    """

    kind: EventKind
    begin: float
    end: float
    ipu: int | None
    pipeline: int | None = None
    stage: int | None = None
    micro_batch: int | None = None
    step: int | None = None
    num_bytes: int = 0
    source: int | None = None
    program: int | None = None
    is_shared: bool = False
    is_bounded: bool = False
    name: str = ""
    process: int = 0

    @property
    def length(self) -> float:
        """How long it took."""
        return self.end - self.begin


def busy_time(events: Iterable[Event]) -> float:
    """How long at least one of some events lasted, in microseconds: what overlaps counts once."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted((event.begin, event.end) for event in events):
        if end > reached:
            total += end - max(begin, reached)
            reached = end
    return total
