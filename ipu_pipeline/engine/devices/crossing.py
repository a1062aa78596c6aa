"""Arrays from group to group in several processes: which one sends, receives, copies, or does nothing.

All processes make the same calls. An array that lies on a group is moved by the processes that have its
devices and by the processes that have the target's. Any other array is one that every process has, such as
a user's, and each process puts it on its own devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, SingleDeviceSharding

from ipu_pipeline.engine.devices.links import Tag, links
from ipu_pipeline.engine.devices.remote import absent_like, is_here
from ipu_pipeline.engine.tracing.replicas import REPLICA
from ipu_pipeline.engine.tracing.tensor_parallel import MODEL
from ipu_pipeline.ground import jax_compat

__all__ = ["can_move_parts", "group_sharding", "is_all_here", "join_parts", "move", "put_own"]


def group_sharding(array: Any) -> NamedSharding | None:
    """The sharding of an array that lies on a group; None for an array that every process has."""
    sharding = array.sharding if isinstance(array, jax.Array) else None
    if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names == (REPLICA, MODEL):
        return sharding
    return None


def is_all_here(sharding: NamedSharding) -> bool:
    """Whether all devices of a sharding belong to this process."""
    return all(map(is_here, sharding.mesh.devices.flat))


def put_own(arrays: Sequence[Any], target: NamedSharding) -> list[Any]:
    """Puts arrays that every process has on this process's devices of a group."""
    own = [device for device in target.mesh.devices.flat if is_here(device)]
    parts = [
        jax.device_put(list(arrays), SingleDeviceSharding(device, memory_kind=target.memory_kind))
        for device in own
    ]
    return (
        [join_parts(some, target) for some in zip(*parts, strict=True)]
        if own
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
    crosses = any(one.process_index != other.process_index for one, other in pairs)
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
        own = SingleDeviceSharding(to_device)
        if is_here(from_device):
            found = [_part_on(array, from_device) for array in arrays]
            if is_here(to_device):
                parts.append(jax.device_put(found, own, may_alias=is_kept))
                continue
            if not is_kept or source.memory_kind != target.memory_kind:
                found = jax.device_put(found, SingleDeviceSharding(from_device), may_alias=False)
            assert tag is not None
            links().send([_as_numbers(array) for array in found], tag, from_device, to_device)
        elif is_here(to_device):
            structs = [_struct_of_numbers(array, source.shard_shape(array.shape), own) for array in arrays]
            assert tag is not None
            received = links().receive(structs, tag, from_device, to_device)
            parts.append([_like(one, array) for one, array in zip(received, arrays, strict=True)])
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
        same = [source for source in sources if source.process_index == target.process_index]
        return same[0] if same else sources[number % len(sources)]

    return [(find(number, target), target) for number, target in enumerate(targets)]


def _part_on(array: Any, device: Any) -> Any:
    """The part of an array that a device has."""
    if len(array.sharding.device_set) == 1:
        return array
    return next(shard.data for shard in array.addressable_shards if shard.device == device)


# Random keys are arrays of arrays, which are sent as the numbers that they are made of.


def _as_numbers(array: Any) -> Any:
    return array if jax_compat.is_device_array(array) else jax.random.key_data(array)


def _struct_of_numbers(array: Any, shape: Sequence[int], sharding: Any) -> Any:
    struct = jax.ShapeDtypeStruct(shape, array.dtype)
    if not jax_compat.is_device_array(array):
        struct = jax.eval_shape(jax.random.key_data, struct)
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)


def _like(received: Any, array: Any) -> Any:
    """Gives a received array the form of the one that was sent: random keys where that has random keys."""
    if jax_compat.is_device_array(array):
        return received
    return jax.random.wrap_key_data(received, impl=jax.random.key_impl(array))
