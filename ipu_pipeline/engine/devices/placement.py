"""Placement of arrays on groups: nothing else moves arrays outside of compiled programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ipu_pipeline.engine.devices.device_groups import (
    HOST_MEMORY,
    WHOLE,
    DeviceGroup,
    absent_like,
    can_move_parts,
    group_sharding,
    is_all_here,
    is_here,
    move,
    partition_of,
    put_here,
)
from ipu_pipeline.engine.devices.links import Tag
from ipu_pipeline.engine.devices.process_exchange import whole
from ipu_pipeline.engine.tracing.stage_meshes import MODEL
from ipu_pipeline.ground import jax_compat
from ipu_pipeline.ground.pytrees import is_readable


def put(
    arrays: Sequence[Any],
    group: DeviceGroup,
    offloaded: bool = False,
    tag: Tag | None = None,
    partitions: Sequence[PartitionSpec] | None = None,
) -> list[Any]:
    """Puts arrays on a group, or in host memory for it. Those already there stay the same objects.

    What lies divided over the devices of a replica stays so on its own group, and is divided on another
    one where it is wanted so there. Everything else is whole on each device.

    JAX arrays are transferred without waiting for them. NumPy arrays may be shared instead of copied
    on a CPU: callers that may change them afterwards use `put_host_copies`.
    """
    return _put(arrays, group, offloaded, False, tag, partitions)


def put_host_copies(
    arrays: Sequence[Any],
    group: DeviceGroup,
    offloaded: bool = False,
    tag: Tag | None = None,
    partitions: Sequence[PartitionSpec] | None = None,
) -> list[Any]:
    """Puts arrays where `put` does, sharing no memory with the caller's NumPy arrays."""
    return _put(arrays, group, offloaded, True, tag, partitions)


def _put(
    arrays: Sequence[Any],
    group: DeviceGroup,
    offloaded: bool,
    is_copied: bool,
    tag: Tag | None,
    partitions: Sequence[PartitionSpec] | None,
) -> list[Any]:
    whole_there = group.host if offloaded else group.replicated
    if not group.is_divided:
        return _put_as(arrays, group, whole_there, is_copied, tag)
    placed, by_partition = list(arrays), dict[PartitionSpec, list[int]]()
    for place, array in enumerate(arrays):
        target_partition = WHOLE if partitions is None else partitions[place]
        by_partition.setdefault(_partition_on(array, group, target_partition), []).append(place)
    for partition, places in by_partition.items():
        sharding = NamedSharding(whole_there.mesh, partition, memory_kind=whole_there.memory_kind)
        part_tag = tag if tag is None or not partition else tag._replace(edge=f"{tag.edge}, {partition}")
        moved = _put_as([arrays[place] for place in places], group, sharding, is_copied, part_tag)
        for place, array in zip(places, moved, strict=True):
            placed[place] = array
    return placed


def _partition_on(array: Any, group: DeviceGroup, target: PartitionSpec) -> PartitionSpec:
    """The partition over the devices of a replica that an array gets when it comes to a group."""
    source, partition = group_sharding(array), partition_of(array)
    if source is None or source.mesh == group.replicated.mesh:
        return partition
    is_alike = partition == target and source.mesh.shape[MODEL] == group.replicated.mesh.shape[MODEL]
    return target if is_alike else WHOLE


def _put_as(
    arrays: Sequence[Any], group: DeviceGroup, sharding: NamedSharding, is_copied: bool, tag: Tag | None
) -> list[Any]:
    """Puts arrays on a group with one of its shardings."""
    offloaded = sharding.memory_kind == HOST_MEMORY
    placed = list(arrays)
    to_move = [
        place
        for place, array in enumerate(arrays)
        if not (isinstance(array, jax.Array) and array.sharding == sharding)
    ]
    if group.has_peers or any(_is_partly_elsewhere(arrays[place]) for place in to_move):
        sources = {place: group_sharding(arrays[place]) for place in to_move}
        for number, source in enumerate(dict.fromkeys(sources.values())):
            if is_all_here(sharding) and (source is None or is_all_here(source)):
                continue  # done below, as in a process that runs alone
            places = [place for place in to_move if sources[place] == source]
            moving = [arrays[place] for place in places]
            move_tag = None if tag is None else tag._replace(edge=f"{tag.edge} ({number})")
            for place, array in zip(places, _bring(moving, source, group, sharding, move_tag), strict=True):
                placed[place] = array
                to_move.remove(place)
    if not offloaded and group.send is not None and all(_is_plain(arrays[place]) for place in to_move):
        for place in to_move:
            placed[place] = group.send(arrays[place], is_copied)
    elif to_move:
        moving = [arrays[place] for place in to_move]
        if is_copied:
            moving = [array if isinstance(array, jax.Array) else np.array(array) for array in moving]
        moved = jax.device_put(moving, sharding)
        for place, array in zip(to_move, moved, strict=True):
            placed[place] = array
    return placed


def _is_partly_elsewhere(array: Any) -> bool:
    return isinstance(array, jax.Array) and not array.is_fully_addressable


