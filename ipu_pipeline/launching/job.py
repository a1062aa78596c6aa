"""A job: its processes are started, and all of them again after a failure, until it is over."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import textwrap
import time
from collections.abc import Iterator

from ipu_pipeline.launching.causes import Cause, Restarts
from ipu_pipeline.launching.group import FORWARDED, Group, Settings
from ipu_pipeline.launching.shown import say
from ipu_pipeline.processes.job_history import Failure, JobHistory

__all__ = ["Job"]

_LOOK = 0.05  # seconds between two looks whether a signal has come
_LONGEST_CAUSE = 100  # characters


class Job:
    """Runs a job's processes, from the first start to the last."""

    def __init__(self, settings: Settings, restarts: Restarts) -> None:
        """Starts nothing yet."""
        self._settings = settings
        self._restarts = restarts
        self._history = JobHistory(time.time())
        self._furthest: dict[str, int] = {}  # as of `Progress`, in all starts
        self._useful = 0.0  # as of `Progress`
        self._failure: tuple[float, str] | None = None  # after which no run is done: when, and what
        self._group: Group | None = None  # while processes run
        self._signal = 0  # the first one that asked this launcher to end

    def run(self) -> int:
        """Runs the job. Returns the status."""
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, lambda number, _frame: self._end_by(number))
        status = None
        while status is None:
            status = self._run_once()
        if told := self._history.describe_goodput(self._useful):
            say(told)
        return status

    def _run_once(self) -> int | None:
        """Runs the processes until all have ended. Returns the job's status; None: all start again."""
        begun = time.monotonic()
        with _blocked_signals():  # one that comes while processes are being started is for them too
            if self._signal:
                return 128 + self._signal
            self._history = dataclasses.replace(self._history, num_restarts=self._restarts.count)
            self._write_history()
            group = self._group = Group(self._settings, self._restarts.count, self._note_progress)
        try:
            group.follow()
        finally:
            self._group = None
            group.kill()
        self._useful = max(self._useful, group.progress.useful)
        return 0 if group.cause is None else self._decide(group, group.cause, time.monotonic() - begun)

    def _decide(self, group: Group, cause: Cause, seconds: float) -> int | None:
        """Returns the job's status after a failure, or waits until it is time for another start."""
        self._failure = group.failed_at, textwrap.shorten(str(cause), _LONGEST_CAUSE, placeholder=" ...")
        furthest = group.progress.furthest
        has_progressed = any(step > self._furthest.get(name, -1) for name, step in furthest.items())
        for name, step in furthest.items():
            self._furthest[name] = max(step, self._furthest.get(name, -1))
        if self._signal:
            return cause.status
        delay = self._restarts.after(cause, seconds, has_progressed)
        if delay is None:
            if count := self._restarts.count:
                say(f"given up after {count} restart{'s' * (count > 1)}.")
            return cause.status
        say(f"{self._restarts.describe(cause)}, {f'in {delay:g} s' if delay else 'at once'}.")
        # Not with an Event: where a signal's handler sets it, the main thread may have its lock.
        end = time.monotonic() + delay
        while time.monotonic() < end and not self._signal:
            time.sleep(_LOOK)
        return None

    def _note_progress(self, run: int, step: int, num_redone: int | None) -> None:
        """Says and writes that training has gone on after a failure."""
        if self._failure is not None:
            (at, what), self._failure = self._failure, None
            failure = Failure(what, at, run, step, num_redone, time.time() - at)
            self._history = self._history.after(failure)
            self._write_history()
            say(f"{failure}.")

    def _write_history(self) -> None:
        if self._settings.memory is not None:
            self._history.write(self._settings.memory)

    def _end_by(self, number: int) -> None:
        """Ends the processes, and then this launcher, by a signal."""
        self._signal = self._signal or number
        if self._group is not None:
            self._group.ask_to_end(number)


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """Lets the signals that are forwarded wait, for a `with` block."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
