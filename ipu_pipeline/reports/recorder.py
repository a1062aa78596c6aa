"""Records the programs that the host starts, what it waits for, and what shares actions have."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from ipu_pipeline.engine import Pipeline
from ipu_pipeline.engine.inspect import Launch, LaunchKind, PipelineDetails, find_facts
from ipu_pipeline.engine.planning import measure_costs
from ipu_pipeline.engine.schedules import Costs
from ipu_pipeline.reports.profile import REHEARSAL, Event, EventKind

# Shares. A program may hold several actions: the last stage's forward and backward, the micro-batches of a
# chunk, or all of a block on one device. XLA does not say where one ends and the next begins, and marks
# within a program would change what XLA makes of it, so its time is divided in proportion to the actions'
# estimated operations (`engine/jaxprs/costs`).

_PER_TRAINED = 10.0  # operations of a weight update per element, counted as elementwise functions


class _Part(NamedTuple):
    """An action, and its cost relative to the others of its program."""

    kind: EventKind
    stage: int | None
    micro_batch: int | None
    step: int
    weight: float


@dataclass(frozen=True)
class Shares:
    """The costs of the actions of a pipeline's programs.

    Attributes:
      facts: the pipeline.
    """

    facts: PipelineDetails

    @property
    def update(self) -> float:
        """The operations of a weight update, if one program does everything."""
        return max(_PER_TRAINED * self.facts.num_trained, 1.0)

    def divide(
        self, launch: Launch, ipu: int, pipeline: int, program: int, begin: float, end: float
    ) -> Iterator[Event]:
        """The events of a program's run."""
        parts = self._parts(launch)
        total = math.fsum(part.weight for part in parts)
        reached = 0.0
        for part in parts:
            first = begin + (end - begin) * (reached / total)
            reached += part.weight
            yield Event(
                part.kind,
                first,
                begin + (end - begin) * min(1.0, reached / total),
                ipu,
                pipeline,
                part.stage,
                None if part.micro_batch is None else self.facts.element(part.micro_batch, ipu),
                part.step,
                program=program,
                is_shared=len(parts) > 1,
            )

    def count(self, launch: Launch) -> int:
        """The number of actions of a program."""
        return len(self._parts(launch))

    def _parts(self, launch: Launch) -> list[_Part]:
        numbers = range(launch.first, launch.first + launch.count)
        if launch.kind == LaunchKind.UPDATE:
            return [_Part(EventKind.UPDATE, None, None, launch.step, 1.0)]
        if launch.kind == LaunchKind.BLOCK:
            return list(self._block(launch))
        stage = launch.stage
        if launch.kind == LaunchKind.FORWARD:
            return [part for number in numbers for part in self._forward(stage, number, launch.step)]
        return [_Part(EventKind(launch.kind), stage, number, launch.step, 1.0) for number in numbers]

    def _forward(self, stage: int, number: int, step: int) -> Iterator[_Part]:
        """The actions of a stage's forward program for a micro-batch."""
        facts = self.facts.stages[stage]
        yield _Part(EventKind.FORWARD, stage, number, step, facts.forward_operations)
        if facts.is_fused and facts.is_halved:
            first = facts.backward_operations - facts.weight_operations
            yield _Part(EventKind.INPUT_GRADIENTS, stage, number, step, first)
        elif facts.is_fused:
            yield _Part(EventKind.BACKWARD, stage, number, step, facts.backward_operations)

    def _block(self, launch: Launch) -> Iterator[_Part]:
        stages, size = self.facts.stages, self.facts.num_serialized
        for begin in range(0, launch.count, size):
            places = range(begin, min(begin + size, launch.count))
            named = [self._name(launch, place) for place in places]
            for stage in stages:
                for number, step in named:
                    yield from self._forward(stage.index, number, step)
            for stage in reversed(stages):
                weight = 0.0 if stage.is_fused else stage.backward_operations
                if weight:
                    for number, step in named:
                        yield _Part(EventKind.BACKWARD, stage.index, number, step, weight)
            if launch.updates and (launch.accumulated + places[-1] + 1) % launch.every == 0:
                yield _Part(EventKind.UPDATE, None, None, named[-1][1], self.update)

    def _name(self, launch: Launch, place: int) -> tuple[int, int]:
        """The number of a block's micro-batch, and its step."""
        if self.facts.kind == "loop":
            return launch.first + place, launch.step
        step, number = divmod(launch.accumulated + place, launch.every)
        return number, launch.step + step


# The recorder, and what it notes.


@dataclass(frozen=True, eq=False)
class LaunchedProgram:
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
class SentData:
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
class HostWork:
    """The host's own work; attributes are as in `Event`, times in nanoseconds since the epoch."""

    kind: EventKind
    begin: int
    end: int
    step: int | None = None
    micro_batch: int | None = None
    num_bytes: int = 0
    name: str = ""


@dataclass(frozen=True)
class IntroducedRunner:
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
    """Measures what programs of a `Pipeline` or `Loop` take alone; None where that is not possible."""
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
        self.introduced: list[IntroducedRunner] = []
        self.launched: list[LaunchedProgram] = []
        self.moved_arrays: list[SentData] = []
        self.host: list[HostWork] = []
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
                self.introduced.append(IntroducedRunner(runner, owner, name, facts))
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
        places = (place for place, record in enumerate(self.introduced) if record.runner is runner)
        return next(places, None)

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
                self.launched.append(LaunchedProgram(launch, function, begin, end, is_rehearsal))
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
            self.moved_arrays += [
                SentData(launch, device.id, num_bytes, time.time_ns()) for device in target
            ]

    @contextlib.contextmanager
    def waiting(self, step: int, first: int, count: int) -> Iterator[None]:
        """See `engine.watching.Watcher`."""
        del count
        begin = time.time_ns()
        try:
            yield
        finally:
            if not self.is_full and not self._rehearses:
                self.host.append(HostWork(EventKind.INFEED_WAIT, begin, time.time_ns(), step, first))

    def outfed(self, begin: int, end: int, num_bytes: int) -> None:
        """See `engine.watching.Watcher`."""
        if self.launched and not self.is_full:
            self.host.append(HostWork(EventKind.OUTFEED, begin, end, num_bytes=num_bytes))

    def spanned(self, name: str, begin: int, end: int) -> None:
        """See `engine.watching.Watcher`. A span that outlasts the recording is noted up to its end."""
        end = end if self._full_at is None else min(end, self._full_at)
        if self.launched and begin <= end:
            self.host.append(HostWork(EventKind.SPAN, begin, end, name=name))

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