def _bring(
    arrays: Sequence[Any],
    source: NamedSharding | None,
    group: DeviceGroup,
    sharding: NamedSharding,
    tag: Tag | None,
) -> list[Any]:
    """Moves arrays in several processes from where all of them are to a sharding of a group."""
    if source is None:
        return put_here(arrays, sharding)
    if source.mesh == sharding.mesh:
        return _relocate(arrays, sharding)
    target = NamedSharding(sharding.mesh, sharding.spec)
    if not source.is_fully_replicated and not can_move_parts(source, target):
        arrays = list(map(whole, arrays))
        source, target = NamedSharding(source.mesh, WHOLE), group.replicated
    return _relocate(move(arrays, source, target, tag, is_kept=False), sharding)


def _relocate(arrays: Sequence[Any], sharding: NamedSharding) -> list[Any]:
    """Gives arrays of a group another sharding of the same group."""
    if not any(map(is_here, sharding.mesh.devices.flat)):
        return absent_like(arrays, sharding)
    current = list(arrays)
    if any(array.sharding.spec != sharding.spec for array in current):
        device = NamedSharding(sharding.mesh, sharding.spec)
        current = jax.jit(_same, out_shardings=[device] * len(current))(current)
    moved: list[Any] = jax.device_put(current, sharding)
    return moved


def _same(arrays: list[Any]) -> list[Any]:
    return arrays


def _is_plain(array: Any) -> bool:
    """Whether a value is an array of NumPy whose dtype JAX takes as it is, in every mode."""
    if type(array) is not np.ndarray and not isinstance(array, np.generic):
        return False
    dtype = array.dtype
    return dtype.kind in "fiub" and dtype.itemsize <= 4 and dtype.isnative


def keep(arrays: Sequence[Any]) -> list[Any]:
    """Keeps what arrays hold before their memory is given away; does not wait for accelerators.

    On a CPU it returns the memory itself, as arrays of NumPy: while these are referred to, XLA gives the
    program that is to take it other memory. Elsewhere it returns copies on the device. NumPy arrays, and
    stand-ins for arrays in other processes, stay the same objects.
    """
    result: list[Any] = [np.asarray(array) if _is_on_host(array) else array for array in arrays]
    to_copy = [
        place for place, array in enumerate(result) if isinstance(array, jax.Array) and is_readable(array)
    ]
    originals = [result[place] for place in to_copy]
    copies = jax.device_put(originals, [array.sharding for array in originals], may_alias=False)
    for place, copy in zip(to_copy, copies, strict=True):
        result[place] = copy
    return result


def _is_on_host(array: Any) -> bool:
    # Random keys are arrays of arrays, which NumPy does not have.
    if not isinstance(array, jax.Array):
        return not isinstance(array, jax.ShapeDtypeStruct)
    if not is_readable(array):
        return False
    return jax_compat.is_device_array(array) and all(device.platform == "cpu" for device in array.devices())


def copy_to(arrays: Sequence[Any], group: DeviceGroup, tag: Tag | None = None) -> list[Any]:
    """Transfers JAX arrays, which are known to be on one group of the same pipeline, to another group."""
    if group.has_peers and not (is_all_here(arrays[0].sharding) and is_all_here(group.replicated)):
        return move(arrays, arrays[0].sharding, group.replicated, tag, is_kept=True)
    if group.copy is not None:
        return group.copy(arrays)
    copies: list[Any] = jax.device_put(list(arrays), group.replicated)
    return copies


# Small values that programs ask for again and again, placed once for each device.

_MAX_SCALARS = 4096  # per group; loops count their iterations without end


class Constants:
    """Integers, and random keys and their numbers, on groups."""

    def __init__(self) -> None:
        self._scalars: dict[tuple[int, int], Any] = {}  # (device, integer) -> int32 scalar there
        self._key_numbers: dict[tuple[int, int], Any] = {}  # (device, number) -> uint32 scalar there
        self._keys: dict[int, tuple[Any, Any]] = {}  # device -> the last random key, and its copy there

    def key(self, key: Any, group: DeviceGroup) -> Any:
        """A random key on a group. The last one is kept: steps use the same key, and placing is slow."""
        entry = self._keys.get(group.ipu)
        if entry is None or entry[0] is not key:
            (placed,) = put([key], group)
            entry = self._keys[group.ipu] = (key, placed)
        return entry[1]

    def key_number(self, number: int, group: DeviceGroup) -> Any:
        """A uint32 scalar on a group, with which random keys are folded; made once."""
        if (group.ipu, number) not in self._key_numbers:
            (self._key_numbers[group.ipu, number],) = put([np.uint32(number)], group)
        return self._key_numbers[group.ipu, number]

    def scalar(self, number: int, group: DeviceGroup) -> Any:
        """An int32 scalar on a group; small ones are made once."""
        value = self._scalars.get((group.ipu, number))
        if value is None:
            (value,) = put([np.int32(number)], group)
            if number < _MAX_SCALARS:
                self._scalars[group.ipu, number] = value
        return value
