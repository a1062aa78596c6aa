"""How large report.html is, and how soon its trace can be seen.

    python -m benchmarks.report_page.run [--rounds 5] [--json FILE]

The traces are of four stages, with 400 and with 40,000 actions (forwards and backwards) in a step, and with
40,000 in 40 steps; there are three quarters as many transfers besides. Sizes are without Plotly's own
script, which every page has. Seconds are from when chromium, without a window, begins to load the file
until the trace is painted; each round starts a browser, so nothing is kept from the one before.

Without chromium, chromedriver and selenium only sizes are measured, and it says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Row
from ipu_pipeline.engine.inspect import IpuMemory, LayerFacts, PipelineFacts, StageFacts
from ipu_pipeline.engine.schedules import Costs, Scenario, simulate
from ipu_pipeline.reports.page import write_page
from ipu_pipeline.reports.predictions import timeline_events
from ipu_pipeline.reports.profile import DeviceFacts, Event, Profile

QUESTION = "report_page"
NUM_STAGES = 4
CASES = {"400 actions": (400, 1), "40,000 actions": (40_000, 1), "40,000 actions in 40 steps": (40_000, 40)}
MOST_BYTES, MOST_SECONDS = 8e6, 8.0
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--window-size=1280,1000",
)


def make_profile(num_actions: int, num_steps: int) -> Profile:
    """A trace that the simulator made, with at least so many actions."""
    count = -(-num_actions // num_steps // (2 * NUM_STAGES))
    stages = tuple(
        StageFacts(
            index,
            f"stage {index} (dense{index})",
            index,
            index,
            tuple(LayerFacts(f"dense{index}/{number}", 65_536, 262_144) for number in range(4)),
            1e8,
            2e8,
            index == NUM_STAGES - 1,
            1 << 20,
            2 * (NUM_STAGES - index) - 1,
        )
        for index in range(NUM_STAGES)
    )
    memory = tuple(
        IpuMemory(index, 1 << 20, 1 << 21, 1 << 20, 7 << 20, 1 << 16, 1 << 18, 0) for index in range(4)
    )
    facts = PipelineFacts("Pipeline", "training", "grouped", count, 1, 1, False, 32, stages, (), (), memory)
    costs = Costs.of(
        NUM_STAGES, forward=[1e-3, 1.3e-3, 1e-3, 0.9e-3], backward=2e-3, update=3e-4, transfer=5e-5
    )
    timeline = simulate(Scenario(costs, "grouped", count)).free_running
    one = timeline_events(
        timeline, facts, 0, [(stage, stage + 1, 65_536.0) for stage in range(NUM_STAGES - 1)]
    )
    events = [
        _later(event, step, step * timeline.step_time * 1e6 * 1.01)
        for step in range(num_steps)
        for event in one
    ]
    return Profile(
        "a simulated program",
        "2026-01-01T00:00:00+00:00",
        {},
        2,
        tuple(DeviceFacts(index, index, "cpu", "cpu") for index in range(NUM_STAGES)),
        (facts,),
        tuple(sorted(events, key=lambda event: (event.begin, event.end))),
    )


def _later(event: Event, step: int, since: float) -> Event:
    return dataclasses.replace(event, begin=event.begin + since, end=event.end + since, step=step)


@contextlib.contextmanager
def start_browser() -> Iterator[Any]:
    """A browser of its own."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in (*ARGUMENTS, "--host-resolver-rules=MAP * ~NOTFOUND"):
        options.add_argument(argument)
    driver = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(str(shutil.which("chromedriver")))
    )
    try:
        yield driver
    finally:
        driver.quit()


def load(path: Path) -> float:
    """The seconds until the trace of a page is painted."""
    script = "return performance.getEntriesByName('trace visible').map((mark) => mark.startTime)"
    with start_browser() as driver:
        driver.get(path.as_uri())
        end = time.monotonic() + harness.MOST_SECONDS
        while not (found := driver.execute_script(script)):
            if time.monotonic() > end:
                raise TimeoutError(f"{path}: no trace was painted.")
            time.sleep(0.1)
        return float(found[0]) / 1e3


def find_missing() -> str | None:
    """What is not there of what a browser needs."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return program
    try:
        import selenium  # noqa: F401  # whether it is there
    except ModuleNotFoundError:
        return "selenium"
    return None


def measure(case: str, num_rounds: int, folder: Path) -> list[Row]:
    """The rows of a case."""
    from plotly.offline import get_plotlyjs

    profile = make_profile(*CASES[case])
    begin = time.perf_counter()
    page = write_page(profile)
    written = time.perf_counter() - begin
    size = float(len(page.encode()) - len(get_plotlyjs().encode()))
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    name = f"{case}, {len(profile.events):,} events"
    rows = [
        Row(QUESTION, f"{name}: bytes beyond Plotly's", f"{size:,.0f}", "", size, None, MOST_BYTES),
        Row(QUESTION, f"{name}: seconds to write it", f"{written:.2f} s", "", written),
    ]
    if find_missing() is None:
        taken = [load(path) for _round in range(num_rounds)]
        middle = statistics.median(taken)
        spread = (min(taken), max(taken))
        what = f"{name}: seconds until the trace is visible"
        rows.append(Row(QUESTION, what, f"{middle:.2f} s", "", middle, spread, MOST_SECONDS))
    return rows


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if find_missing() is not None:
        print(f"There is no {find_missing()}, so only sizes were measured.", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        num_rounds = 3 if args.short else args.rounds
        rows = [row for case in CASES for row in measure(case, num_rounds, Path(folder))]
    harness.report(rows, args.json)


if __name__ == "__main__":
    main()
