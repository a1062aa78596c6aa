"""Observation of running steps: programs for a watcher, bytes that stages hold, stages that wait."""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine import peers, progress, watching
from ipu_pipeline.engine.devices.feeds import Supply, Take
from ipu_pipeline.engine.execution.contract import Request, Runner
from ipu_pipeline.engine.plan.lowering import Key
from ipu_pipeline.engine.plan.plan import Block, Numbered, Op, Plan, Registers, Value
from ipu_pipeline.engine.plan.run import Linked
from ipu_pipeline.engine.programs.stage_programs import Binding, BindingKind
from ipu_pipeline.engine.schedules.timetables import ActionKind
from ipu_pipeline.engine.state import PipelineState, StepOutputs
from ipu_pipeline.engine.tracing.faults import find_line_of
from ipu_pipeline.engine.tracing.stages import TracedPipeline
from ipu_pipeline.engine.watching import Watcher


def rehearse(watcher: Watcher, runner: Runner[Any], state: PipelineState, request: Request) -> None:
    """Waits for earlier steps before the first watched one; if there are none, runs each program once.

    The programs run on copies of the state and on micro-batches of zeros. What they make or raise is
    dropped. Nothing is run if a program calls Python, which would notice.
    """
    with watcher.rehearsing(runner) as is_first:
        if not is_first:
            return
        jax.block_until_ready((state.variables, state.optimizer_state))
        if runner.has_run or runner.has_callbacks:
            return
        num_carried = 0 if runner.iterated is None else len(runner.iterated.carried)
        fed = jax.tree.leaves(runner.placement.traced.element)[num_carried:]
        zeros = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in fed]  # random keys have one, too

        def take(number: int) -> list[Any]:
            return [runner.place_element(zeros) if zeros else () for _number in range(number)]

        with contextlib.suppress(Exception):  # such as jax_debug_nans, or too little memory
            copied = copy_state(state)
            after = runner.run(copied, runner.fetch(copied, request, take)).state
            jax.block_until_ready((after.variables, after.optimizer_state, after.accumulators))


def copy_state(state: PipelineState) -> PipelineState:
    """Copies a state's arrays, where they are."""
    leaves, tree = jax.tree.flatten((state.variables, state.optimizer_state, state.accumulators))
    copies = jax.device_put(leaves, [leaf.sharding for leaf in leaves], may_alias=False)
    variables, optimizer_state, accumulators = jax.tree.unflatten(tree, copies)
    return dataclasses.replace(
        state, variables=variables, optimizer_state=optimizer_state, accumulators=accumulators
    )


def watched_take(take: Take, step: int, first: int) -> Take:
    """Makes a take, of micro-batches from `first` on, tell a watcher how long it takes."""
    watcher = watching.current()
    if watcher is None:
        return take

    def watched(number: int) -> Sequence[Any]:
        nonlocal first
        with watcher.waiting(step, first, number):
            elements = take(number)
        first += len(elements)
        return elements

    return watched


# The bytes that stages hold of micro-batches in flight, measured from their buffers.


class HeldBytes:
    """Finds the most that each stage of a replica holds between forwards and backwards.

    Attributes:
      peaks: per stage, in bytes.
    """

    def __init__(self, replica: int, num_stages: int) -> None:
        """Begins before anything has run."""
        self.peaks = [0] * num_stages
        self._replica = replica
        # by stage and frame of a micro-batch in flight, what is held of it
        self._running: list[dict[Any, set[Value]]] = [{} for _stage in range(num_stages)]

    def find_held(self, blocks: dict[Key, Block], key: Key) -> set[Value]:
        """The values that a stage holds of a micro-batch once one of its programs has run."""
        kind, stage = key

        def read(later_kind: ActionKind) -> set[Value]:
            block = blocks.get((later_kind, stage))
            return set() if block is None else {v for v in _reads(block) if v.replica == self._replica}

        later = read(ActionKind.WEIGHT_GRADIENTS)
        if kind is ActionKind.INPUT_GRADIENTS:
            return later
        if kind is not ActionKind.FORWARD:
            return set()
        next_read = read(ActionKind.BACKWARD) | read(ActionKind.INPUT_GRADIENTS)
        if not next_read:
            return later
        # A cotangent comes from the stage behind, so until it is used it is sent, not held.
        return {value for value in next_read | later if value.what.kind is not BindingKind.COTANGENT}

    def look(
        self, key: Key, frame: Any, held_values: set[Value], find: Registers, registers: Sequence[Any]
    ) -> None:
        """Measures after a program and what follows it."""
        self._running[key[1]][frame] = held_values
        for stage, running in enumerate(self._running):
            unique: dict[int, int] = {}
            for running_frame, values in running.items():
                for value in values:
                    variants = [value._replace(is_away=is_away) for is_away in (True, False)]
                    places = [find.find(variant, running_frame) for variant in variants]
                    arrays = [registers[place] for place in places if place < len(registers)]
                    array = next((array for array in arrays if array is not None), None)
                    if array is not None and array.addressable_shards:
                        # With tensor parallelism, one device's part.
                        unique[id(array)] = array.addressable_shards[0].data.nbytes
            self.peaks[stage] = max(self.peaks[stage], sum(unique.values()))


