"""Advice on what IPUs wait for the host for."""

import dataclasses
import re
import time

import pytest

import ipu_pipeline as ipu
from ipu_pipeline.command_line.main import main
from ipu_pipeline.reports.page.sections import make_tables, summarise
from ipu_pipeline.reports.predictions import study
from ipu_pipeline.reports.profile import COMPILING, Event, EventKind
from tests.support import front
from tests.support.traces import make_events, make_facts, make_profile


def host(kind, begin, end, name=""):
    return Event(kind, begin, end, None, name=name)


def study_of(events, facts=None):
    facts = facts or make_facts(2, 4)
    (one,) = study(make_profile(facts, tuple(sorted(events, key=lambda event: event.begin))))
    return one


# Two steps of an IPU: (begin, end) of a forward each, in microseconds.
def steps_of(*spans, ipu=0, pipeline=0):
    return [
        Event(EventKind.FORWARD, begin, end, ipu, pipeline, 0, 0, number)
        for number, (begin, end) in enumerate(spans)
    ]


def test_what_the_host_did():
    facts = make_facts(1, 1, kind="loop")
    events = [
        *steps_of((0, 10), (60, 70), (100, 110)),
        Event(EventKind.BACKWARD, 120, 130, 0, 0, 0, 0, 2),
        host(EventKind.INFEED_WAIT, 5, 30),
        host(EventKind.INFEED_WAIT, 25, 35),
        host(EventKind.OUTFEED, 30, 45),
        host(EventKind.SPAN, 40, 60, "mine"),
        host(EventKind.SPAN, 75, 85, COMPILING),
        host(EventKind.INFEED_WAIT, 200, 300),  # after the last step
    ]
    found = study_of(events, facts).host
    assert dataclasses.asdict(found) == {
        "length": 120,
        "data": 25,
        "dequeuing": 10,
        "between_steps": 15 + 20,
        "within_steps": 10,
        "others": 0,
    }
    assert found.idle == 80
    assert found.sentence == (
        "66.7% of the time from the start of the first step to the end of the last one (80.0 µs of 120 "
        "µs) no IPU had work, because the host ran the program's own Python between steps for 35.0 "
        "µs, waited for the data set for 25.0 µs, dequeued for 10.0 µs and started programs within "
        "steps for 10.0 µs. Do less between steps, or do it in another thread. In the interfaces of "
        "Graphcore's IPUs, one run may do several steps (repeat_count, the count of a loop, "
        "deviceIterations). Make the data set faster: prepare elements in several threads or processes, "
        "or keep prepared ones. A larger prefetch_depth of the infeed helps if only some elements "
        "take long."
    )


def test_nothing_but_the_data_set_is_slow():
    waits = [host(EventKind.INFEED_WAIT, begin, begin + 50) for begin in (10, 70)]
    one = study_of([*steps_of((0, 10), (60, 70), (120, 130)), *waits], make_facts(1, 1, kind="loop"))
    assert one.host.data == one.host.idle == 100
    assert "because the host waited for the data set for 100 µs. Make the data set faster" in one.advice[0]
    assert "Do more steps in a run" not in one.advice[0]


def test_other_pipelines_and_transfers_are_work():
    facts = make_facts(1, 1, kind="loop")
    events = [
        *steps_of((0, 10), (90, 100)),
        *steps_of((20, 60), ipu=1, pipeline=1),
        Event(EventKind.OTHER, 60, 80, 0, name="mine"),
        Event(EventKind.TRANSFER, 80, 85, 0, 0, 0, 0, 1, source=1),
    ]
    first, second = study(make_profile(facts, tuple(events), pipelines=(facts, facts)))
    assert first.host.idle == 15
    assert (second.host.idle, second.advice) == (0, ())


@pytest.mark.parametrize(
    ("gap", "is_first", "number"),
    [
        (0.0, None, 1),
        (5_000.0, False, 2),  # a step takes 10.3 ms, in which each IPU waits for 3 ms
        (100_000.0, True, 2),
    ],
)
def test_the_largest_cause_comes_first(gap, is_first, number):
    facts = make_facts(4, 8, schedule="sequential")
    one = study_of(make_events(facts, 3, gap=gap), facts)
    advice = [index for index, text in enumerate(one.advice) if "no IPU had work" in text]
    assert len(one.advice) == number
    assert advice == ([] if is_first is None else [0 if is_first else 1])
    sentence = one.predictions.advice.sentence
    if is_first:  # stages do not hold the program back for all the time
        sentence = f"In the other 46.4% of the time, t{sentence[1:]}"
    assert any(told.startswith(sentence) for told in one.advice)


# Programs that run.


def slow_data(seconds):
    def iterate():
        for element in front.data()():
            time.sleep(seconds)
            yield element

    return iterate


@pytest.mark.soak  # what else runs may take more time than the data set
def test_a_slow_data_set_and_a_program_that_does_something_between_runs(tmp_path, capsys):
    model = front.Model(slow_data(0.1), repeat_count=1)
    with front.session_of(model) as session, ipu.reports.capture(tmp_path) as found:
        for run in range(4):
            model.run(session)
            time.sleep(0.2 * (run == 1))
    (one,) = study(found.profile)
    assert one.host.share > 0.8
    assert one.host.between_steps > 0.1 * one.host.idle
    assert one.host.data + one.host.between_steps > 0.8 * one.host.idle
    assert one.host.data > 2 * one.host.between_steps
    assert re.search(
        "because the host waited for the data set for .* the program's own Python between steps for .*"
        r"\. Make the data set faster",
        one.advice[0],
    )
    assert main(["report", str(tmp_path)]) == 0
    advice = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  advice ")]
    assert [line.split("advice")[1].strip() for line in advice] == list(one.advice)


@pytest.mark.thorough
def test_what_compiles_meanwhile_does_not_count(tmp_path):
    """A second program, which is compiled when the first one has run."""
    first, second = front.Model(), front.Model()
    with ipu.Session() as session:
        session.run([first.initializer, second.initializer, ipu.global_variables_initializer()])
        with ipu.reports.capture(tmp_path / "reports") as found:
            first.run(session)
            second.run(session)
            first.run(session)
    names = [event.name for event in found.profile.events if event.kind is EventKind.SPAN]
    assert names.count(COMPILING) == 1
    events = found.profile.events
    (compiled,) = [event for event in events if event.name == COMPILING]
    one, _other = study(found.profile)
    whole = one.analysis.steps[-1].end - one.analysis.steps[0].begin
    assert one.host.length < whole - 0.99 * compiled.length


def test_a_program_that_waits_for_its_host_is_not_told_of_its_stages():
    """One that was 97% host was told that its stage 0 held it back."""
    facts = make_facts(4, 8, schedule="sequential")
    one = study_of(make_events(facts, 3, gap=50_000_000.0), facts)
    assert one.is_held_back_by_host
    (sentence,) = one.advice
    assert sentence == one.host.sentence
    assert "<dt>Held back by</dt><dd>the host</dd>" in summarise(one)
    assert "ramp-down" not in summarise(one)
    assert re.search(r"ramp-down [\d.]+% of it", make_tables(make_profile(facts), one))  # of the bubble
    assert "<dt>Limiting stage</dt>" in summarise(study_of(make_events(facts, 3), facts))
