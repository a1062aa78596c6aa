"""A stage program for several micro-batches, which it handles one after another.

Nothing is merged into one batch. The program is a scan, in which each micro-batch takes over the
accumulators and assigned variables from the one before it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine.programs.stage_programs import StageProgram, StagePrograms, Value, ValueKind
from ipu_pipeline.engine.tracing.traced import TracedPipeline, TracedStage

__all__ = ["ChunkForm", "chunk_programs"]

_COUNTS = (ValueKind.MICRO_BATCH, ValueKind.ACCUMULATED)


@dataclass(frozen=True)
class ChunkForm:
    """The layout of a chunk's values: several micro-batches on a first axis, a single one as it is."""

    size: int  # the number of micro-batches of a chunk

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes before those of a micro-batch's value."""
        return () if self.size == 1 else (self.size,)

    @property
    def num_stacked(self) -> int | None:
        """The number of stacked values; None if there is only one, as it is."""
        return self.axes[0] if self.axes else None


def chunk_programs(
    traced: TracedPipeline, programs: Sequence[StagePrograms], size: int
) -> tuple[StagePrograms, ...]:
    """Makes the programs for `size` micro-batches at once.

    Values of a micro-batch (those between stages, residuals, cotangents) are stacked on a first axis.
    MICRO_BATCH and ACCUMULATED are the first micro-batch's. New values of variables and accumulators are
    those after the last one.
    """
    if size == 1:
        return tuple(programs)
    return tuple(
        own.map(functools.partial(_chunk, stage=stage, size=size))
        for own, stage in zip(programs, traced.stages, strict=True)
    )


def _chunk(program: StageProgram, stage: TracedStage, size: int) -> StageProgram:
    carried = _carried(program)
    counts = [place for place, value in enumerate(program.arguments) if value.kind in _COUNTS]
    stacked = [
        place
        for place, value in enumerate(program.arguments)
        if value.kind in (ValueKind.RESIDUAL, ValueKind.COTANGENT)
        or (value.kind is ValueKind.INPUT and stage.inputs[value.index].is_of_micro_batch)
    ]
    kept, last = [], []  # results returned for all, and state that is not carried but made anew
    for place, values in enumerate(program.results):
        state = tuple(value for value in values if _is_state(value))
        others = tuple(value for value in values if not _is_state(value))
        if others:
            kept.append((place, others))
        if state and place not in carried.values():
            last.append((place, state))

    def chunked(*arguments: Any) -> list[Any]:
        def one(state: list[Any], given: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
            number, values = given
            full = list(arguments)
            for places, own in ((carried, state), (stacked, values)):
                for place, value in zip(places, own, strict=True):
                    full[place] = value
            for place in counts:
                full[place] = full[place] + number
            results = program.function(*full)
            return (
                [results[place] for place in carried.values()],
                [results[place] for place, _values in (*kept, *last)],
            )

        state, stacks = jax.lax.scan(
            one,
            [arguments[place] for place in carried],
            (jnp.arange(size, dtype=jnp.int32), [arguments[place] for place in stacked]),
        )
        return [*state, *stacks[: len(kept)], *(stack[-1] for stack in stacks[len(kept) :])]

    results = [tuple(v for v in program.results[place] if _is_state(v)) for place in carried.values()]
    results += [values for _place, values in (*kept, *last)]
    return dataclasses.replace(
        program,
        function=chunked,
        results=tuple(results),
        num_operations=size * program.num_operations,
    )


def _is_state(value: Value) -> bool:
    return value.kind in (ValueKind.ACCUMULATOR, ValueKind.ASSIGNED)


def _carried(program: StageProgram) -> dict[int, int]:
    """Arguments that have another value in the next micro-batch -> the results that are this value."""
    places = {value: place for place, value in enumerate(program.arguments)}
    carried = {}
    for place, values in enumerate(program.results):
        for value in values:
            is_assigned = value.kind is ValueKind.ASSIGNED
            argument = Value(ValueKind.VARIABLE, value.index) if is_assigned else value
            if _is_state(value) and argument in places:
                carried[places[argument]] = place
    return carried
