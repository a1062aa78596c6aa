"""Splits state between the columns of a pipeline or loop, and joins their results.

State is one for all replicas, on the groups of their devices. Each column reads its part of it, without a
copy; what the columns accumulate and assign is joined by one program per group. Micro-batches are dealt out
to the columns in turn. What they collect is stacked, and brought to the first replica's process. With one
column nothing is split or joined.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import numpy as np

from ipu_pipeline.engine import peers
from ipu_pipeline.engine.devices.crossing import move
from ipu_pipeline.engine.devices.device_groups import DeviceGroup, join, split, stack_replicas
from ipu_pipeline.engine.devices.feeds import Take, gather, take_from
from ipu_pipeline.engine.devices.placing import put
from ipu_pipeline.engine.devices.sharding import gather_replicas
from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.execution.agreeing import agree_on_elements
from ipu_pipeline.engine.execution.all_reduce import Parts, join_replicas, take_first
from ipu_pipeline.engine.execution.columns import Column
from ipu_pipeline.engine.execution.outputs import Accumulated
from ipu_pipeline.engine.execution.steps import Call, ColumnRun, Devices
from ipu_pipeline.engine.jaxprs import has_shard_map
from ipu_pipeline.engine.state import Collected, Handed, PipelineState, RunState
from ipu_pipeline.engine.tracing.replicas import uses_replicas

__all__ = [
    "Dealer",
    "Dealt",
    "Joint",
    "Reduced",
    "Replicas",
    "TogetherRun",
    "gather_outputs",
    "join_collected",
    "join_handed",
]


@dataclass(frozen=True, eq=False)
class Joint:
    """A program that runs on all replicas at once."""

    jitted: Any  # the program; its arguments and results span all replicas, see `device_groups.join`
    group: DeviceGroup  # where it runs


@dataclass(frozen=True, eq=False)
class Reduced:
    """What the columns made, joined."""

    # variables that stages assign, by full name: means of floating-point ones and the first replica's
    # others, or each replica's own if they are not joined
    assigned: dict[str, Any] = field(default_factory=dict)
    means: dict[str, Any] = field(default_factory=dict)  # of the accumulators, by key
    zeros: dict[str, Any] = field(default_factory=dict)  # each replica's, in their memory, by key


class Replicas:
    """The columns of a pipeline or loop.

    Attributes:
      placement: where the state of all columns lives.
      columns: what runs the micro-batches of each.
      joint: the programs that all columns start together, by the index of the template.
      has_identical_keys: whether all replicas draw the same random numbers as a single one would.
      joins_assigned: whether variables that stages assign are the same in all columns after an update.
    """

    def __init__(self, placement: StatePlacement, columns: Sequence[Column]) -> None:
        """Jits the programs that the columns share.

        Raises:
          ValueError: a stage computes with other replicas, and is divided over several devices.
        """
        self.placement, self.columns, self.number = placement, tuple(columns), len(columns)
        self.has_identical_keys, self.joins_assigned = False, True
        self._groups = {group.devices[0]: group for column in columns for group in column.placement.groups}
        self._key: tuple[Any, list[Any]] | None = None  # the last random key, and the replicas' keys
        self.joint: dict[int, Joint] = {}
        for template in columns[0].plan.templates.values() if len(columns) > 1 else ():
            stage = placement.traced.stages[template.stage]
            if uses_replicas(stage.flat):
                group = placement.groups[template.stage]
                if group.is_divided:
                    raise ValueError(
                        f"{stage.place} computes with other replicas (cross_replica_sum, replica_index or "
                        "synchronized batch normalization), which does not go with tensor_parallel and "
                        "num_replicas both above 1. Leave one of the three out."
                    )
                if has_shard_map(stage.flat.equations):
                    raise ValueError(
                        f"{stage.place} computes with other replicas (cross_replica_sum, replica_index or "
                        "synchronized batch normalization), and with jax.shard_map, which do not go "
                        "together with num_replicas above 1. Put them into stages of their own."
                    )
                self.joint[template.index] = Joint(template.jit_jointly(group), group)

    def split(self, array: Any) -> list[Any]:
        """Each column's part of an array."""
        if self.number == 1:
            return [array]
        return split(array, [self._groups[device] for device in array.sharding.mesh.devices[:, 0]])

    def split_state(self, state: RunState) -> list[RunState]:
        """Each column's part of the state. Of the optimizer's state it has only the loss scale."""
        if self.number == 1:
            return [state]
        pipeline = state.pipeline
        variables: list[dict[str, Any]] = [{} for _column in self.columns]
        for name in self.placement.traced.variables:
            if name in self.placement.sharded:
                continue
            for own, part in zip(variables, self.split(pipeline.variables[name]), strict=True):
                own[name] = part
        scales = [pipeline.optimizer_state] * self.number
        updates = self.placement.updates
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
        """The key of each replica. The last ones are remembered: steps use the same."""
        if self.has_identical_keys:
            return [key] * self.number
        known = self._key
        if known is None or known[0] is not key:
            folded = [jax.random.fold_in(key, np.uint32(replica)) for replica in range(self.number)]
            known = self._key = (key, folded)
        return known[1]

    def pack(self, accumulators: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The accumulators of the columns as `RunState` has them: of several columns, a tuple per key."""
        if self.number == 1:
            return dict(accumulators[0])
        return {key: tuple(own[key] for own in accumulators) for key in accumulators[0]}

    def join_assigned(self, assigned: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Joins the variables that stages assigned, by full name; each replica keeps its own values."""
        if self.number == 1:
            return dict(assigned[0])
        groups, owners = self.placement.groups, self.placement.traced.owners
        return {name: join([own[name] for own in assigned], groups[owners[name]]) for name in assigned[0]}

    def first_of(self, outputs: Sequence[Sequence[Any]], read: set[Any]) -> list[Any]:
        """The first replica's leaves of the last stage's outputs, on its group, where they are read."""
        if self.number == 1:
            return list(outputs[0])
        found: list[Any] = [None] * len(outputs[0])
        group = self.placement.groups[-1]
        if read:
            parts = {place: [leaves[place] for leaves in outputs] for place in sorted(read)}
            for place, value in take_first(group, parts).items():
                found[place] = value
        return found

    def stage_of(self, key: str) -> int:
        """The stage on whose group an accumulator lies."""
        owners, extra = self.placement.traced.owners, self.placement.accumulator_plan.extra
        return extra[key].stage if key in extra else owners[key]

    def reduce(
        self,
        group: DeviceGroup,
        accumulated: Sequence[Mapping[str, Any]],
        assigned: Sequence[Mapping[str, Any]],
        step: int,
        reduced: Reduced,
    ) -> None:
        """Joins what the columns have accumulated and assigned on a group."""
        groups, owners = self.placement.groups, self.placement.traced.owners
        parts, offloads = Parts(), self.placement.offloads_accumulators
        for key in accumulated[0]:
            stage = self.stage_of(key)
            if groups[stage] is not group:
                continue
            own = [part[key] for part in accumulated]
            if offloads:
                homes = [column.placement.groups[stage] for column in self.columns]
                own = [put([array], home)[0] for array, home in zip(own, homes, strict=True)]
            parts.accumulators[key] = own
        for name in assigned[0]:
            if groups[owners[name]] is group:
                own = [part[name] for part in assigned]
                if self.joins_assigned:
                    parts.assigned[name] = own
                else:
                    reduced.assigned[name] = join(own, group)
        if not parts.accumulators and not parts.assigned:
            return
        made = join_replicas(group, parts, groups.index(group), step)
        reduced.assigned.update(made.assigned)
        reduced.means.update(made.means)
        for key, zero in made.zeros.items():
            (zero,) = put([zero], group, offloads)
            reduced.zeros[key] = tuple(self.split(zero))


class TogetherRun:
    """Does what the columns do together in a step.

    Attributes:
      reduced: what has been joined so far.
    """

    def __init__(self, replicas: Replicas, variables: Mapping[str, Any], step: int) -> None:
        """Begins."""
        self.reduced = Reduced()
        self._replicas, self._variables, self._step = replicas, variables, step

    def gather(self, stage: int, names: Sequence[str]) -> list[list[Any]]:
        """Gathers the parts of variables that the replicas have."""
        replicas = self._replicas
        arrays = [self._variables[name] for name in names]
        whole = gather_replicas(arrays, replicas.placement.groups[stage])
        return [list(own) for own in zip(*map(replicas.split, whole), strict=True)]

    def launch(self, calls: Sequence[Call], chunk: int) -> list[list[Any]]:
        """Starts one program for all replicas."""
        replicas, template = self._replicas, calls[0].template
        joint = replicas.joint[template.index]
        joined = [
            join(parts, joint.group) for parts in zip(*(call.arguments for call in calls), strict=True)
        ]
        first, *others = [cast(Devices, call.column.reading) for call in calls]
        program = joint.group.program(joint.jitted)
        made = first.launch_jointly(template, joint.group, program, joined, chunk)
        for reading in others:
            reading.forget()
        return [list(results) for results in zip(*map(replicas.split, made), strict=True)]

    def reduce(self, group: DeviceGroup, columns: Sequence[ColumnRun]) -> None:
        """Joins what the columns have accumulated and assigned on a group."""
        accumulated = [column.accumulators for column in columns]
        assigned = [column.assigned for column in columns]
        self._replicas.reduce(group, accumulated, assigned, self._step, self.reduced)


# Dealing out micro-batches.


@dataclass(frozen=True, eq=False)
class Dealt:
    """A micro-batch that was placed for a replica."""

    replica: int  # the replica's number
    generation: int  # rises where the replica that seemed to be next was not
    element: Any  # the micro-batch, as that replica's column takes it

    @property
    def shapes(self) -> int:
        """The number of its shapes; see `Element`."""
        return int(self.element.shapes)

    @property
    def leaves(self) -> Sequence[Any]:
        """The micro-batch's leaves."""
        leaves: Sequence[Any] = self.element.leaves
        return leaves


class Dealer:
    """Places micro-batches for columns, and deals them out."""

    def __init__(self, placement: StatePlacement, columns: Sequence[Column], chunk_size: int) -> None:
        """Begins with the first column."""
        self._placement, self._columns, self._chunk_size = placement, columns, chunk_size
        self._lock = threading.Lock()
        self._num_dealt = self._generation = 0

    def place_element(self, leaves: Sequence[Any]) -> Any:
        """Places a micro-batch for the replica whose turn it seems to be."""
        with self._lock:
            replica, generation = self._num_dealt % len(self._columns), self._generation
            self._num_dealt += 1
        return Dealt(replica, generation, self._columns[replica].feed.add(leaves))

    def place_ahead(self, elements: Sequence[Any]) -> list[Any]:
        """Puts the micro-batches of one update, of all replicas, on the devices that read them."""
        number = len(self._columns)
        if number == 1:
            return self._columns[0].place_ahead(elements)
        placed: list[Any] = [None] * len(elements)
        for replica, column in enumerate(self._columns):
            own = [self._of_replica(element, replica) for element in elements[replica::number]]
            for place, element in enumerate(column.place_ahead(own)):
                placed[replica + place * number] = Dealt(replica, self._generation, element)
        return placed

    def _of_replica(self, dealt: Any, replica: int) -> Any:
        """A micro-batch for a replica's column; placed again if it was placed for another one."""
        if not isinstance(dealt, Dealt):
            return dealt  # there is no feed
        if dealt.replica == replica:
            return dealt.element
        with self._lock:  # the data ended, or began anew, in the middle of a round
            if dealt.generation == self._generation:
                self._generation += 1
                self._num_dealt += replica - dealt.replica
        return self._columns[replica].feed.add(dealt.element.leaves)

    def place_alone(self, elements: Sequence[Any]) -> list[Sequence[Any]]:
        """Puts a micro-batch for each column on its devices, where programs handle one."""
        own = [self._of_replica(element, replica) for replica, element in enumerate(elements)]
        return [column.place_alone(one) for column, one in zip(self._columns, own, strict=True)]

    def take_everywhere(self, take: Take, count: int, *, tells_outsiders: bool = True) -> list[Take]:
        """Takes `count` micro-batches per column, in each process those that it reads; or raises in all.

        Args:
          take: of the micro-batches of all columns.
          count: the number of each column's.
          tells_outsiders: whether processes without a device of the pipeline call it, too.

        Returns:
          A take for each column.
        """
        columns, placement = self._columns, self._placement
        processes = placement.groups[0].processes
        takes = [take] if len(columns) == 1 else self._deal(take)
        groups = [group for column in columns for group in column.fed_groups]
        readers = {device.process_index for group in groups for device in group.devices}
        others = peers.current()
        hearers = range(others.count) if others is not None and tells_outsiders else processes
        if len(processes) < 2 or not readers or jax.process_index() not in hearers:
            return takes
        error: Exception | None = None
        taken: list[list[Any]] = []
        for column, own in zip(columns, takes, strict=True):
            elements: list[Any] = []
            if column.is_fed_here:
                try:
                    elements = gather(own, count, count)
                except Exception as raised:
                    error = error or raised
            taken.append(elements)
        agree_on_elements(placement, readers, hearers, error)
        return list(map(take_from, taken))

    def _deal(self, take: Take) -> list[Take]:
        """A take per replica, of its micro-batches, dealt out in turn."""
        number, size = len(self._columns), self._chunk_size
        waiting: list[collections.deque[Any]] = [collections.deque() for _column in self._columns]

        def take_of(replica: int) -> Take:
            def take_some(wanted: int) -> list[Any]:
                if not waiting[replica]:
                    for place, element in enumerate(gather(take, number * size, number * size)):
                        if self._columns[place % number].takes_elements:
                            waiting[place % number].append(self._of_replica(element, place % number))
                return [waiting[replica].popleft() for _number in range(min(wanted, len(waiting[replica])))]

            return take_some

        return [take_of(replica) for replica in range(number)]


# Joining what replicas collect.


def gather_outputs(placement: StatePlacement, parts: Sequence[Accumulated]) -> list[Accumulated]:
    """Brings what replicas collected and enqueued to the process that has the first replica's leaf.

    Leaves whose replicas are in one process stay where they are.
    """
    first, tree = _flatten(parts[0])
    found: list[Accumulated] = [parts[0]]
    for replica, part in enumerate(parts[1:], 1):
        leaves, _tree = _flatten(part)
        by_transfer: dict[Any, list[int]] = {}  # (source, target) -> numbers
        for place, (leaf, target) in enumerate(zip(leaves, first, strict=True)):
            by_transfer.setdefault((leaf.sharding, target.sharding), []).append(place)
        for number, ((source, target), places) in enumerate(by_transfer.items()):
            if _process(source) == _process(target):
                continue
            tag = placement.tag(f"outputs of replica {replica} ({number})")
            moved = move([leaves[place] for place in places], source, target, tag, is_kept=True)
            for place, leaf in zip(places, moved, strict=True):
                leaves[place] = leaf
        collected, enqueued = _unflatten(part, tree, leaves)
        found.append(dataclasses.replace(part, collected=collected, enqueued=enqueued))
    return found


def _process(sharding: Any) -> int:
    """The process of a replica's group, whose devices are all in one."""
    return int(next(iter(sharding.device_set)).process_index)


def _flatten(part: Accumulated) -> tuple[list[Any], Any]:
    handed = [(one.outputs, one.loss) for one in part.collected], [one.leaves for one in part.enqueued]
    return jax.tree.flatten(handed)


def _unflatten(part: Accumulated, tree: Any, leaves: list[Any]) -> tuple[list[Any], list[Any]]:
    collected, enqueued = jax.tree.unflatten(tree, leaves)
    return (
        [
            dataclasses.replace(one, outputs=outputs, loss=loss)
            for one, (outputs, loss) in zip(part.collected, collected, strict=True)
        ],
        [dataclasses.replace(one, leaves=own) for one, own in zip(part.enqueued, enqueued, strict=True)],
    )


def join_collected(parts: Sequence[Collected]) -> Collected:
    """Stacks what replicas collected together, with a leading axis for replicas if there are several."""
    if len(parts) == 1:
        return parts[0]
    axis = 0 if parts[0].size is None else 1
    outputs = [
        stack_replicas(leaves, axis) for leaves in zip(*(part.outputs for part in parts), strict=True)
    ]
    losses = [part.loss for part in parts]
    loss = None if losses[0] is None else stack_replicas(losses, axis)
    return dataclasses.replace(parts[0], outputs=outputs, loss=loss)


def join_handed(parts: Sequence[Handed]) -> Handed:
    """Stacks what replicas enqueued together, with a leading axis for replicas if there are several."""
    if len(parts) == 1:
        return parts[0]
    axis = 0 if parts[0].size is None else 1
    leaves = [stack_replicas(leaves, axis) for leaves in zip(*(part.leaves for part in parts), strict=True)]
    return dataclasses.replace(parts[0], leaves=leaves)
