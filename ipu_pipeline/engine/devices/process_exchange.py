"""Exchange between processes: arrays are brought to one place, and bytes go the same way."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from ipu_pipeline.engine import peers
from ipu_pipeline.engine.devices.device_groups import (
    absent,
    as_numbers,
    as_sent,
    group_sharding,
    is_here,
    part_on,
    struct_of_numbers,
)
from ipu_pipeline.engine.devices.links import Tag, links, naming_peers
from ipu_pipeline.engine.state import check_exists, check_not_traced
from ipu_pipeline.ground import jax_compat

_numbers = itertools.count()
_lock = threading.Lock()


def only_if_written_here(array: Any) -> Any:
    """An array that this process is to write; for others their shape and dtype.

    Of several processes, the first that has an array writes it; what every process has, such as arrays of
    NumPy, process 0. That one also has to describe arrays that are elsewhere, and keeps what stands for
    them.
    """
    job = peers.current()
    if job is None:
        return array
    array = whole(array)
    sharding = group_sharding(array)
    is_written = job.index == 0 if sharding is None else is_here(sharding.mesh.devices.flat[0])
    if is_written or job.index == 0:
        return array
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def parts_written_here(array: Any) -> list[tuple[tuple[int, ...], Any]]:
    """The parts of an array that this process is to write, each with the place at which it begins.

    Of several devices that have the same part, the first one's is written; what every process has is
    written by process 0.
    """
    sharding = group_sharding(array)
    if sharding is None:
        job = peers.current()
        return [((0,) * array.ndim, array)] if job is None or job.index == 0 else []
    if len(sharding.device_set) == 1:
        return [((0,) * array.ndim, array)] if is_here(sharding.mesh.devices.flat[0]) else []
    return [
        (tuple(axis_slice.start or 0 for axis_slice in shard.index), shard.data)
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]


def rows_written_here(array: Any) -> tuple[int, list[tuple[tuple[int, ...], Any]]]:
    """The parts that replicas of this process have of a variable of which each has its own values.

    Returns:
      The number of replicas, and parts with the place at which each begins in an array with an axis for the
      replicas in front; the parts are without that axis.
    """
    sharding = group_sharding(array)
    if sharding is None:  # not placed, so there is one value for all
        return 1, [((0, *begin), part) for begin, part in parts_written_here(array)]
    devices = sharding.mesh.devices  # replica by replica
    rows = {device: row for row, replica_devices in enumerate(devices) for device in replica_devices}
    parts: dict[tuple[int, ...], Any] = {}
    for shard in array.addressable_shards:
        begin = (rows[shard.device], *(axis_slice.start or 0 for axis_slice in shard.index))
        parts.setdefault(begin, shard.data)
    return len(devices), list(parts.items())


def spread_rows(rows: Any, like: Any) -> Any:
    """The inverse of `rows_written_here`: gives each replica its own values."""
    sharding = like.sharding
    indices = sharding.addressable_devices_indices_map(like.shape)
    parts = [
        jax.device_put(
            rows[replica][indices[device]],
            SingleDeviceSharding(device, memory_kind=sharding.memory_kind),
            may_alias=False,
        )
        for replica, replica_devices in enumerate(sharding.mesh.devices)
        for device in replica_devices
        if device in indices
    ]
    return jax_compat.make_array(like.shape, sharding, parts) if parts else like


def whole(array: Any) -> Any:
    """The array, whole on each device of its group: a copy if the devices have only parts of it.

    All processes that have a part call it, in the same order.
    """
    sharding = group_sharding(array)
    if sharding is None or sharding.is_fully_replicated:
        return array
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    if not array.addressable_shards:
        return absent(array.shape, array.dtype, replicated)
    return jax.jit(_same, out_shardings=replicated)(array)


def _same(array: Any) -> Any:
    return array


@peers.one_thread("reading what other processes have")
def read_gathered(arrays: Sequence[Any]) -> list[Any]:
    """Makes arrays readable in this process. All processes call it, in the same order.

    Returns:
      The arrays that this process has, as they are; copies of the others, on a device of this process.
    """
    job, results = peers.current(), list(arrays)
    if job is None:
        return results
    results = list(map(whole, results))
    by_home: dict[Any, list[int]] = {}  # the device that has them -> positions
    for place, array in enumerate(results):
        sharding = group_sharding(array)
        if sharding is not None:
            by_home.setdefault(sharding.mesh.devices.flat[0], []).append(place)
    with _lock:  # in the same order in all processes
        if by_home:
            links().warm(range(job.count))
        devices = {process: first_device(process) for process in range(job.count)}
        for home, places in by_home.items():
            tag = Tag("a read by all processes", next(_numbers))
            home_arrays = [results[place] for place in places]
            if is_here(home):
                # Copies, because the next step may take the originals' memory.
                copies = [jnp.copy(as_numbers(part_on(array, home))) for array in home_arrays]
                for process, device in devices.items():
                    if process != job.index:
                        links().send(copies, tag, home, device)
                continue
            local = SingleDeviceSharding(devices[job.index])
            structs = [struct_of_numbers(array, array.shape, local) for array in home_arrays]
            with naming_peers():
                received = jax.block_until_ready(links().receive(structs, tag, home, devices[job.index]))
            for place, array, data in zip(places, home_arrays, received, strict=True):
                results[place] = as_sent(data, array)
    return results


def gathered(tree: Any, device: Any = None) -> Any:
    """Copies all arrays of a state, or of another pytree, to one device, for functions of the whole tree.

    The leaves of a state are on the devices of their stages, and JAX cannot compute with arrays on
    different devices. All arrays must fit on the one device. With several processes, all call it, and each
    gets all arrays.

    Example:
      >>> pipeline = engine.Pipeline([layers.Dense(4), layers.Dense(4)], num_micro_batches=1)
      >>> state = pipeline.init(jax.random.key(0), np.ones([2, 8], np.float32))
      >>> norm = optax.tree.norm(engine.gathered(state.variables))  # variables lie on two devices

    Args:
      tree: a pytree with JAX or NumPy arrays; other leaves stay as they are. Arrays may be divided over
        replicas or tensor-parallel devices, or be in host memory. If values differ between replicas, the
        first replica's are copied.
      device: a device of this process. None: the first one that has a part of the tree's first array, or
        of `jax.local_devices()` if there is no array of JAX.

    Returns:
      The tree with whole copies in the device's memory. A step with `donate` does not destroy them.

    Raises:
      TypeError: `device` is not a device, or it is called within `jax.jit` or another transformation.
      ValueError: the device belongs to another process, or a step with `donate` has destroyed an array.
      RuntimeError: JAX has joined several processes, but this library has not.
      ProcessError: a process that had to send data has ended.
    """
    check_not_traced("engine.gathered", tree)
    check_exists("engine.gathered: tree", tree)
    peers.check_joined("engine.gathered")
    leaves, structure = jax.tree.flatten(tree)
    places = [number for number, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]
    readable = read_gathered([leaves[place] for place in places])
    if device is None:
        first_parts = (_first_part(array) for array in readable if isinstance(array, jax.Array))
        device = next((part.device for part in first_parts), jax.local_devices()[0])
    if not isinstance(device, jax.Device):
        raise TypeError(f"engine.gathered: device must be a device of JAX; got {device!r}.")
    if device.process_index != jax.process_index():
        raise ValueError(
            f"engine.gathered: device must be one of this process, {jax.process_index()}; {device} is one "
            f"of process {device.process_index}."
        )
    # Of arrays that all devices have whole, only one copy counts.
    parts = [
        _first_part(array).data if isinstance(array, jax.Array) and array.is_fully_replicated else array
        for array in readable
    ]
    copies = jax.device_put(parts, SingleDeviceSharding(device), may_alias=False)
    for place, copy in zip(places, copies, strict=True):
        leaves[place] = copy
    return jax.tree.unflatten(structure, leaves)


def _first_part(array: jax.Array) -> Any:
    return array.addressable_shards[0]


@peers.one_thread("reading what other processes have")
def share_stacks(stacks: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Shares the results that one process has with all of them. All call it, in the same order."""
    job = peers.current()
    if job is None or not stacks:
        return list(stacks)
    sizes = list(map(int, job.exchange("sizes of results", str(len(stacks[0])))))
    owner = sizes.index(max(sizes))
    with _lock:
        links().warm(range(job.count))
        devices = [first_device(process) for process in range(job.count)]
        tag = Tag("results for all processes", next(_numbers))
        if owner == job.index:
            arrays = jax.device_put(list(stacks), devices[owner], may_alias=False)
            for process in set(range(job.count)) - {owner}:
                links().send(arrays, tag, devices[owner], devices[process])
            return list(stacks)
        local = SingleDeviceSharding(devices[job.index])
        structs = [
            jax.ShapeDtypeStruct((sizes[owner], *stack.shape[1:]), stack.dtype, sharding=local)
            for stack in stacks
        ]
        with naming_peers():
            received = links().receive(structs, tag, devices[owner], devices[job.index])
            return [np.asarray(array) for array in received]


