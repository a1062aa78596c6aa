"""State placement: what replicas share out, what is in host memory, and where state lives."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ipu_pipeline.engine.devices.device_groups import (
    WHOLE,
    DeviceGroup,
    NotRun,
    absent,
    divided_in_replica,
    group_sharding,
    names_of,
    partition_of,
)
from ipu_pipeline.engine.devices.links import Tag, links
from ipu_pipeline.engine.devices.placement import Constants, put_host_copies
from ipu_pipeline.engine.devices.process_exchange import read_gathered
from ipu_pipeline.engine.option_types import Offload, Shard
from ipu_pipeline.engine.tracing.stage_meshes import REPLICA, Partitions, normal_partition
from ipu_pipeline.engine.tracing.stages import TracedPipeline
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind, UpdateValue
from ipu_pipeline.engine.updates.update_programs import (
    Accumulator,
    AccumulatorPlan,
    StateLeaf,
    UpdateProgram,
    Updates,
    variable_of,
)


def sharding_of(group: DeviceGroup, shape: Sequence[int], partition: PartitionSpec) -> NamedSharding:
    """The sharding of an array on a group of which each replica has a part.

    It is divided along the first axis whose size is a multiple of the number of replicas; without one, each
    replica has the whole.
    """
    number, names = group.num_replicas, [*partition, *[None] * (len(shape) - len(partition))]
    for axis, size in enumerate(shape):
        if size and size % number == 0 and names[axis] is None:
            return group.divided(normal_partition([*names[:axis], REPLICA, *names[axis + 1 :]]))
    return group.divided(partition)


def share_out(arrays: Sequence[Any], shardings: Sequence[NamedSharding], group: DeviceGroup) -> list[Any]:
    """Gives arrays on a group, or in host memory for it, other shardings in the same memory."""
    results = list(arrays)
    places = [
        place
        for place, (array, sharding) in enumerate(zip(arrays, shardings, strict=True))
        if array.sharding != sharding
    ]
    targets = [shardings[place].with_memory_kind(results[place].sharding.memory_kind) for place in places]
    if places:
        moved = _reshard([results[place] for place in places], targets, group)
        for place, array in zip(places, moved, strict=True):
            results[place] = array
    return results


def gather_replicas(arrays: Sequence[Any], group: DeviceGroup) -> list[Any]:
    """Gathers arrays of which the replicas have parts: whole in each, in the memory of the group's devices.

    Within a replica they stay divided.
    """
    return _reshard(arrays, [group.divided(partition_of(array)) for array in arrays], group)


def is_apart(array: Any) -> bool:
    """Whether each replica of a group has a part of an array."""
    sharding = group_sharding(array)
    return sharding is not None and any(REPLICA in names_of(entry) for entry in sharding.spec)


def _reshard(arrays: Sequence[Any], targets: Sequence[NamedSharding], group: DeviceGroup) -> list[Any]:
    if not group.has_peers:
        moved: list[Any] = jax.device_put(list(arrays), list(targets))
        return moved
    copied: Callable[..., list[Any]] = jax.jit(_same, out_shardings=list(targets))
    if not group.is_here:
        return [NotRun(_one, target)(array) for array, target in zip(arrays, targets, strict=True)]
    return copied(list(arrays))


def _same(arrays: list[Any]) -> list[Any]:
    return arrays


def _one(array: Any) -> Any:
    return array


def load(value: Any, group: DeviceGroup) -> Any:
    """A traced value in the memory of the group's device."""
    return jax.device_put(value, group.replicated)


def store(value: Any, group: DeviceGroup) -> Any:
    """A traced value in the host's memory."""
    return jax.device_put(value, group.host)


NO_LOSS_SCALE = np.float32(1)
# Processes -> numbers of the pipelines in them, which all of these processes make in the same order. One
# that a process has for itself disturbs no other numbers.
_numbers: collections.defaultdict[tuple[int, ...], Iterator[int]] = collections.defaultdict(itertools.count)


