"""Watches the other processes of a run, so that none waits for one that has died or does not go on.

Each process writes to JAX's store, twice a second, that it lives and how far it has come. A process has
died if it is gone from this machine, or has been silent for long. The processes have stopped if nothing was
started or finished anywhere for long, while one waits for another, no device is at work, and none does what
takes long (compiling). Then each says what it knows and ends: by a ProcessError where its program next
starts or awaits something, or after a few seconds as a whole, since a main thread that is stuck in XLA
hears nothing.

There are two threads: one talks with the store, and may be kept waiting if that is gone; the other judges.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import jax

from ipu_pipeline.engine.processes import Peers, current_log, may_come_from
from ipu_pipeline.processes import board
from ipu_pipeline.processes.interrupts import end_process
from ipu_pipeline.processes.launcher import hear_failures

_STATUSES = "ipu_pipeline/status"
_INTERVAL = 0.5  # the most seconds between two looks
_GLANCES = 5  # from look to look, at whether processes of this machine are gone
_GRACE = 10.0  # the most seconds that the program has to end by itself
_MORE_AT_WORK = 10  # a device may be at work this many times as long
_AFTER_END = 5.0  # seconds that a process may wait for data when all others have ended their programs
_LOOKS_AFTER_ERROR = 4  # until the process that caused an error of this one is found


@dataclass(frozen=True)
class Status:
    """The status that a process writes to the store."""

    beat: int = 0  # a number that rises as long as it lives
    finished: str | None = None  # the last action that it has finished; None if it has not finished any
    next: str | None = None  # the oldest that it has started and not finished; None if there is none
    lacks_data: bool = False  # whether that waits for another process
    number: int = 0  # rises with what is started and finished
    waits_at: str | None = None  # where its program waits for the others; None if it does not
    occupied_with: str | None = None  # what takes it a long time; None if nothing does
    # None while its program runs; "" once it has ended, an error if it ended by that
    end: str | None = None
    verdict: str | None = None  # why the run cannot go on, if it has found out; None otherwise
    pid: int = 0  # its pid; `start`, `boot` and `namespace` tell it from others with this pid
    start: int = 0  # as in `board.Process`
    boot: str = ""  # as in `board.Process`
    namespace: str = ""  # as in `board.Process`
    host: str = ""  # the name of its machine

    @property
    def waits(self) -> bool:
        """Whether it can do nothing until others have acted."""
        return self.end is None and (self.lacks_data or self.waits_at is not None)

    @property
    def is_at_work(self) -> bool:
        """Whether its devices have something to do, as far as it knows."""
        return self.end is None and self.next is not None and not self.lacks_data

    def describe(self) -> str:
        """Describes how far it has come, for people."""
        parts = [f"the last action finished is {self.finished or 'none'}"]
        if self.next is not None:
            parts.append(f"{self.next} {'waits for data' if self.lacks_data else 'is unfinished'}")
        if self.waits_at is not None:
            parts.append(f"the program waits for the others ({self.waits_at})")
        if self.occupied_with is not None:
            parts.append(f"the program is {self.occupied_with}")
        if self.end is not None:
            parts.append(f"the program has ended{' with ' + self.end if self.end else ''}")
        return "; ".join(parts)


class Judge:
    """Finds from the processes' statuses whether the run can go on. Has no threads; is told the time."""

    def __init__(self, index: int, count: int, silence: float, stall: float, most_step: float) -> None:
        """Begins without any reports."""
        self._index = index
        self._count = count
        self._silence = silence
        self._stall = stall
        self._most_step = most_step
        self._last_look: float | None = None
        # Seconds without the time in which this process was stopped, which then blames nobody.
        self._clock = 0.0
        self._answered_seconds = 0.0  # the last of these seconds in which the store answered
        self._beats: dict[int, tuple[int, float]] = {}
        self._last_counts: tuple[tuple[Any, ...], float] = ((), 0.0)
        self._last_answer = 0.0

    def judge(
        self, statuses: dict[int, Status], now: float, is_answered: bool, dead: Mapping[int, str]
    ) -> str | None:
        """Finds why the run cannot go on; None if it can. `dead` says how others' deaths were seen."""
        step = 0.0 if self._last_look is None else min(now - self._last_look, self._most_step)
        self._last_look = now
        self._clock += step
        self._answered_seconds += step if is_answered else 0.0
        for process, status in statuses.items():
            if self._beats.get(process, (-1, 0.0))[0] != status.beat:
                self._beats[process] = (status.beat, self._answered_seconds)
        for process, status in statuses.items():
            if process != self._index and status.verdict is not None:
                return status.verdict
        reason = (
            self._find_dead(statuses, dead) or self._find_failed(statuses) or self._find_stall(statuses)
        )
        if is_answered:
            self._last_answer = self._clock
        elif reason is None and self._clock - self._last_answer > self._silence:
            reason = (
                f"The coordinator, which process 0 started, has not answered for {self._silence:.0f} s."
            )
        return None if reason is None else f"{reason}{self.describe(statuses)}"

    def describe(self, statuses: dict[int, Status]) -> str:
        """Describes how far each process has come, a line for each."""
        lines = []
        for process in range(self._count):
            status = statuses.get(process)
            lines.append(
                f"\n  process {process}: {'has told nothing yet' if status is None else status.describe()}"
            )
        return "".join(lines)

    def _find_dead(self, statuses: dict[int, Status], dead: Mapping[int, str]) -> str | None:
        for process, (_beat, beat_seconds) in sorted(self._beats.items()):
            status, seconds = statuses[process], self._answered_seconds - beat_seconds
            if process == self._index or status.end is not None:
                continue
            name = f"Process {process} (pid {status.pid} on {status.host})"
            if process in dead:
                return f"{name} has died: it {dead[process]}."
            if seconds > self._silence:
                return f"{name} has died or was stopped: no sign of it for {seconds:.0f} s (death_timeout)."
        return None

    def _find_failed(self, statuses: dict[int, Status]) -> str | None:
        for process, status in sorted(statuses.items()):
            if process != self._index and status.end:
                return f"Process {process} (pid {status.pid} on {status.host}) has ended with {status.end}."
        return None

    def _find_stall(self, statuses: dict[int, Status]) -> str | None:
        counts = tuple(
            (p, s.number, s.waits_at, s.end, s.occupied_with) for p, s in sorted(statuses.items())
        )
        if counts != self._last_counts[0]:
            self._last_counts = (counts, self._answered_seconds)
        seconds = self._answered_seconds - self._last_counts[1]
        waiting = [process for process, status in statuses.items() if status.waits]
        if not waiting or any(s.occupied_with is not None and s.end is None for s in statuses.values()):
            return None
        limit = self._stall
        if any(status.is_at_work for status in statuses.values()):
            limit *= _MORE_AT_WORK
        behind = [process for process, status in sorted(statuses.items()) if not status.waits]
        if behind and all(statuses[process].end is not None for process in behind):
            limit = min(limit, _AFTER_END)
        if seconds <= limit or len(statuses) < self._count:
            return None
        alive = [process for process in behind if statuses[process].end is None]
        if alive:
            culprits = f"{_name(alive)} {'does' if len(alive) == 1 else 'do'} not go on"
        elif behind:
            culprits = f"{_name(behind)} {'has' if len(behind) == 1 else 'have'} ended"
        else:
            culprits = "they wait for each other"
        since = f"Nothing was done for {seconds:.0f} s (stall_timeout)"
        return f"{since}: {culprits}, and {_name(waiting)} cannot."


