"""Device groups, on which stages live, and what is in other processes or comes from there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ipu_pipeline.engine.devices.links import Tag, links
from ipu_pipeline.engine.tracing.stage_meshes import MODEL, REPLICA, normal_partition
from ipu_pipeline.ground import jax_compat

# A stage lives on a group of devices, a mesh with the axes `replica` and `model`: along `model` are the
# devices that compute a stage together, mostly one. State is `replicated` over the replicas of a group, and
# whole or `divided` over the devices of each. Micro-batches run in columns, one per replica, whose groups
# have the devices of that replica.
#
# Groups may be on devices of other processes: what is put there has no content here (`absent`), and what
# goes from process to process is sent (`move`).

HOST_MEMORY = "pinned_host"
WHOLE = PartitionSpec()


@dataclass(frozen=True, eq=False)
class DeviceGroup:
    """The devices of one number in the device mapping, in all replicas.

    Attributes:
      ipu: the number.
      replicated: the sharding of what each device has whole, such as scalars.
      has_one_client: whether all groups of the pipeline have devices of one kind.
      processes: the processes that have devices of the pipeline's groups, in order.
    """

    ipu: int
    replicated: NamedSharding
    has_one_client: bool
    processes: tuple[int, ...] = ()

    @functools.cached_property
    def has_peers(self) -> bool:
        """Whether groups of the pipeline are in other processes than this one."""
        return any(process != self.devices[0].client.process_index() for process in self.processes)

    @functools.cached_property
    def is_joined(self) -> bool:
        """Whether the group itself spans several processes, whose parts its programs join."""
        return len({device.process_index for device in self.devices}) > 1

    @functools.cached_property
    def is_here(self) -> bool:
        """Whether this process has devices of the group."""
        return any(map(is_here, self.devices))

    @property
    def results(self) -> dict[str, Any]:
        """Arguments of `jax.jit` that place results on the group; empty where all devices are here."""
        return {"out_shardings": self.replicated} if self.has_peers else {}

    def program(self, function: Callable[..., Any], shardings: Any = None) -> Callable[..., Any]:
        """The function, if this process runs it on the group; else one that returns stand-ins."""
        return function if self.is_here else NotRun(function, shardings or self.replicated)

    @functools.cached_property
    def host(self) -> NamedSharding:
        """The sharding of what is kept in host memory for the group."""
        for device in filter(is_here, self.devices):
            kinds = [memory.kind for memory in device.addressable_memories()]
            if HOST_MEMORY not in kinds:
                raise ValueError(
                    f"Offloading needs the memory kind {HOST_MEMORY!r}; {device} has {', '.join(kinds)}. "
                    "Offload nothing there."
                )
        return self.replicated.with_memory_kind(HOST_MEMORY)

    @functools.cached_property
    def copy(self) -> Callable[[Sequence[Any]], list[Any]] | None:
        """Copies arrays from other groups here, except random keys; None if that is impossible."""
        return jax_compat.make_copy(self.devices, self.replicated) if self.has_one_client else None

    @functools.cached_property
    def send(self) -> Callable[[np.ndarray[Any, Any] | np.generic, bool], Any] | None:
        """Puts an array of NumPy here, or a copy; None if that is impossible."""
        return jax_compat.make_send(self.devices[0], self.replicated) if len(self.devices) == 1 else None

    @property
    def devices(self) -> tuple[Any, ...]:
        """The group's devices, replica by replica."""
        return tuple(self.replicated.mesh.devices.flat)

    @functools.cached_property
    def first_devices(self) -> tuple[Any, ...]:
        """The first device of each replica, which stands for the group in reports."""
        return tuple(self.replicated.mesh.devices[:, 0])

    @functools.cached_property
    def num_replicas(self) -> int:
        """The number of replicas that have devices in the group."""
        return int(self.replicated.mesh.shape[REPLICA])

    @functools.cached_property
    def is_divided(self) -> bool:
        """Whether several devices compute a stage together."""
        return int(self.replicated.mesh.shape[MODEL]) > 1

    def divided(self, partition: PartitionSpec) -> NamedSharding:
        """The sharding of what is divided over the devices of a replica."""
        return NamedSharding(self.replicated.mesh, partition) if partition else self.replicated


