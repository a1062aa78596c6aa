"""The page in a browser: what is drawn where, what is under the pointer, and what controls do."""

import collections
import dataclasses
import re

import pytest

from ipu_pipeline.engine.schedules import Costs, Scenario
from ipu_pipeline.reports.page import write_page, write_simulation
from ipu_pipeline.reports.page.report_page import COLOURS
from ipu_pipeline.reports.profile import Event, EventKind
from tests.reports.test_report_page import IDLES, NASTY, make_replicas, moved, nasty_profile
from tests.support import browsers
from tests.support.traces import ACTION, SLOT, UPDATE, make_events, make_facts, make_profile

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(browsers.MISSING is not None, reason=str(browsers.MISSING)),
]
FORWARD, BACKWARD = COLOURS[EventKind.FORWARD], COLOURS[EventKind.BACKWARD]
IDLE = IDLES[0]
MOST_BYTES, WIDTH = 8e6, 1280


@pytest.fixture(scope="module")
def driver():
    with browsers.browser() as found:
        yield found


@pytest.fixture
def show(driver, tmp_path):
    """Opens the page of a profile; at the end it must have asked for nothing, and complained of nothing."""
    shown = []

    def show(profile):
        path = tmp_path / "report.html"
        path.write_text(write_page(profile), encoding="utf-8")
        shown.append(browsers.Page(driver, path))
        return shown[-1]

    yield show
    assert [fault for page in shown for fault in page.faults()] == []


def rows_of(page, colour, num_rows):
    """How many bars of a colour there are in each row."""
    _left, _top, _width, height = page.area()
    row = (height - 18) / num_rows  # below the rows is room for the names of phases
    return collections.Counter(int((bar[2] + bar[3]) / 2 / row) for bar in page.bars(colour))


def labels_of(page, selector):
    """The texts of elements of a drawing."""
    script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)"
    return page.run(script, selector)


def test_every_action_is_a_bar_in_the_row_of_its_ipu(show):
    facts = make_facts(4, 8)
    waits = tuple(
        Event(EventKind.INFEED_WAIT, at * 2e3, at * 2e3 + 500, None, step=0, micro_batch=at)
        for at in range(8)
    )
    page = show(make_profile(facts, make_events(facts) + waits))
    each = dict.fromkeys(range(4), 8)
    assert rows_of(page, FORWARD, 5) == each
    assert rows_of(page, BACKWARD, 5) == each
    assert rows_of(page, COLOURS[EventKind.UPDATE], 5) == dict.fromkeys(range(4), 1)
    assert rows_of(page, COLOURS[EventKind.TRANSFER], 5) == {0: 8, 1: 16, 2: 16, 3: 8}
    assert rows_of(page, COLOURS[EventKind.INFEED_WAIT], 5) == {4: 8}
    assert rows_of(page, IDLE, 5) == dict.fromkeys(range(4), 1)
    width, length = page.area()[2], 22 * SLOT + UPDATE
    (first,) = [bar for bar in page.bars(FORWARD) if bar[2] < 40 and bar[0] < width / 24]
    assert first[1] - first[0] == pytest.approx(width * ACTION / (1.04 * length), abs=2)
    assert labels_of(page, "#trace .ytick") == ["IPU 0", "IPU 1", "IPU 2", "IPU 3", "Host"]
    assert labels_of(page, "#trace .annotation-text") == ["ramp-up", "main phase", "ramp-down"]


def test_replicas_and_hosts_of_processes_have_rows_of_their_own(show):
    profile = make_replicas(2)
    events = [event for event in profile.events if event.step == 0]
    events += [
        Event(EventKind.INFEED_WAIT, 2e3 * at, 2e3 * at + 500, None, step=0, process=process)
        for process, number in ((0, 3), (1, 5))
        for at in range(number)
    ]
    page = show(dataclasses.replace(profile, events=tuple(events)))
    assert rows_of(page, FORWARD, 6) == rows_of(page, BACKWARD, 6) == dict.fromkeys(range(4), 4)
    assert rows_of(page, COLOURS[EventKind.INFEED_WAIT], 6) == {4: 3, 5: 5}
    assert rows_of(page, IDLE, 6).keys() == set(range(4))
    hosts = ["Host of process 0", "Host of process 1"]
    assert labels_of(page, "#trace .ytick") == ["IPU 0", "IPU 1", "IPU 2", "IPU 3", *hosts]
    page.choose("input[value=free]")
    assert rows_of(page, FORWARD, 4) == dict.fromkeys(range(4), 4)


