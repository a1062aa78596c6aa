"""Runs more replicas than there are devices for: they take turns on the columns.

In each turn, every column runs all micro-batches of one replica; the turn of number t has the replicas from
t * (number of columns) on. All begin with the same variables, with their own random keys, and with empty
accumulators. What these hold after a turn is added up beside them, for which the memory of the accumulators
is needed once more. The weight update gets the mean over all replicas.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.devices.feeds import Take, gather, take_from
from ipu_pipeline.engine.devices.placing import put
from ipu_pipeline.engine.execution.columns import Column
from ipu_pipeline.engine.execution.outputs import Accumulated
from ipu_pipeline.engine.execution.replicas import Reduced, Replicas
from ipu_pipeline.engine.programs.accumulation import count_dtype

__all__ = ["ColumnTurns", "deal_turns", "join_turns"]


def deal_turns(
    takes: Sequence[Take], columns: Sequence[Column], every: int, num_turns: int
) -> list[list[Take]]:
    """Deals the micro-batches of a step out to turns. Takes all of them, before any of them runs.

    Args:
      takes: each column's, of the micro-batches of all turns.
      columns: the columns.
      every: micro-batches of a replica.
      num_turns: the number of turns.

    Returns:
      Per turn, each column's take.
    """
    number = every * num_turns
    taken = [
        gather(take, number, number) if column.takes_elements else []
        for column, take in zip(columns, takes, strict=True)
    ]
    return [[take_from(elements[turn::num_turns]) for elements in taken] for turn in range(num_turns)]


class ColumnTurns:
    """What a column makes in the turns of a step.

    Attributes:
      accumulators: what it accumulates into in the next turn, by key.
    """

    def __init__(self, replicas: Replicas, column: Column, accumulators: Mapping[str, Any]) -> None:
        """Begins before the first turn."""
        self.accumulators = dict(accumulators)
        self._placement, self._stage_of = column.placement, replicas.stage_of
        self._made: list[Accumulated] = []  # per turn
        self._sums: dict[str, Any] = {}  # of accumulators, by key

    def add(self, made: Accumulated) -> None:
        """Adds what was made in a turn. The memory of its accumulators is taken."""
        self._made.append(made)
        sums, offloads = self._sums, self._placement.offloads_accumulators
        for group, keys in self._by_group(made.accumulators):
            parts = put([made.accumulators[key] for key in keys], group)
            before = put([sums[key] for key in keys], group) if self._made[1:] else None
            shardings = [part.sharding for part in parts]
            program = group.program(_adder(tuple(shardings)), (shardings, shardings))
            after, zeros = program(parts, before)
            sums.update(zip(keys, put(after, group, offloads), strict=True))
            self.accumulators.update(zip(keys, put(zeros, group, offloads), strict=True))

    def finish(self) -> list[Accumulated]:
        """Returns what was made in each turn.

        That of the last one has the means over all turns of accumulators, and of the floating-point
        variables that stages assigned; of others the first turn's.
        """
        accumulators, assigned = dict[str, Any](), dict[str, Any]()
        for group, keys in self._by_group(self._sums):
            sums = put([self._sums[key] for key in keys], group)
            shardings = [total.sharding for total in sums]
            dtypes = tuple(self.accumulators[key].dtype for key in keys)
            divider = _divider(len(self._made), dtypes, tuple(shardings))
            means = group.program(divider, shardings)(sums)
            placed = put(means, group, self._placement.offloads_accumulators)
            accumulators.update(zip(keys, placed, strict=True))
        groups, owners = self._placement.groups, self._placement.traced.owners
        for group in dict.fromkeys(groups):
            names = [name for name in self._made[0].assigned if groups[owners[name]] is group]
            if names:
                values = [[made.assigned[name] for made in self._made] for name in names]
                assigned.update(zip(names, group.program(_means_or_first)(values), strict=True))
        last = dataclasses.replace(self._made[-1], accumulators=accumulators, assigned=assigned)
        return [*self._made[:-1], last]

    def _by_group(self, keys: Mapping[str, Any]) -> Iterator[tuple[DeviceGroup, list[str]]]:
        """The keys of accumulators, by the group where they lie."""
        for group in dict.fromkeys(self._placement.groups):
            own = [key for key in keys if self._placement.groups[self._stage_of(key)] is group]
            if own:
                yield group, own


def join_turns(
    replicas: Replicas, turns: Sequence[ColumnTurns], step: int
) -> tuple[list[Accumulated], Reduced]:
    """Joins what the columns made, as a weight update takes it.

    Args:
      replicas: the columns.
      turns: of each column.
      step: the number of the step.

    Returns:
      One entry per replica; the last ones, as many as there are columns, have what `ColumnTurns.finish`
      says. And what is joined over the columns, which is empty if there is one.
    """
    made, reduced = [own.finish() for own in turns], Reduced()
    if replicas.number > 1:
        accumulated, assigned = [own[-1].accumulators for own in made], [own[-1].assigned for own in made]
        for group in dict.fromkeys(replicas.placement.groups):
            replicas.reduce(group, accumulated, assigned, step, reduced)
    return list(itertools.chain(*zip(*made, strict=True))), reduced


@functools.lru_cache(maxsize=256)
def _adder(shardings: tuple[Any, ...]) -> Any:
    """A program that adds parts to sums, in at least 32 bits, and makes zeros in place of the parts."""

    def add(parts: list[jax.Array], before: list[jax.Array] | None) -> tuple[list[Any], list[Any]]:
        after = [part.astype(count_dtype(part.dtype)) for part in parts]
        if before is not None:
            after = [total + part for total, part in zip(before, after, strict=True)]
        return after, list(map(jnp.zeros_like, parts))

    return jax.jit(add, donate_argnums=(0, 1), out_shardings=(list(shardings), list(shardings)))


@functools.lru_cache(maxsize=256)
def _divider(number: int, dtypes: tuple[Any, ...], shardings: tuple[Any, ...]) -> Any:
    """A program that divides sums."""

    def divide(sums: list[jax.Array]) -> list[jax.Array]:
        return [(total / number).astype(dtype) for total, dtype in zip(sums, dtypes, strict=True)]

    return jax.jit(divide, donate_argnums=0, out_shardings=list(shardings))


@jax.jit
def _means_or_first(values: list[list[jax.Array]]) -> list[jax.Array]:
    """The means of floating-point numbers; of others the first."""

    def mean_or_first(parts: list[jax.Array]) -> jax.Array:
        dtype = parts[0].dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            return parts[0]
        return jnp.mean(jnp.stack(parts), 0, dtype=count_dtype(dtype)).astype(dtype)

    return list(map(mean_or_first, values))
