"""What processes tell each other, who has died, and what a run is called: without any processes."""

import collections
import dataclasses
import re
import threading
import time
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import distributed
from ipu_pipeline.checkpointing.checkpoint_directories import DOCUMENT, CheckpointSeries
from ipu_pipeline.checkpointing.collective_calls import beside, do_each
from ipu_pipeline.engine import Pipeline, get_variable, peers, processes
from ipu_pipeline.engine.building import describe
from ipu_pipeline.engine.devices import action_log
from ipu_pipeline.errors import CheckpointError
from ipu_pipeline.ground.errors import ProcessError
from ipu_pipeline.processes import interrupts, peer_watch, rendezvous
from ipu_pipeline.processes.device_selection import spread
from ipu_pipeline.processes.peer_watch import Judge, PeerWatch, Status
from ipu_pipeline.tf1.session.program_runs import concerns_devices


class Store:
    """JAX's store, in one process."""

    def __init__(self):
        self.texts = {}
        self.changed = threading.Condition()
        self.deadline = time.monotonic() + 300  # so that who would wait for ever fails

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            assert allow_overwrite or key not in self.texts
            self.texts[key] = value
            self.changed.notify_all()

    def key_value_delete(self, key):
        del self.texts[key]

    def key_value_dir_get(self, key):
        return [(name, text) for name, text in self.texts.items() if name.startswith(key)]

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.texts, timeout_in_ms / 1000):
                kind = "DEADLINE_EXCEEDED" if time.monotonic() < self.deadline else "UNAVAILABLE"
                raise jax.errors.JaxRuntimeError(f"{kind}: nobody came")
            return self.texts[key]


def together(count, act, store=None):
    """What `act` returns or raises in each of so many processes, each a thread."""
    store = store or Store()

    def run(index):
        try:
            return act(peers.Peers(index, count, "127.0.0.1", store))
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))


def poll(holds, seconds=300):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_texts_are_exchanged_and_then_forgotten():
    def act(one):
        return [one.exchange("greeting", f"{one.index}.{number}") for number in range(6)]

    store = Store()
    found = together(3, act, store)
    assert found == [[[f"{process}.{number}" for process in range(3)] for number in range(6)]] * 3
    assert len(store.texts) <= 6  # those of the last two times


def test_what_differs_is_named_with_the_values_of_all_processes():
    def act(one):
        one.agree("first", {"the seed": "1"})
        long = "a" * 1000 + ("b" if one.index == 1 else "c") + "d" * 1000
        one.agree("second", {"the seed": str(one.index == 2), "same": "1", "long": long})

    errors = together(3, act)
    assert [type(error) for error in errors] == [ValueError] * 3
    (message,) = set(map(str, errors))
    assert "the seed: 'False' in processes 0, 1, 'True' in process 2" in message
    assert "aaabddd" in message
    assert "aaacddd" in message
    assert len(message) < 1000
    assert "same" not in message.partition("All of them")[0]


def test_who_waits_hears_of_the_death_of_another():
    def fail_once_it_waits(one):
        poll(lambda: one.waits_at is not None)
        one.fail("Process 1 has died.")

    def act(one):
        if one.index == 0:
            threading.Thread(target=fail_once_it_waits, args=(one,)).start()
            one.meet("checkpoint")

    error, nothing = together(2, act)
    assert isinstance(error, ProcessError)
    assert str(error) == "Process 1 has died."
    assert nothing is None


@pytest.fixture
def own(monkeypatch):
    """What each thread has as the process that it is."""
    own = threading.local()
    for module in (peers, processes):
        monkeypatch.setattr(module, "current", lambda: own.peers)
    return own


def test_all_processes_hear_why_no_checkpoint_can_be_read(tmp_path, own):
    """The first process looks for all; an error of it left the others waiting."""

    def read_latest(one):
        own.peers = one
        return CheckpointSeries(tmp_path).read_latest()

    assert together(3, read_latest) == [None] * 3
    for name in ("4", "8"):
        (tmp_path / name).mkdir()
        (tmp_path / name / DOCUMENT).write_text("{}")
    first, *others = together(3, read_latest)
    assert isinstance(first, CheckpointError)
    assert str(first).startswith("None of the checkpoints in")
    for error in others:
        assert type(error) is OSError
        assert str(error) == f"In process 0: CheckpointError: {first}"