def _reads(block: Block) -> list[Value]:
    """The values of a micro-batch that programs read, where they lie between programs."""
    return [
        value._replace(is_away=False, copy=0)
        for instruction in block.code
        if instruction.op in (Op.RUN, Op.JOIN, Op.LOAD)
        for value in instruction.reads
        if isinstance(value.what, Binding) and value.what.is_of_micro_batch
    ]


def with_measurements(
    plan: Plan,
    linked: Sequence[list[Linked]],
    memories: Sequence[HeldBytes],
    numbers: Registers,
    registers: Sequence[Any],
) -> list[list[Linked]]:
    """The blocks, each followed by a measurement of what stages hold."""
    of_scopes: dict[Any, dict[Key, Block]] = {}
    for block in dict.fromkeys(numbered.block for numbered in plan.blocks):
        if isinstance(block.name, tuple):
            of_scopes.setdefault(block.scope, {})[block.name] = block

    def look(numbered: Numbered) -> list[Linked]:
        block = numbered.block
        blocks = of_scopes[block.scope]
        values_of_replicas = [(memory, memory.find_held(blocks, block.name)) for memory in memories]

        def measure() -> tuple[()]:
            for memory, values in values_of_replicas:
                memory.look(block.name, numbered.frame, values, numbers, registers)
            return ()

        return [(measure, (), (), ())]

    looks = {
        numbered: look(numbered)
        for numbered in dict.fromkeys(plan.blocks)
        if isinstance(numbered.block.name, tuple)
    }
    return [[*code, *looks.get(numbered, ())] for numbered, code in zip(plan.blocks, linked, strict=True)]


class LiveBytes:
    """Measures the peak memory of each stage between forwards and backwards, in bytes.

    Attributes:
      by_replica: the peaks per replica and stage; 0 for a stage without its own backward, or of another
        process.
    """

    def __init__(self, runner: Runner[Any]) -> None:
        """Starts observing.

        Args:
          runner: the result of `Pipeline.prepare`. Its buffers are measured after each program.

        Raises:
          TypeError: it runs all stages as one program, on one device, which has no buffers between them.
        """
        self.by_replica = runner.observe_held()

    @property
    def peaks(self) -> list[int]:
        """The peak per stage, the largest of all replicas."""
        return [max(peaks) for peaks in zip(*self.by_replica, strict=True)]


# A step that has not ended for a minute is reported, with what it waits for. The thread that looks at the
# steps starts with one and ends when there are none, so that none stays behind.

_logger = logging.getLogger("ipu_pipeline")
_SECONDS = 60.0  # after which a step is reported
_MOST = 256  # steps that are watched at once