def test_what_is_under_the_pointer(show):
    facts = make_facts(2, 2)
    events = [
        dataclasses.replace(event, is_shared=event.stage == 1 and event.kind is not EventKind.TRANSFER)
        for event in make_events(facts)
    ]
    page = show(make_profile(facts, tuple(events)))
    assert page.is_hidden("#tip")
    page.point(page.bars(FORWARD)[1])
    assert page.text("#tip").splitlines() == [
        "Forward",
        "stage 0 (dense0)",
        "micro-batch 1",
        "step 0",
        "IPU 0",
        "begins at 1 ms",
        "takes 900 µs",
    ]
    page.point(page.bars(BACKWARD)[-1])
    assert "micro-batch 1" in page.text("#tip")
    assert "shares a program: its times are estimates" in page.text("#tip")
    page.point(page.bars(COLOURS[EventKind.TRANSFER])[0])
    assert "from IPU 1 to IPU 0" in page.text("#tip")
    assert "4 KiB" in page.text("#tip")
    page.choose("#whole")
    left = page.bars(FORWARD)[0]
    page.point([left[0] - 20, left[0] - 16, left[2], left[3]])  # before anything began
    assert page.is_hidden("#tip")


def test_zooming(show):
    """By Ctrl and the wheel at the pointer, by dragging, and back by a double-click. Both charts follow."""
    page = show(make_profile(num_steps=2))

    def ranges():
        charts = ("trace", "memory")
        return [
            page.run(f"return document.getElementById('{chart}').layout.xaxis.range") for chart in charts
        ]

    def wheel(ctrl):
        left, top, width, height = page.area()
        page.run(
            """
            const [ctrlKey, clientX, clientY] = arguments;
            const where = { ctrlKey, clientX, clientY, deltaY: -100, bubbles: true, cancelable: true };
            return document.querySelector("#trace .nsewdrag").dispatchEvent(new WheelEvent("wheel", where));
            """,
            ctrl,
            left + width / 4,
            top + height / 2,
        )

    (first, last), follower = ranges()
    assert follower == [first, last]
    wheel(ctrl=False)
    assert ranges()[0] == [first, last]
    wheel(ctrl=True)
    (begin, end), follower = ranges()
    assert follower == [begin, end]
    assert end - begin == pytest.approx((last - first) * 2.718281828**-0.5)
    assert begin + (end - begin) / 4 == pytest.approx(first + (last - first) / 4, abs=0.02)  # a pixel
    page.drag(0.25, 0.75)
    (left, right), follower = ranges()
    assert follower == [left, right]
    assert right - left == pytest.approx((end - begin) / 2, rel=0.01)
    page.run("document.getElementById('trace').dispatchEvent(new MouseEvent('dblclick'))")
    whole = 2 * (22 * SLOT + UPDATE) / 1e3
    assert ranges() == [[pytest.approx(-0.01 * whole), pytest.approx(1.01 * whole)]] * 2


def test_a_long_step_opens_on_a_part_that_can_be_read(show):
    page = show(make_profile(make_facts(2, 1000)))

    def shown():
        forwards = page.bars(FORWARD)
        return forwards[3][1] - forwards[3][0], len(forwards), page.text("#drawn")

    width, number, words = shown()
    assert width == pytest.approx(5.0, abs=0.1)  # six pixels, of which one is between neighbours
    assert number < 2 * 2 * WIDTH / 6
    assert words.startswith("This is the beginning of the step")
    page.choose("#zoom")
    assert "narrower than a pixel" in page.text("#drawn") or len(page.bars(FORWARD)) > number
    assert not page.text("#drawn").startswith("This is")


def test_charts_follow_the_theme(show):
    page = show(make_profile())
    driver = page.driver

    def colours():
        return page.run(
            """
            const found = [...document.querySelectorAll(".chart")].map((one) => one.layout.paper_bgcolor);
            return [...new Set([...found, getComputedStyle(document.body).backgroundColor])];
            """
        )

    theme = "Emulation.setEmulatedMedia"
    try:
        assert colours() == ["#fff", "rgb(255, 255, 255)"]
        driver.execute_cdp_cmd(theme, {"features": [{"name": "prefers-color-scheme", "value": "dark"}]})
        page.wait("return document.getElementById('trace').layout.paper_bgcolor === '#14191f'")
        assert colours() == ["#14191f", "rgb(20, 25, 31)"]
        assert len(page.bars(IDLES[1])) == 4
        page.run("dispatchEvent(new Event('beforeprint'))")
        assert colours()[0] == "#fff"  # paper is white
    finally:
        driver.execute_cdp_cmd(theme, {"features": []})


