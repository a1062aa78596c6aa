"""What is made of a profile for people: the analysis, predictions, the page, and `ipu-pipeline report`."""

import base64
import dataclasses
import html
import html.parser
import json
import os
import re
import sys
import types
from importlib import resources

import numpy as np
import pytest

from ipu_pipeline.command_line import main
from ipu_pipeline.engine import Cluster, Costs
from ipu_pipeline.engine.inspect import LayerFacts
from ipu_pipeline.engine.schedules import predict_step_time
from ipu_pipeline.ground.tables import describe_time, say_device
from ipu_pipeline.reports.analysis import analyse, balanced_utilisation
from ipu_pipeline.reports.memory_over_time import profile_memory_over_time
from ipu_pipeline.reports.page import write_page
from ipu_pipeline.reports.page.report_page import COLOURS, INKS, pack, pack_column, pack_measured
from ipu_pipeline.reports.page.sections import as_html, as_script, find_best, table_of_ipus
from ipu_pipeline.reports.predictions import make_scenario, study, timeline_events
from ipu_pipeline.reports.profile import (
    ACTIONS,
    DeviceFacts,
    Event,
    EventKind,
    read_profile,
    to_chrome_trace,
)
from ipu_pipeline.reports.report_files import write_reports
from ipu_pipeline.reports.trace_capture import Capture
from tests.support.traces import ACTION, SENT, SLOT, TRANSFER, UPDATE, make_events, make_facts, make_profile

STYLE = resources.files("ipu_pipeline.reports.page").joinpath("page.css").read_text()
IDLES = re.findall(r"--idle: (#\w{6});", STYLE)  # on a light page, and on a dark one
NASTY = "</script><script>alert('x')</script><!--\"&\u2028\u2029é"


def moved(event, begin=0.0, end=None, **changes):
    """An event that begins and ends so many microseconds later."""
    later = {"begin": event.begin + begin, "end": event.end + (begin if end is None else end)}
    return dataclasses.replace(event, **later, **changes)


def analyse_one(profile):
    (analysis,) = analyse(profile)
    return analysis


# --- the analysis


def test_what_a_balanced_pipeline_does():
    """8 micro-batches on 4 stages: 2(8 + 4 - 1) = 22 time-steps, in 16 of which an IPU acts."""
    analysis = analyse_one(make_profile(num_steps=3))
    length = 22 * SLOT + UPDATE
    steps = [(step.number, step.num_micro_batches, step.is_whole) for step in analysis.steps]
    assert steps == [(number, 8, True) for number in range(3)]
    assert analysis.step_time == pytest.approx(length)
    assert analysis.utilisation == pytest.approx((16 * ACTION + UPDATE) / length)
    assert analysis.bubble == pytest.approx(1 - analysis.utilisation)
    assert analysis.balanced_utilisation == pytest.approx(8 / 11)
    assert [use.utilisation for use in analysis.ipus] == pytest.approx([analysis.utilisation] * 4)
    assert [use.update for use in analysis.ipus] == pytest.approx([UPDATE] * 4)
    assert [(use.forward, use.backward) for use in analysis.stages] == [pytest.approx((ACTION, ACTION))] * 4
    assert [use.num_sent_bytes for use in analysis.stages] == [SENT, 2 * SENT, 2 * SENT, SENT]
    assert [(link.source, link.target) for link in analysis.links] == [
        (0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2),
    ]  # fmt: skip
    assert {link.num_bytes for link in analysis.links} == {SENT}
    assert [link.length for link in analysis.links] == [pytest.approx(TRANSFER)] * 6
    assert analysis.micro_batches_per_second == pytest.approx(8 / length * 1e6)
    assert analysis.samples_per_second == pytest.approx(32 * 8 / length * 1e6)
    assert (analysis.num_actions, analysis.num_shared) == (3 * (64 + 4), 0)


