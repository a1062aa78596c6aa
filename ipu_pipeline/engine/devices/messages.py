"""Bytes from process to process, for what is no array of a pipeline.

They go the way of arrays, so that no process listens at another port for them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from ipu_pipeline.engine import peers
from ipu_pipeline.engine.devices.gathered import first_device
from ipu_pipeline.engine.devices.links import Tag, links, naming_peers

__all__ = ["connect_all", "fetch_bytes", "offer_bytes"]


def connect_all() -> None:
    """Connects all processes of the run; all of them call it before they exchange bytes."""
    others = peers.current()
    if others is not None:
        links().warm(range(others.count))


def offer_bytes(what: str, number: int, listeners: Collection[int], content: Any) -> None:
    """Lets other processes fetch bytes. Does not wait for them."""
    others = peers.current()
    assert others is not None
    source = first_device(others.index)
    array = np.frombuffer(content, np.uint8)
    size = np.array([array.size], np.int64).view(np.uint8)
    arrays = jax.device_put([size, array], source, may_alias=False)
    for process in listeners:
        for part, sent in enumerate(arrays):
            links().send([sent], Tag(what, number, part), source, first_device(process))


def fetch_bytes(what: str, number: int, teller: int) -> memoryview:
    """Waits for bytes that another process offers to this one; see `offer_bytes`."""
    others = peers.current()
    assert others is not None
    source, target = first_device(teller), first_device(others.index)

    def fetch(part: int, size: int) -> np.ndarray[Any, Any]:
        struct = jax.ShapeDtypeStruct((size,), np.uint8, sharding=SingleDeviceSharding(target))
        with naming_peers():
            received = links().receive([struct], Tag(what, number, part), source, target)
            return np.asarray(*jax.block_until_ready(received))

    (size,) = fetch(0, 8).view(np.int64)
    return fetch(1, int(size)).data
