"""Joins the replicas' separate values once per weight update, with one program per group."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ipu_pipeline.engine import peers
from ipu_pipeline.engine.devices import action_log
from ipu_pipeline.engine.devices.device_groups import DeviceGroup, join, over_replicas, partition_of
from ipu_pipeline.engine.programs.accumulation import count_dtype
from ipu_pipeline.engine.tracing.replicas import REPLICA

__all__ = ["Joined", "Parts", "join_replicas", "take_first"]


@dataclass(frozen=True, eq=False)
class Parts:
    """The replicas' values on a group, one array per replica."""

    accumulators: dict[str, Sequence[Any]] = field(default_factory=dict)  # by key; their memory is taken
    # new values of variables that stages assign, by full name
    assigned: dict[str, Sequence[Any]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Joined:
    """The joined values, the same for all replicas."""

    means: dict[str, Any]  # of the accumulators, by key
    zeros: dict[str, Any]  # in the memory of the accumulators, by key
    # means of floating-point numbers, else the first replica's values, by full name
    assigned: dict[str, Any]


def join_replicas(group: DeviceGroup, parts: Parts, stage: int, step: int) -> Joined:
    """Joins the replicas' values on a group, without waiting where the devices do not make it wait."""
    accumulators, assigned = _join_all(group, parts.accumulators), _join_all(group, parts.assigned)
    divided, kept = _partitions(accumulators), _partitions(assigned)
    joining = _joining(group.replicated.mesh, divided, kept)
    program = group.program(joining.program, joining.shardings)
    with _waiting(group):
        joined = Joined(*program(accumulators, assigned))
    log = action_log.current()
    if log is not None and group.is_here and group.is_joined:
        made = [*joined.means.values(), *joined.assigned.values()]
        log.note(action_log.Started("all-reduce", stage, step), made, awaited=made)
    return joined


def take_first(group: DeviceGroup, parts: Mapping[Any, Sequence[Any]]) -> dict[Any, Any]:
    """Gives the first replica's values on a group to all replicas."""
    program = group.program(_taking_first(group.replicated.mesh))
    with _waiting(group):
        values: list[Any] = program(list(_join_all(group, parts).values()))
    return dict(zip(parts, values, strict=True))


def _waiting(group: DeviceGroup) -> contextlib.AbstractContextManager[None]:
    """While a joint program of several processes is started; on a CPU, that may wait for all of them."""
    return peers.waiting("the weight update") if group.is_joined else contextlib.nullcontext()


def _join_all(group: DeviceGroup, parts: Mapping[Any, Sequence[Any]]) -> dict[Any, Any]:
    return {key: join(some, group) for key, some in parts.items()}


_Partitions: TypeAlias = "tuple[tuple[str, PartitionSpec], ...]"


def _partitions(arrays: Mapping[str, Any]) -> _Partitions:
    """How arrays are divided within each replica, by key; sorted, as what a program returns is."""
    return tuple((key, partition_of(arrays[key])) for key in sorted(arrays))


class _Joining(NamedTuple):
    """A program that joins the replicas' values, and the partitions of its results."""

    program: Callable[..., Any]
    shardings: Any


@functools.lru_cache(maxsize=256)
def _joining(mesh: Mesh, accumulators: _Partitions, assigned: _Partitions) -> _Joining:
    divided, kept = dict(accumulators), dict(assigned)
    results = divided, divided, kept
    shardings = jax.tree.map(lambda partition: NamedSharding(mesh, partition), results)

    def join_parts(accumulators: dict[str, Any], assigned: dict[str, Any]) -> Any:
        return (
            {key: _mean(value) for key, value in accumulators.items()},
            {key: jnp.zeros_like(value) for key, value in accumulators.items()},
            {name: _mean_or_first(value) for name, value in assigned.items()},
        )

    joined = over_replicas(mesh, join_parts, (divided, kept), results)
    return _Joining(jax.jit(joined, donate_argnums=0, out_shardings=shardings), shardings)


@functools.lru_cache(maxsize=256)
def _taking_first(mesh: Mesh) -> Callable[..., Any]:
    def take(values: list[Any]) -> list[Any]:
        return [_first(value) for value in values]

    return jax.jit(over_replicas(mesh, take))


def _mean(value: jax.Array) -> jax.Array:
    """The mean, in at least 32 bits: a sum of 16-bit values may overflow 16 bits."""
    mean: jax.Array = jax.lax.pmean(value.astype(count_dtype(value.dtype)), REPLICA)
    return mean.astype(value.dtype)


def _mean_or_first(value: jax.Array) -> jax.Array:
    return _mean(value) if jnp.issubdtype(value.dtype, jnp.floating) else _first(value)


def _first(value: jax.Array) -> jax.Array:
    first: jax.Array = jax.lax.all_gather(value, REPLICA)[0]
    return first
