"""`ipu-pipeline monitor` and `devices`, and what programs announce of themselves."""

import dataclasses
import errno
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import engine, loops
from ipu_pipeline.command_line import main, monitor_command
from ipu_pipeline.ipu_infeed_queue import IPUInfeedQueue
from ipu_pipeline.processes import announcements, board, launcher
from ipu_pipeline.processes.launcher import Failure, JobHistory
from tests.support import front
from tests.support.programs import begin, run, wait_for

NOBODY = 2**22 + 1  # more than any pid


@pytest.fixture
def announced(tmp_path, monkeypatch):
    """A directory of the test's own, and the file of this process there."""
    path = tmp_path / "announced"
    monkeypatch.setenv(board.DIRECTORY_VARIABLE, str(path))
    monkeypatch.delenv(announcements.SWITCH_VARIABLE, raising=False)
    return path


@pytest.fixture
def announcer(announced, monkeypatch):
    """Announces as in a process that has just begun, every 20 ms."""
    made = announcements._Announcer()
    monkeypatch.setattr(announcements, "_announcer", made)
    monkeypatch.setattr(announcements, "_INTERVAL", 0.02)
    yield made
    made._end()
    if made._thread is not None:
        made._thread.join(400)
        assert not made._thread.is_alive()


def make_run(**changes):
    run = {"name": "Pipeline", "state": "running", "since": time.time(), "trains": True}
    run |= {"unit": "micro-batch", "count": 7, "handled": 56, "rate": 12.5, "batch_size": 4, "ipus": []}
    run |= {"process": 0, "num_processes": 1}
    return run | changes


def make_ipu(number, **changes):
    known = {"ipu": number, "device": number, "platform": "cpu", "kind": "cpu", "planned_bytes": 2048}
    return known | changes


def put(process, *runs, program="train.py", **more):
    now = time.time()
    board.write(process, {"program": program, "started": now, "written": now, "runs": runs, **more})


