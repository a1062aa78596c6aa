"""The benchmarks, without running one: their folders, their arithmetic and their models."""

import io
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from benchmarks import harness, history, models, page, run_all
from benchmarks.poptorch import layers_models
from benchmarks.poptorch import models as torch_models
from ipu_pipeline import engine
from tests.support.programs import run_each

ROOT = Path(harness.ROOT) / "benchmarks"
FOLDERS = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__")


def test_each_folder_has_a_program_a_section_and_pinned_requirements():
    everything = (ROOT / "requirements.txt").read_text().splitlines()
    sections = re.findall(r"^### (\w+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert sorted(sections) == sorted(run_all.BENCHMARKS) == FOLDERS
    for folder in FOLDERS:
        assert f"python -m benchmarks.{folder}.run" in (ROOT / folder / "run.py").read_text()
        lines = (ROOT / folder / "requirements.txt").read_text().splitlines()
        assert lines
        assert all("==" in line and line in everything for line in lines), folder


def test_ratios_are_taken_round_by_round():
    row = harness.compare("question", "case", [2.0, 4.0, 9.0], [1.0, 4.0, 3.0], 1.5)
    assert row.value == 2.0  # of 2, 1 and 3, not of the medians 4 and 3
    assert row.spread == (1.0, 3.0)
    assert (row.ours, row.other) == ("4000.00 ms", "3000.00 ms")
    assert row.is_met is False


def test_a_speed_is_met_from_below():
    row = harness.compare("question", "case", [1.0, 2.0, 1.0], [3.0, 5.0, 4.0], 3.0, is_speed=True)
    assert (row.value, row.is_met) == (3.0, True)
    assert harness.compare("question", "case", [1.0], [1.0]).is_met is None
    with pytest.raises(ValueError, match="zip"):
        harness.compare("question", "case", [1.0, 2.0], [1.0])


def test_the_table_gives_a_figure_the_digits_that_its_verdict_needs(tmp_path, capsys):
    rows = [
        harness.Row("feeds", "alone", "1,234,567/s", "", 1234567.0, (1e6, 2e6), 8e5, at_most=False),
        harness.Row("dispatch", "an action", "30.0 us", "", 30.0, None, 25.0),
        harness.Row("dispatch", "an update", "30.0 us", "", 30.0),
        harness.Row("question", "missed", "", "", 1.0302, None, 1.03),
        harness.Row("question", "met", "", "", 1999.7, None, 1999.6, at_most=False),
        harness.Row("question", "alone", "", "", 999.7),
    ]
    table = harness.format_table(rows)
    assert table.splitlines() == [
        "| question | case | ours | other | figure | from..to | target | met |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| feeds | alone | 1,234,567/s |  | 1,234,567 | 1,000,000..2,000,000 | ≥ 800,000 | yes |",
        "| dispatch | an action | 30.0 us |  | 30 |  | ≤ 25 | no |",
        "| dispatch | an update | 30.0 us |  | 30 |  |  |  |",
        "| question | missed |  |  | 1.0302 |  | ≤ 1.03 | no |",
        "| question | met |  |  | 2,000 |  | ≥ 1,999.6 | yes |",
        "| question | alone |  |  | 1,000 |  |  |  |",
    ]
    harness.report(rows, tmp_path / "rows.json")
    assert "question" in capsys.readouterr().out
    read = [harness.Row(**found) for found in json.loads((tmp_path / "rows.json").read_text())]
    assert harness.format_table(read) == table


def make_rows(day, *rows):
    """What history has of rows that were measured on a day."""
    run = history.Run("all", "a machine", "versions", f"2026-01-0{day}", f"commit {day}", rows)
    return history.rows_of(run)


def table_of(text, question):
    """The rows of a question's table on the page."""
    section = text.split(f"## [{question}](")[1].split("\n## ")[0]
    return [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")][2:]


def test_the_page_has_the_newest_run_of_each_question():
    rows = [
        *make_rows(1, harness.Row("feeds", "alone", "", "", 3.0, None, 2.0, at_most=False)),
        *make_rows(1, harness.Row("dispatch", "an action", "", "", 30.0, (20.0, 40.0), 25.0)),
        *make_rows(1, harness.Row("gone", "a case", "", "", 1.0, None, 2.0)),
        *make_rows(2, harness.Row("feeds", "new", "", "", 1.0302, None, 1.03)),
        *make_rows(2, harness.Row("feeds", "to explain the others", "", "", 1.0)),
    ]
    text = page.write(rows)
    assert table_of(text, "feeds") == [["new", "1.0302", "", "≤ 1.03", "no"]]
    assert table_of(text, "dispatch") == [["an action", "30", "20..40", "≤ 25", "no"]]
    assert "a machine; commit 1; 2026-01-01" in text
    assert "0 of 2 cases" in text
    assert "gone" not in text


def test_the_case_nearest_to_its_target_stands_for_those_of_its_kind():
    values = {"a": 1.0, "b": 1.02, "c": 0.7, "d": 0.9, "e": 1.04}
    cases = [harness.Row("splits", f"{n}: against x", "", "", v, None, 1.03) for n, v in values.items()]
    others = [harness.Row("splits", f"{name}: against y", "", "", 1.0, None, 1.03) for name in "abc"]
    assert [row[0] for row in table_of(page.write(make_rows(1, *cases, *others)), "splits")] == [
        "b: against x, and 3 more",
        "e: against x",
        *(f"{name}: against y" for name in "abc"),
    ]
    speeds = [
        harness.Row("splits", f"{n}: against x", "", "", v, None, 0.6, at_most=False)
        for n, v in values.items()
    ]
    assert table_of(page.write(make_rows(1, *speeds)), "splits")[0][0] == "c: against x, and 4 more"


def test_the_committed_page_is_what_the_history_gives():
    text = (ROOT.parent / "docs" / "benchmarks.md").read_text()
    assert page.write(history.read()) == text
    assert {question for question, _case in page.newest(history.read())} == set(FOLDERS)
    assert str(ROOT.parent) not in text


def test_missed_targets_are_explained():
    """Each question with a missed target has a row in docs/speed.md, and no other has."""
    missed = {row.question for row in page.newest(history.read()).values() if row.row.is_met is False}
    section = (ROOT.parent / "docs" / "speed.md").read_text().split("\n## Missed targets\n")[1]
    assert set(re.findall(r"^\| \[\w+\]\(benchmarks\.md#(\w+)\)", section, re.MULTILINE)) == missed


def test_run_all_writes_the_page(tmp_path, monkeypatch, capsys):
    """All benchmarks make a new page; some are added to it; it stays as it is if one fails."""
    path = tmp_path / "page.md"
    fails = set()

    def run(name, is_short):
        assert is_short
        return None if name in fails else [harness.Row(name, "case", "1 ms", "", 1.0, None, 2.0)]

    monkeypatch.setattr(run_all, "run", run)
    monkeypatch.setattr(run_all, "_describe_code", lambda: f"commit {len(fails)}")
    arguments = ["--short", "--write", str(path)]
    run_all.main(arguments)
    found = history.read(tmp_path / "data" / "benchmarks.csv")
    assert [row.question for row in found] == run_all.BENCHMARKS
    assert {row.command for row in found} == {"python -m benchmarks.run_all --short"}
    assert "jax " in found[0].software
    assert path.read_text() == page.write(found)
    run_all.main([*arguments, "--only", "feeds", "memory"])
    found = history.read(tmp_path / "data" / "benchmarks.csv")
    assert [row.question for row in found[len(run_all.BENCHMARKS) :]] == ["feeds", "memory"]
    assert found[-1].command == "python -m benchmarks.run_all --short --only feeds memory"
    assert path.read_text() == page.write(found)
    assert str(tmp_path) not in path.read_text()
    fails.add("feeds")
    with pytest.raises(SystemExit, match="These failed: feeds. .* is left as it was"):
        run_all.main(arguments)
    assert history.read(tmp_path / "data" / "benchmarks.csv") == found
    assert "| memory |" in capsys.readouterr().out


class MadeUpSide:
    """Says what a step takes, and writes down when it was asked for how many."""

    def __init__(self, name, seconds, asked):
        self._name, self._seconds, self._asked = name, seconds, asked

    def run(self, num_steps):
        self._asked.append((self._name, num_steps))
        return self._seconds


def test_a_side_is_asked_for_steps_or_for_its_ideal(monkeypatch, capsys):
    asked = []

    def run(num_steps):
        asked.append(num_steps)
        return 0.5 if num_steps == 0 else None

    monkeypatch.setattr("sys.stdin", io.StringIO("3\n0\n"))
    harness.serve_rounds(run, {"known": 1})
    facts, steps, ideal = capsys.readouterr().out.splitlines()
    assert asked == [3, 0]
    assert facts == 'facts {"known": 1}'
    assert float(steps.removeprefix("took ")) >= 0
    assert ideal == "took 0.5"


def test_sides_take_turns():
    asked = []
    sides = {"ours": MadeUpSide("ours", 0.25, asked), "other": MadeUpSide("other", 2.0, asked)}
    taken = harness.take_turns(sides, 3, seconds=1.0)
    assert taken == {"ours": [0.25] * 3, "other": [2.0] * 3}
    ours, other = ("ours", 4), ("other", 1)  # as many steps as a second has, at least one
    calibration, rounds = asked[:2], asked[2:]
    assert calibration == [("ours", 3), ("other", 3)]
    assert rounds == [other, ours, ours, other, other, ours, ours, other, other, ours]


def test_a_workload_has_the_stages_that_it_says():
    for workload in models.WORKLOADS.values():
        model = workload.make()
        assert len(model.stages) == len(model.parameters) == workload.num_stages
        assert workload.num_micro_batches % workload.unroll == 0
        micro_batches = model.micro_batches(workload.num_micro_batches)
        assert len(micro_batches) == workload.num_micro_batches
        assert not np.array_equal(micro_batches[0][0], micro_batches[1][0])

        def loss(x, target, model=model):
            values = (x, target)
            for stage, own in zip(model.stages[:-1], model.parameters[:-1], strict=True):
                values = stage(own, *values)
            return model.stages[-1](model.parameters[-1], *values)

        found = jax.eval_shape(loss, *micro_batches[0])
        assert (found.shape, found.dtype) == ((), jnp.float32)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c == "mlp" else pytest.mark.thorough) for c in torch_models.CASES]
)
def test_a_torch_module_and_its_layers_are_the_same_model(case):
    """Their outputs and loss, not only how long they take, are compared; with few inputs here."""
    case, make_stages = torch_models.CASES[case], layers_models.STAGES[case]
    module = torch_models.make_model(case)
    x, labels = (tensor[:2] for tensor in torch_models.make_data(case))
    with torch.no_grad():
        logits, loss = (value.numpy() for value in module(x, labels))
    weights = {name: value.numpy() for name, value in module.state_dict().items()}
    stages = make_stages(weights)
    assert len(stages) == len(module.stages)
    pipeline = engine.Pipeline(stages, num_micro_batches=1, device_mapping=[0] * len(stages))
    micro_batch = tuple(map(layers_models.as_array, (x, labels)))
    state = pipeline.init(jax.random.key(0), micro_batch)
    (found_loss, found_logits) = pipeline.step(state, [micro_batch])[1].outputs[0]
    np.testing.assert_allclose(found_loss, loss, rtol=1e-5)
    np.testing.assert_allclose(found_logits, logits, rtol=1e-4, atol=1e-5)
    assert len(pipeline.variables) == len(weights)


@pytest.mark.thorough
def test_the_program_of_emulation_s_page(tmp_path):
    text = (ROOT / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    program += "\nprint(len(times.updates), len(outputs.losses))"
    assert run_each({"emulation": program}, tmp_path, as_tests=True)["emulation"].split() == ["3", "12"]


def test_a_run_is_added_to_the_history_once(tmp_path):
    file = tmp_path / "history.csv"
    rows = (
        harness.compare("question", "case, with a comma", [2.0, 4.0], [1.0, 4.0], 1.5),
        harness.Row("question", "without a target", "", "", 3.25),
    )
    measured = history.Run("all", "a, b", "versions", "2026-01-01", "c", rows)
    for _ in range(2):
        history.append(history.rows_of(measured), file)
    first, second = history.read(file)
    assert (first.machine, first.case) == ("a, b", "case, with a comma")
    assert (first.bound, first.target) == ("at most", "1.5")
    assert (first.figure, first.smallest, first.largest) == ("1.5", "1", "2")
    assert (second.figure, second.smallest, second.bound, second.target) == ("3.25", "", "", "")
    assert (first.ours, first.command, first.software) == ("3000.00 ms", "all", "versions")
    assert [first.row, second.row] == list(rows)
