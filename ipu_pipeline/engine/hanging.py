"""Says of a step that has not ended for a minute which stage waits for what.

A thread looks at the steps on their way a few times a minute. It starts with a step, and ends when it finds
none, so none stays behind. A step is known by its results, which are not kept alive.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ipu_pipeline.engine import peers, progress
from ipu_pipeline.engine.execution.starting import Starting
from ipu_pipeline.engine.tracing.faults import find_line_of
from ipu_pipeline.engine.tracing.traced import TracedPipeline

__all__ = ["StepOnItsWay", "watching_step"]

_logger = logging.getLogger("ipu_pipeline")
_SECONDS = 60.0  # after which a step is told
_MOST = 256  # steps that are watched at once; the oldest one shows what hangs


class StepOnItsWay:
    """A step that has begun.

    Attributes:
      waits_for: what the host waits for now; empty if nothing.
    """

    def __init__(self, starting: Starting, traced: TracedPipeline) -> None:
        """Begins it. `starting` says which program the host starts."""
        self.waits_for = ""
        self.begun = time.monotonic()
        self.is_told = False
        self._starting, self._traced = starting, traced
        self._variables: dict[str, Any] | None = None  # full name -> weak reference
        self._losses: list[Any] = []

    def started(self, variables: Mapping[str, Any], losses: Sequence[Any]) -> None:
        """Notes what the step makes, once the host has started all of it."""
        self._losses = [weakref.ref(loss) for loss in losses if loss is not None]
        self._variables = {name: weakref.ref(value) for name, value in variables.items()}

    def is_done(self) -> bool:
        """Whether the devices have made it, or nobody has it any more."""
        variables = self._variables
        return variables is not None and all(map(_is_ready, (*variables.values(), *self._losses)))

    def describe(self) -> str:
        """What it waits for, a line each."""
        lines = [f"A step of a pipeline has not ended after {_SECONDS:.0f} s."]
        places, variables = [stage.place for stage in self._traced.stages], self._variables
        if self.waits_for:
            lines.append(f"The host waits for {self.waits_for}.")
        elif variables is None:
            program = self._starting.describe(places) or f"the program of {', '.join(places)}"
            lines.append(f"The host has not started all of it; the last it came to is {program}.")
        else:
            number = next((n for n, loss in enumerate(self._losses) if not _is_ready(loss)), None)
            if number is not None and len(self._losses) > 1:
                lines.append(f"The first loss that has not come is number {number}.")
            late = [name for name, value in variables.items() if not _is_ready(value)]
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


def _is_ready(reference: Any) -> bool:
    array = reference()
    try:
        return array is None or bool(array.is_ready())
    except RuntimeError:  # it was deleted: a later step has taken its memory
        return True


_lock = threading.Lock()
_steps: collections.deque[StepOnItsWay] = collections.deque()
_thread: threading.Thread | None = None
_woken = threading.Event()  # set by who does not want to wait for the next look


@contextlib.contextmanager
def watching_step(starting: Starting, traced: TracedPipeline) -> Iterator[StepOnItsWay]:
    """Watches the step that is started inside the `with` block, until it has ended."""
    global _thread
    step = StepOnItsWay(starting, traced)
    with _lock:
        while len(_steps) >= _MOST and _steps[0].is_done():
            _steps.popleft()
        if len(_steps) < _MOST:
            _steps.append(step)
        if _thread is None or not _thread.is_alive():  # it does not go along with a fork
            _thread = threading.Thread(target=_look, name="ipu_pipeline step watch", daemon=True)
            _thread.start()
    try:
        yield step
    except BaseException:
        step.started({}, [])
        raise


def _look() -> None:
    """Looks at the steps on their way until there are none."""
    global _thread
    while True:
        _woken.wait(_SECONDS / 4)
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
