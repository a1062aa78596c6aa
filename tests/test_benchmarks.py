"""The benchmarks, without running one: their folders, their arithmetic and their models."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import harness, models, run_all

ROOT = Path(harness.ROOT) / "benchmarks"
FOLDERS = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__")


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_has_a_program_a_page_and_pinned_requirements(folder):
    page = (ROOT / folder / "README.md").read_text()
    assert f"python -m benchmarks.{folder}.run" in page
    assert f"python -m benchmarks.{folder}.run" in (ROOT / folder / "run.py").read_text()
    lines = (ROOT / folder / "requirements.txt").read_text().splitlines()
    everything = (ROOT / "requirements.txt").read_text().splitlines()
    assert lines
    for line in lines:
        assert "==" in line
        assert line in everything


def test_run_all_knows_every_folder():
    assert sorted(run_all.BENCHMARKS) == FOLDERS


def test_ratios_are_taken_round_by_round():
    row = harness.compare("question", "case", [2.0, 4.0, 9.0], [1.0, 4.0, 3.0], 1.5)
    assert row.value == 2.0  # of 2, 1 and 3, not of the medians 4 and 3
    assert row.spread == (1.0, 3.0)
    assert (row.ours, row.other) == ("4000.00 ms", "3000.00 ms")
    assert row.is_met is False


def test_a_speed_is_met_from_below():
    row = harness.compare("question", "case", [1.0, 2.0, 1.0], [3.0, 5.0, 4.0], 3.0, is_speed=True)
    assert row.value == 3.0
    assert row.is_met is True
    assert harness.compare("question", "case", [1.0], [1.0]).is_met is None


def test_rounds_must_be_the_same():
    with pytest.raises(ValueError, match="zip"):
        harness.compare("question", "case", [1.0, 2.0], [1.0])


def test_the_table():
    rows = [
        harness.Row("feeds", "alone", "1,234,567/s", "", 1234567.0, (1e6, 2e6), 8e5, at_most=False),
        harness.Row("dispatch", "an action", "30.0 us", "", 30.0, None, 25.0),
        harness.Row("dispatch", "an update", "30.0 us", "", 30.0),
    ]
    assert harness.format_table(rows).splitlines() == [
        "| question | case | ours | other | figure | from..to | target | met |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| feeds | alone | 1,234,567/s |  | 1,234,567 | 1,000,000..2,000,000 | ≥ 800,000 | yes |",
        "| dispatch | an action | 30.0 us |  | 30 |  | ≤ 25 | no |",
        "| dispatch | an update | 30.0 us |  | 30 |  |  |  |",
    ]


def test_rows_survive_json(tmp_path, capsys):
    row = harness.compare("question", "case", [2.0, 4.0], [1.0, 4.0], 1.5)
    harness.report([row], tmp_path / "rows.json")
    assert "question" in capsys.readouterr().out
    (read,) = (harness.Row(**found) for found in json.loads((tmp_path / "rows.json").read_text()))
    assert harness.format_table([read]) == harness.format_table([row])


class MadeUpSide:
    """Says what a step takes, and writes down when it was asked for how many."""

    def __init__(self, name, seconds, asked):
        self._name, self._seconds, self._asked = name, seconds, asked

    def run(self, num_steps):
        self._asked.append((self._name, num_steps))
        return self._seconds


def test_sides_take_turns():
    asked = []
    sides = {"ours": MadeUpSide("ours", 0.25, asked), "other": MadeUpSide("other", 2.0, asked)}
    taken = harness.take_turns(sides, 3, seconds=1.0)
    assert taken == {"ours": [0.25] * 3, "other": [2.0] * 3}
    ours, other = ("ours", 4), ("other", 1)  # as many steps as a second has, at least one
    calibration, rounds = asked[:2], asked[2:]
    assert calibration == [("ours", 3), ("other", 3)]
    assert rounds == [other, ours, ours, other, other, ours, ours, other, other, ours]


@pytest.mark.parametrize("case", sorted(models.WORKLOADS))
def test_a_workload_has_the_stages_that_it_says(case):
    workload = models.WORKLOADS[case]
    model = workload.make()
    assert len(model.stages) == len(model.parameters) == workload.num_stages
    assert workload.num_micro_batches % workload.unroll == 0
    micro_batches = model.micro_batches(workload.num_micro_batches)
    assert len(micro_batches) == workload.num_micro_batches
    assert not np.array_equal(micro_batches[0][0], micro_batches[1][0])

    def loss(x, target):
        values = (x, target)
        for stage, own in zip(model.stages[:-1], model.parameters[:-1], strict=True):
            values = stage(own, *values)
        return model.stages[-1](model.parameters[-1], *values)

    found = jax.eval_shape(loss, *micro_batches[0])
    assert (found.shape, found.dtype) == ((), jnp.float32)