def test_a_process_alone_has_no_peers():
    assert peers.current() is None
    assert action_log.current() is None
    with peers.occupied("compiling"):
        pass


@pytest.fixture
def two():
    """This process is the second one of two."""
    known = peers.Peers(1, 2, "127.0.0.1", Store())
    peers.set_current(known)
    yield known
    peers.set_current(None)


def in_a_thread(name, act):
    """What `act` returns or raises in a thread of this name."""
    found = []

    def run():
        try:
            found.append(act())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join(300)
    return found[0]


def hold():
    with peers.one_thread("a run"):
        return True


def test_of_two_threads_nobody_knows_which_is_first(two):
    """Their steps, saves and reads met those of the other thread elsewhere, and waited for ever."""
    with peers.one_thread("a run of a session"):
        assert hold()
    assert in_a_thread("second", hold) is True  # one after the other
    two.check()
    with peers.one_thread("a run of a session"):
        assert hold()  # within
        error = in_a_thread("second", hold)
    assert type(error) is RuntimeError
    message = "thread 'second' began a run while thread 'MainThread' was at a run of a session. "
    assert str(error).startswith(f"Process 1: {message}")
    assert two.failure == str(error)  # which the others hear
    with pytest.raises(ProcessError, match="thread 'second' began"):
        two.check()


def test_threads_of_a_process_alone_take_turns():
    with peers.one_thread("a run"):
        assert in_a_thread("second", hold) is True


def test_what_processes_do_alone_may_be_done_in_another_thread(two):
    """Telling queues something waits for the session, as in one process."""
    queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    session = ipu.Session(seed=0)
    queue_only = [{"a": queue.dequeue()}, (queue.dequeue(),), queue.dequeue()]
    program = ipu.global_variables_initializer()
    assert [concerns_devices(one) for one in (*queue_only, [*queue_only, program])] == [False] * 3 + [True]
    for act in (
        lambda: session.run(program),
        lambda: session.save("nowhere"),
        lambda: session.restore("nowhere"),
        session.take_snapshot,
        lambda: session.variables,
    ):
        with peers.one_thread("a step of a pipeline"):
            error = in_a_thread("second", act)
        assert "while thread 'MainThread' was at a step of a pipeline" in str(error)
    with peers.one_thread("a step of a pipeline"):
        assert in_a_thread("second", lambda: session.load({"a": 1.0})) is None


def test_saving_in_two_threads_has_two_orders(own):
    """A thread writes checkpoints of a series; what is saved meanwhile meets the others elsewhere."""

    def act(one):
        def save():
            own.peers = one
            with beside("checkpoint of a series"):
                return do_each(lambda: f"series {one.index}")

        own.peers = one
        with ThreadPoolExecutor(1) as thread:
            if one.index == 0:  # which thread comes first differs
                saved = thread.submit(save)
                poll(lambda: one.waits_at is not None)
            own_saved = do_each(lambda: f"here {one.index}")
            if one.index == 1:
                saved = thread.submit(save)
            return own_saved, saved.result()

    assert together(2, act) == [(["here 0", "here 1"], ["series 0", "series 1"])] * 2


def test_what_takes_long_is_told(two):
    with peers.occupied("compiling"), peers.occupied("tracing"):
        assert list(two.occupied.values()) == ["compiling"]
    assert two.occupied == {}


Device = collections.namedtuple("Device", "process_index number")


def test_devices_are_taken_from_all_processes(two):
    devices = [Device(process, number) for process in range(2) for number in range(4)]
    taken = spread(devices, 3)
    assert taken[:4] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert sorted(taken) == devices


# The log of actions.


