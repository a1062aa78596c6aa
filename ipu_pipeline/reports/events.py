"""The measurements of a run: an event for each action, with its true begin and end on the device."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["ACTIONS", "COMPILING", "REHEARSAL", "Event", "EventKind", "busy_time"]

# Spans that are not the user's: work that is done only once, or only because a trace is recorded.
COMPILING, REHEARSAL = "compiling", "rehearsal for the trace"


class EventKind(enum.StrEnum):
    """The kinds of events."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENTS = "input gradients"  # the first half of a backward
    WEIGHT_GRADIENTS = "weight gradients"  # and the second
    UPDATE = "update"
    TRANSFER = "transfer"  # from IPU to IPU
    INFEED_WAIT = "infeed wait"  # the host waits for micro-batches
    OUTFEED = "outfeed"  # the host takes or copies what was enqueued
    SPAN = "span"  # on the host: named by the user's program, as with poptorch.profiling.Channel
    OTHER = "other"  # a program that belongs to no stage, such as one of the user's own

    @property
    def is_computation(self) -> bool:
        """Whether the event keeps an IPU busy."""
        return self in (*ACTIONS, EventKind.UPDATE, EventKind.OTHER)


# What stages do with micro-batches.
ACTIONS = (
    EventKind.FORWARD,
    EventKind.BACKWARD,
    EventKind.INPUT_GRADIENTS,
    EventKind.WEIGHT_GRADIENTS,
)


@dataclass(frozen=True)
class Event:
    """An activity of an IPU or the host. Times are in microseconds from the beginning of the trace.

    Attributes:
      kind: what it was.
      begin: when it began.
      end: when it ended.
      ipu: the IPU; for a transfer, the one that received; None for the host's events.
      pipeline: the number of the pipeline in the trace; None if it belongs to none.
      stage: the stage; for a transfer, the one that made what was sent; None if it belongs to none.
      micro_batch: its number within the step, or a loop's iteration; None for updates and the like.
      step: the number of the weight update, or execution in inference; None if it belongs to none.
      num_bytes: the bytes that a transfer moved, or the host took; 0 for computations.
      source: for a transfer, the IPU that sent.
      program: the number of the program's run. Events of one number are shared: one program did them all.
      is_shared: whether its begin or its end within the program was not observed, but computed from the
        estimated operations of the events that share the program.
      is_bounded: for a transfer, whether its end was not observed: it is then the latest possible time.
      name: the name of a program that belongs to no stage, or of a span.
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
        """The time that it took."""
        return self.end - self.begin


def busy_time(events: Iterable[Event]) -> float:
    """The time, in microseconds, in which at least one of the events went on: overlaps count once."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted((event.begin, event.end) for event in events):
        if end > reached:
            total += end - max(begin, reached)
            reached = end
    return total
