"""Says what this process is running, for `ipu-pipeline monitor`.

Code that runs a pipeline or loop counts what is done, which takes a microsecond and writes nothing. A
thread looks at the counts once a second, and writes them if they have changed; no other thread touches a
disk, so that a slow one delays no run. None of this raises: if the disk is full or the directory cannot be
written, it tries again a minute later. IPU_PIPELINE_ANNOUNCE=0 turns it off.

Signals may interrupt counting at any place, so counting holds no lock.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import jax

from ipu_pipeline.engine import Pipeline
from ipu_pipeline.engine.inspect import IpuMemory, Runner
from ipu_pipeline.engine.planning import plan_memory
from ipu_pipeline.engine.processes import is_here
from ipu_pipeline.processes import board, interrupts, launcher
from ipu_pipeline.processes.launcher import JobHistory

SWITCH_VARIABLE = "IPU_PIPELINE_ANNOUNCE"
_INTERVAL = 1.0  # the least seconds between two writes
_AFTER_ERROR = 60.0  # seconds
_WINDOW = 10.0  # seconds over which a speed is measured
_PAUSE = 2.0  # seconds between runs that are announced as one
_MAX_RUNS = 16  # runs that are announced

_logger = logging.getLogger("ipu_pipeline")


class Run:
    """A pipeline or loop that has been run, and may run again; a context manager around its runs."""

    def __init__(self, name: str, model: Pipeline, devices: Sequence[Any], count: int) -> None:
        """Takes what does not change; see `running`."""
        self._size = 1 + max(model.device_mapping)  # devices of each replica
        starts = range(0, self._size * model.num_replicas, self._size)
        ipus = {start + ipu for start in starts for ipu in model.device_mapping}
        self._facts = {
            "name": name,
            "trains": model.built.updates is not None,
            "unit": "iteration" if model.iterated is not None else "micro-batch",
            "batch_size": _find_batch_size(model),
            "process": jax.process_index(),
            "num_processes": jax.process_count(),
        }
        self._ipus = [
            (ipu, devices[ipu].id, devices[ipu].platform, devices[ipu].device_kind)
            for ipu in sorted(ipus)
            if is_here(devices[ipu])
        ]
        self._planned: dict[int, int] | None = None
        self._plan: Callable[[Runner[Any]], Sequence[IpuMemory]] = _make_plan(weakref.ref(model), count)
        self.runner: weakref.ref[Runner[Any]] | None = None
        self.is_running = False
        self.since = time.time()
        self.count = 0
        self.handled = 0
        self._next = 0.0
        self._ended = -_PAUSE
        self._points: tuple[tuple[float, int], ...] = ()  # times, and how much had been handled by then

    def __enter__(self) -> Run:
        """Begins a run."""
        now = time.monotonic()
        if now - self._ended > _PAUSE:
            self.since = time.time()
        if self._points and now - self._points[-1][0] > _WINDOW:
            self._points = ()  # what was handled long ago says nothing about the speed
        self.is_running = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends a run."""
        now = time.monotonic()
        if now < self._next and len(self._points) > 1:
            self._points = (*self._points[:-1], (now, self.handled))
        else:
            self._note(now)
        self._ended, self.is_running = now, False

    def done(self, handled: int, count: int | None = None) -> None:
        """Counts what was handled since the last call; `count` is the sum that is announced."""
        self.handled += handled
        self.count = self.handled if count is None else count
        now = time.monotonic()
        if now >= self._next:
            self._note(now)

    def _note(self, now: float) -> None:
        self._next = now + 0.5
        recent = [point for point in self._points if now - point[0] <= _WINDOW]
        # Slow runs need the last but one point, however old it is.
        self._points = (*(recent or self._points[-1:]), (now, self.handled))

    def is_known(self) -> bool:
        """Whether the pipeline or loop still exists."""
        return self.runner is not None and self.runner() is not None

    def describe(self) -> dict[str, Any]:
        """Describes the run as it is announced."""
        now, planned = time.monotonic(), self._find_planned()
        is_waiting = not self.is_running and now - self._ended > _PAUSE
        return {
            **self._facts,
            "state": "waiting" if is_waiting else "running",
            "since": self.since,
            "count": self.count,
            "handled": self.handled,
            "rate": None if is_waiting else self._find_rate(now),
            "ipus": [
                {
                    "ipu": ipu,
                    "device": number,
                    "platform": platform,
                    "kind": kind,
                    "planned_bytes": planned.get(ipu % self._size),
                }
                for ipu, number, platform, kind in self._ipus
            ],
        }

    def _find_rate(self, now: float) -> float | None:
        """The number handled per second; None if too little is known, or if nothing was done for long."""
        points = self._points
        if len(points) < 2 or points[-1][1] == points[0][1]:
            return None
        seconds = points[-1][0] - points[0][0]
        if now - points[-1][0] > max(_WINDOW, 3 * seconds / (len(points) - 1)):
            return None
        return (points[-1][1] - points[0][1]) / seconds

    def _find_planned(self) -> dict[int, int]:
        """Finds how many bytes each IPU takes, once the programs' memory is known."""
        if self._planned is None and self.handled and self.runner is not None:
            runner = self.runner()
            self._planned = {}
            if runner is not None:
                try:
                    self._planned = {memory.ipu: memory.num_device_bytes for memory in self._plan(runner)}
                except Exception:  # while it is read, another thread may be about to change the pipeline
                    _logger.debug("What a pipeline takes is not announced.", exc_info=True)
        return self._planned or {}


