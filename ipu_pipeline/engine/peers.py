"""The other processes of a run: their number, and what they tell each other.

They use the key-value store of JAX's coordination service. A process that runs alone has no peers:
`current()` is None, and nothing is told, noted or waited for.

A thread that waits here waits for as long as the others live, since they may be compiling for minutes. The
watcher (`ipu_pipeline.processes.peer_watch`) finds out that a process has ended or does not go on, and
calls `fail`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from ipu_pipeline.ground.errors import ProcessError

_PREFIX = "ipu_pipeline/told"
_SLICE = 500  # milliseconds of waiting between checks that the others live
_SHOWN = 120  # characters of a value that differs


class Store(Protocol):
    """The store that the processes share: texts by key."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Enters a text. An error if the key has one, unless it may be overwritten."""

    def key_value_delete(self, key: str) -> None:
        """Removes a text."""

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """All texts whose keys begin with `key`, with their keys."""

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """The text of a key, once there is one; an error after the time."""


def is_of_collective(error: BaseException) -> bool:
    """Whether an error comes from a computation of several processes, for which JAX raises a ValueError."""
    return isinstance(error, jax.errors.JaxRuntimeError | ValueError) and "Gloo" in str(error)


def may_come_from(error: BaseException) -> bool:
    """Whether an error may be a consequence of another process's end."""
    is_known = isinstance(error, jax.errors.JaxRuntimeError | ProcessError)
    return is_known or is_of_collective(error)


class Peers:
    """The processes of a run, as one of them sees them. Safe to use from several threads.

    Attributes:
      index: the number of this process.
      count: the number of processes, 2 or more.
      address: the address of this machine at which this process listens.
      store: the store that they share.
      failure: what has happened to another process, so that this one cannot go on; None if nothing has.
      occupied: by thread, what takes this process long and is no reason to give it up.
    """

    def __init__(self, index: int, count: int, address: str, store: Store) -> None:
        """Made by the function that joins the processes."""
        self.index = index
        self.count = count
        self.address = address
        self.store = store
        self.failure: str | None = None
        self._waits_at: dict[int, str] = {}  # thread -> where it waits
        self.occupied: dict[int, str] = {}
        self._lock = threading.Lock()
        self._turn = threading.RLock()  # held by the thread that does what all processes do
        self._doing: tuple[str, str] | None = None  # this thread's name, and what it does
        self._numbers: Counter[str] = Counter()  # place -> how often the processes have met there

    @property
    def waits_at(self) -> str | None:
        """What a thread now waits for from other processes; None if no thread waits."""
        return next(iter(list(self._waits_at.values())), None)

    @contextlib.contextmanager
    def waiting(self, where: str) -> Iterator[None]:
        """Tells the watcher of the processes that this thread waits for others."""
        thread = threading.get_ident()
        before = self._waits_at.get(thread)
        self._waits_at[thread] = where
        try:
            yield
        finally:
            if before is None:
                self._waits_at.pop(thread, None)
            else:
                self._waits_at[thread] = before

    def fail(self, message: str) -> None:
        """Says that this process cannot go on. The first message stays."""
        self.failure = self.failure or message

    def check(self) -> None:
        """Raises a ProcessError if another process has ended, or does not go on."""
        if self.failure is not None:
            raise ProcessError(self.failure)

    @contextlib.contextmanager
    def one_thread(self, what: str) -> Iterator[None]:
        """Admits one thread at a time to what all processes do, since the order of threads may differ."""
        thread = threading.current_thread().name
        if not self._turn.acquire(blocking=False):
            other, activity = self._doing or ("another one", "its begin")
            message = (
                f"Process {self.index}: thread {thread!r} began {what} while thread {other!r} was at "
                f"{activity}. In a run of several processes all must do the same things in the same order, "
                "so one thread at a time runs, saves, restores and reads."
            )
            self.fail(message)
            raise RuntimeError(message)
        before, self._doing = self._doing, (thread, what)
        try:
            yield
        finally:
            self._doing = before
            self._turn.release()

    def exchange(self, what: str, text: str, deadline: float = math.inf) -> list[str]:
        """Tells all others a text, and waits for their texts. Every process calls it, in the same order.

        Returns:
          The texts, by the number of the process.
        """
        with self._lock:
            number = self._numbers[what]
            self._numbers[what] += 1
        place = f"{_PREFIX}/{what}/{number}"
        self.check()
        with self._calling():
            self.store.key_value_set(f"{place}/{self.index}", text)
            if number >= 2:  # all have come here, so all have read the texts of the time before last
                self.store.key_value_delete(f"{_PREFIX}/{what}/{number - 2}/{self.index}")
        texts = []
        with self.waiting(f"{what}, time {number + 1}"):
            for peer in range(self.count):
                texts.append(text if peer == self.index else self._read(f"{place}/{peer}", deadline))
        return texts

    def tell(self, what: str, teller: int, text: str = "", is_read: bool = True) -> str:
        """Lets one process tell others a text, without waiting. Every process calls it, in the same order.

        Returns:
          The text; "" if it is not read.
        """
        with self._lock:
            number = self._numbers[what]
            self._numbers[what] += 1
        place = f"{_PREFIX}/{what}/{number}"
        if self.index == teller:
            with self._calling():
                self.store.key_value_set(place, text)
            return text
        if not is_read:
            return ""
        with self.waiting(f"{what}, time {number + 1}"):
            return self._read(place, math.inf)

    def meet(self, what: str) -> None:
        """Waits until all processes are there, like `exchange`."""
        self.exchange(what, "")

    def agree(
        self, what: str, document: Mapping[str, str], deadline: float = math.inf, beside: str = ""
    ) -> list[str]:
        """Compares what all processes say, before they rely on it. All call it, in the same order.

        Returns:
          What is `beside` in each process.
        """
        text = json.dumps([dict(document), beside])
        documents, besides = zip(*map(json.loads, self.exchange(what, text, deadline)), strict=True)
        names = dict.fromkeys(itertools.chain(*documents))
        faults = [
            f"{name}: {_describe(values)}"
            for name in names
            if len(set(values := [texts.get(name, "(nothing)") for texts in documents])) > 1
        ]
        if faults:
            raise ValueError(
                f"The processes of the run do not agree ({what}): {'; '.join(faults)}. All of them must "
                "run the same program, with the same arguments and versions."
            )
        return list(besides)

    def _read(self, key: str, deadline: float) -> str:
        while True:
            self.check()
            try:
                with self._calling():
                    return self.store.blocking_key_value_get(key, _SLICE)
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """Turns errors of calls of the store into ours."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if str(error).startswith("DEADLINE_EXCEEDED"):
                raise TimeoutError from None
            self.check()
            raise ProcessError(f"The coordinator of the processes does not answer: {error}") from error


def _describe(values: Sequence[str]) -> str:
    """Describes values and the processes that have them; long ones only around the first difference."""
    processes: dict[str, list[int]] = {}
    for process, value in enumerate(values):
        processes.setdefault(value, []).append(process)
    num_alike = next(n for n, chars in enumerate(itertools.zip_longest(*processes)) if len(set(chars)) > 1)
    begin = max(0, num_alike - _SHOWN // 2)
    parts = []
    for value, holders in processes.items():
        if max(map(len, processes)) > _SHOWN:
            end = begin + _SHOWN
            value = f"{'...' * (begin > 0)}{value[begin:end]}{'...' * (end < len(value))}"
        numbers = ", ".join(map(str, holders))
        parts.append(f"{value!r} in process{'es' * (len(holders) > 1)} {numbers}")
    return ", ".join(parts)


def digest(lines: Iterable[str]) -> str:
    """A short text that differs where the lines differ."""
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def digest_array(array: Any) -> str:
    """A short text that differs where an array's dtype, shape or elements differ."""
    array = np.asarray(array)
    return f"{array.dtype}{list(array.shape)} {hashlib.blake2b(array.tobytes(), digest_size=8).hexdigest()}"