class StepOnItsWay:
    """A step that was dispatched and may not be complete. Its results are not kept alive.

    Attributes:
      begun: when it began, by `time.monotonic`; later, when the step before had ended.
      is_told: whether it has been reported.
    """

    def __init__(
        self, describe_start: Callable[[Sequence[str]], str], traced: TracedPipeline, supply: Supply
    ) -> None:
        """Starts the step's time."""
        self.begun, self.is_told = time.monotonic(), False
        self._describe_start, self._traced, self._supply = describe_start, traced, supply
        self._made: tuple[weakref.ref[PipelineState], weakref.ref[StepOutputs]] | None = None
        self._has_failed = False

    def failed(self) -> None:
        """Notes that the step has ended in an error."""
        self._has_failed = True

    def started(self, state: PipelineState, outputs: StepOutputs) -> None:
        """Notes what the step makes, once the host has started all of it."""
        self._made = weakref.ref(state), weakref.ref(outputs)

    def is_done(self) -> bool:
        """Whether the new state has been computed, or has been garbage-collected."""
        if self._made is None:
            return self._has_failed
        state = self._made[0]()
        return state is None or all(map(_is_ready, state.variables.values()))

    def describe(self) -> str:
        """Describes what the step waits for, in one text of several lines."""
        lines = [f"A step of a pipeline has not ended after {_SECONDS:.0f} s."]
        places = [stage.place for stage in self._traced.stages]
        state, outputs = (None, None) if self._made is None else (self._made[0](), self._made[1]())
        if self._supply.is_taking:
            lines.append(f"The host waits for micro-batch {self._supply.num_taken} of the data.")
        elif self._made is None:
            program = self._describe_start(places) or f"the program of {', '.join(places)}"
            lines.append(f"The host has not started all of it; the last it came to is {program}.")
        elif state is not None:
            losses = [] if outputs is None else [part.loss for part in outputs.collected]
            number = next((n for n, loss in enumerate(losses) if not _is_ready(loss)), None)
            if number is not None and len(losses) > 1:
                lines.append(f"The first loss that has not come is number {number}.")
            late = [name for name, value in state.variables.items() if not _is_ready(value)]
            waiting = ", ".join(places[n] for n in sorted({self._traced.owners[name] for name in late}))
            lines.append(f"All is started. Variables that have not come are of: {waiting or 'no stage'}.")
        peer_processes = peers.current()
        if peer_processes is not None and peer_processes.waits_at is not None:
            lines.append(f"This process waits for others: {peer_processes.waits_at}.")
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():  # noqa: SLF001  # documented, in spite of its name
            if ident != threading.get_ident() and (line := find_line_of(frame)):
                lines.append(f"Python is at {line} (thread {names.get(ident, ident)}).")
        return "\n  ".join(lines)


def _is_ready(array: Any) -> bool:
    try:
        return not hasattr(array, "is_ready") or bool(array.is_ready())
    except RuntimeError:  # it was deleted: a later step has taken its memory
        return True


_lock = threading.Lock()
_steps: collections.deque[StepOnItsWay] = collections.deque(maxlen=_MOST)
_thread: threading.Thread | None = None
_woken = threading.Event()  # set by who does not want to wait for the next look
_is_ending = threading.Event()


def watch_step(step: StepOnItsWay) -> None:
    """Watches a step from its begin until it has ended."""
    global _thread
    with _lock:
        _steps.append(step)
        if _is_ending.is_set():
            return
        if _thread is None or not _thread.is_alive():  # it does not go along with a fork
            _thread = threading.Thread(target=_look, name="ipu_pipeline step watch", daemon=True)
            _thread.start()


@atexit.register
def _end() -> None:
    """Ends the thread before Python ends: in a function of JAX it would then abort the process."""
    thread = _thread
    if thread is not None and thread.is_alive():  # it does not go along with a fork
        _is_ending.set()
        _woken.set()
        thread.join(timeout=1)


def _look() -> None:
    """Looks at the steps on their way until there are none."""
    global _thread
    while True:
        _woken.wait(_SECONDS / 4)
        if _is_ending.is_set():
            return
        now = time.monotonic()
        with _lock:
            while _steps and _steps[0].is_done():
                _steps.popleft()
                if _steps:
                    _steps[0].begun = now  # it may have waited for the one before
            if not _steps:
                _thread = None
                return
            oldest = _steps[0]
        if progress.is_compiling():
            oldest.begun = now
        elif now - oldest.begun >= _SECONDS and not oldest.is_told:
            oldest.is_told = True
            _logger.warning("%s", oldest.describe())
