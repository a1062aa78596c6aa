"""Reads arrays of a run of several processes in all of them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from ipu_pipeline.engine import peers
from ipu_pipeline.engine.devices.crossing import group_sharding
from ipu_pipeline.engine.devices.links import Tag, links, naming_peers
from ipu_pipeline.engine.devices.remote import absent, is_here

__all__ = ["only_if_written_here", "read_gathered", "share_stacks", "whole"]

_numbers = itertools.count()
_lock = threading.Lock()


def only_if_written_here(array: Any) -> Any:
    """An array that this process is to write; for others their shape and dtype.

    Of several processes, the first that has an array writes it; what every process has, such as arrays of
    NumPy, process 0. That one also has to describe arrays that are elsewhere, and keeps what stands for
    them.
    """
    others = peers.current()
    if others is None:
        return array
    array = whole(array)
    sharding = group_sharding(array)
    is_written = others.index == 0 if sharding is None else is_here(sharding.mesh.devices.flat[0])
    if is_written or others.index == 0:
        return array
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


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

    Args:
      arrays: the same in all processes, some of them on devices of other processes only.

    Returns:
      The arrays that this process has, as they are; copies of the others, on a device of this process.

    Raises:
      ProcessError: a process that was to send something has ended.
    """
    others, found = peers.current(), list(arrays)
    if others is None:
        return found
    found = list(map(whole, found))
    by_home: dict[Any, list[int]] = {}  # the device that has them -> positions
    for place, array in enumerate(found):
        sharding = group_sharding(array)
        if sharding is not None:
            by_home.setdefault(sharding.mesh.devices.flat[0], []).append(place)
    with _lock:  # in the same order in all processes
        if by_home:
            links().warm(range(others.count))
        devices = {process: _first_device(process) for process in range(others.count)}
        for home, places in by_home.items():
            tag = Tag("a read by all processes", next(_numbers))
            own = [found[place] for place in places]
            if is_here(home):
                # Copies, because the next step may take the originals' memory.
                copies = [jnp.copy(_as_data(_part_on(array, home))) for array in own]
                for process, device in devices.items():
                    if process != others.index:
                        links().send(copies, tag, home, device)
                continue
            local = SingleDeviceSharding(devices[others.index])
            structs = [
                jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=local)
                for struct in (jax.eval_shape(_as_data, array) for array in own)
            ]
            with naming_peers():
                received = jax.block_until_ready(links().receive(structs, tag, home, devices[others.index]))
            for place, array, data in zip(places, own, received, strict=True):
                found[place] = _from_data(data, array)
    return found


@peers.one_thread("reading what other processes have")
def share_stacks(stacks: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Shares the results that one process has with all of them. All call it, in the same order.

    Args:
      stacks: arrays whose first axes have one size, which is 0 in all processes but one.

    Raises:
      ProcessError: a process has ended.
    """
    others = peers.current()
    if others is None or not stacks:
        return list(stacks)
    sizes = list(map(int, others.exchange("sizes of results", str(len(stacks[0])))))
    owner = sizes.index(max(sizes))
    with _lock:
        links().warm(range(others.count))
        devices = [_first_device(process) for process in range(others.count)]
        tag = Tag("results for all processes", next(_numbers))
        if owner == others.index:
            arrays = jax.device_put(list(stacks), devices[owner], may_alias=False)
            for process in set(range(others.count)) - {owner}:
                links().send(arrays, tag, devices[owner], devices[process])
            return list(stacks)
        local = SingleDeviceSharding(devices[others.index])
        structs = [
            jax.ShapeDtypeStruct((sizes[owner], *stack.shape[1:]), stack.dtype, sharding=local)
            for stack in stacks
        ]
        with naming_peers():
            received = links().receive(structs, tag, devices[owner], devices[others.index])
            return [np.asarray(array) for array in received]


def _first_device(process: int) -> Any:
    return next(device for device in jax.devices() if device.process_index == process)


def _part_on(array: Any, device: Any) -> Any:
    return next(shard.data for shard in array.addressable_shards if shard.device == device)


def _is_key(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


def _as_data(array: Any) -> Any:
    return jax.random.key_data(array) if _is_key(array) else array


def _from_data(data: Any, like: Any) -> Any:
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like)) if _is_key(like) else data