_current: Peers | None = None


def current() -> Peers | None:
    """The processes that this one has joined; None if it runs alone."""
    return _current


def check_joined(what: str) -> None:
    """Raises a RuntimeError if JAX runs in several processes, and this one has not joined the others."""
    if _current is None and jax.process_count() > 1:
        raise RuntimeError(
            f"{what} in {jax.process_count()} processes needs ipu_pipeline.distributed.initialize() in "
            "place of jax.distributed.initialize(), so that they can agree."
        )


def set_current(peers: Peers | None) -> None:
    """Sets the processes that this one has joined; None: it runs alone again."""
    global _current
    _current = peers


@contextlib.contextmanager
def occupied(what: str) -> Iterator[None]:
    """Marks a block that takes long, such as compiling, so that other processes go on waiting for it."""
    peers, thread = _current, threading.get_ident()
    if peers is None or thread in peers.occupied:
        yield
        return
    peers.occupied[thread] = what
    try:
        yield
    finally:
        del peers.occupied[thread]


@contextlib.contextmanager
def waiting(where: str) -> Iterator[None]:
    """Does what `Peers.waiting` does; nothing in a process that runs alone."""
    with contextlib.nullcontext() if _current is None else _current.waiting(where):
        yield


@contextlib.contextmanager
def one_thread(what: str) -> Iterator[None]:
    """Does what `Peers.one_thread` does; nothing in a process that runs alone."""
    with contextlib.nullcontext() if _current is None else _current.one_thread(what):
        yield