def test_the_limiting_stage_is_the_longest_of_the_busiest_ipu():
    facts = make_facts(4, 4, schedule="sequential")
    stages = [dataclasses.replace(stage, ipu=stage.index // 2) for stage in facts.stages]
    facts = dataclasses.replace(facts, stages=tuple(stages), memory=())
    slower = {2: 30.0, 3: 50.0}
    events = [
        moved(event, end=slower.get(event.stage, 0.0) * (event.kind is EventKind.FORWARD))
        for event in make_events(facts)
    ]
    analysis = analyse_one(make_profile(facts, tuple(events)))
    assert (analysis.limiting_ipu, analysis.limiting_stage) == (1, 3)
    assert [use.ipu for use in analysis.ipus] == [0, 1]
    assert analysis.balanced_utilisation is None  # several stages on an IPU, and several IPUs


def test_a_step_begins_where_the_one_before_it_ends():
    """Devices go on with the next step while others end this one: that time is counted once."""
    facts = make_facts(2, 1)
    one = make_events(facts)
    early = [moved(event, 4000, step=1) for event in one]
    analysis = analyse_one(make_profile(facts, (*one, *early)))
    assert [step.length for step in analysis.steps] == pytest.approx([4 * SLOT + UPDATE, 4 * SLOT])
    assert analysis.time_between == 0


def test_a_step_that_took_long_for_once_and_one_that_is_cut_off_change_nothing():
    facts = make_facts(4, 8)
    one = make_events(facts, num_steps=4, gap=150.0)
    expected = analyse_one(make_profile(facts, one))
    assert expected.time_between == pytest.approx(150.0)
    shifted = {(1, EventKind.UPDATE), *((step, kind) for step in (2, 3) for kind in EventKind)}
    late = [moved(event, 9e5 * ((event.step, event.kind) in shifted)) for event in one]
    cut = [event for event in late if event.step < 3 or event.micro_batch in (0, 1)]
    found = analyse_one(make_profile(facts, tuple(cut)))
    assert [step.is_whole for step in found.steps] == [True, True, True, False]
    assert found.step_time == pytest.approx(expected.step_time)
    assert found.utilisation == pytest.approx(expected.utilisation)
    assert found.stages == expected.stages
    assert found.num_micro_batches == 8
    assert found.typical_step.number in (0, 2)


def test_pipelines_are_kept_apart_and_others_programs_are_nobodys():
    first, second = make_facts(2, 4), make_facts(2, 2, name="Other", micro_batch_size=None)
    events = [*make_events(first), *make_events(second, pipeline=1, begin=50_000.0)]
    events.append(Event(EventKind.OTHER, 0.0, 40_000.0, 0, name="jit_mine"))
    events.append(Event(EventKind.INFEED_WAIT, 0.0, 10.0, None, step=0, micro_batch=0))
    profile = make_profile(first, tuple(events), pipelines=(first, second))
    found = analyse(profile)
    assert found[0] == analyse_one(make_profile(first))
    assert found[1].num_micro_batches == 2
    assert found[1].samples_per_second is None
    assert found[1].steps[0].begin == 50_000.0


def test_a_pipeline_of_which_nothing_was_seen():
    analysis = analyse_one(make_profile(events=()))
    assert analysis.steps == ()
    assert analysis.step_time == analysis.utilisation == analysis.micro_batches_per_second == 0.0
    assert analysis.typical_step is None
    page = write_page(make_profile(events=()))
    assert "No step of it was recorded." in page


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, 8 / 11),
        ({"schedule": "interleaved", "chunk_size": 2}, 4 / 7),
        ({"schedule": "sequential"}, 1 / 4),
        ({"schedule": "of_mine"}, None),
        ({"kind": "inference"}, 8 / 11),
        ({"num_stages": 1}, 1.0),
    ],
)
def test_the_utilisation_of_balanced_stages(changed, expected):
    assert balanced_utilisation(make_facts(**changed), 8) == expected


# --- predictions


def test_the_scenario_is_what_was_measured():
    profile = make_profile(num_steps=2)
    (one,) = study(profile)
    scenario = make_scenario(one.facts, one.analysis)
    assert scenario.costs.forward == scenario.costs.backward == pytest.approx((ACTION / 1e6,) * 4)
    assert scenario.costs.update == pytest.approx((UPDATE / 1e6,) * 4)
    assert scenario.costs.transfers[2, 1] == pytest.approx(TRANSFER / 1e6)
    assert (scenario.schedule, scenario.num_micro_batches, scenario.micro_batch_size) == ("grouped", 8, 32)
    assert scenario.memory.num_constant_bytes == (1600 + 3200 + 1600 + 512 + 256,) * 4
    lock_step = one.predictions.simulation.lock_step
    # Nothing is sent in two time-steps: when only stage 3 goes forward, and when only stage 0 goes back.
    assert lock_step.step_time * 1e6 == pytest.approx(22 * ACTION + 20 * TRANSFER + UPDATE)
    advice = one.predictions.advice
    assert "schedule zero_bubble_h2 instead of grouped" in advice.sentence
    takes = r"a simulated step takes [\d.]+ ms now, and [\d.]+ ms then"
    assert re.search(takes, advice.sentence)