class _Unannounced(Run):
    """Counts nothing."""

    def __init__(self) -> None:
        pass

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def done(self, handled: int, count: int | None = None) -> None:
        del handled, count


_unannounced = _Unannounced()


class _Announcer:
    """The runs of this process, and the thread that writes them."""

    def __init__(self) -> None:
        self.runs: dict[tuple[int, str, bool], Run] = {}
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._has_ended = threading.Event()

    def start(self) -> None:
        """Starts the thread, the first time."""
        if self._thread is None:
            with interrupts.deferred(), self._starting:  # signals wait: they must leave no lock behind
                self._start_once()

    def _start_once(self) -> None:
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._work, name="ipu-announcing", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there are too many, or Python is about to end
            return
        self._thread = thread
        atexit.register(self._end)

    def _end(self) -> None:
        """Removes what this process has announced. Does not wait long for a disk."""
        if self is not _announcer or self._thread is None:  # the parent's, in a fork
            return
        self._has_ended.set()
        self._thread.join(timeout=1)

    def _work(self) -> None:
        process, last_content, started = board.this_process(), None, time.time()
        if process is None:
            return
        with contextlib.suppress(OSError):
            board.read_all()  # this removes what ended processes left
        delay = 0.0
        while not self._has_ended.wait(delay):
            delay = _INTERVAL
            try:
                live_runs = [run for run in list(self.runs.values()) if run.is_known()]
                runs = [run.describe() for run in live_runs]
                content = {"program": _program(), "started": started, "runs": runs, "job": _describe_job()}
                if content != last_content:
                    board.write(process, {**content, "written": time.time()})
                    last_content = content
            except Exception:
                _logger.debug("What runs is not announced.", exc_info=True)
                delay = _AFTER_ERROR
        board.remove(process)


_announcer = _Announcer()


def _begin_anew() -> None:
    """Forgets in a forked process what its parent runs."""
    global _announcer
    _announcer = _Announcer()


os.register_at_fork(after_in_child=_begin_anew)


def running(
    owner: object,
    name: str,
    model: Pipeline,
    runner: Runner[Any],
    devices: Sequence[Any],
    count: int,
) -> contextlib.AbstractContextManager[Run]:
    """Announces that a pipeline or loop runs, for a `with` block."""
    devices = devices[:: model.options.num_devices_per_ipu]  # the first of each stage's
    launcher.tell_results(devices[model.device_mapping[-1]].process_index)
    if os.environ.get(SWITCH_VARIABLE) == "0":
        return _unannounced
    announcer, key = _announcer, (id(owner), name, model.built.updates is not None)
    run = announcer.runs.get(key)
    if run is None or run.runner is None or run.runner() is not runner:
        before = run
        run = Run(name, model, devices, count)
        run.runner = weakref.ref(runner)
        if before is not None:  # compiled anew, for other devices or with recomputation
            run.count, run.handled = before.count, before.handled
        waiting = [key for key, waiting_run in announcer.runs.items() if not waiting_run.is_running]
        for old_key in waiting[: 1 - _MAX_RUNS]:
            announcer.runs.pop(old_key, None)
        announcer.runs[key] = run
    announcer.start()
    return run


def _describe_job() -> dict[str, Any] | None:
    """Describes the job of this process; None without a launcher that starts it again."""
    history = JobHistory.of_environment()
    if history is None:
        return None
    goodput = history.goodput(launcher.useful_seconds())
    return {
        "begun": history.begun,
        "restarts": history.num_restarts,
        "failures": [dataclasses.asdict(failure) for failure in history.failures],
        "goodput": None if goodput is None else round(goodput, 2),
    }


def _program() -> str:
    """The program's file, as it was started."""
    return (sys.argv[0] if getattr(sys, "argv", None) else "") or "python"


def _find_batch_size(model: Pipeline) -> int | None:
    """The number of samples of a micro-batch: the first size of all that is fed; None if there is none."""
    carried = () if model.iterated is None else model.iterated.carried
    leaves = jax.tree.leaves(model.traced.element)[len(carried) :]
    sizes = {leaf.shape[0] for leaf in leaves if leaf.shape}
    return sizes.pop() if len(sizes) == 1 else None


def _make_plan(model_of: weakref.ref[Pipeline], count: int) -> Callable[[Runner[Any]], Sequence[IpuMemory]]:
    def plan(runner: Runner[Any]) -> Sequence[IpuMemory]:
        model = model_of()
        if model is None:
            return ()
        stages = plan_memory(model, count)
        return runner.plan_memory(
            model.built.accumulator_dtypes, stages, count * model.options.num_serialized
        )

    return plan
