"""Where stages live. The only module that moves arrays from outside of compiled programs.

A stage lives on a row of devices, one per replica: a mesh with the axis `replica`. State is `replicated`
over rows. Micro-batches run in columns, one per replica, whose rows have one device each.

Rows may be on devices of other processes: what is put there has no content here (`elsewhere`), and what
goes from process to process is sent (`crossing`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ipu_pipeline.engine import jax_compat
from ipu_pipeline.engine.devices.crossing import (
    is_all_here,
    join_parts,
    move,
    put_own,
    row_sharding,
)
from ipu_pipeline.engine.devices.elsewhere import NotRun, absent, absent_like, is_here
from ipu_pipeline.engine.devices.links import Tag
from ipu_pipeline.engine.state import is_readable
from ipu_pipeline.engine.tracing.replicas import REPLICA

__all__ = [
    "Row",
    "copy_to",
    "is_offloaded",
    "join",
    "keep",
    "make_rows",
    "over_replicas",
    "put",
    "put_host_copies",
    "split",
    "stack_replicas",
]

_HOST_MEMORY = "pinned_host"


@dataclass(frozen=True, eq=False)
class Row:
    """The devices of one IPU, one per replica.

    Attributes:
      ipu: the IPU's number in the pipeline.
      replicated: the sharding of variables and scalars.
      has_one_client: whether all rows of the pipeline have devices of one kind.
      processes: those whose devices the rows of the pipeline are on, in order.
    """

    ipu: int
    replicated: NamedSharding
    has_one_client: bool
    processes: tuple[int, ...] = ()

    @functools.cached_property
    def has_peers(self) -> bool:
        """Whether rows of the pipeline are in other processes than this one."""
        return any(process != self.devices[0].client.process_index() for process in self.processes)

    @functools.cached_property
    def is_here(self) -> bool:
        """Whether this process has devices of the row."""
        return any(map(is_here, self.devices))

    @property
    def results(self) -> dict[str, Any]:
        """Arguments of `jax.jit` that say that results are on the row; none where all is here."""
        return {"out_shardings": self.replicated} if self.has_peers else {}

    def program(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, if it is run on the row by this process; else what stands for its results."""
        return function if self.is_here else NotRun(function, self.replicated)

    @functools.cached_property
    def host(self) -> NamedSharding:
        """The sharding of what is kept in host memory for the row.

        Raises:
          ValueError: its devices cannot read host memory.
        """
        for device in filter(is_here, self.devices):
            kinds = [memory.kind for memory in device.addressable_memories()]
            if _HOST_MEMORY not in kinds:
                raise ValueError(
                    f"Offloading needs the memory kind {_HOST_MEMORY!r}; {device} has {', '.join(kinds)}. "
                    "Offload nothing there."
                )
        return self.replicated.with_memory_kind(_HOST_MEMORY)

    @functools.cached_property
    def copy(self) -> Callable[[Sequence[Any]], list[Any]] | None:
        """Copies arrays that lie on other rows here, random keys excepted; None where it cannot."""
        return jax_compat.make_copy(self.devices, self.replicated) if self.has_one_client else None

    @functools.cached_property
    def send(self) -> Callable[[np.ndarray[Any, Any] | np.generic, bool], Any] | None:
        """Puts an array of NumPy here, or a copy; None where it cannot."""
        return jax_compat.make_send(self.devices[0], self.replicated) if len(self.devices) == 1 else None

    @property
    def devices(self) -> tuple[Any, ...]:
        """The row's devices, in the order of the replicas."""
        return tuple(self.replicated.mesh.devices.flat)


def make_rows(
    devices: Sequence[Any], device_mapping: Sequence[int], num_replicas: int = 1
) -> tuple[Row, ...]:
    """The rows of all stages.

    Args:
      devices: JAX devices, by number of the IPU; those of one replica after those of the other.
      device_mapping: the IPU of each stage, in a replica.
      num_replicas: how many there are.

    Returns:
      One row per stage; stages on the same IPU have the same object.
    """
    ipus = sorted(set(device_mapping))
    size = ipus[-1] + 1
    own = {ipu: [devices[replica * size + ipu] for replica in range(num_replicas)] for ipu in ipus}
    has_one_client = len({device.client for some in own.values() for device in some}) == 1
    processes = tuple(sorted({device.process_index for some in own.values() for device in some}))
    rows = {
        ipu: Row(
            ipu, NamedSharding(Mesh(np.array(some), (REPLICA,)), PartitionSpec()), has_one_client, processes
        )
        for ipu, some in own.items()
    }
    return tuple(rows[ipu] for ipu in device_mapping)


def split(array: Any) -> list[Any]:
    """What each device of a row has of an array, in the order of the replicas; nothing is copied.

    Of devices of other processes it is an array without content.
    """
    found = {shard.device: shard.data for shard in array.addressable_shards}
    return [
        found[device] if device in found else absent(array.shape, array.dtype, SingleDeviceSharding(device))
        for device in array.sharding.mesh.devices.flat
    ]


def join(parts: Sequence[Any], row: Row, offloaded: bool = False) -> Any:
    """The array of a row whose devices have these parts, in the order of the replicas; nothing is copied.

    They need not be equal: programs under `jax.shard_map` see each device's own.
    """
    sharding = row.host if offloaded else row.replicated
    here = [part for part in parts if part.is_fully_addressable]
    return join_parts(here, sharding) if here else absent(parts[0].shape, parts[0].dtype, sharding)


def over_replicas(mesh: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on each device of a mesh, of what `join` put there; its results are for `split`."""
    # Without check_vma JAX asks for no proof that values are the same where the sharding says so.
    return jax.shard_map(
        function, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )


def is_offloaded(array: Any) -> bool:
    """Whether it is in host memory for its row."""
    return bool(array.sharding.memory_kind == _HOST_MEMORY)


def stack_replicas(parts: Sequence[Any], axis: int) -> Any:
    """An array with an axis for the replicas, each part of which stays on its device.

    Args:
      parts: arrays with one device each, in the order of the replicas.
      axis: the number of the new axis.
    """
    (first, *_rest) = parts
    if len({device for part in parts for device in part.devices()}) == 1:  # they were brought together
        if not first.is_fully_addressable:
            return absent(
                (*first.shape[:axis], len(parts), *first.shape[axis:]), first.dtype, first.sharding
            )
        return _stack(list(parts), axis)
    sharding = _stacked_sharding(tuple(device for part in parts for device in part.devices()), axis)
    shape = (*first.shape[:axis], len(parts), *first.shape[axis:])
    here = [part for part in parts if part.is_fully_addressable]
    if not here:
        return absent(shape, first.dtype, sharding)
    return jax_compat.make_array(shape, sharding, [_expand(part, axis) for part in here])


@functools.lru_cache(maxsize=256)
def _stacked_sharding(devices: tuple[Any, ...], axis: int) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), (REPLICA,)), PartitionSpec(*[None] * axis, REPLICA))


@functools.partial(jax.jit, static_argnums=1)
def _stack(parts: list[jax.Array], axis: int) -> jax.Array:
    return jnp.stack(parts, axis)


@functools.partial(jax.jit, static_argnums=1)
def _expand(part: jax.Array, axis: int) -> jax.Array:
    return jnp.expand_dims(part, axis)


def put(arrays: Sequence[Any], row: Row, offloaded: bool = False, tag: Tag | None = None) -> list[Any]:
    """The arrays on a row, or in host memory for it. Those that are there already stay the same objects.

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
                moved = move(found, source, row.replicated, own, is_kept=False)
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
