"""Traces of several processes: one report, which the first process writes."""

import dataclasses
import json
import logging
from collections import Counter

import jax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.engine import ProcessError, peers
from ipu_pipeline.ground.jax_processes import key_value_store
from ipu_pipeline.reports.page.sections import table_of_ipus
from ipu_pipeline.reports.predictions import study
from ipu_pipeline.reports.profile import DeviceFacts, Event, EventKind, read_profile, to_chrome_trace
from ipu_pipeline.reports.trace_capture import Part, exchange, merge
from tests.reports.test_capture import COMPUTED, COUNT, actions_of, check_order, make_pipeline, run
from tests.support import joined
from tests.support.traces import make_facts, make_profile


def part(process, events, *, origin=0.0, clock="one", now=0.0, **changed):
    """What a process of two stages recorded that has the second IPU, or the first one."""
    facts = make_facts(2, 4)
    profile = make_profile(facts, tuple(event for event in events if event.ipu in (None, process)))
    devices = (DeviceFacts(process, 7 + process, "cpu", "cpu", process),)
    return Part(dataclasses.replace(profile, devices=devices, **changed), origin, clock, now)


def test_parts_become_one():
    whole = make_profile(make_facts(2, 4), num_steps=2)
    wait = Event(EventKind.INFEED_WAIT, 5.0, 6.0, None)
    numbered = [dataclasses.replace(event, program=n) for n, event in enumerate([wait, *whole.events])]
    parts = [
        part(0, numbered, origin=9e6, num_lost=1, notes=("a",)),
        part(1, numbered, origin=9e6, num_lost=2, notes=("b",)),
    ]
    made = merge(parts)
    assert (made.num_lost, made.notes) == (3, ("Process 0: a", "Process 1: b"))
    assert [(device.ipu, device.process) for device in made.devices] == [(0, 0), (1, 1)]
    assert len({event.program for event in made.events}) == len(made.events) == len(whole.events) + 2
    assert [e.process for e in made.events if e.ipu is None] == [0, 1]
    assert {(e.ipu, e.process) for e in made.events if e.ipu is not None} == {(0, 0), (1, 1)}
    own = [dataclasses.replace(e, process=0, program=None) for e in made.events if e.ipu is not None]
    assert sorted(own, key=repr) == sorted(whole.events, key=repr)
    assert read_profile(made.to_json()) == read_profile(read_profile(made.to_json()).to_json())
    (one,) = study(made)
    (alone,) = study(dataclasses.replace(whole, devices=made.devices))
    assert one.analysis == alone.analysis
    assert "process 1" in table_of_ipus(made, made.pipelines[0], one.analysis)
    named = {e["args"]["name"] for e in json.loads(to_chrome_trace(made))["traceEvents"] if e["ph"] == "M"}
    assert {"Host of process 0", "Host of process 1", "IPU 0", "IPU 1"} <= named


@pytest.mark.parametrize(
    ("clock", "now", "expected"),
    [("one", 0.0, 3.0), ("other", 41e3, 3.0 - 41.0 + 40.0)],  # microseconds
)
def test_times_are_those_of_the_first_process(clock, now, expected):
    event = Event(EventKind.UPDATE, 1.0, 2.0, 0, 0, step=0)
    parts = [
        part(0, [event], origin=10e3, clock="one", now=40e3),
        part(1, [dataclasses.replace(event, ipu=1)], origin=13e3, clock=clock, now=now),
    ]
    begins = {event.ipu: event.begin for event in merge(parts).events}
    assert begins[1] - begins[0] == pytest.approx(expected)
    assert min(begins.values()) == pytest.approx(1.0)


def test_a_process_in_which_nothing_ran():
    event = Event(EventKind.UPDATE, 1.0, 2.0, 1, 0, step=0)
    made = merge([Part(None, 0.0, "one", 0.0), part(1, [event])])
    assert [(event.ipu, event.process) for event in made.events] == [(1, 1)]
    assert merge([Part(None, 0.0, "one", 0.0)]) is None


