"""What all nodes of a job do next: which processes start, when they start again, and when the job is over.

A launcher runs on each node. The one of node 0 has the leader. The launchers report to it, several times a
second, how their nodes stand, and get what they are to do. Both are whole states and not changes, so that a
message that is lost, or comes twice, does no harm, and so that another leader can take over: how often the
job has been started again is in every report.

All processes start together, and when one has failed, all end and are started again together. A node whose
launcher is gone can be replaced by another one of its rank. A job that may shrink goes on without a node
that is not replaced in time, and uses it again when it returns.
"""

from __future__ import annotations

import math
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from signal import SIGINT

from ipu_pipeline.launching.causes import Cause, LostNode, NewNode
from ipu_pipeline.launching.group import Start
from ipu_pipeline.launching.restarts import Restarts
from ipu_pipeline.processes.addresses import hold_port

__all__ = ["Leader", "Nodes", "Orders", "Report"]

_SAID_AFTER = 2.0  # seconds for which the others are waited for
_TO_COME_BACK = 1.0  # seconds, after the connection to a launcher has ended
_LEFT_BEHIND = "was ended: the job is started again"
_MOST_STEP = 1.0  # seconds from look to look that count: more, and this process was stopped


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job, and which one this is.

    Attributes:
      count: how many there are.
      rank: of this one, from 0.
      meet_at: host and port where the launchers meet, on node 0; None if there is only one node.
      wait: how many seconds a node is waited for.
      may_shrink: whether the job goes on without a node that does not come.
    """

    count: int = 1
    rank: int = 0
    meet_at: tuple[str, int] | None = None
    wait: float = 600.0
    may_shrink: bool = False


@dataclass(frozen=True)
class Report:
    """How a node stands.

    Attributes:
      node: its rank.
      num_processes: on this node.
      options: what must be the same on all nodes, by the names of options.
      has_memory: whether it has a directory for in-memory checkpoints.
      agent: what tells its launcher from others.
      restart: which start its processes are in, or were in last; -1 before the first.
      is_running: whether they run.
      cause: why the first one failed that did in that start; None if none has.
      furthest: as of `Group`.
      results: as of `Group`.
      begun: when the job began, as far as is known there, in seconds since the epoch.
      signal: the signal that asked the launcher to end; 0 if none has.
      has_left: whether it ends.
    """

    node: int
    num_processes: int
    options: Mapping[str, str]
    has_memory: bool = False
    agent: str = field(default_factory=lambda: uuid.uuid4().hex)
    restart: int = -1
    is_running: bool = False
    cause: Cause | None = None
    furthest: Mapping[str, int] = field(default_factory=dict)
    results: int | None = None
    begun: float = math.inf
    signal: int = 0
    has_left: bool = False


@dataclass(frozen=True)
class Orders:
    """What a node is to do.

    Attributes:
      leader: what tells the leader from others.
      start: the start that its processes are to be in; None if they are to wait for one.
      failed: the numbers of processes that have failed on another node: those of this one are to end.
      what: what happened to them.
      is_to_end: whether the processes are to end for another start, and nothing has failed.
      results: as of `Group`.
      begun: as of `Report`, as far as is known anywhere.
      signal: the signal with which the job is to end on all nodes; 0 if it is not.
      status: with which status the job is over; None if it is not.
      refusal: why the node does not take part; empty if it does. This may change unless the job is over.
    """

    leader: str
    start: Start | None = None
    failed: tuple[int, ...] = ()
    what: str = ""
    is_to_end: bool = False
    results: int | None = None
    begun: float = math.inf
    signal: int = 0
    status: int | None = None
    refusal: str = ""


@dataclass
class _Node:
    report: Report
    seen: float  # when it last reported
    is_connected: bool = True


@dataclass(frozen=True)
class _Member:
    """A node that takes part in a start."""

    agent: str
    num_processes: int
    start: Start

    @property
    def processes(self) -> tuple[int, ...]:
        """The numbers of its processes."""
        return tuple(range(self.start.first, self.start.first + self.num_processes))


@dataclass
class _Run:
    """A start, and what has become of it."""

    begun: float
    members: dict[int, _Member]
    done: set[int] = field(default_factory=set)  # nodes that have left after the end of their processes
    failure: Cause | LostNode | NewNode | None = None  # why it ends
    node: int = 0  # where it failed

    def has(self, report: Report) -> bool:
        """Whether a report is of a launcher that takes part."""
        return report.node in self.members and self.members[report.node].agent == report.agent


class Leader:
    """Decides for all nodes. Threads may call it at once."""

    def __init__(
        self, nodes: Nodes, address: str, options: Mapping[str, str], restarts: Restarts, silence: float
    ) -> None:
        """Waits for the nodes.

        Args:
          nodes: those of the job.
          address: of this machine, at which the coordinator listens.
          options: those of node 0, as of `Report`.
          restarts: counts the failures.
          silence: after how many seconds without a report a node is lost, other than node 0.
        """
        self._id = uuid.uuid4().hex
        self._of_job = nodes
        self._address = address
        self._options = options
        self._restarts = restarts
        self._silence = silence
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._looked = time.monotonic()
        self._clock = 0.0  # seconds, without the time in which this process was stopped
        self._nodes: dict[int, _Node] = {}
        self._refused: dict[str, float] = {}  # agent -> when it last reported
        self._run: _Run | None = None  # None while nodes are waited for
        self._last: set[int] = set()  # nodes of the last start
        self._without: set[int] = set()  # nodes that are not waited for
        self._begun = math.inf  # as of `Report`
        self._restart = -1
        self._furthest: dict[str, int] = {}  # as of `Group`, in all starts
        self._not_before = 0.0
        self._deadline = nodes.wait
        self._has_said = False  # for whom it waits
        self._signal = 0  # with which the job is to end on all nodes
        self._status: int | None = None
        self._told: set[str] = set()  # agents that know that the job is over, or is to end
        self._held: socket.socket | None = None

    def exchange(self, report: Report) -> Orders:
        """Takes a node's report, and returns what it is to do."""
        with self._lock:
            refusal, is_final = self._find_refusal(report)
            if refusal:
                return self._refuse(report, refusal, is_final)
            self._note(report)
            self._go_on()
            return self._orders(report)

    def note_loss(self, agent: str) -> None:
        """Notes that the connection to a launcher has ended. It has a second to come back."""
        with self._lock:
            for node in self._nodes.values():
                if node.report.agent == agent:
                    node.is_connected = False
                    node.seen = min(node.seen, self._now() - self._silence + _TO_COME_BACK)

    def is_needed(self) -> bool:
        """Whether a launcher is there that does not know that the job is over, or is to end."""
        with self._lock:
            self._go_on()
            if self._status is None and not self._signal:
                return False
            there = {known.report.agent for known in self._nodes.values()}
            there |= {agent for agent, seen in self._refused.items() if self._now() - seen < self._silence}
            return not there <= self._told

    def say(self, what: str) -> None:
        """Has something said."""
        with self._lock:
            self._say(what)

    def take_lines(self) -> list[str]:
        """What is to be said. Only one thread does that, since it may have to wait for a terminal."""
        with self._lock:
            lines, self._lines = self._lines, []
            return lines

    def close(self) -> None:
        """Lets the coordinator's port go."""
        if self._held is not None:
            self._held.close()

    # All of these run under the lock.

    def _now(self) -> float:
        looked, self._looked = self._looked, time.monotonic()
        self._clock += min(self._looked - looked, _MOST_STEP)
        return self._clock

    def _say(self, what: str) -> None:
        self._lines.append(what)

    def _find_refusal(self, report: Report) -> tuple[str, bool]:
        """Why a node does not take part, and whether that is final."""
        if not 0 <= report.node < self._of_job.count:
            return f"there are {self._of_job.count} nodes by node 0's --nodes", True
        for name, value in self._options.items():
            if report.options.get(name) != value:
                own = report.options.get(name)
                return f"node {report.node} has {name} {own}, and node 0 has {value}", True
        known = self._nodes.get(report.node)
        if known is not None and known.report.agent != report.agent:
            if self._now() - known.seen <= self._silence:
                return "another launcher has this rank", False
            self._lose(report.node, "another launcher has come in its place")
        return "", False

    def _refuse(self, report: Report, refusal: str, is_final: bool) -> Orders:
        if report.agent not in self._refused:
            self._say(f"a launcher that is to be node {report.node} is refused: {refusal}.")
        self._refused[report.agent] = self._now()
        status = 2 if is_final else self._status
        if status is not None or self._signal:
            self._told.add(report.agent)
        return Orders(self._id, refusal=refusal, signal=self._signal, status=status)

    def _note(self, report: Report) -> None:
        self._refused.pop(report.agent, None)
        # SIGINT is a person's, and ends the job. Others end one node, if it can be replaced.
        ends_all = report.signal == SIGINT or self._of_job.count == 1 or not self._restarts.most
        if report.signal and ends_all:
            self._signal = self._signal or report.signal
        self._begun = min(self._begun, report.begun)
        if not report.has_left:
            self._nodes[report.node] = _Node(report, self._now())
            self._take_in(report)
            return
        self._remove(report.node)
        run = self._run
        if run is not None and run.has(report):
            has_ended = report.restart == self._restart and not report.is_running
            if has_ended and report.cause is not None:
                self._fail(report.node, report.cause)
            elif has_ended:
                run.done.add(report.node)
            else:
                lost = self._lost(report.node, "its launcher was asked to end")
                self._say(str(lost))
                self._fail(report.node, lost)

    def _take_in(self, report: Report) -> None:
        """Has all started again with a node that comes to a run without it, unless that is at its end."""
        run = self._run
        if run is None:
            if not report.signal:
                self._without.discard(report.node)
        elif report.node not in run.members and not report.signal:
            there = [known.report for node, known in self._nodes.items() if node in run.members]
            if all(one.is_running or one.restart < self._restart for one in there):
                self._without.discard(report.node)
                self._fail(report.node, NewNode(report.node))

    def _remove(self, node: int) -> None:
        """Removes a node that is gone, and waits for another one if it belonged to the job."""
        self._nodes.pop(node, None)
        if node in self._last or not self._last:
            self._deadline = max(self._deadline, self._now() + self._of_job.wait)
        elif self._of_job.may_shrink:
            self._without.add(node)

    def _lose_silent(self) -> None:
        now = self._now()
        for node, known in list(self._nodes.items()):
            if node and now - known.seen > self._silence:  # node 0 is in this process
                silent = f"has said nothing for {self._silence:.0f} s"
                self._lose(node, f"its launcher {silent if known.is_connected else 'is gone'}")

    def _lose(self, node: int, why: str) -> None:
        known = self._nodes[node]
        self._remove(node)
        lost = self._lost(node, why)
        self._say(str(lost))
        if self._run is not None and self._run.has(known.report):
            self._fail(node, lost)

    def _lost(self, node: int, why: str) -> LostNode:
        member = None if self._run is None else self._run.members.get(node)
        return LostNode(node, () if member is None else member.processes, why)

    def _fail(self, node: int, cause: Cause | LostNode | NewNode) -> None:
        assert self._run is not None
        if self._run.failure is None:
            self._run.failure, self._run.node = cause, node
            if isinstance(cause, NewNode):
                self._say(str(cause))
            elif isinstance(cause, Cause) and node:  # the launcher of this node says its own
                self._say(f"node {node}: {cause}")

    def _go_on(self) -> None:
        self._lose_silent()
        if self._status is None:
            if self._run is not None:
                self._look_after(self._run)
            elif not self._signal:
                self._gather()

    def _gather(self) -> None:
        """Starts the processes when all nodes are there."""
        now = self._now()
        if 0 not in self._nodes or self._nodes[0].report.signal:
            return  # this launcher begins, or ends
        here = {node for node, known in self._nodes.items() if not known.report.signal}
        missing = sorted(set(range(self._of_job.count)) - here - self._without)
        if missing and now > self._deadline:
            late = f"{_name(missing)} did not come within {self._of_job.wait:g} s (--wait)"
            if (
                not self._of_job.may_shrink
                or max(known.report.restart for known in self._nodes.values()) < 0
            ):
                self._end(1, late)
                return
            self._say(f"{late}: the job goes on without.")
            self._without.update(missing)
        elif missing:
            if not self._has_said and now > self._not_before + _SAID_AFTER:
                self._say(f"waiting for {_name(missing)}, for up to {self._of_job.wait:g} s.")
                self._has_said = True
            return
        if now >= self._not_before and not any(known.report.is_running for known in self._nodes.values()):
            reports = [self._nodes[node].report for node in sorted(here)]
            self._last = here
            self._restart = max(self._restart, *(report.restart for report in reports)) + 1
            count = sum(report.num_processes for report in reports)
            has_memory = all(report.has_memory for report in reports)
            is_whole = len(here) == self._of_job.count
            coordinator = self._hold_port()
            self._run, first = _Run(now, {}), 0
            for report in reports:
                start = Start(self._restart, coordinator, count, first, has_memory, is_whole)
                self._run.members[report.node] = _Member(report.agent, report.num_processes, start)
                first += report.num_processes

    def _hold_port(self) -> str:
        """Takes another port for each start: the last coordinator may still have its own."""
        self.close()
        self._held = hold_port(self._address)
        host, port = self._held.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _look_after(self, run: _Run) -> None:
        """Takes what the nodes report of a start, and ends it when their processes have ended."""
        members = {node: known.report for node, known in self._nodes.items() if run.has(known.report)}
        begun = {node: report for node, report in members.items() if report.restart == self._restart}
        for node, report in begun.items():
            if report.cause is not None:
                self._fail(node, report.cause)
        if any(report.is_running for report in begun.values()):
            return
        if run.failure is None:
            if len(begun) + len(run.done) == len(run.members):
                self._end(0)
        elif len(begun) == len(members):
            self._run = None
            self._decide(run, run.failure, [report.furthest for report in begun.values()])

    def _decide(
        self, run: _Run, failure: Cause | LostNode | NewNode, furthest: list[Mapping[str, int]]
    ) -> None:
        """Decides whether there is another start after a failure."""
        has_progressed = False
        for name, step in (item for one in furthest for item in one.items()):
            has_progressed |= step > self._furthest.get(name, -1)
            self._furthest[name] = max(step, self._furthest.get(name, -1))
        if self._signal:
            self._end(128 + self._signal if isinstance(failure, NewNode) else failure.status)
            return
        if 0 not in self._nodes or self._nodes[0].report.signal:
            self._say("node 0 ends, with the leader; the others wait for another node 0.")
            return
        now = self._now()
        if isinstance(failure, NewNode):
            self._not_before, self._deadline, self._has_said = now, now + self._of_job.wait, False
            return
        delay = self._restarts.after(failure, now - run.begun, has_progressed)
        if delay is None:
            count = self._restarts.count
            given_up = f"given up after {count} restart{'s' * (count > 1)}" if count else ""
            self._end(failure.status, given_up)
            return
        when = f"in {delay:g} s" if delay else "at once"
        self._say(f"{self._restarts.describe(failure)}, {when}.")
        self._not_before, self._deadline, self._has_said = (
            now + delay,
            now + delay + self._of_job.wait,
            False,
        )

    def _end(self, status: int, why: str = "") -> None:
        self._status, self._run = status, None
        if why:
            self._say(f"{why}.")

    def _orders(self, report: Report) -> Orders:
        if self._status is not None or self._signal:
            self._told.add(report.agent)
        run = self._run
        if run is None or not run.has(report):
            return Orders(
                self._id,
                failed=(0,) if report.is_running else (),
                what=_LEFT_BEHIND if report.is_running else "",
                begun=self._begun,
                signal=self._signal,
                status=self._status,
            )
        results = next(
            (
                node.report.results
                for node in self._nodes.values()
                if node.report.restart == self._restart and node.report.results is not None
            ),
            None,
        )
        failed: tuple[int, ...] = ()
        what, is_to_end = "", isinstance(run.failure, NewNode)
        if isinstance(run.failure, Cause | LostNode) and run.node != report.node:
            failed, what = run.failure.processes, run.failure.what
        elif isinstance(run.failure, LostNode):  # it is there after all
            failed, what = (0,), _LEFT_BEHIND
        start = run.members[report.node].start
        return Orders(
            self._id, start, failed, what, is_to_end, results, self._begun, self._signal, self._status
        )


def _name(nodes: list[int]) -> str:
    return f"node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes))}"