def make_groups(
    devices: Sequence[Any], device_mapping: Sequence[int], num_replicas: int = 1, num_devices: int = 1
) -> tuple[DeviceGroup, ...]:
    """Makes the groups of all stages."""
    ipus = sorted(set(device_mapping))
    size = ipus[-1] + 1
    flat_devices = np.array(devices[: num_replicas * size * num_devices])
    grid = flat_devices.reshape(num_replicas, size, num_devices)[:, ipus]
    has_one_client = len({device.client for device in grid.flat}) == 1
    processes = tuple(sorted({device.process_index for device in grid.flat}))
    groups = {
        ipu: DeviceGroup(
            ipu,
            NamedSharding(Mesh(grid[:, number], (REPLICA, MODEL)), PartitionSpec()),
            has_one_client,
            processes,
        )
        for number, ipu in enumerate(ipus)
    }
    return tuple(groups[ipu] for ipu in device_mapping)


def check_processes(groups: Sequence[DeviceGroup]) -> None:
    """Raises a ValueError if devices that compute a stage together are in several processes.

    Between processes, each device sends its part to its counterpart.
    """
    for group in groups:
        for replica, devices in enumerate(group.replicated.mesh.devices):
            processes = sorted({device.process_index for device in devices})
            if len(processes) > 1:
                of_replica = f" of replica {replica}" if group.num_replicas > 1 else ""
                raise ValueError(
                    f"tensor_parallel: the {len(devices)} devices with number {group.ipu}{of_replica} must "
                    f"be in one process; they are in {', '.join(map(str, processes))}. Give each process a "
                    f"multiple of {len(devices)} devices."
                )


def split(array: Any, groups: Sequence[DeviceGroup]) -> list[Any]:
    """Splits an array of a group into each replica's part, on the groups of the columns; nothing is copied.

    The parts of replicas in other processes are arrays without content.
    """
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    kind, partition = array.sharding.memory_kind, array.sharding.spec

    def of_replica(group: DeviceGroup) -> Any:
        sharding = NamedSharding(group.replicated.mesh, partition, memory_kind=kind)
        local_shards = [shards[device] for device in group.devices if device in shards]
        if not local_shards:
            return absent(array.shape, array.dtype, sharding)
        return jax_compat.make_array(array.shape, sharding, local_shards)

    return [of_replica(group) for group in groups]


def join(parts: Sequence[Any], group: DeviceGroup) -> Any:
    """Joins the replicas' parts, in their order, to an array of a group; nothing is copied.

    They need not be equal: programs under `jax.shard_map` see each replica's own.
    """
    first = parts[0]
    sharding = NamedSharding(
        group.replicated.mesh, partition_of(first), memory_kind=first.sharding.memory_kind
    )
    local_shards = [shard for part in parts for shard in _local_parts(part)]
    return (
        jax_compat.make_array(first.shape, sharding, local_shards)
        if local_shards
        else absent(first.shape, first.dtype, sharding)
    )


def _local_parts(array: Any) -> list[Any]:
    """The parts of an array on this process's devices, in the order of the devices."""
    if len(array.sharding.device_set) == 1:
        return [array] if array.is_fully_addressable else []
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    return [shards[device] for device in array.sharding.mesh.devices.flat if device in shards]


def over_replicas(
    mesh: Any, function: Callable[..., Any], arguments: Any = WHOLE, results: Any = WHOLE
) -> Callable[..., Any]:
    """Runs a function on each device of a mesh, on what `join` put there; `split` takes its results."""
    # Without check_vma JAX asks for no proof that values are the same where the sharding says so.
    return jax.shard_map(function, mesh=mesh, in_specs=arguments, out_specs=results, check_vma=False)


def stack_replicas(parts: Sequence[Any], axis: int) -> Any:
    """An array with an axis for the replicas, each part of which stays on its device."""
    parts = [_first_copy(part) for part in parts]
    (first, *later) = parts
    if len({device for part in parts for device in part.devices()}) < len(parts):
        # Parts of other processes were brought to the first one's device, so the others go there, too.
        parts = [first, *(_beside(part, first) for part in later)]
    if len({device for part in parts for device in part.devices()}) == 1:  # they were brought together
        if not first.is_fully_addressable:
            return absent(
                (*first.shape[:axis], len(parts), *first.shape[axis:]), first.dtype, first.sharding
            )
        return _stack(list(parts), axis)
    sharding = _stacked_sharding(tuple(device for part in parts for device in part.devices()), axis)
    shape = (*first.shape[:axis], len(parts), *first.shape[axis:])
    local_parts = [part for part in parts if part.is_fully_addressable]
    if not local_parts:
        return absent(shape, first.dtype, sharding)
    return jax_compat.make_array(shape, sharding, [_expand(part, axis) for part in local_parts])