class Array:
    def __init__(self, nbytes=8, is_done=False):
        self.nbytes, self.is_done, self.is_gone, self.error = nbytes, is_done, False, None
        self.shape = (nbytes,)

    def is_ready(self):
        return self.is_done

    def block_until_ready(self):
        if self.error is not None:
            raise self.error

    def is_deleted(self):
        return self.is_gone


def forward(number, size=1):
    return action_log.Started("forward", 2, 17, number, size)


def test_names_of_actions():
    assert str(forward(5)) == "stage 2 forward of micro-batch 5 of step 17"
    assert str(forward(4, 4)) == "stage 2 forward of micro-batches 4 to 7 of step 17"
    assert str(action_log.Started("weight update", 0, 3)) == "stage 0 weight update of step 3"


def test_the_last_finished_action_and_the_oldest_unfinished():
    log, arrays = action_log.ActionLog(), [Array(), Array(), Array()]
    assert log.standing()[:3] == (None, None, False)
    for number, array in enumerate(arrays):
        log.note(forward(number), [Array(10**9), array])
    assert log.standing()[:3] == (None, str(forward(0)), False)
    arrays[0].is_done = arrays[2].is_done = True
    assert log.standing()[:3] == (str(forward(0)), str(forward(1)), False)
    arrays[1].is_gone = True  # whoever was given its memory comes later on the same device
    assert log.standing()[:3] == (str(forward(2)), None, False)


def test_an_action_that_waits_for_another_process():
    log, sent, done = action_log.ActionLog(), Array(), Array()
    log.note(forward(0), [done], [sent])
    assert log.standing().lacks_data
    sent.is_done = True
    assert not log.standing().lacks_data


def test_what_ends_with_an_error_is_not_finished():
    """After a death, the report named actions that had waited for the dead process."""
    log, arrays = action_log.ActionLog(), [Array(), Array(), Array()]
    for array in arrays:
        log.note(forward(arrays.index(array)), [array], [array])
    arrays[0].is_done = arrays[1].is_done = True
    arrays[1].error = jax.errors.JaxRuntimeError("UNKNOWN: SocketServer: Connection closed")
    assert log.standing()[:3] == (str(forward(0)), str(forward(2)), True)
    arrays[2].is_done, arrays[2].error = True, ValueError("Gloo")
    assert log.standing()[:3] == (str(forward(0)), None, False)


def test_the_log_holds_few_bytes():
    log = action_log.ActionLog()
    arrays = [Array(10 * 2**20) for _number in range(4)]
    held = [weakref.ref(array) for array in arrays]
    for number, array in enumerate(arrays):
        log.note(forward(number), [array])
    del arrays, array
    assert [reference() is not None for reference in held] == [True, False, False, False]
    held[0]().is_done = True
    assert log.standing()[:2] == (str(forward(0)), None)
    assert held[0]() is None


# Who has died, and whether the processes go on.


OTHER, STUCK = {"pid": 17, "host": "b"}, {"lacks_data": True, "next": "a"}


def judge(looks, answers=lambda second: True, dead=()):
    """What is found, and after how many seconds; `looks` gives the statuses of processes at a second."""
    one = Judge(0, 2, 10.0, 30.0, most_step=2.0)
    for second in range(500):
        statuses = dict(enumerate(looks(second)))
        found = one.judge(statuses, float(second), answers(second), dead if second > 2 else ())
        if found is not None:
            return second, found
    return None, None


def test_processes_that_go_on():
    waiting, nothing = {"waits_at": "the end"}, (None, None)
    assert judge(lambda s: [Status(s), Status(s)]) == nothing
    assert judge(lambda s: [Status(s, number=s, **waiting), Status(s)]) == nothing
    assert judge(lambda s: [Status(s, **waiting), Status(s, occupied_with="compiling")]) == nothing
    assert judge(lambda s: [Status(s), Status(s, end="")]) == nothing
    assert judge(lambda s: [Status(s), Status(min(s, 5), end="")]) == nothing