def join():
    """Makes the processes known to each other, as `ipu.distributed.initialize` does."""
    made = peers.Peers(jax.process_index(), jax.process_count(), "127.0.0.1", key_value_store())
    peers.set_current(made)
    return made


def capture_all(folder):
    """What each process has of a capture; the second one, of a pipeline that the third has no part in."""
    join()
    pipeline, data = make_pipeline((0, 3), num_stages=2, num_replicas=2)
    state, _outputs = run(pipeline, 2 * data, 1)
    directory = f"{folder}/whole"
    with ipu.reports.capture(directory) as captured:
        run(pipeline, 2 * data, 2, state)
    return None if captured.profile is None else captured.profile.to_json()


@pytest.mark.thorough
def test_a_capture_of_several_processes(tmp_path):
    # Replica 0 has the IPUs 0 to 3, of which it uses the ends; so has replica 1.
    made = joined.run(capture_all, 4, 2, str(tmp_path), timeout=150)
    assert {file.name for file in (tmp_path / "whole").iterdir()} >= {"profile.json", "trace.json"}
    profile = read_profile((tmp_path / "whole" / "profile.json").read_text())
    assert read_profile(made[0]) == profile
    assert profile.num_lost == 0
    assert not profile.notes
    found = {(e.stage, e.micro_batch, e.step): e.ipu for e in profile.events if e.kind in COMPUTED}
    assert found == {
        (stage, micro_batch, step): 4 * (micro_batch % 2) + 3 * stage
        for stage in range(2)
        for micro_batch in range(2 * COUNT)
        for step in (1, 2)
    }
    assert set(actions_of(profile.events).values()) == {1}
    check_order(profile.events)  # though each is from another process
    assert {(e.ipu, e.process) for e in profile.events if e.kind in COMPUTED} == {
        (ipu, ipu // 2) for ipu in (0, 3, 4, 7)
    }
    updates = Counter(e.ipu for e in profile.events if e.kind is EventKind.UPDATE)
    assert updates == dict.fromkeys((0, 3, 4, 7), 2)
    assert [(device.ipu, device.process) for device in profile.devices] == [
        (i, i // 2) for i in (0, 3, 4, 7)
    ]
    assert profile.pipelines[0].num_micro_batches == COUNT


def tell_much(folder):
    """A profile of more than a message of the store may have, and one that ends with an error."""
    told = join()
    profile = make_profile(make_facts(2, 4))
    notes = tuple(f"{hash((n, told.index)):x}{n:x}" for n in range(60_000))
    parts = exchange(told, dataclasses.replace(profile, notes=notes), 5.0 + told.index)
    pipeline, data = make_pipeline((0, 1), num_stages=2)
    with pytest.raises(ZeroDivisionError), ipu.reports.capture(folder):
        run(pipeline, data, 1)
        raise ZeroDivisionError
    return [(len(one.profile.notes), one.origin, one.clock == parts[0].clock) for one in parts]


@pytest.mark.thorough
def test_large_traces_and_errors(tmp_path):
    found = joined.run(tell_much, 2, 1, str(tmp_path))
    assert found == [[(60_000, 5.0, True), (60_000, 6.0, True)]] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["process_0", "process_1"]
    for process in range(2):
        profile = read_profile((tmp_path / f"process_{process}" / "profile.json").read_text())
        assert {e.ipu for e in profile.events if e.kind in COMPUTED} == {process}


def test_a_process_that_has_ended(tmp_path, monkeypatch, caplog):
    """The others write what they have."""

    class Ended:
        index, failure = 1, "Process 0 has ended."

        def meet(self, what):
            assert what == "report"
            raise ProcessError(self.failure)

    pipeline, data = make_pipeline((0, 1), num_stages=2)
    with caplog.at_level(logging.WARNING), ipu.reports.capture(tmp_path):
        run(pipeline, data, 1)
        monkeypatch.setattr(peers, "_current", Ended())
    monkeypatch.undo()
    assert "only what process 1 recorded: Process 0 has ended." in caplog.text
    assert (tmp_path / "process_1" / "profile.json").exists()
