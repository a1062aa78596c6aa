"""The data of a step's replicas: micro-batches that are dealt out, results that are brought together."""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from ipu_pipeline.engine import peers
from ipu_pipeline.engine.devices.device_groups import DeviceGroup, absent, move, stack_replicas
from ipu_pipeline.engine.devices.feeds import Element, Feed, Take, gather, take_from
from ipu_pipeline.engine.devices.placement import put, put_host_copies
from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.execution.agreement import agree_on_elements
from ipu_pipeline.engine.execution.contract import Request
from ipu_pipeline.engine.programs.stage_programs import ChunkForm
from ipu_pipeline.engine.state import Collected, Handed


class FeedSlot(NamedTuple):
    """A leaf of a micro-batch, and a group of devices that reads it."""

    leaf: int
    group: DeviceGroup


class ReplicaFeed:
    """Puts a replica's micro-batches on the devices that read them.

    Attributes:
      placement: where the replica's part of the state lives.
      feed: makes whole chunks of micro-batches.
    """

    def __init__(
        self,
        placement: StatePlacement,
        slots: Sequence[FeedSlot],
        chunk: ChunkForm,
        num_carried: int,
        shapes: int,
    ) -> None:
        """Takes where leaves go; in a loop, the first `num_carried` leaves are carried."""
        self.placement = placement
        self._slots, self._chunk, self._num_carried = slots, chunk, num_carried
        self._fed_slots = [slot for slot in slots if slot.leaf >= num_carried]
        self.feed = Feed(functools.partial(self._place_leaves, put, num_carried), chunk.size)
        self.feed.shapes = shapes

    def place_ahead(self, elements: Sequence[Element]) -> list[Element]:
        """Puts micro-batches on the devices that read them."""
        size = self._chunk.size
        if len(elements) % size:
            raise ValueError(
                f"place_micro_batches: programs handle {size} micro-batches each, by the pipeline's "
                f"dispatch_plan; {len(elements)} do not make whole ones."
            )
        return self.feed.place_ahead(elements, size, size) if self._slots else list(elements)

    @property
    def fed_groups(self) -> list[DeviceGroup]:
        """The groups of the stages that read micro-batches, one for each value read."""
        return [slot.group for slot in self._fed_slots]

    @functools.cached_property
    def is_fed_here(self) -> bool:
        """Whether this process puts micro-batches on devices."""
        return any(feed_slot.group.is_here for feed_slot in self._fed_slots)

    @property
    def takes_elements(self) -> bool:
        """Whether this process has a stage that reads micro-batches, or there is nothing to read."""
        return not self._fed_slots or self.is_fed_here

    def feed_from(self, take: Take) -> Callable[[], Sequence[Any]]:
        """Returns a function that gives one placed chunk after the other, in the order of its slots."""
        size = self._chunk.size

        def next_chunk() -> Sequence[Any]:
            if self._fed_slots and not self.is_fed_here:
                return self._not_fed()
            elements = gather(take, size, size)
            if size == 1:
                return self.place_alone(elements[0])
            return self.feed.place(elements) if self._fed_slots else []

        return next_chunk

    def take_iteration(self, take: Take) -> Sequence[Any]:
        """Takes an iteration's elements from the feed of a loop."""
        return [] if self._fed_slots and not self.is_fed_here else take(1)

    def feed_iteration(self, elements: Sequence[Any], request: Request) -> Callable[[], Sequence[Any]]:
        """Returns a function that gives the placed carried values and micro-batch of an iteration."""
        placement = self.placement
        if placement.has_peers:
            placement.begin_step()

        def put_carried(arrays: Sequence[Any], group: DeviceGroup) -> list[Any]:
            return put_host_copies(arrays, group, tag=placement.tag(f"carried values to {group.ipu}"))

        carried = iter(self._place_leaves(put_carried, 0, request.carried))
        if self._fed_slots and not self.is_fed_here:
            fed = iter(self._not_fed())
        else:
            fed = iter(self.feed.place(elements) if self._fed_slots else [])
        slots = self._slots
        chunk = [next(carried if slot.leaf < self._num_carried else fed) for slot in slots]
        return lambda: chunk

    def _place_leaves(self, put: Callable[..., list[Any]], first: int, leaves: Sequence[Any]) -> list[Any]:
        """Puts the leaves of a micro-batch or chunk where they are needed, in the order of its slots."""
        places = range(first, first + len(leaves))
        feed_slots = [feed_slot for feed_slot in self._slots if feed_slot.leaf in places]
        placed: list[Any] = [None] * len(feed_slots)
        for group in dict.fromkeys(self.placement.groups):
            positions = [p for p, feed_slot in enumerate(feed_slots) if feed_slot.group is group]
            if positions:
                arrays = [leaves[feed_slots[p].leaf - first] for p in positions]
                for p, array in zip(positions, put(arrays, group), strict=True):
                    placed[p] = array
        return placed

    def _not_fed(self) -> list[Any]:
        """Stand-ins for the leaves of a micro-batch or chunk in a process that has none of them."""
        element = jax.tree.leaves(self.placement.traced.element)
        return [
            absent((*self._chunk.axes, *element[leaf].shape), element[leaf].dtype, group.replicated)
            for leaf, group in self._fed_slots
        ]

    def place_alone(self, element: Element) -> Sequence[Any]:
        """Puts a micro-batch, also one of a chunk, on the devices, for programs that handle one."""
        if not self._fed_slots:
            return []
        stack = element.stack
        if stack is not None and stack.num_rows > 1 and stack.placed is not None:
            return [leaf[element.row] for leaf in stack.placed]
        if stack is None or stack.num_rows > 1:
            element = self.feed.add(element.leaves)
        return self.feed.place([element])


