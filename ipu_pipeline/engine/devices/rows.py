"""Where stages live. The only module that moves arrays from outside of compiled programs.

A stage lives on a row of a mesh with the axis `replica`, of size 1 as long as there is no data
parallelism. What every replica has whole is `replicated` over the row; a micro-batch is split along its
first axis over the row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ipu_pipeline.engine import jax_compat

__all__ = ["Row", "copy_to", "keep", "make_rows", "put", "put_host_copies"]

_HOST_MEMORY = "pinned_host"


@dataclass(frozen=True, eq=False)
class Row:
    """The devices of one IPU, one per replica.

    Attributes:
      ipu: the IPU's number in the pipeline.
      replicated: the sharding of variables and scalars.
      has_one_client: whether all rows of the pipeline have devices of one kind.
    """

    ipu: int
    replicated: NamedSharding
    has_one_client: bool

    @functools.cached_property
    def host(self) -> NamedSharding:
        """The sharding of what is kept in host memory for the row.

        Raises:
          ValueError: its devices cannot read host memory.
        """
        for device in self.devices:
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


def make_rows(devices: Sequence[Any], device_mapping: Sequence[int]) -> tuple[Row, ...]:
    """The rows of all stages.

    Args:
      devices: JAX devices, by number of the IPU.
      device_mapping: the IPU of each stage.

    Returns:
      One row per stage; stages on the same IPU have the same object.
    """
    ipus = sorted(set(device_mapping))
    has_one_client = len({devices[ipu].client for ipu in ipus}) == 1
    meshes = {ipu: Mesh(np.array([devices[ipu]]), ("replica",)) for ipu in ipus}
    rows = {
        ipu: Row(ipu, NamedSharding(mesh, PartitionSpec()), has_one_client) for ipu, mesh in meshes.items()
    }
    return tuple(rows[ipu] for ipu in device_mapping)


def put(arrays: Sequence[Any], row: Row, offloaded: bool = False) -> list[Any]:
    """The arrays on a row, or in host memory for it. Those that are there already stay the same objects.

    JAX arrays are transferred without waiting for them. NumPy arrays may be shared instead of copied
    on a CPU: whoever can change them afterwards uses `put_host_copies`.
    """
    return _put(arrays, row, offloaded, is_copied=False)


def put_host_copies(arrays: Sequence[Any], row: Row, offloaded: bool = False) -> list[Any]:
    """The arrays where `put` puts them, sharing no memory with NumPy arrays of the caller's."""
    return _put(arrays, row, offloaded, is_copied=True)


def _put(arrays: Sequence[Any], row: Row, offloaded: bool, is_copied: bool) -> list[Any]:
    sharding = row.host if offloaded else row.replicated
    away = [
        place
        for place, array in enumerate(arrays)
        if not (isinstance(array, jax.Array) and array.sharding == sharding)
    ]
    placed = list(arrays)
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


def _is_plain(array: Any) -> bool:
    """Whether it is an array of NumPy whose dtype JAX takes as it is, in every mode."""
    if type(array) is not np.ndarray and not isinstance(array, np.generic):
        return False
    dtype = array.dtype
    return dtype.kind in "fiub" and dtype.itemsize <= 4 and dtype.isnative


def keep(arrays: Sequence[Any]) -> list[Any]:
    """What arrays hold now, for when their memory is given to others; does not wait for accelerators.

    On a CPU that is the memory itself, as arrays of NumPy: while these are referred to, XLA gives what is
    to take it other memory. Elsewhere it is a copy on the device. NumPy arrays stay the same objects.
    """
    result: list[Any] = [np.asarray(array) if _is_on_host(array) else array for array in arrays]
    away = [place for place, array in enumerate(result) if isinstance(array, jax.Array)]
    found = [result[place] for place in away]
    copies = jax.device_put(found, [array.sharding for array in found], may_alias=False)
    for place, copy in zip(away, copies, strict=True):
        result[place] = copy
    return result


def _is_on_host(array: Any) -> bool:
    # Random keys are arrays of arrays, which NumPy does not have.
    if not isinstance(array, jax.Array):
        return True
    return jax_compat.is_device_array(array) and all(device.platform == "cpu" for device in array.devices())


def copy_to(arrays: Sequence[Any], row: Row) -> list[Any]:
    """Transfers JAX arrays that are known to be on another row of the same pipeline."""
    # Random keys are arrays of arrays, which only the public function knows.
    if row.copy is not None and all(map(jax_compat.is_device_array, arrays)):
        return row.copy(arrays)
    copies: list[Any] = jax.device_put(list(arrays), row.replicated)
    return copies
