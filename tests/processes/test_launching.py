"""Real processes of `ipu-pipeline launch`: how they join, listen, end and start again."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ipu_pipeline.command_line.main import main
from ipu_pipeline.launching.local_job import Cause, Output, Restarts
from ipu_pipeline.processes import launcher, rendezvous
from ipu_pipeline.processes.launcher import Memory, Start, hold_port
from ipu_pipeline.processes.rendezvous import address_towards
from tests.support.programs import Started, begin
from tests.test_rooms import rooms

ROOT = Path(rooms.__file__).resolve().parents[2]
LAUNCH = ("-m", "ipu_pipeline", "launch")
GUARD = 400  # seconds; what a test waits for happens in them, and what must not end sleeps longer
pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc")

BEGIN = """
import os, signal, sys, time
import ipu_pipeline.distributed as distributed
from ipu_pipeline.processes import rendezvous
rendezvous.join_by_environment()
import jax, jax.numpy as jnp, numpy as np
from ipu_pipeline.engine import peers
from ipu_pipeline.engine.devices import action_log
one = peers.current()
index = one.index
for number in range(3):
    action_log.current().note(action_log.Started("forward", index, 0, number), [jnp.ones(4) * number])
def num_told():
    told = one.store.key_value_dir_get("ipu_pipeline/status/")
    return sum("micro-batch 2" in text for _key, text in told)
while num_told() < 2:
    time.sleep(0.02)
one.meet("begin")
"""
EVALUATING = BEGIN.partition("import jax,")[0].replace("rendezvous.join_by", "eval(sys.argv[1])\n#")
LISTENING = """
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = Mesh(np.array(jax.devices()), ("x",))
ones = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("x")), np.ones(1), (2,))
total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(ones)
assert float(total) == 2
from ipu_pipeline.engine.devices.links import links
links().warm([0, 1])
def find_listening():
    listening = {}
    for name in ("tcp", "tcp6"):
        if os.path.exists(f"/proc/net/{name}"):
            for line in open(f"/proc/net/{name}").read().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    listening[f"socket:[{fields[9]}]"] = fields[1]
    own = [os.getpid(), *map(int, open(f"/proc/self/task/{os.getpid()}/children").read().split())]
    for pid in own:
        for file in os.listdir(f"/proc/{pid}/fd"):
            try:
                yield listening[os.readlink(f"/proc/{pid}/fd/{file}")]
            except (KeyError, OSError):
                pass
print("listening", index, *find_listening(), file=sys.stderr)
one.meet("listed")
"""
LOOPBACK = ("0100007F", "00000000000000000000000001000000")
MAPPED = "0000000000000000FFFF0000"  # in front of an address of IPv4


# What needs no JAX: the processes are numbered, and know how often they have been started again.
PLAIN = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
index, restart = int(os.environ["IPU_PIPELINE_PROCESS_ID"]), int(os.environ["IPU_PIPELINE_RESTART"])
"""


