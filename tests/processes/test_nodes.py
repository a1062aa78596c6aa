"""Launchers of several nodes: what their leader decides, who is heard, and nodes that are lost."""

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from ipu_pipeline.command_line.main import main
from ipu_pipeline.launching import leader as leader_module
from ipu_pipeline.launching import meeting as meeting_module
from ipu_pipeline.launching.causes import Cause
from ipu_pipeline.launching.group import Start
from ipu_pipeline.launching.leader import Leader, Nodes, Orders, Report
from ipu_pipeline.launching.meeting import Meeting, RemoteLeader
from ipu_pipeline.launching.restarts import Restarts
from tests.processes.test_going_on import assert_same, uninterrupted  # noqa: F401  # a fixture
from tests.processes.test_launching import LAUNCH, PLAIN, ROOT, find_left, free_address
from tests.support.killing import Job
from tests.support.programs import Started, wait_for

SECRET = "a secret of more than 16 characters"  # noqa: S105
PATIENCE = 300.0  # seconds
KILLED = Cause(3, -signal.SIGKILL)
OPTIONS = {"--nodes": "2", "--restarts": "5"}


class Clock:
    """The leader's, which only goes on when it is told to."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def forward(self, seconds, look):
        """Goes on in steps in which nobody can have been stopped."""
        for _step in range(round(2 * seconds)):
            self.now += 0.5
            look()


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(leader_module, "time", made)
    return made


@pytest.fixture
def lead(clock):
    """Makes a leader of 2 nodes."""
    with contextlib.ExitStack() as left:

        def make(restarts=5, wait=60.0, num_nodes=2, may_shrink=False):
            nodes = Nodes(num_nodes, wait=wait, may_shrink=may_shrink)
            made = Leader(nodes, "127.0.0.1", OPTIONS, Restarts(restarts), 5.0)
            left.callback(made.close)
            return made

        yield make


class Node:
    """A node with two processes, as the leader knows it."""

    def __init__(self, leader, rank, restart=-1, has_memory=True, **options):
        self.leader = leader
        self.report = Report(rank, 2, OPTIONS | options, has_memory, restart=restart)

    def tell(self, **changes):
        self.report = dataclasses.replace(self.report, **changes)
        return self.leader.exchange(self.report)

    def begin(self, restart):
        """Is told to start, and does."""
        orders = self.tell()
        assert (orders.start.restart, orders.status, orders.refusal) == (restart, None, "")
        assert (orders.start.count, orders.start.first) == (4, 2 * self.report.node)
        self.tell(restart=restart, is_running=True, cause=None)
        return orders.start

    def end(self, **changes):
        return self.tell(is_running=False, **changes)


def make_two(lead, **options):
    """A leader, and its two nodes."""
    leader = lead(**options)
    return leader, Node(leader, 0), Node(leader, 1)


def begin(*nodes, restart=0):
    for node in nodes:
        node.tell()
    starts = [node.begin(restart) for node in nodes]
    assert len({start.coordinator for start in starts}) == 1
    return starts[0]


def test_all_start_when_all_are_there_and_end_together(lead):
    leader, first, second = make_two(lead)
    assert first.tell().start is None
    begin(first, second)
    second.tell(begun=1000.0)
    assert first.tell(results=1, begun=2000.0).begun == 1000.0  # this one may be another node 0
    assert first.tell().failed == ()
    assert second.tell().results == 1  # its node does not know
    assert first.end().status is None
    assert second.end().status == 0
    assert leader.is_needed()
    assert first.tell().status == 0
    assert not leader.is_needed()


def test_a_failure_ends_the_processes_of_the_other_node_and_all_start_again(lead, clock):
    leader, first, second = make_two(lead)
    before = begin(first, second)
    assert second.end(cause=KILLED).failed == ()
    assert (first.tell().failed, first.tell().what) == ((3,), "was ended by SIGKILL")
    # What follows from it does not count. The next start is not before a second has gone by.
    assert first.end(cause=Cause(0, 1, "process 3 has died")).start is None
    clock.forward(1, lambda: [node.tell() for node in (first, second)])
    # The coordinator of the last start may still have its port.
    assert begin(first, second, restart=1).coordinator != before.coordinator
    first.end(cause=Cause(0, 7), furthest={"a": 3})
    second.end(cause=Cause(2, 1))
    begin(first, second, restart=2)  # at once: training had come further
    assert leader.take_lines() == [  # node 0's launcher says its own failures
        "node 1: process 3 was ended by SIGKILL.",
        "restart 1 of at most 5 for this cause, in 1 s.",
        "restart 1 of at most 5 for this cause, at once.",
    ]


def test_a_node_that_had_not_started_when_another_failed_is_not_waited_for(lead, clock):
    _leader, first, second = make_two(lead)
    second.tell()
    first.begin(0)
    first.end(cause=KILLED)
    orders = second.tell()
    assert orders.failed == (3,)
    second.tell(restart=orders.start.restart)  # it leaves the start out
    clock.forward(1, lambda: [node.tell() for node in (first, second)])
    begin(first, second, restart=1)


def test_a_lost_node_is_replaced(lead, clock):
    leader, first, second = make_two(lead)
    begin(first, second)
    leader.note_loss(second.report.agent)
    clock.forward(0.5, first.tell)
    second.tell()  # it comes back in time
    clock.forward(4, first.tell)
    assert first.tell().failed == ()
    leader.note_loss(second.report.agent)
    newcomer = Node(leader, 1)
    assert newcomer.tell().refusal == "another launcher has this rank"
    clock.forward(1.5, first.tell)
    assert first.tell().failed == (2, 3)
    assert first.tell().what == "was lost with node 1: its launcher is gone"
    assert newcomer.tell() == Orders(newcomer.tell().leader)  # while the other node's processes end
    first.end(cause=Cause(0, 1))
    clock.forward(1, lambda: [node.tell() for node in (first, newcomer)])
    begin(first, newcomer, restart=1)
    # The one that was lost comes back after all, with processes that run.
    assert second.tell().refusal == "another launcher has this rank"
    clock.forward(7, lambda: [node.tell() for node in (first, second)])
    assert first.tell().failed == (2, 3)
    assert second.tell().failed == (0,)
    assert second.tell().what == "was ended: the job is started again"
    assert leader.take_lines() == [
        "a launcher that is to be node 1 is refused: another launcher has this rank.",
        "node 1 was lost: its launcher is gone.",
        "restart 1 of at most 5 for this cause, in 1 s.",
        "a launcher that is to be node 1 is refused: another launcher has this rank.",
        "node 1 was lost: its launcher has said nothing for 5 s.",
    ]


@pytest.mark.parametrize("may_shrink", [False, True])
def test_a_node_is_not_waited_for_without_end(may_shrink, lead, clock):
    """A job that may shrink begins with all nodes, too."""
    leader = lead(wait=20.0, may_shrink=may_shrink)
    first = Node(leader, 0)
    clock.forward(19, first.tell)
    assert first.tell().status is None
    clock.forward(2, first.tell)
    assert first.tell().status == 1
    waited = "node 1 did not come within 20 s (--wait)."
    assert leader.take_lines() == ["waiting for node 1, for up to 20 s.", waited]


def test_a_job_that_may_shrink_goes_on_without_a_node_until_it_comes(lead, clock):
    leader, first, second = make_two(lead, wait=20.0, may_shrink=True)
    clock.forward(19, first.tell)
    assert first.tell().status is None
    begin(first, second)
    second.end(has_left=True, cause=KILLED)
    first.end(cause=Cause(0, 1))
    clock.forward(20, first.tell)
    assert first.tell().start is None
    clock.forward(2, first.tell)
    shrunk = first.tell().start
    assert (shrunk.restart, shrunk.count, shrunk.has_memory, shrunk.is_whole) == (1, 2, True, False)
    first.tell(restart=1, is_running=True, cause=None)
    newcomer = Node(leader, 1)
    assert newcomer.tell().start is None
    assert first.tell().is_to_end
    assert not first.tell().failed
    first.end(cause=Cause(0, -15))
    newcomer.tell()
    assert first.tell().start.is_whole
    begin(first, newcomer, restart=2)
    assert leader.take_lines()[-3:] == [
        "waiting for node 1, for up to 20 s.",
        "node 1 did not come within 20 s (--wait): the job goes on without.",
        "node 1 has come: all are started again with it.",
    ]


def test_the_leaders_own_node_is_not_lost(lead, clock):
    """Its launcher may wait for a terminal that takes nothing."""
    _leader, first, second = make_two(lead)
    begin(first, second)
    clock.forward(60, second.tell)
    assert second.tell().failed == ()


def test_node_0_that_ends_does_not_end_the_job(lead, clock):
    """The others wait for another one, however long the job has run."""
    leader, first, second = make_two(lead, wait=20.0)
    begin(first, second)
    clock.forward(60, lambda: [node.tell() for node in (first, second)])
    first.tell(signal=signal.SIGTERM)
    first.end(cause=Cause(0, 143))
    second.end(cause=Cause(2, 1))
    for _report in range(3):
        assert second.tell() == Orders(second.tell().leader)
    assert leader.take_lines()[-1] == "node 0 ends, with the leader; the others wait for another node 0."


def test_a_leader_that_was_stopped_loses_nobody(lead, clock):
    _leader, first, second = make_two(lead)
    begin(first, second)
    clock.now += 600
    assert first.tell().failed == second.tell().failed == ()


def test_another_leader_takes_over(lead):
    """Its own launcher is new, and the other one's processes are in the fourth start."""
    leader = lead()
    first, second = Node(leader, 0), Node(leader, 1, restart=3)
    first.tell()
    assert second.tell(is_running=True).what == "was ended: the job is started again"
    assert first.tell().start is None
    second.end(cause=Cause(2, 1))
    begin(first, second, restart=4)