def read_programs(capsys):
    assert main.main(["monitor", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["programs"]


def test_what_a_session_runs(announcer, announced, capsys):
    """Two replicas of two stages."""
    opt = ipu.optimizers.CrossReplicaOptimizer(optax.sgd(0.1))
    model = front.Model(
        optimizer_function=lambda *args: ipu.pipelining_ops.OptimizerFunctionOutput(opt, args[-1]),
        repeat_count=2,
    )
    front.ipu_config(4).configure_ipu_system()
    with front.session_of(model) as session:
        for _ in range(3):
            model.run(session)
        pipeline = model.program.calls[0].pipeline
        planned = [memory.num_device_bytes for memory in engine.planning.plan_ipu_memory(pipeline)]

        def is_told():
            programs = read_programs(capsys)
            return programs and programs[0]["runs"][0]["count"] == 6

        wait_for(is_told)
        (program,) = read_programs(capsys)
        (run,) = program["runs"]
    assert program["pid"] == os.getpid()
    assert program["program"] == sys.argv[0]
    assert 2**20 < program["resident_bytes"] < 2**40
    told = {"name": "Pipeline", "handled": 36, "batch_size": 4, "unit": "micro-batch"}
    assert run | told | {"process": 0, "num_processes": 1} == run
    assert [(one["ipu"], one["device"], one["platform"]) for one in run["ipus"]] == [
        (number, device.id, "cpu") for number, device in enumerate(jax.devices()[:4])
    ]
    assert [one["planned_bytes"] for one in run["ipus"]] == [*planned, *planned]
    assert run["samples_per_second"] is None or run["samples_per_second"] == 4 * run["rate"]
    assert announced.stat().st_mode & 0o777 == 0o700
    file = announced / board.this_process().file_name
    assert file.stat().st_mode & 0o777 == 0o600
    announcer._end()
    wait_for(lambda: not list(announced.iterdir()))
    assert main.main(["monitor"]) == 0
    assert capsys.readouterr().out == "No pipelines are running.\n"


def test_several_sessions_of_a_process_and_loops(announcer, capsys):
    def body(total, x, labels):
        return total + jnp.sum(x)

    model = front.Model()
    infeed = IPUInfeedQueue(front.data())
    loop = front.compile_program(lambda: loops.repeat(5, body, [np.float32(0)], infeed))

    def train(number):
        with ipu.Session(seed=number) as session:
            for _ in range(number):
                session.run(model.program, {model.rate: 0.1})
            kept.append(session)

    kept = []
    with ipu.Session() as first:
        first.run([model.initializer, infeed.initializer])
        for number in (1, 2):
            thread = threading.Thread(target=train, args=(number,))
            thread.start()
            thread.join()
        first.run(loop)
        first.run(loop)
        wait_for(lambda: len((read_programs(capsys) or [{"runs": []}])[0]["runs"]) == 3)
        wait_for(lambda: read_programs(capsys)[0]["runs"][2]["count"] == 10)
        runs = read_programs(capsys)[0]["runs"]
    names = ("count", "handled", "unit", "batch_size", "trains")
    assert [tuple(run[name] for name in names) for run in runs] == [
        (1, 3, "micro-batch", 4, True),
        (2, 6, "micro-batch", 4, True),
        (10, 10, "iteration", 4, False),
    ]
    assert runs[2]["samples_per_second"] is None


def test_nothing_is_kept_alive_by_it(announcer, capsys):
    def run_once():
        model = front.Model(gradient_accumulation_count=4)
        with front.session_of(model) as session:
            model.run(session)

    run_once()
    (run,) = announcer.runs.values()
    gc.collect()
    ipu.config.reset_ipu_configuration()

    def is_gone():
        gc.collect()
        return not run.is_known()

    wait_for(is_gone)  # the thread that announces may have it in its hands just now
    wait_for(lambda: (read_programs(capsys) or [{"runs": [1]}])[0]["runs"] == [])


def test_it_can_be_turned_off(announcer, announced, monkeypatch):
    monkeypatch.setenv(announcements.SWITCH_VARIABLE, "0")
    model = front.Model()
    with front.session_of(model) as session:
        model.run(session)
    assert announcer._thread is None
    assert not announced.exists()


@pytest.mark.parametrize("fault", ["no room", "a file in its place", "no rights"])
def test_training_goes_on_where_nothing_can_be_announced(fault, announcer, announced, monkeypatch):
    monkeypatch.setattr(announcements, "_AFTER_ERROR", 0.02)
    tried = []

    def put_nowhere(*arguments):
        tried.append(arguments)
        raise OSError(errno.ENOSPC if fault == "no room" else errno.EACCES, "cannot")

    if fault == "a file in its place":
        announced.write_text("mine")
    else:
        original = board._put
        monkeypatch.setattr(board, "_put", put_nowhere)
    model = front.Model()
    with front.session_of(model) as session:
        losses = model.run(session)
        assert len(losses) == 3
        if fault == "a file in its place":
            assert announced.read_text() == "mine"
            announced.unlink()
        else:
            wait_for(lambda: len(tried) > 1)
            monkeypatch.setattr(board, "_put", original)  # what else is patched stays: it is tried on
        wait_for(lambda: board.read_all().announced)  # once there is room again


def test_a_full_disk_leaves_no_piece_of_a_file(announced, monkeypatch):
    put(board.this_process(), make_run(count=1))

    def fail(*arguments, **places):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        put(board.this_process(), make_run(count=2))
    assert [path.name for path in announced.iterdir()] == [board.this_process().file_name]
    assert board.read_all().announced[0]["runs"][0]["count"] == 1


PROGRAM = """
import os, sys, time
import ipu_pipeline as ipu
from tests.support import front
model = front.Model()
with front.session_of(model) as session:
    model.run(session)
    print("ready", flush=True)
    time.sleep(1000)
"""
FORKING = """
import os, sys, time
from ipu_pipeline.processes import announcements, board
announcements._announcer.start()  # without JAX's backend, with which no process can be forked and end
while not board.read_all().announced:
    time.sleep(0.01)
if os.fork() == 0:
    assert announcements._announcer._thread is None
    sys.exit(0)  # what its parent announces stays
assert os.wait()[1] == 0
print(len(board.read_all().announced), flush=True)
"""


@pytest.mark.thorough
def test_two_programs_one_of_which_is_killed(announced, capsys):
    process = begin("-W", "ignore", "-c", PROGRAM)
    guard = threading.Timer(400, process.kill)
    guard.start()
    with process:
        try:
            assert process.stdout.readline() == "ready\n"
            put(board.this_process(), make_run())
            wait_for(lambda: len(read_programs(capsys)) == 2)
            assert {program["pid"] for program in read_programs(capsys)} == {os.getpid(), process.pid}
            assert main.main(["monitor"]) == 0
            line = next(line for line in capsys.readouterr().out.splitlines() if str(process.pid) in line)
            assert line.split()[:3] == [str(process.pid), "-c", "Pipeline"]
        finally:
            guard.cancel()
            os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        # It has ended, and is a zombie as long as nobody has asked for its status.
        assert [program["pid"] for program in read_programs(capsys)] == [os.getpid()]
        assert [path.name for path in announced.iterdir()] == [board.this_process().file_name]


@pytest.mark.thorough  # it imports JAX in a process of its own
def test_what_a_forked_process_announces_is_its_own(announced):
    assert run("-c", FORKING, as_tests=True) == "1\n"
    assert not list(announced.iterdir())  # and it is taken down at the end


def test_files_of_processes_that_are_gone_are_removed(announced):
    here = board.this_process()
    own = {"boot": here.boot, "namespace": here.namespace, "host": here.host}
    gone = [
        board.Process(NOBODY, 5, **own),
        board.Process(here.pid, here.start - 1, **own),  # a pid that was used before
        board.Process(here.pid, here.start + 1, **own | {"boot": "before"}),  # of an earlier start
    ]
    elsewhere = [
        board.Process(here.pid, 6, **own | {"namespace": "pid:[1]"}),  # in a container
        board.Process(here.pid, 7, **own | {"boot": "other", "host": "other"}),
    ]
    for process in (here, *gone, *elsewhere):
        put(process, make_run())
    (announced / f".{NOBODY}-5.new").write_text("a piece")
    os.utime(announced / f".{NOBODY}-5.new", (1, 1))
    (announced / f".{here.pid}-{here.start}.new").write_text("being written")
    (found,) = board.read_all().announced
    assert found["process"] == vars(here)
    left = {path.name for path in announced.iterdir()}
    assert left == {process.file_name for process in (here, *elsewhere)} | {f".{here.pid}-{here.start}.new"}


def test_nothing_is_removed_where_the_namespace_is_not_known(announced, monkeypatch):
    def refuse(*arguments, **places):
        raise PermissionError("readlink")

    monkeypatch.setattr(os, "readlink", refuse)
    here = board.this_process()
    assert here.namespace == ""
    put(here, make_run())
    put(board.Process(NOBODY, 5, here.boot, "", here.host), make_run())
    assert len(board.read_all().announced) == 1
    assert len(list(announced.iterdir())) == 2


def test_what_is_no_announcement_is_passed_over(announced, capsys):
    here = board.this_process()
    put(here, make_run())
    good = json.loads((announced / here.file_name).read_text())
    job = {"begun": 1, "restarts": 3, "failures": [{"what": 3}], "goodput": None}
    strange = {
        "junk.json": b"\xff{",
        "deep.json": b"[" * 100_000,
        "list.json": b"[1]",
        "empty.json": b"",
        "other-name.json": json.dumps(good).encode(),
        "1-2.json": json.dumps(good | {"runs": [{"name": 3}]}).encode(),
        "1-3.json": json.dumps(good | {"process": {"pid": "1"}}).encode(),
        "1-4.json": json.dumps(good | {"runs": [make_run(ipus=[5])]}).encode(),
        "1-5.json": json.dumps(good | {"job": {"restarts": "3"}}).encode(),
        "1-6.json": json.dumps(good | {"job": job}).encode(),
        ".-.new": b"",
    }
    for name, text in strange.items():
        (announced / name).write_bytes(text)
    os.mkfifo(announced / "fifo.json")
    (announced / "link.json").symlink_to("/dev/zero")
    (announced / "folder.json").mkdir()
    assert len(read_programs(capsys)) == 1
    assert len(list(announced.iterdir())) == len(strange) + 4


def test_directories_that_are_not_used(announced, tmp_path, monkeypatch, capsys):
    def refuses(reason):
        with pytest.raises(OSError, match=reason):
            put(board.this_process(), make_run())
        assert read_programs_with_note(reason) == []

    def read_programs_with_note(reason):
        assert main.main(["monitor", "--json"]) == 0
        said = capsys.readouterr()
        assert reason in said.err
        return json.loads(said.out)["programs"]

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    announced.symlink_to(elsewhere)
    refuses("is no directory, or a link to one")
    assert not list(elsewhere.iterdir())
    announced.unlink()
    announced.mkdir()
    announced.chmod(0o770)
    refuses("others can write to")
    announced.chmod(0o700)
    tmp_path.chmod(0o777)
    refuses("or others can write to it")
    tmp_path.chmod(0o1777)  # as /tmp
    put(board.this_process(), make_run())
    assert len(read_programs(capsys)) == 1
    tmp_path.chmod(0o700)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    refuses("belongs to another user")


def test_where_directories_are(monkeypatch, tmp_path):
    monkeypatch.delenv(board.DIRECTORY_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("TMPDIR", raising=False)
    uid = os.geteuid()
    others = [f"/run/user/{uid}/ipu_pipeline", f"/tmp/ipu_pipeline-{uid}"]  # noqa: S108
    assert [str(path) for path in board.directories()] == [f"{tmp_path}/ipu_pipeline", *others]
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert [str(path) for path in board.directories()] == [*others, f"{tmp_path}/ipu_pipeline-{uid}"]
    monkeypatch.setenv(board.DIRECTORY_VARIABLE, str(tmp_path / "own"))
    assert board.directories() == [tmp_path / "own"]


def test_the_newest_of_two_files_of_a_process_counts(monkeypatch, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setattr(board, "directories", lambda: [first, second])
    put(board.this_process(), make_run(count=1))
    first.chmod(0o770)
    put(board.this_process(), make_run(count=2))
    first.chmod(0o700)
    assert [one["runs"][0]["count"] for one in board.read_all().announced] == [2]
    assert first.exists()


def test_processes_of_pids(tmp_path):
    here = board.this_process()
    assert here == board.find_process(os.getpid())
    assert here.pid == os.getpid()
    assert board.find_process(NOBODY) is None
    assert board.resident_bytes(NOBODY) is None
    # Names of programs may have anything in them.
    program = tmp_path / "x) R 1 ("
    program.symlink_to(shutil.which("sleep"))
    process = subprocess.Popen([program, "60"])
    try:
        assert board.find_process(process.pid).start >= here.start
    finally:
        process.kill()
        process.wait()


def test_the_table(announced, capsys, monkeypatch):
    monkeypatch.setattr(monitor_command.board, "resident_bytes", lambda _pid: 3 * 2**20)
    monkeypatch.setattr(monitor_command, "_describe_time", lambda _seconds: "12:00:00")
    four = [make_ipu(number, planned_bytes=1024 * number) for number in range(4)]
    put(
        board.this_process(),
        make_run(ipus=four, rate=30),
        make_run(name="evaluation\x1b[2J\n", batch_size=None, ipus=[make_ipu(0), make_ipu(2)], rate=1.5),
        make_run(name="Loop", unit="iteration", state="waiting", rate=None, ipus=[make_ipu(1)], count=1234),
        program="/home/me/tr\x07ain.py",
    )
    assert main.main(["monitor"]) == 0
    pid = str(os.getpid())
    heading, *lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in (heading, *lines)]
    assert cells == [
        ["pid", "program", "pipeline", "state", "IPUs", "updates", "speed", "planned", "process", "since"],
        [pid, "tr\\x07ain.py", "Pipeline", "running", "0..3 cpu"]
        + ["7", "120 samples/s", "3 KiB on IPU 3", "3 MiB", "12:00:00"],
        ["evaluation\\x1b[2J\\n", "running", "0, 2 cpu", "7", "1.50 micro-batches/s", "2 KiB on IPU 0"]
        + ["12:00:00"],
        ["Loop", "waiting", "1 cpu", "1,234", "2 KiB", "12:00:00"],
    ]
    assert len({line.index("12:00:00") for line in lines}) == 1


def test_the_table_of_several_processes(announced, capsys):
    ipus = [make_ipu(2, device=131072), make_ipu(3, device=131073)]
    put(board.this_process(), make_run(ipus=ipus, process=1, num_processes=2), make_run(name="alone"))
    assert main.main(["monitor"]) == 0
    heading, first, second = capsys.readouterr().out.splitlines()
    place = heading.index("run by")
    assert first[place:].startswith("process 1 of 2  running  2, 3 cpu")
    assert second[place : heading.index("state")].strip() == ""


def test_a_job_that_was_started_again(announcer, announced, tmp_path, capsys, monkeypatch):
    """As its launcher writes it, with what the runs of this process took."""
    monkeypatch.setenv(launcher.MEMORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(launcher, "_useful", 36_000.0)
    begun = time.time() - 40_000
    what = "process {} was ended by SIGKILL".format
    failures = [Failure(what(n), begun + n, 5 * n, 7 * n, 2, 4.25) for n in (1, 2)]
    history = JobHistory(begun)
    for failure in failures:
        history = history.after(failure)
    dataclasses.replace(history, num_restarts=3).write(tmp_path)
    model = front.Model()
    with front.session_of(model) as session:
        model.run(session)
        wait_for(lambda: any(program["runs"] for program in read_programs(capsys)))
        (program,) = read_programs(capsys)
        assert main.main(["monitor"]) == 0
        last = capsys.readouterr().out.splitlines()[-1]
    assert 0.89 <= program["job"]["goodput"] <= 0.9
    assert program["job"]["restarts"] == 3
    assert program["job"]["failures"] == [dataclasses.asdict(failure) for failure in failures]
    assert last.startswith(
        f"{os.getpid()}: The job has been started again 3 times. The last time, training has gone on with "
        "run 10 (to step 14), 4.2 s after process 2 was ended by SIGKILL; 2 runs were done again. Goodput: "
    )


def test_a_program_that_has_run_nothing_yet(announced, capsys):
    put(board.this_process())
    assert main.main(["monitor"]) == 0
    assert "train.py" in capsys.readouterr().out.splitlines()[1]


def test_watching(announced, capsys, monkeypatch):
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(monitor_command, "time", types.SimpleNamespace(sleep=sleep))
    assert main.main(["monitor", "--watch", "0.5"]) == 130
    assert capsys.readouterr().out == "No pipelines are running.\n" * 3
    assert slept == [0.5] * 3
    slept.clear()
    assert main.main(["monitor", "--json", "--watch"]) == 130
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [{"programs": []}] * 3
    assert slept == [2.0] * 3
    for wrong in ("0", "nan", "inf", "fast", "-1"):
        with pytest.raises(SystemExit):
            main.main(["monitor", f"--watch={wrong}"])
        assert "must be a number of seconds" in capsys.readouterr().err


def test_speed_is_of_the_last_seconds(monkeypatch):
    now = [100.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0], time=lambda: 1000.0 + now[0])
    monkeypatch.setattr(announcements, "time", clock)
    model = front.Model()
    pipeline = model.program.calls[0].pipeline
    run = announcements.Run("x", pipeline, jax.devices(), 3)

    def rate():
        return run.describe()["rate"]

    with run:
        now[0] += 40  # it compiles
        run.done(8, 1)
        assert rate() is None
        for _ in range(100):  # 80 per second
            now[0] += 0.1
            run.done(8, 1)
        assert rate() == pytest.approx(80)
        for _ in range(200):  # and now 8
            now[0] += 1
            run.done(8, 1)
        assert rate() == pytest.approx(8)
        assert len(run._points) <= 22
        now[0] += 31
        assert rate() is None  # it has come to a halt
        run.done(8, 1)
        now[0] += 100
        run.done(8, 1)
        assert rate() == pytest.approx(8 / 100)  # an update takes longer than the window
    assert run.describe()["state"] == "running"  # it may be run again at once
    began = run.describe()["since"]
    for _ in range(5000):
        now[0] += 0.001
        with run:
            run.done(1)
    assert len(run._points) <= 22
    assert run.describe()["since"] == began
    now[0] += 3
    assert run.describe()["state"] == "waiting"
    assert rate() is None
    with run:
        assert run.describe()["since"] == 1000 + now[0]


def test_devices(capsys, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert main.main(["devices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["id", "platform", "kind", "process", "memory", "in", "use"]
    assert len(lines) == 1 + len(jax.devices()) + 1
    assert lines[1].split() == ["0", "cpu", "cpu", "0"]
    assert "virtual devices" in lines[-1]
    assert main.main(["devices", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [device["id"] for device in found["devices"]] == [device.id for device in jax.devices()]
    assert found["can_make_virtual"]
    assert found["num_virtual"] == len(jax.devices())
    assert found["num_cores"] >= 1


class Accelerator:
    id, platform, device_kind, process_index = 3, "gpu", "Some \x1b[31mGPU", 1

    def memory_stats(self):
        return {"bytes_limit": 80 * 2**30, "bytes_in_use": 2**20}


def test_accelerators_and_none_at_all(capsys, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(jax, "devices", lambda: [Accelerator()])
    assert main.main(["devices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["3", "gpu", "Some", "\\x1b[31mGPU", "1", "80", "GiB", "1", "MiB"]
    assert "ipu_model" in lines[-1]

    def fail():
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr(jax, "devices", fail)
    assert main.main(["devices"]) == 1
    assert "JAX does not start: Unable to initialize" in capsys.readouterr().err


@pytest.mark.thorough  # torch takes seconds to be imported
def test_a_torch_model(announcer, capsys):
    import torch

    from ipu_pipeline import poptorch

    class Small(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)

        def forward(self, x):
            return poptorch.identity_loss(self.layer(x) ** 2, reduction="mean")

    options = poptorch.Options()
    options.Training.gradientAccumulation(2)
    model = Small()
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        training(torch.ones(8, 3))
    wait_for(lambda: read_programs(capsys) and read_programs(capsys)[0]["runs"][0]["count"] == 3)
    (run,) = read_programs(capsys)[0]["runs"]
    assert (run["name"], run["handled"], run["batch_size"]) == ("Small", 6, 4)
    assert run["ipus"][0]["planned_bytes"] > 0
    training.destroy()