def _name(processes: Sequence[int]) -> str:
    return f"process{'es' * (len(processes) > 1)} {', '.join(map(str, processes))}"


def _may_come_from_others(error: BaseException | None) -> bool:
    """Whether an error may be a consequence of another process's end."""
    while error is not None:
        if may_come_from(error):
            return True
        error = error.__cause__ or error.__context__
    return False


class PeerWatch:
    """Runs the threads that watch the other processes, and says why when this one ends."""

    def __init__(self, peers: Peers, death_timeout: float, stall_timeout: float) -> None:
        """Starts no threads yet."""
        self._peers = peers
        self._interval = min(_INTERVAL, death_timeout / 10)
        self._grace = min(_GRACE, death_timeout / 6)
        silence = death_timeout - self._grace - 2 * self._interval
        self._judge = Judge(peers.index, peers.count, silence, stall_timeout, 2 * self._interval)
        this_process = board.this_process()
        facts = {} if this_process is None else dataclasses.asdict(this_process)
        self._status = dataclasses.replace(Status(pid=os.getpid()), **facts)
        self._statuses: dict[int, Status] = {}
        self._query_time = 0.0  # when the statuses were asked for
        self._gone: dict[int, float] = {}  # process that is gone -> since when this is known
        self._num_answers = 0
        self._lock = threading.Lock()
        self._looking = threading.Condition()
        self._num_looks = 0
        self._end: str | None = None
        self._is_over = threading.Event()
        self._is_urgent = threading.Event()  # whether the store is to be asked at once
        self._threads = [
            threading.Thread(target=self._tell_and_hear, name="ipu-peers", daemon=True),
            threading.Thread(target=self._look, name="ipu-peer-watch", daemon=True),
        ]
        self._former_hook = sys.excepthook

    def start(self) -> None:
        """Begins to watch, until the process ends."""
        for thread in self._threads:
            thread.start()
        sys.excepthook = self._note_exception
        atexit.register(self._leave, os.getpid())

    # The thread that talks.

    def _tell_and_hear(self) -> None:
        while not self._is_over.is_set():
            self._is_urgent.clear()
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # this is tried again; the judge decides
                self._tell()
                self._hear()
            if self._num_answers:
                self._is_urgent.wait(self._interval)

    def _tell(self) -> None:
        log = current_log()
        with self._lock:
            standing = None if log is None else log.standing()
            self._status = dataclasses.replace(
                self._status,
                beat=self._status.beat + 1,
                waits_at=self._peers.waits_at,
                occupied_with=next(iter(list(self._peers.occupied.values())), None),
                end=self._end,
                verdict=self._peers.failure,
                **({} if standing is None else standing._asdict()),
            )
            text = json.dumps(dataclasses.asdict(self._status))
        self._peers.store.key_value_set(f"{_STATUSES}/{self._peers.index}", text, True)

    def _hear(self) -> None:
        query_time = time.monotonic()
        entries = self._peers.store.key_value_dir_get(f"{_STATUSES}/")
        statuses = {int(key.rpartition("/")[2]): Status(**json.loads(text)) for key, text in entries}
        with self._lock:
            self._statuses, self._query_time = statuses, query_time
            self._num_answers += 1

    # The thread that judges.

    def _look(self) -> None:
        last_answers = num_glances = 0
        while not self._is_over.wait(self._interval / _GLANCES):
            with self._lock:
                statuses, answers, query_time = self._statuses, self._num_answers, self._query_time
            now, gone = time.monotonic(), {**self._find_gone(statuses), **hear_failures()}
            gone.pop(self._peers.index, None)
            dead = self._find_silent(gone, query_time, now)
            num_glances += 1
            if not dead and num_glances % _GLANCES:
                continue
            reason = self._judge.judge(statuses, now, answers != last_answers, dead)
            last_answers = answers
            if reason is not None and self._end is None:
                self._peers.fail(reason)
            with self._looking:
                self._num_looks += 1
                self._looking.notify_all()
            if self._peers.failure is not None and self._end is None:
                self._is_urgent.set()  # the others are told
                if not self._is_over.wait(self._grace) and self._end is None:
                    self._end_process(self._peers.failure)
                return

    def _find_silent(self, gone: Mapping[int, str], query_time: float, now: float) -> dict[int, str]:
        """The processes with nothing more to say: a process's last report is read before judging it."""
        for process in gone:
            if process not in self._gone:
                self._gone[process] = now
                self._is_urgent.set()
        # If the store does not answer, they are not waited for.
        return {
            process: how
            for process, how in gone.items()
            if query_time > self._gone[process] or now - self._gone[process] > self._grace
        }

    def _find_gone(self, statuses: dict[int, Status]) -> dict[int, str]:
        """Finds processes of this machine that are gone."""
        gone = {}
        for process, status in statuses.items():
            if process != self._peers.index and self._is_here(status):
                live_process = board.find_process(status.pid)
                if live_process is None or live_process.start != status.start:
                    gone[process] = "is gone from this machine"
        return gone

    def _is_here(self, status: Status) -> bool:
        """Whether this process would see that another one is gone."""
        own_status = self._status
        is_known = bool(own_status.boot and own_status.namespace)
        return is_known and (status.boot, status.namespace) == (own_status.boot, own_status.namespace)

    # When this process ends.

    def _note_exception(
        self, kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        """Replaces `sys.excepthook`: tells the others, and finds the process that is the cause."""
        self._former_hook(kind, value, traceback)
        if self._end is not None or not issubclass(kind, Exception):
            self._end = self._end or kind.__name__
            return
        if self._peers.failure is None and _may_come_from_others(value):
            self._await_verdict()
            sys.stderr.write(self._say(self._peers.failure))
        first = str(value).splitlines()
        self._end = f"{kind.__name__}: {first[0] if first else ''}".removesuffix(": ")

    def _say(self, reason: str | None) -> str:
        return f"ipu_pipeline: process {self._peers.index} ends. {reason}\n" if reason is not None else ""

    def _end_process(self, reason: str) -> None:
        end_process(self._say(reason))

    def _tell_why(self) -> None:
        """Tells the others the reason, before they can see that this process is gone."""

        def tell() -> None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._tell()

        telling = threading.Thread(target=tell, daemon=True)  # the store may not answer
        telling.start()
        telling.join(2 * self._interval)

    def _await_verdict(self) -> None:
        """Waits for a few looks, in which a process that has died may be found."""
        with self._looking:
            last = self._num_looks + _LOOKS_AFTER_ERROR
            self._looking.wait_for(
                lambda: self._num_looks >= last or self._peers.failure is not None,
                timeout=2 * _LOOKS_AFTER_ERROR * self._interval,
            )

    def _leave(self, pid: int) -> None:
        """Ends the process's part: without an error, waits until the others no longer need it."""
        if os.getpid() != pid:  # this is a fork of it
            return
        if self._end is None:
            self._await_others()
        else:  # at its end, JAX may wait for what never comes
            message = f"Its end took more than {self._grace:.0f} s."
            limit = threading.Timer(self._grace, self._end_process, [message])
            limit.daemon = True
            limit.start()
        self._is_over.set()
        self._is_urgent.set()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._tell()
        for thread in self._threads:
            thread.join(2 * self._interval)

    def _await_others(self) -> None:
        log = current_log()
        while log is not None and log.standing().next is not None and self._peers.failure is None:
            time.sleep(0.01)
        if self._peers.failure is not None:  # what this process had started will never be finished
            self._tell_why()
            self._end_process(self._peers.failure)
        self._end = ""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._tell()
        all_ended = math.inf
        while True:
            with self._lock:
                statuses = {p: s for p, s in self._statuses.items() if p != self._peers.index}
                gone = self._find_gone(self._statuses)
            ended = {process for process, status in statuses.items() if status.end is not None}
            if len(ended | gone.keys()) >= self._peers.count - 1:
                all_ended = min(all_ended, time.monotonic())
                # One that ends with an error is to be gone first: a launcher tells the first one's status.
                failing = [statuses[process] for process in ended - gone.keys() if statuses[process].end]
                if not any(map(self._is_here, failing)) or time.monotonic() > all_ended + self._grace:
                    return
            time.sleep(self._interval / 10)
