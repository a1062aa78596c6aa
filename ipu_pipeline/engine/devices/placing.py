"""Arrays put on rows: the only module that moves arrays from outside of compiled programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ipu_pipeline.engine.devices.crossing import (
    can_move_parts,
    is_all_here,
    move,
    put_own,
    row_sharding,
)
from ipu_pipeline.engine.devices.gathered import whole
from ipu_pipeline.engine.devices.links import Tag
from ipu_pipeline.engine.devices.remote import absent_like, is_here
from ipu_pipeline.engine.devices.rows import HOST_MEMORY, WHOLE, Row, partition_of
from ipu_pipeline.engine.state import is_readable
from ipu_pipeline.engine.tracing.tensor_parallel import MODEL
from ipu_pipeline.ground import jax_compat

__all__ = ["copy_to", "is_offloaded", "keep", "put", "put_host_copies"]


def is_offloaded(array: Any) -> bool:
    """Whether it is in host memory for its row."""
    return bool(array.sharding.memory_kind == HOST_MEMORY)


def put(
    arrays: Sequence[Any],
    row: Row,
    offloaded: bool = False,
    tag: Tag | None = None,
    partitions: Sequence[PartitionSpec] | None = None,
) -> list[Any]:
    """The arrays on a row, or in host memory for it. Those that are there already stay the same objects.

    What lies divided over the devices of a replica stays so on its own row, and comes to another one
    divided where that is what is wanted there. Everything else is whole on each device.

    JAX arrays are transferred without waiting for them. NumPy arrays may be shared instead of copied
    on a CPU: whoever can change them afterwards uses `put_host_copies`.
    """
    return _put(arrays, row, offloaded, False, tag, partitions)


def put_host_copies(
    arrays: Sequence[Any],
    row: Row,
    offloaded: bool = False,
    tag: Tag | None = None,
    partitions: Sequence[PartitionSpec] | None = None,
) -> list[Any]:
    """The arrays where `put` puts them, sharing no memory with NumPy arrays of the caller's."""
    return _put(arrays, row, offloaded, True, tag, partitions)


def _put(
    arrays: Sequence[Any],
    row: Row,
    offloaded: bool,
    is_copied: bool,
    tag: Tag | None,
    partitions: Sequence[PartitionSpec] | None,
) -> list[Any]:
    whole_there = row.host if offloaded else row.replicated
    if not row.is_divided:
        return _put_as(arrays, row, whole_there, is_copied, tag)
    placed, groups = list(arrays), dict[PartitionSpec, list[int]]()
    for place, array in enumerate(arrays):
        wanted = WHOLE if partitions is None else partitions[place]
        groups.setdefault(_partition_on(array, row, wanted), []).append(place)
    for partition, places in groups.items():
        sharding = NamedSharding(whole_there.mesh, partition, memory_kind=whole_there.memory_kind)
        own = None if tag is None or not partition else tag._replace(edge=f"{tag.edge}, {partition}")
        moved = _put_as([arrays[place] for place in places], row, sharding, is_copied, own or tag)
        for place, array in zip(places, moved, strict=True):
            placed[place] = array
    return placed


def _partition_on(array: Any, row: Row, wanted: PartitionSpec) -> PartitionSpec:
    """How an array is to be divided over the devices of a replica when it comes to a row."""
    source, partition = row_sharding(array), partition_of(array)
    if source is None or source.mesh == row.replicated.mesh:
        return partition
    is_alike = partition == wanted and source.mesh.shape[MODEL] == row.replicated.mesh.shape[MODEL]
    return wanted if is_alike else WHOLE