@pytest.mark.parametrize("restarts", [0, 5])
def test_a_signal_while_nodes_are_waited_for(restarts, lead):
    """Without restarts, nothing can take the place of a node, so that each signal ends all."""
    _leader, first, second = make_two(lead, restarts=restarts)
    second.tell()
    first.tell(signal=signal.SIGTERM)
    assert second.tell().signal == (0 if restarts else signal.SIGTERM)
    first.tell(signal=signal.SIGINT, has_left=True)
    assert second.tell().signal == (signal.SIGINT if restarts else signal.SIGTERM)
    assert second.tell().start is None


def test_a_node_that_is_asked_to_end_is_not_started(lead):
    _leader, first, second = make_two(lead)
    second.tell(signal=signal.SIGTERM)
    assert first.tell().start is None
    assert second.tell().start is None


def test_a_node_that_is_asked_to_end_after_its_processes_did_is_not_lost(lead):
    _leader, first, second = make_two(lead)
    begin(first, second)
    second.tell(signal=signal.SIGTERM)
    second.tell(is_running=False, has_left=True)
    assert first.end().status == 0


def test_one_node_of_which_nothing_is_left(lead):
    """Its launcher ends by an error of its own, such as a pipe that nobody reads."""
    leader = lead(num_nodes=1)
    node = Node(leader, 0)
    node.tell(restart=node.tell().start.restart, is_running=True)
    node.tell(has_left=True)
    assert not leader.is_needed()


