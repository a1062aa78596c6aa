"""What the processes of a pipeline or loop agree on: whether there are micro-batches for a step, and more.

Only processes with stages that read the feed take micro-batches. Where the data ends they end the step,
while the others would wait for values that never come. So a step begins when all its micro-batches are
there: the first of the processes that read them tells those that do not. With replicas, whose processes
each read their own micro-batches, every process that reads tells all others.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from ipu_pipeline.engine import peers
from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.devices.feeds import Take, gather, take_from
from ipu_pipeline.engine.devices.links import Tag, links, naming_peers
from ipu_pipeline.engine.devices.remote import is_here
from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.ground.errors import OutOfRangeError, ProcessError

__all__ = ["agree_on_elements", "answer_everywhere", "take_everywhere"]


def take_everywhere(
    placement: StatePlacement, readers: Sequence[DeviceGroup], take: Take, wanted: int
) -> Take:
    """Gets the micro-batches of a step, or raises, in all processes of the pipeline.

    Raises:
      OutOfRangeError: there are too few, here or in the process that reads them.
      ProcessError: the process that reads them had another error.
      Others: what `take` raised here.
    """
    if not readers or not any(group.is_here for group in placement.groups):
        return take
    first = readers[0].devices[0]
    reading = {device.process_index for group in readers for device in group.devices}
    others: dict[int, Any] = {}  # process that does not read -> one of its devices
    for group in placement.groups:
        for device in group.devices:
            if device.process_index not in reading:
                others.setdefault(device.process_index, device)
    tag = placement.tag("micro-batches")
    assert tag is not None
    for device in filter(is_here, others.values()):
        _hear(tag, first, device)
        return take
    error: Exception | None = None
    elements: list[Any] = []
    try:
        elements = gather(take, wanted, wanted)
    except Exception as raised:
        error = raised
        if is_here(first):
            links().share(_key(tag), json.dumps(_describe(error)))
    if is_here(first) and others:
        (has_failed,) = jax.device_put([np.int32(error is not None)], SingleDeviceSharding(first))
        for device in others.values():
            links().send([has_failed], tag, first, device)
    if error is not None:
        raise error
    return take_from(elements)


def agree_on_elements(placement: StatePlacement, readers: Sequence[Any], error: Exception | None) -> None:
    """Raises, in all processes of a pipeline or loop, if one did not get the micro-batches of a step.

    Raises:
      error: as given; with several such processes, in the first of them.
      OutOfRangeError: there were too few in another process.
      ProcessError: another process had another error.
    """
    own = [np.bool_(error is not None)] * len(readers)
    failed = answer_everywhere(placement, own, readers, "micro-batches")
    if not any(failed):
        return
    first = failed.index(True)
    tag = placement.tag("micro-batches", first)
    assert tag is not None
    if not is_here(readers[first]):
        raise _read_error(tag, readers[first]) from error
    assert error is not None
    links().share(_key(tag), json.dumps(_describe(error)))
    raise error


def answer_everywhere(
    placement: StatePlacement, asked: Sequence[Any], homes: Sequence[Any], what: str
) -> list[bool]:
    """Reads boolean scalars in all processes that have a part in a pipeline or loop. Waits for them.

    In other processes all are False.

    Raises:
      ProcessError: the process that has one has ended, or does not go on.
    """
    if not placement.has_peers:
        return list(map(bool, asked))
    placement.begin_step()
    devices: dict[int, Any] = {}  # one of each process
    for group in placement.groups:
        for device in group.devices:
            devices.setdefault(device.process_index, device)
    own = next((device for device in devices.values() if is_here(device)), None)
    if own is None:  # this process has no part
        return [False] * len(homes)
    told: list[Any] = [None] * len(homes)
    tags = [placement.tag(f"answers about the {what}", number) for number in range(len(homes))]
    places = sorted(range(len(homes)), key=lambda place: not is_here(homes[place]))  # sends come first
    for place in places:
        home, tag = homes[place], tags[place]
        assert tag is not None
        if is_here(home):
            (told[place],) = jax.device_put([np.asarray(asked[place])], SingleDeviceSharding(home))
            for device in devices.values():
                if device.process_index != home.process_index:
                    links().send([told[place]], tag, home, device)
        else:
            struct = jax.ShapeDtypeStruct((), np.dtype(bool), sharding=SingleDeviceSharding(own))
            (told[place],) = links().receive([struct], tag, home, own)
    with peers.waiting(f"the {what}"), naming_peers():
        return list(map(bool, told))


def _hear(tag: Tag, first: Any, device: Any) -> None:
    """Waits for the process that reads micro-batches."""
    struct = jax.ShapeDtypeStruct((), np.int32, sharding=SingleDeviceSharding(device))
    (has_failed,) = links().receive([struct], tag, first, device)
    with peers.waiting("the micro-batches of a step"):
        try:
            if not int(has_failed):
                return
        except jax.errors.JaxRuntimeError:
            links().check()
            raise
    raise _read_error(tag, first)


def _describe(error: Exception) -> tuple[bool, str]:
    return isinstance(error, OutOfRangeError), f"{type(error).__name__}: {error}"


def _read_error(tag: Tag, device: Any) -> Exception:
    """The error that a device's process reported, which keeps it from reading micro-batches."""
    is_end, text = json.loads(links().read(_key(tag)))
    kind = OutOfRangeError if is_end else ProcessError
    return kind(f"In process {device.process_index}, which reads the micro-batches: {text}")


def _key(tag: Tag) -> str:
    return f"{tag.edge}/{tag.step}/{tag.number}"
