"""Follows rows as IPUs would that wait only for data: independent of `check`."""

import itertools
from typing import NamedTuple

from ipu_pipeline.engine.schedules.timetables import ActionKind

F, B, I, W = ActionKind  # noqa: E741


class Times(NamedTuple):
    """How long a forward and both halves of a backward take. A whole backward takes as long as both."""

    forward: float = 1
    inputs: float = 1
    weights: float = 1

    def of(self, kind):
        """The time of one kind."""
        times = {F: self.forward, B: self.inputs + self.weights, I: self.inputs, W: self.weights}
        return times[kind]


class Walk(NamedTuple):
    """What was found."""

    wait: float  # of an IPU in one step
    wait_across: float  # where steps follow each other at once
    held: list[int]  # by each IPU at most: micro-batches from forwards to the end of their backwards


ALL_EQUAL = Times()


def walk(rows, times=ALL_EQUAL):
    """Follows rows, for three steps after each other."""
    rows = [[action for action in row if action is not None] for row in rows]
    num_micro_batches = 1 + max(action.micro_batch for row in rows for action in row)
    last_stage = max(action.stage for row in rows for action in row)
    ends = {}  # of (is backward, stage, micro-batch)
    now, places, step_ends = [0.0] * len(rows), [0] * len(rows), [[] for _row in rows]
    num_steps = 3
    while any(place < num_steps * len(row) for place, row in zip(places, rows, strict=True)):
        before = list(places)
        for ipu, row in enumerate(rows):
            while places[ipu] < num_steps * len(row):
                step, place = divmod(places[ipu], len(row))
                kind, stage, number = row[place]
                number += step * num_micro_batches
                needed = [(False, stage - 1, number)] if stage else []
                if kind is W:
                    needed = [(True, stage, number)]
                elif kind is not F:
                    needed = [(False, stage, number)] + [(True, stage + 1, number)] * (stage < last_stage)
                if any(one not in ends for one in needed):
                    break
                now[ipu] = max([now[ipu], *(ends[one] for one in needed)]) + times.of(kind)
                if kind is not W:
                    ends[kind is not F, stage, number] = now[ipu]
                places[ipu] += 1
                if place + 1 == len(row):
                    step_ends[ipu].append(now[ipu])
        assert places != before, "deadlock"
    busy = max(sum(times.of(action.kind) for action in row) for row in rows)
    changes = {F: 1, B: -1, I: 0, W: -1}
    held = [max(itertools.accumulate(changes[action.kind] for action in row)) for row in rows]
    return Walk(
        max(first for first, *_later in step_ends) - busy,
        max(last - before for _first, before, last in step_ends) - busy,
        held,
    )