def test_what_programs_take_alone_counts_if_it_is_known():
    facts = make_facts()
    costs = Costs.of(4, forward=[1, 2, 1, 1], backward=2.0, update=0.5, transfer=0.25, host=1e-3)
    profile = read_profile(make_profile(dataclasses.replace(facts, costs=costs)).to_json())
    (one,) = study(profile)
    found = one.predictions.simulation.scenario.costs
    assert found == dataclasses.replace(costs, is_fused=False)  # as the stage says
    assert "devices that take as long as these do while nothing else runs" in one.predictions.notes[0]
    assert not any("not measured" in note for note in one.predictions.notes)
    assert "(a simulated step takes " in one.predictions.advice.sentence
    expected = predict_step_time(dataclasses.replace(one.predictions.simulation.scenario, cores=2))
    assert (one.predictions.cores, one.predictions.shared_step_time) == (2, expected)
    assert expected > one.predictions.simulation.free_running.step_time
    assert f"on 2 shared cores {describe_time(1e6 * expected)}" in as_plain(write_page(profile)).text
    many = dataclasses.replace(profile, num_cores=64)  # as many as the IPUs could use
    sentence = study(many)[0].predictions.advice.sentence
    assert "(a simulated step takes " in sentence
    assert "Here the IPUs share" not in sentence
    (other,) = study(make_profile())
    assert "as was measured here, whatever the others do" in other.predictions.notes[0]
    assert "What programs take alone was not measured" in other.predictions.notes[1]


def test_a_split_is_advised_where_a_stage_holds_the_others_back():
    facts = make_facts(4, 16)
    slow = {(1, EventKind.FORWARD), (1, EventKind.BACKWARD)}
    events = [
        moved(event, 9 * event.begin, 9 * event.begin + event.length * ((event.stage, event.kind) in slow))
        for event in make_events(facts)
    ]
    (one,) = study(make_profile(facts, tuple(events)))
    assert one.analysis.limiting_stage == 1
    advised = one.predictions.advice.variant
    assert advised.split == "dense1/a from stage 1 to 0"  # a quarter of its operations
    before, after = one.predictions.simulation.scenario.costs, advised.scenario.costs
    assert after.forward[1] == pytest.approx(0.75 * before.forward[1])
    assert after.forward[0] == pytest.approx(before.forward[0] + 0.25 * before.forward[1])
    assert one.predictions.advice.even.step_time < one.predictions.variants[0].step_time
    assert "The time of a layer is estimated" in one.predictions.notes[-1]


def test_without_layers_a_share_of_the_time_moves():
    stages = [dataclasses.replace(stage, layers=(LayerFacts("", 5, 20),)) for stage in make_facts().stages]
    (one,) = study(make_profile(make_facts(stages=tuple(stages))))
    assert any("10% of a mean stage" in row.split for row in one.predictions.variants)
    assert "The stages' layers are not known" in one.predictions.notes[-1]


def test_layers_of_stages_that_the_engine_cut_do_not_move():
    (one,) = study(make_profile(make_facts(cuts="cut by layers, measured")))
    assert not any(row.split for row in one.predictions.variants)
    assert "The engine cut these stages" in one.predictions.notes[-1]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kind": "loop"}, "A loop is not simulated"),
        ({"schedule": "of_mine"}, "its schedule is the program"),
    ],
)
def test_what_cannot_be_simulated(changed, words):
    facts = make_facts(2, 4)
    profile = make_profile(dataclasses.replace(facts, **changed), make_events(facts))
    (one,) = study(profile)
    assert one.predictions is None
    assert words in as_plain(write_page(profile)).text


def test_a_step_with_too_many_actions_is_not_simulated(monkeypatch):
    monkeypatch.setattr("ipu_pipeline.reports.predictions._MAX_ACTIONS", 10)
    assert study(make_profile())[0].predictions is None