@functools.lru_cache(maxsize=256)
def _stacked_sharding(devices: tuple[Any, ...], axis: int) -> NamedSharding:
    mesh = Mesh(np.array(devices).reshape(-1, 1), (REPLICA, MODEL))
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, REPLICA))


def _beside(array: Any, other: Any) -> Any:
    """An array on the device of another one; without content where that is in another process."""
    if other.is_fully_addressable:
        return jax.device_put(array, other.sharding)
    return absent(array.shape, array.dtype, other.sharding)


def _first_copy(array: Any) -> Any:
    """The first device's copy of an array that each device has whole."""
    if len(array.sharding.device_set) == 1:
        return array
    local_parts = _local_parts(array)
    if local_parts:
        return local_parts[0]
    first = SingleDeviceSharding(array.sharding.mesh.devices.flat[0])
    return absent(array.shape, array.dtype, first)


@functools.partial(jax.jit, static_argnums=1)
def _stack(parts: list[jax.Array], axis: int) -> jax.Array:
    return jnp.stack(parts, axis)


@functools.partial(jax.jit, static_argnums=1)
def _expand(part: jax.Array, axis: int) -> jax.Array:
    return jnp.expand_dims(part, axis)


def divided_in_replica(sharding: NamedSharding) -> PartitionSpec:
    """The partition of a replica's part over its devices, in a sharding of a group."""
    return normal_partition([MODEL if MODEL in names_of(entry) else None for entry in sharding.spec])


def partition_of(array: Any) -> PartitionSpec:
    """The partition of an array over the devices of each replica; WHOLE if it lies on no group."""
    sharding = group_sharding(array)
    if sharding is None or sharding.is_fully_replicated:
        return WHOLE
    return divided_in_replica(sharding)


def names_of(entry: Any) -> tuple[str, ...]:
    """The axes of a mesh that an entry of a `PartitionSpec` names."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


# Every process runs the same Python. What lies only on devices of other processes is a JAX array here, too,
# with shape, dtype and sharding, but without a shard. A program whose devices are all elsewhere gives such
# arrays. So the runner, placement and the weight update are the same as in one process.


def is_here(device: Any) -> bool:
    """Whether a device belongs to this process."""
    return bool(device.process_index == device.client.process_index())


@functools.lru_cache(maxsize=4096)
def absent(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    """The array that stands in for one on devices of other processes."""
    return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)


class NotRun:
    """Stands in for a function that other processes run: returns stand-ins for its results."""

    def __init__(self, function: Callable[..., Any], sharding: Any, results: Any = None) -> None:
        """Traces nothing yet."""
        self._function = function
        self._sharding = sharding
        self._known: dict[Any, Any] = {}
        self._results = None if results is None else self._make(results)

    def __call__(self, *arguments: Any) -> Any:
        """Returns stand-ins for the results, found from the shapes and dtypes of the arguments."""
        if self._results is not None:
            return self._results
        leaves, tree = jax.tree.flatten(arguments)
        key = (tree, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._known:
            self._known[key] = self._make(jax.eval_shape(self._function, *arguments))
        return self._known[key]

    def _make(self, results: Any) -> Any:
        shardings = jax.tree.broadcast(self._sharding, results)
        return jax.tree.map(lambda leaf, place: absent(leaf.shape, leaf.dtype, place), results, shardings)


def absent_like(arrays: Sequence[Any], sharding: Any) -> list[Any]:
    """Stand-ins for arrays, or for structs with shapes and dtypes."""
    return [absent(tuple(array.shape), array.dtype, sharding) for array in arrays]


# All processes make the same calls. An array that lies on a group is moved by the processes that have its
# devices and by the processes that have the target's. Any other array is one that every process has, such
# as a user's, and each process puts it on its own devices.


def group_sharding(array: Any) -> NamedSharding | None:
    """The sharding of an array that lies on a group; None for an array that every process has."""
    sharding = array.sharding if isinstance(array, jax.Array) else None
    if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names == (REPLICA, MODEL):
        return sharding
    return None


def is_all_here(sharding: NamedSharding) -> bool:
    """Whether all devices of a sharding belong to this process."""
    return all(map(is_here, sharding.mesh.devices.flat))


def put_here(arrays: Sequence[Any], target: NamedSharding) -> list[Any]:
    """Puts arrays that every process has on this process's devices of a group."""
    devices = [device for device in target.mesh.devices.flat if is_here(device)]
    parts = [
        jax.device_put(list(arrays), SingleDeviceSharding(device, memory_kind=target.memory_kind))
        for device in devices
    ]
    return (
        [join_parts(some, target) for some in zip(*parts, strict=True)]
        if devices
        else absent_like(arrays, target)
    )