def test_in_memory_checkpoints_need_memory_on_all_nodes(lead):
    leader = lead()
    first, second = Node(leader, 0), Node(leader, 1, has_memory=False)
    for node in (first, second):
        node.tell()
    assert [node.tell().start.has_memory for node in (first, second)] == [False, False]


def test_without_restarts_the_first_failure_is_the_end(lead):
    _leader, first, second = make_two(lead, restarts=0)
    begin(first, second)
    second.end(cause=KILLED)
    assert first.end(cause=Cause(0, 1)).status == 137
    assert second.tell().status == 137


def test_a_node_of_another_job_is_refused(lead):
    leader = lead()
    orders = Node(leader, 1, **{"--nodes": "3"}).tell()
    refusal = "node 1 has --nodes 3, and node 0 has 2"
    assert (orders.status, orders.refusal) == (2, refusal)
    assert Node(leader, 7).tell().refusal == "there are 2 nodes by node 0's --nodes"
    assert leader.take_lines()[0] == f"a launcher that is to be node 1 is refused: {refusal}."


def test_a_refused_launcher_hears_that_the_job_is_over(lead):
    leader, first, second = make_two(lead)
    other = Node(leader, 1)
    begin(first, second)
    assert other.tell().status is None
    second.end()
    assert first.end().status == 0
    second.tell()
    assert leader.is_needed()
    assert other.tell().status == 0
    assert not leader.is_needed()