@pytest.mark.parametrize(
    ("first", "other", "second", "text"),
    [
        ({}, {"end": "an error"}, 0, r"Process 1 \(pid 17 on b\) has ended with an error\."),
        ({}, {"verdict": "as it is"}, 0, "as it is$"),
        (STUCK, {}, 31, ".*process 1 does not go on, and process 0 cannot"),
        (STUCK, STUCK, 31, ".*they wait for each other"),
        (STUCK, {"next": "long"}, 301, ""),
        (STUCK, {"end": ""}, 6, ".*process 1 has ended, and process 0 cannot"),
    ],
)
def test_errors_of_others_and_processes_that_stand_still(first, other, second, text):
    found_second, found = judge(lambda s: [Status(s, **first), Status(s, **OTHER, **other)])
    assert found_second == second
    assert re.match(text, found, re.DOTALL), found


def test_a_process_that_is_silent():
    second, found = judge(lambda s: [Status(s), Status(min(s, 5), **OTHER)])
    assert second == 16
    assert "Process 1 (pid 17 on b) has died or was stopped: no sign of it for 11 s" in found


def test_a_process_that_is_gone():
    found = judge(lambda s: [Status(s), Status(s, finished="x", **OTHER)], dead={1: "was ended"})
    assert found == (
        3,
        "Process 1 (pid 17 on b) has died: it was ended.\n"
        "  process 0: the last action finished is none\n"
        "  process 1: the last action finished is x",
    )


def test_a_coordinator_that_does_not_answer():
    second, found = judge(lambda s: [Status(3), Status(3)], answers=lambda second: second < 5)
    assert second == 15
    assert found.startswith("The coordinator, which process 0 started, has not answered for 10 s.")


def test_what_a_process_told_as_it_ended_is_heard_before_it_counts_as_dead(two):
    """It was called dead, without the error that it had ended with, if it had gone between two looks."""
    for answers in (True, False):
        watch = PeerWatch(two, 12.0, 12.0)  # which is not started
        found = [
            watch._find_silent({0: "is gone"}, asked if answers else 1.0, now)
            for asked, now in ((1.0, 1.2), (1.1, 1.7), (1.6, 2.2), (2.1, 3.3))
        ]
        assert [list(dead) for dead in found] == [[], [], [0] if answers else [], [0]]


class Ending:
    """How process 0 of three, which are on this machine, ends as its program ends.

    Attributes:
      num_looks: how often it had to look again; after three looks the others are gone.
      now: the seconds that this took.
    """

    def __init__(self, monkeypatch, statuses, most_looks=3):
        watch = PeerWatch(peers.Peers(0, 3, "127.0.0.1", Store()), 12.0, 12.0)  # which is not started
        here = watch._status
        gone = dataclasses.replace(here, pid=2**22 + 1)  # above the largest pid there is
        elsewhere = dataclasses.replace(here, boot="another machine")
        places = {"alive": here, "gone": gone, "elsewhere": elsewhere}
        watch._statuses = {
            number: dataclasses.replace(places[where], end=end)
            for number, (where, end) in enumerate(statuses, start=1)
        }
        self.num_looks, self.now = 0, 0.0

        def sleep(seconds):
            self.num_looks, self.now = self.num_looks + 1, self.now + seconds
            if self.num_looks == most_looks:
                watch._statuses = {number: dataclasses.replace(gone, end="") for number in (1, 2)}

        clock = types.SimpleNamespace(monotonic=lambda: self.now, sleep=sleep)
        monkeypatch.setattr(peer_watch, "time", clock)
        watch._await_others()


@pytest.mark.parametrize(
    ("statuses", "leaves"),
    [
        ([("alive", ""), ("alive", "")], True),
        ([("alive", None), ("gone", "")], False),  # one that has said that it ends, and is gone, is one
        ([("gone", None), ("gone", "ValueError")], True),
        ([("alive", ""), ("alive", "ValueError")], False),  # it is to be gone first
        ([("alive", ""), ("elsewhere", "ValueError")], True),  # which nobody would see
    ],
)
def test_whom_a_process_awaits_at_its_end(statuses, leaves, monkeypatch):
    assert Ending(monkeypatch, statuses).num_looks == (0 if leaves else 3)