@dataclass(frozen=True, eq=False)
class DealtMicroBatch:
    """A micro-batch that was placed for a replica."""

    replica: int  # the replica's number
    generation: int  # rises where the replica that seemed to be next was not
    element: Any  # the micro-batch, as that replica takes it

    @property
    def shapes(self) -> int:
        """The number of its shapes; see `Element`."""
        return int(self.element.shapes)

    @property
    def leaves(self) -> Sequence[Any]:
        """The micro-batch's leaves."""
        leaves: Sequence[Any] = self.element.leaves
        return leaves


class Dealer:
    """Places micro-batches for replicas, and deals them out."""

    def __init__(self, placement: StatePlacement, feeds: Sequence[ReplicaFeed], chunk_size: int) -> None:
        """Begins with the first replica."""
        self._placement, self._feeds, self._chunk_size = placement, feeds, chunk_size
        self._lock = threading.Lock()
        self._num_dealt = self._generation = 0

    def place_element(self, leaves: Sequence[Any]) -> Any:
        """Places a micro-batch for the replica whose turn it seems to be."""
        with self._lock:
            replica, generation = self._num_dealt % len(self._feeds), self._generation
            self._num_dealt += 1
        return DealtMicroBatch(replica, generation, self._feeds[replica].feed.add(leaves))

    def place_ahead(self, elements: Sequence[Any]) -> list[Any]:
        """Puts the micro-batches of one update, of all replicas, on the devices that read them."""
        number = len(self._feeds)
        if number == 1:
            return self._feeds[0].place_ahead(elements)
        placed: list[Any] = [None] * len(elements)
        for replica, feed in enumerate(self._feeds):
            dealt = [self._of_replica(element, replica) for element in elements[replica::number]]
            for place, element in enumerate(feed.place_ahead(dealt)):
                placed[replica + place * number] = DealtMicroBatch(replica, self._generation, element)
        return placed

    def _of_replica(self, dealt: Any, replica: int) -> Any:
        """A micro-batch for a replica; placed again if it was placed for another one."""
        if not isinstance(dealt, DealtMicroBatch):
            return dealt  # there is no feed
        if dealt.replica == replica:
            return dealt.element
        with self._lock:  # the data ended, or began anew, in the middle of a round
            if dealt.generation == self._generation:
                self._generation += 1
                self._num_dealt += replica - dealt.replica
        return self._feeds[replica].feed.add(dealt.element.leaves)

    def place_alone(self, elements: Sequence[Any]) -> list[Sequence[Any]]:
        """Puts a micro-batch for each replica on its devices, where programs handle one."""
        dealt = [self._of_replica(element, replica) for replica, element in enumerate(elements)]
        return [feed.place_alone(element) for feed, element in zip(self._feeds, dealt, strict=True)]

    def take_everywhere(self, take: Take, count: int, *, tells_outsiders: bool = True) -> list[Take]:
        """Takes `count` micro-batches per replica, in each process those that it reads; or raises in all.

        Returns:
          A take for each replica.
        """
        feeds, placement = self._feeds, self._placement
        processes = placement.groups[0].processes
        takes = [take] if len(feeds) == 1 else self._deal(take)
        if len(processes) < 2:
            return takes
        groups = [group for feed in feeds for group in feed.fed_groups]
        readers = {device.process_index for group in groups for device in group.devices}
        joined = peers.current()
        hearers = range(joined.count) if joined is not None and tells_outsiders else processes
        if not readers or jax.process_index() not in hearers:
            return takes
        error: Exception | None = None
        elements_by_feed: list[list[Any]] = []
        for feed, feed_take in zip(feeds, takes, strict=True):
            elements: list[Any] = []
            if feed.is_fed_here:
                try:
                    elements = gather(feed_take, count, count)
                except Exception as raised:
                    error = error or raised
            elements_by_feed.append(elements)
        agree_on_elements(placement, readers, hearers, error)
        return list(map(take_from, elements_by_feed))

    def _deal(self, take: Take) -> list[Take]:
        """A take per replica, of its micro-batches, dealt out in turn."""
        number, size = len(self._feeds), self._chunk_size
        waiting: list[collections.deque[Any]] = [collections.deque() for _feed in self._feeds]

        def take_of(replica: int) -> Take:
            def take_some(limit: int) -> list[Any]:
                if not waiting[replica]:
                    for place, element in enumerate(gather(take, number * size, number * size)):
                        if self._feeds[place % number].takes_elements:
                            waiting[place % number].append(self._of_replica(element, place % number))
                return [waiting[replica].popleft() for _number in range(min(limit, len(waiting[replica])))]

            return take_some

        return [take_of(replica) for replica in range(number)]