# Who is heard.


class Deaf:
    """A leader that only counts."""

    def __init__(self):
        self.reports, self.lost, self.lines = [], [], []
        self.say, self.note_loss = self.lines.append, self.lost.append

    def exchange(self, report):
        self.reports.append(report)
        start = Start(3, "here:1", 4, 2, has_memory=True, is_whole=True)
        return Orders("leader", start, (2, 3), "was lost", status=7)


@pytest.fixture
def meeting(request, monkeypatch):
    """A meeting at an address, and a leader that only counts; nobody is too late, if not said."""
    monkeypatch.setattr(meeting_module, "_TO_PROVE", PATIENCE)
    monkeypatch.setattr(meeting_module, "_LEAVING", PATIENCE)
    host, port = free_address().split(":")
    leader, address = Deaf(), (host, int(port))
    made = Meeting(leader, address, SECRET, getattr(request, "param", PATIENCE))
    yield leader, address
    made.close()


def ask(address):
    """A report of a launcher, and the orders; None if there were none in time."""
    remote = RemoteLeader(address, SECRET, PATIENCE)
    report = Report(1, 4, OPTIONS, cause=Cause(2, -9), furthest={"a": 3})
    deadline = time.monotonic() + PATIENCE
    while (orders := remote.exchange(report)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    remote.close(dataclasses.replace(report, has_left=True))
    return report, orders


def test_reports_and_orders_arrive_as_they_were(meeting):
    leader, address = meeting
    report, orders = ask(address)
    assert orders == leader.exchange(None)
    assert leader.reports[0] == report
    assert leader.reports[-2] == dataclasses.replace(report, has_left=True)
    wait_for(lambda: leader.lost == [report.agent])


@pytest.mark.soak
@pytest.mark.parametrize("meeting", [3.0], indirect=True)
def test_a_launcher_that_gives_no_reports_is_silent(meeting):
    """It waits for a terminal, for example; its thread does not say for it that all is as before."""
    leader, address = meeting
    remote, report = RemoteLeader(address, SECRET, 0.5), Report(1, 4, OPTIONS)
    wait_for(lambda: remote.exchange(report) is not None)
    wait_for(lambda: leader.lost == [report.agent])
    before = len(leader.reports)
    wait_for(lambda: remote.exchange(report) and len(leader.reports) > before)
    remote.close(report)


def speak(address, text):
    """Sends bytes; what comes back until the other side ends the connection."""
    with socket.create_connection(address, timeout=300) as connection:
        connection.sendall(text)
        connection.shutdown(socket.SHUT_WR)
        found = b""
        while part := connection.recv(4096):
            found += part
        return found


def test_who_does_not_know_the_secret_is_refused_and_said_once(meeting, monkeypatch, capfd):
    leader, address = meeting
    monkeypatch.setattr(meeting_module, "_SAID_AFTER", 0.0)
    monkeypatch.setattr(meeting_module, "_AGAIN_AFTER", 0.01)
    remote = RemoteLeader(address, "another secret of 16 characters", PATIENCE)
    report, told = Report(1, 4, OPTIONS), ""
    assert remote.exchange(report) is None
    while "Is IPU_PIPELINE_SECRET the same there?" not in told:
        told += capfd.readouterr().err
    hello = speak(address, b"GET / HTTP/1.1\r\nHost: node0\r\n\r\n")[:22]
    assert hello.startswith(b"ipu-pipeline launch")
    too_long, short = (2**31).to_bytes(4) + bytes(100), (2).to_bytes(4) + bytes(32) + b"{}"
    for rest in (bytes(32) + too_long, bytes(32) + short, bytes(10)):
        assert len(speak(address, hello + rest)) == len(hello) + 32  # no more than the greeting
    for text in (os.urandom(500), b""):
        assert len(speak(address, text)) == len(hello) + 32
    assert leader.reports == []
    (line,) = leader.lines
    assert line.endswith("was refused: it does not know the job's secret. Others will not be reported.")
    assert remote.exchange(report) is None
    with monkeypatch.context() as patch:
        patch.setattr(meeting_module, "_LEAVING", 0.0)
        remote.close(report)
    assert "SECRET" not in capfd.readouterr().err
    assert ask(address)[1] is not None


def test_what_is_too_long_or_one_too_many_is_closed_at_once(meeting):
    """The other side goes on listening; silence alone would take `PATIENCE`."""
    _leader, address = meeting
    with contextlib.ExitStack() as left:

        def connect():
            return left.enter_context(socket.create_connection(address, timeout=0.8 * PATIENCE))

        connection = connect()
        greeting = connection.recv(100)
        connection.sendall(greeting[:-32] + bytes(32) + (2**31).to_bytes(4) + bytes(100))
        assert connection.recv(4096) == b""
        opened = [connect() for _number in range(66)]
        while opened[0].recv(4096):
            pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("1 --nodes 0", "--nodes must be 1 or more; it is 0"),
        ("1", "with --nodes 2, --meet-at must be given"),
        ("2 --meet-at node0:1", "--node-rank must be from 0 to 1, as --nodes is 2; it is 2"),
        ("0 --meet-at 0.0.0.0:1234", "at which the other nodes reach it"),
        *(
            (f"1 --meet-at {text}", f"--meet-at must be host:port, such as node0:1234; it is '{text}'")
            for text in ("node0", "node0:", "node0:99999", "http://node0:1", "me@node0:1")
        ),
        ("1 --meet-at node1:1", "variable IPU_PIPELINE_SECRET must be the same"),
    ],
)
def test_wrong_options(options, message, monkeypatch, capfd):
    monkeypatch.setenv("IPU_PIPELINE_SECRET", SECRET)
    if "IPU_PIPELINE_SECRET" in message:
        monkeypatch.delenv("IPU_PIPELINE_SECRET")
    with pytest.raises(SystemExit):
        main(["launch", "-n", "1", "--nodes", "2", "--node-rank", *options.split(), __file__])
    assert message in capfd.readouterr().err