def test_one_ipu_has_no_other_schedule_and_no_other_split():
    facts = make_facts(2, 4)
    stages = tuple(dataclasses.replace(stage, ipu=0) for stage in facts.stages)
    changed = {"stages": stages, "memory": facts.memory[:1], "is_one_program": True}
    (one,) = study(make_profile(make_facts(2, 4, **changed)))
    assert one.predictions.advice.even is None
    assert {row.change for row in one.predictions.variants} == {"", "gradient accumulation count"}


def test_simulated_events_are_like_measured_ones():
    (one,) = study(make_profile())
    found = timeline_events(one.predictions.simulation.lock_step, one.facts, 0, [(0, 1, 77)])
    counts = {kind: sum(event.kind is kind for event in found) for kind in EventKind}
    assert (counts[EventKind.FORWARD], counts[EventKind.BACKWARD], counts[EventKind.UPDATE]) == (32, 32, 4)
    sent = [event for event in found if event.kind is EventKind.TRANSFER and event.source == 0]
    assert {(event.ipu, event.stage, event.num_bytes) for event in sent} == {(1, 0, 77)}
    assert min(event.begin for event in found) == 0.0


def make_replicas(num_replicas):
    """A profile of replicas that all do the same at the same time."""
    facts = make_facts(2, 4)
    events = [
        dataclasses.replace(
            event,
            ipu=event.ipu + 2 * replica,
            source=None if event.source is None else event.source + 2 * replica,
            micro_batch=None if event.micro_batch is None else event.micro_batch * num_replicas + replica,
        )
        for event in make_events(facts, 2)
        for replica in range(num_replicas)
    ]
    return make_profile(dataclasses.replace(facts, num_replicas=num_replicas), tuple(events))


def test_replicas():
    (one,), (three,) = study(make_replicas(1)), study(make_replicas(3))
    assert three.analysis.step_time == pytest.approx(one.analysis.step_time)
    assert three.analysis.samples_per_second == pytest.approx(3 * one.analysis.samples_per_second)
    assert three.analysis.balanced_utilisation == one.analysis.balanced_utilisation == pytest.approx(4 / 5)
    assert [use.ipu for use in three.analysis.ipus] == list(range(6))
    assert [use.busy for use in three.analysis.ipus] == [use.busy for use in one.analysis.ipus] * 3
    for name in ("stages", "links"):
        assert getattr(three.analysis, name) == getattr(one.analysis, name)
    alone = one.predictions.simulation.scenario
    scenario = three.predictions.simulation.scenario
    assert scenario == dataclasses.replace(alone, cluster=Cluster(num_replicas=3))
    timeline = three.predictions.simulation.free_running
    found = timeline_events(timeline, three.facts, 0, [(0, 1, 77), (1, 0, 77)])
    places = {(event.stage, event.micro_batch, event.ipu) for event in found if event.kind == "forward"}
    assert places == {(stage, k, 2 * (k % 3) + stage) for stage in range(2) for k in range(12)}
    sent = {(event.source, event.ipu) for event in found if event.kind == "transfer"}
    assert sent == {(2 * r + source, 2 * r + 1 - source) for r in range(3) for source in range(2)}


def write(tmp_path, profile=None):
    directory = tmp_path / "reports"
    directory.mkdir()
    write_reports(directory, {"profile.json": (profile or make_profile(num_steps=2)).to_json()})
    return directory