def test_other_settings_are_points(show):
    """The best five are numbered as in the table beside them; the present setting is a star."""
    page = show(make_profile())
    points = page.run("""
        return document.querySelector(".settings").data.flatMap((trace) => trace.x.map((x, at) =>
          [trace.name, String(trace.text[at]), x, trace.y[at], trace.customdata[at][0]]));
    """)
    assert points[-1][0] == "now"
    assert points[-1][2:4] == [pytest.approx(7.01, abs=0.01), pytest.approx(20.5, abs=0.1)]
    ranked = {point[1]: point[4] for point in points if point[1]}
    rows = [row.split("\t")[:2] for row in page.texts(".beside tbody tr")]
    assert [rank for rank, _words in rows] == ["now", "1", "2", "3", "4", "5"]
    assert dict(rows[1:]) == ranked


def test_the_switch_between_measured_and_simulated(show):
    facts = make_facts(4, 8)
    events = (*make_events(facts), Event(EventKind.OUTFEED, 100.0, 5e3, None))
    page = show(make_profile(facts, events))
    assert rows_of(page, COLOURS[EventKind.OUTFEED], 5) == {4: 1}
    assert page.is_hidden("#memory") is False
    assert re.fullmatch(r"IPU 0 holds most: 7.01 MiB, first at .*measured\.", page.text("#peak"))
    for name in ("free", "lock"):
        page.choose(f"input[value={name}]")
        assert rows_of(page, FORWARD, 4) == rows_of(page, BACKWARD, 4) == dict.fromkeys(range(4), 8)
        assert page.bars(COLOURS[EventKind.OUTFEED]) == []
        assert "Simulated: one step" in page.text("#drawn")
        assert page.text("#peak").endswith("simulated.")
        assert page.run("return document.querySelectorAll('#memory .scatterlayer .lines path').length") == 4
    page.choose("#ipu", "1")
    assert len(labels_of(page, "#memory .legendtext")) == 6
    page.choose("input[value=measured]")
    assert rows_of(page, COLOURS[EventKind.OUTFEED], 5) == {4: 1}


def test_the_two_simulated_timelines_differ(show):
    """Before a slow last stage, IPU 0 goes ahead with its forwards, and waits in lock-step."""
    facts = make_facts(4, 8)
    events = [
        moved(event, end=1800.0 * (event.stage == 3 and not event.num_bytes))
        for event in make_events(facts)
    ]
    page = show(make_profile(facts, tuple(events)))

    def fifth_forward_of_ipu_0(name):
        page.choose(f"input[value={name}]")
        return sorted(bar for bar in page.bars(FORWARD) if bar[2] < 30)[4][0] / page.area()[2]

    assert fifth_forward_of_ipu_0("free") < 0.5 * fifth_forward_of_ipu_0("lock")


def test_the_page_of_a_simulation(driver, tmp_path):
    scenario = Scenario(Costs.of(3, forward=1.0, backward=2.0), "interleaved", 4)
    path = tmp_path / "simulated.html"
    path.write_text(write_simulation(scenario, "three stages"))
    page = browsers.Page(driver, path)
    assert page.is_hidden("input[value=measured]")
    assert rows_of(page, FORWARD, 3) == rows_of(page, BACKWARD, 3) == dict.fromkeys(range(3), 4)
    page.choose("input[value=lock]")
    assert rows_of(page, FORWARD, 3) == dict.fromkeys(range(3), 4)
    assert page.faults() == []