def first_device(process: int) -> Any:
    """The first device of a process."""
    return next(device for device in jax.devices() if device.process_index == process)


# Bytes go the way of arrays, so that no process listens at another port for them.


def connect_all() -> None:
    """Connects all processes of the run; all of them call it before they exchange bytes."""
    job = peers.current()
    if job is not None:
        links().warm(range(job.count))


def offer_bytes(edge: str, number: int, listeners: Collection[int], content: Any) -> None:
    """Lets other processes fetch bytes. Does not wait for them."""
    job = peers.current()
    assert job is not None
    source = first_device(job.index)
    array = np.frombuffer(content, np.uint8)
    size = np.array([array.size], np.int64).view(np.uint8)
    arrays = jax.device_put([size, array], source, may_alias=False)
    for process in listeners:
        for part, sent in enumerate(arrays):
            links().send([sent], Tag(edge, number, part), source, first_device(process))


def fetch_bytes(edge: str, number: int, teller: int) -> memoryview:
    """Waits for bytes that another process offers to this one; see `offer_bytes`."""
    job = peers.current()
    assert job is not None
    source, target = first_device(teller), first_device(job.index)

    def fetch(part: int, size: int) -> np.ndarray[Any, Any]:
        struct = jax.ShapeDtypeStruct((size,), np.uint8, sharding=SingleDeviceSharding(target))
        with naming_peers():
            received = links().receive([struct], Tag(edge, number, part), source, target)
            return np.asarray(*jax.block_until_ready(received))

    (size,) = fetch(0, 8).view(np.int64)
    return fetch(1, int(size)).data