def _put_as(
    arrays: Sequence[Any], row: Row, sharding: NamedSharding, is_copied: bool, tag: Tag | None
) -> list[Any]:
    """The arrays with a sharding of the row."""
    offloaded = sharding.memory_kind == HOST_MEMORY
    placed = list(arrays)
    away = [
        place
        for place, array in enumerate(arrays)
        if not (isinstance(array, jax.Array) and array.sharding == sharding)
    ]
    if row.has_peers or any(_is_partly_elsewhere(arrays[place]) for place in away):
        sources = {place: row_sharding(arrays[place]) for place in away}
        for number, source in enumerate(dict.fromkeys(sources.values())):
            if is_all_here(sharding) and (source is None or is_all_here(source)):
                continue  # as in a process alone, below
            places = [place for place in away if sources[place] == source]
            found = [arrays[place] for place in places]
            own = None if tag is None else tag._replace(edge=f"{tag.edge} ({number})")
            for place, array in zip(places, _bring(found, source, row, sharding, own), strict=True):
                placed[place] = array
                away.remove(place)
    if not offloaded and row.send is not None and all(_is_plain(arrays[place]) for place in away):
        for place in away:
            placed[place] = row.send(arrays[place], is_copied)
    elif away:
        found = [arrays[place] for place in away]
        if is_copied:
            found = [array if isinstance(array, jax.Array) else np.array(array) for array in found]
        moved = jax.device_put(found, sharding)
        for place, array in zip(away, moved, strict=True):
            placed[place] = array
    return placed


def _is_partly_elsewhere(array: Any) -> bool:
    return isinstance(array, jax.Array) and not array.is_fully_addressable


def _bring(
    arrays: Sequence[Any], source: NamedSharding | None, row: Row, sharding: NamedSharding, tag: Tag | None
) -> list[Any]:
    """Arrays in several processes: from where all of them are to a sharding of a row."""
    if source is None:
        return put_own(arrays, sharding)
    if source.mesh == sharding.mesh:
        return _relocate(arrays, sharding)
    target = NamedSharding(sharding.mesh, sharding.spec)
    if not source.is_fully_replicated and not can_move_parts(source, target):
        arrays = list(map(whole, arrays))
        source, target = NamedSharding(source.mesh, WHOLE), row.replicated
    return _relocate(move(arrays, source, target, tag, is_kept=False), sharding)


def _relocate(arrays: Sequence[Any], sharding: NamedSharding) -> list[Any]:
    """Arrays of a row with another sharding of the same row."""
    if not any(map(is_here, sharding.mesh.devices.flat)):
        return absent_like(arrays, sharding)
    found = list(arrays)
    if any(array.sharding.spec != sharding.spec for array in found):
        device = NamedSharding(sharding.mesh, sharding.spec)
        found = jax.jit(_same, out_shardings=[device] * len(found))(found)
    moved: list[Any] = jax.device_put(found, sharding)
    return moved


def _same(arrays: list[Any]) -> list[Any]:
    return arrays


def _is_plain(array: Any) -> bool:
    """Whether it is an array of NumPy whose dtype JAX takes as it is, in every mode."""
    if type(array) is not np.ndarray and not isinstance(array, np.generic):
        return False
    dtype = array.dtype
    return dtype.kind in "fiub" and dtype.itemsize <= 4 and dtype.isnative


def keep(arrays: Sequence[Any]) -> list[Any]:
    """What arrays hold now, for when their memory is given to others; does not wait for accelerators.

    On a CPU that is the memory itself, as arrays of NumPy: while these are referred to, XLA gives what is
    to take it other memory. Elsewhere it is a copy on the device. NumPy arrays stay the same objects, and
    what stands for arrays in other processes.
    """
    result: list[Any] = [np.asarray(array) if _is_on_host(array) else array for array in arrays]
    away = [
        place for place, array in enumerate(result) if isinstance(array, jax.Array) and is_readable(array)
    ]
    found = [result[place] for place in away]
    copies = jax.device_put(found, [array.sharding for array in found], may_alias=False)
    for place, copy in zip(away, copies, strict=True):
        result[place] = copy
    return result


def _is_on_host(array: Any) -> bool:
    # Random keys are arrays of arrays, which NumPy does not have.
    if not isinstance(array, jax.Array):
        return not isinstance(array, jax.ShapeDtypeStruct)
    if not is_readable(array):
        return False
    return jax_compat.is_device_array(array) and all(device.platform == "cpu" for device in array.devices())


def copy_to(arrays: Sequence[Any], row: Row, tag: Tag | None = None) -> list[Any]:
    """Transfers JAX arrays that are known to be together on another row of the same pipeline."""
    if row.has_peers and not (is_all_here(arrays[0].sharding) and is_all_here(row.replicated)):
        return move(arrays, arrays[0].sharding, row.replicated, tag, is_kept=True)
    if row.copy is not None:
        return row.copy(arrays)
    copies: list[Any] = jax.device_put(list(arrays), row.replicated)
    return copies