def can_move_parts(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether two groups divide arrays alike, so that each device sends its part to its counterpart."""
    return source.spec == target.spec and source.mesh.devices.shape == target.mesh.devices.shape


def move(
    arrays: Sequence[Any], source: NamedSharding, target: NamedSharding, tag: Tag | None, is_kept: bool
) -> list[Any]:
    """Moves arrays of one group to another; each device gets them from one device of the first group."""
    pairs = _pair(list(source.mesh.devices.flat), list(target.mesh.devices.flat))
    crosses = any(from_device.process_index != to_device.process_index for from_device, to_device in pairs)
    is_possible = source.is_fully_replicated or can_move_parts(source, target)
    if not is_possible or (crosses and tag is None):
        devices = ", ".join(f"{d.id} (process {d.process_index})" for d in source.mesh.devices.flat)
        raise ValueError(
            f"An array on the devices {devices} is needed in another process. Only what belongs to a "
            "pipeline is sent from process to process: read it where it is, and give it to all processes "
            "as an array of NumPy."
        )
    parts = []
    for from_device, to_device in pairs:
        local = SingleDeviceSharding(to_device)
        if is_here(from_device):
            shards = [part_on(array, from_device) for array in arrays]
            if is_here(to_device):
                parts.append(jax.device_put(shards, local, may_alias=is_kept))
                continue
            if not is_kept or source.memory_kind != target.memory_kind:
                shards = jax.device_put(shards, SingleDeviceSharding(from_device), may_alias=False)
            assert tag is not None
            links().send([as_numbers(array) for array in shards], tag, from_device, to_device)
        elif is_here(to_device):
            structs = [struct_of_numbers(array, source.shard_shape(array.shape), local) for array in arrays]
            assert tag is not None
            received = links().receive(structs, tag, from_device, to_device)
            parts.append([as_sent(part, array) for part, array in zip(received, arrays, strict=True)])
    if not parts:
        return absent_like(arrays, target)
    return [
        jax_compat.make_array(array.shape, target, some)
        for array, some in zip(arrays, zip(*parts, strict=True), strict=True)
    ]


def join_parts(parts: Sequence[Any], sharding: Any) -> Any:
    """Makes an array with a replicated sharding from this process's parts, without copying."""
    return jax_compat.make_array(parts[0].shape, sharding, parts)


def _pair(sources: list[Any], targets: list[Any]) -> list[tuple[Any, Any]]:
    """The device that each target gets its arrays from: one of its replica, else one of its process."""
    if len(sources) == len(targets):
        return list(zip(sources, targets, strict=True))

    def find(number: int, target: Any) -> Any:
        local_sources = [source for source in sources if source.process_index == target.process_index]
        return local_sources[0] if local_sources else sources[number % len(sources)]

    return [(find(number, target), target) for number, target in enumerate(targets)]


def part_on(array: Any, device: Any) -> Any:
    """The part of an array that a device has."""
    if len(array.sharding.device_set) == 1:
        return array
    return next(shard.data for shard in array.addressable_shards if shard.device == device)


# Random keys are arrays of arrays, which are sent as the numbers that they are made of.


def as_numbers(array: Any) -> Any:
    """The numbers that an array is sent as."""
    return array if jax_compat.is_device_array(array) else jax.random.key_data(array)


def struct_of_numbers(array: Any, shape: Sequence[int], sharding: Any) -> Any:
    """Shape, dtype and sharding of the numbers that an array, or a part of this shape, is sent as."""
    struct = jax.ShapeDtypeStruct(shape, array.dtype)
    if not jax_compat.is_device_array(array):
        struct = jax.eval_shape(jax.random.key_data, struct)
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)


def as_sent(received: Any, array: Any) -> Any:
    """Converts received numbers to the form of the array that was sent: random keys if it has those."""
    if jax_compat.is_device_array(array):
        return received
    return jax.random.wrap_key_data(received, impl=jax.random.key_impl(array))