def test_one_that_fails_is_not_awaited_for_ever(monkeypatch):
    ending = Ending(monkeypatch, [("alive", ""), ("alive", "ValueError")], most_looks=10**6)
    assert 2 < ending.now < 2.2  # a sixth of the time after which it counts as dead


def test_who_was_stopped_does_not_blame_the_others():
    one = Judge(0, 2, 10.0, 30.0, most_step=2.0)
    for second in (0.0, 1.0, 500.0, 501.0):
        assert one.judge({0: Status(int(second)), 1: Status(5)}, second, True, ()) is None


def test_the_process_ends_after_what_it_writes(monkeypatch, capfd):
    ended = []
    begun, release = threading.Event(), threading.Event()

    def write():
        with interrupts.written_whole("the checkpoint x"):
            begun.set()
            assert release.wait(300)
            ended.append("written")

    writer = threading.Thread(target=write)

    def let_it_write(_seconds):
        assert not ended
        release.set()
        writer.join(300)

    clock = types.SimpleNamespace(monotonic=time.monotonic, sleep=let_it_write)
    monkeypatch.setattr(interrupts, "time", clock)
    monkeypatch.setattr(interrupts.os, "_exit", ended.append)
    writer.start()
    assert begun.wait(300)
    interrupts.end_process("why\n")
    assert ended == ["written", 1]
    assert capfd.readouterr().err == "why\nFirst the checkpoint x is written.\n"


# What is given to `initialize`.


@pytest.fixture
def environment(monkeypatch):
    for name in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID"):
        monkeypatch.delenv(f"IPU_PIPELINE_{name}", raising=False)
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    return monkeypatch


def find(address=None, count=None, index=None):
    return rendezvous.find_place(address, count, index, None, 1)


def test_the_place_of_a_process(environment):
    assert find("a:1", 2, 1) == rendezvous.Place("a:1", 2, 1, None)
    environment.setenv("IPU_PIPELINE_COORDINATOR_ADDRESS", "b:2")
    environment.setenv("IPU_PIPELINE_NUM_PROCESSES", "4")
    environment.setenv("IPU_PIPELINE_PROCESS_ID", "3")
    assert rendezvous.is_in_environment()
    assert find() == rendezvous.Place("b:2", 4, 3, None)
    assert find("a:1", index=0) == rendezvous.Place("a:1", 4, 0, None)
    environment.setenv("IPU_PIPELINE_PROCESS_ID", "x")
    with pytest.raises(ValueError, match="IPU_PIPELINE_PROCESS_ID must be an integer; it is 'x'"):
        find()


def test_an_environment_that_is_half_set(environment):
    environment.setenv("IPU_PIPELINE_NUM_PROCESSES", "4")
    message = (
        r"coordinator_address \(IPU_PIPELINE_COORDINATOR_ADDRESS\) and "
        r"process_id \(IPU_PIPELINE_PROCESS_ID\) missing: .* has only"
    )
    with pytest.raises(ValueError, match=message):
        find()


