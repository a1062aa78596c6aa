"""What the columns of a pipeline or loop have apart, and how it becomes one again.

State is one for all replicas, on the rows of their devices. Each column reads its part of it, without a
copy; what the columns accumulate and assign is joined by one program per row. With one column everything is
as the column has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ipu_pipeline.engine.devices.placing import put
from ipu_pipeline.engine.devices.residence import Residence
from ipu_pipeline.engine.devices.rows import Row, join, split
from ipu_pipeline.engine.devices.sharding import gather_replicas
from ipu_pipeline.engine.execution.all_reduce import Parts, join_replicas, take_first
from ipu_pipeline.engine.execution.columns import Column
from ipu_pipeline.engine.execution.readings import WatchedDevices
from ipu_pipeline.engine.execution.steps import ColumnRun
from ipu_pipeline.engine.execution.templates import Template
from ipu_pipeline.engine.state import PipelineState, RunState
from ipu_pipeline.engine.tracing.replicas import uses_replicas
from ipu_pipeline.engine.updates.accumulators import Accumulator

__all__ = ["Joint", "Reduced", "Replicas", "TogetherRun"]


@dataclass(frozen=True, eq=False)
class Joint:
    """A program that runs on all replicas at once."""

    jitted: Any  # the program; its arguments and results are one for all, see `rows.join`.
    row: Row  # where it runs


@dataclass(frozen=True, eq=False)
class Reduced:
    """What has been joined of the columns."""

    # variables that stages assign, by full name: the means of floating ones, else those of the first
    # replica; or of each replica its own
    assigned: dict[str, Any] = field(default_factory=dict)
    means: dict[str, Any] = field(default_factory=dict)  # of the accumulators, by key
    zeros: dict[str, Any] = field(default_factory=dict)  # in their memory, of each replica, by key


class Replicas:
    """The columns of a pipeline or loop.

    Attributes:
      residence: where the state of all of them lives.
      columns: what runs the micro-batches of each.
      joint: by the index of the template, the programs that all columns start together.
      has_identical_keys: whether they draw the random numbers that one alone would.
      joins_assigned: whether variables that stages assign are the same in all of them after an update.
    """

    def __init__(self, residence: Residence, columns: Sequence[Column]) -> None:
        """Jits what they have in common.

        Raises:
          ValueError: a stage computes with other replicas, and is divided over several devices.
        """
        self.residence, self.columns = residence, tuple(columns)
        self.has_identical_keys, self.joins_assigned = False, True
        self._rows = {row.devices[0]: row for column in columns for row in column.residence.rows}
        self._key: tuple[Any, list[Any]] | None = None  # the last random key, and those of the replicas
        self.joint: dict[int, Joint] = {}
        for template in columns[0].plan.templates.values() if len(columns) > 1 else ():
            stage = residence.traced.stages[template.stage]
            if uses_replicas(stage.flat):
                row = residence.rows[template.stage]
                if row.is_divided:
                    raise ValueError(
                        f"{stage.place} computes with other replicas (cross_replica_sum, replica_index or "
                        "synchronized batch normalization), which does not go with tensor_parallel and "
                        "num_replicas both above 1. Leave one of the three out."
                    )
                self.joint[template.index] = Joint(template.jit_jointly(row), row)

    @property
    def number(self) -> int:
        """How many there are."""
        return len(self.columns)

    def split(self, array: Any) -> list[Any]:
        """An array as each column has it."""
        if self.number == 1:
            return [array]
        return split(array, [self._rows[device] for device in array.sharding.mesh.devices[:, 0]])

    def split_state(self, state: RunState) -> list[RunState]:
        """The state as each column has it; of the optimizer's, only the loss scale."""
        if self.number == 1:
            return [state]
        pipeline = state.pipeline
        variables: list[dict[str, Any]] = [{} for _column in self.columns]
        for name in self.residence.traced.variables:
            if name in self.residence.sharded:
                continue
            for own, part in zip(variables, self.split(pipeline.variables[name]), strict=True):
                own[name] = part
        scales = [pipeline.optimizer_state] * self.number
        updates = self.residence.updates
        if pipeline.optimizer_state is not None:
            assert updates is not None
            leaves: list[list[Any]] = [[0] * len(updates.state_leaves) for _column in self.columns]
            if updates.loss_scale is not None:
                place = updates.loss_scale.leaf
                scale = jax.tree.leaves(pipeline.optimizer_state)[place]
                for own_leaves, part in zip(leaves, self.split(scale), strict=True):
                    own_leaves[place] = part
            scales = [updates.state_tree.unflatten(own_leaves) for own_leaves in leaves]
        keys = self._fold(pipeline.key)
        return [
            RunState(
                PipelineState(
                    variables[replica],
                    scales[replica],
                    pipeline.update_count,
                    pipeline.execution_count,
                    keys[replica],
                ),
                {key: parts[replica] for key, parts in state.accumulators.items()},
                state.num_accumulated,
            )
            for replica in range(self.number)
        ]

    def _fold(self, key: Any) -> list[Any]:
        """The key of each replica. The last ones are remembered: steps have the same."""
        if self.has_identical_keys:
            return [key] * self.number
        known = self._key
        if known is None or known[0] is not key:
            folded = [jax.random.fold_in(key, np.uint32(replica)) for replica in range(self.number)]
            known = self._key = (key, folded)
        return known[1]

    def pack(self, accumulators: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The accumulators of the columns as `RunState` has them: of several a tuple per key."""
        if self.number == 1:
            return dict(accumulators[0])
        return {key: tuple(own[key] for own in accumulators) for key in accumulators[0]}

    def join_assigned(self, assigned: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Variables that stages assigned, of each replica its own, by full name."""
        if self.number == 1:
            return dict(assigned[0])
        rows, owners = self.residence.rows, self.residence.traced.owners
        return {name: join([own[name] for own in assigned], rows[owners[name]]) for name in assigned[0]}

    def first_of(self, outputs: Sequence[Sequence[Any]], read: set[Any]) -> list[Any]:
        """The first replica's leaves of what the last stage returned, on its row, where they are read."""
        if self.number == 1:
            return list(outputs[0])
        found: list[Any] = [None] * len(outputs[0])
        row = self.residence.rows[-1]
        if read:
            parts = {place: [leaves[place] for leaves in outputs] for place in sorted(read)}
            for place, value in take_first(row, parts).items():
                found[place] = value
        return found

    def stage_of(self, key: str) -> int:
        """The stage on whose row an accumulator lies."""
        owners, extra = self.residence.traced.owners, self.residence.accumulator_plan.extra
        return (extra.get(key) or Accumulator(key, owners[key])).stage

    def reduce(
        self,
        row: Row,
        accumulated: Sequence[Mapping[str, Any]],
        assigned: Sequence[Mapping[str, Any]],
        step: int,
        reduced: Reduced,
    ) -> None:
        """Joins what the columns have accumulated and assigned on a row."""
        rows, owners = self.residence.rows, self.residence.traced.owners
        parts, offloads = Parts(), self.residence.offloads_accumulators
        for key in accumulated[0]:
            stage = self.stage_of(key)
            if rows[stage] is not row:
                continue
            own = [part[key] for part in accumulated]
            if offloads:
                homes = [column.residence.rows[stage] for column in self.columns]
                own = [put([array], home)[0] for array, home in zip(own, homes, strict=True)]
            parts.accumulators[key] = own
        for name in assigned[0]:
            if rows[owners[name]] is row:
                own = [part[name] for part in assigned]
                if self.joins_assigned:
                    parts.assigned[name] = own
                else:
                    reduced.assigned[name] = join(own, row)
        if not parts.accumulators and not parts.assigned:
            return
        made = join_replicas(row, parts, rows.index(row), step)
        reduced.assigned.update(made.assigned)
        reduced.means.update(made.means)
        for key, zero in made.zeros.items():
            (zero,) = put([zero], row, offloads)
            reduced.zeros[key] = tuple(self.split(zero))


class TogetherRun:
    """What the columns do together in a step.

    Attributes:
      reduced: what has been joined.
    """

    def __init__(self, replicas: Replicas, variables: Mapping[str, Any], step: int) -> None:
        """Begins."""
        self.reduced = Reduced()
        self._replicas, self._variables, self._step = replicas, variables, step

    def gather(self, columns: Sequence[ColumnRun], stage: int, names: Sequence[str]) -> list[list[Any]]:
        """Variables of a stage of which the replicas have parts, whole for each column."""
        del columns
        replicas = self._replicas
        arrays = [self._variables[name] for name in names]
        whole = gather_replicas(arrays, replicas.residence.rows[stage])
        return [list(own) for own in zip(*map(replicas.split, whole), strict=True)]

    def launch(
        self,
        columns: Sequence[ColumnRun],
        templates: Sequence[Template],
        arguments: Sequence[list[Any]],
        chunk: int,
    ) -> list[list[Any]]:
        """Runs a program for all replicas at once; returns the results of each."""
        replicas = self._replicas
        joint = replicas.joint[templates[0].index]
        joined = [join(parts, joint.row) for parts in zip(*arguments, strict=True)]
        reading, program = columns[0].reading, joint.row.program(joint.jitted)
        if isinstance(reading, WatchedDevices) and joint.row.is_here:
            made = reading.launch_jointly(templates[0], joint.row, program, joined, chunk)
        else:
            made = program(*joined)
        return [list(results) for results in zip(*map(replicas.split, made), strict=True)]

    def reduce(self, row: Row, columns: Sequence[ColumnRun]) -> None:
        """Joins what the columns have accumulated and assigned on a row."""
        accumulated = [column.accumulators for column in columns]
        assigned = [column.assigned for column in columns]
        self._replicas.reduce(row, accumulated, assigned, self._step, self.reduced)
