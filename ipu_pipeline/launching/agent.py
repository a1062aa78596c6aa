"""The launcher of one node: starts the processes there when the leader says so, and says how they stand."""

from __future__ import annotations

import dataclasses
import signal
import textwrap
import threading
import time
from dataclasses import dataclass

from ipu_pipeline.launching.group import FORWARDED, Group, Settings, Start
from ipu_pipeline.launching.leader import Leader, Orders, Report
from ipu_pipeline.launching.meeting import Link, Meeting, RemoteLeader
from ipu_pipeline.launching.restarts import Restarts
from ipu_pipeline.launching.shown import say
from ipu_pipeline.processes.job_history import Failure, JobHistory

__all__ = ["Agent", "Nodes"]

_LOOK = 0.02  # seconds between two looks at the orders
_MOST_SILENCE = 10.0  # seconds
_LONGEST_CAUSE = 100  # characters


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job, and which one this is.

    Attributes:
      count: how many there are.
      rank: of this one, from 0.
      meet_at: host and port where the launchers meet, on node 0; None if there is only one node. On node 0
        the host is the number of an address.
      wait: how many seconds a node is waited for.
    """

    count: int = 1
    rank: int = 0
    meet_at: tuple[str, int] | None = None
    wait: float = 600.0


class Agent:
    """Runs a job's processes on one node, from the first start to the last."""

    def __init__(self, settings: Settings, nodes: Nodes, restarts: int) -> None:
        """Begins to meet the others.

        Args:
          settings: how the processes are run.
          nodes: where.
          restarts: after how many failures of one cause the job is over.

        Raises:
          OSError: node 0 cannot listen there.
        """
        self._settings = settings
        self._nodes = nodes
        self._report = Report(nodes.rank, nodes.count, settings.count)
        self._group: Group | None = None
        self._history = JobHistory(time.time())
        self._useful = 0.0  # as of `Group`
        self._failure: tuple[float, str] | None = None  # of this start: when it was noticed, and what
        self._failed_before: tuple[float, str] | None = None  # of the start before
        self._signal = 0  # which asked this launcher to end
        self._was_running = False  # whether processes ran then
        self._is_asked = threading.Event()
        self._taken_part = time.monotonic()  # when this node last did
        self._has_said = False  # that it cannot take part as yet
        self._leader: Leader | None = None
        self._meeting: Meeting | None = None
        self._remote: RemoteLeader | None = None
        silence = min(_MOST_SILENCE, settings.death_timeout / 2)
        # The threads do not take signals: a signal is for the thread that starts processes.
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        try:
            if nodes.rank:
                assert nodes.meet_at is not None
                self._remote = RemoteLeader(nodes.meet_at, settings.secret, silence)
            else:
                host = "127.0.0.1" if nodes.meet_at is None else nodes.meet_at[0]
                self._leader = Leader(nodes.count, host, Restarts(restarts), nodes.wait, silence)
                if nodes.meet_at is not None:
                    self._meeting = Meeting(self._leader, nodes.meet_at, settings.secret, silence)
        except OSError:
            if self._leader is not None:
                self._leader.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)

    def run(self) -> int:
        """Runs the job. Returns the status."""
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._send_on)
        status = None
        while status is None:
            orders = self._exchange()
            status = self._status(orders)
            if status is not None:
                break
            if orders is None or orders.start is None or orders.start.restart <= self._report.restart:
                self._is_asked.wait(_LOOK)
            elif orders.failure is None:
                self._run_group(orders.start)
            else:  # it is over already: other nodes were quicker
                self._report = dataclasses.replace(self._report, restart=orders.start.restart)
        if self._history.num_restarts and self._useful and not self._nodes.rank:
            seconds, times = time.time() - self._history.begun, self._history.describe_times()
            say(
                f"goodput {self._history.goodput(self._useful):.2f}: the runs took {self._useful:.1f} s of "
                f"{seconds:.1f} s; the job was started again {times}."
            )
        return status

    def close(self) -> None:
        """Lets the other nodes know that this one ends."""
        last = dataclasses.replace(self._report, signal=self._signal, has_left=True)
        if self._remote is not None:
            self._remote.close(last)
        if self._leader is not None:
            self._leader.exchange(last)
            end = time.monotonic() + _MOST_SILENCE
            while self._leader.is_needed() and time.monotonic() < end:
                time.sleep(_LOOK)
            if self._meeting is not None:
                self._meeting.close()
            self._leader.close()

    def _exchange(self) -> Orders | None:
        link: Link | None = self._remote or self._leader
        assert link is not None
        orders = link.exchange(dataclasses.replace(self._report, signal=self._signal))
        if self._remote is not None:
            self._taken_part = max(self._taken_part, self._remote.accepted)
        else:
            self._taken_part = time.monotonic()
        return orders

    def _status(self, orders: Orders | None) -> int | None:
        """With which status this launcher ends now, while no processes run; None if it does not."""
        if orders is not None and orders.status is not None:
            if orders.refusal:
                say(f"this node cannot take part: {orders.refusal}.")
            return orders.status
        if self._is_asked.is_set():
            cause = self._report.cause
            return cause.status if cause is not None and self._was_running else 128 + self._signal
        if time.monotonic() - self._taken_part > self._nodes.wait:
            say(f"this node could not take part for {self._nodes.wait:g} s (--wait).")
            return 1
        if orders is not None and orders.refusal and not self._has_said:
            self._has_said = True
            say(f"this node waits: {orders.refusal}.")
        return None

    def _run_group(self, start: Start) -> None:
        """Runs the processes of a start until they have ended."""
        # A signal that comes while processes are being started is for them too.
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        group = None
        try:
            if self._is_asked.is_set():
                return
            self._report = dataclasses.replace(
                self._report, restart=start.restart, is_running=True, cause=None, furthest={}, results=None
            )
            self._failed_before, self._failure = self._failure or self._failed_before, None
            self._history = dataclasses.replace(self._history, num_restarts=start.restart)
            self._write_history()
            group = self._group = Group(self._settings, start, self._note_progress)
            told: list[int] = []
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            group.follow(lambda: self._keep_in_step(group, told))
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            self._group = None
            if group is not None:
                group.kill()
            self._report = dataclasses.replace(self._report, is_running=False)
        self._take_from(group)

    def _take_from(self, group: Group) -> None:
        if group.cause is not None:
            self._note_failure(f"process {group.cause.process} {group.cause.what}")
        self._useful = max(self._useful, group.useful)
        self._report = dataclasses.replace(
            self._report, cause=group.cause, furthest=dict(group.furthest), results=group.results
        )

    def _keep_in_step(self, group: Group, told: list[int]) -> None:
        """Tells the leader how the processes stand, and them what happens on other nodes, once."""
        self._take_from(group)
        orders = self._exchange()
        if orders is None:
            return
        if orders.failure is not None and not told:
            told.append(orders.failure[0])
            self._note_failure("process {} {}".format(*orders.failure))
            group.know_failure(*orders.failure)
        if orders.results is not None and group.results is None:
            group.know_results(orders.results)

    def _note_failure(self, what: str) -> None:
        """Notes the first failure of a start; others follow from it."""
        if self._failure is None:
            self._failure = (time.time(), textwrap.shorten(what, _LONGEST_CAUSE, placeholder=" ..."))

    def _note_progress(self, run: int, step: int, num_redone: int) -> None:
        """Says and writes that training has gone on after a failure."""
        if self._failed_before is not None:
            (at, what), self._failed_before = self._failed_before, None
            failure = Failure(what, at, run, step, num_redone, time.time() - at)
            self._history = self._history.after(failure)
            self._write_history()
            if not self._nodes.rank:
                say(f"{failure}.")

    def _write_history(self) -> None:
        if self._settings.memory is not None:
            self._history.write(self._settings.memory)

    def _send_on(self, number: int, _frame: object) -> None:
        self._signal, self._was_running = number, self._group is not None
        self._is_asked.set()
        if self._group is not None:
            self._group.ask_to_end(number)
