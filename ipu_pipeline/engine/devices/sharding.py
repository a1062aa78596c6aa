"""The arrays that replicas may divide among themselves, instead of each having the whole."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, TypeAlias

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ipu_pipeline.engine.devices.crossing import group_sharding
from ipu_pipeline.engine.devices.device_groups import DeviceGroup, names_of, partition_of
from ipu_pipeline.engine.devices.remote import NotRun
from ipu_pipeline.engine.tracing.replicas import REPLICA
from ipu_pipeline.engine.tracing.tensor_parallel import normal_partition
from ipu_pipeline.ground.enumerations import parse_member

__all__ = ["Shard", "ShardName", "gather_replicas", "is_apart", "parse_shard", "sharding_of", "share_out"]


class Shard(enum.Enum):
    """The arrays of which each replica has a part (Rajbhandari et al., "ZeRO", 2020, sections 5 and 6).

    OPTIMIZER_STATE: the optimizer's state; each replica updates its part. WEIGHTS: the trainable variables
    that only one stage has; they are gathered for each program that reads them, and released afterwards.

    Example:
      >>> pipeline = engine.Pipeline(
      ...     [layers.Dense(4)],
      ...     num_micro_batches=2,
      ...     num_replicas=2,
      ...     loss=jnp.mean,
      ...     optimizer=optax.adam(1e-3),
      ...     shard=[engine.Shard.OPTIMIZER_STATE],  # or "optimizer_state"
      ... )
    """

    OPTIMIZER_STATE = "optimizer_state"
    WEIGHTS = "weights"


ShardName: TypeAlias = Literal["optimizer_state", "weights"]  # their values


def parse_shard(values: Collection[ShardName | Shard]) -> frozenset[Shard]:
    """A collection of members or of their values."""
    if isinstance(values, str):
        raise ValueError(f"shard must be a collection of names; got the string {values!r}.")
    return frozenset(parse_member(Shard, value, "shard: each entry") for value in values)


def sharding_of(group: DeviceGroup, shape: Sequence[int], partition: PartitionSpec) -> NamedSharding:
    """How an array lies on a group of which each replica has a part.

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
    found = list(arrays)
    places = [
        place
        for place, (array, sharding) in enumerate(zip(arrays, shardings, strict=True))
        if array.sharding != sharding
    ]
    targets = [shardings[place].with_memory_kind(found[place].sharding.memory_kind) for place in places]
    if places:
        moved = _reshard([found[place] for place in places], targets, group)
        for place, array in zip(places, moved, strict=True):
            found[place] = array
    return found


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
