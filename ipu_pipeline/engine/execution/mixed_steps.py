"""Micro-batches of several shapes in one step, each with the programs for its own.

The step has one schedule. Where that says "the forward of stage 2 for micro-batch 5", the program is the
one for that micro-batch's shapes. A replica has a `ColumnRun` for each of the shapes; these share what does
not depend on shapes: accumulators, assigned variables, and what is collected and enqueued. They also share
the slots, which are those of a micro-batch each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ipu_pipeline.engine.devices.feeds import Supply, Take, gather, shapes_of
from ipu_pipeline.engine.execution.lowering import ProgramKey
from ipu_pipeline.engine.execution.steps import ColumnRun, StepAction, StepRun

__all__ = ["MixedRun", "ProgramsOfShapes", "feed_mixed", "peek_alike", "share"]


@dataclass(eq=False)
class MixedRun(StepRun):
    """A step of micro-batches of several shapes, on its way.

    `columns` are those of the first micro-batch's shapes, once it has come.
    """

    take: Take = field(kw_only=True)  # takes micro-batches, of all replicas
    num_replicas: int = field(kw_only=True)
    first: int = field(kw_only=True)  # the number of each replica's first micro-batch, in the step
    # begins what runs the micro-batches of some shapes, by their number
    begin: Callable[[int], StepRun] = field(kw_only=True)
    # puts the micro-batches of all replicas on their devices, from the number of their shapes
    place: Callable[[int, Sequence[Any]], Sequence[Sequence[Any]]] = field(kw_only=True)
    runs: dict[int, StepRun] = field(default_factory=dict)  # by the number of the shapes
    shapes: dict[int, int] = field(default_factory=dict)  # by micro-batch, the number of its shapes


@dataclass(frozen=True, eq=False)
class ProgramsOfShapes:
    """Starts the program that a micro-batch's shapes need, with what goes before and after it."""

    key: ProgramKey
    find: Callable[[int, ProgramKey], Sequence[StepAction]]  # the program's actions for some shapes

    def __call__(self, run: StepRun, chunk: int) -> None:
        """Follows the actions."""
        assert isinstance(run, MixedRun)
        shapes = run.shapes[chunk]
        own = run.runs[shapes]
        for action in self.find(shapes, self.key):
            action(own, chunk)


def feed_mixed(run: StepRun, chunk: int) -> None:
    """Takes a micro-batch for each replica from the feed.

    Raises:
      ValueError: those of the replicas have different shapes.
    """
    assert isinstance(run, MixedRun)
    elements = _take_alike(run.take, run.first + chunk, run.num_replicas)
    shapes = shapes_of(elements[0])
    if shapes not in run.runs:
        run.runs[shapes] = run.begin(shapes)
    run.shapes[chunk] = shapes
    fed = run.place(shapes, elements)
    for column, values in zip(run.runs[shapes].columns, fed, strict=True):
        slots = column.slots[chunk] = [None] * column.num_slots
        for slot, value in zip(column.feed_slots, values, strict=True):
            slots[slot] = value


def peek_alike(supply: Supply, number: int, num_replicas: int) -> None:
    """Raises, as `feed_mixed` does, if the micro-batches that replicas get next have different shapes.

    Args:
      supply: has the micro-batches, which stay there.
      number: the number of each replica's micro-batch in the step.
      num_replicas: the number of replicas.
    """
    supply.give_back(_take_alike(supply, number, num_replicas))


def _take_alike(take: Take, number: int, num_replicas: int) -> Sequence[Any]:
    elements = gather(take, num_replicas, num_replicas)
    if len(set(map(shapes_of, elements))) > 1:
        raise ValueError(
            f"Micro-batches {number * num_replicas} to {(number + 1) * num_replicas - 1} of a step go to "
            f"the {num_replicas} replicas at the same time, so they must have the same shapes; they have "
            f"different ones. Group the data so that {num_replicas} in a row are alike "
            f"(datasets.Buckets does, with in_a_row={num_replicas})."
        )
    return elements


def share(column: ColumnRun, first: ColumnRun) -> ColumnRun:
    """Makes a replica's run for some shapes share with the first one what all have. Returns it."""
    column.accumulators, column.assigned = first.accumulators, first.assigned
    column.enqueued, column.slots = first.enqueued, first.slots
    return column
