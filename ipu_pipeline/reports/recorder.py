"""Notes, while a trace is recorded, the programs that the host starts, and what it waits for."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ipu_pipeline.engine import Pipeline
from ipu_pipeline.engine.inspect import Launch, PipelineDetails, find_facts
from ipu_pipeline.engine.planning import measure_costs
from ipu_pipeline.engine.schedules import Costs
from ipu_pipeline.reports.events import REHEARSAL, EventKind
from ipu_pipeline.reports.sharing import Shares

__all__ = ["HostTime", "Introduced", "Launched", "Moved", "Recorder"]


@dataclass(frozen=True, eq=False)
class Launched:
    """A program that the host started. Times are in nanoseconds since the epoch.

    Attributes:
      launch: the program.
      function: the function that was called.
      begin: when the host began to start it.
      end: when the host went on.
      is_rehearsal: whether it is a rehearsal, which does not count.
    """

    launch: Launch
    function: Any
    begin: int
    end: int
    is_rehearsal: bool = False


@dataclass(frozen=True)
class Moved:
    """Data that was sent from one device to another.

    Attributes:
      launch: the program whose results the data are.
      device: the id of the device that it went to.
      num_bytes: the size of the data.
      time: when the host had asked for it, in nanoseconds since the epoch.
    """

    launch: Launch
    device: int
    num_bytes: int
    time: int


@dataclass(frozen=True)
class HostTime:
    """The host's own work; attributes are as in `Event`, times in nanoseconds since the epoch."""

    kind: EventKind
    begin: int
    end: int
    step: int | None = None
    micro_batch: int | None = None
    num_bytes: int = 0
    name: str = ""


@dataclass(frozen=True)
class Introduced:
    """A pipeline or loop that runs.

    Attributes:
      runner: the runner.
      owner: its `Pipeline` or `Loop`.
      name: its name for people.
      facts: its description, with what its programs take alone, if that could be measured.
    """

    runner: Any
    owner: Any
    name: str
    facts: PipelineDetails

    @property
    def shares(self) -> Shares:
        """The shares of its actions."""
        return Shares(self.facts)


def _measure(owner: Any) -> Costs | None:
    """What the programs of a `Pipeline` or `Loop` take alone; None where they cannot be measured."""
    if not isinstance(owner, Pipeline):
        return None
    # It has phases or callbacks, say; or there is not enough memory beside the state.
    with contextlib.suppress(ValueError, jax.errors.JaxRuntimeError):
        return measure_costs(owner)
    return None