def test_a_micro_batch_is_highlighted_through_the_pipeline(show):
    page = show(make_profile(num_steps=3))
    assert page.run("return document.getElementById('step').value") == "0"
    page.choose("#step", "2")
    page.choose("#batch", "5")

    def chosen():
        return page.run("""
            const traces = document.getElementById("trace").data.filter((one) => /^chosen/.test(one.meta));
            const count = (one) => one.x.filter((x) => x === null).length;
            return Object.fromEntries(traces.map((one) => [one.meta, count(one)]));
        """)

    assert chosen() == {"chosen forward": 4, "chosen backward": 4, "chosen transfer": 6}
    assert page.text("#chosen caption") == "Micro-batch 5 of step 2"
    page.choose("#step", "1")
    assert page.text("#chosen caption") == "Micro-batch 5 of step 1"
    page.choose("#step", "2")
    rows = page.texts("#chosen tbody tr")
    assert [row.split("\t")[:3] for row in rows if row[0] != "t"] == [
        ["forward", "0", "0"], ["forward", "1", "1"], ["forward", "2", "2"], ["forward", "3", "3"],
        ["backward", "3", "3"], ["backward", "2", "2"], ["backward", "1", "1"], ["backward", "0", "0"],
    ]  # fmt: skip
    page.choose("#clear")
    assert chosen() == {}
    assert page.is_hidden("#chosen")
    step = [bar for bar in page.bars(BACKWARD) if bar[2] < 30]  # of IPU 0, the step before it, too
    page.point(sorted(step)[-8], clicks=True)
    assert page.text("#chosen caption") == "Micro-batch 0 of step 2"
    assert page.run("return document.getElementById('batch').value") == "0"
    assert chosen()["chosen backward"] == 4
    page.choose("input[value=free]")
    assert page.text("#chosen caption") == "Micro-batch 0"
    page.choose("#batch", "99")
    assert page.text("#chosen caption") == "There is no micro-batch 99 in this trace."


def test_pipelines_are_chosen(show):
    first = make_facts(2, 4)
    second = make_facts(3, 2, name="Evaluation", schedule="of_mine")
    second_events = make_events(dataclasses.replace(second, schedule="grouped"), pipeline=1, begin=2e4)
    profile = make_profile(first, (*make_events(first), *second_events), pipelines=(first, second))
    page = show(profile)
    assert len(page.bars(FORWARD)) == 8
    assert "Evaluation" not in page.text("section[data-pipeline='0']")
    page.choose("#pipeline", "1")
    page.choose("#whole")
    assert len(page.bars(FORWARD)) == 6
    assert page.bars(COLOURS[EventKind.OTHER])  # the other pipeline's
    assert page.is_hidden("section[data-pipeline='0']")
    assert "Evaluation" in page.text("section[data-pipeline='1']")
    assert page.run("return document.querySelector('input[value=free]').disabled")


def test_without_a_pipeline_it_says_so(show):
    page = show(make_profile(events=(), pipelines=()))
    assert page.text("main") == "No pipeline and no loop was recorded."


def test_names_are_shown_and_do_nothing(show):
    page = show(nasty_profile())
    assert page.run("return document.querySelector('h1').textContent") == NASTY
    page.point(page.bars(FORWARD)[0])
    assert "alert('x')" in page.text("#tip")
    assert page.run("return document.title").startswith("</script>")


def covered(bars):
    """The area of some bars."""
    return sum((bar[1] - bar[0]) * (bar[3] - bar[2]) for bar in bars)


@pytest.mark.parametrize("num_steps", [1, 40])
def test_of_many_actions_few_bars_are_drawn(show, tmp_path, num_steps):
    """40,000 actions in one step, and in many; zoomed in, they are bars of their own."""
    # In each step, a micro-batch has 4 forwards, 4 backwards, 3 transfers of values and 3 of gradients.
    facts = make_facts(4, -(-40_000 // num_steps // (4 + 4 + 3 + 3)))
    profile = make_profile(facts, num_steps=num_steps)
    assert len(profile.events) >= 40_000
    from plotly.offline import get_plotlyjs

    page = show(profile)
    size = (tmp_path / "report.html").stat().st_size - len(get_plotlyjs().encode())
    assert size <= MOST_BYTES
    page.choose("#whole")
    counts = """
        const data = document.getElementById("trace").dataset;
        return [Number(data.drawn), Number(data.summed)];
    """
    _drawn, summed = page.run(counts)
    assert summed > 0.9 * len(profile.events)
    assert "narrower than a pixel" in page.text("#drawn")
    forwards = page.bars(FORWARD)
    assert len(forwards) <= 4 * WIDTH  # of 20,000; benchmarks/report_page has the seconds
    busy = covered(forwards) / covered(page.bars(IDLE))
    assert busy == pytest.approx(0.45, abs=0.02)  # half of the slots, 900 of 1,000 microseconds of each
    for _zoom in range(4):
        page.drag(0.5, 0.6)
    drawn, summed = page.run(counts)
    assert summed == 0
    assert 0 < drawn < 500
    assert page.text("#drawn") == ""
