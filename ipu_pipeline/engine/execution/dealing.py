"""Which replica gets which micro-batch: they are dealt out in turn."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ipu_pipeline.engine.devices.feeds import Take, gather
from ipu_pipeline.engine.devices.residence import Residence
from ipu_pipeline.engine.execution.agreeing import agree_on_elements, take_everywhere
from ipu_pipeline.engine.execution.columns import Column

__all__ = ["Dealer", "Dealt"]


@dataclass(frozen=True, eq=False)
class Dealt:
    """A micro-batch that was placed for a replica."""

    replica: int  # which one
    generation: int  # of the guesses which replica is next
    element: Any  # the micro-batch, as that replica's column takes it


class Dealer:
    """Places micro-batches for columns, and deals them out."""

    def __init__(self, residence: Residence, columns: Sequence[Column], chunk_size: int) -> None:
        """Begins with the first column."""
        self._residence, self._columns, self._chunk_size = residence, columns, chunk_size
        self._lock = threading.Lock()
        self._num_dealt = self._generation = 0

    def place_element(self, leaves: Sequence[Any]) -> Any:
        """A micro-batch, placed for the replica whose turn it seems to be."""
        if len(self._columns) == 1:
            return self._columns[0].place_element(leaves)
        with self._lock:
            replica, generation = self._num_dealt % len(self._columns), self._generation
            self._num_dealt += 1
        return Dealt(replica, generation, self._columns[replica].place_element(leaves))

    def place_ahead(self, elements: Sequence[Any]) -> list[Any]:
        """The micro-batches of one update, of all replicas, on the devices that read them."""
        number = len(self._columns)
        if number == 1:
            return self._columns[0].place_ahead(elements)
        placed: list[Any] = [None] * len(elements)
        for replica, column in enumerate(self._columns):
            own = [self._of_replica(element, replica) for element in elements[replica::number]]
            for place, element in enumerate(column.place_ahead(own)):
                placed[replica + place * number] = Dealt(replica, self._generation, element)
        return placed

    def _of_replica(self, dealt: Any, replica: int) -> Any:
        """What a replica's column takes; placed again if it was placed for another one."""
        if not isinstance(dealt, Dealt):
            return dealt  # there is no feed
        if dealt.replica == replica:
            return dealt.element
        with self._lock:  # the data ended, or began anew, in the middle of a round
            if dealt.generation == self._generation:
                self._generation += 1
                self._num_dealt += replica - dealt.replica
        return self._columns[replica].place_element(dealt.element.leaves)

    def take_everywhere(self, take: Take, count: int) -> list[Take]:
        """What gives each column so many micro-batches; in all processes of the pipeline, or in none."""
        residence, columns = self._residence, self._columns
        if len(columns) == 1:
            if not residence.has_peers:
                return [take]
            residence.begin_step()
            return [take_everywhere(residence, columns[0].fed_rows, take, count)]
        takes = self._deal(take)
        readers = {
            (replica, device.process_index): device
            for replica, column in enumerate(columns)
            for row in column.fed_rows
            for device in row.devices
        }
        if not residence.has_peers or not readers:
            return takes
        error: Exception | None = None
        taken: list[Iterator[Any]] = []
        for column, own in zip(columns, takes, strict=True):
            elements: list[Any] = []
            if column.is_fed_here:
                try:
                    elements = gather(own, count, count)
                except Exception as raised:
                    error = error or raised
            taken.append(iter(elements))
        agree_on_elements(residence, list(readers.values()), error)
        return [_take_from(elements) for elements in taken]

    def _deal(self, take: Take) -> list[Take]:
        """What gives each replica its micro-batches, dealt out in turn."""
        number, size = len(self._columns), self._chunk_size
        waiting: list[collections.deque[Any]] = [collections.deque() for _column in self._columns]

        def take_of(replica: int) -> Take:
            def take_some(wanted: int) -> list[Any]:
                if not waiting[replica]:
                    for place, element in enumerate(gather(take, number * size, number * size)):
                        if self._columns[place % number].takes_elements:
                            waiting[place % number].append(self._of_replica(element, place % number))
                return [waiting[replica].popleft() for _number in range(min(wanted, len(waiting[replica])))]

            return take_some

        return [take_of(replica) for replica in range(number)]


def _take_from(elements: Iterator[Any]) -> Take:
    return lambda wanted: list(itertools.islice(elements, wanted))
