"""The table of devices in docs/speed.md is what the simulator finds, and the search misses nothing."""

import dataclasses
import itertools
import sys
from pathlib import Path

import pytest

from ipu_pipeline.engine.schedules import LinkSpeed, simulate

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import write_scale_table as page  # noqa: E402  # scripts are no package
from scaling import gpt, layouts  # noqa: E402

SMALL = gpt.Gpt(5, width=64, num_heads=4, length=32, num_words=500, num_sequences=16)
DEVICE = gpt.Device(1e9, 2.5e6, 1e9, LinkSpeed(1e-4, 1e8), LinkSpeed(1e-3, 2e7), per_process=2, host=1e-4)


LINES = page.PAGE.read_text().splitlines()


@pytest.mark.parametrize(
    ("num_blocks", "num_devices"),
    [
        (24, 8),
        pytest.param(96, 512, marks=pytest.mark.thorough),
        *(
            pytest.param(*others, marks=pytest.mark.soak)
            for others in itertools.product(page.NUM_BLOCKS, page.NUM_DEVICES)
            if others not in [(24, 8), (96, 512)]
        ),
    ],
)
def test_rows_of_the_page(num_blocks, num_devices):
    assert page.make_row(gpt.Gpt(num_blocks), num_devices) in LINES, "python scripts/write_scale_table.py"


def test_the_page_has_the_table():
    rows = page.PAGE.read_text().partition(page.HEAD)[2].partition("\n\n")[0].splitlines()
    assert [tuple(row.split(" | ")[:2]) for row in rows] == [
        (f"| {blocks}", f"{devices:,}") for blocks in page.NUM_BLOCKS for devices in page.NUM_DEVICES
    ]


def test_known_sizes():
    # GPT-3's 175 thousand million parameters (Brown et al., 2020), whose words are tied.
    model = gpt.Gpt(96, width=12288, num_heads=96, num_words=50257)
    tied = model.num_parameters - model.num_words * model.width
    assert tied == pytest.approx(174.6e9, rel=1e-3)
    # Narayanan et al.: 96 B s l h^2 (1 + s / 6h + V / 16lh) operations with recomputation of everything.
    (whole,) = gpt.split(model, 1, recompute=False)
    words = 2 * model.length * model.width * model.num_words
    formula = 96 * model.length * model.num_blocks * model.width**2
    formula *= (
        1 + model.length / (6 * model.width) + model.num_words / (16 * model.num_blocks * model.width)
    )
    again = whole.forward - words  # they recompute all but the logits
    assert whole.forward + whole.backward + again == pytest.approx(formula)
    # Korthikanti et al.: with width 6144 and 64 heads 5 a s / h is 106.67.
    (block, _last) = gpt.split(gpt.Gpt(2, width=6144, num_heads=64), 2, recompute=False)
    assert block.held_bytes / (2048 * 6144) == pytest.approx(34 + 106.67, rel=1e-3)


@pytest.mark.parametrize(("num_stages", "recompute"), [(1, False), (3, True), (4, False)])
def test_no_split_has_a_faster_slowest_stage(num_stages, recompute):
    model = dataclasses.replace(SMALL, num_blocks=7)
    stages = gpt.split(model, num_stages, recompute=recompute)
    (alone,) = gpt.split(dataclasses.replace(model, num_blocks=0), 1, recompute=False)
    (block,) = gpt.split(dataclasses.replace(model, num_blocks=1), 1, recompute=False)
    one = block.forward - alone.forward
    times = 4 if recompute else 3

    def slowest(counts):
        return max(
            *(times * count * one for count in counts[:-1]), 3 * (counts[-1] * one + alone.forward), 0
        )

    found = tuple(stage.num_blocks for stage in stages)
    assert sum(found) == 7
    every = (counts for counts in itertools.product(range(8), repeat=num_stages) if sum(counts) == 7)
    assert slowest(found) == pytest.approx(min(slowest(c) for c in every if all(c[:-1])))
    assert slowest(found) == pytest.approx(max(stage.forward + stage.backward for stage in stages))


def test_the_search_finds_the_best():
    num_devices = 7
    found = layouts.search(SMALL, DEVICE, num_devices)
    every = list(layouts.find_layouts(SMALL, DEVICE, num_devices))
    assert found.num_layouts == len(every)
    fitting = [layout for layout in every if layout.fits]
    assert 0 < len(fitting) == found.num_fitting < len(every)
    for layout in every:
        assert layout.num_stages * layout.num_replicas <= num_devices
        assert layout.least_time <= layout.step_time * (1 + 1e-12)
    assert found.best.step_time == min(layout.step_time for layout in fitting)
    assert len({layout.schedule for layout in every}) == len({layout.by_stage for layout in every}) == 2


def test_where_devices_are_and_what_they_hold():
    layout = layouts.Layout(SMALL, DEVICE, 2, 4, 2, "interleaved", False, True, False)
    assert layout.num_micro_batches == 2
    assert layout.scenario.cluster.processes == (0, 0, 1, 1, 2, 2, 3, 3)
    beside = dataclasses.replace(layout, by_stage=True)
    assert beside.scenario.cluster.processes == (0, 2, 0, 2, 1, 3, 1, 3)
    first, last = layout.stages
    block = 32 * 64 * (34 + 5 * 4 * 32 / 64)
    held = 2 * (
        2 * first.num_blocks * block + block
    )  # of two micro-batches in flight, and one while it runs
    assert layout.num_bytes == pytest.approx(
        max(
            first.num_parameters * (8 + 8 / 4) + held,
            last.num_parameters * (8 + 8 / 4) + 2 * (last.num_blocks * block + 4 * 32 * 500),
        )
    )
    assert layout.scenario.costs.num_gradient_bytes == (4 * first.num_parameters, 4 * last.num_parameters)
    assert layout.scenario.costs.num_sent_bytes == dict.fromkeys([(0, 1), (1, 0)], 2 * 2 * 32 * 64)


def test_shares_are_all_of_the_time():
    layout = layouts.Layout(SMALL, DEVICE, 3, 2, 1, "grouped", True, False, False)
    found = layouts.shares(layout, 7)
    assert sum(vars(found).values()) == pytest.approx(1)
    assert min(vars(found).values()) > 0
    assert found.unused == pytest.approx(1 / 7)
    timeline = simulate(layout.scenario).free_running
    assert found.compute == pytest.approx(timeline.utilisation * 6 / 7)
    assert found.links == pytest.approx(timeline.bubble.transfers / (7 * timeline.step_time))


def test_rows_of_another_gpt(capsys):
    page.main(["--devices", "1", "2", "--blocks", "2"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| 2 ")]
    assert [(row[1], row[3]) for row in rows] == [("1", "1 x 1"), ("2", "1 x 2")]
    page.main(["--devices", "1", "--blocks", "96"])
    assert "none fits" in capsys.readouterr().out