IN_USE = "Address already in use (while attempting to bind on address ('127.0.0.1', {0}))"


@pytest.mark.parametrize(
    ("address", "why"),
    [("127.0.0.1:{0}", IN_USE), ("nowhere.invalid:1", "Name or service not known")],
)
def test_a_node_that_cannot_listen(address, why, monkeypatch, capfd):
    monkeypatch.setattr("signal.signal", lambda *_given: None)  # the launcher takes signals
    monkeypatch.setenv("IPU_PIPELINE_SECRET", SECRET)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address, why = (text.format(server.getsockname()[1]) for text in (address, why))
        options = f"-n 1 --nodes 2 --node-rank 0 --meet-at {address} --wait 1"
        assert main(["launch", *options.split(), __file__]) == 1
    what = f"ipu-pipeline launch: this node cannot listen at {address} (--meet-at): {why}."
    assert capfd.readouterr().err.splitlines() == [f"{what} This is tried again for 1 s (--wait).", what]


# Launchers and their processes.


class Cluster:
    """Nodes of this machine, each with a launcher and a directory in place of its memory."""

    def __init__(self, tmp_path, *program, options=()):
        self.meet_at = free_address()
        self.tmp_path = tmp_path
        self.program = list(map(str, program))
        self.options = ["-n", "1", "--nodes", "2", "--meet-at", self.meet_at, *options]
        self.nodes = [self.start(rank) for rank in range(2)]

    def start(self, rank, **environment):
        memory = self.tmp_path / f"memory{rank}"
        shutil.rmtree(memory, ignore_errors=True)
        memory.mkdir()
        command = [*LAUNCH, *self.options, "--node-rank", str(rank), "--memory-dir", str(memory)]
        with (self.tmp_path / f"log{rank}").open("a") as log:
            return Started(
                [sys.executable, *command, *self.program],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "IPU_PIPELINE_SECRET": SECRET, **environment},
            )

    def lose(self, rank):
        """A node with its memory, in whose place another one comes."""
        self.nodes[rank].kill()
        self.nodes[rank].wait()
        self.nodes[rank] = self.start(rank)

    def log(self, rank):
        return (self.tmp_path / f"log{rank}").read_text()

    def statuses(self, timeout=60):
        try:
            return [node.wait(timeout) for node in self.nodes]
        except subprocess.TimeoutExpired:
            raise AssertionError("\n".join(self.log(rank)[-4000:] for rank in range(2))) from None