# The outputs of a step.


class ReplicaOutputs(NamedTuple):
    """The values that a replica collected and enqueued, per micro-batch or chunk."""

    collected: list[Collected]
    enqueued: list[Handed]


def gather_outputs(placement: StatePlacement, parts: Sequence[ReplicaOutputs]) -> list[ReplicaOutputs]:
    """Brings what replicas collected and enqueued to the process that has the first replica's leaf.

    Leaves whose replicas are in one process stay where they are.
    """
    first, tree = _flatten(parts[0])
    gathered = [parts[0]]
    for replica, part in enumerate(parts[1:], 1):
        leaves, _tree = _flatten(part)
        by_transfer: dict[Any, list[int]] = {}  # (source, target) -> numbers
        for place, (leaf, target) in enumerate(zip(leaves, first, strict=True)):
            by_transfer.setdefault((leaf.sharding, target.sharding), []).append(place)
        for number, ((source, target), places) in enumerate(by_transfer.items()):
            if _process(source) == _process(target):
                continue
            tag = placement.tag(f"outputs of replica {replica} ({number})")
            moved = move([leaves[place] for place in places], source, target, tag, is_kept=True)
            for place, leaf in zip(places, moved, strict=True):
                leaves[place] = leaf
        gathered.append(_unflatten(part, tree, leaves))
    return gathered


def _process(sharding: Any) -> int:
    """The process of a replica's group, whose devices are all in one."""
    return int(next(iter(sharding.device_set)).process_index)


def _flatten(part: ReplicaOutputs) -> tuple[list[Any], Any]:
    collected = [(entry.outputs, entry.loss) for entry in part.collected]
    return jax.tree.flatten((collected, [entry.leaves for entry in part.enqueued]))


def _unflatten(part: ReplicaOutputs, tree: Any, leaves: list[Any]) -> ReplicaOutputs:
    collected, enqueued = jax.tree.unflatten(tree, leaves)
    return ReplicaOutputs(
        [
            dataclasses.replace(old, outputs=outputs, loss=loss)
            for old, (outputs, loss) in zip(part.collected, collected, strict=True)
        ],
        [dataclasses.replace(old, leaves=new) for old, new in zip(part.enqueued, enqueued, strict=True)],
    )


def join_collected(parts: Sequence[Collected]) -> Collected:
    """Stacks what replicas collected together, with a leading axis for replicas if there are several."""
    if len(parts) == 1:
        return parts[0]
    axis = 0 if parts[0].size is None else 1
    outputs = [
        stack_replicas(leaves, axis) for leaves in zip(*(part.outputs for part in parts), strict=True)
    ]
    losses = [part.loss for part in parts]
    loss = None if losses[0] is None else stack_replicas(losses, axis)
    return dataclasses.replace(parts[0], outputs=outputs, loss=loss)


def join_handed(parts: Sequence[Handed]) -> Handed:
    """Stacks what replicas enqueued together, with a leading axis for replicas if there are several."""
    if len(parts) == 1:
        return parts[0]
    axis = 0 if parts[0].size is None else 1
    leaves = [stack_replicas(leaves, axis) for leaves in zip(*(part.leaves for part in parts), strict=True)]
    return dataclasses.replace(parts[0], leaves=leaves)
