"""Arrays put on rows: the only module that moves arrays from outside of compiled programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ipu_pipeline.engine import jax_compat
from ipu_pipeline.engine.devices.crossing import is_all_here, move, put_own, row_sharding
from ipu_pipeline.engine.devices.elsewhere import absent_like, is_here
from ipu_pipeline.engine.devices.links import Tag
from ipu_pipeline.engine.devices.rows import HOST_MEMORY, Row, partition_of
from ipu_pipeline.engine.state import is_readable

__all__ = ["copy_to", "is_offloaded", "keep", "put", "put_host_copies"]


def is_offloaded(array: Any) -> bool:
    """Whether it is in host memory for its row."""
    return bool(array.sharding.memory_kind == HOST_MEMORY)


def put(arrays: Sequence[Any], row: Row, offloaded: bool = False, tag: Tag | None = None) -> list[Any]:
    """The arrays on a row, or in host memory for it. Those that are there already stay the same objects.

    What lies divided over the devices of a replica is divided in the same way there.

    JAX arrays are transferred without waiting for them. NumPy arrays may be shared instead of copied
    on a CPU: whoever can change them afterwards uses `put_host_copies`.

    Args:
      arrays: of JAX or NumPy; for a row in another process, also what only has shape and dtype.
      row: where they are to be.
      offloaded: whether in host memory.
      tag: what the transfers between processes are; needed if arrays of other rows may be among them.
    """
    return _put(arrays, row, offloaded, is_copied=False, tag=tag)


def put_host_copies(
    arrays: Sequence[Any], row: Row, offloaded: bool = False, tag: Tag | None = None
) -> list[Any]:
    """The arrays where `put` puts them, sharing no memory with NumPy arrays of the caller's."""
    return _put(arrays, row, offloaded, is_copied=True, tag=tag)


def _put(arrays: Sequence[Any], row: Row, offloaded: bool, is_copied: bool, tag: Tag | None) -> list[Any]:
    sharding = row.host if offloaded else row.replicated
    away = [
        place
        for place, array in enumerate(arrays)
        if not (isinstance(array, jax.Array) and array.sharding == sharding)
    ]
    if row.is_divided and away:
        return _put_divided(arrays, away, row, sharding, is_copied, tag)
    return _put_whole(arrays, away, row, sharding, is_copied, tag)


def _put_divided(
    arrays: Sequence[Any],
    away: Sequence[int],
    row: Row,
    sharding: NamedSharding,
    is_copied: bool,
    tag: Tag | None,
) -> list[Any]:
    """As `_put_whole`, of arrays some of which may be divided over the devices of a replica."""
    placed = list(arrays)
    divided: dict[PartitionSpec, list[int]] = {}
    for place in away:
        divided.setdefault(partition_of(arrays[place]), []).append(place)
    for number, (partition, places) in enumerate(divided.items()):
        target = NamedSharding(sharding.mesh, partition, memory_kind=sharding.memory_kind)
        own = (
            None if tag is None else tag._replace(edge=f"{tag.edge} ({partition})" if number else tag.edge)
        )
        found = [arrays[place] for place in places]
        off = [
            number
            for number, array in enumerate(found)
            if not (isinstance(array, jax.Array) and array.sharding == target)
        ]
        for place, array in zip(places, _put_whole(found, off, row, target, is_copied, own), strict=True):
            placed[place] = array
    return placed


def _put_whole(
    arrays: Sequence[Any],
    away: list[int],
    row: Row,
    sharding: NamedSharding,
    is_copied: bool,
    tag: Tag | None,
) -> list[Any]:
    """The arrays, those of some places with a sharding of the row."""
    offloaded = sharding.memory_kind == HOST_MEMORY
    placed = list(arrays)
    if row.has_peers:
        sources = {place: row_sharding(arrays[place]) for place in away}
        for number, source in enumerate(dict.fromkeys(sources.values())):
            if is_all_here(sharding) and (source is None or is_all_here(source)):
                continue  # as in a process alone, below
            places = [place for place in away if sources[place] == source]
            found = [arrays[place] for place in places]
            if source is None:
                moved = put_own(found, sharding)
            elif source.mesh == sharding.mesh:
                moved = _relocate(found, sharding)
            else:
                own = None if tag is None else tag._replace(edge=f"{tag.edge} ({number})")
                kept = NamedSharding(sharding.mesh, sharding.spec)
                moved = move(found, source, kept, own, is_kept=False)
                moved = _relocate(moved, sharding) if offloaded else moved
            for place, array in zip(places, moved, strict=True):
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


def _relocate(arrays: Sequence[Any], sharding: NamedSharding) -> list[Any]:
    """Arrays of a row in the memory of a sharding of the same row."""
    if not any(map(is_here, sharding.mesh.devices.flat)):
        return absent_like(arrays, sharding)
    moved: list[Any] = jax.device_put(list(arrays), sharding)
    return moved


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
    """Transfers JAX arrays that are known to be together on another row of the same pipeline.

    Args:
      arrays: the arrays; nobody donates or deletes them.
      row: where they go.
      tag: what the transfer is, if the pipeline is in several processes.
    """
    if row.has_peers and not (is_all_here(arrays[0].sharding) and is_all_here(row.replicated)):
        return move(arrays, arrays[0].sharding, row.replicated, tag, is_kept=True)
    # Random keys are arrays of arrays, which only the public function knows.
    if row.copy is not None and all(map(jax_compat.is_device_array, arrays)):
        return row.copy(arrays)
    copies: list[Any] = jax.device_put(list(arrays), row.replicated)
    return copies