def report(capsys, *arguments):
    """What the command prints."""
    assert main.main(["report", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_the_page_of_replicas(tmp_path, capsys):
    profile = make_replicas(2)
    held = profile_memory_over_time(profile, 0)
    alone = profile_memory_over_time(make_replicas(1), 0)
    assert [one.ipu for one in held] == [0, 1, 2, 3]
    for one, other in zip(held, alone * 2, strict=True):
        assert one.peak.num_bytes == other.peak.num_bytes
        assert one.times.tolist() == other.times.tolist()
    directory = write(tmp_path, profile)
    printed = report(capsys, directory)
    assert "8 micro-batches a step of 2 replicas)" in printed
    assert re.findall(r"IPU \d  ", printed) == [f"IPU {ipu}  " for ipu in range(4)]
    table = table_of_ipus(profile, profile.pipelines[0], analyse_one(profile))
    cells = re.findall(r"<tr><th[^>]*>(\d+)</th><td>(\d+)</td><td[^>]*>(\d+)</td>", table)
    assert cells == [(str(ipu), str(ipu // 2), str(ipu % 2)) for ipu in range(4)]


# --- the page


def unpack_column(packed, count):
    """What `trace.js` makes of a column."""
    if isinstance(packed, int):
        return [packed] * count
    values, left = [], iter(base64.b64decode(packed))
    for byte in left:
        value, place = byte & 127, 0
        while byte & 128:
            byte, place = next(left), place + 7
            value += (byte & 127) << place
        values.append(-(value + 1) // 2 if value % 2 else value // 2)
    assert len(values) == count
    return values


def unpack(columns):
    """What `trace.js` makes of columns, as tuples."""
    count = columns["count"]
    named = {name: values for name, values in columns.items() if name not in ("count", "kinds", "names")}
    expanded = {name: unpack_column(values, count) for name, values in named.items()}
    begins = np.cumsum(expanded["begin"])
    numbers = ("ipu", "pipeline", "stage", "batch", "step", "source", "bytes", "flags")
    return [
        (
            columns["kinds"][expanded["kind"][at]],
            begins[at] / 1e3,
            expanded["length"][at] / 1e3,
            *(expanded[name][at] for name in numbers),
            columns["names"][expanded["name"][at]],
        )
        for at in range(count)
    ]


def test_columns_have_all_of_the_events():
    events = [
        Event(EventKind.FORWARD, 1.25, 3.5, 2, 0, 1, 7, 4, is_shared=True),
        Event(EventKind.TRANSFER, 0.5, 0.5, 1, 0, 0, 6, 4, num_bytes=9, source=0, is_bounded=True),
        Event(EventKind.OTHER, 2.0, 2.125, 0, name="jit_x"),
    ]
    assert unpack(pack(events)) == [
        ("transfer", 0.5, 0.0, 1, 0, 0, 6, 4, 0, 9, 2, ""),
        ("forward", 1.25, 2.25, 2, 0, 1, 7, 4, -1, 0, 1, ""),
        ("other", 2.0, 0.125, 0, -1, -1, -1, -1, -1, 0, 0, "jit_x"),
    ]
    assert pack([])["count"] == 0
    for values in ([0, -1, 1, -64, 64, 127, 128, -129], [2**40, -(2**50), 0], [7, 7, 7], []):
        assert unpack_column(pack_column(values), len(values)) == values
    assert pack(events[:1])["ipu"] == 2  # all the same


def test_memory_over_time():
    """Stage 0 goes forward in time-steps 1 and 2, back in 5 and 6; stage 1 in 2 and 4, in 3 and 5."""
    facts = make_facts(2, 2)
    profile = make_profile(facts)
    found = pack_measured(profile, 0)
    assert [one["ipu"] for one in found] == [0, 1]
    held = []
    for one in found:
        parts = {part["name"]: unpack_column(part["values"], one["count"]) for part in one["parts"]}
        times = np.cumsum(unpack_column(one["times"], one["count"])) / 1e3 / SLOT
        changes = []
        for time, size in zip(times.tolist(), parts.pop("activations"), strict=True):
            if not changes or changes[-1][1] != size >> 20:
                changes.append((time, size >> 20))
        held.append(changes)
        assert set(parts.pop("temporaries")) == {0, 256}
        assert {name: set(values) for name, values in parts.items()} == {
            "variables": {1600}, "optimizer state": {3200}, "accumulators": {1600}, "micro-batches": {512},
        }  # fmt: skip
    assert held == [
        [(0.0, 1), (1.0, 2), (4.9, 1), (5.9, 0)],
        [(0.0, 0), (1.0, 1), (2.9, 0), (3.0, 1), (4.9, 0)],
    ]
    assert "forward of stage 0, micro-batch 1" in write_page(profile)
    without = make_profile(dataclasses.replace(facts, memory=()))
    assert pack_measured(without, 0) == []


class Plain(html.parser.HTMLParser):
    """The elements of a page, the text of each script, and all other text."""

    void = ("meta", "input", "br")

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.scripts, self.attributes, self.texts, self.tags = [], [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attributes]
        if tag not in self.void:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif not self.open or self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def as_plain(page):
    plain = Plain()
    plain.feed(page)
    plain.close()
    assert plain.open == []
    return plain


def nasty_profile():
    """Everything that a user names has everything that could end a script or an attribute."""
    facts = make_facts(2, 4, name=NASTY, schedule="grouped")
    stages = tuple(
        dataclasses.replace(
            stage,
            name=f"{NASTY}{stage.index}",
            layers=tuple(LayerFacts(f"{NASTY}/{n}", 9, 36) for n in range(6)),
        )
        for stage in facts.stages
    )
    events = make_events(facts) + (Event(EventKind.OTHER, 9e4, 9.1e4, 0, name=NASTY),)
    facts = dataclasses.replace(facts, stages=stages)
    other = dataclasses.replace(facts, schedule=NASTY)
    return make_profile(
        facts, events, program=NASTY, notes=(NASTY,), versions={NASTY: NASTY}, pipelines=(facts, other)
    )


def test_names_of_users_are_only_ever_text():
    plain = as_plain(write_page(nasty_profile()))
    assert len(plain.scripts) == 3
    data = json.loads(plain.scripts[0])
    assert data["pipelines"][0]["name"] == NASTY
    assert data["pipelines"][0]["stages"][1]["name"] == f"{NASTY}1"
    assert NASTY in data["measured"]["names"]
    assert not {"iframe", "img", "object", "b"} & set(plain.tags)
    shown = NASTY.replace("\u2028\u2029", " ").split()
    assert all(word in plain.text for word in shown)
    assert "alert" not in plain.scripts[2]
    raw = as_script(nasty_profile().pipelines[0].name)
    assert not re.search("[<>&\u2028\u2029]", raw)
    assert json.loads(raw) == NASTY
    assert as_html(NASTY).count("<") == 0


@pytest.fixture(scope="module")
def page():
    """Of a profile of two steps."""
    return write_page(make_profile(num_steps=2))


def test_the_page_has_all_in_itself(page):
    plain = as_plain(page)
    assert not {"src", "href", "srcset", "action"} & {name for _tag, name, _value in plain.attributes}
    contents = [value for _tag, name, value in plain.attributes if name == "content"]
    (policy,) = [value for value in contents if "default-src" in value]
    assert policy.startswith("default-src 'none'")
    headings = [entry for entry in plain.attributes if entry[:2] == ("th", "scope")]
    assert len(headings) == plain.tags.count("th")
    assert plain.tags.count("table") == plain.tags.count("caption")
    assert "<h1>train.py</h1>" in page
    for words in ("Utilisation of the IPUs", "Bubble", "samples/s", "stage 0"):
        assert words in plain.text
    assert "The settings that gain most" in plain.text
    assert re.search(r"All \d+ settings, simulated", plain.text)
    data = json.loads(plain.scripts[0])
    assert data["measured"]["count"] == len(make_profile(num_steps=2).events)
    assert set(data["pipelines"][0]["simulated"]) == {"free", "lock"}


def luminance(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    """Source: WCAG 2.1, contrast ratio."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_told_apart_by_their_brightness():
    """Of blue and orange, the blue is darker; each shows beside waiting in both themes."""
    assert contrast(COLOURS[EventKind.FORWARD], COLOURS[EventKind.BACKWARD]) >= 2.5
    assert len(IDLES) == 2
    for idle in IDLES:
        assert contrast(COLOURS[EventKind.FORWARD], idle) >= 2
        assert contrast(COLOURS[EventKind.BACKWARD], idle) >= 1.3
    for kind in (*ACTIONS, EventKind.UPDATE, EventKind.OTHER):
        assert contrast(COLOURS[kind], INKS[kind]) >= 4.5


def test_engine_programs_have_devices():
    """TF1's and PopTorch's interfaces have IPUs."""
    page = as_plain(write_page(make_profile(make_facts(device_word="device")))).text
    assert "Utilisation of the devices" in page
    assert "These devices are virtual" in page
    assert not re.search(r"\bIPUs?\b", page)
    assert say_device("On an IPU. IPUs of IPUConfig", "device") == "On a device. Devices of IPUConfig"
    assert say_device("an IPU", "IPU") == "an IPU"


def test_without_plotly_the_extra_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(RuntimeError, match=r"pip install 'ipu_pipeline\[reports\]'"):
        write_page(make_profile())
    directory = write(tmp_path)
    assert main.main(["report", str(directory)]) == 2
    assert "pip install 'ipu_pipeline[reports]'" in capsys.readouterr().err
    assert not (directory / "report.html").exists()


def test_no_older_page_is_left_where_none_can_be_written(monkeypatch, tmp_path, page):
    directory = write(tmp_path)
    captured = Capture(directory, 10)
    captured._write_page(make_profile(num_steps=2))
    assert (directory / "report.html").read_text() == page
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    captured._write_page(make_profile())
    assert sorted(path.name for path in directory.iterdir()) == ["manifest.json", "profile.json"]
    (directory / "report.html").symlink_to(directory / "profile.json")
    captured._write_page(make_profile())
    assert (directory / "report.html").is_symlink()


def test_jupyter_shows_the_page_in_a_frame(monkeypatch, tmp_path, page):
    captured = Capture(tmp_path, 10)
    assert captured._repr_html_() is None  # nothing ran
    captured.profile = make_profile(num_steps=2)
    before, shown, _after = captured._repr_html_().split('"', 2)
    assert (before, html.unescape(shown)) == ("<iframe srcdoc=", page)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert "ipu_pipeline[reports]" in captured._repr_html_()


# --- ipu-pipeline report


def test_report_rebuilds_the_page_and_tells_the_summary(tmp_path, capsys, page):
    directory = write(tmp_path)
    printed = report(capsys, directory)
    assert f"The page is {directory / 'report.html'}" in printed
    assert re.search(r"utilisation +65\.9% \(72\.7% if all stages took equally long\)", printed)
    assert re.search(r"limiting stage +none: all IPUs are about equally busy", printed)
    profile = make_profile(num_steps=2)
    assert (directory / "trace.json").read_text() == to_chrome_trace(profile)
    assert (directory / "report.html").read_text() == page
    assert sorted(path.name for path in directory.iterdir()) == [
        "manifest.json", "profile.json", "report.html", "trace.json",
    ]  # fmt: skip


def test_report_names_the_limiting_stage(tmp_path, capsys):
    facts = make_facts(2, 4)
    events = [moved(event, end=50.0 * (event.stage == 1)) for event in make_events(facts)]
    printed = report(capsys, write(tmp_path, make_profile(facts, tuple(events))))
    assert re.search(r"limiting stage +stage 1 on IPU 1, 1\.90 ms for a micro-batch", printed)


def test_report_says_the_process_of_each_ipu(tmp_path, capsys):
    two = make_facts(2, 4, num_replicas=2)
    events = make_events(make_facts(2, 4))
    computed = [event for event in events if event.kind is not EventKind.TRANSFER]
    later = [dataclasses.replace(event, ipu=event.ipu + 2) for event in computed]
    devices = tuple(DeviceFacts(ipu, 7 + ipu, "cpu", "cpu", ipu // 2) for ipu in range(4))
    profile = make_profile(two, (*events, *later))
    directory = write(tmp_path, dataclasses.replace(profile, devices=devices))
    lines = report(capsys, directory).splitlines()
    found = [re.fullmatch(r"  IPU (\d) +busy [\d.]+% +process (\d)", line) for line in lines]
    told = [match.groups() for match in found if match]
    assert told == [(str(ipu), str(ipu // 2)) for ipu in range(4)]
    assert len({line.index("process") for line in lines if line.startswith("  IPU ")}) == 1
    (pipeline,) = json.loads(report(capsys, "--json", directory))["pipelines"]
    assert [(one["ipu"], one["process"]) for one in pipeline["ipus"]] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    alone = dataclasses.replace(profile, devices=devices[:2])
    (directory / "profile.json").write_text(alone.to_json())
    lines = [line for line in report(capsys, directory).splitlines() if line.startswith("  IPU ")]
    assert len(lines) == 4
    assert not any("process" in line for line in lines)


def test_simulate_takes_the_costs_of_a_profile(tmp_path, capsys):
    directory = write(tmp_path)
    assert main.main(["simulate", "--json", "--costs-from", str(directory / "profile.json")]) == 0
    scenario = json.loads(capsys.readouterr().out)["scenario"]
    (one,) = study(make_profile(num_steps=2))
    assert scenario == one.predictions.simulation.scenario.as_dict()
    loop = make_profile(make_facts(2, 4, kind="loop"))
    (directory / "profile.json").write_text(loop.to_json())
    with pytest.raises(SystemExit):
        main.main(["simulate", "--costs-from", str(directory / "profile.json")])
    assert "has no pipeline that can be simulated" in capsys.readouterr().err


def test_simulate_writes_a_page(tmp_path, capsys, monkeypatch):
    file = tmp_path / "simulated.html"
    options = ["simulate", "--stages", "3", "--micro-batches", "4", "--forward-cost", "1,2,1"]
    assert main.main([*options, "--html", str(file)]) == 0
    plain = as_plain(file.read_text())
    assert "3 stages on 3 devices, 4 micro-batches, schedule grouped" in plain.text
    assert "A cost of 1 is shown as 1 ms." in plain.text
    data = json.loads(plain.scripts[0])
    assert data["isSimulated"]
    assert data["measured"]["count"] == 0
    events = unpack(data["pipelines"][0]["simulated"]["free"])
    forwards = [event for event in events if event[0] == "forward" and event[5] == 1]
    assert [event[2] for event in forwards] == [2000.0] * 4
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(SystemExit):
        main.main([*options, "--html", str(file)])
    assert "pip install 'ipu_pipeline[reports]'" in capsys.readouterr().err


def test_report_does_not_obey_names(tmp_path, capsys):
    facts = make_facts(2, 4, name="a\x1b[2Jb")
    assert "\x1b" not in report(capsys, write(tmp_path, make_profile(facts)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "has no profile.json; ipu-pipeline profile SCRIPT writes one"),
        ("{", "this is no profile of ipu_pipeline"),
        (b"\xff\xfe", "it is damaged"),
        (make_profile().to_json().replace('"version": 6', '"version": 99'),
         "a later ipu_pipeline (version 99"),
        (make_profile().to_json().replace('"columns"', '"kolumns"'), "it is damaged"),
        (make_profile(make_facts(2, 4), make_events(make_facts(3, 4))).to_json(),
         "event of stage 2 of pipeline 0"),
        (make_profile(pipelines=()).to_json(), "of pipeline 0, and pipelines with [] stages"),
    ],
    ids=["missing", "no JSON", "no text", "later", "no columns", "a stage too many", "no pipeline"],
)  # fmt: skip
def test_report_refuses(text, words, tmp_path, capsys):
    if text is not None:
        (tmp_path / "profile.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main.main(["report", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile.json"] * (text is not None)


def test_report_refuses_what_is_no_directory(tmp_path, capsys):
    assert main.main(["report", str(tmp_path / "nowhere")]) == 2
    assert "there is no directory" in capsys.readouterr().err


def test_report_as_json_writes_neither_over_strange_files_nor_through_links(tmp_path, capsys):
    directory = write(tmp_path)
    mine = tmp_path / "mine.html"
    mine.write_text("mine")
    os.symlink(mine, directory / "report.html")
    assert main.main(["report", str(directory)]) == 2
    assert "'report.html' that its manifest.json does not list" in capsys.readouterr().err
    (directory / "report.html").unlink()
    write_reports(directory, {"report.html": "older"})
    (directory / "report.html").unlink()
    os.symlink(mine, directory / "report.html")  # the manifest lists it, so it is replaced, not followed
    found = json.loads(report(capsys, "--json", directory))
    assert found["page"] == str(directory / "report.html")
    (pipeline,) = found["pipelines"]
    assert pipeline["limiting_stage"] == 0
    assert pipeline["step_time"] == pytest.approx(22 * SLOT + UPDATE)
    assert pipeline["scenario"]["num_micro_batches"] == 8
    assert mine.read_text() == "mine"
    assert not (directory / "report.html").is_symlink()


def test_settings_that_gain_nothing_are_not_among_the_best():
    gains = [0.0, -0.1, 0.2, 0.0, 0.1]  # the first is the present setting
    predictions = types.SimpleNamespace(variants=[types.SimpleNamespace(gain=gain) for gain in gains])
    assert [row.gain for row in find_best(predictions)] == [0.2, 0.1]
