"""The tutorial's figures are what the library says today."""

import itertools
import re
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

from benchmarks.history import Measured
from ipu_pipeline.engine.schedules.schedule_arguments import timetable
from tests.support import forked
from tests.support.programs import environment

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))
import draw_figures  # noqa: E402  # scripts are no package
from figures import facts, measured  # noqa: E402


def test_check_names_what_is_wrong(tmp_path, capsys, monkeypatch):
    drawn = {name: f"<svg id='{name}'/>\n" for name in ("grouped.svg", "phases.svg")}
    figures = {"tutorial/figures": drawn, "docs/figures": {"rooms.svg": "<svg/>\n"}}
    monkeypatch.setattr(draw_figures, "draw_all", lambda: figures)
    folder = tmp_path / "tutorial" / "figures"
    assert draw_figures.main(["--check"], tmp_path) == 1
    assert "grouped.svg: missing" in capsys.readouterr().out.splitlines()
    assert draw_figures.main([], tmp_path) == 0
    assert draw_figures.main(["--check"], tmp_path) == 0
    (folder / "grouped.svg").write_text("<svg/>\n")
    (folder / "phases.svg").unlink()
    (folder / "old.svg").write_text("<svg/>\n")
    (tmp_path / "docs" / "figures" / "rooms.svg").write_text("\n")
    capsys.readouterr()
    assert draw_figures.main(["--check"], tmp_path) == 1
    assert capsys.readouterr().out.splitlines() == [
        "phases.svg: missing",
        "grouped.svg: out of date",
        "old.svg: not a figure that this script draws",
        "rooms.svg: out of date",
    ]


CHECK = f"""
import runpy, sys
from jax._src import xla_bridge
sys.path.insert(0, {str(SCRIPTS)!r})
sys.argv = [{str(SCRIPTS / "draw_figures.py")!r}, "--check"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    assert not xla_bridge.backends_are_initialized()
"""


@pytest.mark.thorough
def test_figures_are_up_to_date(tmp_path):
    """`python scripts/draw_figures.py` draws them again; it starts no backend, and needs no folder."""
    result = forked.run(CHECK, environment(as_tests=True), tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "All figures are up to date.\n"


def test_figures_of_rows_and_lines_are_up_to_date():
    """Fast, unlike all figures: these two change with the benchmarks' rows and with modules."""
    kept = ROOT / "docs" / "figures"
    rows = measured.draw_against_targets(draw_figures.history.read())
    assert rows.render() == (kept / "benchmarks.svg").read_text(), "run scripts/draw_figures.py"
    assert draw_figures.draw_rooms().render() == (kept / "rooms.svg").read_text(), (
        "run scripts/draw_figures.py"
    )


def test_files_can_be_read_in_a_diff():
    titles = set()
    folders = (ROOT / "tutorial" / "figures", ROOT / "docs" / "figures")
    every = {path.name: path.read_text() for folder in folders for path in folder.glob("*.svg")}
    for name, text in every.items():
        root = xml.etree.ElementTree.fromstring(text)  # noqa: S314  # made by our own script
        children = [child.tag.partition("}")[2] for child in root]
        assert children[:3] == ["title", "style", "rect"], name
        titles.add(root[0].text)
        drawn = text[text.index("</style>") :].splitlines()[1:-1]
        assert len(drawn) == len(children) - 2, name  # one element per line
        for child in root[2:]:
            numbers = [value for key, value in child.attrib.items() if key != "class"]
            assert re.fullmatch(r"[\d ,]+", " ".join(numbers)), (name, child.attrib)
    assert len(titles) == len(every)


def test_numbers_from_the_model():
    sizes = [784, 256, 128, 64, 32, 10]
    dense = [(before + 1) * after for before, after in itertools.pairwise(sizes)]
    assert [layer.num_parameters for layer in facts.model_layers()] == [0, *dense, 0]
    assert [layer.feeds for layer in facts.model_layers()] == [(0,), (), (), (), (), (), (1,)]
    assert [aval.shape for aval in facts.micro_batch().values()] == [(32, 28, 28), (32,)]
    for splits in draw_figures.SPLITS[-1:]:
        pipeline, stages = facts.trace(splits), facts.layers_of_stages(splits)
        assert [stage[0].name for stage in stages[1:]] == splits
        for index, layers in enumerate(stages):
            expected = sum(layer.num_parameters for layer in layers)
            assert facts.count_parameters(pipeline, index) == expected
    assert facts.bytes_across(facts.trace(["dense32"]), 0, 1) == (32 * 64 * 4, 32 * 64 * 4)
    no_gradient = facts.trace(["dense256"])  # nothing is trained before the edge
    assert facts.bytes_across(no_gradient, 0, 1) == (32 * 784 * 4, 0)


def test_phases_and_share_of_waiting():
    for name, num_micro_batches, phases, percent in [
        ("grouped", 8, [(1, 3), (4, 19), (20, 22)], 27),
        ("interleaved", 8, [(1, 3), (4, 19), (20, 22)], 27),
        ("sequential", 8, [(1, 3), (4, 61), (62, 64)], 75),
        ("grouped", 1, [(1, 3), (4, 5), (6, 8)], 75),
    ]:
        table = timetable(name, 4, num_micro_batches, (0, 1, 2, 3), True)
        assert facts.find_ramps(table) == [
            (phase, *span) for phase, span in zip(("ramp up", "main", "ramp down"), phases, strict=True)
        ]
        assert facts.percent_idle(table) == percent


def test_which_side_of_its_target_a_benchmark_is_on():
    def squares(bound, **figures):
        rows = [
            Measured(f"2026-01-{day[1:]}", "c", "m", "question", "case", figure, "", "", bound, "2")
            for day, figure in figures.items()
        ]
        text = measured.draw_against_targets(rows, least_runs=1).render()
        tree = xml.etree.ElementTree.fromstring(text)  # noqa: S314  # our own
        tags = [element for element in tree.iter() if element.tag.endswith("rect")]
        # The last two are the legend's.
        return [(tag.get("class"), int(tag.get("x")), int(tag.get("y"))) for tag in tags[1:-2]]

    for bound, figure, style in [
        ("at most", "1.5", "dark_forward"),
        ("at most", "3", "dark_backward"),
        ("at least", "3", "dark_forward"),
        ("at least", "1.5", "dark_backward"),
    ]:
        (_, first_day, target), (_, second_day, _), (newest, later, place) = squares(
            bound, d05="2", d06="2", d08=figure
        )
        assert newest == style
        assert place > target if style == "dark_forward" else place < target
        assert later - second_day == 2 * (second_day - first_day)  # days are equally wide