@pytest.mark.soak
@pytest.mark.parametrize(
    ("number", "restarts", "statuses"),
    [(signal.SIGINT, 5, [130, 130]), (signal.SIGTERM, 0, [143, 143]), (signal.SIGTERM, 5, [1, 143])],
)
def test_signals_to_the_launcher_of_one_node(number, restarts, statuses, tmp_path):
    """Ctrl-C ends the job. SIGTERM ends the node, and all if it cannot be replaced; here nobody comes."""
    program = tmp_path / "program.py"
    program.write_text(
        f"""{PLAIN}
from ipu_pipeline.processes.launched import hear_failures
print("ready", index, file=sys.stderr, flush=True)
while not hear_failures():
    time.sleep(0.01)
sys.exit(1)
"""
    )
    options = ("--restarts", restarts, "--wait", "2", "--death-timeout", "2")
    cluster = Cluster(tmp_path, program, options=list(map(str, options)))
    wait_for(lambda: "ready 0" in cluster.log(0) and "ready 1" in cluster.log(1), 30)
    cluster.nodes[1].send_signal(number)
    assert cluster.statuses() == statuses
    assert ("node 1 did not come within 2 s (--wait)" in cluster.log(0)) == (statuses[0] == 1)
    assert find_left(tmp_path) == []


def train_on_two_nodes(tmp_path, runs, num_stages, num_replicas, *options):
    """A job that trains, with a process on each of two nodes, and these."""
    job = Job.of(tmp_path / "job")
    job.directory.mkdir()
    program = ("-m", "tests.support.resumer", job.directory, runs, num_stages, num_replicas)
    options = ("--restarts", "9", "--death-timeout", "9", *options)
    cluster = Cluster(tmp_path, *program, options=options)
    job.process, job.log = cluster.nodes[0], tmp_path / "log0"
    return job, cluster


@pytest.mark.soak
def test_nodes_are_lost_with_their_memory(tmp_path, uninterrupted):  # noqa: F811
    """Each of two in turn, also that of the leader: what one had is in the memory of the other."""
    job, cluster = train_on_two_nodes(tmp_path, 100, 4, 1, "--wait", "60")
    for victim in (1, 0):
        job.await_runs(8)
        cluster.lose(victim)
        job.process = cluster.nodes[0]
    assert cluster.statuses(120) == [0, 0]
    assert_same(job, uninterrupted(4, 1, 100))
    assert job.num_runs() < 100 + 2 * 3  # of runs that were done again
    assert "node 1 was lost: its launcher is gone." in cluster.log(0)
    assert "Process 1 (pid" in cluster.log(0)
    assert "Process 0 (pid" in cluster.log(1)
    assert len(list((tmp_path / "memory0").iterdir())) == 0


