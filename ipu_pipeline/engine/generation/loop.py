"""The loop that takes requests from a queue, and keeps all stages at work until none is left.

In each turn all groups of slots take in requests. Then each starts a token of each slot, and the tokens of
its turn before are read. So the host is at most a turn behind, and a stage never waits for it, if there
are as many groups as devices. A request that ends by a stop token has one more token computed, which is
dropped.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Sequence

from ipu_pipeline.engine.generation.requests import Request
from ipu_pipeline.engine.generation.slots import BoundStages, SlotGroup

__all__ = ["RequestQueue", "run"]


class RequestQueue:
    """Requests that wait for a slot, and those in flight; safe to use from several threads."""

    def __init__(self, requests: Iterable[Request] = (), *, is_open: bool = False) -> None:
        """Takes the first requests."""
        self._waiting = collections.deque(requests)
        self._all = list(self._waiting)
        self._changed = threading.Condition()
        self._is_open = is_open
        self.error: BaseException | None = None  # what ended all requests

    def submit(self, request: Request) -> bool:
        """Adds a request. Returns whether that was still possible."""
        with self._changed:
            if self._is_open:
                self._all = [one for one in self._all if not one.is_done]
                self._all.append(request)
                self._waiting.append(request)
                self._changed.notify_all()
            return self._is_open

    def close(self) -> None:
        """Says that no more requests will come."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        """Closes, and ends all requests that are not done; see `Request.end`."""
        with self._changed:
            self._is_open, self.error = False, error
            self._waiting.clear()
            self._changed.notify_all()
        for request in self._all:
            request.end(error)

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for a slot."""
        return len(self._waiting)

    def take(self) -> Request | None:
        """The next request that is not done; None if none waits."""
        with self._changed:
            while self._waiting:
                request = self._waiting.popleft()
                if not request.is_done:
                    return request
            return None

    def wait(self) -> bool:
        """Waits until a request waits for a slot. Returns False if none will."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not self._is_open)
            return bool(self._waiting)


def run(
    stages: BoundStages,
    queue: RequestQueue,
    num_groups: int,
    num_slots: int,
    prepare: Callable[[Request], Sequence[int]],
) -> None:
    """Answers the requests of a queue, until it is closed and empty."""
    groups: list[SlotGroup] = []
    while queue.wait():
        groups = groups or [SlotGroup(stages, num_slots) for _group in range(num_groups)]
        while queue.num_waiting or any(group.num_taken or group.num_unread for group in groups):
            for group in groups:  # before any token, so that no stage waits for a prompt that just came
                # As many requests in each group, so that all stages have work.
                num_all = queue.num_waiting + sum(one.num_taken for one in groups)
                room = min(num_slots, -(-num_all // num_groups)) - group.num_taken
                for _slot in range(room):
                    request = queue.take()
                    if request is not None:
                        group.join(request, prepare(request))
            for group in groups:
                is_started = group.num_taken > 0
                if is_started:
                    group.decode()
                group.read(1 if is_started else 0)
