"""Emulated links between devices and host memory, which take time and no core.

On a CPU host memory is the device's, and what a copy between them takes says nothing of accelerators. Here
each virtual device has two more, one for either direction: what is moved is copied there, sleeps, and is
copied on. A link carries one thing at a time, while the device goes on with other work.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.emulation import stages
from ipu_pipeline import engine
from ipu_pipeline.engine.devices import placement
from ipu_pipeline.engine.devices.device_groups import DeviceGroup

__all__ = ["linked_to_host", "time_link"]

_LEAST_NUMBERS = 2048  # of what a link multiplies: then XLA starts its programs asynchronously


class _HostLink:
    """A link of one direction."""

    def __init__(self, device: Any, speed: engine.LinkSpeed) -> None:
        """Notes the virtual device that is the link, and how long it takes, in seconds."""
        self._there = jax.sharding.SingleDeviceSharding(device)
        self._speed = speed
        self._ones = jax.device_put(np.ones(_LEAST_NUMBERS, np.float32), self._there)

    def carry(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays, on the link, when they have been on their way for as long as it takes."""
        seconds = self._speed.time(sum(array.nbytes for array in arrays))
        there = jax.device_put(list(arrays), self._there)
        return _sleeper(seconds * 1e3)(there, self._ones)


@functools.cache
def _sleeper(milliseconds: float) -> Callable[[list[Any], Any], list[Any]]:
    def sleep(arrays: list[Any], ones: Any) -> list[Any]:
        slept = stages.sleep(ones, milliseconds) * ones
        made: list[Any] = jax.lax.optimization_barrier((arrays, slept))[0]
        return [jnp.where(slept[0] > 0, array, 0) for array in made]

    return jax.jit(sleep)


def time_link(row: DeviceGroup, num_rounds: int = 5) -> engine.LinkSpeed:
    """What it takes to bring something to a row from host memory; within `linked_to_host` its link.

    Args:
      row: the row.
      num_rounds: how often each of two sizes is timed.

    Returns:
      Latency in seconds and bytes per second, by the medians.
    """
    sizes, taken = (2**13, 2**17), []
    for size in sizes:
        times = []
        (there,) = placement.put([np.zeros(size // 4, np.float32)], row, offloaded=True)
        for _ in range(1 + num_rounds):
            jax.block_until_ready(there)
            begin = time.perf_counter()
            jax.block_until_ready(placement.put([there], row))
            times.append(time.perf_counter() - begin)
        taken.append(statistics.median(times[1:]))  # the first one compiles
    per_byte = max(0.0, (taken[1] - taken[0]) / (sizes[1] - sizes[0]))
    latency = max(0.0, taken[0] - per_byte * sizes[0])
    return engine.LinkSpeed(latency, 1 / per_byte if per_byte else math.inf)


@contextlib.contextmanager
def linked_to_host(pipeline: engine.Pipeline, speed: engine.LinkSpeed) -> Iterator[None]:
    """Has what goes between a pipeline's devices and host memory take time, in this process.

    Args:
      pipeline: on virtual devices of a CPU, in one process and one replica.
      speed: how long links sleep, in seconds and bytes per second; `time_link` says what they take.

    Raises:
      ValueError: there are too few virtual devices for the links.
    """
    rows = list(dict.fromkeys(pipeline.prepare().placement.groups))
    taken = [row.devices[0] for row in rows]
    free = [device for device in jax.devices() if device not in taken]
    if len(free) < 2 * len(rows):
        total = 3 * len(rows)
        raise ValueError(
            f"linked_to_host: {len(rows)} IPUs need {total} virtual devices, with the links; there are "
            f'{jax.device_count()}. jax.config.update("jax_num_cpu_devices", {total}) makes more.'
        )
    ways = [(row.devices[0], kind) for row in rows for kind in ("device", "pinned_host")]
    links = {way: _HostLink(device, speed) for way, device in zip(ways, free, strict=False)}
    plain = vars(placement)["_put_as"]

    def put_as(arrays: Sequence[Any], row: DeviceGroup, sharding: Any, *rest: Any) -> list[Any]:
        link = links.get((row.devices[0], sharding.memory_kind))
        placed = list(arrays)
        moved = [] if link is None else [n for n, a in enumerate(arrays) if _crosses(a, row, sharding)]
        if link is not None and moved:
            for number, array in zip(moved, link.carry([arrays[n] for n in moved]), strict=True):
                placed[number] = array
        return plain(placed, row, sharding, *rest)

    vars(placement)["_put_as"] = put_as
    try:
        yield
    finally:
        vars(placement)["_put_as"] = plain


def _crosses(array: Any, row: DeviceGroup, sharding: Any) -> bool:
    """Whether an array of a row goes to the other memory there."""
    if not isinstance(array, jax.Array) or array.devices() != {row.devices[0]}:
        return False
    return bool(array.sharding.memory_kind != sharding.memory_kind)