class Recorder:
    """A watcher that notes everything, up to a number of actions. Several threads may call it.

    Attributes:
      introduced: the pipelines and loops that ran, in the order of appearance.
      launched: the programs, in the order in which they were started.
      moved_arrays: the data that was sent.
      host: the host's work.
      num_actions: how many actions were noted: one per micro-batch of a program.
      num_dropped: how many were not noted, because there were too many.
    """

    def __init__(
        self, max_actions: int, on_first: Callable[[], None], on_full: Callable[[], None] = lambda: None
    ) -> None:
        """Starts with nothing noted."""
        self.introduced: list[Introduced] = []
        self.launched: list[Launched] = []
        self.moved_arrays: list[Moved] = []
        self.host: list[HostTime] = []
        self.num_actions = self.num_dropped = 0
        self._has_begun = False
        self._full_at: int | None = None  # when something was first left out
        self._max_actions = max_actions
        self._on_first, self._on_full = on_first, on_full
        self._lock = threading.RLock()  # programs are noted in the order in which they are started
        self._measuring = threading.RLock()  # taken before the other; the recording begins under it
        self._noted: set[Launch] = set()
        self._rehearsed: set[Any] = set()
        self._local = threading.local()
        self._last: dict[Any, list[weakref.ref[Any]]] = {}  # what each program returned last

    @property
    def _rehearses(self) -> bool:
        """Whether this thread is rehearsing."""
        return getattr(self._local, "rehearses", False)

    @property
    def is_full(self) -> bool:
        """Whether something was left out because there was too much."""
        return self.num_dropped > 0

    def introduce(self, runner: Any, owner: Any, name: str | None = None) -> None:
        """See `engine.watching.Watcher`."""
        with self._until_begun():
            # What is measured while the devices' profiler runs would be part of the trace.
            is_measured = not self._has_begun and self.find(runner) is None
            self._enter(runner, owner, name, _measure(owner) if is_measured else None)

    def _enter(self, runner: Any, owner: Any, name: str | None, costs: Costs | None) -> None:
        with self._lock:
            place = self.find(runner)
            if place is None:
                number = len(self.introduced)
                word = "IPU" if name else "device"  # only TF1's and PopTorch's interfaces name pipelines
                name = name or ("Pipeline" if not number else f"Pipeline_{number}")
                facts = dataclasses.replace(find_facts(owner), costs=costs, device_word=word)
                self.introduced.append(Introduced(runner, owner, name, facts))
            elif name is not None:
                self.introduced[place] = dataclasses.replace(self.introduced[place], name=name)

    @contextlib.contextmanager
    def rehearsing(self, runner: Any) -> Iterator[bool]:
        """See `engine.watching.Watcher`."""
        with self._lock:
            is_first = runner not in self._rehearsed
            self._rehearsed.add(runner)
        self._local.rehearses = True
        begin = time.time_ns()
        try:
            yield is_first
        finally:
            self._local.rehearses = False
            if is_first:
                self.spanned(REHEARSAL, begin, time.time_ns())

    def _until_begun(self) -> contextlib.AbstractContextManager[Any]:
        """Wraps what may begin the recording, or may only be done before that."""
        return contextlib.nullcontext() if self._has_begun else self._measuring

    def find(self, runner: Any) -> int | None:
        """The number of a runner; None if it was not introduced."""
        known = (place for place, one in enumerate(self.introduced) if one.runner is runner)
        return next(known, None)

    def run(self, launch: Launch, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """See `engine.watching.Watcher`."""
        is_rehearsal = self._rehearses
        with self._until_begun(), self._lock:
            # Rehearsals while the devices' profiler runs must be known, so that they can be left out.
            is_noted = self._has_begun if is_rehearsal else self._has_room(launch)
            if is_noted and not self._has_begun:
                self._on_first()
                self._has_begun = True
        # Launches are in the order of their runs. But a program that calls Python, which may wait for
        # another thread, must not keep that from starting its own.
        with contextlib.nullcontext() if launch.runner.has_callbacks else self._lock:
            begin = time.time_ns()
            results = function(*arguments)
            end = time.time_ns()
            if is_noted:
                self.launched.append(Launched(launch, function, begin, end, is_rehearsal))
                if not is_rehearsal:
                    self._noted.add(launch)
                arrays = [leaf for leaf in jax.tree.leaves(results) if isinstance(leaf, jax.Array)]
                self._last[launch.devices, launch.name] = [weakref.ref(array) for array in arrays]
            return results

    def _has_room(self, launch: Launch) -> bool:
        """Whether a program is to be noted."""
        place = self.find(launch.runner)
        if place is None:
            raise RuntimeError("A runner has to be introduced before it runs.")
        size = self.introduced[place].shares.count(launch)
        if self.num_dropped or self.num_actions + size > self._max_actions:
            if not self.num_dropped:
                self._full_at = time.time_ns()
                self._on_full()
            self.num_dropped += size
            return False
        self.num_actions += size
        return True

    def moved(self, launch: Launch, target: Sequence[Any], arrays: Sequence[Any]) -> None:
        """See `engine.watching.Watcher`."""
        if launch in self._noted:
            num_bytes = sum(array.nbytes for array in arrays)
            self.moved_arrays += [Moved(launch, device.id, num_bytes, time.time_ns()) for device in target]

    @contextlib.contextmanager
    def waiting(self, step: int, first: int, count: int) -> Iterator[None]:
        """See `engine.watching.Watcher`."""
        del count
        begin = time.time_ns()
        try:
            yield
        finally:
            if not self.is_full and not self._rehearses:
                self.host.append(HostTime(EventKind.INFEED_WAIT, begin, time.time_ns(), step, first))

    def outfed(self, begin: int, end: int, num_bytes: int) -> None:
        """See `engine.watching.Watcher`."""
        if self.launched and not self.is_full:
            self.host.append(HostTime(EventKind.OUTFEED, begin, end, num_bytes=num_bytes))

    def spanned(self, name: str, begin: int, end: int) -> None:
        """See `engine.watching.Watcher`. A span that outlasts the recording is noted up to its end."""
        end = end if self._full_at is None else min(end, self._full_at)
        if self.launched and begin <= end:
            self.host.append(HostTime(EventKind.SPAN, begin, end, name=name))

    def forget(self) -> None:
        """Releases everything."""
        with self._lock:
            self.introduced, self.launched, self.moved_arrays, self.host = [], [], [], []
            self._noted, self._rehearsed, self._last = set(), set(), {}

    def wait(self) -> None:
        """Waits until the started programs have run, as far as their results are still held."""
        with self._lock:
            arrays = [reference() for references in self._last.values() for reference in references]
        for array in arrays:
            if array is not None and not array.is_deleted():
                with contextlib.suppress(Exception):  # the error is raised where its results are read
                    jax.block_until_ready(array)
