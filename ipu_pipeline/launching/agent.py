"""The launcher of one node: starts the processes there when the leader says so, and says how they stand."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import signal
import socket
import textwrap
import threading
import time
from collections.abc import Iterator

import ipu_pipeline
from ipu_pipeline.launching.group import FORWARDED, Group, Settings, Start
from ipu_pipeline.launching.leader import Leader, Nodes, Orders, Report
from ipu_pipeline.launching.meeting import Meeting, RemoteLeader
from ipu_pipeline.launching.restarts import Restarts
from ipu_pipeline.launching.shown import say
from ipu_pipeline.processes.job_history import Failure, JobHistory

__all__ = ["Agent"]

_LOOK = 0.02  # seconds between two looks at the orders
_AGAIN_AFTER = 1.0  # seconds, until the next attempt to listen
_MOST_SILENCE = 10.0  # seconds
_LONGEST_CAUSE = 100  # characters
_MOST_TRAININGS = 100  # of which the leader is told how far they are


class Agent:
    """Runs a job's processes on one node, from the first start to the last."""

    def __init__(self, settings: Settings, nodes: Nodes, restarts: int) -> None:
        """Starts nothing yet.

        Args:
          settings: how the processes are run.
          nodes: where.
          restarts: after how many failures of one cause the job is over.
        """
        self._settings = settings
        self._nodes = nodes
        self._restarts = restarts
        options = {
            "--nodes": str(nodes.count),
            "--restarts": str(restarts),
            "--shrink": "given" if nodes.may_shrink else "not given",
            "--memory-every": str(settings.memory_every),
            "--death-timeout": f"{settings.death_timeout:g}",
            "the version of ipu_pipeline": ipu_pipeline.__version__,
        }
        self._report = Report(nodes.rank, settings.count, options, settings.memory is not None)
        self._silence = min(_MOST_SILENCE, settings.death_timeout / 2)
        self._begun = time.time()
        self._history = JobHistory(self._begun)
        self._useful = 0.0  # as of `Group`
        self._failure: tuple[float, str] | None = None  # of this start: when it was noticed, and what
        self._failed_before: tuple[float, str] | None = None  # of the start before
        self._group: Group | None = None
        self._standby: Group | None = None
        self._has_standby = settings.has_standby
        self._signal = 0  # which asked this launcher to end
        self._is_by_order = False  # whether another node's launcher was asked
        self._was_running = False  # whether processes ran then
        self._is_asked = threading.Event()
        self._taken_part = time.monotonic()  # when this node last did
        self._has_said = False  # that it cannot take part as yet
        self._leader: Leader | None = None
        self._meeting: Meeting | None = None
        self._remote: RemoteLeader | None = None

    def run(self) -> int:
        """Runs the job. Returns the status."""
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, lambda number, _frame: self._end_by(number))
        status = self._meet()
        while status is None:
            orders = self._exchange()
            status = self._status(orders)
            if status is not None:
                break
            if orders is None or orders.start is None or orders.start.restart <= self._report.restart:
                self._is_asked.wait(_LOOK)
            elif not (orders.failed or orders.is_to_end):
                self._run_group(orders.start)
            else:  # it is over already: other nodes were quicker
                self._report = self._report_of(orders.start, is_running=False)
        goodput = self._history.goodput(self._useful)
        if goodput is not None and self._history.num_restarts and not self._nodes.rank:
            seconds, times = time.time() - self._history.begun, self._history.describe_times()
            say(
                f"goodput {goodput:.2f}: the runs took {self._useful:.1f} s of {seconds:.1f} s; the job "
                f"was started again {times}."
            )
        return status

    def close(self) -> None:
        """Lets the other nodes know that this one ends."""
        self._end_standby()
        last = dataclasses.replace(self._report, signal=self._signal, has_left=True)
        if self._remote is not None:
            self._remote.close(last)
        if self._leader is not None:
            if self._nodes.count > 1:
                self._leader.exchange(last)
                end = time.monotonic() + self._silence
                while self._leader.is_needed() and time.monotonic() < end:
                    time.sleep(_LOOK)
                self._say_lines()
            if self._meeting is not None:
                self._meeting.close()
            self._leader.close()

    # The leader.

    def _meet(self) -> int | None:
        """Begins to talk with the leader, or to be where it is. Returns a status if this cannot be."""
        # The threads take no signals: a signal is for the thread that starts processes.
        with _blocked_signals():
            if self._nodes.rank:
                assert self._nodes.meet_at is not None
                self._remote = RemoteLeader(self._nodes.meet_at, self._settings.secret, self._silence)
                return None
            if self._nodes.meet_at is None:
                self._leader = self._make_leader("127.0.0.1")
                return None
        return self._listen(*self._nodes.meet_at)

    def _make_leader(self, address: str) -> Leader:
        return Leader(self._nodes, address, self._report.options, Restarts(self._restarts), self._silence)

    def _listen(self, host: str, port: int) -> int | None:
        """Listens for the other launchers. A name, or its address, may be known a while later only."""
        deadline, has_said = time.monotonic() + self._nodes.wait, False
        while True:
            error: OSError = OSError("it has no address")
            try:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except OSError as unknown:
                error, found = unknown, []
            for address in dict.fromkeys(str(entry[4][0]) for entry in found):
                if ipaddress.ip_address(address).is_unspecified:
                    error = OSError("the other nodes cannot reach it there")
                    continue
                leader = self._make_leader(address)
                try:
                    with _blocked_signals():
                        meeting = Meeting(leader, (address, port), self._settings.secret, self._silence)
                except OSError as taken:
                    error = taken
                    continue
                self._leader, self._meeting = leader, meeting
                if ipaddress.ip_address(address).is_loopback and host != address and host != "localhost":
                    say(f"{host} is {address} here: only launchers on this machine reach it.")
                return None
            why = error.strerror or error
            what = f"this node cannot listen at {host}:{port} (--meet-at): {why}"
            if self._is_asked.wait(min(_AGAIN_AFTER, self._nodes.wait / 4)):
                return 128 + self._signal
            if time.monotonic() > deadline:
                say(f"{what}.")
                return 1
            if not has_said:
                say(f"{what}. This is tried again for {self._nodes.wait:g} s (--wait).")
            has_said = True

    def _exchange(self) -> Orders | None:
        report = dataclasses.replace(self._report, signal=self._signal, begun=self._history.begun)
        if self._remote is not None:
            orders = self._remote.exchange(report)
            self._taken_part = max(self._taken_part, self._remote.accepted)
        else:
            assert self._leader is not None
            orders = self._leader.exchange(report)
            self._taken_part = time.monotonic()
            self._say_lines()
        if orders is None:
            return None
        if orders.signal and not self._signal:
            self._end_by(orders.signal)
            self._is_by_order = True
        if orders.begun < self._history.begun:
            self._history = dataclasses.replace(self._history, begun=orders.begun)
        if orders.failed and orders.start is not None and orders.start.restart == self._report.restart:
            self._note_failure(f"process {orders.failed[0]} {orders.what}")
        return orders

    def _say_lines(self) -> None:
        assert self._leader is not None
        for line in self._leader.take_lines():
            say(line)

    def _status(self, orders: Orders | None) -> int | None:
        """With which status this launcher ends now, while no processes run; None if it does not."""
        if orders is not None and orders.status is not None:
            if orders.refusal:
                say(f"this node cannot take part: {orders.refusal}.")
            return orders.status
        if self._is_asked.is_set():
            if not self._was_running:
                return 128 + self._signal
            return 0 if self._report.cause is None else self._report.cause.status
        if time.monotonic() - self._taken_part > self._nodes.wait:
            say(f"this node could not take part for {self._nodes.wait:g} s (--wait).")
            return 1
        if orders is not None and orders.refusal and not self._has_said:
            self._has_said = True
            say(f"this node waits: {orders.refusal}.")
        return None

    # The processes.

    def _run_group(self, start: Start) -> None:
        """Runs the processes of a start until they have ended."""
        if not start.has_memory and self._settings.memory is not None:
            say("nothing is kept in memory, since another node has none for it.")
        group = None
        try:
            with _blocked_signals():  # one that comes while processes are being started is for them too
                if self._is_asked.is_set():
                    return
                self._report = self._report_of(start, is_running=True)
                self._failed_before, self._failure = self._failure or self._failed_before, None
                self._history = dataclasses.replace(self._history, num_restarts=start.restart)
                self._write_history()
                group = self._group = self._begin_standby(start)
                if group is None:
                    group = self._group = Group(self._settings, start, self._note_progress)
            group.follow(lambda: self._keep_in_step(group))
        finally:
            self._group = None
            if group is not None:
                group.kill()
            self._report = dataclasses.replace(self._report, is_running=False)
            self._taken_part = time.monotonic()
        self._take_from(group)

    def _look_after_standby(self, group: Group) -> None:
        """Starts processes for the next start when training has begun, and sees whether they are there."""
        if self._standby is not None:
            self._find_standby()
        elif self._has_standby and group.furthest and group.cause is None and not self._signal:
            self._start_standby(dataclasses.replace(group.start, restart=group.start.restart + 1))

    def _find_standby(self) -> Group | None:
        """The processes on standby, if there are some. Without one of them, the others end."""
        ended = None if self._standby is None else self._standby.look()
        if ended is not None:
            self._has_standby = False
            say(
                f"process {ended.process}, on standby, {ended.what}. From now on processes are started "
                "when they are needed."
            )
            self._end_standby()
        return self._standby

    def _start_standby(self, start: Start) -> None:
        try:
            with _blocked_signals():
                self._standby = Group(self._settings, start, self._note_progress, is_standby=True)
        except OSError as error:  # the job goes on
            self._has_standby = False
            say(f"no processes are on standby: {error.strerror or error}.")

    def _begin_standby(self, start: Start) -> Group | None:
        """Lets the processes on standby take part in a start, if there are some and it is theirs."""
        standby = self._find_standby()
        if standby is not None and standby.begin(start):
            self._standby = None
            return standby
        self._end_standby()
        return None

    def _end_standby(self) -> None:
        if self._standby is not None:
            self._standby.dismiss(self._silence / 5)  # the leader is to hear of this node meanwhile
            self._standby = None

    def _report_of(self, start: Start, is_running: bool) -> Report:
        """A report that knows nothing of a start yet."""
        own = self._report
        return Report(
            own.node,
            own.num_processes,
            own.options,
            own.has_memory,
            own.agent,
            start.restart,
            is_running,
        )

    def _take_from(self, group: Group) -> None:
        if group.cause is not None:
            self._note_failure(f"process {group.cause.process} {group.cause.what}")
        self._useful = max(self._useful, group.useful)
        self._report = dataclasses.replace(
            self._report,
            cause=group.cause,
            furthest=dict(list(group.furthest.items())[-_MOST_TRAININGS:]),
            results=group.results,
        )

    def _keep_in_step(self, group: Group) -> None:
        """Tells the leader how the processes stand, and tells them what has failed on another node."""
        self._take_from(group)
        self._look_after_standby(group)
        is_first = self._failure is None
        orders = self._exchange()
        if orders is None:
            return
        if orders.results is not None and group.results is None:
            group.know_results(orders.results)
        if orders.failed:
            group.know_failure(orders.failed, orders.what)
        if orders.is_to_end and is_first:
            self._note_failure("a node came")
            if not self._signal:
                group.ask_to_end(signal.SIGTERM)

    def _note_failure(self, what: str) -> None:
        """Notes the first failure of a start; others follow from it."""
        if self._failure is None:
            self._failure = (time.time(), textwrap.shorten(what, _LONGEST_CAUSE, placeholder=" ..."))

    def _note_progress(self, run: int, step: int, num_redone: int | None) -> None:
        """Says and writes that training has gone on after a failure."""
        if self._failed_before is None and self._history.num_restarts and not self._history.failures:
            self._failed_before = (self._begun, f"the launcher of node {self._nodes.rank} began")
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

    def _end_by(self, number: int) -> None:
        """Ends the processes, and then this launcher, by a signal."""
        if not self._signal:
            self._was_running = self._group is not None
        has_come, self._is_by_order = self._is_by_order, False
        self._signal = signal.SIGINT if self._signal == signal.SIGINT else number
        self._is_asked.set()
        # A scheduler sends the same one to all launchers: the processes get it once.
        if self._group is not None and not has_come:
            self._group.ask_to_end(number)


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """Lets the signals that are forwarded wait, for a `with` block."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