class StatePlacement:
    """Puts variables, optimizer state and accumulators on the groups of their stages."""

    def __init__(
        self,
        traced: TracedPipeline,
        updates: Updates | None,
        groups: Sequence[DeviceGroup],
        accumulator_plan: AccumulatorPlan,
        offload: Collection[Offload] = (),
        shard: Collection[Shard] = (),
        partitions: Partitions = MappingProxyType({}),
    ) -> None:
        """Decides which arrays are offloaded, shared out and divided."""
        self.offloads_state = Offload.WEIGHT_UPDATE_VARIABLES in offload
        self.offloads_accumulators = Offload.GRADIENT_ACCUMULATION_BUFFERS in offload
        self.offloads_activations = Offload.ACTIVATIONS in offload
        self.offloaded: frozenset[str] = frozenset()  # full names of variables
        assigned = {spec.name for stage in traced.stages for spec in stage.assigned}
        if Offload.WEIGHTS in offload:
            specs = traced.variables.items()
            self.offloaded = frozenset(n for n, spec in specs if spec.trainable or n not in assigned)
        self.partitions = partitions
        has_replicas = groups[0].num_replicas > 1
        self.shards_state = has_replicas and Shard.OPTIMIZER_STATE in shard
        self.sharded: frozenset[str] = frozenset()  # full names of variables
        if has_replicas and Shard.WEIGHTS in shard:
            unsharded = assigned | traced.shared()
            specs = traced.variables.items()
            self.sharded = frozenset(n for n, spec in specs if spec.trainable and n not in unsharded)
        self.accumulator_plan = accumulator_plan
        self.traced = traced
        self.updates = updates
        self.groups = tuple(groups)
        self.constants = Constants()
        self._leaf_partitions: tuple[PartitionSpec, ...] = ()
        if updates is not None:
            self._leaf_partitions = tuple(map(self._partition_of_leaf, updates.state_leaves))
        self.has_peers = any(group.has_peers for group in self.groups)
        self._name = (
            f"pipeline {next(_numbers[self.groups[0].processes])} of processes {self.groups[0].processes}"
        )
        self._step = self._num_agreements = 0

    # What only matters with several processes.

    def has_variable(self, name: str) -> bool:
        """Whether a variable is on a device of this process."""
        return self.groups[self.traced.owners[name]].is_here

    def begin_step(self) -> None:
        """Begins the next step in the sense of `tag`; all processes do so at the same places.

        Steps are counted here and not taken from the state, which may be used twice. Before the first one
        all processes connect, so that it is known at once if one cannot be reached.
        """
        if self._step == 0 and any(group.is_here for group in self.groups):
            links().warm(self.groups[0].processes)
        self._step += 1

    def tag(self, edge: str, number: int = 0) -> Tag | None:
        """The tag of a transfer between processes; None if there are no others."""
        return Tag(f"{self._name}, {edge}", self._step, number) if self.has_peers else None

    def name_agreement(self, topic: str) -> tuple[str, int]:
        """Names and counts what the processes are about to agree on, so that a mismatch shows.

        Unlike steps, agreements are counted alike in processes without a part in the groups.
        """
        self._num_agreements += 1
        return f"{self._name}, {topic}", self._num_agreements

    def place_variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Places the variables that the pipeline has, each on its home's group.

        The results share no memory with NumPy arrays that are given.
        """
        placed: dict[str, Any] = {}
        if self.has_peers:
            self.begin_step()
        by_place: dict[tuple[int, bool], list[str]] = {}
        for name, home in self.traced.owners.items():
            if name in variables:
                by_place.setdefault((home, name in self.offloaded), []).append(name)
        for (index, is_offloaded), names in sorted(by_place.items()):
            arrays = [variables[name] for name in names]
            tag = self.tag(f"variables of stage {index} ({is_offloaded})")
            shardings = [self.sharding_of_variable(name) for name in names]
            arrays = self._place_as(arrays, self.groups[index], shardings, is_offloaded, tag)
            placed.update(zip(names, arrays, strict=True))
        return placed

    def _place_as(
        self,
        arrays: Sequence[Any],
        group: DeviceGroup,
        shardings: Sequence[NamedSharding],
        is_offloaded: bool,
        tag: Tag | None,
    ) -> list[Any]:
        """Puts arrays on a group, with shardings; those already there stay the same objects."""
        kind = str((group.host if is_offloaded else group.replicated).memory_kind)
        targets = [sharding.with_memory_kind(kind) for sharding in shardings]
        placed = list(arrays)
        to_read = [place for place, array in enumerate(placed) if self._is_elsewhere(array)]
        if to_read:  # by all processes: those without a part in the groups may count steps differently
            gathered = read_gathered([placed[place] for place in to_read])
            for place, array in zip(to_read, gathered, strict=True):
                placed[place] = array if group.is_here else absent(array.shape, array.dtype, targets[place])
        to_move = [
            place
            for place, (array, sharding) in enumerate(zip(arrays, targets, strict=True))
            if not (isinstance(array, jax.Array) and array.sharding == sharding)
        ]
        partitions = [divided_in_replica(targets[place]) for place in to_move]
        moved = put_host_copies([placed[place] for place in to_move], group, is_offloaded, tag, partitions)
        moved = share_out(moved, [targets[place] for place in to_move], group)
        for place, array in zip(to_move, moved, strict=True):
            placed[place] = array
        return placed

    def _is_elsewhere(self, array: Any) -> bool:
        """Whether an array lies only in processes in which the pipeline has no device."""
        sharding = group_sharding(array)
        if sharding is None:
            return False
        return {device.process_index for device in sharding.mesh.devices.flat}.isdisjoint(
            self.groups[0].processes
        )

    def sharding_of_variable(self, name: str) -> NamedSharding:
        """The sharding of a variable on its group while no program uses it."""
        group = self.groups[self.traced.owners[name]]
        if name not in self.sharded:
            return self.sharding_in_program(name, group)
        return sharding_of(group, self.traced.variables[name].shape, self.partitions.get(name, WHOLE))

    def sharding_in_program(self, name: str, group: DeviceGroup) -> NamedSharding:
        """The sharding of a variable and its gradient on a group while a program there uses them."""
        return group.divided(self.partitions[name]) if name in self.partitions else group.replicated

    def _partition_of_leaf(self, leaf: StateLeaf) -> PartitionSpec:
        """The partition of the variable that an optimizer-state leaf belongs to, if their shapes match."""
        name = leaf.variable
        if (
            name is None
            or name not in self.partitions
            or leaf.aval.shape != self.traced.variables[name].shape
        ):
            return WHOLE
        return self.partitions[name]

    def partition_of_leaf(self, number: int) -> PartitionSpec:
        """The partition within a replica of a leaf of the optimizer's state."""
        return self._leaf_partitions[number]

    def sharding_of_leaf(self, number: int) -> NamedSharding:
        """The sharding of a leaf of the optimizer's state on its group."""
        assert self.updates is not None
        leaf, partition = self.updates.state_leaves[number], self._leaf_partitions[number]
        group = self.groups[leaf.stage]
        return (
            sharding_of(group, leaf.aval.shape, partition)
            if self.shards_state
            else group.divided(partition)
        )

    def part_of_variable(self, name: str) -> jax.ShapeDtypeStruct:
        """Shape and dtype of each replica's part of a variable."""
        spec = self.traced.variables[name]
        shape = self.sharding_of_variable(name).shard_shape(spec.shape)
        return jax.ShapeDtypeStruct(shape, spec.dtype)

    def part_of_leaf(self, number: int) -> jax.ShapeDtypeStruct:
        """Shape and dtype of each replica's part of a leaf of the optimizer's state."""
        assert self.updates is not None
        aval = self.updates.state_leaves[number].aval
        return jax.ShapeDtypeStruct(self.sharding_of_leaf(number).shard_shape(aval.shape), aval.dtype)

    def part_of_gradient(self, name: str, dtype: Any) -> jax.ShapeDtypeStruct:
        """Shape and dtype of each device's part of an accumulator of a variable's gradients."""
        home = self.groups[self.traced.owners[name]]
        shape = self.sharding_in_program(name, home).shard_shape(self.traced.variables[name].shape)
        return jax.ShapeDtypeStruct(shape, dtype)

    @property
    def shards_anything(self) -> bool:
        """Whether replicas share out anything."""
        return self.shards_state or bool(self.sharded)

    def sharding_in_update(self, value: UpdateValue, group: DeviceGroup) -> NamedSharding:
        """The sharding of a value that an update reads or makes, on the group of the program."""
        if value.kind == UpdateKind.GRADIENT:
            return self.sharding_in_program(value.key, group)
        if value.kind == UpdateKind.PARAMETER:
            sharding = self.sharding_of_variable(value.key)
            partition = self.partitions.get(value.key, WHOLE)
        elif value.kind == UpdateKind.STATE:
            sharding, partition = self.sharding_of_leaf(value.key), self._leaf_partitions[value.key]
        else:
            return group.replicated
        return sharding if sharding.mesh == group.replicated.mesh else group.divided(partition)

    def place_accumulators(self, accumulators: Mapping[str, Any]) -> dict[str, Any]:
        """Places accumulators, each on its group; returns them by key."""
        placed = {}
        if self.has_peers:
            self.begin_step()
        for key, value in accumulators.items():
            accumulator, tag = self._accumulator(key), self.tag(f"accumulator {key}")
            group = self.groups[accumulator.stage]
            sharding = self.sharding_in_program(accumulator.variable, group)
            (placed[key],) = self._place_as([value], group, [sharding], self.offloads_accumulators, tag)
        return placed

    def make_accumulators(
        self, dtypes: Mapping[str, Any], values: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Makes the accumulators of the variables' gradients, placed, by key; zeros where none is known."""
        avals = self.find_accumulators(dtypes)
        arrays: dict[str, Any] = {}
        for old_key, value in (values or {}).items():
            key = old_key if old_key in avals else variable_of(old_key)
            arrays[key] = np.asarray(arrays[key]) + np.asarray(value) if key in arrays else value
        arrays = {key: np.zeros(aval.shape, aval.dtype) for key, aval in avals.items()} | arrays
        return self.place_accumulators(arrays)

    def find_accumulators(self, dtypes: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the accumulators, by key."""
        names = {key: self._accumulator(key).variable for key in (*dtypes, *self.accumulator_plan.extra)}
        shapes = {key: self.traced.variables[name].shape for key, name in names.items()}
        return {key: jax.ShapeDtypeStruct(shapes[key], dtypes[name]) for key, name in names.items()}

    def _accumulator(self, key: str) -> Accumulator:
        return self.accumulator_plan.extra.get(key) or Accumulator(key, self.traced.owners[key])

    def place_optimizer_state(self, leaves: Sequence[Any]) -> list[Any]:
        """Places the leaves of the optimizer's state, each on its stage's group."""
        updates = self.updates
        assert updates is not None
        if self.has_peers:
            self.begin_step()
        return [
            self._place_as(
                [leaf],
                self.groups[state_leaf.stage],
                [self.sharding_of_leaf(number)],
                self.offloads_state,
                self.tag("optimizer state", number),
            )[0]
            for number, (state_leaf, leaf) in enumerate(zip(updates.state_leaves, leaves, strict=True))
        ]

    def loss_scale(self, optimizer_state: Any) -> Any:
        """Returns the scale that the backward starts from; 1 without loss scaling."""
        scale = None if self.updates is None else self.updates.loss_scale
        if scale is None:
            return NO_LOSS_SCALE
        if optimizer_state is None:
            return np.float32(scale.initial)
        return jax.tree.leaves(optimizer_state)[scale.leaf]

    def results_of(self, program: UpdateProgram) -> dict[str, Any]:
        """Arguments of `jax.jit` that say where the results of an update's program lie."""
        group = self.groups[program.stage]
        if not self.shards_anything and not group.is_divided:
            return group.results
        return {"out_shardings": [self.sharding_in_update(value, group) for value in program.results]}

    @property
    def offloads_in_micro_batches(self) -> bool:
        """Whether anything in host memory is needed for micro-batches."""
        return bool(self.offloaded) or self.offloads_accumulators or self.offloads_activations

    @property
    def offloads_anything(self) -> bool:
        """Whether anything lies in host memory."""
        return self.offloads_state or self.offloads_in_micro_batches

    def is_offloaded(self, value: UpdateValue) -> bool:
        """Whether what an update makes goes to host memory."""
        if value.kind == UpdateKind.PARAMETER:
            return value.key in self.offloaded
        if value.kind == UpdateKind.GRADIENT:
            return self.offloads_accumulators
        return value.kind == UpdateKind.STATE and self.offloads_state
