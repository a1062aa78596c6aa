"""Says of a step that has not ended for a minute which stage waits for what.

A thread looks at the steps on their way a few times a minute. It starts with a step, and ends when it finds
none, so none stays behind. A step is known by its results, which are not kept alive.
"""

from __future__ import annotations

import atexit
import collections
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ipu_pipeline.engine import peers, progress
from ipu_pipeline.engine.devices.feeds import Supply
from ipu_pipeline.engine.state import PipelineState, StepOutputs
from ipu_pipeline.engine.tracing.faults import find_line_of
from ipu_pipeline.engine.tracing.traced import TracedPipeline

__all__ = ["StepOnItsWay", "watch"]

_logger = logging.getLogger("ipu_pipeline")
_SECONDS = 60.0  # after which a step is told
_MOST = 256  # steps that are watched at once


class StepOnItsWay:
    """A step that has begun.

    Attributes:
      begun: when it began, by `time.monotonic`; later, when the one before had ended.
      is_told: whether it has been told of.
    """

    def __init__(
        self, describe_start: Callable[[Sequence[str]], str], traced: TracedPipeline, supply: Supply
    ) -> None:
        """Begins it."""
        self.begun, self.is_told = time.monotonic(), False
        self._describe_start, self._traced, self._supply = describe_start, traced, supply
        self._made: tuple[weakref.ref[PipelineState], weakref.ref[StepOutputs]] | None = None
        self._has_failed = False

    def failed(self) -> None:
        """Notes that it has ended in an error."""
        self._has_failed = True

    def started(self, state: PipelineState, outputs: StepOutputs) -> None:
        """Notes what the step makes, once the host has started all of it."""
        self._made = weakref.ref(state), weakref.ref(outputs)

    def is_done(self) -> bool:
        """Whether the devices have made the new state, or nobody has it any more."""
        if self._made is None:
            return self._has_failed
        state = self._made[0]()
        return state is None or all(map(_is_ready, state.variables.values()))

    def describe(self) -> str:
        """What it waits for, a line each."""
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
        others = peers.current()
        if others is not None and others.waits_at is not None:
            lines.append(f"This process waits for others: {others.waits_at}.")
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


def watch(step: StepOnItsWay) -> None:
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