def launch(tmp_path, text, *options, through=(), begins=PLAIN, **variables):
    program = tmp_path / "program.py"
    program.write_text(begins + text)
    return Started(
        [*through, sys.executable, *LAUNCH, "-n", "2", "--death-timeout", "120", *options, program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
    )


def run(tmp_path, text, *options, **given):
    """The status, and what it wrote; the processes must not be there any more."""
    started = launch(tmp_path, text, *options, **given)
    out, err = started.communicate(timeout=GUARD)
    assert find_left(tmp_path) == []
    return started.returncode, out, err


def own_lines(errors):
    return [line.removeprefix("ipu-pipeline launch: ") for line in errors.splitlines() if line[0] != "["]


def free_address(host="127.0.0.1"):
    with socket.create_server((host, 0)) as server:
        return f"{host}:{server.getsockname()[1]}"


def find_left(tmp_path, seconds=120.0):
    """Processes that are left, other than the test's, when those that were killed are gone."""
    deadline = time.monotonic() + seconds
    while True:
        left = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                text = path.read_bytes()
            except OSError:
                continue
            if str(tmp_path).encode() in text:
                left.append(text)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def addresses_in(text):
    """At which the two processes said that they listen."""
    listed = dict(re.findall(r"listening (\d) (.*)", text))
    assert sorted(listed) == ["0", "1"]
    found = [one.split(":")[0].removeprefix(MAPPED) for line in listed.values() for one in line.split()]
    assert len(found) >= 5  # collectives and transfers of each process, and the coordinator
    return set(found)


def test_a_death_while_another_process_is_stuck_and_no_port_beyond_loopback(tmp_path):
    text = f"""
{LISTENING}
if index == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1000)
"""
    status, out, err = run(tmp_path, text, begins=BEGIN)
    assert (status, out) == (128 + signal.SIGKILL, "")
    assert "ipu-pipeline launch: process 1 was ended by SIGKILL." in err
    assert re.search(r"\[0\] ipu_pipeline: process 0 ends\. Process 1 \(pid \d+ on .*\) has died", err)
    for process in range(2):
        last = f"stage {process} forward of micro-batch 2 of step 0"
        assert f"process {process}: the last action finished is {last}" in err
    assert addresses_in(err) <= set(LOOPBACK)


KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
STOPPED = "os.kill(os.getpid(), signal.SIGSTOP)"
STUCK, WAITS = "time.sleep(1000)", 'one.meet("end")'
SOON = ("--death-timeout", "9")  # what does not go on is noticed; so is what has no processor meanwhile


ENDS = {  # what process 0 or 1 does and the other one; the launcher's status, what it says, its options
    "killed": (KILLED, 1, WAITS, 137, "ProcessError: Process 1 .* has died", ()),
    "error": ("raise ValueError('no data')", 1, WAITS, 1, "ended with ValueError: no data", ()),
    "0 killed": (KILLED, 0, STUCK, 137, r"Process 0 .* has died: it (is gone|was ended by SIGKILL)", ()),
    "stopped": (STOPPED, 1, WAITS, 1, "ProcessError: Process 1 .* no sign of it", SOON),
    "ended": ("sys.exit(7)", 1, WAITS, 1, "process 1 has ended, and process 0 cannot", SOON),
    "stuck": (STUCK, 1, WAITS, 1, "process 1 does not go on, and process 0 cannot", SOON),
}
LONG = [pytest.param(name, marks=pytest.mark.thorough) for name in ("killed", "error")]
LONGEST = [pytest.param(name, marks=pytest.mark.soak) for name in ("0 killed", "stopped", "ended", "stuck")]


@pytest.mark.parametrize("end", [*LONG, *LONGEST])
def test_ends_of_processes(end, tmp_path):
    does, who, other, status, message, options = ENDS[end]
    text = f"""
import atexit
atexit.register(lambda: print("a handler of its own has run", file=sys.stderr))
if index == {who}:
    {does}
else:
    {other}
"""
    found, _out, err = run(tmp_path, text, *options, begins=BEGIN)
    assert found == status
    assert re.search(message, err)
    if other == WAITS:  # its main thread gets the error, and ends as Python ends programs
        assert f"[{1 - who}] a handler of its own has run" in err


@pytest.mark.thorough
def test_listening_at_an_address_that_was_given(tmp_path):
    own = address_towards("192.0.2.77", 80)  # nobody's; nothing is sent
    if own.startswith("127.") or ":" in own:
        pytest.skip("this machine has no other address than the loopback one")
    joins = 'distributed.initialize(os.environ["ADDRESS"], 2, int(sys.argv[1]), death_timeout=120)'
    program = tmp_path / "program.py"
    program.write_text(f"{BEGIN.replace('rendezvous.join_by_environment()', joins)}{LISTENING}")
    address = free_address(own)
    started = [begin(program, index, ADDRESS=address) for index in range(2)]
    texts = [one.communicate(timeout=GUARD)[1] for one in started]
    assert [one.returncode for one in started] == [0, 0]
    expected = "".join(f"{int(part):02X}" for part in reversed(own.split(".")))
    assert addresses_in("".join(texts)) == {expected}


@pytest.mark.thorough
def test_faults_at_the_beginning(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(EVALUATING)

    def run_alone(call):
        started = begin(program, f"distributed.initialize({call})")
        return started.communicate(timeout=GUARD)[1], started.returncode

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text, status = run_alone(f"'127.0.0.1:{port}', 2, 0")
        assert "the coordinator cannot listen at 127.0.0.1" in text
        assert status == 1
    for index in range(2):  # process 0, and one that does not find it
        text, status = run_alone(f"'127.0.0.1:{port}', 2, {index}, initialization_timeout=4")
        assert "TimeoutError: distributed.initialize: the 2 processes of the run did not all come" in text
        assert status == 1


@pytest.mark.thorough
def test_processes_of_another_job_are_found(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(EVALUATING)
    address = free_address()
    started = []
    for index, secret in enumerate(["one of 16 letters", "and another one"]):
        call = f"distributed.initialize('{address}', 2, {index})"
        started.append(begin(program, call, IPU_PIPELINE_SECRET=secret))
    errors = [one.communicate(timeout=GUARD)[1] for one in started]
    assert [one.returncode for one in started] == [1, 1]
    assert any(re.search(r"process \d has another secret than process \d", text) for text in errors), errors


@pytest.mark.thorough
def test_a_process_that_ends_before_all_have_joined(tmp_path):
    text = 'import os, sys\nif os.environ["IPU_PIPELINE_PROCESS_ID"] == "1":\n    sys.exit("no module x")\n'
    program = tmp_path / "program.py"
    program.write_text(text + BEGIN)
    job = begin(*LAUNCH, "-n", "2", program)  # with the default timeout, a minute
    _out, errors = job.communicate(timeout=GUARD)
    assert job.returncode == 1
    assert "Process 1 ended with status 1: no module x, before all processes had joined" in errors


@pytest.mark.thorough
def test_process_0_has_given_up_and_its_coordinator_is_there(tmp_path):
    """It has come and gone, so that the next one is not alone by the coordinator's count."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time\nimport ipu_pipeline.distributed as distributed\n"
        "address, index = sys.argv[1], int(sys.argv[2])\n"
        "try:\n    distributed.initialize(address, 2, index, initialization_timeout=3)\n"
        "except TimeoutError as error:\n    print('late', flush=True)\n"
        "    sys.exit(str(error)) if index else time.sleep(1000)\n"
    )
    address = free_address()
    first = begin(program, address, 0)  # which ends with the test
    assert first.stdout.readline() == "late\n"
    second = begin(program, address, 1)
    _out, errors = second.communicate(timeout=GUARD)
    assert "the 2 processes of the run did not all come" in errors
    assert (second.returncode, first.poll()) == (1, None)


def test_what_is_shown(capfdbinary):
    def show(*actions, shows_all=False, count=2):
        output = Output(count, shows_all)
        for name, *arguments in actions:
            getattr(output, name)(*arguments)
        output.end()
        return capfdbinary.readouterr()

    gloo = b"[Gloo] Rank 1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n"
    first, second = ("take", 0, False, b"a\nb"), ("take", 1, False, b"a\n" + gloo)
    ends = [("take", process, False, b"") for process in range(2)]
    assert show(first, second, ("know_results", 1), *ends) == (b"a\n", b"")
    more = ("take", 0, False, b"c\nd")
    assert show(first, second, ("know_results", 0), more, *ends) == (b"a\nbc\nd", b"")
    assert show(second, ("take", 0, False, b"a\n")) == (b"a\n", b"")
    assert show(first, second, *ends) == (b"[0] a\n[1] a\n[0] b\n", b"")
    assert show(first, second, *ends, shows_all=True) == (b"[0] a\n[1] a\n[0] b\n", b"")
    assert show(("take", 1, True, b"x\ny"), ("take", 1, True, b"")) == (b"", b"[1] x\n[1] y\n")
    much = ("take", 0, False, (b"a" * 2**20 + b"\n") * 16)
    assert show(much, ("take", 1, False, b"b\n"))[0].endswith(b"a\n[1] b\n")
    assert show(second, much, ("know_results", 1))[0].startswith(b"[1] a\n[0] a")
    results = [("know_results", 1), ("know_results", 0)]
    out, err = show(*results, ("take", 0, False, b"a\n"), ("take", 1, False, b"b\n"))
    assert out == b"b\n"
    assert b"process 0 has results too; what it prints is shown with --all only." in err


def test_the_line_that_says_why_is_not_one_that_only_adds_to_it(capfd):
    output = Output(2, shows_all=False)
    output.take(0, True, b"Traceback (most recent call last):\n  File x\n")
    output.take(0, True, b"ProcessError: process 1 has died.\n")
    output.take(0, True, b"  process 0: the last action finished is none\n\n")
    output.take(1, True, b"x" * 10**6 + b"\n")
    capfd.readouterr()
    # The beginning of a long one: it goes to the other processes.
    assert output.last_errors == {0: "ProcessError: process 1 has died.", 1: "x" * 200}


def test_a_launcher_that_reads_nothing_holds_up_no_process(monkeypatch):
    """As when its terminal is stopped. What it reads later are whole lines."""
    own, other = socket.socketpair()
    monkeypatch.setenv(launcher.LAUNCHER_VARIABLE, launcher.describe_socket(other))
    monkeypatch.setattr(launcher, "_TELL_EVERY", -1.0)

    def tell():
        for run_number in range(20_000):
            launcher.tell_progress("a", run_number, 2 * run_number)

    telling = threading.Thread(target=tell, daemon=True)
    telling.start()
    telling.join(GUARD)
    assert not telling.is_alive()
    lines = own.recv(2**22).decode().splitlines()
    assert len(lines) > 100
    seconds = f"{launcher.useful_seconds():.6g}"
    assert all(line == f"progress a {n} {2 * n} {seconds}" for n, line in enumerate(lines))
    other.detach()
    launcher._launcher().close()
    launcher._open.cache_clear()
    own.close()


def test_the_coordinators_port_is_nobody_elses():
    """It was free for a moment, until process 0 had imported JAX, and another program might take it."""
    with hold_port() as held:
        address = held.getsockname()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        with socket.create_server(address):  # as the coordinator asks whether anybody listens there
            pass
        with socket.create_server(address, reuse_port=True):  # as gRPC listens
            pass


def test_the_coordinator_is_no_child_of_process_0():
    """Ray kills the children of process 0 before the other processes, which JAX would then abort."""
    with hold_port() as held:
        host, port = held.getsockname()
        coordinator = rendezvous._Coordinator(f"{host}:{port}", 1, 10)
        assert coordinator._process.returncode == 0
        socket.create_connection((host, port)).close()
        coordinator.shutdown()


def test_a_process_has_the_memory_of_its_own_launcher():
    start = Start(2, 3, "127.0.0.1:5", 6.0, 1, "known")
    environment = {"IPU_PIPELINE_MEMORY_DIR": "another's", "IPU_PIPELINE_SECRET": "another's"}
    start.describe_to(environment, 1, None)
    assert "another's" not in environment.values()
    start.describe_to(environment, 1, "own")
    assert (environment["IPU_PIPELINE_MEMORY_DIR"], environment["IPU_PIPELINE_CACHE_DIR"]) == (
        "own",
        "own/programs",
    )
    assert "known" not in repr(start)


NO_MEMORY = "nothing can be written to /nowhere/at/all: No such file or directory"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-n 0 {}", "-n must be 1 or more; it is 0"),
        ("--death-timeout 1 {}", "--death-timeout must be 2 or more; it is 1"),
        ("--restarts -1 {}", "--restarts must be 0 or more; it is -1"),
        ("--grace nan {}", "--grace must be 0 or more; it is nan"),
        ("--memory-every 0 {}", "--memory-every must be 1 or more; it is 0"),
        ("--restarts 1 --memory-dir /nowhere/at/all {}", f"--memory-dir: {NO_MEMORY}"),
        ("--nodes 2 {}", "unrecognized arguments: --nodes"),
        ("", "the following arguments are required: SCRIPT"),
        ("nowhere.py", "there is no program nowhere.py"),
        ("{}", "--death-timeout: invalid float value: 'a minute'"),
    ],
)
def test_wrong_arguments_of_the_launcher(options, message, capsys, monkeypatch):
    if "minute" in message:
        monkeypatch.setenv("IPU_PIPELINE_DEATH_TIMEOUT", "a minute")
    with pytest.raises(SystemExit):
        main(["launch", "-n", "2", *options.format(__file__).split()])
    assert message in capsys.readouterr().err


def test_all_are_started_again_until_there_were_too_many_failures_of_one_cause(tmp_path):
    """And a process hears from the launcher which other one has failed."""
    text = """
from ipu_pipeline.processes.launcher import hear_failures
if index == 1:
    sys.exit(f"file {restart} is missing")
while not hear_failures():
    time.sleep(0.01)
sys.exit(f"heard {hear_failures()}")
"""
    status, out, errors = run(tmp_path, text, "--restarts", "1")
    assert own_lines(errors) == [
        "process 1 ended with status 1: file 0 is missing.",
        "process 0 ended with status 1.",
        "restart 1 of at most 1 for this cause, in 1 s.",
        "process 1 ended with status 1: file 1 is missing.",
        "process 0 ended with status 1.",
        "given up after 1 restart.",
    ]
    assert "[0] heard {1: 'ended with status 1: file 0 is missing'}" in errors
    assert (status, out) == (1, "")


def test_results_are_shown_once(tmp_path):
    text = """
from ipu_pipeline.processes.launcher import tell_results
print("prepared by", index)
tell_results(1)
print("results of", index)
print(f"{index} is told", file=sys.stderr)
assert "IPU_PIPELINE_MEMORY_DIR" not in os.environ  # without restarts
"""
    status, out, errors = run(tmp_path, text, IPU_PIPELINE_MEMORY_DIR="/of/another/launcher")
    assert (status, out) == (0, "prepared by 1\nresults of 1\n")
    assert sorted(errors.splitlines()) == ["[0] 0 is told", "[1] 1 is told"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda n: n.name)
def test_signals_reach_all_processes_which_end_with_the_launcher(tmp_path, number):
    started = launch(tmp_path, 'print("ready", file=sys.stderr, flush=True)\ntime.sleep(1000)')
    assert {started.stderr.readline() for _process in range(2)} == {"[0] ready\n", "[1] ready\n"}
    started.send_signal(number)
    _out, errors = started.communicate(timeout=GUARD)
    assert find_left(tmp_path) == []
    assert started.returncode == (-number if number == signal.SIGKILL else 128 + number)
    for process in range(2):
        assert (f"process {process} was ended by {number.name}" in errors) == (number != signal.SIGKILL)


PATIENT = """
import sys
from ipu_pipeline.command_line.main import main
from ipu_pipeline.launching.local_job import Restarts
Restarts.after = lambda *_given: 1000.0
sys.exit(main(["launch", "-n", "2", "--restarts", "9", sys.argv[1]]))
"""


def test_a_signal_ends_a_job_that_waits_for_its_next_start(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("raise SystemExit(3)")
    started = begin("-c", PATIENT, program)
    while ", in 1000 s." not in (line := started.stderr.readline()):
        assert line
    started.send_signal(signal.SIGTERM)
    started.communicate(timeout=GUARD)
    assert started.returncode == 128 + signal.SIGTERM
    assert find_left(tmp_path) == []


def test_what_is_ignored_as_under_nohup_ends_nothing(tmp_path):
    text = """
print("ready", file=sys.stderr, flush=True)
while not os.path.exists(__file__ + ".end"):
    time.sleep(0.02)
"""
    started = launch(tmp_path, text, through=["nohup"])
    while (line := started.stderr.readline()) != "[0] ready\n":  # nohup says that it ignores the input
        assert line
    started.send_signal(signal.SIGHUP)
    (tmp_path / "program.py.end").touch()
    _out, errors = started.communicate(timeout=GUARD)
    assert (started.returncode, own_lines(errors)) == (0, [])


def test_a_reader_of_the_output_that_ends(tmp_path):
    started = launch(tmp_path, "while True: print(index)", "--all", "--restarts", "1")
    assert started.stdout.readline()
    started.stdout.close()
    assert started.wait(GUARD) == 128 + signal.SIGPIPE
    assert started.stderr.read() == ""
    assert find_left(tmp_path) == []


def test_processes_that_do_not_end_in_time_are_killed(tmp_path):
    text = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", file=sys.stderr, flush=True)
time.sleep(1000)
"""
    started = launch(tmp_path, text, "--restarts", "9", "--grace", "0.1")
    assert {started.stderr.readline() for _process in range(2)} == {"[0] ready\n", "[1] ready\n"}
    started.send_signal(signal.SIGTERM)
    _out, errors = started.communicate(timeout=GUARD)
    first, *others = own_lines(errors)
    assert first == "processes 0, 1 have not ended by themselves."
    assert sorted(others) == [f"process {process} was ended by SIGKILL." for process in range(2)]
    assert started.returncode == 128 + signal.SIGKILL


def test_what_is_said_of_an_end():
    assert str(Cause(2, 7)) == "process 2 ended with status 7"
    assert str(Cause(0, 1, "3 is odd")) == "process 0 ended with status 1: 3 is odd"
    assert Cause(0, 1, "step 3 failed").kind == Cause(1, 1, "step 12 failed").kind
    assert Cause(0, 1, "step 3 failed").kind != Cause(0, 1, "no such file").kind
    assert str(Cause(0, -signal.SIGSEGV, "noise")) == "process 0 was ended by SIGSEGV"
    assert "signal 63" in str(Cause(0, -63))
    assert "for lack of memory" in str(Cause(0, -signal.SIGKILL, was_memory=True))
    assert "memory" not in str(Cause(0, -signal.SIGTERM, was_memory=True))


def test_delays_grow_and_a_long_run_or_progress_begins_to_count_anew():
    restarts, killed = Restarts(8), Cause(0, -signal.SIGKILL)
    assert [restarts.after(killed, 5) for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, None]
    assert restarts.after(Cause(1, 1), 5) == 1
    assert restarts.after(killed, 600) == 1
    assert restarts.count == 10
    restarts, told = Restarts(8), [False, False, True, False, False]
    assert [restarts.after(killed, 5, progress) for progress in told] == [1, 2, 0, 1, 2]


def test_only_what_comes_further_than_ever_before_is_started_again_at_once(tmp_path):
    """As a training says it: its name, the run that was done, the global step, and the seconds of runs."""
    text = """
told = [["a 4 50 0.1"], ["a 4 50 0.1", "a 5 50 0.2"], ["b 0 10 0.2"], ["a 5 60 0.4"], []][restart]
own = int(os.environ["IPU_PIPELINE_LAUNCHER_FD"].split(":")[0])
os.write(own, b"resumed %d\\n" % restart)
for text in told:
    os.write(own, f"progress {text}\\n".encode())
if told:
    sys.exit("failed")
from ipu_pipeline.processes.launcher import JobHistory
print(JobHistory.of_environment().describe(), file=sys.stderr)
"""
    status, _out, errors = run(tmp_path, text, "--restarts", "9", "-n", "1")
    assert status == 0, errors
    assert re.findall(r"for this cause, (.*)\.", errors) == ["at once", "in 1 s", "at once", "at once"]
    for first, redone in (("4 (to step 50)", "1 run was"), ("0 (to step 10)", "2 runs were")):
        cause = "s after process 0 ended with status 1: failed"
        on = rf"training has gone on with run {re.escape(first)}, [0-9.]+ {cause}; {redone} done again\."
        assert re.search(on, errors)
    goodput = r"goodput 0\.\d\d: the runs took 0\.4 s of .* the job was started again 4 times\."
    assert re.search(goodput, errors)
    history = "The job has been started again 4 times. The last time, training has gone on with run 5"
    assert f"[0] {history}" in errors


def test_memory_is_the_launchers_own_and_goes_with_it(tmp_path):
    """Two starts share the directory. What a launcher that was killed left is removed by the next."""
    text = f"""
from pathlib import Path
directory = Path(os.environ["IPU_PIPELINE_MEMORY_DIR"])
assert directory.parent == Path({str(tmp_path / "memory")!r}) and directory.stat().st_mode & 0o777 == 0o700
assert os.environ["IPU_PIPELINE_MEMORY_EVERY"] == "3"
assert os.environ["IPU_PIPELINE_CACHE_DIR"] == str(directory / "programs")
(directory / f"{{index}}-{{restart}}").touch()
if restart == 0:
    (directory.parent / "begun").touch()
    time.sleep(600)
    os.kill(os.getpid(), signal.SIGKILL)
assert (directory / f"{{index}}-0").exists()
"""
    (tmp_path / "memory").mkdir()
    options = ("--restarts", "1", "--memory-dir", tmp_path / "memory", "--memory-every", "3")
    killed = launch(tmp_path, text, *options)
    while not (tmp_path / "memory" / "begun").exists():
        assert killed.poll() is None
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    assert len(list((tmp_path / "memory").iterdir())) == 2
    foreign = tmp_path / "memory" / "ipu_pipeline-launch-somebody"
    foreign.mkdir()
    other = Memory(tmp_path / "memory")  # of a launcher that lives
    status, _out, errors = run(tmp_path, text.replace("600", "0"), *options)
    assert status == 0, errors
    left = {path.name for path in (tmp_path / "memory").iterdir()}
    assert left == {"begun", foreign.name, other.path.name}
    other.close()