@pytest.mark.soak
def test_a_job_goes_on_with_fewer_nodes_and_with_more_again(tmp_path, uninterrupted):  # noqa: F811
    """Its four stages are in one process then, and in two processes before and after."""
    job, cluster = train_on_two_nodes(tmp_path, 400, 4, 1, "--wait", "8", "--shrink")
    job.await_runs(8)
    cluster.nodes[1].kill()
    wait_for(lambda: "the job goes on without" in cluster.log(0), 60)
    job.await_runs(20)
    cluster.nodes[1] = cluster.start(1)
    assert cluster.statuses(120) == [0, 0]
    assert "node 1 has come: all are started again with it." in cluster.log(0)
    assert_same(job, uninterrupted(4, 1, 400))
    assert job.num_runs() < 400 + 2 * 3


@pytest.mark.soak
def test_a_node_that_is_preempted_saves_and_is_replaced(tmp_path):
    """SIGTERM comes to the launcher of one node only; all processes stop after the same update."""
    program = ("-m", "tests.support.survivor", tmp_path / "model", 800, "every=1000000")
    cluster = Cluster(tmp_path, *program, options=("--restarts", "1", "--wait", "60", "--all"))
    wait_for(lambda: "] step " in cluster.log(1))
    cluster.nodes[1].terminate()
    assert cluster.nodes[1].wait(60) == 143
    (saved,) = (tmp_path / "model" / "checkpoints").iterdir()
    assert 0 < int(saved.name) < 800
    cluster.nodes[1] = cluster.start(1)
    assert cluster.statuses(90) == [0, 0]
    assert "process 0 ended with status 143" in cluster.log(0)
    assert "training has gone on with run" in cluster.log(0)
    first, second = (list(map(int, re.findall(r"\] step (\d+)\n", cluster.log(rank)))) for rank in range(2))
    assert first == second == sorted(set(first))  # nothing was done again
    assert max(first) == 800


# The files for clusters, with what stands in for these.

_SRUN = """#!/bin/bash
for node in $(seq 0 $((SLURM_NNODES - 1))); do
    SLURM_NODEID=$node "$@" &
done
wait -n && wait -n
"""
_WRITES = f"""{PLAIN}
with open(os.environ["HOME"] + f"/told{{index}}", "w") as file:
    file.write(os.environ["IPU_PIPELINE_NUM_PROCESSES"])
"""


@pytest.fixture
def cluster_environment(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(_WRITES)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("srun", _SRUN), ("scontrol", "#!/bin/sh\necho 127.0.0.1\necho 127.0.0.2\n")):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}


def assert_told(tmp_path):
    assert [(tmp_path / f"told{index}").read_text() for index in range(2)] == ["2", "2"]


@pytest.mark.soak
def test_the_file_for_slurm(tmp_path, cluster_environment):
    of_slurm = {"SLURM_NNODES": "2", "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node[0-1]"}
    subprocess.run(
        ["/bin/bash", ROOT / "examples" / "cluster" / "slurm.sh"],
        cwd=tmp_path,
        env={**cluster_environment, **of_slurm},
        check=True,
        timeout=60,
    )
    assert_told(tmp_path)


@pytest.mark.soak
def test_the_file_for_kubernetes(tmp_path, cluster_environment):
    text = (ROOT / "examples" / "cluster" / "kubernetes.yaml").read_text()
    documents = {document["kind"]: document for document in yaml.safe_load_all(text)}
    job = documents["Job"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert job["completions"] == job["parallelism"] == 2
    name = documents["Service"]["metadata"]["name"]
    assert job["template"]["spec"]["subdomain"] == name
    host = f"{documents['Job']['metadata']['name']}-0.{name}"  # of the pod of index 0
    assert container["command"][2].count(f"{host}:1234") == 1
    command = container["command"][2].replace(f"{host}:1234", free_address())
    pods = [
        Started(
            [*container["command"][:2], command],
            cwd=tmp_path,
            env={**cluster_environment, "JOB_COMPLETION_INDEX": str(index), "IPU_PIPELINE_SECRET": SECRET},
        )
        for index in range(2)
    ]
    assert [pod.wait(60) for pod in pods] == [0, 0]
    assert_told(tmp_path)