def test_a_cluster_is_recognised(environment):
    with pytest.raises(ValueError, match="recognises no cluster here .* ipu-pipeline launch"):
        find()
    slurm = {"JOB_ID": "1", "STEP_NODELIST": "node[1-2]", "NTASKS": "2", "PROCID": "1", "LOCALID": "0"}
    for name, text in slurm.items():
        environment.setenv(f"SLURM_{name}", text)
    place = find()
    assert (place.count, place.index, place.local_devices) == (2, 1, [0])
    assert place.coordinator.startswith("node1:")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"address": 3}, "coordinator_address must be a text"),
        ({"count": "2"}, "num_processes must be an integer; it is '2'"),
        ({"index": True}, "process_id must be an integer; it is True"),
        ({"index": 2}, "process_id must be from 0 to 1, as there are 2 processes; it is 2"),
        ({"count": 0, "index": 0}, "num_processes must be 1 or more; it is 0"),
        ({"address": "host"}, 'coordinator_address must be "host:port"'),
        ({"address": "host:99999"}, 'coordinator_address must be "host:port"'),
        ({"address": "::1:80"}, 'coordinator_address must be "host:port"'),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments(environment, given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        find(**{"address": "a:1", "count": 2, "index": 1, **given})


def test_addresses():
    assert rendezvous.split_address("[fd00::1]:80") == ("fd00::1", 80)
    assert rendezvous.address_towards("localhost", 80) in ("127.0.0.1", "::1")
    with pytest.raises(ValueError, match=r"host 'nowhere\.invalid' cannot be reached"):
        rendezvous.address_towards("nowhere.invalid", 80)


def test_a_host_that_is_not_known_yet(environment, caplog):
    asked = []

    def find(host, port):
        asked.append((host, port))
        if len(asked) < 3:
            raise ValueError("not yet")
        return "10.0.0.3"

    environment.setattr(rendezvous, "address_towards", find)
    environment.setattr(rendezvous.time, "sleep", lambda seconds: None)
    assert rendezvous._find_own_address("pod", 80, 5) == "10.0.0.3"
    assert asked == [("pod", 80)] * 3
    assert [record.getMessage()[:10] for record in caplog.records] == ["not yet It"]


def test_processes_join_once_and_before_the_backend_runs(environment):
    jax.devices()
    with pytest.raises(RuntimeError, match="must be called before JAX's backend starts"):
        distributed.initialize("127.0.0.1:1", 2, 0)
    assert not distributed.is_initialized()
    environment.setattr(rendezvous, "_is_joined", True)
    assert distributed.is_initialized()
    distributed.initialize()  # after set_num_devices, say, which has joined them
    with pytest.raises(RuntimeError, match="num_processes, process_id cannot have an effect any more"):
        distributed.initialize(None, 2, 0)


def test_times(environment):
    environment.setattr(rendezvous.jax_processes, "backends_run", lambda: False)
    with pytest.raises(ValueError, match="death_timeout must be a number of seconds from 2; it is 1"):
        distributed.initialize("127.0.0.1:1", 2, 0, death_timeout=1)
    environment.setenv("IPU_PIPELINE_STALL_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="variable IPU_PIPELINE_STALL_TIMEOUT must be .* it is 'soon'"):
        distributed.initialize("127.0.0.1:1", 2, 0)


# What processes compare of a pipeline.


def fingerprint(width=6, scale=2.0, **options):
    stages = [lambda x: x @ get_variable("first", (5, width)) * scale, lambda h: (h**2).mean()]
    options = {"num_micro_batches": 4, "optimizer": optax.adam(0.1), **options}
    pipeline = Pipeline(stages, **options)
    pipeline.trace(jax.ShapeDtypeStruct((3, 5), np.float32))
    mapping, timetable = pipeline.device_mapping, pipeline.timetable(4)
    return describe(pipeline.built, pipeline.options, mapping, timetable, pipeline.dispatch_plan)


def test_fingerprints_of_pipelines():
    known = fingerprint()
    assert known == fingerprint()

    def differences(**arguments):
        other = fingerprint(**arguments)
        return {name.partition(" of ")[0] for name in known | other if known.get(name) != other.get(name)}

    assert differences(scale=3.0) == {"the program"}
    assert {"the variables", "the program", "the optimizer's state"} <= differences(width=7)
    assert "num_micro_batches" in differences(num_micro_batches=8)
    assert "the schedule" in differences(schedule="sequential")
    assert "device_mapping" in differences(device_mapping=[1, 0])
    assert "the optimizer's state" in differences(optimizer=optax.sgd(0.1))


def test_threads_wait_each_for_themselves(two):
    def wait_there():
        with two.waiting("there"):
            pass

    with two.waiting("here"):
        in_a_thread("second", wait_there)
        assert two.waits_at == "here"
        with two.waiting("within"):
            assert two.waits_at == "within"
        assert two.waits_at == "here"
    assert two.waits_at is None
